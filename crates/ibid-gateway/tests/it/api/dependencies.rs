//! The store is down, or the app is asked about an unknown outcome.

use ibid::store::ErrorKind;
use ibid_gateway::config::ApiListen;
use ibid_testkit::wrappers::CallFilter;
use testbed::{
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};

use super::common::{
    ApiGateway, ApiPlace, ApiReply, TOKEN, begin_until_settled, created, payment, request_bytes, send,
};
use crate::support::{BIN, InProcessGateway, policy};

async fn in_process(dials: &str) -> (InProcessGateway, ApiPlace) {
    let upstream = TestUpstream::start().await;
    let config = format!("[api]\nlisten = \"127.0.0.1:0\"\ntoken = \"{TOKEN}\"\n{}", policy(dials));
    let here = InProcessGateway::start(&config, &upstream).await;
    let Some(ApiListen::Tcp(address)) = here.gateway.api.clone() else { panic!("it has an API") };
    (here, ApiPlace::Tcp(address))
}

async fn call(place: &ApiPlace, path: &str, message: &serde_json::Value) -> ApiReply {
    send(place, &request_bytes(path, Some(TOKEN), &message.to_string())).await.expect("an answer")
}

#[tokio::test]
async fn without_the_store_closed_refuses_and_open_runs_unprotected() {
    let (here, place) = in_process("").await;
    here.store.fail(CallFilter::All, ErrorKind::NotApplied);
    let refused = call(&place, "/v1/exchanges", &payment("key-1")).await.answer();
    assert_eq!((refused.status, refused.refusal().as_str()), (503, "store-unavailable"));

    let (here, place) = in_process("on_store_down = \"open\"").await;
    here.store.fail(CallFilter::All, ErrorKind::NotApplied);
    let begun = call(&place, "/v1/exchanges", &payment("key-1")).await;
    assert_eq!(begun.status, 201, "{begun:?}");
    let message = begun.json();
    assert!(message["attempt"].is_null() && message["fence"].is_null(), "{message}");
    let end = format!("/v1/exchanges/{}/end", message["exchange"].as_str().unwrap());
    let answer = call(&place, &end, &created("paid")).await.answer();
    assert_eq!((answer.status, answer.header("idempotency-guarantee")), (201, Some("degraded")));
}

/// The operation has run: its answer is not lost because the store fails now.
#[tokio::test]
async fn an_end_that_the_store_does_not_take_is_recorded_later() {
    let (here, place) = in_process("").await;
    let message = call(&place, "/v1/exchanges", &payment("key-1")).await.json();
    here.store.fail(CallFilter::Settle, ErrorKind::NotApplied);
    let end = format!("/v1/exchanges/{}/end", message["exchange"].as_str().unwrap());
    let refused = call(&place, &end, &created("paid")).await.answer();
    assert_eq!((refused.status, refused.refusal().as_str()), (503, "store-unavailable"), "there is no journal");
    here.store.heal();
    crate::support::until_some("the answer", || async {
        let begun = call(&place, "/v1/exchanges", &payment("key-1")).await;
        (begun.status == 200 && begun.answer().body == "paid").then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_upstream_is_asked_about_an_unknown_outcome() {
    let upstream = TestUpstream::start().await;
    upstream.on("/found", UpstreamReply::status(200).json(r#"{"id":7}"#));
    let dials = "resolve = \"GET /found?key={key}\"\ntimeout = \"200ms\"\nlate_answer = \"0s\"\nlease = \"300ms\"";
    let config = format!("[api]\nlisten = \"unix:api.sock\"\n{}", policy(dials));
    let launch = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url());
    let process = launch.arg("--store").arg("memory:").start().await;
    let place = ApiPlace::Unix(process.dir().join("api.sock"));
    let gateway = ApiGateway { process, place };
    gateway.run(&payment("key-1")).await;
    let found = begin_until_settled(&gateway, "key-1").await.answer();
    assert_eq!((found.status, found.body.as_str()), (200, r#"{"id":7}"#));
    let probe = upstream.last();
    assert_eq!((probe.method.as_str(), probe.target.as_str()), ("GET", "/found?key=key-1"));
    assert_eq!((probe.header("authorization"), probe.body.len()), (Some("Bearer one"), 0));
    assert_eq!(upstream.executions(), 0);
}
