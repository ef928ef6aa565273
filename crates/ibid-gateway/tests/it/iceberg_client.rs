//! A real client of Iceberg catalogs, pyiceberg, with a key per operation, in front of a small catalog that counts.
//!
//! `tests/iceberg/client.py` and `tests/iceberg/catalog.py`; `scripts/tools` installs pyiceberg.

use std::{fs, net::SocketAddr, path::Path, process::Stdio, time::Duration};

use tempfile::TempDir;
use testbed::{FaultProxy, process::GatewayProcess};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

use super::presets::shipped_config;
use crate::support::{BIN, lines};

/// Imports of large libraries, many tests at a time on few cores.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(90);
const APPENDS: usize = 5;

struct PythonProcess {
    _child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl PythonProcess {
    fn spawn(script: &str, args: &[&str]) -> Self {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(here.join("../../target/iceberg-client/bin/python"));
        command.arg(here.join("tests/iceberg").join(script)).args(args).env("PYTHONDONTWRITEBYTECODE", "1");
        let spawned = command.kill_on_drop(true).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/tools installs it"));
        let (stdin, stdout) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Self { _child: child, stdin, stdout: BufReader::new(stdout).lines() }
    }

    async fn next_line(&mut self) -> String {
        let line = timeout(PROCESS_TIMEOUT, self.stdout.next_line()).await.expect("it answers in time");
        line.expect("text").expect("it runs")
    }

    async fn run(&mut self, operation: &str) -> String {
        self.stdin.write_all(format!("{operation}\n").as_bytes()).await.expect("the client runs");
        self.next_line().await
    }
}

struct Catalog {
    _process: PythonProcess,
    addr: SocketAddr,
    folder: TempDir,
}

impl Catalog {
    async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (warehouse, runs) = (folder.path().join("warehouse"), folder.path().join("runs"));
        let path = |path: &Path| path.to_str().expect("a plain path").to_owned();
        let mut process = PythonProcess::spawn("catalog.py", &[&path(&warehouse), &path(&runs)]);
        let url = process.next_line().await;
        let addr = url.trim_start_matches("http://").parse().expect("an address");
        Self { _process: process, addr, folder }
    }

    async fn gateway(&self, upstream: SocketAddr) -> GatewayProcess {
        let launch = GatewayProcess::launch(BIN).config(shipped_config("iceberg"));
        launch.upstream(&format!("http://{upstream}")).arg("--store").arg("memory:").start().await
    }

    /// Every operation that took effect.
    fn runs(&self) -> Vec<String> {
        let runs = fs::read_to_string(self.folder.path().join("runs")).unwrap_or_default();
        runs.lines().map(str::to_owned).collect()
    }
}

fn client_of(addr: SocketAddr) -> PythonProcess {
    PythonProcess::spawn("client.py", &[&format!("http://{addr}")])
}

/// Runs each operation with its first answer lost.
async fn run_with_lost_answers(client: &mut PythonProcess, proxy: &FaultProxy, operations: &[&str]) -> Vec<String> {
    let mut all = Vec::new();
    for operation in operations {
        proxy.break_answers(1);
        all.push(client.run(operation).await);
        assert_eq!(proxy.answers_to_lose(), 0, "{operation}");
    }
    all
}

#[tokio::test]
async fn every_operation_takes_effect_once_though_its_answer_was_lost() {
    let catalog = Catalog::start().await;
    let gateway = catalog.gateway(catalog.addr).await;
    let proxy = FaultProxy::to(gateway.addr());
    let mut client = client_of(proxy.addr());
    assert_eq!(client.run("lifetime").await, "PT24H");
    let operations = [&["namespace", "create"][..], &["append"; APPENDS], &["set", "set"]].concat();
    let done = run_with_lost_answers(&mut client, &proxy, &operations).await;
    assert_eq!(done, vec!["done"; operations.len()]);
    assert_eq!(client.run("rows").await, APPENDS.to_string(), "one row per append");
    assert_eq!(run_with_lost_answers(&mut client, &proxy, &["drop"]).await, ["done"]);
    let expected = [&["create-namespace", "create-table"][..], &["commit"; APPENDS + 2], &["drop-table"]].concat();
    assert_eq!(catalog.runs(), expected);
    let replays = lines(&gateway, "stored answer replayed", expected.len()).await;
    assert_eq!(replays.len(), expected.len(), "the answer of every operation was lost");
}

/// What the gateway is for: the same client without it.
#[tokio::test]
async fn without_the_gateway_a_lost_answer_is_an_error_or_a_second_commit() {
    let catalog = Catalog::start().await;
    let proxy = FaultProxy::to(catalog.addr);
    let mut client = client_of(proxy.addr());
    assert_eq!(client.run("lifetime").await, "None");
    let all = run_with_lost_answers(&mut client, &proxy, &["namespace", "create", "load"]).await;
    assert_eq!(
        all,
        ["NamespaceAlreadyExistsError", "TableAlreadyExistsError", "done"],
        "the retry met its own operation"
    );
    assert_eq!(run_with_lost_answers(&mut client, &proxy, &["set"]).await, ["done"]);
    assert_eq!(
        catalog.runs(),
        ["create-namespace", "create-table", "commit", "commit"],
        "two commits of one operation"
    );
    assert_eq!(run_with_lost_answers(&mut client, &proxy, &["drop"]).await, ["NoSuchTableError"], "it is dropped");
}

/// The answer of the catalog itself was lost: the client must not take the commit for a failed one.
#[tokio::test]
async fn an_unknown_outcome_is_an_unknown_state_of_the_commit() {
    let catalog = Catalog::start().await;
    let lossy = FaultProxy::to(catalog.addr);
    let gateway = catalog.gateway(lossy.addr()).await;
    let mut client = client_of(gateway.addr());
    for operation in ["namespace", "create"] {
        assert_eq!(client.run(operation).await, "done");
    }
    let append = run_with_lost_answers(&mut client, &lossy, &["append"]).await;
    assert_eq!(append, ["CommitStateUnknownException"]);
    assert_eq!(client.run("rows").await, "1", "it was made");
    assert_eq!(catalog.runs()[2..], ["commit"]);
}
