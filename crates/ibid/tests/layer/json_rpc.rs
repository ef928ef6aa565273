//! The layer in front of an MCP server. Its policy tells that requests are JSON-RPC.

use ibid::json_rpc::ToolSelection;

use super::*;

async fn run_tool(State(app): State<LayerTestApp>, body: String) -> impl IntoResponse {
    let message: serde_json::Value = serde_json::from_str(&body).unwrap();
    let run = app.runs.fetch_add(1, SeqCst) + 1;
    axum::Json(serde_json::json!({ "jsonrpc": "2.0", "id": message["id"], "result": { "run": run } }))
}

/// Lists its tools on two pages, and counts the pages.
async fn run_listed_tool(State(app): State<ListedTools>, body: String) -> Response<Body> {
    let message: serde_json::Value = serde_json::from_str(&body).unwrap();
    if message["method"] != "tools/list" {
        return run_tool(State(app.tools), body).await.into_response();
    }
    app.pages.fetch_add(1, SeqCst);
    let result = match (app.is_broken.load(SeqCst), message["params"]["cursor"].as_str()) {
        (true, _) => return StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        (false, None) => serde_json::json!({ "tools": [{ "name": "pay" }], "nextCursor": "2" }),
        (false, Some(_)) => {
            serde_json::json!({ "tools": [{ "name": "look", "annotations": { "readOnlyHint": true } }] })
        }
    };
    axum::Json(serde_json::json!({ "jsonrpc": "2.0", "id": message["id"], "result": result })).into_response()
}

#[derive(Clone, Default)]
struct ListedTools {
    tools: LayerTestApp,
    pages: Arc<AtomicUsize>,
    is_broken: Arc<std::sync::atomic::AtomicBool>,
}

#[tokio::test(start_paused = true)]
async fn annotations_are_read_again_once_they_are_old() {
    let (app, ibid) = (ListedTools::default(), Ibid::new(Arc::new(Memory::default())));
    let mut policy = Policy::mcp();
    policy.tools = Some(ToolSelection::Annotations);
    let router = Router::new().route("/mcp", post(run_listed_tool)).layer(ibid.layer(policy).unwrap());
    let router = router.with_state(app.clone());
    let runs_and_pages = || (app.tools.runs.load(SeqCst), app.pages.load(SeqCst));
    for id in 1..=3 {
        call_tool(&router, id, "look").await;
        call_tool(&router, id, "pay").await;
    }
    assert_eq!(runs_and_pages(), (4, 2), "pay ran once");
    tokio::time::advance(Duration::from_secs(61)).await;
    app.is_broken.store(true, SeqCst);
    call_tool(&router, 9, "look").await;
    call_tool(&router, 9, "look").await;
    assert_eq!(runs_and_pages(), (5, 3), "it is covered, and the list is not asked for again at once");
    app.is_broken.store(false, SeqCst);
    tokio::time::advance(Duration::from_secs(6)).await;
    call_tool(&router, 9, "look").await;
    assert_eq!(runs_and_pages(), (6, 5));
}

async fn call_tool(router: &Router, id: u32, tool: &str) -> serde_json::Value {
    let params = serde_json::json!({ "name": tool, "_meta": { "idempotency-key": format!("{tool}-key") } });
    send_message(router, id, "tools/call", params).await
}

async fn send(router: &Router, id: u32, method: &str) -> serde_json::Value {
    let params = serde_json::json!({ "name": "pay", "_meta": { "idempotency-key": "k1" } });
    send_message(router, id, method, params).await
}

async fn send_message(router: &Router, id: u32, method: &str, params: serde_json::Value) -> serde_json::Value {
    let message = serde_json::json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params });
    let request = Request::post("/mcp").header("authorization", "Bearer a").header("host", "x");
    let request = request.header("content-type", "application/json").body(Body::from(message.to_string())).unwrap();
    serde_json::from_str(&text(router.clone().oneshot(request).await.unwrap()).await).unwrap()
}

#[tokio::test]
async fn a_call_of_a_tool_runs_once_and_other_methods_pass() {
    for mode in [PolicyMode::Enforce, PolicyMode::Shadow] {
        let (app, ibid) = (LayerTestApp::default(), Ibid::new(Arc::new(Memory::default())));
        let mut policy = Policy::mcp();
        policy.mode = mode;
        let router = Router::new().route("/mcp", post(run_tool)).layer(ibid.layer(policy).unwrap());
        let router = router.with_state(app.clone());
        let is_enforced = mode == PolicyMode::Enforce;
        for id in 1..=3 {
            let run = if is_enforced { 1 } else { id };
            let expected = serde_json::json!({ "jsonrpc": "2.0", "id": id, "result": { "run": run } });
            assert_eq!(send(&router, id, "tools/call").await, expected);
        }
        let before = app.runs.load(SeqCst);
        for id in 1..=2 {
            send(&router, id, "tools/list").await;
        }
        assert_eq!(app.runs.load(SeqCst), before + 2);
    }
}
