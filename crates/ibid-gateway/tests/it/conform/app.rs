//! An operation to be checked, and a way to protect it by hand: right, or wrong in one way at a time.
//!
//! The app counts what it runs (`GET /count`), takes as long as `X-Slow` says in milliseconds, and fails with `X-Fail`.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpListener;

/// What a server does wrong.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ServerFaults {
    /// Looks whether the key is known, runs, and writes it down: two at once both run.
    pub(super) checks_then_writes: bool,
    /// A key is the same whoever sends it.
    pub(super) shares_callers: bool,
    /// And whatever is sent with it.
    pub(super) ignores_body: bool,
    /// Remembers the body only.
    pub(super) forgets_head: bool,
    /// A failure of the server is remembered like anything else.
    pub(super) keeps_failures: bool,
    /// Takes the first of two keys.
    pub(super) takes_first_key: bool,
    /// Stops working when its client has gone, and lets the next one run again.
    pub(super) stops_with_client: bool,
    /// Answers are all alike, and nothing says whether one is a replay.
    pub(super) hides_replays: bool,
    /// One answer for everybody.
    pub(super) ignores_keys: bool,
    /// Every answer is said to be a replay.
    pub(super) always_marks: bool,
    /// A replay sets the first answer's cookies.
    pub(super) keeps_cookies: bool,
    /// Another request under the key is refused, and takes its place.
    pub(super) forgets_on_mismatch: bool,
    /// Refusals are text.
    pub(super) refuses_in_plain_text: bool,
    /// Keys have at most 100 characters.
    pub(super) takes_short_keys: bool,
    /// A GET with a key is refused.
    pub(super) guards_get: bool,
    /// No fault: methods other than POST are not allowed, as most operations have it.
    pub(super) takes_post_only: bool,
    /// No fault: replays are JSON of the same value, written anew.
    pub(super) reserialises_replays: bool,
    /// No fault: callers are told apart by X-Tenant-Id, and the credential says nothing.
    pub(super) has_tenants: bool,
    /// Nothing is ever run: everything gets one answer.
    pub(super) is_static: bool,
}

/// The app, unprotected or with protection of its own.
pub(super) struct ConformApp {
    pub(super) addr: SocketAddr,
    state: Arc<ConformAppState>,
    task: tokio::task::JoinHandle<()>,
}

struct ConformAppState {
    executions: AtomicU64,
    /// `None`: somebody else protects it.
    faults: Option<ServerFaults>,
    known: Mutex<HashMap<String, ConformAppEntry>>,
}

#[derive(Clone)]
struct ConformAppEntry {
    fingerprint: Bytes,
    /// `None` while it runs.
    answer: Option<(http::response::Parts, Bytes)>,
}

type ConformAppResponse = Response<Full<Bytes>>;

impl ConformApp {
    pub(super) async fn start_unprotected() -> ConformApp {
        ConformApp::start(None).await
    }

    /// With protection as the draft has it, but for these faults.
    pub(super) async fn start_protected(faults: ServerFaults) -> ConformApp {
        ConformApp::start(Some(faults)).await
    }

    async fn start(faults: Option<ServerFaults>) -> ConformApp {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let state = Arc::new(ConformAppState { executions: AtomicU64::new(0), faults, known: Mutex::default() });
        let shared = Arc::clone(&state);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let state = Arc::clone(&shared);
                let service = service_fn(move |request| {
                    let state = Arc::clone(&state);
                    async move { Ok::<_, Infallible>(state.answer(request).await) }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        ConformApp { addr, state, task }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    pub(super) fn executions(&self) -> u64 {
        self.state.executions.load(Ordering::SeqCst)
    }
}

impl Drop for ConformApp {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ConformAppState {
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> ConformAppResponse {
        let (head, body) = request.into_parts();
        let Ok(body) = body.collect().await.map(http_body_util::Collected::to_bytes) else {
            return problem(400, "body");
        };
        match (&head.method, &self.faults) {
            (&Method::GET, _) if head.uri.path() == "/count" => {
                let count = self.executions.load(Ordering::SeqCst);
                json(200, &format!(r#"{{"ran":{{"times":{count}}}}}"#))
            }
            (&Method::GET, Some(faults)) if faults.guards_get && head.headers.contains_key("idempotency-key") => {
                problem(400, "no key here")
            }
            (_, Some(faults)) if faults.is_static => {
                let mut answer = json(200, r#"{"ok":true}"#);
                if faults.always_marks {
                    answer.headers_mut().insert("idempotent-replayed", HeaderValue::from_static("true"));
                }
                answer
            }
            (&Method::GET, _) => json(200, r#"{"all":[]}"#),
            (method, Some(faults)) if faults.takes_post_only && method != Method::POST => problem(405, "POST only"),
            (_, None) => self.execute(&head.headers).await,
            (_, Some(faults)) => {
                let faults = *faults;
                if faults.stops_with_client {
                    return self.protect(head, body, faults).await;
                }
                // Whoever hangs up does not cancel it.
                tokio::spawn(async move { self.protect(head, body, faults).await }).await.unwrap()
            }
        }
    }

    /// The operation itself.
    async fn execute(&self, headers: &HeaderMap) -> ConformAppResponse {
        let run = self.executions.fetch_add(1, Ordering::SeqCst) + 1;
        if let Some(slow) = headers.get("x-slow") {
            tokio::time::sleep(Duration::from_millis(slow.to_str().unwrap().parse().unwrap())).await;
        }
        if let Some(status) = headers.get("x-fail") {
            return json(status.to_str().unwrap().parse().unwrap(), &format!(r#"{{"error":"failed","run":{run}}}"#));
        }
        let silent = self.faults.is_some_and(|faults| faults.hides_replays);
        let id = if silent { 0 } else { run };
        let mut answer = json(201, &format!(r#"{{"id":{id},"amount":12345678901234567890.10}}"#));
        let headers = answer.headers_mut();
        headers.insert("location", format!("/payments/{id}").parse().unwrap());
        headers.insert("etag", format!("\"{id}\"").parse().unwrap());
        if !silent {
            headers.insert("set-cookie", "session=abc".parse().unwrap());
        }
        if self.faults.is_some_and(|faults| faults.always_marks) {
            headers.insert("idempotent-replayed", "true".parse().unwrap());
        }
        answer
    }

    async fn protect(&self, head: http::request::Parts, body: Bytes, faults: ServerFaults) -> ConformAppResponse {
        let mut keys = head.headers.get_all("idempotency-key").iter();
        let Some(key) = keys.next() else { return self.execute(&head.headers).await };
        if keys.next().is_some() && !faults.takes_first_key {
            return problem(400, "two keys");
        }
        let key = match ibid::key::extract_key(key.as_bytes()) {
            Ok(_) if faults.ignores_keys => "the same".into(),
            Ok(key) if key.len() <= if faults.takes_short_keys { 100 } else { 255 } => key,
            _ if faults.refuses_in_plain_text => {
                return Response::builder().status(400).body(Full::new("no".into())).unwrap();
            }
            _ => return problem(400, "no key"),
        };
        let name = if faults.has_tenants { "x-tenant-id" } else { "authorization" };
        let caller = if faults.shares_callers { None } else { head.headers.get(name) };
        let place = format!("{key} of {caller:?}");
        let part =
            if faults.ignores_body { Bytes::new() } else { format!("{} {} {body:?}", head.method, head.uri).into() };
        if let Some(answer) = self.known(&place, &part, faults) {
            return answer;
        }
        let mut guard = ForgetOnDrop { state: self, entry_key: &place, is_armed: true };
        let answer = self.execute(&head.headers).await;
        guard.is_armed = false;
        let (parts, body) = answer.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let keeps = faults.keeps_failures || !parts.status.is_server_error();
        let mut known = self.known.lock();
        match keeps {
            true => drop(known.insert(
                place.clone(),
                ConformAppEntry { fingerprint: part, answer: Some((parts.clone(), body.clone())) },
            )),
            false => drop(known.remove(&place)),
        }
        Response::from_parts(parts, Full::new(body))
    }

    /// What a key that is known gets. One that is not is known from now on, unless it is only looked at.
    fn known(&self, place: &str, part: &Bytes, faults: ServerFaults) -> Option<ConformAppResponse> {
        let mut known = self.known.lock();
        let Some(entry) = known.get(place) else {
            if !faults.checks_then_writes {
                known.insert(place.to_owned(), ConformAppEntry { fingerprint: part.clone(), answer: None });
            }
            return None;
        };
        if entry.fingerprint != *part {
            if faults.forgets_on_mismatch {
                known.remove(place);
            }
            return Some(problem(422, "another request"));
        }
        let Some((parts, body)) = &entry.answer else {
            if faults.refuses_in_plain_text {
                return Some(Response::builder().status(409).body(Full::new("busy".into())).unwrap());
            }
            let mut busy = problem(409, "still running");
            busy.headers_mut().insert("retry-after", HeaderValue::from_static("1"));
            return Some(busy);
        };
        if faults.forgets_head {
            return Some(Response::new(Full::new(body.clone())));
        }
        let mut parts = parts.clone();
        if !faults.keeps_cookies {
            parts.headers.remove("set-cookie");
        }
        if !faults.hides_replays {
            parts.headers.insert("idempotent-replayed", HeaderValue::from_static("true"));
        }
        let body = match faults.reserialises_replays {
            true => reserialise(body),
            false => body.clone(),
        };
        Some(Response::from_parts(parts, Full::new(body)))
    }
}

/// The members of an object in another order, and in another layout.
fn reserialise(body: &[u8]) -> Bytes {
    let text = std::str::from_utf8(body).unwrap();
    let members: Vec<&str> = text.trim_matches(['{', '}']).split(',').rev().collect();
    format!("{{ {} }}\n", members.join(",\n  ").replace(':', ": ")).into()
}

/// Forgets a key whose request was dropped in the middle.
struct ForgetOnDrop<'a> {
    state: &'a ConformAppState,
    entry_key: &'a str,
    is_armed: bool,
}

impl Drop for ForgetOnDrop<'_> {
    fn drop(&mut self) {
        if self.is_armed {
            self.state.known.lock().remove(self.entry_key);
        }
    }
}

fn json(status: u16, body: &str) -> ConformAppResponse {
    let answer = Response::builder().status(status).header("content-type", "application/json");
    answer.body(Full::new(body.to_owned().into())).unwrap()
}

fn problem(status: u16, title: &str) -> ConformAppResponse {
    let body = format!(
        r#"{{"type":"https://example.com/keys","title":"{title}","status":{status},"detail":"{title}: see the page"}}"#
    );
    let answer = Response::builder().status(status).header("content-type", "application/problem+json");
    answer.body(Full::new(body.into())).unwrap()
}
