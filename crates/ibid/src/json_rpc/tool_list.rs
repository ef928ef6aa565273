//! Which tools pass by the annotations of their server (`tools = "annotations"`).
//!
//! The list is read with the headers of the request that needs it, and kept for all callers of the route. A list that
//! cannot be read covers every tool.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, LazyLock},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, header, request::Parts};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{CALL_METHOD, MESSAGE_MEMBERS, event_stream, is_event_stream, pointers};
use crate::{
    fingerprint::{
        JsonPointer,
        json::{self, JsonLookup, NameEquality},
    },
    http::json_string,
    key::KeySource,
    policy::Policy,
};

/// How long a list is used.
const LIST_TTL: Duration = Duration::from_secs(60);
/// How long a list that could not be read is not requested again.
const LIST_RETRY_DELAY: Duration = Duration::from_secs(5);
/// The maximum number of pages of a list.
pub(crate) const MAX_LIST_PAGES: usize = 50;

const LIST_METHOD: &str = "tools/list";
const METHOD_HEADER: HeaderName = HeaderName::from_static("mcp-method");

static META: LazyLock<[JsonPointer; 1]> = LazyLock::new(|| pointers(["/params/_meta"]));
static PAGE_MEMBERS: LazyLock<[JsonPointer; 2]> = LazyLock::new(|| pointers(["/result/tools", "/result/nextCursor"]));

/// The names of tools that pass.
pub(crate) type PassingTools = Arc<HashSet<String>>;

/// The lists of all routes, by name.
#[derive(Debug, Default)]
pub(crate) struct ToolLists(Mutex<HashMap<String, (PassingTools, Instant)>>);

impl ToolLists {
    /// The list of a route, unless it is too old.
    pub(crate) fn find(&self, route: &str) -> Option<PassingTools> {
        let lists = self.0.lock();
        lists.get(route).filter(|(_, until)| *until > Instant::now()).map(|(list, _)| list.clone())
    }

    /// Keeps the list of a route. Without one, every tool is covered for a while.
    pub(crate) fn keep(&self, route: &str, list: Option<HashSet<String>>) -> PassingTools {
        let until = Instant::now() + if list.is_some() { LIST_TTL } else { LIST_RETRY_DELAY };
        let list = Arc::new(list.unwrap_or_default());
        self.0.lock().insert(route.to_owned(), (list.clone(), until));
        list
    }
}

/// The tool that a message calls. `None` for all other messages.
pub(crate) fn called_tool(body: &[u8]) -> Option<String> {
    let [method, _, name, ..] = json::find_all(body, &MESSAGE_MEMBERS, NameEquality::IgnoreCase)?;
    match (method, name) {
        (JsonLookup::String(method), JsonLookup::String(name)) if method == CALL_METHOD => Some(name.into_owned()),
        _ => None,
    }
}

/// The request for a page of the list, in the name of the caller of a tool.
pub(crate) fn list_request(policy: &Policy, parts: &Parts, call: &[u8], cursor: Option<&str>) -> Request<Bytes> {
    let meta = json::canonical_text(call, &META[0]).map(|meta| format!("\"_meta\":{meta}"));
    let cursor = cursor.map(|cursor| format!("\"cursor\":{}", json_string(cursor)));
    let params: Vec<String> = meta.into_iter().chain(cursor).collect();
    let params = params.join(",");
    let body =
        format!("{{\"jsonrpc\":\"2.0\",\"id\":\"ibid-tools\",\"method\":\"{LIST_METHOD}\",\"params\":{{{params}}}}}");
    let mut request = Request::new(Bytes::from(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = parts.uri.clone();
    *request.version_mut() = parts.version;
    *request.extensions_mut() = parts.extensions.clone();
    let is_of_call = |name: &HeaderName| {
        let name_text = name.as_str();
        name_text == "mcp-name"
            || name_text.starts_with("mcp-param-")
            || matches!(name_text, "transfer-encoding" | "expect" | "trailer" | "accept-encoding" | "content-encoding")
            || policy.key.from.contains(&KeySource::Header(name.clone()))
    };
    let mut headers: HeaderMap = HeaderMap::with_capacity(parts.headers.len());
    for (name, value) in parts.headers.iter().filter(|(name, _)| !is_of_call(name)) {
        headers.append(name, value.clone());
    }
    if headers.contains_key(METHOD_HEADER) {
        headers.insert(METHOD_HEADER, HeaderValue::from_static(LIST_METHOD));
    }
    headers.insert(header::CONTENT_LENGTH, request.body().len().into());
    *request.headers_mut() = headers;
    request
}

/// One page of a list: the tools that pass, and the cursor of the next page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ToolPage {
    pub(crate) passing: Vec<String>,
    pub(crate) next: Option<String>,
}

impl ToolPage {
    /// Returns `None` if the response has no list, or one that could be read in two ways.
    pub(crate) fn read(headers: &HeaderMap, body: Bytes) -> Option<Self> {
        let message = if is_event_stream(headers) { event_stream::find_response(&body)? } else { body };
        let [tools, next] = json::find_all(&message, &PAGE_MEMBERS, NameEquality::Exact)?;
        if tools == JsonLookup::Absent {
            return None;
        }
        let mut passing = Vec::new();
        for nth in 0.. {
            let members = ["name", "annotations/readOnlyHint", "annotations/idempotentHint"];
            let at = members.map(|member| format!("/result/tools/{nth}/{member}"));
            let at = pointers([&at[0], &at[1], &at[2]]);
            let [JsonLookup::String(name), hints @ ..] = json::find_all(&message, &at, NameEquality::Exact)? else {
                break;
            };
            if hints.contains(&JsonLookup::True) {
                passing.push(name.into_owned());
            }
        }
        let next = if let JsonLookup::String(next) = next { Some(next.into_owned()) } else { None };
        Some(Self { passing, next })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_pass_by_their_hints() {
        let page = |body: &'static str| ToolPage::read(&HeaderMap::new(), Bytes::from_static(body.as_bytes()));
        let listed = page(
            r#"{"id":1,"result":{"tools":[{"name":"pay"},{"name":"look","annotations":{"readOnlyHint":true}},
                {"name":"set","annotations":{"idempotentHint":true,"readOnlyHint":false}},
                {"name":"run","annotations":{"readOnlyHint":"true"}}],"nextCursor":"2"}}"#,
        );
        assert_eq!(listed, Some(ToolPage { passing: vec!["look".into(), "set".into()], next: Some("2".into()) }));
        assert_eq!(page(r#"{"id":1,"result":{"tools":[]}}"#), Some(ToolPage { passing: Vec::new(), next: None }));
        for unreadable in ["", r#"{"id":1,"error":{"code":-32600}}"#, r#"{"id":1,"result":{"tools":[],"tools":[]}}"#] {
            assert_eq!(page(unreadable), None, "{unreadable}");
        }
    }

    #[test]
    fn a_list_is_read_in_the_name_of_the_caller() {
        let call = br#"{"id":7,"method":"tools/call","params":{"name":"pay","arguments":{"a":1},"_meta":{"v":"2"}}}"#;
        assert_eq!(called_tool(call).as_deref(), Some("pay"));
        assert_eq!(called_tool(br#"{"id":7,"method":"ping"}"#), None);
        let (parts, ()) = Request::post("/mcp")
            .header("authorization", "Bearer a")
            .header("idempotency-key", "k1")
            .header("mcp-method", "tools/call")
            .header("mcp-name", "pay")
            .header("content-length", "99")
            .body(())
            .unwrap()
            .into_parts();
        let request = list_request(&Policy::mcp(), &parts, call, Some("p\"2"));
        let expected =
            r#"{"jsonrpc":"2.0","id":"ibid-tools","method":"tools/list","params":{"_meta":{"v":"2"},"cursor":"p\"2"}}"#;
        assert_eq!(request.body(), expected);
        let headers = request.headers();
        assert_eq!(
            (&headers["authorization"], &headers["mcp-method"]),
            (&"Bearer a".parse().unwrap(), &"tools/list".parse().unwrap())
        );
        assert!(!headers.contains_key("idempotency-key") && !headers.contains_key("mcp-name"));
        assert_eq!(headers["content-length"], expected.len().to_string());
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_is_kept_for_a_minute_and_a_failure_for_less() {
        let lists = ToolLists::default();
        assert!(lists.find("a").is_none());
        assert!(lists.keep("a", Some(HashSet::from(["look".to_owned()]))).contains("look"));
        tokio::time::advance(LIST_TTL - Duration::from_secs(1)).await;
        assert!(lists.find("a").is_some_and(|list| list.contains("look")) && lists.find("b").is_none());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(lists.find("a").is_none());
        assert!(lists.keep("a", None).is_empty() && lists.find("a").is_some());
        tokio::time::advance(LIST_RETRY_DELAY).await;
        assert!(lists.find("a").is_none());
    }
}
