//! The end: in good order, and in time.

use std::time::{Duration, Instant};

use ibid::store::ClaimOutcome;
use testbed::{
    client::{RawClient, get},
    process::{GatewayProcess, ProcessSignal},
    upstream::{ReplyGate, TestUpstream, UpstreamFault, UpstreamReply},
};
use tokio::time::{sleep, timeout};

use crate::support::{InProcessGateway, TestGateway, anonymous_pay, start_gateway};
use testbed::http1::WAIT_TIMEOUT;

const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

async fn wait_until_refusing(gateway: &GatewayProcess) {
    let refused = async {
        // One may still be taken from the queue before the listener closes.
        while RawClient::try_connect(gateway.addr()).await.is_ok() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(WAIT_TIMEOUT, refused).await.expect("new connections are refused");
}

#[tokio::test]
async fn terminated_it_takes_nobody_in_and_finishes_what_has_begun() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    upstream.on("/plain", UpstreamReply::usual().gated(&gate));
    let mut gateway = start_gateway("", &upstream).await;
    let mut idle = RawClient::connect(gateway.addr()).await;
    assert_eq!(get(gateway.addr(), "/").send_on(&mut idle).await.status, 200);
    let mut silent = RawClient::connect(gateway.addr()).await;
    let mut keyed = anonymous_pay(gateway.addr(), "k-1").start().await;
    let mut plain = get(gateway.addr(), "/plain").start().await;
    gate.arrived(2).await;

    gateway.signal(ProcessSignal::Term);
    gateway.wait_for_log("stopping").await;
    wait_until_refusing(&gateway).await;
    assert!(idle.is_closed_within(SHUTDOWN_TIMEOUT).await, "an idle connection is closed");
    assert!(silent.is_closed_within(SHUTDOWN_TIMEOUT).await, "so is one that never sent anything");
    let ready = get(gateway.admin_addr(), "/readyz").send().await;
    assert_eq!((ready.status, &ready.json()["stopping"]), (503, &true.into()), "{ready:?}");
    assert_eq!(ready.json()["running"], 1, "{ready:?}");
    assert_eq!(get(gateway.admin_addr(), "/healthz").send().await.status, 200);
    assert!(!gateway.has_exited());

    gate.open();
    let answer = keyed.read_response().await;
    assert_eq!((answer.status, answer.text().as_str()), (201, r#"{"id":1,"run":1}"#), "{answer:?}");
    assert_eq!(plain.read_response().await.status, 200);
    assert_eq!(gateway.wait_exit(SHUTDOWN_TIMEOUT).await.code(), Some(0));
    assert!(!gateway.logs().iter().any(|line| line.contains("WARN") || line.contains("ERROR")), "{:?}", gateway.logs());
}

#[tokio::test]
async fn interrupted_it_waits_a_second_for_a_slow_app() {
    let TestGateway { upstream, mut gateway } = TestGateway::start("").await;
    upstream.on("/pay", UpstreamReply::usual().delay(Duration::from_secs(1)));
    let mut running = anonymous_pay(gateway.addr(), "k-1").start().await;
    upstream.wait_for(1).await;
    gateway.signal(ProcessSignal::Int);
    assert_eq!(running.read_response().await.status, 201);
    assert!(running.is_closed_within(SHUTDOWN_TIMEOUT).await);
    assert_eq!(gateway.wait_exit(SHUTDOWN_TIMEOUT).await.code(), Some(0));
}

#[tokio::test]
async fn an_operation_whose_client_has_left_is_waited_for_too() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    let mut gateway = start_gateway("", &upstream).await;
    let running = anonymous_pay(gateway.addr(), "k-1").start().await;
    gate.arrived(1).await;
    running.abort();
    gateway.signal(ProcessSignal::Term);
    gateway.wait_for_log("stopping").await;
    wait_until_refusing(&gateway).await;
    assert!(!gateway.has_exited());
    gate.open();
    assert_eq!(gateway.wait_exit(SHUTDOWN_TIMEOUT).await.code(), Some(0));
    assert!(gateway.logs().iter().any(|line| line.contains("answer stored")), "{:?}", gateway.logs());
    assert_eq!(upstream.client_disconnects(), 0);
}

#[tokio::test]
async fn idle_it_ends_at_once() {
    let TestGateway { upstream: _upstream, mut gateway } = TestGateway::start("").await;
    let mut idle = RawClient::connect(gateway.addr()).await;
    assert_eq!(anonymous_pay(gateway.addr(), "k-1").send_on(&mut idle).await.status, 201);
    gateway.signal(ProcessSignal::Term);
    assert_eq!(gateway.wait_exit(SHUTDOWN_TIMEOUT).await.code(), Some(0), "an idle connection keeps nobody");
}

#[tokio::test]
async fn past_the_deadline_it_ends_all_the_same_and_says_so() {
    let TestGateway { upstream, mut gateway } = TestGateway::start("limits.shutdown = \"500ms\"").await;
    upstream.on("/pay", UpstreamFault::Hang);
    let mut stays = anonymous_pay(gateway.addr(), "k-1").start().await;
    let leaves = anonymous_pay(gateway.addr(), "k-2").start().await;
    upstream.wait_for(2).await;
    drop(leaves);
    let started = Instant::now();
    gateway.signal(ProcessSignal::Term);
    assert_eq!(gateway.wait_exit(SHUTDOWN_TIMEOUT).await.code(), Some(0));
    assert!(started.elapsed() >= Duration::from_millis(500), "it waited as long as it was told to");
    let warned = gateway.wait_for_log("operations still run").await;
    assert!(warned.contains("WARN") && warned.contains("running=2"), "{warned}");
    assert!(stays.try_read_response().await.is_err_and(|broken| broken.is_closed()), "nobody invents an answer");
}

#[tokio::test]
async fn what_is_given_up_is_parked_and_not_to_be_taken_over_yet() {
    let upstream = TestUpstream::start().await;
    upstream.on("/pay", UpstreamFault::Hang);
    let here = InProcessGateway::start("limits.shutdown = \"300ms\"", &upstream).await;
    let _stays = here.pay("k-1").start().await;
    let leaves = here.pay("k-2").start().await;
    upstream.wait_for(2).await;
    drop(leaves);
    here.gateway.stop().await;
    let entries = crate::support::entries(&here.store).await;
    assert_eq!(entries.len(), 2);
    for entry in entries {
        match entry {
            ClaimOutcome::OutcomeUnknown(holder) => assert!(holder.takeover_in > Duration::from_secs(20), "{holder:?}"),
            other => panic!("the claim is not parked: {other:?}"),
        }
    }
}
