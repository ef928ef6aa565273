//! Who sees what, and who changes it.

use super::common::{ABSENT_ADDRESS, ADMIN_CONFIG, ADMIN_TOKEN, USER_TOKEN, VIEWER_TOKEN, assert_problem, keys};
use crate::support::TestGateway;

const READS: [&str; 7] =
    ["/api/records", "/api/stats", "/api/policies", "/api/store", "/api/audit", "/api/shadow", "/api/refusals"];
const CHANGES: [&str; 3] = ["release", "forget", "resolve"];

#[tokio::test]
async fn without_a_token_nothing_is_told_and_with_a_wrong_one_neither() {
    let office = TestGateway::with_records().await;
    let address = office.address("key-one-of-u1-done").await;
    let paths = READS.map(String::from).into_iter().chain([format!("/api/records/{address}")]);
    for path in paths {
        for token in ["", "token-of-the-admi", "token-of-the-admin2", "TOKEN-OF-THE-ADMIN"] {
            let answer = office.admin_get(token, &path).await;
            assert_problem(&answer, 401, "Authorization: Bearer TOKEN");
            assert!(answer.header("www-authenticate").is_some_and(|how| how.starts_with("Bearer")), "{answer:?}");
            assert!(!answer.text().contains("u1"), "{answer:?}");
        }
        if path.ends_with("stats") {
            // The limit on failures is another test's affair.
            break;
        }
    }
    for action in CHANGES {
        let answer = office.admin_post("", &format!("/api/records/{address}/{action}"), r#"{"reason":"r"}"#).await;
        assert_problem(&answer, 401, "Authorization");
    }
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(office.admin_get("", path).await.status, 200, "{path}");
    }
    assert_eq!(office.record("key-one-of-u1-done").await["state"], "done");
}

#[tokio::test]
async fn where_no_token_is_configured_the_answer_says_how_to_set_one() {
    let office = TestGateway::embedded("").await;
    for token in ["", "anything"] {
        for path in READS {
            assert_problem(&office.admin_get(token, path).await, 401, "set admin.token");
        }
        let answer =
            office.admin_post(token, &format!("/api/records/{ABSENT_ADDRESS}/forget"), r#"{"reason":"r"}"#).await;
        assert_problem(&answer, 401, "set admin.token");
    }
    assert_eq!(office.admin_get("", "/healthz").await.status, 200);
    assert_eq!(office.admin_get("", "/metrics").await.status, 200);
}

#[tokio::test]
async fn a_viewer_sees_everything_and_changes_nothing() {
    let office = TestGateway::with_records().await;
    for path in READS {
        assert_eq!(office.admin_get(VIEWER_TOKEN, path).await.status, 200, "{path}");
    }
    let lost = office.record("key-two-of-u1-lost").await;
    let address = lost["address"].as_str().unwrap();
    assert_eq!(office.admin_get(VIEWER_TOKEN, &format!("/api/records/{address}")).await.status, 200);
    for action in CHANGES {
        let body = r#"{"reason":"r","as":"not-executed"}"#;
        let answer = office.admin_post(VIEWER_TOKEN, &format!("/api/records/{address}/{action}"), body).await;
        assert_problem(&answer, 403, "role \"admin\"");
    }
    assert_eq!(office.record("key-two-of-u1-lost").await["fence"], lost["fence"]);
    assert_eq!(office.admin_json("/api/audit").await["entries"], serde_json::json!([]));
}

#[tokio::test]
async fn a_user_sees_its_own_records_and_those_only() {
    let office = TestGateway::with_records().await;
    let own = ["key-one-of-u1-done", "key-two-of-u1-lost"];
    for (query, expected) in [
        ("", &own[..]),
        ("?user=u1", &own),
        ("?user=u2", &[]),
        ("?key=key-one-of-u2-done", &[]),
        ("?tenant=acme&state=unknown", &own[1..]),
        ("?user=", &own),
    ] {
        let answer = office.admin_get(USER_TOKEN, &format!("/api/records{query}")).await;
        assert_eq!(
            (answer.status, keys(&answer.json()).as_slice()),
            (200, expected.iter().map(|key| key.to_string()).collect::<Vec<_>>().as_slice()),
            "{query}"
        );
    }
    let mine = office.address(own[0]).await;
    assert_eq!(office.admin_get(USER_TOKEN, &format!("/api/records/{mine}")).await.json()["user"], "u1");
    let theirs = office.address("key-one-of-u2-done").await;
    let hidden = office.admin_get(USER_TOKEN, &format!("/api/records/{theirs}")).await;
    assert_problem(&hidden, 404, "nothing matches");
    let absent = office.admin_get(USER_TOKEN, &format!("/api/records/{ABSENT_ADDRESS}")).await;
    assert_eq!(hidden.text(), absent.text(), "whether it exists is not told");
    for address in [&mine, &theirs] {
        for action in CHANGES {
            let body = r#"{"reason":"r","as":"not-executed"}"#;
            let answer = office.admin_post(USER_TOKEN, &format!("/api/records/{address}/{action}"), body).await;
            assert_problem(&answer, 403, "role \"admin\"");
        }
    }
    for path in ["/api/stats", "/api/policies", "/api/store", "/api/shadow", "/api/refusals"] {
        assert_problem(&office.admin_get(USER_TOKEN, path).await, 403, "one user");
    }
    for key in [own[1], "key-one-of-u2-done"] {
        let address = office.address(key).await;
        let done = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/forget"), r#"{"reason":"r"}"#).await;
        assert_eq!(done.status, 200, "{done:?}");
    }
    let audit = office.admin_get(USER_TOKEN, "/api/audit").await.json();
    let users: Vec<_> =
        audit["entries"].as_array().unwrap().iter().map(|entry| entry["user"].as_str().unwrap()).collect();
    assert_eq!(users, ["u1"], "of two changes one is about its records");
}

/// Without a word about labels: a scope of users says whose a record is.
#[tokio::test]
async fn a_user_sees_its_records_under_a_preset_that_scopes_by_user() {
    let office = TestGateway::embedded(&format!("{ADMIN_CONFIG}[policy]\npreset = \"membership\"\n")).await;
    for (user, key) in [("u1", "key-of-user-one-0001"), ("u2", "key-of-user-two-0002")] {
        assert_eq!(office.pay_as("/pay/ok", key, user).send().await.status, 201);
    }
    let own = office.admin_get(USER_TOKEN, "/api/records").await.json();
    assert_eq!(keys(&own), ["key-****0001"]);
    assert_eq!(keys(&office.admin_json("/api/records").await).len(), 2);
}

#[tokio::test]
async fn a_page_of_a_user_is_never_filled_with_records_of_others() {
    let office = TestGateway::embedded(&format!(
        "{ADMIN_CONFIG}[[route]]\nmatch = \"POST /pay/*\"\nlabel = {{ user = \"header:X-User-Id\", key = \"clear\" }}\n"
    ))
    .await;
    for nth in 0..20 {
        let user = if nth % 5 == 0 { "u1" } else { "u2" };
        assert_eq!(office.pay_as("/pay/ok", &format!("key-number-{nth}-of-many"), user).send().await.status, 201);
    }
    let first = office.admin_get(USER_TOKEN, "/api/records?limit=3").await.json();
    assert_eq!(keys(&first).len(), 3, "{first:#}");
    let next = first["next"].as_str().expect("there is one more");
    let rest = office.admin_get(USER_TOKEN, &format!("/api/records?limit=3&cursor={next}")).await.json();
    assert_eq!((keys(&rest).len(), &rest["next"]), (1, &().into()));
}
