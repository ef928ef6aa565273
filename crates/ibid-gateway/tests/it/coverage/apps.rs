//! Apps that nobody here wrote, and what they take for a path or a call: Express, grpcio.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
};

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use testbed::{
    client::{get, post},
    grpc::{GrpcTestClient, message},
    process::GatewayProcess,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use super::Http2Connection;
use crate::support::{BIN, assert_refused, within};

const SECRET: &str = "It's a Secret to Everybody";

/// An app in a process of its own, which prints its port first.
struct App {
    addr: SocketAddr,
    _process: Child,
}

impl App {
    async fn start(mut command: Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().expect("the app starts");
        let mut lines = BufReader::new(process.stdout.take().expect("it is piped")).lines();
        let port = within("the app's port", lines.next_line()).await.unwrap().expect("it prints its port");
        Self { addr: SocketAddr::from(([127, 0, 0, 1], port.trim().parse().expect("a port"))), _process: process }
    }

    async fn express() -> Self {
        let mut command = Command::new("node");
        command.arg(test_file("apps/express.cjs")).env("NODE_PATH", installed_path("apps/node_modules"));
        Self::start(command).await
    }

    async fn grpcio() -> Self {
        let mut command = Command::new(installed_path("grpc-clients/python/bin/python"));
        command.arg(test_file("grpc/server.py"));
        Self::start(command).await
    }
}

fn test_file(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(file)
}

fn installed_path(what: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target").join(what);
    assert!(path.exists(), "{} is not there: run scripts/tools, which installs it", path.display());
    path
}

/// Express ignores case and a slash at the end unless told otherwise.
#[tokio::test]
async fn what_express_takes_for_a_route_is_covered_by_it() {
    let app = App::express().await;
    let runs = async || get(app.addr, "/runs").send().await.json().as_u64().unwrap();
    let spellings = ["/hooks/github/", "/Hooks/GitHub", "/HOOKS/github/"];
    for path in spellings {
        assert_eq!(post(app.addr, path).send().await.status, 201, "Express itself runs {path}");
    }
    let before = runs().await;
    let config = format!(
        "store.url = \"memory:\"\n[policy]\npreset = \"off\"\n[[route]]\nmatch = \"POST /hooks/github\"\n\
         preset = \"webhook:github\"\nsecrets = [{SECRET:?}]\n[[route]]\nmatch = \"POST /payments\"\n"
    );
    let gateway = GatewayProcess::spawn(BIN, &config, &format!("http://{}", app.addr)).await;
    let deliver = async |path: &str, signature: &str| {
        let request = post(gateway.addr(), path).json("{}").header("X-Hub-Signature-256", signature);
        request.header("X-GitHub-Delivery", "d-1").header("X-GitHub-Event", "push").send().await
    };
    for path in spellings {
        assert_refused(&deliver(path, "sha256=00").await, 401, "identity-invalid");
    }
    assert_eq!(runs().await, before, "no forged delivery ran");
    let mut mac = <Hmac<Sha256>>::new_from_slice(SECRET.as_bytes()).unwrap();
    mac.update(b"{}");
    let signature: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    for path in ["/hooks/github"].into_iter().chain(spellings) {
        assert_eq!(deliver(path, &format!("sha256={signature}")).await.status, 201, "{path}");
    }
    assert_eq!(runs().await, before + 1, "a delivery runs once, however its path is spelt");

    for (at, path) in ["/payments", "/Payments", "/payments/"].into_iter().enumerate() {
        for _ in 0..2 {
            assert_eq!(post(gateway.addr(), path).key(format!("pay-{at}")).json("{}").send().await.status, 201);
        }
    }
    assert_eq!(runs().await, before + 4, "each key ran once");
}

/// grpcio looks at the path alone: it runs a call whatever its media type is.
#[tokio::test]
async fn a_call_that_does_not_look_like_one_does_not_run_again_in_a_grpcio_server() {
    const CREATE: &str = "/shop.Orders/Create";
    let app = App::grpcio().await;
    let direct = GrpcTestClient::connect(app.addr).await;
    let runs = async || direct.call("/shop.Orders/Runs", &[], message("")).await.text();
    let odd = Http2Connection::connect(app.addr).await;
    let answer = odd.send("POST", CREATE, &[("content-type", "application/grpc+x"), ("te", "trailers")], message("x"));
    assert_eq!(answer.await.status, 200);
    assert_eq!(runs().await, "1", "grpcio itself runs it");

    let config = "store.url = \"memory:\"\n[[route]]\nmatch = \"grpc shop.Orders/Create\"\npreset = \"platform\"";
    let gateway = GatewayProcess::spawn(BIN, config, &format!("h2c://{}", app.addr)).await;
    let key = ("idempotency-key", "key-1");
    let client = GrpcTestClient::connect(gateway.addr()).await;
    for _ in 0..2 {
        let answer = client.call(CREATE, &[key], message("x")).await;
        assert_eq!((answer.code(), answer.text()), (0, "2".to_owned()));
    }
    let http2 = Http2Connection::connect(gateway.addr()).await;
    for media_type in ["application/json", "application/grpc-web+proto", "application/proto", "application/grpcx"] {
        let headers = [key, ("content-type", media_type), ("te", "trailers")];
        let answer = http2.send("POST", CREATE, &headers, message("x")).await;
        assert_eq!(answer.status, 422, "{media_type}: {answer:?}");
        assert_eq!(answer.headers["content-type"], "application/problem+json", "it is refused as what it is");
        let without_key = http2.send("POST", CREATE, &headers[1..], message("x")).await;
        assert_eq!(without_key.status, 400, "{media_type}: {without_key:?}");
    }
    for media_type in ["application/grpc", "application/grpc+proto", "application/json"] {
        let request = post(gateway.addr(), CREATE).header("TE", "trailers").body(message("x"));
        let answer = request.header("Content-Type", media_type).key("key-1").send().await;
        let expected = if media_type.contains("grpc") { (400, "request-ambiguous") } else { (422, "key-reused") };
        assert_refused(&answer, expected.0, expected.1);
    }
    assert_eq!(runs().await, "2", "one key, one run");
}
