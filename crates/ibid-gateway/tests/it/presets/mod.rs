//! Each preset as its page says, seen on the wire.
//!
//! One file per preset; what several of them promise in the same words is checked by the functions here. Every test runs
//! the binary with the preset's own configuration file, on the memory store, in front of an upstream that counts.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::Value;
use testbed::{
    client::{self, RawClient, TestRequest, TestResponse},
    upstream::{ReplyGate, UpstreamFault, UpstreamReply},
};
use tokio::{
    sync::Barrier,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::support::{TestGateway, run_ibid};

mod acp;
mod appsportal;
mod bookings;
mod iceberg;
mod ietf;
mod leads;
mod mcp;
mod membership;
mod platform;
mod requirements;
mod stripe;
mod ucp;

/// The key that the documents use, and how it is shown.
const UUID: &str = "550e8400-e29b-41d4-a716-446655440000";
const MASKED_UUID: &str = "550e****0000";

/// Every header by which an answer says what ibid did. A test names those that it expects: no other may be there.
const IBID_HEADERS: [&str; 8] = [
    "Idempotency-Stored",
    "Idempotency-Guarantee",
    "Idempotency-Body",
    "Idempotent-Replayed",
    "X-Idempotency-Replay",
    "X-Idempotency-Cached",
    "X-Original-Timestamp",
    "X-Request-Id",
];
/// Where Stripe's SDKs look for what a refusal is.
const STRIPE_CODES: [(&str, &str); 2] = [("in-progress", "idempotency_key_in_use"), ("quota-exceeded", "rate_limit")];
const NO_HEADERS: [(&str, &str); 0] = [];
const NOT_STORED: [(&str, &str); 1] = [("Idempotency-Stored", "false")];

/// How long nobody may be answered before the test believes that all of them wait.
const SILENCE_DURATION: Duration = Duration::from_millis(300);
/// Longer than any of the lifetimes that a test sets.
const LIFETIME_TIMEOUT: Duration = Duration::from_secs(10);

impl TestGateway {
    /// With the preset's own configuration file.
    async fn shipped(preset: &str) -> TestGateway {
        TestGateway::in_memory(&shipped_config(preset)).await
    }

    /// The same with these dials written under its preset.
    async fn shipped_with(preset: &str, dials: &str) -> TestGateway {
        let (found, under) = (shipped_config(preset), format!("\"{preset}\""));
        let set = |name: &str| dials.lines().any(|dial| dial.split('=').next().unwrap_or_default().trim() == name);
        let text = found.lines().map(|line| match line.split_once('=') {
            Some((name, value)) if name.trim() == "preset" && value.trim() == under => format!("{line}\n{dials}\n"),
            Some((name, _)) if set(name.trim()) => String::new(),
            _ => format!("{line}\n"),
        });
        TestGateway::in_memory(&text.collect::<String>()).await
    }

    /// The preset with these dials on every path: without the endpoints of its file.
    async fn everywhere(preset: &str, dials: &str) -> TestGateway {
        TestGateway::in_memory(&format!("[policy]\npreset = \"{preset}\"\n{dials}\n")).await
    }
}

fn preset_file(preset: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "presets", &format!("{preset}.toml")].iter().collect()
}

pub(crate) fn shipped_config(preset: &str) -> String {
    fs::read_to_string(preset_file(preset)).expect("the preset ships with a configuration")
}

/// What an answer says about itself, in the order of [`IBID_HEADERS`].
fn ibid_headers(answer: &TestResponse) -> Vec<(&'static str, &str)> {
    let all =
        IBID_HEADERS.iter().flat_map(|name| answer.headers.get_all(name).into_iter().map(move |value| (*name, value)));
    all.collect()
}

/// Checks that this is the answer to the upstream's execution number `run`, and says nothing about itself.
#[track_caller]
fn assert_run(answer: &TestResponse, run: usize) {
    assert_run_with_headers(answer, run, &NO_HEADERS);
}

#[track_caller]
fn assert_run_with_headers(answer: &TestResponse, run: usize, says: &[(&str, &str)]) {
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.text(), format!(r#"{{"id":{run},"run":{run}}}"#), "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"), "{answer:?}");
    assert_eq!(ibid_headers(answer), says, "{answer:?}");
}

/// Checks that `replay` is `first` again, and says this about itself and nothing else.
#[track_caller]
fn assert_replay(replay: &TestResponse, first: &TestResponse, says: &[(&str, &str)]) {
    assert_eq!(replay.status, first.status, "{replay:?}");
    assert_eq!(replay.body, first.body, "{replay:?}");
    assert_eq!(replayed_headers(replay), replayed_headers(first), "{replay:?}");
    assert_eq!(ibid_headers(replay), says, "{replay:?}");
    assert!(!replay.headers.contains("retry-after"), "{replay:?}");
}

/// The headers that a first answer and its replay have in common.
fn replayed_headers(answer: &TestResponse) -> Vec<(String, String)> {
    let apart = ["date", "set-cookie", "stripe-should-retry"];
    let own = |name: &str| IBID_HEADERS.iter().chain(&apart).any(|own| own.eq_ignore_ascii_case(name));
    let mut kept: Vec<_> = answer.headers.iter().map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect();
    kept.retain(|(name, _)| !own(name));
    kept.sort();
    kept
}

/// Checks a refusal as RFC 9457, or the protocol of its preset, and the table of refusals have it, and returns its body.
#[track_caller]
fn assert_refusal(answer: &TestResponse, status: u16, name: &str) -> Value {
    assert_eq!(answer.status, status, "{answer:?}");
    let problem = answer.json();
    if problem["error"]["code"].is_number() {
        assert_iceberg_refusal(answer, &problem, name);
    } else if problem["error"]["type"].is_string() {
        assert_stripe_refusal(answer, &problem["error"], name);
    } else if problem["code"].is_string() {
        assert_commerce_refusal(answer, &problem, name);
    } else {
        assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
        assert_eq!(problem["type"], format!("/.well-known/idempotency#{name}"), "{answer:?}");
        assert_eq!(problem["status"], status, "{answer:?}");
        for member in ["title", "detail"] {
            assert!(problem[member].as_str().is_some_and(|text| !text.is_empty()), "{answer:?}");
        }
    }
    let link = answer.header("link").is_some_and(|link| link.contains(r#"rel="describedby""#));
    let bad_request = ["key-missing", "key-invalid", "scope-missing", "request-ambiguous"].contains(&name);
    assert_eq!(link, bad_request, "{answer:?}");
    let retry_after = answer.header("retry-after").map(|after| after.parse::<u64>().expect("seconds"));
    let later = ["store-unavailable", "overloaded", "in-progress", "quota-exceeded"].contains(&name);
    assert_eq!(retry_after.is_some_and(|seconds| seconds > 0), later, "{answer:?}");
    assert_eq!(retry_after.is_some(), later, "{answer:?}");
    // Which request it was may be said of a refusal too; that it was replayed or stored may not.
    let says: Vec<_> = ibid_headers(answer).into_iter().filter(|(name, _)| *name != "X-Request-Id").collect();
    assert_eq!(says, NO_HEADERS, "{answer:?}");
    problem
}

#[track_caller]
fn assert_stripe_refusal(answer: &TestResponse, error: &Value, name: &str) {
    assert_eq!(answer.header("content-type"), Some("application/json"), "{answer:?}");
    assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{answer:?}");
    let known = STRIPE_CODES.iter().find(|(reason, _)| *reason == name).map(|(_, code)| (*code).to_owned());
    let code = known.unwrap_or_else(|| name.replace('-', "_"));
    match name {
        "key-reused" => assert_eq!((&error["type"], &error["code"]), (&"idempotency_error".into(), &Value::Null)),
        _ => assert_eq!(error["code"], code, "{answer:?}"),
    }
    let retry = answer.header("stripe-should-retry");
    assert!(matches!(retry, Some("true" | "false")), "{answer:?}");
    if matches!(name, "key-reused" | "outcome-unknown") {
        assert_eq!(retry, Some("false"), "{answer:?}");
    }
}

/// The members of an object, sorted.
fn members(object: &Value) -> Vec<&str> {
    let mut names: Vec<_> = object.as_object().expect("an object").keys().map(String::as_str).collect();
    names.sort_unstable();
    names
}

/// A refusal of the Agentic Commerce Protocol, or of the Universal Commerce Protocol.
#[track_caller]
fn assert_commerce_refusal(answer: &TestResponse, error: &Value, name: &str) {
    assert_eq!(answer.header("content-type"), Some("application/json"), "{answer:?}");
    let plain = name.replace('-', "_");
    if error["content"].is_string() {
        assert_eq!(members(error), ["code", "content"], "{answer:?}");
        let code = if name == "key-reused" { "IDEMPOTENCY_CONFLICT".into() } else { plain.to_uppercase() };
        assert_eq!(error["code"], code, "{answer:?}");
        return;
    }
    assert_eq!(members(error), ["code", "message", "type"], "{answer:?}");
    let code = match name {
        "key-missing" => "idempotency_key_required",
        "key-reused" => "idempotency_conflict",
        "in-progress" => "idempotency_in_flight",
        _ => &plain,
    };
    let kind = match name {
        "store-unavailable" | "overloaded" => "service_unavailable",
        "outcome-unknown" | "upstream-lost" | "upstream-timeout" | "upstream-unreachable" => "processing_error",
        _ => "invalid_request",
    };
    assert_eq!((error["type"].as_str(), error["code"].as_str()), (Some(kind), Some(code)), "{answer:?}");
}

#[track_caller]
fn assert_iceberg_refusal(answer: &TestResponse, body: &Value, name: &str) {
    assert_eq!(answer.header("content-type"), Some("application/json"), "{answer:?}");
    let error = &body["error"];
    assert_eq!((members(body), members(error)), (vec!["error"], vec!["code", "message", "type"]), "{answer:?}");
    assert_eq!(error["code"], answer.status, "{answer:?}");
    let kind = match name {
        "outcome-unknown" | "upstream-lost" | "upstream-timeout" => "CommitStateUnknownException",
        "in-progress" | "store-unavailable" => "SlowDownException",
        "key-reused" => "UnprocessableEntityException",
        "key-invalid" | "request-ambiguous" => "BadRequestException",
        _ => error["type"].as_str().expect("text"),
    };
    assert_eq!(error["type"], kind, "{answer:?}");
}

/// Sends a request until it is no longer told that the first one is still running, as the documents' clients do.
async fn send_until_not_in_progress(request: &TestRequest) -> TestResponse {
    let patience = async {
        loop {
            let answer = request.send().await;
            if answer.status != 409 {
                return answer;
            }
            assert_refusal(&answer, 409, "in-progress");
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(LIFETIME_TIMEOUT, patience).await.expect("the first request ends")
}

/// Starts `n` of the same request at the same moment, each on its own connection.
fn burst(n: usize, request: &TestRequest) -> JoinSet<TestResponse> {
    let start = Arc::new(Barrier::new(n));
    let mut answers = JoinSet::new();
    for _ in 0..n {
        let (request, start) = (request.clone(), Arc::clone(&start));
        answers.spawn(async move {
            let mut raw = RawClient::connect(request.addr()).await;
            start.wait().await;
            request.send_on(&mut raw).await
        });
    }
    answers
}

async fn next(answers: &mut JoinSet<TestResponse>) -> TestResponse {
    answers.join_next().await.expect("not all answers have come").expect("an answer came")
}

/// Requests with one key that do not share an operation: each runs, and is replayed on its own.
async fn each_runs_once(bench: &TestGateway, requests: &[TestRequest], replay_says: &[(&str, &str)]) {
    for says in [&NO_HEADERS[..], replay_says] {
        for (run, request) in requests.iter().enumerate() {
            assert_run_with_headers(&request.send().await, run + 1, says);
        }
    }
    bench.assert_executed(requests.len());
}

/// `on_concurrent = "reject"`: of fifty, one runs; the others are told to come back, and then get its answer.
async fn of_fifty_one_runs_and_the_others_come_back(
    bench: &TestGateway, request: &TestRequest, replay_says: &[(&str, &str)],
) {
    let gate = ReplyGate::new();
    bench.upstream.reply_by_default(UpstreamReply::usual().gated(&gate));
    let mut answers = burst(50, request);
    for _ in 1..50 {
        assert_refusal(&next(&mut answers).await, 409, "in-progress");
    }
    gate.arrived(1).await;
    bench.assert_executed(1);
    gate.open();
    let first = next(&mut answers).await;
    assert_run(&first, 1);
    for retry in client::many(49, || request.clone()).await {
        assert_replay(&retry, &first, replay_says);
    }
    bench.assert_executed(1);
}

/// `on_concurrent = "wait"`: of fifty, one runs, nobody is answered before it ends, and none is refused.
async fn of_fifty_one_runs_and_the_others_wait(bench: &TestGateway, request: &TestRequest) -> Vec<TestResponse> {
    let gate = ReplyGate::new();
    bench.upstream.reply_by_default(UpstreamReply::usual().gated(&gate));
    let mut answers = burst(50, request);
    gate.arrived(1).await;
    if let Ok(early) = timeout(SILENCE_DURATION, next(&mut answers)).await {
        panic!("answered while the first was running: {early:?}");
    }
    gate.open();
    let answers = answers.join_all().await;
    assert_eq!(answers.len(), 50);
    bench.assert_executed(1);
    answers
}

const SHORT_LEASE: &str = "lease = \"1s\"";

/// `on_unknown = "retry"`: after a lost answer a retry runs again once the lease has lapsed, as the second attempt under a
/// higher fence. Returns the answers of that run and of the next retry. The bench has [`SHORT_LEASE`].
async fn a_lost_answer_runs_again(bench: &TestGateway, request: &TestRequest) -> (TestResponse, TestResponse) {
    let start = Instant::now();
    bench.upstream.reply_by_default(UpstreamFault::ResetAfterRequest);
    assert_refusal(&request.send().await, 502, "upstream-lost");
    bench.assert_executed(1);
    bench.upstream.clear_rules();
    let second = send_until_not_in_progress(request).await;
    assert!(start.elapsed() >= Duration::from_secs(1), "taken over after {:?}", start.elapsed());
    let log = bench.upstream.log();
    assert_eq!(log.iter().map(|seen| seen.attempt()).collect::<Vec<_>>(), [Some(1), Some(2)]);
    assert!(log[0].fence() < log[1].fence(), "{log:#?}");
    let third = request.send().await;
    bench.assert_executed(2);
    (second, third)
}

/// `on_unknown = "hold"`: after a lost answer every retry is refused, and nothing runs again.
async fn a_lost_answer_is_held(bench: &TestGateway, request: &TestRequest) {
    bench.upstream.reply_by_default(UpstreamFault::ResetAfterRequest);
    assert_refusal(&request.send().await, 502, "upstream-lost");
    bench.upstream.clear_rules();
    for _ in 0..2 {
        assert_refusal(&request.send().await, 409, "outcome-unknown");
    }
    bench.assert_executed(1);
}

/// After a time-out the operation may still be running: it is run again, but not before its lease has lapsed. The
/// bench has `timeout = "200ms"` and this lease.
async fn a_timed_out_operation_runs_again_after_its_lease(bench: &TestGateway, request: &TestRequest, lease: Duration) {
    let start = Instant::now();
    bench.upstream.reply_by_default(UpstreamFault::Hang);
    assert_refusal(&request.send().await, 504, "upstream-timeout");
    bench.upstream.clear_rules();
    let again = send_until_not_in_progress(request).await;
    assert!(start.elapsed() >= lease, "taken over after {:?}", start.elapsed());
    assert_eq!(again.status, 201, "{again:?}");
    assert_eq!(bench.upstream.last().attempt(), Some(2));
    bench.assert_executed(2);
}

/// A key is new once its time is over, and not before. The bench has this `ttl`.
async fn a_key_is_new_after(ttl: Duration, bench: &TestGateway, request: &TestRequest) {
    let start = Instant::now();
    assert_eq!(request.send().await.status, 201);
    let expired = async {
        while bench.upstream.executions() == 1 {
            assert_eq!(request.send().await.status, 201);
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(LIFETIME_TIMEOUT, expired).await.expect("the answer is forgotten");
    assert!(start.elapsed() >= ttl, "forgotten after {:?}", start.elapsed());
    bench.assert_executed(2);
    assert_eq!(bench.upstream.last().attempt(), Some(1), "a new key, not another attempt");
}

/// Statuses that are remembered: the operation runs once, and its failure is what every retry gets.
async fn remembered(
    bench: &TestGateway, statuses: &[u16], request: impl Fn(u16) -> TestRequest, replay_says: &[(&str, &str)],
) {
    for (count, status) in statuses.iter().enumerate() {
        bench.upstream.reply_by_default(UpstreamReply::status(*status).numbered());
        let request = request(*status);
        let first = request.send().await;
        assert_eq!((first.status, ibid_headers(&first)), (*status, NO_HEADERS.to_vec()), "{first:?}");
        bench.upstream.clear_rules();
        assert_replay(&request.send().await, &first, replay_says);
        bench.assert_executed(count + 1);
    }
}

/// Statuses that are not: the answer says so, and the next request with the key runs.
async fn not_remembered(
    bench: &TestGateway, statuses: &[u16], request: impl Fn(u16) -> TestRequest, replay_says: &[(&str, &str)],
) {
    for (count, status) in statuses.iter().enumerate() {
        bench.upstream.reply_by_default(UpstreamReply::status(*status).numbered());
        let request = request(*status);
        let failed = request.send().await;
        assert_eq!((failed.status, ibid_headers(&failed)), (*status, NOT_STORED.to_vec()), "{failed:?}");
        bench.upstream.clear_rules();
        let first = request.send().await;
        assert_run(&first, 2 * count + 2);
        assert_replay(&request.send().await, &first, replay_says);
        bench.assert_executed(2 * count + 2);
    }
}

/// A request that nothing is done about: it runs each time, and its answer is the app's.
async fn passes_through(bench: &TestGateway, request: &TestRequest) {
    let before = bench.upstream.requests();
    for n in 1..=2 {
        let answer = request.send().await;
        assert!(matches!(answer.status, 200 | 201), "{answer:?}");
        assert_eq!(ibid_headers(&answer), NO_HEADERS, "{answer:?}");
        assert_eq!(bench.upstream.requests(), before + n);
        let seen = bench.upstream.last();
        assert_eq!((seen.attempt(), seen.fence()), (None, None), "{seen:#?}");
    }
}

/// A key that is refused: nothing runs, and the refusal does not repeat the key.
async fn key_is_invalid(bench: &TestGateway, request: &TestRequest) {
    let before = bench.upstream.requests();
    let answer = request.send().await;
    assert_refusal(&answer, 400, "key-invalid");
    assert_eq!(bench.upstream.requests(), before);
}

/// Once the key was logged it was logged masked, and never in full.
async fn keys_are_masked_in_the_log(bench: &TestGateway, request: &TestRequest, key: &str, masked: &str) {
    for _ in 0..2 {
        request.send().await;
    }
    bench.gateway.wait_for_log("replayed").await;
    let logs = bench.gateway.logs();
    assert!(logs.iter().any(|line| line.contains(masked)), "{logs:#?}");
    assert!(!logs.iter().any(|line| line.to_lowercase().contains(&key.to_lowercase())), "{logs:#?}");
}

/// A route as `ibid check` prints it: its name and its dials.
type CheckedRoute = (String, BTreeMap<String, String>);

/// What `ibid check` says about the preset's own configuration.
async fn checked_routes(preset: &str) -> Vec<CheckedRoute> {
    let file = preset_file(preset);
    let output = run_ibid(&["check", file.to_str().expect("a plain path")], &[]).await;
    let text = output.text();
    assert!(output.code == Some(0), "{text}");
    let mut routes: Vec<CheckedRoute> = Vec::new();
    let (_, body) = text.split_once("\n\n").expect("a first line");
    for line in body.lines().take_while(|line| *line != "* differs from the preset") {
        if line.starts_with("[policy]  off ") {
            break;
        }
        if line.starts_with("route[") || line.starts_with("[policy]") {
            let name =
                line.split("    (").next().and_then(|start| start.split_once("  ")).expect("a place and a name").1;
            routes.push((name.to_owned(), BTreeMap::new()));
        } else if let (Some((name, value)), Some((_, dials))) =
            (line[line.len().min(2)..].split_once(' '), routes.last_mut())
        {
            dials.insert(name.to_owned(), value.trim().to_owned());
        }
    }
    assert!(!routes.is_empty(), "{text}");
    routes
}

/// Checks that every route of the preset's configuration has these dials.
async fn every_route_has(preset: &str, column: &[(&str, &str)]) {
    for (route, dials) in checked_routes(preset).await {
        for (dial, value) in column {
            assert_eq!(dials.get(*dial).map(String::as_str), Some(*value), "{dial} of {route}");
        }
    }
}
