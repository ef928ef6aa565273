//! What a thief finds: of the store and of the journal, nothing that was planted; of logs, pages and messages, no key.
//! Each look at a file is made without a seal too, where everything must be found.

use std::{fs, os::unix::fs::PermissionsExt as _, time::Duration};

use testbed::{
    TestRedis,
    client::get,
    process::{GatewayProcess, ProcessSignal},
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};

use super::{SECRET, contains_text, files, ibid, key_base64, key_bytes, pay, table};
use crate::{
    stores::common::journal_files,
    support::until_some,
    support::{assert_replay, start_gateway},
};

const KEY: &str = "planted-idempotency-key";
const TENANT: &str = "planted-tenant";
const USER: &str = "planted-user-id";
const REPLY: &str = "planted-in-the-body";
const HEADER: &str = "planted-in-a-header";
const AGENT: &str = "planted-user-agent";
const ALL: [&str; 6] = [KEY, TENANT, USER, REPLY, HEADER, AGENT];
const POLICY: &str =
    "[policy]\nlabel = { tenant = \"header:X-Tenant-Id\", user = \"header:X-User-Id\", key = \"clear\" }\n";

fn planted_request(gateway: &GatewayProcess) -> testbed::client::TestRequest {
    let request = pay(gateway, KEY).header("X-Tenant-Id", TENANT).header("X-User-Id", USER);
    request.header("User-Agent", AGENT)
}

async fn upstream() -> TestUpstream {
    let upstream = TestUpstream::start().await;
    upstream.on("/pay", reply());
    upstream
}

fn reply() -> UpstreamReply {
    UpstreamReply::status(201).json(&format!("{{\"card\":\"{REPLY}\"}}")).header("X-Planted", HEADER)
}

#[track_caller]
fn assert_secrets_found(bytes: &[u8], is_sealed: bool) {
    assert!(bytes.len() > 300, "{} bytes", bytes.len());
    for planted in ALL.into_iter().chain(["/pay"]) {
        assert_eq!(contains_text(bytes, planted), !is_sealed, "{planted}, sealed: {is_sealed}");
    }
}

#[tokio::test]
async fn nothing_is_in_the_files_of_the_store() {
    for is_sealed in [true, false] {
        let seal = if is_sealed { table(&["k"]) } else { String::new() };
        let upstream = upstream().await;
        let config = format!("{POLICY}[store]\nurl = \"embedded:data\"\n{seal}");
        let mut gateway = start_gateway(&config, &upstream).await;
        let first = planted_request(&gateway).send().await;
        assert_replay(&planted_request(&gateway).send().await, &first);
        gateway.kill().await;
        assert_secrets_found(&files(&gateway.dir().join("data")), is_sealed);
        gateway.restart().await;
        assert_replay(&planted_request(&gateway).send().await, &first);
        assert_eq!(upstream.executions(), 1);
    }
}

#[tokio::test]
async fn nothing_is_in_the_journal() {
    for is_sealed in [true, false] {
        let seal = if is_sealed { table(&["k"]) } else { String::new() };
        let (server, upstream, gate) = (TestRedis::start(), TestUpstream::start().await, ReplyGate::new());
        upstream.on("/pay", reply().gated(&gate));
        let url = server.url();
        let config = format!("{POLICY}[store]\nurl = {url:?}\nlocal_cache = \"0\"\ntimeout = \"300ms\"\n{seal}");
        let mut gateway = start_gateway(&config, &upstream).await;
        let request = planted_request(&gateway);
        let running = tokio::spawn(async move { request.send().await });
        gate.arrived(1).await;
        server.kill();
        gate.open();
        let first = running.await.expect("it is answered");
        assert_eq!((first.status, first.header("idempotency-stored")), (201, Some("pending")), "{first:?}");
        let journal = gateway.dir().join("ibid-journal");
        assert_secrets_found(&files(&journal), is_sealed);
        let made = fs::read_dir(&journal).unwrap().map(|file| file.unwrap().path()).chain([journal.clone()]);
        for path in made {
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{} is for its owner only: {mode:o}", path.display());
        }
        // A retry gets it from there, also after a restart.
        assert_replay(&planted_request(&gateway).send().await, &first);
        gateway.kill().await;
        gateway.restart().await;
        assert_replay(&planted_request(&gateway).send().await, &first);
        server.restart();
        gateway.wait_for_log("the journal's answer has reached the store").await;
        // It is said before the file is removed.
        until_some("the journal to be empty", || async { journal_files(&journal).is_empty().then_some(()) }).await;
        assert_replay(&planted_request(&gateway).send().await, &first);
        assert_eq!(upstream.executions(), 1);
    }
}

#[tokio::test]
async fn a_journal_in_clear_is_set_aside_and_said() {
    let (server, upstream, gate) = (TestRedis::start(), TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", reply().gated(&gate));
    let config = format!("{POLICY}[store]\nurl = {:?}\nlocal_cache = \"0\"\ntimeout = \"300ms\"\n", server.url());
    let mut gateway = start_gateway(&config, &upstream).await;
    let request = planted_request(&gateway);
    let running = tokio::spawn(async move { request.send().await });
    gate.arrived(1).await;
    server.kill();
    gate.open();
    assert_eq!(running.await.expect("it is answered").header("idempotency-stored"), Some("pending"));
    gateway.kill().await;
    gateway.rewrite_config(&format!("{config}{}", table(&["k"])));
    gateway.restart().await;
    gateway.wait_for_log("an answer in the journal cannot be read; it was set aside").await;
    let journal = gateway.dir().join("ibid-journal");
    let names = journal_files(&journal);
    assert!(!names.is_empty() && names.iter().all(|name| name.ends_with(".unreadable")), "{names:?}");
}

#[tokio::test]
async fn no_key_is_ever_printed() {
    let ids = ["planted-key-one", "planted-key-two"];
    let secrets: Vec<String> = ids.iter().chain([&SECRET]).map(|name| key_base64(name)).collect();
    let mut printed = String::new();
    for (level, format) in [("trace", "text"), ("debug", "json")] {
        let upstream = upstream().await;
        let config = format!("log = {{ level = {level:?}, format = {format:?} }}\n[store]\nurl = \"embedded:data\"\n");
        let mut gateway = start_gateway(&format!("{config}{}", table(&ids)), &upstream).await;
        let first = planted_request(&gateway).send().await;
        assert_replay(&planted_request(&gateway).send().await, &first);
        // Taken up, refused because it forgets, and wrong.
        let forgets = table(&ids[..1]).replace(&key_base64(SECRET), &key_base64("another-secret"));
        let wrong = table(&ids).replace(&secrets[1], &secrets[1][..30]);
        for (text, said) in [
            (table(&ids[..1]), "configuration taken up"),
            (forgets, "would forget what is remembered"),
            (wrong, "the configuration in force stays"),
        ] {
            gateway.rewrite_config(&format!("{config}{text}"));
            gateway.signal(ProcessSignal::Hup);
            gateway.wait_for_log(said).await;
        }
        for page in ["/metrics", "/readyz", "/healthz"] {
            printed += &get(gateway.admin_addr(), page).send().await.text();
        }
        printed += &get(gateway.addr(), "/.well-known/idempotency").send().await.text();
        // The key is gone that the record needs.
        gateway.signal(ProcessSignal::Term);
        gateway.wait_exit(Duration::from_secs(20)).await;
        gateway.rewrite_config(&format!("{config}{}", table(&ids[1..])));
        gateway.restart().await;
        assert_eq!(planted_request(&gateway).send().await.status, 503);
        gateway.wait_for_log(", which seal.keys does not have").await;
        let file = gateway.dir().join("ibid.toml");
        gateway.signal(ProcessSignal::Term);
        gateway.wait_exit(Duration::from_secs(20)).await;
        printed += &gateway.logs().join("\n");
        let (data, file) = (gateway.dir().join("data"), file.to_str().unwrap());
        let config = config.replace("embedded:data", &format!("embedded:{}", data.display()));
        fs::write(file, format!("upstream = \"http://127.0.0.1:3000\"\n{config}{}", table(&ids))).unwrap();
        for args in [
            &["check", file][..],
            &["keys", "list", "--config", file],
            &["keys", "reseal", "--config", file],
            &["keys", "show", "--key", KEY, "--config", file],
            &["store", "check", data.to_str().unwrap()],
            &["store", "dump", data.to_str().unwrap()],
        ] {
            let (code, out, said) = ibid(args).await;
            assert_eq!(code, Some(0), "{args:?}: {said}");
            printed += &format!("{out}{said}");
        }
    }
    assert!(printed.contains("planted-key-one"), "the names are there");
    for secret in &secrets {
        assert!(!printed.contains(&secret[4..24]), "{secret}");
    }
    // The bytes that the names were made into.
    for name in ids.iter().chain([&SECRET]) {
        let bytes: String = key_bytes(name).map(char::from).iter().collect();
        assert!(!printed.contains(&bytes), "{name}");
        let hex: String = name.bytes().take(8).map(|byte| format!("{byte:02x}")).collect();
        assert!(!printed.contains(&hex), "{name} as hex");
    }
}
