//! The engine on stores that fail, clocks that jump and holders that are late. Time is simulated.

mod common;
mod refused_settlements;

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use common::{
    EngineFixture, TestOperation, assert_refused, assert_replay, claim_request, claim_request_for, complete, expect_ran,
};
use ibid::{
    Decision, Policy, RefusalReason, RequestOutcome, Scope,
    engine::{OnRollback, ProbeOutcome, ShadowResult, ShadowRunOutcome, StoredAs, UnknownCause},
    journal::Journal,
    observe::ShadowOutcome,
    policy::{OnConcurrent, OnStoreDown, OnUnknown, PolicyMode},
    store::{Address, ClaimOutcome, ClaimRequest, ErrorKind, Fence, Fingerprint, Memory, Store},
};
use ibid_testkit::wrappers::{CallFilter, DelayedStore, FailingStore};
use tokio::time::{advance, sleep};

const LEASE: Duration = Duration::from_secs(30);

fn waiting_policy() -> Policy {
    let mut policy = Policy::ietf();
    policy.on_concurrent = OnConcurrent::Wait;
    policy
}

fn retrying_policy() -> Policy {
    let mut policy = Policy::ietf();
    policy.on_unknown = OnUnknown::Retry;
    policy
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_answer_is_lost_is_asked_again_and_runs_once() {
    let world = EngineFixture::new(FailingStore::new(Memory::default()));
    world.store.lose_answers(CallFilter::Claim);
    let heal = async {
        sleep(Duration::from_millis(15)).await;
        world.store.heal();
    };
    let policy = Policy::ietf();
    let (verdict, ()) = tokio::join!(world.execute(&policy, claim_request("k"), TestOperation::quick()), heal);
    assert_eq!(expect_ran(verdict), StoredAs::Recorded);
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_ambiguous_claim_that_is_given_up_is_released_until_acknowledged() {
    let world = EngineFixture::new(FailingStore::new(Memory::default()));
    world.store.lose_answers(CallFilter::Claim);
    let verdict = world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await;
    assert_refused(verdict, RefusalReason::StoreUnavailable);
    assert_eq!(world.runs(), 0);
    world.store.heal();
    world.engine.settle_queue().wait_until_empty().await;
    let verdict = world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await;
    assert_eq!(expect_ran(verdict), StoredAs::Recorded, "the key must not stay blocked for its lease");
}

#[tokio::test(start_paused = true)]
async fn a_refused_claim_that_is_still_on_its_way_does_not_come_alive_later() {
    let world = EngineFixture::new(FailingStore::new(Memory::default()));
    let holder = Arc::new(claim_request("k"));
    let Ok(ClaimOutcome::Granted(lease)) = world.store.claim(&holder).await else { panic!("a fresh key is granted") };
    // The first copy is held up; the second finds the holder.
    let late = claim_request("k");
    world.store.fail(CallFilter::Claim, ErrorKind::Ambiguous);
    let heal = async {
        sleep(Duration::from_millis(5)).await;
        world.store.heal();
    };
    let policy = Policy::ietf();
    let (verdict, ()) = tokio::join!(world.execute(&policy, late.clone(), TestOperation::quick()), heal);
    assert_refused(verdict, RefusalReason::InProgress);
    world.engine.settle_queue().wait_until_empty().await;
    let held = world.store.settle(&lease, &ibid::store::Settlement::Release).await.unwrap();
    assert_eq!(held, ibid::store::SettleOutcome::Applied);
    let found = world.store.claim(&Arc::new(late)).await.unwrap();
    assert_eq!(found, ClaimOutcome::TokenSpent, "nobody waits for this grant: the key would be unknown for nothing");
    assert_eq!(
        expect_ran(world.execute(&policy, claim_request("k"), TestOperation::quick()).await),
        StoredAs::Recorded
    );
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_refuses_when_closed_and_runs_degraded_when_open() {
    let world = EngineFixture::new(FailingStore::new(Memory::default()));
    world.store.fail(CallFilter::All, ErrorKind::NotApplied);
    assert_refused(
        world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await,
        RefusalReason::StoreUnavailable,
    );
    assert_eq!(world.runs(), 0);
    let mut open = Policy::ietf();
    open.on_store_down = OnStoreDown::Open;
    assert_eq!(
        expect_ran(world.execute(&open, claim_request("k"), TestOperation::quick()).await),
        StoredAs::Unprotected
    );
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_entry_is_refused_even_when_open() {
    let world = EngineFixture::new(FailingStore::new(Memory::default()));
    world.store.fail(CallFilter::Claim, ErrorKind::Corrupt);
    let mut open = Policy::ietf();
    open.on_store_down = OnStoreDown::Open;
    assert_refused(
        world.execute(&open, claim_request("k"), TestOperation::quick()).await,
        RefusalReason::StoreUnavailable,
    );
    assert_eq!(world.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_cannot_be_recorded_is_withheld_without_a_journal_and_comes_later() {
    let world = EngineFixture::new(FailingStore::new(Memory::default()));
    world.store.fail(CallFilter::Settle, ErrorKind::NotApplied);
    assert_refused(
        world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await,
        RefusalReason::StoreUnavailable,
    );
    assert_eq!(world.runs(), 1);
    world.store.heal();
    world.engine.settle_queue().wait_until_empty().await;
    assert_replay(world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await, b"run 1");
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn an_answer_that_cannot_be_recorded_goes_to_the_journal_and_survives_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let memory = Arc::new(FailingStore::new(Memory::default()));
    let journal = || Some(Arc::new(Journal::open(folder.path()).unwrap()));
    {
        let world = EngineFixture::on(memory.clone(), journal());
        memory.fail(CallFilter::Settle, ErrorKind::NotApplied);
        assert_eq!(
            expect_ran(world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await),
            StoredAs::Pending
        );
        assert_replay(world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await, b"run 1");
        let other = claim_request_for("k", Fingerprint::of_bytes(b"another request"));
        assert_refused(world.execute(&Policy::ietf(), other, TestOperation::quick()).await, RefusalReason::KeyReused);
        assert_eq!(world.runs(), 1);
    }
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let mode = std::os::unix::fs::MetadataExt::mode(&file.unwrap().metadata().unwrap());
        assert_eq!(mode & 0o777, 0o600, "nobody else may read it");
    }
    // Another process on the same folder, the store still down: the retry is answered from the journal.
    memory.fail(CallFilter::All, ErrorKind::NotApplied);
    let world = EngineFixture::on(memory.clone(), journal());
    assert_replay(world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await, b"run 1");
    memory.heal();
    world.engine.settle_queue().wait_until_empty().await;
    assert!(
        matches!(memory.get(&claim_request("k").address).await.unwrap(), Some(ClaimOutcome::Completed(_))),
        "drained"
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left in the folder");
    assert_replay(world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await, b"run 1");
    assert_eq!(world.runs(), 0);
}

#[tokio::test]
async fn an_unreadable_journal_file_is_set_aside_and_never_answered_from() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(format!("{}.answer", claim_request("k").address)), b"not an answer").unwrap();
    let journal = Journal::open(folder.path()).unwrap();
    assert!(journal.is_empty());
    assert_eq!(journal.unreadable().len(), 1);
    assert!(journal.unreadable()[0].exists());
}

#[tokio::test]
async fn a_journal_that_cannot_be_written_withholds_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(FailingStore::new(Memory::default()));
    let journal = Arc::new(Journal::open(folder.path()).unwrap());
    drop(folder);
    let world = EngineFixture::on(store.clone(), Some(journal));
    store.fail(CallFilter::Settle, ErrorKind::NotApplied);
    assert_refused(
        world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await,
        RefusalReason::StoreUnavailable,
    );
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_heartbeat_keeps_a_slow_operation_alive_far_beyond_its_lease() {
    let world = EngineFixture::new(Memory::default());
    let slow = world.spawn(&Policy::ietf(), claim_request("k"), TestOperation::lasting(LEASE * 10));
    for _ in 0..20 {
        sleep(LEASE / 3).await;
        assert_refused(
            world.execute(&retrying_policy(), claim_request("k"), TestOperation::quick()).await,
            RefusalReason::InProgress,
        );
    }
    assert_eq!(expect_ran(slow.await.unwrap()), StoredAs::Recorded);
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_went_silent_is_held_or_taken_over_as_the_policy_says() {
    let world = EngineFixture::new(Memory::default());
    world.claim_and_vanish("k").await;
    assert_refused(
        world.execute(&retrying_policy(), claim_request("k"), TestOperation::quick()).await,
        RefusalReason::InProgress,
    );
    advance(LEASE + Duration::from_secs(1)).await;
    assert_refused(
        world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await,
        RefusalReason::OutcomeUnknown,
    );
    let other = claim_request_for("k", Fingerprint::of_bytes(b"another request"));
    assert_refused(world.execute(&retrying_policy(), other, TestOperation::quick()).await, RefusalReason::KeyReused);
    assert_eq!(world.runs(), 0, "another body never takes over");
    assert_eq!(
        expect_ran(world.execute(&retrying_policy(), claim_request("k"), TestOperation::quick()).await),
        StoredAs::Recorded
    );
    assert_eq!(world.attempts(), [2]);
}

#[tokio::test(start_paused = true)]
async fn a_stale_holder_gives_what_the_record_says_and_counts_as_a_lost_claim() {
    let world = EngineFixture::new(FailingStore::new(Memory::default()));
    world.store.fail(CallFilter::Extend, ErrorKind::NotApplied);
    let slow = world.spawn(&retrying_policy(), claim_request("k"), TestOperation::lasting(LEASE * 2));
    sleep(LEASE + Duration::from_secs(1)).await;
    assert_eq!(
        expect_ran(world.execute(&retrying_policy(), claim_request("k"), TestOperation::quick()).await),
        StoredAs::Recorded
    );
    assert_replay(slow.await.unwrap(), b"run 2");
    assert_eq!(world.lost_claims(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_late_completion_is_accepted_if_nobody_took_over() {
    let world = EngineFixture::new(FailingStore::new(Memory::default()));
    world.store.fail(CallFilter::Extend, ErrorKind::NotApplied);
    assert_eq!(
        expect_ran(world.execute(&Policy::ietf(), claim_request("k"), TestOperation::lasting(LEASE * 3)).await),
        StoredAs::Recorded
    );
    assert_replay(world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await, b"run 1");
}

#[tokio::test(start_paused = true)]
async fn only_one_of_many_takes_over() {
    let world = Arc::new(EngineFixture::new(Memory::default()));
    world.claim_and_vanish("k").await;
    advance(LEASE * 2).await;
    let mut policy = retrying_policy();
    policy.on_concurrent = OnConcurrent::Wait;
    let all: Vec<_> = (0..50)
        .map(|_| world.spawn(&policy, claim_request("k"), TestOperation::lasting(Duration::from_millis(50))))
        .collect();
    for one in all {
        match one.await.unwrap() {
            Decision::Ran(..) | Decision::Replay(..) => {}
            Decision::Refused(refusal) => panic!("{refusal}"),
        }
    }
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn after_a_release_exactly_one_waiter_runs_and_the_others_get_its_answer() {
    let world = Arc::new(EngineFixture::new(Memory::default()));
    let first = world.spawn(&waiting_policy(), claim_request("k"), TestOperation::releasing(Duration::from_secs(1)));
    sleep(Duration::from_millis(100)).await;
    let waiters: Vec<_> = (0..20)
        .map(|_| world.spawn(&waiting_policy(), claim_request("k"), TestOperation::lasting(Duration::from_secs(1))))
        .collect();
    assert_eq!(expect_ran(first.await.unwrap()), StoredAs::NotRecorded);
    let mut replays = 0;
    for waiter in waiters {
        match waiter.await.unwrap() {
            Decision::Ran(_, stored) => assert_eq!(stored, StoredAs::Recorded),
            Decision::Replay(..) => replays += 1,
            Decision::Refused(refusal) => panic!("{refusal}"),
        }
    }
    assert_eq!((world.runs(), replays), (2, 19));
    assert_eq!(world.attempts(), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_woken_at_once_and_gives_up_after_its_patience() {
    let world = EngineFixture::new(Memory::default());
    let slow = world.spawn(&waiting_policy(), claim_request("k"), TestOperation::lasting(Duration::from_secs(5)));
    sleep(Duration::from_secs(1)).await;
    let started = tokio::time::Instant::now();
    assert_replay(world.execute(&waiting_policy(), claim_request("k"), TestOperation::quick()).await, b"run 1");
    assert_eq!(started.elapsed(), Duration::from_secs(4), "woken without polling");
    assert_eq!(expect_ran(slow.await.unwrap()), StoredAs::Recorded);
    let _slow = world.spawn(&waiting_policy(), claim_request("k2"), TestOperation::lasting(Duration::from_secs(60)));
    sleep(Duration::from_secs(1)).await;
    assert_refused(
        world.execute(&waiting_policy(), claim_request("k2"), TestOperation::quick()).await,
        RefusalReason::InProgress,
    );
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_took_too_long_is_not_taken_over_before_its_lease_has_lapsed() {
    let world = EngineFixture::new(Memory::default());
    assert_eq!(
        expect_ran(world.execute(&retrying_policy(), claim_request("k"), TestOperation::timing_out()).await),
        StoredAs::OutcomeUnknown
    );
    assert_refused(
        world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await,
        RefusalReason::OutcomeUnknown,
    );
    assert_refused(
        world.execute(&retrying_policy(), claim_request("k"), TestOperation::quick()).await,
        RefusalReason::InProgress,
    );
    advance(LEASE + Duration::from_secs(1)).await;
    assert_eq!(
        expect_ran(world.execute(&retrying_policy(), claim_request("k"), TestOperation::quick()).await),
        StoredAs::Recorded
    );
}

#[tokio::test(start_paused = true)]
async fn what_provably_did_not_start_is_free_again_and_a_takeover_that_did_not_is_unknown_again() {
    let world = EngineFixture::new(Memory::default());
    assert_refused(
        world.execute(&retrying_policy(), claim_request("k"), TestOperation::not_starting()).await,
        RefusalReason::UpstreamUnreachable,
    );
    assert_eq!(
        expect_ran(world.execute(&retrying_policy(), claim_request("k"), TestOperation::parking()).await),
        StoredAs::OutcomeUnknown
    );
    assert_refused(
        world.execute(&retrying_policy(), claim_request("k"), TestOperation::not_starting()).await,
        RefusalReason::UpstreamUnreachable,
    );
    assert_refused(
        world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await,
        RefusalReason::OutcomeUnknown,
    );
}

#[tokio::test(start_paused = true)]
async fn the_app_is_asked_about_an_unknown_outcome() {
    let mut policy = Policy::ietf();
    policy.resolve = Some("GET /p?key={key}".parse().unwrap());
    for (probed, check) in [
        (ProbeOutcome::Happened(complete(b"it did")), ExpectedRetry::Replay(b"it did")),
        (ProbeOutcome::DidNotHappen, ExpectedRetry::Ran),
        (ProbeOutcome::Inconclusive, ExpectedRetry::OutcomeUnknown),
    ] {
        let world = EngineFixture::new(Memory::default());
        assert_eq!(
            expect_ran(world.execute(&policy, claim_request("k"), TestOperation::parking()).await),
            StoredAs::OutcomeUnknown
        );
        let verdict = world.execute(&policy, claim_request("k"), TestOperation::quick().probing(probed)).await;
        match check {
            ExpectedRetry::Replay(body) => {
                assert_replay(verdict, body);
                assert_replay(world.execute(&policy, claim_request("k"), TestOperation::quick()).await, body);
            }
            ExpectedRetry::Ran => assert_eq!(expect_ran(verdict), StoredAs::Recorded),
            ExpectedRetry::OutcomeUnknown => assert_refused(verdict, RefusalReason::OutcomeUnknown),
        }
    }
}

enum ExpectedRetry {
    Replay(&'static [u8]),
    Ran,
    OutcomeUnknown,
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_took_long_to_be_granted_is_extended_before_anything_runs() {
    let world = EngineFixture::new(DelayedStore::new(Memory::default()));
    world.store.delay(CallFilter::Claim, Duration::ZERO, LEASE * 3 / 4);
    let slow = world.spawn(&Policy::ietf(), claim_request("k"), TestOperation::lasting(LEASE / 2));
    sleep(LEASE * 3 / 4 + LEASE / 3).await;
    world.store.heal();
    assert_refused(
        world.execute(&retrying_policy(), claim_request("k"), TestOperation::quick()).await,
        RefusalReason::InProgress,
    );
    assert_eq!(expect_ran(slow.await.unwrap()), StoredAs::Recorded);
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn work_that_is_dropped_is_parked_with_its_lease_kept() {
    let world = EngineFixture::new(Memory::default());
    let slow = world.spawn(&Policy::ietf(), claim_request("k"), TestOperation::lasting(LEASE));
    sleep(Duration::from_secs(1)).await;
    slow.abort();
    assert!(slow.await.unwrap_err().is_cancelled());
    world.engine.settle_queue().wait_until_empty().await;
    match world.store.get(&claim_request("k").address).await.unwrap() {
        Some(ClaimOutcome::OutcomeUnknown(holder)) => assert!(holder.takeover_in > LEASE / 2, "{holder:?}"),
        other => panic!("{other:?}"),
    }
}

/// Observes a run that ends with an answer, and says what was seen beside it.
async fn observe_run<S: Store>(world: &EngineFixture<S>, ask: ClaimRequest) -> ShadowResult {
    observe_run_with(world, ask, |_| async { ShadowRunOutcome::Complete(common::complete(b"run 1")) }).await
}

async fn observe_run_with<S: Store, F: Future<Output = ShadowRunOutcome>>(
    world: &EngineFixture<S>, ask: ClaimRequest, run: impl FnOnce(Address) -> F,
) -> ShadowResult {
    let address = ask.address;
    let (sender, seen) = tokio::sync::oneshot::channel();
    let mut policy = Policy::ietf();
    policy.mode = PolicyMode::Shadow;
    let report = |observed| assert!(sender.send(observed).is_ok());
    let observation = world.engine.observe(*policy.checked().unwrap().terms(), ask, |_| None, None, report);
    observation.end(run(address).await);
    seen.await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn shadow_mode_claims_and_records_beside_the_run() {
    let world = EngineFixture::new(FailingStore::new(Memory::default()));
    let shadowed = |reason| RequestOutcome::Shadow(ShadowOutcome::Refusal(reason));
    assert_eq!(
        observe_run(&world, claim_request("k")).await,
        ShadowResult { outcome: RequestOutcome::Executed, attempt: Some(1) }
    );
    assert_replay(world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await, b"run 1");
    let again = observe_run(&world, claim_request("k")).await;
    assert_eq!(again, ShadowResult { outcome: RequestOutcome::Shadow(ShadowOutcome::Replay), attempt: None });
    let other = claim_request_for("k", Fingerprint::of_bytes(b"another request"));
    assert_eq!(observe_run(&world, other).await.outcome, shadowed(RefusalReason::KeyReused));
    world.store.fail(CallFilter::All, ErrorKind::NotApplied);
    assert_eq!(observe_run(&world, claim_request("k2")).await.outcome, shadowed(RefusalReason::StoreUnavailable));
    world.store.heal();
    world.store.fail(CallFilter::Settle, ErrorKind::NotApplied);
    assert_eq!(observe_run(&world, claim_request("k3")).await.outcome, RequestOutcome::Released);
    world.store.heal();
    let running = observe_run_with(&world, claim_request("k4"), |_| async {
        // Long enough for its lease to lapse, if nobody kept it.
        sleep(LEASE * 3).await;
        assert_eq!(observe_run(&world, claim_request("k4")).await.outcome, shadowed(RefusalReason::InProgress));
        ShadowRunOutcome::Park
    });
    assert_eq!(running.await.outcome, RequestOutcome::Unknown);
    assert_eq!(observe_run(&world, claim_request("k4")).await.outcome, shadowed(RefusalReason::OutcomeUnknown));
    assert_eq!(world.lost_claims(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_shadow_claim_that_an_operator_forgot_leaves_nothing() {
    for finish in
        [ShadowRunOutcome::Complete(common::complete(b"x")), ShadowRunOutcome::Release, ShadowRunOutcome::Park]
    {
        let world = EngineFixture::new(Memory::default());
        let store = world.store.clone();
        let observed = observe_run_with(&world, claim_request("k"), |address| async move {
            let holder = loop {
                match store.get(&address).await.unwrap() {
                    Some(ClaimOutcome::InProgress(holder)) => break holder,
                    _ => tokio::task::yield_now().await,
                }
            };
            let _ = store.admin().forget(&address, holder.fence).await.unwrap();
            finish
        });
        assert!(matches!(
            observed.await.outcome,
            RequestOutcome::Executed | RequestOutcome::Released | RequestOutcome::Unknown
        ));
    }
}

#[tokio::test(start_paused = true)]
async fn in_shadow_mode_every_call_of_run_runs() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    let mut policy = Policy::ietf();
    policy.mode = PolicyMode::Shadow;
    let scope = Scope::from_parts(&["test"]);
    for _ in 0..2 {
        let ran = ibid::run(&store, &policy, "k", &scope, |_| async { Ok::<_, &str>(Bytes::from("ok")) }).await;
        assert_eq!(ran.unwrap(), ibid::RunResult::First(Bytes::from("ok")));
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_an_operator_forgot_is_lost_and_the_key_is_free() {
    let world = EngineFixture::new(Memory::default());
    let slow = world.spawn(&Policy::ietf(), claim_request("k"), TestOperation::lasting(Duration::from_secs(5)));
    sleep(Duration::from_secs(1)).await;
    let Some(ClaimOutcome::InProgress(holder)) = world.store.get(&claim_request("k").address).await.unwrap() else {
        panic!("not running")
    };
    let _ = world.store.admin().forget(&claim_request("k").address, holder.fence).await.unwrap();
    assert_ne!(holder.fence, Fence::UNSEEN);
    assert_refused(slow.await.unwrap(), RefusalReason::InProgress);
    assert_eq!(world.lost_claims(), 1);
    assert_eq!(
        expect_ran(world.execute(&Policy::ietf(), claim_request("k"), TestOperation::quick()).await),
        StoredAs::Recorded
    );
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_lost_its_claim_never_gets_the_answer_of_another_request() {
    let world = EngineFixture::new(Memory::default());
    let slow = world.spawn(&Policy::ietf(), claim_request("k"), TestOperation::lasting(Duration::from_secs(5)));
    sleep(Duration::from_secs(1)).await;
    let Some(ClaimOutcome::InProgress(holder)) = world.store.get(&claim_request("k").address).await.unwrap() else {
        panic!("not running")
    };
    let _ = world.store.admin().forget(&claim_request("k").address, holder.fence).await.unwrap();
    let other = claim_request_for("k", Fingerprint::of_bytes(b"another request"));
    assert_eq!(expect_ran(world.execute(&Policy::ietf(), other, TestOperation::quick()).await), StoredAs::Recorded);
    assert_refused(slow.await.unwrap(), RefusalReason::KeyReused);
    assert_eq!(world.lost_claims(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_full_store_refuses_new_keys_and_still_settles_and_replays() {
    let world = EngineFixture::new(Memory::new(3072));
    let mut refused = 0;
    let running =
        world.spawn(&Policy::ietf(), claim_request("running"), TestOperation::lasting(Duration::from_secs(1)));
    sleep(Duration::from_millis(1)).await;
    for n in 0..20 {
        let verdict = world.execute(&Policy::ietf(), claim_request(&format!("k{n}")), TestOperation::quick()).await;
        if let Decision::Refused(refusal) = verdict {
            assert_eq!(refusal.reason, RefusalReason::StoreUnavailable);
            refused += 1;
        }
    }
    assert!(refused > 10, "{refused}");
    assert_eq!(expect_ran(running.await.unwrap()), StoredAs::Recorded);
    assert_replay(world.execute(&Policy::ietf(), claim_request("k0"), TestOperation::quick()).await, b"run 2");
    advance(Duration::from_secs(25 * 3600)).await;
    assert_eq!(
        expect_ran(world.execute(&Policy::ietf(), claim_request("new"), TestOperation::quick()).await),
        StoredAs::Recorded,
        "room again"
    );
}

#[tokio::test(start_paused = true)]
async fn a_function_that_is_late_is_refused_and_its_result_is_remembered() {
    let (store, scope): (Arc<dyn Store>, _) = (Arc::new(Memory::default()), ibid::Scope::from_parts(&["acme"]));
    let mut policy = Policy::ietf();
    (policy.timeout, policy.lease) = (Duration::from_secs(1), Duration::from_secs(5));
    let slow = |seconds| {
        move |_| async move {
            sleep(Duration::from_secs(seconds)).await;
            Ok::<_, &str>(Bytes::from("ok"))
        }
    };
    for key in ["late", "too-late"] {
        let takes = if key == "late" { 3 } else { 60 };
        let Err(ibid::RunError::Refused(refusal)) = ibid::run(&store, &policy, key, &scope, slow(takes)).await else {
            panic!("it was refused after a second");
        };
        assert_eq!(refusal.reason, RefusalReason::UpstreamTimeout);
    }
    sleep(Duration::from_secs(10)).await;
    let late = ibid::run(&store, &policy, "late", &scope, slow(0)).await.unwrap();
    assert_eq!(late, ibid::RunResult::Replayed(Bytes::from("ok")));
    let Err(ibid::RunError::Refused(refusal)) = ibid::run(&store, &policy, "too-late", &scope, slow(0)).await else {
        panic!("nobody knows whether it took place");
    };
    assert_eq!(refusal.reason, RefusalReason::OutcomeUnknown);
}

#[tokio::test]
async fn run_remembers_results_and_not_failures() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    let scope = ibid::Scope::from_parts(&["tenant"]);
    let failed = ibid::run(&store, &Policy::ietf(), "k", &scope, |_| async { Err::<Bytes, _>("no") }).await;
    assert!(matches!(failed, Err(ibid::RunError::Failed("no"))));
    let ok = |attempt: u32| async move { Ok::<_, &str>(Bytes::from(format!("attempt {attempt}"))) };
    let first = ibid::run(&store, &Policy::ietf(), "k", &scope, ok).await.unwrap();
    assert_eq!(first, ibid::RunResult::First("attempt 2".into()));
    let again = ibid::run(&store, &Policy::ietf(), "k", &scope, ok).await.unwrap();
    assert_eq!(again, ibid::RunResult::Replayed("attempt 2".into()));
    let other = ibid::RunKey::with_request("k", b"another");
    let Err(ibid::RunError::Refused(refusal)) = ibid::run(&store, &Policy::ietf(), other, &scope, ok).await else {
        panic!("another request must be refused");
    };
    assert_eq!(refusal.reason, RefusalReason::KeyReused);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_its_own_transaction_recorded_is_answered_and_no_lost_claim() {
    let world = EngineFixture::new(Memory::default());
    let policy = Policy::ietf();
    let verdict =
        world.execute(&policy, claim_request("same"), TestOperation::delegating(OnRollback::Refuse, true)).await;
    assert_eq!(expect_ran(verdict), StoredAs::Recorded);
    assert_replay(world.execute(&policy, claim_request("same"), TestOperation::quick()).await, b"run 1");
    // Whatever the operation says, what was committed counts.
    let parks = OnRollback::Park(UnknownCause::TimedOut);
    for (key, otherwise, record) in [("a", OnRollback::Release, "run 2"), ("b", parks, "run 3")] {
        assert_replay(
            world.execute(&policy, claim_request(key), TestOperation::delegating(otherwise, true)).await,
            record.as_bytes(),
        );
        assert_replay(world.execute(&policy, claim_request(key), TestOperation::quick()).await, record.as_bytes());
    }
    assert_eq!((world.runs(), world.lost_claims()), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_was_rolled_back_with_its_transaction_is_not_given() {
    let world = EngineFixture::new(Memory::default());
    let policy = Policy::ietf();
    let verdict =
        world.execute(&policy, claim_request("same"), TestOperation::delegating(OnRollback::Refuse, false)).await;
    assert_refused(verdict, RefusalReason::StoreUnavailable);
    assert_eq!(
        expect_ran(world.execute(&policy, claim_request("same"), TestOperation::quick()).await),
        StoredAs::Recorded,
        "nothing was remembered"
    );
    let verdict =
        world.execute(&policy, claim_request("other"), TestOperation::delegating(OnRollback::Release, false)).await;
    assert_eq!(expect_ran(verdict), StoredAs::NotRecorded);
    assert_eq!(
        expect_ran(world.execute(&policy, claim_request("other"), TestOperation::quick()).await),
        StoredAs::Recorded
    );
    let parks = TestOperation::delegating(OnRollback::Park(UnknownCause::AppSaidSo), false);
    assert_eq!(expect_ran(world.execute(&policy, claim_request("parked"), parks).await), StoredAs::OutcomeUnknown);
    assert_refused(
        world.execute(&policy, claim_request("parked"), TestOperation::quick()).await,
        RefusalReason::OutcomeUnknown,
    );
}

#[tokio::test(start_paused = true)]
async fn whether_a_transaction_was_committed_is_asked_until_the_store_says() {
    let policy = Policy::ietf();
    let world = EngineFixture::new(FailingStore::new(Memory::default()));
    world.store.fail(CallFilter::Settle, ErrorKind::NotApplied);
    let verdict =
        world.execute(&policy, claim_request("k"), TestOperation::delegating(OnRollback::Refuse, false)).await;
    assert_refused(verdict, RefusalReason::StoreUnavailable);
    assert_refused(world.execute(&policy, claim_request("k"), TestOperation::quick()).await, RefusalReason::InProgress);
    world.store.heal();
    world.engine.settle_queue().wait_until_empty().await;
    assert_eq!(
        expect_ran(world.execute(&policy, claim_request("k"), TestOperation::quick()).await),
        StoredAs::Recorded
    );
}
