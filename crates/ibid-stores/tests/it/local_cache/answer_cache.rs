use ibid_testkit::wrappers::{CallFilter, DelayedStore};
use tokio::time::{advance, sleep};

use super::*;

type SlowStore = DelayedStore<CountingStore<Memory>>;

/// A store that can be slow, copies around it, and a key that is done in the store but not copied.
async fn slow_store_with_completed_key(keep: Duration) -> (Arc<SlowStore>, AnswerCache, Arc<LocalCache>) {
    let slow = Arc::new(DelayedStore::new(CountingStore::new(Memory::default())));
    let lease = granted(&*slow, &ask(1)).await;
    assert_eq!(slow.settle(&lease, &complete(b"answer", keep)).await.unwrap(), SettleOutcome::Applied);
    let copies = AnswerCache::default();
    let near = Arc::new(LocalCache::new(slow.clone(), copies.clone()));
    (slow, copies, near)
}

fn claim_count(slow: &SlowStore) -> usize {
    slow.inner().calls()[0]
}

#[tokio::test(start_paused = true)]
async fn a_replay_makes_no_call() {
    let counting = Arc::new(CountingStore::new(Memory::default()));
    let copies = AnswerCache::default();
    let near = LocalCache::new(counting.clone(), copies.clone());
    let first = ask(1);
    let lease = granted(&near, &first).await;
    assert_eq!(near.settle(&lease, &complete(b"answer", SECOND * 60)).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(counting.calls(), [1, 0, 0, 1]);
    advance(SECOND).await;
    for asked in
        [ask(1), first, Arc::new(ClaimRequest { take_over: Some(lease.fence), ..ClaimRequest::clone(&ask(1)) })]
    {
        let finished = done(&near, &asked).await;
        assert_eq!((finished.fence, finished.attempt, &finished.record[..]), (lease.fence, 1, &b"answer"[..]));
        assert_eq!((finished.fingerprint, finished.failed), (lease.request.fingerprint, false));
        assert_eq!(finished.expires_in, SECOND * 59, "its life goes on");
    }
    assert_eq!((counting.calls(), copies.hits()), ([1, 0, 0, 1], 3), "no call more than before");
}

#[tokio::test(start_paused = true)]
async fn a_copy_is_confirmed_after_ten_seconds() {
    let (slow, copies, near) = slow_store_with_completed_key(SECOND * 3600).await;
    done(&*near, &ask(1)).await;
    advance(SECOND * 10 - Duration::from_millis(1)).await;
    done(&*near, &ask(1)).await;
    assert_eq!((claim_count(&slow), copies.hits()), (2, 1));
    advance(Duration::from_millis(1)).await;
    done(&*near, &ask(1)).await;
    assert_eq!((claim_count(&slow), copies.hits()), (3, 1), "ten seconds are over: the store is asked");
    advance(SECOND * 9).await;
    done(&*near, &ask(1)).await;
    assert_eq!((claim_count(&slow), copies.hits()), (3, 2), "and has confirmed it");
}

#[tokio::test(start_paused = true)]
async fn a_life_is_counted_from_before_the_call_that_fetched_it() {
    let (slow, copies, near) = slow_store_with_completed_key(SECOND * 5).await;
    // The store looks at once, and its answer is on the way for three seconds.
    slow.delay(CallFilter::Claim, Duration::ZERO, SECOND * 3);
    let finished = done(&*near, &ask(1)).await;
    assert_eq!(finished.expires_in, SECOND * 5, "as the store said");
    slow.heal();
    advance(SECOND).await;
    assert_eq!(done(&*near, &ask(1)).await.expires_in, SECOND, "one of five is left");
    assert_eq!(copies.hits(), 1);
    advance(SECOND).await;
    granted(&*near, &ask(1)).await;
    assert_eq!(copies.hits(), 1, "what has expired is not answered");
}

#[tokio::test(start_paused = true)]
async fn ten_seconds_are_counted_from_before_the_call_too() {
    let (slow, copies, near) = slow_store_with_completed_key(SECOND * 3600).await;
    slow.delay(CallFilter::Claim, Duration::ZERO, SECOND * 11);
    done(&*near, &ask(1)).await;
    assert!(copies.is_empty(), "an answer that took eleven seconds is too old to keep");
}

/// While a slow claim, get or settle is on its way, `meanwhile` happens. Whether its answer was kept.
async fn is_cached_after(call: &str, meanwhile: impl FnOnce(&AnswerCache)) -> bool {
    let (slow, copies, near) = slow_store_with_completed_key(SECOND * 3600).await;
    let lease = granted(&*near, &ask(2)).await;
    slow.delay(CallFilter::All, Duration::ZERO, SECOND * 2);
    let (asks, near_too, call) = ([ask(1), ask(2)], near.clone(), call.to_owned());
    let filling = tokio::spawn(async move {
        match &call[..] {
            "claim" => drop(done(&*near_too, &asks[0]).await),
            "get" => assert!(matches!(near_too.get(&asks[0].address).await.unwrap(), Some(ClaimOutcome::Completed(_)))),
            _ => assert_eq!(
                near_too.settle(&lease, &complete(b"mine", SECOND * 60)).await.unwrap(),
                SettleOutcome::Applied
            ),
        }
    });
    sleep(SECOND).await;
    meanwhile(&copies);
    filling.await.unwrap();
    !copies.is_empty()
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_blocks_what_is_on_its_way() {
    for (call, nth) in [("claim", 1), ("get", 1), ("settle", 2)] {
        assert!(is_cached_after(call, |_| {}).await, "{call}: kept if nothing happens");
        assert!(!is_cached_after(call, |copies| copies.forget(&Address([nth; 32]))).await, "{call}: forgotten");
        assert!(!is_cached_after(call, AnswerCache::flush).await, "{call}: flushed");
        assert!(
            is_cached_after(call, |copies| copies.forget(&Address([9; 32]))).await,
            "{call}: another was forgotten"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_forgotten_or_flushed_is_asked_for_again() {
    let (slow, copies, near) = slow_store_with_completed_key(SECOND * 3600).await;
    for invalidate in [|copies: &AnswerCache| copies.forget(&Address([1; 32])), AnswerCache::flush] {
        done(&*near, &ask(1)).await;
        let before = claim_count(&slow);
        done(&*near, &ask(1)).await;
        assert_eq!(claim_count(&slow), before);
        invalidate(&copies);
        assert_eq!((copies.len(), copies.bytes()), (0, 0));
        done(&*near, &ask(1)).await;
        assert_eq!(claim_count(&slow), before + 1);
    }
}

#[tokio::test(start_paused = true)]
async fn operators_changes_invalidate_even_if_nobody_waits_for_them() {
    for change in ["forget", "replace", "resolve"] {
        let (slow, copies, near) = slow_store_with_completed_key(SECOND * 3600).await;
        let finished = done(&*near, &ask(1)).await;
        assert_eq!(copies.len(), 1);
        slow.delay(CallFilter::All, Duration::ZERO, SECOND * 5);
        let at = Address([1; 32]);
        let operators = near.admin();
        let end = Settlement::Release;
        let call = match change {
            "forget" => operators.forget(&at, finished.fence),
            "replace" => operators.replace_record(&at, finished.fence, Bytes::from_static(b"other")),
            _ => operators.resolve(&at, finished.fence, &end),
        };
        assert!(tokio::time::timeout(SECOND, call).await.is_err(), "{change} was given up");
        assert!(copies.is_empty(), "{change}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_repeated_settle_copies_nothing() {
    let memory = Arc::new(Memory::default());
    let copies = AnswerCache::default();
    let near = LocalCache::new(memory.clone(), copies.clone());
    let lease = granted(&near, &ask(1)).await;
    // An earlier settle of the same holder, whose answer was lost elsewhere.
    assert_eq!(near.settle(&lease, &complete(b"first", SECOND * 8)).await.unwrap(), SettleOutcome::Applied);
    copies.flush();
    advance(SECOND * 5).await;
    assert_eq!(near.settle(&lease, &complete(b"second", SECOND * 8)).await.unwrap(), SettleOutcome::Applied);
    assert!(copies.is_empty(), "nobody knows what the store holds");
    let finished = done(&near, &ask(1)).await;
    assert_eq!((&finished.record[..], finished.expires_in), (&b"first"[..], SECOND * 3));
}

#[tokio::test(start_paused = true)]
async fn copies_are_bounded_in_bytes_and_the_asked_for_stay() {
    const RECORD: &[u8] = &[7; 1000];
    let counting = Arc::new(CountingStore::new(Memory::default()));
    let copies = AnswerCache::new(64 << 10);
    let near = LocalCache::new(counting.clone(), copies.clone());
    let at = |nth: u16| {
        let mut address = [0; 32];
        address[..2].copy_from_slice(&nth.to_le_bytes());
        address[31] = (nth % 7) as u8;
        Arc::new(ClaimRequest { address: Address(address), token: ClaimToken::mint(), ..ClaimRequest::clone(&ask(0)) })
    };
    for nth in 0..500 {
        let lease = granted(&near, &at(nth)).await;
        assert_eq!(near.settle(&lease, &complete(RECORD, SECOND * 3600)).await.unwrap(), SettleOutcome::Applied);
        assert!(copies.bytes() <= 64 << 10, "{} bytes", copies.bytes());
        done(&near, &at(0)).await;
    }
    assert!(copies.len() > 30, "{} copies of 1,000 bytes", copies.len());
    let asked = counting.calls()[0];
    assert!(asked < 520, "the one that was asked for all the time stayed: {asked} claims");
    // One that would take up more than its share is not kept at all.
    let lease = granted(&near, &at(600)).await;
    let large = Settlement::Complete {
        failed: false,
        record: Bytes::from(vec![0; 17 << 10]),
        summary: RecordSummary::default(),
        ttl: SECOND * 3600,
    };
    let before = copies.len();
    assert_eq!(near.settle(&lease, &large).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(copies.len(), before);
    assert_eq!(done(&near, &at(600)).await.record.len(), 17 << 10);
}
