//! MCP servers: a `tools/call` with a key runs once and is replayed under the id of the retry; all other messages pass.
//! The SDKs themselves are in `mcp_clients.rs`.

use serde_json::json;

use super::*;

const PATH: &str = "/mcp";
const KEY: &str = "KG5LxwFBepaKHyUD";
const REPLAY: [(&str, &str); 1] = [("Idempotent-Replayed", "true")];

async fn start_preset() -> TestGateway {
    let bench = TestGateway::shipped("mcp").await;
    bench.upstream.on(PATH, result("done"));
    bench
}

fn result(text: &str) -> UpstreamReply {
    let content = json!([{ "type": "text", "text": text }]);
    let response = json!({ "jsonrpc": "2.0", "id": 1, "result": { "content": content, "isError": false } });
    UpstreamReply::status(200).json(&response.to_string()).header("Mcp-Session-Id", "s1")
}

fn event(message: &Value) -> String {
    format!("event: message\ndata: {message}\n\n")
}

fn events(chunks: &[String]) -> UpstreamReply {
    UpstreamReply::chunks(chunks.to_vec()).header("Content-Type", "text/event-stream")
}

fn message(bench: &TestGateway, message: &Value) -> TestRequest {
    let request = bench.post(PATH).header("Authorization", "Bearer agent-1");
    request.header("Accept", "application/json, text/event-stream").json(&message.to_string())
}

/// A call of the tool `pay` with this amount.
fn call_message(id: Value, amount: u32) -> Value {
    let params = json!({ "name": "pay", "arguments": { "amount": amount } });
    json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params })
}

fn call(bench: &TestGateway, id: impl Into<Value>, key: &str) -> TestRequest {
    message(bench, &call_message(id.into(), 5)).key(key)
}

/// Checks a refusal, and returns its error.
#[track_caller]
fn assert_error(answer: &TestResponse, id: Value, code: i64, kind: &str) -> Value {
    let status = if id.is_null() { 400 } else { 200 };
    assert_eq!((answer.status, answer.header("content-type")), (status, Some("application/json")), "{answer:?}");
    let body = answer.json();
    let error = &body["error"];
    assert_eq!((&body["jsonrpc"], &body["id"]), (&json!("2.0"), &id), "{body}");
    assert_eq!((&error["code"], &error["data"]["type"]), (&json!(code), &json!(kind)), "{body}");
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
    error.clone()
}

#[tokio::test]
async fn a_retry_gets_the_first_result_under_its_own_id() {
    let bench = start_preset().await;
    let first = call(&bench, 1, KEY).send().await;
    assert_eq!((first.status, ibid_headers(&first)), (200, vec![]), "{first:?}");
    assert_eq!(first.header("mcp-session-id"), Some("s1"), "{first:?}");
    bench.upstream.on(PATH, result("again"));
    for id in [json!(2), json!("a\"b"), json!(1)] {
        let again = call(&bench, id.clone(), KEY).send().await;
        assert_eq!(ibid_headers(&again), REPLAY, "{again:?}");
        let body = again.json();
        assert_eq!((&body["id"], &body["result"]), (&id, &first.json()["result"]), "{body}");
        assert_eq!(again.header("mcp-session-id"), None, "it may be of another session: {again:?}");
        assert_eq!(again.header("content-length"), Some(&*again.body.len().to_string()), "{again:?}");
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn the_key_is_taken_from_the_first_carrier_that_has_one() {
    let bench = start_preset().await;
    let call = |carriers: &[(&str, &str)], header: Option<&str>| {
        let mut call = call_message(json!(1), 5);
        for (carrier, key) in carriers {
            match *carrier {
                "param" => call["params"]["idempotencyKey"] = json!(key),
                name => call["params"]["_meta"][name] = json!(key),
            }
        }
        let request = message(&bench, &call);
        if let Some(key) = header { request.key(key) } else { request }
    };
    let (meta, short) = ("io.modelcontextprotocol/idempotencyKey", "idempotency-key");
    for (at, (carriers, header)) in [
        (&[("param", "k-a"), (meta, "x"), (short, "x")][..], Some("x")),
        (&[(meta, "k-b"), (short, "x")], Some("x")),
        (&[(short, "k-c")], Some("x")),
        (&[], Some("k-d")),
    ]
    .into_iter()
    .enumerate()
    {
        call(carriers, header).send().await;
        bench.assert_executed(at + 1);
        let key = ["k-a", "k-b", "k-c", "k-d"][at];
        let again = call(&[], Some(key)).send().await;
        assert_eq!(ibid_headers(&again), REPLAY, "{key}: {again:?}");
    }
    bench.assert_executed(4);
    for _ in 0..2 {
        call(&[], None).send().await;
    }
    bench.assert_executed(6);
}

#[tokio::test]
async fn what_changes_with_each_attempt_is_not_compared_and_the_call_is() {
    let bench = start_preset().await;
    call(&bench, 1, KEY).send().await;
    let mut again = call_message(json!(2), 5);
    again["params"]["_meta"] = json!({ "progressToken": 7, "traceparent": "00-1" });
    let again = message(&bench, &again).header("Mcp-Session-Id", "s2").key(KEY).send().await;
    assert_eq!(ibid_headers(&again), REPLAY, "{again:?}");
    let other = message(&bench, &call_message(json!(3), 6)).key(KEY).send().await;
    let error = assert_error(&other, json!(3), -31010, "key-reused");
    assert_eq!(error["data"]["key"], "KG5L****HyUD", "{error}");
    let mut continued = call_message(json!("c"), 5);
    continued["params"]["requestState"] = json!("s");
    assert_error(&message(&bench, &continued).key(KEY).send().await, json!("c"), -31010, "key-reused");
    bench.assert_executed(1);
    let stranger = call(&bench, 4, KEY).header("X-Api-Key", "another agent").send().await;
    assert_eq!(ibid_headers(&stranger), NO_HEADERS, "{stranger:?}");
    bench.assert_executed(2);
}

#[tokio::test]
async fn other_messages_pass() {
    let bench = start_preset().await;
    let mut runs = 0;
    for other in [
        json!({ "jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {} }),
        json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" }),
        json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }),
        json!({ "jsonrpc": "2.0", "method": "tools/call", "params": { "name": "pay" } }),
        json!({ "jsonrpc": "2.0", "id": 1, "result": {} }),
    ] {
        for _ in 0..2 {
            let answer = message(&bench, &other).key(KEY).send().await;
            assert_eq!((answer.status, ibid_headers(&answer)), (200, vec![]), "{other}: {answer:?}");
            runs += 1;
            bench.assert_executed(runs);
            assert_eq!(bench.upstream.last().text(), other.to_string());
        }
    }
    // Also from a caller who could not use a key: a session begins before anybody logs in.
    let cookies = bench.post(PATH).header("Cookie", "a=b").key(KEY);
    let other = cookies.clone().json(r#"{"jsonrpc":"2.0","id":1,"method":"initialize"}"#).send().await;
    assert_eq!((other.status, ibid_headers(&other)), (200, vec![]), "{other:?}");
    let refused = cookies.json(&call_message(json!(9), 5).to_string()).send().await;
    assert_error(&refused, json!(9), -31003, "scope-missing");
    bench.assert_executed(runs + 1);
    for method in ["GET", "DELETE"] {
        let answer = bench.request(method, PATH).key(KEY).send().await;
        assert_eq!(ibid_headers(&answer), NO_HEADERS, "{answer:?}");
    }
}

#[tokio::test]
async fn refusals_are_errors_of_json_rpc_with_the_id_of_the_request() {
    let bench = start_preset().await;
    assert_error(&call(&bench, 1, &"k".repeat(256)).send().await, json!(1), -31002, "key-invalid");
    let two = call(&bench, "two", KEY).header("Idempotency-Key", "k-2").send().await;
    assert_error(&two, json!("two"), -31004, "request-ambiguous");
    let batch = json!([call_message(json!(1), 5)]);
    assert_error(&message(&bench, &batch).send().await, Value::Null, -31004, "request-ambiguous");
    let twice = r#"{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/call","params":{"name":"pay"}}"#;
    let twice = bench.post(PATH).header("Authorization", "Bearer a").json(twice).send().await;
    assert_error(&twice, Value::Null, -31004, "request-ambiguous");
    bench.assert_executed(0);
    bench.upstream.on(PATH, UpstreamFault::ResetAfterRequest);
    assert_error(&call(&bench, 3, "k-3").send().await, json!(3), -31016, "upstream-lost");
    assert_error(&call(&bench, 4, "k-3").send().await, json!(4), -31013, "outcome-unknown");
    bench.upstream.stop().await;
    assert_error(&call(&bench, 5, "k-4").send().await, json!(5), -31015, "upstream-unreachable");
    // Without the id of the message, the status tells the client that its request failed.
    let passed = message(&bench, &json!({ "jsonrpc": "2.0", "id": 6, "method": "tools/list" })).send().await;
    assert_eq!((passed.status, &passed.json()["error"]["code"]), (502, &json!(-31015)), "{passed:?}");
}

#[tokio::test]
async fn a_duplicate_of_a_running_call_is_refused_or_waits() {
    for dial in ["reject", "wait"] {
        let bench = TestGateway::shipped_with("mcp", &format!("on_concurrent = \"{dial}\"")).await;
        let gate = ReplyGate::new();
        bench.upstream.on(PATH, result("slow").gated(&gate));
        let mut first = call(&bench, 1, KEY).start().await;
        gate.arrived(1).await;
        if dial == "reject" {
            let answer = call(&bench, 2, KEY).send().await;
            let error = assert_error(&answer, json!(2), -31012, "in-progress");
            assert!(error["data"]["retryAfterMs"].as_u64().is_some_and(|ms| ms > 0), "{error}");
            assert!(answer.header("retry-after").is_some(), "{answer:?}");
            gate.open();
        } else {
            let mut second = call(&bench, 2, KEY).start().await;
            sleep(SILENCE_DURATION).await;
            gate.open();
            assert_eq!(second.read_response().await.json()["id"], 2);
        }
        assert_eq!(first.read_response().await.json()["id"], 1);
        bench.assert_executed(1);
    }
}

#[tokio::test]
async fn of_an_event_stream_the_response_is_remembered() {
    let bench = start_preset().await;
    let progress = event(&json!({ "jsonrpc": "2.0", "method": "notifications/progress", "params": { "progress": 1 } }));
    let ask = event(&json!({ "jsonrpc": "2.0", "id": 1, "method": "sampling/createMessage", "params": {} }));
    let response = json!({ "jsonrpc": "2.0", "id": 1, "result": { "content": [], "structuredContent": { "n": 1 } } });
    let stream = [progress.clone(), ask.clone(), event(&response)];
    bench.upstream.on(PATH, events(&stream));
    let first = call(&bench, 1, KEY).send().await;
    assert_eq!((first.header("content-type"), first.text()), (Some("text/event-stream"), stream.concat()), "{first:?}");
    let again = call(&bench, 2, KEY).send().await;
    assert_eq!((again.header("content-type"), ibid_headers(&again)), (Some("application/json"), REPLAY.to_vec()));
    let mut expected = response.clone();
    expected["id"] = json!(2);
    assert_eq!(again.json(), expected, "{again:?}");
    bench.assert_executed(1);

    // Progress of any size does not keep the response from being remembered.
    let filler = format!(": {}\n\n", "x".repeat(64 << 10));
    let long: Vec<String> = std::iter::repeat_n(filler, 20).chain([event(&response)]).collect();
    bench.upstream.on(PATH, events(&long));
    assert_eq!(call(&bench, 1, "k-long").send().await.text(), long.concat());
    assert_eq!(call(&bench, 3, "k-long").send().await.json()["result"], response["result"]);
    bench.assert_executed(2);

    // A stream without a response may go on in another request: the outcome is unknown.
    bench.upstream.on(PATH, events(&[progress, ask]));
    assert_eq!(call(&bench, 1, "k-cut").send().await.status, 200);
    assert_error(&call(&bench, 4, "k-cut").send().await, json!(4), -31013, "outcome-unknown");
    bench.assert_executed(3);
}

#[tokio::test]
async fn what_says_that_the_tool_did_not_run_is_not_remembered() {
    let bench = start_preset().await;
    let mut runs = 0;
    let rpc_error = |code: i32| json!({ "jsonrpc": "2.0", "id": 1, "error": { "code": code, "message": "no" } });
    for (at, reply) in [
        UpstreamReply::status(200).json(&rpc_error(-32602).to_string()),
        UpstreamReply::status(200).json(&json!({ "id": 1, "result": { "resultType": "input_required" } }).to_string()),
        events(&[event(&rpc_error(-32600))]),
        UpstreamReply::status(400).json(&rpc_error(-32020).to_string()),
        UpstreamReply::status(401),
        UpstreamReply::status(404),
        UpstreamReply::status(500),
    ]
    .into_iter()
    .enumerate()
    {
        bench.upstream.on(PATH, reply);
        let key = format!("key-{at}");
        call(&bench, 1, &key).send().await;
        bench.upstream.on(PATH, result("done"));
        let second = call(&bench, 2, &key).send().await;
        runs += 2;
        assert_eq!(ibid_headers(&second), NO_HEADERS, "{at}: {second:?}");
        bench.assert_executed(runs);
    }
}

#[tokio::test]
async fn errors_of_tools_are_remembered_by_dial() {
    let is_error = json!({ "jsonrpc": "2.0", "id": 1, "result": { "content": [], "isError": true } });
    let internal = json!({ "jsonrpc": "2.0", "id": 1, "error": { "code": -32603, "message": "it broke" } });
    for (dials, remembered) in [("", true), ("remember_tool_errors = false", false)] {
        let bench = TestGateway::shipped_with("mcp", dials).await;
        let mut runs = 0;
        for (at, response) in [&is_error, &internal].into_iter().enumerate() {
            bench.upstream.on(PATH, UpstreamReply::status(200).json(&response.to_string()));
            let key = format!("key-{at}");
            call(&bench, 1, &key).send().await;
            bench.upstream.on(PATH, result("done"));
            let again = call(&bench, 2, &key).send().await;
            runs += if remembered { 1 } else { 2 };
            bench.assert_executed(runs);
            if remembered {
                let mut expected = response.clone();
                expected["id"] = json!(2);
                assert_eq!((again.json(), ibid_headers(&again)), (expected, REPLAY.to_vec()), "{again:?}");
            }
        }
    }
}

#[tokio::test]
async fn only_the_named_tools_are_covered() {
    let bench = TestGateway::shipped_with("mcp", "tools = [\"create_*\", \"pay\"]\nkey.required = true").await;
    bench.upstream.on(PATH, result("done"));
    let named = |name: &str| {
        let params = json!({ "name": name, "arguments": {} });
        message(&bench, &json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params }))
    };
    for (at, name) in ["create_order", "pay"].into_iter().enumerate() {
        assert_error(&named(name).send().await, json!(1), -31001, "key-missing");
        named(name).key(format!("key-{at}")).send().await;
        assert_eq!(ibid_headers(&named(name).key(format!("key-{at}")).send().await), REPLAY, "{name}");
    }
    bench.assert_executed(2);
    for name in ["list_orders", "pay_later"] {
        assert_eq!(ibid_headers(&named(name).key(KEY).send().await), NO_HEADERS, "{name}");
        assert_eq!(ibid_headers(&named(name).key(KEY).send().await), NO_HEADERS, "{name}");
    }
    bench.assert_executed(6);
}

#[tokio::test]
async fn an_answer_too_large_to_keep_is_told_as_such() {
    let bench = TestGateway::shipped_with("mcp", "max_response = \"1KiB\"").await;
    let large = json!({ "jsonrpc": "2.0", "id": 1, "result": { "content": "x".repeat(2000) } });
    for (key, reply) in
        [("k-json", UpstreamReply::status(200).json(&large.to_string())), ("k-events", events(&[event(&large)]))]
    {
        bench.upstream.on(PATH, reply);
        let first = call(&bench, 1, key).send().await;
        assert!(first.text().contains(&large.to_string()), "{first:?}");
        let error = assert_error(&call(&bench, 2, key).send().await, json!(2), -31099, "digest");
        assert!(error["data"]["length"].as_u64().is_some_and(|length| length > 2000), "{error}");
    }
    bench.assert_executed(2);
}

#[tokio::test]
async fn dials_that_make_no_sense_are_named() {
    for (config, told) in [
        ("[[route]]\nmatch = \"POST|PUT /mcp\"\npreset = \"mcp\"", "route[1].methods"),
        ("[[route]]\nmatch = \"POST /mcp\"\npreset = \"mcp\"\ntools = []", "route[1].tools"),
        ("[[route]]\nmatch = \"POST /mcp\"\npreset = \"mcp\"\nenvelope = \"metadata\"", "route[1].envelope"),
        ("[[route]]\nmatch = \"POST /mcp\"\npreset = \"mcp\"\nremember_body = false", "route[1].remember_body"),
        ("[[route]]\nmatch = \"POST /mcp\"\npreset = \"mcp\"\nresolve = \"GET /x\"", "route[1].resolve"),
        ("[[route]]\nmatch = \"grpc shop.Orders/Create\"\npreset = \"mcp\"", "route[1].preset"),
        ("[policy]\nremember_tool_errors = true", "policy.remember_tool_errors"),
        ("[policy]\ntools = [\"a\"]", "policy.tools"),
    ] {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), format!("upstream = \"http://127.0.0.1:3000\"\n{config}\n")).unwrap();
        let output = run_ibid(&["check", file.path().to_str().unwrap()], &[]).await;
        assert!(output.all().contains(told), "{config}: {}", output.all());
    }
}
