use std::{sync::Arc, time::Duration};

use serde_json::json;
use testbed::process::ProcessSignal;
use tokio::{io::AsyncWriteExt as _, net::UnixStream, task::JoinSet, time::sleep};

use super::common::{
    ApiGateway, ApiPlace, begin_until_settled, created, new_id, payment, payment_of, request_bytes, response,
};

#[tokio::test]
async fn the_first_runs_and_the_second_gets_its_answer() {
    let gateway = ApiGateway::ietf("").await;
    let (exchange, message) = gateway.run(&payment("key-1")).await;
    assert_eq!(
        (&message["attempt"], &message["key"], &message["deadline_ms"]),
        (&json!(1), &json!("****"), &json!(60_000))
    );
    let fence = message["fence"].as_u64().expect("a fence");
    let headers = message["headers"].to_string();
    assert!(headers.contains(r#"["ibid-attempt","1"]"#) && headers.contains(&format!(r#"["ibid-fence","{fence}"]"#)));
    assert!(headers.contains("x-request-id"), "{headers}");
    let operation = message["operation"].as_str().expect("an operation");
    assert!(operation.len() == 32 && headers.contains(&format!(r#"["ibid-operation","{operation}"]"#)), "{message}");
    let first = gateway.end(&exchange, &created("paid")).await.answer();
    assert_eq!((first.status, first.body.as_str(), first.is_replay()), (201, "paid", false));
    let replay = gateway.begin(&payment("key-1")).await.answer();
    assert_eq!((replay.status, replay.body.as_str(), replay.is_replay()), (201, "paid", true));
    assert_eq!(replay.header("content-type"), Some("application/json"));
}

#[tokio::test]
async fn another_request_with_the_key_is_refused() {
    let gateway = ApiGateway::ietf("").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let in_progress = gateway.begin(&payment("key-1")).await.answer();
    assert_eq!((in_progress.status, in_progress.refusal().as_str()), (409, "in-progress"));
    assert!(in_progress.header("retry-after").is_some());
    gateway.end(&exchange, &created("paid")).await.answer();
    let reused = gateway.begin(&payment_of("key-1", r#"{"amount":2}"#)).await.answer();
    assert_eq!((reused.status, reused.refusal().as_str()), (422, "key-reused"));
}

#[tokio::test]
async fn what_no_policy_covers_needs_no_further_call() {
    let gateway = ApiGateway::start("[policy]\npreset = \"off\"\n[[route]]\nmatch = \"POST /pay\"\n").await;
    let mut other = payment("key-1");
    other["target"] = json!("/elsewhere");
    let passed = gateway.begin(&other).await;
    assert_eq!((passed.status, passed.body.as_str()), (204, ""));
    let mut keyless = payment("key-1");
    keyless["headers"].as_array_mut().unwrap().pop();
    assert_eq!(gateway.begin(&keyless).await.status, 204);
    assert_eq!(gateway.begin(&payment("key-1")).await.status, 201);
}

#[tokio::test]
async fn of_fifty_at_once_one_runs() {
    let gateway = Arc::new(ApiGateway::ietf("on_concurrent = \"wait\"\nwait_timeout = \"20s\"").await);
    let mut all = JoinSet::new();
    for _ in 0..50 {
        let gateway = gateway.clone();
        all.spawn(async move {
            let begun = gateway.begin(&payment("key-1")).await;
            if begun.status != 201 {
                return (false, begun.answer());
            }
            sleep(Duration::from_millis(100)).await;
            let exchange = begun.json()["exchange"].as_str().unwrap().to_owned();
            (true, gateway.end(&exchange, &created("paid")).await.answer())
        });
    }
    let answers = all.join_all().await;
    assert_eq!(answers.iter().filter(|(ran, _)| *ran).count(), 1, "{answers:?}");
    for (ran, answer) in answers {
        assert_eq!((answer.status, answer.body.as_str(), answer.is_replay()), (201, "paid", !ran));
    }
}

#[tokio::test]
async fn a_call_that_is_sent_again_gets_the_same_answer() {
    let gateway = ApiGateway::ietf("").await;
    let call = payment("key-1");
    let (exchange, first) = gateway.run(&call).await;
    assert_eq!(gateway.run(&call).await.1, first, "a lost begin");
    let ended = gateway.end(&exchange, &created("paid")).await;
    assert_eq!(gateway.end(&exchange, &created("paid")).await.body, ended.body, "a lost end");
    assert_eq!(gateway.begin(&call).await.answer().body, "paid", "the handler does not run again");
    let other = gateway.end(&exchange, &created("something else")).await;
    other.assert_problem(409, "ended with another response");
    gateway.failed(&exchange, "unknown").await.assert_problem(409, "ended with another response");
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().body, "paid");
}

#[tokio::test]
async fn an_id_belongs_to_one_request() {
    let gateway = ApiGateway::ietf("").await;
    let call = payment("key-1");
    gateway.run(&call).await;
    let mut other = payment("key-2");
    other["id"] = call["id"].clone();
    gateway.begin(&other).await.assert_problem(409, "another request has used it");
    other["id"] = json!(new_id());
    assert_eq!(gateway.begin(&other).await.status, 201);
}

#[tokio::test]
async fn a_response_that_is_not_remembered_frees_the_key() {
    let gateway = ApiGateway::ietf("").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let failed = gateway.end(&exchange, &response(500, "oops")).await.answer();
    assert_eq!((failed.status, failed.header("idempotency-stored")), (500, Some("false")));
    let (_, again) = gateway.run(&payment("key-1")).await;
    assert_eq!(again["attempt"], 2);
}

#[tokio::test]
async fn a_handler_that_did_not_start_frees_the_key_and_one_that_failed_does_not() {
    let gateway = ApiGateway::ietf("").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let answer = gateway.failed(&exchange, "not-started").await.answer();
    assert_eq!((answer.status, answer.refusal().as_str()), (502, "upstream-unreachable"));
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let answer = gateway.failed(&exchange, "unknown").await.answer();
    assert_eq!((answer.status, answer.refusal().as_str()), (502, "upstream-lost"));
    let held = gateway.begin(&payment("key-1")).await.answer();
    assert_eq!((held.status, held.refusal().as_str()), (409, "outcome-unknown"));
}

/// The app was killed: nobody ends the exchange.
#[tokio::test]
async fn without_an_end_the_outcome_is_unknown_and_a_later_end_resolves_it() {
    let gateway = ApiGateway::ietf("timeout = \"300ms\"\nlate_answer = \"200ms\"\nlease = \"5s\"").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let unknown = begin_until_settled(&gateway, "key-1").await.answer();
    assert_eq!((unknown.status, unknown.refusal().as_str()), (409, "outcome-unknown"));
    let late = gateway.end(&exchange, &created("paid")).await.answer();
    assert_eq!((late.status, late.body.as_str()), (201, "paid"));
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().body, "paid");
}

#[tokio::test]
async fn an_end_after_the_deadline_counts_until_somebody_has_taken_over() {
    let dials = "timeout = \"200ms\"\nlate_answer = \"100ms\"\nlease = \"200ms\"\non_unknown = \"retry\"";
    let gateway = ApiGateway::ietf(dials).await;
    let (first, _) = gateway.run(&payment("key-1")).await;
    let second = begin_until_settled(&gateway, "key-1").await;
    assert_eq!(second.status, 201, "{second:?}");
    let message = second.json();
    assert_eq!(message["attempt"], 2);
    let lost = gateway.end(&first, &created("first")).await.answer();
    assert!(["in-progress", "outcome-unknown"].contains(&lost.refusal().as_str()), "{lost:?}");
    let ended = gateway.end(message["exchange"].as_str().unwrap(), &created("second")).await.answer();
    assert_eq!(ended.body, "second");
    assert_eq!(gateway.end(&first, &created("first")).await.answer(), lost, "repeated");
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().body, "second");
}

#[tokio::test]
async fn the_claim_is_kept_until_the_deadline_and_an_extension_moves_it() {
    let gateway = ApiGateway::ietf("timeout = \"2s\"\nlate_answer = \"0s\"\nlease = \"300ms\"").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    sleep(Duration::from_millis(1200)).await;
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().refusal(), "in-progress", "four leases later");
    let extended = gateway.extend(&exchange).await;
    assert_eq!((extended.status, &extended.json()["deadline_ms"]), (200, &json!(2000)));
    sleep(Duration::from_millis(1400)).await;
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().refusal(), "in-progress", "after the first deadline");
    assert_eq!(gateway.end(&exchange, &created("paid")).await.answer().status, 201);
    gateway.extend(&exchange).await.assert_problem(409, "settled or taken over");
}

/// The app hung up while it waited for another run: it will not run its handler.
#[tokio::test]
async fn a_begin_whose_caller_left_before_its_turn_runs_nothing() {
    let gateway = ApiGateway::ietf("on_concurrent = \"wait\"\nwait_timeout = \"20s\"").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let ApiPlace::Unix(path) = &gateway.place else { unreachable!() };
    let mut waiting = UnixStream::connect(path).await.unwrap();
    waiting.write_all(&request_bytes("/v1/exchanges", None, &payment("key-1").to_string())).await.unwrap();
    sleep(Duration::from_millis(300)).await;
    drop(waiting);
    sleep(Duration::from_millis(100)).await;
    gateway.end(&exchange, &response(500, "not remembered")).await.answer();
    let next = gateway.begin(&payment("key-1")).await;
    assert_eq!(next.status, 201, "{next:?}");
}

#[tokio::test]
async fn a_large_answer_is_passed_on_whole_and_remembered_as_a_digest() {
    let gateway = ApiGateway::ietf("max_response = \"1KiB\"").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let large = "x".repeat(300_000);
    let first = gateway.end(&exchange, &created(&large)).await.answer();
    assert!(first.body == large, "{} bytes", first.body.len());
    let replay = gateway.begin(&payment("key-1")).await.answer();
    assert_eq!((replay.status, replay.header("idempotency-body")), (201, Some("digest")));
    assert!(replay.body.contains("\"length\":300000"), "{replay:?}");
}

#[tokio::test]
async fn a_body_above_the_limit_of_the_route_is_refused() {
    let gateway = ApiGateway::ietf("max_request = \"1KiB\"").await;
    let refused = gateway.begin(&payment_of("key-1", &"x".repeat(2000))).await.answer();
    assert_eq!((refused.status, refused.refusal().as_str()), (413, "body-too-large"));
}

#[tokio::test]
async fn the_headers_of_a_preset_are_those_of_the_gateway() {
    let gateway = ApiGateway::start("[policy]\npreset = \"membership\"\n").await;
    let mut call = payment("550e8400-e29b-41d4-a716-446655440000");
    let headers = call["headers"].as_array_mut().unwrap();
    headers.push(json!(["X-Request-Id", "request-1"]));
    headers.push(json!(["X-User-Id", "u1"]));
    call["peer"] = json!("127.0.0.1");
    let (exchange, _) = gateway.run(&call).await;
    let first = gateway.end(&exchange, &created(r#"{"ok":true}"#)).await.answer();
    assert_eq!(
        (first.header("x-idempotency-cached"), first.header("x-request-id")),
        (Some("false"), Some("request-1"))
    );
    call["id"] = json!(new_id());
    let replay = gateway.begin(&call).await.answer();
    assert_eq!(replay.header("x-idempotency-cached"), Some("true"));
    assert!(replay.header("x-original-timestamp").is_some(), "{replay:?}");
    assert!(replay.body.contains("\"metadata\""), "{replay:?}");
}

#[tokio::test]
async fn the_scope_is_that_of_the_client_not_of_the_app() {
    let gateway = ApiGateway::start("[policy]\npreset = \"ietf\"\nscope = [\"header:X-User-Id\"]\n").await;
    let mut call = payment("key-1");
    call["headers"].as_array_mut().unwrap().push(json!(["X-User-Id", "u1"]));
    assert_eq!(gateway.begin(&call).await.answer().refusal(), "scope-refused", "the client names itself");
    call["peer"] = json!("127.0.0.1");
    call["id"] = json!(new_id());
    assert_eq!(gateway.begin(&call).await.status, 201, "the app names it");
    *call["headers"].as_array_mut().unwrap().last_mut().unwrap() = json!(["X-User-Id", "u2"]);
    call["id"] = json!(new_id());
    assert_eq!(gateway.begin(&call).await.status, 201, "another user's key");
}

#[tokio::test]
async fn in_shadow_mode_the_handler_runs_and_its_response_is_unchanged() {
    let gateway = ApiGateway::ietf("mode = \"shadow\"").await;
    for _ in 0..2 {
        let (exchange, message) = gateway.run(&payment("key-1")).await;
        assert!(message["attempt"].is_null() && message["fence"].is_null(), "{message}");
        let answer = gateway.end(&exchange, &created("paid")).await.answer();
        assert_eq!((answer.status, answer.body.as_str(), answer.is_replay()), (201, "paid", false));
    }
}

#[tokio::test]
async fn a_shutdown_lets_exchanges_end_and_begins_nothing() {
    let mut gateway = ApiGateway::ietf("").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    gateway.process.signal(ProcessSignal::Term);
    gateway.process.wait_for_log("stopping").await;
    crate::support::until_some("a refusal", || async {
        let begun = gateway.begin(&payment("key-2")).await;
        (begun.status == 503).then_some(())
    })
    .await;
    assert_eq!(gateway.end(&exchange, &created("paid")).await.answer().status, 201);
    assert!(gateway.process.wait_exit(Duration::from_secs(10)).await.success());
    assert!(!gateway.process.dir().join("api.sock").exists(), "the socket is removed");
    gateway.process.restart().await;
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().body, "paid");
}
