//! Helpers of the cases: fresh claim requests, and calls that panic unless the result is as expected.
//!
//! Invariant: nothing here assumes the speed of the store. Expected changes are polled for, up to [`POLL_TIMEOUT`].

use std::future::Future;
pub(super) use std::{
    sync::Arc,
    time::{Duration, Instant},
};

pub(super) use bytes::Bytes;
pub(super) use futures_util::future::{join, join_all, join3};
pub(super) use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, CounterUsage, Counters, EntryFilter, EntryInfo,
    EntryState, Fence, Fingerprint, Holder, Lease, ListCursor, RecordSummary, SettleOutcome, Settlement, Store,
    StoreError, Tags, key_hash,
};
pub(super) use tokio::time::{sleep, timeout};

/// Longer than any case runs.
pub(super) const LONG_LEASE: Duration = Duration::from_secs(600);
/// A lease that a case waits for to expire.
pub(super) const SHORT_LEASE: Duration = Duration::from_millis(60);
/// How long a case polls for an expected change.
pub(super) const POLL_TIMEOUT: Duration = Duration::from_secs(15);

/// A claim request at an unused address, with a lease that outlives the case.
pub(super) fn new_request() -> ClaimRequest {
    let mut address = [0; 32];
    address[..16].copy_from_slice(&ClaimToken::mint().0);
    address[16..].copy_from_slice(&ClaimToken::mint().0);
    request_at(Address(address))
}

/// A claim request at an unused address, whose lease and entry expire soon.
pub(super) fn short_request() -> ClaimRequest {
    ClaimRequest { lease: SHORT_LEASE, ttl: SHORT_LEASE, ..new_request() }
}

/// A claim request at an unused address that listings find by its tenant.
pub(super) fn request_of_tenant(tenant: &str) -> ClaimRequest {
    ClaimRequest { tags: Tags::new(tenant, "", "", ""), ..new_request() }
}

/// A claim request of another holder at the same address, with its own fingerprint.
pub(super) fn competing_request(of: &ClaimRequest) -> ClaimRequest {
    request_at(of.address)
}

fn request_at(address: Address) -> ClaimRequest {
    let mut digest = [0x5a; 32];
    digest[..16].copy_from_slice(&ClaimToken::mint().0);
    ClaimRequest {
        address,
        token: ClaimToken::mint(),
        fingerprint: Fingerprint { version: 1, digest },
        tags: Tags::default(),
        label: Bytes::new(),
        lease: LONG_LEASE,
        ttl: LONG_LEASE,
        take_over: None,
    }
}

/// A competing request that takes over `fence`.
pub(super) fn takeover_request(of: &ClaimRequest, fence: Fence) -> ClaimRequest {
    ClaimRequest { take_over: Some(fence), ..competing_request(of) }
}

/// The lease with which a holder settles a claim whose outcome it never received.
pub(super) fn unseen_lease(ask: &ClaimRequest) -> Lease {
    Lease { request: Arc::new(ask.clone()), fence: Fence::UNSEEN, attempt: 0, front_only: false }
}

pub(super) fn completion(failed: bool, record: impl Into<Bytes>, ttl: Duration) -> Settlement {
    Settlement::Complete { failed, record: record.into(), summary: RecordSummary::default(), ttl }
}

pub(super) fn complete_settlement(record: &'static [u8]) -> Settlement {
    completion(false, record, LONG_LEASE)
}

pub(super) fn park_settlement() -> Settlement {
    Settlement::Park { ttl: LONG_LEASE, retry_in: Duration::ZERO }
}

/// Returns the result of a call that must not fail.
#[track_caller]
pub(super) fn expect_answer<T>(call: &str, answered: Result<T, StoreError>) -> T {
    answered.unwrap_or_else(|error| panic!("{call} failed: {error}"))
}

pub(super) async fn claim(store: &dyn Store, ask: &ClaimRequest) -> ClaimOutcome {
    let at_hand = store.find_completed(&ask.address);
    let found = expect_answer("claim", store.claim(&Arc::new(ask.clone())).await);
    // A spent token never gets an answer.
    if found != ClaimOutcome::TokenSpent {
        check_at_hand(at_hand, Some(&found));
    }
    found
}

pub(super) async fn get(store: &dyn Store, at: &ClaimRequest) -> Option<ClaimOutcome> {
    let at_hand = store.find_completed(&at.address);
    let found = expect_answer("get", store.get(&at.address).await);
    check_at_hand(at_hand, found.as_ref());
    found
}

/// The answer that a store had at hand must be the one that it then returned.
fn check_at_hand(at_hand: Option<CompletedEntry>, found: Option<&ClaimOutcome>) {
    // One that is about to expire may be gone by then.
    let Some(at_hand) = at_hand.filter(|at_hand| at_hand.expires_in > Duration::from_millis(200)) else { return };
    let Some(ClaimOutcome::Completed(stored)) = found else {
        panic!("the store has an answer at hand, and returns {found:?}")
    };
    let stored = CompletedEntry { expires_in: at_hand.expires_in, ..stored.clone() };
    assert_eq!(at_hand, stored, "the answer at hand");
}

pub(super) async fn settle(store: &dyn Store, lease: &Lease, end: &Settlement) -> SettleOutcome {
    expect_answer("settle", store.settle(lease, end).await)
}

/// Claims; the claim must be granted as requested.
pub(super) async fn claim_granted(store: &dyn Store, ask: &ClaimRequest) -> Lease {
    match claim(store, ask).await {
        ClaimOutcome::Granted(lease) => {
            assert_eq!(*lease.request, *ask, "a lease must carry what was asked");
            assert_ne!(lease.fence, Fence::UNSEEN, "a granted fence must not be the one that means unseen");
            lease
        }
        other => panic!("the claim must be granted, and it found {other:?}"),
    }
}

/// `expect_NAME` asserts that an outcome is this variant; `find_NAME`, that a competing claim finds it.
macro_rules! outcomes {
    ($($variant:ident($inner:ty): $expect:ident, $find:ident;)*) => { $(
        #[track_caller]
        pub(super) fn $expect(found: ClaimOutcome) -> $inner {
            match found {
                ClaimOutcome::$variant(inner) => inner,
                other => panic!("the entry must be {}, and it was {other:?}", stringify!($variant)),
            }
        }

        pub(super) async fn $find(store: &dyn Store, at: &ClaimRequest) -> $inner {
            $expect(claim(store, &competing_request(at)).await)
        }
    )* };
}
outcomes! {
    InProgress(Holder): expect_in_progress, find_in_progress;
    OutcomeUnknown(Holder): expect_outcome_unknown, find_outcome_unknown;
    Completed(CompletedEntry): expect_completed, find_completed;
}

/// Asserts that a competing claim finds this record.
pub(super) async fn assert_record(store: &dyn Store, at: &ClaimRequest, record: &[u8]) {
    assert_eq!(find_completed(store, at).await.record, record, "the remembered record");
}

#[track_caller]
pub(super) fn expect_token_spent(found: ClaimOutcome) {
    assert_eq!(found, ClaimOutcome::TokenSpent, "a token that was released or forgotten must be spent");
}

#[track_caller]
pub(super) fn expect_applied(what: &str, answered: SettleOutcome) {
    assert_eq!(answered, SettleOutcome::Applied, "{what} must be answered with Held");
}

#[track_caller]
pub(super) fn expect_claim_lost(what: &str, answered: SettleOutcome) -> ClaimOutcome {
    match answered {
        SettleOutcome::ClaimLost(found) => *found,
        other => panic!("{what} must be Lost, and it was {other:?}"),
    }
}

pub(super) async fn settle_applied(store: &dyn Store, lease: &Lease, end: &Settlement) {
    expect_applied("a holder's settle", settle(store, lease, end).await);
}

pub(super) async fn complete(store: &dyn Store, lease: &Lease, record: &'static [u8]) {
    settle_applied(store, lease, &complete_settlement(record)).await;
}

pub(super) async fn release(store: &dyn Store, lease: &Lease) {
    settle_applied(store, lease, &Settlement::Release).await;
}

pub(super) async fn park(store: &dyn Store, lease: &Lease) {
    settle_applied(store, lease, &park_settlement()).await;
}

/// Settles; the claim must be lost. Returns what is there instead.
pub(super) async fn settle_lost(what: &str, store: &dyn Store, lease: &Lease, end: &Settlement) -> ClaimOutcome {
    expect_claim_lost(what, settle(store, lease, end).await)
}

pub(super) async fn extend(store: &dyn Store, lease: &Lease, by: Duration) -> SettleOutcome {
    expect_answer("extend", store.extend(lease, by).await)
}

pub(super) async fn extend_applied(what: &str, store: &dyn Store, lease: &Lease) {
    expect_applied(what, extend(store, lease, LONG_LEASE).await);
}

pub(super) async fn extend_lost(what: &str, store: &dyn Store, lease: &Lease) -> ClaimOutcome {
    expect_claim_lost(what, extend(store, lease, LONG_LEASE).await)
}

pub(super) async fn forget_applied(store: &dyn Store, lease: &Lease) {
    expect_applied("forget", forget(store, &lease.request, lease.fence).await);
}

pub(super) async fn resolve(store: &dyn Store, at: &ClaimRequest, seen: Fence, end: &Settlement) -> SettleOutcome {
    expect_answer("resolve", store.admin().resolve(&at.address, seen, end).await)
}

pub(super) async fn resolve_applied(store: &dyn Store, lease: &Lease, end: &Settlement) {
    expect_applied("resolve", resolve(store, &lease.request, lease.fence, end).await);
}

pub(super) async fn forget(store: &dyn Store, at: &ClaimRequest, seen: Fence) -> SettleOutcome {
    expect_answer("forget", store.admin().forget(&at.address, seen).await)
}

/// A granted competing claim.
pub(super) async fn claim_next(store: &dyn Store, after: &ClaimRequest) -> Lease {
    claim_granted(store, &competing_request(after)).await
}

pub(super) async fn take_over(store: &dyn Store, at: &ClaimRequest, fence: Fence) -> Lease {
    claim_granted(store, &takeover_request(at, fence)).await
}

/// A granted claim at an unused address.
pub(super) async fn new_claim(store: &dyn Store) -> (ClaimRequest, Lease) {
    let ask = new_request();
    let lease = claim_granted(store, &ask).await;
    (ask, lease)
}

/// A parked claim at an unused address.
pub(super) async fn new_parked(store: &dyn Store) -> (ClaimRequest, Lease) {
    let (ask, lease) = new_claim(store).await;
    park(store, &lease).await;
    (ask, lease)
}

/// A claim at an unused address whose lease has expired.
pub(super) async fn new_lapsed(store: &dyn Store) -> (ClaimRequest, Lease) {
    let ask = new_request();
    let lease = claim_and_lapse(store, &ask).await;
    (ask, lease)
}

/// A claim at an unused address whose entry has expired.
pub(super) async fn new_expired(store: &dyn Store) -> (ClaimRequest, Lease) {
    let ask = short_request();
    let lease = claim_granted(store, &ask).await;
    wait_until_absent(store, &ask).await;
    (ask, lease)
}

/// Claims with a [`SHORT_LEASE`] and waits until it has expired.
pub(super) async fn claim_and_lapse(store: &dyn Store, ask: &ClaimRequest) -> Lease {
    let asked = Instant::now();
    let lease = claim_granted(store, &ClaimRequest { lease: SHORT_LEASE, ..ask.clone() }).await;
    poll_until("the lease to lapse", || async {
        match get(store, ask).await {
            Some(ClaimOutcome::InProgress(_)) => None,
            Some(ClaimOutcome::OutcomeUnknown(holder)) => {
                let held = asked.elapsed();
                assert!(held >= SHORT_LEASE, "the lease lapsed {held:?} after it was asked for");
                assert_eq!(holder.fence, lease.fence, "the lapsed holder is still the one that is there");
                Some(())
            }
            other => panic!("a lapsed claim is unknown, and here was {other:?}"),
        }
    })
    .await;
    lease
}

pub(super) async fn wait_until_absent(store: &dyn Store, at: &ClaimRequest) {
    poll_until("the entry to expire", || async { get(store, at).await.is_none().then_some(()) }).await;
}

/// Calls `look` until it returns a value.
pub(super) async fn poll_until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(began.elapsed() < POLL_TIMEOUT, "waited {POLL_TIMEOUT:?} in vain for {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Returns all matching entries, page by page.
pub(super) async fn list_all(store: &dyn Store, filter: &EntryFilter, at_most: u32) -> Vec<EntryInfo> {
    let mut all: Vec<EntryInfo> = Vec::new();
    let mut from = ListCursor::default();
    loop {
        let page = expect_answer("list", store.admin().list(filter, from, at_most).await);
        assert!(page.entries.len() <= at_most as usize, "a page of {at_most} held {}", page.entries.len());
        all.extend(page.entries);
        let sorted = all.is_sorted_by(|a, b| a.address < b.address);
        assert!(sorted, "a listing is in the order of its addresses, each once");
        match page.next {
            Some(next) => from = next,
            None => return all,
        }
    }
}

/// Returns the listing of the entry of `ask`, which must exist.
pub(super) async fn find_listed(store: &dyn Store, ask: &ClaimRequest) -> EntryInfo {
    let filter = EntryFilter { address: Some(ask.address), ..EntryFilter::default() };
    let mut all = list_all(store, &filter, 10).await;
    assert_eq!(all.len(), 1, "the entry at {} must be listed once", ask.address);
    all.remove(0)
}
