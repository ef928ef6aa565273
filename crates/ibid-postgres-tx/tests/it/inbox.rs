//! The inbox, on both drivers: every case runs on each.

use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use ibid::inbox::{BrokerReply, InboxEvent};
use ibid_postgres_tx::{
    Tx, TxFuture, TxPool,
    inbox::{TxEventClaim, TxEventFailure, TxEventOutcome, TxInbox, TxInboxError},
};
use ibid_stores::postgres::{MigrateAction, migrate};
use testbed::TestPostgres;

use self::TxEventClaim::{Duplicate, New, TooOld};

const DAY: Duration = Duration::from_secs(24 * 3600);

type TxWork<'t> = TxFuture<'t, Result<(), String>>;

/// What differs between the drivers.
trait InboxDriver: Sized + 'static {
    type Pool: TxPool + Clone + 'static;

    fn pool(url: &str) -> Self::Pool;
    /// Writes an effect, or runs into an error that the caller does not see.
    fn write<'t>(tx: &'t mut Tx<'_, Self::Pool>, sql: String) -> TxWork<'t>;
    /// Claims, has the effects of what is new, and commits or not.
    fn claim(
        pool: &Self::Pool, inbox: &TxInbox, events: &[InboxEvent], commit: bool,
    ) -> impl Future<Output = Result<Vec<TxEventClaim>, TxInboxError>> + Send;
    async fn forget(pool: &Self::Pool, inbox: &TxInbox, event: &InboxEvent) -> bool;
}

struct InboxSqlx;
struct InboxDeadpool;

impl InboxDriver for InboxSqlx {
    type Pool = sqlx::PgPool;

    fn pool(url: &str) -> Self::Pool {
        sqlx::postgres::PgPoolOptions::new().max_connections(12).connect_lazy(url).unwrap()
    }

    fn write<'t>(tx: &'t mut Tx<'_, Self::Pool>, sql: String) -> TxWork<'t> {
        Box::pin(async move {
            let done = sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&mut **tx).await;
            done.map(drop).map_err(|error| error.to_string())
        })
    }

    async fn claim(
        pool: &Self::Pool, inbox: &TxInbox, events: &[InboxEvent], commit: bool,
    ) -> Result<Vec<TxEventClaim>, TxInboxError> {
        let mut tx = pool.begin().await.unwrap();
        let claims = inbox.claim_batch(&mut tx, events).await?;
        for (event, _) in events.iter().zip(&claims).filter(|(_, claim)| **claim == New) {
            Self::write(&mut tx, effect(event)).await.unwrap();
        }
        if commit {
            tx.commit().await.unwrap()
        } else {
            tx.rollback().await.unwrap()
        }
        Ok(claims)
    }

    async fn forget(pool: &Self::Pool, inbox: &TxInbox, event: &InboxEvent) -> bool {
        let mut tx = pool.begin().await.unwrap();
        let was_there = inbox.forget(&mut tx, event).await.unwrap();
        tx.commit().await.unwrap();
        was_there
    }
}

impl InboxDriver for InboxDeadpool {
    type Pool = deadpool_postgres::Pool;

    fn pool(url: &str) -> Self::Pool {
        let manager = deadpool_postgres::Manager::new(url.parse().unwrap(), tokio_postgres::NoTls);
        deadpool_postgres::Pool::builder(manager).max_size(12).build().unwrap()
    }

    fn write<'t>(tx: &'t mut Tx<'_, Self::Pool>, sql: String) -> TxWork<'t> {
        Box::pin(async move { tx.batch_execute(&sql).await.map_err(|error| error.to_string()) })
    }

    async fn claim(
        pool: &Self::Pool, inbox: &TxInbox, events: &[InboxEvent], commit: bool,
    ) -> Result<Vec<TxEventClaim>, TxInboxError> {
        let mut client = pool.get().await.unwrap();
        let mut tx = client.transaction().await.unwrap();
        let claims = inbox.claim_batch(&mut tx, events).await?;
        for (event, _) in events.iter().zip(&claims).filter(|(_, claim)| **claim == New) {
            tx.batch_execute(&effect(event)).await.unwrap();
        }
        if commit {
            tx.commit().await.unwrap()
        } else {
            tx.rollback().await.unwrap()
        }
        Ok(claims)
    }

    async fn forget(pool: &Self::Pool, inbox: &TxInbox, event: &InboxEvent) -> bool {
        let mut client = pool.get().await.unwrap();
        let mut tx = client.transaction().await.unwrap();
        let was_there = inbox.forget(&mut tx, event).await.unwrap();
        tx.commit().await.unwrap();
        was_there
    }
}

macro_rules! on_both {
    ($($case:ident)*) => {
        mod by_sqlx { $(#[tokio::test] async fn $case() { super::$case::<super::InboxSqlx>(&super::InboxDatabase::new().await).await })* }
        mod by_deadpool { $(#[tokio::test] async fn $case() { super::$case::<super::InboxDeadpool>(&super::InboxDatabase::new().await).await })* }
    };
}

on_both! {
    an_event_has_its_effect_once
    what_is_rolled_back_is_new_again
    a_claim_waits_for_another_that_has_not_ended
    two_consumers_are_independent
    a_batch_answers_in_its_order_and_knows_its_own_copies
    overlapping_batches_in_opposite_order_do_not_deadlock
    a_failed_item_does_not_take_its_batch_with_it
    a_batch_that_cannot_be_committed_is_handled_one_by_one
    an_event_that_fails_too_often_is_poisoned_until_it_is_forgotten
    a_handler_that_ignores_a_failed_statement_is_not_believed
    what_is_older_than_the_marks_is_never_new
    what_was_swept_is_too_old_whatever_the_next_inbox_keeps
    a_sweep_under_load_removes_what_has_had_its_time_and_nothing_else
    who_may_not_is_told_what_is_missing
}

/// A database of its own.
struct InboxDatabase {
    server: &'static TestPostgres,
    name: String,
}

impl InboxDatabase {
    async fn new() -> Self {
        let server = TestPostgres::shared();
        let name = server.create_database();
        migrate(&server.url("migrator", &name), MigrateAction::Up).await.unwrap();
        server
            .sql(&name, "CREATE TABLE public.effects (consumer text, id text); GRANT ALL ON public.effects TO PUBLIC");
        Self { server, name }
    }

    fn pool<D: InboxDriver>(&self) -> D::Pool {
        D::pool(&self.server.url("gateway", &self.name))
    }

    fn count(&self, what: &str) -> usize {
        self.server.sql(&self.name, &format!("SELECT count(*) FROM {what}")).parse().unwrap()
    }

    fn effects(&self) -> usize {
        self.count("public.effects")
    }
}

fn event(id: impl ToString) -> InboxEvent {
    InboxEvent::new("mailer", "/orders", &id.to_string()).unwrap()
}

fn events(ids: impl IntoIterator<Item = usize>) -> Vec<InboxEvent> {
    ids.into_iter().map(event).collect()
}

fn effect(event: &InboxEvent) -> String {
    format!("INSERT INTO public.effects VALUES ('{}', '{}')", event.consumer(), event.id())
}

async fn handle<D: InboxDriver>(
    pool: &D::Pool, inbox: &TxInbox, event: &InboxEvent,
) -> Result<TxEventOutcome<String>, TxInboxError> {
    inbox.handle(pool, event, |tx| D::write(tx, effect(event))).await
}

async fn fail<D: InboxDriver>(
    pool: &D::Pool, inbox: &TxInbox, event: &InboxEvent,
) -> Result<TxEventOutcome<String>, TxInboxError> {
    let sql = effect(event);
    let handled = inbox.handle(pool, event, |tx| {
        Box::pin(async move {
            D::write(tx, sql).await?;
            Err("no".to_owned())
        })
    });
    handled.await
}

async fn an_event_has_its_effect_once<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, inbox, one) = (world.pool::<D>(), TxInbox::default(), event(1));
    let done = handle::<D>(&pool, &inbox, &one).await;
    assert!(matches!(done, Ok(TxEventOutcome::Done)), "{done:?}");
    assert_eq!(inbox.reply(&done), BrokerReply::Acknowledge);
    let again = handle::<D>(&pool, &inbox, &one).await;
    assert!(matches!(again, Ok(TxEventOutcome::Duplicate)), "{again:?}");
    assert_eq!(inbox.reply(&again), BrokerReply::Acknowledge, "or the broker sends it for ever");
    let all = join_all((0..64).map(|nth| handle_nth::<D>(&pool, &inbox, nth % 4 + 10))).await;
    assert_eq!(all.iter().filter(|handled| matches!(handled, Ok(TxEventOutcome::Done))).count(), 4, "{all:?}");
    assert_eq!(world.effects(), 5);
}

async fn handle_nth<D: InboxDriver>(
    pool: &D::Pool, inbox: &TxInbox, nth: usize,
) -> Result<TxEventOutcome<String>, TxInboxError> {
    handle::<D>(pool, inbox, &event(nth)).await
}

async fn what_is_rolled_back_is_new_again<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, inbox, one) = (world.pool::<D>(), TxInbox::default(), [event(1)]);
    for _ in 0..3 {
        assert_eq!(D::claim(&pool, &inbox, &one, false).await.unwrap(), [New]);
    }
    assert_eq!((world.effects(), world.count("ibid.processed_events")), (0, 0));
    assert_eq!(D::claim(&pool, &inbox, &one, true).await.unwrap(), [New]);
    assert_eq!(D::claim(&pool, &inbox, &one, true).await.unwrap(), [Duplicate]);
    assert_eq!(world.effects(), 1);
}

async fn a_claim_waits_for_another_that_has_not_ended<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, inbox) = (world.pool::<D>(), TxInbox::default());
    for (commits, then) in [(true, Duplicate), (false, New)] {
        let one = event(if commits { "commits" } else { "does not" });
        let (go, wait) = tokio::sync::oneshot::channel::<()>();
        let first = {
            let (pool, inbox, one) = (pool.clone(), inbox.clone(), one.clone());
            tokio::spawn(async move {
                let handled = inbox.handle(&pool, &one, |_tx| {
                    Box::pin(async move {
                        wait.await.unwrap();
                        if commits { Ok(()) } else { Err("no".to_owned()) }
                    })
                });
                handled.await
            })
        };
        let waiting =
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
        until(|| {
            world.count("pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'") == 1
        })
        .await;
        let second = {
            let (pool, inbox, one) = (pool.clone(), inbox.clone(), one.clone());
            tokio::spawn(async move { D::claim(&pool, &inbox, &[one], true).await.unwrap() })
        };
        until(|| world.server.sql(&world.name, waiting) == "1").await;
        go.send(()).unwrap();
        drop(first.await.unwrap().unwrap());
        assert_eq!(second.await.unwrap(), [then]);
    }
}

async fn until(is_so: impl Fn() -> bool) {
    for _ in 0..600 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("waited in vain");
}

async fn two_consumers_are_independent<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, inbox) = (world.pool::<D>(), TxInbox::default());
    let other = InboxEvent::new("billing", "/orders", "1").unwrap();
    for one in [&event(1), &other, &InboxEvent::new("mailer", "/refunds", "1").unwrap()] {
        assert!(matches!(handle::<D>(&pool, &inbox, one).await, Ok(TxEventOutcome::Done)), "{one}");
        assert!(matches!(handle::<D>(&pool, &inbox, one).await, Ok(TxEventOutcome::Duplicate)), "{one}");
    }
    assert!(D::forget(&pool, &inbox, &other).await);
    assert!(matches!(handle::<D>(&pool, &inbox, &event(1)).await, Ok(TxEventOutcome::Duplicate)));
    assert!(matches!(handle::<D>(&pool, &inbox, &other).await, Ok(TxEventOutcome::Done)));
}

async fn a_batch_answers_in_its_order_and_knows_its_own_copies<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, inbox) = (world.pool::<D>(), TxInbox::default());
    assert_eq!(D::claim(&pool, &inbox, &events([3, 5]), true).await.unwrap(), [New, New]);
    let claims = D::claim(&pool, &inbox, &events([9, 5, 1, 9, 3, 1, 2]), true).await.unwrap();
    assert_eq!(claims, [New, Duplicate, New, Duplicate, Duplicate, Duplicate, New]);
    assert_eq!(world.effects(), 5);
    assert_eq!(D::claim(&pool, &inbox, &[], true).await.unwrap(), []);
    let old = event(7).with_time(SystemTime::now() - 8 * DAY);
    let claims = D::claim(&pool, &inbox, &[old.clone(), old.clone(), event(8)], true).await.unwrap();
    assert_eq!(claims, [TooOld, TooOld, New]);
    let many = events(0..ibid_postgres_tx::inbox::MAX_BATCH + 1);
    let refused = D::claim(&pool, &inbox, &many, true).await.unwrap_err();
    assert!(refused.to_string().contains("10000"), "{refused}");
}

async fn overlapping_batches_in_opposite_order_do_not_deadlock<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, inbox) = (world.pool::<D>(), TxInbox::default());
    for round in 0..6 {
        let up: Vec<usize> = (0..600).map(|nth| round * 1000 + nth).collect();
        let mut down = up.clone();
        down.reverse();
        let mut inside_out = up.clone();
        inside_out.rotate_left(300);
        let (up, down, inside_out) = (events(up), events(down), events(inside_out));
        let (a, b, c) = tokio::join!(
            D::claim(&pool, &inbox, &up, true),
            D::claim(&pool, &inbox, &down, true),
            D::claim(&pool, &inbox, &inside_out, true)
        );
        let new = [a, b, c].into_iter().flat_map(|claims| claims.expect("no deadlock")).filter(|claim| *claim == New);
        assert_eq!(new.count(), 600);
    }
    assert_eq!(world.effects(), 3600);
}

async fn a_failed_item_does_not_take_its_batch_with_it<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, inbox, all) = (world.pool::<D>(), TxInbox::default(), events(0..6));
    assert_eq!(D::claim(&pool, &inbox, &all[..1], true).await.unwrap(), [New]);
    let batch = async |fails: bool| {
        let (all, six) = (all.clone(), all.clone());
        let handled = inbox.handle_batch(&pool, &six, move |tx, nth| {
            let sql = effect(&all[nth]);
            Box::pin(async move {
                D::write(&mut *tx, sql).await?;
                match nth {
                    2 if fails => Err("no".to_owned()),
                    // A statement that fails, and a handler that does not care.
                    4 if fails => {
                        let _ = D::write(tx, "INSERT INTO public.nowhere VALUES (1)".to_owned()).await;
                        Ok(())
                    }
                    _ => Ok(()),
                }
            })
        });
        handled.await
    };
    let handled = batch(true).await.unwrap();
    assert!(
        matches!(
            &handled[..],
            [
                TxEventOutcome::Duplicate,
                TxEventOutcome::Done,
                TxEventOutcome::Failed { why: TxEventFailure::Handler(_), attempts: 1, poisoned: false },
                TxEventOutcome::Done,
                TxEventOutcome::Failed { why: TxEventFailure::Spoilt, attempts: 1, poisoned: false },
                TxEventOutcome::Done
            ]
        ),
        "{handled:?}"
    );
    assert_eq!((world.effects(), world.count("ibid.processed_events")), (4, 4));
    let handled = batch(false).await.unwrap();
    let again: Vec<usize> =
        handled.iter().enumerate().filter(|(_, one)| matches!(one, TxEventOutcome::Done)).map(|(nth, _)| nth).collect();
    assert_eq!(again, [2, 4], "{handled:?}");
    assert_eq!(world.effects(), 6);
}

async fn a_batch_that_cannot_be_committed_is_handled_one_by_one<D: InboxDriver>(world: &InboxDatabase) {
    let unique = "ALTER TABLE public.effects ADD UNIQUE (id) DEFERRABLE INITIALLY DEFERRED; INSERT INTO public.effects VALUES ('x', '2')";
    world.server.sql(&world.name, unique);
    let (pool, inbox, all) = (world.pool::<D>(), TxInbox::default(), events(0..4));
    let handled = inbox.handle_batch(&pool, &all, |tx, nth| D::write(tx, effect(&event(nth)))).await.unwrap();
    assert!(
        matches!(
            &handled[..],
            [
                TxEventOutcome::Done,
                TxEventOutcome::Done,
                TxEventOutcome::Failed { why: TxEventFailure::CommitFailed(_), attempts: 1, .. },
                TxEventOutcome::Done
            ]
        ),
        "{handled:?}"
    );
    assert_eq!((world.effects(), world.count("ibid.processed_events")), (4, 3));
}

async fn an_event_that_fails_too_often_is_poisoned_until_it_is_forgotten<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, inbox, one) = (world.pool::<D>(), TxInbox::default().poison_after(3), event(1));
    for attempt in 1..=3 {
        let failed = fail::<D>(&pool, &inbox, &one).await;
        let Ok(TxEventOutcome::Failed { attempts, poisoned, .. }) = &failed else { panic!("{failed:?}") };
        assert_eq!((*attempts, *poisoned), (attempt, attempt == 3));
        assert_eq!(matches!(inbox.reply(&failed), BrokerReply::DeadLetter { .. }), attempt == 3);
    }
    for _ in 0..2 {
        let dead = handle::<D>(&pool, &inbox, &one).await;
        assert!(matches!(&dead, Ok(TxEventOutcome::Poisoned { attempts: 3, error }) if error == "no"), "{dead:?}");
        let BrokerReply::DeadLetter { why } = inbox.reply(&dead) else { panic!() };
        assert!(why.contains("3 times"), "{why}");
    }
    assert_eq!(world.effects(), 0);
    assert!(D::forget(&pool, &inbox, &one).await, "its failures are forgotten");
    assert!(!D::forget(&pool, &inbox, &one).await, "nothing is left");
    assert!(matches!(fail::<D>(&pool, &inbox, &one).await, Ok(TxEventOutcome::Failed { attempts: 1, .. })));
    assert!(matches!(handle::<D>(&pool, &inbox, &one).await, Ok(TxEventOutcome::Done)));
    assert!(matches!(handle::<D>(&pool, &inbox, &one).await, Ok(TxEventOutcome::Duplicate)));
    // A handled one too can be sent again on purpose.
    assert!(D::forget(&pool, &inbox, &one).await);
    assert!(matches!(handle::<D>(&pool, &inbox, &one).await, Ok(TxEventOutcome::Done)));
    assert_eq!(world.effects(), 2);
}

async fn a_handler_that_ignores_a_failed_statement_is_not_believed<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, inbox, one) = (world.pool::<D>(), TxInbox::default(), event(1));
    let spoilt = inbox.handle(&pool, &one, |tx| {
        Box::pin(async move {
            D::write(&mut *tx, effect(&event(1))).await?;
            let _ = D::write(tx, "SELECT 1/0".to_owned()).await;
            Ok(())
        })
    });
    let spoilt: Result<TxEventOutcome<String>, _> = spoilt.await;
    assert!(
        matches!(spoilt, Ok(TxEventOutcome::Failed { why: TxEventFailure::Spoilt, attempts: 1, .. })),
        "{spoilt:?}"
    );
    assert!(matches!(inbox.reply(&spoilt), BrokerReply::Redeliver { .. }));
    assert!(matches!(handle::<D>(&pool, &inbox, &one).await, Ok(TxEventOutcome::Done)));
    assert_eq!(world.effects(), 1);
}

async fn what_is_older_than_the_marks_is_never_new<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, inbox) = (world.pool::<D>(), TxInbox::default().ttl(DAY));
    let old = event(1).with_time(SystemTime::now() - 2 * DAY);
    let late = handle::<D>(&pool, &inbox, &old).await;
    assert!(matches!(late, Ok(TxEventOutcome::TooOld)), "{late:?}");
    assert!(matches!(inbox.reply(&late), BrokerReply::DeadLetter { .. }));
    // One that is marked is a duplicate, however old; one of yesterday is new; so is one from a clock that is ahead.
    assert!(matches!(handle::<D>(&pool, &inbox, &event(2)).await, Ok(TxEventOutcome::Done)));
    let again = event(2).with_time(SystemTime::UNIX_EPOCH);
    assert!(matches!(handle::<D>(&pool, &inbox, &again).await, Ok(TxEventOutcome::Duplicate)));
    for (nth, at) in [(3, SystemTime::now() - DAY / 2), (4, SystemTime::now() + 400 * DAY)] {
        assert!(matches!(handle::<D>(&pool, &inbox, &event(nth).with_time(at)).await, Ok(TxEventOutcome::Done)));
    }
    // Somebody who knows better says so.
    assert!(!D::forget(&pool, &inbox, &old).await);
    assert!(matches!(handle::<D>(&pool, &inbox, &old).await, Ok(TxEventOutcome::Done)));
    assert!(matches!(handle::<D>(&pool, &inbox, &old).await, Ok(TxEventOutcome::Duplicate)));
    assert_eq!(world.effects(), 4);
}

async fn what_was_swept_is_too_old_whatever_the_next_inbox_keeps<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, short) = (world.pool::<D>(), TxInbox::default().ttl(Duration::from_millis(50)));
    let before = SystemTime::now();
    // Its source's clock is a year ahead: that must not make all others too old.
    let ahead = event("ahead").with_time(before + 365 * DAY);
    let one = event("one");
    assert_eq!(D::claim(&pool, &short, &[ahead, one.clone()], true).await.unwrap(), [New, New]);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let swept = short.sweep(&pool, 100).await.unwrap();
    assert_eq!((swept.removed, swept.more), (2, false));
    let long = TxInbox::default();
    assert_eq!(D::claim(&pool, &long, &[one.with_time(before)], true).await.unwrap(), [TooOld]);
    let other = InboxEvent::new("billing", "/orders", "one").unwrap().with_time(before);
    assert_eq!(D::claim(&pool, &long, &[other], true).await.unwrap(), [New], "of this consumer nothing was removed");
    let later = event("later").with_time(SystemTime::now() + Duration::from_secs(1));
    assert_eq!(D::claim(&pool, &long, &[later], true).await.unwrap(), [New]);
}

async fn a_sweep_under_load_removes_what_has_had_its_time_and_nothing_else<D: InboxDriver>(world: &InboxDatabase) {
    let (pool, short, long) = (world.pool::<D>(), TxInbox::default().ttl(Duration::from_millis(1)), TxInbox::default());
    let load = async {
        for round in 0..20 {
            let (brief, lasting) = (events((0..100).map(|nth| round * 100 + nth)), events([100_000 + round]));
            assert!(D::claim(&pool, &short, &brief, true).await.unwrap().iter().all(|claim| *claim == New));
            assert_eq!(D::claim(&pool, &long, &lasting, true).await.unwrap(), [New]);
        }
    };
    let sweeper = async || {
        let mut removed = 0;
        for _ in 0..400 {
            let swept = short.sweep(&pool, 30).await.unwrap();
            assert!(swept.removed <= 30, "bounded");
            removed += swept.removed;
        }
        removed
    };
    let ((), one, two) = tokio::join!(load, sweeper(), sweeper());
    let mut removed = one + two;
    loop {
        let swept = short.sweep(&pool, 500).await.unwrap();
        removed += swept.removed;
        if !swept.more {
            break;
        }
    }
    assert_eq!((removed, world.count("ibid.processed_events")), (2000, 20));
    let lasting = events((0..20).map(|round| 100_000 + round));
    assert!(D::claim(&pool, &long, &lasting, true).await.unwrap().iter().all(|claim| *claim == Duplicate));
}

async fn who_may_not_is_told_what_is_missing<D: InboxDriver>(world: &InboxDatabase) {
    let inbox = TxInbox::default();
    let nobody = D::pool(&world.server.url("alice", &world.name));
    let refused = D::claim(&nobody, &inbox, &[event(1)], true).await.unwrap_err();
    assert!(refused.to_string().contains("ibid_service"), "{refused}");
    let bare = D::pool(&world.server.url("postgres", &world.server.create_database()));
    let refused = D::claim(&bare, &inbox, &[event(1)], true).await.unwrap_err();
    assert!(refused.to_string().contains("ibid migrate"), "{refused}");
}

#[tokio::test]
async fn claiming_one_by_one_in_opposite_order_can_wait_in_a_circle_and_says_so() {
    let world = InboxDatabase::new().await;
    let (pool, inbox) = (world.pool::<InboxSqlx>(), TxInbox::default());
    let (mut one, mut two) = (pool.begin().await.unwrap(), pool.begin().await.unwrap());
    assert_eq!(inbox.claim(&mut one, &event("a")).await.unwrap(), New);
    assert_eq!(inbox.claim(&mut two, &event("b")).await.unwrap(), New);
    let (a, b) = (event("a"), event("b"));
    let (first, second) = tokio::join!(
        async {
            let found = inbox.claim(&mut one, &b).await;
            one.rollback().await.unwrap();
            found
        },
        async {
            let found = inbox.claim(&mut two, &a).await;
            two.rollback().await.unwrap();
            found
        }
    );
    let circle = first.err().or(second.err()).expect("one of them");
    assert!(circle.is_transient() && circle.sqlstate() == Some("40P01"), "{circle}");
}

#[tokio::test]
async fn other_languages_have_the_same_inbox() {
    let world = InboxDatabase::new().await;
    let ask = |sql: &str| world.server.sql_as("gateway", &world.name, sql);
    assert_eq!(ask("SELECT ibid.claim_event('mailer', '/orders', '1')").unwrap(), "new");
    assert_eq!(ask("SELECT ibid.claim_event('mailer', '/orders', '1')").unwrap(), "duplicate");
    assert_eq!(ask("SELECT ibid.claim_event('mailer', '/orders', '2', now() - interval '8 days')").unwrap(), "too old");
    for failures in 1..=5 {
        let failed = "SELECT ibid.event_failed('mailer', '/orders', '3', 'no')";
        assert_eq!(ask(failed).unwrap(), failures.to_string());
    }
    assert_eq!(ask("SELECT ibid.claim_event('mailer', '/orders', '3')").unwrap(), "poisoned");
    assert_eq!(ask("SELECT ibid.forget_event('mailer', '/orders', '3')").unwrap(), "t");
    assert_eq!(ask("SELECT ibid.forget_event('mailer', '/orders', 'never')").unwrap(), "f");
    assert_eq!(ask("SELECT ibid.claim_event('mailer', '/orders', '3')").unwrap(), "new");
    assert!(ask("SELECT ibid.claim_event('mailer', NULL, '3')").unwrap_err().contains("its source"));
    // The same table as that of everybody else.
    let claims =
        InboxSqlx::claim(&world.pool::<InboxSqlx>(), &TxInbox::default(), &events([1, 9]), true).await.unwrap();
    assert_eq!(claims, [Duplicate, New]);
}

#[tokio::test]
async fn the_stores_own_sweep_removes_events_too() {
    let world = InboxDatabase::new().await;
    let (pool, short) = (world.pool::<InboxSqlx>(), TxInbox::default().ttl(Duration::from_millis(1)));
    assert_eq!(InboxSqlx::claim(&pool, &short, &events([1, 2, 3]), true).await.unwrap(), [New, New, New]);
    tokio::time::sleep(Duration::from_millis(20)).await;
    let swept =
        world.server.sql_as("gateway", &world.name, "SELECT removed, lapsed, more FROM ibid._sweep_all(2)").unwrap();
    assert_eq!(swept, "2|0|t");
    let swept =
        world.server.sql_as("gateway", &world.name, "SELECT removed, lapsed, more FROM ibid._sweep_all(2)").unwrap();
    assert_eq!(swept, "1|0|f");
}

#[tokio::test]
async fn a_transaction_that_takes_too_long_is_given_up_with_its_connection() {
    let world = InboxDatabase::new().await;
    let (pool, inbox) = (world.pool::<InboxSqlx>(), TxInbox::default().transaction_timeout(Duration::from_millis(500)));
    let one = event(1);
    let endless = inbox.handle(&pool, &one, |tx| InboxSqlx::write(tx, "SELECT pg_sleep(600)".to_owned()));
    let given_up = endless.await.unwrap_err();
    assert!(given_up.may_have_committed(), "{given_up}");
    assert_eq!(inbox.reply::<String>(&Err(given_up)), BrokerReply::Redeliver { after: Duration::from_secs(1) });
    // Nobody waits for it: what it had marked is undone once the server notices, and the next connection is another.
    world.server.sql(&world.name, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(600)%' AND pid <> pg_backend_pid()");
    let patient = TxInbox::default();
    assert!(matches!(handle::<InboxSqlx>(&pool, &patient, &one).await, Ok(TxEventOutcome::Done)));
    assert_eq!(world.effects(), 1);
}
