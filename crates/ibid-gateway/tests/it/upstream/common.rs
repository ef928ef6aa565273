//! Servers that behave exactly as badly as a test needs.
#![allow(dead_code, unreachable_pub, missing_docs)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use ibid_gateway::upstream::{Affinity, ReusePolicy, SendFailure, UpstreamBody, UpstreamClient, UpstreamSettings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub type TestBody = Full<Bytes>;
pub type UpstreamUnderTest = UpstreamClient<TestBody>;
pub type Reply = Result<Response<UpstreamBody>, SendFailure>;

pub struct Server {
    pub addr: SocketAddr,
    pub connections: Arc<AtomicUsize>,
}

impl Server {
    pub fn count(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
    pub fn url(&self, scheme: &str) -> String {
        format!("{scheme}://{}", self.addr)
    }
}

/// Runs `handle(stream, n)` for each connection; `n` counts from 0.
pub async fn serve<F, Fut>(handle: F) -> Server
where
    F: Fn(TcpStream, usize) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            stream.set_nodelay(true).unwrap();
            let n = count.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(handle(stream, n));
        }
    });
    Server { addr, connections }
}

/// Reads one request with its Content-Length body. None: the peer closed first.
pub async fn read_request<S: tokio::io::AsyncRead + Unpin>(stream: &mut S) -> Option<String> {
    let mut got = Vec::new();
    let mut byte = [0; 4096];
    loop {
        if let Some(end) = got.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&got[..end]).to_lowercase();
            let length: usize =
                head.lines().find_map(|l| l.strip_prefix("content-length:")).map_or(0, |v| v.trim().parse().unwrap());
            if got.len() >= end + 4 + length {
                return Some(String::from_utf8_lossy(&got).into_owned());
            }
        }
        match stream.read(&mut byte).await {
            Ok(0) | Err(_) => return None,
            Ok(n) => got.extend_from_slice(&byte[..n]),
        }
    }
}

pub async fn answer<S: tokio::io::AsyncWrite + Unpin>(stream: &mut S, text: &str) -> bool {
    stream.write_all(text.as_bytes()).await.is_ok() && stream.flush().await.is_ok()
}

pub const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// Answers every request on every connection.
pub async fn start_well_behaved() -> Server {
    serve(|mut s, _| async move { while read_request(&mut s).await.is_some() && answer(&mut s, OK).await {} }).await
}

pub fn new_upstream(url: &str) -> Arc<UpstreamUnderTest> {
    new_upstream_with(url, UpstreamSettings::default())
}

pub fn new_upstream_with(url: &str, settings: UpstreamSettings) -> Arc<UpstreamUnderTest> {
    UpstreamClient::new(url.parse().unwrap(), settings).unwrap()
}

pub fn post(body: impl Into<Bytes>) -> Request<TestBody> {
    Request::post("/pay?x=1").header("host", "app.example").body(Full::new(body.into())).unwrap()
}

pub async fn send(up: &UpstreamUnderTest, care: ReusePolicy) -> Reply {
    within(up.send(post("hello"), care, &Affinity::default())).await
}

pub async fn read(response: Response<UpstreamBody>) -> Result<Bytes, ibid_gateway::upstream::UpstreamError> {
    within(response.into_body().collect()).await.map(|b| b.to_bytes())
}

/// Nothing here takes long.
pub async fn within<F: Future>(f: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(20), f).await.expect("took too long")
}

/// Looks again and again, for things that happen in another task.
pub async fn until(mut what: impl FnMut() -> bool) {
    within(async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

#[track_caller]
pub fn expect_never_written<T>(result: Result<T, SendFailure>) -> String {
    match result {
        Err(SendFailure::NeverWritten(e)) => e.to_string(),
        Err(SendFailure::MaybeWritten(e)) => panic!("lost: {e}"),
        Ok(_) => panic!("a reply"),
    }
}

#[track_caller]
pub fn expect_lost<T>(result: Result<T, SendFailure>) -> String {
    match result {
        Err(SendFailure::MaybeWritten(e)) => e.to_string(),
        Err(SendFailure::NeverWritten(e)) => panic!("never written: {e}"),
        Ok(_) => panic!("a reply"),
    }
}
