//! The app of the scenarios in Rust: with ibid's layer inside, or calling the exchange API message by message.
//!
//! It must be a process of its own, because it is killed: this test binary, started again with one test.

use std::{collections::BTreeSet, env, fs, io::Write as _, panic::AssertUnwindSafe, path::Path, time::Duration};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    response::Response,
    routing::post,
};
use data_encoding::BASE64;
use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use ibid::Ibid;
use ibid_gateway::config::{Env, GatewaySettings, ServeArgs};
use serde_json::{Value, json};
use tokio::{net::TcpListener, time::sleep};

use super::{ScenarioApp, ScenarioTransport, read_file, root, run_all};
use crate::api::common::{ApiPlace, ApiReply, new_id, request_bytes, send};

const APP_TEST: &str = "scenarios::rust_app::serve_the_app";
const LARGE_BYTES: usize = 300_000;

fn rust_app() -> ScenarioApp {
    let args = ["--ignored", "--exact", "--nocapture", APP_TEST].map(str::to_owned).to_vec();
    ScenarioApp { program: env::current_exe().expect("this program"), args, env: Vec::new(), folder: root() }
}

#[tokio::test]
async fn the_layer_passes_all_scenarios() {
    run_all(ScenarioTransport::Layer, rust_app()).await;
}

#[tokio::test]
async fn an_app_that_calls_the_api_itself_passes_all_scenarios() {
    run_all(ScenarioTransport::Api, rust_app()).await;
}

/// The app itself, which the tests above start. It serves until it is killed.
#[tokio::test]
#[ignore = "a process of the tests of scenarios"]
async fn serve_the_app() {
    let runs = env::var("RUNS_FILE").expect("only the tests of scenarios start it");
    let port = env::var("PORT").unwrap_or_else(|_| "0".into());
    let listener = TcpListener::bind(format!("127.0.0.1:{port}")).await.expect("a free port");
    let app = match env::var("IBID_API") {
        Ok(api) => Router::new().fallback(move |request| answer_by_api(api.clone(), request)),
        Err(_) => layered_app(Path::new(&runs)).await,
    };
    eprintln!("listening on http://{}", listener.local_addr().expect("it is bound"));
    axum::serve(listener, app).await.expect("it serves");
}

/// Every path under the policy that the gateway would have for it.
async fn layered_app(runs: &Path) -> Router {
    let config = format!("upstream = \"http://127.0.0.1:9\"\n{}", read_file().config);
    let settings = GatewaySettings::from_text(&config, None, &ServeArgs::default(), &Env::from_pairs(&[]));
    let settings = settings.unwrap_or_else(|why| panic!("{why}"));
    let store = ibid_stores::open(&format!("embedded:{}", runs.with_file_name("layer-data").display())).await;
    let ibid = Ibid::new(store.expect("the store opens"));
    let mut app = Router::new();
    let scenarios = read_file().scenario;
    let steps = scenarios.iter().flat_map(|scenario| &scenario.steps);
    for path in steps.filter_map(|step| step.post.as_deref()).collect::<BTreeSet<_>>() {
        let route = settings.routes.find(&Method::POST, path).expect("the configuration covers it");
        let layer = ibid.layer((*route.policy).clone()).expect("a policy of the configuration");
        app = app.merge(Router::new().route(path, post(handle)).layer(layer));
    }
    app
}

async fn handle(request: Request) -> Response {
    let (head, body) = request.into_parts();
    let _ = to_bytes(body, usize::MAX).await;
    let attempt = head.headers.get("ibid-attempt").and_then(|value| value.to_str().ok());
    let body = run_handler(head.uri.path(), attempt).await;
    let response = Response::builder().status(201).header("content-type", "application/json");
    response.body(Body::from(body)).expect("a response")
}

async fn run_handler(path: &str, attempt: Option<&str>) -> String {
    let runs = env::var("RUNS_FILE").expect("the app has it");
    let mut file = fs::OpenOptions::new().append(true).open(&runs).expect("the test has created it");
    writeln!(file, "{path}").expect("it is written");
    let run = fs::read_to_string(&runs).expect("it is there").lines().count();
    match path {
        "/exception" => panic!("the handler failed"),
        "/killed" => {
            let pid = std::process::id().to_string();
            std::process::Command::new("kill").args(["-KILL", &pid]).status().expect("kill runs");
            std::future::pending().await
        }
        "/slow" | "/waiting" => sleep(Duration::from_secs(1)).await,
        _ => {}
    }
    let told = json!({ "run": run, "attempt": attempt });
    match path {
        "/large" => "x".repeat(LARGE_BYTES),
        "/presets/mcp" => json!({ "jsonrpc": "2.0", "id": 1, "result": told }).to_string(),
        _ => told.to_string(),
    }
}

/// Runs to its end even if the client disconnects.
async fn answer_by_api(api: String, request: Request) -> Response {
    let answered = tokio::spawn(exchange(api, request)).await;
    answered.unwrap_or_else(|_| Response::builder().status(500).body(Body::empty()).expect("a response"))
}

async fn exchange(api: String, request: Request) -> Response {
    let place = ApiPlace::Unix(api.strip_prefix("unix:").expect("a socket").into());
    let (head, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.expect("a whole request");
    let headers: Vec<_> = head.headers.iter().map(|(name, value)| [name.as_str(), text(value)]).collect();
    let begin = json!({
        "id": new_id(),
        "method": head.method.as_str(),
        "target": head.uri.to_string(),
        "headers": headers,
        "body_base64": BASE64.encode(&body),
        "peer": "127.0.0.1",
    });
    let Ok(begun) = send(&place, &request_bytes("/v1/exchanges", None, &begin.to_string())).await else {
        let refused = Response::builder().status(503).header("retry-after", "1");
        return refused.body(Body::empty()).expect("a response");
    };
    let granted = match begun.status {
        200 => return to_response(&begun),
        201 => begun.json(),
        204 => Value::Null,
        _ => panic!("{begun:?}"),
    };
    let attempt = granted["attempt"].as_u64().map(|attempt| attempt.to_string());
    let ran = AssertUnwindSafe(run_handler(head.uri.path(), attempt.as_deref())).catch_unwind().await;
    let (call, message) = match &ran {
        Ok(body) => (
            "end",
            json!({ "status": 201, "headers": [["content-type", "application/json"]],
                                     "body_base64": BASE64.encode(body.as_bytes()) }),
        ),
        Err(_) => ("failed", json!({ "how": "unknown" })),
    };
    let Some(exchange) = granted["exchange"].as_str() else {
        return Response::builder()
            .status(201)
            .body(Body::from(ran.expect("no handler fails here")))
            .expect("a response");
    };
    let ended = loop {
        let call = request_bytes(&format!("/v1/exchanges/{exchange}/{call}"), None, &message.to_string());
        match send(&place, &call).await {
            Ok(reply) if reply.status != 503 => break reply,
            _ => sleep(Duration::from_millis(100)).await,
        }
    };
    assert!(ran.is_ok(), "the handler failed");
    to_response(&ended)
}

fn text(value: &HeaderValue) -> &str {
    value.to_str().expect("the scenarios send ASCII")
}

fn to_response(reply: &ApiReply) -> Response {
    let answer = reply.answer();
    let mut response = Response::new(Body::from(answer.body));
    *response.status_mut() = u16::try_from(answer.status).expect("a status").try_into().expect("a status");
    let pair = |(name, value): &(String, String)| {
        (name.parse::<HeaderName>().expect("a name"), HeaderValue::from_str(value).expect("a value"))
    };
    *response.headers_mut() = answer.headers.iter().map(pair).collect::<HeaderMap>();
    response
}
