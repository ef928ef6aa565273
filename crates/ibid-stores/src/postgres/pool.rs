//! A few connections, each kept by a task of its own that makes it again when it is lost.
//!
//! Calls are pipelined: a call takes the connection with the least under way and waits for nobody. The first connection
//! is made at once, the others when the ones before them are busy. Invariants: a call is sent at most once per
//! [`Pool::call`] (a repetition after an ambiguous end is the caller's to decide); a connection on which an answer is
//! overdue is closed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use ibid::store::{ErrorKind, StoreError};
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    task::{AbortHandle, JoinHandle},
    time::{Instant, sleep, timeout_at},
};
use tokio_postgres::{
    Error, Row,
    types::{ToSql, Type},
};

use super::{
    checks::Findings,
    faults::{self, failed},
    link::Link,
    place::Place,
    statements::Statement,
};
use crate::{
    breaker::{Breaker, jittered},
    certificates::Certificates,
};

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(2);
/// A connection may take longer to make than a call to answer.
const CONNECTING: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Pool {
    pub(super) place: Place,
    pub(super) certificates: Arc<Certificates>,
    pub(super) timeout: Duration,
    breaker: Breaker,
    slots: Vec<Mutex<Option<Arc<Link>>>>,
    /// How many slots have a keeper.
    started: AtomicUsize,
    /// Why the last connection could not be made, if there is none.
    fault: Mutex<Option<(ErrorKind, String)>>,
    /// Told when a connection was made, or could not be.
    changed: Notify,
    findings: Mutex<Option<Findings>>,
    keepers: Mutex<Vec<AbortHandle>>,
}

impl Pool {
    pub(super) fn new(place: Place, certificates: Arc<Certificates>, timeout: Duration) -> Arc<Self> {
        let slots = (0..place.pool).map(|_| Mutex::new(None)).collect();
        let pool = Arc::new(Self {
            place,
            certificates,
            timeout,
            breaker: Breaker::default(),
            slots,
            started: AtomicUsize::new(0),
            fault: Mutex::new(None),
            changed: Notify::new(),
            findings: Mutex::new(None),
            keepers: Mutex::default(),
        });
        pool.start_another();
        pool
    }

    /// Until the first connection is there, or could not be made.
    pub(super) async fn is_tried(&self) {
        let deadline = Instant::now() + self.connecting_limit() * 2;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.best().is_some() || self.fault.lock().is_some() || Instant::now() >= deadline {
                return;
            }
            drop(timeout_at(deadline, changed).await);
        }
    }

    /// What start-up found, `None` if nobody could look yet.
    pub(super) fn findings(&self) -> Option<Findings> {
        self.findings.lock().clone()
    }

    /// Why there is no connection.
    pub(super) fn fault(&self) -> Option<(ErrorKind, String)> {
        self.fault.lock().clone()
    }

    pub(super) fn connecting_limit(&self) -> Duration {
        self.timeout.max(CONNECTING)
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// Sends a prepared statement.
    pub(super) async fn call(
        self: &Arc<Self>, what: Statement, params: &[&(dyn ToSql + Sync)], deadline: Instant,
    ) -> Result<Vec<Row>, Failed> {
        self.send(what.reads(), deadline, Sql::Prepared(what, params)).await
    }

    /// Sends a statement that reads, with a deadline of its own.
    pub(super) async fn read(
        self: &Arc<Self>, sql: &str, params: &[(&(dyn ToSql + Sync), Type)], limit: Duration,
    ) -> Result<Vec<Row>, StoreError> {
        let sent = self.send(true, Instant::now() + limit, Sql::Once(sql, params)).await;
        sent.map_err(Failed::into)
    }

    /// Sends a statement that writes, and is rare.
    pub(super) async fn write(self: &Arc<Self>, sql: &str) -> Result<Vec<Row>, StoreError> {
        let sent = self.send(false, self.deadline(), Sql::Once(sql, &[])).await;
        sent.map_err(Failed::into)
    }

    async fn send(self: &Arc<Self>, reads: bool, deadline: Instant, sql: Sql<'_>) -> Result<Vec<Row>, Failed> {
        let link = self.link(deadline).await?;
        let pass = self.breaker.pass().map_err(|pause| {
            let why = format!("{} failed several times in a row and is left alone for {pause:?}", self.place);
            Failed::unsent(ErrorKind::NotApplied, why)
        })?;
        let _under_way = link.begin();
        match timeout_at(deadline, sql.run(&link)).await {
            Ok(Ok(rows)) => {
                pass.answered();
                Ok(rows)
            }
            Ok(Err(error)) => {
                let rolled_back = faults::was_rolled_back(&error);
                if rolled_back {
                    pass.answered();
                } else {
                    pass.failed();
                    link.discard();
                }
                if faults::is_read_only(&error) {
                    link.discard();
                }
                let in_the_way = faults::was_in_the_way(&error);
                Err(Failed { error: faults::of_sent(&error, reads), rolled_back, in_the_way })
            }
            Err(_) => {
                pass.failed();
                link.discard();
                let kind = if reads { ErrorKind::NotApplied } else { ErrorKind::Ambiguous };
                let error = failed(kind, format!("{} did not answer in time", self.place));
                Err(Failed { error, rolled_back: false, in_the_way: false })
            }
        }
    }

    /// A connection to send on. Nothing has been sent if there is none.
    async fn link(self: &Arc<Self>, deadline: Instant) -> Result<Arc<Link>, Failed> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(link) = self.best() {
                if link.under_way() > 0 {
                    self.start_another();
                }
                return Ok(link);
            }
            if let Some((kind, why)) = self.fault() {
                return Err(Failed::unsent(kind, why));
            }
            if timeout_at(deadline, changed).await.is_err() {
                let why = format!("no connection to {} in time", self.place);
                return Err(Failed::unsent(ErrorKind::NotApplied, why));
            }
        }
    }

    fn best(&self) -> Option<Arc<Link>> {
        let started = self.started.load(Relaxed).min(self.slots.len());
        let live = self.slots[..started].iter().filter_map(|slot| slot.lock().clone());
        live.filter(|link| !link.is_closed()).min_by_key(|link| link.under_way())
    }

    fn start_another(self: &Arc<Self>) {
        let next =
            self.started.fetch_update(Relaxed, Relaxed, |started| (started < self.slots.len()).then_some(started + 1));
        if let Ok(slot) = next {
            let keeper = tokio::spawn(self.clone().keep(slot));
            self.keepers.lock().push(keeper.abort_handle());
        }
    }

    /// Makes a connection, and again whenever it is lost. Ends with the store.
    async fn keep(self: Arc<Self>, slot: usize) {
        let mut pause = FIRST_PAUSE;
        loop {
            match Link::open(&self.place, &self.certificates, self.connecting_limit()).await {
                Ok((link, findings, driver)) => {
                    pause = FIRST_PAUSE;
                    self.is_made(slot, link, findings);
                    self.is_lost(slot, driver).await;
                }
                Err((kind, why)) => {
                    if self.best().is_none() {
                        let mut fault = self.fault.lock();
                        if fault.as_ref() != Some(&(kind, why.clone())) {
                            tracing::warn!(store = faults::STORE, at = %self.place, %why, "no connection");
                        }
                        *fault = Some((kind, why));
                    }
                    self.changed.notify_waiters();
                    sleep(jittered(pause)).await;
                    pause = (pause * 2).min(LAST_PAUSE);
                }
            }
        }
    }

    fn is_made(&self, slot: usize, link: Link, findings: Findings) {
        *self.slots[slot].lock() = Some(Arc::new(link));
        if self.fault.lock().take().is_some() {
            tracing::info!(store = faults::STORE, at = %self.place, "connected");
        }
        let before = self.findings.lock().replace(findings.clone());
        if before.as_ref() != Some(&findings) {
            for wanting in &findings.wanting {
                tracing::warn!(store = faults::STORE, at = %self.place, "{wanting}");
            }
        }
        self.breaker.close();
        self.changed.notify_waiters();
    }

    async fn is_lost(&self, slot: usize, driver: JoinHandle<()>) {
        drop(driver.await);
        *self.slots[slot].lock() = None;
        self.changed.notify_waiters();
    }

    /// Closes all connections.
    pub(super) fn close(&self) {
        self.keepers.lock().drain(..).for_each(|keeper| keeper.abort());
        self.slots.iter().for_each(|slot| drop(slot.lock().take()));
    }
}

/// What is sent.
enum Sql<'a> {
    Prepared(Statement, &'a [&'a (dyn ToSql + Sync)]),
    Once(&'a str, &'a [(&'a (dyn ToSql + Sync), Type)]),
}

impl Sql<'_> {
    async fn run(&self, link: &Link) -> Result<Vec<Row>, Error> {
        match self {
            Self::Prepared(what, params) => link.run(*what, params).await,
            Self::Once(sql, params) => link.run_once(sql, params).await,
        }
    }
}

/// A call that failed, and whether that is known to have undone it.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: StoreError,
    /// The server itself said so: it may be sent again in another form.
    pub(super) rolled_back: bool,
    /// Only because somebody else was at the same row at the same time.
    pub(super) in_the_way: bool,
}

impl Failed {
    fn unsent(kind: ErrorKind, why: String) -> Self {
        Self { error: failed(kind, why), rolled_back: false, in_the_way: false }
    }
}

impl From<Failed> for StoreError {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}
