//! Tokens change with the configuration, while the gateway serves.

use std::{fs, time::Duration};

use testbed::{
    client::{TestRequest, post, request},
    process::GatewayProcess,
    upstream::TestUpstream,
};
use tokio::time::{sleep, timeout};

use super::common::assert_problem;
use crate::support::{BIN, TestGateway, start_gateway};

const RELOADED_LOG_TEXT: &str = "configuration taken up";

async fn wait_for_reloads(gateway: &GatewayProcess, times: usize) {
    let taken = async {
        while gateway.logs().iter().filter(|line| line.contains(RELOADED_LOG_TEXT)).count() < times {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(20), taken).await.expect("it is taken up");
}

fn admin_request(gateway: &GatewayProcess, token: &str) -> TestRequest {
    request("GET", gateway.admin_addr(), "/api/stats").header("Authorization", format!("Bearer {token}"))
}

async fn is_known(gateway: &GatewayProcess, token: &str) -> bool {
    let answer = admin_request(gateway, token).send().await;
    assert!([200, 401].contains(&answer.status), "{answer:?}");
    answer.status == 200
}

/// The cookie of a session that begins with a token.
async fn log_in(gateway: &GatewayProcess, token: &str) -> String {
    let form = post(gateway.admin_addr(), "/login").header("Content-Type", "application/x-www-form-urlencoded");
    let answer = form.body(format!("token={token}")).send().await;
    assert_eq!(answer.status, 303, "{answer:?}");
    answer.header("set-cookie").and_then(|cookie| cookie.split(';').next()).expect("a cookie").to_owned()
}

/// Where a session's first page leads to; empty if it is shown.
async fn page(gateway: &GatewayProcess, cookie: &str) -> String {
    let answer = request("GET", gateway.admin_addr(), "/").header("Cookie", cookie).send().await;
    answer.header("location").unwrap_or_default().to_owned()
}

fn config(tokens: &str) -> String {
    format!("[store]\nurl = \"memory:\"\n[admin]\n{tokens}")
}

#[tokio::test]
async fn a_token_that_is_replaced_in_the_file_is_good_no_more_and_neither_are_its_sessions() {
    let upstream = TestUpstream::start().await;
    let both = "token = \"the-first-token\"\ntokens = [{ role = \"viewer\", token = \"the-viewers\" }]\n";
    let gateway = start_gateway(&config(both), &upstream).await;
    let (admin, viewer) = (log_in(&gateway, "the-first-token").await, log_in(&gateway, "the-viewers").await);
    assert_eq!((page(&gateway, &admin).await, page(&gateway, &viewer).await), (String::new(), String::new()));

    gateway.rewrite_config(&config(&both.replace("the-first-token", "the-second-token")));
    wait_for_reloads(&gateway, 1).await;
    assert!(!is_known(&gateway, "the-first-token").await && is_known(&gateway, "the-second-token").await);
    assert!(page(&gateway, &admin).await.starts_with("/login?because=expired"), "its session has ended");
    assert_eq!(page(&gateway, &viewer).await, "", "another's goes on");
    let line = gateway.wait_for_log(RELOADED_LOG_TEXT).await;
    assert!(!line.contains("needs_restart"), "{line}");

    // A file that is wrong changes nothing.
    gateway.rewrite_config(&config("token = \"\"\n"));
    gateway.wait_for_log("the configuration in force stays").await;
    assert!(is_known(&gateway, "the-second-token").await);

    gateway.rewrite_config(&config(""));
    wait_for_reloads(&gateway, 2).await;
    let refused = admin_request(&gateway, "the-second-token").send().await;
    assert_problem(&refused, 401, "no token is configured");
    assert!(page(&gateway, &viewer).await.starts_with("/login"));
    gateway.rewrite_config(&config("token = \"the-third-token\"\n"));
    wait_for_reloads(&gateway, 3).await;
    assert!(is_known(&gateway, "the-third-token").await);
    let said = gateway.logs().join("\n");
    assert!(["first", "second", "third"].iter().all(|nth| !said.contains(&format!("the-{nth}-token"))), "{said}");
}

#[tokio::test]
async fn a_token_changes_with_the_content_of_its_file_and_with_the_variable_that_is_named() {
    let upstream = TestUpstream::start().await;
    let text = config("token = \"env:ONE\"\ntokens = [{ role = \"viewer\", token = \"file:viewer.token\" }]\n");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("viewer.token");
    fs::write(&file, "viewer-one\n").unwrap();
    let text = text.replace("file:viewer.token", &format!("file:{}", file.display()));
    let launch = GatewayProcess::launch(BIN).config(&text).upstream(&upstream.url());
    let gateway = launch.env("ONE", "admin-one").env("TWO", "admin-two").start().await;
    assert!(is_known(&gateway, "admin-one").await && is_known(&gateway, "viewer-one").await);
    let session = log_in(&gateway, "viewer-one").await;

    // Nothing but the content of the file.
    fs::write(&file, "viewer-two\n").unwrap();
    wait_for_reloads(&gateway, 1).await;
    assert!(!is_known(&gateway, "viewer-one").await && is_known(&gateway, "viewer-two").await);
    assert!(page(&gateway, &session).await.starts_with("/login?because=expired"));
    assert!(is_known(&gateway, "admin-one").await, "the other is as it was");

    gateway.rewrite_config(&text.replace("env:ONE", "env:TWO"));
    wait_for_reloads(&gateway, 2).await;
    assert!(!is_known(&gateway, "admin-one").await && is_known(&gateway, "admin-two").await);
}

#[tokio::test]
async fn who_guesses_is_limited_across_configurations() {
    let TestGateway { upstream: _upstream, gateway } =
        TestGateway::start(&config("token = \"the-first-token\"\n")).await;
    let mut limited = None;
    for nth in 0..200 {
        if admin_request(&gateway, "guess").send().await.status == 429 {
            limited = Some(nth);
            break;
        }
    }
    assert!(limited.is_some_and(|nth| nth >= 30), "{limited:?}");
    gateway.rewrite_config(&config("token = \"the-second-token\"\n"));
    wait_for_reloads(&gateway, 1).await;
    // One log-in comes back every two seconds; whoever goes on guessing uses it up.
    let answers: Vec<u16> = {
        let mut answers = Vec::new();
        for _ in 0..40 {
            answers.push(admin_request(&gateway, "guess").send().await.status);
        }
        answers
    };
    let failed = answers.iter().filter(|status| **status == 401).count();
    assert!(failed < 30 && answers.contains(&429), "not thirty anew: {answers:?}");
}
