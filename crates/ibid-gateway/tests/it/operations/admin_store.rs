//! The admin API on a store that fails: nothing is claimed to be so that nobody knows.

use ibid::store::ErrorKind;
use ibid_testkit::wrappers::CallFilter;
use serde_json::Value;
use testbed::{
    client::{TestRequest, TestResponse, request},
    upstream::TestUpstream,
};

use crate::support::InProcessGateway;

const CONFIG: &str =
    "[admin]\ntoken = \"token-of-the-admin\"\n[[route]]\nmatch = \"POST /pay\"\nlabel.key = \"clear\"\n";

impl InProcessGateway {
    fn admin_request(&self, method: &str, path: &str) -> TestRequest {
        let admin = self.gateway.admin.expect("it has an admin port");
        request(method, admin, path).header("Authorization", "Bearer token-of-the-admin")
    }

    async fn get_json(&self, path: &str) -> Value {
        let answer = self.admin_request("GET", path).send().await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }
}

async fn start_with_record() -> (InProcessGateway, String) {
    let upstream = TestUpstream::start().await;
    let here = InProcessGateway::start(CONFIG, &upstream).await;
    assert_eq!(here.pay("key-of-a-payment").send().await.status, 201);
    let page = here.get_json("/api/records").await;
    let address = page["records"][0]["address"].as_str().expect("text").to_owned();
    (here, address)
}

#[track_caller]
fn assert_unavailable(answer: &TestResponse, part: &str) {
    assert_eq!((answer.status, answer.header("content-type")), (503, Some("application/problem+json")), "{answer:?}");
    assert!(answer.json()["detail"].as_str().is_some_and(|detail| detail.contains(part)), "{part:?} in {answer:?}");
}

#[tokio::test]
async fn a_store_that_is_down_is_said_to_be() {
    let (here, address) = start_with_record().await;
    here.store.fail(CallFilter::All, ErrorKind::NotApplied);
    for path in ["/api/records".to_owned(), format!("/api/records/{address}")] {
        let answer = here.admin_request("GET", &path).send().await;
        assert_unavailable(&answer, "the store cannot be used");
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
    }
    let forget = here.admin_request("POST", &format!("/api/records/{address}/forget")).json(r#"{"reason":"r"}"#);
    assert_unavailable(&forget.send().await, "the store cannot be used");
    // What needs no store goes on.
    assert_eq!(here.get_json("/api/audit").await["entries"].as_array().map(Vec::len), Some(0), "nothing was begun");
    assert!(here.get_json("/api/store").await["error"].is_string());
    for path in ["/api/stats", "/api/policies", "/api/shadow", "/api/refusals"] {
        here.get_json(path).await;
    }
    here.store.heal();
    assert_eq!(forget.send().await.status, 200);
}

#[tokio::test]
async fn a_change_that_failed_and_one_whose_answer_was_lost_are_told_apart() {
    let (here, address) = start_with_record().await;
    let forget = here.admin_request("POST", &format!("/api/records/{address}/forget")).json(r#"{"reason":"r"}"#);
    here.store.fail(CallFilter::AdminChange, ErrorKind::NotApplied);
    let failed = forget.send().await;
    assert_unavailable(&failed, "switched off");
    assert_eq!((&failed.json()["changed"], &failed.json()["after"]["state"]), (&false.into(), &"done".into()));
    here.store.heal();
    here.store.lose_answers(CallFilter::AdminChange);
    let lost = forget.send().await;
    assert_unavailable(&lost, "look before you try again");
    assert_eq!((&lost.json()["changed"], &lost.json()["after"]), (&Value::Null, &Value::Null), "it was made");
    let audit = here.get_json("/api/audit").await;
    let outcomes: Vec<_> = audit["entries"].as_array().unwrap().iter().map(|entry| &entry["outcome"]).collect();
    assert_eq!(outcomes, ["unknown", "failed"]);
    assert!(audit["entries"][0]["why"].as_str().is_some_and(|why| why.contains("lost")), "{audit:#}");
}
