//! A client of an MCP server over HTTP: what it sends, and what it reads in answers.

use std::time::Instant;

use bytes::Bytes;
use http::Response;
use serde_json::{Map, Value, json};

use super::super::{
    checks::require_reachable,
    connection::{RawExchange, RawRequest, header_of},
    session::{ConformSession, RETRY_PAUSE},
};
use crate::CommandError;

/// The revision without sessions, in which each request describes its client.
const STATELESS_REVISION: &str = "2026-07-28";
const KEY_IN_HEADER: &str = "header";

/// One client of the server.
pub(super) struct McpClient<'s, 'a> {
    pub(super) session: &'s mut ConformSession<'a>,
    pub(super) tool: &'a str,
    /// `None` under [`STATELESS_REVISION`], and if the server has no sessions.
    pub(super) session_id: Option<String>,
    pub(super) last_id: u64,
    /// Whether the results of two runs differ.
    pub(super) has_varying_results: bool,
}

/// A call and what came of it.
pub(super) struct McpCall {
    pub(super) id: u64,
    pub(super) seen: RawExchange,
    /// The response with this or any other id.
    pub(super) message: Option<Value>,
}

impl McpCall {
    pub(super) fn new(id: u64, seen: RawExchange) -> Self {
        let message = seen.response.as_ref().ok().and_then(|response| find_response(response, id));
        Self { id, seen, message }
    }

    /// The result, without metadata, if the tool succeeded.
    pub(super) fn success(&self) -> Option<Value> {
        let mut result = self.message.as_ref()?.get("result")?.clone();
        if result["isError"] == true {
            return None;
        }
        result.as_object_mut()?.remove("_meta");
        Some(result)
    }

    pub(super) fn is_refused(&self) -> bool {
        self.message.as_ref().is_some_and(|message| message["error"].is_object())
    }

    /// Whether the first call with the key is still running.
    fn is_in_progress(&self) -> bool {
        let kind = self.message.as_ref().map(|message| &message["error"]["data"]["type"]);
        kind.is_some_and(|kind| kind == "in-progress" || kind == "idempotency_key_in_progress")
    }

    pub(super) fn has_own_id(&self) -> bool {
        self.message.as_ref().is_some_and(|message| message["id"] == self.id)
    }
}

/// Finds the response in a body or an event stream, preferably that with this id.
fn find_response(response: &Response<Bytes>, id: u64) -> Option<Value> {
    let body = std::str::from_utf8(response.body()).ok()?;
    let is_stream = header_of(response, "content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
    let events = body.split("\n\n").flat_map(|event| event.split("\r\n\r\n"));
    let texts: Vec<String> = match is_stream {
        false => vec![body.to_owned()],
        true => events.map(|event| event.lines().filter_map(|line| line.strip_prefix("data:")).collect()).collect(),
    };
    let messages = texts.iter().filter_map(|text| serde_json::from_str::<Value>(text.trim()).ok());
    let responses: Vec<_> =
        messages.filter(|message| message.get("result").is_some() || message.get("error").is_some()).collect();
    responses.iter().find(|message| message["id"] == id).or(responses.first()).cloned()
}

/// Puts a value at a JSON pointer, and objects on the way to it.
fn insert_at(message: &mut Value, pointer: &str, value: Value) {
    let mut node = message;
    for step in pointer.split('/').skip(1) {
        let step = step.replace("~1", "/").replace("~0", "~");
        if !node.is_object() {
            *node = Value::Object(Map::new());
        }
        node = node.as_object_mut().expect("just made").entry(step).or_insert(Value::Null);
    }
    *node = value;
}

impl McpClient<'_, '_> {
    fn is_stateless(&self) -> bool {
        self.session.args.protocol_version == STATELESS_REVISION
    }

    /// A request with this method and these parameters, and the key and the headers of an operation.
    fn message(&self, id: Option<u64>, method: &str, mut params: Value, operation: &RawRequest) -> RawRequest {
        let args = self.session.args;
        let version = args.protocol_version.as_str();
        let client = json!({ "name": "ibid-conform", "version": env!("CARGO_PKG_VERSION") });
        let mut headers = vec![("accept".into(), "application/json, text/event-stream".into())];
        if self.is_stateless() {
            let name = params["name"].as_str().or(params["uri"].as_str()).map(str::to_owned);
            for (member, value) in
                [("protocolVersion", version.into()), ("clientInfo", client), ("clientCapabilities", json!({}))]
            {
                insert_at(&mut params, &format!("/_meta/io.modelcontextprotocol~1{member}"), value);
            }
            headers.push(("mcp-method".into(), method.into()));
            headers.extend(name.map(|name| ("mcp-name".into(), name)));
        } else if method == "initialize" {
            params = json!({ "protocolVersion": version, "capabilities": {}, "clientInfo": client });
        }
        if method != "initialize" {
            headers.push(("mcp-protocol-version".into(), version.into()));
        }
        headers.extend(self.session_id.clone().map(|id| ("mcp-session-id".into(), id)));
        let mut message = json!({ "jsonrpc": "2.0", "method": method, "params": params });
        let mut request = operation.clone().with_headers(&headers);
        if let Some(id) = id {
            message["id"] = id.into();
        }
        if args.key_at != KEY_IN_HEADER
            && let Some((_, key)) = request.keys.pop()
        {
            insert_at(&mut message, &args.key_at, String::from_utf8_lossy(&key).into());
        }
        request.body = Some(message.to_string().into());
        request
    }

    /// A call of the tool, with the arguments in the operation's body and its key.
    pub(super) fn call_message(&mut self, operation: &RawRequest) -> (u64, RawRequest) {
        self.last_id += 1;
        let arguments = operation.body.as_ref().and_then(|body| serde_json::from_slice(body).ok());
        let params = json!({ "name": self.tool, "arguments": arguments.unwrap_or(json!({})) });
        (self.last_id, self.message(Some(self.last_id), "tools/call", params, operation))
    }

    pub(super) async fn call(&mut self, operation: &RawRequest) -> McpCall {
        let (id, request) = self.call_message(operation);
        McpCall::new(id, self.session.send(&request).await)
    }

    /// Calls again until the first call with this key has ended, or until the timeout.
    pub(super) async fn retry(&mut self, operation: &RawRequest) -> McpCall {
        let since = Instant::now();
        loop {
            let call = self.call(operation).await;
            let is_over = since.elapsed() > self.session.args.timeout || self.session.is_past_deadline();
            if !call.is_in_progress() || is_over {
                return call;
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    pub(super) async fn ask(&mut self, method: &str, params: Value, operation: &RawRequest) -> McpCall {
        self.last_id += 1;
        let request = self.message(Some(self.last_id), method, params, operation);
        McpCall::new(self.last_id, self.session.send(&request).await)
    }

    /// Opens a session, in revisions that have them.
    pub(super) async fn open_session(&mut self) -> Result<Option<String>, CommandError> {
        if self.is_stateless() {
            return Ok(None);
        }
        let operation = self.session.operation_without_key();
        let before = self.session_id.take();
        let opened = self.ask("initialize", json!({}), &operation).await;
        require_reachable(&opened.seen)?;
        let (Some(Value::Object(_)), Ok(response)) = (opened.success(), &opened.seen.response) else {
            let came = opened.seen.describe_response();
            let why = format!("{} is no MCP server that takes initialize: {came}", self.session.target);
            return Err(CommandError::Usage(why));
        };
        let id = header_of(response, "mcp-session-id").map(str::to_owned);
        self.session_id = id.clone();
        let initialized = self.message(None, "notifications/initialized", json!({}), &operation);
        self.session.send(&initialized).await;
        self.session_id = before;
        Ok(id)
    }

    /// How often the tool has run, if anything tells.
    pub(super) async fn count(&mut self) -> Result<Option<u64>, CommandError> {
        let args = self.session.args;
        let plain = self.session.operation_without_key();
        let (call, what) = match (&args.count_tool, &args.count_resource) {
            (Some(tool), _) => {
                let params = json!({ "name": tool, "arguments": {} });
                (self.ask("tools/call", params, &plain).await, format!("--count-tool {tool}"))
            }
            (None, Some(uri)) => {
                let params = json!({ "uri": uri });
                (self.ask("resources/read", params, &plain).await, format!("--count-resource {uri}"))
            }
            (None, None) => return self.session.execution_count().await,
        };
        let cannot = |why: String| CommandError::Usage(format!("{what}: {why}"));
        let result = call.success().ok_or_else(|| cannot(format!("it answers {}", call.seen.describe_response())))?;
        let texts = result["content"].as_array().or(result["contents"].as_array());
        let text = texts.and_then(|all| all.first()?["text"].as_str()).unwrap_or_default();
        let found: Value = serde_json::from_str(text).unwrap_or_default();
        let count = match found.pointer(&args.count_pointer) {
            Some(Value::Array(list)) => Some(list.len() as u64),
            value => value.and_then(Value::as_u64),
        };
        let missing =
            || cannot(format!("there is no number at {:?} (see --count-pointer) in {text:?}", args.count_pointer));
        count.map(Some).ok_or_else(missing)
    }

    pub(super) async fn ran_since(&mut self, before: Option<u64>) -> Result<Option<u64>, CommandError> {
        let after = self.count().await?;
        Ok(before.zip(after).map(|(before, after)| after.saturating_sub(before)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_response_is_found_in_a_body_and_among_events() {
        let response = |kind: &str, body: &'static str| {
            Response::builder().header("content-type", kind).body(Bytes::from_static(body.as_bytes())).unwrap()
        };
        let plain = response("application/json", r#"{"jsonrpc":"2.0","id":2,"result":{}}"#);
        assert_eq!(find_response(&plain, 2).unwrap()["id"], 2);
        assert_eq!(find_response(&plain, 3).unwrap()["id"], 2, "that of another request is shown");
        let stream = "event: message\ndata: {\"method\":\"notifications/progress\"}\n\nid: 7\ndata: {\"id\":2,\ndata: \"error\":{}}\n\n";
        assert!(find_response(&response("text/event-stream", stream), 2).unwrap()["error"].is_object());
        let windows = "data: {\"id\":2,\"result\":{}}\r\n\r\ndata: {\"id\":3,\"result\":{}}\r\n\r\n";
        assert_eq!(find_response(&response("text/event-stream; charset=utf-8", windows), 3).unwrap()["id"], 3);
        assert_eq!(find_response(&response("application/json", "no JSON"), 2), None);
    }

    #[test]
    fn a_key_goes_where_the_pointer_says() {
        let mut message = json!({ "params": { "name": "pay" } });
        insert_at(&mut message, "/params/_meta/a~1b", "k".into());
        assert_eq!(message, json!({ "params": { "name": "pay", "_meta": { "a/b": "k" } } }));
    }
}
