//! What a client of the layer sees, frame by frame.

use std::{sync::atomic::Ordering::SeqCst, time::Duration};

use bytes::Bytes;
use ibid::{
    Policy, RefusalReason,
    grpc::GrpcStatusCode,
    policy::{OnConcurrent, OnUnknown, PolicyMode},
};
use testbed::grpc::{frame_message, message};

use super::common::{GrpcLayerShop, with_changes, within};

const CREATE: &str = "/shop.Orders/Create";
const GATED: &str = "/shop.Orders/Gated";
const STATUS: &str = "/shop.Orders/Status";
const KEY: (&str, &str) = ("idempotency-key", "key-1");

fn with_marker() -> Policy {
    with_changes(Policy::platform(), |policy| {
        policy.replay_headers = Policy::ietf().replay_headers;
    })
}

#[tokio::test]
async fn a_replay_has_the_same_headers_message_and_trailers() {
    let shop = GrpcLayerShop::open(with_marker()).await;
    let client = shop.client().await;
    let first = client.call(CREATE, &[KEY], message("ten")).await;
    assert_eq!((first.code(), first.text()), (0, "ten in run 1".to_owned()));
    assert!(!first.trailers_only && !first.headers.contains_key("idempotent-replayed"));
    assert_eq!(
        (&first.trailers["x-after"], &first.headers["x-run"]),
        (&"done".parse().unwrap(), &"1".parse().unwrap())
    );
    for _ in 0..3 {
        let again = client.call(CREATE, &[KEY], message("ten")).await;
        assert_eq!(again.headers["idempotent-replayed"], "true");
        assert_eq!(again.without_per_call_metadata(), first.clone().without_per_call_metadata());
    }
    let other = client.call(CREATE, &[("idempotency-key", "key-2")], message("ten")).await;
    assert_eq!(other.text(), "ten in run 2");
    let (headers, _) = shop.state.seen.lock()[0].clone();
    assert_eq!(
        (&headers["ibid-attempt"], &headers["grpc-accept-encoding"]),
        (&"1".parse().unwrap(), &"identity".parse().unwrap())
    );
    assert_eq!(headers["grpc-timeout"], "600000m", "the route's timeout and late_answer, not the client's");
}

#[tokio::test]
async fn a_failure_without_a_message_is_replayed_as_one_block_of_headers() {
    let shop = GrpcLayerShop::open(with_marker()).await;
    let client = shop.client().await;
    let first = client.call(STATUS, &[KEY, ("want", "5")], message("x")).await;
    assert!(first.trailers_only, "{first:?}");
    assert_eq!((first.code(), first.value("grpc-message")), (5, Some("by%20request")));
    let again = client.call(STATUS, &[KEY, ("want", "5")], message("x")).await;
    assert!(again.trailers_only, "{again:?}");
    assert_eq!(again.headers["idempotent-replayed"], "true");
    assert_eq!(again.without_per_call_metadata(), first.without_per_call_metadata());
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn repeated_binary_metadata_comes_back_as_it_was() {
    let shop = GrpcLayerShop::open(Policy::platform()).await;
    let client = shop.client().await;
    let ask = [KEY, ("ask-bin", "AA"), ("ask-bin", "AQ")];
    let first = client.call("/shop.Orders/Bins", &ask, message("")).await;
    let again = client.call("/shop.Orders/Bins", &ask, message("")).await;
    for answer in [&first, &again] {
        let all = |map: &http::HeaderMap, name| map.get_all(name).iter().cloned().collect::<Vec<_>>();
        assert_eq!(all(&answer.headers, "trace-bin"), ["AAEC", "AwQF"]);
        assert_eq!(all(&answer.trailers, "sum-bin"), ["AA", "AQ", "Ag,Aw"]);
    }
    assert_eq!(shop.runs(), 1);
    let seen = shop.state.seen.lock()[0].0.clone();
    assert_eq!(seen.get_all("ask-bin").iter().collect::<Vec<_>>(), ["AA", "AQ"], "not our business");
}

#[tokio::test]
async fn statuses_settle_by_what_they_say() {
    let policy = with_changes(Policy::ietf(), |policy| {
        policy.on_unknown = OnUnknown::Hold;
    });
    let shop = GrpcLayerShop::open(policy).await;
    let client = shop.client().await;
    for code in GrpcStatusCode::all() {
        let (number, key) = (code.number().to_string(), format!("key-{code}"));
        let ask = [("idempotency-key", key.as_str()), ("want", &number)];
        let before = shop.runs();
        let first = client.call(STATUS, &ask, message("x")).await;
        assert_eq!(first.code(), u32::from(code.number()), "the app's own answer: {first:?}");
        let again = client.call(STATUS, &ask, message("x")).await;
        match code {
            GrpcStatusCode::Ok
            | GrpcStatusCode::InvalidArgument
            | GrpcStatusCode::NotFound
            | GrpcStatusCode::AlreadyExists
            | GrpcStatusCode::FailedPrecondition
            | GrpcStatusCode::OutOfRange => {
                assert_eq!(again.headers["idempotent-replayed"], "true", "{code}");
                assert_eq!(shop.runs(), before + 1, "{code}");
            }
            GrpcStatusCode::Cancelled
            | GrpcStatusCode::DeadlineExceeded
            | GrpcStatusCode::Unknown
            | GrpcStatusCode::Internal
            | GrpcStatusCode::DataLoss => {
                again.assert_refused(9, "OUTCOME_UNKNOWN");
                assert_eq!(shop.runs(), before + 1, "{code}");
            }
            _ => {
                assert_eq!(first.headers["idempotency-stored"], "false", "{code}");
                assert_eq!(again.code(), u32::from(code.number()));
                assert_eq!(shop.runs(), before + 2, "{code}");
            }
        }
    }
}

#[tokio::test]
async fn a_reply_without_a_status_leaves_the_outcome_open() {
    let shop = GrpcLayerShop::open(with_changes(Policy::platform(), |policy| {
        policy.on_unknown = OnUnknown::Hold;
    }))
    .await;
    let client = shop.client().await;
    let lost = client.call("/shop.Orders/Cut", &[KEY], message("x")).await;
    lost.assert_refused(2, "UPSTREAM_LOST");
    client.call("/shop.Orders/Cut", &[KEY], message("x")).await.assert_refused(9, "OUTCOME_UNKNOWN");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn what_is_wrong_with_a_key_is_told_in_trailers_only() {
    let mut policy = Policy::platform();
    policy.grpc_status = vec![(RefusalReason::ScopeMissing, 16)];
    let shop = GrpcLayerShop::open(policy).await;
    let client = shop.client().await;
    client.call(CREATE, &[], message("x")).await.assert_refused(3, "KEY_MISSING");
    client.call(CREATE, &[("idempotency-key", "a b")], message("x")).await.assert_refused(3, "KEY_INVALID");
    client.call(CREATE, &[KEY, KEY], message("x")).await.assert_refused(3, "KEY_INVALID");
    assert_eq!(shop.runs(), 0);
    let other_name = client.call(CREATE, &[("x-idempotency-key", "key-1")], message("x")).await;
    assert_eq!(other_name.code(), 0);
    assert_eq!(client.call(CREATE, &[KEY], message("x")).await.text(), other_name.text(), "one key, two names");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn another_message_under_the_same_key_is_refused_by_the_code_of_the_dial() {
    let mut policy = Policy::platform();
    let shop = GrpcLayerShop::open(policy.clone()).await;
    let client = shop.client().await;
    assert_eq!(client.call(CREATE, &[KEY], message("ten")).await.code(), 0);
    client.call(CREATE, &[KEY], message("eleven")).await.assert_refused(3, "KEY_REUSED");
    client.call(STATUS, &[KEY], message("ten")).await.assert_refused(3, "KEY_REUSED");
    assert_eq!(shop.runs(), 1);
    policy.grpc_status = vec![(RefusalReason::KeyReused, GrpcStatusCode::AlreadyExists.number())];
    let shop = GrpcLayerShop::open(policy).await;
    let client = shop.client().await;
    assert_eq!(client.call(CREATE, &[KEY], message("ten")).await.code(), 0);
    client.call(CREATE, &[KEY], message("eleven")).await.assert_refused(6, "KEY_REUSED");
}

#[tokio::test]
async fn while_the_first_runs_others_are_told_when_to_come_back() {
    let shop = GrpcLayerShop::open(Policy::platform()).await;
    let client = shop.client().await;
    let first = client.start(GATED, &[KEY], &[message("x")]).await;
    within("the first call", shop.state.entered.notified()).await;
    let second = client.call(GATED, &[KEY], message("x")).await;
    second.assert_refused(10, "IN_PROGRESS");
    assert_eq!(second.headers.get_all("grpc-retry-pushback-ms").iter().collect::<Vec<_>>(), ["1000"]);
    shop.state.gate.add_permits(1);
    let first = first.end().await;
    assert_eq!(client.call(GATED, &[KEY], message("x")).await.text(), first.text());
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_client_that_cancels_loses_nothing() {
    let shop = GrpcLayerShop::open(Policy::platform()).await;
    let client = shop.client().await;
    let mut first = client.start(GATED, &[KEY], &[message("x")]).await;
    within("the first call", shop.state.entered.notified()).await;
    first.send.send_reset(h2::Reason::CANCEL);
    drop(first);
    // Whatever became of the reset by now, it has not ended the call.
    client.call(GATED, &[KEY], message("x")).await.assert_refused(10, "IN_PROGRESS");
    shop.state.gate.add_permits(1);
    within("the end of what runs", shop.ibid.drained()).await;
    let again = client.call(GATED, &[KEY], message("x")).await;
    assert_eq!((again.code(), again.text()), (0, "x in run 1".to_owned()));
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_duplicate_waits_no_longer_than_its_own_deadline() {
    let policy = with_changes(Policy::platform(), |policy| {
        policy.on_concurrent = OnConcurrent::Wait;
        policy.wait_timeout = Duration::from_secs(3600);
    });
    let shop = GrpcLayerShop::open(policy).await;
    let client = shop.client().await;
    let first = client.start(GATED, &[KEY], &[message("x")]).await;
    within("the first call", shop.state.entered.notified()).await;
    let patient = client.start(GATED, &[KEY], &[message("x")]).await;
    let hasty = client.call(GATED, &[KEY, ("grpc-timeout", "50m")], message("x")).await;
    hasty.assert_refused(10, "IN_PROGRESS");
    shop.state.gate.add_permits(1);
    assert_eq!(patient.end().await.text(), first.end().await.text());
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_message_is_the_same_compressed_and_plain() {
    use std::io::Write;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(b"ten").unwrap();
    let packed = frame_message(1, &gzip.finish().unwrap());
    let shop = GrpcLayerShop::open(Policy::platform()).await;
    let client = shop.client().await;
    let coding = ("grpc-encoding", "gzip");
    let first = client.call(CREATE, &[KEY, coding, ("grpc-accept-encoding", "gzip")], packed.clone()).await;
    assert_eq!(first.code(), 0);
    assert_eq!(shop.state.seen.lock()[0].1, packed, "the server gets the message as it was sent");
    let again = client.call(CREATE, &[KEY], message("ten")).await;
    assert_eq!(again.body, first.body);
    client.call(CREATE, &[KEY], message("two")).await.assert_refused(3, "KEY_REUSED");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn frames_may_be_cut_anywhere_and_must_be_one_message() {
    let shop = GrpcLayerShop::open(Policy::platform()).await;
    let client = shop.client().await;
    let body = message("ten");
    let pieces: Vec<Bytes> = (0..body.len()).map(|at| body.slice(at..=at)).collect();
    let first = client.start(CREATE, &[KEY], &pieces).await.end().await;
    assert_eq!(first.text(), "ten in run 1");
    assert_eq!(client.call(CREATE, &[KEY], body.clone()).await.body, first.body);
    let empty = [("idempotency-key", "empty")];
    assert_eq!(client.call(CREATE, &empty, message("")).await.text(), " in run 2");
    assert_eq!(client.call(CREATE, &empty, Bytes::from_static(&[0; 5])).await.text(), " in run 2");
    for (bad, why) in [
        (Bytes::new(), "no message"),
        (body.slice(..3), "breaks off"),
        (body.slice(..7), "breaks off"),
        (Bytes::from([&body[..], &body[..]].concat()), "more than one"),
        (frame_message(7, b"x"), "flag"),
    ] {
        let answer = client.call(CREATE, &[("idempotency-key", "bad")], bad).await;
        answer.assert_refused(3, "REQUEST_AMBIGUOUS");
        assert!(answer.value("grpc-message").unwrap().contains(why), "{answer:?}");
    }
    assert_eq!(shop.runs(), 2);
}

#[tokio::test]
async fn a_message_beyond_the_limit_is_refused() {
    let shop = GrpcLayerShop::open(with_changes(Policy::platform(), |policy| {
        policy.max_request = 1000;
    }))
    .await;
    let client = shop.client().await;
    client.call(CREATE, &[KEY], frame_message(0, &[b'x'; 2000])).await.assert_refused(8, "BODY_TOO_LARGE");
    assert_eq!(shop.runs(), 0);
}

#[tokio::test]
async fn a_stream_passes_with_or_without_a_key() {
    let shop = GrpcLayerShop::open(Policy::platform()).await;
    let client = shop.client().await;
    let mut call = client.open("/shop.Orders/Chat", &[KEY]).await;
    let mut body = None;
    for turn in 0..3 {
        let said = message(&format!("turn {turn}"));
        call.send.send_data(said.clone(), false).unwrap();
        if body.is_none() {
            let response = within("the head of a stream", &mut call.answer).await.unwrap();
            body = Some(response.into_body());
        }
        let heard = within("an echo", body.as_mut().unwrap().data()).await.unwrap().unwrap();
        assert_eq!(heard, said, "it comes back before the next is sent");
    }
    call.send.send_data(Bytes::new(), true).unwrap();
    let mut body = body.unwrap();
    assert!(within("the end", body.data()).await.is_none());
    assert_eq!(within("trailers", body.trailers()).await.unwrap().unwrap()["grpc-status"], "0");
}

#[tokio::test]
async fn an_answer_too_large_to_keep_is_not_played_as_a_success() {
    let shop = GrpcLayerShop::open(Policy::platform()).await;
    let client = shop.client().await;
    let first = client.call("/shop.Orders/Large", &[KEY], message("x")).await;
    assert_eq!((first.code(), first.body.len()), (0, (3 << 20) + 5));
    let again = client.call("/shop.Orders/Large", &[KEY], message("x")).await;
    again.assert_refused(9, "ANSWER_TOO_LARGE");
    assert!(again.value("grpc-message").unwrap().contains("3145733 bytes"), "{again:?}");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_large_answer_without_a_status_breaks_off_and_leaves_the_outcome_open() {
    let shop =
        GrpcLayerShop::open(with_changes(Policy::platform(), |policy| policy.on_unknown = OnUnknown::Hold)).await;
    let client = shop.client().await;
    let call = client.start("/shop.Orders/LargeCut", &[KEY], &[message("x")]).await;
    let broken = within("the end", call.try_finish()).await.expect_err("no client takes it for a whole answer");
    assert!(broken.is_reset(), "{broken}");
    client.call("/shop.Orders/LargeCut", &[KEY], message("x")).await.assert_refused(9, "OUTCOME_UNKNOWN");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn without_bodies_a_replay_is_the_status_over_an_empty_message() {
    let shop = GrpcLayerShop::open(with_changes(with_marker(), |policy| {
        policy.remember_body = false;
    }))
    .await;
    let client = shop.client().await;
    assert_eq!(client.call(CREATE, &[KEY], message("ten")).await.text(), "ten in run 1");
    let again = client.call(CREATE, &[KEY], message("ten")).await;
    assert_eq!((again.code(), &again.body[..]), (0, &[0; 5][..]));
    assert_eq!(again.headers["content-type"], "application/grpc");
    assert!(!again.trailers.contains_key("x-after"));
    let failed = [("idempotency-key", "key-2"), ("want", "5")];
    let first = client.call(STATUS, &failed, message("x")).await;
    let again = client.call(STATUS, &failed, message("x")).await;
    assert!(again.trailers_only);
    assert_eq!((again.code(), again.value("grpc-message")), (5, first.value("grpc-message")));
}

#[tokio::test]
async fn what_is_not_a_known_call_passes_untouched() {
    let shop = GrpcLayerShop::open(Policy::platform()).await;
    let client = shop.client().await;
    for run in 1..=2 {
        let unknown = client.call("/shop.Orders/Unheard", &[KEY], message("x")).await;
        assert_eq!(unknown.text(), format!("x in run {run}"));
    }
    assert!(!shop.state.seen.lock()[0].0.contains_key("ibid-attempt"));
}

#[tokio::test]
async fn in_shadow_mode_every_call_gets_the_apps_own_answer() {
    let shop = GrpcLayerShop::open(with_changes(with_marker(), |policy| policy.mode = PolicyMode::Shadow)).await;
    let client = shop.client().await;
    let timeout = ("grpc-timeout", "7S");
    assert_eq!(client.call(CREATE, &[], message("x")).await.text(), "x in run 1", "a missing key");
    for run in 2..=3 {
        let answer = client.call(CREATE, &[KEY, timeout], message("ten")).await;
        assert_eq!(answer.text(), format!("ten in run {run}"));
        assert!(!answer.headers.contains_key("idempotent-replayed"));
    }
    assert_eq!(client.call(CREATE, &[KEY], message("other")).await.text(), "other in run 4");
    let two = Bytes::from([&message("a")[..], &message("b")[..]].concat());
    assert_eq!(client.call(CREATE, &[("idempotency-key", "two")], two).await.code(), 0);
    let cut = client.call("/shop.Orders/Cut", &[("idempotency-key", "cut")], message("x")).await;
    assert_eq!((cut.text(), cut.value("grpc-status")), ("no end".to_owned(), None));
    assert_eq!(shop.state.seen.lock()[1].0["grpc-timeout"], "7S", "the client's own");
}

#[tokio::test]
async fn fifty_at_once_run_once_under_each_concurrency_dial() {
    for dial in [OnConcurrent::Reject, OnConcurrent::Wait] {
        let shop = GrpcLayerShop::open(with_changes(Policy::platform(), |policy| {
            policy.on_concurrent = dial;
        }))
        .await;
        let client = shop.client().await;
        let calls: Vec<_> = (0..50)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { client.call(CREATE, &[KEY], message("ten")).await })
            })
            .collect();
        let mut ok = 0;
        for call in calls {
            let answer = call.await.unwrap();
            match answer.code() {
                0 => {
                    assert_eq!(answer.text(), "ten in run 1");
                    ok += 1;
                }
                _ => answer.assert_refused(10, "IN_PROGRESS"),
            }
        }
        assert_eq!(shop.state.runs.load(SeqCst), 1, "{dial}");
        assert!(if dial == OnConcurrent::Wait { ok == 50 } else { ok >= 1 }, "{dial}: {ok}");
    }
}
