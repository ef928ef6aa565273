//! The keys of the calls that a handler makes: a chain of services stays idempotent if the handler dies in between.

use std::{path::Path, process::Stdio};

use testbed::{
    client::{TestRequest, post},
    process::GatewayProcess,
    upstream::TestUpstream,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use crate::support::{BIN, caller, pay, policy, start_gateway, until_some};

/// The app, and its port.
async fn start_app(service: &GatewayProcess, port: u16) -> (Child, u16) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("python3");
    command.arg(here.join("tests/apps/outbound.py")).arg(service.addr().to_string()).arg(port.to_string());
    command.env("PYTHONPATH", here.join("../../clients/python")).env("PYTHONDONTWRITEBYTECODE", "1");
    let mut app = command.kill_on_drop(true).stdout(Stdio::piped()).spawn().expect("Python 3 runs");
    let mut lines = BufReader::new(app.stdout.take().expect("piped")).lines();
    let line = lines.next_line().await.expect("text").expect("the port");
    (app, line.parse().expect("a port"))
}

fn order(gateway: &GatewayProcess, key: &str) -> TestRequest {
    caller(post(gateway.addr(), "/order")).key(key).json(r#"{"order":"o1"}"#)
}

#[tokio::test]
async fn a_handler_that_dies_between_two_calls_repeats_them_under_their_keys() {
    let bank = TestUpstream::start().await;
    let service = start_gateway(&policy(""), &bank).await;
    let (mut app, port) = start_app(&service, 0).await;
    let config = policy("on_unknown = \"retry\"\nlease = \"200ms\"");
    let gateway = GatewayProcess::spawn(BIN, &config, &format!("http://127.0.0.1:{port}")).await;
    assert_eq!(order(&gateway, "k-1").send().await.status, 502, "its outcome is unknown");
    assert_eq!(app.wait().await.expect("it ran").code(), Some(9));
    assert_eq!((bank.executions_at("/charge"), bank.executions_at("/mail")), (1, 0));
    let (_app, _) = start_app(&service, port).await;
    until_some("the lease to expire", || async {
        let answer = order(&gateway, "k-1").send().await;
        (answer.status == 201).then_some(answer)
    })
    .await;
    assert_eq!((bank.executions_at("/charge"), bank.executions_at("/mail")), (1, 1), "{:#?}", bank.log());
    let keys: Vec<_> =
        bank.log().iter().map(|seen| seen.header("idempotency-key").unwrap_or_default().to_owned()).collect();
    assert_ne!(keys[0], keys[1], "each call has a key of its own");
}

#[tokio::test]
async fn an_operation_is_the_same_in_all_attempts_and_another_for_each_key_and_caller() {
    let upstream = TestUpstream::start().await;
    let config = policy("on_unknown = \"retry\"\nunknown_status = [503]\nremember = \"success\"");
    let gateway = start_gateway(&config, &upstream).await;
    let operation = || upstream.last().header("ibid-operation").expect("the header").to_owned();
    upstream.on("/pay", testbed::upstream::UpstreamReply::status(503));
    let mut seen = Vec::new();
    for _ in 0..2 {
        pay(&gateway, "k-1").header("Ibid-Operation", "0".repeat(32)).send().await;
        seen.push(operation());
    }
    assert_eq!((&seen[0], upstream.last().header("ibid-attempt")), (&seen[1], Some("2")));
    assert!(seen[0].len() == 32 && seen[0].bytes().all(|byte| byte.is_ascii_hexdigit()), "{seen:?}");
    pay(&gateway, "k-2").send().await;
    seen.push(operation());
    post(gateway.addr(), "/pay").header("Authorization", "Bearer two").key("k-1").json(r#"{"amount":1}"#).send().await;
    seen.push(operation());
    assert!(seen[1] != seen[2] && seen[2] != seen[3] && seen[1] != seen[3], "{seen:?}");
    assert!(seen.iter().all(|operation| *operation != "0".repeat(32)), "a client does not name it");
}

/// The SDKs test against the same file.
#[test]
fn keys_are_those_of_every_sdk() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/outbound_keys.json");
    let rows = std::fs::read(file).expect("the vectors");
    let rows: Vec<std::collections::HashMap<String, String>> = serde_json::from_slice(&rows).expect("a list");
    assert!(rows.len() > 4);
    for row in &rows {
        assert_eq!(ibid::outbound_key(&row["operation"], &row["name"]), row["key"], "{row:?}");
    }
}
