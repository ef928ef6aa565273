//! What shadow mode saw, and which part of a request differed.

use serde_json::{Value, json};
use testbed::client::{get, post};

use super::common::{ADMIN_CONFIG, ADMIN_TOKEN, VIEWER_TOKEN};
use crate::support::{TestGateway, caller, run_ibid};

const SHADOW: &str = r#"
[[route]]
match = "POST /pay/*"
mode = "shadow"

[[route]]
match = "POST /strict/*"
key.required = true
"#;

async fn shadowed() -> TestGateway {
    let office = TestGateway::embedded(&format!("{ADMIN_CONFIG}{SHADOW}")).await;
    let send = async |path: &str, key: &str, body: &str, agent: &str| {
        let mut request = caller(post(office.gateway.addr(), path)).header("Host", "shop.example").json(body);
        if !key.is_empty() {
            request = request.key(key);
        }
        if !agent.is_empty() {
            request = request.header("User-Agent", agent);
        }
        request.send().await.status
    };
    for _ in 0..3 {
        send("/pay/ok", "key-of-one-payment", "{}", "shop/2").await;
    }
    send("/pay/ok", "key-of-one-payment", r#"{"amount":2}"#, "shop/2").await;
    for _ in 0..2 {
        send("/pay/ok", "", "{}", "Old-Shop/1.0 (iPhone)").await;
    }
    send("/pay/ok", "", "{}", "").await;
    assert_eq!(send("/strict/a", "", "{}", "Old-Shop/1.0 (iPad)").await, 400);
    // It is counted beside the requests, and so maybe after them.
    while route(&office.admin_json("/api/shadow").await, "POST /pay/*")["requests"] != 7 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    office
}

fn route<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["routes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|route| route["route"] == name)
        .unwrap_or_else(|| panic!("{report:#}"))
}

#[tokio::test]
async fn the_shadow_report_says_what_would_have_been_and_who_sends_no_key() {
    let office = shadowed().await;
    let report = office.admin_json("/api/shadow").await;
    let pay = route(&report, "POST /pay/*");
    assert_eq!((&pay["mode"], &pay["requests"], &pay["run"]), (&"shadow".into(), &7.into(), &1.into()), "{pay:#}");
    assert_eq!((&pay["replay"], &pay["refuse"]), (&2.into(), &json!({ "key-reused": 1 })));
    assert_eq!(pay["no_key"], 3);
    let agents = json!([{ "user_agent": "Old-Shop/1.0", "requests": 2 }, { "user_agent": null, "requests": 1 }]);
    assert_eq!((&pay["no_key_by"], &pay["no_key_by_others"]), (&agents, &0.into()));
    let strict = route(&report, "POST /strict/*");
    assert_eq!((&strict["mode"], &strict["refuse"]), (&"enforce".into(), &json!({ "key-missing": 1 })), "{strict:#}");
    assert_eq!(strict["no_key_by"], json!([{ "user_agent": "Old-Shop/1.0", "requests": 1 }]));
}

#[tokio::test]
async fn the_report_command_prints_it_as_a_table_and_as_json() {
    let office = shadowed().await;
    let admin = format!("http://{}", office.gateway.admin_addr());
    let env = [("IBID_ADMIN_TOKEN", VIEWER_TOKEN)];
    let output = run_ibid(&["report", "--admin", &admin], &env).await;
    let text = output.text();
    assert!(output.code == Some(0), "{text}");
    for line in [
        "ROUTE           MODE     REQUESTS  RUN  REPLAY  REFUSE  NO KEY\n",
        "POST /pay/*     shadow   7         1    2       1       3\n",
        "  1 would be refused: key-reused\n",
        "  2 without a key: Old-Shop/1.0\n",
        "  1 without a key: no user agent\n",
        "  1 refused: key-missing\n",
    ] {
        assert!(text.contains(line), "{line:?} in\n{text}");
    }
    let output = run_ibid(&["report", "--admin", &admin, "--json"], &env).await;
    let report = output.json();
    assert_eq!(route(&report, "POST /pay/*")["replay"], 2);
    let none = run_ibid(&["report"], &env).await;
    assert_eq!(none.code, Some(64));
    assert!(&none.stderr.starts_with("ibid: which gateway?"), "{none:?}");
}

#[tokio::test]
async fn operators_see_which_part_of_a_reused_key_differed() {
    let office = TestGateway::with_records().await;
    let key = "key-one-of-u1-done";
    let again = |path: &str, body: &str| {
        let request = caller(post(office.gateway.addr(), path)).header("Host", "shop.example").key(key).json(body);
        request.header("X-Tenant-Id", "acme").header("X-User-Id", "u1").header("User-Agent", "other/1")
    };
    for (path, body, differs) in [
        ("/pay/ok", r#"{"amount":2}"#, &["body"][..]),
        ("/pay/other", r#"{"amount":1}"#, &["path"]),
        ("/pay/ok?x=1", r#"{"amount":1}"#, &["query"]),
        ("/pay/other?x=1", "{}", &["path", "query", "body"]),
    ] {
        let refused = again(path, body).send().await;
        assert_eq!(refused.status, 422, "{refused:?}");
        assert!(!refused.text().contains("\"path\"") && !refused.text().contains("differs"), "a client is not told");
        let seen = office.admin_json("/api/refusals?reason=key-reused&limit=1").await;
        let newest = &seen["refusals"][0];
        assert_eq!(newest["differs"], json!(differs), "{newest:#}");
        assert_eq!(
            (&newest["key"], &newest["status"], &newest["shadow"]),
            (&"key-****done".into(), &422.into(), &false.into())
        );
        assert_eq!((&newest["user_agent"], &newest["client"]), (&"other/1".into(), &"127.0.0.1".into()));
        assert_eq!(
            (&newest["first"]["path"], &newest["first"]["user_agent"]),
            (&"/pay/ok".into(), &"shop/1 (x)".into())
        );
    }
    assert_eq!(again("/pay/ok", r#"{ "amount" : 1 }"#).send().await.status, 201, "the same in other words");
    let all = office.admin_json("/api/refusals").await;
    assert_eq!(all["refusals"].as_array().map(Vec::len), Some(4));
    // Without its first request it is a refusal still, of which nobody knows more.
    let address = office.address(key).await;
    assert_eq!(
        office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/forget"), r#"{"reason":"r"}"#).await.status,
        200
    );
    let gone = office.admin_json("/api/refusals?limit=1").await;
    assert_eq!((&gone["refusals"][0]["differs"], &gone["refusals"][0]["first"]), (&Value::Null, &Value::Null));
    assert_eq!(get(office.gateway.admin_addr(), "/api/refusals").send().await.status, 401);
}
