//! The request was sent and nobody knows how it ended: parked, and never run again unless the policy says so.

use std::time::{Duration, Instant};

use testbed::upstream::{TestUpstream, UpstreamFault, UpstreamReply};

use crate::support::{
    TestGateway, assert_ran, assert_refused, assert_replay, is_in_progress, other_pay_at, pay, pay_at,
    send_until_settled, until,
};

/// Every way to lose an answer, each at a path of its own.
const RESPONSE_LOSSES: [(&str, UpstreamFault); 7] = [
    ("/reset", UpstreamFault::ResetAfterRequest),
    ("/closed", UpstreamFault::CloseWithoutReply),
    ("/truncated", UpstreamFault::Truncated { content_length: 100, sent: 40 }),
    ("/headless", UpstreamFault::Truncated { content_length: 100, sent: 0 }),
    ("/chunked", UpstreamFault::TruncatedChunked),
    ("/garbage", UpstreamFault::Garbage),
    ("/upgrade", UpstreamFault::UnexpectedUpgrade),
];

#[tokio::test]
async fn a_lost_answer_leaves_the_outcome_unknown() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    for (path, fault) in RESPONSE_LOSSES {
        upstream.on_each(path, [fault.into(), UpstreamReply::usual()]);
        let request = pay_at(&gateway, path, path);
        assert_refused(&request.send().await, 502, "upstream-lost");
        assert_eq!(upstream.executions_at(path), 1, "{path}");
        for _ in 0..2 {
            assert_refused(&request.send().await, 409, "outcome-unknown");
        }
        assert_refused(&other_pay_at(&gateway, path, path).send().await, 422, "key-reused");
        assert_eq!(upstream.executions_at(path), 1, "{path}");
    }
}

#[tokio::test]
async fn a_lost_answer_is_retried_where_the_policy_says_so() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("on_unknown = \"retry\"\nlease = \"300ms\"").await;
    for (path, fault) in RESPONSE_LOSSES {
        upstream.on_each(path, [fault.into(), UpstreamReply::usual()]);
        let request = pay_at(&gateway, path, path);
        assert_refused(&request.send().await, 502, "upstream-lost");
        let lost = upstream.last();
        assert_eq!(lost.attempt(), Some(1), "{path}");
        // Whoever sends something else under this key takes nothing over.
        assert_refused(&other_pay_at(&gateway, path, path).send().await, 422, "key-reused");
        assert_eq!(upstream.executions_at(path), 1, "{path}");
        let second = send_until_settled(&request).await;
        assert_ran(&second);
        let ran = upstream.last();
        assert_eq!(ran.attempt(), Some(2), "{path}");
        let after = ran.at.duration_since(lost.at);
        assert!(after >= Duration::from_millis(300), "{path}: run again {after:?} after it, within the lease");
        assert!(ran.fence() > lost.fence() && lost.fence().is_some(), "{path}: {lost:?} {ran:?}");
        assert_replay(&request.send().await, &second);
        assert_eq!(upstream.executions_at(path), 2, "{path}");
    }
}

#[tokio::test]
async fn a_takeover_that_cannot_start_leaves_the_outcome_unknown() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("on_unknown = \"retry\"\nlease = \"300ms\"").await;
    upstream.on_each("/pay", [UpstreamFault::CloseWithoutReply.into(), UpstreamReply::usual()]);
    let request = pay(&gateway, "k-1");
    assert_refused(&request.send().await, 502, "upstream-lost");
    upstream.stop().await;
    assert_refused(&send_until_settled(&request).await, 502, "upstream-unreachable");
    upstream.restart().await;
    // Released, it would be free for anything; it is still what may have happened.
    assert_refused(&other_pay_at(&gateway, "/pay", "k-1").send().await, 422, "key-reused");
    assert_ran(&request.send().await);
    assert_eq!(upstream.last().attempt(), Some(3));
}

#[tokio::test]
async fn no_answer_in_time_leaves_the_outcome_unknown() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("timeout = \"300ms\"\nlease = \"500ms\"").await;
    upstream.on_each("/pay", [UpstreamFault::Hang.into(), UpstreamReply::usual()]);
    let request = pay(&gateway, "k-1");
    assert_refused(&request.send().await, 504, "upstream-timeout");
    assert_refused(&send_until_settled(&request).await, 409, "outcome-unknown");
    assert_refused(&other_pay_at(&gateway, "/pay", "k-1").send().await, 422, "key-reused");
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_refused(&request.send().await, 409, "outcome-unknown");
    assert_eq!(upstream.executions(), 1);
    until("the gateway to give the connection up", || upstream.client_disconnects() == 1).await;
}

#[tokio::test]
async fn after_a_timeout_the_retry_waits_for_the_lease() {
    let TestGateway { upstream, gateway } =
        TestGateway::ietf("timeout = \"300ms\"\nlease = \"900ms\"\non_unknown = \"retry\"").await;
    upstream.on_each("/pay", [UpstreamFault::Hang.into(), UpstreamReply::usual()]);
    let request = pay(&gateway, "k-1");
    let begun = Instant::now();
    assert_refused(&request.send().await, 504, "upstream-timeout");
    let early = request.send().await;
    assert!(is_in_progress(&early), "{early:?}");
    assert_refused(&early, 409, "in-progress");
    assert_refused(&other_pay_at(&gateway, "/pay", "k-1").send().await, 422, "key-reused");
    let second = send_until_settled(&request).await;
    assert_ran(&second);
    let ran = upstream.last();
    assert_eq!(ran.attempt(), Some(2));
    let after = ran.at.duration_since(begun);
    assert!(after >= Duration::from_millis(1200), "taken over {after:?} after the start, within the lease");
    assert_replay(&request.send().await, &second);
    assert_eq!(upstream.executions(), 2);
}

#[tokio::test]
async fn a_gateways_own_trouble_upstream_is_passed_on_and_leaves_the_outcome_unknown() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    for (path, status) in [("/502", 502), ("/504", 504)] {
        let theirs = UpstreamReply::status(status).json(r#"{"theirs":true}"#).header("X-Theirs", "1");
        upstream.on_each(path, [theirs, UpstreamReply::usual()]);
        let request = pay_at(&gateway, path, path);
        let answer = request.send().await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.text(), r#"{"theirs":true}"#);
        assert_eq!(answer.header("x-theirs"), Some("1"));
        assert_refused(&request.send().await, 409, "outcome-unknown");
        assert_refused(&other_pay_at(&gateway, path, path).send().await, 422, "key-reused");
        assert_eq!(upstream.executions_at(path), 1);
    }
}

#[tokio::test]
async fn an_answer_that_is_not_remembered_says_so_and_the_retry_runs() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    for status in [500, 503, 401, 403, 408, 409, 425, 429] {
        let path = format!("/{status}");
        upstream.on_each(&path, [UpstreamReply::status(status).numbered(), UpstreamReply::usual()]);
        let request = pay_at(&gateway, &path, &path);
        let answer = request.send().await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.header("idempotency-stored"), Some("false"), "{answer:?}");
        let second = request.send().await;
        assert_ran(&second);
        assert_eq!(upstream.last().attempt(), Some(2), "{path}");
        assert_replay(&request.send().await, &second);
        assert_eq!(upstream.executions_at(&path), 2);
    }
}

#[tokio::test]
async fn a_lost_answer_over_http2_leaves_the_outcome_unknown() {
    let upstream = TestUpstream::start_h2c().await;
    let config = crate::support::policy("timeout = \"500ms\"\nlate_answer = \"100ms\"");
    let url = format!("h2c://{}", upstream.addr());
    let gateway = testbed::process::GatewayProcess::spawn(crate::support::BIN, &config, &url).await;
    for (path, fault) in [
        ("/reset", UpstreamFault::ResetAfterRequest),
        ("/truncated", UpstreamFault::Truncated { content_length: 100, sent: 40 }),
        ("/cut", UpstreamFault::TruncatedChunked),
        ("/hang", UpstreamFault::Hang),
    ] {
        upstream.on_each(path, [fault.into(), UpstreamReply::usual()]);
        let request = pay_at(&gateway, path, path);
        let timed_out = fault == UpstreamFault::Hang;
        let (status, name) = if timed_out { (504, "upstream-timeout") } else { (502, "upstream-lost") };
        assert_refused(&request.send().await, status, name);
        assert_refused(&send_until_settled(&request).await, 409, "outcome-unknown");
        assert_eq!(upstream.executions_at(path), 1, "{path}");
    }
}
