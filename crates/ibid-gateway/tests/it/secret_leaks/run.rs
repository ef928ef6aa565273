//! A gateway that succeeds, refuses, is configured wrongly and loses its stores, at the most talkative level.

use std::{fs, path::Path, time::Duration};

use http::{Method, Response};
use testbed::process::ProcessSignal;

use super::{
    scene::{ADMIN, ANSWER, CANARY, HOOK, JWT, KEY, SEAL, SecretsGateway, USER, VIEWER, WRONG, bearer},
    secret_search::{PlantedSecret, base64},
};
use crate::support::run_ibid;

/// What was printed, shown or sent: where, and what.
#[derive(Default)]
struct OutputLog(Vec<(String, String)>);

impl OutputLog {
    fn take(&mut self, place: impl Into<String>, text: impl Into<String>) {
        self.0.push((place.into(), text.into()));
    }

    /// Head and body of an answer.
    fn answer(&mut self, place: impl Into<String>, answer: &Response<bytes::Bytes>) {
        let text = format!("{:?}\n{}", answer.headers(), String::from_utf8_lossy(answer.body()));
        self.take(place, text);
    }

    fn text_at(&self, place: &str) -> String {
        self.0.iter().filter(|(known, _)| known.starts_with(place)).map(|(_, text)| text.as_str()).collect()
    }
}

/// What the gateway says to clients, who may see their own answers only.
async fn exercise_clients(scene: &SecretsGateway, seen: &mut OutputLog) {
    let first = scene.pay_valid("/pay/1", KEY).await;
    assert!(first.status() == 201 && String::from_utf8_lossy(first.body()).contains(ANSWER), "{first:?}");
    assert_eq!(scene.pay_valid("/pay/1", KEY).await.headers()["idempotent-replayed"], "true");
    let canary = scene.pay_valid(&format!("/pay/{CANARY}"), "key-of-the-canary").await;
    assert_eq!(canary.status(), 201);
    for (what, status, answer) in [
        ("another request with the key", 422, scene.pay("/pay/1", KEY, "other", JWT).await),
        ("a token of another issuer", 401, scene.pay_with_foreign_token().await),
        ("an answer that is lost", 502, scene.pay_valid("/pay/lost", "key-that-is-lost").await),
        ("its retry", 409, scene.pay_valid("/pay/lost", "key-that-is-lost").await),
        ("a key that is none", 400, scene.pay_valid("/pay/1", &KEY.repeat(9)).await),
        ("a path that is none", 400, scene.pay_valid("/pay/../pay/1", KEY).await),
        ("a delivery of somebody else", 401, scene.deliver_webhook("d-2", WRONG).await),
    ] {
        assert_eq!(answer.status(), status, "{what}: {answer:?}");
        seen.answer(format!("to a client: {what}"), &answer);
    }
    assert_eq!(scene.deliver_webhook("d-1", HOOK).await.status(), 201);
    for accept in ["application/json", "text/html"] {
        seen.answer("the contract page", &scene.get_contract(accept).await);
    }
}

/// Everything on the admin port, as whoever may see it.
async fn read_admin_port(scene: &SecretsGateway, seen: &mut OutputLog, when: &str) {
    let get = async |path: &str, who: (&str, &str)| scene.ask(Method::GET, path, who, "").await;
    let nobody = ("x-nobody", "1");
    for path in ["/healthz", "/readyz", "/metrics", "/api/openapi.json", "/login", "/"] {
        seen.answer(format!("{when}: {path} to nobody"), &get(path, nobody).await);
    }
    let mut addresses = Vec::new();
    for token in [VIEWER, ADMIN, USER] {
        let who = bearer(token);
        let who = (who.0, who.1.as_str());
        let records = get("/api/records", who).await;
        seen.answer(format!("{when}: /api/records"), &records);
        let page: serde_json::Value = serde_json::from_slice(records.body()).expect("JSON");
        let found = page["records"].as_array().into_iter().flatten();
        addresses.extend(found.map(|record| record["address"].as_str().expect("text").to_owned()));
        for path in ["stats", "policies", "store", "audit", "shadow", "refusals"] {
            seen.answer(format!("{when}: /api/{path}"), &get(&format!("/api/{path}"), who).await);
        }
    }
    let session = scene.ask(Method::POST, "/login", nobody, &format!("token={VIEWER}")).await;
    let cookie = session.headers()["set-cookie"].to_str().unwrap().split(';').next().unwrap().to_owned();
    let who = ("cookie", cookie.as_str());
    for path in ["/", "/series", "/records", "/unknown", "/policies", "/shadow", "/store", "/audit"] {
        let answer = get(path, who).await;
        assert!(when == "without stores" || answer.status() == 200, "{path}: {answer:?}");
        seen.answer(format!("{when}: {path}"), &answer);
    }
    addresses.sort();
    addresses.dedup();
    let viewer = bearer(VIEWER);
    for address in addresses {
        // Here operators see the app's answer.
        seen.answer("a record of the API", &get(&format!("/api/records/{address}"), (viewer.0, &viewer.1)).await);
        seen.answer("a record of the console", &get(&format!("/records/{address}"), who).await);
    }
    let wrong = bearer(WRONG);
    seen.answer(format!("{when}: a wrong token"), &get("/api/records", (wrong.0, &wrong.1)).await);
    let wrong = scene.ask(Method::POST, "/login", nobody, &format!("token={WRONG}&next=/{WRONG}")).await;
    // What somebody typed into their own address comes back to them.
    let text = String::from_utf8_lossy(wrong.body()).replace(&format!("value=\"/{WRONG}\""), "");
    seen.take(format!("{when}: a wrong log-in"), text);
}

/// Configurations that are refused, each with a secret close to what is wrong.
async fn reload_invalid_configs(scene: &mut SecretsGateway) {
    for (part, by, told) in [
        (format!("\"{}\"", base64(SEAL)), format!("\"{}\"", &base64(SEAL)[..30]), "seal.keys[1].key: "),
        (format!("token = \"{VIEWER}\""), format!("token = {{ it = \"{VIEWER}\" }}"), "admin.tokens[1].token: "),
        (format!("secrets = [\"{HOOK}\"]"), format!("secrets = {{ it = \"{HOOK}\" }}"), "route[2].secrets: "),
        (format!("token = \"{USER}\""), format!("token = \"{USER}"), "ibid.toml:"),
        ("[store]\nurl = \"redis:".to_owned(), "[store]\nurl = \"rediz:".to_owned(), "store.url: "),
    ] {
        scene.rewrite_config(&part, &by);
        scene.gateway.signal(ProcessSignal::Hup);
        let line = scene.gateway.wait_for_log(told).await;
        assert!(line.contains("the configuration in force stays"), "{line}");
    }
    scene.gateway.rewrite_config(&scene.config);
}

/// What commands print.
async fn run_commands(scene: &SecretsGateway, seen: &mut OutputLog) {
    let file = scene.gateway.dir().join("ibid.toml").display().to_string();
    let (admin, ca) = (scene.gateway.admin_addr().to_string(), scene.authority.path().display().to_string());
    let url = format!("https://{admin}");
    let upstream = scene.upstream.url();
    let env = [
        ("PLANTED_ADMIN", ADMIN),
        ("IBID_ADMIN_TOKEN", ADMIN),
        ("IBID_ADMIN_CA", &ca),
        ("IBID_UPSTREAM", upstream.as_str()),
    ];
    for args in [
        &["check", &file][..],
        &["check", &file, "--against", &file],
        &["health", "--config", &file, "--admin", &admin, "--ready"],
        &["keys", "list", "--admin", &url],
        &["keys", "list", "--config", &file],
        &["keys", "list", "--json", "--config", &file],
        &["report", "--admin", &url],
        &["sweep", "--config", &file],
    ] {
        let output = run_ibid(args, &env).await;
        assert_eq!(output.code, Some(0), "{args:?}: {}", output.all());
        seen.take(format!("ibid {}", args.join(" ")), output.all());
    }
}

fn record_files(folder: &Path, seen: &mut OutputLog) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            record_files(&path, seen);
        } else if !path.ends_with("ibid.toml") {
            let bytes = fs::read(&path).expect("a file");
            seen.take(format!("file {}", path.display()), bytes.escape_ascii().to_string());
        }
    }
}

async fn assert_no_secret_leaks(level: &str, format: &str) {
    let mut scene = SecretsGateway::start(level, format).await;
    let mut seen = OutputLog::default();
    exercise_clients(&scene, &mut seen).await;
    let admin = bearer(ADMIN);
    let stuck = scene.ask(Method::GET, "/api/records?state=unknown", (admin.0, &admin.1), "").await;
    let stuck: serde_json::Value = serde_json::from_slice(stuck.body()).expect("JSON");
    read_admin_port(&scene, &mut seen, "while all is well").await;
    let path = format!("/api/records/{}/release", stuck["records"][0]["address"].as_str().expect("one is unknown"));
    let changed = scene.ask(Method::POST, &path, (admin.0, &admin.1), "{\"reason\":\"ticket 7\"}").await;
    assert_eq!(changed.status(), 200, "{changed:?}");
    seen.answer("a change", &changed);
    run_commands(&scene, &mut seen).await;
    reload_invalid_configs(&mut scene).await;
    scene.redis.kill();
    scene.postgres.kill();
    let refused = scene.pay_valid("/pay/2", "key-without-a-store").await;
    assert_eq!(refused.status(), 503, "{refused:?}");
    seen.answer("to a client: without stores", &refused);
    assert_eq!(scene.pay_valid("/pay/1", "another-key-without-a-store").await.status(), 503);
    read_admin_port(&scene, &mut seen, "without stores").await;
    scene.gateway.signal(ProcessSignal::Term);
    scene.gateway.wait_exit(Duration::from_secs(30)).await;
    seen.take("the log", scene.gateway.logs().join("\n"));
    record_files(scene.gateway.dir(), &mut seen);
    for sent in scene.collector.log() {
        seen.take("the traces", format!("{:?} {}", sent.headers, String::from_utf8_lossy(&sent.body)));
    }
    search_output(&scene, &seen, level);
}

fn search_output(scene: &SecretsGateway, seen: &OutputLog, level: &str) {
    // It was looked where there is something to see, by what finds things.
    let canary = PlantedSecret::text("the canary", CANARY);
    for place in ["the log", "the traces", "while all is well: /api/records", "ibid keys list --json"] {
        assert!(canary.found_in(&seen.text_at(place)).is_some(), "{place} at {level}: {}", seen.text_at(place));
    }
    for place in ["a record of the API", "a record of the console"] {
        assert!(seen.text_at(place).contains(ANSWER), "operators see answers there: {}", seen.text_at(place));
    }
    assert!(seen.text_at("file ").contains("ticket 7"), "the audit trail is there");
    let answer = PlantedSecret::text("an answer's body", ANSWER);
    let mut leaks = Vec::new();
    for (place, text) in &seen.0 {
        let may_show_it = place.starts_with("a record of ");
        for secret in scene.secrets.iter().chain((!may_show_it).then_some(&answer)) {
            if let Some(form) = secret.found_in(text) {
                let line = text.lines().find(|line| line.contains(form)).unwrap_or_default();
                leaks.push(format!("{} in {place}, as {form}:\n{line}", secret.name));
            }
        }
    }
    assert!(leaks.is_empty(), "at {level}:\n{}", leaks.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_that_is_planted_is_seen_in_a_run_at_trace_as_text() {
    assert_no_secret_leaks("trace", "text").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_that_is_planted_is_seen_in_a_run_at_trace_as_json() {
    assert_no_secret_leaks("trace", "json").await;
}
