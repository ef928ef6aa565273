//! The same key again: with another request, from another caller, too early, after an outcome that nobody knows.

use testbed::{
    client::{TestRequest, TestResponse, delete, get, patch, put},
    upstream::UpstreamFault,
};

use super::{BODY, HOST, TestGateway, assert_problem};

#[track_caller]
fn assert_replay(case: &str, answer: &TestResponse, run: u64) {
    assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, Some("true")), "{case}: {answer:?}");
    assert_eq!(answer.json()["run"], run, "{case}");
}

#[tokio::test]
async fn another_request_under_the_same_key_is_refused() {
    let world = TestGateway::in_memory("").await;
    let key = "key-used-before";
    world.assert_runs_once("first", key).await;
    let addr = world.gateway.addr();
    let dressed = |request: TestRequest| request.key(key).json(BODY);
    for (case, request) in [
        ("another body", world.shop_post("/pay").key(key).json(r#"{"amount":2}"#)),
        ("no body", world.shop_post("/pay").key(key)),
        ("the same bytes as text", world.shop_post("/pay").key(key).header("Content-Type", "text/plain").body(BODY)),
        ("another path", dressed(world.shop_post("/refund"))),
        ("another case", dressed(world.shop_post("/PAY"))),
        ("a query", dressed(world.shop_post("/pay?x=1"))),
        ("an empty query with a value", dressed(world.shop_post("/pay?="))),
        ("PUT", dressed(put(addr, "/pay").header("Host", HOST))),
        ("PATCH", dressed(patch(addr, "/pay").header("Host", HOST))),
        ("DELETE", dressed(delete(addr, "/pay").header("Host", HOST))),
        ("a precondition", dressed(world.shop_post("/pay")).header("If-Match", "\"1\"")),
        ("a range", dressed(world.shop_post("/pay")).header("Content-Range", "bytes 0-11/12")),
    ] {
        let answer = request.send().await;
        assert_problem(case, &answer, 422, "key-reused", Some(key));
        assert_eq!(world.upstream.requests(), 1, "{case}");
    }
    // Frameworks redirect between the two forms of a path.
    assert_replay("a trailing slash", &dressed(world.shop_post("/pay/")).send().await, 1);
    // None of it changed the record.
    assert_replay("the first again", &world.valid_request(key).send().await, 1);
    assert_eq!(world.upstream.executions(), 1);
}

#[tokio::test]
async fn another_caller_has_keys_of_its_own() {
    let world = TestGateway::in_memory("").await;
    let key = "key-of-many-callers";
    let callers: [&[(&str, &str)]; 6] = [
        &[],
        &[("Authorization", "Bearer one")],
        &[("Authorization", "Bearer two")],
        &[("Authorization", "bearer one")],
        &[("X-Api-Key", "one")],
        &[("X-Api-Key", "Bearer one"), ("Authorization", "Bearer three")],
    ];
    let as_caller = |at: usize| {
        callers[at].iter().fold(world.valid_request(key), |request, (name, value)| request.header(*name, *value))
    };
    for run in 1..=callers.len() {
        let answer = as_caller(run - 1).send().await;
        assert_eq!((answer.status, answer.json()["run"].as_u64()), (201, Some(run as u64)), "{:?}", callers[run - 1]);
    }
    for run in 1..=callers.len() {
        assert_replay(&format!("{:?}", callers[run - 1]), &as_caller(run - 1).send().await, run as u64);
    }
    // Another host is another app; its case is not.
    let at = |host: &str| testbed::client::post(world.gateway.addr(), "/pay").header("Host", host).key(key).json(BODY);
    assert_eq!(at("other.test").send().await.json()["run"], 7);
    assert_replay("the host in capitals", &at("SHOP.TEST").send().await, 1);
    assert_eq!(world.upstream.executions(), 7);
}

#[tokio::test]
async fn operators_are_told_of_a_key_that_two_callers_share_and_the_callers_are_not() {
    let world = TestGateway::in_memory("").await;
    let key = "key-of-two-callers";
    let alone = world.valid_request(key).header("Authorization", "Bearer one").send().await;
    let second = world.valid_request(key).header("Authorization", "Bearer two").send().await;
    let names = |answer: &TestResponse| answer.headers.iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
    assert_eq!((second.status, names(&second)), (alone.status, names(&alone)));
    let line = world.gateway.wait_for_log("two callers sent the same key with the same request").await;
    assert!(!line.contains(key), "{line}");
    let metrics = get(world.gateway.admin_addr(), "/metrics").send().await.text();
    assert!(metrics.contains("\nidempotency_shared_keys_total 1\n"), "{metrics}");
}

#[tokio::test]
async fn what_is_in_flight_is_refused_until_it_has_ended() {
    let world = TestGateway::in_memory("").await;
    let key = "key-in-flight-now";
    let gate = world.upstream.gate("/pay");
    let first = tokio::spawn({
        let good = world.valid_request(key);
        async move { good.send().await }
    });
    gate.arrived(1).await;
    let answer = world.valid_request(key).send().await;
    assert_problem("in flight", &answer, 409, "in-progress", Some(key));
    // The fingerprint is compared before the state is looked at.
    let answer = world.shop_post("/pay").key(key).json(r#"{"amount":2}"#).send().await;
    assert_problem("another body in flight", &answer, 422, "key-reused", Some(key));
    assert_eq!(world.upstream.requests(), 1);
    gate.open();
    assert_eq!(first.await.expect("it ends").status, 201);
    assert_replay("afterwards", &world.valid_request(key).send().await, 1);
}

#[tokio::test]
async fn what_nobody_knows_is_not_run_again() {
    let world = TestGateway::in_memory("").await;
    let key = "key-of-unknown-fate";
    world.upstream.on("/pay", UpstreamFault::CloseWithoutReply);
    let answer = world.valid_request(key).send().await;
    assert_problem("the answer is lost", &answer, 502, "upstream-lost", Some(key));
    for _ in 0..2 {
        let answer = world.valid_request(key).send().await;
        assert_problem("unknown", &answer, 409, "outcome-unknown", Some(key));
    }
    assert_eq!(world.upstream.executions(), 1);
}

#[tokio::test]
async fn an_upgrade_with_a_key_is_refused() {
    let world = TestGateway::in_memory("").await;
    for (at, upgrade) in ["websocket", "WebSocket", "h2c, websocket"].into_iter().enumerate() {
        let key = format!("key-of-upgrade-{at}");
        let answer = world.valid_request(&key).header("Connection", "Upgrade").header("Upgrade", upgrade).send().await;
        assert_problem(upgrade, &answer, 400, "request-ambiguous", Some(&key));
        world.assert_runs_once(upgrade, &key).await;
    }
    // One that is not allowed is no upgrade.
    for upgrade in ["h2c", "anything"] {
        let request = world
            .valid_request(&format!("key-of-{upgrade}"))
            .header("Connection", "Upgrade")
            .header("Upgrade", upgrade);
        for replayed in [false, true] {
            let answer = request.send().await;
            assert_eq!(answer.status, 201, "{upgrade}: {answer:?}");
            assert_eq!(answer.headers.contains("idempotent-replayed"), replayed, "{upgrade}: {answer:?}");
        }
        assert!(!world.upstream.last().headers.contains("upgrade"), "{upgrade}");
    }
}
