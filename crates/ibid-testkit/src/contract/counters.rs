//! Counters of tenants: each reservation counts once per window.

use super::common::*;

const HOUR: Duration = Duration::from_secs(3600);

fn counters(store: &dyn Store) -> &dyn Counters {
    store.counters().expect("a store that is tested counts")
}

async fn reserve(store: &dyn Store, who: &Address, n: u64, window: Duration) -> CounterUsage {
    expect_answer("reserve", counters(store).reserve(who, n, window).await)
}

/// Every reservation counts once, also concurrent ones; tenants are counted separately.
pub async fn what_is_reserved_adds_up(store: &dyn Store) {
    let (one, other) = (new_request().address, new_request().address);
    let mut totals: Vec<_> =
        join_all((0..20).map(|_| reserve(store, &one, 3, HOUR))).await.into_iter().map(|used| used.total).collect();
    totals.sort_unstable();
    assert_eq!(totals, (1..=20).map(|n| n * 3).collect::<Vec<u64>>());
    let used = reserve(store, &other, 1, HOUR).await;
    assert_eq!(used.total, 1);
    assert!(used.resets_in <= HOUR && used.resets_in > HOUR / 2, "{used:?}");
}

pub async fn a_window_ends_by_itself(store: &dyn Store) {
    let who = new_request().address;
    assert_eq!(reserve(store, &who, 5, Duration::from_millis(100)).await.total, 5);
    sleep(Duration::from_millis(300)).await;
    assert_eq!(reserve(store, &who, 2, HOUR).await.total, 2, "another window");
    let again = reserve(store, &who, 2, Duration::from_millis(1)).await;
    assert_eq!(again.total, 4);
    assert!(again.resets_in > HOUR / 2, "{again:?}: a window lasts as long as it was begun for");
}

/// Endless windows and huge numbers are capped, not rejected.
pub async fn endless_windows_do_not_overflow(store: &dyn Store) {
    let who = new_request().address;
    for _ in 0..3 {
        let used = reserve(store, &who, 1 << 40, Duration::MAX).await;
        assert!(used.total >= 1 << 40 && used.resets_in > HOUR, "{used:?}");
    }
}
