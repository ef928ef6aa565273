//! An app that uses the exchange API on one connection: `begin`, and `end` if its handler must run.

use std::{io, path::PathBuf};

use data_encoding::BASE64;
use ibid_count::json_body;
use tokio::{io::AsyncWriteExt, net::UnixStream};

use super::{
    LoadPlan,
    http1::{INITIAL_BUFFER_BYTES, read_response},
};

/// The app on the exchange API, in place of a client of the gateway.
#[derive(Clone, Debug)]
pub struct ApiLoad {
    /// Where ibid listens.
    pub socket: PathBuf,
    /// Size of the JSON body that the handler answers with.
    pub response_bytes: usize,
}

#[derive(Debug)]
pub(super) struct ExchangeLoadConnection {
    stream: UnixStream,
    /// The first half of every id: the connection's own.
    id_prefix: String,
    begun: u64,
    key_prefix: String,
    /// What follows the id and the key in the message.
    begin: [String; 2],
    end: String,
    /// How often the handler ran.
    pub(super) executed: u64,
    buffer: Vec<u8>,
    last: usize,
}

impl ExchangeLoadConnection {
    pub(super) async fn connect(api: &ApiLoad, plan: &LoadPlan, index: u64) -> io::Result<Self> {
        let (bytes, body) = (plan.body_bytes, BASE64.encode(json_body(plan.body_bytes).as_bytes()));
        let begin = [
            format!(
                "\",\"method\":\"POST\",\"target\":\"{}\",\"peer\":\"127.0.0.1\",\"headers\":[[\"Host\",\"{}\"],\
                 [\"Authorization\",\"Bearer bench\"],[\"Content-Type\",\"application/json\"],\
                 [\"Content-Length\",\"{bytes}\"],[\"Idempotency-Key\",\"",
                plan.path, plan.addr
            ),
            format!("\"]],\"body_base64\":\"{body}\"}}"),
        ];
        let answer = json_body(api.response_bytes);
        let end = format!(
            "{{\"status\":201,\"headers\":[[\"content-type\",\"application/json\"],[\"content-length\",\"{}\"]],\
             \"body_base64\":\"{}\"}}",
            answer.len(),
            BASE64.encode(answer.as_bytes())
        );
        Ok(Self {
            stream: UnixStream::connect(&api.socket).await?,
            id_prefix: format!("{:016x}", plan.namespace ^ (index << 48)),
            begun: 0,
            key_prefix: format!("{:016x}", plan.namespace),
            begin,
            end,
            executed: 0,
            buffer: vec![0; INITIAL_BUFFER_BYTES],
            last: 0,
        })
    }

    /// Returns the status of the answer for the client.
    pub(super) async fn exchange(&mut self, serial: u64) -> io::Result<u16> {
        self.begun += 1;
        let [after_id, after_key] = &self.begin;
        let (id, key) = (&self.id_prefix, &self.key_prefix);
        let message = format!("{{\"id\":\"{id}{:016x}{after_id}{key}{serial:016x}{after_key}", self.begun);
        if self.call("/v1/exchanges", &message).await? == 201 {
            self.executed += 1;
            let body = String::from_utf8_lossy(&self.buffer[..self.last]);
            let exchange = body.split("\"exchange\":\"").nth(1).and_then(|rest| rest.split('"').next());
            let exchange = exchange.ok_or_else(|| io::Error::other(format!("no exchange in {body}")))?;
            let path = format!("/v1/exchanges/{exchange}/end");
            let end = std::mem::take(&mut self.end);
            let status = self.call(&path, &end).await;
            self.end = end;
            status?;
        }
        let answer = String::from_utf8_lossy(&self.buffer[..self.last]);
        let status = answer.split("{\"answer\":{\"status\":").nth(1).and_then(|rest| rest.get(..3)?.parse().ok());
        status.ok_or_else(|| io::Error::other(format!("no answer in {answer}")))
    }

    async fn call(&mut self, path: &str, message: &str) -> io::Result<u16> {
        let length = message.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        self.stream.write_all((head + message).as_bytes()).await?;
        let response = read_response(&mut self.stream, &mut self.buffer).await?;
        self.last = response.len;
        Ok(response.status)
    }

    /// The last response, for people.
    pub(super) fn last(&self) -> String {
        String::from_utf8_lossy(&self.buffer[..self.last.min(600)]).into_owned()
    }
}
