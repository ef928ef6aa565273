//! Waits for holders: one task polls for all waiters.
//!
//! A waiter uses no connection: it is an entry in a table. While there are waiters, one task queries all their rows in
//! one statement, which also marks the rows, so that their settlement sends a NOTIFY. Claims without waiters send none.
//! The task also polls at jittered intervals, and when a lease is due to expire. Behind a pooler there is no LISTEN, so
//! it polls more often.
//!
//! With a local cache, the listening connection stays open and receives forgets; behind a pooler, the task polls a
//! counter instead. Any gap flushes the cache.

use std::{collections::HashMap, future::poll_fn, sync::Arc, time::Duration};

use ibid::store::{Address, Fence};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_postgres::{AsyncMessage, Row, types::ToSql};

use super::{
    pool::{CallFailure, PostgresPool},
    rows,
    statements::Statement,
    tls::PostgresTlsConnector,
};
use crate::{breaker::with_jitter, local_cache::AnswerCache};

/// Poll interval while notifications are received.
const POLL_INTERVAL_LISTENING: Duration = Duration::from_secs(1);
/// Poll interval without notifications.
const POLL_INTERVAL: Duration = Duration::from_millis(60);
/// Maximum number of rows queried in one statement.
const MAX_POLLED_ROWS: usize = 256;
/// Consecutive failures after which waiters are woken; their own claims report the error.
const MAX_POLL_FAILURES: u32 = 3;
/// How long the listening connection outlives the last waiter.
const LISTENER_LINGER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct PostgresWaiters {
    pool: Arc<PostgresPool>,
    answer_cache: Option<AnswerCache>,
    by_holder: Mutex<HashMap<(Address, Fence), HolderWaiters>>,
    /// Notified of a new waiter or a received notification.
    changed: Notify,
    /// Whether there are waiters. Changed under the table's lock.
    has_waiters: watch::Sender<bool>,
    /// Whether notifications of marked rows are received.
    is_listening: watch::Sender<bool>,
}

/// All waiters of one holder.
#[derive(Debug)]
struct HolderWaiters {
    waiters: Vec<oneshot::Sender<()>>,
    next_poll: Instant,
}

impl PostgresWaiters {
    pub(super) fn new(pool: Arc<PostgresPool>, copies: Option<AnswerCache>) -> Arc<Self> {
        Arc::new(Self {
            pool,
            answer_cache: copies,
            by_holder: Mutex::default(),
            changed: Notify::new(),
            has_waiters: watch::Sender::new(false),
            is_listening: watch::Sender::new(false),
        })
    }

    /// Waits until `seen` no longer runs, or for `limit`.
    pub(super) async fn wait(&self, at: &Address, seen: Fence, limit: Duration) {
        let (wake, woken) = oneshot::channel();
        {
            let mut table = self.by_holder.lock();
            let seat = table
                .entry((*at, seen))
                .or_insert_with(|| HolderWaiters { waiters: Vec::new(), next_poll: Instant::now() });
            // Remove waiters that gave up, so that the list does not grow forever.
            if seat.waiters.len() == seat.waiters.capacity() {
                seat.waiters.retain(|waiter| !waiter.is_closed());
            }
            seat.waiters.push(wake);
            self.has_waiters.send_replace(true);
        }
        self.changed.notify_one();
        drop(timeout(limit.min(Duration::from_secs(1 << 32)), woken).await);
    }

    /// Polls for all waiters, forever.
    pub(super) async fn run_poller(self: Arc<Self>) {
        let mut failures = 0;
        loop {
            match self.next_poll() {
                None => self.changed.notified().await,
                Some(due) => tokio::select! {
                    () = sleep_until(due) => {}
                    () = self.changed.notified() => {}
                },
            }
            let due = self.take_due();
            if due.is_empty() {
                continue;
            }
            match self.poll_holders(&due).await {
                Ok(()) => failures = 0,
                Err(()) => {
                    failures += 1;
                    if failures >= MAX_POLL_FAILURES {
                        due.iter().for_each(|(at, seen)| self.wake(at, *seen));
                    }
                }
            }
        }
    }

    fn next_poll(&self) -> Option<Instant> {
        let mut table = self.by_holder.lock();
        table.retain(|_, seat| seat.waiters.iter().any(|waiter| !waiter.is_closed()));
        self.has_waiters.send_replace(!table.is_empty());
        table.values().map(|seat| seat.next_poll).min()
    }

    /// Returns the holders to poll now, and schedules their next poll.
    fn take_due(&self) -> Vec<(Address, Fence)> {
        let now = Instant::now();
        let again = now + with_jitter(self.poll_interval());
        let mut due = Vec::new();
        for (at, seat) in
            self.by_holder.lock().iter_mut().filter(|(_, seat)| seat.next_poll <= now).take(MAX_POLLED_ROWS)
        {
            seat.next_poll = again;
            due.push(*at);
        }
        due
    }

    fn poll_interval(&self) -> Duration {
        if *self.is_listening.borrow() { POLL_INTERVAL_LISTENING } else { POLL_INTERVAL }
    }

    async fn poll_holders(&self, due: &[(Address, Fence)]) -> Result<(), ()> {
        let addresses: Vec<&[u8]> = due.iter().map(|(at, _)| &at.0[..]).collect();
        let seen: Vec<i64> = due.iter().map(|(_, seen)| rows::fence_param(*seen)).collect();
        let mark = *self.is_listening.borrow();
        let sent = match self.watch_rows(&addresses, &seen, mark).await {
            // A row is locked and cannot be marked now: read it without marking, and poll again soon.
            Err(failed) if failed.is_row_conflict => {
                self.reschedule(due, Instant::now() + with_jitter(POLL_INTERVAL));
                self.watch_rows(&addresses, &seen, false).await
            }
            sent => sent,
        };
        for row in sent.map_err(|_| ())? {
            let (nth, runs): (Result<i32, _>, Result<Option<i64>, _>) = (rows::column(&row, 0), rows::column(&row, 1));
            let nth = nth.ok().and_then(|nth| due.get(usize::try_from(nth - 1).ok()?));
            let Some((at, seen)) = nth else { continue };
            match runs.ok().flatten() {
                None => self.wake(at, *seen),
                Some(us) => {
                    let lapses = Instant::now() + Duration::from_micros(us.clamp(1000, 1 << 40) as u64);
                    if let Some(seat) = self.by_holder.lock().get_mut(&(*at, *seen)) {
                        seat.next_poll = seat.next_poll.min(lapses);
                    }
                }
            }
        }
        Ok(())
    }

    async fn watch_rows(&self, addresses: &[&[u8]], seen: &[i64], mark: bool) -> Result<Vec<Row>, CallFailure> {
        let params: [&(dyn ToSql + Sync); 3] = [&addresses, &seen, &mark];
        self.pool.call(Statement::Watch, &params, self.pool.deadline()).await
    }

    fn reschedule(&self, to: &[(Address, Fence)], due: Instant) {
        let mut table = self.by_holder.lock();
        for at in to {
            if let Some(seat) = table.get_mut(at) {
                seat.next_poll = due;
            }
        }
    }

    fn wake(&self, at: &Address, seen: Fence) {
        if let Some(seat) = self.by_holder.lock().remove(&(*at, seen)) {
            for waiter in seat.waiters {
                let _ = waiter.send(());
            }
        }
    }

    /// Keeps a listening connection open while it is needed, forever.
    pub(super) async fn run_listener(self: Arc<Self>) {
        if self.pool.url.unnamed_statements {
            return self.poll_forgets().await;
        }
        let mut pause = POLL_INTERVAL;
        loop {
            if self.answer_cache.is_none() {
                let mut wanted = self.has_waiters.subscribe();
                drop(wanted.wait_for(|wanted| *wanted).await);
            }
            let began = Instant::now();
            let was_heard = self.listen_once().await;
            self.is_listening.send_replace(false);
            if let Some(copies) = &self.answer_cache {
                copies.flush();
            }
            // Marked rows may have been settled without a notification.
            self.poll_all_now();
            pause = if was_heard && began.elapsed() > POLL_INTERVAL_LISTENING {
                POLL_INTERVAL
            } else {
                (pause * 2).min(POLL_INTERVAL_LISTENING * 2)
            };
            if *self.has_waiters.borrow() || self.answer_cache.is_some() {
                sleep(with_jitter(pause)).await;
            }
        }
    }

    /// Listens on one connection until it ends. Returns whether listening started.
    async fn listen_once(&self) -> bool {
        let pool = &self.pool;
        let connecting =
            async { pool.url.config.connect(PostgresTlsConnector::current(&pool.certificates).await).await };
        let Ok(Ok((client, mut connection))) = timeout(pool.connect_timeout(), connecting).await else { return false };
        let listening = async {
            let listened =
                timeout(pool.connect_timeout(), client.batch_execute("LISTEN ibid_wake; LISTEN ibid_forget"));
            if !matches!(listened.await, Ok(Ok(()))) {
                return false;
            }
            // From here on nothing is missed; earlier forgets may have been.
            if let Some(copies) = &self.answer_cache {
                copies.flush();
            }
            self.is_listening.send_replace(true);
            self.poll_all_now();
            self.wait_until_idle(&client).await;
            true
        };
        let hearing = async {
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(said) = message {
                    self.on_notification(said.channel(), said.payload());
                }
            }
        };
        tokio::select! {
            came_about = listening => came_about,
            () = hearing => *self.is_listening.borrow(),
        }
    }

    fn poll_all_now(&self) {
        self.by_holder.lock().values_mut().for_each(|seat| seat.next_poll = Instant::now());
        self.changed.notify_one();
    }

    /// Returns when there has been no waiter for a while, or the connection no longer responds.
    async fn wait_until_idle(&self, client: &tokio_postgres::Client) {
        loop {
            sleep(LISTENER_LINGER).await;
            if self.answer_cache.is_none() && !*self.has_waiters.borrow() {
                return;
            }
            // A vanished peer sends nothing, so probe it.
            if !matches!(timeout(self.pool.connect_timeout(), client.batch_execute("")).await, Ok(Ok(()))) {
                return;
            }
        }
    }

    fn on_notification(&self, channel: &str, payload: &str) {
        match channel {
            "ibid_wake" => {
                let Some((address, fence)) = payload.split_once(':') else { return };
                if let (Some(at), Ok(fence)) = (Address::from_hex(address), fence.parse()) {
                    self.wake(&at, Fence(fence));
                }
            }
            "ibid_forget" => {
                if let (Some(copies), Some(at)) = (&self.answer_cache, Address::from_hex(payload)) {
                    copies.forget(&at);
                }
            }
            _ => {}
        }
    }

    /// Polls the forget counter. It shows that something was forgotten, not what.
    async fn poll_forgets(&self) {
        let Some(copies) = &self.answer_cache else { return };
        let mut last = None;
        loop {
            let asked = self.pool.read("SELECT m.forgets FROM ibid.meta m", &[], self.pool.timeout).await;
            let now = asked.ok().and_then(|found| rows::column::<i64>(found.first()?, 0).ok());
            if now.is_none() || now != last {
                copies.flush();
            }
            last = now;
            sleep(with_jitter(POLL_INTERVAL_LISTENING)).await;
        }
    }
}
