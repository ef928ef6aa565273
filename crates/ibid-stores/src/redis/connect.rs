//! Opens connections: TCP, TLS, login.

use rustls::{ClientConfig, pki_types::ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{
    connection::{OnInvalidate, RedisCall, RedisConnection},
    resp::Reply,
    *,
};
use crate::certificates::{ReloadingTlsConfig, TlsMaterial};

/// Milliseconds after which the system gives up a connection whose peer acknowledges nothing.
#[cfg(target_os = "linux")]
const TCP_USER_TIMEOUT_MS: u32 = 30_000;

/// Opens connections to the servers of one URL.
pub(super) struct RedisConnector {
    pub(super) url: RedisUrl,
    tls: Option<Arc<ReloadingTlsConfig>>,
    /// Limits both connecting and one call.
    pub(super) timeout: Duration,
    pub(super) key_names: Arc<KeyNames>,
    /// Local cache to keep coherent: connections for calls track what they read.
    pub(super) answer_cache: Option<AnswerCache>,
}

/// What a connection is opened for.
enum ConnectionUse {
    /// Calls about entries, in the URL's database.
    Calls,
    /// Waiters: every key that is read is tracked.
    Waiters(OnInvalidate),
    Sentinel {
        with_login: bool,
    },
}

impl RedisConnector {
    pub(super) fn new(
        url: RedisUrl, timeout: Duration, key_names: Arc<KeyNames>, answer_cache: Option<AnswerCache>,
    ) -> Result<Self, String> {
        let tls = url.tls.clone().map(|files| ReloadingTlsConfig::open(STORE_NAME, files, tls_config)).transpose()?;
        Ok(Self { url, tls, timeout, key_names, answer_cache })
    }

    pub(super) async fn connect(&self, host: &RedisHost) -> Result<RedisConnection, String> {
        self.open(host, ConnectionUse::Calls).await
    }

    /// Opens a connection that passes on every invalidation of a key that it has read.
    pub(super) async fn connect_waiters(
        &self, host: &RedisHost, on_invalidate: OnInvalidate,
    ) -> Result<RedisConnection, String> {
        self.open(host, ConnectionUse::Waiters(on_invalidate)).await
    }

    /// Opens a connection to a sentinel: with the same login, or without one if the sentinel rejects it.
    pub(super) async fn connect_sentinel(&self, host: &RedisHost) -> Result<RedisConnection, String> {
        match self.open(host, ConnectionUse::Sentinel { with_login: true }).await {
            Err(_) if self.url.password.is_some() => {
                self.open(host, ConnectionUse::Sentinel { with_login: false }).await
            }
            opened => opened,
        }
    }

    async fn open(&self, host: &RedisHost, purpose: ConnectionUse) -> Result<RedisConnection, String> {
        match timeout(self.timeout, self.open_socket(host, &purpose)).await {
            Ok(opened) => opened.map_err(|why| format!("cannot connect to {host}: {why}")),
            Err(_) => Err(format!("cannot connect to {host}: no answer within {:?}", self.timeout)),
        }
    }

    async fn open_socket(&self, host: &RedisHost, purpose: &ConnectionUse) -> Result<RedisConnection, String> {
        let on_invalidate = match purpose {
            ConnectionUse::Calls => self.answer_cache.clone().map(|answers| self.forget_invalidated(answers)),
            ConnectionUse::Waiters(on_invalidate) => Some(on_invalidate.clone()),
            ConnectionUse::Sentinel { .. } => None,
        };
        let names = self.key_names.clone();
        #[cfg(feature = "simulation")]
        if let Some(connecting) = crate::simulation::connect(&host.name) {
            let stream = connecting.await.map_err(|error| error.to_string())?;
            return self.greet(RedisConnection::start(host, stream, names, on_invalidate), purpose).await;
        }
        let tcp = TcpStream::connect((host.name.as_str(), host.port)).await.map_err(|error| error.to_string())?;
        configure_socket(&tcp).map_err(|error| error.to_string())?;
        let connection = match &self.tls {
            None => RedisConnection::start(host, tcp, names, on_invalidate),
            Some(tls) => {
                let name = ServerName::try_from(host.name.clone()).map_err(|error| error.to_string())?;
                let tls = TlsConnector::from(tls.now().await);
                let tcp = tls.connect(name, tcp).await.map_err(|error| format!("TLS: {error}"))?;
                RedisConnection::start(host, tcp, names, on_invalidate)
            }
        };
        self.greet(connection, purpose).await
    }

    /// Keeps the local cache coherent: an answer whose key was changed is removed, and all are if that cannot be known.
    fn forget_invalidated(&self, answers: AnswerCache) -> OnInvalidate {
        let names = self.key_names.clone();
        Arc::new(move |key| match key {
            None => answers.flush(),
            Some(key) => names.parse_address(key).iter().for_each(|at| answers.forget(at)),
        })
    }

    /// Logs in, and finds out what the server supports.
    async fn greet(&self, mut connection: RedisConnection, purpose: &ConnectionUse) -> Result<RedisConnection, String> {
        let with_login = !matches!(purpose, ConnectionUse::Sentinel { with_login: false });
        let password = self.url.password.as_deref().filter(|_| with_login);
        let user = self.url.user.as_deref().unwrap_or("default");
        let mut hello: Vec<&[u8]> = vec![b"HELLO", b"3"];
        if let Some(password) = password {
            hello.extend([&b"AUTH"[..], user.as_bytes(), password.as_bytes()]);
        }
        let mut speaks_resp3 = false;
        match connection.call(RedisCall::new(&hello)).await {
            Ok(Reply::Array(facts)) => {
                speaks_resp3 = true;
                connection.features.compare_and_set = has_compare_and_set(&facts);
            }
            Ok(_) => return Err("the server does not answer HELLO as Redis does".into()),
            Err(RedisCallError::NotSent(why) | RedisCallError::Unanswered(why)) => {
                // With TLS 1.3 a server rejects a client certificate only after the handshake.
                let why = if self.tls.is_some() {
                    format!("TLS: the server does not let us in; perhaps it does not know our certificate: {why}")
                } else {
                    why
                };
                return Err(why);
            }
            Err(error) if error.has_code("WRONGPASS") => return Err(login_refused()),
            // A proxy that speaks RESP2 only, or a password is missing, which every call will say.
            Err(_) if password.is_none() => {}
            // RESP2 only: Valkey answers NOAUTH to a command that it does not know.
            Err(_) => {
                let mut auth: Vec<&[u8]> = vec![b"AUTH"];
                auth.extend(self.url.user.as_deref().map(str::as_bytes));
                auth.extend(password.map(str::as_bytes));
                connection.call(RedisCall::new(&auth)).await.map_err(|_| login_refused())?;
            }
        }
        if matches!(purpose, ConnectionUse::Sentinel { .. }) {
            return Ok(connection);
        }
        self.prepare(&mut connection, purpose, speaks_resp3).await?;
        Ok(connection)
    }

    /// Selects the database, starts tracking and reads the server's clock.
    async fn prepare(
        &self, connection: &mut RedisConnection, purpose: &ConnectionUse, speaks_resp3: bool,
    ) -> Result<(), String> {
        if self.url.database != 0 {
            let select = RedisCall::new(&[b"SELECT", self.url.database.to_string().as_bytes()]);
            connection.call(select).await.map_err(|error| StoreError::from(error).source.to_string())?;
        }
        let tracking: &[&[u8]] = match purpose {
            ConnectionUse::Waiters(_) => &[b"CLIENT", b"TRACKING", b"ON"],
            // What this connection writes itself is known here.
            _ => &[b"CLIENT", b"TRACKING", b"ON", b"OPTIN", b"NOLOOP"],
        };
        let wants_tracking = matches!(purpose, ConnectionUse::Waiters(_)) || self.answer_cache.is_some();
        if wants_tracking && speaks_resp3 {
            connection.features.tracking = matches!(connection.call(RedisCall::new(tracking)).await, Ok(Reply::Ok));
        }
        connection.read_clock().await;
        Ok(())
    }
}

/// Describes the server's response, never the credentials.
fn login_refused() -> String {
    "the login was refused; check user and password in the store's URL".to_owned()
}

/// Whether the server that answered HELLO has `SET … IFEQ`: Valkey since 8.1, Redis since 8.4.
fn has_compare_and_set(facts: &[Reply]) -> bool {
    let fact = |name: &str| {
        let mut pairs = facts.chunks_exact(2);
        let value = pairs.find(|pair| pair[0].as_bytes().is_some_and(|key| key == name))?[1].as_bytes()?;
        String::from_utf8(value.to_vec()).ok()
    };
    let Some((server, version)) = fact("server").zip(fact("version")) else { return false };
    let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match server.as_str() {
        "valkey" => version >= (8, 1),
        "redis" => version >= (8, 4),
        _ => false,
    }
}

/// Sends at once, gives up a silent peer, and discards what is unsent when the connection is closed: no command arrives
/// long after its caller was told that it is ambiguous.
fn configure_socket(tcp: &TcpStream) -> std::io::Result<()> {
    tcp.set_nodelay(true)?;
    tcp.set_zero_linger()?;
    #[cfg(target_os = "linux")]
    rustix::net::sockopt::set_tcp_user_timeout(tcp, TCP_USER_TIMEOUT_MS)?;
    Ok(())
}

fn tls_config(files: &TlsMaterial) -> Result<ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("TLS: {error}"))?
        .with_root_certificates(files.root_certificates("ca")?);
    files.with_client_certificate(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compare_and_set_is_found_by_server_and_version() {
        let facts = |server: &str, version: &str| {
            let texts = ["server", server, "version", version].map(|text| Reply::Bytes(text.to_owned().into()));
            let mut facts = texts.to_vec();
            facts.extend([Reply::Bytes("proto".into()), Reply::Int(3)]);
            facts
        };
        for (server, version, has) in [
            ("redis", "7.0.15", false),
            ("redis", "8.2.1", false),
            ("redis", "8.4.0", true),
            ("valkey", "8.0.9", false),
            ("valkey", "8.1.0", true),
            ("valkey", "9.1.2", true),
            ("another", "9.1.2", false),
        ] {
            assert_eq!(has_compare_and_set(&facts(server, version)), has, "{server} {version}");
        }
        assert!(!has_compare_and_set(&[]));
    }
}
