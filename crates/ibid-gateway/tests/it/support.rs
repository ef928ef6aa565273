//! What the suites share: a gateway in front of an upstream, requests to it, and what an answer must be.

use std::{fs, future::Future, path::PathBuf, time::Duration};

use serde_json::Value;
use tempfile::TempDir;
use testbed::{
    client::{self, TestRequest, TestResponse, post},
    http1::WAIT_TIMEOUT,
    process::{GatewayLauncher, GatewayProcess},
    upstream::TestUpstream,
};
use tokio::time::{Instant, sleep, timeout};

pub(crate) use self::{
    ibid_process::{CommandResult, IbidProcess, run_ibid},
    in_process::{
        HealAfterFailures, InProcessGateway, anonymous_pay, entries, failing_store, start_in_process,
        start_on_opened_store,
    },
    schemathesis::run_schemathesis,
    scripted_upstream::ScriptedUpstream,
};

mod ibid_process;
mod in_process;
mod schemathesis;
mod scripted_upstream;
pub(crate) mod tls;

pub(crate) const BIN: &str = env!("CARGO_BIN_EXE_ibid");

/// How long a server that was broken, and whoever uses it, may take to be well again on few cores.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(30);

/// The binary in front of an upstream that counts.
pub(crate) struct TestGateway {
    pub(crate) upstream: TestUpstream,
    pub(crate) gateway: GatewayProcess,
}

impl TestGateway {
    pub(crate) async fn start(config: &str) -> TestGateway {
        TestGateway::launch(config, |launch| launch).await
    }

    /// With every path under `ietf` with these dials on top.
    pub(crate) async fn ietf(dials: &str) -> TestGateway {
        TestGateway::start(&policy(dials)).await
    }

    /// On the memory store, whatever the configuration says.
    pub(crate) async fn in_memory(config: &str) -> TestGateway {
        TestGateway::launch(config, |launch| launch.arg("--store").arg("memory:")).await
    }

    /// With more arguments or variables.
    pub(crate) async fn launch(config: &str, more: impl FnOnce(GatewayLauncher) -> GatewayLauncher) -> TestGateway {
        let upstream = TestUpstream::start().await;
        let launch = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url());
        let gateway = more(launch).start().await;
        TestGateway { upstream, gateway }
    }

    pub(crate) fn request(&self, method: &str, path: &str) -> TestRequest {
        client::request(method, self.gateway.addr(), path)
    }

    pub(crate) fn post(&self, path: &str) -> TestRequest {
        self.request("POST", path)
    }

    /// Checks how many operations the upstream has carried out.
    #[track_caller]
    pub(crate) fn assert_executed(&self, times: usize) {
        assert_eq!(self.upstream.executions(), times, "executions: {:#?}", self.upstream.log());
    }
}

/// The binary in front of an upstream that the test has already set up.
pub(crate) async fn start_gateway(config: &str, upstream: &TestUpstream) -> GatewayProcess {
    GatewayProcess::spawn(BIN, config, &upstream.url()).await
}

/// A gateway whose every path is under `ietf` with these dials on top.
pub(crate) async fn start_ietf_gateway(upstream: &TestUpstream, dials: &str) -> GatewayProcess {
    start_gateway(&policy(dials), upstream).await
}

/// The part of a configuration that puts every path under `ietf` with these dials on top.
pub(crate) fn policy(dials: &str) -> String {
    format!("[policy]\npreset = \"ietf\"\n{dials}\n")
}

/// A payment of somebody who is known by a credential.
pub(crate) fn pay(gateway: &GatewayProcess, key: &str) -> TestRequest {
    pay_at(gateway, "/pay", key)
}

pub(crate) fn pay_at(gateway: &GatewayProcess, path: &str, key: &str) -> TestRequest {
    caller(post(gateway.addr(), path)).key(key).json(r#"{"amount":1}"#)
}

/// The same person's other payment.
pub(crate) fn other_pay_at(gateway: &GatewayProcess, path: &str, key: &str) -> TestRequest {
    caller(post(gateway.addr(), path)).key(key).json(r#"{"amount":2}"#)
}

pub(crate) fn caller(request: TestRequest) -> TestRequest {
    request.header("Authorization", "Bearer one")
}

/// The answer is this refusal, in the form of a problem. Returns the problem.
#[track_caller]
pub(crate) fn assert_refused(answer: &TestResponse, status: u16, name: &str) -> Value {
    assert_eq!((answer.status, refusal_name(answer).as_str()), (status, name), "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    let comes_back = matches!(name, "in-progress" | "overloaded" | "quota-exceeded" | "store-unavailable");
    assert_eq!(answer.header("retry-after").is_some(), comes_back, "{answer:?}");
    assert!(!answer.headers.contains("idempotent-replayed"), "{answer:?}");
    answer.json()
}

/// The name of the refusal in an answer.
pub(crate) fn refusal_name(answer: &TestResponse) -> String {
    let kind = answer.json()["type"].as_str().unwrap_or_default().to_owned();
    let name = kind.strip_prefix("/.well-known/idempotency#");
    name.unwrap_or_else(|| panic!("no refusal of ours: {answer:?}")).to_owned()
}

/// The answer is `first` again, and says so.
#[track_caller]
pub(crate) fn assert_replay(answer: &TestResponse, first: &TestResponse) {
    assert_eq!(answer.status, first.status, "{answer:?}");
    assert_eq!(answer.body, first.body, "{answer:?}\nis not\n{first:?}");
    assert_eq!(answer.headers.get_all("idempotent-replayed"), ["true"], "{answer:?}");
    assert_eq!(answer.header("content-type"), first.header("content-type"), "{answer:?}");
}

/// The answer comes from the upstream's own run, not from a record.
#[track_caller]
pub(crate) fn assert_ran(answer: &TestResponse) {
    assert_eq!(answer.status, 201, "{answer:?}");
    assert!(!answer.headers.contains("idempotent-replayed"), "{answer:?}");
    assert!(!answer.headers.contains("idempotency-stored"), "{answer:?}");
}

pub(crate) fn is_in_progress(answer: &TestResponse) -> bool {
    answer.status == 409 && answer.text().contains("#in-progress")
}

/// Sends until the answer is something else than "in progress".
pub(crate) async fn send_until_settled(request: &TestRequest) -> TestResponse {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let answer = request.send().await;
        if !is_in_progress(&answer) {
            return answer;
        }
        assert!(Instant::now() < until, "still in progress after {WAIT_TIMEOUT:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Returns once this is so.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) -> impl Future<Output = ()> {
    let what = format!("waited {WAIT_TIMEOUT:?} for {what}");
    async move {
        let end = Instant::now() + WAIT_TIMEOUT;
        while !is_so() {
            assert!(Instant::now() < end, "{what}");
            sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Returns once this gives something.
pub(crate) async fn until_some<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let end = Instant::now() + RECOVERY_TIMEOUT;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < end, "waited {RECOVERY_TIMEOUT:?} for {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until the log has `n` lines with `part`.
pub(crate) async fn lines(gateway: &GatewayProcess, part: &str, n: usize) -> Vec<String> {
    let found = || gateway.logs().into_iter().filter(|line| line.contains(part)).collect::<Vec<_>>();
    until(&format!("{n} lines with {part:?}"), || found().len() >= n).await;
    found()
}

pub(crate) async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    timeout(WAIT_TIMEOUT, work).await.unwrap_or_else(|_| panic!("waited {WAIT_TIMEOUT:?} for {what}"))
}

pub(crate) fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|window| window == needle)
}

/// A folder with a file in it.
pub(crate) fn folder_with(name: &str, text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join(name);
    fs::write(&path, text).expect("the file is written");
    (dir, path)
}
