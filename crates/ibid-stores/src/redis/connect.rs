//! Opens connections: TCP, TLS, login.

use redis::{AsyncConnectionConfig, ProtocolVersion, RedisConnectionInfo, aio::MultiplexedConnection};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::AbortHandle,
};
use tokio_rustls::TlsConnector;

use super::*;
use crate::certificates::{ReloadingTlsConfig, TlsMaterial};

/// Maximum number of calls queued for a connection's writer.
const PIPELINE_BUFFER_SIZE: usize = 1024;

/// Opens connections to the servers of one URL.
pub(super) struct RedisConnector {
    pub(super) url: RedisUrl,
    tls: Option<Arc<ReloadingTlsConfig>>,
    /// Limits both connecting and one call.
    pub(super) timeout: Duration,
}

/// Receives push messages.
pub(super) type PushHandler = Arc<dyn Fn(PushInfo) + Send + Sync>;

/// An open connection, multiplexed by concurrent calls.
pub(super) struct RedisConnection {
    pub(super) host: RedisHost,
    connection: MultiplexedConnection,
    reply_count: AtomicU64,
    is_aborted: AtomicBool,
    /// Drives the socket, and ends with it.
    driver: AbortHandle,
}

impl RedisConnector {
    pub(super) fn new(place: RedisUrl, timeout: Duration) -> Result<Self, String> {
        let tls = place.tls.clone().map(|files| ReloadingTlsConfig::open(STORE_NAME, files, tls_config)).transpose()?;
        Ok(Self { url: place, tls, timeout })
    }

    pub(super) async fn connect(&self, host: &RedisHost) -> Result<RedisConnection, String> {
        self.open(host, self.connection_info(true), self.url.database, None).await
    }

    /// Opens a connection that also receives push messages.
    pub(super) async fn connect_pubsub(
        &self, host: &RedisHost, pushes: PushHandler,
    ) -> Result<RedisConnection, String> {
        let info = self.connection_info(true).set_protocol(ProtocolVersion::RESP3);
        self.open(host, info, 0, Some(pushes)).await
    }

    /// Opens a connection to a sentinel: with the same login, or without one if the sentinel rejects it.
    pub(super) async fn connect_sentinel(&self, host: &RedisHost) -> Result<RedisConnection, String> {
        match self.open(host, self.connection_info(true), 0, None).await {
            Err(_) if self.url.password.is_some() => self.open(host, self.connection_info(false), 0, None).await,
            answered => answered,
        }
    }

    fn connection_info(&self, with: bool) -> RedisConnectionInfo {
        let mut info = RedisConnectionInfo::default().set_skip_set_lib_name();
        if let Some(user) = self.url.user.as_deref().filter(|_| with) {
            info = info.set_username(user);
        }
        if let Some(password) = self.url.password.as_deref().filter(|_| with) {
            info = info.set_password(password);
        }
        info
    }

    async fn open(
        &self, host: &RedisHost, info: RedisConnectionInfo, database: i64, pushes: Option<PushHandler>,
    ) -> Result<RedisConnection, String> {
        let deadline = Instant::now() + self.timeout;
        let opened = timeout_at(deadline, async {
            let tcp = TcpStream::connect((host.name.as_str(), host.port)).await.map_err(|error| error.to_string())?;
            tcp.set_nodelay(true).map_err(|error| error.to_string())?;
            let info = info.set_db(database);
            match &self.tls {
                None => start_driver(host, info, tcp, pushes).await,
                Some(tls) => {
                    let name = ServerName::try_from(host.name.clone()).map_err(|error| error.to_string())?;
                    let tls = TlsConnector::from(tls.now().await);
                    let tcp = tls.connect(name, tcp).await.map_err(|error| format!("TLS: {error}"))?;
                    start_driver(host, info, tcp, pushes).await?.verify_accepted().await
                }
            }
        });
        match opened.await {
            Ok(opened) => opened.map_err(|why| format!("cannot connect to {host}: {why}")),
            Err(_) => Err(format!("cannot connect to {host}: no answer within {:?}", self.timeout)),
        }
    }
}

async fn start_driver(
    host: &RedisHost, info: RedisConnectionInfo, socket: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    pushes: Option<PushHandler>,
) -> Result<RedisConnection, String> {
    // This crate enforces deadlines: a driver timeout would hide whether a call was sent.
    let mut config = AsyncConnectionConfig::new()
        .set_response_timeout(None)
        .set_connection_timeout(None)
        .set_pipeline_buffer_size(PIPELINE_BUFFER_SIZE);
    if let Some(pushes) = pushes {
        config = config.set_push_sender(move |push: PushInfo| {
            pushes(push);
            Ok::<_, ()>(())
        });
    }
    let (connection, driver) =
        MultiplexedConnection::new_with_config(&info, socket, config).await.map_err(|error| login_refused(&error))?;
    let (reply_count, is_aborted) = (AtomicU64::new(0), AtomicBool::new(false));
    let driver = tokio::spawn(driver).abort_handle();
    Ok(RedisConnection { host: host.clone(), connection, reply_count, is_aborted, driver })
}

/// Describes the server's response, never the credentials.
fn login_refused(error: &RedisError) -> String {
    match error.kind() {
        redis::ErrorKind::AuthenticationFailed => {
            "the login was refused; check user and password in the store's URL".to_owned()
        }
        _ => error.to_string(),
    }
}

impl RedisConnection {
    /// Checks that the server accepts our certificate. With TLS 1.3 it rejects it only after the handshake; without
    /// this check the first call would fail as ambiguous.
    async fn verify_accepted(self) -> Result<Self, String> {
        match self.ask(&redis::cmd("PING")).await {
            Err(error) if error.is_io_error() || error.is_connection_dropped() => {
                Err(format!("TLS: the server does not let us in; perhaps it does not know our certificate: {error}"))
            }
            // Any reply shows that the connection was accepted.
            _ => Ok(self),
        }
    }

    pub(super) async fn ask(&self, command: &Cmd) -> Result<Value, RedisError> {
        let answer = self.connection.clone().send_packed_command(command).await?;
        self.reply_count.fetch_add(1, Relaxed);
        Ok(answer)
    }

    /// Sends all commands at once and returns the replies from index `first` on.
    pub(super) async fn ask_all(&self, commands: &redis::Pipeline, first: usize) -> Result<Vec<Value>, RedisError> {
        let count = commands.len() - first;
        let answers = self.connection.clone().send_packed_commands(commands, first, count).await?;
        self.reply_count.fetch_add(1, Relaxed);
        Ok(answers)
    }

    pub(super) fn is_open(&self) -> bool {
        !self.is_aborted.load(Relaxed) && !self.driver.is_finished()
    }

    pub(super) fn answers(&self) -> u64 {
        self.reply_count.load(Relaxed)
    }

    /// Closes the connection. Calls in flight get no reply.
    pub(super) fn abort(&self) {
        self.is_aborted.store(true, Relaxed);
        self.driver.abort();
    }
}

impl Drop for RedisConnection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

fn tls_config(files: &TlsMaterial) -> Result<ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("TLS: {error}"))?
        .with_root_certificates(files.root_certificates("ca")?);
    files.with_client_certificate(config)
}
