//! The store fails while the answer of a run is recorded.

use std::path::Path;

use ibid::store::{Claim, ErrorKind};
use ibid_testkit::{
    client::Raw,
    upstream::{Gate, Reply, Upstream},
    wrappers::Calls,
};

use super::common::{HealsAfter, Here, entries, eventually, pay, refusal, start, switchable};

/// How many answers wait in the folder.
fn waiting(journal: &Path) -> usize {
    let files = std::fs::read_dir(journal).expect("the journal's folder").map(|file| file.expect("a file").path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "answer")).count()
}

fn with_journal(journal: &Path) -> String {
    format!("journal = {:?}", journal.to_str().expect("a plain path"))
}

/// Starts a request, and lets the store go down while it runs.
async fn caught(here: &Here, gate: &Gate, key: &str) -> Raw {
    let before = gate.count();
    let running = here.pay(key).start().await;
    gate.arrived(before + 1).await;
    here.store.fail(Calls::All, ErrorKind::NotApplied);
    gate.let_through(1);
    running
}

async fn gated() -> (Upstream, Gate) {
    let (upstream, gate) = (Upstream::start().await, Gate::new());
    upstream.on("/pay", Reply::usual().gated(&gate));
    (upstream, gate)
}

#[tokio::test]
async fn an_answer_goes_to_the_journal_is_replayed_from_it_and_drains() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, gate) = gated().await;
    let here = Here::start(&with_journal(folder.path()), &upstream).await;
    let first = caught(&here, &gate, "k-1").await.read_response().await;
    assert_eq!((first.status, first.header("idempotency-stored")), (201, Some("pending")), "{first:?}");
    assert_eq!(waiting(folder.path()), 1);
    assert_eq!(here.ready().await.json()["store"]["waiting"], 1);

    let again = here.pay("k-1").send().await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")), "{again:?}");
    assert_eq!(again.body, first.body, "from the journal, the store is still down");
    assert_eq!(again.header("idempotency-stored"), Some("pending"), "another gateway would not know it yet");
    let other = here.pay("k-1").body(r#"{"amount":2}"#).send().await;
    assert_eq!(refusal(&other), "key-reused", "{other:?}");
    assert_eq!(refusal(&here.pay("k-2").send().await), "store-unavailable");

    here.store.heal();
    eventually("the journal drains", || waiting(folder.path()) == 0).await;
    here.told.wait_for("the journal's answer has reached the store").await;
    assert!(matches!(here.entries().await[..], [Claim::Done(_)]));
    let again = here.pay("k-1").send().await;
    assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body));
    assert_eq!(again.header("idempotency-stored"), None);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn the_journal_survives_a_restart_even_onto_an_empty_store() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, gate) = gated().await;
    let here = Here::start(&with_journal(folder.path()), &upstream).await;
    let host = here.gateway.address().to_string();
    let first = caught(&here, &gate, "k-1").await.read_response().await;
    assert_eq!(first.header("idempotency-stored"), Some("pending"));
    // It waits for the store in vain; the answer stays on disk.
    here.gateway.stop().await;
    assert_eq!(waiting(folder.path()), 1);

    let next = Here::start(&with_journal(folder.path()), &upstream).await;
    eventually("the journal drains", || waiting(folder.path()) == 0).await;
    assert!(matches!(next.entries().await[..], [Claim::Done(_)]));
    let again = next.pay("k-1").header("Host", &host).send().await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")), "{again:?}");
    assert_eq!((&again.body, upstream.executions()), (&first.body, 1));
}

#[tokio::test]
async fn a_restarted_gateway_replays_from_the_journal_while_the_store_is_still_down() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, gate) = gated().await;
    let here = Here::start(&with_journal(folder.path()), &upstream).await;
    let host = here.gateway.address().to_string();
    let first = caught(&here, &gate, "k-1").await.read_response().await;
    here.gateway.stop().await;
    let next = Here::start_on(here.store, &with_journal(folder.path()), &upstream).await;
    let again = next.pay("k-1").header("Host", &host).send().await;
    assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body), "{again:?}");
    next.store.heal();
    eventually("the journal drains", || waiting(folder.path()) == 0).await;
    assert!(matches!(entries(&next.store).await[..], [Claim::Done(_)]));
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn without_a_journal_the_answer_is_withheld_until_it_is_recorded() {
    let (upstream, gate) = gated().await;
    let here = Here::start("", &upstream).await;
    let first = caught(&here, &gate, "k-1").await.read_response().await;
    assert_eq!((first.status, refusal(&first).as_str()), (503, "store-unavailable"), "{first:?}");
    assert!(first.headers.contains("retry-after"));
    assert_eq!(refusal(&here.pay("k-1").send().await), "store-unavailable");
    here.store.heal();
    eventually("the answer is recorded", || here.gateway.ibid().engine().later().waiting() == 0).await;
    let again = here.pay("k-1").send().await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")), "{again:?}");
    assert_eq!(again.text(), r#"{"id":1,"run":1}"#);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_retry_before_the_answer_is_recorded_does_not_run_it_again() {
    let (upstream, gate) = gated().await;
    let here = Here::start("", &upstream).await;
    let running = here.pay("k-1").start().await;
    gate.arrived(1).await;
    here.store.fail(Calls::Settle, ErrorKind::NotApplied);
    gate.open();
    let mut running = running;
    assert_eq!(running.read_response().await.status, 503);
    // Claims are answered, ends are not taken yet.
    let retry = here.pay("k-1").send().await;
    assert_eq!((retry.status, refusal(&retry).as_str()), (409, "in-progress"), "{retry:?}");
    here.store.heal();
    eventually("the answer is recorded", || here.gateway.ibid().engine().later().waiting() == 0).await;
    assert_eq!(here.pay("k-1").send().await.header("idempotent-replayed"), Some("true"));
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_recording_whose_answer_was_lost_is_sent_again_and_changes_nothing() {
    for lost in 1..=2 {
        let upstream = Upstream::start().await;
        let store = switchable();
        let gateway = start("", &upstream, store.clone(), HealsAfter::new("settle", lost, &store)).await;
        store.lose(Calls::Settle);
        let first = pay(gateway.address(), "k-1").send().await;
        assert_eq!((first.status, first.header("idempotency-stored")), (201, None), "{lost} lost: {first:?}");
        let again = pay(gateway.address(), "k-1").send().await;
        assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body), "{again:?}");
        assert_eq!(upstream.executions(), 1);
    }
}
