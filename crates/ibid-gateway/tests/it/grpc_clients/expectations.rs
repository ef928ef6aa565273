//! What each scenario should have shown. Codes are numbers: 0 OK, 3 INVALID_ARGUMENT, 9 FAILED_PRECONDITION, 10 ABORTED.

use serde_json::{Value, json};

use super::common::{GrpcClientKind, GrpcProtection, GrpcShop};

pub(super) async fn a_first_call_runs_once_and_arrives_as_it_was_sent(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "first").await;
    let answer = &seen["answer"];
    assert_eq!((&answer["code"], &answer["id"], &answer["amount"]), (&json!(0), &json!("order-1"), &json!(1)));
    // The key as it was sent; an answer that every client reads; the route's time, not this client's.
    for (name, value) in [
        ("idempotency-key", "Zmlyc3Q="),          // first
        ("grpc-accept-encoding", "aWRlbnRpdHk="), // identity
        ("grpc-timeout", "NjAwMDAwbQ=="),         // 600000m
        ("ibid-attempt", "MQ=="),                 // 1
    ] {
        assert_eq!(values(&answer["echo"], name), [value], "{name}");
    }
    assert_eq!(seen["stats"], ran_once());
}

pub(super) async fn a_replay_has_the_message_metadata_trailers_and_details_of_the_first(
    scene: &GrpcShop, client: GrpcClientKind,
) {
    let seen = scene.run_scenario(client, "replay").await;
    let first = expect_identical(&seen["ok"], 3);
    assert_eq!(first["code"], 0);
    assert_eq!(values(&first["initial"], "x-shelf").join(", "), "a, b");
    assert_eq!(values(&first["trailing"], "x-cost"), ["3"]);
    assert_eq!(values(&first["trailing"], "x-proof-bin"), ["AP8="]);
    let failed = expect_identical(&seen["failed"], 3);
    assert_eq!((&failed["code"], &failed["message"]), (&json!(5), &json!("no tea left")));
    assert_eq!(failed["details"], json!({ "reason": "SOLD_OUT", "domain": "shop" }));
    assert_eq!(values(&failed["trailing"], "x-cost"), ["3"]);
    assert_eq!(values(&failed["trailing"], "x-shelf").join(", "), "a, b", "an answer of trailers only stays one");
    assert_eq!(failed["initial"], json!([]), "an answer of trailers only stays one");
    assert_eq!(seen["stats"], json!([ran_once(), ran_once()]));
}

pub(super) async fn a_key_for_another_message_or_method_is_refused(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "mismatch").await;
    let [first, other, again, other_method] = &list(&seen["answers"])[..] else { panic!("{seen}") };
    assert_eq!((&first["code"], first), (&json!(0), again));
    for refused in [other, other_method] {
        assert_refused(refused, 3, json!({ "reason": "KEY_REUSED", "domain": "ibid" }));
    }
    assert_eq!(seen["stats"], ran_once());
}

pub(super) async fn a_call_without_a_key_is_refused(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "missing_key").await;
    let details = json!({ "reason": "KEY_MISSING", "domain": "ibid", "fields": ["idempotency-key"] });
    assert_refused(&seen["answer"], 3, details);
    assert_eq!(seen["stats"], json!({ "begun": 0, "finished": 0 }));
}

/// The first call is let go on only when both others were refused: the one that does not try again, and the first try of
/// the one that does. So an answer to that one is the answer to a later try, which the library made by itself.
pub(super) async fn a_client_tries_again_by_itself_while_the_first_runs(scene: &GrpcShop, client: GrpcClientKind) {
    let open = async {
        scene.wait_for_in_progress_refusals(2).await;
        scene.shop.open_gate("busy");
    };
    let (seen, ()) = tokio::join!(scene.run_scenario(client, "in_progress"), open);
    let refused = &seen["refused"];
    assert_refused(refused, 10, json!({ "reason": "IN_PROGRESS", "domain": "ibid", "retry_ms": 1000 }));
    assert_eq!(values(&refused["trailing"], "grpc-retry-pushback-ms"), ["1000"]);
    assert_eq!((&seen["first"]["code"], &seen["first"]), (&json!(0), &seen["retried"]));
    // Node says how often; Python does not.
    let tries = &seen["tries_before"];
    assert!(
        matches!(client, GrpcClientKind::Python) || tries.as_u64() >= Some(1),
        "{tries} tries before the answered one"
    );
    assert_eq!(seen["stats"], ran_once());
}

pub(super) async fn a_deadline_in_mid_run_leaves_one_effect_and_its_answer(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "deadline").await;
    let code = &seen["lost"]["code"];
    // tonic has a deadline of its own, and says CANCELLED if it notices first.
    let tonic_first = matches!(scene.protection, GrpcProtection::Layer(_)) && code == 1;
    assert!(code == 4 || tonic_first, "{seen}");
    assert_completed_after_client_left(&seen);
}

pub(super) async fn a_cancelled_call_leaves_one_effect_and_its_answer(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "cancelled").await;
    assert_eq!(seen["lost"]["code"], 1);
    assert_completed_after_client_left(&seen);
}

pub(super) async fn a_compressed_call_and_a_plain_one_are_the_same(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "gzip").await;
    assert_eq!((&seen["packed"]["code"], &seen["packed"]), (&json!(0), &seen["plain"]));
    assert_eq!(values(&seen["packed"]["echo"], "grpc-encoding"), ["Z3ppcA=="], "it went on compressed");
    assert_eq!(values(&seen["packed"]["initial"], "grpc-encoding"), [""; 0], "and came back plain");
    assert_eq!(seen["stats"], ran_once());
}

pub(super) async fn binary_metadata_of_one_name_stay_several(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "binary_metadata").await;
    let answer = expect_identical(&seen["answers"], 2);
    let twice = ["AAH/", "/g=="];
    assert_eq!(values(&answer["echo"], "trace-bin"), twice, "as the server saw them");
    assert_eq!(values(&answer["initial"], "seen-bin"), twice);
    assert_eq!(values(&answer["trailing"], "seen-bin"), twice);
    assert_eq!(seen["stats"], ran_once());
}

pub(super) async fn messages_beyond_ascii_come_back_as_they_were(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "messages").await;
    let answer = expect_identical(&seen["answers"], 2);
    assert_eq!(answer["code"], 9);
    assert_eq!(answer["message"], "Größe 100 % – tab\t, line\n, \u{1f4a5}");
    assert_eq!(seen["stats"], ran_once());
}

pub(super) async fn empty_messages_are_messages(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "empty").await;
    let asked = expect_identical(&seen["asked"], 2);
    assert_eq!((&asked["code"], &asked["id"]), (&json!(0), &json!("order-1")));
    let given = expect_identical(&seen["given"], 2);
    assert_eq!((&given["code"], &given["body"]["length"]), (&json!(0), &json!(0)));
    assert_eq!(seen["stats"], json!([ran_once(), ran_once()]));
}

pub(super) async fn large_answers_are_kept_up_to_the_limit(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "big").await;
    let kept = expect_identical(&seen["kept"], 2);
    assert_eq!(kept["code"], 0);
    assert!(kept["body"]["length"].as_u64() > Some(300_000), "{kept}");
    let [whole, digest] = &list(&seen["large"])[..] else { panic!("{seen}") };
    assert_eq!(whole["code"], 0);
    assert!(whole["body"]["length"].as_u64() > Some(2_000_000), "{whole}");
    assert_refused(digest, 9, json!({ "reason": "ANSWER_TOO_LARGE", "domain": "ibid" }));
    assert_eq!(seen["stats"], json!([ran_once(), ran_once()]));
}

pub(super) async fn streams_with_a_key_pass_as_they_come(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "streams").await;
    let chat = expect_identical(&seen["chats"], 2);
    assert_eq!(chat, &json!({ "said": ["you said: one", "you said: two"], "rest": 0, "code": 0 }));
    assert_eq!(expect_identical(&seen["watched"], 2), &json!({ "rest": 2, "code": 0 }));
}

pub(super) async fn of_fifty_calls_at_once_one_runs(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "concurrent").await;
    let (ran, refused): (Vec<_>, Vec<_>) = list(&seen["answers"]).iter().partition(|answer| answer["code"] == 0);
    assert_eq!((ran.len(), refused.len()), (1, 49));
    for answer in refused {
        assert_refused(answer, 10, json!({ "reason": "IN_PROGRESS", "domain": "ibid", "retry_ms": 1000 }));
    }
    assert_eq!(expect_identical(&seen["again"], 50), ran[0]);
    assert_eq!(seen["stats"], ran_once());
}

pub(super) async fn reflection_passes(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "reflection").await;
    let version = match client {
        GrpcClientKind::Python => "grpc.reflection.v1alpha.ServerReflection",
        GrpcClientKind::Node => "grpc.reflection.v1.ServerReflection",
    };
    assert_eq!(seen["services"], json!(["grpc.health.v1.Health", version, "shop.Orders"]));
    assert_eq!(seen["methods"], json!(["Create", "Pay", "Refund", "Watch", "Chat", "Stats", "Open"]));
}

pub(super) async fn health_passes(scene: &GrpcShop, client: GrpcClientKind) {
    let seen = scene.run_scenario(client, "health").await;
    // 1 is SERVING; the code for a service that nobody knows is NOT_FOUND.
    assert_eq!(seen, json!({ "status": 1, "watched": 1, "unknown": 5 }));
}

fn ran_once() -> Value {
    json!({ "begun": 1, "finished": 1 })
}

/// The client left while the call ran; the call went on, and its answer was there for the retry.
fn assert_completed_after_client_left(seen: &Value) {
    assert_eq!(seen["before"], json!({ "begun": 0, "finished": 0 }));
    assert_eq!(seen["running"], json!({ "begun": 1, "finished": 0 }), "it was still running when its client had gone");
    let answer = expect_identical(&seen["again"], 2);
    assert_eq!((&answer["code"], &answer["id"]), (&json!(0), &json!("order-1")));
    assert_eq!(seen["stats"], ran_once());
}

#[track_caller]
fn assert_refused(answer: &Value, code: u32, details: Value) {
    assert_eq!((&answer["code"], &answer["details"]), (&json!(code), &details), "{answer}");
    assert_eq!(answer["initial"], json!([]), "refusals are trailers only");
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

/// The first of `count` answers that do not differ.
#[track_caller]
fn expect_identical(answers: &Value, count: usize) -> &Value {
    let answers = list(answers);
    assert_eq!(answers.len(), count);
    for answer in answers {
        assert_eq!(answer, &answers[0]);
    }
    &answers[0]
}

/// The values of one name, in their order.
fn values<'a>(metadata: &'a Value, name: &str) -> Vec<&'a str> {
    let pairs = list(metadata).iter().filter(|pair| pair[0] == name);
    pairs.map(|pair| pair[1].as_str().expect("a text")).collect()
}
