//! One entry in full.

use super::{
    TestStore,
    common::{BINARY_BODY, BINARY_KEY, KeysFixture, UNKNOWN_KEY, key},
};

/// `2026-11-15T08:00:00.000Z`, and not long ago.
#[track_caller]
fn assert_recent(date: &str) {
    let now = ibid::time::rfc3339(
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_millis() as u64,
    );
    assert!(date.len() == now.len() && date <= now.as_str() && date[..8] == now[..8], "{date} is not before {now}");
}

pub(super) async fn every_field_of_a_finished_one_is_shown(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let address = scene.address(&key(1)).await;
    let by_address = scene.run_keys(&["show", &address]).await;
    let by_key = scene.run_keys(&["show", "--key", &key(1)]).await;
    for shown in [&by_address, &by_key] {
        assert_eq!((shown.code, shown.stderr.as_str()), (Some(0), ""), "{shown:?}");
        for (name, value) in [
            ("address", address.as_str()),
            ("state", "done"),
            ("key", &key(1)),
            ("tenant", "globex"),
            ("user", "user-1"),
            ("endpoint", "POST /pay/*"),
            ("request", "POST /pay/1"),
            ("client", "127.0.0.1"),
            ("user agent", "test/1"),
            ("status code", "201"),
            ("success", "true"),
            ("attempt", "1"),
        ] {
            assert_eq!(shown.field(name), value, "{name}");
        }
        assert_recent(&shown.field("requested at"));
        assert_recent(&shown.field("completed at"));
        assert!(shown.field("duration").ends_with(" ms"));
        assert!(shown.field("expires at").contains("(in 23h)"), "{}", shown.field("expires at"));
        assert!(shown.field("fence").parse::<u64>().is_ok_and(|fence| fence > 0));
        let fingerprint = shown.field("fingerprint");
        assert!(
            fingerprint.starts_with('v') && fingerprint.contains("****") && fingerprint.len() < 20,
            "{fingerprint}"
        );
        let text = shown.text();
        assert!(text.contains("\nresponse headers\n") && text.contains("\n  location: /p/1\n"), "{text}");
        assert!(text.ends_with("\nresponse body: 10 bytes of text\n{\"paid\":1}\n"), "{text}");
    }

    let json = scene.run_keys(&["show", &address, "--json"]).await.json();
    assert_eq!((&json["state"], &json["status"], &json["success"]), (&"done".into(), &201.into(), &true.into()));
    assert_eq!(json["response"]["body"], serde_json::json!({ "length": 10, "text": "{\"paid\":1}" }));
    let headers = json["response"]["headers"].as_array().expect("a list");
    assert!(headers.contains(&serde_json::json!(["location", "/p/1"])), "{headers:?}");
    for name in ["requested_at", "completed_at"] {
        assert_recent(json[name].as_str().expect("a date"));
    }
    assert!(json["duration_ms"].as_f64().is_some_and(|took| took > 0.0), "{json:#}");
    assert!(json["expires_in_ms"].as_u64().is_some_and(|left| left > 23 * 3_600_000), "{json:#}");
    assert_eq!(json["fence"].to_string(), by_address.field("fence"));

    let body = scene.run_keys(&["show", &address, "--body"]).await;
    assert_eq!((body.code, body.text().as_str()), (Some(0), "{\"paid\":1}"));
}

pub(super) async fn a_body_that_is_no_text_is_shown_as_hex_and_written_raw(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let shown = scene.run_keys(&["show", "--key", BINARY_KEY]).await.text();
    assert!(shown.ends_with("\nresponse body: 4 bytes, in hex\n0001feff\n"), "{shown}");
    let json = scene.run_keys(&["show", "--key", BINARY_KEY, "--json"]).await.json();
    assert_eq!(json["response"]["body"], serde_json::json!({ "length": 4, "hex": "0001feff" }));
    assert_eq!(scene.run_keys(&["show", "--key", BINARY_KEY, "--body"]).await.stdout, BINARY_BODY);
}

pub(super) async fn an_unknown_one_has_no_answer(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let shown = scene.run_keys(&["show", "--key", UNKNOWN_KEY]).await;
    assert_eq!(shown.code, Some(0), "{shown:?}");
    for (name, value) in [("state", "unknown"), ("status code", "-"), ("completed at", "-"), ("success", "-")] {
        assert_eq!(shown.field(name), value, "{name}");
    }
    // The app may still be running it: not before its lease has lapsed.
    assert!(shown.field("takeover").starts_with("in "), "{shown:?}");
    assert_recent(&shown.field("requested at"));
    assert!(!shown.text().contains("response"), "{}", shown.text());
    let json = scene.run_keys(&["show", "--key", UNKNOWN_KEY, "--json"]).await.json();
    assert!(json["success"].is_null() && json["status"].is_null() && json.get("response").is_none(), "{json:#}");
    // The gateway that saw it has gone; the store knows why.
    assert!(shown.field("unknown since").starts_with("connection lost"), "{}", shown.text());
    assert!(json["unknown"]["since"].is_string() && json["unknown"]["probe"].is_null(), "{json:#}");
    let body = scene.run_keys(&["show", "--key", UNKNOWN_KEY, "--body"]).await;
    assert_eq!((body.code, body.stderr.as_str()), (Some(1), "ibid: it has no answer: it is unknown\n"), "{body:?}");
}

pub(super) async fn what_is_not_there_or_not_alone_is_not_shown(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let nowhere = "00".repeat(32);
    for args in [&["show", &nowhere][..], &["show", "--key", "nobody's"], &["forget", &nowhere, "--reason", "r"]] {
        let done = scene.run_keys(args).await;
        assert_eq!((done.code, done.stdout.len()), (Some(1), 0), "{done:?}");
        assert!(done.stderr.starts_with("ibid: nothing matches: "), "{done:?}");
    }
    let many = scene.run_keys(&["forget", "--tenant", "acme", "--reason", "r"]).await;
    assert_eq!((many.code, many.stdout.len()), (Some(1), 0), "{many:?}");
    assert!(many.stderr.starts_with("ibid: more than one entry matches"), "{many:?}");
    assert_eq!(scene.list(&[]).await.len(), super::common::ENTRY_COUNT, "nothing was forgotten");
}
