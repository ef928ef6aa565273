//! The description of the API holds: Schemathesis, which nobody here wrote, asks everything that it allows and much that it
//! does not, and compares each answer with it. `scripts/test` installs it.

use std::{collections::BTreeSet, fs};

use ibid::RefusalReason;
use serde_json::Value;
use testbed::client::get;

use super::common::{ADMIN_TOKEN, USER_TOKEN, VIEWER_TOKEN};
use crate::{
    scenarios::root,
    support::{TestGateway, run_schemathesis},
};

fn openapi_document() -> Value {
    serde_json::from_str(ibid_gateway::admin::api::OPENAPI_DOCUMENT).expect("JSON")
}

#[tokio::test]
async fn the_document_that_is_served_is_the_one_in_the_docs() {
    let office = TestGateway::with_operators().await;
    let served = get(office.gateway.admin_addr(), "/api/openapi.json").send().await;
    assert_eq!((served.status, served.header("content-type")), (200, Some("application/json")));
    let docs = fs::read_to_string(root().join("docs/admin-api.json")).expect("the docs have it");
    assert!(served.text() == docs, "copy crates/ibid-gateway/src/admin/openapi.json to docs/admin-api.json");
}

#[test]
fn names_in_the_document_are_those_of_the_code() {
    let document = openapi_document();
    let reasons =
        &document["components"]["schemas"]["Refusals"]["properties"]["refusals"]["items"]["properties"]["reason"];
    let reasons: BTreeSet<_> = reasons["enum"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(reasons, RefusalReason::all().map(RefusalReason::name).collect());
    let members = |schema: &str| -> BTreeSet<String> {
        let schema = &document["components"]["schemas"][schema];
        schema["properties"].as_object().unwrap().keys().cloned().collect()
    };
    // What docs/operating.md lists; a test there compares that list with what is printed.
    for name in ["address", "state", "takeover_in_ms", "response", "fence", "fingerprint"] {
        assert!(members("Record").contains(name), "{name}");
    }
}

#[test]
fn the_guide_for_operators_names_every_endpoint() {
    let guide = fs::read_to_string(root().join("docs/operating.md")).expect("the docs have it");
    let section =
        guide.split("\n## Admin API\n").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("a section");
    for path in openapi_document()["paths"].as_object().unwrap().keys() {
        let name = path.replace("{address}", "ADDRESS");
        let last = format!("`/{}`", name.rsplit('/').next().unwrap());
        assert!(section.contains(&name) || name.contains("ADDRESS/") && section.contains(&last), "{name}");
    }
}

/// Every endpoint that the document has is there, and every operation is allowed.
#[tokio::test]
async fn every_endpoint_of_the_document_is_there() {
    let office = TestGateway::with_operators().await;
    for (path, operations) in openapi_document()["paths"].as_object().unwrap() {
        let path = path.replace("{address}", super::common::ABSENT_ADDRESS);
        let options = office.admin_request("OPTIONS", "", &path).send().await;
        assert_eq!(options.status, 204, "{path}");
        let allow = options.header("allow").expect("it says what is allowed").to_owned();
        for method in operations.as_object().unwrap().keys() {
            assert!(allow.contains(&method.to_uppercase()), "{method} {path}: {allow}");
        }
    }
}

/// Runs it with a token; `fixed` are values of parameters that it could not guess.
async fn run(office: &TestGateway, token: &str, fixed: &str, flags: &[&str]) {
    let admin = format!("http://{}", office.gateway.admin_addr());
    run_schemathesis(&admin, &format!("{admin}/api/openapi.json"), token, fixed, flags).await;
}

/// In its stateful phase it takes addresses from lists and changes what is there.
#[tokio::test]
async fn everything_is_answered_as_the_document_says() {
    let office = TestGateway::with_records().await;
    run(&office, ADMIN_TOKEN, "", &[]).await;
}

/// On a record that is there: shown, resolved, and then refused.
#[tokio::test]
async fn a_record_that_is_there_is_answered_as_the_document_says() {
    let office = TestGateway::with_records().await;
    let fixed = format!("[parameters]\n\"path.address\" = \"{}\"\n", office.address("key-two-of-u1-lost").await);
    let flags = ["--include-path-regex", "records/.address", "--exclude-path", "/api/records/{address}/forget"];
    run(&office, ADMIN_TOKEN, &fixed, &[&flags[..], &["--phases", "coverage,fuzzing"]].concat()).await;
    let audit = office.admin_json("/api/audit?limit=1000").await;
    let entries = audit["entries"].as_array().unwrap().iter();
    let outcomes: BTreeSet<_> = entries.map(|entry| entry["outcome"].as_str().unwrap()).collect();
    assert!(outcomes.contains("changed") && outcomes.contains("refused"), "{outcomes:?}");
}

/// On a gateway that seals, so that there is something to reseal.
#[tokio::test]
async fn a_reseal_is_answered_as_the_document_says() {
    let office =
        TestGateway::embedded(&format!("{}{}", super::common::ADMIN_CONFIG, crate::sealing::table(&["k"]))).await;
    assert_eq!(office.pay_as("/pay/ok", "key-of-a-payment", "u1").send().await.status, 201);
    let flags = ["--include-path-regex", "^/api/(reseal|audit)$", "--phases", "coverage,fuzzing"];
    run(&office, ADMIN_TOKEN, "", &flags).await;
    let audit = office.admin_json("/api/audit?limit=1000").await;
    assert!(audit["entries"].as_array().unwrap().iter().any(|entry| entry["outcome"] == "changed"), "{audit:#}");
}

/// Those who may not change anything, and those who see little, get what is documented, too.
#[tokio::test]
async fn other_roles_are_answered_as_the_document_says() {
    let office = TestGateway::with_records().await;
    for token in [VIEWER_TOKEN, USER_TOKEN] {
        run(&office, token, "", &["--phases", "coverage"]).await;
    }
    assert_eq!(office.admin_json("/api/records").await["records"].as_array().map(Vec::len), Some(4));
}
