//! What must never be printed, at any level, whatever becomes of the request.

use testbed::{
    client::{RawClient, post},
    process::{GatewayProcess, ProcessSignal},
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};

use crate::support::{BIN, anonymous_pay};
use testbed::http1::WAIT_TIMEOUT;

const KEY: &str = "customer-4711-order-0815-planted-key";
const AUTHORIZATION: &str = "planted-credential-of-the-caller";
const BODY: &str = "planted-card-number-4111111111111111";
const QUERY: &str = "planted-in-the-query";
const REPLY: &str = "planted-in-the-answer";
const COOKIE: &str = "planted-session-cookie";

async fn assert_nothing_printed(upstream: TestUpstream, url: &str, level: &str, format: &str) {
    upstream.reply_by_default(
        UpstreamReply::status(201).json(&format!("{{\"secret\":\"{REPLY}\"}}")).header("X-Secret", REPLY),
    );
    upstream.on("/lost", UpstreamFault::ResetAfterRequest);
    let config = format!("log = {{ level = \"{level}\", format = \"{format}\" }}\n[policy]\nkey.required = true\n");
    let mut gateway = GatewayProcess::launch(BIN).config(config).upstream(url).start().await;
    let addr = gateway.addr();
    let body = format!("{{\"card\":\"{BODY}\"}}");
    let request = |path: &str, key: &str| {
        let request = post(addr, format!("{path}?token={QUERY}")).key(key).json(&body);
        let request = request.header("Authorization", format!("Bearer {AUTHORIZATION}"));
        request.header("Cookie", format!("session={COOKIE}"))
    };
    for (path, key, status) in [
        ("/pay", KEY, 201),
        ("/pay", KEY, 201),
        ("/other", KEY, 422),
        ("/lost", &format!("{KEY}-2"), 502),
        ("/lost", &format!("{KEY}-2"), 409),
        ("/pay", &format!("{KEY}, {KEY}"), 400),
        ("/pay", &KEY.repeat(9), 400),
        ("/a/../pay", KEY, 400),
    ] {
        let answer = request(path, key).send().await;
        assert_eq!(answer.status, status, "{path} {key}: {answer:?}");
        assert!(!answer.text().contains(KEY), "refusals mask the key too: {answer:?}");
    }
    let mut broken = RawClient::connect(addr).await;
    broken.send(format!("POST /pay HTTP/1.1\r\nhost: a\r\nbad header {BODY}\r\n\r\n")).await;
    let _ = broken.try_read_response().await;
    let mut broken = RawClient::connect(addr).await;
    broken
        .send(format!("POST /pay HTTP/1.1\r\nhost: a\r\nIdempotency-Key: {KEY}\r\ncontent-length: 99\r\n\r\n{BODY}"))
        .await;
    drop(broken);
    assert_eq!(anonymous_pay(addr, "last").send().await.status, 201);
    gateway.signal(ProcessSignal::Term);
    gateway.wait_exit(WAIT_TIMEOUT).await;
    let logs = gateway.logs();
    for secret in [KEY, AUTHORIZATION, BODY, QUERY, REPLY, COOKIE] {
        let shown: Vec<_> = logs.iter().filter(|line| line.contains(secret)).collect();
        assert!(shown.is_empty(), "{secret} at {level}: {shown:#?}");
    }
    assert!(logs.iter().any(|line| line.contains("cust****-key")), "the masked form is there: {logs:#?}");
}

#[tokio::test]
async fn no_secret_is_logged_as_text_at_debug() {
    let upstream = TestUpstream::start().await;
    let url = upstream.url();
    assert_nothing_printed(upstream, &url, "debug", "text").await;
}

#[tokio::test]
async fn no_secret_is_logged_as_json_at_trace() {
    let upstream = TestUpstream::start().await;
    let url = upstream.url();
    assert_nothing_printed(upstream, &url, "trace", "json").await;
}

#[tokio::test]
async fn no_secret_is_logged_on_the_way_to_an_http2_app() {
    for level in ["debug", "trace"] {
        let upstream = TestUpstream::start_h2c().await;
        let url = upstream.url().replace("http://", "h2c://");
        assert_nothing_printed(upstream, &url, level, "text").await;
    }
}
