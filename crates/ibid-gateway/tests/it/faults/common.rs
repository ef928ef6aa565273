//! What the tests on the wire share: a gateway with few words, an upstream played by hand, and what an answer must be.

use std::{
    future::Future,
    net::SocketAddr,
    time::{Duration, Instant},
};

use testbed::{
    client::{TestRequest, TestResponse, post},
    http1::WAIT_TIMEOUT,
    process::GatewayProcess,
    upstream::TestUpstream,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

pub(crate) const BIN: &str = env!("CARGO_BIN_EXE_ibid");

/// A gateway whose every path is under `ietf` with these dials on top.
pub(crate) async fn start_ietf_gateway(upstream: &TestUpstream, dials: &str) -> GatewayProcess {
    GatewayProcess::spawn(BIN, &policy(dials), &upstream.url()).await
}

/// The part of a configuration that puts every path under `ietf` with these dials on top.
pub(crate) fn policy(dials: &str) -> String {
    format!("[policy]\npreset = \"ietf\"\n{dials}\n")
}

/// A payment of somebody who is known by a credential.
pub(crate) fn pay(gateway: &GatewayProcess, key: &str) -> TestRequest {
    pay_at(gateway, "/pay", key)
}

pub(crate) fn pay_at(gateway: &GatewayProcess, path: &str, key: &str) -> TestRequest {
    caller(post(gateway.addr(), path)).key(key).json(r#"{"amount":1}"#)
}

/// The same person's other payment.
pub(crate) fn other_pay_at(gateway: &GatewayProcess, path: &str, key: &str) -> TestRequest {
    caller(post(gateway.addr(), path)).key(key).json(r#"{"amount":2}"#)
}

pub(crate) fn caller(request: TestRequest) -> TestRequest {
    request.header("Authorization", "Bearer one")
}

/// The answer is this refusal, in the form of a problem.
#[track_caller]
pub(crate) fn assert_refused(answer: &TestResponse, status: u16, name: &str) {
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    assert_eq!(answer.json()["type"], format!("/.well-known/idempotency#{name}"), "{answer:?}");
    let comes_back = matches!(name, "in-progress" | "overloaded" | "store-unavailable");
    assert_eq!(answer.header("retry-after").is_some(), comes_back, "{answer:?}");
    assert!(!answer.headers.contains("idempotent-replayed"), "{answer:?}");
}

/// The answer is `first` again, and says so.
#[track_caller]
pub(crate) fn assert_replay(answer: &TestResponse, first: &TestResponse) {
    assert_eq!(answer.status, first.status, "{answer:?}");
    assert_eq!(answer.body, first.body, "{answer:?}\nis not\n{first:?}");
    assert_eq!(answer.headers.get_all("idempotent-replayed"), ["true"], "{answer:?}");
    assert_eq!(answer.header("content-type"), first.header("content-type"), "{answer:?}");
}

/// The answer comes from the upstream's own run, not from a record.
#[track_caller]
pub(crate) fn assert_ran(answer: &TestResponse) {
    assert_eq!(answer.status, 201, "{answer:?}");
    assert!(!answer.headers.contains("idempotent-replayed"), "{answer:?}");
    assert!(!answer.headers.contains("idempotency-stored"), "{answer:?}");
}

pub(crate) fn is_in_progress(answer: &TestResponse) -> bool {
    answer.status == 409 && answer.text().contains("#in-progress")
}

/// Sends until the answer is something else than "in progress".
pub(crate) async fn send_until_settled(request: &TestRequest) -> TestResponse {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let answer = request.send().await;
        if !is_in_progress(&answer) {
            return answer;
        }
        assert!(Instant::now() < until, "still in progress after {WAIT_TIMEOUT:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Returns once this is so.
#[track_caller]
pub(crate) fn until(what: &str, is_so: impl Fn() -> bool) -> impl Future<Output = ()> {
    let what = format!("waited {WAIT_TIMEOUT:?} for {what}");
    async move {
        let end = Instant::now() + WAIT_TIMEOUT;
        while !is_so() {
            assert!(Instant::now() < end, "{what}");
            sleep(Duration::from_millis(1)).await;
        }
    }
}

pub(crate) async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    timeout(WAIT_TIMEOUT, work).await.unwrap_or_else(|_| panic!("waited {WAIT_TIMEOUT:?} for {what}"))
}

/// An upstream played by the test itself, byte by byte: for what must be seen between two bytes.
pub(crate) struct ScriptedUpstream {
    listener: TcpListener,
}

impl ScriptedUpstream {
    pub(crate) async fn start() -> ScriptedUpstream {
        ScriptedUpstream { listener: TcpListener::bind("127.0.0.1:0").await.expect("a free port") }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.listener.local_addr().expect("it is bound")
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.addr())
    }

    /// The next connection, with the head of its first request and whatever of the body came with it.
    pub(crate) async fn accept_head(&self) -> ScriptedExchange {
        let work = async {
            let (stream, _) = self.listener.accept().await.expect("a connection");
            stream.set_nodelay(true).expect("a live socket");
            let mut exchange = ScriptedExchange { stream, head: String::new(), body: Vec::new() };
            loop {
                if let Some(end) = find(&exchange.body, b"\r\n\r\n") {
                    exchange.head = String::from_utf8_lossy(&exchange.body[..end]).into_owned();
                    exchange.body.drain(..end + 4);
                    return exchange;
                }
                assert!(exchange.read_more().await > 0, "closed before the head was there");
            }
        };
        within("a request at the upstream", work).await
    }

    /// The next connection, with the whole of its first request, which announces its length.
    pub(crate) async fn request(&self) -> ScriptedExchange {
        let mut exchange = self.accept_head().await;
        let lower = exchange.head.to_lowercase();
        let length = lower.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.map_or(0, |length| length.trim().parse().expect("a number"));
        while exchange.body.len() < length {
            assert!(within("the body", exchange.read_more()).await > 0, "closed before the body was there");
        }
        exchange
    }
}

/// One request at an upstream that is played by hand.
pub(crate) struct ScriptedExchange {
    pub(crate) stream: TcpStream,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl ScriptedExchange {
    /// Reads more of the body; how many bytes came.
    pub(crate) async fn read_more(&mut self) -> usize {
        let mut part = [0; 16 << 10];
        let n = self.stream.read(&mut part).await.expect("the gateway does not reset");
        self.body.extend_from_slice(&part[..n]);
        n
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        let written = within("the gateway to read", self.stream.write_all(bytes.as_ref())).await;
        written.expect("the gateway does not hang up");
    }

    pub(crate) async fn chunk(&mut self, data: &str) {
        self.write(format!("{:x}\r\n{data}\r\n", data.len())).await;
    }
}

pub(crate) fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|window| window == needle)
}
