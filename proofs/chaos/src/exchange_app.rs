//! An app that asks ibid by the exchange API, as an SDK does: it begins, runs its handler at the upstream, and ends.
//!
//! Invariant: a handler runs only if ibid said so, and its response is the client's only after ibid has taken it.

use std::{
    convert::Infallible,
    hash::{BuildHasher as _, RandomState},
    io,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use bytes::Bytes;
use data_encoding::BASE64;
use http::{HeaderMap, Request, Response, StatusCode, request::Parts};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use testbed::client::{RawClient, TestResponse, post};
use tokio::{
    net::TcpListener,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

const TOKEN: &str = "chaos";
/// How long one call may take before it is sent again.
const CALL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a begin is repeated.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an end is repeated: longer than ibid is ever down.
const END_TIMEOUT: Duration = Duration::from_secs(15);

/// The app. Dropping it closes everything.
pub(crate) struct ExchangeApp {
    addr: SocketAddr,
    server_task: JoinHandle<()>,
}

#[derive(Clone, Copy)]
struct AppTargets {
    api: SocketAddr,
    upstream: SocketAddr,
}

impl ExchangeApp {
    /// Starts it; it expects ibid at `api`.
    pub(crate) async fn start(upstream: SocketAddr, api: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let server_task = tokio::spawn(serve(listener, AppTargets { api, upstream }));
        Ok(Self { addr, server_task })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The configuration of an ibid that listens at `api`.
    pub(crate) fn config(api: SocketAddr) -> String {
        format!("[api]\nlisten = \"{api}\"\ntoken = \"{TOKEN}\"\n")
    }
}

impl Drop for ExchangeApp {
    fn drop(&mut self) {
        self.server_task.abort();
    }
}

async fn serve(listener: TcpListener, targets: AppTargets) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(Duration::from_millis(10)).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        tokio::spawn(async move {
            let service = service_fn(|request| answer(request, targets));
            let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(request: Request<Incoming>, targets: AppTargets) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return Ok(plain(StatusCode::BAD_REQUEST)) };
    // On its own: a client that hangs up does not stop the handler.
    let work = tokio::spawn(async move { targets.run(&head, &body.to_bytes()).await });
    Ok(work.await.expect("an exchange never panics"))
}

impl AppTargets {
    async fn run(self, head: &Parts, body: &[u8]) -> Response<Full<Bytes>> {
        let random = RandomState::new();
        let id = format!("{:016x}{:016x}", random.hash_one(0), random.hash_one(1));
        let begin = json!({
            "id": id,
            "method": head.method.as_str(),
            "target": head.uri.to_string(),
            "headers": pairs(&head.headers),
            "body_base64": BASE64.encode(body),
            "peer": "127.0.0.1",
        });
        let Some(begun) = self.call("/v1/exchanges", &begin, BEGIN_TIMEOUT).await else {
            return plain(StatusCode::SERVICE_UNAVAILABLE);
        };
        match begun.status {
            200 => to_response(&begun.json()["answer"]),
            201 => {
                let exchange = begun.json()["exchange"].as_str().expect("an exchange").to_owned();
                self.handle(head, body, &format!("/v1/exchanges/{exchange}")).await
            }
            status => plain(StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)),
        }
    }

    /// Runs the handler, and tells ibid how it ended.
    async fn handle(self, head: &Parts, body: &[u8], exchange: &str) -> Response<Full<Bytes>> {
        let key = head.headers["idempotency-key"].to_str().unwrap_or_default();
        let request = post(self.upstream, head.uri.path()).header("Idempotency-Key", key).body(body.to_vec());
        let sent = match RawClient::try_connect(self.upstream).await {
            Ok(mut raw) => request.try_send_on(&mut raw).await.map_err(|_| "unknown"),
            Err(_) => Err("not-started"),
        };
        let (call, told) = match &sent {
            Ok(response) => (
                "end",
                json!({ "status": response.status, "headers": [["content-type", "application/json"]],
                "body_base64": BASE64.encode(&response.body) }),
            ),
            Err(how) => ("failed", json!({ "how": how })),
        };
        match self.call(&format!("{exchange}/{call}"), &told, END_TIMEOUT).await {
            Some(ended) if ended.status == 200 && sent.is_ok() => to_response(&ended.json()["answer"]),
            _ => plain(StatusCode::BAD_GATEWAY),
        }
    }

    /// Calls ibid, again and again while it does not answer or is stopping.
    async fn call(self, path: &str, body: &Value, limit: Duration) -> Option<TestResponse> {
        let end = Instant::now() + limit;
        let request = post(self.api, path).header("Authorization", format!("Bearer {TOKEN}")).json(&body.to_string());
        while Instant::now() < end {
            match timeout(CALL_TIMEOUT, request.try_send()).await {
                Ok(Ok(answer)) if answer.status != 503 => return Some(answer),
                _ => sleep(Duration::from_millis(20)).await,
            }
        }
        None
    }
}

fn pairs(headers: &HeaderMap) -> Vec<[String; 2]> {
    headers.iter().map(|(name, value)| [name.to_string(), String::from_utf8_lossy(value.as_bytes()).into()]).collect()
}

fn plain(status: StatusCode) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    *response.status_mut() = status;
    response
}

fn to_response(answer: &Value) -> Response<Full<Bytes>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let status = answer["status"].as_u64().and_then(|status| u16::try_from(status).ok()).unwrap_or(500);
    let mut response = Response::builder().status(status);
    for pair in answer["headers"].as_array().into_iter().flatten() {
        response = response.header(text(&pair[0]), text(&pair[1]));
    }
    let body = BASE64.decode(text(&answer["body_base64"]).as_bytes()).unwrap_or_default();
    response.body(Full::new(body.into())).unwrap_or_else(|_| plain(StatusCode::INTERNAL_SERVER_ERROR))
}
