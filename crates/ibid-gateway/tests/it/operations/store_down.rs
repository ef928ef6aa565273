//! The store fails before anything has run.

use ibid::store::ErrorKind;
use ibid_testkit::wrappers::CallFilter;
use testbed::upstream::TestUpstream;

use crate::support::{
    HealAfterFailures, InProcessGateway, anonymous_pay, failing_store, refusal_name, start_in_process, until,
};

const KINDS: [ErrorKind; 3] = [ErrorKind::NotApplied, ErrorKind::Ambiguous, ErrorKind::Rejected];

#[tokio::test]
async fn closed_refuses_and_runs_nothing() {
    let upstream = TestUpstream::start().await;
    let here = InProcessGateway::start("", &upstream).await;
    for kind in KINDS {
        here.store.fail(CallFilter::All, kind);
        let answer = here.pay("k-1").send().await;
        assert_eq!((answer.status, refusal_name(&answer).as_str()), (503, "store-unavailable"), "{kind:?} {answer:?}");
        assert!(answer.header("retry-after").is_some_and(|after| after.parse::<u32>().unwrap() >= 1), "{answer:?}");
        assert_eq!(upstream.executions(), 0, "{kind:?}");
        here.store.heal();
        until("the given-up claim is released", || here.gateway.ibid.engine().settle_queue().pending() == 0).await;
    }
    let answer = here.pay("k-1").send().await;
    assert_eq!((answer.status, upstream.executions()), (201, 1), "{answer:?}");
    assert!(!answer.headers.contains("idempotency-guarantee"), "{answer:?}");
}

#[tokio::test]
async fn what_is_not_covered_passes_while_the_store_is_down() {
    let upstream = TestUpstream::start().await;
    let here = InProcessGateway::start("", &upstream).await;
    here.store.fail(CallFilter::All, ErrorKind::NotApplied);
    let addr = here.gateway.address;
    assert_eq!(testbed::client::get(addr, "/pay").key("k-1").send().await.status, 200);
    assert_eq!(testbed::client::post(addr, "/pay").send().await.status, 201);
}

#[tokio::test]
async fn open_runs_and_says_that_it_is_degraded() {
    let upstream = TestUpstream::start().await;
    let here = InProcessGateway::start("[policy]\non_store_down = \"open\"", &upstream).await;
    here.store.fail(CallFilter::All, ErrorKind::NotApplied);
    for run in 1..=2 {
        let answer = here.pay("k-1").send().await;
        assert_eq!((answer.status, upstream.executions()), (201, run), "{answer:?}");
        assert_eq!(answer.header("idempotency-guarantee"), Some("degraded"), "{answer:?}");
        assert!(!answer.headers.contains("idempotent-replayed"), "{answer:?}");
    }
    here.store.heal();
    let first = here.pay("k-1").send().await;
    assert_eq!((first.status, first.header("idempotency-guarantee")), (201, None), "{first:?}");
    let again = here.pay("k-1").send().await;
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!((again.header("idempotency-guarantee"), &again.body), (None, &first.body), "{again:?}");
}

#[tokio::test]
async fn a_claim_whose_answer_was_lost_is_asked_again_and_runs_once() {
    for lost in 1..=2 {
        let upstream = TestUpstream::start().await;
        let store = failing_store();
        let observer = HealAfterFailures::new("claim", lost, &store);
        let gateway = start_in_process("", &upstream, store.clone(), observer).await;
        store.lose_answers(CallFilter::Claim);
        let first = anonymous_pay(gateway.address, "k-1").send().await;
        assert_eq!((first.status, upstream.executions()), (201, 1), "{lost} lost: {first:?}");
        assert_eq!(upstream.last().attempt(), Some(1), "the same token is granted, not a second attempt");
        let again = anonymous_pay(gateway.address, "k-1").send().await;
        assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body));
        assert_eq!(upstream.executions(), 1);
    }
}

#[tokio::test]
async fn a_claim_that_stays_ambiguous_runs_nothing_and_leaves_the_key_free() {
    let upstream = TestUpstream::start().await;
    let here = InProcessGateway::start("", &upstream).await;
    here.store.lose_answers(CallFilter::All);
    let answer = here.pay("k-1").send().await;
    assert_eq!((answer.status, refusal_name(&answer).as_str()), (503, "store-unavailable"), "{answer:?}");
    assert_eq!(upstream.executions(), 0);
    assert!(here.told.count("claim: ") >= 2, "it asked again");
    // The release reaches the store even if its own answers are lost.
    here.told.wait_for("settle: ").await;
    here.store.heal();
    let answer = here.pay("k-1").send().await;
    assert_eq!((answer.status, upstream.executions()), (201, 1), "the key is free at once: {answer:?}");
}

#[tokio::test]
async fn a_release_that_the_store_could_not_take_is_told_until_it_does() {
    let upstream = TestUpstream::start().await;
    let here = InProcessGateway::start("", &upstream).await;
    here.store.fail(CallFilter::Settle, ErrorKind::NotApplied);
    here.store.lose_answers(CallFilter::Claim);
    assert_eq!(here.pay("k-1").send().await.status, 503);
    assert_eq!(here.gateway.ibid.engine().settle_queue().pending(), 1);
    here.store.heal();
    until("the release is taken", || here.gateway.ibid.engine().settle_queue().pending() == 0).await;
    assert_eq!(here.pay("k-1").send().await.status, 201);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_failing_heartbeat_neither_cancels_nor_repeats_the_operation() {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/pay");
    let here = InProcessGateway::start("[policy]\nlease = \"1s\"", &upstream).await;
    here.store.fail(CallFilter::Extend, ErrorKind::NotApplied);
    let mut running = here.pay("k-1").start().await;
    gate.arrived(1).await;
    assert_eq!(refusal_name(&here.pay("k-1").send().await), "in-progress");
    here.told.wait_for("extend: ").await;
    // Its lease lapses unheard of: unknown, never free.
    let unknown = async {
        loop {
            let answer = here.pay("k-1").send().await;
            assert_eq!(answer.status, 409, "{answer:?}");
            if refusal_name(&answer) == "outcome-unknown" {
                assert!(!answer.headers.contains("retry-after"), "{answer:?}");
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(testbed::http1::WAIT_TIMEOUT, unknown).await.expect("the lease lapses");
    here.store.heal();
    gate.open();
    let first = running.read_response().await;
    assert_eq!((first.status, first.header("idempotency-stored")), (201, None), "late, and recorded: {first:?}");
    let again = here.pay("k-1").send().await;
    assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body));
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn readiness_follows_the_store_and_says_what_its_trouble_is() {
    let upstream = TestUpstream::start().await;
    let here = InProcessGateway::start("", &upstream).await;
    let ready = here.ready().await;
    assert_eq!((ready.status, &ready.json()["store"]["error"]), (200, &serde_json::Value::Null), "{ready:?}");
    here.store.fail(CallFilter::All, ErrorKind::NotApplied);
    let down = here.ready().await;
    assert_eq!((down.status, &down.json()["ready"]), (503, &false.into()), "{down:?}");
    let trouble = down.json()["store"]["error"].as_str().unwrap_or_default().to_owned();
    assert!(trouble.contains("switched off by the test"), "{trouble}");
    let alive = testbed::client::get(here.gateway.admin.unwrap(), "/healthz").send().await;
    assert_eq!(alive.status, 200, "a store that is down is no reason to restart the gateway");
    here.store.heal();
    assert_eq!(here.ready().await.status, 200);
}
