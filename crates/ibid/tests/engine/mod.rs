//! The engine on stores that fail, clocks that jump and holders that are late. Time is simulated.

mod kit;
mod refused;

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::{
    Finish, Journal, Mode, Observed, OnConcurrent, OnStoreDown, OnUnknown, Otherwise, Outcome, ParkedBy, Policy,
    Probed, Reason, Scope, Shadow, Stored, Verdict,
    store::{Address, Ask, Claim, ErrorKind, Fence, Fingerprint, Memory, Store},
};
use ibid_testkit::wrappers::{Calls, Delays, FailsOnDemand};
use kit::{Op, World, ask, ask_for, complete, is_refused, is_replay, ran};
use tokio::time::{advance, sleep};

const LEASE: Duration = Duration::from_secs(30);

fn waiting() -> Policy {
    let mut policy = Policy::ietf();
    policy.on_concurrent = OnConcurrent::Wait;
    policy
}

fn retrying() -> Policy {
    let mut policy = Policy::ietf();
    policy.on_unknown = OnUnknown::Retry;
    policy
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_answer_is_lost_is_asked_again_and_runs_once() {
    let world = World::new(FailsOnDemand::new(Memory::default()));
    world.store.lose(Calls::Claim);
    let heal = async {
        sleep(Duration::from_millis(15)).await;
        world.store.heal();
    };
    let policy = Policy::ietf();
    let (verdict, ()) = tokio::join!(world.execute(&policy, ask("k"), Op::quick()), heal);
    assert_eq!(ran(verdict), Stored::Yes);
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_ambiguous_claim_that_is_given_up_is_released_until_acknowledged() {
    let world = World::new(FailsOnDemand::new(Memory::default()));
    world.store.lose(Calls::Claim);
    let verdict = world.execute(&Policy::ietf(), ask("k"), Op::quick()).await;
    is_refused(verdict, Reason::StoreUnavailable);
    assert_eq!(world.runs(), 0);
    world.store.heal();
    world.engine.later().flushed().await;
    let verdict = world.execute(&Policy::ietf(), ask("k"), Op::quick()).await;
    assert_eq!(ran(verdict), Stored::Yes, "the key must not stay blocked for its lease");
}

#[tokio::test(start_paused = true)]
async fn a_refused_claim_that_is_still_on_its_way_does_not_come_alive_later() {
    let world = World::new(FailsOnDemand::new(Memory::default()));
    let holder = Arc::new(ask("k"));
    let Ok(Claim::Granted(lease)) = world.store.claim(&holder).await else { panic!("a fresh key is granted") };
    // The first copy is held up; the second finds the holder.
    let late = ask("k");
    world.store.fail(Calls::Claim, ErrorKind::Ambiguous);
    let heal = async {
        sleep(Duration::from_millis(5)).await;
        world.store.heal();
    };
    let policy = Policy::ietf();
    let (verdict, ()) = tokio::join!(world.execute(&policy, late.clone(), Op::quick()), heal);
    is_refused(verdict, Reason::InProgress);
    world.engine.later().flushed().await;
    let held = world.store.settle(&lease, &ibid::store::End::Release).await.unwrap();
    assert_eq!(held, ibid::store::Held::Held);
    let found = world.store.claim(&Arc::new(late)).await.unwrap();
    assert_eq!(found, Claim::Spent, "nobody waits for this grant: the key would be unknown for nothing");
    assert_eq!(ran(world.execute(&policy, ask("k"), Op::quick()).await), Stored::Yes);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_refuses_when_closed_and_runs_degraded_when_open() {
    let world = World::new(FailsOnDemand::new(Memory::default()));
    world.store.fail(Calls::All, ErrorKind::NotApplied);
    is_refused(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, Reason::StoreUnavailable);
    assert_eq!(world.runs(), 0);
    let mut open = Policy::ietf();
    open.on_store_down = OnStoreDown::Open;
    assert_eq!(ran(world.execute(&open, ask("k"), Op::quick()).await), Stored::Degraded);
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_entry_is_refused_even_when_open() {
    let world = World::new(FailsOnDemand::new(Memory::default()));
    world.store.fail(Calls::Claim, ErrorKind::Corrupt);
    let mut open = Policy::ietf();
    open.on_store_down = OnStoreDown::Open;
    is_refused(world.execute(&open, ask("k"), Op::quick()).await, Reason::StoreUnavailable);
    assert_eq!(world.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_cannot_be_recorded_is_withheld_without_a_journal_and_comes_later() {
    let world = World::new(FailsOnDemand::new(Memory::default()));
    world.store.fail(Calls::Settle, ErrorKind::NotApplied);
    is_refused(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, Reason::StoreUnavailable);
    assert_eq!(world.runs(), 1);
    world.store.heal();
    world.engine.later().flushed().await;
    is_replay(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, b"run 1");
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn an_answer_that_cannot_be_recorded_goes_to_the_journal_and_survives_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let memory = Arc::new(FailsOnDemand::new(Memory::default()));
    let journal = || Some(Arc::new(Journal::open(folder.path()).unwrap()));
    {
        let world = World::on(memory.clone(), journal());
        memory.fail(Calls::Settle, ErrorKind::NotApplied);
        assert_eq!(ran(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await), Stored::Pending);
        is_replay(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, b"run 1");
        let other = ask_for("k", Fingerprint::of_bytes(b"another request"));
        is_refused(world.execute(&Policy::ietf(), other, Op::quick()).await, Reason::KeyReused);
        assert_eq!(world.runs(), 1);
    }
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let mode = std::os::unix::fs::MetadataExt::mode(&file.unwrap().metadata().unwrap());
        assert_eq!(mode & 0o777, 0o600, "nobody else may read it");
    }
    // Another process on the same folder, the store still down: the retry is answered from the journal.
    memory.fail(Calls::All, ErrorKind::NotApplied);
    let world = World::on(memory.clone(), journal());
    is_replay(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, b"run 1");
    memory.heal();
    world.engine.later().flushed().await;
    assert!(matches!(memory.get(&ask("k").address).await.unwrap(), Some(Claim::Done(_))), "drained");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left in the folder");
    is_replay(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, b"run 1");
    assert_eq!(world.runs(), 0);
}

#[tokio::test]
async fn an_unreadable_journal_file_is_set_aside_and_never_answered_from() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(format!("{}.answer", ask("k").address)), b"not an answer").unwrap();
    let journal = Journal::open(folder.path()).unwrap();
    assert!(journal.is_empty());
    assert_eq!(journal.unreadable().len(), 1);
    assert!(journal.unreadable()[0].exists());
}

#[tokio::test]
async fn a_journal_that_cannot_be_written_withholds_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(FailsOnDemand::new(Memory::default()));
    let journal = Arc::new(Journal::open(folder.path()).unwrap());
    drop(folder);
    let world = World::on(store.clone(), Some(journal));
    store.fail(Calls::Settle, ErrorKind::NotApplied);
    is_refused(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, Reason::StoreUnavailable);
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_heartbeat_keeps_a_slow_operation_alive_far_beyond_its_lease() {
    let world = World::new(Memory::default());
    let slow = world.spawn(&Policy::ietf(), ask("k"), Op::lasting(LEASE * 10));
    for _ in 0..20 {
        sleep(LEASE / 3).await;
        is_refused(world.execute(&retrying(), ask("k"), Op::quick()).await, Reason::InProgress);
    }
    assert_eq!(ran(slow.await.unwrap()), Stored::Yes);
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_went_silent_is_held_or_taken_over_as_the_policy_says() {
    let world = World::new(Memory::default());
    world.silent_claim("k").await;
    is_refused(world.execute(&retrying(), ask("k"), Op::quick()).await, Reason::InProgress);
    advance(LEASE + Duration::from_secs(1)).await;
    is_refused(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, Reason::OutcomeUnknown);
    let other = ask_for("k", Fingerprint::of_bytes(b"another request"));
    is_refused(world.execute(&retrying(), other, Op::quick()).await, Reason::KeyReused);
    assert_eq!(world.runs(), 0, "another body never takes over");
    assert_eq!(ran(world.execute(&retrying(), ask("k"), Op::quick()).await), Stored::Yes);
    assert_eq!(world.attempts(), [2]);
}

#[tokio::test(start_paused = true)]
async fn a_stale_holder_gives_what_the_record_says_and_counts_as_a_lost_claim() {
    let world = World::new(FailsOnDemand::new(Memory::default()));
    world.store.fail(Calls::Extend, ErrorKind::NotApplied);
    let slow = world.spawn(&retrying(), ask("k"), Op::lasting(LEASE * 2));
    sleep(LEASE + Duration::from_secs(1)).await;
    assert_eq!(ran(world.execute(&retrying(), ask("k"), Op::quick()).await), Stored::Yes);
    is_replay(slow.await.unwrap(), b"run 2");
    assert_eq!(world.lost_claims(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_late_completion_is_accepted_if_nobody_took_over() {
    let world = World::new(FailsOnDemand::new(Memory::default()));
    world.store.fail(Calls::Extend, ErrorKind::NotApplied);
    assert_eq!(ran(world.execute(&Policy::ietf(), ask("k"), Op::lasting(LEASE * 3)).await), Stored::Yes);
    is_replay(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, b"run 1");
}

#[tokio::test(start_paused = true)]
async fn only_one_of_many_takes_over() {
    let world = Arc::new(World::new(Memory::default()));
    world.silent_claim("k").await;
    advance(LEASE * 2).await;
    let mut policy = retrying();
    policy.on_concurrent = OnConcurrent::Wait;
    let all: Vec<_> = (0..50).map(|_| world.spawn(&policy, ask("k"), Op::lasting(Duration::from_millis(50)))).collect();
    for one in all {
        match one.await.unwrap() {
            Verdict::Ran(..) | Verdict::Replay(..) => {}
            Verdict::Refused(refusal) => panic!("{refusal}"),
        }
    }
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn after_a_release_exactly_one_waiter_runs_and_the_others_get_its_answer() {
    let world = Arc::new(World::new(Memory::default()));
    let first = world.spawn(&waiting(), ask("k"), Op::releasing(Duration::from_secs(1)));
    sleep(Duration::from_millis(100)).await;
    let waiters: Vec<_> =
        (0..20).map(|_| world.spawn(&waiting(), ask("k"), Op::lasting(Duration::from_secs(1)))).collect();
    assert_eq!(ran(first.await.unwrap()), Stored::No);
    let mut replays = 0;
    for waiter in waiters {
        match waiter.await.unwrap() {
            Verdict::Ran(_, stored) => assert_eq!(stored, Stored::Yes),
            Verdict::Replay(..) => replays += 1,
            Verdict::Refused(refusal) => panic!("{refusal}"),
        }
    }
    assert_eq!((world.runs(), replays), (2, 19));
    assert_eq!(world.attempts(), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_woken_at_once_and_gives_up_after_its_patience() {
    let world = World::new(Memory::default());
    let slow = world.spawn(&waiting(), ask("k"), Op::lasting(Duration::from_secs(5)));
    sleep(Duration::from_secs(1)).await;
    let started = tokio::time::Instant::now();
    is_replay(world.execute(&waiting(), ask("k"), Op::quick()).await, b"run 1");
    assert_eq!(started.elapsed(), Duration::from_secs(4), "woken without polling");
    assert_eq!(ran(slow.await.unwrap()), Stored::Yes);
    let _slow = world.spawn(&waiting(), ask("k2"), Op::lasting(Duration::from_secs(60)));
    sleep(Duration::from_secs(1)).await;
    is_refused(world.execute(&waiting(), ask("k2"), Op::quick()).await, Reason::InProgress);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_took_too_long_is_not_taken_over_before_its_lease_has_lapsed() {
    let world = World::new(Memory::default());
    assert_eq!(ran(world.execute(&retrying(), ask("k"), Op::timing_out()).await), Stored::Unknown);
    is_refused(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, Reason::OutcomeUnknown);
    is_refused(world.execute(&retrying(), ask("k"), Op::quick()).await, Reason::InProgress);
    advance(LEASE + Duration::from_secs(1)).await;
    assert_eq!(ran(world.execute(&retrying(), ask("k"), Op::quick()).await), Stored::Yes);
}

#[tokio::test(start_paused = true)]
async fn what_provably_did_not_start_is_free_again_and_a_takeover_that_did_not_is_unknown_again() {
    let world = World::new(Memory::default());
    is_refused(world.execute(&retrying(), ask("k"), Op::not_starting()).await, Reason::UpstreamUnreachable);
    assert_eq!(ran(world.execute(&retrying(), ask("k"), Op::parking()).await), Stored::Unknown);
    is_refused(world.execute(&retrying(), ask("k"), Op::not_starting()).await, Reason::UpstreamUnreachable);
    is_refused(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, Reason::OutcomeUnknown);
}

#[tokio::test(start_paused = true)]
async fn the_app_is_asked_about_an_unknown_outcome() {
    let mut policy = Policy::ietf();
    policy.resolve = Some("GET /p?key={key}".parse().unwrap());
    for (probed, check) in [
        (Probed::Happened(complete(b"it did")), Check::Replay(b"it did")),
        (Probed::DidNotHappen, Check::Ran),
        (Probed::Unclear, Check::Unknown),
    ] {
        let world = World::new(Memory::default());
        assert_eq!(ran(world.execute(&policy, ask("k"), Op::parking()).await), Stored::Unknown);
        let verdict = world.execute(&policy, ask("k"), Op::quick().probing(probed)).await;
        match check {
            Check::Replay(body) => {
                is_replay(verdict, body);
                is_replay(world.execute(&policy, ask("k"), Op::quick()).await, body);
            }
            Check::Ran => assert_eq!(ran(verdict), Stored::Yes),
            Check::Unknown => is_refused(verdict, Reason::OutcomeUnknown),
        }
    }
}

enum Check {
    Replay(&'static [u8]),
    Ran,
    Unknown,
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_took_long_to_be_granted_is_extended_before_anything_runs() {
    let world = World::new(Delays::new(Memory::default()));
    world.store.delay(Calls::Claim, Duration::ZERO, LEASE * 3 / 4);
    let slow = world.spawn(&Policy::ietf(), ask("k"), Op::lasting(LEASE / 2));
    sleep(LEASE * 3 / 4 + LEASE / 3).await;
    world.store.heal();
    is_refused(world.execute(&retrying(), ask("k"), Op::quick()).await, Reason::InProgress);
    assert_eq!(ran(slow.await.unwrap()), Stored::Yes);
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn work_that_is_dropped_is_parked_with_its_lease_kept() {
    let world = World::new(Memory::default());
    let slow = world.spawn(&Policy::ietf(), ask("k"), Op::lasting(LEASE));
    sleep(Duration::from_secs(1)).await;
    slow.abort();
    assert!(slow.await.unwrap_err().is_cancelled());
    world.engine.later().flushed().await;
    match world.store.get(&ask("k").address).await.unwrap() {
        Some(Claim::Unknown(holder)) => assert!(holder.takeover_in > LEASE / 2, "{holder:?}"),
        other => panic!("{other:?}"),
    }
}

/// Observes a run that ends with an answer, and says what was seen beside it.
async fn observed<S: Store>(world: &World<S>, ask: Ask) -> Observed {
    observed_with(world, ask, |_| async { Finish::Complete(kit::complete(b"run 1")) }).await
}

async fn observed_with<S: Store, F: Future<Output = Finish>>(
    world: &World<S>, ask: Ask, run: impl FnOnce(Address) -> F,
) -> Observed {
    let address = ask.address;
    let (sender, seen) = tokio::sync::oneshot::channel();
    let mut policy = Policy::ietf();
    policy.mode = Mode::Shadow;
    let report = |observed| assert!(sender.send(observed).is_ok());
    let observation = world.engine.observe(policy.checked().unwrap(), ask, |_| None, None, report);
    observation.end(run(address).await);
    seen.await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn shadow_mode_claims_and_records_beside_the_run() {
    let world = World::new(FailsOnDemand::new(Memory::default()));
    let shadowed = |reason| Outcome::Shadow(Shadow::Refusal(reason));
    assert_eq!(observed(&world, ask("k")).await, Observed { outcome: Outcome::Executed, attempt: Some(1) });
    is_replay(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await, b"run 1");
    let again = observed(&world, ask("k")).await;
    assert_eq!(again, Observed { outcome: Outcome::Shadow(Shadow::Replay), attempt: None });
    let other = ask_for("k", Fingerprint::of_bytes(b"another request"));
    assert_eq!(observed(&world, other).await.outcome, shadowed(Reason::KeyReused));
    world.store.fail(Calls::All, ErrorKind::NotApplied);
    assert_eq!(observed(&world, ask("k2")).await.outcome, shadowed(Reason::StoreUnavailable));
    world.store.heal();
    world.store.fail(Calls::Settle, ErrorKind::NotApplied);
    assert_eq!(observed(&world, ask("k3")).await.outcome, Outcome::Released);
    world.store.heal();
    let running = observed_with(&world, ask("k4"), |_| async {
        // Long enough for its lease to lapse, if nobody kept it.
        sleep(LEASE * 3).await;
        assert_eq!(observed(&world, ask("k4")).await.outcome, shadowed(Reason::InProgress));
        Finish::Park
    });
    assert_eq!(running.await.outcome, Outcome::Unknown);
    assert_eq!(observed(&world, ask("k4")).await.outcome, shadowed(Reason::OutcomeUnknown));
    assert_eq!(world.lost_claims(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_shadow_claim_that_an_operator_forgot_leaves_nothing() {
    for finish in [Finish::Complete(kit::complete(b"x")), Finish::Release, Finish::Park] {
        let world = World::new(Memory::default());
        let store = world.store.clone();
        let observed = observed_with(&world, ask("k"), |address| async move {
            let holder = loop {
                match store.get(&address).await.unwrap() {
                    Some(Claim::Busy(holder)) => break holder,
                    _ => tokio::task::yield_now().await,
                }
            };
            let _ = store.operators().forget(&address, holder.fence).await.unwrap();
            finish
        });
        assert!(matches!(observed.await.outcome, Outcome::Executed | Outcome::Released | Outcome::Unknown));
    }
}

#[tokio::test(start_paused = true)]
async fn in_shadow_mode_every_call_of_run_runs() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    let mut policy = Policy::ietf();
    policy.mode = Mode::Shadow;
    let scope = Scope::from_parts(&["test"]);
    for _ in 0..2 {
        let ran = ibid::run(&store, &policy, "k", &scope, |_| async { Ok::<_, &str>(Bytes::from("ok")) }).await;
        assert_eq!(ran.unwrap(), ibid::Ran::First(Bytes::from("ok")));
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_an_operator_forgot_is_lost_and_the_key_is_free() {
    let world = World::new(Memory::default());
    let slow = world.spawn(&Policy::ietf(), ask("k"), Op::lasting(Duration::from_secs(5)));
    sleep(Duration::from_secs(1)).await;
    let Some(Claim::Busy(holder)) = world.store.get(&ask("k").address).await.unwrap() else { panic!("not running") };
    let _ = world.store.operators().forget(&ask("k").address, holder.fence).await.unwrap();
    assert_ne!(holder.fence, Fence::UNSEEN);
    is_refused(slow.await.unwrap(), Reason::InProgress);
    assert_eq!(world.lost_claims(), 1);
    assert_eq!(ran(world.execute(&Policy::ietf(), ask("k"), Op::quick()).await), Stored::Yes);
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_lost_its_claim_never_gets_the_answer_of_another_request() {
    let world = World::new(Memory::default());
    let slow = world.spawn(&Policy::ietf(), ask("k"), Op::lasting(Duration::from_secs(5)));
    sleep(Duration::from_secs(1)).await;
    let Some(Claim::Busy(holder)) = world.store.get(&ask("k").address).await.unwrap() else { panic!("not running") };
    let _ = world.store.operators().forget(&ask("k").address, holder.fence).await.unwrap();
    let other = ask_for("k", Fingerprint::of_bytes(b"another request"));
    assert_eq!(ran(world.execute(&Policy::ietf(), other, Op::quick()).await), Stored::Yes);
    is_refused(slow.await.unwrap(), Reason::KeyReused);
    assert_eq!(world.lost_claims(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_full_store_refuses_new_keys_and_still_settles_and_replays() {
    let world = World::new(Memory::new(ibid::store::MemoryLimits { max_bytes: 4096 }));
    let mut refused = 0;
    let running = world.spawn(&Policy::ietf(), ask("running"), Op::lasting(Duration::from_secs(1)));
    sleep(Duration::from_millis(1)).await;
    for n in 0..20 {
        let verdict = world.execute(&Policy::ietf(), ask(&format!("k{n}")), Op::quick()).await;
        if let Verdict::Refused(refusal) = verdict {
            assert_eq!(refusal.reason, Reason::StoreUnavailable);
            refused += 1;
        }
    }
    assert!(refused > 10, "{refused}");
    assert_eq!(ran(running.await.unwrap()), Stored::Yes);
    is_replay(world.execute(&Policy::ietf(), ask("k0"), Op::quick()).await, b"run 2");
    advance(Duration::from_secs(25 * 3600)).await;
    assert_eq!(ran(world.execute(&Policy::ietf(), ask("new"), Op::quick()).await), Stored::Yes, "room again");
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
        assert_eq!(refusal.reason, Reason::UpstreamTimeout);
    }
    sleep(Duration::from_secs(10)).await;
    let late = ibid::run(&store, &policy, "late", &scope, slow(0)).await.unwrap();
    assert_eq!(late, ibid::Ran::Replayed(Bytes::from("ok")));
    let Err(ibid::RunError::Refused(refusal)) = ibid::run(&store, &policy, "too-late", &scope, slow(0)).await else {
        panic!("nobody knows whether it took place");
    };
    assert_eq!(refusal.reason, Reason::OutcomeUnknown);
}

#[tokio::test]
async fn run_remembers_results_and_not_failures() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    let scope = ibid::Scope::from_parts(&["tenant"]);
    let failed = ibid::run(&store, &Policy::ietf(), "k", &scope, |_| async { Err::<Bytes, _>("no") }).await;
    assert!(matches!(failed, Err(ibid::RunError::Failed("no"))));
    let ok = |attempt: u32| async move { Ok::<_, &str>(Bytes::from(format!("attempt {attempt}"))) };
    let first = ibid::run(&store, &Policy::ietf(), "k", &scope, ok).await.unwrap();
    assert_eq!(first, ibid::Ran::First("attempt 2".into()));
    let again = ibid::run(&store, &Policy::ietf(), "k", &scope, ok).await.unwrap();
    assert_eq!(again, ibid::Ran::Replayed("attempt 2".into()));
    let other = ibid::RunKey::with_request("k", b"another");
    let Err(ibid::RunError::Refused(refusal)) = ibid::run(&store, &Policy::ietf(), other, &scope, ok).await else {
        panic!("another request must be refused");
    };
    assert_eq!(refusal.reason, Reason::KeyReused);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_its_own_transaction_recorded_is_answered_and_no_lost_claim() {
    let world = World::new(Memory::default());
    let policy = Policy::ietf();
    let verdict = world.execute(&policy, ask("same"), Op::entrusting(Otherwise::Refuse, true)).await;
    assert_eq!(ran(verdict), Stored::Yes);
    is_replay(world.execute(&policy, ask("same"), Op::quick()).await, b"run 1");
    // Whatever the operation says, what was committed counts.
    let parks = Otherwise::Park(ParkedBy::Timeout);
    for (key, otherwise, record) in [("a", Otherwise::Release, "run 2"), ("b", parks, "run 3")] {
        is_replay(world.execute(&policy, ask(key), Op::entrusting(otherwise, true)).await, record.as_bytes());
        is_replay(world.execute(&policy, ask(key), Op::quick()).await, record.as_bytes());
    }
    assert_eq!((world.runs(), world.lost_claims()), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_was_rolled_back_with_its_transaction_is_not_given() {
    let world = World::new(Memory::default());
    let policy = Policy::ietf();
    let verdict = world.execute(&policy, ask("same"), Op::entrusting(Otherwise::Refuse, false)).await;
    is_refused(verdict, Reason::StoreUnavailable);
    assert_eq!(ran(world.execute(&policy, ask("same"), Op::quick()).await), Stored::Yes, "nothing was remembered");
    let verdict = world.execute(&policy, ask("other"), Op::entrusting(Otherwise::Release, false)).await;
    assert_eq!(ran(verdict), Stored::No);
    assert_eq!(ran(world.execute(&policy, ask("other"), Op::quick()).await), Stored::Yes);
    let parks = Op::entrusting(Otherwise::Park(ParkedBy::Answer), false);
    assert_eq!(ran(world.execute(&policy, ask("parked"), parks).await), Stored::Unknown);
    is_refused(world.execute(&policy, ask("parked"), Op::quick()).await, Reason::OutcomeUnknown);
}

#[tokio::test(start_paused = true)]
async fn whether_a_transaction_was_committed_is_asked_until_the_store_says() {
    let policy = Policy::ietf();
    let world = World::new(FailsOnDemand::new(Memory::default()));
    world.store.fail(Calls::Settle, ErrorKind::NotApplied);
    let verdict = world.execute(&policy, ask("k"), Op::entrusting(Otherwise::Refuse, false)).await;
    is_refused(verdict, Reason::StoreUnavailable);
    is_refused(world.execute(&policy, ask("k"), Op::quick()).await, Reason::InProgress);
    world.store.heal();
    world.engine.later().flushed().await;
    assert_eq!(ran(world.execute(&policy, ask("k"), Op::quick()).await), Stored::Yes);
}
