//! Answers too large to keep, and streams of events: they flow while they are recorded.

use sha2::{Digest as _, Sha256};
use testbed::{
    client::{RawClient, TestResponse, post},
    upstream::{TestUpstream, UpstreamFault, UpstreamReply, filler},
};

use crate::support::{
    ScriptedUpstream, TestGateway, assert_refused, assert_replay, caller, find, pay, policy, send_until_settled,
    start_gateway, start_ietf_gateway, until_some,
};

const SMALL_MAX_RESPONSE: &str = "max_response = \"64KiB\"";

/// The answer is the digest of this body, under the status it had.
#[track_caller]
fn assert_digest(answer: &TestResponse, status: u16, body: &[u8]) {
    let hex: String = Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(answer.text(), format!(r#"{{"length":{},"sha256":"{hex}"}}"#, body.len()));
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.header("idempotency-body"), Some("digest"), "{answer:?}");
    assert_eq!(answer.header("idempotent-replayed"), Some("true"), "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"), "{answer:?}");
}

/// Reads until this many bytes of a body without chunks have come; the head is cut off.
async fn read_body(raw: &mut RawClient, at_least: usize) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let head = find(&all, b"\r\n\r\n").map(|end| end + 4);
        if let Some(head) = head.filter(|head| all.len() >= head + at_least) {
            return all.split_off(head);
        }
        let more = raw.read_some().await;
        assert!(!more.is_empty(), "closed after {} bytes", all.len());
        all.extend(more);
    }
}

#[tokio::test]
async fn a_large_answer_arrives_whole_and_is_replayed_as_its_digest() {
    let upstream = TestUpstream::start().await;
    let body = filler(300 << 10);
    let gateway = start_ietf_gateway(&upstream, SMALL_MAX_RESPONSE).await;
    let replies = [
        ("/length", UpstreamReply::status(201).body(body.clone())),
        ("/chunks", UpstreamReply::chunks(body.chunks(10_000).map(|chunk| body.slice_ref(chunk)))),
    ];
    for (path, reply) in replies {
        upstream.on(path, reply.header("Location", "/payments/1").header("ETag", "\"1\""));
        let request = caller(post(gateway.addr(), path)).key(path).json("{}");
        let first = request.send().await;
        assert_eq!(first.body, body, "{path}");
        assert_eq!(first.header("location"), Some("/payments/1"));
        for _ in 0..2 {
            let again = request.send().await;
            assert_digest(&again, first.status, &body);
            assert_eq!(again.header("location"), Some("/payments/1"));
            assert!(!again.headers.contains("etag"), "it named another body: {again:?}");
        }
        assert_eq!(upstream.executions_at(path), 1);
    }
}

#[tokio::test]
async fn an_answer_at_the_limit_is_kept_and_one_byte_more_is_not() {
    let TestGateway { upstream, gateway } = TestGateway::ietf(SMALL_MAX_RESPONSE).await;
    let (fits, over) = (filler(64 << 10), filler((64 << 10) + 1));
    upstream.on("/fits", UpstreamReply::status(201).body(fits.clone()));
    upstream.on("/over", UpstreamReply::status(201).body(over.clone()));
    let request = |path: &str| caller(post(gateway.addr(), path)).key(path).json("{}");
    let first = request("/fits").send().await;
    assert_replay(&request("/fits").send().await, &first);
    assert_eq!(request("/over").send().await.body, over);
    assert_digest(&request("/over").send().await, 201, &over);
}

#[tokio::test]
async fn a_large_answer_streams_before_the_upstream_has_finished() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(&policy(SMALL_MAX_RESPONSE)).await;
    let body = filler(300 << 10);
    let request = pay(&gateway, "k-1");
    let mut client = request.start().await;
    let mut app = upstream.request().await;
    app.write(format!("HTTP/1.1 201 Created\r\ncontent-length: {}\r\n\r\n", body.len())).await;
    app.write(&body[..200 << 10]).await;
    let begun = read_body(&mut client, 100 << 10).await;
    assert_eq!(begun, body[..begun.len()], "the beginning, while the end does not exist yet");
    assert_refused(&request.send().await, 409, "in-progress");
    app.write(&body[200 << 10..]).await;
    let mut all = begun;
    while all.len() < body.len() {
        let more = client.read_some().await;
        assert!(!more.is_empty(), "closed after {} bytes", all.len());
        all.extend(more);
    }
    assert_eq!(all, body);
    // Record first: whoever has seen the last byte finds the record.
    assert_digest(&request.send().await, 201, &body);
}

#[tokio::test]
async fn a_client_that_stalls_is_dropped_and_the_answer_recorded() {
    let upstream = TestUpstream::start().await;
    let body = vec![b'x'; 24 << 20];
    upstream.on("/pay", UpstreamReply::status(201).body(body.clone()));
    let gateway = start_ietf_gateway(&upstream, "max_response = \"64KiB\"\ntimeout = \"400ms\"").await;
    let request = pay(&gateway, "k-1");
    let mut stalled = request.start().await;
    upstream.wait_for(1).await;
    assert_digest(&send_until_settled(&request).await, 201, &body);
    assert_eq!(upstream.executions(), 1);
    let seen = stalled.try_read_response().await;
    assert!(seen.as_ref().is_err_and(|broken| broken.is_closed()), "the stalled client must not see an end");
}

#[tokio::test]
async fn a_client_that_leaves_a_large_answer_does_not_stop_its_recording() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(&policy(SMALL_MAX_RESPONSE)).await;
    let body = filler(300 << 10);
    for (key, leave) in [("close", (|raw| drop(raw)) as fn(RawClient)), ("reset", RawClient::abort)] {
        let request = pay(&gateway, key);
        let mut client = request.start().await;
        let mut app = upstream.request().await;
        app.write(format!("HTTP/1.1 201 Created\r\ncontent-length: {}\r\n\r\n", body.len())).await;
        app.write(&body[..200 << 10]).await;
        read_body(&mut client, 100 << 10).await;
        leave(client);
        assert_refused(&request.send().await, 409, "in-progress");
        app.write(&body[200 << 10..]).await;
        assert_digest(&send_until_settled(&request).await, 201, &body);
        drop(app);
    }
}

#[tokio::test]
async fn a_large_answer_that_breaks_off_is_seen_to_and_its_outcome_unknown() {
    let TestGateway { upstream, gateway } = TestGateway::ietf(SMALL_MAX_RESPONSE).await;
    upstream.on("/pay", UpstreamFault::Truncated { content_length: 300 << 10, sent: 200 << 10 });
    let request = pay(&gateway, "k-1");
    let broken = request.try_send().await.expect_err("not a whole answer");
    assert!(broken.is_closed(), "{broken}");
    assert_refused(&send_until_settled(&request).await, 409, "outcome-unknown");
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_large_chunked_answer_that_breaks_off_has_no_end() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(&policy(SMALL_MAX_RESPONSE)).await;
    let request = pay(&gateway, "k-1");
    let mut client = request.start().await;
    let mut app = upstream.request().await;
    app.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
    let piece = "x".repeat(40 << 10);
    for _ in 0..4 {
        app.chunk(&piece).await;
    }
    drop(app);
    let broken = client.try_read_response().await.expect_err("not a whole answer");
    assert!(broken.is_closed(), "{broken}");
    assert_refused(&send_until_settled(&request).await, 409, "outcome-unknown");
}

#[tokio::test]
async fn events_arrive_as_they_are_sent_and_are_replayed_whole() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(&policy("")).await;
    let request = pay(&gateway, "k-1");
    let mut client = request.start().await;
    let mut app = upstream.request().await;
    app.write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n").await;
    app.chunk("data: 1\n\n").await;
    app.chunk("data: 2\n\n").await;
    client.read_until("data: 1\n\n").await;
    app.chunk("data: 3\n\n").await;
    app.write("0\r\n\r\n").await;
    client.read_until("0\r\n\r\n").await;
    let again = request.send().await;
    assert_eq!((again.status, again.text().as_str()), (200, "data: 1\n\ndata: 2\n\ndata: 3\n\n"), "{again:?}");
    assert_eq!(again.header("content-type"), Some("text/event-stream"));
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
}

/// A record that the store refuses for ever must not hold up the results behind it.
#[tokio::test]
async fn an_answer_that_is_too_large_for_the_embedded_store_is_remembered_as_its_digest() {
    let upstream = TestUpstream::start().await;
    let body = filler(3 << 20);
    upstream.on("/pay", UpstreamReply::status(201).body(body.clone()));
    upstream.on("/other", UpstreamReply::usual());
    // Compressed, this one would fit.
    let config = "store.url = \"embedded:records?max_size=16MiB\"\nstore.compress = false\n";
    let gateway = start_gateway(&format!("{config}{}", policy("max_response = \"4MiB\"")), &upstream).await;
    let warning =
        "max_response (4MiB) is more than the store can hold (1MiB); larger answers are remembered as digests";
    gateway.wait_for_log(warning).await;
    let request = pay(&gateway, "k-1");
    let first = request.send().await;
    assert!(first.status == 201 && first.body == body, "the first client gets all of it");
    assert_eq!(first.header("idempotency-stored"), Some("pending"));
    gateway.wait_for_log("the store refused the whole answer").await;
    // Until its file is gone, the journal answers, with all of it.
    let replay = until_some("the journal to drain", || async {
        let replay = send_until_settled(&request).await;
        replay.headers.contains("idempotency-body").then_some(replay)
    })
    .await;
    assert_digest(&replay, 201, &body);
    let other = caller(post(gateway.addr(), "/other")).key("k-2").json("{}");
    let answer = other.send().await;
    assert_eq!((answer.status, answer.header("idempotency-stored")), (201, None), "{answer:?}");
    assert_replay(&other.send().await, &answer);
    assert_eq!(upstream.executions(), 2);
}
