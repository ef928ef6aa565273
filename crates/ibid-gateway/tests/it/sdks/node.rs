use std::path::PathBuf;

use crate::scenarios::{ScenarioApp, ScenarioTransport, root, run_all};

/// Where `scripts/tools` puts Node if the system has none.
fn node() -> PathBuf {
    let installed = root().join("target/node/bin/node");
    if installed.exists() { installed } else { "node".into() }
}

/// `clients/js/test/server-app.mjs` in this framework.
fn node_app(framework: &str) -> ScenarioApp {
    let apps = root().join("target/apps");
    assert!(apps.join("node_modules/fastify").exists(), "{} has no fastify: scripts/tools installs it", apps.display());
    let text = |text: &str| text.to_owned();
    ScenarioApp {
        program: node(),
        args: vec![text("server-app.mjs")],
        env: vec![(text("FRAMEWORK"), text(framework)), (text("APPS"), apps.display().to_string())],
        folder: root().join("clients/js/test"),
    }
}

#[tokio::test]
async fn express_passes_all_scenarios() {
    run_all(ScenarioTransport::Sdk, node_app("express")).await;
}

#[tokio::test]
async fn the_gateway_in_front_of_express_passes_all_scenarios() {
    run_all(ScenarioTransport::Gateway, node_app("express")).await;
}

#[tokio::test]
async fn fastify_passes_all_scenarios() {
    run_all(ScenarioTransport::Sdk, node_app("fastify")).await;
}

#[tokio::test]
async fn a_fetch_handler_passes_all_scenarios() {
    run_all(ScenarioTransport::Sdk, node_app("fetch")).await;
}

#[tokio::test]
async fn nest_passes_all_scenarios() {
    run_all(ScenarioTransport::Sdk, node_app("nest")).await;
}
