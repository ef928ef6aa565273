//! A test client that sends exactly the bytes it is given.
//!
//! [`RawClient`] is one connection. [`TestRequest`] builds a correct request, for tests in which the bytes do not
//! matter. Every wait ends after ten seconds, and a failure shows the bytes received so far.
//!
//! ```no_run
//! # async fn example(gateway: std::net::SocketAddr) {
//! use testbed::client::{RawClient, post};
//!
//! let answer = post(gateway, "/pay").key("k-1").json(r#"{"amount":1}"#).send().await;
//! assert_eq!(answer.status, 201);
//!
//! let mut raw = RawClient::connect(gateway).await;
//! raw.send("POST /pay HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n").await;
//! assert_eq!(raw.read_response().await.status, 400);
//! assert!(raw.is_closed().await);
//! # }
//! ```

use std::{fmt, io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpStream, tcp::OwnedWriteHalf},
    sync::Barrier,
    time::timeout,
};

pub use self::request::{TestRequest, delete, get, patch, post, put, request};
use crate::http1::{BodyFraming, HeaderList, MessageReader, WAIT_TIMEOUT, malformed, to_text};

mod request;

/// Maximum bytes that a failure shows.
const MAX_SHOWN_BYTES: usize = 2000;

/// One connection, byte by byte.
#[derive(Debug)]
pub struct RawClient {
    reader: MessageReader,
    writer: OwnedWriteHalf,
}

impl RawClient {
    pub async fn connect(addr: SocketAddr) -> RawClient {
        RawClient::try_connect(addr).await.unwrap_or_else(|error| panic!("cannot connect to {addr}: {error}"))
    }

    pub async fn try_connect(addr: SocketAddr) -> io::Result<RawClient> {
        let stream = timeout(WAIT_TIMEOUT, TcpStream::connect(addr)).await??;
        stream.set_nodelay(true)?;
        let (reader, writer) = stream.into_split();
        Ok(RawClient { reader: MessageReader::new(reader), writer })
    }

    /// Sends bytes. Ignores that the peer has closed already: the test checks its response, or its silence.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let sent = self.try_send(bytes).await;
        let timed_out = sent.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
        assert!(!timed_out, "the peer does not read");
    }

    pub async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        timeout(WAIT_TIMEOUT, self.writer.write_all(bytes.as_ref())).await?
    }

    /// Sends while reading the response, so that an early response is read whatever happens to the rest of the request.
    async fn exchange(&mut self, bytes: &[u8], head_only: bool) -> Result<TestResponse, Broken> {
        let RawClient { reader: wire, writer } = self;
        let write = async {
            let _ = timeout(WAIT_TIMEOUT, writer.write_all(bytes)).await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            response = read_final(wire, head_only) => response,
            () = write => unreachable!("writing never ends the exchange"),
        }
    }

    /// Reads the next final response. Earlier ones (100, 103) are in [`TestResponse::interim`]. A 101 is final; read
    /// the bytes after it with [`read_some`](RawClient::read_some).
    pub async fn read_response(&mut self) -> TestResponse {
        self.try_read_response().await.unwrap_or_else(|broken| panic!("{broken}"))
    }

    /// Like [`read_response`](RawClient::read_response), for a test that expects the response to break off.
    pub async fn try_read_response(&mut self) -> Result<TestResponse, Broken> {
        read_final(&mut self.reader, false).await
    }

    /// Reads the next response, interim (`100 Continue`) or final.
    pub async fn read_next(&mut self) -> TestResponse {
        read_message(&mut self.reader, false).await.unwrap_or_else(|broken| panic!("{broken}"))
    }

    /// Reads at least one byte, after a 101 or within a stream. Returns nothing if the peer closed.
    pub async fn read_some(&mut self) -> Vec<u8> {
        let read = timeout(WAIT_TIMEOUT, self.reader.read_some()).await;
        let read = read.unwrap_or_else(|_| panic!("nothing was received for {WAIT_TIMEOUT:?}"));
        read.unwrap_or_else(|error| panic!("reading failed: {error}"))
    }

    /// Reads until `needle` arrives, and returns everything received, for a test that inspects a stream.
    pub async fn read_until(&mut self, needle: &str) -> String {
        let mut all = Vec::new();
        loop {
            let more = self.read_some().await;
            assert!(!more.is_empty(), "closed before {needle:?} came; received:\n{}", preview(&all));
            all.extend(more);
            if all.windows(needle.len()).any(|window| window == needle.as_bytes()) {
                return to_text(&all);
            }
        }
    }

    /// Closes the sending side, and continues to read.
    pub async fn half_close(&mut self) {
        let _ = self.writer.shutdown().await;
    }

    /// Resets the connection, as a crashed client does.
    pub fn abort(self) {
        let RawClient { reader: wire, writer } = self;
        let _ = writer.as_ref().set_zero_linger();
        // Otherwise dropping the writing half would send a FIN before the reset.
        writer.forget();
        drop(wire);
    }

    /// Whether the peer closes or resets the connection within a second. Data that arrives first stays readable.
    pub async fn is_closed(&mut self) -> bool {
        self.is_closed_within(Duration::from_secs(1)).await
    }

    /// Whether the peer closes or resets the connection within `limit`.
    pub async fn is_closed_within(&mut self, limit: Duration) -> bool {
        timeout(limit, self.reader.wait_closed()).await.is_ok()
    }
}

#[derive(Clone)]
pub struct TestResponse {
    pub status: u16,
    pub status_line: String,
    pub headers: HeaderList,
    /// The body without its framing.
    pub body: Bytes,
    pub trailers: HeaderList,
    /// The status codes of the preceding interim responses (1xx).
    pub interim: Vec<u16>,
}

impl TestResponse {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)
    }

    pub fn text(&self) -> String {
        to_text(&self.body)
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("not JSON ({error}): {self:?}"))
    }
}

impl fmt::Debug for TestResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.status_line)?;
        for (name, value) in self.headers.iter() {
            writeln!(f, "{name}: {value}")?;
        }
        write!(f, "\n{}", preview(&self.body))?;
        for (name, value) in self.trailers.iter() {
            write!(f, "\n{name}: {value}")?;
        }
        Ok(())
    }
}

/// A response that did not arrive, or not completely.
#[derive(Clone, Debug)]
pub struct Broken {
    pub received: Bytes,
    /// The kind of error; `TimedOut` if the deadline passed.
    pub kind: io::ErrorKind,
    reason: String,
}

impl Broken {
    /// Whether the peer closed or reset the connection.
    pub fn is_closed(&self) -> bool {
        matches!(
            self.kind,
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted
        )
    }

    /// Whether the deadline passed while the connection was open.
    pub fn is_timeout(&self) -> bool {
        self.kind == io::ErrorKind::TimedOut
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no complete answer: {}; received so far:\n{}", self.reason, preview(&self.received))
    }
}

impl std::error::Error for Broken {}

/// Sends `n` requests at the same moment, each on its own connection, and returns the responses in the order of the
/// requests. All connections are open before the first byte is sent.
pub async fn many(n: usize, mut make: impl FnMut() -> TestRequest) -> Vec<TestResponse> {
    let start = Arc::new(Barrier::new(n));
    let tasks: Vec<_> = (0..n)
        .map(|_| {
            let (request, start) = (make(), Arc::clone(&start));
            tokio::spawn(async move {
                let raw = RawClient::try_connect(request.addr()).await;
                // Wait even after a failure, or the others would wait for ever.
                start.wait().await;
                let mut raw = raw.unwrap_or_else(|error| panic!("cannot connect to {}: {error}", request.addr()));
                request.send_on(&mut raw).await
            })
        })
        .collect();
    let mut responses = Vec::with_capacity(n);
    for (index, task) in tasks.into_iter().enumerate() {
        responses.push(task.await.unwrap_or_else(|error| panic!("request {index} of {n}: {error}")));
    }
    responses
}

async fn read_final(wire: &mut MessageReader, head_only: bool) -> Result<TestResponse, Broken> {
    let mut interim = Vec::new();
    loop {
        let response = read_message(wire, head_only).await?;
        if response.status == 101 || response.status >= 200 {
            return Ok(TestResponse { interim, ..response });
        }
        interim.push(response.status);
    }
}

async fn read_message(wire: &mut MessageReader, head_only: bool) -> Result<TestResponse, Broken> {
    let (kind, reason) = match timeout(WAIT_TIMEOUT, parse(wire, head_only)).await {
        Ok(Ok(response)) => return Ok(response),
        Ok(Err(error)) => (error.kind(), error.to_string()),
        Err(_) => (io::ErrorKind::TimedOut, format!("not within {WAIT_TIMEOUT:?}")),
    };
    Err(Broken { received: Bytes::copy_from_slice(wire.received()), kind, reason })
}

async fn parse(wire: &mut MessageReader, head_only: bool) -> io::Result<TestResponse> {
    if !wire.next_message().await? {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed before any answer"));
    }
    let status_line = wire.read_line().await?;
    let mut parts = status_line.splitn(3, ' ');
    let version = parts.next().unwrap_or_default();
    let status = parts.next().and_then(|status| status.parse::<u16>().ok());
    let (true, Some(status)) = (version.starts_with("HTTP/1."), status) else {
        return Err(malformed(format!("the status line is {status_line:?}")));
    };
    let headers = wire.read_fields().await?;
    let framing = match status {
        100..200 | 204 | 304 => BodyFraming::Length(0),
        _ if head_only => BodyFraming::Length(0),
        _ => BodyFraming::of(&headers, BodyFraming::UntilClose)?,
    };
    let (body, trailers) = wire.body(framing).await?;
    Ok(TestResponse { status, status_line, headers, body: body.into(), trailers, interim: Vec::new() })
}

fn preview(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(MAX_SHOWN_BYTES)];
    let text = String::from_utf8_lossy(cut).into_owned();
    match bytes.len() - cut.len() {
        0 => text,
        more => format!("{text}… and {more} bytes more"),
    }
}
