//! Clients that hang up: before the body is whole nothing happens, after it everything does.

use std::time::Duration;

use testbed::{client::RawClient, upstream::UpstreamReply};
use tokio::time::sleep;

use crate::support::{TestGateway, assert_ran, assert_refused, assert_replay, pay, send_until_settled};

/// How a client leaves.
type Disconnect = fn(RawClient);

const DISCONNECTS: [(&str, Disconnect); 2] = [("close", |raw| drop(raw)), ("reset", RawClient::abort)];

#[tokio::test]
async fn a_body_that_is_never_whole_leaves_no_trace() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    for (way, leave) in DISCONNECTS {
        for (framing, request) in [("length", pay(&gateway, way)), ("chunks", pay(&gateway, way).chunked())] {
            let whole = request.to_bytes();
            for sent in [whole.len() - 1, whole.len() - 6, whole.len() - 11] {
                let mut raw = RawClient::connect(gateway.addr()).await;
                raw.send(&whole[..sent]).await;
                leave(raw);
            }
            let mut raw = RawClient::connect(gateway.addr()).await;
            raw.send(&whole[..whole.len() - 1]).await;
            raw.half_close().await;
            // Told or not, it is over.
            if let Ok(answer) = raw.try_read_response().await {
                assert_eq!(answer.status, 400, "{way} {framing}: {answer:?}");
            }
        }
        assert_eq!(upstream.executions_with_key(way), 0);
        assert_eq!(upstream.broken(), 0, "nothing of it was sent on");
        assert_ran(&pay(&gateway, way).send().await);
        assert_eq!(upstream.last().attempt(), Some(1), "the key was fresh");
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_does_not_stop_its_request() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    for (way, leave) in DISCONNECTS {
        let gate = upstream.gate("/pay");
        let request = pay(&gateway, way);
        let raw = request.start().await;
        gate.arrived(1).await;
        leave(raw);
        assert_refused(&request.send().await, 409, "in-progress");
        gate.open();
        let again = send_until_settled(&request).await;
        assert_eq!(again.status, 201, "{way}: {again:?}");
        assert_replay(&request.send().await, &again);
        assert_eq!(again.header("idempotent-replayed"), Some("true"), "{way}: {again:?}");
        assert_eq!(upstream.executions_with_key(way), 1);
    }
    assert_eq!(upstream.client_disconnects(), 0, "the upstream never noticed");
}

#[tokio::test]
async fn clients_that_hang_up_at_any_moment_cause_one_execution() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("on_concurrent = \"wait\"").await;
    upstream.on("/pay", UpstreamReply::usual().delay(Duration::from_millis(10)));
    for n in 0..40_u64 {
        let key = format!("k-{n}");
        let request = pay(&gateway, &key);
        let holder = request.start().await;
        let waiter = request.start().await;
        // 0 to 20 ms: before, while and after the upstream works.
        sleep(Duration::from_micros(n * 500)).await;
        waiter.abort();
        if n % 2 == 0 {
            holder.abort();
        } else {
            drop(holder);
        }
        let again = request.send().await;
        assert_eq!(again.status, 201, "{n}: {again:?}");
        for _ in 0..2 {
            assert_replay(&request.send().await, &again);
        }
        assert_eq!(upstream.executions_with_key(&key), 1, "{n}");
    }
    assert_eq!(upstream.executions(), 40);
}

#[tokio::test]
async fn a_waiter_that_hangs_up_takes_nobody_elses_answer_away() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("on_concurrent = \"wait\"").await;
    let gate = upstream.gate("/pay");
    let request = pay(&gateway, "k-1");
    let mut holder = request.start().await;
    gate.arrived(1).await;
    let mut stays = request.start().await;
    for (_, leave) in DISCONNECTS {
        leave(request.start().await);
    }
    gate.open();
    let first = holder.read_response().await;
    assert_ran(&first);
    assert_replay(&stays.read_response().await, &first);
    assert_replay(&request.send().await, &first);
    assert_eq!(upstream.executions(), 1);
}
