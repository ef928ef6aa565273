//! gRPC through Envoy. `grpc_clients` runs more calls, with clients and a server that others wrote.

use std::time::Duration;

use testbed::{
    HTTP2_APP, TestEnvoy,
    grpc::{GrpcTestCall, GrpcTestClient, message},
    process::GatewayProcess,
    upstream::{ReplyGate, TestUpstream, UpstreamFault, UpstreamReply},
};

use super::EnvoySetup;
use crate::support::{BIN, within};

const CREATE: &str = "/shop.Orders/Create";
const KEY: (&str, &str) = ("idempotency-key", "k1");

fn ok_reply() -> UpstreamReply {
    let reply = UpstreamReply::chunks([message("done")]).header("content-type", "application/grpc");
    reply.header("x-before", "b").trailer("grpc-status", "0").trailer("x-after", "a")
}

impl EnvoySetup {
    async fn grpc(dials: &str, changes: &[(&str, &str)]) -> (EnvoySetup, GrpcTestClient) {
        let upstream = TestUpstream::start_h2c().await;
        upstream.reply_by_default(ok_reply());
        let envoy = TestEnvoy::start(upstream.addr(), &[changes, &[HTTP2_APP]].concat());
        let route = format!("[[route]]\nmatch = \"grpc shop.Orders/Create\"\n{dials}");
        let config = format!("[ext_proc]\nlisten = \"{}\"\n{route}", envoy.ext_proc_addr());
        let ibid = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).start().await;
        let client = GrpcTestClient::connect(envoy.addr()).await;
        (EnvoySetup { upstream, envoy, ibid }, client)
    }
}

#[tokio::test]
async fn a_call_runs_once_and_its_replay_has_messages_and_trailers() {
    let (setup, client) = EnvoySetup::grpc("", &[]).await;
    // In three frames, of which the first ends inside the message's length.
    let whole = message("ten");
    let pieces = [whole.slice(..3), whole.slice(3..6), whole.slice(6..)];
    let first = client.start(CREATE, &[KEY], &pieces).await.end().await;
    assert_eq!((first.code(), first.text().as_str(), first.trailers_only), (0, "done", false));
    assert_eq!((first.value("x-before"), first.trailers.get("x-after").unwrap().as_bytes()), (Some("b"), &b"a"[..]));
    let ran = setup.upstream.last();
    assert_eq!((ran.attempt(), ran.body.clone()), (Some(1), whole.to_vec().into()));

    let replay = client.call(CREATE, &[KEY], whole).await;
    assert_eq!(replay.value("idempotent-replayed"), Some("true"), "{replay:?}");
    let comparable = |response: testbed::grpc::GrpcTestResponse| {
        let mut response = response.without_per_call_metadata();
        for name in ["x-envoy-upstream-service-time", "server"] {
            response.headers.remove(name);
        }
        response
    };
    assert_eq!(comparable(replay), comparable(first));
    client.call(CREATE, &[KEY], message("two")).await.assert_refused(3, "KEY_REUSED");
    assert_eq!(setup.upstream.requests(), 1);
}

#[tokio::test]
async fn a_remembered_failure_stays_trailers_only() {
    let (setup, client) = EnvoySetup::grpc("", &[]).await;
    let failure = UpstreamReply::status(200).header("content-type", "application/grpc");
    setup.upstream.on(CREATE, failure.header("grpc-status", "9").header("grpc-message", "no tea"));
    for _ in 0..2 {
        let failed = client.call(CREATE, &[KEY], message("ten")).await;
        assert!(failed.trailers_only, "{failed:?}");
        assert_eq!((failed.code(), failed.value("grpc-message")), (9, Some("no tea")));
    }
    assert_eq!(setup.upstream.requests(), 1);
}

#[tokio::test]
async fn calls_that_need_no_claim_stream_and_cost_one_message() {
    let (setup, client) = EnvoySetup::grpc("", &[]).await;
    let sent = setup.counter("stream_msgs_sent").await;
    for path in [CREATE, "/shop.Orders/Chat"] {
        let GrpcTestCall { answer, mut send } = client.open(path, &[]).await;
        send.send_data(message("one"), false).unwrap();
        // Envoy connects to the app before the call is complete.
        within("a connection", async {
            while setup.upstream.connections() == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        send.send_data(message("two"), true).unwrap();
        let passed = GrpcTestCall { answer, send }.end().await;
        assert_eq!((passed.code(), passed.text().as_str()), (0, "done"));
    }
    assert_eq!(setup.counter("stream_msgs_sent").await - sent, 2);
}

#[tokio::test]
async fn a_wait_is_not_limited_by_the_message_time_out() {
    let changes = [("message_timeout: 5s", "message_timeout: 0.2s")];
    let (setup, client) = EnvoySetup::grpc("on_concurrent = \"wait\"\nwait_timeout = \"20s\"\n", &changes).await;
    let gate = ReplyGate::new();
    setup.upstream.on(CREATE, ok_reply().gated(&gate));
    let first = client.start(CREATE, &[KEY], &[message("ten")]).await;
    gate.arrived(1).await;
    let second = client.start(CREATE, &[KEY], &[message("ten")]).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    gate.open();
    assert_eq!((first.end().await.code(), second.end().await.code()), (0, 0));
    assert_eq!(setup.upstream.requests(), 1);
}

async fn assert_outcome_unknown(client: &GrpcTestClient, key: (&str, &str)) {
    within("the outcome to be recorded", async {
        loop {
            let answer = client.call(CREATE, &[key], message("ten")).await;
            if answer.code() != 10 {
                return answer.assert_refused(9, "OUTCOME_UNKNOWN");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

/// Envoy gives up the call to the app, too.
#[tokio::test]
async fn a_call_whose_client_cancels_or_whose_app_breaks_has_an_unknown_outcome() {
    let (setup, client) = EnvoySetup::grpc("", &[]).await;
    let gate = ReplyGate::new();
    setup.upstream.on(CREATE, ok_reply().gated(&gate));
    let mut cancelled = client.start(CREATE, &[KEY], &[message("ten")]).await;
    gate.arrived(1).await;
    cancelled.send.send_reset(h2::Reason::CANCEL);
    drop(cancelled);
    assert_outcome_unknown(&client, KEY).await;
    gate.open();

    setup.upstream.on(CREATE, UpstreamFault::ResetAfterRequest);
    let other = ("idempotency-key", "k2");
    client.call(CREATE, &[other], message("ten")).await.assert_refused(2, "UPSTREAM_LOST");
    assert_outcome_unknown(&client, other).await;
    assert_eq!(setup.upstream.requests(), 2);
}

#[tokio::test]
async fn without_ibid_or_without_mode_overrides_nothing_runs() {
    let (setup, client) = EnvoySetup::grpc("", &[("allow_mode_override: true", "allow_mode_override: false")]).await;
    assert_ne!(client.call(CREATE, &[KEY], message("ten")).await.code(), 0);
    assert_eq!(setup.upstream.requests(), 0);
    let (mut setup, client) = EnvoySetup::grpc("", &[]).await;
    setup.ibid.kill().await;
    assert_ne!(client.call(CREATE, &[KEY], message("ten")).await.code(), 0);
    assert_eq!(setup.upstream.requests(), 0);
}
