//! A changed configuration that is wrong, or that would forget, is not taken up.

use std::fs;

use testbed::{
    client::post,
    process::{GatewayProcess, ProcessSignal},
};

use crate::support::{TestGateway, anonymous_pay, until};

const REFUSED_LOG_TEXT: &str = "stays";
const RELOADED_LOG_TEXT: &str = "configuration taken up";
const OLD_CONFIG: &str = "[[route]]\nmatch = \"POST /pay\"\nkey.required = true\n";

/// Whether the configuration that it started with is in force.
async fn is_old_config_active(gateway: &GatewayProcess) -> bool {
    post(gateway.addr(), "/pay").json("{}").send().await.status == 400
}

#[tokio::test]
async fn a_wrong_file_keeps_the_old_one_and_is_told_in_one_line() {
    let TestGateway { upstream: _upstream, mut gateway } = TestGateway::start(OLD_CONFIG).await;
    let wrong = [
        ("[[route]]\nmatch = \"POST /pay\"\nttl = \"soon\"\n", "route[1].ttl: \"soon\" is no duration; allowed is"),
        ("[[route]]\nmatch = \"POST /pay\"\ntll = \"1h\"\n", "route[1].tll: unknown key, did you mean \"ttl\"?"),
        ("[policy]\npreset = \"pay\"\n", "policy.preset: \"pay\" is no preset; allowed are \"leads\""),
        (
            "[policy]\npreset = \"env:IBID_NOT_THERE\"\n",
            "policy.preset: \"env:IBID_NOT_THERE\": the environment variable",
        ),
        ("[policy\n", "ibid.toml:1:"),
        ("listen = 8\n[policy]\nttl = 5\n", "ibid.toml:3:1: policy.ttl: found 5; allowed is"),
    ];
    for (text, said) in wrong {
        gateway.rewrite_config(text);
        gateway.signal(ProcessSignal::Hup);
        // File, key, what was found, what is allowed and what becomes of it: all in this line.
        let line = gateway.wait_for_log(said).await;
        assert!(line.contains("ERROR") && line.contains("ibid.toml:") && line.contains(REFUSED_LOG_TEXT), "{line}");
        assert!(is_old_config_active(&gateway).await);
    }
    fs::remove_file(gateway.dir().join("ibid.toml")).unwrap();
    gateway.signal(ProcessSignal::Hup);
    let line = gateway.wait_for_log("ibid.toml: cannot be read").await;
    assert!(line.contains(REFUSED_LOG_TEXT), "{line}");
    assert!(is_old_config_active(&gateway).await);
    assert!(!gateway.logs().iter().any(|line| line.contains(RELOADED_LOG_TEXT)));

    gateway.rewrite_config("[[route]]\nmatch = \"POST /pay\"\n");
    gateway.wait_for_log(RELOADED_LOG_TEXT).await;
    assert!(!is_old_config_active(&gateway).await, "a right one is taken up again");
}

#[tokio::test]
async fn a_change_that_would_forget_is_refused_unless_accepted() {
    let TestGateway { upstream, mut gateway } = TestGateway::start(OLD_CONFIG).await;
    let first = anonymous_pay(gateway.addr(), "k-1").send().await;
    assert_eq!(first.status, 201);
    let forgetting = [
        ("scope = \"global\"", "scope changed from [host, credential] to [global]"),
        ("fingerprint = [\"method\", \"body\"]", "fingerprint changed from"),
        ("key.from = \"header:X-Key\"", "key.from changed from"),
        ("on_mismatch = \"new\"", "on_mismatch changed from reject to new"),
        ("mode = \"off\"", "mode changed from enforce to off"),
    ];
    for (dial, told) in forgetting {
        gateway.rewrite_config(&format!("{OLD_CONFIG}{dial}\n"));
        gateway.signal(ProcessSignal::Hup);
        let line = gateway.wait_for_log(told).await;
        assert!(line.contains("ERROR") && line.contains("ibid.toml") && line.contains("POST /pay"), "{line}");
        assert!(line.contains("accept_forgetting = true"), "{line}");
        let again = anonymous_pay(gateway.addr(), "k-1").send().await;
        assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body), "{dial}");
    }
    gateway.rewrite_config("[policy]\npreset = \"off\"\n[[route]]\nmatch = \"POST /other\"\n");
    gateway.signal(ProcessSignal::Hup);
    let line = gateway.wait_for_log("POST is no longer covered").await;
    assert!(line.contains("accept_forgetting = true"), "{line}");
    assert!(!gateway.logs().iter().any(|line| line.contains(RELOADED_LOG_TEXT)));
    assert_eq!(upstream.executions(), 1);

    gateway.rewrite_config(&format!("accept_forgetting = true\n{OLD_CONFIG}scope = \"global\"\n"));
    gateway.signal(ProcessSignal::Hup);
    gateway.wait_for_log(RELOADED_LOG_TEXT).await;
    assert_eq!(
        anonymous_pay(gateway.addr(), "k-1").send().await.text(),
        r#"{"id":2,"run":2}"#,
        "forgotten, as accepted"
    );
}

#[tokio::test]
async fn a_wrong_file_is_not_told_every_second() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start(OLD_CONFIG).await;
    gateway.rewrite_config("nonsense = 1\n");
    gateway.wait_for_log(REFUSED_LOG_TEXT).await;
    tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
    let said = || gateway.logs().iter().filter(|line| line.contains(REFUSED_LOG_TEXT)).count();
    assert_eq!(said(), 1);
    gateway.rewrite_config("nonsense = 2\n");
    until("another wrong file is told", || said() == 2).await;
}
