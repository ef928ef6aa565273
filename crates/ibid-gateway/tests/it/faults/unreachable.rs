//! Nothing of the request was written: released, and the retry runs.

use testbed::{
    client::RawClient,
    process::{GatewayProcess, ProcessSignal},
    upstream::{TestUpstream, UpstreamFault, UpstreamReply, filler},
};

use crate::support::{
    BIN, TestGateway, assert_ran, assert_refused, assert_replay, caller, pay, policy, send_until_settled,
    start_ietf_gateway, until,
};

#[tokio::test]
async fn a_refused_connection_is_released_and_the_retry_runs() {
    let upstream = TestUpstream::start_refusing().await;
    let gateway = start_ietf_gateway(&upstream, "").await;
    let request = pay(&gateway, "k-1");
    assert_refused(&request.send().await, 502, "upstream-unreachable");
    upstream.restart().await;
    let first = request.send().await;
    assert_ran(&first);
    assert_eq!(upstream.last().attempt(), Some(2));
    assert_replay(&request.send().await, &first);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn an_upstream_that_goes_away_while_connections_are_idle_is_unreachable() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    assert_ran(&pay(&gateway, "k-0").send().await);
    upstream.stop().await;
    let request = pay(&gateway, "k-1");
    assert_refused(&request.send().await, 502, "upstream-unreachable");
    upstream.restart().await;
    assert_ran(&request.send().await);
    assert_eq!(upstream.executions_with_key("k-1"), 1);
    assert_eq!(upstream.last().attempt(), Some(2));
}

#[tokio::test]
async fn a_name_without_an_address_is_released_and_the_retry_runs() {
    let upstream = TestUpstream::start().await;
    let config = |url: &str| format!("upstream = \"{url}\"\n{}", policy(""));
    let mut gateway = GatewayProcess::launch(BIN).config(config("http://nobody.invalid:80")).start().await;
    let request = pay(&gateway, "k-1");
    assert_refused(&request.send().await, 502, "upstream-unreachable");
    gateway.rewrite_config(&config(&upstream.url()));
    gateway.signal(ProcessSignal::Hup);
    gateway.wait_for_log("configuration taken up").await;
    let first = request.send().await;
    assert_ran(&first);
    assert_eq!(upstream.last().attempt(), Some(2));
    assert_replay(&request.send().await, &first);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn an_idle_connection_that_can_be_seen_closed_is_never_written_to() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    upstream.on("/pay", UpstreamFault::CloseIdle);
    let mut raw = RawClient::connect(gateway.addr()).await;
    for n in 0..100 {
        let key = format!("k-{n}");
        assert_ran(&pay(&gateway, &key).send_on(&mut raw).await);
        assert_eq!(upstream.executions_with_key(&key), 1);
        // From here on the gateway's kernel knows of the close.
        until("the upstream to close", || upstream.connections_open() == 0).await;
    }
    assert_eq!(upstream.executions(), 100);
    println!("CloseIdle, seen: 100 requests, 100 executions, 0 lost");
}

#[tokio::test]
async fn an_idle_connection_that_closes_while_it_is_written_to_runs_nothing_twice() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    upstream.on("/pay", UpstreamFault::CloseIdle);
    let mut raw = RawClient::connect(gateway.addr()).await;
    let mut lost = 0;
    for n in 0..100 {
        let key = format!("k-{n}");
        let answer = pay(&gateway, &key).send_on(&mut raw).await;
        if answer.status == 201 {
            assert_eq!(upstream.executions_with_key(&key), 1);
            continue;
        }
        lost += 1;
        assert_refused(&answer, 502, "upstream-lost");
        assert_eq!(upstream.executions_with_key(&key), 0);
        assert_refused(&pay(&gateway, &key).send_on(&mut raw).await, 409, "outcome-unknown");
    }
    assert_eq!(upstream.executions(), 100 - lost);
    println!("CloseIdle, raced: 100 requests, {} executions, {lost} lost", upstream.executions());
}

#[tokio::test]
async fn a_reused_connection_that_closes_at_the_request_costs_a_retry_and_no_second_run() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("on_unknown = \"retry\"\nlease = \"100ms\"").await;
    upstream.on("/pay", UpstreamFault::CloseReused);
    let mut raw = RawClient::connect(gateway.addr()).await;
    let mut lost = 0;
    for n in 0..100 {
        let key = format!("k-{n}");
        let mut answer = pay(&gateway, &key).send_on(&mut raw).await;
        if answer.status != 201 {
            lost += 1;
            assert_refused(&answer, 502, "upstream-lost");
            assert_eq!(upstream.executions_with_key(&key), 0);
            answer = send_until_settled(&pay(&gateway, &key)).await;
        }
        assert_ran(&answer);
        assert_eq!(upstream.executions_with_key(&key), 1);
    }
    assert_eq!(upstream.executions(), 100);
    println!("CloseReused: 100 keys, 100 executions, {lost} answers lost on the way");
}

#[tokio::test]
async fn an_early_answer_is_delivered_and_remembered_while_the_body_is_still_being_sent() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let body = filler(900 << 10);
    // One reads the rest of the request, one resets the connection with the body unread.
    for (path, reply) in
        [("/drains", UpstreamReply::early(413)), ("/resets", UpstreamFault::EarlyReplyThenClose.into())]
    {
        upstream.on(path, reply);
        for n in 0..30 {
            let key = format!("{path}-{n}");
            let request = caller(testbed::client::post(gateway.addr(), path)).key(&key).body(body.clone());
            let first = request.send().await;
            assert_eq!(first.status, 413, "{path} {n}: {first:?}");
            assert!(!first.text().contains("well-known"), "not the upstream's own: {first:?}");
            let arrived = upstream.requests();
            assert_replay(&request.send().await, &first);
            assert_eq!(upstream.requests(), arrived, "{path} {n}");
        }
    }
}
