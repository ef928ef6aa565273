//! Operations in process, without sockets: a fixed number of them, to have their cost counted from outside.
//!
//! What is set up before does not depend on their number, so that runs of N and of 2N operations differ by N operations.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    hint::black_box,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::Full;
use ibid::{
    CheckedPolicy, Decision, Engine, Ibid, Operation, Policy, RunOutcome, Scope,
    engine::CompletedAnswer,
    http::{IbidService, RequestBody},
    store::{ClaimRequest, ClaimToken, Fingerprint, Lease, Memory, RecordSummary, Tags},
};
use sha2::{Digest, Sha256};
use tower_layer::Layer;
use tower_service::Service;

use crate::{json_body, sorted_json_body};

/// What can be run; sizes are those of the JSON body.
pub const MODES: &[(&str, CountedRun)] = &[
    ("inner", |n| block_on(app_only(n))),
    ("service-miss", |n| first_requests(n, &Ibid::new(Arc::new(Memory::default())))),
    ("service-replay", |n| block_on(service_replay(n))),
    ("engine-miss", |n| block_on(engine_miss(n))),
    ("engine-replay", |n| block_on(engine_replay(n))),
    ("fingerprint-300", |n| fingerprints(n, &json_body(300))),
    ("fingerprint-1024", |n| fingerprints(n, &json_body(1024))),
    ("fingerprint-16384", |n| fingerprints(n, &json_body(16384))),
    ("fingerprint-sorted-300", |n| fingerprints(n, &sorted_json_body(300))),
    ("fingerprint-sorted-1024", |n| fingerprints(n, &sorted_json_body(1024))),
    ("fingerprint-sorted-16384", |n| fingerprints(n, &sorted_json_body(16384))),
    ("sha256-300", |n| hash_bodies(n, &json_body(300))),
    ("sha256-1024", |n| hash_bodies(n, &json_body(1024))),
    ("sha256-16384", |n| hash_bodies(n, &json_body(16384))),
];

/// Runs an operation so many times.
pub type CountedRun = fn(u64);

/// Keys that replays take turns with.
const REPLAYED_KEYS: u64 = 256;
/// Of the request and of the answer, in all modes that have no size of their own.
const BODY_BYTES: usize = 300;

/// How SHA-256 is computed where this runs: valgrind may not know the processor's own instructions.
#[must_use]
pub fn sha_implementation() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    let by_processor = std::arch::is_x86_feature_detected!("sha");
    #[cfg(target_arch = "aarch64")]
    let by_processor = std::arch::is_aarch64_feature_detected!("sha2");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let by_processor = false;
    if by_processor { "hardware" } else { "software" }
}

fn block_on<F: Future<Output = ()>>(work: F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime without threads").block_on(work);
}

/// An app that answers at once.
#[derive(Clone)]
struct InstantApp(Bytes);

impl<B> Service<Request<B>> for InstantApp {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        let mut answer = Response::new(Full::new(self.0.clone()));
        *answer.status_mut() = StatusCode::CREATED;
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        ready(Ok(answer))
    }
}

/// The requests of the load generator, in process.
struct RequestFactory {
    headers: HeaderMap,
    body: Bytes,
}

impl RequestFactory {
    fn new(body: &str) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_static("127.0.0.1:8080"));
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("Bearer bench"));
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::CONTENT_LENGTH, body.len().into());
        Self { headers, body: Bytes::copy_from_slice(body.as_bytes()) }
    }

    fn with_key(&self, serial: u64) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static("/orders");
        *request.headers_mut() = self.headers.clone();
        let key = HeaderValue::from_str(&key(serial)).expect("hex digits");
        request.headers_mut().insert("idempotency-key", key);
        request
    }
}

fn key(serial: u64) -> String {
    format!("{serial:032x}")
}

/// What is not the layer's: making a request, and the app.
async fn app_only(count: u64) {
    let requests = RequestFactory::new(&json_body(BODY_BYTES));
    let mut app = InstantApp(json_body(BODY_BYTES).into());
    for serial in 0..count {
        let request = requests.with_key(serial).map(RequestBody::untouched);
        let _ = black_box(app.call(request).await);
    }
}

fn service(ibid: &Ibid) -> IbidService<InstantApp> {
    ibid.layer(Policy::ietf()).expect("a preset").layer(InstantApp(json_body(BODY_BYTES).into()))
}

/// First requests through a layer of `ibid`.
pub fn first_requests(count: u64, ibid: &Ibid) {
    block_on(service_miss(count, service(ibid)));
}

async fn send_request(service: &mut IbidService<InstantApp>, request: Request<Full<Bytes>>) {
    let answer = service.call(request).await.unwrap_or_else(|never| match never {});
    assert_eq!(answer.status(), StatusCode::CREATED);
    black_box(answer);
}

async fn service_miss(count: u64, mut service: IbidService<InstantApp>) {
    let requests = RequestFactory::new(&json_body(BODY_BYTES));
    for serial in 0..count {
        send_request(&mut service, requests.with_key(serial)).await;
    }
    // What it costs to give a whole store back is no operation's.
    std::mem::forget(service);
}

async fn service_replay(count: u64) {
    let (requests, mut service) =
        (RequestFactory::new(&json_body(BODY_BYTES)), service(&Ibid::new(Arc::new(Memory::default()))));
    for serial in (0..REPLAYED_KEYS).chain((0..count).map(|serial| serial % REPLAYED_KEYS)) {
        send_request(&mut service, requests.with_key(serial)).await;
    }
    // What it costs to give a whole store back is no operation's.
    std::mem::forget(service);
}

/// An operation that has its answer already.
struct CompletedOperation(Bytes);

impl ibid::Claimant for CompletedOperation {}

impl Operation for CompletedOperation {
    type Answer = ();

    async fn run(&mut self, _: Option<&Lease>) -> RunOutcome<()> {
        let record = std::mem::take(&mut self.0);
        RunOutcome::Complete((), CompletedAnswer { failed: false, record, summary: RecordSummary::default() })
    }
}

struct EngineBench {
    engine: Engine,
    policy: CheckedPolicy,
    scope: Scope,
    tags: Tags,
    record: Bytes,
}

impl EngineBench {
    fn new() -> Self {
        Self {
            engine: Engine::new(Arc::new(Memory::default())),
            policy: Policy::ietf().checked().expect("a preset"),
            scope: Scope::from_parts(&["bench"]),
            tags: Tags::new("", "", "POST /orders", "0000****0000"),
            record: json_body(BODY_BYTES).into(),
        }
    }

    async fn execute(&self, serial: u64) -> Decision<()> {
        let ask = ClaimRequest {
            address: self.scope.address(&key(serial), None, None),
            token: ClaimToken::mint(),
            fingerprint: Fingerprint::NONE,
            tags: self.tags.clone(),
            label: Bytes::new(),
            lease: self.policy.lease,
            ttl: self.policy.ttl,
            take_over: None,
        };
        self.engine.execute(self.policy.terms(), ask, CompletedOperation(self.record.clone())).await
    }
}

async fn engine_miss(count: u64) {
    let asks = EngineBench::new();
    for serial in 0..count {
        assert!(matches!(asks.execute(serial).await, Decision::Ran(..)));
    }
    std::mem::forget(asks);
}

async fn engine_replay(count: u64) {
    let asks = EngineBench::new();
    for serial in 0..REPLAYED_KEYS {
        assert!(matches!(asks.execute(serial).await, Decision::Ran(..)));
    }
    for serial in 0..count {
        assert!(matches!(asks.execute(serial % REPLAYED_KEYS).await, Decision::Replay(..)));
    }
}

/// Fingerprints of requests with this body.
pub fn fingerprints(count: u64, body: &str) {
    let (requests, policy, uri) = (RequestFactory::new(body), Policy::ietf(), Uri::from_static("/orders"));
    for _ in 0..count {
        black_box(Fingerprint::of(&policy, &Method::POST, &uri, &requests.headers, black_box(&requests.body)));
    }
}

/// The plain SHA-256 of a body.
pub fn hash_bodies(count: u64, body: &str) {
    for _ in 0..count {
        black_box(Sha256::digest(black_box(body.as_bytes())));
    }
}
