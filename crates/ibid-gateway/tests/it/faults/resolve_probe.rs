//! `resolve`: the app is asked what became of an unknown outcome.

use testbed::{
    client::many,
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};

use crate::support::{
    TestGateway, assert_ran, assert_refused, assert_replay, pay, send_until_settled, start_ietf_gateway,
};

/// An upstream that loses its first answer, and a gateway that asks it at `/found`.
async fn start_losing_first_answer() -> (TestUpstream, GatewayProcess) {
    let TestGateway { upstream, gateway } =
        TestGateway::ietf("resolve = \"GET /found?key={key}\"\nlease = \"300ms\"").await;
    upstream.on_each("/pay", [UpstreamFault::CloseWithoutReply.into(), UpstreamReply::usual()]);
    (upstream, gateway)
}

#[tokio::test]
async fn what_the_app_found_is_remembered_as_the_answer() {
    let (upstream, gateway) = start_losing_first_answer().await;
    upstream.on("/found", UpstreamReply::status(200).json(r#"{"id":7}"#).header("Location", "/payments/7"));
    let request = pay(&gateway, "k-1");
    assert_refused(&request.send().await, 502, "upstream-lost");
    assert_eq!(upstream.requests(), 1, "nobody asks before somebody needs to know");
    let early = request.send().await;
    assert_refused(&early, 409, "in-progress");
    assert_eq!((early.header("retry-after"), upstream.requests()), (Some("1"), 1), "it may still be running");
    let found = send_until_settled(&request).await;
    assert_eq!((found.status, found.text().as_str()), (200, r#"{"id":7}"#), "{found:?}");
    assert_eq!(found.header("location"), Some("/payments/7"));
    let probe = upstream.last();
    assert_eq!((probe.method.as_str(), probe.target.as_str()), ("GET", "/found?key=k-1"));
    assert_eq!(probe.header("authorization"), Some("Bearer one"));
    assert!(probe.body.is_empty() && probe.header("content-type").is_none(), "{probe:?}");
    assert_replay(&request.send().await, &found);
    assert_eq!((upstream.requests(), upstream.executions()), (2, 1), "asked once, run once");
}

#[tokio::test]
async fn what_the_app_did_not_find_is_released_and_run() {
    let (upstream, gateway) = start_losing_first_answer().await;
    upstream.on("/found", UpstreamReply::status(404));
    let request = pay(&gateway, "k-1");
    assert_refused(&request.send().await, 502, "upstream-lost");
    let second = send_until_settled(&request).await;
    assert_ran(&second);
    assert_eq!(upstream.last().attempt(), Some(2));
    assert_replay(&request.send().await, &second);
    assert_eq!(upstream.executions(), 2);
}

#[tokio::test]
async fn an_app_that_cannot_say_leaves_the_outcome_unknown() {
    let (upstream, gateway) = start_losing_first_answer().await;
    let unclear = [
        UpstreamReply::status(500),
        UpstreamReply::status(403),
        UpstreamFault::CloseWithoutReply.into(),
        UpstreamReply::status(200),
    ];
    upstream.on_each("/found", unclear);
    let request = pay(&gateway, "k-1");
    assert_refused(&request.send().await, 502, "upstream-lost");
    for _ in 0..3 {
        assert_refused(&send_until_settled(&request).await, 409, "outcome-unknown");
    }
    gateway.wait_for_log("asked about an unknown outcome, the app did not know").await;
    assert_eq!(upstream.executions(), 1);
    assert_eq!(request.send().await.status, 200, "asked again, it can say");
}

#[tokio::test]
async fn the_key_is_percent_encoded_in_the_probe() {
    let (upstream, gateway) = start_losing_first_answer().await;
    upstream.on("/found", UpstreamReply::status(200));
    let key = "a/b&c=d%e#f+g?h";
    let request = pay(&gateway, &format!("\"{key}\""));
    assert_refused(&request.send().await, 502, "upstream-lost");
    assert_eq!(send_until_settled(&request).await.status, 200);
    assert_eq!(upstream.last().target, "/found?key=a%2Fb%26c%3Dd%25e%23f%2Bg%3Fh");
}

#[tokio::test]
async fn another_request_under_the_key_does_not_ask() {
    let (upstream, gateway) = start_losing_first_answer().await;
    upstream.on("/found", UpstreamReply::status(404));
    assert_refused(&pay(&gateway, "k-1").send().await, 502, "upstream-lost");
    let other = crate::support::other_pay_at(&gateway, "/pay", "k-1");
    assert_refused(&other.send().await, 422, "key-reused");
    assert_eq!(upstream.requests(), 1);
}

#[tokio::test]
async fn of_many_who_ask_at_once_one_runs() {
    let upstream = TestUpstream::start().await;
    upstream.on_each("/pay", [UpstreamFault::CloseWithoutReply.into(), UpstreamReply::usual()]);
    upstream.on("/found", UpstreamReply::status(404));
    let dials = "resolve = \"GET /found?key={key}\"\nlease = \"300ms\"\non_concurrent = \"wait\"";
    let gateway = start_ietf_gateway(&upstream, dials).await;
    let request = pay(&gateway, "k-1");
    assert_refused(&request.send().await, 502, "upstream-lost");
    let answers = many(10, || request.clone()).await;
    assert!(answers.iter().all(|answer| answer.status == 201 && answer.body == answers[0].body), "{answers:?}");
    assert_eq!(upstream.executions(), 2);
}
