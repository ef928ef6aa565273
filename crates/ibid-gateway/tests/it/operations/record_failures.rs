//! The store fails while the answer of a run is recorded.

use std::path::Path;

use ibid::store::{ClaimOutcome, ErrorKind};
use ibid_testkit::wrappers::CallFilter;
use testbed::{
    client::RawClient,
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};

use crate::support::{
    HealAfterFailures, InProcessGateway, anonymous_pay, entries, failing_store, refusal_name, start_in_process, until,
};

/// How many answers wait in the folder.
fn journaled_answers(journal: &Path) -> usize {
    let files = std::fs::read_dir(journal).expect("the journal's folder").map(|file| file.expect("a file").path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "answer")).count()
}

fn with_journal(journal: &Path) -> String {
    format!("journal = {:?}", journal.to_str().expect("a plain path"))
}

/// Starts a request, and lets the store go down while it runs.
async fn start_then_fail_store(here: &InProcessGateway, gate: &ReplyGate, key: &str) -> RawClient {
    let before = gate.count();
    let running = here.pay(key).start().await;
    gate.arrived(before + 1).await;
    here.store.fail(CallFilter::All, ErrorKind::NotApplied);
    gate.let_through(1);
    running
}

async fn start_gated_upstream() -> (TestUpstream, ReplyGate) {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    (upstream, gate)
}

#[tokio::test]
async fn an_answer_goes_to_the_journal_is_replayed_from_it_and_drains() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, gate) = start_gated_upstream().await;
    let here = InProcessGateway::start(&with_journal(folder.path()), &upstream).await;
    let first = start_then_fail_store(&here, &gate, "k-1").await.read_response().await;
    assert_eq!((first.status, first.header("idempotency-stored")), (201, Some("pending")), "{first:?}");
    assert_eq!(journaled_answers(folder.path()), 1);
    assert_eq!(here.ready().await.json()["store"]["waiting"], 1);

    let again = here.pay("k-1").send().await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")), "{again:?}");
    assert_eq!(again.body, first.body, "from the journal, the store is still down");
    assert_eq!(again.header("idempotency-stored"), Some("pending"), "another gateway would not know it yet");
    let other = here.pay("k-1").body(r#"{"amount":2}"#).send().await;
    assert_eq!(refusal_name(&other), "key-reused", "{other:?}");
    assert_eq!(refusal_name(&here.pay("k-2").send().await), "store-unavailable");

    here.store.heal();
    until("the journal drains", || journaled_answers(folder.path()) == 0).await;
    here.told.wait_for("the journal's answer has reached the store").await;
    assert!(matches!(here.entries().await[..], [ClaimOutcome::Completed(_)]));
    let again = here.pay("k-1").send().await;
    assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body));
    assert_eq!(again.header("idempotency-stored"), None);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn the_journal_survives_a_restart_even_onto_an_empty_store() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, gate) = start_gated_upstream().await;
    let here = InProcessGateway::start(&with_journal(folder.path()), &upstream).await;
    let host = here.gateway.address.to_string();
    let first = start_then_fail_store(&here, &gate, "k-1").await.read_response().await;
    assert_eq!(first.header("idempotency-stored"), Some("pending"));
    // It waits for the store in vain; the answer stays on disk.
    here.gateway.stop().await;
    assert_eq!(journaled_answers(folder.path()), 1);

    let next = InProcessGateway::start(&with_journal(folder.path()), &upstream).await;
    until("the journal drains", || journaled_answers(folder.path()) == 0).await;
    assert!(matches!(next.entries().await[..], [ClaimOutcome::Completed(_)]));
    let again = next.pay("k-1").header("Host", &host).send().await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")), "{again:?}");
    assert_eq!((&again.body, upstream.executions()), (&first.body, 1));
}

#[tokio::test]
async fn a_restarted_gateway_replays_from_the_journal_while_the_store_is_still_down() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, gate) = start_gated_upstream().await;
    let here = InProcessGateway::start(&with_journal(folder.path()), &upstream).await;
    let host = here.gateway.address.to_string();
    let first = start_then_fail_store(&here, &gate, "k-1").await.read_response().await;
    here.gateway.stop().await;
    let next = InProcessGateway::start_on_store(here.store, &with_journal(folder.path()), &upstream).await;
    let again = next.pay("k-1").header("Host", &host).send().await;
    assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body), "{again:?}");
    next.store.heal();
    until("the journal drains", || journaled_answers(folder.path()) == 0).await;
    assert!(matches!(entries(&next.store).await[..], [ClaimOutcome::Completed(_)]));
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn without_a_journal_the_answer_is_withheld_until_it_is_recorded() {
    let (upstream, gate) = start_gated_upstream().await;
    let here = InProcessGateway::start("", &upstream).await;
    let first = start_then_fail_store(&here, &gate, "k-1").await.read_response().await;
    assert_eq!((first.status, refusal_name(&first).as_str()), (503, "store-unavailable"), "{first:?}");
    assert!(first.headers.contains("retry-after"));
    assert_eq!(refusal_name(&here.pay("k-1").send().await), "store-unavailable");
    here.store.heal();
    until("the answer is recorded", || here.gateway.ibid.engine().settle_queue().pending() == 0).await;
    let again = here.pay("k-1").send().await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")), "{again:?}");
    assert_eq!(again.text(), r#"{"id":1,"run":1}"#);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_retry_before_the_answer_is_recorded_does_not_run_it_again() {
    let (upstream, gate) = start_gated_upstream().await;
    let here = InProcessGateway::start("", &upstream).await;
    let running = here.pay("k-1").start().await;
    gate.arrived(1).await;
    here.store.fail(CallFilter::Settle, ErrorKind::NotApplied);
    gate.open();
    let mut running = running;
    assert_eq!(running.read_response().await.status, 503);
    // Claims are answered, ends are not taken yet.
    let retry = here.pay("k-1").send().await;
    assert_eq!((retry.status, refusal_name(&retry).as_str()), (409, "in-progress"), "{retry:?}");
    here.store.heal();
    until("the answer is recorded", || here.gateway.ibid.engine().settle_queue().pending() == 0).await;
    assert_eq!(here.pay("k-1").send().await.header("idempotent-replayed"), Some("true"));
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_recording_whose_answer_was_lost_is_sent_again_and_changes_nothing() {
    for lost in 1..=2 {
        let upstream = TestUpstream::start().await;
        let store = failing_store();
        let gateway =
            start_in_process("", &upstream, store.clone(), HealAfterFailures::new("settle", lost, &store)).await;
        store.lose_answers(CallFilter::Settle);
        let first = anonymous_pay(gateway.address, "k-1").send().await;
        assert_eq!((first.status, first.header("idempotency-stored")), (201, None), "{lost} lost: {first:?}");
        let again = anonymous_pay(gateway.address, "k-1").send().await;
        assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body), "{again:?}");
        assert_eq!(upstream.executions(), 1);
    }
}
