//! Claims that run on the first store alone, and their way to the last one.

use ibid::{
    Complete, Ended, Engine, Journal, Operation, Policy, Stored, Verdict,
    store::{Ask, End, ErrorKind, Held, Lease, Outline},
};
use ibid_testkit::wrappers::Calls;
use tokio::time::{advance, sleep};

use super::{
    two::{Gateway, Swapped, faults},
    *,
};
use crate::near::{ask, complete, done, granted};

pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const HOUR: Duration = Duration::from_secs(3600);

pub(super) fn cut(gateway: &Gateway) {
    faults(&gateway.last).fail(Calls::All, ErrorKind::NotApplied);
}

pub(super) fn heal(gateway: &Gateway) {
    faults(&gateway.first).heal();
    faults(&gateway.last).heal();
}

/// A claim that was granted without the last store.
pub(super) async fn solo(gateway: &Gateway) -> Lease {
    cut(gateway);
    let lease = granted(&gateway.store, &ask(1)).await;
    assert!(lease.solo);
    assert_eq!(gateway.log.count("solo"), 1);
    lease
}

pub(super) async fn settled() {
    sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_solo_claim_is_busy_for_all_who_see_first() {
    let (gateway, other, _, last) = Gateway::two(Mode::Loose);
    let lease = solo(&gateway).await;
    for asking in [&gateway, &other] {
        let Claim::Busy(holder) = asking.store.claim(&ask(1)).await.unwrap() else { panic!("busy") };
        assert_eq!(holder.fence, lease.fence);
        assert!(matches!(asking.store.get(&lease.ask.address).await.unwrap(), Some(Claim::Busy(_))));
    }
    assert_eq!(last.get(&lease.ask.address).await.unwrap(), None);
    let (at, seen) = (lease.ask.address, lease.fence);
    let waits = tokio::spawn(async move { other.store.wait(&at, seen, SECOND * 20).await });
    sleep(SECOND * 5).await;
    assert!(!waits.is_finished(), "whoever waits for it waits");
    assert!(gateway.store.settle(&lease, &complete(b"alone", HOUR)).await.is_err());
    tokio::time::timeout(SECOND, waits).await.expect("it is over").unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_solo_answer_is_replayed_from_first_and_inserted_by_the_drain() {
    let (gateway, other, _, last) = Gateway::two(Mode::Loose);
    let lease = solo(&gateway).await;
    let end = complete(b"alone", HOUR);
    assert_eq!(gateway.store.settle(&lease, &end).await.unwrap_err().kind, ErrorKind::NotApplied, "so it is journaled");
    cut(&other);
    for asking in [&gateway, &other] {
        let finished = done(&asking.store, &ask(1)).await;
        assert_eq!((&finished.record[..], finished.fence), (&b"alone"[..], lease.fence));
    }
    heal(&gateway);
    heal(&other);
    assert_eq!(gateway.store.settle(&lease, &end).await.unwrap(), Held::Restored, "the drain inserts");
    assert_eq!(gateway.store.settle(&lease, &end).await.unwrap(), Held::Held, "and may be repeated");
    let finished = done(&last, &ask(1)).await;
    assert_eq!((finished.fence, finished.attempt), (lease.fence, 1));
    assert_eq!(done(&other.store, &ask(1)).await.fence, lease.fence);
}

#[tokio::test(start_paused = true)]
async fn a_running_solo_claim_claims_in_last_with_its_next_heartbeat() {
    let (gateway, other, _, last) = Gateway::two(Mode::Loose);
    let lease = solo(&gateway).await;
    assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), Held::Held, "in the first store");
    heal(&gateway);
    assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), Held::Restored, "in the last one");
    assert!(
        matches!(last.get(&lease.ask.address).await.unwrap(), Some(Claim::Busy(seen)) if seen.fence == lease.fence)
    );
    faults(&other.first).fail(Calls::All, ErrorKind::NotApplied);
    assert!(matches!(other.store.claim(&ask(1)).await.unwrap(), Claim::Busy(_)), "now also for who sees only that");
    assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), Held::Held);
    assert_eq!(gateway.store.settle(&lease, &complete(b"alone", HOUR)).await.unwrap(), Held::Held);
    assert_eq!(done(&other.store, &ask(1)).await.fence, lease.fence);
}

#[tokio::test(start_paused = true)]
async fn a_solo_claim_that_ran_elsewhere_too_is_lost_and_says_what_the_record_says() {
    let (gateway, other, first, _) = Gateway::two(Mode::Loose);
    let lease = solo(&gateway).await;
    // The first window: the other gateway sees only the last store.
    faults(&other.first).fail(Calls::All, ErrorKind::NotApplied);
    let twice = granted(&other.store, &ask(1)).await;
    assert_eq!((twice.solo, other.log.count("fallback")), (false, 1));
    assert_eq!(other.store.settle(&twice, &complete(b"theirs", HOUR)).await.unwrap(), Held::Held);
    heal(&gateway);
    let Held::Lost(found) = gateway.store.settle(&lease, &complete(b"mine", HOUR)).await.unwrap() else {
        panic!("a double start is lost")
    };
    assert!(matches!(*found, Claim::Done(finished) if finished.record == b"theirs"[..]));
    settled().await;
    assert!(matches!(first.get(&lease.ask.address).await.unwrap(), Some(Claim::Done(_))));
    assert_eq!(&done(&gateway.store, &ask(1)).await.record[..], b"theirs", "all answers are equal");
}

#[tokio::test(start_paused = true)]
async fn a_release_that_somebody_left_in_last_does_not_lose_a_solo_answer() {
    let (gateway, other, _, last) = Gateway::two(Mode::Loose);
    let before = granted(&last, &ask(1)).await;
    assert_eq!(last.settle(&before, &End::Release).await.unwrap(), Held::Held);
    let lease = solo(&gateway).await;
    heal(&gateway);
    assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), Held::Restored);
    assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), Held::Held);
    assert_eq!(gateway.store.settle(&lease, &complete(b"alone", HOUR)).await.unwrap(), Held::Held);
    assert_eq!(gateway.store.settle(&lease, &complete(b"alone", HOUR)).await.unwrap(), Held::Held);
    assert_eq!(&done(&other.store, &ask(1)).await.record[..], b"alone");
    assert_eq!(&done(&last, &ask(1)).await.record[..], b"alone");
}

#[tokio::test(start_paused = true)]
async fn a_silent_solo_claim_is_unknown_and_runs_again_only_by_name() {
    let (gateway, other, _, last) = Gateway::two(Mode::Loose);
    let lease = solo(&gateway).await;
    advance(SECOND * 31).await;
    for _ in 0..2 {
        let Claim::Unknown(holder) = other.store.claim(&ask(1)).await.unwrap() else { panic!("unknown") };
        assert_eq!(holder.fence, lease.fence);
        assert!(matches!(other.store.get(&lease.ask.address).await.unwrap(), Some(Claim::Unknown(_))));
    }
    assert_eq!(last.get(&lease.ask.address).await.unwrap(), None);
    // Who knows that it may run again says so by naming the holder.
    let named = Arc::new(Ask { over: Some(lease.fence), ..Ask::clone(&ask(1)) });
    let next = granted(&other.store, &named).await;
    assert!(!next.solo);
    heal(&gateway);
    assert!(matches!(gateway.store.settle(&lease, &complete(b"late", HOUR)).await.unwrap(), Held::Lost(_)));
}

#[tokio::test(start_paused = true)]
async fn an_operator_may_end_what_ran_solo() {
    for end in [complete(b"known", HOUR), End::Release] {
        let (gateway, other, ..) = Gateway::two(Mode::Loose);
        let lease = solo(&gateway).await;
        advance(SECOND * 31).await;
        let at = lease.ask.address;
        assert_eq!(other.store.operators().resolve(&at, lease.fence, &end).await.unwrap(), Held::Held);
        match end {
            End::Release => drop(granted(&other.store, &ask(1)).await),
            _ => assert_eq!(&done(&other.store, &ask(1)).await.record[..], b"known"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn first_that_lost_a_solo_claim_does_not_lose_its_answer() {
    let (first, last) = (Arc::new(Swapped::default()), Arc::new(Memory::default()));
    let gateway = Gateway::new(Mode::Loose, first.clone(), last.clone());
    let lease = solo(&gateway).await;
    first.lose_everything();
    let end = complete(b"alone", HOUR);
    assert!(gateway.store.settle(&lease, &end).await.is_err(), "journaled");
    assert_eq!(&done(&gateway.store, &ask(1)).await.record[..], b"alone", "put back");
    heal(&gateway);
    assert_eq!(gateway.store.settle(&lease, &end).await.unwrap(), Held::Restored);
    assert_eq!(done(&last, &ask(1)).await.fence, lease.fence);
}

/// U marks, and is slow to extend; V takes over meanwhile, finds the marker, and gives back. U must not run.
#[tokio::test(start_paused = true)]
async fn who_was_taken_over_between_marking_and_extending_does_not_run() {
    let (u, v, ..) = Gateway::two(Mode::Loose);
    cut(&u);
    // Marked at once; the heartbeat that must follow leaves after the lease is over.
    u.first.inner.delay(Calls::Extend, SECOND * 40, Duration::ZERO);
    let store = u.store.clone();
    let starts = tokio::spawn(async move { store.claim(&ask(1)).await });
    sleep(SECOND * 35).await;
    let Claim::Unknown(_) = v.store.claim(&ask(1)).await.unwrap() else { panic!("it may have run solo") };
    // Even if V had not looked before: it takes over by name.
    let Some(Claim::Unknown(holder)) = v.store.get(&ask(1).address).await.unwrap() else { panic!("unknown") };
    let named = Arc::new(Ask { over: Some(holder.fence), ..Ask::clone(&ask(1)) });
    granted(&v.store, &named).await;
    let found = starts.await.unwrap();
    assert!(matches!(found, Ok(Claim::Busy(_))), "{found:?}");
    assert_eq!(u.log.count("solo"), 0);
}

/// U lapses before it has marked; V takes over, finds no marker and runs. U marks, its extend is lost, it does not run.
#[tokio::test(start_paused = true)]
async fn who_marks_after_it_was_taken_over_does_not_run() {
    let (u, v, ..) = Gateway::two(Mode::Loose);
    // The last store takes long to be given up, longer than the lease.
    u.last.inner.delay(Calls::Claim, SECOND * 40, Duration::ZERO);
    cut(&u);
    let store = u.store.clone();
    let starts = tokio::spawn(async move { store.claim(&ask(1)).await });
    sleep(SECOND * 35).await;
    let runs = granted(&v.store, &ask(1)).await;
    assert!(!runs.solo);
    let found = starts.await.unwrap();
    assert!(matches!(found, Ok(Claim::Busy(_))), "{found:?}");
    assert_eq!(u.log.count("solo"), 0);
    assert_eq!(v.store.settle(&runs, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
}

/// V looked for a marker when there was none yet, and takes over much later: it looks again, finds it and gives back.
/// The next one finds the marker of the fence that this left behind.
#[tokio::test(start_paused = true)]
async fn a_takeover_of_a_solo_claim_is_given_back() {
    let (u, v, first, last) = Gateway::two(Mode::Loose);
    cut(&u);
    // V: claim and get at once; from then on every look at the first store takes 20 s, and the takeover 60 s more.
    let between = granted(&first, &ask(1)).await;
    advance(SECOND * 31).await;
    v.first.inner.delay(Calls::Claim, Duration::ZERO, SECOND * 60);
    let store = v.store.clone();
    let takes_over = tokio::spawn(async move { store.claim(&ask(1)).await });
    sleep(SECOND).await;
    // The lapsed holder comes back to life as U's claim, runs solo, and falls silent again before V goes on.
    let lease = granted(&u.store, &between.ask).await;
    assert_eq!((lease.solo, lease.fence), (true, between.fence));
    sleep(SECOND * 32).await;
    let found = takes_over.await.unwrap().unwrap();
    assert!(matches!(found, Claim::Unknown(_)), "{found:?}");
    v.first.inner.heal();
    for _ in 0..3 {
        let found = v.store.claim(&ask(1)).await.unwrap();
        assert!(matches!(found, Claim::Unknown(_)), "{found:?}");
        assert_eq!(last.get(&between.ask.address).await.unwrap(), None, "nobody runs it again");
    }
}

#[tokio::test(start_paused = true)]
async fn without_an_answer_of_first_nothing_runs_solo() {
    for lose in [true, false] {
        let (gateway, first, _) = Gateway::alone(Mode::Loose);
        cut(&gateway);
        if lose {
            faults(&gateway.first).lose(Calls::Extend);
        } else {
            faults(&gateway.first).fail(Calls::Extend, ErrorKind::NotApplied);
        }
        let error = gateway.store.claim(&ask(1)).await.unwrap_err();
        assert_eq!((error.kind, gateway.log.count("solo")), (ErrorKind::NotApplied, 0), "{lose}");
        settled().await;
        assert_eq!(first.get(&ask(1).address).await.unwrap(), None, "released");
        assert_eq!(first.operators().counts().await.unwrap().unknown, 0, "and nothing says that it ran");
    }
}

/// Answers at once.
struct Quick;

impl Operation for Quick {
    type Answer = ();

    async fn run(&mut self, lease: Option<&Lease>) -> Ended<()> {
        assert!(lease.is_some_and(|lease| lease.solo));
        let record = bytes::Bytes::from_static(b"alone");
        Ended::Complete((), Complete { failed: false, record, outline: Outline::default() })
    }
}

#[tokio::test]
async fn the_engine_journals_a_solo_answer_and_drains_it() {
    let (gateway, other, _, last) = Gateway::two(Mode::Loose);
    cut(&gateway);
    let folder = tempfile::TempDir::new().unwrap();
    let journal = Arc::new(Journal::open(folder.path()).unwrap());
    let engine = Engine::with(Arc::new(gateway.store.clone()), gateway.log.clone(), Some(journal.clone()));
    let verdict = engine.execute(&Policy::ietf().checked().unwrap(), Ask::clone(&ask(1)), Quick).await;
    assert!(matches!(verdict, Verdict::Ran((), Stored::Solo)), "{verdict:?}");
    assert_eq!(journal.len(), 1);
    assert_eq!(&done(&other.store, &ask(1)).await.record[..], b"alone", "others have it from the first store");
    heal(&gateway);
    tokio::time::timeout(SECOND * 60, engine.later().flushed()).await.expect("drained");
    assert_eq!(&done(&last, &ask(1)).await.record[..], b"alone");
    assert_eq!((journal.len(), gateway.log.count("lost claim")), (0, 0));
}
