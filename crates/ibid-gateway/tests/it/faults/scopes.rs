//! No answer crosses from one caller to another.

use ibid_testkit::{
    client::{Request, post},
    process::Gateway,
    upstream::{Gate, Reply, Upstream},
};

use super::kit::{assert_ran, assert_refused, assert_replay, ietf};

fn pay_as(gateway: &Gateway, name: &str, value: &str) -> Request {
    post(gateway.addr(), "/pay").key("k-1").json(r#"{"amount":1}"#).header(name, value)
}

#[tokio::test]
async fn another_callers_answer_is_never_replayed() {
    let upstream = Upstream::start().await;
    let gateway = ietf(&upstream, "").await;
    let callers = [
        pay_as(&gateway, "Authorization", "Bearer one"),
        pay_as(&gateway, "Authorization", "Bearer two"),
        pay_as(&gateway, "X-Api-Key", "three"),
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
async fn another_caller_neither_waits_nor_learns_of_the_first() {
    let upstream = Upstream::start().await;
    let gate = Gate::new();
    upstream.on_each("/pay", [Reply::usual().gated(&gate), Reply::usual()]);
    let gateway = ietf(&upstream, "").await;
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
    let upstream = Upstream::start().await;
    let gateway = ietf(&upstream, "").await;
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
    let upstream = Upstream::start().await;
    let gateway = ietf(&upstream, "scope = [\"host\", \"cookie:session\"]").await;
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
