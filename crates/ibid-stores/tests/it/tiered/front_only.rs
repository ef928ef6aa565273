//! Claims that run on the first store alone, and their way to the last one.

use ibid::{
    Decision, Engine, Operation, Policy, RunOutcome,
    engine::{CompletedAnswer, StoredAs},
    journal::Journal,
    store::{ClaimRequest, ErrorKind, Lease, RecordSummary, SettleOutcome, Settlement},
};
use ibid_testkit::wrappers::CallFilter;
use tokio::time::{advance, sleep};

use super::{
    common::{LosableStore, TieredGateway, failing_store},
    *,
};
use crate::local_cache::{ask, complete, done, granted};

pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const HOUR: Duration = Duration::from_secs(3600);

pub(super) fn cut_authority(gateway: &TieredGateway) {
    failing_store(&gateway.authority).fail(CallFilter::All, ErrorKind::NotApplied);
}

pub(super) fn heal_stores(gateway: &TieredGateway) {
    failing_store(&gateway.front).heal();
    failing_store(&gateway.authority).heal();
}

/// A claim that was granted without the last store.
pub(super) async fn claim_front_only(gateway: &TieredGateway) -> Lease {
    cut_authority(gateway);
    let lease = granted(&gateway.store, &ask(1)).await;
    assert!(lease.front_only);
    assert_eq!(gateway.log.count("solo"), 1);
    lease
}

pub(super) async fn wait_for_background() {
    sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_solo_claim_is_busy_for_all_who_see_first() {
    let (gateway, other, _, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&gateway).await;
    for asking in [&gateway, &other] {
        let ClaimOutcome::InProgress(holder) = asking.store.claim(&ask(1)).await.unwrap() else { panic!("busy") };
        assert_eq!(holder.fence, lease.fence);
        assert!(matches!(asking.store.get(&lease.request.address).await.unwrap(), Some(ClaimOutcome::InProgress(_))));
    }
    assert_eq!(last.get(&lease.request.address).await.unwrap(), None);
    let (at, seen) = (lease.request.address, lease.fence);
    let waits = tokio::spawn(async move { other.store.wait(&at, seen, SECOND * 20).await });
    sleep(SECOND * 5).await;
    assert!(!waits.is_finished(), "whoever waits for it waits");
    assert!(gateway.store.settle(&lease, &complete(b"alone", HOUR)).await.is_err());
    tokio::time::timeout(SECOND, waits).await.expect("it is over").unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_solo_answer_is_replayed_from_first_and_inserted_by_the_drain() {
    let (gateway, other, _, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&gateway).await;
    let end = complete(b"alone", HOUR);
    assert_eq!(gateway.store.settle(&lease, &end).await.unwrap_err().kind, ErrorKind::NotApplied, "so it is journaled");
    cut_authority(&other);
    for asking in [&gateway, &other] {
        let finished = done(&asking.store, &ask(1)).await;
        assert_eq!((&finished.record[..], finished.fence), (&b"alone"[..], lease.fence));
        assert!(finished.front_only, "the last store may still decide otherwise");
    }
    heal_stores(&gateway);
    heal_stores(&other);
    assert_eq!(gateway.store.settle(&lease, &end).await.unwrap(), SettleOutcome::Restored, "the drain inserts");
    assert_eq!(gateway.store.settle(&lease, &end).await.unwrap(), SettleOutcome::Applied, "and may be repeated");
    let finished = done(&last, &ask(1)).await;
    assert_eq!((finished.fence, finished.attempt), (lease.fence, 1));
    let confirmed = done(&other.store, &ask(1)).await;
    assert_eq!((confirmed.fence, confirmed.front_only), (lease.fence, false));
}

#[tokio::test(start_paused = true)]
async fn a_solo_answer_is_not_cached_before_the_last_store_has_it() {
    let (gateway, other, _, _) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&gateway).await;
    assert!(gateway.store.settle(&lease, &complete(b"alone", HOUR)).await.is_err());
    cut_authority(&other);
    let answers = AnswerCache::default();
    let cache = LocalCache::new(Arc::new(other.store.clone()), answers.clone());
    assert!(done(&cache, &ask(1)).await.front_only);
    assert!(answers.is_empty());
    heal_stores(&other);
    assert!(!done(&cache, &ask(1)).await.front_only);
    assert_eq!(answers.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_running_solo_claim_claims_in_last_with_its_next_heartbeat() {
    let (gateway, other, _, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&gateway).await;
    assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), SettleOutcome::Applied, "in the first store");
    heal_stores(&gateway);
    assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), SettleOutcome::Restored, "in the last one");
    assert!(
        matches!(last.get(&lease.request.address).await.unwrap(), Some(ClaimOutcome::InProgress(seen)) if seen.fence == lease.fence)
    );
    failing_store(&other.front).fail(CallFilter::All, ErrorKind::NotApplied);
    assert!(
        matches!(other.store.claim(&ask(1)).await.unwrap(), ClaimOutcome::InProgress(_)),
        "now also for who sees only that"
    );
    assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(gateway.store.settle(&lease, &complete(b"alone", HOUR)).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(done(&other.store, &ask(1)).await.fence, lease.fence);
}

#[tokio::test(start_paused = true)]
async fn a_solo_claim_that_ran_elsewhere_too_is_lost_and_says_what_the_record_says() {
    let (gateway, other, first, _) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&gateway).await;
    // The first window: the other gateway sees only the last store.
    failing_store(&other.front).fail(CallFilter::All, ErrorKind::NotApplied);
    let twice = granted(&other.store, &ask(1)).await;
    assert_eq!((twice.front_only, other.log.count("fallback")), (false, 1));
    assert_eq!(other.store.settle(&twice, &complete(b"theirs", HOUR)).await.unwrap(), SettleOutcome::Applied);
    heal_stores(&gateway);
    let SettleOutcome::ClaimLost(found) = gateway.store.settle(&lease, &complete(b"mine", HOUR)).await.unwrap() else {
        panic!("a double start is lost")
    };
    assert!(matches!(*found, ClaimOutcome::Completed(finished) if finished.record == b"theirs"[..]));
    wait_for_background().await;
    assert!(matches!(first.get(&lease.request.address).await.unwrap(), Some(ClaimOutcome::Completed(_))));
    assert_eq!(&done(&gateway.store, &ask(1)).await.record[..], b"theirs", "all answers are equal");
}

#[tokio::test(start_paused = true)]
async fn a_release_that_somebody_left_in_last_does_not_lose_a_solo_answer() {
    let (gateway, other, _, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let before = granted(&last, &ask(1)).await;
    assert_eq!(last.settle(&before, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    let lease = claim_front_only(&gateway).await;
    heal_stores(&gateway);
    assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), SettleOutcome::Restored);
    assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(gateway.store.settle(&lease, &complete(b"alone", HOUR)).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(gateway.store.settle(&lease, &complete(b"alone", HOUR)).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(&done(&other.store, &ask(1)).await.record[..], b"alone");
    assert_eq!(&done(&last, &ask(1)).await.record[..], b"alone");
}

#[tokio::test(start_paused = true)]
async fn a_silent_solo_claim_is_unknown_and_runs_again_only_by_name() {
    let (gateway, other, _, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&gateway).await;
    advance(SECOND * 31).await;
    for _ in 0..2 {
        let ClaimOutcome::OutcomeUnknown(holder) = other.store.claim(&ask(1)).await.unwrap() else { panic!("unknown") };
        assert_eq!(holder.fence, lease.fence);
        assert!(matches!(
            other.store.get(&lease.request.address).await.unwrap(),
            Some(ClaimOutcome::OutcomeUnknown(_))
        ));
    }
    assert_eq!(last.get(&lease.request.address).await.unwrap(), None);
    // Who knows that it may run again says so by naming the holder.
    let named = Arc::new(ClaimRequest { take_over: Some(lease.fence), ..ClaimRequest::clone(&ask(1)) });
    let next = granted(&other.store, &named).await;
    assert!(!next.front_only);
    heal_stores(&gateway);
    assert!(matches!(
        gateway.store.settle(&lease, &complete(b"late", HOUR)).await.unwrap(),
        SettleOutcome::ClaimLost(_)
    ));
}

#[tokio::test(start_paused = true)]
async fn an_operator_may_end_what_ran_solo() {
    for end in [complete(b"known", HOUR), Settlement::Release] {
        let (gateway, other, ..) = TieredGateway::two_gateways(TieredMode::Loose);
        let lease = claim_front_only(&gateway).await;
        advance(SECOND * 31).await;
        let at = lease.request.address;
        assert_eq!(other.store.admin().resolve(&at, lease.fence, &end).await.unwrap(), SettleOutcome::Applied);
        match end {
            Settlement::Release => drop(granted(&other.store, &ask(1)).await),
            _ => assert_eq!(&done(&other.store, &ask(1)).await.record[..], b"known"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn first_that_lost_a_solo_claim_does_not_lose_its_answer() {
    let (first, last) = (Arc::new(LosableStore::default()), Arc::new(Memory::default()));
    let gateway = TieredGateway::new(TieredMode::Loose, first.clone(), last.clone());
    let lease = claim_front_only(&gateway).await;
    first.lose_everything();
    let end = complete(b"alone", HOUR);
    assert!(gateway.store.settle(&lease, &end).await.is_err(), "journaled");
    assert_eq!(&done(&gateway.store, &ask(1)).await.record[..], b"alone", "put back");
    heal_stores(&gateway);
    assert_eq!(gateway.store.settle(&lease, &end).await.unwrap(), SettleOutcome::Restored);
    assert_eq!(done(&last, &ask(1)).await.fence, lease.fence);
}

/// U marks, and is slow to extend; V takes over meanwhile, finds the marker, and gives back. U must not run.
#[tokio::test(start_paused = true)]
async fn who_was_taken_over_between_marking_and_extending_does_not_run() {
    let (u, v, ..) = TieredGateway::two_gateways(TieredMode::Loose);
    cut_authority(&u);
    // Marked at once; the heartbeat that must follow leaves after the lease is over.
    u.front.inner.delay(CallFilter::Extend, SECOND * 40, Duration::ZERO);
    let store = u.store.clone();
    let starts = tokio::spawn(async move { store.claim(&ask(1)).await });
    sleep(SECOND * 35).await;
    let ClaimOutcome::OutcomeUnknown(_) = v.store.claim(&ask(1)).await.unwrap() else { panic!("it may have run solo") };
    // Even if V had not looked before: it takes over by name.
    let Some(ClaimOutcome::OutcomeUnknown(holder)) = v.store.get(&ask(1).address).await.unwrap() else {
        panic!("unknown")
    };
    let named = Arc::new(ClaimRequest { take_over: Some(holder.fence), ..ClaimRequest::clone(&ask(1)) });
    granted(&v.store, &named).await;
    let found = starts.await.unwrap();
    assert!(matches!(found, Ok(ClaimOutcome::InProgress(_))), "{found:?}");
    assert_eq!(u.log.count("solo"), 0);
}

/// U lapses before it has marked; V takes over, finds no marker and runs. U marks, its extend is lost, it does not run.
#[tokio::test(start_paused = true)]
async fn who_marks_after_it_was_taken_over_does_not_run() {
    let (u, v, ..) = TieredGateway::two_gateways(TieredMode::Loose);
    // The last store takes long to be given up, longer than the lease.
    u.authority.inner.delay(CallFilter::Claim, SECOND * 40, Duration::ZERO);
    cut_authority(&u);
    let store = u.store.clone();
    let starts = tokio::spawn(async move { store.claim(&ask(1)).await });
    sleep(SECOND * 35).await;
    let runs = granted(&v.store, &ask(1)).await;
    assert!(!runs.front_only);
    let found = starts.await.unwrap();
    assert!(matches!(found, Ok(ClaimOutcome::InProgress(_))), "{found:?}");
    assert_eq!(u.log.count("solo"), 0);
    assert_eq!(v.store.settle(&runs, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
}

/// V looked for a marker when there was none yet, and takes over much later: it looks again, finds it and gives back.
/// The next one finds the marker of the fence that this left behind.
#[tokio::test(start_paused = true)]
async fn a_takeover_of_a_solo_claim_is_given_back() {
    let (u, v, first, last) = TieredGateway::two_gateways(TieredMode::Loose);
    cut_authority(&u);
    // V: claim and get at once; from then on every look at the first store takes 20 s, and the takeover 60 s more.
    let between = granted(&first, &ask(1)).await;
    advance(SECOND * 31).await;
    v.front.inner.delay(CallFilter::Claim, Duration::ZERO, SECOND * 60);
    let store = v.store.clone();
    let takes_over = tokio::spawn(async move { store.claim(&ask(1)).await });
    sleep(SECOND).await;
    // The lapsed holder comes back to life as U's claim, runs solo, and falls silent again before V goes on.
    let lease = granted(&u.store, &between.request).await;
    assert_eq!((lease.front_only, lease.fence), (true, between.fence));
    sleep(SECOND * 32).await;
    let found = takes_over.await.unwrap().unwrap();
    assert!(matches!(found, ClaimOutcome::OutcomeUnknown(_)), "{found:?}");
    v.front.inner.heal();
    for _ in 0..3 {
        let found = v.store.claim(&ask(1)).await.unwrap();
        assert!(matches!(found, ClaimOutcome::OutcomeUnknown(_)), "{found:?}");
        assert_eq!(last.get(&between.request.address).await.unwrap(), None, "nobody runs it again");
    }
}

#[tokio::test(start_paused = true)]
async fn without_an_answer_of_first_nothing_runs_solo() {
    for lose in [true, false] {
        let (gateway, first, _) = TieredGateway::one_gateway(TieredMode::Loose);
        cut_authority(&gateway);
        if lose {
            failing_store(&gateway.front).lose_answers(CallFilter::Extend);
        } else {
            failing_store(&gateway.front).fail(CallFilter::Extend, ErrorKind::NotApplied);
        }
        let error = gateway.store.claim(&ask(1)).await.unwrap_err();
        assert_eq!((error.kind, gateway.log.count("solo")), (ErrorKind::NotApplied, 0), "{lose}");
        wait_for_background().await;
        assert_eq!(first.get(&ask(1).address).await.unwrap(), None, "released");
        assert_eq!(first.admin().counts().await.unwrap().unknown, 0, "and nothing says that it ran");
    }
}

/// Answers at once.
struct InstantOperation;

impl ibid::Claimant for InstantOperation {}

impl Operation for InstantOperation {
    type Answer = ();

    async fn run(&mut self, lease: Option<&Lease>) -> RunOutcome<()> {
        assert!(lease.is_some_and(|lease| lease.front_only));
        let record = bytes::Bytes::from_static(b"alone");
        RunOutcome::Complete((), CompletedAnswer { failed: false, record, summary: RecordSummary::default() })
    }
}

#[tokio::test]
async fn the_engine_journals_a_solo_answer_and_drains_it() {
    let (gateway, other, _, last) = TieredGateway::two_gateways(TieredMode::Loose);
    cut_authority(&gateway);
    let folder = tempfile::TempDir::new().unwrap();
    let journal = Arc::new(Journal::open(folder.path()).unwrap());
    let engine = Engine::with_observer(Arc::new(gateway.store.clone()), gateway.log.clone(), Some(journal.clone()));
    let verdict =
        engine.execute(Policy::ietf().checked().unwrap().terms(), ClaimRequest::clone(&ask(1)), InstantOperation).await;
    assert!(matches!(verdict, Decision::Ran((), StoredAs::FrontOnly)), "{verdict:?}");
    assert_eq!(journal.len(), 1);
    assert_eq!(&done(&other.store, &ask(1)).await.record[..], b"alone", "others have it from the first store");
    heal_stores(&gateway);
    tokio::time::timeout(SECOND * 60, engine.settle_queue().wait_until_empty()).await.expect("drained");
    assert_eq!(&done(&last, &ask(1)).await.record[..], b"alone");
    assert_eq!((journal.len(), gateway.log.count("lost claim")), (0, 0));
}
