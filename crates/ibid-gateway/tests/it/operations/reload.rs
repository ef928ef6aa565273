//! A changed configuration is taken up without dropping a request.

use std::{fs, os::unix::fs::symlink, path::Path};

use testbed::{
    client::{RawClient, get, post},
    process::{GatewayProcess, ProcessSignal},
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};

use crate::support::{BIN, IbidProcess, TestGateway, anonymous_pay, folder_with, lines, start_gateway};

const RELOADED_LOG_TEXT: &str = "configuration taken up";
const OLD_CONFIG: &str = "[[route]]\nmatch = \"POST /pay\"\n";
const NEW_CONFIG: &str = "[[route]]\nmatch = \"POST /pay\"\n[[route]]\nmatch = \"POST /orders\"\nkey.required = true\n";

/// Whether the second route is in force.
async fn orders_need_a_key(gateway: &GatewayProcess) -> bool {
    match post(gateway.addr(), "/orders").json("{}").send().await.status {
        400 => true,
        201 => false,
        other => panic!("neither refused nor passed: {other}"),
    }
}

#[tokio::test]
async fn a_new_route_is_in_force_and_a_running_request_survives() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    let gateway = start_gateway(OLD_CONFIG, &upstream).await;
    let mut kept = RawClient::connect(gateway.addr()).await;
    assert_eq!(get(gateway.addr(), "/").send_on(&mut kept).await.status, 200);
    assert!(!orders_need_a_key(&gateway).await);
    let mut running = anonymous_pay(gateway.addr(), "k-1").start().await;
    gate.arrived(1).await;
    gateway.rewrite_config(NEW_CONFIG);
    let line = gateway.wait_for_log(RELOADED_LOG_TEXT).await;
    assert!(line.contains("INFO") && line.contains("ibid.toml"), "{line}");
    assert!(orders_need_a_key(&gateway).await);
    assert_eq!(get(gateway.addr(), "/").send_on(&mut kept).await.status, 200, "connections are kept");
    gate.open();
    let first = running.read_response().await;
    assert_eq!(first.status, 201, "{first:?}");
    let again = anonymous_pay(gateway.addr(), "k-1").send().await;
    assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body), "{again:?}");
    let page = get(gateway.addr(), "/.well-known/idempotency").send().await;
    assert_eq!(
        page.json()["routes"].as_array().map(Vec::len),
        Some(3),
        "two routes and [policy]: the contract is published anew"
    );
}

#[tokio::test]
async fn two_hundred_requests_during_five_reloads_all_succeed() {
    let TestGateway { upstream, mut gateway } = TestGateway::start(OLD_CONFIG).await;
    let addr = gateway.addr();
    let clients: Vec<_> = (0..4)
        .map(|client| {
            tokio::spawn(async move {
                let mut raw = RawClient::connect(addr).await;
                for n in 0..50 {
                    let answer = anonymous_pay(addr, &format!("k-{client}-{n}")).send_on(&mut raw).await;
                    assert_eq!(answer.status, 201, "{answer:?}");
                }
            })
        })
        .collect();
    for reload in 1..=5 {
        gateway.rewrite_config(&format!("{OLD_CONFIG}ttl = \"{reload}h\"\n"));
        gateway.signal(ProcessSignal::Hup);
        lines(&gateway, RELOADED_LOG_TEXT, reload).await;
    }
    for client in clients {
        client.await.expect("no request fails");
    }
    assert_eq!(upstream.executions(), 200);
}

#[tokio::test]
async fn a_hangup_reads_again_what_the_file_points_to() {
    let TestGateway { upstream: _upstream, mut gateway } = TestGateway::start("").await;
    fs::write(gateway.dir().join("required"), "false").unwrap();
    gateway.rewrite_config("[policy]\nttl = \"1h\"\nkey.required = \"file:required\"\n");
    lines(&gateway, RELOADED_LOG_TEXT, 1).await;
    assert!(!orders_need_a_key(&gateway).await);
    // The file itself stays as it is, so nobody but the signal brings this about.
    fs::write(gateway.dir().join("required"), "true").unwrap();
    gateway.signal(ProcessSignal::Hup);
    lines(&gateway, RELOADED_LOG_TEXT, 2).await;
    assert!(orders_need_a_key(&gateway).await);
}

#[tokio::test]
async fn a_file_written_in_place_and_one_behind_a_swapped_link_are_seen() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start(OLD_CONFIG).await;
    fs::write(gateway.dir().join("ibid.toml"), NEW_CONFIG).unwrap();
    lines(&gateway, RELOADED_LOG_TEXT, 1).await;
    assert!(orders_need_a_key(&gateway).await);

    // As orchestrators mount configuration: file -> ..data -> a folder, of which the middle link is swapped.
    let dir = gateway.dir();
    for (folder, text) in [("v1", NEW_CONFIG.to_owned()), ("v2", format!("{NEW_CONFIG}key.max_length = 8\n"))] {
        fs::create_dir(dir.join(folder)).unwrap();
        fs::write(dir.join(folder).join("ibid.toml"), text).unwrap();
    }
    replace_symlink(Path::new("v1"), &dir.join("..data"));
    replace_symlink(Path::new("..data/ibid.toml"), &dir.join("ibid.toml"));
    replace_symlink(Path::new("v2"), &dir.join("..data"));
    lines(&gateway, RELOADED_LOG_TEXT, 2).await;
    let long = post(gateway.addr(), "/orders").key("longer-than-eight").send().await;
    assert_eq!(long.status, 400, "{long:?}");
}

/// Puts a link in place of what is there, in one step.
fn replace_symlink(to: &Path, at: &Path) {
    let next = at.with_file_name("link.next");
    symlink(to, &next).unwrap();
    fs::rename(&next, at).unwrap();
}

#[tokio::test]
async fn what_needs_a_restart_is_named() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start(OLD_CONFIG).await;
    let changed = format!("max_running = 7\nlimits.shutdown = \"1s\"\nlog.level = \"debug\"\n{NEW_CONFIG}");
    gateway.rewrite_config(&changed);
    let line = gateway.wait_for_log(RELOADED_LOG_TEXT).await;
    assert!(line.contains("WARN"), "{line}");
    for named in ["max_running", "limits", "log"] {
        assert!(line.contains(named), "{named}: {line}");
    }
    for fine in ["store", "journal", "trusted_proxies"] {
        assert!(!line.contains(fine), "{fine}: {line}");
    }
    assert!(orders_need_a_key(&gateway).await, "the rest is in force");
}

#[tokio::test]
async fn a_file_named_by_a_variable_is_watched_too() {
    let upstream = TestUpstream::start().await;
    let (_dir, path) = folder_with("mine.toml", OLD_CONFIG);
    let env = [("IBID_CONFIG", path.to_str().unwrap()), ("IBID_UPSTREAM", &upstream.url())];
    let process = IbidProcess::start(&["serve", "--listen", "127.0.0.1:0", "--admin", "off"], &env);
    process.wait_for("ibid: listening on ").await;
    fs::write(&path, NEW_CONFIG).unwrap();
    process.wait_for(RELOADED_LOG_TEXT).await;
}

#[tokio::test]
async fn flags_and_variables_still_win_after_a_reload() {
    let upstream = TestUpstream::start().await;
    let launch = GatewayProcess::launch(BIN).config("").upstream(&upstream.url()).env("IBID_PRESET", "platform");
    let mut gateway = launch.start().await;
    assert!(orders_need_a_key(&gateway).await);
    gateway.rewrite_config("upstream = \"http://127.0.0.1:9\"\n[policy]\npreset = \"ietf\"\nttl = \"1h\"\n");
    gateway.signal(ProcessSignal::Hup);
    gateway.wait_for_log(RELOADED_LOG_TEXT).await;
    assert!(orders_need_a_key(&gateway).await, "IBID_PRESET wins over the file");
    assert_eq!(anonymous_pay(gateway.addr(), "k-1").send().await.status, 201, "--upstream wins over the file");
}
