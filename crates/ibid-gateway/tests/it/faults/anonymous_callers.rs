//! Anonymous callers whose answers set cookies: a retry with these cookies is the same caller, a session is not.

use testbed::{
    client::{TestRequest, post},
    process::GatewayProcess,
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};

use crate::sealing::table;
use crate::support::{
    TestGateway, assert_ran, assert_refused, assert_replay, is_in_progress, policy, start_gateway, start_ietf_gateway,
};

fn request_with_cookies(gateway: &GatewayProcess, key: &str, cookies: &str) -> TestRequest {
    let request = post(gateway.addr(), "/pay").key(key).json(r#"{"amount":1}"#);
    if cookies.is_empty() { request } else { request.header("Cookie", cookies) }
}

#[tokio::test]
async fn a_load_balancers_cookie_on_the_first_answer_does_not_break_the_retry() {
    let upstream = TestUpstream::start().await;
    upstream.on("/pay", UpstreamReply::usual().set_cookie("lb=node-1; Path=/; HttpOnly").set_cookie("zone=b; Secure"));
    for config in [policy(""), format!("{}{}", policy(""), table(&["k"]))] {
        let before = upstream.executions();
        let config = format!("{config}[store]\nurl = \"embedded:data\"\n");
        let mut gateway = start_gateway(&config, &upstream).await;
        let first = request_with_cookies(&gateway, "k-1", "").send().await;
        assert_ran(&first);
        for cookies in ["lb=node-1", "zone=b; lb=node-1", "lb=node-1; lb=node-1", ""] {
            assert_replay(&request_with_cookies(&gateway, "k-1", cookies).send().await, &first);
        }
        gateway.restart().await;
        assert_replay(&request_with_cookies(&gateway, "k-1", "lb=node-1").send().await, &first);
        // Another value, a session, a name that was not set, and the same value under another name.
        for cookies in ["lb=node-2", "lb=node-1; session=7", "session=7", "zone=node-1", "node-1"] {
            let refused = request_with_cookies(&gateway, "k-1", cookies).send().await;
            assert_refused(&refused, 400, "scope-missing");
            assert!(refused.text().contains("cookie:session"), "{refused:?}");
        }
        // Another key and another request have no such answer.
        assert_refused(&request_with_cookies(&gateway, "k-2", "lb=node-1").send().await, 400, "scope-missing");
        let other = request_with_cookies(&gateway, "k-1", "lb=node-1").body(r#"{"amount":2}"#).send().await;
        assert_refused(&other, 400, "scope-missing");
        // Who has a credential is another caller.
        assert_ran(
            &request_with_cookies(&gateway, "k-1", "lb=node-1").header("Authorization", "Bearer one").send().await,
        );
        assert_eq!(upstream.executions() - before, 2);
    }
}

#[tokio::test]
async fn cookies_of_an_answer_that_was_released_are_kept() {
    let upstream = TestUpstream::start().await;
    let gate = ReplyGate::new();
    let replies = [
        UpstreamReply::status(500).set_cookie("lb=node-1"),
        UpstreamReply::status(503).set_cookie("zone=b"),
        UpstreamReply::usual().set_cookie("late=1").gated(&gate),
    ];
    upstream.on_each("/pay", replies);
    let gateway = start_ietf_gateway(&upstream, "").await;
    assert_eq!(request_with_cookies(&gateway, "k-1", "").send().await.status, 500);
    assert_refused(&request_with_cookies(&gateway, "k-1", "lb=node-2").send().await, 400, "scope-missing");
    assert_eq!(request_with_cookies(&gateway, "k-1", "lb=node-1").send().await.status, 503, "it runs again");
    let both = request_with_cookies(&gateway, "k-1", "lb=node-1; zone=b");
    let mut running = both.start().await;
    gate.arrived(1).await;
    assert!(is_in_progress(&both.send().await));
    assert_refused(&request_with_cookies(&gateway, "k-1", "lb=node-1; late=1").send().await, 400, "scope-missing");
    gate.open();
    let last = running.read_response().await;
    assert_ran(&last);
    for cookies in ["lb=node-1; zone=b", "lb=node-1; zone=b; late=1", "late=1"] {
        assert_replay(&request_with_cookies(&gateway, "k-1", cookies).send().await, &last);
    }
    assert_refused(&request_with_cookies(&gateway, "k-1", "lb=node-1; session=7").send().await, 400, "scope-missing");
    let other = request_with_cookies(&gateway, "k-1", "lb=node-1").body(r#"{"amount":2}"#).send().await;
    assert_refused(&other, 400, "scope-missing");
    assert_eq!(upstream.executions(), 3);
}

#[tokio::test]
async fn cookies_of_an_answer_with_an_unknown_outcome_are_kept() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    upstream.on("/pay", UpstreamReply::status(502).set_cookie("lb=node-1"));
    assert_eq!(request_with_cookies(&gateway, "k-1", "").send().await.status, 502);
    assert_refused(&request_with_cookies(&gateway, "k-1", "lb=node-1").send().await, 409, "outcome-unknown");
    assert_refused(&request_with_cookies(&gateway, "k-1", "session=7").send().await, 400, "scope-missing");
    assert_eq!(upstream.executions(), 1);
}
