//! A gateway with operators of every role, and records of two users in it.

use serde_json::Value;
use testbed::{
    client::{TestRequest, TestResponse, request},
    upstream::{UpstreamFault, UpstreamReply},
};

use crate::support::{TestGateway, caller};

pub(super) const ADMIN_TOKEN: &str = "token-of-the-admin";
pub(super) const VIEWER_TOKEN: &str = "token-of-the-viewer";
pub(super) const USER_TOKEN: &str = "token-of-user-one";

pub(super) const ABSENT_ADDRESS: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Who there is; the user is `u1`.
pub(super) const ADMIN_CONFIG: &str = r#"[admin]
token = "token-of-the-admin"
tokens = [
    { role = "viewer", token = "token-of-the-viewer" },
    { role = "user", user = "u1", token = "token-of-user-one" },
    { role = "admin", name = "Ada", token = "token-of-ada-lovelace" },
]
"#;

const ROUTES: &str = r#"
[[route]]
match = "POST /pay/*"
label = { tenant = "header:X-Tenant-Id", user = "header:X-User-Id", key = "clear" }
"#;

impl TestGateway {
    /// Nothing is remembered yet.
    pub(super) async fn with_operators() -> TestGateway {
        TestGateway::embedded(&format!("{ADMIN_CONFIG}{ROUTES}")).await
    }

    pub(super) async fn embedded(config: &str) -> TestGateway {
        let office = TestGateway::start(&format!("[store]\nurl = \"embedded:data\"\n{config}")).await;
        let upstream = &office.upstream;
        upstream.on("/pay/ok", UpstreamReply::status(201).json(r#"{"paid":1}"#).header("Location", "/p/1"));
        upstream.on("/pay/failed", UpstreamReply::status(404).json(r#"{"error":"no such account"}"#));
        upstream.on("/pay/lost", UpstreamFault::CloseWithoutReply);
        office
    }

    /// With a finished record of u1, one of u2, one of u2 that failed, and one of u1 that is lost.
    pub(super) async fn with_records() -> TestGateway {
        let office = TestGateway::with_operators().await;
        for (path, key, user, status) in [
            ("/pay/ok", "key-one-of-u1-done", "u1", 201),
            ("/pay/ok", "key-one-of-u2-done", "u2", 201),
            ("/pay/failed", "key-two-of-u2-failed", "u2", 404),
            ("/pay/lost", "key-two-of-u1-lost", "u1", 502),
        ] {
            let answer = office.pay_as(path, key, user).send().await;
            assert_eq!(answer.status, status, "{answer:?}");
        }
        office
    }

    /// A request of a client.
    pub(super) fn pay_as(&self, path: &str, key: &str, user: &str) -> TestRequest {
        let request = caller(self.post(path)).header("Host", "shop.example");
        let request =
            request.header("X-Tenant-Id", "acme").header("X-User-Id", user).header("User-Agent", "shop/1 (x)");
        request.key(key).json(r#"{"amount":1}"#)
    }

    /// A request of an operator.
    pub(super) fn admin_request(&self, method: &str, token: &str, path: &str) -> TestRequest {
        let request = request(method, self.gateway.admin_addr(), path);
        if token.is_empty() { request } else { request.header("Authorization", format!("Bearer {token}")) }
    }

    pub(super) async fn admin_get(&self, token: &str, path: &str) -> TestResponse {
        self.admin_request("GET", token, path).send().await
    }

    pub(super) async fn admin_post(&self, token: &str, path: &str, body: &str) -> TestResponse {
        self.admin_request("POST", token, path).json(body).send().await
    }

    /// What a path holds for the admin.
    pub(super) async fn admin_json(&self, path: &str) -> Value {
        let answer = self.admin_get(ADMIN_TOKEN, path).await;
        assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")), "{answer:?}");
        answer.json()
    }

    /// The record with a key.
    pub(super) async fn record(&self, key: &str) -> Value {
        let page = self.admin_json(&format!("/api/records?key={key}")).await;
        let records = page["records"].as_array().expect("a list");
        assert_eq!(records.len(), 1, "{page:#}");
        records[0].clone()
    }

    pub(super) async fn address(&self, key: &str) -> String {
        self.record(key).await["address"].as_str().expect("text").to_owned()
    }
}

/// The keys of records, sorted.
pub(super) fn keys(page: &Value) -> Vec<String> {
    let records = page["records"].as_array().expect("a list");
    let mut keys: Vec<String> = records.iter().map(|record| record["key"].as_str().expect("text").to_owned()).collect();
    keys.sort_unstable();
    keys
}

/// A problem of this status whose detail says `part`.
#[track_caller]
pub(super) fn assert_problem(answer: &TestResponse, status: u16, part: &str) {
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    let problem = answer.json();
    assert_eq!(problem["status"], status, "{problem:#}");
    assert!(problem["title"].as_str().is_some_and(|title| !title.is_empty()), "{problem:#}");
    assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains(part)), "{part:?} in {problem:#}");
}
