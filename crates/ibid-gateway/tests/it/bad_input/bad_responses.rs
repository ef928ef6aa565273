//! What an app may not answer: an upgrade that nobody asked for, and that its answer is a replay.

use testbed::{
    client::{get, post},
    upstream::UpstreamReply,
};

use super::{BODY, HOST, TestGateway, assert_problem};

#[tokio::test]
async fn an_upgrade_that_nobody_asked_for_is_a_lost_answer() {
    let world = TestGateway::in_memory("").await;
    world.upstream.on("/pay", UpstreamReply::upgrade_echo());
    let key = "key-of-an-upgrade";
    let answer = world.valid_request(key).send().await;
    assert_problem("101", &answer, 502, "upstream-lost", Some(key));
    for _ in 0..2 {
        assert_problem("afterwards", &world.valid_request(key).send().await, 409, "outcome-unknown", Some(key));
    }
    assert_eq!(world.upstream.requests(), 1, "nobody knows whether it took place, so it is not tried again");
    // Without a key there is no claim to park, but there is no tunnel either: the connection goes on speaking HTTP.
    let (keyless, safe) = (world.shop_post("/pay").json(BODY), get(world.gateway.addr(), "/pay").header("Host", HOST));
    for request in [keyless, safe] {
        let mut raw = request.start().await;
        assert_eq!(raw.read_response().await.status, 502);
        let next = get(world.gateway.addr(), "/things").header("Host", HOST).send_on(&mut raw).await;
        assert_eq!((next.status, world.upstream.last().target.as_str()), (200, "/things"), "{next:?}");
    }
}

#[tokio::test]
async fn an_upgrade_to_something_else_than_was_asked_for_opens_no_claim() {
    let world = TestGateway::in_memory("").await;
    world.upstream.on("/pay", UpstreamReply::upgrade_echo());
    // With a key it does not get that far.
    let asked = world
        .valid_request("key-with-upgrade")
        .header("Connection", "Upgrade")
        .header("Upgrade", "websocket")
        .send()
        .await;
    assert_problem("asked for", &asked, 400, "request-ambiguous", Some("key-with-upgrade"));
    assert_eq!(world.upstream.requests(), 0);
    world.upstream.clear_rules();
    world.assert_runs_once("afterwards", "key-with-upgrade").await;
}

#[tokio::test]
async fn an_app_cannot_say_that_its_answer_is_a_replay() {
    let members = "[[route]]\nmatch = \"POST /members\"\npreset = \"membership\"\n[[route]]\nmatch = \"POST /*\"\n";
    let world = TestGateway::in_memory(members).await;
    let lies = [("Idempotent-Replayed", "true"), ("X-Idempotency-Cached", "true"), ("X-Original-Timestamp", "1970")];
    for path in ["/pay", "/members"] {
        world
            .upstream
            .on(path, lies.iter().fold(UpstreamReply::usual(), |reply, (name, value)| reply.header(*name, *value)));
    }
    let first = world.valid_request("told-by-the-app").send().await;
    assert_eq!((first.status, first.header("idempotent-replayed")), (201, None), "{first:?}");
    let again = world.valid_request("told-by-the-app").send().await;
    assert_eq!(again.headers.get_all("idempotent-replayed"), ["true"], "once: {again:?}");
    let member = |user: &str| {
        post(world.gateway.addr(), "/members").key("member-key-1234567").header("X-User-Id", user).json(BODY)
    };
    let first = member("u1").send().await;
    assert_eq!(first.headers.get_all("x-idempotency-cached"), ["false"], "{first:?}");
    assert_eq!(first.header("x-original-timestamp"), None, "{first:?}");
    let again = member("u1").send().await;
    assert_eq!(again.headers.get_all("x-idempotency-cached"), ["true"], "{again:?}");
    assert_ne!(again.headers.get_all("x-original-timestamp"), ["1970"], "{again:?}");
}
