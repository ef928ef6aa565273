//! One server: a connection per thread that is reopened when lost, a circuit breaker, and a deadline per call.

use std::cell::RefCell;

use tokio::sync::Semaphore;

use super::{
    connection::{OnInvalidate, RedisCall, ReplyReceiver},
    resp::Reply,
    *,
};
use crate::breaker::{BreakerPermit, CircuitBreaker};

/// Maximum number of connections per server for calls that wait for replicas. Each serves one call at a time.
const MAX_WAIT_CONNECTIONS: usize = 32;
/// Delay before a connection for waiters is tried again.
const WAITERS_RETRY_DELAY: Duration = Duration::from_secs(2);

pub(super) struct RedisServer {
    /// Identifies the server in [`THREAD_CONNECTIONS`].
    id: u64,
    connector: Arc<RedisConnector>,
    pub(super) target: ServerTarget,
    breaker: CircuitBreaker,
    /// The connections of all threads. A lost one stays until its claims are indexed.
    connections: Mutex<Vec<Arc<RedisConnection>>>,
    connect_lock: tokio::sync::Mutex<()>,
    /// Time and reason of the last failed connect, so that concurrent calls need not repeat it.
    failed: Mutex<Option<(Instant, String)>>,
    /// Idle connections for calls that wait for replicas.
    wait_connections: Mutex<Vec<Arc<RedisConnection>>>,
    wait_permits: Semaphore,
    waiters: tokio::sync::Mutex<WaitersConnection>,
}

/// The connection on which waiters read. `failed_at` is set if there is none.
#[derive(Default)]
struct WaitersConnection {
    connection: Option<Arc<RedisConnection>>,
    failed_at: Option<Instant>,
}

thread_local! {
    static THREAD_CONNECTIONS: RefCell<Vec<ThreadConnection>> = const { RefCell::new(Vec::new()) };
}

/// A connection of this thread to one server. It is given up when the thread ends.
struct ThreadConnection {
    server: u64,
    connection: Weak<RedisConnection>,
}

impl Drop for ThreadConnection {
    fn drop(&mut self) {
        self.connection.upgrade().iter().for_each(|connection| connection.retire());
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ServerTarget {
    Host(RedisHost),
    /// The primary of this name, according to the sentinels.
    Primary(String),
}

/// A reply, what the builder of the call returned, and the connection that it was sent on.
pub(super) struct Answered<T> {
    pub(super) reply: Reply,
    pub(super) sent: T,
    pub(super) connection: Arc<RedisConnection>,
}

impl RedisServer {
    pub(super) fn new(connector: Arc<RedisConnector>, target: ServerTarget) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Self {
            id: NEXT_ID.fetch_add(1, Relaxed),
            connector,
            target,
            breaker: CircuitBreaker::default(),
            connections: Mutex::default(),
            connect_lock: tokio::sync::Mutex::default(),
            failed: Mutex::default(),
            wait_connections: Mutex::default(),
            wait_permits: Semaphore::new(MAX_WAIT_CONNECTIONS),
            waiters: tokio::sync::Mutex::default(),
        }
    }

    pub(super) fn host(&self) -> Option<RedisHost> {
        self.connections.lock().iter().find(|connection| connection.is_open()).map(|open| open.host.clone())
    }

    /// Sends a call and waits for the reply until the deadline. An error reply is an error. With replicas, the reply is
    /// an array of the call's reply and the number of replicas that have it.
    ///
    /// Boxes what few calls need: every call would move it.
    pub(super) async fn send<T>(
        &self, deadline: Instant, replicas: u32, build: impl FnOnce(&RedisConnection) -> (RedisCall, T),
    ) -> Result<Answered<T>, RedisCallError> {
        let pass = self.pass_breaker()?;
        let answered = if replicas > 0 {
            Box::pin(self.send_replicated(deadline, replicas, build)).await
        } else {
            match self.thread_connection() {
                Some(connection) => self.send_on(connection, deadline, build).await,
                None => {
                    let sent = async {
                        let connection = self.open_connection(deadline).await?;
                        self.send_on(connection, deadline, build).await
                    };
                    Box::pin(sent).await
                }
            }
        };
        self.report(pass, answered.as_ref().err());
        answered
    }

    /// Sends a call on a connection.
    fn send_on<T>(
        &self, connection: Arc<RedisConnection>, deadline: Instant,
        build: impl FnOnce(&RedisConnection) -> (RedisCall, T),
    ) -> impl Future<Output = Result<Answered<T>, RedisCallError>> {
        // Not an `async fn`, which would keep the call.
        let (call, sent) = build(&connection);
        let (before, reply) = (connection.reply_count(), connection.enqueue(call));
        async move {
            let reply = self.receive(&connection, deadline, before, reply?).await?;
            Ok(Answered { reply, sent, connection })
        }
    }

    /// Sends a plain call.
    pub(super) async fn send_plain(&self, call: RedisCall, deadline: Instant) -> Result<Reply, RedisCallError> {
        self.send(deadline, 0, |_| (call, ())).await.map(|answered| answered.reply)
    }

    fn pass_breaker(&self) -> Result<BreakerPermit<'_>, RedisCallError> {
        self.breaker.pass().map_err(|pause| {
            let why = self.failed.lock().as_ref().map_or_else(String::new, |(_, why)| format!(": {why}"));
            RedisCallError::NotSent(format!("it failed several times in a row and is left alone for {pause:.0?}{why}"))
        })
    }

    /// Reports the result of a call to the circuit breaker.
    fn report(&self, pass: BreakerPermit<'_>, error: Option<&RedisCallError>) {
        match error {
            None | Some(RedisCallError::Refused { .. }) => pass.answered(),
            Some(RedisCallError::NotSent(_) | RedisCallError::Unanswered(_)) => pass.failed(),
        }
        if error.is_some_and(RedisCallError::says_wrong_server) {
            // The server may no longer be the right one: resolve names and ask sentinels again.
            self.hang_up();
        }
    }

    /// Makes later calls open new connections. Calls in flight still get their replies.
    pub(super) fn hang_up(&self) {
        self.connections.lock().iter().for_each(|connection| connection.retire());
        self.wait_connections.lock().clear();
    }

    /// Waits for a reply until the deadline. `before` is the number of replies when the call was sent.
    async fn receive(
        &self, connection: &RedisConnection, deadline: Instant, before: u64, reply: ReplyReceiver,
    ) -> Result<Reply, RedisCallError> {
        match timeout_at(deadline, reply).await {
            Ok(Err(RedisCallError::Unanswered(why))) => {
                Err(RedisCallError::Unanswered(format!("the connection to {} was lost: {why}", connection.host)))
            }
            Ok(answered) => answered,
            Err(_) => {
                // No call was answered meanwhile, so the connection is dead. Abort it, or every call would wait for a
                // vanished peer.
                if connection.reply_count() == before {
                    connection.abort();
                }
                let why = format!("no answer from {} within {:?}", connection.host, self.connector.timeout);
                Err(RedisCallError::Unanswered(why))
            }
        }
    }

    /// Opens the connection of this thread, unless another call does.
    async fn open_connection(&self, deadline: Instant) -> Result<Arc<RedisConnection>, RedisCallError> {
        let asked = Instant::now();
        let late = || RedisCallError::NotSent(format!("no connection within {:?}", self.connector.timeout));
        let _connecting = timeout_at(deadline, self.connect_lock.lock()).await.map_err(|_| late())?;
        if let Some(connection) = self.thread_connection() {
            return Ok(connection);
        }
        if let Some((at, why)) = &*self.failed.lock()
            && *at >= asked
        {
            return Err(RedisCallError::NotSent(why.clone()));
        }
        match self.connect_until(deadline).await {
            Ok(connection) => {
                let connection = Arc::new(connection);
                self.connections.lock().push(connection.clone());
                THREAD_CONNECTIONS.with_borrow_mut(|all| {
                    all.retain(|own| own.connection.upgrade().is_some_and(|connection| connection.is_open()));
                    all.push(ThreadConnection { server: self.id, connection: Arc::downgrade(&connection) });
                });
                Ok(connection)
            }
            Err(why) => {
                *self.failed.lock() = Some((Instant::now(), why.clone()));
                Err(RedisCallError::NotSent(why))
            }
        }
    }

    fn thread_connection(&self) -> Option<Arc<RedisConnection>> {
        THREAD_CONNECTIONS.with_borrow(|all| {
            let own = all.iter().filter(|own| own.server == self.id);
            own.filter_map(|own| own.connection.upgrade()).find(|connection| connection.is_open())
        })
    }

    async fn connect_until(&self, deadline: Instant) -> Result<RedisConnection, String> {
        let connecting = async {
            match &self.target {
                ServerTarget::Host(host) => self.connector.connect(host).await,
                ServerTarget::Primary(name) => sentinel::connect_primary(&self.connector, name).await,
            }
        };
        let late = |_| Err(format!("no connection to {} within {:?}", self.target, self.connector.timeout));
        timeout_at(deadline, connecting).await.unwrap_or_else(late)
    }

    /// Returns the connections whose claims may have to be indexed. Forgets those that are lost and have none.
    pub(super) fn connections(&self) -> Vec<Arc<RedisConnection>> {
        let mut all = self.connections.lock();
        all.retain(|connection| connection.is_open() || connection.with_claim_log(|claims| !claims.is_empty()));
        all.clone()
    }

    /// Sends a call followed by WAIT. That blocks its connection, so each of these calls uses its own.
    async fn send_replicated<T>(
        &self, deadline: Instant, replicas: u32, build: impl FnOnce(&RedisConnection) -> (RedisCall, T),
    ) -> Result<Answered<T>, RedisCallError> {
        let late = || RedisCallError::NotSent("all connections on which replicas are waited for are busy".to_owned());
        let _permit = timeout_at(deadline, self.wait_permits.acquire()).await.map_err(|_| late())?;
        let idle = {
            let mut idle = self.wait_connections.lock();
            std::iter::from_fn(|| idle.pop()).find(|connection| connection.is_open())
        };
        let connection = match idle {
            Some(connection) => connection,
            None => {
                let connection = Arc::new(self.connect_until(deadline).await.map_err(RedisCallError::NotSent)?);
                self.connections.lock().push(connection.clone());
                connection
            }
        };
        // Reserve the last part of the deadline for the reply's way back; the server checks WAIT timeouts only ten
        // times a second.
        let left = deadline.saturating_duration_since(Instant::now());
        let patience = (left * 4 / 5).min(left.saturating_sub(Duration::from_millis(150))).max(left / 2);
        let patience = (patience.as_millis() as u64).max(1).to_string();
        let answered = self.send_on(connection, deadline, |connection| {
            let (call, sent) = build(connection);
            (call.then(&[b"WAIT", replicas.to_string().as_bytes(), patience.as_bytes()]).keep_all(), sent)
        });
        let Answered { reply, sent, connection } = answered.await?;
        self.wait_connections.lock().push(connection.clone());
        let Reply::Array(mut replies) = reply else { return Err(RedisCallError::Unanswered("no array".into())) };
        // ASKING may come first.
        let (reached, reply) = (replies.pop().unwrap_or(Reply::Nil), replies.pop().unwrap_or(Reply::Nil).ok()?);
        Ok(Answered { reply: Reply::Array(vec![reply, reached.ok()?]), sent, connection })
    }

    /// Returns the connection on which waiters read: the server reports changes of what was read there. `None` if there
    /// is none, or the server does not support it.
    pub(super) async fn waiters_connection(&self, on_invalidate: &OnInvalidate) -> Option<Arc<RedisConnection>> {
        let mut waiters = self.waiters.lock().await;
        // After a failover, the former primary may still answer.
        let is_current = |host: &RedisHost| match &self.target {
            ServerTarget::Host(_) => true,
            ServerTarget::Primary(_) => self.host().is_none_or(|current| current == *host),
        };
        let open = waiters.connection.as_ref().filter(|connection| connection.is_open());
        if let Some(open) = open.filter(|connection| is_current(&connection.host)) {
            return Some(open.clone());
        }
        if waiters.failed_at.is_some_and(|at| at.elapsed() < WAITERS_RETRY_DELAY) {
            return None;
        }
        waiters.connection = self.connect_waiters(on_invalidate).await.map(Arc::new);
        waiters.failed_at = waiters.connection.is_none().then(Instant::now);
        waiters.connection.clone()
    }

    async fn connect_waiters(&self, on_invalidate: &OnInvalidate) -> Option<RedisConnection> {
        let host = match &self.target {
            ServerTarget::Host(host) => host.clone(),
            ServerTarget::Primary(_) => self.host()?,
        };
        let opened = self.connector.connect_waiters(&host, on_invalidate.clone()).await;
        match opened {
            Ok(connection) if connection.features.tracking => Some(connection),
            Ok(_) => {
                tracing::debug!("redis: the server does not report changes; waiters poll");
                None
            }
            Err(why) => {
                tracing::debug!(why, "redis: no connection for waiters; they poll");
                None
            }
        }
    }

    /// Closes the connection on which nobody waits.
    pub(super) async fn close_waiters_connection(&self) {
        self.waiters.lock().await.connection = None;
    }

    /// Closes connections that were lost without notice and on which the local cache relies.
    pub(super) async fn ping_tracking_connections(&self) {
        let mut connections = self.connections();
        connections.extend(self.waiters.lock().await.connection.clone());
        let tracking =
            connections.into_iter().filter(|connection| connection.features.tracking && connection.is_open());
        join_all(tracking.map(|connection| async move {
            let ping = connection.call(RedisCall::new(&[b"PING"]));
            if timeout(self.connector.timeout, ping).await.is_err() {
                connection.abort();
            }
        }))
        .await;
    }
}

impl fmt::Display for ServerTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(host) => host.fmt(f),
            Self::Primary(name) => write!(f, "the primary {name:?}"),
        }
    }
}

/// Returns the deadline of an administrative or background call: a multiple of that of a request's call.
pub(super) fn background_deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.max(Duration::from_secs(1)) * 2
}
