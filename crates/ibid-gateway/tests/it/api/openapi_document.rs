//! The description of the API holds: Schemathesis calls everything that it allows and much that it does not.

use std::{collections::BTreeSet, fs};

use serde_json::Value;

use super::common::{ApiGateway, ApiPlace, TOKEN, payment};
use crate::{scenarios::root, support::run_schemathesis};

fn openapi_document() -> Value {
    serde_json::from_str(ibid_gateway::api::OPENAPI_DOCUMENT).expect("JSON")
}

#[tokio::test]
async fn the_document_that_is_served_is_the_one_in_the_docs() {
    let gateway = ApiGateway::ietf("").await;
    let served = gateway.send(b"GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert_eq!(served.status, 200);
    let docs = fs::read_to_string(root().join("docs/exchange-api.json")).expect("the docs have it");
    assert!(served.body == docs, "copy crates/ibid-gateway/src/api/openapi.json to docs/exchange-api.json");
}

#[tokio::test]
async fn the_document_has_the_members_that_are_sent() {
    let gateway = ApiGateway::ietf("").await;
    let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let schemas = &openapi_document()["components"]["schemas"];
    assert_eq!(names(&schemas["Begin"]["properties"]), names(&payment("key-1")));
    let (exchange, message) = gateway.run(&payment("key-1")).await;
    assert_eq!(names(&schemas["Run"]["properties"]), names(&message));
    let ended = gateway.end(&exchange, &super::common::created("paid")).await.json();
    assert_eq!(names(&schemas["Answer"]["properties"]), names(&ended["answer"]));
    let page = fs::read_to_string(root().join("docs/exchange-api.md")).expect("the docs have it");
    for path in openapi_document()["paths"].as_object().unwrap().keys() {
        let path = path.replace("{exchange}", "EXCHANGE");
        assert!(page.contains(&path), "{path}");
    }
}

/// `fixed` are values of parameters that it could not guess.
async fn run(gateway: &ApiGateway, fixed: &str, flags: &[&str]) {
    let ApiPlace::Tcp(address) = gateway.place else { unreachable!() };
    let document = root().join("docs/exchange-api.json").display().to_string();
    // What a begin contains decides about it beyond what a schema can say, and not every begin creates an exchange.
    let excluded = ["--exclude-checks", "positive_data_acceptance,ensure_resource_availability"];
    run_schemathesis(&format!("http://{address}"), &document, TOKEN, fixed, &[&excluded, flags].concat()).await;
}

#[tokio::test]
async fn everything_is_answered_as_the_document_says() {
    let gateway = ApiGateway::tcp("timeout = \"1s\"\nlate_answer = \"0s\"").await;
    run(&gateway, "", &[]).await;
}

/// On an exchange that runs: extended, ended, and then refused.
#[tokio::test]
async fn an_exchange_that_runs_is_answered_as_the_document_says() {
    let gateway = ApiGateway::tcp("").await;
    for verb in ["extend", "end", "failed"] {
        let (exchange, _) = gateway.run(&payment(&format!("key-{verb}"))).await;
        let fixed = format!("[parameters]\n\"path.exchange\" = \"{exchange}\"\n");
        let path = format!("/v1/exchanges/{{exchange}}/{verb}");
        run(&gateway, &fixed, &["--include-path", &path, "--phases", "coverage,fuzzing"]).await;
        let after = gateway.begin(&payment(&format!("key-{verb}"))).await;
        assert_eq!(after.status == 200 && after.body.contains("retry-after"), verb == "extend", "{verb}: {after:?}");
    }
}
