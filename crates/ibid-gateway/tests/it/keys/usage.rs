//! What is told to whoever uses these commands wrongly, or on a store that cannot be used.

use std::fs;

use super::{TestStore, common::KeysFixture};
use crate::support::run_ibid;

const ABSENT_ADDRESS: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// The exit code, and all that was said.
async fn run_failing(args: &[&str]) -> (Option<i32>, String) {
    let done = run_ibid(args, &[]).await;
    assert!(done.stdout.is_empty(), "{done:?}");
    (done.code, done.stderr)
}

#[tokio::test]
async fn usage_is_told_with_64() {
    let store = ["--store", "redis://127.0.0.1:1/0"];
    let change = ["--reason", "r"];
    for (args, part) in [
        (&["forget", ABSENT_ADDRESS][..], "--reason <TEXT>"),
        (&["forget", ABSENT_ADDRESS, "--reason", "  "], "it is empty; give the reason"),
        (&["forget", "--reason", "r"], "which one? name it by its ADDRESS, or by --key"),
        (&["show"], "which one? name it by its ADDRESS, or by --key"),
        (&["show", "xyz"], "it is no address; write at least the first 4 hex digits"),
        (&["list", "--state", "lost"], "processing, done, failed, unknown"),
        (&["list", "--older-than", "soon"], "\"soon\" is no duration; allowed is a duration such as"),
        (&["list", "--limit", "0"], "1..=1000"),
        (&["list", "--limit", "1001"], "1..=1000"),
        (&["list", "--cursor", "5"], "it is no address"),
        (&["forget", ABSENT_ADDRESS, "--reason", "r", "--fence", "0"], "it is no fence"),
        (&["resolve", ABSENT_ADDRESS, "--reason", "r"], "--as <OUTCOME>"),
        (&["resolve", ABSENT_ADDRESS, "--reason", "r", "--as", "maybe"], "done, not-executed"),
        (&["resolve", ABSENT_ADDRESS, "--reason", "r", "--as", "done"], "--as done needs the --status of its answer"),
        (&["resolve", ABSENT_ADDRESS, "--reason", "r", "--as", "done", "--status", "99"], "200..=599"),
        (
            &["resolve", ABSENT_ADDRESS, "--reason", "r", "--as", "not-executed", "--status", "200"],
            "--as not-executed has no answer; leave out --status",
        ),
        (
            &["resolve", ABSENT_ADDRESS, "--reason", "r", "--as", "done", "--status", "200", "--header", "nope"],
            "--header: \"nope\" is no header; write one such as",
        ),
        (
            &[
                "resolve",
                ABSENT_ADDRESS,
                "--reason",
                "r",
                "--as",
                "done",
                "--status",
                "200",
                "--header",
                "Content-Length: 1",
            ],
            "\"content-length\" frames a message",
        ),
        (
            &["resolve", ABSENT_ADDRESS, "--reason", "r", "--as", "done", "--status", "200", "--body", "/no/such"],
            "--body: /no/such: No such file",
        ),
        (&["frobnicate"], "unrecognized subcommand"),
    ] {
        let all: Vec<&str> = ["keys"].iter().chain(args).chain(&store).copied().collect();
        let (code, said) = run_failing(&all).await;
        assert_eq!(code, Some(64), "{all:?}: {said}");
        assert!(said.contains(part), "{all:?}: {said}");
    }
    let all: Vec<&str> = ["keys", "forget", ABSENT_ADDRESS].iter().chain(&change).copied().collect();
    for args in [&all[..], &["keys", "list"], &["sweep"], &["migrate"]] {
        let what = "--store: missing; name the store by --store, by IBID_STORE, or by the gateway's --config\n";
        assert_eq!(run_failing(args).await, (Some(64), what.into()), "{args:?}");
    }
    let help = run_ibid(&["keys", "--help"], &[]).await;
    assert_eq!((help.code, help.stderr.as_str()), (Some(0), ""), "help is what was asked for");
}

#[tokio::test]
async fn a_store_in_a_process_cannot_be_looked_into() {
    for command in [&["keys", "list"][..], &["keys", "forget", ABSENT_ADDRESS, "--reason", "r"], &["sweep"]] {
        let (code, said) = run_failing(&[command, &["--store", "memory:"]].concat()).await;
        assert_eq!(code, Some(64), "{said}");
        let why = "memory: lives in the process of its gateway, where no other command can reach it";
        assert!(said.starts_with(&format!("ibid: {why}")), "{said}");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_told_with_69() {
    for url in ["redis://:s3cret@127.0.0.1:1/0", "postgres://ibid:s3cret@127.0.0.1:1/ibid"] {
        for command in [&["keys", "list"][..], &["keys", "forget", ABSENT_ADDRESS, "--reason", "r"], &["sweep"]] {
            let (code, said) = run_failing(&[command, &["--store", url]].concat()).await;
            assert_eq!(code, Some(69), "{said}");
            assert!(said.starts_with("ibid: the store ") && said.contains("127.0.0.1:1"), "{said}");
            assert!(!said.contains("s3cret"), "{said}");
        }
    }
}

#[tokio::test]
async fn a_folder_that_is_not_there_is_not_made() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("typo");
    let url = format!("embedded:{}", path.display());
    for command in [&["keys", "list"][..], &["sweep"]] {
        let (code, said) = run_failing(&[command, &["--store", &url]].concat()).await;
        assert_eq!(code, Some(69), "{said}");
        assert_eq!(said, format!("ibid: the store {url} cannot be opened: there is no such folder\n"));
    }
    assert!(!path.exists());
}

#[tokio::test]
async fn an_embedded_store_that_a_gateway_has_is_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = TestStore::new(format!("embedded:{}", folder.path().join("data").display()), ());
    let scene = KeysFixture::start_filled(&place).await;
    let gateway = scene.start_gateway().await;
    for command in [&["keys", "list"][..], &["keys", "forget", ABSENT_ADDRESS, "--reason", "r"], &["sweep"]] {
        let (code, said) = run_failing(&[command, &["--store", &place.url]].concat()).await;
        assert_eq!(code, Some(69), "{said}");
        assert!(said.contains(&format!("in use by process {} on ", gateway.id())), "{said}");
        assert!(said.ends_with("; ask that gateway instead (--admin URL), or stop it\n"), "{said}");
    }
}

/// Of the gateway's file only `[store]` is read: whoever looks after the store need not have the gateway's secrets.
#[tokio::test]
async fn the_store_is_found_by_flag_by_variable_and_by_the_gateways_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = TestStore::new(format!("embedded:{}", folder.path().join("data").display()), ());
    let _scene = KeysFixture::start_filled(&place).await;
    let config = folder.path().join("ibid.toml");
    fs::write(&config, format!("[admin]\ntoken = \"env:NOT_SET_HERE\"\n[store]\nurl = {:?}\n", place.url)).unwrap();
    let config = config.to_str().expect("a plain path");
    let elsewhere = ("IBID_STORE", "embedded:/no/such/place");
    for (args, env) in [
        (&["--store", &place.url][..], &[elsewhere][..]),
        (&[], &[("IBID_STORE", &*place.url)]),
        (&["--config", config], &[]),
        (&[], &[("IBID_CONFIG", config)]),
        (&["--config", config, "--store", &place.url], &[]),
        (&["--config", "/dev/null"], &[("IBID_STORE", &*place.url)]),
    ] {
        let output = run_ibid(&[&["keys", "list", "--json"], args].concat(), env).await;
        let said = &output.stderr;
        assert_eq!(output.code, Some(0), "{args:?} {env:?}: {said}");
        let page = output.json();
        assert_eq!(page["records"].as_array().map(Vec::len), Some(super::common::ENTRY_COUNT), "{args:?} {env:?}");
    }
    for (text, what) in [
        ("[store]\nulr = 1", "store.ulr: unknown key, did you mean \"url\"?"),
        (
            "[store]\nurl = \"memory:\"\nfallback = \"postgres://h/d\"",
            "store.fallback: only a redis store.url has a fallback",
        ),
        ("[store", ""),
    ] {
        fs::write(folder.path().join("wrong.toml"), text).unwrap();
        let wrong = folder.path().join("wrong.toml");
        let (code, said) = run_failing(&["keys", "list", "--config", wrong.to_str().unwrap()]).await;
        assert_eq!(code, Some(64), "{said}");
        assert!(said.starts_with(&format!("{}:", wrong.display())) && said.contains(what), "{said}");
    }
}

#[tokio::test]
async fn only_postgres_is_migrated() {
    for (url, kind) in [("embedded:data", "embedded"), ("memory:", "memory"), ("redis://:s3cret@h/0", "redis")] {
        let (code, said) = run_failing(&["migrate", "--store", url]).await;
        assert_eq!(code, Some(64), "{said}");
        assert!(said.starts_with("ibid: only a postgres store is migrated, and "), "{said}");
        assert!(said.contains(&format!("is a store of kind {kind}")) && !said.contains("s3cret"), "{said}");
    }
    let (code, said) = run_failing(&["migrate", "--store", "postgres://h/d", "--dry-run", "--down"]).await;
    assert_eq!(code, Some(64), "{said}");
    assert!(said.contains("cannot be used with"), "{said}");
}

#[tokio::test]
async fn what_is_migrated_is_the_url_or_the_fallback() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("ibid.toml");
    for text in [
        "url = \"postgres://ibid:s3cret@127.0.0.1:1/ibid\"",
        "url = \"redis://127.0.0.1:2/0\"\nfallback = \"postgres://ibid:s3cret@127.0.0.1:1/ibid\"",
        "url = \"postgres://ibid:s3cret@127.0.0.1:1/ibid\"\ncache = \"redis://127.0.0.1:2/0\"",
    ] {
        fs::write(&config, format!("[store]\n{text}\n")).expect("it is written");
        for how in [&[][..], &["--dry-run"], &["--down"]] {
            let (code, said) = run_failing(&[&["migrate", "--config", config.to_str().unwrap()], how].concat()).await;
            assert_eq!(code, Some(69), "{said}");
            assert!(said.starts_with("ibid: postgres://ibid:****@127.0.0.1:1/ibid was not migrated: "), "{said}");
            assert!(!said.contains("s3cret"), "{said}");
        }
    }
}
