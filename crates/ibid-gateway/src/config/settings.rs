//! Everything that was decided at start-up. Past it, nothing can be invalid.

use std::{fmt, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use ibid::{Credentials, QuotaLimit, TrustedProxies};
use ibid_stores::seal::Sealer;

use super::{collector::Collector, scalar::Scalar, seal::SealSettings, secret::Secret, store::StoreSettings};
use crate::routes::{GrpcUnknown, RouteTable};

/// Instead of a file of descriptors: the upstreams are asked for theirs.
pub(super) const REFLECTION_KEYWORD: &str = "reflection";

/// The finished configuration. Secrets in it are never shown by `Debug`.
#[derive(Debug, Clone, PartialEq)]
pub struct GatewaySettings {
    /// The file that it was read from, if there was one. Watched for changes.
    pub file: Option<PathBuf>,
    /// Files that values were read from. Watched as well.
    pub value_files: Vec<PathBuf>,
    /// Where clients connect.
    pub listen: SocketAddr,
    /// Present if clients connect with TLS.
    pub tls: Option<TlsSettings>,
    /// The app: scheme (`http`, `https`, `h2c`), host and port.
    pub upstream: String,
    /// Certificates that `https` upstreams are checked against, instead of the system's.
    pub upstream_ca: Option<Pem>,
    /// What the gateway shows to `https` upstreams that ask who it is.
    pub upstream_identity: Option<ClientIdentity>,
    /// Connections per upstream.
    pub max_upstream: usize,
    /// How long an idle connection to an upstream may be reused.
    pub upstream_idle: Duration,
    /// Protocols that a connection may be upgraded to, in lower case.
    pub upgrades: Vec<String>,
    /// How callers' tokens are verified, if some are.
    pub jwt: Option<JwtSettings>,
    /// How much tenants may begin.
    pub quota: QuotaSettings,
    /// Whose scope headers are believed.
    pub trusted_proxies: TrustedProxies,
    /// Which headers carry credentials, and which schemes of Authorization are accepted.
    pub credentials: Credentials,
    /// More running requests are refused before claiming.
    pub max_running: usize,
    /// Bytes of all request and response buffers together.
    pub buffer_memory: u64,
    /// Pages of these origins may read the gateway's own answers.
    pub cors_origins: Vec<HeaderValue>,
    /// Whether a reload may forget what is remembered.
    pub accept_forgetting: bool,
    /// The local journal's directory; `None` if there is none.
    pub journal: Option<PathBuf>,
    /// What says which gRPC methods are unary, as written: a file of protobuf descriptors, or [`REFLECTION_KEYWORD`].
    pub descriptors: Option<String>,
    /// What becomes of calls to gRPC methods that nothing is known about, if it is set.
    pub grpc_unknown: Option<GrpcUnknown>,
    /// Paths of the app's own OpenAPI documents, which are annotated as they pass.
    pub openapi: Vec<String>,
    /// What the upstreams said about themselves, if they were asked: a descriptor set.
    pub reflected_descriptors: Option<Bytes>,
    /// What a connection may do.
    pub limits: LimitSettings,
    /// How logs are written.
    pub log: LogSettings,
    /// Where traces go, if anywhere.
    pub trace: Option<TraceSettings>,
    /// The admin port, unless it is off.
    pub admin: Option<AdminSettings>,
    /// Where records live.
    pub store: StoreSettings,
    /// How they are sealed, if they are.
    pub seal: Option<SealSettings>,
    /// Which policy a request is under.
    pub routes: RouteTable,
    /// What is allowed, and probably not meant. Logged at start-up.
    pub warnings: Vec<String>,
    /// What somebody who reads the configuration should know. `ibid check` prints it.
    pub notes: Vec<String>,
}

/// The certificate of a port that clients or operators connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsSettings {
    /// The certificate and those that vouch for it.
    pub cert: Pem,
    /// Its private key.
    pub key: Pem,
    /// Clients must show a certificate that one of these vouches for.
    pub client_ca: Option<Pem>,
}

/// A certificate to show, and its private key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The certificate and those that vouch for it.
    pub cert: Pem,
    /// Its private key.
    pub key: Pem,
}

/// Where traces go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceSettings {
    /// Who takes them.
    pub collector: Collector,
    /// Certificates that it is checked against, instead of the system's.
    pub ca: Option<Pem>,
    /// What it is shown if it asks.
    pub identity: Option<ClientIdentity>,
}

/// How much a tenant may begin; as much as they like where nothing is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QuotaSettings {
    /// Per tenant, counted in the store.
    pub new_keys: Option<QuotaLimit>,
    /// Per tenant, counted in the store as answers are recorded.
    pub new_bytes: Option<QuotaLimit>,
    /// Per tenant and user, counted by each gateway.
    pub rate: Option<QuotaLimit>,
}

impl QuotaSettings {
    /// Whether anybody is limited.
    pub fn is_set(&self) -> bool {
        self.new_keys.is_some() || self.new_bytes.is_some() || self.rate.is_some()
    }
}

/// How callers' tokens are verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JwtSettings {
    /// By which keys.
    pub keys: JwtKeys,
    /// Certificates that the server of the keys is checked against, instead of the system's.
    pub ca: Option<Pem>,
    /// What it is shown if it asks.
    pub identity: Option<ClientIdentity>,
    /// Whose tokens are believed; anybody's who has the key if `None`.
    pub issuer: Option<String>,
    /// For whom they must be; for anybody if empty.
    pub audience: Vec<String>,
    /// Where a token is looked for. The first source that is present counts.
    pub from: Vec<TokenSource>,
    /// By how much clocks may differ.
    pub leeway: Duration,
    /// How often keys are fetched.
    pub refresh: Duration,
}

/// Where a caller's token is looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// A header: `Bearer TOKEN`, or the token alone in headers other than Authorization.
    Header(HeaderName),
    /// A cookie.
    Cookie(String),
}

/// The keys that tokens are verified with.
#[derive(Clone, PartialEq, Eq)]
pub enum JwtKeys {
    /// Shared with the issuer.
    Secret(Secret),
    /// Public ones.
    Pem(Pem),
    /// A JWK set. Never shown: somebody may have put a private key into it.
    Jwks(Secret),
    /// Where the issuer publishes a JWK set.
    JwksUrl(String),
}

/// The text of a PEM file, read at start-up. Never shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pem(pub(super) Secret);

/// What a connection may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitSettings {
    /// How long a request's head may take.
    pub header_timeout: Duration,
    /// How long a request's body may be silent.
    pub body_timeout: Duration,
    /// How long a connection may be idle.
    pub idle_timeout: Duration,
    /// How long a client may go without reading any of an answer.
    pub write_timeout: Duration,
    /// How long a request without a claim waits for a connection to the upstream.
    pub pool_timeout: Duration,
    /// How long the upstream may take to begin its reply to a request without a claim.
    pub reply_timeout: Duration,
    /// How long neither side of an upgraded connection may send anything.
    pub tunnel_timeout: Duration,
    /// Headers of a request.
    pub max_headers: usize,
    /// Bytes of all headers of a request.
    pub max_header_bytes: u64,
    /// Connections of clients.
    pub max_connections: usize,
    /// How long a shutdown waits for running operations.
    pub shutdown: Duration,
}

/// How logs are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogSettings {
    /// For people or for machines.
    pub format: LogFormat,
    /// The least that is worth a line.
    pub level: LogLevel,
}

/// How a line of the log looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

/// What is worth a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Failures.
    Error,
    /// And what should not happen.
    Warn,
    /// And what happened.
    Info,
    /// And why.
    Debug,
    /// And everything else.
    Trace,
}

/// The admin port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminSettings {
    /// Where operators connect.
    pub listen: SocketAddr,
    /// Who may; nobody if empty.
    pub tokens: Vec<AdminToken>,
    /// The file of the audit trail; `None` if it is only logged, and remembered until the process ends.
    pub audit: Option<PathBuf>,
    /// The names, besides those of this machine, that the API and the console answer to.
    pub hosts: Vec<String>,
    /// Present if operators connect with TLS.
    pub tls: Option<TlsSettings>,
}

impl AdminSettings {
    fn has_tls(this: Option<&Self>) -> bool {
        this.is_some_and(|admin| admin.tls.is_some())
    }
}

/// Somebody who may use the admin API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminToken {
    /// What they may do.
    pub role: Role,
    /// Whose records a [`Role::User`] sees. `None` for all others.
    pub user: Option<String>,
    /// What the audit trail calls them: as configured, or where the token is configured.
    pub name: String,
    /// What they send.
    pub token: Secret,
}

/// What the holder of a token may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// See and change everything.
    Admin,
    /// See everything.
    Viewer,
    /// See their own records.
    User,
}

impl GatewaySettings {
    /// Whether the upstreams are to be asked which gRPC methods they have.
    pub fn uses_reflection(&self) -> bool {
        self.descriptors.as_deref() == Some(REFLECTION_KEYWORD)
    }

    /// What differs from `old` and is only read at start-up.
    pub fn settings_needing_restart(&self, old: &Self) -> Vec<&'static str> {
        // Tokens and certificates are taken up.
        let fixed = |settings: &Self| settings.admin.as_ref().map(|admin| (admin.listen, admin.audit.clone()));
        let all = [
            ("listen", self.listen != old.listen),
            // Certificates are taken up; whether there are any is not.
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
            // Where they go is taken up; whether they go anywhere is not.
            ("trace", self.trace.is_some() != old.trace.is_some()),
            ("admin", fixed(self) != fixed(old)),
            ("admin.tls", AdminSettings::has_tls(self.admin.as_ref()) != AdminSettings::has_tls(old.admin.as_ref())),
            ("store", self.store != old.store),
            ("seal", SealSettings::needs_restart(old.seal.as_ref(), self.seal.as_ref())),
        ];
        all.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
    }

    /// How the store and the journal are sealed, if they are.
    pub fn sealing(&self) -> Option<Sealer> {
        self.seal.as_ref().and_then(SealSettings::sealing)
    }

    /// Whether this configuration remembers nothing of what `old` remembered, sentence by sentence; see
    /// [`forgets`](super::forgotten_answers).
    pub fn forgotten_answers(&self, old: &Self) -> Vec<String> {
        super::forgotten_answers(old, self)
    }
}

impl fmt::Debug for JwtKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Secret(_) => f.write_str("Secret(****)"),
            Self::Pem(_) => f.write_str("Pem(****)"),
            Self::Jwks(_) => f.write_str("Set(****)"),
            // Without its query, which may hold a secret.
            Self::JwksUrl(url) => write!(f, "Url({:?})", url.split('?').next().unwrap_or_default()),
        }
    }
}

impl Pem {
    /// The text.
    pub fn text(&self) -> &str {
        self.0.expose()
    }
}

/// Words with a fixed set of values.
macro_rules! words {
    ($type:ty, $what:literal, { $($word:literal => $value:path),+ $(,)? }) => {
        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok($value),)+
                    _ => Err(format!("{text:?} is no {}; allowed are {}", $what, super::error::quote_list([$($word),+]))),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($value => $word,)+ })
            }
        }

        impl Scalar for $type {
            const ALLOWED: &'static str = concat!("one of", $(" \"", $word, "\""),+);

            fn from_text(text: &str) -> Result<Self, String> {
                text.parse()
            }
        }
    };
}

words!(LogFormat, "log format", { "text" => LogFormat::Text, "json" => LogFormat::Json });
words!(LogLevel, "log level", {
    "error" => LogLevel::Error, "warn" => LogLevel::Warn, "info" => LogLevel::Info, "debug" => LogLevel::Debug,
    "trace" => LogLevel::Trace,
});
words!(GrpcUnknown, "way to treat unknown gRPC methods", {
    "refuse" => GrpcUnknown::Refuse, "pass" => GrpcUnknown::Pass,
});
words!(Role, "role", { "admin" => Role::Admin, "viewer" => Role::Viewer, "user" => Role::User });
