//! An app that calls the API itself, message by message.

use std::{io, net::SocketAddr, path::PathBuf, time::Duration};

use data_encoding::BASE64;
use serde_json::{Value, json};
use testbed::{http1::WAIT_TIMEOUT, process::GatewayProcess};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    time::timeout,
};

use crate::support::{BIN, policy};

pub(super) const TOKEN: &str = "token-of-the-app";

#[derive(Clone, Debug)]
pub(crate) enum ApiPlace {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// A gateway with an API.
pub(super) struct ApiGateway {
    pub(super) process: GatewayProcess,
    pub(super) place: ApiPlace,
}

/// What the API answered.
#[derive(Debug)]
pub(crate) struct ApiReply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl ApiGateway {
    /// On a Unix socket and the embedded store, with every path under `ietf` with these dials.
    pub(super) async fn ietf(dials: &str) -> ApiGateway {
        ApiGateway::start(&policy(dials)).await
    }

    pub(super) async fn start(config: &str) -> ApiGateway {
        let config = format!("[api]\nlisten = \"unix:api.sock\"\n[store]\nurl = \"embedded:data\"\n{config}");
        let launch = GatewayProcess::launch(BIN).config(config).upstream("http://127.0.0.1:9");
        let process = launch.start().await;
        let place = ApiPlace::Unix(process.dir().join("api.sock"));
        ApiGateway { process, place }
    }

    /// On a loopback address, with a token.
    pub(super) async fn tcp(dials: &str) -> ApiGateway {
        let config = format!("[api]\nlisten = \"127.0.0.1:0\"\ntoken = \"{TOKEN}\"\n{}", policy(dials));
        let launch = GatewayProcess::launch(BIN).config(config).upstream("http://127.0.0.1:9");
        let process = launch.arg("--store").arg("memory:").start().await;
        let line = process.wait_for_log("ibid: api on ").await;
        let address = line.rsplit(' ').next().unwrap().parse().expect("an address");
        ApiGateway { process, place: ApiPlace::Tcp(address) }
    }

    pub(super) async fn begin(&self, call: &Value) -> ApiReply {
        self.call("/v1/exchanges", call).await
    }

    /// Begins an exchange that must run. Returns its handle and the whole message.
    pub(super) async fn run(&self, call: &Value) -> (String, Value) {
        let begun = self.begin(call).await;
        assert_eq!(begun.status, 201, "{begun:?}");
        let message = begun.json();
        (message["exchange"].as_str().expect("a handle").to_owned(), message)
    }

    pub(super) async fn end(&self, exchange: &str, response: &Value) -> ApiReply {
        self.call(&format!("/v1/exchanges/{exchange}/end"), response).await
    }

    pub(super) async fn failed(&self, exchange: &str, how: &str) -> ApiReply {
        self.call(&format!("/v1/exchanges/{exchange}/failed"), &json!({ "how": how })).await
    }

    pub(super) async fn extend(&self, exchange: &str) -> ApiReply {
        self.call(&format!("/v1/exchanges/{exchange}/extend"), &json!({})).await
    }

    pub(super) async fn call(&self, path: &str, message: &Value) -> ApiReply {
        self.send(&request_bytes(path, Some(TOKEN), &message.to_string())).await
    }

    pub(super) async fn send(&self, bytes: &[u8]) -> ApiReply {
        self.try_send(bytes).await.unwrap_or_else(|why| panic!("no answer: {why}"))
    }

    pub(super) async fn try_send(&self, bytes: &[u8]) -> io::Result<ApiReply> {
        send(&self.place, bytes).await
    }
}

pub(crate) async fn send(place: &ApiPlace, bytes: &[u8]) -> io::Result<ApiReply> {
    async fn exchange(mut stream: impl AsyncReadExt + AsyncWriteExt + Unpin, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        // The answer to a call that is too large may come before its end.
        let _ = stream.write_all(bytes).await;
        stream.read_to_end(&mut all).await?;
        Ok(all)
    }
    let work = async {
        match place {
            ApiPlace::Unix(path) => exchange(UnixStream::connect(path).await?, bytes).await,
            ApiPlace::Tcp(address) => exchange(TcpStream::connect(address).await?, bytes).await,
        }
    };
    let all = timeout(WAIT_TIMEOUT * 2, work).await.expect("an answer in time")?;
    let text = String::from_utf8(all).expect("text");
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| io::Error::other(format!("no answer: {text:?}")))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    Ok(ApiReply { status, head: head.to_owned(), body: body.to_owned() })
}

impl ApiReply {
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|why| panic!("{why}: {self:?}"))
    }

    /// What the client gets: status, body, and the value of the replay header.
    #[track_caller]
    pub(crate) fn answer(&self) -> ClientAnswer {
        assert_eq!(self.status, 200, "{self:?}");
        let answer = &self.json()["answer"];
        let headers = answer["headers"].as_array().expect("headers").iter();
        let headers = headers.map(|pair| (text(&pair[0]), text(&pair[1]))).collect();
        let body = BASE64.decode(text(&answer["body_base64"]).as_bytes()).expect("base64");
        ClientAnswer {
            status: answer["status"].as_u64().expect("a status"),
            headers,
            body: String::from_utf8(body).unwrap(),
        }
    }

    /// The call was refused with this status, for this reason.
    #[track_caller]
    pub(super) fn assert_problem(&self, status: u16, part: &str) {
        assert_eq!(self.status, status, "{self:?}");
        assert!(self.head.contains("application/problem+json"), "{self:?}");
        let problem = self.json();
        assert_eq!(problem["status"], status);
        assert!(text(&problem["detail"]).contains(part), "{problem}");
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ClientAnswer {
    pub(crate) status: u64,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl ClientAnswer {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(super) fn is_replay(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    /// The name of the refusal.
    #[track_caller]
    pub(super) fn refusal(&self) -> String {
        let problem: Value = serde_json::from_str(&self.body).unwrap_or_else(|why| panic!("{why}: {self:?}"));
        let kind = text(&problem["type"]);
        kind.strip_prefix("/.well-known/idempotency#").unwrap_or_else(|| panic!("{self:?}")).to_owned()
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}")).to_owned()
}

pub(crate) fn request_bytes(path: &str, token: Option<&str>, body: &str) -> Vec<u8> {
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
    let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n";
    format!("POST {path} HTTP/1.1\r\n{head}{token}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// A payment with this key. Every call has its own id.
pub(super) fn payment(key: &str) -> Value {
    payment_of(key, r#"{"amount":1}"#)
}

pub(super) fn payment_of(key: &str, body: &str) -> Value {
    json!({
        "id": new_id(),
        "method": "POST",
        "target": "/pay",
        "headers": [
            ["Host", "shop.example.com"],
            ["Content-Type", "application/json"],
            ["Authorization", "Bearer one"],
            ["Idempotency-Key", key],
        ],
        "body_base64": BASE64.encode(body.as_bytes()),
        "peer": "192.0.2.7",
    })
}

pub(crate) fn new_id() -> String {
    let token = ibid::store::ClaimToken::mint().0;
    token.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn created(body: &str) -> Value {
    response(201, body)
}

pub(super) fn response(status: u16, body: &str) -> Value {
    let headers = [["content-type", "application/json"]];
    json!({ "status": status, "headers": headers, "body_base64": BASE64.encode(body.as_bytes()) })
}

/// Begins with new ids until the answer is not the refusal `in-progress`.
pub(super) async fn begin_until_settled(gateway: &ApiGateway, key: &str) -> ApiReply {
    let end = tokio::time::Instant::now() + WAIT_TIMEOUT;
    loop {
        let reply = gateway.begin(&payment(key)).await;
        if reply.status != 200 || !reply.answer().body.contains("#in-progress") {
            return reply;
        }
        assert!(tokio::time::Instant::now() < end, "still in progress");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
