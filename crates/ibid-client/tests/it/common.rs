//! What the tests share: the gateway's binary, requests, options with a journal to look into.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, OnceLock},
    time::Duration,
};

use ibid_client::{KeyJournal, PendingOperation, SendError, SendErrorReason, SendOptions};
use reqwest::{Client, Request};
use tempfile::TempDir;
use testbed::{
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is there")
}

/// The gateway's binary.
pub(crate) fn gateway_binary() -> &'static Path {
    static BIN: OnceLock<PathBuf> = OnceLock::new();
    BIN.get_or_init(|| build_binary(&["--package", "ibid-gateway", "--bin", "ibid"], "ibid"))
}

/// The example that is killed.
pub(crate) fn pay() -> &'static Path {
    static BIN: OnceLock<PathBuf> = OnceLock::new();
    BIN.get_or_init(|| build_binary(&["--package", "ibid-client", "--example", "pay"], "examples/pay"))
}

/// Binaries of other targets stand beside the tests, but only a run of the whole workspace has built them anew: such a
/// run says so with `IBID_BUILT`.
fn build_binary(what: &[&str], name: &str) -> PathBuf {
    let test = env::current_exe().expect("the test has a path");
    let folder = test.ancestors().nth(2).expect("target/debug/deps/it");
    if env::var_os("IBID_BUILT").is_none() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--locked"]).args(what).current_dir(root());
        cargo.arg("--target-dir").arg(folder.parent().expect("target"));
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        let status = cargo.status().expect("cargo runs");
        assert!(status.success(), "cargo build {what:?}: {status}");
    }
    let path = folder.join(name);
    assert!(path.exists(), "{} is missing", path.display());
    path
}

pub(crate) async fn gateway(config: &str, upstream: &TestUpstream) -> GatewayProcess {
    let launch = GatewayProcess::launch(gateway_binary()).config(config).upstream(&upstream.url());
    launch.arg("--store").arg("memory:").start().await
}

/// A client that goes nowhere but where it is told to.
pub(crate) fn client() -> Client {
    // Idle connections would hide what a new one meets.
    Client::builder().no_proxy().pool_max_idle_per_host(0).build().expect("a client")
}

pub(crate) fn payment(url: &str) -> Request {
    let request = client().post(url).header("content-type", "application/json");
    request.body(r#"{"amount":1}"#).build().expect("a request")
}

/// Options whose keys are in a folder that lasts as long as this.
pub(crate) struct KeyFolder {
    folder: TempDir,
    pub(crate) options: SendOptions,
}

impl KeyFolder {
    pub(crate) fn new() -> KeyFolder {
        let folder = tempfile::tempdir().expect("a folder");
        let options = SendOptions::in_folder(folder.path()).operation("order-17");
        KeyFolder { folder, options }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn options(&self) -> SendOptions {
        self.options.clone()
    }

    /// What has not had its final answer, as another process would see it.
    pub(crate) async fn pending(&self) -> Vec<PendingOperation> {
        let journal: Arc<dyn KeyJournal> = SendOptions::in_folder(self.path()).journal().clone();
        journal.pending().await.expect("the journal can be read")
    }

    pub(crate) async fn pending_key(&self) -> Option<String> {
        self.pending().await.pop().map(|entry| entry.key.as_str().to_owned())
    }

    /// Every file of the journal but its lock and those of operations that have succeeded.
    pub(crate) fn files(&self) -> usize {
        let paths = fs::read_dir(self.path()).expect("a folder").map(|entry| entry.expect("an entry").path());
        let succeeded = |path: &Path| fs::read_to_string(path).expect("a file").contains("until_ms");
        paths.filter(|path| !path.ends_with("lock") && !succeeded(path)).count()
    }
}

/// A refusal as ibid gives it.
pub(crate) fn problem(name: &str, status: u16) -> UpstreamReply {
    let body = format!(
        r#"{{"type":"/.well-known/idempotency#{name}","title":"t","status":{status},"detail":"it is {name}"}}"#
    );
    UpstreamReply::status(status).header("content-type", "application/problem+json").body(body)
}

/// The times between the requests, as the server saw them.
pub(crate) fn request_intervals(upstream: &TestUpstream) -> Vec<Duration> {
    upstream.log().windows(2).map(|pair| pair[1].at - pair[0].at).collect()
}

/// Never early, and not so late that another schedule would explain it.
#[track_caller]
pub(crate) fn assert_schedule(upstream: &TestUpstream, waits: &[u64]) {
    let seen = request_intervals(upstream);
    assert_eq!(seen.len(), waits.len(), "{seen:?} for {waits:?}");
    for (gap, wait) in seen.iter().zip(waits) {
        let wait = Duration::from_millis(*wait);
        assert!(*gap >= wait && *gap < wait * 5 / 4 + Duration::from_secs(4), "{seen:?} for {waits:?}");
    }
}

/// The key of everything that ran: one, or the test fails.
#[track_caller]
pub(crate) fn only_key(upstream: &TestUpstream) -> String {
    let mut keys: Vec<_> = upstream.log().into_iter().filter(|seen| seen.execution.is_some()).collect();
    keys.dedup_by_key(|seen| seen.key().map(str::to_owned));
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys[0].key().expect("it has a key").to_owned()
}

/// The reason's name, to compare.
pub(crate) fn reason(stopped: &SendError) -> &'static str {
    match stopped.reason {
        SendErrorReason::OutcomeUnknown => "outcome-unknown",
        SendErrorReason::KeyReused => "key-reused",
        SendErrorReason::Refused => "refused",
        SendErrorReason::StillInProgress => "in-progress",
        SendErrorReason::Unavailable => "unavailable",
        SendErrorReason::ServerError => "server-error",
        SendErrorReason::Network => "network",
        SendErrorReason::RetryAfterTooLong { .. } => "retry-after",
        SendErrorReason::DeadlineExceeded(_) => "deadline",
        SendErrorReason::KeyExpired { .. } => "key-too-old",
        SendErrorReason::BodyNotReplayable => "body",
        SendErrorReason::BadKey(_) => "bad-key",
        SendErrorReason::Journal(_) => "journal",
        SendErrorReason::InvalidRequest => "unsendable",
        _ => "new",
    }
}
