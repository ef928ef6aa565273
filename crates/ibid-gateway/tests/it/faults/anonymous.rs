//! Anonymous callers whose answers set cookies: a retry with these cookies is the same caller, a session is not.

use ibid_testkit::{
    client::{Request, post},
    process::Gateway,
    upstream::{Gate, Reply, Upstream},
};

use super::kit::{BIN, assert_ran, assert_refused, assert_replay, ietf, is_in_progress, policy};
use crate::sealing::table;

fn visit(gateway: &Gateway, key: &str, cookies: &str) -> Request {
    let request = post(gateway.addr(), "/pay").key(key).json(r#"{"amount":1}"#);
    if cookies.is_empty() { request } else { request.header("Cookie", cookies) }
}

#[tokio::test]
async fn a_load_balancers_cookie_on_the_first_answer_does_not_break_the_retry() {
    let upstream = Upstream::start().await;
    upstream.on("/pay", Reply::usual().set_cookie("lb=node-1; Path=/; HttpOnly").set_cookie("zone=b; Secure"));
    for config in [policy(""), format!("{}{}", policy(""), table(&["k"]))] {
        let before = upstream.executions();
        let config = format!("{config}[store]\nurl = \"embedded:data\"\n");
        let mut gateway = Gateway::spawn(BIN, &config, &upstream.url()).await;
        let first = visit(&gateway, "k-1", "").send().await;
        assert_ran(&first);
        for cookies in ["lb=node-1", "zone=b; lb=node-1", "lb=node-1; lb=node-1", ""] {
            assert_replay(&visit(&gateway, "k-1", cookies).send().await, &first);
        }
        gateway.restart().await;
        assert_replay(&visit(&gateway, "k-1", "lb=node-1").send().await, &first);
        // Another value, a session, a name that was not set, and the same value under another name.
        for cookies in ["lb=node-2", "lb=node-1; session=7", "session=7", "zone=node-1", "node-1"] {
            let refused = visit(&gateway, "k-1", cookies).send().await;
            assert_refused(&refused, 400, "scope-missing");
            assert!(refused.text().contains("cookie:session"), "{refused:?}");
        }
        // Another key and another request have no such answer.
        assert_refused(&visit(&gateway, "k-2", "lb=node-1").send().await, 400, "scope-missing");
        let other = visit(&gateway, "k-1", "lb=node-1").body(r#"{"amount":2}"#).send().await;
        assert_refused(&other, 400, "scope-missing");
        // Who has a credential is another caller.
        assert_ran(&visit(&gateway, "k-1", "lb=node-1").header("Authorization", "Bearer one").send().await);
        assert_eq!(upstream.executions() - before, 2);
    }
}

#[tokio::test]
async fn cookies_of_an_answer_that_was_released_are_kept() {
    let upstream = Upstream::start().await;
    let gate = Gate::new();
    let replies = [
        Reply::status(500).set_cookie("lb=node-1"),
        Reply::status(503).set_cookie("zone=b"),
        Reply::usual().set_cookie("late=1").gated(&gate),
    ];
    upstream.on_each("/pay", replies);
    let gateway = ietf(&upstream, "").await;
    assert_eq!(visit(&gateway, "k-1", "").send().await.status, 500);
    assert_refused(&visit(&gateway, "k-1", "lb=node-2").send().await, 400, "scope-missing");
    assert_eq!(visit(&gateway, "k-1", "lb=node-1").send().await.status, 503, "it runs again");
    let both = visit(&gateway, "k-1", "lb=node-1; zone=b");
    let mut running = both.start().await;
    gate.arrived(1).await;
    assert!(is_in_progress(&both.send().await));
    assert_refused(&visit(&gateway, "k-1", "lb=node-1; late=1").send().await, 400, "scope-missing");
    gate.open();
    let last = running.read_response().await;
    assert_ran(&last);
    for cookies in ["lb=node-1; zone=b", "lb=node-1; zone=b; late=1", "late=1"] {
        assert_replay(&visit(&gateway, "k-1", cookies).send().await, &last);
    }
    assert_refused(&visit(&gateway, "k-1", "lb=node-1; session=7").send().await, 400, "scope-missing");
    let other = visit(&gateway, "k-1", "lb=node-1").body(r#"{"amount":2}"#).send().await;
    assert_refused(&other, 400, "scope-missing");
    assert_eq!(upstream.executions(), 3);
}

#[tokio::test]
async fn cookies_of_an_answer_with_an_unknown_outcome_are_kept() {
    let upstream = Upstream::start().await;
    upstream.on("/pay", Reply::status(502).set_cookie("lb=node-1"));
    let gateway = ietf(&upstream, "").await;
    assert_eq!(visit(&gateway, "k-1", "").send().await.status, 502);
    assert_refused(&visit(&gateway, "k-1", "lb=node-1").send().await, 409, "outcome-unknown");
    assert_refused(&visit(&gateway, "k-1", "session=7").send().await, 400, "scope-missing");
    assert_eq!(upstream.executions(), 1);
}
