//! Unary gRPC calls over one HTTP/2 connection, one at a time.

use std::io;

use bytes::{BufMut, Bytes, BytesMut};
use h2::{RecvStream, client::SendRequest};
use http::{HeaderMap, HeaderValue, Request, request::Parts};
use tokio::net::TcpStream;

use super::LoadPlan;
use ibid_count::json_body;

#[derive(Debug)]
pub(super) struct GrpcLoadConnection {
    send: SendRequest<Bytes>,
    head: Parts,
    namespace: u64,
    /// With its prefix.
    message: Bytes,
    /// What the last call that failed said.
    last: String,
}

impl GrpcLoadConnection {
    pub(super) async fn connect(stream: TcpStream, plan: &LoadPlan) -> io::Result<Self> {
        let (send, connection) = h2::client::handshake(stream).await.map_err(io::Error::other)?;
        // Ends when `send` is dropped, or with the connection; what broke it is told to the call that it broke.
        tokio::spawn(connection);
        let head = Request::post(format!("http://{}{}", plan.addr, plan.path))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("authorization", "Bearer bench")
            .body(())
            .map_err(io::Error::other)?
            .into_parts()
            .0;
        let body = json_body(plan.body_bytes);
        let mut message = BytesMut::with_capacity(5 + body.len());
        message.put_u8(0);
        message.put_u32(body.len() as u32);
        message.put_slice(body.as_bytes());
        Ok(Self { send, head, namespace: plan.namespace, message: message.freeze(), last: String::new() })
    }

    /// One call; its code and 1000.
    pub(super) async fn exchange(&mut self, serial: u64) -> io::Result<u16> {
        let mut head = self.head.clone();
        let key = format!("{:016x}{serial:016x}", self.namespace);
        head.headers.insert("idempotency-key", HeaderValue::from_str(&key).map_err(io::Error::other)?);
        let mut send = self.send.clone().ready().await.map_err(io::Error::other)?;
        let (answer, mut body) = send.send_request(Request::from_parts(head, ()), false).map_err(io::Error::other)?;
        body.send_data(self.message.clone(), true).map_err(io::Error::other)?;
        let (answer, mut body) = answer.await.map_err(io::Error::other)?.into_parts();
        read_to_end(&mut body).await.map_err(io::Error::other)?;
        let trailers = body.trailers().await.map_err(io::Error::other)?;
        let trailers = trailers.as_ref().unwrap_or(&answer.headers);
        let code = code(trailers).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("a call without a status: {answer:?}, {trailers:?}"))
        })?;
        if code != 0 {
            self.last = format!("{trailers:?}");
        }
        Ok(1000 + code)
    }

    pub(super) fn last(&self) -> String {
        self.last.clone()
    }
}

async fn read_to_end(body: &mut RecvStream) -> Result<(), h2::Error> {
    while let Some(data) = body.data().await {
        let length = data?.len();
        body.flow_control().release_capacity(length)?;
    }
    Ok(())
}

fn code(trailers: &HeaderMap) -> Option<u16> {
    trailers.get("grpc-status")?.to_str().ok()?.parse().ok().filter(|code| *code < 100)
}
