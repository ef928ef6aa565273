//! Behind HAProxy and in front of app servers that people run: Hypercorn, uvicorn, gunicorn.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::Path,
    process::Stdio,
    time::Duration,
};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use testbed::{
    client::{RawClient, get, post},
    process::GatewayProcess,
    upstream::TestUpstream,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::TcpStream,
    process::{Child, Command},
    time::sleep,
};

use crate::support::{BIN, assert_replay, pay, start_gateway, within};

const EVERYTHING: &str = "[policy]\npreset = \"ietf\"\n";

/// A server with the app of `tests/app_servers`. Dropping it kills the process.
struct AppServer {
    addr: SocketAddr,
    _process: Child,
}

impl AppServer {
    async fn start(name: &str, args: &[&str]) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(root.join("../../target/app-servers/bin").join(name));
        command.args(args).current_dir(root.join("tests/app_servers")).env("PYTHONDONTWRITEBYTECODE", "1");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().expect("scripts/tools has installed it");
        let mut lines = BufReader::new(process.stderr.take().expect("piped")).lines();
        let listening = async {
            while let Some(line) = lines.next_line().await.expect("text") {
                if let Some((_, rest)) = line.split_once("http://") {
                    let addr = rest.split([' ', '/']).next().expect("an address");
                    return addr.parse().expect("an address");
                }
            }
            panic!("{name} ended before it listened");
        };
        let addr = tokio::time::timeout(Duration::from_secs(30), listening).await.expect("it listens in time");
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Self { addr, _process: process }
    }

    fn url(&self) -> String {
        format!("http://{}", self.addr)
    }
}

async fn posts(addr: SocketAddr) -> u64 {
    get(addr, "/").send().await.json()["posts"].as_u64().expect("a number")
}

#[tokio::test]
async fn hypercorn_speaks_no_http2_behind_the_gateways_back() {
    let app = AppServer::start("hypercorn", &["--bind", "127.0.0.1:0", "app:asgi"]).await;
    let gateway = GatewayProcess::spawn(BIN, EVERYTHING, &app.url()).await;
    let upgrade = "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\
                   HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n";
    let ask = async |addr| {
        let mut raw = RawClient::connect(addr).await;
        raw.send(upgrade).await;
        raw.read_response().await.status
    };
    assert_eq!(ask(app.addr).await, 101, "Hypercorn itself accepts it");
    assert_eq!(ask(gateway.addr()).await, 200, "through the gateway it never hears of it");
    let keyed = pay(&gateway, "k-1").header("Connection", "Upgrade, HTTP2-Settings").header("Upgrade", "h2c");
    let keyed = keyed.header("HTTP2-Settings", "AAMAAABkAAQAAP__");
    let first = keyed.send().await;
    assert_eq!(first.json()["posts"], 1, "{first:?}");
    assert_replay(&keyed.send().await, &first);
    assert_eq!(posts(app.addr).await, 1, "no POST went past the policy");
}

#[tokio::test]
async fn a_websocket_to_hypercorn_is_tunnelled() {
    let app = AppServer::start("hypercorn", &["--bind", "127.0.0.1:0", "app:asgi"]).await;
    let gateway = GatewayProcess::spawn(BIN, EVERYTHING, &app.url()).await;
    let mut raw = RawClient::connect(gateway.addr()).await;
    raw.send(
        "GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    )
    .await;
    let answer = raw.read_response().await;
    assert_eq!(answer.status, 101, "{answer:?}");
    assert_eq!(answer.header("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    // "hi", masked with noughts; it comes back unmasked.
    raw.send(b"\x81\x82\0\0\0\0hi").await;
    assert_eq!(raw.read_until("hi").await.as_bytes().last_chunk::<2>(), Some(b"hi"));
}

/// uvicorn closes connections that are idle for a second; requests arrive around that very moment.
#[tokio::test]
async fn gets_to_uvicorn_survive_its_keep_alive_timeout() {
    let args = ["--port", "0", "--timeout-keep-alive", "1", "--log-level", "info", "app:asgi"];
    let app = AppServer::start("uvicorn", &args).await;
    let gateway = GatewayProcess::spawn(BIN, "upstream_idle = \"1m\"\n", &app.url()).await;
    let clients: Vec<_> = (0..60_u64)
        .map(|n| {
            let addr = gateway.addr();
            tokio::spawn(async move {
                let mut raw = RawClient::connect(addr).await;
                for _ in 0..4 {
                    let answer = get(addr, "/").send_on(&mut raw).await;
                    assert_eq!(answer.status, 200, "{answer:?}");
                    sleep(Duration::from_millis(990 + n / 2)).await;
                }
            })
        })
        .collect();
    for client in clients {
        client.await.expect("every answer is a 200");
    }
}

#[tokio::test]
async fn gunicorn_gets_all_cookies_of_an_http2_client() {
    let args = ["--no-control-socket", "--bind", "127.0.0.1:0", "app:wsgi"];
    let app = AppServer::start("gunicorn", &args).await;
    let gateway = GatewayProcess::spawn(BIN, EVERYTHING, &app.url()).await;
    let tcp = TcpStream::connect(gateway.addr()).await.expect("the gateway listens");
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tcp)).await.expect("it speaks HTTP/2");
    tokio::spawn(connection);
    for key in [None, Some("k-1")] {
        let request = Request::post(format!("http://{}/", gateway.addr())).header("authorization", "Bearer one");
        let request = request.header("cookie", "a=1").header("cookie", "session=s").header("cookie", "b=2");
        let request = match key {
            Some(key) => request.header("idempotency-key", key),
            None => request,
        };
        let answer = client.send_request(request.body(Full::new(Bytes::new())).expect("a request"));
        let answer = within("an answer", answer).await.expect("an answer");
        let body = within("its body", answer.into_body().collect()).await.expect("a whole answer").to_bytes();
        let told: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(told["cookie"], "a=1; session=s; b=2", "{told}");
    }
}

/// HAProxy in front of an address, with `option forwardfor`.
struct HaproxyServer {
    addr: SocketAddr,
    _folder: tempfile::TempDir,
    _process: Child,
}

impl HaproxyServer {
    async fn start(server: SocketAddr) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("haproxy.cfg");
        // The port may be taken between the two: then another one.
        for _ in 0..5 {
            let addr = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
            let config = format!(
                "defaults\n  mode http\n  timeout connect 5s\n  timeout client 20s\n  timeout server 20s\n\
                 frontend f\n  bind {addr}\n  option forwardfor\n  http-request add-header X-Forwarded-Proto https\n\
                 \x20 default_backend b\nbackend b\n  server s {server}\n"
            );
            fs::write(&path, config).expect("the configuration is written");
            let mut command = Command::new("/usr/sbin/haproxy");
            command.arg("-db").arg("-f").arg(&path).stdin(Stdio::null()).kill_on_drop(true);
            let mut process = command.spawn().expect("scripts/tools has installed HAProxy");
            while process.try_wait().expect("a child").is_none() {
                if TcpStream::connect(addr).await.is_ok() {
                    return Self { addr, _folder: folder, _process: process };
                }
                sleep(Duration::from_millis(10)).await;
            }
        }
        panic!("HAProxy does not start");
    }
}

#[tokio::test]
async fn what_haproxy_says_of_a_client_is_not_lost_behind_what_the_client_says() {
    let upstream = TestUpstream::start().await;
    for (trusted, chain) in
        [("", "203.0.113.7, 198.51.100.9, 127.0.0.1, 127.0.0.1"), ("trusted_proxies = []\n", "127.0.0.1")]
    {
        let gateway = start_gateway(&format!("{trusted}{EVERYTHING}"), &upstream).await;
        let haproxy = HaproxyServer::start(gateway.addr()).await;
        for request in [get(haproxy.addr, "/list"), post(haproxy.addr, "/pay").key("k-1").json("{}")] {
            let answer = request
                .header("X-Forwarded-For", "203.0.113.7")
                .header("X-Forwarded-For", "198.51.100.9")
                .header("X-Forwarded-Proto", "gopher")
                .send()
                .await;
            assert!(answer.status < 300, "{answer:?}");
            let seen = upstream.last();
            assert_eq!(seen.headers.get_all("x-forwarded-for"), [chain], "{seen:?}");
            let proto = if trusted.is_empty() { "https" } else { "http" };
            assert_eq!(seen.headers.get_all("x-forwarded-proto"), [proto], "{seen:?}");
        }
    }
}
