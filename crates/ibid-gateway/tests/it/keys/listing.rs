//! Lists: what is in them, filters, pages.

use std::{collections::BTreeSet, time::Duration};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    time::timeout,
};

use super::{
    TestStore,
    common::{ENTRY_COUNT, FAILED_KEY, KeysFixture, PAYMENT_COUNT, UNKNOWN_KEY, key, send},
};

fn keys(records: &[Value]) -> BTreeSet<&str> {
    records.iter().map(|record| record["key"].as_str().expect("text")).collect()
}

pub(super) async fn a_list_has_what_the_gateway_remembers(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let records = scene.list(&[]).await;
    assert_eq!(records.len(), ENTRY_COUNT);
    let addresses: Vec<_> = records.iter().map(|record| record["address"].as_str().expect("text")).collect();
    assert!(addresses.is_sorted() && addresses.iter().all(|address| address.len() == 64), "{addresses:?}");
    let paid = records.iter().find(|record| record["key"] == key(3).as_str()).expect("it is listed");
    for (name, value) in [
        ("state", "done".into()),
        ("tenant", "globex".into()),
        ("user", "user-1".into()),
        ("endpoint", "POST /pay/*".into()),
        ("method", "POST".into()),
        ("path", "/pay/3".into()),
        ("user_agent", "test/1".into()),
        ("status", 201.into()),
        ("success", Value::from(true)),
        ("attempt", 1.into()),
    ] {
        assert_eq!(paid[name], value, "{name} in {paid:#}");
    }

    let done = scene.run_keys(&["list"]).await;
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""), "{done:?}");
    let table = done.text();
    assert_eq!(table.lines().count(), 1 + ENTRY_COUNT, "{table}");
    assert!(table.starts_with("STATE "), "{table}");
    let line = table.lines().find(|line| line.contains(&key(3))).expect("it is listed");
    assert!(line.starts_with("done") && line.contains("201") && line.ends_with(paid["address"].as_str().unwrap()));
}

pub(super) async fn filters_are_all_applied(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let all_payments: Vec<String> = (0..PAYMENT_COUNT).map(key).collect();
    for (filters, expected) in [
        (&["--state", "unknown"][..], &[UNKNOWN_KEY][..]),
        (&["--state", "failed"], &[FAILED_KEY]),
        (&["--state", "processing"], &[]),
        (&["--tenant", "globex"], &[all_payments[1].as_str(), &all_payments[3]]),
        (&["--tenant", "acme", "--user", "user-0"], &[&all_payments[0], &all_payments[2], &all_payments[4]]),
        (&["--tenant", "globex", "--user", "user-0"], &[]),
        (&["--key", UNKNOWN_KEY], &[UNKNOWN_KEY]),
        (&["--key", UNKNOWN_KEY, "--state", "done"], &[]),
        (&["--endpoint", "POST /pay/*", "--state", "failed"], &[FAILED_KEY]),
        (&["--endpoint", "POST /other"], &[]),
        (&["--older-than", "1h"], &[]),
        (&["--older-than", "1ms", "--state", "unknown"], &[UNKNOWN_KEY]),
    ] {
        let records = scene.list(filters).await;
        assert_eq!(keys(&records), expected.iter().copied().collect(), "{filters:?}");
    }
    let none = scene.run_keys(&["list", "--tenant", "nobody"]).await;
    assert_eq!((none.code, none.text().as_str()), (Some(0), ""));
    assert_eq!(none.stderr, "ibid: nothing matches\n");
}

pub(super) async fn a_list_goes_on_where_it_ended(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let whole = scene.list(&[]).await;
    let mut seen = Vec::new();
    let mut cursor: Option<String> = None;
    for _ in 0..ENTRY_COUNT {
        let mut args = vec!["list", "--json", "--limit", "3"];
        args.extend(cursor.iter().flat_map(|cursor| ["--cursor", cursor.as_str()]));
        let page = scene.run_keys(&args).await.json();
        let records = page["records"].as_array().expect("a list").clone();
        assert!(records.len() <= 3, "{page:#}");
        seen.extend(records);
        cursor = page["next"].as_str().map(str::to_owned);
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(cursor, None, "it ends");
    let addresses = |records: &[Value]| records.iter().map(|record| record["address"].clone()).collect::<Vec<_>>();
    assert_eq!(addresses(&seen), addresses(&whole), "nothing twice, nothing left out");
    // For people the cursor stands beside the list, not in it.
    let page = scene.run_keys(&["list", "--limit", "3"]).await;
    let next = whole[2]["address"].as_str().expect("text");
    assert_eq!(page.stderr, format!("ibid: there are more: --cursor {next}\n"));
    assert_eq!(page.text().lines().count(), 4);
}

pub(super) async fn a_key_is_found_as_sent_though_it_is_stored_masked(place: &TestStore) {
    let scene = KeysFixture::start_filled_with(place, "").await;
    for by in [UNKNOWN_KEY, "key-****-one"] {
        let records = scene.list(&["--key", by, "--state", "unknown"]).await;
        assert_eq!(keys(&records), ["key-****-one"].into(), "{by}");
    }
    // A whole key is one entry, though others look the same; a mask fits several keys, and says so.
    assert_eq!(scene.list(&["--key", UNKNOWN_KEY]).await.len(), 1);
    let exact = scene.run_keys(&["show", "--key", UNKNOWN_KEY, "--json"]).await.json();
    assert_eq!((&exact["key"], &exact["state"]), (&"key-****-one".into(), &"unknown".into()), "{exact:#}");
    assert_eq!(scene.list(&["--key", "key-of-another-one"]).await.len(), 0, "shown alike, and never sent");
    assert_eq!(scene.list(&["--key", "key-****-one"]).await.len(), 3);
    let several = scene.run_keys(&["show", "--key", "key-****-one"]).await;
    assert_eq!(several.code, Some(1), "{several:?}");
    assert!(several.stderr.contains("more than one entry matches; name one by its address, such as "), "{several:?}");
    let one = scene.run_keys(&["show", "--key", &key(2)]).await;
    assert_eq!((one.code, one.field("key").as_str()), (Some(0), "key-****nt-2"), "{one:?}");
}

pub(super) async fn addresses_and_keys_are_found_by_their_beginning(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let all_payments: Vec<String> = (0..PAYMENT_COUNT).map(key).collect();
    assert_eq!(
        keys(&scene.list(&["--key", "key-of-payment-*"]).await),
        all_payments.iter().map(String::as_str).collect()
    );
    assert_eq!(scene.list(&["--key", "no-such-*"]).await.len(), 0);
    let address = scene.address(UNKNOWN_KEY).await;
    for by in [&address[..12], &format!("{}****{}", &address[..4], &address[60..]), &address[..12].to_uppercase()] {
        let one = scene.run_keys(&["show", by, "--json"]).await.json();
        assert_eq!((&one["address"], &one["key"]), (&address.as_str().into(), &UNKNOWN_KEY.into()), "{by}");
    }
    let missing = scene.run_keys(&["show", &format!("{}****{}", &address[..4], "0123")]).await;
    assert_eq!(missing.code, Some(1), "{missing:?}");
    // The runbook: from the line in the log to the change.
    let by = format!("{}****{}", &address[..4], &address[60..]);
    let released = scene.run_keys(&["release", &by, "--reason", "ticket 7"]).await;
    assert_eq!(released.code, Some(0), "{released:?}");
}

/// Every change of what is running or unknown, as it happens.
#[tokio::test]
async fn a_watched_list_prints_changes() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = TestStore::new(format!("embedded:{}", folder.path().join("data").display()), ());
    let scene = KeysFixture::start_filled(&place).await;
    let gateway = scene.start_gateway().await;
    let admin = format!("http://{}", gateway.admin_addr());
    let mut watching = tokio::process::Command::new(crate::support::BIN)
        .args(["keys", "list", "--watch", "--json", "--admin", &admin])
        .env("IBID_ADMIN_TOKEN", super::common::OPERATOR_TOKEN)
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut next = async || -> Value {
        let line = timeout(Duration::from_secs(20), lines.next_line()).await.expect("in time").unwrap();
        serde_json::from_str(&line.expect("it goes on")).unwrap()
    };
    let first = next().await;
    assert_eq!((&first["state"], &first["record"]["key"]), (&"unknown".into(), &UNKNOWN_KEY.into()), "{first:#}");
    let gate = scene.upstream.gate("/pay/slow");
    let running = send(gateway.addr(), "slow", "key-of-a-slow-one").start().await;
    let begun = next().await;
    assert_eq!((&begun["state"], &begun["record"]["path"]), (&"processing".into(), &"/pay/slow".into()), "{begun:#}");
    gate.open();
    let ended = next().await;
    assert_eq!(
        (&ended["state"], &ended["record"]["address"]),
        (&"done".into(), &begun["record"]["address"]),
        "{ended:#}"
    );
    let released = scene.release_over(&admin, first["record"]["address"].as_str().unwrap()).await;
    assert_eq!(released.code, Some(0), "{released:?}");
    let gone = next().await;
    assert_eq!((&gone["state"], &gone["record"]["address"]), (&Value::Null, &first["record"]["address"]), "{gone:#}");
    drop(running);
}
