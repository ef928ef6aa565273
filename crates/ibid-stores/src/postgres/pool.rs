//! A small connection pool. One task per connection reopens it when it is lost.
//!
//! Calls are pipelined: a call uses the connection with the fewest calls in flight, without waiting. The first
//! connection is opened at once, the others when all before them are busy. Invariants: each [`PostgresPool::call`] is
//! sent at most once (the caller decides whether to repeat an ambiguous call); a connection with an overdue reply is
//! closed; tasks run on the runtime that opened the store, because runtimes of callers may end earlier.

use parking_lot::RwLock;
use tokio::{runtime::Handle, time::timeout_at};

use super::{connection::PostgresConnection, *};
use crate::breaker::CircuitBreaker;

const INITIAL_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// Minimum timeout of connecting, which may take longer than a call.
const MIN_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct PostgresPool {
    pub(super) url: PostgresUrl,
    pub(super) certificates: Arc<ReloadingTlsConfig>,
    pub(super) timeout: Duration,
    breaker: CircuitBreaker,
    /// The open connections.
    connections: RwLock<Vec<Arc<PostgresConnection>>>,
    /// Number of running connection tasks, of which each keeps one connection.
    started_count: AtomicUsize,
    /// Why the last connection failed, while there is none.
    pub(super) last_error: Mutex<Option<(ErrorKind, String)>>,
    /// Notified when a connection was opened or failed.
    changed: Notify,
    /// What the server checks found, or `None` before the first connection.
    pub(super) findings: Mutex<Option<PostgresFindings>>,
    connection_tasks: Mutex<JoinSet<()>>,
    /// The runtime that opened the store.
    runtime: Handle,
}

impl PostgresPool {
    pub(super) fn new(place: PostgresUrl, certificates: Arc<ReloadingTlsConfig>, timeout: Duration) -> Arc<Self> {
        let pool = Arc::new(Self {
            url: place,
            certificates,
            timeout,
            breaker: CircuitBreaker::default(),
            connections: RwLock::default(),
            started_count: AtomicUsize::new(0),
            last_error: Mutex::new(None),
            changed: Notify::new(),
            findings: Mutex::new(None),
            connection_tasks: Mutex::default(),
            runtime: Handle::current(),
        });
        pool.start_connection();
        pool
    }

    /// Waits until the first connection is open or has failed.
    pub(super) async fn wait_until_tried(self: &Arc<Self>) {
        drop(self.connection(Instant::now() + self.connect_timeout() * 2).await);
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        self.timeout.max(MIN_CONNECT_TIMEOUT)
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    pub(super) async fn call(
        self: &Arc<Self>, what: Statement, params: &[&(dyn ToSql + Sync)], deadline: Instant,
    ) -> Result<Vec<Row>, CallFailure> {
        self.send(what.is_read_only(), deadline, async |connection| connection.run(what, params).await).await
    }

    /// Sends a read-only statement with its own deadline.
    pub(super) async fn read(
        self: &Arc<Self>, sql: &str, params: &[(&(dyn ToSql + Sync), Type)], limit: Duration,
    ) -> Result<Vec<Row>, StoreError> {
        let deadline = Instant::now() + limit;
        Ok(self.send(true, deadline, async |connection| connection.run_once(sql, params).await).await?)
    }

    /// Sends a rare statement that writes.
    pub(super) async fn write(self: &Arc<Self>, sql: &str) -> Result<Vec<Row>, StoreError> {
        Ok(self.send(false, self.deadline(), async |connection| connection.run_once(sql, &[]).await).await?)
    }

    async fn send(
        self: &Arc<Self>, reads: bool, deadline: Instant,
        run: impl AsyncFnOnce(&PostgresConnection) -> Result<Vec<Row>, Error>,
    ) -> Result<Vec<Row>, CallFailure> {
        let connection = self.connection(deadline).await?;
        let pass = self.breaker.pass().map_err(|pause| {
            let why = format!("{} failed several times in a row and is left alone for {pause:?}", self.url);
            CallFailure::without_reply(ErrorKind::NotApplied, why)
        })?;
        let _under_way = connection.begin_call();
        match timeout_at(deadline, run(&connection)).await {
            Ok(Ok(rows)) => {
                pass.answered();
                Ok(rows)
            }
            Ok(Err(error)) => {
                let (was_rolled_back, is_row_conflict) =
                    (error::was_rolled_back(&error), error::was_row_conflict(&error));
                if was_rolled_back {
                    pass.answered()
                } else {
                    pass.failed()
                }
                let is_discarded = !was_rolled_back || error::is_read_only(&error);
                if is_discarded {
                    connection.discard();
                }
                let error = error::statement_error(&error, reads);
                Err(CallFailure { error, was_rolled_back: !is_discarded, is_row_conflict })
            }
            Err(_) => {
                pass.failed();
                connection.discard();
                let kind = if reads { ErrorKind::NotApplied } else { ErrorKind::Ambiguous };
                Err(CallFailure::without_reply(kind, format!("{} did not answer in time", self.url)))
            }
        }
    }

    /// Returns a connection to send on. If it fails, nothing was sent.
    async fn connection(self: &Arc<Self>, deadline: Instant) -> Result<Arc<PostgresConnection>, CallFailure> {
        if let Some(connection) = self.least_busy() {
            if connection.in_flight() > 0 {
                self.start_connection();
            }
            return Ok(connection);
        }
        self.wait_for_connection(deadline).await
    }

    #[cold]
    async fn wait_for_connection(&self, deadline: Instant) -> Result<Arc<PostgresConnection>, CallFailure> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(connection) = self.least_busy() {
                return Ok(connection);
            }
            if let Some((kind, why)) = self.last_error.lock().clone() {
                return Err(CallFailure::without_reply(kind, why));
            }
            if timeout_at(deadline, changed).await.is_err() {
                let why = format!("no connection to {} in time", self.url);
                return Err(CallFailure::without_reply(ErrorKind::NotApplied, why));
            }
        }
    }

    fn least_busy(&self) -> Option<Arc<PostgresConnection>> {
        let connections = self.connections.read();
        let live = connections.iter().filter(|connection| !connection.is_closed());
        live.min_by_key(|connection| connection.in_flight()).cloned()
    }

    fn start_connection(self: &Arc<Self>) {
        let limit = self.url.pool_size;
        if self.started_count.load(Relaxed) >= limit {
            return;
        }
        let next =
            self.started_count.fetch_update(Relaxed, Relaxed, |started| (started < limit).then_some(started + 1));
        if next.is_ok() {
            self.connection_tasks.lock().spawn_on(self.clone().keep_connected(), &self.runtime);
        }
    }

    /// Opens a connection, and reopens it whenever it is lost, until the store is dropped.
    async fn keep_connected(self: Arc<Self>) {
        let mut pause = INITIAL_BACKOFF;
        loop {
            match PostgresConnection::open(&self.url, &self.certificates, self.connect_timeout()).await {
                Ok((connection, findings, driver)) => {
                    pause = INITIAL_BACKOFF;
                    let connection = Arc::new(connection);
                    self.on_connected(connection.clone(), findings);
                    drop(driver.await);
                    self.connections.write().retain(|other| !Arc::ptr_eq(other, &connection));
                    self.changed.notify_waiters();
                }
                Err((kind, why)) => {
                    if self.least_busy().is_none() {
                        let mut fault = self.last_error.lock();
                        if fault.as_ref() != Some(&(kind, why.clone())) {
                            tracing::warn!(store = error::STORE_NAME, at = %self.url, %why, "no connection");
                        }
                        *fault = Some((kind, why));
                    }
                    self.changed.notify_waiters();
                    sleep(with_jitter(pause)).await;
                    pause = (pause * 2).min(MAX_BACKOFF);
                }
            }
        }
    }

    fn on_connected(&self, connection: Arc<PostgresConnection>, findings: PostgresFindings) {
        self.connections.write().push(connection);
        if self.last_error.lock().take().is_some() {
            tracing::info!(store = error::STORE_NAME, at = %self.url, "connected");
        }
        let before = self.findings.lock().replace(findings.clone());
        if before.as_ref() != Some(&findings) {
            for wanting in &findings.warnings {
                tracing::warn!(store = error::STORE_NAME, at = %self.url, "{wanting}");
            }
        }
        self.breaker.close();
        self.changed.notify_waiters();
    }

    /// Runs a task that serves callers of several runtimes.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(self.runtime.spawn(task));
    }

    pub(super) fn close(&self) {
        self.connection_tasks.lock().abort_all();
        self.connections.write().clear();
    }
}

/// A failed call, and whether it certainly had no effect.
#[derive(Debug)]
pub(super) struct CallFailure {
    pub(super) error: StoreError,
    /// The server reported the rollback, and is used further: the call can be sent again in another form.
    pub(super) was_rolled_back: bool,
    /// The rollback was caused by a concurrent change of the same row.
    pub(super) is_row_conflict: bool,
}

impl CallFailure {
    fn without_reply(kind: ErrorKind, why: String) -> Self {
        Self { error: store_error(kind, why), was_rolled_back: false, is_row_conflict: false }
    }
}

impl From<CallFailure> for StoreError {
    fn from(failed: CallFailure) -> Self {
        failed.error
    }
}
