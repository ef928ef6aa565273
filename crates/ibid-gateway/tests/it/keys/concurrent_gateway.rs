//! Commands on a shared store, beside a gateway that runs.

use std::time::Duration;

use testbed::upstream::{ReplyGate, UpstreamReply};
use tokio::time::sleep;

use super::{
    TestStore,
    common::{KeysFixture, UNKNOWN_KEY, key, pay, send},
};
use crate::support::assert_replay;

const WHY: &str = "ticket 7";

pub(super) async fn a_running_one_is_neither_released_nor_resolved(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let gate = ReplyGate::new();
    scene.upstream.on("/pay/slow", UpstreamReply::status(201).gated(&gate));
    let gateway = scene.start_gateway().await;
    let request = send(gateway.addr(), "slow", "key-of-the-slow-one");
    let running = tokio::spawn(async move { request.send().await });
    gate.arrived(1).await;
    let shown = scene.run_keys(&["show", "--key", "key-of-the-slow-one"]).await;
    assert_eq!((shown.code, shown.field("state").as_str()), (Some(0), "processing"), "{shown:?}");
    assert!(shown.field("takeover").starts_with("in "), "{shown:?}");
    assert_eq!(scene.list(&["--state", "processing"]).await.len(), 1);
    for args in [
        &["release", "--key", "key-of-the-slow-one", "--reason", WHY][..],
        &["resolve", "--key", "key-of-the-slow-one", "--as", "done", "--status", "200", "--reason", WHY],
    ] {
        let done = scene.run_keys(args).await;
        assert_eq!(done.code, Some(1), "{done:?}");
        let why = "ibid: nothing was changed: it is running: its lease ends in ";
        assert!(done.stderr.contains(why) && done.stderr.contains("wait until then, or forget it"), "{done:?}");
    }
    gate.open();
    assert_eq!(running.await.expect("it is answered").status, 201);
    let shown = scene.run_keys(&["show", "--key", "key-of-the-slow-one"]).await;
    assert_eq!(shown.field("state"), "done");
}

pub(super) async fn a_gateway_sees_what_was_changed_beside_it(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let gateway = scene.start_gateway().await;
    let ran = scene.upstream.executions();
    // Twice, so that the second one comes from the copy in the gateway.
    for _ in 0..2 {
        let replay = pay(gateway.addr(), 0).send().await;
        assert_eq!(replay.header("idempotent-replayed"), Some("true"), "{replay:?}");
    }
    assert_eq!(scene.run_keys(&["forget", "--key", &key(0), "--reason", WHY]).await.code, Some(0));
    let mut answer = pay(gateway.addr(), 0).send().await;
    // What was forgotten is told at once; if the telling is lost, a copy is not believed for longer than ten seconds.
    for _ in 0..120 {
        if answer.header("idempotent-replayed").is_none() {
            break;
        }
        sleep(Duration::from_millis(100)).await;
        answer = pay(gateway.addr(), 0).send().await;
    }
    assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, None), "{answer:?}");
    assert_eq!(scene.upstream.executions(), ran + 1);

    assert_eq!(send(gateway.addr(), "lost", UNKNOWN_KEY).send().await.status, 409);
    let resolve = ["resolve", "--key", UNKNOWN_KEY, "--as", "done", "--status", "202", "--reason", WHY];
    assert_eq!(scene.run_keys(&resolve).await.code, Some(0));
    let told = send(gateway.addr(), "lost", UNKNOWN_KEY).send().await;
    assert_eq!((told.status, told.header("idempotent-replayed")), (202, Some("true")), "{told:?}");
}

pub(super) async fn a_sweep_beside_a_gateway_takes_nothing_from_it(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let gateway = scene.start_gateway().await;
    let first = pay(gateway.addr(), 1).send().await;
    let swept = scene.run_on_store(&["sweep"]).await;
    assert_eq!((swept.code, swept.text().starts_with("removed 0, ")), (Some(0), true), "{swept:?}");
    assert_replay(&pay(gateway.addr(), 1).send().await, &first);
}
