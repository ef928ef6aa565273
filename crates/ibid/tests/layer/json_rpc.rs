//! The layer in front of an MCP server. Its policy tells that requests are JSON-RPC.

use super::*;

async fn run_tool(State(app): State<LayerTestApp>, body: String) -> impl IntoResponse {
    let message: serde_json::Value = serde_json::from_str(&body).unwrap();
    let run = app.runs.fetch_add(1, SeqCst) + 1;
    axum::Json(serde_json::json!({ "jsonrpc": "2.0", "id": message["id"], "result": { "run": run } }))
}

async fn send(router: &Router, id: u32, method: &str) -> serde_json::Value {
    let params = serde_json::json!({ "name": "pay", "_meta": { "idempotency-key": "k1" } });
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
