//! Pages of other origins change nothing, whatever a browser sends along.

use testbed::client::TestRequest;

use super::common::{ADMIN_TOKEN, assert_problem};
use crate::support::TestGateway;

#[tokio::test]
async fn a_change_from_a_page_of_another_origin_is_refused() {
    let office = TestGateway::with_records().await;
    let address = office.address("key-two-of-u1-lost").await;
    let own = format!("http://{}", office.gateway.admin_addr());
    let forget = |fence: &str| -> TestRequest {
        let body = format!(r#"{{"reason":"r"{fence}}}"#);
        office.admin_request("POST", ADMIN_TOKEN, &format!("/api/records/{address}/forget")).json(&body)
    };
    for (name, value) in [
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Origin", "http://127.0.0.1"),
        ("Origin", "file://"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
    ] {
        assert_problem(&forget("").header(name, value).send().await, 403, "another origin");
    }
    let both = forget("").header("Origin", own.as_str()).header("Origin", "http://evil.example");
    assert_problem(&both.send().await, 403, "another origin");
    assert_eq!(office.record("key-two-of-u1-lost").await["state"], "unknown");
    // Its own origin is fine; the fence keeps this one from doing anything.
    let mine = forget(",\"fence\":1").header("Origin", own.as_str()).header("Sec-Fetch-Site", "same-origin");
    assert_problem(&mine.send().await, 409, "fence");
}

#[tokio::test]
async fn a_cookie_that_nobody_was_given_is_worth_nothing() {
    let office = TestGateway::with_records().await;
    let address = office.address("key-two-of-u1-lost").await;
    let answer = office.admin_request("GET", "", "/api/records").header("Cookie", "ibid_session=guess").send().await;
    assert_problem(&answer, 401, "log in again");
    let change = office.admin_request("POST", "", &format!("/api/records/{address}/forget")).json(r#"{"reason":"r"}"#);
    assert_problem(&change.header("Cookie", "ibid_session=guess").send().await, 401, "log in again");
}
