//! Turns the raw file into finished settings: defaults and contradictions.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use http::{HeaderName, Uri, header};
use ibid::{
    grpc::UnaryMethods,
    scope::{Credentials, TrustedProxies},
};

use ibid_stores::StoreKind;

use super::{
    dials,
    env::ValueResolver,
    error::ConfigError,
    raw,
    secret::{Collector, Secret, UpstreamUrl},
    settings::{
        AdminSettings, AdminToken, ApiListen, ApiSettings, AuditDestination, ClientIdentity, ClientTls,
        GatewaySettings, JwtKeys, JwtSettings, PemFile, REFLECTION_KEYWORD, Role, TlsSettings, TokenSource,
        TraceSettings,
    },
    store::build_seal,
    toml_node::Scalar,
    warnings,
};
use crate::{admin::hosts, jwt::KeySet, routes::RouteTable};

const DEFAULT_JOURNAL: &str = "ibid-journal";
/// In the journal's directory.
const DEFAULT_AUDIT_FILE: &str = "audit.jsonl";
const MAX_TOKEN_NAME_CHARS: usize = 100;
const OTEL_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// Only for traces, and with the whole path.
const OTEL_TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";

/// Validates a file that variables and flags have already overridden. Errors are kept in `lookup`; the settings count
/// only if it has none.
pub(super) fn validate(file: raw::RawFile, path: Option<PathBuf>, lookup: &ValueResolver<'_>) -> GatewaySettings {
    let unary = file.descriptors.as_ref().map(|path| load_unary_methods(path, lookup)).transpose();
    let unary = lookup.collect(unary.map_err(|what| wrong("descriptors", what)));
    let routes = match unary {
        Some(unary) => dials::build_route_table(file.policy.as_ref(), &file.route, unary.as_ref(), lookup),
        None => RouteTable::new(Vec::new()),
    };
    check_upstreams(&file, lookup);
    let missing = "missing; name the app, such as \"http://127.0.0.1:3000\", here, by --upstream or by IBID_UPSTREAM";
    let upstream = lookup.collect(file.upstream.ok_or_else(|| wrong("upstream", missing)));
    let trusted_proxies = file.trusted_proxies.as_ref().and_then(|list| {
        let networks = TrustedProxies::parse(list.iter().map(String::as_str));
        lookup.collect(networks.map_err(|why| wrong("trusted_proxies", why.message())))
    });
    let has_jwt = file.jwt.is_some();
    let jwt = file.jwt.and_then(|jwt| lookup.collect(build_jwt(jwt, lookup)));
    if !has_jwt {
        lookup.collect(require_verifier_for_claims(&routes));
    }
    let store = lookup.collect(file.store.check()).unwrap_or_default();
    let compress = store.compress.unwrap_or(true);
    // Every store outside this process can be unavailable, so it needs a journal.
    let journal = (store.url.store_url().kind() != StoreKind::Memory).then(|| DEFAULT_JOURNAL.into());
    let journal = lookup.collect(path_or_off("journal", "a directory", file.journal, journal)).flatten();
    let admin = build_admin(file.admin, journal.as_deref(), lookup);
    let listen = file.listen;
    if admin.as_ref().is_some_and(|admin| admin.listen == listen && listen.port() != 0) {
        let what = format!("\"{listen}\" is where clients connect already (listen)");
        lookup.collect(Err::<(), _>(wrong("admin.listen", what)));
    }
    if file.ext_proc.listen.is_some_and(|address| address == listen && listen.port() != 0) {
        let what = format!("\"{listen}\" is where clients connect already (listen)");
        lookup.collect(Err::<(), _>(wrong("ext_proc.listen", what)));
    }
    let tls = file.tls.and_then(|tls| lookup.collect(build_tls("tls", tls, lookup)));
    let upstream_tls = build_client_tls("upstream_", file.upstream_ca, file.upstream_cert, file.upstream_key, lookup);
    let credentials = build_credentials(file.credentials, file.credential_schemes);
    let mut settings = GatewaySettings {
        file: path,
        value_files: Vec::new(),
        listen,
        tls,
        upstream: upstream.map(|upstream| upstream.0).unwrap_or_default(),
        upstream_tls: lookup.collect(upstream_tls).unwrap_or_default(),
        jwt,
        quota: file.quota,
        max_upstream: file.max_upstream,
        upstream_idle: file.upstream_idle,
        upgrades: file
            .upgrades
            .map_or_else(|| vec!["websocket".to_owned()], |list| list.into_iter().map(|protocol| protocol.0).collect()),
        trusted_proxies: trusted_proxies.unwrap_or_else(TrustedProxies::loopback),
        credentials: lookup.collect(credentials).unwrap_or_default(),
        max_running: file.max_running,
        buffer_memory: file.buffer_memory,
        cors_origins: file.cors.origins.into_iter().map(|origin| origin.0).collect(),
        accept_forgetting: file.accept_forgetting,
        journal,
        descriptors: file.descriptors,
        grpc_unknown: file.grpc_unknown,
        openapi: file.openapi.into_iter().map(|path| path.0).collect(),
        reflected_descriptors: lookup.reflected.clone(),
        limits: file.limits,
        log: file.log,
        trace: lookup.collect(build_trace(file.trace, lookup)).flatten(),
        admin,
        api: lookup.collect(build_api(file.api, listen)).flatten(),
        ext_proc: file.ext_proc.listen,
        store,
        seal: file.seal.and_then(|written| lookup.collect(build_seal(written, compress))),
        routes: routes.with_quota(file.quota.is_set()).with_unknown_calls(file.grpc_unknown),
        warnings: Vec::new(),
        notes: Vec::new(),
    };
    let nobody_trusted = file.trusted_proxies.is_some_and(|list| list.is_empty());
    settings.warnings = warnings::find_warnings(&settings, nobody_trusted);
    settings.notes = warnings::find_notes(&settings);
    settings.value_files = lookup.read_paths();
    settings
}

fn wrong(key: impl Into<String>, what: impl Into<String>) -> ConfigError {
    ConfigError::at(key, what)
}

fn check_upstreams(file: &raw::RawFile, lookup: &ValueResolver<'_>) {
    let upstreams = file.route.iter().enumerate().map(|(at, route)| (format!("route[{}].", at + 1), &route.upstream));
    let default = file.policy.iter().map(|policy| ("policy.".to_owned(), &policy.upstream));
    for (place, upstream) in [(String::new(), &file.upstream)].into_iter().chain(upstreams).chain(default) {
        if let Some(upstream) = upstream.as_ref().filter(|upstream| is_loop_to(upstream, file.listen)) {
            let what = format!("{:?} is where ibid itself listens ({})", upstream.0, file.listen);
            lookup.collect(Err::<(), _>(wrong(format!("{place}upstream"), what)));
        }
    }
}

/// Reads a path that may be `off`.
fn path_or_off(
    key: &str, allowed: &str, written: Option<String>, default: Option<PathBuf>,
) -> Result<Option<PathBuf>, ConfigError> {
    match written {
        None => Ok(default),
        Some(path) if path == "off" => Ok(None),
        Some(path) if path.is_empty() => Err(wrong(key, format!("it is empty; allowed is {allowed} or \"off\""))),
        Some(path) => Ok(Some(path.into())),
    }
}

fn build_credentials(headers: Option<Vec<HeaderName>>, schemes: Vec<String>) -> Result<Credentials, ConfigError> {
    let credentials = headers.map_or_else(|| Ok(Credentials::default()), Credentials::new);
    let credentials = credentials.map_err(|why| wrong("credentials", why.message()))?;
    credentials.and_schemes(schemes).map_err(|why| wrong("credential_schemes", why.message()))
}

/// Builds the certificate of a port. `table` is its table in the file.
fn build_tls(table: &str, file: raw::RawTls, lookup: &ValueResolver<'_>) -> Result<TlsSettings, ConfigError> {
    let missing = |name: &str| wrong(format!("{table}.{name}"), format!("missing; [{table}] needs a cert and a key"));
    let cert = file.cert.ok_or_else(|| missing("cert"))?;
    let key = file.key.ok_or_else(|| missing("key"))?;
    let client_ca = file.client_ca.map(|ca| ca.load(lookup)).transpose()?;
    Ok(TlsSettings { cert: cert.load(lookup)?, key: key.load(lookup)?, client_ca })
}

fn build_admin(file: raw::RawAdmin, journal: Option<&Path>, lookup: &ValueResolver<'_>) -> Option<AdminSettings> {
    let mut tokens: Vec<AdminToken> = Vec::new();
    let first = |token| AdminToken { role: Role::Admin, user: None, name: "admin.token".into(), token };
    tokens.extend(file.token.map(first));
    for (at, written) in file.tokens.into_iter().enumerate() {
        let token = lookup.collect(build_admin_token(&format!("admin.tokens[{}]", at + 1), written, &tokens));
        tokens.extend(token);
    }
    let audit = journal.map(|folder| folder.join(DEFAULT_AUDIT_FILE));
    let audit = match file.audit {
        Some(word) if word == "store" => AuditDestination::Store,
        written => lookup
            .collect(path_or_off("admin.audit", "a file, \"store\"", written, audit))
            .flatten()
            .map_or(AuditDestination::Memory, AuditDestination::File),
    };
    let tls = file.tls.and_then(|tls| lookup.collect(build_tls("admin.tls", tls, lookup)));
    for (at, host) in file.hosts.iter().enumerate().filter(|(_, host)| !hosts::is_host_name(host)) {
        let allowed = "allowed is one without scheme and port, such as \"ibid.example.com\"";
        let what = format!("{host:?} is no host name; {allowed}");
        lookup.collect(Err::<(), _>(wrong(format!("admin.hosts[{}]", at + 1), what)));
    }
    file.listen.map(|listen| AdminSettings { listen, tokens, audit, hosts: file.hosts, tls })
}

fn build_api(file: raw::RawApi, clients: SocketAddr) -> Result<Option<ApiSettings>, ConfigError> {
    let Some(listen) = file.listen else {
        let needless = "it is for api.listen, which is missing; name a place such as \"unix:/run/ibid/api.sock\"";
        return if file.token.is_some() { Err(wrong("api.token", needless)) } else { Ok(None) };
    };
    match &listen {
        ApiListen::Tcp(address) if *address == clients && clients.port() != 0 => {
            Err(wrong("api.listen", format!("\"{address}\" is where clients connect already (listen)")))
        }
        ApiListen::Tcp(_) if file.token.is_none() => {
            let what = "missing; every local user can connect to an address, so write a token such as \
                        \"env:IBID_API_TOKEN\", or listen on \"unix:PATH\"";
            Err(wrong("api.token", what))
        }
        _ => Ok(Some(ApiSettings { listen, token: file.token })),
    }
}

/// `place` is the path of the token, and its name unless it has one. `known` are the tokens before it.
fn build_admin_token(place: &str, written: raw::RawToken, known: &[AdminToken]) -> Result<AdminToken, ConfigError> {
    let wrong = |name: &str, what: &str| wrong(format!("{place}.{name}"), what);
    let missing = "missing; allowed are \"admin\" \"viewer\" \"user\"";
    let role = written.role.ok_or_else(|| wrong("role", missing))?;
    let missing = "missing; write one such as \"env:IBID_VIEWER\"";
    let token = written.token.ok_or_else(|| wrong("token", missing))?;
    let user = written.user;
    match (role, &user) {
        (Role::User, None) => {
            return Err(wrong("user", "missing; a token of role \"user\" names whose it is"));
        }
        (Role::User, Some(user)) if user.trim().is_empty() => {
            return Err(wrong("user", "it is empty; a token of role \"user\" names whose it is"));
        }
        (Role::Admin | Role::Viewer, Some(_)) => {
            let what = format!("a token of role \"{role}\" sees all users; leave user out, or use role = \"user\"");
            return Err(wrong("user", &what));
        }
        _ => {}
    }
    if known.iter().any(|known| known.token == token) {
        return Err(wrong("token", "another token is the same; each needs its own"));
    }
    let name = written.name.unwrap_or_else(|| place.to_owned());
    if name.trim().is_empty() || name.chars().count() > MAX_TOKEN_NAME_CHARS || name.contains(char::is_control) {
        let what = format!("it is no name; allowed are 1 to {MAX_TOKEN_NAME_CHARS} characters that can be shown");
        return Err(wrong("name", &what));
    }
    Ok(AdminToken { role, user, name, token })
}

/// Without `trace.otlp`, OpenTelemetry's own variables name the collector.
fn build_trace(mut file: raw::RawTrace, lookup: &ValueResolver<'_>) -> Result<Option<TraceSettings>, ConfigError> {
    let variable = |name: &str| lookup.env.non_empty(name);
    if file.otlp.is_none() {
        file.otlp = match (variable(OTEL_TRACES_ENDPOINT)?, variable(OTEL_ENDPOINT)?) {
            (Some(url), _) => Some(read_collector(OTEL_TRACES_ENDPOINT, &url)?.with_full_path(&url)),
            (None, Some(url)) => Some(read_collector(OTEL_ENDPOINT, &url)?),
            (None, None) => None,
        };
    }
    let secure = file.otlp.as_ref().is_some_and(|collector| collector.is_secure);
    for (name, given) in [("trace.ca", file.ca.is_some()), ("trace.cert", file.cert.is_some())] {
        if given && !secure {
            return Err(wrong(name, "certificates are for a collector at https://…; set trace.otlp to one"));
        }
    }
    let tls = build_client_tls("trace.", file.ca, file.cert, file.key, lookup)?;
    let attributes = variable("OTEL_RESOURCE_ATTRIBUTES")?.unwrap_or_default();
    let attributes = attributes.split(',').filter_map(|pair| pair.split_once('='));
    let mut resource: Vec<(String, String)> =
        attributes.map(|(name, value)| (name.trim().to_owned(), decode_percent(value.trim()))).collect();
    let name = resource.iter().position(|(name, _)| name == "service.name").map(|at| resource.remove(at).1);
    let name = variable("OTEL_SERVICE_NAME")?.or(name).unwrap_or_else(|| "ibid".into());
    resource.insert(0, ("service.name".into(), name));
    let is_disabled = variable("OTEL_SDK_DISABLED")?.is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let collector = file.otlp.filter(|_| !is_disabled);
    Ok(collector.map(|collector| TraceSettings { collector, tls, resource }))
}

fn read_collector(variable: &str, url: &str) -> Result<Collector, ConfigError> {
    Collector::from_text(url).map_err(|what| ConfigError::new(variable, "", what))
}

fn decode_percent(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// `whose` is the prefix of the settings' names.
pub(super) fn build_client_tls(
    whose: &str, ca: Option<PemFile>, cert: Option<PemFile>, key: Option<PemFile>, lookup: &ValueResolver<'_>,
) -> Result<ClientTls, ConfigError> {
    let missing = |name: &str| wrong(format!("{whose}{name}"), "missing; a certificate and its key belong together");
    let identity = match (cert, key) {
        (None, None) => None,
        (Some(cert), Some(key)) => Some(ClientIdentity { cert: cert.load(lookup)?, key: key.load(lookup)? }),
        (None, _) => return Err(missing("cert")),
        (_, None) => return Err(missing("key")),
    };
    Ok(ClientTls { ca: ca.map(|ca| ca.load(lookup)).transpose()?, identity })
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

/// Whether the upstream is the gateway itself, so that requests would loop.
fn is_loop_to(upstream: &UpstreamUrl, listen: SocketAddr) -> bool {
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

pub(super) fn build_jwt(file: raw::RawJwt, lookup: &ValueResolver<'_>) -> Result<JwtSettings, ConfigError> {
    let wrong = |key: &str| {
        let key = key.to_owned();
        move |what: String| ConfigError::at(key, what)
    };
    let keys = match (file.secret, file.pem, file.jwks) {
        (Some(secret), None, None) => {
            KeySet::from_secret(secret.expose()).map_err(wrong("jwt.secret"))?;
            JwtKeys::Secret(secret)
        }
        (None, Some(pem), None) => {
            let pem = pem.load(lookup)?;
            KeySet::from_pem(pem.text()).map_err(wrong("jwt.pem"))?;
            JwtKeys::Pem(pem)
        }
        (None, None, Some(jwks)) => parse_jwks(jwks).map_err(wrong("jwt.jwks"))?,
        (None, None, None) => {
            return Err(ConfigError::at("jwt", "found no keys; allowed is one of \"secret\" \"pem\" \"jwks\""));
        }
        _ => {
            let what = "found keys in two places; allowed is one of \"secret\" \"pem\" \"jwks\"";
            return Err(ConfigError::at("jwt", what));
        }
    };
    for (name, given) in [("jwt.ca", file.ca.is_some()), ("jwt.cert", file.cert.is_some())] {
        if given && !matches!(keys, JwtKeys::JwksUrl(_)) {
            return Err(ConfigError::at(name, "certificates are only for keys from a URL; set jwks to one"));
        }
    }
    Ok(JwtSettings {
        keys,
        tls: build_client_tls("jwt.", file.ca, file.cert, file.key, lookup)?,
        issuer: file.issuer,
        audience: file.audience,
        from: token_sources(file.from)?,
        leeway: file.leeway,
        refresh: file.refresh,
    })
}

/// Defaults to the `Authorization` header.
fn token_sources(written: Option<Vec<String>>) -> Result<Vec<TokenSource>, ConfigError> {
    let Some(written) = written else { return Ok(vec![TokenSource::Header(header::AUTHORIZATION)]) };
    if written.is_empty() {
        return Err(ConfigError::at(
            "jwt.from",
            "found no source; name at least one, such as \"header:Authorization\"",
        ));
    }
    let source = |text: &String| match text.split_once(':') {
        Some(("header", name)) => name.parse().ok().map(TokenSource::Header),
        Some(("cookie", name)) if !name.is_empty() => Some(TokenSource::Cookie(name.into())),
        _ => None,
    };
    let allowed = "allowed are \"header:NAME\" and \"cookie:NAME\"";
    let checked =
        |text: &String| source(text).ok_or_else(|| ConfigError::at("jwt.from", format!("found {text:?}; {allowed}")));
    written.iter().map(checked).collect()
}

/// A policy that uses claims requires `[jwt]`: unverified claims are worthless.
fn require_verifier_for_claims(routes: &RouteTable) -> Result<(), ConfigError> {
    for (at, route) in routes.iter().enumerate() {
        if let Some(claim) = route.policy.claims().next() {
            let place = if route.is_default_policy { "policy".to_owned() } else { format!("route[{}]", at + 1) };
            let what =
                format!("\"jwt:{claim}\" needs keys to verify tokens with; add [jwt] with a secret, pem or jwks");
            return Err(ConfigError::at(place, what));
        }
    }
    Ok(())
}

/// Parses the text of a JWK set, from `file:` or `env:`, or its URL.
fn parse_jwks(written: Secret) -> Result<JwtKeys, String> {
    let text = written.expose();
    if text.trim_start().starts_with('{') {
        KeySet::from_jwks(text.as_bytes())?;
        return Ok(JwtKeys::Jwks(written));
    }
    let allowed = "allowed is \"file:PATH\" or a URL such as \"https://id.example.com/.well-known/jwks.json\"";
    let Some(uri) = text.parse::<Uri>().ok().filter(|uri| uri.scheme().is_some() && uri.authority().is_some()) else {
        return Err(format!("it is no JWK set; {allowed}"));
    };
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let here = host == "localhost" || host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback());
    // A query may contain a secret.
    let shown = text.split('?').next().unwrap_or_default();
    match uri.scheme_str() {
        _ if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) => {
            Err(format!("a URL with a user's name or password is not shown here; {allowed}"))
        }
        Some("https") => Ok(JwtKeys::JwksUrl(text.into())),
        Some("http") if here => Ok(JwtKeys::JwksUrl(text.into())),
        Some("http") => Err(format!("{shown:?}: the keys could be exchanged on the way; use https")),
        _ => Err(format!("{shown:?} is no URL for keys; {allowed}")),
    }
}
