//! The finished settings. After start-up none of them can be invalid.

use std::{collections::BTreeSet, fmt, net::SocketAddr, path::PathBuf, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use ibid::{
    quota::QuotaLimit,
    scope::{Credentials, TrustedProxies},
};
use ibid_stores::seal::Sealer;

use super::{
    env::ValueResolver,
    error::{ConfigError, quote_list},
    secret::Collector,
    secret::Secret,
    store::SealSettings,
    store::StoreSettings,
    toml_node::{FromToml, Scalar, TomlNode, tables},
    values::{AtLeastOne, ByteLimit, HeaderBytes, Positive},
};
use crate::routes::RouteTable;

/// The value of `descriptors` that queries the upstreams by reflection.
pub(super) const REFLECTION_KEYWORD: &str = "reflection";

/// The finished configuration. `Debug` shows no secrets.
#[derive(Debug, Clone, PartialEq)]
pub struct GatewaySettings {
    /// The file that it was read from, if any. Watched for changes.
    pub file: Option<PathBuf>,
    /// Files that values were read from. Also watched.
    pub value_files: Vec<PathBuf>,
    /// Where clients connect.
    pub listen: SocketAddr,
    /// Present if clients connect with TLS.
    pub tls: Option<TlsSettings>,
    /// The app's URL: scheme (`http`, `https`, `h2c`), host and port.
    pub upstream: String,
    /// For `https` upstreams.
    pub upstream_tls: ClientTls,
    pub max_upstream: usize,
    /// How long an idle upstream connection may be reused.
    pub upstream_idle: Duration,
    /// Protocols that a connection may be upgraded to, in lower case.
    pub upgrades: Vec<String>,
    pub jwt: Option<JwtSettings>,
    pub quota: QuotaSettings,
    /// Peers whose scope headers and forwarding headers are trusted.
    pub trusted_proxies: TrustedProxies,
    /// The headers that carry credentials, and the accepted schemes of `Authorization`.
    pub credentials: Credentials,
    /// Maximum number of running requests. Further ones are refused before they claim.
    pub max_running: usize,
    /// Maximum bytes of all request and response buffers together.
    pub buffer_memory: u64,
    /// Origins whose pages may read the gateway's own responses.
    pub cors_origins: Vec<HeaderValue>,
    /// Whether a reload may make remembered answers unreachable.
    pub accept_forgetting: bool,
    /// The directory of the local journal; `None` without a journal.
    pub journal: Option<PathBuf>,
    /// Source of the unary gRPC methods, as written: a file of protobuf descriptors, or [`REFLECTION_KEYWORD`].
    pub descriptors: Option<String>,
    /// What happens to calls of unknown gRPC methods, if set.
    pub grpc_unknown: Option<GrpcUnknown>,
    /// Paths of the app's own OpenAPI documents, which the gateway annotates.
    pub openapi: Vec<String>,
    /// The descriptor set from reflection, if the upstreams were queried.
    pub reflected_descriptors: Option<Bytes>,
    pub limits: LimitSettings,
    pub log: LogSettings,
    pub trace: Option<TraceSettings>,
    /// `None` if the admin port is off.
    pub admin: Option<AdminSettings>,
    /// `None` if the exchange API is off.
    pub api: Option<ApiSettings>,
    /// Where Envoy connects. `None` if external processing is off.
    pub ext_proc: Option<SocketAddr>,
    pub store: StoreSettings,
    pub seal: Option<SealSettings>,
    pub routes: RouteTable,
    /// Allowed settings that are probably mistakes. Logged at start-up.
    pub warnings: Vec<String>,
    /// Facts that a reader of the configuration should know. `ibid check` prints them.
    pub notes: Vec<String>,
}

/// The certificate of the client port or the admin port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsSettings {
    pub cert: Pem,
    pub key: Pem,
    /// Clients must present a certificate from one of these CAs.
    pub client_ca: Option<Pem>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientIdentity {
    pub cert: Pem,
    pub key: Pem,
}

/// How the gateway and its commands connect to other servers with TLS.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// CAs for the server's certificate, instead of the system's.
    pub ca: Option<Pem>,
    /// The client certificate for servers that ask for one.
    pub identity: Option<ClientIdentity>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceSettings {
    pub collector: Collector,
    pub tls: ClientTls,
    /// Names and values that describe this gateway to the collector; `service.name` first.
    pub resource: Vec<(String, String)>,
}

tables! {
    /// The limits of a tenant. `None` means no limit.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct QuotaSettings {
        /// Per tenant, counted in the store.
        pub new_keys: Option<QuotaLimit>,
        /// Per tenant, counted in the store when answers are recorded.
        pub new_bytes: Option<QuotaLimit> as ByteLimit,
        /// Per tenant and user, counted by each gateway.
        pub rate: Option<QuotaLimit>,
    }

    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct LimitSettings {
        pub header_timeout: Duration as Positive = Duration::from_secs(10),
        /// For a request with a key: maximum time for the whole body. Otherwise: maximum time without progress of the body.
        pub body_timeout: Duration as Positive = Duration::from_secs(30),
        pub idle_timeout: Duration as Positive = Duration::from_secs(75),
        /// Maximum time that a client may leave a waiting response unread.
        pub write_timeout: Duration as Positive = Duration::from_secs(60),
        /// How long a request without a claim waits for an upstream connection.
        pub pool_timeout: Duration as Positive = Duration::from_secs(10),
        /// Maximum time for the upstream to begin its response to a request without a claim.
        pub reply_timeout: Duration as Positive = Duration::from_secs(300),
        /// Maximum time that both sides of an upgraded connection may be silent.
        pub tunnel_timeout: Duration as Positive = Duration::from_secs(600),
        pub max_headers: usize as AtLeastOne = 100,
        pub max_header_bytes: u64 as HeaderBytes = 64 << 10,
        pub max_connections: usize as AtLeastOne = 10_000,
        pub shutdown: Duration = Duration::from_secs(30),
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct LogSettings {
        pub format: LogFormat = LogFormat::Text,
        /// The least severe level that is logged.
        pub level: LogLevel = LogLevel::Info,
    }
}

impl QuotaSettings {
    pub fn is_set(&self) -> bool {
        self.new_keys.is_some() || self.new_bytes.is_some() || self.rate.is_some()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JwtSettings {
    pub keys: JwtKeys,
    pub tls: ClientTls,
    /// The required issuer; `None` accepts any.
    pub issuer: Option<String>,
    pub audience: Vec<String>,
    /// Sources of the token. The first one that is present counts.
    pub from: Vec<TokenSource>,
    pub leeway: Duration,
    pub refresh: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// A header: `Bearer TOKEN`, or the token alone in headers other than `Authorization`.
    Header(HeaderName),
    Cookie(String),
}

#[derive(Clone, PartialEq, Eq)]
pub enum JwtKeys {
    Secret(Secret),
    Pem(Pem),
    /// A JWK set. Never shown, because it may contain a private key by mistake.
    Jwks(Secret),
    JwksUrl(String),
}

/// The text of a PEM file, read at start-up. Never shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pem(pub(super) Secret);

/// Where the audit trail is kept. The log has it in any case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuditDestination {
    /// Until the process ends.
    Memory,
    File(PathBuf),
    Store,
}

impl fmt::Display for AuditDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("off"),
            Self::File(path) => path.display().fmt(f),
            Self::Store => f.write_str("store"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminSettings {
    pub listen: SocketAddr,
    /// The accepted tokens. Empty: nobody has access.
    pub tokens: Vec<AdminToken>,
    pub audit: AuditDestination,
    /// Host names, besides those of this machine, that the API and the console accept.
    pub hosts: Vec<String>,
    /// Present if operators connect with TLS.
    pub tls: Option<TlsSettings>,
}

/// Where apps beside this process call the exchange API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiSettings {
    pub listen: ApiListen,
    /// Always present on TCP.
    pub token: Option<Secret>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiListen {
    /// The path of a Unix socket.
    Unix(PathBuf),
    /// A loopback address.
    Tcp(SocketAddr),
}

impl Scalar for ApiListen {
    const ALLOWED: &'static str = "\"unix:PATH\" or a loopback address and a port such as \"127.0.0.1:8082\"";

    fn from_text(text: &str) -> Result<Self, String> {
        match (text.strip_prefix("unix:"), text.parse::<SocketAddr>()) {
            (Some(path), _) if !path.is_empty() => Ok(Self::Unix(path.into())),
            (None, Ok(address)) if address.ip().is_loopback() => Ok(Self::Tcp(address)),
            (None, Ok(_)) => Err(format!("{text:?} is no loopback address; allowed is {}", Self::ALLOWED)),
            _ => Err(format!("{text:?} is no place to listen; allowed is {}", Self::ALLOWED)),
        }
    }
}

impl fmt::Display for ApiListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminToken {
    pub role: Role,
    /// The user whose records a [`Role::User`] sees. `None` for other roles.
    pub user: Option<String>,
    /// The holder's name in the audit trail: as configured, or the setting that contains the token.
    pub name: String,
    pub token: Secret,
}

impl GatewaySettings {
    /// Whether the upstreams are queried for their gRPC methods.
    pub fn uses_reflection(&self) -> bool {
        self.descriptors.as_deref() == Some(REFLECTION_KEYWORD)
    }

    /// The app of `[policy]` and those of routes, each once.
    pub fn upstream_urls(&self) -> BTreeSet<&str> {
        let routes = self.routes.iter().filter_map(|route| route.upstream.as_deref());
        routes.chain([self.upstream.as_str()]).collect()
    }

    /// Returns the settings that differ from `old` and are only read at start-up.
    pub fn settings_needing_restart(&self, old: &Self) -> Vec<&'static str> {
        // A reload applies new tokens and certificates.
        let fixed = |settings: &Self| settings.admin.as_ref().map(|admin| (admin.listen, admin.audit.clone()));
        let has_admin_tls = |settings: &Self| settings.admin.as_ref().is_some_and(|admin| admin.tls.is_some());
        let all = [
            ("listen", self.listen != old.listen),
            // A reload applies new certificates, but cannot turn TLS on or off.
            ("tls", self.tls.is_some() != old.tls.is_some()),
            ("trusted_proxies", self.trusted_proxies != old.trusted_proxies),
            ("credentials", self.credentials.headers() != old.credentials.headers()),
            ("credential_schemes", self.credentials.schemes() != old.credentials.schemes()),
            ("max_running", self.max_running != old.max_running),
            ("buffer_memory", self.buffer_memory != old.buffer_memory),
            ("cors", self.cors_origins != old.cors_origins),
            ("journal", self.journal != old.journal),
            ("limits", self.limits != old.limits),
            ("log", self.log != old.log),
            // A reload applies a new collector, but cannot turn tracing on or off.
            ("trace", self.trace.is_some() != old.trace.is_some()),
            ("admin", fixed(self) != fixed(old)),
            ("admin.tls", has_admin_tls(self) != has_admin_tls(old)),
            ("api", self.api != old.api),
            ("ext_proc", self.ext_proc != old.ext_proc),
            ("store", self.store != old.store),
            ("seal", SealSettings::needs_restart(old.seal.as_ref(), self.seal.as_ref())),
        ];
        all.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
    }

    pub fn sealing(&self) -> Option<Sealer> {
        self.seal.as_ref().and_then(SealSettings::sealing)
    }
}

impl fmt::Debug for JwtKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Secret(_) => f.write_str("Secret(****)"),
            Self::Pem(_) => f.write_str("Pem(****)"),
            Self::Jwks(_) => f.write_str("Set(****)"),
            // Omits the query, which may contain a secret.
            Self::JwksUrl(url) => write!(f, "Url({:?})", url.split('?').next().unwrap_or_default()),
        }
    }
}

impl Pem {
    pub fn text(&self) -> &str {
        self.0.expose()
    }

    /// Reads a PEM file. The value is its path or its text. `key` is its key, for errors.
    pub(super) fn load(key: &str, written: Secret, lookup: &ValueResolver<'_>) -> Result<Self, String> {
        const BEGIN: &str = "-----BEGIN ";
        if written.expose().contains(BEGIN) {
            return Ok(Self(written));
        }
        // The value may be the private key itself, in another format, instead of its path.
        let shown = if key.ends_with("key") { "what it names".into() } else { format!("{:?}", written.expose()) };
        let text = lookup.read(written.expose()).map_err(|why| format!("cannot read {shown}: {why}"))?;
        if !text.contains(BEGIN) {
            return Err(format!("{shown} is no PEM file; it has no line \"-----BEGIN ...\""));
        }
        Secret::from_text(&text).map(Self)
    }
}

/// A setting that names a PEM file, which is not read yet.
pub(super) struct PemFile {
    key: String,
    written: Secret,
}

impl PemFile {
    pub(super) fn load(self, lookup: &ValueResolver<'_>) -> Result<Pem, ConfigError> {
        Pem::load(&self.key, self.written, lookup).map_err(|what| ConfigError::at(self.key, what))
    }
}

impl FromToml for PemFile {
    fn from_toml(node: &TomlNode<'_>) -> Result<Self, ConfigError> {
        Ok(Self { key: node.path.clone(), written: Secret::from_toml(node)? })
    }

    fn schema() -> serde_json::Value {
        Secret::schema()
    }
}

macro_rules! keywords {
    ($($(#[$meta:meta])* $what:literal $name:ident { $($(#[$doc:meta])* $value:ident = $word:literal,)+ })+) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $value,)+
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$value => $word,)+ })
            }
        }

        impl Scalar for $name {
            const ALLOWED: &'static str = concat!("one of", $(" \"", $word, "\""),+);

            fn from_text(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$value),)+
                    _ => Err(format!("{text:?} is no {}; allowed are {}", $what, quote_list([$($word),+]))),
                }
            }

            fn choices() -> Vec<&'static str> {
                vec![$($word),+]
            }
        }
    )+};
}

keywords! {
    "log format" LogFormat {
        Text = "text",
        Json = "json",
    }

    /// Each level includes those before it.
    "log level" LogLevel {
        Error = "error",
        Warn = "warn",
        Info = "info",
        Debug = "debug",
        Trace = "trace",
    }

    "role" Role {
        /// Sees and changes everything.
        Admin = "admin",
        /// Sees everything.
        Viewer = "viewer",
        /// Sees the user's own records.
        User = "user",
    }

    /// What happens to gRPC calls that no route names and whose method is not known to be unary.
    "way to treat unknown gRPC methods" GrpcUnknown {
        Refuse = "refuse",
        Pass = "pass",
    }
}
