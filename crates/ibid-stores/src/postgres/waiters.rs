//! Waits for holders: one task polls for all waiters.
//!
//! A waiter uses no connection: it is an entry in a table. While there are waiters, one task queries all their rows in
//! one statement, which also marks the rows, so that their settlement sends a NOTIFY. Claims without waiters send none.
//! The task also polls at jittered intervals, and when a lease is due to expire. Behind a pooler there is no LISTEN, so
//! it polls more often.
//!
//! With a local cache, the listening connection stays open and receives forgets; behind a pooler, the task polls a
//! counter instead. Any gap flushes the cache.

use std::{collections::HashMap, future::poll_fn};

use tokio::{
    sync::{mpsc, watch},
    time::sleep_until,
};
use tokio_postgres::AsyncMessage;

use super::*;

/// Poll interval while notifications are received.
const POLL_INTERVAL_LISTENING: Duration = Duration::from_secs(1);
/// Poll interval without notifications.
const POLL_INTERVAL: Duration = Duration::from_millis(60);
/// Maximum number of rows queried in one statement.
const MAX_POLLED_ROWS: usize = 256;
/// Consecutive failures after which waiters are woken; their own claims report the error.
const MAX_POLL_FAILURES: u32 = 3;
/// Longest lease that a poll is scheduled by, in microseconds.
const MAX_LEASE_US: i64 = 1 << 40;
/// How long the listening connection outlives the last waiter.
const LISTENER_LINGER: Duration = Duration::from_secs(5);

pub(super) struct PostgresWaiters {
    pool: Arc<PostgresPool>,
    pub(super) notifications: ServerNotifications,
    /// Tells the poller of each waited for holder.
    awaited: mpsc::UnboundedSender<AwaitedHolder>,
    /// Makes the poller poll all holders.
    poll_all: Notify,
    has_waiters: watch::Sender<bool>,
    /// Whether notifications of marked rows are received.
    is_listening: watch::Sender<bool>,
}

type AwaitedHolder = (Address, Fence);

impl PostgresWaiters {
    /// Creates the table of waiters, and the holders that [`run_poller`](Self::run_poller) receives.
    pub(super) fn new(
        pool: Arc<PostgresPool>, notifications: ServerNotifications,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<AwaitedHolder>) {
        let (awaited, holders) = mpsc::unbounded_channel();
        let waiters = Self {
            pool,
            notifications,
            awaited,
            poll_all: Notify::new(),
            has_waiters: watch::Sender::new(false),
            is_listening: watch::Sender::new(false),
        };
        (Arc::new(waiters), holders)
    }

    /// Waits until `seen` no longer runs, or for `limit`.
    pub(super) async fn wait(&self, at: &Address, seen: Fence, limit: Duration) -> Result<(), StoreError> {
        // The poller checks, and wakes.
        let check = || async {
            let _ = self.awaited.send((*at, seen));
            Ok(Some(Duration::MAX))
        };
        self.notifications.waits.wait(at, seen, limit, check).await
    }

    /// Polls for all waiters, forever.
    pub(super) async fn run_poller(self: Arc<Self>, mut awaited: mpsc::UnboundedReceiver<AwaitedHolder>) {
        let mut next_polls: HashMap<AwaitedHolder, Instant> = HashMap::new();
        let mut failures = 0;
        loop {
            next_polls.retain(|(at, seen), _| self.notifications.waits.is_awaited(at, *seen));
            let has_waiters = !next_polls.is_empty();
            self.has_waiters.send_if_modified(|had| mem::replace(had, has_waiters) != has_waiters);
            let next = next_polls.values().min().copied();
            tokio::select! {
                holder = awaited.recv() => {
                    let more = std::iter::from_fn(|| awaited.try_recv().ok());
                    for holder in holder.into_iter().chain(more) {
                        next_polls.entry(holder).or_insert_with(Instant::now);
                    }
                }
                () = self.poll_all.notified() => next_polls.values_mut().for_each(|due| *due = Instant::now()),
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            }
            let now = Instant::now();
            let interval = if *self.is_listening.borrow() { POLL_INTERVAL_LISTENING } else { POLL_INTERVAL };
            let again = now + with_jitter(interval);
            let due = next_polls.iter_mut().filter(|(_, due)| **due <= now).take(MAX_POLLED_ROWS);
            let due: Vec<AwaitedHolder> = due.map(|(holder, due)| (*due = again, *holder).1).collect();
            if due.is_empty() {
                continue;
            }
            match self.poll_holders(&due).await {
                Ok(running) => {
                    failures = 0;
                    for (holder, until) in running {
                        next_polls.entry(holder).and_modify(|due| *due = until.min(*due));
                    }
                }
                Err(_) => {
                    failures += 1;
                    if failures >= MAX_POLL_FAILURES {
                        due.iter().for_each(|(at, seen)| self.notifications.waits.wake(at, *seen));
                    }
                }
            }
        }
    }

    /// Wakes the waiters of holders that no longer run. Returns the others, and when to poll them at the latest.
    async fn poll_holders(&self, due: &[AwaitedHolder]) -> Result<Vec<(AwaitedHolder, Instant)>, CallFailure> {
        let addresses: Vec<&[u8]> = due.iter().map(|(at, _)| &at.0[..]).collect();
        let seen: Vec<i64> = due.iter().map(|(_, seen)| rows::fence_param(*seen)).collect();
        let watch = async |mark: bool| {
            let params: [&(dyn ToSql + Sync); 3] = [&addresses, &seen, &mark];
            self.pool.call(Statement::Watch, &params, self.pool.deadline()).await
        };
        let (mark, mut latest) = (*self.is_listening.borrow(), MAX_LEASE_US);
        let sent = match watch(mark).await {
            // A row is locked and cannot be marked now: read it without marking, and poll again soon.
            Err(failed) if failed.is_row_conflict => {
                latest = with_jitter(POLL_INTERVAL).as_micros() as i64;
                watch(false).await?
            }
            sent => sent?,
        };
        let mut running = Vec::new();
        for row in sent {
            let (nth, runs): (Result<i32, _>, Result<Option<i64>, _>) = (rows::column(&row, 0), rows::column(&row, 1));
            let Some(holder) = nth.ok().and_then(|nth| due.get(usize::try_from(nth - 1).ok()?)) else { continue };
            match runs.ok().flatten() {
                None => self.notifications.waits.wake(&holder.0, holder.1),
                Some(us) => {
                    running.push((*holder, Instant::now() + Duration::from_micros(us.clamp(1000, latest) as u64)));
                }
            }
        }
        Ok(running)
    }

    /// Keeps a listening connection open while it is needed, forever.
    pub(super) async fn run_listener(self: Arc<Self>) {
        if self.pool.url.unnamed_statements {
            return self.poll_forgets().await;
        }
        let mut pause = POLL_INTERVAL;
        loop {
            if !self.notifications.has_cache() {
                let mut wanted = self.has_waiters.subscribe();
                drop(wanted.wait_for(|wanted| *wanted).await);
            }
            let began = Instant::now();
            let was_heard = self.listen_once().await;
            self.is_listening.send_replace(false);
            self.notifications.flush_cache();
            // Marked rows may have been settled without a notification.
            self.poll_all.notify_one();
            pause = if was_heard && began.elapsed() > POLL_INTERVAL_LISTENING {
                POLL_INTERVAL
            } else {
                (pause * 2).min(POLL_INTERVAL_LISTENING * 2)
            };
            if *self.has_waiters.borrow() || self.notifications.has_cache() {
                sleep(with_jitter(pause)).await;
            }
        }
    }

    /// Listens on one connection until it ends. Returns whether listening started.
    async fn listen_once(&self) -> bool {
        let pool = &self.pool;
        let connecting = async { pool.url.config.connect(tls::connector(&pool.certificates).await).await };
        let Ok(Ok((client, mut connection))) = timeout(pool.connect_timeout(), connecting).await else { return false };
        let listening = async {
            let listened =
                timeout(pool.connect_timeout(), client.batch_execute("LISTEN ibid_wake; LISTEN ibid_forget"));
            if !matches!(listened.await, Ok(Ok(()))) {
                return false;
            }
            // From here on nothing is missed; earlier forgets may have been.
            self.notifications.flush_cache();
            self.is_listening.send_replace(true);
            self.poll_all.notify_one();
            self.wait_until_idle(&client).await;
            true
        };
        let hearing = async {
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(said) = message {
                    match said.channel() {
                        "ibid_wake" => self.notifications.on_wake(said.payload()),
                        "ibid_forget" => self.notifications.on_forget(said.payload()),
                        _ => {}
                    }
                }
            }
        };
        tokio::select! {
            came_about = listening => came_about,
            () = hearing => *self.is_listening.borrow(),
        }
    }

    /// Returns when there has been no waiter for a while, or the connection no longer responds.
    async fn wait_until_idle(&self, client: &tokio_postgres::Client) {
        loop {
            sleep(LISTENER_LINGER).await;
            if !self.notifications.has_cache() && !*self.has_waiters.borrow() {
                return;
            }
            // A vanished peer sends nothing, so probe it.
            if !matches!(timeout(self.pool.connect_timeout(), client.batch_execute("")).await, Ok(Ok(()))) {
                return;
            }
        }
    }

    /// Polls the forget counter. It shows that something was forgotten, not what.
    async fn poll_forgets(&self) {
        let mut last = None;
        while self.notifications.has_cache() {
            let asked = self.pool.read("SELECT m.forgets FROM ibid.meta m", &[], self.pool.timeout).await;
            let now = asked.ok().and_then(|found| rows::column::<i64>(found.first()?, 0).ok());
            if now.is_none() || now != last {
                self.notifications.flush_cache();
            }
            last = now;
            sleep(with_jitter(POLL_INTERVAL_LISTENING)).await;
        }
    }
}
