//! The trail of changes.

use serde_json::Value;
use testbed::process::ProcessSignal;

use super::common::{ADMIN_CONFIG, ADMIN_TOKEN, assert_problem};
use crate::disk::TestMount;
use crate::support::{TestGateway, run_ibid};

async fn audit_entries(office: &TestGateway, query: &str) -> Vec<Value> {
    office.admin_json(&format!("/api/audit{query}")).await["entries"].as_array().expect("a list").clone()
}

#[tokio::test]
async fn every_change_is_written_down_and_survives_a_restart() {
    let mut office = TestGateway::with_records().await;
    let (lost, done) = (office.address("key-two-of-u1-lost").await, office.address("key-one-of-u1-done").await);
    let refused =
        office.admin_post(ADMIN_TOKEN, &format!("/api/records/{done}/release"), r#"{"reason":"by mistake"}"#).await;
    assert_eq!(refused.status, 409, "{refused:?}");
    let ada = "token-of-ada-lovelace";
    let body = "{\"reason\":\" ticket 7:\\n\\\"nothing\\\" there \"}";
    let forgotten = office.admin_post(ada, &format!("/api/records/{lost}/forget"), body).await;
    assert_eq!(forgotten.status, 200, "{forgotten:?}");

    let entries = audit_entries(&office, "").await;
    assert_eq!(entries.len(), 2, "{entries:#?}");
    let newest = &entries[0];
    for (name, value) in [
        ("id", 2.into()),
        ("by", "Ada".into()),
        ("role", "admin".into()),
        ("client", "127.0.0.1".into()),
        ("action", "forget".into()),
        ("address", lost.as_str().into()),
        ("key", "key-****lost".into()),
        ("tenant", "acme".into()),
        ("user", "u1".into()),
        ("endpoint", "POST /pay/*".into()),
        ("reason", "ticket 7:\n\"nothing\" there".into()),
        ("outcome", Value::from("changed")),
        ("after", Value::Null),
        ("why", Value::Null),
    ] {
        assert_eq!(newest[name], value, "{name} in {newest:#}");
    }
    assert_eq!((&newest["before"]["state"], &newest["before"]["attempt"]), (&"unknown".into(), &1.into()));
    assert_eq!((&entries[1]["outcome"], &entries[1]["by"]), (&"refused".into(), &"admin.token".into()));
    assert!(entries[1]["why"].as_str().is_some_and(|why| why.contains("nothing left to resolve")));
    let line = office.gateway.wait_for_log("outcome=Changed").await;
    for part in ["an operator's change", "by=\"Ada\"", "action=\"forget\"", "before=\"unknown\"", "ticket 7"] {
        assert!(line.contains(part), "{part} in {line}");
    }
    assert!(!line.contains(&lost) && !line.contains("key-two-of-u1-lost"), "masked: {line}");

    for signal in [ProcessSignal::Term, ProcessSignal::Kill] {
        office.gateway.signal(signal);
        office.gateway.restart().await;
        assert_eq!(audit_entries(&office, "").await, entries, "after {signal:?}");
    }
    let again = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{done}/forget"), r#"{"reason":"r"}"#).await;
    assert_eq!(again.status, 200, "{again:?}");
    assert_eq!(audit_entries(&office, "?limit=1").await[0]["id"], 3, "numbers go on");
    let page = office.admin_json("/api/audit?limit=2").await;
    assert_eq!((page["entries"].as_array().unwrap().len(), &page["next"]), (2, &2.into()));
    let rest = audit_entries(&office, "?limit=2&cursor=2").await;
    assert_eq!((rest.len(), &rest[0]["id"]), (1, &1.into()));
}

#[tokio::test]
async fn what_cannot_be_written_down_is_not_done() {
    let disk = TestMount::tmpfs("256k");
    let setting = format!("[admin]\naudit = {:?}", disk.path().join("audit.jsonl"));
    let routes = "[[route]]\nmatch = \"POST /pay/*\"\nlabel = { key = \"clear\" }\n";
    let office = TestGateway::embedded(&format!("{}{routes}", ADMIN_CONFIG.replacen("[admin]", &setting, 1))).await;
    assert_eq!(office.pay_as("/pay/ok", "key-of-a-payment", "u1").send().await.status, 201);
    let forget = format!("/api/records/{}/forget", office.address("key-of-a-payment").await);
    let ballast = disk.fill();
    let refused = office.admin_post(ADMIN_TOKEN, &forget, r#"{"reason":"r"}"#).await;
    assert_problem(&refused, 503, "the audit trail cannot be written, so nothing was changed");
    assert_eq!(office.record("key-of-a-payment").await["state"], "done", "nothing was changed");
    // Whoever tried it in the console is told what is wrong, and not that the store is.
    let fence = office.record("key-of-a-payment").await["fence"].to_string();
    let form = office.admin_request("POST", ADMIN_TOKEN, &forget.replacen("/api", "", 1));
    let form = form.header("Content-Type", "application/x-www-form-urlencoded");
    let page = form.body(format!("step=commit&reason=r&seen={fence}")).send().await;
    assert_eq!(page.status, 503, "{page:?}");
    assert!(page.text().contains("The audit trail cannot be written"), "{}", page.text());
    assert!(!page.text().contains("The store does not answer"));
    assert_eq!(audit_entries(&office, "").await.len(), 0);
    std::fs::remove_file(ballast).expect("room again");
    assert_eq!(office.admin_post(ADMIN_TOKEN, &forget, r#"{"reason":"r"}"#).await.status, 200);
    assert_eq!(audit_entries(&office, "").await.len(), 1);
}

#[tokio::test]
async fn the_trail_is_where_the_configuration_says_or_only_in_the_log() {
    let routes = "[[route]]\nmatch = \"POST /pay/*\"\nlabel = { key = \"clear\" }\n";
    for (setting, file) in [("audit = \"trail/audit.jsonl\"", Some("trail/audit.jsonl")), ("audit = \"off\"", None)] {
        let who = ADMIN_CONFIG.replacen("[admin]", &format!("[admin]\n{setting}"), 1);
        let mut office = TestGateway::embedded(&format!("{who}{routes}")).await;
        assert_eq!(office.pay_as("/pay/ok", "key-of-a-payment", "u1").send().await.status, 201);
        let address = office.address("key-of-a-payment").await;
        let done = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/forget"), r#"{"reason":"r"}"#).await;
        assert_eq!(done.status, 200, "{done:?}");
        assert_eq!(audit_entries(&office, "").await.len(), 1, "{setting}");
        office.gateway.wait_for_log("an operator's change").await;
        office.gateway.restart().await;
        assert_eq!(audit_entries(&office, "").await.len(), usize::from(file.is_some()), "{setting}");
        if let Some(file) = file {
            assert!(office.gateway.dir().join(file).exists());
        }
        assert!(!office.gateway.dir().join("ibid-journal/audit.jsonl").exists(), "{setting}");
    }
}

#[tokio::test]
async fn a_trail_that_cannot_be_opened_stops_the_start() {
    let (_folder, file) = {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ibid.toml");
        std::fs::write(folder.path().join("file"), "").unwrap();
        let trail = folder.path().join("file/audit.jsonl");
        let text = format!(
            "upstream = \"http://127.0.0.1:1\"\nlisten = \"127.0.0.1:0\"\n[store]\nurl = \"memory:\"\n[admin]\nlisten = \"127.0.0.1:0\"\naudit = {trail:?}\n"
        );
        std::fs::write(&file, text).unwrap();
        (folder, file)
    };
    let output = run_ibid(&["serve", "--config", file.to_str().unwrap()], &[]).await;
    let said = output.stderr;
    assert_eq!(output.code, Some(1), "{said}");
    assert!(said.contains("admin.audit: ") && said.contains("file/audit.jsonl"), "{said}");
}

/// What a gateway says that does not start because of these settings.
async fn start_error(settings: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ibid.toml");
    let top = "upstream = \"http://127.0.0.1:1\"\nlisten = \"127.0.0.1:0\"\nstore.url = \"memory:\"\n";
    std::fs::write(&file, format!("{top}{settings}")).unwrap();
    let serve = ["serve", "--config", file.to_str().unwrap()];
    let output = run_ibid(&serve, &[]).await;
    let said = output.stderr;
    assert_eq!(output.code, Some(1), "{said}");
    said
}

#[tokio::test]
async fn two_gateways_cannot_share_a_trail_and_it_can_be_read_all_the_same() {
    let mut office = TestGateway::with_records().await;
    let done = office.address("key-one-of-u1-done").await;
    let forgotten = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{done}/forget"), r#"{"reason":"r"}"#).await;
    assert_eq!(forgotten.status, 200, "{forgotten:?}");
    let written_to = office.gateway.dir().join("ibid-journal/audit.jsonl");
    let said = start_error(&format!("[admin]\nlisten = \"127.0.0.1:0\"\naudit = {written_to:?}\n")).await;
    let holder = format!("it is in use by process {} on ", office.gateway.id());
    for part in ["admin.audit: ", "audit.jsonl: ", &holder, "each gateway writes to a file of its own"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let written = std::fs::read_to_string(&written_to).expect("it can be read");
    assert!(written.lines().count() == 2 && written.contains(&done), "begun, and ended: {written}");
    // Whoever was killed holds nothing.
    office.gateway.signal(ProcessSignal::Kill);
    office.gateway.restart().await;
    assert_eq!(audit_entries(&office, "").await.len(), 1);
}

#[tokio::test]
async fn two_gateways_cannot_share_a_journal() {
    let mut office = TestGateway::with_operators().await;
    let journal = office.gateway.dir().join("ibid-journal");
    let unfinished = journal.join("half.part");
    std::fs::write(&unfinished, "half of an answer").unwrap();
    let said = start_error(&format!("journal = {journal:?}\n[admin]\nlisten = \"off\"\n")).await;
    let holder = format!("it is in use by process {} on ", office.gateway.id());
    for part in ["journal: ", "ibid-journal: ", &holder, "each gateway has a journal of its own"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(unfinished.exists(), "what the first is writing is not touched");
    office.gateway.signal(ProcessSignal::Kill);
    office.gateway.restart().await;
    assert!(!unfinished.exists(), "the first itself knows that nobody writes it any more");
}

#[tokio::test]
async fn pages_are_asked_for_well_or_refused() {
    let office = TestGateway::with_operators().await;
    for (query, part) in [
        ("limit=0", "allowed is 1 to 1000"),
        ("limit=1001", "allowed is 1 to 1000"),
        ("cursor=x", "send what \"next\" said"),
        ("cursor=-1", "send what \"next\" said"),
        ("user=u1", "allowed are limit, cursor"),
    ] {
        assert_problem(&office.admin_get(ADMIN_TOKEN, &format!("/api/audit?{query}")).await, 400, part);
    }
}

#[tokio::test]
async fn gateways_of_one_store_share_a_trail_and_what_they_know_about_unknown_outcomes() {
    let redis = testbed::TestRedis::start();
    let who = ADMIN_CONFIG.replacen("[admin]", "[admin]\naudit = \"store\"", 1);
    let route = "[[route]]\nmatch = \"POST /pay/*\"\nlabel = { key = \"clear\" }\n";
    let config = format!("{who}{route}[store]\nurl = {:?}\n", redis.url());
    let (one, other) = (TestGateway::start(&config).await, TestGateway::start(&config).await);
    one.upstream.on("/pay/lost", testbed::upstream::UpstreamFault::CloseWithoutReply);
    for nth in 0..3 {
        let key = format!("key-of-payment-{nth}");
        assert_eq!(one.pay_as("/pay/lost", &key, "u1").send().await.status, 502);
    }
    let seen = crate::support::until_some("the other gateway knows why", async || {
        let address = other.address("key-of-payment-0").await;
        let record = other.admin_json(&format!("/api/records/{address}")).await;
        record["unknown"]["since"].is_string().then_some(record)
    });
    let seen = seen.await;
    assert!(seen["unknown"]["cause"].as_str().is_some_and(|cause| cause.starts_with("connection lost")), "{seen:#}");
    // Two by the gateways, one by the command on the store.
    for (gateway, nth) in [(&one, 0), (&other, 1)] {
        let address = gateway.address(&format!("key-of-payment-{nth}")).await;
        let body = format!("{{\"reason\":\"reason {nth}\"}}");
        let released = gateway.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/release"), &body).await;
        assert_eq!(released.status, 200, "{released:?}");
    }
    let args = ["keys", "release", "--key", "key-of-payment-2", "--reason", "reason 2", "--store", &redis.url()];
    assert_eq!(run_ibid(&args, &[]).await.code, Some(0));
    for gateway in [&one, &other] {
        let entries = audit_entries(gateway, "").await;
        let told: Vec<_> = entries.iter().map(|entry| (entry["id"].as_u64(), entry["reason"].as_str())).collect();
        let expected = [(Some(3), Some("reason 2")), (Some(2), Some("reason 1")), (Some(1), Some("reason 0"))];
        assert_eq!(told, expected, "{entries:#?}");
        assert!(entries.iter().all(|entry| entry["outcome"] == "changed"), "{entries:#?}");
        let page = gateway.admin_json("/api/audit?limit=2").await;
        assert_eq!((page["entries"].as_array().unwrap().len(), &page["next"]), (2, &2.into()), "{page:#}");
        assert_eq!(audit_entries(gateway, "?limit=2&cursor=2").await.len(), 1);
    }
    // Lists have records only.
    assert_eq!(one.admin_json("/api/records").await["records"].as_array().map(Vec::len), Some(0));
}
