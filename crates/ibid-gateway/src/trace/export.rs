//! Spans on their way to the collector: OTLP over HTTP, in its JSON form. Gathered for a second, sent together, never waited for.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http::{HeaderValue, Request, header};
use http_body_util::{BodyExt as _, Limited};
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout, timeout_at},
};

use super::ids::{Place, written};
use crate::{
    config::{Collector, Trace},
    live::Live,
    proxy::Body,
    tls,
    upstream::{self, Affinity, Care, Upstream},
};

/// Spans that wait; more are dropped.
const MOST: usize = 8192;
/// Spans in one request to the collector.
const TOGETHER: usize = 512;
/// How long a span may wait for others.
const GATHER: Duration = Duration::from_secs(1);
/// How long the collector may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is said that it does not take them.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// Takes spans to a collector.
#[derive(Clone)]
pub struct Tracer {
    spans: mpsc::Sender<Item>,
    dropped: Arc<AtomicU64>,
}

enum Item {
    Span(Box<Span>),
    /// Tell when everything before has been sent.
    Flush(oneshot::Sender<()>),
}

/// What a span is to its trace.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Server = 2,
    Client = 3,
}

/// A span that has ended.
pub(super) struct Span {
    place: Place,
    parent: Option<[u8; 8]>,
    name: String,
    kind: Kind,
    start: SystemTime,
    end: SystemTime,
    attributes: Vec<Value>,
    pub(super) link: Option<Place>,
    pub(super) failed: bool,
}

impl Tracer {
    /// Starts a task that sends.
    pub fn start(live: Arc<Live>) -> Self {
        let (spans, waiting) = mpsc::channel(MOST);
        let dropped = Arc::new(AtomicU64::new(0));
        tokio::spawn(send_all(live, waiting, dropped.clone()));
        Self { spans, dropped }
    }

    pub(super) fn tell(&self, span: Span) {
        if self.spans.try_send(Item::Span(Box::new(span))).is_err() {
            self.dropped.fetch_add(1, Relaxed);
        }
    }

    /// Returns once what was told so far was sent, or given up.
    pub async fn flushed(&self) {
        let (done, is_done) = oneshot::channel();
        let flush = async {
            if self.spans.send(Item::Flush(done)).await.is_ok() {
                let _ = is_done.await;
            }
        };
        let _ = timeout(PATIENCE, flush).await;
    }
}

async fn send_all(live: Arc<Live>, mut waiting: mpsc::Receiver<Item>, dropped: Arc<AtomicU64>) {
    let (mut said, mut told_of): (Option<Instant>, u64) = (None, 0);
    while let Some(first) = waiting.recv().await {
        let (mut spans, mut flushed) = (Vec::new(), None);
        let until = Instant::now() + GATHER;
        let mut item = Some(first);
        loop {
            match item {
                Some(Item::Span(span)) => spans.push(span),
                Some(Item::Flush(done)) => flushed = Some(done),
                None => {}
            }
            if spans.len() >= TOGETHER || flushed.is_some() {
                break;
            }
            match timeout_at(until, waiting.recv()).await {
                Ok(Some(next)) => item = Some(next),
                Ok(None) | Err(_) => break,
            }
        }
        let mut why = None;
        let Some(to) = live.now().collector.clone() else { return };
        if !spans.is_empty()
            && let Err(failed) = timeout(PATIENCE, to.take(&spans)).await.unwrap_or_else(|_| Err(slow()))
        {
            dropped.fetch_add(spans.len() as u64, Relaxed);
            why = Some(failed);
        }
        let lost = dropped.load(Relaxed);
        if lost > told_of && said.is_none_or(|said| said.elapsed() > SAY_AGAIN) {
            (said, told_of) = (Some(Instant::now()), lost);
            let why =
                why.map_or_else(|| "it does not take them as fast as they come".to_owned(), |why| why.to_string());
            tracing::warn!(collector = %to.named, %why, dropped = lost, "traces cannot be sent; spans are dropped");
        }
        if let Some(done) = flushed {
            let _ = done.send(());
        }
    }
}

fn slow() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {PATIENCE:?}"))
}

/// A collector, and how it is reached.
pub(crate) struct Collecting {
    named: Collector,
    server: Arc<Upstream<Body>>,
}

impl Collecting {
    /// Connects nothing yet.
    ///
    /// # Errors
    /// If its certificates make no sense.
    pub(crate) fn new(trace: &Trace) -> Result<Self, String> {
        let client = upstream::Settings {
            max_connections: 1,
            connect_timeout: PATIENCE,
            tls: tls::towards("trace.", trace.ca.as_ref(), trace.identity.as_ref())?,
            ..upstream::Settings::default()
        };
        let target = trace.collector.origin().parse().map_err(|why| format!("trace.otlp: {why}"))?;
        let server = Upstream::new(target, client).map_err(|why| format!("trace.otlp: {why}"))?;
        Ok(Self { named: trace.collector.clone(), server })
    }

    async fn take(&self, spans: &[Box<Span>]) -> io::Result<()> {
        let body = Body::whole(Bytes::from(message(spans).to_string()), None);
        let mut request = Request::post(self.named.path()).body(body).map_err(io::Error::other)?;
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let affinity = Affinity::default();
        let answer = self.server.send(request, Care::Plain, &affinity).await;
        let answer = answer.map_err(|why| io::Error::other(why.to_string()))?;
        let status = answer.status();
        let said = Limited::new(answer.into_body(), 64 << 10).collect().await;
        if status.is_success() {
            return Ok(());
        }
        let said = said.map(|said| String::from_utf8_lossy(&said.to_bytes()).into_owned()).unwrap_or_default();
        Err(io::Error::other(format!("it says {status}: {}", said.chars().take(200).collect::<String>())))
    }
}

/// `ExportTraceServiceRequest`.
fn message(spans: &[Box<Span>]) -> Value {
    let version = env!("CARGO_PKG_VERSION");
    let spans: Vec<_> = spans.iter().map(|span| span.json()).collect();
    json!({ "resourceSpans": [{
        "resource": { "attributes": [text("service.name", "ibid"), text("service.version", version)] },
        "scopeSpans": [{ "scope": { "name": "ibid", "version": version }, "spans": spans }],
    }] })
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

impl Span {
    pub(super) fn new(
        place: Place, parent: Option<[u8; 8]>, name: String, kind: Kind, start: SystemTime, end: SystemTime,
    ) -> Self {
        Self { place, parent, name, kind, start, end, attributes: Vec::new(), link: None, failed: false }
    }

    pub(super) fn text(&mut self, key: &str, value: Option<String>) {
        self.attributes.extend(value.map(|value| text(key, &value)));
    }

    pub(super) fn number(&mut self, key: &str, value: Option<i64>) {
        // 64 bits are texts in JSON.
        self.attributes.extend(value.map(|value| json!({ "key": key, "value": { "intValue": value.to_string() } })));
    }

    fn json(&self) -> Value {
        let nanos = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string();
        let links: Vec<_> =
            self.link.iter().map(|to| json!({ "traceId": written(&to.trace), "spanId": written(&to.span) })).collect();
        json!({
            "traceId": written(&self.place.trace),
            "spanId": written(&self.place.span),
            "parentSpanId": self.parent.map(|parent| written(&parent)).unwrap_or_default(),
            "flags": 1,
            "name": self.name,
            "kind": self.kind as u8,
            "startTimeUnixNano": nanos(self.start),
            "endTimeUnixNano": nanos(self.end.max(self.start)),
            "attributes": self.attributes,
            "links": links,
            "status": if self.failed { json!({ "code": 2 }) } else { json!({}) },
        })
    }
}
