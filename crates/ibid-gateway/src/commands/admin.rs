//! The commands that ask a running gateway, and the client of its admin API.
//!
//! - `ibid health` checks the gateway that uses the same settings. For container images without curl.
//! - `ibid report` says how enforcement handles, or would handle, each route's requests, and which callers send no key. It
//!   helps to decide whether to change a route from `mode = "shadow"` to `enforce`.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use bytes::Bytes;
use clap::Args;
use http::{HeaderValue, Method, Request, StatusCode, Uri, header};
use ibid_tools::CommandError;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use super::{
    print::{escape_control, print_columns, print_json},
    store,
};
use crate::{
    admin::stats::{ShadowReport, ShadowRoute},
    config::{AdminTlsArgs, Env, GatewaySettings, Secret, ServeArgs},
    outbound::{OutboundClient, OutboundError},
    tls,
};

/// Timeout of one call. The gateway itself waits ten seconds for its store.
const ADMIN_CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a response in bytes: enough for a thousand records, or one with a large body in hex.
const MAX_RESPONSE_BYTES: usize = 512 << 20;

#[derive(Clone, Default, Args)]
pub(super) struct AdminArgs {
    /// The admin URL of a running gateway, such as http://127.0.0.1:8081
    #[arg(long, value_name = "URL")]
    pub admin: Option<String>,
    /// Its token, as env:NAME or file:PATH [default: env:IBID_ADMIN_TOKEN]
    #[arg(long, value_name = "SOURCE", requires = "admin")]
    pub token: Option<String>,
    #[command(flatten)]
    pub tls: AdminTlsArgs,
}

/// Omits values that may contain a token or a password by mistake.
impl fmt::Debug for AdminArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminArgs").field("tls", &self.tls).finish_non_exhaustive()
    }
}

pub(super) struct AdminClient {
    /// For messages.
    url: String,
    server: OutboundClient,
    token: Secret,
}

impl AdminClient {
    /// Returns the client that the flags describe, or `None` if they name no gateway.
    pub(super) fn from_args(choice: &AdminArgs, env: &Env<'_>) -> Result<Option<Self>, CommandError> {
        let Some(url) = &choice.admin else {
            if choice.tls.has_flags() {
                let what = "certificates of an admin port were given, and no admin port; name one with --admin https://HOST:PORT";
                return Err(CommandError::Usage(what.into()));
            }
            return Ok(None);
        };
        let usage = |what: String| {
            CommandError::Usage(format!("--admin: {what}; allowed is one such as http://127.0.0.1:8081"))
        };
        if url.contains('@') {
            return Err(usage("it names no host, or a password besides".into()));
        }
        let uri: Uri = url.parse().map_err(|_| usage(format!("{url:?} is no URL")))?;
        let secure = uri.scheme_str() == Some("https");
        if !secure && uri.scheme_str() != Some("http") {
            return Err(usage(format!("{url:?} is no URL of a gateway")));
        }
        let authority = uri.authority().ok_or_else(|| usage(format!("{url:?} names no host")))?;
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(usage(format!("{url:?} has a path")));
        }
        let source = choice.token.as_deref().unwrap_or("env:IBID_ADMIN_TOKEN");
        let token = Secret::from_source(source, env).map_err(|why| CommandError::Usage(format!("--token: {why}")))?;
        if !secure && choice.tls.has_flags() {
            let what = format!("--admin: {url:?} speaks no TLS, and certificates were given; write https://");
            return Err(CommandError::Usage(what));
        }
        let tls = if secure { tls::client_config("--admin-", &choice.tls.load(env)?) } else { Ok(None) };
        let origin = format!("{}://{authority}", uri.scheme_str().unwrap_or_default());
        let server = OutboundClient::with_tls(&origin, tls.map_err(CommandError::Usage)?, ADMIN_CALL_TIMEOUT);
        let server = server.map_err(|why| CommandError::Usage(format!("{why}; name some with --admin-ca")))?;
        Ok(Some(Self { url: url.clone(), server, token }))
    }

    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CommandError> {
        let (status, body) = self.call(Method::GET, path, Bytes::new()).await?;
        if status != StatusCode::OK {
            return Err(self.error_from_response(status, &body));
        }
        self.parse_body(&body)
    }

    /// Returns the report of a change, and an error if the change was not made.
    pub(super) async fn post<T: DeserializeOwned>(
        &self, path: &str, body: Bytes,
    ) -> Result<(T, Option<CommandError>), CommandError> {
        let (status, body) = self.call(Method::POST, path, body).await?;
        if status == StatusCode::OK {
            return Ok((self.parse_body(&body)?, None));
        }
        let failed = self.error_from_response(status, &body);
        // A refusal of a change to an existing record also describes the record.
        match serde_json::from_slice(&body) {
            Ok(told) => Ok((told, Some(failed))),
            Err(_) => Err(failed),
        }
    }

    fn parse_body<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, CommandError> {
        let wrong = |why: serde_json::Error| {
            CommandError::Unavailable(format!("{} does not answer like a gateway: {why}", self.url))
        };
        serde_json::from_slice(body).map_err(wrong)
    }

    fn error_from_response(&self, status: StatusCode, body: &[u8]) -> CommandError {
        let problem: Value = serde_json::from_slice(body).unwrap_or_default();
        let detail = problem["detail"].as_str().map_or_else(|| format!("it answers with {status}"), str::to_owned);
        match status {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => CommandError::Conflict(detail),
            StatusCode::BAD_REQUEST
            | StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::PAYLOAD_TOO_LARGE => CommandError::Usage(format!("{}: {detail}", self.url)),
            _ => CommandError::Unavailable(format!("{}: {detail}", self.url)),
        }
    }

    async fn call(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes), CommandError> {
        let lost = if method == Method::GET { "" } else { "; look before you try again" };
        let called = timeout(ADMIN_CALL_TIMEOUT, self.send(method, path, body)).await;
        let url = &self.url;
        let why = match called {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(OutboundError::NotSent(why))) => format!("{url} cannot be reached: {why}"),
            Ok(Err(OutboundError::ResponseLost(why))) => format!("the answer of {url} was lost: {why}{lost}"),
            Err(_) => format!("{url} did not answer within {ADMIN_CALL_TIMEOUT:?}{lost}"),
        };
        Err(CommandError::Unavailable(why))
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes), OutboundError> {
        let mut request = request_to(path).map_err(|why| OutboundError::NotSent(format!("{path}: {why}")))?;
        let mut bearer = HeaderValue::from_str(&format!("Bearer {}", self.token.expose())).map_err(|_| {
            OutboundError::NotSent("the token cannot be sent: it has characters that a header cannot have".into())
        })?;
        bearer.set_sensitive(true);
        (*request.method_mut(), *request.body_mut()) = (method, body);
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().extend([(header::AUTHORIZATION, bearer), (header::CONTENT_TYPE, json)]);
        let answer = self.server.send(request, MAX_RESPONSE_BYTES).await?;
        Ok((answer.status(), answer.into_body()))
    }
}

/// A GET of this path.
pub(super) fn request_to(path: &str) -> http::Result<Request<Bytes>> {
    let agent = concat!("ibid/", env!("CARGO_PKG_VERSION"));
    Request::get(path).header(header::USER_AGENT, agent).body(Bytes::new())
}

/// Timeout of the answer. Readiness includes a store call, which may take a second.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(6);
const MAX_ANSWER_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Default, Args)]
pub struct HealthArgs {
    /// The gateway's configuration file [env: IBID_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The gateway's admin address [env: IBID_ADMIN] [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS")]
    pub admin: Option<String>,
    /// Check whether it is ready (/readyz), not only whether it is alive (/healthz)
    #[arg(long)]
    pub ready: bool,
    /// Certificates for an admin port with TLS
    #[command(flatten)]
    pub tls: AdminTlsArgs,
}

/// Prints the gateway's answer if it is healthy.
pub fn health(args: &HealthArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), CommandError> {
    let serve = ServeArgs {
        config: args.config.clone(),
        admin: args.admin.clone(),
        // Required, but irrelevant here; the gateway may get it by a flag.
        upstream: Some("http://127.0.0.1".into()),
        ..ServeArgs::default()
    };
    let Some(admin) = GatewaySettings::load(&serve, env)?.admin else {
        return Err(CommandError::Usage("admin.listen is off: there is nobody to ask; give it an address".into()));
    };
    let addr = local_address(admin.listen);
    let tls = match &admin.tls {
        None => None,
        Some(_) => Some(tls::health_client_config("--admin-", &args.tls.load(env)?).map_err(CommandError::Usage)?),
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let path = if args.ready { "/readyz" } else { "/healthz" };
    let url = format!("{scheme}://{addr}{path}");
    let unanswered = |why: &dyn fmt::Display| CommandError::Conflict(format!("no answer from {url}: {why}"));
    let server = OutboundClient::with_tls(&format!("{scheme}://{addr}"), tls, HEALTH_TIMEOUT);
    let server = server.map_err(|why| unanswered(&why))?;
    let request = request_to(path).expect("a path of ours");
    let answer = store::block_on(async {
        match timeout(HEALTH_TIMEOUT, server.send(request, MAX_ANSWER_BYTES)).await {
            Ok(answer) => answer.map_err(|why| unanswered(&why)),
            Err(_) => Err(unanswered(&format!("nothing within {HEALTH_TIMEOUT:?}"))),
        }
    })?;
    let (status, said) = (answer.status(), answer.into_body());
    let said = String::from_utf8_lossy(&said);
    let said = said.trim();
    if !status.is_success() {
        return Err(CommandError::Conflict(format!("{url} says {}: {said}", status.as_u16())));
    }
    Ok(writeln!(out, "{said}")?)
}

/// Replaces an unspecified address by the loopback address.
pub(super) fn local_address(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

#[derive(Debug, Args)]
pub struct ReportArgs {
    #[command(flatten)]
    admin: AdminArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn report(args: &ReportArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), CommandError> {
    let Some(api) = AdminClient::from_args(&args.admin, env)? else {
        let what = "which gateway? name its admin address, such as --admin http://127.0.0.1:8081";
        return Err(CommandError::Usage(what.into()));
    };
    let report: ShadowReport = store::block_on(api.get("/api/shadow"))?;
    Ok(if args.json { print_json(&report, out) } else { print_report(&report, out) }?)
}

fn print_report(report: &ShadowReport, out: &mut dyn io::Write) -> io::Result<()> {
    let names = ["ROUTE", "MODE", "REQUESTS", "RUN", "REPLAY", "REFUSE", "NO KEY"].map(String::from);
    let row = |route: &ShadowRoute| {
        [
            escape_control(&route.route),
            escape_control(&route.mode),
            route.requests.to_string(),
            route.run.to_string(),
            route.replay.to_string(),
            route.refuse.values().sum::<u64>().to_string(),
            route.no_key.to_string(),
        ]
    };
    let rows: Vec<[String; 7]> = [names].into_iter().chain(report.routes.iter().map(row)).collect();
    writeln!(out, "since {}\n", escape_control(&report.since))?;
    print_columns(&rows, out)?;
    for route in report.routes.iter().filter(|route| !route.refuse.is_empty() || route.no_key > 0) {
        writeln!(out, "\n{}", escape_control(&route.route))?;
        let would = if route.mode == "shadow" { "would be refused" } else { "refused" };
        for (reason, count) in &route.refuse {
            writeln!(out, "  {count} {would}: {}", escape_control(reason))?;
        }
        for agent in &route.no_key_by {
            let name = agent.user_agent.as_deref().map_or("no user agent".into(), escape_control);
            writeln!(out, "  {} without a key: {name}", agent.requests)?;
        }
        if route.no_key_by_others > 0 {
            writeln!(out, "  {} without a key: others", route.no_key_by_others)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_everywhere_is_asked_here() {
        for (listen, asked) in [
            ("0.0.0.0:81", "127.0.0.1:81"),
            ("[::]:81", "[::1]:81"),
            ("127.0.0.1:82", "127.0.0.1:82"),
            ("10.0.0.7:82", "10.0.0.7:82"),
        ] {
            assert_eq!(local_address(listen.parse().unwrap()).to_string(), asked);
        }
    }
}
