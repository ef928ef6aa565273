//! The official SDKs of MCP: their clients, and their servers behind the gateway, in both eras of the protocol and with
//! both kinds of answers.
//!
//! The clients (`tests/mcp/client.py`, `tests/mcp/client.mjs`) call and say what they saw; the servers
//! (`tests/mcp/server.py`, `tests/mcp/server.mjs`) count runs. `scripts/tools` installs the SDKs.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::{
    FaultProxy,
    client::{TestRequest, post, request},
    process::GatewayProcess,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

use crate::support::{BIN, until};

/// Imports of a large SDK, many tests at a time on few cores.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(90);
const CONFIG: &str = "[store]\nurl = \"memory:\"\n[[route]]\nmatch = \"POST /mcp\"\npreset = \"mcp\"\n";

/// A client of an SDK, and the variant of it that is used.
#[derive(Clone, Copy, Debug)]
enum McpSdk {
    /// `legacy` with a session, `auto` without if the server allows it.
    Python(&'static str),
    /// The major version of the SDK.
    Node(&'static str),
}

fn python(script: &str) -> Command {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(here.join("../../target/mcp-clients/python/bin/python"));
    command.arg(here.join("tests/mcp").join(script)).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

fn node(script: &str) -> Command {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("node");
    let modules = here.join("../../target/mcp-clients/node/node_modules");
    command.arg(here.join("tests/mcp").join(script)).env("NODE_MODULES", modules);
    command
}

fn spawn(command: &mut Command) -> (Child, ChildStdin, Lines<BufReader<ChildStdout>>) {
    let spawned = command.kill_on_drop(true).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = spawned.unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/tools installs the SDK"));
    let (stdin, stdout) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
    (child, stdin, BufReader::new(stdout).lines())
}

async fn next_line(lines: &mut Lines<BufReader<ChildStdout>>) -> String {
    let line = timeout(CLIENT_TIMEOUT, lines.next_line()).await.expect("it answers in time");
    line.expect("text").expect("it runs")
}

/// A server of the SDK, with the gateway in front of it.
struct McpServer {
    process: Child,
    gateway: GatewayProcess,
    url: String,
    runs: PathBuf,
    _folder: TempDir,
}

impl McpServer {
    async fn start(answers: &str, dials: &str) -> Self {
        Self::launch(python("server.py"), answers, dials, None).await
    }

    /// A server of an SDK for Node, of this major version.
    async fn start_node(version: &str, answers: &str, dials: &str) -> Self {
        Self::launch(node("server.mjs"), answers, dials, Some(version)).await
    }

    async fn launch(mut command: Command, answers: &str, dials: &str, version: Option<&str>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let runs = folder.path().join("runs");
        let (process, _, mut lines) = spawn(command.arg(answers).arg(&runs).args(version));
        let url = next_line(&mut lines).await;
        let gateway = GatewayProcess::spawn(BIN, &format!("{CONFIG}{dials}"), &url).await;
        Self { process, gateway, url, runs, _folder: folder }
    }

    fn runs(&self) -> usize {
        fs::read_to_string(&self.runs).unwrap_or_default().lines().count()
    }

    /// How many pages of the list of tools were read.
    fn listed(&self) -> usize {
        fs::read_to_string(self.runs.with_extension("lists")).unwrap_or_default().lines().count()
    }

    fn client(&self, sdk: McpSdk, agent: &str) -> McpClient {
        self.client_of(self.gateway.addr(), sdk, agent)
    }

    fn client_of(&self, addr: SocketAddr, sdk: McpSdk, agent: &str) -> McpClient {
        let url = format!("http://{addr}/mcp");
        let (mut command, variant) = match sdk {
            McpSdk::Python(mode) => (python("client.py"), mode),
            McpSdk::Node(version) => (node("client.mjs"), version),
        };
        let (process, calls, answers) = spawn(command.arg(url).arg(variant).arg(agent));
        McpClient { process, calls, answers }
    }
}

struct McpClient {
    process: Child,
    calls: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl McpClient {
    async fn send(&mut self, call: Value) {
        self.calls.write_all(format!("{call}\n").as_bytes()).await.expect("the client runs");
    }

    async fn call(&mut self, call: Value) -> Vec<Value> {
        self.send(call).await;
        self.next_answer().await
    }

    async fn next_answer(&mut self) -> Vec<Value> {
        serde_json::from_str(&next_line(&mut self.answers).await).expect("a list")
    }

    /// Waits until the client gives the call up that it sent.
    async fn expect_no_answer(&mut self) {
        let told = self.next_answer().await;
        assert!(told[0]["text"].is_null(), "its answer was lost: {told:?}");
    }
}

fn paid(run: usize, amount: u32) -> Value {
    json!({ "text": format!("run {run} paid {amount}"), "failed": false })
}

const WAIT: &str = "on_concurrent = \"wait\"\n";

async fn a_call_runs_once(sdk: McpSdk, answers: &str) {
    a_call_runs_once_at(McpServer::start(answers, WAIT).await, sdk).await;
}

async fn a_call_runs_once_at(mut server: McpServer, sdk: McpSdk) {
    let mut client = server.client(sdk, "agent-1");
    for _ in 0..2 {
        // Each in a session of its own.
        assert_eq!(client.call(json!({ "key": "k-1", "amount": 5 })).await, [paid(1, 5)]);
    }
    let reused = client.call(json!({ "key": "k-1", "amount": 6 })).await;
    assert_eq!(reused, [json!({ "code": -31010, "type": "key-reused" })]);
    assert_eq!(server.runs(), 1);

    let mut other = server.client(sdk, "agent-2");
    assert_eq!(other.call(json!({ "key": "k-1", "amount": 5 })).await, [paid(2, 5)], "another agent's key");

    let all = client.call(json!({ "key": "k-2", "amount": 7, "seconds": 1, "times": 50 })).await;
    assert_eq!(all, vec![paid(3, 7); 50]);
    assert_eq!(server.runs(), 3);

    // The tool failed; it is not run again.
    let failed = client.call(json!({ "key": "k-3", "amount": -1 })).await;
    assert_eq!(failed[0]["failed"], true, "{failed:?}");
    assert_eq!(client.call(json!({ "key": "k-3", "amount": -1 })).await, failed);
    assert_eq!(server.runs(), 4);

    // The client is killed while the tool runs, and another one asks again.
    client.send(json!({ "key": "k-4", "amount": 8, "seconds": 2 })).await;
    until("the tool runs", || server.runs() == 5).await;
    client.process.kill().await.expect("it runs");
    let mut client = server.client(sdk, "agent-1");
    assert_eq!(client.call(json!({ "key": "k-4", "amount": 8, "seconds": 2 })).await, [paid(5, 8)]);
    assert_eq!(server.runs(), 5);

    // The server is killed while the tool runs: nobody knows what became of it.
    client.send(json!({ "key": "k-5", "amount": 9, "seconds": 60 })).await;
    until("the tool runs", || server.runs() == 6).await;
    server.process.kill().await.expect("it runs");
    let told: Vec<Value> = serde_json::from_str(&next_line(&mut client.answers).await).expect("a list");
    assert!(!told[0]["code"].is_null(), "{told:?}");
    let params = json!({ "name": "pay", "arguments": { "amount": 9, "seconds": 60 } });
    let again = json!({ "jsonrpc": "2.0", "id": "again", "method": "tools/call", "params": params }).to_string();
    let again = post(server.gateway.addr(), "/mcp").header("Authorization", "Bearer agent-1").key("k-5").json(&again);
    let told = again.send().await.json();
    assert_eq!((&told["id"], &told["error"]["data"]["type"]), (&json!("again"), &json!("outcome-unknown")), "{told}");
}

#[tokio::test]
async fn pythons_sdk_in_a_session_with_json() {
    a_call_runs_once(McpSdk::Python("legacy"), "json").await;
}

#[tokio::test]
async fn pythons_sdk_in_a_session_with_event_streams() {
    a_call_runs_once(McpSdk::Python("legacy"), "stream").await;
}

#[tokio::test]
async fn pythons_sdk_without_a_session_with_json() {
    a_call_runs_once(McpSdk::Python("auto"), "json").await;
}

#[tokio::test]
async fn pythons_sdk_without_a_session_with_event_streams() {
    a_call_runs_once(McpSdk::Python("auto"), "stream").await;
}

#[tokio::test]
async fn nodes_first_sdk_with_json() {
    a_call_runs_once(McpSdk::Node("1"), "json").await;
}

#[tokio::test]
async fn nodes_first_sdk_with_event_streams() {
    a_call_runs_once(McpSdk::Node("1"), "stream").await;
}

#[tokio::test]
async fn nodes_second_sdk_with_json() {
    a_call_runs_once(McpSdk::Node("2"), "json").await;
}

#[tokio::test]
async fn nodes_second_sdk_with_event_streams() {
    a_call_runs_once(McpSdk::Node("2"), "stream").await;
}

#[tokio::test]
async fn servers_of_nodes_first_sdk() {
    a_call_runs_once_at(McpServer::start_node("1", "json", WAIT).await, McpSdk::Python("auto")).await;
    a_call_runs_once_at(McpServer::start_node("1", "stream", WAIT).await, McpSdk::Node("1")).await;
}

#[tokio::test]
async fn servers_of_nodes_second_sdk() {
    a_call_runs_once_at(McpServer::start_node("2", "json", WAIT).await, McpSdk::Python("auto")).await;
    a_call_runs_once_at(McpServer::start_node("2", "stream", WAIT).await, McpSdk::Node("2")).await;
}

/// The client loses the gateway while the tool runs, for so long that it gives up. (A client that reaches the gateway
/// again ends its session, which ends the run: see the next test.)
async fn a_lost_answer_is_replayed(sdk: McpSdk, answers: &str) {
    let server = McpServer::start(answers, WAIT).await;
    let proxy = FaultProxy::to(server.gateway.addr());
    let mut client = server.client_of(proxy.addr(), sdk, "agent-1");
    client.send(json!({ "key": "k-1", "amount": 5, "seconds": 2 })).await;
    until("the tool runs", || server.runs() == 1).await;
    proxy.refuse();
    proxy.reset();
    client.expect_no_answer().await;
    proxy.heal();
    assert_eq!(client.call(json!({ "key": "k-1", "amount": 5, "seconds": 2 })).await, [paid(1, 5)]);
    assert_eq!(server.runs(), 1);
}

/// A server of the revisions with sessions aborts the calls of a session that its client ends.
#[tokio::test]
async fn a_session_that_ends_in_mid_call_leaves_the_outcome_unknown() {
    let server = McpServer::start("stream", WAIT).await;
    let addr = server.gateway.addr();
    let send = |method: &str, id: Value, params: Value| {
        let text = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }).to_string();
        let request = post(addr, "/mcp").header("Authorization", "Bearer agent-1").json(&text);
        request.header("Accept", "application/json, text/event-stream")
    };
    let client = json!({ "name": "test", "version": "1" });
    let begin = json!({ "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client });
    let begun = send("initialize", json!(1), begin).send().await;
    let session = begun.header("mcp-session-id").unwrap_or_else(|| panic!("{begun:?}")).to_owned();
    let in_session =
        |request: TestRequest| request.header("Mcp-Session-Id", &session).header("MCP-Protocol-Version", "2025-06-18");
    let ready = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }).to_string();
    let ready = post(addr, "/mcp").header("Accept", "application/json, text/event-stream").json(&ready);
    assert_eq!(in_session(ready).send().await.status, 202);
    let call = |id: u32| {
        let arguments = json!({ "amount": 5, "seconds": 60 });
        in_session(send("tools/call", json!(id), json!({ "name": "pay", "arguments": arguments })).key("k-1"))
    };
    let _held = call(2).start().await;
    until("the tool runs", || server.runs() == 1).await;
    let end = in_session(request("DELETE", addr, "/mcp"));
    assert_eq!(end.send().await.status, 200);
    let told = call(3).send().await.json();
    assert_eq!(told["error"]["data"]["type"], "outcome-unknown", "{told}");
    assert_eq!(server.runs(), 1);
}

#[tokio::test]
async fn an_answer_that_pythons_sdk_lost_is_replayed() {
    for mode in ["auto", "legacy"] {
        a_lost_answer_is_replayed(McpSdk::Python(mode), "json").await;
        a_lost_answer_is_replayed(McpSdk::Python(mode), "stream").await;
    }
}

#[tokio::test]
async fn an_answer_that_nodes_sdks_lost_is_replayed() {
    for version in ["1", "2"] {
        a_lost_answer_is_replayed(McpSdk::Node(version), "json").await;
        a_lost_answer_is_replayed(McpSdk::Node(version), "stream").await;
    }
}

/// The tools that the server annotates pass, all others are covered. The list has a page for each of its four tools, and
/// is read once.
async fn annotations_decide(mode: &'static str, answers: &str) {
    let server = McpServer::start(answers, "tools = \"annotations\"\n").await;
    let mut client = server.client(McpSdk::Python(mode), "agent-1");
    for run in 1..=2 {
        let saw = client.call(json!({ "tool": "look", "key": "k-1", "amount": 5 })).await;
        assert_eq!(saw, [json!({ "text": format!("run {run} saw 5"), "failed": false })]);
    }
    let reset = client.call(json!({ "tool": "reset", "key": "k-1", "amount": 5 })).await;
    assert_eq!(reset, [json!({ "text": "run 3 reset 5", "failed": false })]);
    for _ in 0..2 {
        assert_eq!(client.call(json!({ "key": "k-1", "amount": 5 })).await, [paid(4, 5)]);
    }
    assert_eq!((server.runs(), server.listed()), (4, 4));
}

#[tokio::test]
async fn tools_that_their_server_calls_harmless_pass() {
    annotations_decide("auto", "json").await;
    annotations_decide("legacy", "stream").await;
}

/// A server that does not list its tools.
#[tokio::test]
async fn every_tool_is_covered_if_the_list_cannot_be_read() {
    let server = McpServer::start("json", "tools = \"annotations\"\n").await;
    fs::write(server.runs.with_extension("refuse"), "").expect("a file");
    let mut client = server.client(McpSdk::Python("auto"), "agent-1");
    for _ in 0..2 {
        let saw = client.call(json!({ "tool": "look", "key": "k-1", "amount": 5 })).await;
        assert_eq!(saw, [json!({ "text": "run 1 saw 5", "failed": false })]);
    }
    assert_eq!(server.runs(), 1);
}

/// What `ibid conform --profile mcp` finds: the failed checks, those that were not performed, and the exit code.
async fn conform(url: &str, more: &[&str]) -> (Vec<String>, Vec<String>, Option<i32>) {
    let mut command = Command::new(BIN);
    command.args(["conform", &format!("{url}/mcp"), "--profile", "mcp", "--tool", "pay", "--json", "--timeout", "30s"]);
    command.args(["--body", r#"{"amount":{nonce},"seconds":0}"#, "--slow-body", r#"{"amount":{nonce},"seconds":1}"#]);
    command.args(["--other-body", r#"{"amount":99999,"seconds":0}"#, "--rounds", "1"]);
    command.args(["--header", "Authorization: Bearer a", "--other-header", "Authorization: Bearer b"]);
    let output = timeout(CLIENT_TIMEOUT, command.args(more).kill_on_drop(true).output());
    let output = output.await.expect("it ends").expect("it runs");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|why| panic!("{why}: {told}"));
    let all = |verdict: &str| {
        let checks = json["checks"].as_array().expect("checks").iter();
        let ids = checks.filter(|check| check["verdict"] == verdict).map(|check| check["id"].as_str().expect("an id"));
        ids.map(str::to_owned).collect()
    };
    (all("failed"), all("not performed"), output.status.code())
}

const COUNT_TOOL: [&str; 2] = ["--count-tool", "runs"];
const STATELESS: [&str; 2] = ["--protocol-version", "2026-07-28"];

#[tokio::test]
async fn conform_finds_that_a_server_runs_a_lost_call_twice_and_that_behind_the_gateway_it_does_not() {
    let doubles = ["mcp.lost-answer", "mcp.result", "mcp.hang-up", "mcp.concurrent", "mcp.session", "mcp.arguments"]
        .map(str::to_owned);
    for (answers, key_at) in [("json", "/params/_meta/idempotency-key"), ("stream", "header")] {
        let server = McpServer::start(answers, "").await;
        let more = [&COUNT_TOOL[..], &["--key-at", key_at]].concat();
        let (failed, not_performed, code) = conform(&server.url, &more).await;
        assert_eq!((&failed[..], &not_performed[..], code), (&doubles[..], &[][..], Some(1)), "{answers}");
        let gateway = format!("http://{}", server.gateway.addr());
        assert_eq!(conform(&gateway, &more).await, (vec![], vec![], Some(0)), "{answers}");
    }
}

#[tokio::test]
async fn conform_speaks_the_revision_without_sessions_and_counts_by_a_resource() {
    let server = McpServer::start("stream", "on_concurrent = \"wait\"\n").await;
    let more = [&STATELESS[..], &["--count-resource", "runs://count"]].concat();
    let (failed, not_performed, code) = conform(&server.url, &more).await;
    let doubles = ["mcp.lost-answer", "mcp.result", "mcp.hang-up", "mcp.concurrent", "mcp.arguments"];
    assert_eq!(
        (failed, not_performed, code),
        (doubles.map(str::to_owned).to_vec(), vec!["mcp.session".into()], Some(1))
    );
    let gateway = format!("http://{}", server.gateway.addr());
    assert_eq!(conform(&gateway, &more).await, (vec![], vec!["mcp.session".into()], Some(0)));
    // Without a counter, results tell runs apart; who hangs up sees none.
    let (failed, not_performed, code) = conform(&gateway, &STATELESS).await;
    assert_eq!((failed, code), (vec![], Some(0)));
    assert_eq!(not_performed, ["mcp.hang-up", "mcp.session"]);
}

#[tokio::test]
async fn conform_finds_a_gateway_that_confuses_callers_and_arguments() {
    let server = McpServer::start("json", "scope = \"global\"\non_mismatch = \"ignore\"\n").await;
    let gateway = format!("http://{}", server.gateway.addr());
    let (failed, _, code) = conform(&gateway, &COUNT_TOOL).await;
    assert_eq!((failed, code), (vec!["mcp.arguments".into(), "mcp.caller".into()], Some(1)));
}
