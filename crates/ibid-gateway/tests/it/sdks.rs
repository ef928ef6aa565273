//! The SDKs under `clients/`, each in an app of its own language, run the scenarios that the gateway runs.

use std::{fs, path::Path, process::Stdio, time::Duration};

use testbed::{
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};
use tokio::{process::Command, time::timeout};

use crate::{
    scenarios::root,
    support::{BIN, policy},
};

mod go;
mod node;
mod php;
pub(crate) mod python;

/// An ibid for an SDK's own tests: every path is covered, and `/flaky` fails once.
struct SdkTestbed {
    gateway: GatewayProcess,
    _upstream: TestUpstream,
}

impl SdkTestbed {
    async fn start() -> SdkTestbed {
        let upstream = TestUpstream::start().await;
        upstream.on_each("/flaky", [UpstreamReply::status(503), UpstreamReply::usual()]);
        let config = format!("[api]\nlisten = \"unix:api.sock\"\n{}", policy(""));
        let gateway = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url());
        SdkTestbed { gateway: gateway.arg("--store").arg("memory:").start().await, _upstream: upstream }
    }

    /// Runs a command that finds the API in `IBID_API` and the gateway in `IBID_URL`. Returns what it said.
    async fn run(&self, command: &mut Command) -> String {
        command.env("IBID_URL", format!("http://{}", self.gateway.addr()));
        command.env("IBID_API", format!("unix:{}", self.gateway.dir().join("api.sock").display()));
        run_to_end(command).await
    }
}

/// Runs a command, which must succeed. Returns what it said.
async fn run_to_end(command: &mut Command) -> String {
    let output = timeout(Duration::from_secs(120), command.stdin(Stdio::null()).kill_on_drop(true).output());
    let output = output.await.expect("it ends in time").expect("it runs: scripts/tools installs it");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    said
}

/// The lines of a file that are neither blank nor comments nor Python's docstrings.
fn code_lines(path: &Path) -> usize {
    let text = fs::read_to_string(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    let mut is_docstring = false;
    let is_code = |line: &&str| {
        let line = line.trim();
        let quotes = line.matches("\"\"\"").count();
        let is_inside = is_docstring || quotes > 0;
        is_docstring ^= quotes == 1;
        !is_inside && !line.is_empty() && !["//", "#", "/*", "*"].iter().any(|mark| line.starts_with(mark))
    };
    text.lines().filter(is_code).count()
}

#[test]
fn every_sdk_has_under_400_lines() {
    let clients = root().join("clients");
    for (path, ending) in [("python/ibid", "py"), ("php/src", "php"), ("go/ibid.go", ""), ("js/server.js", "")] {
        let path = clients.join(path);
        let lines = if ending.is_empty() {
            code_lines(&path)
        } else {
            let files = fs::read_dir(&path).expect("its source").map(|entry| entry.expect("a file").path());
            files
                .filter(|file| file.extension().is_some_and(|found| found == ending))
                .map(|file| code_lines(&file))
                .sum()
        };
        assert!((200..400).contains(&lines), "{}: {lines} lines", path.display());
    }
}
