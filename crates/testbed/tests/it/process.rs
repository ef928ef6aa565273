//! The process harness, with a shell script in the binary's place.

use std::{net::SocketAddr, path::PathBuf, process::Command, time::Duration};

use tempfile::TempDir;
use testbed::process::{GatewayProcess, ProcessSignal, run};

const SECOND: Duration = Duration::from_secs(1);

/// Says what it was given, listens in name only, and does as it is signalled.
const STUB_GATEWAY_SCRIPT: &str = r#"#!/usr/bin/env bash
echo "args: $*"
echo "env: $FLAVOUR ${IBID_LISTEN-unset}"
echo "starting" >&2
trap 'echo "bye"; exit 3' TERM
trap 'echo "config: $(cat "$3")"' HUP
echo run >> runs
echo "ibid: listening on http://127.0.0.1:$((4000 + $(wc -l < runs)))"
sleep 0.1
echo "ibid: admin on http://127.0.0.1:5001"
while true; do sleep 0.02; done
"#;

/// Written by another process: a file that was open for writing here while another test forked cannot be run.
fn script(text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ibid");
    let write = r#"printf %s "$1" > "$2" && chmod +x "$2""#;
    assert!(Command::new("bash").args(["-c", write, "bash", text]).arg(&path).status().unwrap().success());
    (dir, path)
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

#[tokio::test]
async fn a_gateway_is_started_signalled_and_ended() {
    let (_dir, bin) = script(STUB_GATEWAY_SCRIPT);
    let launch =
        GatewayProcess::launch(&bin).config("a = 1").upstream("http://127.0.0.1:9").arg("--store").arg("memory:");
    let mut gateway = launch.env("FLAVOUR", "mint").start().await;
    assert_eq!((gateway.addr(), gateway.admin_addr()), (local(4001), local(5001)));
    let config = gateway.dir().join("ibid.toml").display().to_string();
    assert_eq!(
        gateway.wait_for_log("args:").await,
        format!(
            "args: serve --config {config} --listen 127.0.0.1:0 --admin 127.0.0.1:0 \
             --upstream http://127.0.0.1:9 --store memory:"
        )
    );
    assert_eq!(gateway.wait_for_log("env:").await, "env: mint unset");
    gateway.wait_for_log("starting").await;

    gateway.rewrite_config("b = 2");
    gateway.signal(ProcessSignal::Hup);
    assert_eq!(gateway.wait_for_log("config:").await, "config: b = 2");

    gateway.signal(ProcessSignal::Stop);
    gateway.signal(ProcessSignal::Term);
    tokio::time::sleep(SECOND / 10).await;
    assert!(!gateway.has_exited());
    gateway.signal(ProcessSignal::Cont);
    assert_eq!(gateway.wait_exit(5 * SECOND).await.code(), Some(3));
    assert_eq!(gateway.logs().last().unwrap(), "bye");
    gateway.signal(ProcessSignal::Term);
}

#[tokio::test]
async fn a_killed_gateway_restarts_in_its_folder_and_keeps_its_log() {
    let (_dir, bin) = script(STUB_GATEWAY_SCRIPT);
    let mut gateway = GatewayProcess::spawn(&bin, "", "http://127.0.0.1:9").await;
    gateway.kill().await;
    assert!(gateway.has_exited());
    gateway.restart().await;
    assert_eq!(gateway.addr(), local(4002), "the folder is the same, so this is run two");
    assert_eq!(gateway.logs().iter().filter(|line| line.starts_with("args:")).count(), 2);
    let id = gateway.id();
    drop(gateway);
    assert!(!PathBuf::from(format!("/proc/{id}")).exists(), "killed and reaped");
}

#[tokio::test]
#[should_panic(expected = "unknown key `colour`")]
async fn a_start_that_fails_shows_what_was_printed() {
    let (_dir, bin) = script("#!/bin/sh\necho 'ibid.toml: unknown key `colour`' >&2\nexit 64\n");
    GatewayProcess::spawn(&bin, "colour = 1", "http://127.0.0.1:9").await;
}

#[tokio::test]
async fn commands_run_to_their_end() {
    let (_dir, bin) = script("#!/bin/sh\necho \"$1 $A\"; echo err >&2; exit 64\n");
    let output = run(&bin, &["check", "f"], &[("A", "b")]).await;
    assert_eq!(output.status.code(), Some(64));
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (b"check b\n".as_slice(), b"err\n".as_slice()));
}
