//! Browsers on other origins.

use testbed::{
    client::{TestRequest, TestResponse, post, request},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};

use crate::support::{TestGateway, anonymous_pay, start_gateway};

const SHOP_ORIGIN: &str = "https://shop.example.com";
const TILL_ORIGIN: &str = "https://till.example.com";
const FOREIGN_ORIGINS: [&str; 4] =
    ["https://evil.example.com", "http://shop.example.com", "https://shop.example.com.evil.org", "null"];
const CORS_HEADERS: [&str; 4] = [
    "access-control-allow-origin",
    "access-control-expose-headers",
    "access-control-allow-headers",
    "access-control-allow-credentials",
];

async fn start_cors_gateway(upstream: &TestUpstream) -> GatewayProcess {
    let config = format!(
        "cors = {{ origins = [\"{SHOP_ORIGIN}\", \"{TILL_ORIGIN}\"] }}\n[policy]\npreset = \"off\"\n\
         [[route]]\nmatch = \"POST /pay\"\nkey.required = true\n"
    );
    start_gateway(&config, upstream).await
}

fn preflight(gateway: &GatewayProcess, path: &str, origin: &str) -> TestRequest {
    let asks = request("OPTIONS", gateway.addr(), path).header("Origin", origin);
    let asks = asks.header("Access-Control-Request-Method", "POST");
    asks.header("Access-Control-Request-Headers", "content-type,idempotency-key")
}

fn list_contains(answer: &TestResponse, list: &str, item: &str) -> bool {
    let lines = answer.headers.get_all(list);
    lines.iter().flat_map(|line| line.split(',')).any(|found| found.trim().eq_ignore_ascii_case(item))
}

/// The answer can be read by scripts of this origin, with all that ibid says in headers.
fn assert_readable(answer: &TestResponse, origin: &str) {
    assert_eq!(answer.headers.get_all("access-control-allow-origin"), [origin], "{answer:?}");
    assert_eq!(answer.headers.get_all("access-control-allow-credentials"), ["true"], "{answer:?}");
    assert!(list_contains(answer, "vary", "origin"), "{answer:?}");
    for name in ["idempotent-replayed", "idempotency-stored", "retry-after"] {
        assert!(list_contains(answer, "access-control-expose-headers", name), "{name}: {answer:?}");
    }
}

#[tokio::test]
async fn a_preflight_is_allowed_where_the_app_knows_none() {
    let upstream = TestUpstream::start().await;
    let gateway = start_cors_gateway(&upstream).await;
    for status in [404, 405, 501] {
        upstream.on("/pay", UpstreamReply::status(status).body("what?").header("allow", "POST"));
        let answer = preflight(&gateway, "/pay", SHOP_ORIGIN).send().await;
        assert!(matches!(answer.status, 200 | 204), "{answer:?}");
        assert_eq!(answer.header("access-control-allow-origin"), Some(SHOP_ORIGIN), "{answer:?}");
        assert!(list_contains(&answer, "access-control-allow-methods", "POST"), "{answer:?}");
        assert!(list_contains(&answer, "access-control-allow-headers", "idempotency-key"), "{answer:?}");
        assert!(list_contains(&answer, "access-control-allow-headers", "content-type"), "{answer:?}");
        assert!(list_contains(&answer, "vary", "origin"), "{answer:?}");
        assert!(answer.body.is_empty(), "{answer:?}");
    }
    assert_eq!(upstream.executions(), 0);
}

#[tokio::test]
async fn the_apps_own_answer_to_a_preflight_is_kept_and_completed() {
    let upstream = TestUpstream::start().await;
    let own = UpstreamReply::status(200)
        .header("access-control-allow-origin", SHOP_ORIGIN)
        .header("access-control-max-age", "7");
    let own =
        own.header("access-control-allow-headers", "Content-Type, X-Own").header("access-control-allow-methods", "PUT");
    upstream.on("/pay", own.header("access-control-allow-credentials", "true").body("own"));
    let gateway = start_cors_gateway(&upstream).await;
    let answer = preflight(&gateway, "/pay", SHOP_ORIGIN).send().await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "own"), "{answer:?}");
    for (name, value) in [
        ("access-control-allow-origin", SHOP_ORIGIN),
        ("access-control-max-age", "7"),
        ("access-control-allow-methods", "PUT"),
        ("access-control-allow-credentials", "true"),
    ] {
        assert_eq!(answer.headers.get_all(name), [value], "{answer:?}");
    }
    for name in ["content-type", "x-own", "idempotency-key"] {
        assert!(list_contains(&answer, "access-control-allow-headers", name), "{name}: {answer:?}");
    }
}

#[tokio::test]
async fn first_answers_replays_and_refusals_are_readable() {
    let upstream = TestUpstream::start().await;
    let gateway = start_cors_gateway(&upstream).await;
    let keyless = post(gateway.addr(), "/pay").header("Origin", SHOP_ORIGIN).send().await;
    assert_eq!(keyless.status, 400);
    assert_readable(&keyless, SHOP_ORIGIN);
    let first = anonymous_pay(gateway.addr(), "k-1").header("Origin", SHOP_ORIGIN).send().await;
    assert_eq!(first.status, 201);
    assert_readable(&first, SHOP_ORIGIN);
    let again = anonymous_pay(gateway.addr(), "k-1").header("Origin", SHOP_ORIGIN).send().await;
    assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body));
    assert_readable(&again, SHOP_ORIGIN);
    let reused = post(gateway.addr(), "/pay").key("k-1").json("{}").header("Origin", SHOP_ORIGIN).send().await;
    assert_eq!(reused.status, 422);
    assert_readable(&reused, SHOP_ORIGIN);
    upstream.on("/pay", UpstreamReply::status(500));
    let released = anonymous_pay(gateway.addr(), "k-2").header("Origin", SHOP_ORIGIN).send().await;
    assert_eq!((released.status, released.header("idempotency-stored")), (500, Some("false")));
    assert_readable(&released, SHOP_ORIGIN);
    upstream.stop().await;
    let lost = anonymous_pay(gateway.addr(), "k-3").header("Origin", SHOP_ORIGIN).send().await;
    assert_eq!(lost.status, 502);
    assert_readable(&lost, SHOP_ORIGIN);
}

#[tokio::test]
async fn a_replay_is_made_readable_for_who_asks_now() {
    let upstream = TestUpstream::start().await;
    // The app answers for the first origin only, and exposes a header of its own.
    let reply =
        UpstreamReply::usual().header("access-control-allow-origin", SHOP_ORIGIN).header("vary", "Accept-Language");
    upstream.on("/pay", reply.header("access-control-allow-credentials", "true"));
    let gateway = start_cors_gateway(&upstream).await;
    assert_readable(&anonymous_pay(gateway.addr(), "k-1").header("Origin", SHOP_ORIGIN).send().await, SHOP_ORIGIN);
    for origin in [TILL_ORIGIN, SHOP_ORIGIN] {
        let replay = anonymous_pay(gateway.addr(), "k-1").header("Origin", origin).send().await;
        assert_eq!(replay.header("idempotent-replayed"), Some("true"));
        assert_readable(&replay, origin);
        assert!(list_contains(&replay, "vary", "accept-language"), "{replay:?}");
        assert_eq!(replay.header("access-control-allow-credentials"), Some("true"), "{replay:?}");
    }
    assert_eq!(upstream.executions(), 1);
}

/// An app that answers for origins itself decides about cookies.
#[tokio::test]
async fn what_the_app_says_of_credentials_stays() {
    let upstream = TestUpstream::start().await;
    upstream.on("/pay", UpstreamReply::usual().header("access-control-allow-origin", SHOP_ORIGIN));
    let gateway = start_cors_gateway(&upstream).await;
    for _ in 0..2 {
        let answer = anonymous_pay(gateway.addr(), "k-1").header("Origin", SHOP_ORIGIN).send().await;
        assert_eq!(answer.header("access-control-allow-origin"), Some(SHOP_ORIGIN), "{answer:?}");
        assert_eq!(answer.header("access-control-allow-credentials"), None, "{answer:?}");
    }
}

#[tokio::test]
async fn other_origins_and_none_get_nothing_of_ours() {
    let upstream = TestUpstream::start().await;
    let gateway = start_cors_gateway(&upstream).await;
    upstream.on("/plain", UpstreamReply::status(405));
    for (n, origin) in FOREIGN_ORIGINS.into_iter().enumerate() {
        let key = format!("k-{n}");
        let mut answers = vec![post(gateway.addr(), "/pay").header("Origin", origin).send().await];
        for _ in 0..2 {
            answers.push(anonymous_pay(gateway.addr(), &key).header("Origin", origin).send().await);
        }
        // Recorded for somebody who may read it, asked for by somebody who may not.
        anonymous_pay(gateway.addr(), &format!("{key}-shop")).header("Origin", SHOP_ORIGIN).send().await;
        answers.push(anonymous_pay(gateway.addr(), &format!("{key}-shop")).header("Origin", origin).send().await);
        answers.push(anonymous_pay(gateway.addr(), &format!("{key}-shop")).send().await);
        let asked = preflight(&gateway, "/pay", origin).send().await;
        assert_eq!(asked.status, 200, "the app's own: {asked:?}");
        answers.push(asked);
        for answer in answers {
            assert!(CORS_HEADERS.iter().all(|name| !answer.headers.contains(name)), "{origin}: {answer:?}");
        }
    }
}

#[tokio::test]
async fn a_preflight_of_what_is_not_covered_is_the_apps_own_affair() {
    let upstream = TestUpstream::start().await;
    upstream.reply_by_default(UpstreamReply::status(405));
    let gateway = start_cors_gateway(&upstream).await;
    let other = preflight(&gateway, "/admin/users", SHOP_ORIGIN).send().await;
    assert_eq!(other.status, 405, "{other:?}");
    assert!(CORS_HEADERS.iter().all(|name| !other.headers.contains(name)), "{other:?}");
    let options = request("OPTIONS", gateway.addr(), "/pay").header("Origin", SHOP_ORIGIN).send().await;
    assert_eq!(options.status, 405, "an OPTIONS that is no preflight: {options:?}");
}

#[tokio::test]
async fn without_the_setting_nothing_is_added() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start("").await;
    for _ in 0..2 {
        let answer = anonymous_pay(gateway.addr(), "k-1").header("Origin", SHOP_ORIGIN).send().await;
        assert!(CORS_HEADERS.iter().all(|name| !answer.headers.contains(name)), "{answer:?}");
    }
    let answer = preflight(&gateway, "/pay", SHOP_ORIGIN).send().await;
    assert!(CORS_HEADERS.iter().all(|name| !answer.headers.contains(name)), "{answer:?}");
}
