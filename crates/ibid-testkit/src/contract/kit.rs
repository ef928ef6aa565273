//! What the cases are written with: fresh asks, and calls that panic unless they are answered as expected.
//!
//! Invariant: nothing here assumes how fast the store is. What must come is polled for, up to [`PATIENCE`].

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use ibid::store::{
    Address, Ask, Claim, End, Fence, Filter, Fingerprint, Finished, Held, Holder, Lease, Listed, Outline, Store,
    StoreError, Tags, Token,
};

/// Longer than any case runs.
pub(super) const LONG: Duration = Duration::from_secs(600);
/// A lease that a case waits out.
pub(super) const SHORT: Duration = Duration::from_millis(60);
/// How long a case waits for something that must come.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);

/// An ask at an address that nobody else knows, with a lease that outlives the case.
pub(super) fn fresh() -> Ask {
    let mut address = [0; 32];
    address[..16].copy_from_slice(&Token::mint().0);
    address[16..].copy_from_slice(&Token::mint().0);
    at(Address(address))
}

/// An ask at the same address by somebody else, with a request of its own.
pub(super) fn rival(of: &Ask) -> Ask {
    at(of.address)
}

fn at(address: Address) -> Ask {
    let mut digest = [0x5a; 32];
    digest[..16].copy_from_slice(&Token::mint().0);
    Ask {
        address,
        token: Token::mint(),
        fingerprint: Fingerprint { version: 1, digest },
        tags: Tags::default(),
        label: Bytes::new(),
        hold: LONG,
        keep: LONG,
        over: None,
    }
}

/// A rival that takes over `fence`.
pub(super) fn taking_over(of: &Ask, fence: Fence) -> Ask {
    Ask { over: Some(fence), ..rival(of) }
}

/// What somebody has to settle with whose claim was never answered.
pub(super) fn unseen(ask: &Ask) -> Lease {
    Lease { ask: Arc::new(ask.clone()), fence: Fence::UNSEEN, attempt: 0, solo: false }
}

pub(super) fn complete(record: &'static [u8]) -> End {
    complete_for(record, LONG)
}

pub(super) fn complete_for(record: &'static [u8], keep: Duration) -> End {
    End::Complete { failed: false, record: Bytes::from_static(record), outline: Outline::default(), keep }
}

pub(super) fn park() -> End {
    End::Park { keep: LONG, retry_in: Duration::ZERO }
}

/// The answer of a call that the case does not expect to fail.
#[track_caller]
pub(super) fn answer<T>(call: &str, answered: Result<T, StoreError>) -> T {
    answered.unwrap_or_else(|error| panic!("{call} failed: {error}"))
}

pub(super) async fn claim(store: &dyn Store, ask: &Ask) -> Claim {
    answer("claim", store.claim(&Arc::new(ask.clone())).await)
}

pub(super) async fn get(store: &dyn Store, at: &Ask) -> Option<Claim> {
    answer("get", store.get(&at.address).await)
}

pub(super) async fn settle(store: &dyn Store, lease: &Lease, end: &End) -> Held {
    answer("settle", store.settle(lease, end).await)
}

/// Claims and must be granted, for exactly what was asked.
pub(super) async fn granted(store: &dyn Store, ask: &Ask) -> Lease {
    match claim(store, ask).await {
        Claim::Granted(lease) => {
            assert_eq!(*lease.ask, *ask, "a lease must carry what was asked");
            assert_ne!(lease.fence, Fence::UNSEEN, "a granted fence must not be the one that means unseen");
            lease
        }
        other => panic!("the claim must be granted, and it found {other:?}"),
    }
}

#[track_caller]
pub(super) fn expect_busy(found: Claim) -> Holder {
    match found {
        Claim::Busy(holder) => holder,
        other => panic!("a live holder must be found busy, and it was {other:?}"),
    }
}

#[track_caller]
pub(super) fn expect_unknown(found: Claim) -> Holder {
    match found {
        Claim::Unknown(holder) => holder,
        other => panic!("the entry must be unknown, and it was {other:?}"),
    }
}

#[track_caller]
pub(super) fn expect_done(found: Claim) -> Finished {
    match found {
        Claim::Done(finished) => finished,
        other => panic!("the entry must be done, and it was {other:?}"),
    }
}

#[track_caller]
pub(super) fn expect_spent(found: Claim) {
    assert_eq!(found, Claim::Spent, "a token that was released or forgotten must be spent");
}

#[track_caller]
pub(super) fn expect_held(what: &str, answered: Held) {
    assert_eq!(answered, Held::Held, "{what} must be answered with Held");
}

#[track_caller]
pub(super) fn expect_lost(what: &str, answered: Held) -> Claim {
    match answered {
        Held::Lost(found) => *found,
        other => panic!("{what} must be Lost, and it was {other:?}"),
    }
}

/// Settles and must be believed.
pub(super) async fn held(store: &dyn Store, lease: &Lease, end: &End) {
    expect_held("a holder's settle", settle(store, lease, end).await);
}

/// Claims with a lease of [`SHORT`] and waits until that has lapsed.
pub(super) async fn lapsed(store: &dyn Store, ask: &Ask) -> Lease {
    let asked = Instant::now();
    let lease = granted(store, &Ask { hold: SHORT, ..ask.clone() }).await;
    until("the lease to lapse", || async {
        match get(store, ask).await {
            Some(Claim::Busy(_)) => None,
            Some(Claim::Unknown(holder)) => {
                assert!(asked.elapsed() >= SHORT, "the lease lapsed {:?} after it was asked for", asked.elapsed());
                assert_eq!(holder.fence, lease.fence, "the lapsed holder is still the one that is there");
                Some(())
            }
            other => panic!("a lapsed claim is unknown, and here was {other:?}"),
        }
    })
    .await;
    lease
}

/// Claims and parks.
pub(super) async fn parked(store: &dyn Store, ask: &Ask) -> Lease {
    let lease = granted(store, ask).await;
    held(store, &lease, &park()).await;
    lease
}

/// Waits until nothing is there any more.
pub(super) async fn gone(store: &dyn Store, at: &Ask) {
    until("the entry to expire", || async { get(store, at).await.is_none().then_some(()) }).await;
}

/// Asks again and again until there is an answer.
pub(super) async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// All that match, page by page.
pub(super) async fn list(store: &dyn Store, filter: &Filter, at_most: u32) -> Vec<Listed> {
    let mut all: Vec<Listed> = Vec::new();
    let mut from = ibid::store::Cursor::default();
    loop {
        let page = answer("list", store.operators().list(filter, from, at_most).await);
        assert!(page.entries.len() <= at_most as usize, "a page of {at_most} held {}", page.entries.len());
        all.extend(page.entries);
        assert!(
            all.is_sorted_by(|a, b| a.address < b.address),
            "a listing is in the order of its addresses, each once"
        );
        match page.next {
            Some(next) => from = next,
            None => return all,
        }
    }
}

/// How operators see the entry of `ask`, which is there.
pub(super) async fn listed(store: &dyn Store, ask: &Ask) -> Listed {
    let filter = Filter { address: Some(ask.address), ..Filter::default() };
    let mut all = list(store, &filter, 10).await;
    assert_eq!(all.len(), 1, "the entry at {} must be listed once", ask.address);
    all.remove(0)
}
