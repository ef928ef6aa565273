//! The description of the API holds: Schemathesis calls everything that it allows and much that it does not.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde_json::Value;
use tokio::{process::Command, time::timeout};

use super::common::{ApiGateway, ApiPlace, TOKEN, payment};

const SCHEMATHESIS_TIMEOUT: Duration = Duration::from_secs(240);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn openapi_document() -> Value {
    serde_json::from_str(ibid_gateway::api::OPENAPI_DOCUMENT).expect("JSON")
}

#[tokio::test]
async fn the_document_that_is_served_is_the_one_in_the_docs() {
    let gateway = ApiGateway::ietf("").await;
    let served = gateway.send(b"GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert_eq!(served.status, 200);
    let docs = fs::read_to_string(root().join("docs/exchange-api.json")).expect("the docs have it");
    assert!(served.body == docs, "copy crates/ibid-gateway/src/api/openapi.json to docs/exchange-api.json");
}

#[tokio::test]
async fn the_document_has_the_members_that_are_sent() {
    let gateway = ApiGateway::ietf("").await;
    let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let schemas = &openapi_document()["components"]["schemas"];
    assert_eq!(names(&schemas["Begin"]["properties"]), names(&payment("key-1")));
    let (exchange, message) = gateway.run(&payment("key-1")).await;
    assert_eq!(names(&schemas["Run"]["properties"]), names(&message));
    let ended = gateway.end(&exchange, &super::common::created("paid")).await.json();
    assert_eq!(names(&schemas["Answer"]["properties"]), names(&ended["answer"]));
    let page = fs::read_to_string(root().join("docs/exchange-api.md")).expect("the docs have it");
    for path in openapi_document()["paths"].as_object().unwrap().keys() {
        let path = path.replace("{exchange}", "EXCHANGE");
        assert!(page.contains(&path), "{path}");
    }
}

/// Runs it; `fixed` are values of parameters that it could not guess.
async fn run_schemathesis(gateway: &ApiGateway, fixed: &str, flags: &[&str]) {
    let ApiPlace::Tcp(address) = gateway.place else { unreachable!() };
    let program = root().join("target/schemathesis/bin/schemathesis");
    assert!(program.exists(), "{} is missing: scripts/tools installs it", program.display());
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("schemathesis.toml");
    fs::write(&config, format!("color = false\n{fixed}")).unwrap();
    let url = format!("http://{address}");
    let mut command = Command::new(&program);
    command.arg("--config-file").arg(&config).arg("run").arg(root().join("docs/exchange-api.json"));
    command.args(["--url", &url, "--checks", "all", "--max-examples", "15", "--seed", "7", "--request-timeout", "20"]);
    // What a begin contains decides about it beyond what a schema can say, and not every begin creates an exchange.
    command.args(["--exclude-checks", "positive_data_acceptance,ensure_resource_availability"]);
    command.args(["--continue-on-failure", "--header", &format!("Authorization: Bearer {TOKEN}")]).args(flags);
    command.current_dir(folder.path()).stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(SCHEMATHESIS_TIMEOUT, command.output()).await.expect("it ends").expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("Test cases:") && !said.contains(" 0 generated"), "{said}");
}

#[tokio::test]
async fn everything_is_answered_as_the_document_says() {
    let gateway = ApiGateway::tcp("timeout = \"1s\"\nlate_answer = \"0s\"").await;
    run_schemathesis(&gateway, "", &[]).await;
}

/// On an exchange that runs: extended, ended, and then refused.
#[tokio::test]
async fn an_exchange_that_runs_is_answered_as_the_document_says() {
    let gateway = ApiGateway::tcp("").await;
    for verb in ["extend", "end", "failed"] {
        let (exchange, _) = gateway.run(&payment(&format!("key-{verb}"))).await;
        let fixed = format!("[parameters]\n\"path.exchange\" = \"{exchange}\"\n");
        let path = format!("/v1/exchanges/{{exchange}}/{verb}");
        run_schemathesis(&gateway, &fixed, &["--include-path", &path, "--phases", "coverage,fuzzing"]).await;
        let after = gateway.begin(&payment(&format!("key-{verb}"))).await;
        assert_eq!(after.status == 200 && after.body.contains("retry-after"), verb == "extend", "{verb}: {after:?}");
    }
}
