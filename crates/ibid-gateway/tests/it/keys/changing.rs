//! Changes: what they do, what they refuse, what they leave behind.

use super::{
    TestStore,
    common::{ENTRY_COUNT, KeysFixture, UNKNOWN_KEY, key},
};
use crate::support::assert_refused;

const WHY: &str = "ticket 7: looked it up";

pub(super) async fn a_forgotten_one_runs_again(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let ran = scene.upstream.executions();
    let before = scene.send_to_fresh_gateway("/pay/0", &key(0)).await;
    assert_eq!((before.status, before.header("idempotent-replayed")), (201, Some("true")), "{before:?}");
    let done = scene.run_keys(&["forget", "--key", &key(0), "--reason", WHY]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    let text = done.text();
    assert!(text.starts_with("before  done 201, attempt 1, fence "), "{text}");
    assert!(text.ends_with("\nafter   absent: the next request with its key runs\n"), "{text}");
    assert!(scene.list(&["--key", &key(0)]).await.is_empty());
    assert_eq!(scene.list(&[]).await.len(), ENTRY_COUNT - 1, "and no other");
    let again = scene.send_to_fresh_gateway("/pay/0", &key(0)).await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, None), "{again:?}");
    assert_eq!(scene.upstream.executions(), ran + 1);
}

pub(super) async fn a_released_one_runs_again(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    assert_refused(&scene.send_to_fresh_gateway("lost", UNKNOWN_KEY).await, 409, "outcome-unknown");
    let done = scene.run_keys(&["release", "--key", UNKNOWN_KEY, "--reason", WHY]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(done.text().starts_with("before  unknown, attempt 1, fence "), "{}", done.text());
    let trail = scene.run_keys(&["audit", "--json"]).await.json();
    let entry = &trail["entries"][0];
    assert_eq!((&entry["action"], &entry["reason"]), (&"release".into(), &WHY.into()), "{trail:#}");
    assert_eq!((&entry["outcome"], &entry["before"]["state"]), (&"changed".into(), &"unknown".into()), "{trail:#}");
    let again = scene.send_to_fresh_gateway("lost", UNKNOWN_KEY).await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, None), "{again:?}");
    assert_eq!(scene.upstream.last().attempt(), Some(2));
}

pub(super) async fn one_that_never_happened_runs_again(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let done =
        scene.run_keys(&["resolve", "--key", UNKNOWN_KEY, "--as", "not-executed", "--reason", WHY, "--json"]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    let json = done.json();
    assert_eq!(
        (&json["changed"], &json["refused"], &json["after"]),
        (&true.into(), &().into(), &().into()),
        "{json:#}"
    );
    assert_eq!((&json["before"]["state"], &json["reason"]), (&"unknown".into(), &WHY.into()), "{json:#}");
    assert_eq!(scene.send_to_fresh_gateway("lost", UNKNOWN_KEY).await.status, 201);
}

pub(super) async fn a_resolved_one_is_answered_as_told(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let ran = scene.upstream.executions();
    let body = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(body.path(), r#"{"paid":"by hand"}"#).expect("it is written");
    let body = body.path().to_str().expect("a plain path");
    let mut args =
        vec!["resolve", "--key", UNKNOWN_KEY, "--as", "done", "--status", "201", "--body", body, "--reason", WHY];
    args.extend(["--header", "Content-Type: application/json", "--header", "Link: </a>", "--header", "Link: </b>"]);
    let done = scene.run_keys(&args).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(done.text().contains("\nafter   done 201, attempt 1, fence "), "{}", done.text());
    let answer = scene.send_to_fresh_gateway("lost", UNKNOWN_KEY).await;
    assert_eq!((answer.status, answer.text().as_str()), (201, r#"{"paid":"by hand"}"#), "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.headers.get_all("link"), ["</a>", "</b>"]);
    assert_eq!(answer.header("idempotent-replayed"), Some("true"));
    assert_eq!(scene.upstream.executions(), ran, "nothing ran");
    let shown = scene.run_keys(&["show", "--key", UNKNOWN_KEY]).await;
    assert_eq!((shown.field("state").as_str(), shown.field("success").as_str()), ("done", "true"));
    assert!(shown.field("expires at").contains("(in 23h)") || shown.field("expires at").contains("(in 24h)"));

    let again = scene.run_keys(&args).await;
    assert_eq!(again.code, Some(1), "it is resolved already: {again:?}");
}

pub(super) async fn a_finished_one_is_not_resolved(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    for args in [
        &["release", "--key", &key(0), "--reason", WHY][..],
        &["resolve", "--key", &key(0), "--as", "not-executed", "--reason", WHY],
        &["resolve", "--key", &key(0), "--as", "done", "--status", "500", "--reason", WHY],
    ] {
        let done = scene.run_keys(args).await;
        assert_eq!(done.code, Some(1), "{done:?}");
        let why = "ibid: nothing was changed: it is done, so there is nothing left to resolve; forget it if it is to run again";
        assert!(done.stderr.contains(why), "{done:?}");
        assert!(done.stderr.contains(" WARN keys ") && done.stderr.contains("changed=false"), "{done:?}");
    }
    assert_eq!(scene.run_keys(&["show", "--key", &key(0), "--body"]).await.text(), r#"{"paid":0}"#);
}

pub(super) async fn another_fence_changes_nothing(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let entry = scene.list(&["--key", UNKNOWN_KEY]).await.remove(0);
    let (address, fence) = (entry["address"].as_str().expect("text"), entry["fence"].as_u64().expect("a number"));
    let (other, right) = ((fence - 1).to_string(), fence.to_string());
    for args in [
        &["forget", address, "--fence", &other, "--reason", WHY, "--json"][..],
        &["release", address, "--fence", &other, "--reason", WHY, "--json"],
        &["resolve", address, "--as", "done", "--status", "200", "--fence", &other, "--reason", WHY, "--json"],
    ] {
        let done = scene.run_keys(args).await;
        assert_eq!(done.code, Some(1), "{done:?}");
        let json = done.json();
        assert_eq!((&json["changed"], &json["after"]["state"]), (&false.into(), &"unknown".into()), "{json:#}");
        assert_eq!(json["after"]["fence"], fence);
        assert!(done.stderr.contains(&format!("its fence is {fence}, not {other}")), "{done:?}");
    }
    let done = scene.run_keys(&["forget", address, "--fence", &right, "--reason", WHY]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
}

pub(super) async fn a_change_is_written_to_the_log_with_its_reason(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let address = scene.address(UNKNOWN_KEY).await;
    let done = scene.run_keys(&["forget", &address, "--reason", "two\nlines \"quoted\""]).await;
    assert_eq!((done.code, done.stderr.lines().count()), (Some(0), 1), "{done:?}");
    let parts = [
        " INFO keys forget changed=true ",
        &format!(" address={address} fence="),
        &format!(" key={UNKNOWN_KEY:?} endpoint=\"POST /pay/*\" before=unknown after=absent "),
        r#" reason="two\nlines \"quoted\"""#,
    ];
    for part in parts {
        assert!(done.stderr.contains(part), "{part} in {}", done.stderr);
    }
}
