//! Bad input over raw sockets: what it gets, and that nothing ran and nothing stays claimed.
//!
//! Every case has a key of its own. What follows a bad request is a good one with the same key: it runs, once. A claim
//! that had been left behind would answer in its place.

use std::time::Duration;

use testbed::client::{RawClient, TestRequest, TestResponse};

use crate::support::TestGateway;

mod bad_responses;
mod bodies;
mod framing;
mod fuzz;
mod http2;
mod keys;
mod limits;
mod lookalike_headers;
mod paths;
mod same_key;
mod smuggling;
mod sources;

/// Long enough for two noisy cores; only a failure waits that long.
const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// What good requests carry.
const HOST: &str = "shop.test";
const BODY: &str = r#"{"amount":1}"#;

/// The head that every raw request of these tests begins with, up to the headers in question.
fn request_head(path: &str, key: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: {HOST}\r\nIdempotency-Key: {key}\r\n")
}

impl TestGateway {
    async fn connect(&self) -> RawClient {
        RawClient::connect(self.gateway.addr()).await
    }

    fn shop_post(&self, path: &str) -> TestRequest {
        self.post(path).header("Host", HOST)
    }

    /// A request without fault, under the key header of most presets.
    fn valid_request(&self, key: &str) -> TestRequest {
        self.shop_post("/pay").key(key).json(BODY)
    }

    /// Sends these bytes and reads one answer.
    async fn exchange(&self, bytes: impl AsRef<[u8]>) -> TestResponse {
        let mut raw = self.connect().await;
        raw.send(bytes).await;
        raw.read_response().await
    }

    /// The key was left alone: a good request runs, as the first and only one.
    async fn assert_runs_once(&self, case: &str, key: &str) {
        self.assert_request_runs_once(case, key, &self.valid_request(key)).await;
    }

    /// As [`assert_runs_once`](World::runs_once), with a good request for another route.
    async fn assert_request_runs_once(&self, case: &str, key: &str, good: &TestRequest) {
        assert_eq!(self.upstream.executions_with_key(key), 0, "{case}: the bad request was executed");
        let answer = good.send().await;
        assert_eq!(answer.status, 201, "{case}: the good request after it: {answer:?}");
        assert_eq!(answer.header("idempotent-replayed"), None, "{case}: {answer:?}");
        assert_eq!(self.upstream.executions_with_key(key), 1, "{case}: {:?}", self.upstream);
    }

    /// The server itself cannot make sense of these bytes: it answers with one of `allowed`, or says nothing, and
    /// closes the connection. (An answer may be lost where the client still had something to say: the system resets
    /// a connection that is closed with bytes unread.) Returns the status, if one came.
    async fn assert_rejected(&self, case: &str, bytes: impl AsRef<[u8]>, allowed: &[u16]) -> Option<u16> {
        let mut raw = self.connect().await;
        raw.send(bytes).await;
        let status = match raw.try_read_response().await {
            Ok(answer) => {
                assert!(allowed.contains(&answer.status), "{case}: {answer:?}");
                Some(answer.status)
            }
            Err(broken) => {
                assert!(broken.is_closed(), "{case}: {broken}");
                None
            }
        };
        assert!(raw.is_closed_within(WAIT_TIMEOUT).await, "{case}: the connection stays open");
        status
    }
}

/// The answer is the refusal of that name: status, type, masked key and headers. `key` is `None` where the problem must
/// not name one; a key that is invalid is named as it was sent, masked.
#[track_caller]
fn assert_problem(case: &str, answer: &TestResponse, status: u16, name: &str, key: Option<&str>) {
    assert_eq!(answer.status, status, "{case}: {answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{case}: {answer:?}");
    let problem = answer.json();
    let kind = problem["type"].as_str().unwrap_or_default();
    assert!(kind.ends_with(&format!("#{name}")), "{case}: {answer:?}");
    assert_eq!(problem["status"], status, "{case}: {answer:?}");
    for member in ["title", "detail"] {
        assert!(problem[member].as_str().is_some_and(|text| !text.is_empty()), "{case}: {answer:?}");
    }
    match (key, problem["key"].as_str()) {
        (None, Some(shown)) if name == "key-invalid" => {
            let hides = shown == "****" || shown.chars().count() == 12 && shown.contains("****");
            assert!(hides, "{case}: {answer:?}");
        }
        (key, shown) => assert_eq!(shown, key.map(masked).as_deref(), "{case}: {answer:?}"),
    }
    let linked = answer.header("link").is_some_and(|link| link.contains("rel=\"describedby\""));
    assert_eq!(linked, status == 400 && name != "key-reused", "{case}: {answer:?}");
    let retry = answer.header("retry-after").map(|after| after.parse::<u32>().expect("seconds"));
    assert_eq!(
        retry.is_some(),
        matches!(name, "in-progress" | "overloaded" | "store-unavailable"),
        "{case}: {answer:?}"
    );
}

/// How a key is shown: its ends, or nothing of a short one.
fn masked(key: &str) -> String {
    match key.len() {
        0..12 => "****".to_owned(),
        length => format!("{}****{}", &key[..4], &key[length - 4..]),
    }
}

/// `template` with every `K` replaced by the key; bytes, because headers need not be text.
fn with_key(template: &[u8], key: &str) -> Vec<u8> {
    template.iter().flat_map(|byte| if *byte == b'K' { key.as_bytes().to_vec() } else { vec![*byte] }).collect()
}
