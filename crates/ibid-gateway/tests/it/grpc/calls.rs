//! Unary calls: one effect, one answer, refusals as trailers.

use std::time::Duration;

use http::Version;
use testbed::{
    client::post,
    grpc::{GrpcTestClient, message},
    upstream::{ReplyGate, TestUpstream, UpstreamFault},
};

use super::{CREATE, KEY, create_route_config, error_reply, ok_reply, start_shop};
use crate::{
    coverage::Http2Connection,
    support::{start_gateway, within},
};

#[tokio::test]
async fn a_retry_gets_the_first_answer_and_the_app_sees_one_call_over_http2() {
    let (upstream, _gateway, client) =
        start_shop(&create_route_config("replay_headers = { Idempotent-Replayed = \"true\" }")).await;
    let sent = [KEY, ("grpc-timeout", "5S"), ("grpc-accept-encoding", "gzip"), ("x-mine", "1")];
    let first = client.call(CREATE, &sent, message("ten")).await;
    assert_eq!((first.code(), first.text()), (0, "done".to_owned()));
    assert_eq!((first.value("x-before"), first.value("x-after")), (Some("b"), Some("a")));
    assert!(!first.headers.contains_key("idempotent-replayed"));
    for _ in 0..3 {
        let again = client.call(CREATE, &[KEY], message("ten")).await;
        assert_eq!(again.headers["idempotent-replayed"], "true");
        assert_eq!(again.headers.get_all("trace-bin").iter().collect::<Vec<_>>(), ["AAEC", "AwQF"]);
        assert_eq!(again.without_per_call_metadata(), first.clone().without_per_call_metadata());
    }
    assert_eq!(upstream.requests(), 1);
    let seen = upstream.last();
    assert_eq!((seen.version, seen.path(), &seen.body[..]), (Version::HTTP_2, CREATE, &message("ten")[..]));
    for (name, value) in [
        ("te", "trailers"),
        ("grpc-timeout", "600000m"),
        ("grpc-accept-encoding", "identity"),
        ("content-type", "application/grpc"),
        ("idempotency-key", "key-1"),
        ("ibid-attempt", "1"),
        ("x-mine", "1"),
        (":authority", "shop"),
    ] {
        assert_eq!(seen.headers.get_all(name), [value], "{name}");
    }
}

#[tokio::test]
async fn refusals_are_trailers_only_with_the_codes_of_the_dials() {
    let (upstream, _gateway, client) =
        start_shop(&create_route_config("grpc_status.key_reused = \"ALREADY_EXISTS\"")).await;
    client.call(CREATE, &[], message("x")).await.assert_refused(3, "KEY_MISSING");
    client.call(CREATE, &[KEY, KEY], message("x")).await.assert_refused(3, "KEY_INVALID");
    client.call(CREATE, &[KEY], message("x").slice(..4)).await.assert_refused(3, "REQUEST_AMBIGUOUS");
    assert_eq!(upstream.requests(), 0);
    assert_eq!(client.call(CREATE, &[KEY], message("ten")).await.code(), 0);
    client.call(CREATE, &[KEY], message("two")).await.assert_refused(6, "KEY_REUSED");
    client.call("/shop.Orders//Create", &[KEY], message("ten")).await.assert_refused(6, "KEY_REUSED");
    client.call("/shop.Orders/./Create", &[KEY], message("ten")).await.assert_refused(3, "REQUEST_AMBIGUOUS");
    assert_eq!(upstream.requests(), 1);
}

#[tokio::test]
async fn a_failure_is_remembered_as_one() {
    let (upstream, _gateway, client) = start_shop(&create_route_config("")).await;
    upstream.on(CREATE, error_reply(9));
    let first = client.call(CREATE, &[KEY], message("x")).await;
    assert_eq!((first.code(), first.value("grpc-message")), (9, Some("no")));
    upstream.on(CREATE, ok_reply("now it works"));
    let again = client.call(CREATE, &[KEY], message("x")).await;
    assert!(again.trailers_only, "{again:?}");
    assert_eq!((again.code(), again.value("grpc-message")), (9, Some("no")));
    assert_eq!(upstream.requests(), 1);
}

#[tokio::test]
async fn a_status_that_says_not_now_is_run_again() {
    let (upstream, _gateway, client) = start_shop(&create_route_config("remember = \"final\"")).await;
    upstream.on_each(CREATE, [error_reply(14), ok_reply("done")]);
    let first = client.call(CREATE, &[KEY], message("x")).await;
    assert_eq!((first.code(), first.value("idempotency-stored")), (14, Some("false")));
    assert_eq!(client.call(CREATE, &[KEY], message("x")).await.code(), 0);
    assert_eq!(client.call(CREATE, &[KEY], message("x")).await.code(), 0);
    assert_eq!(upstream.requests(), 2);
}

#[tokio::test]
async fn a_client_that_cancels_in_the_middle_costs_no_second_run() {
    let (upstream, _gateway, client) = start_shop(&create_route_config("")).await;
    let gate = ReplyGate::new();
    upstream.on(CREATE, ok_reply("done").gated(&gate));
    let mut first = client.start(CREATE, &[KEY], &[message("x")]).await;
    gate.arrived(1).await;
    first.send.send_reset(h2::Reason::CANCEL);
    drop(first);
    let meanwhile = client.call(CREATE, &[KEY], message("x")).await;
    meanwhile.assert_refused(10, "IN_PROGRESS");
    assert_eq!(meanwhile.headers.get_all("grpc-retry-pushback-ms").iter().collect::<Vec<_>>(), ["1000"]);
    gate.open();
    within("the answer to be remembered", async {
        while client.call(CREATE, &[KEY], message("x")).await.code() != 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    assert_eq!(upstream.executions_at(CREATE), 1);
}

#[tokio::test]
async fn an_app_that_is_away_is_unavailable_and_the_call_may_run_later() {
    let upstream = TestUpstream::start_h2c().await;
    upstream.reply_by_default(ok_reply("done"));
    upstream.stop().await;
    let gateway = start_gateway(&create_route_config("on_unknown = \"hold\""), &upstream).await;
    let client = GrpcTestClient::connect(gateway.addr()).await;
    client.call(CREATE, &[KEY], message("x")).await.assert_refused(14, "UPSTREAM_UNREACHABLE");
    client.call("/shop.Orders/Other", &[], message("x")).await.assert_refused(14, "UPSTREAM_UNREACHABLE");
    upstream.restart().await;
    assert_eq!(client.call(CREATE, &[KEY], message("x")).await.code(), 0);
    assert_eq!(upstream.executions(), 1, "it was released: an unknown outcome would be held");
}

#[tokio::test]
async fn an_answer_that_is_lost_leaves_the_outcome_open() {
    let (upstream, _gateway, client) =
        start_shop(&create_route_config("on_unknown = \"hold\"\ntimeout = \"300ms\"\nlate_answer = \"0s\"")).await;
    upstream.on(CREATE, UpstreamFault::ResetAfterRequest);
    client.call(CREATE, &[KEY], message("x")).await.assert_refused(2, "UPSTREAM_LOST");
    client.call(CREATE, &[KEY], message("x")).await.assert_refused(9, "OUTCOME_UNKNOWN");
    upstream.on(CREATE, UpstreamFault::Hang);
    let slow = [("idempotency-key", "slow")];
    client.call(CREATE, &slow, message("x")).await.assert_refused(4, "UPSTREAM_TIMEOUT");
    upstream.on(CREATE, ok_reply("done"));
    client.call(CREATE, &slow, message("x")).await.assert_refused(9, "OUTCOME_UNKNOWN");
    assert_eq!(upstream.requests(), 2);
}

#[tokio::test]
async fn fifty_calls_at_once_on_fifty_connections_run_once() {
    let (upstream, gateway, _client) = start_shop(&create_route_config("on_concurrent = \"wait\"")).await;
    upstream.on(CREATE, ok_reply("done").delay(Duration::from_millis(50)));
    let calls: Vec<_> = (0..50)
        .map(|_| {
            let addr = gateway.addr();
            tokio::spawn(async move { GrpcTestClient::connect(addr).await.call(CREATE, &[KEY], message("x")).await })
        })
        .collect();
    for call in calls {
        let answer = call.await.unwrap();
        assert_eq!((answer.code(), answer.text()), (0, "done".to_owned()));
    }
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn the_answer_survives_a_kill() {
    let (upstream, mut gateway, client) = start_shop(&create_route_config("")).await;
    let first = client.call(CREATE, &[KEY], message("x")).await;
    gateway.kill().await;
    gateway.restart().await;
    let client = GrpcTestClient::connect(gateway.addr()).await;
    assert_eq!(
        client.call(CREATE, &[KEY], message("x")).await.without_per_call_metadata(),
        first.without_per_call_metadata()
    );
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn http_routes_cover_calls_and_the_other_way_round() {
    let config = create_route_config("") + "[[route]]\nmatch = \"POST /*\"\nkey.required = true\n";
    let (upstream, gateway, client) = start_shop(&config).await;
    for _ in 0..2 {
        assert_eq!(client.call("/shop.Orders/Other", &[KEY], message("x")).await.code(), 0);
        assert_eq!(upstream.requests(), 1, "an HTTP route names its path, so it covers it");
    }
    let http2 = Http2Connection::connect(gateway.addr()).await;
    let kind = ("content-type", "application/grpc");
    let missing = http2.send("POST", "/shop.Orders/Other", &[kind], message("x")).await;
    assert_eq!(missing.status, 400);
    assert_eq!(missing.headers["content-type"], "application/problem+json", "it is handled as an HTTP request");
    client.call(CREATE, &[], message("x")).await.assert_refused(3, "KEY_MISSING");
    let answer = post(gateway.addr(), CREATE).json("{}").send().await;
    assert_eq!((answer.status, answer.header("content-type")), (400, Some("application/problem+json")));
    assert_eq!(upstream.requests(), 1);
}

#[tokio::test]
async fn the_log_says_the_status_of_a_call() {
    let (upstream, gateway, client) = start_shop(&create_route_config("")).await;
    upstream.on(CREATE, error_reply(5));
    client.call(CREATE, &[KEY], message("x")).await;
    let line = gateway.wait_for_log("answer stored").await;
    assert!(line.contains("grpc_status=\"NOT_FOUND\"") && line.contains("route=\"grpc shop.Orders/Create\""), "{line}");
}
