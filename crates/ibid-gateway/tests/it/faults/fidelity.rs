//! A replay is the first answer, but for what belongs to one connection, one moment or one browser.

use testbed::{
    client::{delete, post},
    upstream::{TestUpstream, UpstreamReply},
};

use crate::support::{TestGateway, assert_ran, assert_replay, caller, pay, start_ietf_gateway};

const LONG_AGO: &str = "Thu, 01 Jan 2015 00:00:00 GMT";

#[tokio::test]
async fn a_replay_keeps_what_describes_the_answer() {
    let upstream = TestUpstream::start().await;
    let kept = [
        ("Link", "</a>; rel=\"next\""),
        ("Link", "</b>; rel=\"prev\""),
        ("Location", "/payments/1"),
        ("ETag", "\"v1\""),
        ("Vary", "Accept"),
        ("Vary", "Origin"),
        ("Cache-Control", "private, max-age=60"),
        ("X-Odd", "caf\u{e9}"),
    ];
    let reply = kept.iter().fold(UpstreamReply::usual(), |reply, (name, value)| reply.header(*name, *value));
    upstream.on("/pay", reply);
    let gateway = start_ietf_gateway(&upstream, "").await;
    let first = pay(&gateway, "k-1").send().await;
    let again = pay(&gateway, "k-1").send().await;
    assert_ran(&first);
    assert_replay(&again, &first);
    for (name, _) in kept {
        let values: Vec<_> = kept.iter().filter(|(other, _)| *other == name).map(|(_, value)| *value).collect();
        assert_eq!(first.headers.get_all(name), values, "{first:?}");
        assert_eq!(again.headers.get_all(name), values, "{again:?}");
    }
    assert_eq!(again.header("content-length"), Some(first.body.len().to_string().as_str()));
}

#[tokio::test]
async fn a_replay_drops_what_belonged_to_the_first_client() {
    let upstream = TestUpstream::start().await;
    let reply = UpstreamReply::usual()
        .set_cookie("session=1")
        .set_cookie("other=2")
        .header("Date", LONG_AGO)
        .header("Connection", "X-Hop")
        .header("X-Hop", "1")
        .header("Keep-Alive", "timeout=30")
        .header("Server-Timing", "db;dur=5")
        .header("Alt-Svc", "h3=\":443\"")
        .header("Age", "7");
    upstream.on("/pay", reply);
    let gateway = start_ietf_gateway(&upstream, "").await;
    let first = pay(&gateway, "k-1").send().await;
    assert_ran(&first);
    assert_eq!(first.headers.get_all("set-cookie"), ["session=1", "other=2"]);
    assert_eq!(first.headers.get_all("date"), [LONG_AGO]);
    assert_eq!(first.header("age"), Some("7"));
    let again = pay(&gateway, "k-1").send().await;
    assert_replay(&again, &first);
    for name in ["set-cookie", "connection", "x-hop", "keep-alive", "server-timing", "alt-svc", "age"] {
        assert!(!again.headers.contains(name), "{name}: {again:?}");
    }
    assert!(!first.headers.contains("x-hop") && !first.headers.contains("keep-alive"), "{first:?}");
    let dates = again.headers.get_all("date");
    assert!(dates.len() == 1 && dates[0] != LONG_AGO, "{again:?}");
}

#[tokio::test]
async fn a_binary_body_is_replayed_byte_by_byte() {
    let upstream = TestUpstream::start().await;
    let body: Vec<u8> = (0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    upstream.on("/pay", UpstreamReply::status(200).header("Content-Type", "image/png").body(body.clone()));
    let gateway = start_ietf_gateway(&upstream, "").await;
    let first = pay(&gateway, "k-1").send().await;
    assert_eq!(first.body, body);
    let again = pay(&gateway, "k-1").send().await;
    assert_replay(&again, &first);
    assert_eq!(again.header("content-length"), Some("100000"));
}

#[tokio::test]
async fn empty_answers_are_replayed_empty() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    for (path, status) in [("/204", 204), ("/200", 200), ("/303", 303), ("/404", 404)] {
        upstream.on(path, UpstreamReply::status(status).header("Location", "/x"));
        let request = caller(delete(gateway.addr(), path)).key(path);
        let first = request.send().await;
        assert_eq!((first.status, first.body.len()), (status, 0), "{first:?}");
        let again = request.send().await;
        assert_replay(&again, &first);
        assert_eq!(again.header("location"), Some("/x"));
        let length = (status != 204).then_some("0");
        assert_eq!(again.header("content-length"), length, "{again:?}");
        assert!(!again.headers.contains("transfer-encoding"), "{again:?}");
        assert_eq!(upstream.executions_at(path), 1);
    }
}

#[tokio::test]
async fn chunked_answers_are_replayed_with_a_length() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    upstream.on("/pay", UpstreamReply::chunks(["one", "two", "three"]));
    let first = pay(&gateway, "k-1").send().await;
    assert_eq!(first.text(), "onetwothree");
    let again = pay(&gateway, "k-1").send().await;
    assert_replay(&again, &first);
    assert_eq!(again.header("content-length"), Some("11"));
}

#[tokio::test]
async fn trailers_are_replayed() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    upstream.on("/pay", UpstreamReply::chunks(["body"]).header("Trailer", "X-Sum").trailer("X-Sum", "42"));
    let request = pay(&gateway, "k-1").header("TE", "trailers");
    let first = request.send().await;
    assert_eq!((first.text().as_str(), first.trailers.get("x-sum")), ("body", Some("42")), "{first:?}");
    let again = request.send().await;
    assert_replay(&again, &first);
    assert_eq!(again.trailers, first.trailers);
    // Without a word that it wants them, a client gets the answer without.
    let without = pay(&gateway, "k-1").send().await;
    assert_replay(&without, &first);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn many_headers_are_replayed() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    upstream.on("/pay", UpstreamReply::usual().many_headers(150));
    let first = pay(&gateway, "k-1").send().await;
    assert_ran(&first);
    let again = pay(&gateway, "k-1").send().await;
    assert_replay(&again, &first);
    for n in 1..=150 {
        let name = format!("x-filler-{n}");
        assert_eq!(first.header(&name), Some(n.to_string().as_str()), "{name}");
        assert_eq!(again.header(&name), Some(n.to_string().as_str()), "{name}");
    }
}

#[tokio::test]
async fn conditions_and_ranges_are_not_evaluated_on_a_replay() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    upstream.on("/pay", UpstreamReply::status(200).header("ETag", "\"v1\"").body("0123456789"));
    let plain = pay(&gateway, "k-1");
    let first = plain.send().await;
    let again = plain.header("Range", "bytes=0-3").header("If-Modified-Since", "Thu, 01 Jan 2099 00:00:00 GMT");
    assert_replay(&again.send().await, &first);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn client_errors_are_remembered_as_they_were() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    upstream.on_each("/pay", [UpstreamReply::status(422).json(r#"{"error":"card"}"#), UpstreamReply::usual()]);
    let first = pay(&gateway, "k-1").send().await;
    assert_eq!((first.status, first.text().as_str()), (422, r#"{"error":"card"}"#));
    assert_replay(&pay(&gateway, "k-1").send().await, &first);
    // The same content in another form of the same JSON is the same request.
    let same = caller(post(gateway.addr(), "/pay")).key("\"k-1\"").json("{ \"amount\" : 1 }");
    assert_replay(&same.send().await, &first);
    assert_eq!(upstream.executions(), 1);
}
