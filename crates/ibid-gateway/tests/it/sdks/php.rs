use tokio::process::Command;

use super::{SdkTestbed, run_to_end};
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

#[tokio::test]
async fn the_library_passes_its_own_tests() {
    let mut tests = Command::new("php");
    let said = SdkTestbed::start().await.run(tests.arg("test/unit.php").current_dir(root().join("clients/php"))).await;
    assert!(said.ends_with("all passed\n"), "{said}");
}

#[tokio::test]
async fn the_source_is_free_of_errors_and_its_package_is_valid() {
    let folder = root().join("clients/php");
    for part in ["src", "test"] {
        for entry in std::fs::read_dir(folder.join(part)).expect("its source") {
            run_to_end(Command::new("php").arg("-l").arg(entry.expect("a file").path())).await;
        }
    }
    for package in [folder, root().join("examples/leads-php")] {
        let mut validate = Command::new("composer");
        validate.args(["validate", "--strict", "--no-check-lock", "--no-interaction"]).current_dir(package);
        validate.env("COMPOSER_ALLOW_SUPERUSER", "1").env("COMPOSER_DISABLE_NETWORK", "1");
        run_to_end(validate.env("COMPOSER_HOME", root().join("target/composer"))).await;
    }
}
