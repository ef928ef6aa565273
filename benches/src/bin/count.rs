//! Operations in process, without sockets: a fixed number of them, to have their instructions counted from outside.
//!
//! `count MODE N` runs the operation of [`MODES`] N times and prints nothing. What is set up before does not depend on
//! N, so that two runs with N and 2N differ by N operations; `scripts/bench` does that under callgrind.
//! `count ratios` compares fingerprints with plain SHA-256 of the same body by the clock, in alternating batches, for
//! several sizes and shapes of JSON.
//! `count sha` says how SHA-256 is computed where it runs: valgrind may not know the processor's own instructions.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    hint::black_box,
    process::ExitCode,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::Full;
use ibid::{
    CheckedPolicy, Decision, Engine, Ibid, Operation, Policy, RunOutcome, Scope,
    engine::CompletedAnswer,
    http::{IbidService, RequestBody},
    observe::NoopObserver,
    store::{ClaimRequest, ClaimToken, Fingerprint, Lease, Memory, RecordSummary, Tags},
};
use ibid_bench::wire::json_body;
use ibid_gateway::metrics::MetricsObserver;
use sha2::{Digest, Sha256};
use tower_layer::Layer;
use tower_service::Service;

/// What can be run; sizes are those of the JSON body.
const MODES: &[(&str, CountedRun)] = &[
    ("inner", |n| block_on(app_only(n))),
    ("service-miss", |n| block_on(service_miss(n, service()))),
    ("service-miss-counted", |n| block_on(service_miss(n, counted_service()))),
    ("service-replay", |n| block_on(service_replay(n))),
    ("engine-miss", |n| block_on(engine_miss(n))),
    ("engine-replay", |n| block_on(engine_replay(n))),
    ("fingerprint-300", |n| fingerprints(n, 300)),
    ("fingerprint-1024", |n| fingerprints(n, 1024)),
    ("fingerprint-16384", |n| fingerprints(n, 16384)),
    ("sha256-300", |n| hash_bodies(n, 300)),
    ("sha256-1024", |n| hash_bodies(n, 1024)),
    ("sha256-16384", |n| hash_bodies(n, 16384)),
];

type CountedRun = fn(u64);

/// Keys that replays take turns with.
const REPLAYED_KEYS: u64 = 256;
/// Of the request and of the answer, in all modes that have no size of their own.
const BODY_BYTES: usize = 300;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["ratios"] => print_ratios(),
        ["sha"] => println!("{}", sha_implementation()),
        [mode, count] => match (MODES.iter().find(|(name, _)| *name == mode), count.parse()) {
            (Some((_, run)), Ok(count)) => run(count),
            _ => return usage(),
        },
        _ => return usage(),
    }
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    let modes: Vec<_> = MODES.iter().map(|(name, _)| *name).collect();
    eprintln!("count MODE N | count ratios | count sha; modes: {}", modes.join(" "));
    ExitCode::FAILURE
}

fn sha_implementation() -> &'static str {
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
    fn new(size: usize) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_static("127.0.0.1:8080"));
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("Bearer bench"));
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::CONTENT_LENGTH, size.into());
        Self { headers, body: json_body(size).into() }
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
    let requests = RequestFactory::new(BODY_BYTES);
    let mut app = InstantApp(json_body(BODY_BYTES).into());
    for serial in 0..count {
        let request = requests.with_key(serial).map(RequestBody::untouched);
        let _ = black_box(app.call(request).await);
    }
}

fn service() -> IbidService<InstantApp> {
    let ibid = Ibid::new(Arc::new(Memory::default()));
    ibid.layer(Policy::ietf()).expect("a preset").layer(InstantApp(json_body(BODY_BYTES).into()))
}

/// The same with the metrics of the gateway.
fn counted_service() -> IbidService<InstantApp> {
    let ibid = Ibid::builder(Arc::new(Memory::default())).observer(MetricsObserver::new(NoopObserver)).build();
    ibid.layer(Policy::ietf()).expect("a preset").layer(InstantApp(json_body(BODY_BYTES).into()))
}

async fn send_request(service: &mut IbidService<InstantApp>, request: Request<Full<Bytes>>) {
    let answer = service.call(request).await.unwrap_or_else(|never| match never {});
    assert_eq!(answer.status(), StatusCode::CREATED);
    black_box(answer);
}

async fn service_miss(count: u64, mut service: IbidService<InstantApp>) {
    let requests = RequestFactory::new(BODY_BYTES);
    for serial in 0..count {
        send_request(&mut service, requests.with_key(serial)).await;
    }
    // What it costs to give a whole store back is no operation's.
    std::mem::forget(service);
}

async fn service_replay(count: u64) {
    let (requests, mut service) = (RequestFactory::new(BODY_BYTES), service());
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

fn fingerprints(count: u64, size: usize) {
    let (requests, policy, uri) = (RequestFactory::new(size), Policy::ietf(), Uri::from_static("/orders"));
    for _ in 0..count {
        black_box(Fingerprint::of(&policy, &Method::POST, &uri, &requests.headers, black_box(&requests.body)));
    }
}

fn hash_bodies(count: u64, size: usize) {
    let body = json_body(size);
    for _ in 0..count {
        black_box(Sha256::digest(black_box(body.as_bytes())));
    }
}

/// How a client writes JSON.
#[derive(Clone, Copy)]
enum JsonShape {
    /// Members sorted, no spaces: already canonical.
    Sorted,
    /// Members unsorted, no spaces, as in all other modes.
    Unsorted,
    /// Members unsorted, a space after each colon and comma.
    Spaced,
}

impl JsonShape {
    const ALL: [(&str, Self); 3] =
        [("sorted", Self::Sorted), ("unsorted", Self::Unsorted), ("unsorted, with spaces", Self::Spaced)];

    /// The order of [`json_body`] in this shape.
    fn body(self, bytes: usize) -> String {
        let (open, comma, close, end) = match self {
            Self::Sorted => (r#"{"currency":"EUR","lines":["#, ",", r#"],"note":""#, r#"","order":"o-1"}"#),
            Self::Unsorted => return json_body(bytes),
            Self::Spaced => (r#"{"order": "o-1", "lines": ["#, ", ", r#"], "currency": "EUR", "note": ""#, r#""}"#),
        };
        let mut body = open.to_owned();
        for line in 1_u32.. {
            let (price, quantity) = (line * 37, line % 9 + 1);
            let item = match self {
                Self::Spaced => {
                    format!(r#"{{"sku": "A-{line:05}", "quantity": {quantity}, "price": {price}, "gift": false}}"#)
                }
                _ => format!(r#"{{"gift":false,"price":{price},"quantity":{quantity},"sku":"A-{line:05}"}}"#),
            };
            if body.len() + comma.len() + item.len() + close.len() + end.len() > bytes {
                break;
            }
            body += if line == 1 { "" } else { comma };
            body += &item;
        }
        body += close;
        let padding = bytes - body.len() - end.len();
        body + &"x".repeat(padding) + end
    }
}

/// The fastest of many short batches, taken in turns: what disturbs one disturbs the other.
fn print_ratios() {
    const BATCHES: u32 = 400;
    let batch = Duration::from_micros(500);
    println!(
        "| JSON body | members | fingerprint | SHA-256 ({}) | ratio |\n|---|---|---|---|---|",
        sha_implementation()
    );
    for size in [300, 1024, 16 << 10, 1 << 20] {
        for (name, shape) in JsonShape::ALL {
            let (requests, body) = (RequestFactory::new(size), shape.body(size));
            let (policy, uri) = (Policy::ietf(), Uri::from_static("/orders"));
            let print = || {
                let body = black_box(body.as_bytes());
                black_box(Fingerprint::of(&policy, &Method::POST, &uri, &requests.headers, body));
            };
            let sha = || {
                black_box(Sha256::digest(black_box(body.as_bytes())));
            };
            let (prints, shas) = (batch_size(batch, &print), batch_size(batch, &sha));
            let (mut print_took, mut sha_took) = (Duration::MAX, Duration::MAX);
            for _ in 0..BATCHES {
                print_took = print_took.min(timed(prints, &print));
                sha_took = sha_took.min(timed(shas, &sha));
            }
            let print = print_took.as_secs_f64() * 1e9 / f64::from(prints);
            let sha = sha_took.as_secs_f64() * 1e9 / f64::from(shas);
            println!("| {size} B | {name} | {print:.0} ns | {sha:.0} ns | {:.2} |", print / sha);
        }
    }
}

fn timed(count: u32, run: &impl Fn()) -> Duration {
    let start = Instant::now();
    (0..count).for_each(|_| run());
    start.elapsed()
}

/// How many runs take at least as long as a batch.
fn batch_size(batch: Duration, run: &impl Fn()) -> u32 {
    (0..31).map(|n| 1 << n).find(|count| timed(*count, run) > batch).unwrap_or(1)
}
