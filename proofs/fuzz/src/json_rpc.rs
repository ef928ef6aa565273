//! JSON-RPC messages through the layer with the preset `mcp`: whatever the body is, it is answered, and a call of a tool with
//! a key runs at most once.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use ibid::{Ibid, Policy, http::RequestBody, store::Memory};
use tower::{Layer as _, ServiceExt as _, service_fn};

/// See the module.
pub fn check(message: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let calls = Arc::new(AtomicUsize::new(0));
        let ibid = Ibid::new(Arc::new(Memory::default()));
        let layer = ibid.layer(Policy::mcp()).expect("a valid policy");
        let counted = Arc::clone(&calls);
        let server = layer.layer(service_fn(move |request: Request<RequestBody<Full<Bytes>>>| {
            let counted = Arc::clone(&counted);
            async move {
                let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
                counted.fetch_add(1, SeqCst);
                Ok::<_, Infallible>(answer(&body))
            }
        }));
        for _ in 0..2 {
            let request = Request::post("/mcp").header("host", "x").header("authorization", "Bearer a");
            let request = request.header("content-type", "application/json").header("idempotency-key", "k");
            let request = request.body(Full::new(Bytes::copy_from_slice(message))).expect("a valid request");
            let response = server.clone().oneshot(request).await.expect("it never fails");
            let _ = response.into_body().collect().await;
        }
        if is_tool_call(message) {
            assert!(calls.load(SeqCst) <= 1, "it ran {} times", calls.load(SeqCst));
        }
    });
}

fn answer(request: &[u8]) -> Response<Full<Bytes>> {
    let message: serde_json::Value = serde_json::from_slice(request).unwrap_or_default();
    let reply = serde_json::json!({ "jsonrpc": "2.0", "id": message["id"], "result": {} });
    let response = Response::builder().header("content-type", "application/json");
    response.body(Full::new(reply.to_string().into())).expect("a valid response")
}

fn is_tool_call(message: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(message).is_ok_and(|message| {
        let id = &message["id"];
        message["method"] == "tools/call" && (id.is_string() || id.is_i64() || id.is_u64())
    })
}
