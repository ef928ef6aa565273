//! JSON-RPC over HTTP, as MCP (Model Context Protocol) servers have it.
//!
//! ```
//! use std::sync::Arc;
//! use ibid::{Ibid, Policy, store::Memory};
//!
//! let ibid = Ibid::new(Arc::new(Memory::default()));
//! let layer = ibid.layer(Policy::mcp())?;
//! # let _ = layer;
//! # Ok::<(), ibid::InvalidPolicy>(())
//! ```
//!
//! The operation is a `tools/call`. All other messages pass through: other methods, notifications and the client's own
//! responses. A [`Route`](crate::http::Route) of [`Protocol::JsonRpc`] differs from HTTP only in these points:
//!
//! | | HTTP | JSON-RPC |
//! |---|---|---|
//! | covered | methods | requests with the method `tools/call`, by the [name of the tool](ToolPattern) |
//! | body | canonical by its type | `name`, `arguments`, `inputResponses` and `requestState` of `params` |
//! | outcome | HTTP status | HTTP status, then `result` or `error` |
//! | event stream | remembered as it is | its response is remembered, and nothing else |
//! | replay | as it was | with the `id` of the present request, as JSON |
//! | refusals | problem documents | errors with the `id` of the request and HTTP status 200 |
//!
//! Invariant: a message that could be read in two ways (a batch, a member that occurs twice) is refused, because the
//! server could find a call in it that this module does not.

use std::{fmt, str::FromStr, sync::LazyLock};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header, request::Parts};

pub(crate) use self::{
    event_stream::{ResponseEventFinder, is_event_stream},
    tool_list::{MAX_LIST_PAGES, ToolLists, ToolPage, called_tool, list_request},
};
use crate::{
    engine::StoredAs,
    fingerprint::{
        FingerprintInput, JsonPointer, PartDigests,
        json::{self, JsonLookup, NameEquality},
    },
    http::{HttpRules, RequestContext, WholeBody, completed_answer, is_remembered, json_string, remove_body_digests},
    key::hex,
    policy::{FingerprintPart, InvalidSetting, Policy, ResponseEnvelope, require},
    protocol::{AppReply, MessageKind, Protocol, ProtocolRules, ReplyMeaning},
    record::{Record, RecordBody},
    refusal::{Refusal, RefusalReason},
    store::Fingerprint,
};

mod event_stream;
mod tool_list;

/// The only method whose requests are operations.
const CALL_METHOD: &str = "tools/call";

/// The JSON-RPC code of a replay whose answer was too large to store.
const ANSWER_NOT_STORED_CODE: i32 = -31099;

static MESSAGE_MEMBERS: LazyLock<[JsonPointer; 5]> =
    LazyLock::new(|| pointers(["/method", "/id", "/params/name", "/result", "/error"]));

static COMPARED_MEMBERS: LazyLock<[JsonPointer; 4]> =
    LazyLock::new(|| pointers(["/params/name", "/params/arguments", "/params/inputResponses", "/params/requestState"]));

static RESPONSE_MEMBERS: LazyLock<[JsonPointer; 6]> = LazyLock::new(|| {
    pointers(["/method", "/result", "/error", "/error/code", "/result/isError", "/result/resultType"])
});

fn pointers<const N: usize>(written: [&str; N]) -> [JsonPointer; N] {
    written.map(|pointer| JsonPointer::parse(pointer).expect("written above"))
}

/// The name of a tool, with `*` for any characters: `create_*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolPattern(String);

/// Which tools of an MCP server are covered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolSelection {
    /// Those with these names.
    Named(Vec<ToolPattern>),
    /// Those that their server does not annotate with `readOnlyHint` or `idempotentHint`. Its list of tools is read and
    /// kept for a minute. If it cannot be read, all tools are covered.
    Annotations,
}

impl fmt::Display for ToolSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(patterns) => {
                f.write_str(&patterns.iter().map(|pattern| &*pattern.0).collect::<Vec<_>>().join(", "))
            }
            Self::Annotations => f.write_str("annotations"),
        }
    }
}

impl ToolPattern {
    /// Whether the pattern matches the name of a tool.
    pub fn matches(&self, name: &str) -> bool {
        let mut pieces = self.0.split('*');
        let first = pieces.next().unwrap_or_default();
        let Some(mut rest) = name.strip_prefix(first) else { return false };
        let Some(last) = pieces.next_back() else { return rest.is_empty() };
        for piece in pieces {
            let Some(at) = rest.find(piece) else { return false };
            rest = &rest[at + piece.len()..];
        }
        rest.ends_with(last)
    }
}

impl FromStr for ToolPattern {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        match text.is_empty() || text.contains(char::is_control) {
            true => {
                Err(format!("{text:?} is no name of a tool; write one such as \"create_order\" or \"create_*\"").into())
            }
            false => Ok(Self(text.into())),
        }
    }
}

impl fmt::Display for ToolPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Policy {
    /// The protocol of the requests that the policy covers, unless they are gRPC calls.
    pub fn protocol(&self) -> Protocol {
        if self.tools.is_some() { Protocol::JsonRpc } else { Protocol::Http }
    }

    /// Checks that all settings are meaningful for JSON-RPC requests, if they are.
    pub(crate) fn check_tools(&self) -> Result<(), InvalidSetting> {
        let Some(tools) = &self.tools else { return Ok(()) };
        let is_empty = matches!(tools, ToolSelection::Named(patterns) if patterns.is_empty());
        require(!is_empty, "tools", "is empty; name at least one tool, or use mode = \"off\"")?;
        let message = "has another method than POST, in which messages of MCP are sent; cover POST only";
        require(self.methods == [Method::POST], "methods", message)?;
        let message = "has \"raw\", which differs with each id; use \"body\", which is the tool and its arguments";
        require(!self.fingerprint.contains(&FingerprintPart::Raw), "fingerprint", message)?;
        let message = "is set, which an MCP server has no answer to; leave it out";
        require(self.resolve.is_none(), "resolve", message)?;
        let message = "is false; an MCP client needs the result, so leave it out";
        require(self.remember_body, "remember_body", message)?;
        let message = "is \"metadata\", which no message of MCP has; leave it out";
        require(self.envelope == ResponseEnvelope::None, "envelope", message)
    }

    fn covers_tool(&self, name: &str) -> bool {
        match &self.tools {
            Some(ToolSelection::Named(patterns)) => patterns.iter().any(|pattern| pattern.matches(name)),
            // Tools that pass by their annotations have passed before.
            Some(ToolSelection::Annotations) => true,
            None => false,
        }
    }
}

pub(crate) struct JsonRpcRules;

impl ProtocolRules for JsonRpcRules {
    fn is_plain_http(&self) -> bool {
        true
    }

    fn read_message(&self, policy: &Policy, body: &[u8]) -> Result<MessageKind, Refusal> {
        if body.trim_ascii_start().starts_with(b"[") {
            return Err(ambiguous("the body is a batch; send each message in a request of its own"));
        }
        let members = json::find_all(body, &MESSAGE_MEMBERS, NameEquality::IgnoreCase);
        let Some([method, id, name, result, error]) = members else {
            return Err(ambiguous(
                "the body is no JSON, or a member occurs twice in it; send one plain JSON-RPC message",
            ));
        };
        match method {
            JsonLookup::String(method) if method == CALL_METHOD => {}
            JsonLookup::String(_) => return Ok(MessageKind::Other),
            JsonLookup::Absent if result != JsonLookup::Absent || error != JsonLookup::Absent => {
                return Ok(MessageKind::Other);
            }
            _ => return Err(ambiguous("the message has no method; send one JSON-RPC message")),
        }
        let id = match id {
            JsonLookup::String(id) => json_string(&id),
            JsonLookup::Number(id) => id.to_owned(),
            // A notification.
            JsonLookup::Absent => return Ok(MessageKind::Other),
            JsonLookup::True | JsonLookup::OtherType => {
                return Err(ambiguous("the id of the request is neither a string nor a number"));
            }
        };
        let name = if let JsonLookup::String(name) = &name { &**name } else { "" };
        match policy.covers_tool(name) {
            true => Ok(MessageKind::Operation { id: Some(id.into()) }),
            false => Ok(MessageKind::Other),
        }
    }

    /// The id, the progress token and the client's metadata change with each attempt, so they are not compared.
    fn fingerprint(
        &self, version: u8, policy: &Policy, input: &FingerprintInput<'_>,
    ) -> Result<Option<(Fingerprint, PartDigests)>, Refusal> {
        Ok(input.with_body(version, policy, |printing| {
            input.hash_json_values(printing, policy, &*COMPARED_MEMBERS);
        }))
    }

    /// The fields are those of the tool's arguments. Calls of two tools have no intent in common.
    fn intent(&self, fields: &[JsonPointer], input: &FingerprintInput<'_>) -> Option<[u8; 32]> {
        let [_, _, tool, ..] = &*MESSAGE_MEMBERS;
        let fields = fields.iter().map(|field| field.under("/params/arguments"));
        input.json_intent(&std::iter::once(tool.clone()).chain(fields).collect::<Vec<_>>())
    }

    fn write_endpoint(&self, request: &Parts, out: &mut String) {
        HttpRules.write_endpoint(request, out);
    }

    fn response_event_finder(&self, policy: &Policy) -> Option<ResponseEventFinder> {
        Some(ResponseEventFinder::new(policy.max_response))
    }

    fn judge(&self, policy: &Policy, reply: AppReply<'_>) -> ReplyMeaning {
        let RecordBody::Whole(body) = &reply.body else { return HttpRules.judge(policy, reply) };
        if !is_remembered(policy, reply.status) {
            return HttpRules.judge(policy, reply);
        }
        let is_stream = is_event_stream(reply.headers);
        let response = if is_stream { event_stream::find_response(body) } else { Some(body.clone()) };
        let Some((response, outcome)) = response.and_then(|body| ToolOutcome::of(&body).map(|outcome| (body, outcome)))
        else {
            // A stream that ends early may be resumed in another request, which is not covered.
            return ReplyMeaning::Unknown;
        };
        let failed = match outcome {
            ToolOutcome::NotRun => return ReplyMeaning::Release,
            ToolOutcome::Failed if !policy.remember_tool_errors => return ReplyMeaning::Release,
            outcome => outcome == ToolOutcome::Failed,
        };
        let mut headers = reply.headers.clone();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let reply = AppReply { body: RecordBody::Whole(response), headers: &headers, ..reply };
        let mut answer = completed_answer(policy, reply);
        answer.failed = failed;
        ReplyMeaning::Remember(answer)
    }

    fn status(&self, status: StatusCode, _: &HeaderMap, _: Option<&HeaderMap>) -> u16 {
        status.as_u16()
    }

    fn refuse(&self, refusal: &Refusal, context: &RequestContext) -> Response<WholeBody> {
        HttpRules.refuse(refusal, context)
    }

    fn fail(&self, status: StatusCode, detail: &str, context: &RequestContext) -> Response<WholeBody> {
        HttpRules.fail(status, detail, context)
    }

    /// A client may resend its request in another session, under another id.
    fn replay(&self, mut record: Record, stored: StoredAs, context: &RequestContext) -> Response<WholeBody> {
        let id = context.message_id.as_deref().unwrap_or("null");
        let body = match &record.body {
            RecordBody::Whole(body) => {
                json::splice_member(body, "id", id.as_bytes()).map_or_else(|| body.clone(), Bytes::from)
            }
            RecordBody::Digest { length, sha256 } => not_stored(id, *length, sha256).into(),
            RecordBody::None => Bytes::new(),
        };
        remove_body_digests(&mut record.headers);
        record.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        record.body = RecordBody::Whole(body);
        HttpRules.replay(record, stored, context)
    }
}

/// The error in place of an answer of which only the digest was stored.
fn not_stored(id: &str, length: u64, sha256: &[u8; 32]) -> Vec<u8> {
    let message = "the call was executed, and its answer was too large to be remembered";
    let (code, sha256) = (ANSWER_NOT_STORED_CODE, hex(sha256));
    let data = format!("{{\"type\":\"digest\",\"length\":{length},\"sha256\":\"{sha256}\"}}");
    let error = format!("{{\"code\":{code},\"message\":\"{message}\",\"data\":{data}}}");
    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"error\":{error}}}").into_bytes()
}

/// What the response to a call says about the tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ToolOutcome {
    Succeeded,
    /// The tool failed, perhaps after it had an effect.
    Failed,
    /// The tool was not run, or not to its end: the request was invalid, or the server needs more of the client.
    NotRun,
}

impl ToolOutcome {
    /// Returns `None` if the message is no response.
    fn of(message: &Bytes) -> Option<Self> {
        let members = json::find_all(message, &RESPONSE_MEMBERS, NameEquality::Exact)?;
        let [JsonLookup::Absent, result, error, code, is_error, result_type] = members else { return None };
        match (result, error) {
            (JsonLookup::Absent, JsonLookup::Absent) => None,
            (_, JsonLookup::Absent) => Some(match (is_error, result_type) {
                (_, JsonLookup::String(kind)) if kind == "input_required" => Self::NotRun,
                (JsonLookup::True, _) => Self::Failed,
                _ => Self::Succeeded,
            }),
            _ => match code {
                JsonLookup::Number(code) if is_protocol_error(code) => Some(Self::NotRun),
                _ => Some(Self::Failed),
            },
        }
    }
}

/// Whether a JSON-RPC error says that the request itself was wrong: invalid (-32700 to -32600), unsupported in this
/// session or lacking an elicitation (-32099 to -32020, which MCP reserves).
fn is_protocol_error(code: &str) -> bool {
    matches!(code.parse::<i64>(), Ok(-32700 | -32602..=-32600 | -32099..=-32020))
}

fn ambiguous(detail: &str) -> Refusal {
    Refusal::new(RefusalReason::RequestAmbiguous, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(policy: &Policy, body: &str) -> Result<Option<String>, RefusalReason> {
        match JsonRpcRules.read_message(policy, body.as_bytes()) {
            Ok(MessageKind::Operation { id }) => Ok(id.map(String::from)),
            Ok(MessageKind::Other) => Ok(None),
            Err(refusal) => Err(refusal.reason),
        }
    }

    #[test]
    fn only_a_call_of_a_tool_is_an_operation() {
        let policy = Policy::mcp();
        let call = |id: &str| format!(r#"{{"jsonrpc":"2.0",{id}"method":"tools/call","params":{{"name":"pay"}}}}"#);
        assert_eq!(kind(&policy, &call("\"id\":7,")), Ok(Some("7".into())));
        assert_eq!(kind(&policy, &call("\"id\":\"a\\\"b\",")), Ok(Some("\"a\\\"b\"".into())));
        assert_eq!(kind(&policy, &call("")), Ok(None), "a notification");
        for other in [
            r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#,
            r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":""}}"#,
        ] {
            assert_eq!(kind(&policy, other), Ok(None), "{other}");
        }
    }

    #[test]
    fn what_can_be_read_in_two_ways_is_refused() {
        for body in [
            "",
            "nonsense",
            "7",
            r#" [{"jsonrpc":"2.0","id":1,"method":"tools/call"}]"#,
            r#"{"id":1,"id":2,"method":"tools/call","params":{"name":"a"}}"#,
            r#"{"id":1,"method":"ping","method":"tools/call","params":{"name":"a"}}"#,
            r#"{"id":1,"method":"tools/call","params":{"name":"a"},"params":{"name":"b"}}"#,
            r#"{"id":1,"Method":"tools/call","params":{"name":"a"}}"#,
            r#"{"id":null,"method":"tools/call","params":{"name":"a"}}"#,
            r#"{"id":{},"method":"tools/call","params":{"name":"a"}}"#,
            r#"{"id":1,"method":7}"#,
        ] {
            assert_eq!(kind(&Policy::mcp(), body), Err(RefusalReason::RequestAmbiguous), "{body}");
        }
    }

    #[test]
    fn tools_are_covered_by_their_names() {
        let tools = ToolSelection::Named(vec!["create_*".parse().unwrap(), "pay".parse().unwrap()]);
        let policy = Policy { tools: Some(tools), ..Policy::mcp() };
        let covered = |name: &str| {
            let body = format!(r#"{{"id":1,"method":"tools/call","params":{{"name":"{name}"}}}}"#);
            kind(&policy, &body).unwrap().is_some()
        };
        assert!(["create_", "create_order", "pay"].into_iter().all(covered));
        assert!(!["Create_order", "recreate_order", "pay2", "", "delete"].into_iter().any(covered));
        let matches = |pattern: &str, name: &str| pattern.parse::<ToolPattern>().unwrap().matches(name);
        assert!(matches("*", "") && matches("*_x", "a_x") && matches("a*b*c", "a1b2bc") && matches("a*a", "aa"));
        assert!(!matches("a*a", "a") && !matches("a*b*c", "acb") && !matches("*_x", "_xy"));
        assert!("".parse::<ToolPattern>().is_err());
    }

    #[test]
    fn the_same_call_under_another_id_is_the_same() {
        let print = |body: &str| {
            let (parts, ()) = http::Request::post("/mcp").body(()).unwrap().into_parts();
            let Parts { method, uri, headers, .. } = &parts;
            let found = crate::fingerprint::FoundHeaders::of(&crate::sent_names::SentHeaders::of(headers));
            let input = FingerprintInput { method, uri, headers, found, body: body.as_bytes(), trailers: None };
            JsonRpcRules.fingerprint(Fingerprint::VERSION, &Policy::mcp(), &input).unwrap().unwrap().0
        };
        let first = print(
            r#"{"id":1,"method":"tools/call","params":{"name":"pay","arguments":{"a":1,"b":[2]},"_meta":{"t":1}}}"#,
        );
        let again =
            r#"{"method":"tools/call","id":"x","params":{"_meta":{"t":2},"arguments":{"b":[2],"a":1},"name":"pay"}}"#;
        assert_eq!(print(again), first);
        for other in [
            r#"{"id":1,"method":"tools/call","params":{"name":"pay","arguments":{"a":1,"b":[3]}}}"#,
            r#"{"id":1,"method":"tools/call","params":{"name":"pay2","arguments":{"a":1,"b":[2]}}}"#,
            r#"{"id":1,"method":"tools/call","params":{"name":"pay"}}"#,
            r#"{"id":1,"method":"tools/call","params":{"name":"pay","arguments":{"a":1,"b":[2]},"requestState":"s"}}"#,
        ] {
            assert_ne!(print(other), first, "{other}");
        }
        let moved = r#"{"params":{"name":"pay","requestState":{"a":1}}}"#;
        assert_ne!(print(moved), print(r#"{"params":{"name":"pay","arguments":{"a":1}}}"#));
    }

    #[test]
    fn a_response_says_whether_the_tool_ran() {
        let of = |message: &str| ToolOutcome::of(&Bytes::copy_from_slice(message.as_bytes()));
        assert_eq!(of(r#"{"id":1,"result":{"content":[],"isError":false}}"#), Some(ToolOutcome::Succeeded));
        assert_eq!(of(r#"{"id":1,"result":{"content":[],"isError":true}}"#), Some(ToolOutcome::Failed));
        assert_eq!(of(r#"{"id":1,"result":{"resultType":"input_required"}}"#), Some(ToolOutcome::NotRun));
        for (code, outcome) in [
            (-32700, ToolOutcome::NotRun),
            (-32602, ToolOutcome::NotRun),
            (-32042, ToolOutcome::NotRun),
            (-32603, ToolOutcome::Failed),
            (-32000, ToolOutcome::Failed),
            (0, ToolOutcome::Failed),
        ] {
            assert_eq!(of(&format!(r#"{{"id":1,"error":{{"code":{code}}}}}"#)), Some(outcome), "{code}");
        }
        assert_eq!(of(r#"{"id":1,"method":"ping"}"#), None);
        assert_eq!(of(r#"{"id":1}"#), None);
        assert_eq!(of("gone"), None);
    }
}
