//! Stripe's own SDKs, of Python and of Node, with the gateway as their API and an app behind it that knows nothing of keys.
//!
//! The clients (`tests/stripe/client.py`, `tests/stripe/client.mjs`) call and say what they saw; what it should have been is
//! said here, once for both. `scripts/tools` installs what they need.

use std::{path::Path, process::Stdio, time::Duration};

use serde_json::{Value, json};
use testbed::{
    client,
    process::GatewayProcess,
    upstream::{ReplyGate, TestUpstream, UpstreamFault, UpstreamReply},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

use crate::support::start_gateway;

/// Imports of a large SDK, and its pauses between attempts, many tests at a time on few cores.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(90);
const PATH: &str = "/v1/payment_intents";

#[derive(Clone, Copy, Debug, PartialEq)]
enum StripeSdk {
    Python,
    Node,
}

/// A running client.
struct StripeClient {
    sdk: StripeSdk,
    _child: Child,
    calls: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl StripeClient {
    fn start(sdk: StripeSdk, gateway: &GatewayProcess) -> StripeClient {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (tests, installed) = (here.join("tests/stripe"), here.join("../../target/stripe-clients"));
        let missing = "scripts/tools installs the SDKs into target/stripe-clients";
        let mut command = match sdk {
            StripeSdk::Python => {
                let mut command = Command::new(installed.join("python/bin/python"));
                command.arg(tests.join("client.py"));
                command
            }
            StripeSdk::Node => {
                let mut command = Command::new("node");
                command.arg(tests.join("client.mjs")).env("NODE_MODULES", installed.join("node/node_modules"));
                command
            }
        };
        command.arg(format!("http://{}", gateway.addr())).kill_on_drop(true);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap_or_else(|error| panic!("{command:?}: {error}; {missing}"));
        let (calls, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        StripeClient { sdk, _child: child, calls, answers: BufReader::new(answers).lines() }
    }

    async fn send_call(&mut self, call: &Value) {
        self.calls.write_all(format!("{call}\n").as_bytes()).await.expect("the client runs");
    }

    async fn read_result(&mut self) -> Value {
        let line = timeout(CLIENT_TIMEOUT, self.answers.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("{:?} did not answer within {CLIENT_TIMEOUT:?}", self.sdk));
        let line = line.expect("text").unwrap_or_else(|| panic!("{:?} ended", self.sdk));
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{:?} said {line:?}: {error}", self.sdk))
    }

    async fn call(&mut self, call: Value) -> Value {
        self.send_call(&call).await;
        self.read_result().await
    }

    async fn create(&mut self, key: &str, amount: u32, retries: u32) -> Value {
        self.call(create(key, amount, retries)).await
    }

    /// Checks which exception it was. Those of Python have no prefix.
    #[track_caller]
    fn assert_thrown(&self, told: &Value, error: &str, status: u16, kind: &str, code: Option<&str>) {
        let name = if self.sdk == StripeSdk::Node { format!("Stripe{error}") } else { error.to_owned() };
        assert_eq!(told["error"], name, "{:?}: {told}", self.sdk);
        assert_eq!((&told["status"], &told["type"]), (&json!(status), &json!(kind)), "{:?}: {told}", self.sdk);
        assert_eq!(told["code"].as_str(), code, "{:?}: {told}", self.sdk);
        assert!(told["message"].as_str().is_some_and(|text| !text.is_empty()), "{:?}: {told}", self.sdk);
    }
}

fn create(key: &str, amount: u32, retries: u32) -> Value {
    json!({ "do": "create", "key": key, "amount": amount, "retries": retries })
}

fn intent(id: &str) -> UpstreamReply {
    UpstreamReply::status(200).json(&json!({ "id": id, "object": "payment_intent" }).to_string())
}

fn execution_count(upstream: &TestUpstream) -> usize {
    upstream.executions_at(PATH)
}

/// How many lines of the log say this of a payment, once everything that was answered before is in it.
async fn logged(gateway: &GatewayProcess, says: &str) -> usize {
    let marker = format!("/marker/{}", ibid::generate_key());
    client::post(gateway.addr(), &marker).key("k").send().await;
    gateway.wait_for_log(&marker).await;
    gateway.logs().iter().filter(|line| line.contains(PATH) && line.contains(says)).count()
}

async fn talks_to_the_gateway(sdk: StripeSdk) {
    let upstream = TestUpstream::start().await;
    let config = "[store]\nurl = \"memory:\"\n[policy]\npreset = \"stripe\"\n";
    let gateway = start_gateway(config, &upstream).await;
    let mut client = StripeClient::start(sdk, &gateway);

    // A first answer, and its replay. Both repeat the key.
    upstream.on(PATH, intent("pi_1"));
    let first = client.create("k-1", 1000, 0).await;
    assert_eq!(
        (&first["id"], &first["key"], &first["replayed"]),
        (&json!("pi_1"), &json!("k-1"), &Value::Null),
        "{sdk:?}"
    );
    upstream.on(PATH, intent("pi_2"));
    let again = client.create("k-1", 1000, 0).await;
    assert_eq!((&again["id"], &again["replayed"]), (&json!("pi_1"), &json!("true")), "{sdk:?}: {again}");

    // The key with other parameters.
    let told = client.create("k-1", 2000, 2).await;
    client.assert_thrown(&told, "IdempotencyError", 400, "idempotency_error", None);
    assert_eq!((&told["key"], logged(&gateway, "key-reused").await), (&json!("k-1"), 1), "{sdk:?} tries once: {told}");
    assert_eq!(execution_count(&upstream), 1);

    // While the first runs, another is told to come back, does so by itself, and gets its answer.
    let gate = ReplyGate::new();
    upstream.on(PATH, intent("pi_3").gated(&gate));
    let mut other = StripeClient::start(sdk, &gateway);
    client.send_call(&create("k-2", 1000, 0)).await;
    gate.arrived(1).await;
    other.send_call(&create("k-2", 1000, 5)).await;
    gateway.wait_for_log("in-progress").await;
    gate.open();
    let (first, second) = (client.read_result().await, other.read_result().await);
    assert_eq!((&first["id"], &second["id"], &second["replayed"]), (&json!("pi_3"), &json!("pi_3"), &json!("true")));
    assert_eq!(execution_count(&upstream), 2);
    let gate = ReplyGate::new();
    upstream.on(PATH, intent("pi_4").gated(&gate));
    client.send_call(&create("k-3", 1000, 0)).await;
    gate.arrived(1).await;
    let told = other.create("k-3", 1000, 0).await;
    assert_eq!((&told["status"], &told["code"]), (&json!(409), &json!("idempotency_key_in_use")), "{sdk:?}: {told}");
    assert_eq!(told["type"], "invalid_request_error", "{sdk:?}: {told}");
    gate.open();
    client.read_result().await;

    // An unknown outcome: the SDK asks once after the answer was lost, and then no more, however many retries it has.
    upstream.on(PATH, UpstreamFault::ResetAfterRequest);
    let told = client.create("k-4", 1000, 5).await;
    client.assert_thrown(&told, "APIError", 409, "api_error", Some("outcome_unknown"));
    assert_eq!((logged(&gateway, "outcome-unknown").await, execution_count(&upstream)), (1, 4), "{sdk:?}");
    let told = client.create("k-4", 1000, 5).await;
    client.assert_thrown(&told, "APIError", 409, "api_error", Some("outcome_unknown"));
    assert_eq!((logged(&gateway, "outcome-unknown").await, execution_count(&upstream)), (2, 4), "{sdk:?}");

    // A failure of the app is remembered, and its replay is not asked for again.
    let failure = json!({ "error": { "type": "api_error", "message": "it broke" } });
    upstream.on(PATH, UpstreamReply::status(500).json(&failure.to_string()));
    let told = client.create("k-5", 1000, 5).await;
    client.assert_thrown(&told, "APIError", 500, "api_error", None);
    assert_eq!(
        (logged(&gateway, "status=500").await, execution_count(&upstream)),
        (2, 5),
        "{sdk:?}: the run, and its replay"
    );

    // Conflicts and limits of the app are not: the same key runs again.
    let busy = json!({ "error": { "type": "invalid_request_error", "code": "lock_timeout", "message": "busy" } });
    upstream.on_each(PATH, [UpstreamReply::status(409).json(&busy.to_string()), intent("pi_6")]);
    let told = client.create("k-6", 1000, 2).await;
    assert_eq!((&told["id"], execution_count(&upstream)), (&json!("pi_6"), 7), "{sdk:?}: {told}");

    // What no policy covers is refused in the same shape, or it would be taken for a success.
    upstream.stop().await;
    let told = client.call(json!({ "do": "retrieve" })).await;
    client.assert_thrown(&told, "APIError", 502, "api_error", Some("upstream_unreachable"));
}

#[tokio::test]
async fn stripes_sdk_for_python_understands_the_gateway() {
    talks_to_the_gateway(StripeSdk::Python).await;
}

#[tokio::test]
async fn stripes_sdk_for_node_understands_the_gateway() {
    talks_to_the_gateway(StripeSdk::Node).await;
}
