//! No header, HTTP version or spelling makes a request that a route names reach the app uncovered.

mod apps;
mod combinations;
mod unrouted_requests;

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

use crate::support::within;

/// A connection over HTTP/2, on which requests may have any media type.
pub(crate) struct Http2Connection(SendRequest<Full<Bytes>>);

/// What came back.
#[derive(Debug)]
pub(crate) struct Http2Response {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Http2Connection {
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        let tcp = TcpStream::connect(addr).await.expect("it listens");
        let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(tcp)).await.expect("it speaks HTTP/2");
        tokio::spawn(connection);
        Self(sender)
    }

    pub(crate) async fn send(
        &self, method: &str, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>,
    ) -> Http2Response {
        let mut request = Request::builder().method(method).uri(format!("http://shop.test{path}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).expect("a valid request");
        let mut sender = self.0.clone();
        let answer = async {
            let (head, body) = sender.send_request(request).await.expect("an answer").into_parts();
            let body = body.collect().await.expect("a whole answer").to_bytes();
            Http2Response { status: head.status, headers: head.headers, body }
        };
        within("an answer over HTTP/2", answer).await
    }
}
