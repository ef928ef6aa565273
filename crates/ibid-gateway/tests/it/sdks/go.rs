use std::process::Command;

use crate::scenarios::{ScenarioApp, ScenarioTransport, root, run_all};

/// Runs Go on `clients/go`, with its cache in `target`.
fn go(args: &[&str]) -> String {
    let mut command = Command::new("go");
    command.args(args).current_dir(root().join("clients/go")).env("GOCACHE", root().join("target/go-cache"));
    let output = command.env("GOFLAGS", "-mod=mod").output().expect("scripts/tools installs Go");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {said}");
    said
}

#[tokio::test]
async fn net_http_passes_all_scenarios() {
    let program = root().join("target/go-scenarios");
    go(&["build", "-o", program.to_str().expect("text"), "./scenarios"]);
    let folder = root().join("clients/go");
    run_all(ScenarioTransport::Sdk, ScenarioApp { program, args: Vec::new(), env: Vec::new(), folder }).await;
}

#[test]
fn the_package_passes_its_own_tests_and_vet() {
    go(&["vet", "./..."]);
    assert!(go(&["test", "-count=1", "-v", "."]).contains("--- PASS: TestClosedRefusesAndOpenRunsDegraded"));
    let unformatted = Command::new("gofmt").args(["-l", "."]).current_dir(root().join("clients/go")).output();
    assert!(unformatted.expect("gofmt is part of Go").stdout.is_empty());
}
