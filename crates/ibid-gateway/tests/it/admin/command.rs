//! `ibid keys --admin`: what is told to whoever uses it wrongly. What it does is tested with the cases of `keys`.

use super::common::{ABSENT_ADDRESS, ADMIN_TOKEN, USER_TOKEN, VIEWER_TOKEN};
use crate::support::{TestGateway, run_ibid};

async fn run_keys(args: &[&str], token: &str) -> (Option<i32>, String) {
    let env = [("IBID_ADMIN_TOKEN", token)];
    let output = run_ibid(args, if token.is_empty() { &[] } else { &env }).await;
    (output.code, output.stderr)
}

#[tokio::test]
async fn it_is_told_what_is_wrong() {
    let office = TestGateway::with_records().await;
    let admin = format!("http://{}", office.gateway.admin_addr());
    let address = office.address("key-two-of-u1-lost").await;
    let list = ["keys", "list", "--admin", &admin];
    let forget = ["keys", "forget", &address, "--reason", "r", "--admin", &admin];
    for (args, token, code, part) in [
        (&list[..], "", 64, "--token: \"env:IBID_ADMIN_TOKEN\": the environment variable IBID_ADMIN_TOKEN is not set"),
        (&[&list[..], &["--token", ADMIN_TOKEN]].concat(), "", 64, "write it as env:NAME or file:PATH"),
        (&[&list[..], &["--token", "env:NOPE"]].concat(), ADMIN_TOKEN, 64, "NOPE is not set"),
        (&[&list[..], &["--token", "file:/no/such"]].concat(), ADMIN_TOKEN, 64, "cannot read it"),
        (&list, "a-wrong-token", 64, "this is no token of [admin]"),
        (&forget, VIEWER_TOKEN, 64, "a change needs a token of role \"admin\""),
        (&forget, USER_TOKEN, 64, "a change needs a token of role \"admin\""),
        (&["keys", "show", ABSENT_ADDRESS, "--admin", &admin], ADMIN_TOKEN, 1, "nothing matches"),
        (&["keys", "list", "--admin", "127.0.0.1:8081"], ADMIN_TOKEN, 64, "--admin: "),
        (&["keys", "list", "--admin", "ftp://h"], ADMIN_TOKEN, 64, "is no URL of a gateway"),
        (&["keys", "list", "--admin", "http://h/path"], ADMIN_TOKEN, 64, "has a path"),
        (&["keys", "list", "--admin", "http://u:p@h"], ADMIN_TOKEN, 64, "names no host, or a password"),
        (&["keys", "list", "--admin", "http://127.0.0.1:1"], ADMIN_TOKEN, 69, "cannot be reached"),
        (
            &["keys", "list", "--admin", &format!("http://{}", office.gateway.addr())],
            ADMIN_TOKEN,
            69,
            "does not answer like a gateway",
        ),
        (&[&list[..], &["--store", "memory:"]].concat(), ADMIN_TOKEN, 64, "cannot be used with"),
        (&["keys", "list", "--token", "env:X", "--store", "memory:"], ADMIN_TOKEN, 64, "--admin"),
    ] {
        let (found, said) = run_keys(args, token).await;
        assert_eq!(found, Some(code), "{args:?}: {said}");
        assert!(said.contains(part), "{args:?}: {said}");
        assert!(!said.contains(ADMIN_TOKEN) && !said.contains("u:p"), "{said}");
    }
    assert_eq!(office.record("key-two-of-u1-lost").await["state"], "unknown");
}

#[tokio::test]
async fn a_token_from_a_file_and_a_user_that_sees_its_own() {
    let office = TestGateway::with_records().await;
    let admin = format!("http://{}", office.gateway.admin_addr());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{USER_TOKEN}\n")).unwrap();
    let token = format!("file:{}", file.path().display());
    let output = run_ibid(&["keys", "list", "--json", "--admin", &admin, "--token", &token], &[]).await;
    let page = output.json();
    assert_eq!(super::common::keys(&page), ["key-one-of-u1-done", "key-two-of-u1-lost"]);
}
