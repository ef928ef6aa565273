//! From the file to finished settings: defaults, and what contradicts what.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use http::HeaderName;
use ibid::{Credentials, TrustedProxies, grpc::Unary};

use super::{
    dials,
    env::Lookup,
    error::ConfigError,
    jwt, raw,
    scalar::{List, One, Scalar},
    seal,
    secret::{Secret, Upstream},
    settings::{
        Admin, Limits, Log, LogFormat, LogLevel, Pem, Quota, REFLECTION, Role, Settings, Shown, Tls, Token, Trace,
    },
    store,
    values::{ByteLimit, Size},
    warnings,
};
use crate::admin::hosts;

const DEFAULT_LISTEN: &str = "127.0.0.1:8080";
const DEFAULT_ADMIN: &str = "127.0.0.1:8081";
const DEFAULT_JOURNAL: &str = "ibid-journal";
/// Shorter than the 5 s after which many app servers (Node, uvicorn, Hypercorn) close idle connections.
const UPSTREAM_IDLE: Duration = Duration::from_secs(4);
/// Beside the answers in the journal's folder.
const DEFAULT_AUDIT: &str = "audit.jsonl";
/// The most characters of the name of a token's holder.
const LONGEST_NAME: usize = 100;

/// Finishes a file over which everything else was laid.
pub(super) fn finish(file: raw::File, path: Option<PathBuf>, lookup: &Lookup<'_>) -> Result<Settings, ConfigError> {
    let origin = path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let wrong = |key: &str, what: &str| ConfigError::new(&origin, key, what);
    let unary = file.descriptors.as_ref().map(|One(path)| descriptors(path, lookup)).transpose();
    let unary = unary.map_err(|what| wrong("descriptors", &what))?;
    let routes = dials::finish(file.policy.as_ref(), &file.route, unary.as_ref(), &origin)?;
    let Some(One(upstream)) = file.upstream else {
        let what = "missing; name the app, such as \"http://127.0.0.1:3000\", here, by --upstream or by IBID_UPSTREAM";
        return Err(wrong("upstream", what));
    };
    let listen = or(file.listen, default(DEFAULT_LISTEN));
    let no_loop = |key: &str, upstream: &Upstream| {
        let what = format!("{:?} is where ibid itself listens ({listen})", upstream.0);
        if leads_to(upstream, listen) { Err(wrong(key, &what)) } else { Ok(()) }
    };
    no_loop("upstream", &upstream)?;
    for (at, route) in file.route.iter().enumerate() {
        if let Some(One(upstream)) = &route.upstream {
            no_loop(&format!("route[{}].upstream", at + 1), upstream)?;
        }
    }
    if let Some(One(upstream)) = file.policy.as_ref().and_then(|policy| policy.upstream.as_ref()) {
        no_loop("policy.upstream", upstream)?;
    }
    let trusted_proxies = match &file.trusted_proxies {
        None => TrustedProxies::loopback(),
        Some(list) => {
            TrustedProxies::parse(list.0.iter().map(String::as_str)).map_err(|what| wrong("trusted_proxies", &what))?
        }
    };
    let credentials = credentials(file.credentials, file.credential_schemes, &wrong)?;
    let pem = |key: &str, written: &Secret| pem(key, written, lookup).map_err(|what| wrong(key, &what));
    let tls = tls("tls", file.tls, &pem, &wrong)?;
    let upstream_identity = identity("upstream_", file.upstream_cert, file.upstream_key, &pem, &wrong)?;
    let trace = trace(file.trace, &pem, &wrong)?;
    let jwt = file.jwt.map(|jwt| jwt::finish(jwt, &pem, &wrong)).transpose()?;
    jwt::check_routes(jwt.as_ref(), &routes, &wrong)?;
    let quota = Quota {
        new_keys: file.quota.new_keys.map(|One(limit)| limit),
        new_bytes: file.quota.new_bytes.map(|One(ByteLimit(limit))| limit),
        rate: file.quota.rate.map(|One(limit)| limit),
    };
    let grpc_unknown = file.grpc_unknown.map(|One(set)| set);
    let routes = routes.limited(quota.is_set()).with_unknown_calls(grpc_unknown);
    let upstream_ca = file.upstream_ca.as_ref().map(|One(path)| {
        let written = Secret::from_text(path).map_err(|what| wrong("upstream_ca", &what))?;
        pem("upstream_ca", &written)
    });
    let store = store::finish(file.store, &wrong)?;
    let seal = file.seal.map(|written| seal::finish(written, store.compress.unwrap_or(true), &wrong)).transpose()?;
    let journal = match file.journal {
        Some(One(path)) if path == "off" => None,
        Some(One(path)) if path.is_empty() => {
            return Err(wrong("journal", "it is empty; allowed is a directory or \"off\""));
        }
        Some(One(path)) => Some(path.into()),
        // All but a store in this process can be away.
        None => (!store.url.is_memory()).then(|| DEFAULT_JOURNAL.into()),
    };
    let admin = admin(file.admin, journal.as_deref(), &pem, &wrong)?;
    if admin.as_ref().is_some_and(|admin| admin.listen == listen && listen.port() != 0) {
        return Err(wrong("admin.listen", &format!("\"{listen}\" is where clients connect already (listen)")));
    }
    let mut settings = Settings {
        file: path,
        files: Vec::new(),
        listen,
        tls,
        upstream: upstream.0,
        upstream_ca: upstream_ca.transpose()?,
        upstream_identity,
        jwt,
        quota,
        max_upstream: at_least_one("max_upstream", file.max_upstream, 1024, &wrong)?,
        upstream_idle: or(file.upstream_idle, UPSTREAM_IDLE),
        upgrades: file.upgrades.map_or_else(
            || vec!["websocket".to_owned()],
            |list| list.0.into_iter().map(|protocol| protocol.0).collect(),
        ),
        trusted_proxies,
        credentials,
        max_running: at_least_one("max_running", file.max_running, 10_000, &wrong)?,
        buffer_memory: or(file.buffer_memory, Size(256 << 20)).0,
        cors_origins: file
            .cors
            .origins
            .map(|list| list.0.into_iter().map(|origin| origin.0).collect())
            .unwrap_or_default(),
        accept_forgetting: or(file.accept_forgetting, false),
        journal,
        descriptors: file.descriptors.map(|One(path)| path),
        grpc_unknown,
        openapi: file.openapi.map(|list| list.0.into_iter().map(|path| path.0).collect()).unwrap_or_default(),
        reflected: lookup.reflected.clone(),
        limits: limits(file.limits, &wrong)?,
        log: Log { format: or(file.log.format, LogFormat::Text), level: or(file.log.level, LogLevel::Info) },
        trace,
        admin,
        store,
        seal,
        routes,
        warnings: Vec::new(),
        notes: Vec::new(),
    };
    let nobody_trusted = file.trusted_proxies.is_some_and(|list| list.0.is_empty());
    settings.warnings = warnings::warnings(&settings, nobody_trusted);
    settings.notes = warnings::notes(&settings);
    settings.files = lookup.files();
    Ok(settings)
}

pub(super) fn or<T>(written: Option<One<T>>, default: T) -> T {
    written.map_or(default, |written| written.0)
}

pub(super) fn default<T: Scalar>(text: &str) -> T {
    T::from_text(text).unwrap_or_else(|_| panic!("a default that cannot be: {text}"))
}

/// Makes the error of a key.
pub(super) type Wrong<'a> = &'a dyn Fn(&str, &str) -> ConfigError;

/// Reads what a key names as PEM.
pub(super) type ReadPem<'a> = &'a dyn Fn(&str, &Secret) -> Result<Pem, ConfigError>;

fn at_least_one(key: &str, written: Option<One<usize>>, usual: usize, wrong: Wrong<'_>) -> Result<usize, ConfigError> {
    match or(written, usual) {
        0 => Err(wrong(key, "found 0; allowed is 1 and more")),
        number => Ok(number),
    }
}

pub(super) fn not_zero(
    key: &str, written: Option<One<Duration>>, usual: Duration, wrong: Wrong<'_>,
) -> Result<Duration, ConfigError> {
    let duration = or(written, usual);
    if duration.is_zero() { Err(wrong(key, "it is zero; it must be longer, such as \"30s\"")) } else { Ok(duration) }
}

fn credentials(
    headers: Option<List<HeaderName>>, schemes: Option<List<String>>, wrong: Wrong<'_>,
) -> Result<Credentials, ConfigError> {
    let credentials = headers.map_or_else(|| Ok(Credentials::default()), |list| Credentials::new(list.0));
    let credentials = credentials.map_err(|what| wrong("credentials", &what))?;
    let schemes = schemes.map(|list| list.0).unwrap_or_default();
    credentials.and_schemes(schemes).map_err(|what| wrong("credential_schemes", &what))
}

fn limits(file: raw::Limits, wrong: Wrong<'_>) -> Result<Limits, ConfigError> {
    let seconds = Duration::from_secs;
    let max_header_bytes = or(file.max_header_bytes, Size(64 << 10)).0;
    if !(8 << 10..=1 << 24).contains(&max_header_bytes) {
        let what = format!("found {max_header_bytes} bytes; allowed is \"8KiB\" to \"16MiB\"");
        return Err(wrong("limits.max_header_bytes", &what));
    }
    Ok(Limits {
        header_timeout: not_zero("limits.header_timeout", file.header_timeout, seconds(10), wrong)?,
        body_timeout: not_zero("limits.body_timeout", file.body_timeout, seconds(30), wrong)?,
        idle_timeout: not_zero("limits.idle_timeout", file.idle_timeout, seconds(75), wrong)?,
        write_timeout: not_zero("limits.write_timeout", file.write_timeout, seconds(60), wrong)?,
        pool_timeout: not_zero("limits.pool_timeout", file.pool_timeout, seconds(10), wrong)?,
        reply_timeout: not_zero("limits.reply_timeout", file.reply_timeout, seconds(300), wrong)?,
        tunnel_timeout: not_zero("limits.tunnel_timeout", file.tunnel_timeout, seconds(600), wrong)?,
        max_headers: at_least_one("limits.max_headers", file.max_headers, 100, wrong)?,
        max_header_bytes,
        max_connections: at_least_one("limits.max_connections", file.max_connections, 10_000, wrong)?,
        shutdown: or(file.shutdown, seconds(30)),
    })
}

/// The certificate of a port; `table` is the one that it stands in.
fn tls(table: &str, file: Option<raw::Tls>, pem: ReadPem<'_>, wrong: Wrong<'_>) -> Result<Option<Tls>, ConfigError> {
    let Some(raw::Tls { cert, key, client_ca }) = file else { return Ok(None) };
    let named = |name: &str| format!("{table}.{name}");
    let missing = |name: &str| wrong(&named(name), &format!("missing; [{table}] needs a cert and a key"));
    let One(cert) = cert.ok_or_else(|| missing("cert"))?;
    let One(key) = key.ok_or_else(|| missing("key"))?;
    let (cert, key) = (pem(&named("cert"), &cert)?, pem(&named("key"), &key)?);
    let client_ca = client_ca.map(|One(ca)| pem(&named("client_ca"), &ca)).transpose()?;
    Ok(Some(Tls { cert, key, client_ca }))
}

fn admin(
    file: raw::Admin, journal: Option<&Path>, pem: ReadPem<'_>, wrong: Wrong<'_>,
) -> Result<Option<Admin>, ConfigError> {
    let mut tokens: Vec<Token> = Vec::new();
    let first = |One(token)| Token { role: Role::Admin, user: None, name: "admin.token".into(), token };
    tokens.extend(file.token.map(first));
    for (at, written) in file.tokens.into_iter().enumerate() {
        let key = |name: &str| format!("admin.tokens[{}].{name}", at + 1);
        let Some(One(role)) = written.role else {
            return Err(wrong(&key("role"), "missing; allowed are \"admin\" \"viewer\" \"user\""));
        };
        let Some(One(token)) = written.token else {
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
        if name.trim().is_empty() || name.chars().count() > LONGEST_NAME || name.contains(char::is_control) {
            let what = format!("it is no name; allowed are 1 to {LONGEST_NAME} characters that can be shown");
            return Err(wrong(&key("name"), &what));
        }
        tokens.push(Token { role, user, name, token });
    }
    let audit = match file.audit {
        Some(One(path)) if path == "off" => None,
        Some(One(path)) if path.is_empty() => {
            return Err(wrong("admin.audit", "it is empty; allowed is a file or \"off\""));
        }
        Some(One(path)) => Some(path.into()),
        None => journal.map(|folder| folder.join(DEFAULT_AUDIT)),
    };
    let listen = or(file.listen, default(DEFAULT_ADMIN)).0;
    let tls = tls("admin.tls", file.tls, pem, wrong)?;
    let hosts = file.hosts.map_or_else(Vec::new, |list| list.0);
    if let Some(at) = hosts.iter().position(|host| !hosts::is_name(host)) {
        let what = format!(
            "{:?} is no host name; allowed is one without scheme and port, such as \"ibid.example.com\"",
            hosts[at]
        );
        return Err(wrong(&format!("admin.hosts[{}]", at + 1), &what));
    }
    Ok(listen.map(|listen| Admin { listen, tokens, audit, hosts, tls }))
}

fn trace(file: raw::Trace, pem: ReadPem<'_>, wrong: Wrong<'_>) -> Result<Option<Trace>, ConfigError> {
    let secure = file.otlp.as_ref().is_some_and(|One(collector)| collector.is_secure());
    for (name, given) in [("trace.ca", file.ca.is_some()), ("trace.cert", file.cert.is_some())] {
        if given && !secure {
            return Err(wrong(name, "certificates are for a collector at https://…; set trace.otlp to one"));
        }
    }
    let ca = file.ca.map(|One(ca)| pem("trace.ca", &ca)).transpose()?;
    let identity = identity("trace.", file.cert, file.key, pem, wrong)?;
    Ok(file.otlp.map(|One(collector)| Trace { collector, ca, identity }))
}

/// What is shown to somebody who asks for a certificate. `whose` is the beginning of the settings' names.
pub(super) fn identity(
    whose: &str, cert: Option<One<Secret>>, key: Option<One<Secret>>, pem: ReadPem<'_>, wrong: Wrong<'_>,
) -> Result<Option<Shown>, ConfigError> {
    let (cert_name, key_name) = (format!("{whose}cert"), format!("{whose}key"));
    match (cert, key) {
        (None, None) => Ok(None),
        (Some(One(cert)), Some(One(key))) => {
            Ok(Some(Shown { cert: pem(&cert_name, &cert)?, key: pem(&key_name, &key)? }))
        }
        (None, _) => Err(wrong(&cert_name, "missing; a certificate and its key belong together")),
        (_, None) => Err(wrong(&key_name, "missing; a certificate and its key belong together")),
    }
}

/// The gRPC methods of a descriptor set; none yet where upstreams have not been asked for theirs.
fn descriptors(path: &str, lookup: &Lookup<'_>) -> Result<Unary, String> {
    if path == REFLECTION {
        let told = lookup.reflected.as_deref().map(Unary::from_descriptor_set).transpose();
        return Ok(told
            .map_err(|why| format!("what the upstream said of itself cannot be used: {why}"))?
            .unwrap_or_default());
    }
    let bytes = lookup.read_bytes(path).map_err(|why| format!("cannot read {path:?}: {why}"))?;
    Unary::from_descriptor_set(&bytes).map_err(|why| format!("{path:?} cannot be used: {why}"))
}

/// A PEM file's path, or its text.
pub(super) fn pem(key: &str, written: &Secret, lookup: &Lookup<'_>) -> Result<Pem, String> {
    const BEGIN: &str = "-----BEGIN ";
    if written.expose().contains(BEGIN) {
        return Ok(Pem(written.clone()));
    }
    // What should be the path of a private key may be the key itself, in another form.
    let shown = if key.ends_with("key") { "what it names".into() } else { format!("{:?}", written.expose()) };
    let text = lookup.read(written.expose()).map_err(|why| format!("cannot read {shown}: {why}"))?;
    if !text.contains(BEGIN) {
        return Err(format!("{shown} is no PEM file; it has no line \"-----BEGIN ...\""));
    }
    Secret::from_text(&text).map(Pem)
}

/// Whether requests would come back to ibid for ever.
fn leads_to(upstream: &Upstream, listen: std::net::SocketAddr) -> bool {
    let (host, port) = upstream.place();
    let local = host == "localhost";
    let address = if local { Some(IpAddr::from([127, 0, 0, 1])) } else { host.parse().ok() };
    port == listen.port()
        && address.is_some_and(|address| {
            address == listen.ip()
                || listen.ip().is_unspecified() && (address.is_loopback() || address.is_unspecified())
                || local && listen.ip().is_loopback()
        })
}
