//! A client of a running gateway's admin API.

use std::{fmt, io, sync::Arc, time::Duration};

use bytes::Bytes;
use clap::Args;
use http::{HeaderValue, Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, pki_types::ServerName},
};

use super::CommandError;
use crate::{
    config::{AdminTls, AdminTlsArgs, Env, Secret},
    tls,
    upstream::native_root_config,
};

/// Timeout of one call. The gateway itself waits ten seconds for its store.
const ADMIN_CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a response in bytes: enough for a thousand records, or one with a large body in hex.
const MAX_RESPONSE_BYTES: usize = 512 << 20;

/// The admin API that a command calls.
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
    tls: Option<Arc<ClientConfig>>,
    host: String,
    port: u16,
    token: Secret,
}

/// The API's error body.
#[derive(Debug, Deserialize)]
struct ApiProblem {
    #[serde(default)]
    detail: String,
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
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(usage(format!("{url:?} is no URL of a gateway"))),
        };
        let Some(authority) = uri.authority() else { return Err(usage(format!("{url:?} names no host"))) };
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(usage(format!("{url:?} has a path")));
        }
        let (host, port) = (authority.host(), authority.port_u16().unwrap_or(if secure { 443 } else { 80 }));
        let source = choice.token.as_deref().unwrap_or("env:IBID_ADMIN_TOKEN");
        let token = Secret::from_source(source, env).map_err(|why| CommandError::Usage(format!("--token: {why}")))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let tls = match secure {
            true => Some(tls_config(&choice.tls.load(env)?)?),
            false if choice.tls.has_flags() => {
                return Err(CommandError::Usage(format!(
                    "--admin: {url:?} speaks no TLS, and certificates were given; write https://"
                )));
            }
            false => None,
        };
        Ok(Some(Self { url: url.clone(), tls, host, port, token }))
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
        let wrong =
            |why: serde_json::Error| CommandError::Store(format!("{} does not answer like a gateway: {why}", self.url));
        serde_json::from_slice(body).map_err(wrong)
    }

    fn error_from_response(&self, status: StatusCode, body: &[u8]) -> CommandError {
        let detail = serde_json::from_slice::<ApiProblem>(body).map(|problem| problem.detail).unwrap_or_default();
        let detail = if detail.is_empty() { format!("it answers with {status}") } else { detail };
        match status {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => CommandError::Conflict(detail),
            StatusCode::BAD_REQUEST
            | StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::PAYLOAD_TOO_LARGE => CommandError::Usage(format!("{}: {detail}", self.url)),
            _ => CommandError::Store(format!("{}: {detail}", self.url)),
        }
    }

    async fn call(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes), CommandError> {
        let lost = match method {
            Method::GET => "",
            _ => "; look before you try again",
        };
        match timeout(ADMIN_CALL_TIMEOUT, self.exchange(method, path, body)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(AdminCallError::NotSent(why))) => {
                Err(CommandError::Store(format!("{} cannot be reached: {why}", self.url)))
            }
            Ok(Err(AdminCallError::ResponseLost(why))) => {
                Err(CommandError::Store(format!("the answer of {} was lost: {why}{lost}", self.url)))
            }
            Err(_) => {
                Err(CommandError::Store(format!("{} did not answer within {ADMIN_CALL_TIMEOUT:?}{lost}", self.url)))
            }
        }
    }

    async fn exchange(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes), AdminCallError> {
        let unsent = |why: io::Error| AdminCallError::NotSent(why.to_string());
        let socket = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(unsent)?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().map_err(|why| AdminCallError::NotSent(format!("{path}: {why}")))?;
        let host = if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        };
        let value = |text: &str| HeaderValue::from_str(text).map_err(|why| AdminCallError::NotSent(why.to_string()));
        let mut bearer = value(&format!("Bearer {}", self.token.expose())).map_err(|_| {
            AdminCallError::NotSent("the token cannot be sent: it has characters that a header cannot have".into())
        })?;
        bearer.set_sensitive(true);
        for (name, value) in [
            (header::HOST, value(&host)?),
            (header::AUTHORIZATION, bearer),
            (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
            (header::USER_AGENT, HeaderValue::from_static(concat!("ibid/", env!("CARGO_PKG_VERSION")))),
        ] {
            request.headers_mut().insert(name, value);
        }
        let Some(tls) = &self.tls else { return send(socket, request).await };
        let name = ServerName::try_from(self.host.clone()).map_err(|why| AdminCallError::NotSent(why.to_string()))?;
        let tls = TlsConnector::from(tls.clone());
        send(tls.connect(name, socket).await.map_err(unsent)?, request).await
    }
}

fn tls_config(AdminTls { ca, shown }: &AdminTls) -> Result<Arc<ClientConfig>, CommandError> {
    match tls::client_config("--admin-", ca.as_ref(), shown.as_ref()).map_err(CommandError::Usage)? {
        Some(config) => Ok(config),
        None => native_root_config()
            .map(Arc::new)
            .map_err(|why| CommandError::Usage(format!("{why}; name some with --admin-ca"))),
    }
}

enum AdminCallError {
    /// The request was not sent.
    NotSent(String),
    /// The request may have been sent.
    ResponseLost(String),
}

async fn send<S>(socket: S, request: Request<Full<Bytes>>) -> Result<(StatusCode, Bytes), AdminCallError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let lost = |why: hyper::Error| AdminCallError::ResponseLost(why.to_string());
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(socket)).await;
    let (mut sender, connection) = handshake.map_err(|why| AdminCallError::NotSent(why.to_string()))?;
    tokio::spawn(connection);
    let answer = sender.send_request(request).await.map_err(lost)?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_RESPONSE_BYTES).collect().await;
    Ok((status, body.map_err(|why| AdminCallError::ResponseLost(why.to_string()))?.to_bytes()))
}

/// Encodes text for a query or a path.
pub(super) fn percent_encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}
