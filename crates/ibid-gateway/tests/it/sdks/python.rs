use tokio::process::Command;

use super::{SdkTestbed, run_to_end};
use crate::scenarios::{ScenarioApp, ScenarioTransport, root, run_all};

/// `clients/python/test/app.py` on an app server that `scripts/tools` has installed.
fn python_app(server: &str, args: &[&str]) -> ScenarioApp {
    let mut env = vec![("PYTHONPATH".to_owned(), root().join("clients/python").display().to_string())];
    env.push(("PYTHONDONTWRITEBYTECODE".into(), "1".into()));
    ScenarioApp {
        program: root().join("target/app-servers/bin").join(server),
        args: args.iter().map(|arg| (*arg).to_owned()).collect(),
        env,
        folder: root().join("clients/python/test"),
    }
}

pub(crate) fn uvicorn() -> ScenarioApp {
    python_app("python", &["serve.py"])
}

fn gunicorn() -> ScenarioApp {
    python_app("gunicorn", &["--bind", "127.0.0.1:0", "--workers", "1", "--threads", "64", "app:wsgi"])
}

#[tokio::test]
async fn the_gateway_in_front_of_an_app_passes_all_scenarios() {
    run_all(ScenarioTransport::Gateway, uvicorn()).await;
}

#[tokio::test]
async fn asgi_passes_all_scenarios() {
    run_all(ScenarioTransport::Sdk, uvicorn()).await;
}

#[tokio::test]
async fn wsgi_passes_all_scenarios() {
    run_all(ScenarioTransport::Sdk, gunicorn()).await;
}

/// The package as `pip install` puts it, with httpx and requests beside it.
#[tokio::test]
async fn the_installed_package_passes_its_own_tests() {
    let python = root().join("target/python-sdk/bin/python");
    let folder = tempfile::tempdir().expect("a folder");
    // A copy, because setuptools builds inside the source folder.
    run_to_end(Command::new("cp").arg("-r").arg(root().join("clients/python")).arg(folder.path())).await;
    let site = folder.path().join("site");
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]).arg(&site);
    run_to_end(install.arg(folder.path().join("python"))).await;
    for file in ["ibid/py.typed", concat!("ibid_sdk-", env!("CARGO_PKG_VERSION"), ".dist-info/LICENSE-MIT")] {
        assert!(site.join(file).exists(), "{file} is not installed");
    }

    let mut tests = Command::new(&python);
    tests.arg("test_sdk.py").current_dir(root().join("clients/python/test")).env("PYTHONPATH", &site);
    let said = SdkTestbed::start().await.run(tests.env("PYTHONDONTWRITEBYTECODE", "1")).await;
    assert!(said.contains("Ran 10 tests"), "{said}");
}

#[tokio::test]
async fn the_source_passes_its_linter() {
    for check in [&["check"][..], &["format", "--check"]] {
        let mut ruff = Command::new(root().join("target/python-sdk/bin/ruff"));
        ruff.args(check).args(["--no-cache", "ibid", "test"]).current_dir(root().join("clients/python"));
        run_to_end(&mut ruff).await;
    }
}
