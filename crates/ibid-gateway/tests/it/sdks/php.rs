use std::process::Command;

use crate::scenarios::{ScenarioApp, ScenarioTransport, root, run_all};

/// `clients/php/test/app.php` on PHP's own server, with enough workers for fifty requests at once.
fn php_app(style: &str) -> ScenarioApp {
    let serve = "exec php -d display_errors=0 -d post_max_size=8M -S \"127.0.0.1:${PORT:-0}\" app.php";
    ScenarioApp {
        program: "sh".into(),
        args: vec!["-c".into(), serve.into()],
        env: vec![("STYLE".into(), style.into()), ("PHP_CLI_SERVER_WORKERS".into(), "60".into())],
        folder: root().join("clients/php/test"),
    }
}

#[tokio::test]
async fn the_plain_function_passes_all_scenarios() {
    run_all(ScenarioTransport::Sdk, php_app("plain")).await;
}

#[tokio::test]
async fn psr_15_passes_all_scenarios() {
    run_all(ScenarioTransport::Sdk, php_app("psr")).await;
}

/// Without an ibid: `closed` refuses, `open` runs.
#[test]
fn the_library_passes_its_own_tests() {
    let folder = root().join("clients/php");
    for entry in std::fs::read_dir(folder.join("src")).expect("its source") {
        let file = entry.expect("a file").path();
        let lint = Command::new("php").arg("-l").arg(&file).output().expect("PHP runs");
        assert!(lint.status.success(), "{lint:?}");
    }
    let output = Command::new("php").arg("test/unit.php").current_dir(&folder).output().expect("PHP runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.ends_with("all passed\n"), "{output:?}");
}
