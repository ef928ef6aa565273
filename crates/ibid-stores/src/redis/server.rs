//! One server: a connection that is reopened when lost, a circuit breaker, and a deadline per call.
//!
//! Invariant: [`RedisCallError::NotSent`] is returned only if no byte of the call was handed to a connection.

use tokio::sync::Semaphore;

use super::*;
use crate::breaker::CircuitBreaker;

/// Maximum number of connections per server for calls that wait for replicas. Each serves one call at a time.
const MAX_WAIT_CONNECTIONS: usize = 32;

pub(super) struct RedisServer {
    connector: Arc<RedisConnector>,
    pub(super) target: ServerTarget,
    breaker: CircuitBreaker,
    /// The connection for calls. Replaced only under `connect_lock`.
    wire: Mutex<Option<Arc<RedisConnection>>>,
    connect_lock: tokio::sync::Mutex<()>,
    /// Time and reason of the last failed connect, so that concurrent calls need not repeat it.
    failed: Mutex<Option<(Instant, String)>>,
    /// Idle connections for calls that wait for replicas.
    wait_connections: Mutex<Vec<Arc<RedisConnection>>>,
    wait_permits: Semaphore,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ServerTarget {
    Host(RedisHost),
    /// The primary of this name, according to the sentinels.
    Primary(String),
}

/// A call and how it is sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct RedisCommand<'a> {
    pub(super) command: &'a Cmd,
    /// Precedes the command with ASKING, for a node that is importing the slot.
    pub(super) asking: bool,
    /// Follows the command with WAIT for this many replicas. The reply is then a pair: the command's and the number of
    /// replicas.
    pub(super) replicas: u32,
}

impl<'a> RedisCommand<'a> {
    pub(super) fn plain(command: &'a Cmd) -> Self {
        Self { command, asking: false, replicas: 0 }
    }

    fn pipeline(self, patience: Duration) -> redis::Pipeline {
        let mut all = redis::pipe();
        if self.asking {
            all.add_command(redis::cmd("ASKING"));
        }
        all.add_command(self.command.clone());
        if self.replicas > 0 {
            let mut wait = redis::cmd("WAIT");
            wait.arg(self.replicas).arg(patience.as_millis().max(1) as u64);
            all.add_command(wait);
        }
        all
    }

    /// Index of the command's reply.
    fn first(self) -> usize {
        usize::from(self.asking)
    }
}

impl RedisServer {
    pub(super) fn new(connector: Arc<RedisConnector>, target: ServerTarget) -> Self {
        Self {
            connector,
            target,
            breaker: CircuitBreaker::default(),
            wire: Mutex::default(),
            connect_lock: tokio::sync::Mutex::default(),
            failed: Mutex::default(),
            wait_connections: Mutex::default(),
            wait_permits: Semaphore::new(MAX_WAIT_CONNECTIONS),
        }
    }

    pub(super) fn host(&self) -> Option<RedisHost> {
        self.wire.lock().as_ref().filter(|wire| wire.is_open()).map(|wire| wire.host.clone())
    }

    /// Returns the host for another connection to the same server.
    pub(super) async fn resolve_host(&self) -> Result<RedisHost, String> {
        match &self.target {
            ServerTarget::Host(host) => Ok(host.clone()),
            ServerTarget::Primary(name) => match self.host() {
                Some(host) => Ok(host),
                None => sentinel::connect_primary(&self.connector, name).await.map(|wire| wire.host.clone()),
            },
        }
    }

    /// Sends a command and waits for the reply until the deadline.
    pub(super) async fn send(&self, call: RedisCommand<'_>, deadline: Instant) -> Result<Value, RedisCallError> {
        self.guarded(async {
            if call.replicas > 0 {
                return self.send_replicated(call, deadline).await;
            }
            let wire = self.get_connection(deadline).await?;
            if call.asking {
                let all = call.pipeline(Duration::ZERO);
                let answers = self.exchange(&wire, deadline, wire.ask_all(&all, call.first())).await?;
                return check_reply(answers.into_iter().next_back().unwrap_or(Value::Nil));
            }
            check_reply(self.exchange(&wire, deadline, wire.ask(call.command)).await?)
        })
        .await
    }

    /// Sends several plain commands at once. Each has its own reply or error.
    pub(super) async fn send_all(
        &self, commands: &redis::Pipeline, deadline: Instant,
    ) -> Result<Vec<Value>, RedisCallError> {
        self.guarded(async {
            let wire = self.get_connection(deadline).await?;
            self.exchange(&wire, deadline, wire.ask_all(commands, 0)).await
        })
        .await
    }

    /// Sends through the circuit breaker.
    async fn guarded<T>(&self, send: impl Future<Output = Result<T, RedisCallError>>) -> Result<T, RedisCallError> {
        let pass = self.breaker.pass().map_err(|pause| {
            let why = self.failed.lock().as_ref().map_or_else(String::new, |(_, why)| format!(": {why}"));
            RedisCallError::NotSent(format!("it failed several times in a row and is left alone for {pause:.0?}{why}"))
        })?;
        let answered = send.await;
        match &answered {
            Ok(_) | Err(RedisCallError::Refused { .. }) => pass.answered(),
            Err(RedisCallError::NotSent(_) | RedisCallError::Unanswered(_)) => pass.failed(),
        }
        if answered.as_ref().is_err_and(RedisCallError::says_wrong_server) {
            // The server may no longer be the right one: resolve names and ask sentinels again.
            self.hang_up();
        }
        answered
    }

    /// Drops the connections, so that later calls open new ones.
    pub(super) fn hang_up(&self) {
        self.wire.lock().take();
        self.wait_connections.lock().clear();
    }

    /// Waits for a reply on `wire` until the deadline.
    async fn exchange<T>(
        &self, wire: &RedisConnection, deadline: Instant, ask: impl Future<Output = Result<T, RedisError>>,
    ) -> Result<T, RedisCallError> {
        let before = wire.answers();
        match timeout_at(deadline, ask).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => {
                wire.abort();
                Err(RedisCallError::Unanswered(format!("the connection to {} was lost: {error}", wire.host)))
            }
            Err(_) => {
                // No call was answered meanwhile, so the connection is dead. Abort it, or every call would wait for a
                // vanished peer.
                if wire.answers() == before {
                    wire.abort();
                }
                let why = format!("no answer from {} within {:?}", wire.host, self.connector.timeout);
                Err(RedisCallError::Unanswered(why))
            }
        }
    }

    async fn get_connection(&self, deadline: Instant) -> Result<Arc<RedisConnection>, RedisCallError> {
        if let Some(wire) = self.live_connection() {
            return Ok(wire);
        }
        let asked = Instant::now();
        let late = || RedisCallError::NotSent(format!("no connection within {:?}", self.connector.timeout));
        let _dialing = timeout_at(deadline, self.connect_lock.lock()).await.map_err(|_| late())?;
        if let Some(wire) = self.live_connection() {
            return Ok(wire);
        }
        if let Some((at, why)) = &*self.failed.lock()
            && *at >= asked
        {
            return Err(RedisCallError::NotSent(why.clone()));
        }
        match self.connect_until(deadline).await {
            Ok(wire) => {
                let wire = Arc::new(wire);
                *self.wire.lock() = Some(wire.clone());
                Ok(wire)
            }
            Err(why) => {
                *self.failed.lock() = Some((Instant::now(), why.clone()));
                Err(RedisCallError::NotSent(why))
            }
        }
    }

    fn live_connection(&self) -> Option<Arc<RedisConnection>> {
        self.wire.lock().as_ref().filter(|wire| wire.is_open()).cloned()
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

    /// WAIT blocks its connection, so each of these calls uses its own.
    async fn send_replicated(&self, call: RedisCommand<'_>, deadline: Instant) -> Result<Value, RedisCallError> {
        let late = || RedisCallError::NotSent("all connections on which replicas are waited for are busy".to_owned());
        let _room = timeout_at(deadline, self.wait_permits.acquire()).await.map_err(|_| late())?;
        let idle = {
            let mut idle = self.wait_connections.lock();
            std::iter::from_fn(|| idle.pop()).find(|wire| wire.is_open())
        };
        let wire = match idle {
            Some(wire) => wire,
            None => Arc::new(self.connect_until(deadline).await.map_err(RedisCallError::NotSent)?),
        };
        // Reserve the last part of the deadline for the reply's way back; the server checks WAIT timeouts only ten
        // times a second.
        let left = deadline.saturating_duration_since(Instant::now());
        let patience = (left * 4 / 5).min(left.saturating_sub(Duration::from_millis(150))).max(left / 2);
        let all = call.pipeline(patience);
        let answers = self.exchange(&wire, deadline, wire.ask_all(&all, call.first())).await?;
        self.wait_connections.lock().push(wire);
        match answers.first() {
            Some(Value::ServerError(error)) => Err(RedisCallError::from_server(error)),
            _ => Ok(Value::Array(answers)),
        }
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
