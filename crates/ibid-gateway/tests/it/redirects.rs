//! Redirects that repeat the request: FastAPI answers 307 to `/items` and means `/items/`. Clients that follow it send the
//! same request with the same key again, and may start their retry at either address.
//!
//! The app and the clients are real: `scripts/tools` installs them.

use std::{net::SocketAddr, path::PathBuf, process::Stdio, time::Duration};

use serde_json::Value;
use testbed::process::GatewayProcess;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    time::timeout,
};

use crate::support::BIN;

const CLIENT_TIMEOUT: Duration = Duration::from_secs(60);

fn python(script: &str) -> Command {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("../../target/redirect-clients/bin/python");
    assert!(python.exists(), "{} is missing: scripts/tools installs it", python.display());
    let mut command = Command::new(python);
    command.arg(root.join("tests/redirects").join(script)).kill_on_drop(true).stdout(Stdio::piped());
    command
}

/// A FastAPI app under uvicorn.
struct FastApiApp {
    url: String,
    _process: Child,
}

impl FastApiApp {
    async fn start() -> Self {
        let mut process = python("app.py").spawn().expect("python runs");
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let port =
            timeout(CLIENT_TIMEOUT, lines.next_line()).await.expect("it starts").unwrap().expect("it prints its port");
        Self { url: format!("http://127.0.0.1:{port}"), _process: process }
    }

    async fn start_gateway(&self, dials: &str) -> GatewayProcess {
        let config = format!("[store]\nurl = \"memory:\"\n[policy]\n{dials}");
        GatewayProcess::launch(BIN).config(config).upstream(&self.url).start().await
    }
}

/// What a client saw in the end: the status, the body, and whether it was a replay.
type RedirectResult = (u64, String, bool);

async fn send(client: &str, at: SocketAddr, path: &str, key: &str) -> RedirectResult {
    let url = format!("http://{at}{path}");
    let output = if client == "curl" {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "-L", "--max-time", "30", "-d", r#"{"name": "lamp"}"#]);
        curl.args(["-H", "Content-Type: application/json", "-H", "Authorization: Bearer t"]);
        curl.args(["-H", &format!("Idempotency-Key: {key}"), &url]);
        curl.args(["-w", "\n%{http_code} %header{idempotent-replayed}"]).kill_on_drop(true).output()
    } else {
        python("client.py").args([client, &url, key]).output()
    };
    let output = timeout(CLIENT_TIMEOUT, output).await.expect("it ends").unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{client}: {text}");
    if client == "curl" {
        let (body, told) = text.rsplit_once('\n').unwrap();
        let (status, replayed) = told.split_once(' ').unwrap();
        return (status.parse().unwrap(), body.to_owned(), replayed == "true");
    }
    let told: Value = serde_json::from_str(&text).unwrap();
    if path == "/items" && !told["replayed"].is_string() {
        assert_eq!(told["hops"], 1, "the app redirects: {told}");
    }
    let body = told["body"].as_str().unwrap().to_owned();
    (told["status"].as_u64().unwrap(), body, told["replayed"] == "true")
}

#[tokio::test]
async fn a_request_that_was_redirected_runs_once_and_its_retry_replays_from_either_address() {
    let app = FastApiApp::start().await;
    let by_default = app.start_gateway("").await;
    let by_path = app.start_gateway("scope = [\"host\", \"credential\", \"path\"]").await;
    let all = [("requests", &by_default), ("httpx", &by_default), ("curl", &by_default), ("curl", &by_path)];
    for (run, (client, gateway)) in all.into_iter().enumerate() {
        let (key, at) = (format!("redirected-{run}"), gateway.addr());
        let body = format!(r#"{{"run":{},"item":{{"name":"lamp"}}}}"#, run + 1);
        assert_eq!(send(client, at, "/items", &key).await, (200, body.clone(), false), "{client}: the first time");
        for path in ["/items", "/items/"] {
            assert_eq!(send(client, at, path, &key).await, (200, body.clone(), true), "{client}: a retry of {path}");
        }
    }
}
