//! Turns the raw file into finished settings: defaults and contradictions.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use http::HeaderName;
use ibid::{Credentials, TrustedProxies, grpc::UnaryMethods};

use super::{
    dials,
    env::ValueResolver,
    error::ConfigError,
    jwt, raw,
    scalar::{List, Scalar, Single},
    seal,
    secret::{Secret, UpstreamUrl},
    settings::{
        AdminSettings, AdminToken, ClientIdentity, GatewaySettings, LimitSettings, LogFormat, LogLevel, LogSettings,
        Pem, QuotaSettings, REFLECTION_KEYWORD, Role, TlsSettings, TraceSettings,
    },
    store,
    values::{ByteLimit, ByteSize},
    warnings,
};
use crate::admin::hosts;

const DEFAULT_LISTEN: &str = "127.0.0.1:8080";
const DEFAULT_ADMIN: &str = "127.0.0.1:8081";
const DEFAULT_JOURNAL: &str = "ibid-journal";
/// Shorter than the 5 s after which many app servers (Node, uvicorn, Hypercorn) close idle connections.
const DEFAULT_UPSTREAM_IDLE: Duration = Duration::from_secs(4);
/// In the journal's directory.
const DEFAULT_AUDIT_FILE: &str = "audit.jsonl";
/// Maximum number of characters of the name of a token's holder.
const MAX_TOKEN_NAME_CHARS: usize = 100;

/// Validates a file that variables and flags have already overridden.
pub(super) fn validate(
    file: raw::RawFile, path: Option<PathBuf>, lookup: &ValueResolver<'_>,
) -> Result<GatewaySettings, ConfigError> {
    let origin = path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let wrong = |key: &str, what: &str| ConfigError::new(&origin, key, what);
    let unary = file.descriptors.as_ref().map(|Single(path)| load_unary_methods(path, lookup)).transpose();
    let unary = unary.map_err(|what| wrong("descriptors", &what))?;
    let routes = dials::build_route_table(file.policy.as_ref(), &file.route, unary.as_ref(), &origin)?;
    let Some(Single(upstream)) = file.upstream else {
        let what = "missing; name the app, such as \"http://127.0.0.1:3000\", here, by --upstream or by IBID_UPSTREAM";
        return Err(wrong("upstream", what));
    };
    let listen = value_or(file.listen, parse_default(DEFAULT_LISTEN));
    let no_loop = |key: &str, upstream: &UpstreamUrl| {
        let what = format!("{:?} is where ibid itself listens ({listen})", upstream.0);
        if is_loop_to(upstream, listen) { Err(wrong(key, &what)) } else { Ok(()) }
    };
    no_loop("upstream", &upstream)?;
    for (at, route) in file.route.iter().enumerate() {
        if let Some(Single(upstream)) = &route.upstream {
            no_loop(&format!("route[{}].upstream", at + 1), upstream)?;
        }
    }
    if let Some(Single(upstream)) = file.policy.as_ref().and_then(|policy| policy.upstream.as_ref()) {
        no_loop("policy.upstream", upstream)?;
    }
    let trusted_proxies = match &file.trusted_proxies {
        None => TrustedProxies::loopback(),
        Some(list) => TrustedProxies::parse(list.0.iter().map(String::as_str))
            .map_err(|why| wrong("trusted_proxies", why.message()))?,
    };
    let credentials = build_credentials(file.credentials, file.credential_schemes, &wrong)?;
    let pem = |key: &str, written: &Secret| load_pem(key, written, lookup).map_err(|what| wrong(key, &what));
    let tls = build_tls("tls", file.tls, &pem, &wrong)?;
    let upstream_identity = build_identity("upstream_", file.upstream_cert, file.upstream_key, &pem, &wrong)?;
    let trace = build_trace(file.trace, &pem, &wrong)?;
    let jwt = file.jwt.map(|jwt| jwt::build_jwt(jwt, &pem, &wrong)).transpose()?;
    jwt::require_verifier_for_claims(jwt.as_ref(), &routes, &wrong)?;
    let quota = QuotaSettings {
        new_keys: file.quota.new_keys.map(|Single(limit)| limit),
        new_bytes: file.quota.new_bytes.map(|Single(ByteLimit(limit))| limit),
        rate: file.quota.rate.map(|Single(limit)| limit),
    };
    let grpc_unknown = file.grpc_unknown.map(|Single(set)| set);
    let routes = routes.with_quota(quota.is_set()).with_unknown_calls(grpc_unknown);
    let upstream_ca = file.upstream_ca.as_ref().map(|Single(path)| {
        let written = Secret::from_text(path).map_err(|what| wrong("upstream_ca", &what))?;
        pem("upstream_ca", &written)
    });
    let store = store::build_store(file.store, &wrong)?;
    let seal =
        file.seal.map(|written| seal::build_seal(written, store.compress.unwrap_or(true), &wrong)).transpose()?;
    let journal = match file.journal {
        Some(Single(path)) if path == "off" => None,
        Some(Single(path)) if path.is_empty() => {
            return Err(wrong("journal", "it is empty; allowed is a directory or \"off\""));
        }
        Some(Single(path)) => Some(path.into()),
        // Every store outside this process can be unavailable, so it needs a journal.
        None => (!store.url.is_memory()).then(|| DEFAULT_JOURNAL.into()),
    };
    let admin = build_admin(file.admin, journal.as_deref(), &pem, &wrong)?;
    if admin.as_ref().is_some_and(|admin| admin.listen == listen && listen.port() != 0) {
        return Err(wrong("admin.listen", &format!("\"{listen}\" is where clients connect already (listen)")));
    }
    let mut settings = GatewaySettings {
        file: path,
        value_files: Vec::new(),
        listen,
        tls,
        upstream: upstream.0,
        upstream_ca: upstream_ca.transpose()?,
        upstream_identity,
        jwt,
        quota,
        max_upstream: require_at_least_one("max_upstream", file.max_upstream, 1024, &wrong)?,
        upstream_idle: value_or(file.upstream_idle, DEFAULT_UPSTREAM_IDLE),
        upgrades: file.upgrades.map_or_else(
            || vec!["websocket".to_owned()],
            |list| list.0.into_iter().map(|protocol| protocol.0).collect(),
        ),
        trusted_proxies,
        credentials,
        max_running: require_at_least_one("max_running", file.max_running, 10_000, &wrong)?,
        buffer_memory: value_or(file.buffer_memory, ByteSize(256 << 20)).0,
        cors_origins: file
            .cors
            .origins
            .map(|list| list.0.into_iter().map(|origin| origin.0).collect())
            .unwrap_or_default(),
        accept_forgetting: value_or(file.accept_forgetting, false),
        journal,
        descriptors: file.descriptors.map(|Single(path)| path),
        grpc_unknown,
        openapi: file.openapi.map(|list| list.0.into_iter().map(|path| path.0).collect()).unwrap_or_default(),
        reflected_descriptors: lookup.reflected.clone(),
        limits: build_limits(file.limits, &wrong)?,
        log: LogSettings {
            format: value_or(file.log.format, LogFormat::Text),
            level: value_or(file.log.level, LogLevel::Info),
        },
        trace,
        admin,
        store,
        seal,
        routes,
        warnings: Vec::new(),
        notes: Vec::new(),
    };
    let nobody_trusted = file.trusted_proxies.is_some_and(|list| list.0.is_empty());
    settings.warnings = warnings::find_warnings(&settings, nobody_trusted);
    settings.notes = warnings::find_notes(&settings);
    settings.value_files = lookup.read_paths();
    Ok(settings)
}

pub(super) fn value_or<T>(written: Option<Single<T>>, default: T) -> T {
    written.map_or(default, |written| written.0)
}

pub(super) fn parse_default<T: Scalar>(text: &str) -> T {
    T::from_text(text).unwrap_or_else(|_| panic!("a default that cannot be: {text}"))
}

/// Creates the error for a key.
pub(super) type ErrorForKey<'a> = &'a dyn Fn(&str, &str) -> ConfigError;

/// Reads the PEM text that a key names.
pub(super) type PemReader<'a> = &'a dyn Fn(&str, &Secret) -> Result<Pem, ConfigError>;

fn require_at_least_one(
    key: &str, written: Option<Single<usize>>, usual: usize, wrong: ErrorForKey<'_>,
) -> Result<usize, ConfigError> {
    match value_or(written, usual) {
        0 => Err(wrong(key, "found 0; allowed is 1 and more")),
        number => Ok(number),
    }
}

pub(super) fn require_non_zero(
    key: &str, written: Option<Single<Duration>>, usual: Duration, wrong: ErrorForKey<'_>,
) -> Result<Duration, ConfigError> {
    let duration = value_or(written, usual);
    if duration.is_zero() { Err(wrong(key, "it is zero; it must be longer, such as \"30s\"")) } else { Ok(duration) }
}

fn build_credentials(
    headers: Option<List<HeaderName>>, schemes: Option<List<String>>, wrong: ErrorForKey<'_>,
) -> Result<Credentials, ConfigError> {
    let credentials = headers.map_or_else(|| Ok(Credentials::default()), |list| Credentials::new(list.0));
    let credentials = credentials.map_err(|why| wrong("credentials", why.message()))?;
    let schemes = schemes.map(|list| list.0).unwrap_or_default();
    credentials.and_schemes(schemes).map_err(|why| wrong("credential_schemes", why.message()))
}

fn build_limits(file: raw::RawLimits, wrong: ErrorForKey<'_>) -> Result<LimitSettings, ConfigError> {
    let seconds = Duration::from_secs;
    let max_header_bytes = value_or(file.max_header_bytes, ByteSize(64 << 10)).0;
    if !(8 << 10..=1 << 24).contains(&max_header_bytes) {
        let what = format!("found {max_header_bytes} bytes; allowed is \"8KiB\" to \"16MiB\"");
        return Err(wrong("limits.max_header_bytes", &what));
    }
    Ok(LimitSettings {
        header_timeout: require_non_zero("limits.header_timeout", file.header_timeout, seconds(10), wrong)?,
        body_timeout: require_non_zero("limits.body_timeout", file.body_timeout, seconds(30), wrong)?,
        idle_timeout: require_non_zero("limits.idle_timeout", file.idle_timeout, seconds(75), wrong)?,
        write_timeout: require_non_zero("limits.write_timeout", file.write_timeout, seconds(60), wrong)?,
        pool_timeout: require_non_zero("limits.pool_timeout", file.pool_timeout, seconds(10), wrong)?,
        reply_timeout: require_non_zero("limits.reply_timeout", file.reply_timeout, seconds(300), wrong)?,
        tunnel_timeout: require_non_zero("limits.tunnel_timeout", file.tunnel_timeout, seconds(600), wrong)?,
        max_headers: require_at_least_one("limits.max_headers", file.max_headers, 100, wrong)?,
        max_header_bytes,
        max_connections: require_at_least_one("limits.max_connections", file.max_connections, 10_000, wrong)?,
        shutdown: value_or(file.shutdown, seconds(30)),
    })
}

/// Builds the certificate of a port. `table` is its table in the file.
fn build_tls(
    table: &str, file: Option<raw::RawTls>, pem: PemReader<'_>, wrong: ErrorForKey<'_>,
) -> Result<Option<TlsSettings>, ConfigError> {
    let Some(raw::RawTls { cert, key, client_ca }) = file else { return Ok(None) };
    let named = |name: &str| format!("{table}.{name}");
    let missing = |name: &str| wrong(&named(name), &format!("missing; [{table}] needs a cert and a key"));
    let Single(cert) = cert.ok_or_else(|| missing("cert"))?;
    let Single(key) = key.ok_or_else(|| missing("key"))?;
    let (cert, key) = (pem(&named("cert"), &cert)?, pem(&named("key"), &key)?);
    let client_ca = client_ca.map(|Single(ca)| pem(&named("client_ca"), &ca)).transpose()?;
    Ok(Some(TlsSettings { cert, key, client_ca }))
}

fn build_admin(
    file: raw::RawAdmin, journal: Option<&Path>, pem: PemReader<'_>, wrong: ErrorForKey<'_>,
) -> Result<Option<AdminSettings>, ConfigError> {
    let mut tokens: Vec<AdminToken> = Vec::new();
    let first = |Single(token)| AdminToken { role: Role::Admin, user: None, name: "admin.token".into(), token };
    tokens.extend(file.token.map(first));
    for (at, written) in file.tokens.into_iter().enumerate() {
        let key = |name: &str| format!("admin.tokens[{}].{name}", at + 1);
        let Some(Single(role)) = written.role else {
            return Err(wrong(&key("role"), "missing; allowed are \"admin\" \"viewer\" \"user\""));
        };
        let Some(Single(token)) = written.token else {
            return Err(wrong(&key("token"), "missing; write one such as \"env:IBID_VIEWER\""));
        };
        let user = written.user.map(|user| user.0);
        match (role, &user) {
            (Role::User, None) => {
                return Err(wrong(&key("user"), "missing; a token of role \"user\" names whose it is"));
            }
            (Role::User, Some(user)) if user.trim().is_empty() => {
                return Err(wrong(&key("user"), "it is empty; a token of role \"user\" names whose it is"));
            }
            (Role::Admin | Role::Viewer, Some(_)) => {
                let what = format!("a token of role \"{role}\" sees all users; leave user out, or use role = \"user\"");
                return Err(wrong(&key("user"), &what));
            }
            _ => {}
        }
        if tokens.iter().any(|known| known.token == token) {
            return Err(wrong(&key("token"), "another token is the same; each needs its own"));
        }
        let name = written.name.map_or_else(|| format!("admin.tokens[{}]", at + 1), |name| name.0);
        if name.trim().is_empty() || name.chars().count() > MAX_TOKEN_NAME_CHARS || name.contains(char::is_control) {
            let what = format!("it is no name; allowed are 1 to {MAX_TOKEN_NAME_CHARS} characters that can be shown");
            return Err(wrong(&key("name"), &what));
        }
        tokens.push(AdminToken { role, user, name, token });
    }
    let audit = match file.audit {
        Some(Single(path)) if path == "off" => None,
        Some(Single(path)) if path.is_empty() => {
            return Err(wrong("admin.audit", "it is empty; allowed is a file or \"off\""));
        }
        Some(Single(path)) => Some(path.into()),
        None => journal.map(|folder| folder.join(DEFAULT_AUDIT_FILE)),
    };
    let listen = value_or(file.listen, parse_default(DEFAULT_ADMIN)).0;
    let tls = build_tls("admin.tls", file.tls, pem, wrong)?;
    let hosts = file.hosts.map_or_else(Vec::new, |list| list.0);
    if let Some(at) = hosts.iter().position(|host| !hosts::is_host_name(host)) {
        let what = format!(
            "{:?} is no host name; allowed is one without scheme and port, such as \"ibid.example.com\"",
            hosts[at]
        );
        return Err(wrong(&format!("admin.hosts[{}]", at + 1), &what));
    }
    Ok(listen.map(|listen| AdminSettings { listen, tokens, audit, hosts, tls }))
}

fn build_trace(
    file: raw::RawTrace, pem: PemReader<'_>, wrong: ErrorForKey<'_>,
) -> Result<Option<TraceSettings>, ConfigError> {
    let secure = file.otlp.as_ref().is_some_and(|Single(collector)| collector.is_secure());
    for (name, given) in [("trace.ca", file.ca.is_some()), ("trace.cert", file.cert.is_some())] {
        if given && !secure {
            return Err(wrong(name, "certificates are for a collector at https://…; set trace.otlp to one"));
        }
    }
    let ca = file.ca.map(|Single(ca)| pem("trace.ca", &ca)).transpose()?;
    let identity = build_identity("trace.", file.cert, file.key, pem, wrong)?;
    Ok(file.otlp.map(|Single(collector)| TraceSettings { collector, ca, identity }))
}

/// Builds a client certificate. `whose` is the prefix of the settings' names.
pub(super) fn build_identity(
    whose: &str, cert: Option<Single<Secret>>, key: Option<Single<Secret>>, pem: PemReader<'_>, wrong: ErrorForKey<'_>,
) -> Result<Option<ClientIdentity>, ConfigError> {
    let (cert_name, key_name) = (format!("{whose}cert"), format!("{whose}key"));
    match (cert, key) {
        (None, None) => Ok(None),
        (Some(Single(cert)), Some(Single(key))) => {
            Ok(Some(ClientIdentity { cert: pem(&cert_name, &cert)?, key: pem(&key_name, &key)? }))
        }
        (None, _) => Err(wrong(&cert_name, "missing; a certificate and its key belong together")),
        (_, None) => Err(wrong(&key_name, "missing; a certificate and its key belong together")),
    }
}

/// Loads the gRPC methods of a descriptor set. Empty while reflection has not been queried.
fn load_unary_methods(path: &str, lookup: &ValueResolver<'_>) -> Result<UnaryMethods, String> {
    if path == REFLECTION_KEYWORD {
        let told = lookup.reflected.as_deref().map(UnaryMethods::from_descriptor_set).transpose();
        return Ok(told
            .map_err(|why| format!("what the upstream said of itself cannot be used: {why}"))?
            .unwrap_or_default());
    }
    let bytes = lookup.read_bytes(path).map_err(|why| format!("cannot read {path:?}: {why}"))?;
    UnaryMethods::from_descriptor_set(&bytes).map_err(|why| format!("{path:?} cannot be used: {why}"))
}

/// Reads a PEM file. The value is its path or its text.
pub(super) fn load_pem(key: &str, written: &Secret, lookup: &ValueResolver<'_>) -> Result<Pem, String> {
    const BEGIN: &str = "-----BEGIN ";
    if written.expose().contains(BEGIN) {
        return Ok(Pem(written.clone()));
    }
    // The value may be the private key itself, in another format, instead of its path.
    let shown = if key.ends_with("key") { "what it names".into() } else { format!("{:?}", written.expose()) };
    let text = lookup.read(written.expose()).map_err(|why| format!("cannot read {shown}: {why}"))?;
    if !text.contains(BEGIN) {
        return Err(format!("{shown} is no PEM file; it has no line \"-----BEGIN ...\""));
    }
    Secret::from_text(&text).map(Pem)
}

/// Whether the upstream is the gateway itself, so that requests would loop.
fn is_loop_to(upstream: &UpstreamUrl, listen: std::net::SocketAddr) -> bool {
    let (host, port) = upstream.host_and_port();
    let local = host == "localhost";
    let address = if local { Some(IpAddr::from([127, 0, 0, 1])) } else { host.parse().ok() };
    port == listen.port()
        && address.is_some_and(|address| {
            address == listen.ip()
                || listen.ip().is_unspecified() && (address.is_loopback() || address.is_unspecified())
                || local && listen.ip().is_loopback()
        })
}
