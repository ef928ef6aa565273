//! No answer crosses from one caller to another.

use testbed::{
    TestRedis,
    client::{TestRequest, post},
    process::{self, GatewayProcess},
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};

use crate::support::{TestGateway, assert_ran, assert_refused, assert_replay, policy, start_gateway};

fn pay_as(gateway: &GatewayProcess, name: &str, value: &str) -> TestRequest {
    post(gateway.addr(), "/pay").key("k-1").json(r#"{"amount":1}"#).header(name, value)
}

#[tokio::test]
async fn another_callers_answer_is_never_replayed() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let callers = [
        pay_as(&gateway, "Authorization", "Bearer one"),
        pay_as(&gateway, "Authorization", "Bearer two"),
        pay_as(&gateway, "X-Api-Key", "three"),
        pay_as(&gateway, "X-Api-Key", "four").header("Authorization", "Bearer one"),
        pay_as(&gateway, "X-Api-Key", "five").header("Authorization", "Bearer one"),
        pay_as(&gateway, "Api-Key", "three"),
        pay_as(&gateway, "X-Auth-Token", "three"),
        pay_as(&gateway, "X-Auth-Token", "four"),
        pay_as(&gateway, "X-Other", "anonymous"),
        pay_as(&gateway, "Authorization", "Bearer one").header("Host", "other.example"),
    ];
    let mut firsts = Vec::new();
    for request in &callers {
        let first = request.send().await;
        assert_ran(&first);
        firsts.push(first);
    }
    for (request, first) in callers.iter().zip(&firsts) {
        assert_replay(&request.send().await, first);
    }
    assert_eq!(upstream.executions(), callers.len());
}

#[tokio::test]
async fn other_headers_can_be_the_credentials() {
    let upstream = TestUpstream::start().await;
    let config = format!("credentials = [\"X-Session-Token\"]\n{}", policy(""));
    let gateway = start_gateway(&config, &upstream).await;
    let first = pay_as(&gateway, "X-Session-Token", "one").send().await;
    assert_ran(&first);
    assert_ran(&pay_as(&gateway, "X-Session-Token", "two").send().await);
    let signed = pay_as(&gateway, "X-Session-Token", "one").header("Authorization", "Digest nc=1");
    assert_replay(&signed.send().await, &first);
    let twin = pay_as(&gateway, "X-Session-Token", "one").header("X_Session_Token", "two");
    assert_refused(&twin.send().await, 400, "request-ambiguous");
    assert_eq!(upstream.executions(), 2);
}

/// Sends a payment with curl, as somebody with these options; the status and the body of the answer.
async fn pay_with_curl(gateway: &GatewayProcess, options: &[&str]) -> (String, String) {
    let url = format!("http://{}/pay", gateway.addr());
    let mut args = vec!["-s", "-w", "\n%{http_code}", "-u", "user:password", "-H", "Idempotency-Key: k-1"];
    args.extend(["-H", "Content-Type: application/json", "-d", r#"{"amount":1}"#]);
    args.extend(options);
    args.push(&url);
    let output = process::run("curl", &args, &[]).await;
    let text = String::from_utf8(output.stdout).expect("text");
    let (body, status) = text.rsplit_once('\n').expect("a status");
    (status.to_owned(), body.to_owned())
}

/// curl signs each request anew: SigV4 with the time in it, Digest with a number that only it knows.
#[tokio::test]
async fn a_scheme_that_signs_each_request_is_refused_by_name_of_the_setting() {
    const SIGV4: [&str; 2] = ["--aws-sigv4", "aws:amz:us-east-1:execute-api"];
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    for _ in 0..2 {
        let (status, body) = pay_with_curl(&gateway, &SIGV4).await;
        assert_eq!(status, "400", "{body}");
        assert!(body.contains("#scope-missing") && body.contains("AWS4-HMAC-SHA256"), "{body}");
        assert!(body.contains("credential_schemes"), "{body}");
    }
    assert_eq!(upstream.requests(), 0);
    upstream.on(
        "/pay",
        UpstreamReply::status(401).header("www-authenticate", r#"Digest realm="a", nonce="n", qop="auth""#),
    );
    let (status, body) = pay_with_curl(&gateway, &["--digest"]).await;
    assert_eq!(status, "400", "{body}");
    assert!(body.contains("#scope-missing") && body.contains("Digest"), "{body}");
    assert_eq!(upstream.requests(), 1, "only the request without an answer to the challenge");
    upstream.clear_rules();

    assert_eq!(pay_with_curl(&gateway, &["--basic"]).await.0, "201");
    let config = format!("credential_schemes = [\"AWS4-HMAC-SHA256\"]\n{}", policy(""));
    let gateway = start_gateway(&config, &upstream).await;
    assert_eq!(pay_with_curl(&gateway, &SIGV4).await.0, "201");
}

#[tokio::test]
async fn two_gateways_on_two_ports_before_one_app_are_one_place() {
    let (server, upstream) = (TestRedis::start(), TestUpstream::start().await);
    let config = format!("{}[store]\nurl = {:?}\n", policy(""), server.url());
    let one = start_gateway(&config, &upstream).await;
    let other = start_gateway(&config, &upstream).await;
    assert_ne!(one.addr().port(), other.addr().port());
    // Each is asked under its own address and port, as Host says.
    let first = pay_as(&one, "Authorization", "Bearer one").send().await;
    assert_ran(&first);
    assert_replay(&pay_as(&other, "Authorization", "Bearer one").send().await, &first);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn another_caller_neither_waits_nor_learns_of_the_first() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let gate = ReplyGate::new();
    upstream.on_each("/pay", [UpstreamReply::usual().gated(&gate), UpstreamReply::usual()]);
    let mut first = pay_as(&gateway, "Authorization", "Bearer one").start().await;
    gate.arrived(1).await;
    assert_ran(&pay_as(&gateway, "Authorization", "Bearer two").send().await);
    let other = post(gateway.addr(), "/pay").key("k-1").json("[]").header("Authorization", "Bearer three");
    assert_ran(&other.send().await);
    gate.open();
    assert_ran(&first.read_response().await);
}

#[tokio::test]
async fn a_caller_known_by_cookies_only_is_refused_by_name_of_the_setting() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let answer = pay_as(&gateway, "Cookie", "session=1").send().await;
    assert_refused(&answer, 400, "scope-missing");
    assert!(answer.json()["detail"].as_str().is_some_and(|detail| detail.contains("cookie:session")), "{answer:?}");
    assert_eq!(upstream.requests(), 0);
    // Beside a credential, cookies do not matter.
    let request = pay_as(&gateway, "Authorization", "Bearer one");
    let first = request.clone().header("Cookie", "session=1").send().await;
    assert_ran(&first);
    assert_replay(&request.header("Cookie", "session=2").send().await, &first);
}

#[tokio::test]
async fn with_the_setting_the_session_cookie_is_the_caller() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("scope = [\"host\", \"cookie:session\"]").await;
    let first = pay_as(&gateway, "Cookie", "theme=dark; session=1").send().await;
    assert_ran(&first);
    assert_replay(&pay_as(&gateway, "Cookie", "session=1; theme=light").send().await, &first);
    assert_ran(&pay_as(&gateway, "Cookie", "session=2").send().await);
    assert_refused(&pay_as(&gateway, "Cookie", "theme=dark").send().await, 400, "scope-missing");
    assert_refused(&pay_as(&gateway, "Cookie", "session=").send().await, 400, "scope-missing");
    // Apps differ in which of two they take.
    assert_refused(&pay_as(&gateway, "Cookie", "session=1; session=2").send().await, 400, "request-ambiguous");
    let lines = pay_as(&gateway, "Cookie", "session=1").header("Cookie", "session=2");
    assert_refused(&lines.send().await, 400, "request-ambiguous");
    assert_eq!(upstream.executions(), 2);
}
