//! Resealing by the gateway that has the store open: over its admin API, while it serves.

use std::{sync::Arc, time::Duration};

use ibid::store::{ErrorKind, Memory};
use ibid_gateway::commands::serve;
use ibid_stores::{
    OpenedStore,
    seal::{SealKey, SealOptions, SealedStore, Sealer},
};
use ibid_testkit::wrappers::{CallFilter, DelayedStore, FailingStore};
use serde_json::{Value, json};
use testbed::{
    client::{TestResponse, request},
    process::GatewayProcess,
    upstream::TestUpstream,
};

use super::{SECRET, end, key_bytes, pay, pay_at, table};
use crate::support::{assert_ran, assert_replay, run_ibid, start_gateway, start_on_opened_store};

const ADMIN: &str = "token-of-the-admin";
const VIEWER: &str = "token-of-the-viewer";
const WHO: &str = "[admin]\ntoken = \"token-of-the-admin\"\n\
                   tokens = [{ role = \"viewer\", token = \"token-of-the-viewer\" }]\n";

async fn reseal(gateway: std::net::SocketAddr, token: &str, body: Value) -> TestResponse {
    let asked = request("POST", gateway, "/api/reseal").header("Authorization", format!("Bearer {token}"));
    asked.json(&body.to_string()).send().await
}

async fn audit(gateway: std::net::SocketAddr) -> Vec<Value> {
    let asked = request("GET", gateway, "/api/audit").header("Authorization", format!("Bearer {ADMIN}"));
    asked.send().await.json()["entries"].as_array().expect("a list").clone()
}

/// `ibid keys reseal --admin`: exit code, what was printed, what was said.
async fn command(gateway: &GatewayProcess, args: &[&str]) -> (Option<i32>, String, String) {
    let admin = format!("http://{}", gateway.admin_addr());
    let args = [&["keys", "reseal", "--admin", &admin], args].concat();
    let done = run_ibid(&args, &[("IBID_ADMIN_TOKEN", ADMIN)]).await;
    (done.code, done.text(), done.stderr)
}

/// From `old` to `new` and to `new` alone, with the store in use all the time.
#[tokio::test]
async fn an_embedded_store_is_resealed_while_its_gateway_serves() {
    let (upstream, folder) = (TestUpstream::start().await, tempfile::tempdir().unwrap());
    let store = format!("[store]\nurl = \"embedded:{}\"\n", folder.path().join("data").display());
    let config = |ids: &[&str]| format!("{store}{WHO}{}", table(ids));
    let gateway = start_gateway(&config(&["old"]), &upstream).await;
    let mut answers = Vec::new();
    for nth in 0..40 {
        let answer = pay(&gateway, &format!("key-{nth}")).send().await;
        assert_ran(&answer);
        answers.push(answer);
    }
    gateway.rewrite_config(&config(&["new", "old"]));
    gateway.wait_for_log("configuration taken up").await;

    let (code, _, said) = command(&gateway, &["--json"]).await;
    assert!(code == Some(64) && said.contains("--admin needs a --reason"), "{said}");
    // Bit by bit, as it may be broken off.
    let (code, printed, said) = command(&gateway, &["--reason", "rotation", "--limit", "7", "--json"]).await;
    assert_eq!(code, Some(0), "{said}");
    let first: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((&first["looked"], &first["from"]["old"], &first["key"]), (&7.into(), &7.into(), &"new".into()));
    let cursor = first["next"].as_str().expect("there is more").to_owned();
    assert!(said.contains(&format!("there are more: --cursor {cursor}")), "{said}");
    let entries = audit(gateway.admin_addr()).await;
    assert_eq!((entries.len(), &entries[0]["outcome"]), (1, &"unknown".into()), "it goes on: {entries:#?}");
    let (code, printed, said) = command(&gateway, &["--reason", "rotation", "--cursor", &cursor]).await;
    assert_eq!(code, Some(0), "{said}");
    assert!(
        printed.starts_with("sealed 33 records with new that were with old\n0 records had new already\n"),
        "{printed}"
    );
    assert!(
        said.contains("INFO keys reseal key=new looked=33 resealed=33 ") && said.contains("reason=\"rotation\""),
        "{said}"
    );

    let entries = audit(gateway.admin_addr()).await;
    assert_eq!(entries.len(), 1, "one run, one entry: {entries:#?}");
    let entry = &entries[0];
    for (name, value) in [
        ("action", json!("reseal")),
        ("by", json!("admin.token")),
        ("reason", json!("rotation")),
        ("outcome", json!("changed")),
        ("address", Value::Null),
        ("before", Value::Null),
        ("resealed", json!({ "key": "new", "looked": 40, "resealed": 40, "unopened": 0 })),
    ] {
        assert_eq!(entry[name], value, "{name} in {entry:#}");
    }
    gateway.wait_for_log("action=\"reseal\"").await;

    gateway.rewrite_config(&config(&["new"]));
    let taken = async {
        while gateway.logs().iter().filter(|line| line.contains("configuration taken up")).count() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), taken).await.expect("it is taken up");
    for (nth, first) in answers.iter().enumerate() {
        assert_replay(&pay(&gateway, &format!("key-{nth}")).send().await, first);
    }
    assert_eq!(upstream.executions(), 40);
    let (code, printed, _) = command(&gateway, &["--reason", "again"]).await;
    assert!(code == Some(0) && printed.starts_with("40 records had new already\n"), "{printed}");
    end(gateway).await;
}

#[tokio::test]
async fn who_may_not_and_what_cannot_be_resealed_is_told() {
    let upstream = TestUpstream::start().await;
    let plain = start_gateway(WHO, &upstream).await;
    let refused = reseal(plain.admin_addr(), ADMIN, json!({ "reason": "r" })).await;
    assert_eq!(refused.status, 409, "{refused:?}");
    assert!(refused.json()["detail"].as_str().unwrap().contains("it has no seal.keys"), "{refused:?}");
    assert!(audit(plain.admin_addr()).await.is_empty());

    let folder = tempfile::tempdir().unwrap();
    let store = format!("[store]\nurl = \"embedded:{}\"\n", folder.path().join("data").display());
    let gateway = start_gateway(&format!("{store}{WHO}{}", table(&["old"])), &upstream).await;
    let at = gateway.admin_addr();
    for (token, body, status) in [
        ("", json!({ "reason": "r" }), 401),
        (VIEWER, json!({ "reason": "r" }), 403),
        (ADMIN, json!({}), 400),
        (ADMIN, json!({ "reason": " " }), 400),
        (ADMIN, json!({ "reason": "r", "limit": 0 }), 400),
        (ADMIN, json!({ "reason": "r", "cursor": "7" }), 400),
    ] {
        let refused = reseal(at, token, body.clone()).await;
        assert_eq!(refused.status, status, "{body}: {refused:?}");
    }
    assert!(audit(at).await.is_empty());
    for nth in 0..3 {
        assert_ran(&pay(&gateway, &format!("key-{nth}")).send().await);
    }
    end(gateway).await;

    // Without the key that they have, nothing can be done, and it is said.
    let gateway = start_gateway(&format!("{store}{WHO}{}", table(&["new"])), &upstream).await;
    let (code, _, said) = command(&gateway, &["--reason", "too late"]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("3 records did not open; nothing was changed there"), "{said}");
    assert_eq!(said.lines().filter(|line| line.contains("the key \"old\"")).count(), 3, "{said}");
    let entries = audit(gateway.admin_addr()).await;
    assert_eq!(entries[0]["resealed"], json!({ "key": "new", "looked": 3, "resealed": 0, "unopened": 3 }));
}

type MisbehavingStore = FailingStore<DelayedStore<Memory>>;

/// A gateway in this process, on a sealed store that does what it is told; with so many answers under `old`, while `new`
/// seals.
async fn start_misbehaving(upstream: &TestUpstream, answers: u32) -> (serve::RunningGateway, Arc<MisbehavingStore>) {
    let store = Arc::new(FailingStore::new(DelayedStore::new(Memory::default())));
    let key = |id: &str| SealKey::new(id, key_bytes(id)).unwrap();
    let sealing = Sealer::new(key("old"), Vec::new(), &key_bytes(SECRET), SealOptions::default());
    let sealed = SealedStore::new(store.clone(), sealing.clone(), Arc::new(ibid::observe::NoopObserver));
    let observer = Arc::new(ibid::observe::NoopObserver);
    let gateway = start_on_opened_store(WHO, upstream, OpenedStore::sealed(sealed), observer).await;
    for nth in 0..answers {
        assert_ran(&pay_at(gateway.address, &format!("key-{nth}")).send().await);
    }
    sealing.rekey(key("new"), vec![key("old")], SealOptions::default());
    (gateway, store)
}

#[tokio::test]
async fn a_store_that_fails_on_the_way_is_said_and_nothing_is_lost() {
    let upstream = TestUpstream::start().await;
    let (gateway, store) = start_misbehaving(&upstream, 5).await;
    let at = gateway.admin.unwrap();
    let some = reseal(at, ADMIN, json!({ "reason": "r", "limit": 2 })).await;
    assert_eq!((some.status, &some.json()["resealed"]), (200, &2.into()), "{some:?}");
    let next = some.json()["next"].clone();
    store.fail(CallFilter::All, ErrorKind::NotApplied);
    let failed = reseal(at, ADMIN, json!({ "reason": "r", "cursor": next })).await;
    assert_eq!(failed.status, 503, "{failed:?}");
    assert_eq!((&failed.json()["resealed"], &failed.json()["next"]), (&0.into(), &next), "from where to go on");
    let entries = audit(at).await;
    assert_eq!((entries.len(), &entries[0]["outcome"]), (1, &"failed".into()), "{entries:#?}");
    assert_eq!(entries[0]["resealed"]["resealed"], 2);
    store.heal();
    let rest = reseal(at, ADMIN, json!({ "reason": "r", "cursor": next })).await;
    assert_eq!((rest.status, &rest.json()["resealed"], &rest.json()["next"]), (200, &3.into(), &Value::Null));
    assert_eq!(audit(at).await.len(), 2, "what has failed has ended");
    gateway.stop().await;
}

#[tokio::test]
async fn one_is_at_work_at_a_time_and_one_that_is_broken_off_is_written_down() {
    let upstream = TestUpstream::start().await;
    let (gateway, store) = start_misbehaving(&upstream, 4).await;
    let at = gateway.admin.unwrap();
    store.inner().delay(CallFilter::All, Duration::from_millis(700), Duration::ZERO);
    let one = |reason: &'static str| reseal(at, ADMIN, json!({ "reason": reason, "limit": 2 }));
    let (first, second) = tokio::join!(one("a"), one("b"));
    let mut statuses = [first.status, second.status];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 409], "{first:?} {second:?}");
    store.inner().heal();
    let (begun, other) = if first.status == 200 { ("a", "c") } else { ("b", "c") };
    let third = one(other).await;
    assert_eq!((third.status, &third.json()["current"]), (200, &2.into()), "from the beginning: {third:?}");
    let entries = audit(at).await;
    assert_eq!((&entries[1]["reason"], &entries[1]["outcome"]), (&begun.into(), &"changed".into()), "{entries:#?}");
    assert!(entries[1]["why"].as_str().is_some_and(|why| why.contains("broken off")), "{entries:#?}");
    gateway.stop().await;
}
