//! A standard error that nobody reads: requests go on, lines are lost, and both the metrics and the log say so.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    net::SocketAddr,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use testbed::{client::get, upstream::TestUpstream};

use crate::support::{BIN, anonymous_pay};

/// A line each of these is longer than; the pipe, the writer and the buffer together take some 8 MiB.
const USER_AGENT_BYTES: usize = 16 << 10;

async fn lost_log_lines(admin: SocketAddr) -> u64 {
    let page = get(admin, "/metrics").send().await.text();
    let value = page.lines().find_map(|line| line.strip_prefix("idempotency_log_lines_lost_total "));
    value.expect("it is there").parse().expect("a number")
}

#[tokio::test]
async fn lost_lines_are_counted_and_told() {
    let (upstream, folder) = (TestUpstream::start().await, tempfile::tempdir().expect("a folder"));
    let mut command = Command::new(BIN);
    command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--store", "memory:"]);
    command.args(["--upstream", &upstream.url()]).current_dir(folder.path());
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let mut out = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut address = || -> SocketAddr {
        let line = out.next().expect("a line").expect("text");
        line.rsplit_once("http://").expect("an address").1.parse().expect("an address")
    };
    let (admin, addr) = (address(), address());
    let agent = "a".repeat(USER_AGENT_BYTES);
    let mut sent = 0;
    while lost_log_lines(admin).await == 0 {
        for _ in 0..50 {
            let answer = anonymous_pay(addr, "k-1").header("User-Agent", &agent).send().await;
            assert_eq!(answer.status, 201, "requests do not wait for the log");
        }
        sent += 50;
        assert!(sent < 5000, "nothing is counted as lost after {sent} lines of {USER_AGENT_BYTES} bytes");
    }
    let counted = lost_log_lines(admin).await;

    let mut log = BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    while !line.contains("log lines were lost") {
        line.clear();
        assert_ne!(log.read_line(&mut line).expect("text"), 0, "the log ended without saying so");
    }
    let told = line.split(" log lines were lost").next().and_then(|before| before.rsplit(' ').next());
    let told: u64 = told.and_then(|told| told.parse().ok()).unwrap_or_else(|| panic!("no number: {line}"));
    assert!(line.contains("WARN") && told >= counted, "{counted} were counted: {line}");
    assert_eq!(lost_log_lines(admin).await, told, "nothing is lost any more");

    // Nobody reads again: that must not keep the process from ending.
    while lost_log_lines(admin).await == told {
        assert_eq!(anonymous_pay(addr, "k-1").header("User-Agent", &agent).send().await.status, 201);
    }
    let ended = Command::new("kill").arg("-TERM").arg(child.id().to_string()).status();
    assert!(ended.is_ok_and(|status| status.success()));
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("our child") {
            assert!(status.success(), "{status}");
            break;
        }
        if began.elapsed() > Duration::from_secs(10) {
            let _ = child.kill();
            let _ = child.wait();
            panic!("it waits for its log");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The pipe was there to the end.
    let _ = log.read(&mut [0; 1]).expect("a pipe");
}
