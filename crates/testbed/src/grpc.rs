//! A gRPC client that exposes headers, trailers, and whether the headers ended the response.
//!
//! ```no_run
//! # async fn example(addr: std::net::SocketAddr) {
//! use testbed::grpc::{GrpcTestClient, message};
//!
//! let client = GrpcTestClient::connect(addr).await;
//! let answer = client.call("/shop.Orders/Create", &[("idempotency-key", "k")], message("ten")).await;
//! assert_eq!(answer.code(), 0);
//! # }
//! ```

use std::net::SocketAddr;

use bytes::{BufMut, Bytes, BytesMut};
use data_encoding::BASE64_NOPAD;
use http::{HeaderMap, Request};
use tokio::{net::TcpStream, time::timeout};

use crate::http1::WAIT_TIMEOUT;

/// Frames a message: a flag, its length in four bytes, the message.
pub fn frame_message(flag: u8, message: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(message.len() + 5);
    frame.put_u8(flag);
    frame.put_u32(u32::try_from(message.len()).expect("a message is shorter than 4 GiB"));
    frame.put_slice(message);
    frame.freeze()
}

/// Frames an uncompressed text message.
pub fn message(text: &str) -> Bytes {
    frame_message(0, text.as_bytes())
}

#[derive(Debug, Clone, PartialEq)]
pub struct GrpcTestResponse {
    /// Initial metadata, or the whole response if it is trailers-only.
    pub headers: HeaderMap,
    pub trailers_only: bool,
    /// The body, including message frames.
    pub body: Bytes,
    pub trailers: HeaderMap,
}

impl GrpcTestResponse {
    /// The first value of a name, from the trailers or else from the headers.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.trailers.get(name).or(self.headers.get(name)).and_then(|value| value.to_str().ok())
    }

    pub fn code(&self) -> u32 {
        let status = self.value("grpc-status").and_then(|status| status.parse().ok());
        status.unwrap_or_else(|| panic!("no status: {self:?}"))
    }

    /// The message as text, without the frame.
    pub fn text(&self) -> String {
        let message = self.body.get(5..).unwrap_or_else(|| panic!("no message: {self:?}"));
        String::from_utf8(message.to_vec()).expect("a text")
    }

    /// Removes metadata that differs for every response, for comparisons.
    pub fn without_per_call_metadata(mut self) -> Self {
        self.headers.remove("date");
        self.headers.remove("idempotent-replayed");
        self
    }

    /// Asserts that this is a refusal: trailers-only, with this code, and this name in its details.
    #[track_caller]
    pub fn assert_refused(&self, code: u32, reason: &str) {
        assert!(self.trailers_only, "{self:?}");
        assert_eq!(self.value("content-type"), Some("application/grpc"), "{self:?}");
        assert_eq!(self.code(), code, "{self:?}");
        let details = self.value("grpc-status-details-bin").unwrap_or_else(|| panic!("no details: {self:?}"));
        let details = BASE64_NOPAD.decode(details.as_bytes()).expect("Base64 without padding");
        let text = String::from_utf8_lossy(&details);
        assert!(text.contains("type.googleapis.com/google.rpc.ErrorInfo"), "{text}");
        assert!(text.contains(reason), "{reason} is not in {text}");
    }
}

#[derive(Clone)]
pub struct GrpcTestClient(h2::client::SendRequest<Bytes>);

/// A call whose response has not arrived yet.
pub struct GrpcTestCall {
    pub answer: h2::client::ResponseFuture,
    pub send: h2::SendStream<Bytes>,
}

impl GrpcTestClient {
    /// Connects without TLS, by prior knowledge.
    pub async fn connect(addr: SocketAddr) -> Self {
        let tcp = TcpStream::connect(addr).await.unwrap_or_else(|why| panic!("{addr}: {why}"));
        let (send, connection) = h2::client::handshake(tcp).await.expect("it speaks HTTP/2");
        tokio::spawn(async move { drop(connection.await) });
        Self(send)
    }

    pub async fn open(&self, path: &str, headers: &[(&str, &str)]) -> GrpcTestCall {
        let mut request = Request::post(format!("http://shop{path}"))
            .header("te", "trailers")
            .header("content-type", "application/grpc");
        if headers.iter().all(|(name, _)| *name != "authorization") {
            request = request.header("authorization", "Bearer one");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut ready = self.0.clone().ready().await.expect("an open connection");
        let (answer, send) = ready.send_request(request.body(()).expect("valid headers"), false).expect("a stream");
        GrpcTestCall { answer, send }
    }

    /// Sends a whole call, each piece in its own DATA frame.
    pub async fn start(&self, path: &str, headers: &[(&str, &str)], pieces: &[Bytes]) -> GrpcTestCall {
        let mut call = self.open(path, headers).await;
        for piece in pieces {
            // The server may refuse a call before it is sent completely.
            let _ = call.send.send_data(piece.clone(), false);
            tokio::task::yield_now().await;
        }
        let _ = call.send.send_data(Bytes::new(), true);
        call
    }

    pub async fn call(&self, path: &str, headers: &[(&str, &str)], body: Bytes) -> GrpcTestResponse {
        self.start(path, headers, &[body]).await.end().await
    }
}

impl GrpcTestCall {
    pub async fn end(self) -> GrpcTestResponse {
        let ended = timeout(WAIT_TIMEOUT, self.try_finish()).await;
        ended.unwrap_or_else(|_| panic!("no answer within {WAIT_TIMEOUT:?}")).expect("a whole answer")
    }

    /// Waits for the response, for a test that expects it to break off.
    pub async fn try_finish(self) -> Result<GrpcTestResponse, h2::Error> {
        let response = self.answer.await?;
        assert_eq!(response.status(), 200, "{response:?}");
        let (parts, mut stream) = response.into_parts();
        let trailers_only = stream.is_end_stream();
        let mut body = BytesMut::new();
        while let Some(data) = stream.data().await {
            let data = data?;
            let _ = stream.flow_control().release_capacity(data.len());
            body.extend_from_slice(&data);
        }
        let trailers = stream.trailers().await?.unwrap_or_default();
        Ok(GrpcTestResponse { headers: parts.headers, trailers_only, body: body.freeze(), trailers })
    }
}
