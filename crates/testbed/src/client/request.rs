//! A builder of correct requests.

use std::net::SocketAddr;

use bytes::Bytes;

use super::{Broken, RawClient, TestResponse};
use crate::http1::{chunk, field_lines, last_chunk};

/// A request that can be sent many times. Adds `Host` and the framing unless [`header`](TestRequest::header) sets them.
#[derive(Clone, Debug)]
pub struct TestRequest {
    addr: SocketAddr,
    method: String,
    target: String,
    headers: Vec<(String, String)>,
    body: Option<Bytes>,
    chunked: bool,
    trailers: Vec<(String, String)>,
}

pub fn request(method: impl Into<String>, addr: SocketAddr, target: impl Into<String>) -> TestRequest {
    let (method, target) = (method.into(), target.into());
    TestRequest { addr, method, target, headers: vec![], body: None, chunked: false, trailers: vec![] }
}

macro_rules! request_with_method {
    ($($name:ident: $method:literal),*) => { $(
        pub fn $name(addr: SocketAddr, target: impl Into<String>) -> TestRequest {
            request($method, addr, target)
        }
    )* };
}
request_with_method!(post: "POST", get: "GET", put: "PUT", patch: "PATCH", delete: "DELETE");

impl TestRequest {
    /// Adds a header; adding a name twice sends two lines.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn key(self, key: impl Into<String>) -> Self {
        self.header("Idempotency-Key", key)
    }

    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = Some(body.into());
        self
    }

    pub fn json(self, body: &str) -> Self {
        self.header("Content-Type", "application/json").body(body.to_owned())
    }

    /// Sends the body in two chunks, without a length.
    pub fn chunked(mut self) -> Self {
        self.chunked = true;
        self
    }

    /// Adds a trailer, which requires a chunked body.
    pub fn trailer(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.trailers.push((name.into(), value.into()));
        self.chunked()
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The exact bytes, for use with [`RawClient::send`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.target);
        if !self.has_header("host") {
            head += &format!("Host: {}\r\n", self.addr);
        }
        head += &field_lines(&self.headers);
        let body = self.body.clone().unwrap_or_default();
        if self.chunked {
            let mut bytes = format!("{head}Transfer-Encoding: chunked\r\n\r\n").into_bytes();
            let (first, second) = body.split_at(body.len() / 2);
            for part in [first, second].into_iter().filter(|part| !part.is_empty()) {
                bytes.extend(chunk(part));
            }
            bytes.extend(last_chunk(&self.trailers).as_bytes());
            return bytes;
        }
        let expects_body = matches!(self.method.as_str(), "POST" | "PUT" | "PATCH");
        if !self.has_header("content-length") && (self.body.is_some() || expects_body) {
            head += &format!("Content-Length: {}\r\n", body.len());
        }
        let mut bytes = format!("{head}\r\n").into_bytes();
        bytes.extend(&body);
        bytes
    }

    pub async fn send(&self) -> TestResponse {
        self.send_on(&mut RawClient::connect(self.addr).await).await
    }

    /// Sends the request on a new connection, for a test that expects the response to break off.
    pub async fn try_send(&self) -> Result<TestResponse, Broken> {
        let unconnected = |error: std::io::Error| {
            let (kind, reason) = (error.kind(), format!("cannot connect: {error}"));
            Broken { received: Bytes::new(), kind, reason }
        };
        self.try_send_on(&mut RawClient::try_connect(self.addr).await.map_err(unconnected)?).await
    }

    /// Sends the request on an open connection, which can be used again afterwards.
    pub async fn send_on(&self, raw: &mut RawClient) -> TestResponse {
        self.try_send_on(raw).await.unwrap_or_else(|broken| panic!("{} {}: {broken}", self.method, self.target))
    }

    /// Sends the request on an open connection, for a test that expects the response to break off.
    pub async fn try_send_on(&self, raw: &mut RawClient) -> Result<TestResponse, Broken> {
        raw.exchange(&self.to_bytes(), self.method == "HEAD").await
    }

    /// Sends the request without waiting for a response. Returns the connection, for the test to drop, abort or keep.
    pub async fn start(&self) -> RawClient {
        let mut raw = RawClient::connect(self.addr).await;
        raw.send(self.to_bytes()).await;
        raw
    }

    fn has_header(&self, name: &str) -> bool {
        self.headers.iter().any(|(other, _)| other.eq_ignore_ascii_case(name))
    }
}
