//! Envoy's external processing: Envoy in front of a counting upstream, and ibid beside it.

mod grpc;
mod protocol;

use std::time::Duration;

use testbed::{
    HTTP2_APP, TestEnvoy,
    client::{RawClient, TestRequest, TestResponse, get, post},
    process::{GatewayProcess, ProcessSignal},
    upstream::{ReplyGate, TestUpstream, UpstreamFault, UpstreamReply},
};

use crate::{
    scenarios::{ScenarioTransport, run_all},
    sdks::python::uvicorn,
    support::{
        BIN, assert_ran, assert_refused, assert_replay, caller, folder_with, policy, run_ibid, send_until_settled,
    },
};

struct EnvoySetup {
    upstream: TestUpstream,
    envoy: TestEnvoy,
    ibid: GatewayProcess,
}

impl EnvoySetup {
    /// `changes` replaces parts of Envoy's configuration.
    async fn start(config: &str, changes: &[(&str, &str)]) -> EnvoySetup {
        let upstream = TestUpstream::start().await;
        let envoy = TestEnvoy::start(upstream.addr(), changes);
        let config = format!("[ext_proc]\nlisten = \"{}\"\n{config}", envoy.ext_proc_addr());
        let ibid = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).start().await;
        EnvoySetup { upstream, envoy, ibid }
    }

    async fn ietf(dials: &str) -> EnvoySetup {
        EnvoySetup::start(&policy(dials), &[]).await
    }

    fn post(&self, path: &str, key: &str) -> TestRequest {
        caller(post(self.envoy.addr(), path)).key(key).json(r#"{"amount":1}"#)
    }

    /// The value of one of Envoy's counters of the filter.
    async fn counter(&self, name: &str) -> u64 {
        let all = get(self.envoy.admin_addr(), format!("/stats?filter=ext_proc.{name}$")).send().await.text();
        all.rsplit_once(": ").and_then(|(_, value)| value.trim().parse().ok()).unwrap_or(0)
    }
}

fn assert_unknown(answer: &TestResponse) {
    assert_refused(answer, 409, "outcome-unknown");
}

#[tokio::test]
async fn envoy_passes_all_scenarios() {
    run_all(ScenarioTransport::Envoy, uvicorn()).await;
}

#[tokio::test]
async fn the_app_runs_once_and_the_retry_is_replayed() {
    let setup = EnvoySetup::ietf("").await;
    setup.upstream.on("/pay", UpstreamReply::status(201).header("X-One", "1").set_cookie("a=1").numbered());
    let first = setup.post("/pay", "k1").send().await;
    assert_ran(&first);
    assert_eq!(first.status, 201);
    let ran = setup.upstream.last();
    assert_eq!((ran.attempt(), ran.text().as_str()), (Some(1), r#"{"amount":1}"#));
    assert_eq!(ran.header("ibid-operation").map(str::len), Some(32));
    assert_replay(&setup.post("/pay", "k1").send().await, &first);
    assert_refused(&setup.post("/pay", "k1").json(r#"{"amount":2}"#).send().await, 422, "key-reused");
    assert_eq!(setup.upstream.executions(), 1);
}

#[tokio::test]
async fn a_request_without_a_body_is_claimed_at_its_headers() {
    let setup = EnvoySetup::start("[[route]]\nmatch = \"DELETE /pay\"\n", &[]).await;
    let empty = caller(post(setup.envoy.addr(), "/pay")).key("k0").chunked();
    assert_ran(&empty.send().await);
    let delete = caller(testbed::client::request("DELETE", setup.envoy.addr(), "/pay")).key("k1");
    let first = delete.send().await;
    assert_ran(&first);
    assert_replay(&delete.send().await, &first);
    assert_eq!(setup.upstream.executions(), 2);
}

#[tokio::test]
async fn a_request_that_no_policy_covers_costs_one_message() {
    let setup = EnvoySetup::ietf("").await;
    let sent = setup.counter("stream_msgs_sent").await;
    assert_eq!(get(setup.envoy.addr(), "/orders").send().await.status, 200);
    assert_eq!(setup.counter("stream_msgs_sent").await - sent, 1);
    // A large body without a key streams: Envoy would refuse to buffer it.
    let large = post(setup.envoy.addr(), "/upload").body(vec![b'x'; 3 << 20]).send().await;
    assert_eq!(large.status, 201, "{large:?}");
    assert_eq!(setup.counter("stream_msgs_sent").await - sent, 2);
    assert_eq!(setup.counter("streams_failed").await, 0);
}

#[tokio::test]
async fn envoys_buffer_limits_covered_requests() {
    let config = format!("[limits]\nbody_timeout = \"1s\"\n{}", policy("max_request = \"8MiB\"\n"));
    let setup = EnvoySetup::start(&config, &[]).await;
    let large = caller(post(setup.envoy.addr(), "/pay")).key("k1").body(vec![b'x'; 3 << 20]);
    assert_eq!(large.send().await.status, 408);
    assert_ran(&setup.post("/pay", "k1").send().await);
}

#[tokio::test]
async fn a_large_response_streams_and_is_recorded_as_a_digest() {
    let setup = EnvoySetup::ietf("").await;
    setup.upstream.on("/large", UpstreamReply::usual().large(3 << 20));
    let first = setup.post("/large", "k1").send().await;
    assert_eq!((first.status, first.body.len(), first.header("content-length")), (201, 3 << 20, Some("3145728")));
    let again = send_until_settled(&setup.post("/large", "k1")).await;
    assert_eq!(again.header("idempotency-body"), Some("digest"), "{again:?}");
    assert_eq!(setup.upstream.executions(), 1);
}

#[tokio::test]
async fn events_arrive_while_the_app_sends_them() {
    let setup = EnvoySetup::ietf("").await;
    setup.upstream.on("/events", UpstreamReply::events(3, Duration::from_millis(700)));
    let mut client = setup.post("/events", "k1").start().await;
    let begun = client.read_until("data: 1").await;
    assert!(!begun.contains("data: 2"), "{begun}");
    client.read_until("data: 3").await;
    assert_eq!(setup.upstream.executions(), 1);
}

/// Envoy has the trailers of an app that speaks HTTP/2. It cannot add trailers to a replay.
#[tokio::test]
async fn trailers_of_the_response_are_recorded() {
    let upstream = TestUpstream::start_h2c().await;
    upstream
        .reply_by_default(UpstreamReply::status(201).header("trailer", "x-check").body("paid").trailer("x-check", "1"));
    let envoy = TestEnvoy::start(upstream.addr(), &[HTTP2_APP]);
    let config = format!("[ext_proc]\nlisten = \"{}\"\n{}", envoy.ext_proc_addr(), policy(""));
    let ibid = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).start().await;
    let request = |addr| caller(post(addr, "/pay")).key("k1").header("TE", "trailers").json("{}");
    let first = request(envoy.addr()).send().await;
    assert_eq!((first.status, first.text().as_str()), (201, "paid"));
    let replay = request(ibid.addr()).send().await;
    assert_eq!((replay.text().as_str(), replay.trailers.get("x-check")), ("paid", Some("1")), "{replay:?}");
    assert_eq!(request(envoy.addr()).send().await.text(), "paid");
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_response_that_breaks_off_leaves_the_outcome_unknown() {
    let setup = EnvoySetup::ietf("").await;
    setup.upstream.on("/pay", UpstreamFault::TruncatedChunked);
    let _ = setup.post("/pay", "k1").try_send().await;
    assert_unknown(&send_until_settled(&setup.post("/pay", "k1")).await);
    assert_eq!(setup.upstream.executions(), 1);
}

#[tokio::test]
async fn a_client_that_disconnects_leaves_the_outcome_unknown() {
    let setup = EnvoySetup::ietf("").await;
    let gate = setup.upstream.gate("/pay");
    let client: RawClient = setup.post("/pay", "k1").start().await;
    gate.arrived(1).await;
    client.abort();
    assert_unknown(&send_until_settled(&setup.post("/pay", "k1")).await);
    gate.open();
    assert_eq!(setup.upstream.executions(), 1);
}

#[tokio::test]
async fn an_app_that_cannot_be_reached_leaves_the_key_free() {
    let setup = EnvoySetup::ietf("").await;
    setup.upstream.stop().await;
    assert_refused(&setup.post("/pay", "k1").send().await, 502, "upstream-unreachable");
    setup.upstream.restart().await;
    assert_ran(&setup.post("/pay", "k1").send().await);
    assert_eq!(setup.upstream.executions(), 1);
}

#[tokio::test]
async fn a_connection_that_breaks_leaves_the_outcome_unknown() {
    let setup = EnvoySetup::ietf("").await;
    let gate = setup.upstream.gate("/pay");
    let request = setup.post("/pay", "k1");
    let sent = tokio::spawn(async move { request.send().await });
    gate.arrived(1).await;
    setup.upstream.stop().await;
    assert_refused(&sent.await.unwrap(), 502, "upstream-lost");
    setup.upstream.restart().await;
    assert_unknown(&setup.post("/pay", "k1").send().await);
}

#[tokio::test]
async fn a_time_out_of_envoy_leaves_the_outcome_unknown() {
    let setup = EnvoySetup::start(&policy(""), &[("timeout: 60s }", "timeout: 1s }")]).await;
    let _gate = setup.upstream.gate("/pay");
    assert_refused(&setup.post("/pay", "k1").send().await, 504, "upstream-timeout");
    assert_unknown(&setup.post("/pay", "k1").send().await);
    assert_eq!(setup.upstream.executions(), 1);
}

#[tokio::test]
async fn an_app_that_takes_longer_than_its_policy_allows_is_given_up() {
    let setup = EnvoySetup::ietf("timeout = \"1s\"\nlate_answer = \"0s\"\n").await;
    let _gate = setup.upstream.gate("/pay");
    assert_refused(&setup.post("/pay", "k1").send().await, 504, "upstream-timeout");
    assert_unknown(&setup.post("/pay", "k1").send().await);
    assert_eq!(setup.upstream.executions(), 1);
}

#[tokio::test]
async fn envoy_waits_while_ibid_waits_for_another_run() {
    let wait = "on_concurrent = \"wait\"\nwait_timeout = \"20s\"\n";
    let changes = [("message_timeout: 5s", "message_timeout: 0.2s")];
    let setup = EnvoySetup::start(&policy(wait), &changes).await;
    let gate = setup.upstream.gate("/pay");
    let (one, two) = (setup.post("/pay", "k1"), setup.post("/pay", "k1"));
    let one = tokio::spawn(async move { one.send().await });
    gate.arrived(1).await;
    let two = tokio::spawn(async move { two.send().await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    gate.open();
    assert_replay(&two.await.unwrap(), &one.await.unwrap());
}

#[tokio::test]
async fn envoy_gives_up_a_wait_that_is_longer_than_it_allows() {
    let wait = "on_concurrent = \"wait\"\nwait_timeout = \"20s\"\n";
    let changes =
        [("message_timeout: 5s", "message_timeout: 0.2s"), ("max_message_timeout: 60s", "max_message_timeout: 1s")];
    let setup = EnvoySetup::start(&policy(wait), &changes).await;
    let gate = setup.upstream.gate("/pay");
    let first = setup.post("/pay", "k1");
    let first = tokio::spawn(async move { first.send().await });
    gate.arrived(1).await;
    assert_eq!(setup.post("/pay", "k1").send().await.status, 504, "Envoy's own response");
    gate.open();
    assert_replay(&setup.post("/pay", "k1").send().await, &first.await.unwrap());
    assert_eq!(setup.upstream.executions(), 1);
}

#[tokio::test]
async fn without_ibid_failure_mode_allow_decides() {
    let mut closed = EnvoySetup::ietf("").await;
    closed.ibid.kill().await;
    assert_eq!(closed.post("/pay", "k1").send().await.status, 500);
    assert_eq!(closed.upstream.executions(), 0);

    let mut open = EnvoySetup::start(&policy(""), &[("failure_mode_allow: false", "failure_mode_allow: true")]).await;
    open.ibid.kill().await;
    assert_eq!(open.post("/pay", "k1").send().await.status, 201);
    assert_eq!(open.upstream.executions(), 1);
}

#[tokio::test]
async fn ibid_that_stops_ends_its_streams_with_an_error() {
    let mut setup = EnvoySetup::start(&format!("[limits]\nshutdown = \"1s\"\n{}", policy("")), &[]).await;
    let gate = setup.upstream.gate("/pay");
    let request = setup.post("/pay", "k1");
    let sent = tokio::spawn(async move { request.send().await });
    gate.arrived(1).await;
    setup.ibid.signal(ProcessSignal::Term);
    assert_eq!(sent.await.unwrap().status, 500);
    setup.ibid.wait_exit(Duration::from_secs(20)).await;
    setup.ibid.restart().await;
    gate.open();
    assert_unknown(&send_until_settled(&setup.post("/pay", "k1")).await);
    assert_eq!(setup.upstream.executions(), 1);
}

/// The client gets a response that nobody recorded: a retry does not run the operation again.
#[tokio::test]
async fn with_failure_mode_allow_a_response_passes_when_ibid_stops() {
    let config = format!("[limits]\nshutdown = \"1s\"\n{}", policy(""));
    let mut setup = EnvoySetup::start(&config, &[("failure_mode_allow: false", "failure_mode_allow: true")]).await;
    let gate = setup.upstream.gate("/pay");
    let request = setup.post("/pay", "k1");
    let sent = tokio::spawn(async move { request.send().await });
    gate.arrived(1).await;
    setup.ibid.signal(ProcessSignal::Term);
    setup.ibid.wait_exit(Duration::from_secs(20)).await;
    gate.open();
    assert_eq!(sent.await.unwrap().status, 201);
    setup.ibid.restart().await;
    assert_unknown(&send_until_settled(&setup.post("/pay", "k1")).await);
    assert_eq!(setup.upstream.executions(), 1);
}

/// Envoy sends the claimed request again, with the same attempt and fence. ibid cannot prevent it, and says so.
#[tokio::test]
async fn a_retry_by_envoy_is_reported() {
    for (retry_on, first) in [("5xx", UpstreamReply::status(503)), ("reset", UpstreamFault::ResetAfterRequest.into())] {
        let retry = format!("timeout: 60s, retry_policy: {{ retry_on: {retry_on}, num_retries: 1 }} }}");
        let setup = EnvoySetup::start(&policy(""), &[("timeout: 60s }", &retry)]).await;
        setup.upstream.on_each("/pay", [first, UpstreamReply::usual()]);
        let answer = setup.post("/pay", "k1").send().await;
        assert_ran(&answer);
        let sent: Vec<_> = setup.upstream.log().iter().map(|request| (request.attempt(), request.fence())).collect();
        assert_eq!((sent.len(), sent[0].0, sent[0]), (2, Some(1), sent[1]), "{retry_on}");
        setup.ibid.wait_for_log("Envoy sent a claimed request more than once").await;
        assert_replay(&setup.post("/pay", "k1").send().await, &answer);
    }
}

/// Envoy no longer proves that the request was not sent.
#[tokio::test]
async fn an_app_that_cannot_be_reached_by_a_retry_leaves_the_outcome_unknown() {
    let retry = "timeout: 60s, retry_policy: { retry_on: connect-failure, num_retries: 1 } }";
    let setup = EnvoySetup::start(&policy(""), &[("timeout: 60s }", retry)]).await;
    setup.upstream.stop().await;
    assert_refused(&setup.post("/pay", "k1").send().await, 502, "upstream-lost");
    setup.upstream.restart().await;
    assert_unknown(&setup.post("/pay", "k1").send().await);
    assert_eq!(setup.upstream.executions(), 0);
}

#[tokio::test]
async fn a_filter_that_sends_too_little_is_reported() {
    let changes = [("allow_mode_override: true", "allow_mode_override: false")];
    let setup = EnvoySetup::start(&policy(""), &changes).await;
    assert_eq!(setup.post("/pay", "k1").send().await.status, 500);
    setup.ibid.wait_for_log("set allow_mode_override to true").await;

    let setup = EnvoySetup::start(&policy(""), &[("response.code_details, ", "")]).await;
    assert_eq!(setup.post("/pay", "k1").send().await.status, 500);
    setup.ibid.wait_for_log("add response.code_details to response_attributes").await;
    assert_unknown(&send_until_settled(&setup.post("/pay", "k1")).await);
}

#[tokio::test]
async fn shadow_mode_changes_nothing() {
    let setup = EnvoySetup::ietf("mode = \"shadow\"\n").await;
    for runs in 1..=2 {
        assert_eq!(setup.post("/pay", "k1").send().await.status, 201);
        assert_eq!(setup.upstream.executions(), runs);
    }
    setup.upstream.stop().await;
    assert_eq!(setup.post("/pay", "k1").send().await.status, 503, "Envoy's own response");
}

#[tokio::test]
async fn shadow_mode_passes_a_body_that_arrives_slowly() {
    let config = format!("[limits]\nbody_timeout = \"300ms\"\n{}", policy("mode = \"shadow\"\n"));
    let setup = EnvoySetup::start(&config, &[]).await;
    let mut client = RawClient::connect(setup.envoy.addr()).await;
    client.send("POST /pay HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k1\r\nContent-Length: 4\r\n\r\nab").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    client.send("cd").await;
    assert_eq!(client.read_response().await.status, 201);
    assert_eq!(setup.upstream.last().text(), "abcd");
}

#[tokio::test]
async fn check_says_what_an_address_means() {
    for (listen, code, expected) in [
        ("127.0.0.1:8083", 0, "failure_mode_allow"),
        ("0.0.0.0:8083", 0, "who can connect can name any caller"),
        ("127.0.0.1:8080", 64, "ext_proc.listen: \"127.0.0.1:8080\" is where clients connect already"),
    ] {
        let config = format!("upstream = \"http://127.0.0.1:9\"\n[ext_proc]\nlisten = \"{listen}\"\n");
        let (_folder, file) = folder_with("ibid.toml", &config);
        let output = run_ibid(&["check", file.to_str().unwrap()], &[]).await;
        assert_eq!(output.code, Some(code), "{output:?}");
        assert!(output.all().contains(expected), "{listen}: {output:?}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_its_request_is_let_pass_blocks_nobody() {
    let setup = EnvoySetup::ietf("on_concurrent = \"wait\"\nwait_timeout = \"20s\"\n").await;
    let gate = ReplyGate::new();
    let failing = UpstreamReply::status(503).gated(&gate);
    setup.upstream.on_each("/pay", [failing, UpstreamReply::usual()]);
    let first = setup.post("/pay", "k1");
    let first = tokio::spawn(async move { first.send().await });
    gate.arrived(1).await;
    let second = setup.post("/pay", "k1").start().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    second.abort();
    tokio::time::sleep(Duration::from_millis(500)).await;
    gate.open();
    assert_eq!(first.await.unwrap().status, 503);
    assert_ran(&setup.post("/pay", "k1").send().await);
    assert_eq!(setup.upstream.executions(), 2, "the second request never ran");
}
