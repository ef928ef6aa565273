//! The inbox over a store: what runs, what runs again, and what does not.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, SystemTime},
};

use ibid::{
    inbox::{BrokerReply, HandleError, HandleOutcome, Inbox, InboxEvent},
    policy::OnUnknown,
    store::{Memory, Store},
};
use tokio::time::{advance, sleep};

const LEASE: Duration = Duration::from_secs(30);

/// An inbox and how often its handlers ran.
struct InboxFixture {
    inbox: Inbox,
    runs: Arc<AtomicU32>,
}

impl InboxFixture {
    fn new(how: impl FnOnce(Inbox) -> Inbox) -> Self {
        let store: Arc<dyn Store> = Arc::new(Memory::default());
        Self { inbox: how(Inbox::new(store).timeouts(Duration::from_secs(60), LEASE)), runs: Arc::default() }
    }

    async fn handle(
        &self, event: &InboxEvent, ends: Result<(), &'static str>,
    ) -> Result<HandleOutcome, HandleError<&'static str>> {
        let ran = self.runs.clone();
        let handler = move |_attempt| async move {
            ran.fetch_add(1, SeqCst);
            ends
        };
        self.inbox.handle(event, handler).await
    }

    /// A handler that starts and is never heard of again: its process is gone.
    async fn start_and_crash(&self, event: &InboxEvent) {
        let (inbox, event, ran) = (self.inbox.clone(), event.clone(), self.runs.clone());
        // With a runtime of its own, which ends under it without a word to the store.
        let crashed = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let handler = move |_attempt| async move {
                    ran.fetch_add(1, SeqCst);
                    sleep(Duration::from_secs(3600)).await;
                    Ok::<_, String>(())
                };
                let handling = inbox.handle(&event, handler);
                let _ = tokio::time::timeout(Duration::from_millis(100), handling).await;
            });
        });
        crashed.join().unwrap();
    }

    fn runs(&self) -> u32 {
        self.runs.load(SeqCst)
    }
}

fn event(id: &str) -> InboxEvent {
    InboxEvent::new("mailer", "/orders", id).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_of_a_handled_event_is_not_handled() {
    let world = InboxFixture::new(|inbox| inbox);
    assert_eq!(world.handle(&event("1"), Ok(())).await.unwrap(), HandleOutcome::Handled);
    advance(Duration::from_secs(6 * 24 * 3600)).await;
    let again = world.handle(&event("1"), Ok(())).await;
    assert_eq!(*again.as_ref().unwrap(), HandleOutcome::Duplicate);
    assert_eq!(world.inbox.reply(&again), BrokerReply::Acknowledge);
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_failed_event_runs_again_when_it_comes_again_however_late() {
    let world = InboxFixture::new(|inbox| inbox);
    for (attempt, pause) in [(1, 1), (2, 30), (3, 3600)] {
        let failed = world.handle(&event("1"), Err("no")).await;
        let Err(HandleError::Failed { error: "no", attempt: seen, poisoned: false }) = failed else {
            panic!("{failed:?}")
        };
        assert_eq!(seen, attempt, "counted beyond the life of a released claim");
        assert!(matches!(world.inbox.reply(&failed), BrokerReply::Redeliver { .. }));
        advance(Duration::from_secs(pause)).await;
    }
    assert_eq!(world.handle(&event("1"), Ok(())).await.unwrap(), HandleOutcome::Handled);
    assert_eq!(world.handle(&event("1"), Ok(())).await.unwrap(), HandleOutcome::Duplicate);
    assert_eq!(world.runs(), 4);
}

#[tokio::test(start_paused = true)]
async fn an_event_that_fails_too_often_is_poisoned_until_it_is_forgotten() {
    let world = InboxFixture::new(|inbox| inbox.poison_after(3));
    for attempt in 1..=3 {
        let failed = world.handle(&event("1"), Err("no")).await;
        let Err(HandleError::Failed { poisoned, .. }) = failed else { panic!("{failed:?}") };
        assert_eq!(poisoned, attempt == 3);
        advance(Duration::from_secs(600)).await;
    }
    for _ in 0..2 {
        let dead = world.handle(&event("1"), Ok(())).await;
        assert_eq!(*dead.as_ref().unwrap(), HandleOutcome::Poisoned { attempts: 3, error: "no".into() });
        let BrokerReply::DeadLetter { why } = world.inbox.reply(&dead) else { panic!() };
        assert!(why.contains("3 times") && why.contains("no"), "{why}");
    }
    assert_eq!(world.runs(), 3);
    assert!(world.inbox.forget(&event("1")).await.unwrap());
    advance(Duration::from_secs(61)).await;
    assert_eq!(
        world.handle(&event("1"), Ok(())).await.unwrap(),
        HandleOutcome::Handled,
        "sent again from the dead-letter queue"
    );
    assert!(world.inbox.forget(&event("never seen")).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn forgetting_starts_the_count_anew_even_at_once() {
    let world = InboxFixture::new(|inbox| inbox.poison_after(2));
    for _ in 0..2 {
        assert!(world.handle(&event("1"), Err("no")).await.is_err());
    }
    assert!(world.inbox.forget(&event("1")).await.unwrap());
    let again = world.handle(&event("1"), Err("no")).await;
    assert!(matches!(again, Err(HandleError::Failed { poisoned: false, .. })), "{again:?}");
    assert_eq!(world.handle(&event("1"), Ok(())).await.unwrap(), HandleOutcome::Handled);
}

#[tokio::test(start_paused = true)]
async fn two_consumers_of_one_event_are_independent() {
    let world = InboxFixture::new(|inbox| inbox);
    let other = InboxEvent::new("billing", "/orders", "1").unwrap();
    assert_eq!(world.handle(&event("1"), Ok(())).await.unwrap(), HandleOutcome::Handled);
    assert_eq!(world.handle(&other, Ok(())).await.unwrap(), HandleOutcome::Handled);
    assert_eq!(world.handle(&other, Ok(())).await.unwrap(), HandleOutcome::Duplicate);
    assert_eq!(world.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn while_it_is_handled_others_are_told_to_come_back() {
    let world = InboxFixture::new(|inbox| inbox);
    let (inbox, first) = (world.inbox.clone(), event("1"));
    let slow = |_attempt| async {
        sleep(Duration::from_secs(45)).await;
        Ok::<_, String>(())
    };
    let running = tokio::spawn(async move { inbox.handle(&first, slow).await });
    for _ in 0..4 {
        sleep(Duration::from_secs(10)).await;
        let busy = world.handle(&event("1"), Ok(())).await;
        assert!(matches!(busy, Ok(HandleOutcome::InProgress { retry_in }) if !retry_in.is_zero()), "{busy:?}");
        assert!(!world.inbox.forget(&event("1")).await.unwrap(), "what runs is not forgotten");
    }
    assert_eq!(running.await.unwrap().unwrap(), HandleOutcome::Handled);
    assert_eq!(world.handle(&event("1"), Ok(())).await.unwrap(), HandleOutcome::Duplicate);
    assert_eq!(world.runs(), 0);
}

#[tokio::test]
async fn what_crashed_runs_again_once_its_lease_has_lapsed() {
    let world = InboxFixture::new(|inbox| inbox.timeouts(Duration::from_secs(60), Duration::from_millis(300)));
    world.start_and_crash(&event("1")).await;
    let busy = world.handle(&event("1"), Ok(())).await;
    assert!(matches!(busy, Ok(HandleOutcome::InProgress { .. })), "it may still be at it: {busy:?}");
    sleep(Duration::from_millis(400)).await;
    assert_eq!(world.handle(&event("1"), Ok(())).await.unwrap(), HandleOutcome::Handled);
    assert_eq!(world.runs(), 2);
}

#[tokio::test]
async fn what_always_crashes_is_poisoned_too() {
    let world =
        InboxFixture::new(|inbox| inbox.timeouts(Duration::from_secs(60), Duration::from_millis(200)).poison_after(2));
    for _ in 0..2 {
        world.start_and_crash(&event("1")).await;
        sleep(Duration::from_millis(300)).await;
    }
    for _ in 0..2 {
        let dead = world.handle(&event("1"), Ok(())).await;
        assert!(matches!(dead, Ok(HandleOutcome::Poisoned { .. })), "{dead:?}");
    }
    assert_eq!(world.runs(), 2);
    assert!(world.inbox.forget(&event("1")).await.unwrap());
    assert_eq!(world.handle(&event("1"), Ok(())).await.unwrap(), HandleOutcome::Handled);
}

#[tokio::test]
async fn what_crashed_is_held_where_that_is_wanted() {
    let quick =
        |inbox: Inbox| inbox.timeouts(Duration::from_secs(60), Duration::from_millis(200)).on_crash(OnUnknown::Hold);
    let world = InboxFixture::new(quick);
    world.start_and_crash(&event("1")).await;
    sleep(Duration::from_millis(300)).await;
    let held = world.handle(&event("1"), Ok(())).await;
    assert_eq!(*held.as_ref().unwrap(), HandleOutcome::OutcomeUnknown);
    assert!(matches!(world.inbox.reply(&held), BrokerReply::DeadLetter { .. }));
    // A failure is no crash: it runs again all the same.
    assert!(world.handle(&event("2"), Err("no")).await.is_err());
    assert_eq!(world.handle(&event("2"), Ok(())).await.unwrap(), HandleOutcome::Handled);
}

#[tokio::test(start_paused = true)]
async fn a_panic_and_a_time_out_leave_it_to_the_next_delivery() {
    let world = InboxFixture::new(|inbox| inbox);
    let panics = |_attempt| async { if true { panic!("on purpose") } else { Ok::<_, String>(()) } };
    let aborted = world.inbox.handle(&event("1"), panics).await;
    assert!(matches!(aborted, Err(HandleError::Aborted(_))), "{aborted:?}");
    let sleeps = |_attempt| async {
        sleep(Duration::from_secs(61)).await;
        Ok::<_, String>(())
    };
    let late = world.inbox.handle(&event("2"), sleeps).await;
    assert!(matches!(late, Err(HandleError::TimedOut)), "{late:?}");
    assert_eq!(world.inbox.reply(&late), BrokerReply::Redeliver { after: LEASE });
    sleep(LEASE + Duration::from_secs(1)).await;
    for id in ["1", "2"] {
        assert_eq!(world.handle(&event(id), Ok(())).await.unwrap(), HandleOutcome::Handled);
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_older_than_what_is_remembered_is_never_taken_for_new() {
    let world = InboxFixture::new(|inbox| inbox.keep(Duration::from_secs(3600)));
    let old = SystemTime::now() - Duration::from_secs(7200);
    let late = world.handle(&event("1").with_time(old), Ok(())).await;
    assert_eq!(*late.as_ref().unwrap(), HandleOutcome::TooOld);
    assert!(matches!(world.inbox.reply(&late), BrokerReply::DeadLetter { .. }));
    assert_eq!(world.runs(), 0);
    // One that is remembered is a duplicate, however old.
    assert_eq!(world.handle(&event("2"), Ok(())).await.unwrap(), HandleOutcome::Handled);
    assert_eq!(world.handle(&event("2").with_time(old), Ok(())).await.unwrap(), HandleOutcome::Duplicate);
    // Somebody who knows that it was never handled may say so.
    assert_eq!(world.handle(&event("1").with_time(old).without_time(), Ok(())).await.unwrap(), HandleOutcome::Handled);
}

#[tokio::test(start_paused = true)]
async fn of_many_deliveries_at_once_one_is_handled_also_after_a_failure() {
    let world = InboxFixture::new(|inbox| inbox.poison_after(100));
    assert!(world.handle(&event("1"), Err("no")).await.is_err());
    let one = event("1");
    let all = futures_util::future::join_all((0..64).map(|_| world.handle(&one, Ok(())))).await;
    let done = all.iter().filter(|handled| matches!(handled, Ok(HandleOutcome::Handled))).count();
    assert_eq!((done, world.runs()), (1, 2), "{all:?}");
}
