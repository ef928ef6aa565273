//! Many at once: one execution, whatever the others are told; and what is refused for lack of room.

use std::time::{Duration, Instant};

use testbed::{
    client::many,
    upstream::{ReplyGate, TestUpstream, UpstreamReply, filler},
};

use crate::support::{
    TestGateway, assert_ran, assert_refused, assert_replay, caller, is_in_progress, pay, policy, start_gateway,
    start_ietf_gateway,
};

#[tokio::test]
async fn of_fifty_at_once_one_runs_and_the_others_are_told_to_come_back() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let gate = upstream.gate("/pay");
    let opened = async {
        gate.arrived(1).await;
        gate.open();
    };
    let (answers, ()) = tokio::join!(many(50, || pay(&gateway, "k-1")), opened);
    let ran = answers.iter().filter(|answer| answer.status == 201 && !answer.headers.contains("idempotent-replayed"));
    assert_eq!(ran.count(), 1, "{answers:?}");
    for answer in answers.iter().filter(|answer| answer.status != 201) {
        assert_refused(answer, 409, "in-progress");
    }
    assert_eq!(upstream.executions(), 1);
    assert_eq!(pay(&gateway, "k-1").send().await.status, 201);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn of_fifty_at_once_all_get_the_answer_where_they_wait() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("on_concurrent = \"wait\"").await;
    let gate = upstream.gate("/pay");
    let opened = async {
        gate.arrived(1).await;
        gate.open();
    };
    let (answers, ()) = tokio::join!(many(50, || pay(&gateway, "k-1")), opened);
    let (replays, ran): (Vec<_>, Vec<_>) =
        answers.iter().partition(|answer| answer.headers.contains("idempotent-replayed"));
    assert_eq!((ran.len(), replays.len()), (1, 49));
    assert_ran(ran[0]);
    replays.iter().for_each(|answer| assert_replay(answer, ran[0]));
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_waiter_is_told_to_come_back_when_its_time_is_up() {
    let TestGateway { upstream, gateway } =
        TestGateway::ietf("on_concurrent = \"wait\"\nwait_timeout = \"300ms\"").await;
    let gate = upstream.gate("/pay");
    let request = pay(&gateway, "k-1");
    let mut holder = request.start().await;
    gate.arrived(1).await;
    let begun = Instant::now();
    assert_refused(&request.send().await, 409, "in-progress");
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    gate.open();
    assert_ran(&holder.read_response().await);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn after_a_released_answer_exactly_one_waiter_runs() {
    let upstream = TestUpstream::start().await;
    let (first_gate, second_gate) = (ReplyGate::new(), ReplyGate::new());
    let replies = [UpstreamReply::status(500).gated(&first_gate), UpstreamReply::usual().gated(&second_gate)];
    upstream.on_each("/pay", replies);
    let gateway = start_ietf_gateway(&upstream, "on_concurrent = \"wait\"").await;
    let request = pay(&gateway, "k-1");
    let mut holder = request.start().await;
    first_gate.arrived(1).await;
    let checked = async {
        first_gate.open();
        let failed = holder.read_response().await;
        assert_eq!((failed.status, failed.header("idempotency-stored")), (500, Some("false")), "{failed:?}");
        second_gate.arrived(1).await;
        assert_eq!(upstream.executions(), 2);
        second_gate.open();
    };
    let (answers, ()) = tokio::join!(many(10, || request.clone()), checked);
    let (replays, ran): (Vec<_>, Vec<_>) =
        answers.iter().partition(|answer| answer.headers.contains("idempotent-replayed"));
    assert_eq!((ran.len(), replays.len()), (1, 9));
    assert_ran(ran[0]);
    replays.iter().for_each(|answer| assert_replay(answer, ran[0]));
    assert_eq!(upstream.executions(), 2);
    assert_eq!(upstream.last().attempt(), Some(2));
}

#[tokio::test]
async fn every_waiter_runs_in_turn_while_nothing_is_remembered() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("on_concurrent = \"wait\"").await;
    upstream.on("/pay", UpstreamReply::status(500));
    let answers = many(8, || pay(&gateway, "k-1")).await;
    assert!(answers.iter().all(|answer| answer.status == 500), "{answers:?}");
    let fences: Vec<_> = upstream.log().iter().map(|seen| (seen.attempt(), seen.fence())).collect();
    assert_eq!(fences.len(), 8);
    assert!(fences.is_sorted() && fences.iter().enumerate().all(|(n, (attempt, _))| *attempt == Some(n as u64 + 1)));
}

#[tokio::test]
async fn more_than_may_run_is_refused_before_any_claim() {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/pay");
    let config = format!("max_running = 2\n{}", policy(""));
    let gateway = start_gateway(&config, &upstream).await;
    let mut running = [pay(&gateway, "k-1").start().await, pay(&gateway, "k-2").start().await];
    gate.arrived(2).await;
    let third = pay(&gateway, "k-3");
    assert_refused(&third.send().await, 503, "overloaded");
    assert_eq!(upstream.requests(), 2);
    gate.open();
    for raw in &mut running {
        assert_ran(&raw.read_response().await);
    }
    assert_ran(&third.send().await);
    assert_eq!(upstream.last().attempt(), Some(1), "the refusal left no claim");
    assert_eq!(upstream.executions(), 3);
}

#[tokio::test]
async fn a_request_beyond_the_memory_budget_is_refused_before_any_claim() {
    let upstream = TestUpstream::start().await;
    let config = format!("buffer_memory = \"64KiB\"\n{}", policy(""));
    let gateway = start_gateway(&config, &upstream).await;
    let large = || caller(testbed::client::post(gateway.addr(), "/pay")).key("k-1").body(filler(100 << 10));
    for _ in 0..3 {
        assert_refused(&large().send().await, 503, "overloaded");
        assert_refused(&large().chunked().send().await, 503, "overloaded");
    }
    assert_eq!(upstream.requests(), 0);
    // Room that was refused is not kept.
    let fits = caller(testbed::client::post(gateway.addr(), "/pay")).key("k-1").body(filler(60 << 10));
    assert_ran(&fits.send().await);
    assert_eq!(upstream.last().attempt(), Some(1));
}

#[tokio::test]
async fn different_keys_run_at_the_same_time() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let gate = upstream.gate("/pay");
    let mut n = 0;
    let next = || {
        n += 1;
        pay(&gateway, &format!("k-{n}"))
    };
    let opened = async {
        gate.arrived(50).await;
        gate.open();
    };
    let (answers, ()) = tokio::join!(many(50, next), opened);
    assert!(answers.iter().all(|answer| answer.status == 201 && !is_in_progress(answer)), "{answers:?}");
    assert_eq!(upstream.executions(), 50);
}

#[tokio::test]
async fn a_request_that_waits_for_a_connection_has_not_been_sent() {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/slow");
    let config = format!("max_upstream = 1\n{}", policy("timeout = \"300ms\""));
    let gateway = start_gateway(&config, &upstream).await;
    let mut slow = testbed::client::get(gateway.addr(), "/slow").start().await;
    gate.arrived(1).await;
    let request = pay(&gateway, "k-1");
    assert_refused(&request.send().await, 502, "upstream-unreachable");
    assert_eq!(upstream.executions(), 0);
    gate.open();
    assert_eq!(slow.read_response().await.status, 200);
    assert_ran(&request.send().await);
    assert_eq!((upstream.executions(), upstream.last().attempt()), (1, Some(2)));
}
