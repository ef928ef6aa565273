use std::{process::Stdio, time::Duration};

use testbed::{
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};
use tokio::{process::Command, time::timeout};

use crate::{
    scenarios::{ScenarioApp, ScenarioTransport, root, run_all},
    support::{BIN, policy},
};

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
    let python = root().join("target/redirect-clients/bin/python");
    let folder = tempfile::tempdir().expect("a folder");
    // A copy, because setuptools builds inside the source folder.
    run_to_end(Command::new("cp").arg("-r").arg(root().join("clients/python")).arg(folder.path())).await;
    let site = folder.path().join("site");
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]).arg(&site);
    run_to_end(install.arg(folder.path().join("python"))).await;

    let upstream = TestUpstream::start().await;
    upstream.on_each("/flaky", [UpstreamReply::status(503), UpstreamReply::usual()]);
    let config = format!("[api]\nlisten = \"unix:api.sock\"\n{}", policy(""));
    let gateway = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url());
    let gateway = gateway.arg("--store").arg("memory:").start().await;
    let mut tests = Command::new(&python);
    tests.arg("test_sdk.py").current_dir(root().join("clients/python/test")).env("PYTHONPATH", &site);
    tests.env("PYTHONDONTWRITEBYTECODE", "1").env("IBID_URL", format!("http://{}", gateway.addr()));
    tests.env("IBID_API", format!("unix:{}", gateway.dir().join("api.sock").display()));
    let said = run_to_end(&mut tests).await;
    assert!(said.contains("Ran 9 tests"), "{said}");
}

async fn run_to_end(command: &mut Command) -> String {
    let output = timeout(Duration::from_secs(120), command.stdin(Stdio::null()).kill_on_drop(true).output());
    let output = output.await.expect("it ends in time").expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    said
}
