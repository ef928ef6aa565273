//! Holders that stop: the gateway's own process killed or paused in mid-run.

use std::time::Duration;

use testbed::{
    process::ProcessSignal,
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};
use tokio::time::sleep;

use crate::support::{assert_ran, assert_replay, pay, policy, start_gateway, start_ietf_gateway};

/// The promise of `memory:` is one start per key *and process*: what it does not outlive, it cannot prevent.
#[tokio::test]
async fn a_killed_gateway_forgets_what_it_kept_in_memory() {
    let upstream = TestUpstream::start().await;
    let gate = ReplyGate::new();
    upstream.on_each("/pay", [UpstreamReply::usual().gated(&gate), UpstreamReply::usual()]);
    let config = format!("{}[store]\nurl = \"memory:\"\n", policy(""));
    let mut gateway = start_gateway(&config, &upstream).await;
    let held = pay(&gateway, "k-1").start().await;
    gate.arrived(1).await;
    gateway.kill().await;
    drop(held);
    gateway.restart().await;
    let again = pay(&gateway, "k-1").send().await;
    assert_ran(&again);
    assert_eq!(upstream.last().attempt(), Some(1));
    assert_eq!(upstream.executions(), 2);
    assert_replay(&pay(&gateway, "k-1").send().await, &again);
}

#[tokio::test]
async fn a_gateway_that_slept_past_its_lease_still_completes() {
    for on_unknown in ["hold", "retry"] {
        let upstream = TestUpstream::start().await;
        let gate = upstream.gate("/pay");
        let dials = format!("lease = \"300ms\"\ntimeout = \"20s\"\non_unknown = \"{on_unknown}\"");
        let mut gateway = start_ietf_gateway(&upstream, &dials).await;
        let request = pay(&gateway, "k-1");
        let mut holder = request.start().await;
        gate.arrived(1).await;
        gateway.signal(ProcessSignal::Stop);
        gate.open();
        sleep(Duration::from_millis(900)).await;
        gateway.signal(ProcessSignal::Cont);
        let first = holder.read_response().await;
        assert_ran(&first);
        assert_replay(&request.send().await, &first);
        assert_eq!(upstream.executions(), 1);
    }
}

#[tokio::test]
async fn a_run_that_outlasts_its_lease_keeps_it_by_its_heartbeat() {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/pay");
    // Were the lease to lapse, `retry` would run it a second time.
    let dials = "lease = \"600ms\"\ntimeout = \"20s\"\non_unknown = \"retry\"";
    let gateway = start_ietf_gateway(&upstream, dials).await;
    let request = pay(&gateway, "k-1");
    let mut holder = request.start().await;
    gate.arrived(1).await;
    sleep(Duration::from_millis(1400)).await;
    crate::support::assert_refused(&request.send().await, 409, "in-progress");
    gate.open();
    let first = holder.read_response().await;
    assert_ran(&first);
    assert_replay(&request.send().await, &first);
    assert_eq!(upstream.executions(), 1);
}
