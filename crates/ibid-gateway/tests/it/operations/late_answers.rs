//! After `timeout` the client is refused, and the app's answer still counts for `late_answer`.

use std::time::Duration;

use testbed::{
    client::{TestRequest, TestResponse, get},
    process::{GatewayProcess, ProcessSignal},
    upstream::{ReplyGate, TestUpstream, UpstreamFault, UpstreamReply},
};
use tokio::time::{sleep, timeout};

use super::metrics_format::MetricsPage;
use crate::support::{TestGateway, anonymous_pay, refusal_name, start_gateway};
use testbed::http1::WAIT_TIMEOUT;

/// `late_answer` is one lease, which no test waits for.
const POLICY: &str = "[policy]\npreset = \"ietf\"\ntimeout = \"200ms\"\nlease = \"1m\"\n";

/// The name of the refusal in an answer, if it is one.
fn refusal_if_any(answer: &TestResponse) -> Option<String> {
    (answer.status >= 400).then(|| refusal_name(answer))
}

/// Repeats a request until it gets something else than `in-progress`.
async fn send_until_settled(request: &TestRequest) -> TestResponse {
    let settled = async {
        loop {
            let answer = request.send().await;
            if refusal_if_any(&answer).as_deref() != Some("in-progress") {
                return answer;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(WAIT_TIMEOUT, settled).await.expect("the first request is settled")
}

async fn metric(gateway: &GatewayProcess, name: &str) -> f64 {
    MetricsPage::parse(&get(gateway.admin_addr(), "/metrics").send().await.text()).value(name)
}

#[tokio::test]
async fn an_answer_after_the_time_out_is_recorded_and_a_retry_gets_it() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    let gateway = start_gateway(POLICY, &upstream).await;
    let request = anonymous_pay(gateway.addr(), "k-1");
    let first = request.send().await;
    assert_eq!((first.status, &*refusal_name(&first)), (504, "upstream-timeout"), "{first:?}");
    let meanwhile = request.send().await;
    assert_eq!((meanwhile.status, &*refusal_name(&meanwhile)), (409, "in-progress"), "{meanwhile:?}");

    gate.open();
    let again = send_until_settled(&request).await;
    assert_eq!((again.status, again.text().as_str()), (201, r#"{"id":1,"run":1}"#), "{again:?}");
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(upstream.executions(), 1);
    gateway.wait_for_log("the answer came after timeout; executed").await;
    assert_eq!(metric(&gateway, "idempotency_late_answers_total").await, 1.0);
    assert_eq!(metric(&gateway, "idempotency_unknown_total").await, 0.0);
}

#[tokio::test]
async fn a_late_answer_above_the_limit_is_recorded_as_a_digest() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::status(201).large(200_000).gated(&gate));
    let gateway = start_gateway(&format!("{POLICY}max_response = \"64KiB\"\n"), &upstream).await;
    let request = anonymous_pay(gateway.addr(), "k-1");
    assert_eq!(request.send().await.status, 504);
    gate.open();
    let again = send_until_settled(&request).await;
    assert_eq!((again.status, again.header("idempotency-body")), (201, Some("digest")), "{again:?}");
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_late_answer_that_breaks_off_leaves_the_outcome_unknown() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    let gateway = start_gateway(POLICY, &upstream).await;
    let request = anonymous_pay(gateway.addr(), "k-1");
    assert_eq!(request.send().await.status, 504);
    upstream.stop().await;
    let again = send_until_settled(&request).await;
    assert_eq!(refusal_name(&again), "outcome-unknown", "{again:?}");
    assert_eq!(metric(&gateway, "idempotency_unknown_total").await, 1.0);
}

/// The lease is a minute: a takeover within the test's patience had no further lease to wait for.
#[tokio::test]
async fn without_a_late_answer_the_operation_runs_again_at_once() {
    let upstream = TestUpstream::start().await;
    upstream.on("/pay", UpstreamFault::Hang);
    let config = format!("{POLICY}late_answer = \"300ms\"\non_unknown = \"retry\"\n");
    let gateway = start_gateway(&config, &upstream).await;
    let request = anonymous_pay(gateway.addr(), "k-1");
    assert_eq!(request.send().await.status, 504);
    upstream.clear_rules();
    let again = send_until_settled(&request).await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, None), "{again:?}");
    assert_eq!(upstream.last().attempt(), Some(2));
    gateway.wait_for_log("no answer came during late_answer either").await;
    assert_eq!(metric(&gateway, "idempotency_unknown_total").await, 1.0);
    assert_eq!(metric(&gateway, "idempotency_late_answers_total").await, 0.0);
}

#[tokio::test]
async fn late_answers_can_be_switched_off() {
    let TestGateway { upstream, gateway } = TestGateway::start(&format!("{POLICY}late_answer = \"0s\"\n")).await;
    upstream.on("/pay", UpstreamFault::Hang);
    let request = anonymous_pay(gateway.addr(), "k-1");
    assert_eq!(request.send().await.status, 504);
    assert_eq!(refusal_name(&request.send().await), "outcome-unknown");
}

/// A quarter of four connections is one.
#[tokio::test]
async fn the_oldest_gives_way_when_a_quarter_of_the_connections_waits() {
    let TestGateway { upstream, gateway } = TestGateway::start(&format!("max_upstream = 4\n{POLICY}")).await;
    upstream.on("/pay", UpstreamFault::Hang);
    let (older, newer) = (anonymous_pay(gateway.addr(), "k-1"), anonymous_pay(gateway.addr(), "k-2"));
    assert_eq!(older.send().await.status, 504);
    assert_eq!(refusal_name(&older.send().await), "in-progress");
    assert_eq!(newer.send().await.status, 504);
    assert_eq!(refusal_name(&send_until_settled(&older).await), "outcome-unknown");
    assert_eq!(refusal_name(&newer.send().await), "in-progress");
}

#[tokio::test]
async fn shutdown_waits_for_a_late_answer() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    let launch = GatewayProcess::launch(crate::support::BIN).config(POLICY).upstream(&upstream.url());
    let mut gateway = launch.arg("--store").arg("embedded:data").start().await;
    assert_eq!(anonymous_pay(gateway.addr(), "k-1").header("Host", "x").send().await.status, 504);
    gateway.signal(ProcessSignal::Term);
    gateway.wait_for_log("stopping").await;
    assert!(!gateway.has_exited());
    gate.open();
    assert_eq!(gateway.wait_exit(WAIT_TIMEOUT).await.code(), Some(0));
    gateway.restart().await;
    let again = anonymous_pay(gateway.addr(), "k-1").header("Host", "x").send().await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")), "{again:?}");
    assert_eq!(upstream.executions(), 1);
}
