//! The harness from outside: real processes, a stand-in gateway, no judgement of speed.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

const SHORT: [&str; 8] = ["--rounds", "2", "--seconds", "0.2", "--settle", "0.05", "--connections", "8"];

fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ibid-bench"));
    command.args(SHORT).args(args).env_remove("IBID_BENCH_PROXY").env_remove("IBID_BENCH_IBID");
    command
}

fn run(args: &[&str]) -> (Output, String) {
    let output = bench(args).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output, text)
}

/// Cargo builds examples beside the binaries before it runs tests.
fn stub() -> String {
    let bins = Path::new(env!("CARGO_BIN_EXE_ibid-bench")).parent().unwrap();
    bins.join("examples/stub-gateway").to_str().unwrap().to_owned()
}

#[test]
fn gateway_rows_run_from_warm_up_to_json() {
    let json = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("gateway.json");
    let stub = stub();
    let (output, text) = run(&[
        "--rows",
        "gateway-memory,gateway-embedded",
        "--proxy-bin",
        &stub,
        "--ibid-bin",
        &stub,
        "--json",
        json.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{text}");
    for row in ["gateway-memory-miss-300", "gateway-memory-replay-16k"] {
        assert!(text.contains(row), "{text}");
    }
    assert!(text.contains("not judged") && !text.contains("INVALID"), "{text}");
    // nginx is beside them, in the same rounds.
    assert!(text.contains("| contender") && text.contains("| vCPU per 1,000 requests/s |"), "{text}");
    for contender in ["nginx", "ibid-miss", "embedded-miss"] {
        assert!(text.lines().any(|line| line.starts_with(&format!("| {contender} "))), "{contender}: {text}");
    }
    let json = fs::read_to_string(json).unwrap();
    assert!(json.contains("\"measure\":\"cpu-ratio-at-most\""), "{json}");
    assert!(json.contains("{\"scene\":\"gateway-16k\",\"contender\":\"nginx\",\"per_second\":"), "{json}");
}

#[test]
fn latency_at_half_load_is_told_for_both_stores() {
    let stub = stub();
    let (output, text) = run(&["--half-load", "--proxy-bin", &stub, "--ibid-bin", &stub]);
    assert!(output.status.success(), "{text}");
    for store in ["memory", "embedded"] {
        let line =
            text.lines().find(|line| line.starts_with(&format!("| {store} "))).unwrap_or_else(|| panic!("{text}"));
        let rate = line.split('|').nth(2).and_then(|rate| rate.trim().parse::<f64>().ok());
        assert!(rate.is_some_and(|rate| rate > 10.0), "{text}");
    }
}

#[test]
fn another_proxy_runs_beside_nginx() {
    // Long enough for nginx to use some ticks of the clock that counts its CPU, also on a busy machine.
    let (output, text) = run(&["--rows", "peer-haproxy-300", "--seconds", "2"]);
    assert!(output.status.success() && !text.contains("INVALID"), "{text}");
    let nginx = text.lines().find(|line| line.starts_with("| nginx ")).unwrap_or_default();
    let cells: Vec<_> = nginx.split('|').map(str::trim).collect();
    // Its workers are counted: a master alone uses next to nothing.
    assert_eq!((cells[3], cells[5]), ("1.00", "1.00"), "{text}");
    assert!(cells[4].parse::<f64>().unwrap() > 1.0, "{text}");
    let (output, text) = run(&["--rows", "peer-envoy-300", "--envoy-bin", "/nowhere/envoy"]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("no such program: /nowhere/envoy"), "{text}");
}

/// `scripts/bench --quick` runs them with ibid.
#[test]
fn envoy_with_a_processor_that_does_not_answer_makes_its_rows_invalid() {
    let (output, text) = run(&["--rows", "ext-proc-miss-300", "--ibid-bin", &stub()]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("envoy-ibid-miss: INVALID: warming up") && text.contains("500"), "{text}");
    assert!(text.lines().any(|line| line.contains("round 2/2 envoy: ") && line.contains("req/s")), "{text}");
}

#[test]
fn grpc_rows_run_and_a_server_of_something_else_makes_them_invalid() {
    let (output, text) = run(&["--rows", "grpc-layer"]);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("grpc-layer-replay-300") && !text.contains("INVALID"), "{text}");
    // The stand-in speaks HTTP/1.1 only.
    let (output, text) = run(&["--rows", "grpc-gateway-miss", "--ibid-bin", &stub()]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("INVALID"), "{text}");
}

#[test]
fn a_gateway_that_executes_replays_makes_the_row_invalid() {
    // Without its first argument, `serve`, the stub is a plain proxy: it executes every replay.
    let script = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("forgetful");
    fs::write(&script, format!("#!/bin/sh\nshift\nexec {} \"$@\"\n", stub())).unwrap();
    assert!(Command::new("chmod").arg("+x").arg(&script).status().unwrap().success());
    let (output, text) =
        run(&["--rows", "gateway-memory-replay-300", "--proxy-bin", &stub(), "--ibid-bin", script.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("times instead of 0"), "{text}");
}

#[test]
fn loads_on_stores_and_their_servers_run_and_count_round_trips() {
    let (output, text) = run(&["--rounds", "1", "--rows", "store-redis-claims,store-postgres-claims"]);
    assert!(output.status.success(), "{text}");
    for line in
        ["pgbench claim of 16", "redis-benchmark claim -P 16", "| store, PostgreSQL with Redis in front | replay |"]
    {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(!text.contains("INVALID") && !text.contains("WRONG"), "{text}");
}

#[test]
fn the_size_of_a_table_under_load_is_reported_to_its_end() {
    let output = Command::new(env!("CARGO_BIN_EXE_bloat")).args(["0.05", "100"]).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
    let cells: Vec<&str> = text.lines().last().unwrap_or_default().split('|').map(str::trim).collect();
    // Keys so far, rows, and WAL bytes per key.
    let number = |nth: usize| cells.get(nth).and_then(|cell| cell.parse::<f64>().ok());
    assert!(number(2) == number(5) && number(2) > Some(50.0), "{text}");
    assert!(number(9).is_some_and(|wal| (500.0..20_000.0).contains(&wal)), "{text}");
}

#[test]
fn a_gateway_that_does_not_ask_its_store_has_the_wrong_round_trips() {
    let stub = stub();
    let rows = "gateway-redis-near-replay-300,gateway-postgres-replay-300";
    let (output, text) = run(&["--rounds", "1", "--rows", rows, "--proxy-bin", &stub, "--ibid-bin", &stub]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    // The rows are valid: the stand-in replays. It is the wire that tells.
    assert!(text.contains("| gateway, PostgreSQL | replay | 0 | 0 | 0 + 1 | WRONG |"), "{text}");
    assert!(text.contains("| gateway, Redis with near copies | replay | 0 | 0 | 0 + 0 | met |"), "{text}");
    assert!(!text.contains("INVALID"), "{text}");
}

/// The stand-in replays to everybody: its answers to keys that another caller used come without the app.
#[test]
fn a_gateway_whose_callers_share_answers_is_told_by_its_times() {
    let mut timing = Command::new(env!("CARGO_BIN_EXE_timing"));
    let output = timing.args(["--each", "300", "--ibid-bin", &stub()]).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let first = text.lines().find(|line| line.starts_with("| memory | 201, its first |")).unwrap_or_default();
    assert!(first.ends_with("| TOLD APART |"), "{text}");
    assert!(text.contains("B got 201 instead of 422"), "{text}");
    assert_eq!(output.status.code(), Some(1), "{text}");
}

#[test]
fn a_missing_binary_is_named_with_its_flag_before_anything_runs() {
    let (output, text) = run(&["--rows", "gateway-memory-miss-300", "--proxy-bin", "/nowhere/proxy"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("no such program: /nowhere/proxy (set --proxy-bin or IBID_BENCH_PROXY)"), "{text}");
    assert!(!text.contains("round 1"), "{text}");
}

#[test]
fn a_terminated_run_leaves_no_server_behind() {
    let child =
        bench(&["--rows", "noise", "--seconds", "60"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let servers = || fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap_or_default();
    let deadline = Instant::now() + Duration::from_secs(20);
    while servers().trim().is_empty() {
        assert!(Instant::now() < deadline, "no server was started");
        thread::sleep(Duration::from_millis(20));
    }
    let server = servers().split_whitespace().next().unwrap().to_owned();
    thread::sleep(Duration::from_millis(200));
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(!Path::new(&format!("/proc/{server}")).exists());
}
