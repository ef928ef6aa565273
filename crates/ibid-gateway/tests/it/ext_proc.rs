//! Envoy's external processing: Envoy in front of a counting upstream, and ibid beside it.

use std::time::Duration;

use envoy_types::pb::envoy::{
    config::core::v3::{HeaderMap as EnvoyHeaders, HeaderValue as EnvoyHeader},
    service::ext_proc::v3::{
        HttpBody, HttpHeaders, ProcessingRequest, external_processor_client::ExternalProcessorClient,
        processing_request::Request as EnvoyRequest,
    },
};
use testbed::{
    TestEnvoy,
    client::{RawClient, TestRequest, TestResponse, get, post},
    grpc::{GrpcTestClient, message},
    process::{GatewayProcess, ProcessSignal},
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};

use crate::{
    scenarios::{ScenarioTransport, run_all},
    sdks::python::uvicorn,
    support::{
        BIN, assert_ran, assert_refused, assert_replay, caller, folder_with, policy, run_ibid, send_until_settled,
        within,
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
async fn envoys_buffer_limits_what_is_protected() {
    let config = format!("[limits]\nbody_timeout = \"1s\"\n{}", policy("max_request = \"8MiB\"\n"));
    let setup = EnvoySetup::start(&config, &[]).await;
    let large = caller(post(setup.envoy.addr(), "/pay")).key("k1").body(vec![b'x'; 3 << 20]);
    assert_eq!(large.send().await.status, 408);
    assert_ran(&setup.post("/pay", "k1").send().await);

    setup.upstream.on("/large", UpstreamReply::usual().large(3 << 20));
    assert_eq!(setup.post("/large", "k2").send().await.status, 500);
    assert_unknown(&send_until_settled(&setup.post("/large", "k2")).await);
    assert_eq!(setup.upstream.executions_at("/large"), 1);
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

/// ibid cannot prevent it, and says so.
#[tokio::test]
async fn a_retry_by_envoy_is_reported() {
    let retry = "timeout: 60s, retry_policy: { retry_on: 5xx, num_retries: 1 } }";
    let setup = EnvoySetup::start(&policy(""), &[("timeout: 60s }", retry)]).await;
    setup.upstream.on_each("/pay", [UpstreamReply::status(503), UpstreamReply::usual()]);
    assert_ran(&setup.post("/pay", "k1").send().await);
    assert_eq!(setup.upstream.executions(), 2);
    setup.ibid.wait_for_log("Envoy sent a claimed request more than once").await;
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

/// A replay would need trailers, which Envoy cannot send in place of a request that it buffers.
#[tokio::test]
async fn grpc_calls_with_a_key_are_refused_and_others_pass() {
    let http2 = "    - name: app
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          \"@type\": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: { http2_protocol_options: {} }
      load_assignment:";
    let upstream = TestUpstream::start_h2c().await;
    let reply = UpstreamReply::chunks([message("done")]).header("content-type", "application/grpc");
    upstream.reply_by_default(reply.trailer("grpc-status", "0"));
    let envoy = TestEnvoy::start(upstream.addr(), &[("    - name: app\n      load_assignment:", http2)]);
    let route = "[[route]]\nmatch = \"grpc shop.Orders/Create\"\n";
    let config = format!("[ext_proc]\nlisten = \"{}\"\n{route}", envoy.ext_proc_addr());
    let _ibid = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).start().await;
    let client = GrpcTestClient::connect(envoy.addr()).await;
    let refused = client.call("/shop.Orders/Create", &[("idempotency-key", "k1")], message("ten")).await;
    refused.assert_refused(9, "METHOD_UNKNOWN");
    assert!(refused.value("grpc-message").is_some_and(|text| text.contains("through the gateway")), "{refused:?}");
    assert_eq!(upstream.requests(), 0);
    let passed = client.call("/shop.Orders/Create", &[], message("ten")).await;
    assert_eq!((passed.code(), passed.text().as_str()), (0, "done"));
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

fn request_headers(pairs: &[(&str, &str)]) -> EnvoyRequest {
    let header = |(name, value): &(&str, &str)| EnvoyHeader {
        key: (*name).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..EnvoyHeader::default()
    };
    let headers = Some(EnvoyHeaders { headers: pairs.iter().map(header).collect() });
    EnvoyRequest::RequestHeaders(HttpHeaders { headers, ..HttpHeaders::default() })
}

/// Envoy goes on unprotected after a stream that ends with OK.
#[tokio::test]
async fn a_stream_with_wrong_messages_ends_with_an_error() {
    let upstream = TestUpstream::start().await;
    let config = format!("[ext_proc]\nlisten = \"127.0.0.1:0\"\n{}", policy(""));
    let ibid = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).start().await;
    let line = ibid.wait_for_log("ibid: ext_proc on ").await;
    let address = line.rsplit(' ').next().expect("an address").to_owned();
    let mut client = ExternalProcessorClient::connect(format!("http://{address}")).await.expect("it listens");
    let head = [(":method", "POST"), (":path", "/pay"), (":authority", "a"), ("idempotency-key", "k1")];
    let body = || EnvoyRequest::RequestBody(HttpBody { body: b"{}".to_vec(), ..HttpBody::default() });
    let cases: [(&str, Vec<EnvoyRequest>); 5] = [
        ("a body first", vec![body()]),
        ("an invalid path", vec![request_headers(&[(":method", "POST"), (":path", "\u{1}"), (":authority", "a")])]),
        ("an invalid header", vec![request_headers(&[&head[..], &[("a", "\u{1}")]].concat())]),
        ("headers twice", vec![request_headers(&head), request_headers(&head)]),
        ("a body twice", vec![request_headers(&head), body(), body()]),
    ];
    for (what, messages) in cases {
        let message = |request| ProcessingRequest { request: Some(request), ..ProcessingRequest::default() };
        // The stream stays open after the last message, as Envoy's does.
        let messages = futures_util::stream::iter(messages.into_iter().map(message));
        let messages = futures_util::StreamExt::chain(messages, futures_util::stream::pending());
        let mut replies = client.process(messages).await.expect("a stream").into_inner();
        let ended = loop {
            match within(what, replies.message()).await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("{what}: the stream ended with OK"),
                Err(status) => break status,
            }
        };
        assert!(
            matches!(ended.code(), tonic::Code::InvalidArgument | tonic::Code::FailedPrecondition),
            "{what}: {ended}"
        );
    }
    assert_eq!(upstream.requests(), 0);
}
