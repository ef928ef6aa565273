//! Browsers on other origins.

use ibid_testkit::{
    client::{Request, Response, post, request},
    process::Gateway,
    upstream::{Reply, Upstream},
};

use super::common::{gateway, pay};

const SHOP: &str = "https://shop.example.com";
const TILL: &str = "https://till.example.com";
const OTHERS: [&str; 4] =
    ["https://evil.example.com", "http://shop.example.com", "https://shop.example.com.evil.org", "null"];
const OURS: [&str; 4] = [
    "access-control-allow-origin",
    "access-control-expose-headers",
    "access-control-allow-headers",
    "access-control-allow-credentials",
];

async fn shop(upstream: &Upstream) -> Gateway {
    let config = format!(
        "cors = {{ origins = [\"{SHOP}\", \"{TILL}\"] }}\n[policy]\npreset = \"off\"\n\
         [[route]]\nmatch = \"POST /pay\"\nkey.required = true\n"
    );
    gateway(&config, upstream).await
}

fn preflight(gateway: &Gateway, path: &str, origin: &str) -> Request {
    let asks = request("OPTIONS", gateway.addr(), path).header("Origin", origin);
    let asks = asks.header("Access-Control-Request-Method", "POST");
    asks.header("Access-Control-Request-Headers", "content-type,idempotency-key")
}

fn has(answer: &Response, list: &str, item: &str) -> bool {
    let lines = answer.headers.get_all(list);
    lines.iter().flat_map(|line| line.split(',')).any(|found| found.trim().eq_ignore_ascii_case(item))
}

/// The answer can be read by scripts of this origin, with all that ibid says in headers.
fn assert_readable(answer: &Response, origin: &str) {
    assert_eq!(answer.headers.get_all("access-control-allow-origin"), [origin], "{answer:?}");
    assert_eq!(answer.headers.get_all("access-control-allow-credentials"), ["true"], "{answer:?}");
    assert!(has(answer, "vary", "origin"), "{answer:?}");
    for name in ["idempotent-replayed", "idempotency-stored", "retry-after"] {
        assert!(has(answer, "access-control-expose-headers", name), "{name}: {answer:?}");
    }
}

#[tokio::test]
async fn a_preflight_is_allowed_where_the_app_knows_none() {
    let upstream = Upstream::start().await;
    let gateway = shop(&upstream).await;
    for status in [404, 405, 501] {
        upstream.on("/pay", Reply::status(status).body("what?").header("allow", "POST"));
        let answer = preflight(&gateway, "/pay", SHOP).send().await;
        assert!(matches!(answer.status, 200 | 204), "{answer:?}");
        assert_eq!(answer.header("access-control-allow-origin"), Some(SHOP), "{answer:?}");
        assert!(has(&answer, "access-control-allow-methods", "POST"), "{answer:?}");
        assert!(has(&answer, "access-control-allow-headers", "idempotency-key"), "{answer:?}");
        assert!(has(&answer, "access-control-allow-headers", "content-type"), "{answer:?}");
        assert!(has(&answer, "vary", "origin"), "{answer:?}");
        assert!(answer.body.is_empty(), "{answer:?}");
    }
    assert_eq!(upstream.executions(), 0);
}

#[tokio::test]
async fn the_apps_own_answer_to_a_preflight_is_kept_and_completed() {
    let upstream = Upstream::start().await;
    let own = Reply::status(200).header("access-control-allow-origin", SHOP).header("access-control-max-age", "7");
    let own =
        own.header("access-control-allow-headers", "Content-Type, X-Own").header("access-control-allow-methods", "PUT");
    upstream.on("/pay", own.header("access-control-allow-credentials", "true").body("own"));
    let gateway = shop(&upstream).await;
    let answer = preflight(&gateway, "/pay", SHOP).send().await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "own"), "{answer:?}");
    for (name, value) in [
        ("access-control-allow-origin", SHOP),
        ("access-control-max-age", "7"),
        ("access-control-allow-methods", "PUT"),
        ("access-control-allow-credentials", "true"),
    ] {
        assert_eq!(answer.headers.get_all(name), [value], "{answer:?}");
    }
    for name in ["content-type", "x-own", "idempotency-key"] {
        assert!(has(&answer, "access-control-allow-headers", name), "{name}: {answer:?}");
    }
}

#[tokio::test]
async fn first_answers_replays_and_refusals_are_readable() {
    let upstream = Upstream::start().await;
    let gateway = shop(&upstream).await;
    let keyless = post(gateway.addr(), "/pay").header("Origin", SHOP).send().await;
    assert_eq!(keyless.status, 400);
    assert_readable(&keyless, SHOP);
    let first = pay(gateway.addr(), "k-1").header("Origin", SHOP).send().await;
    assert_eq!(first.status, 201);
    assert_readable(&first, SHOP);
    let again = pay(gateway.addr(), "k-1").header("Origin", SHOP).send().await;
    assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body));
    assert_readable(&again, SHOP);
    let reused = post(gateway.addr(), "/pay").key("k-1").json("{}").header("Origin", SHOP).send().await;
    assert_eq!(reused.status, 422);
    assert_readable(&reused, SHOP);
    upstream.on("/pay", Reply::status(500));
    let released = pay(gateway.addr(), "k-2").header("Origin", SHOP).send().await;
    assert_eq!((released.status, released.header("idempotency-stored")), (500, Some("false")));
    assert_readable(&released, SHOP);
    upstream.stop().await;
    let lost = pay(gateway.addr(), "k-3").header("Origin", SHOP).send().await;
    assert_eq!(lost.status, 502);
    assert_readable(&lost, SHOP);
}

#[tokio::test]
async fn a_replay_is_made_readable_for_who_asks_now() {
    let upstream = Upstream::start().await;
    // The app answers for the first origin only, and exposes a header of its own.
    let reply = Reply::usual().header("access-control-allow-origin", SHOP).header("vary", "Accept-Language");
    upstream.on("/pay", reply.header("access-control-allow-credentials", "true"));
    let gateway = shop(&upstream).await;
    assert_readable(&pay(gateway.addr(), "k-1").header("Origin", SHOP).send().await, SHOP);
    for origin in [TILL, SHOP] {
        let replay = pay(gateway.addr(), "k-1").header("Origin", origin).send().await;
        assert_eq!(replay.header("idempotent-replayed"), Some("true"));
        assert_readable(&replay, origin);
        assert!(has(&replay, "vary", "accept-language"), "{replay:?}");
        assert_eq!(replay.header("access-control-allow-credentials"), Some("true"), "{replay:?}");
    }
    assert_eq!(upstream.executions(), 1);
}

/// An app that answers for origins itself decides about cookies.
#[tokio::test]
async fn what_the_app_says_of_credentials_stays() {
    let upstream = Upstream::start().await;
    upstream.on("/pay", Reply::usual().header("access-control-allow-origin", SHOP));
    let gateway = shop(&upstream).await;
    for _ in 0..2 {
        let answer = pay(gateway.addr(), "k-1").header("Origin", SHOP).send().await;
        assert_eq!(answer.header("access-control-allow-origin"), Some(SHOP), "{answer:?}");
        assert_eq!(answer.header("access-control-allow-credentials"), None, "{answer:?}");
    }
}

#[tokio::test]
async fn other_origins_and_none_get_nothing_of_ours() {
    let upstream = Upstream::start().await;
    let gateway = shop(&upstream).await;
    upstream.on("/plain", Reply::status(405));
    for (n, origin) in OTHERS.into_iter().enumerate() {
        let key = format!("k-{n}");
        let mut answers = vec![post(gateway.addr(), "/pay").header("Origin", origin).send().await];
        for _ in 0..2 {
            answers.push(pay(gateway.addr(), &key).header("Origin", origin).send().await);
        }
        // Recorded for somebody who may read it, asked for by somebody who may not.
        pay(gateway.addr(), &format!("{key}-shop")).header("Origin", SHOP).send().await;
        answers.push(pay(gateway.addr(), &format!("{key}-shop")).header("Origin", origin).send().await);
        answers.push(pay(gateway.addr(), &format!("{key}-shop")).send().await);
        let asked = preflight(&gateway, "/pay", origin).send().await;
        assert_eq!(asked.status, 200, "the app's own: {asked:?}");
        answers.push(asked);
        for answer in answers {
            assert!(OURS.iter().all(|name| !answer.headers.contains(name)), "{origin}: {answer:?}");
        }
    }
}

#[tokio::test]
async fn a_preflight_of_what_is_not_covered_is_the_apps_own_affair() {
    let upstream = Upstream::start().await;
    upstream.on_any(Reply::status(405));
    let gateway = shop(&upstream).await;
    let other = preflight(&gateway, "/admin/users", SHOP).send().await;
    assert_eq!(other.status, 405, "{other:?}");
    assert!(OURS.iter().all(|name| !other.headers.contains(name)), "{other:?}");
    let options = request("OPTIONS", gateway.addr(), "/pay").header("Origin", SHOP).send().await;
    assert_eq!(options.status, 405, "an OPTIONS that is no preflight: {options:?}");
}

#[tokio::test]
async fn without_the_setting_nothing_is_added() {
    let upstream = Upstream::start().await;
    let gateway = gateway("", &upstream).await;
    for _ in 0..2 {
        let answer = pay(gateway.addr(), "k-1").header("Origin", SHOP).send().await;
        assert!(OURS.iter().all(|name| !answer.headers.contains(name)), "{answer:?}");
    }
    let answer = preflight(&gateway, "/pay", SHOP).send().await;
    assert!(OURS.iter().all(|name| !answer.headers.contains(name)), "{answer:?}");
}
