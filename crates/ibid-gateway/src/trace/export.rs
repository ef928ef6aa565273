//! Exports spans to the collector as OTLP/JSON over HTTP, batched for up to a second. Requests never wait for it.

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use data_encoding::HEXLOWER;
use http::{HeaderValue, Request, header};
use ibid::store::ClaimToken;
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout, timeout_at},
};

use super::SpanContext;
use crate::{
    config::{Collector, TraceSettings},
    outbound::OutboundClient,
    watch::LiveConfig,
};

/// Spans in the queue; more are dropped.
const MAX_QUEUED_SPANS: usize = 8192;
const MAX_SPANS_PER_EXPORT: usize = 512;
/// How long a span waits for a batch.
const EXPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Time limit of one export request, and of a flush.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time between two warnings about dropped spans.
const DROP_WARNING_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub struct Tracer {
    spans: mpsc::Sender<ExportItem>,
    dropped: Arc<AtomicU64>,
}

enum ExportItem {
    Span(Box<FinishedSpan>),
    /// Signals that all earlier spans are exported or dropped.
    Flush(oneshot::Sender<()>),
}

/// The values of OTLP's `SpanKind`.
#[derive(Clone, Copy)]
pub(super) enum SpanKind {
    Server = 2,
    Client = 3,
}

/// Written as JSON by the exporter, not while a request waits.
enum AttributeValue {
    Text(String),
    Number(i64),
}

pub(super) struct FinishedSpan {
    context: SpanContext,
    parent: Option<[u8; 8]>,
    name: String,
    kind: SpanKind,
    start: SystemTime,
    end: SystemTime,
    attributes: Vec<(&'static str, AttributeValue)>,
    pub(super) link: Option<SpanContext>,
    pub(super) failed: bool,
}

impl Tracer {
    pub fn start(live: Arc<LiveConfig>) -> Self {
        let (spans, waiting) = mpsc::channel(MAX_QUEUED_SPANS);
        let dropped = Arc::new(AtomicU64::new(0));
        tokio::spawn(run_exporter(live, waiting, dropped.clone()));
        Self { spans, dropped }
    }

    pub(super) fn submit(&self, span: FinishedSpan) {
        if self.spans.try_send(ExportItem::Span(Box::new(span))).is_err() {
            self.dropped.fetch_add(1, Relaxed);
        }
    }

    /// Waits until all queued spans are exported or dropped, at most `EXPORT_TIMEOUT`.
    pub async fn flush(&self) {
        let (done, is_done) = oneshot::channel();
        let flush = async {
            if self.spans.send(ExportItem::Flush(done)).await.is_ok() {
                let _ = is_done.await;
            }
        };
        let _ = timeout(EXPORT_TIMEOUT, flush).await;
    }
}

async fn run_exporter(live: Arc<LiveConfig>, mut waiting: mpsc::Receiver<ExportItem>, dropped: Arc<AtomicU64>) {
    let (mut said, mut told_of): (Option<Instant>, u64) = (None, 0);
    while let Some(first) = waiting.recv().await {
        let (mut spans, mut flushed) = (Vec::new(), None);
        let until = Instant::now() + EXPORT_INTERVAL;
        let mut item = Some(first);
        while let Some(next) = item {
            match next {
                ExportItem::Span(span) => spans.push(span),
                ExportItem::Flush(done) => flushed = Some(done),
            }
            if spans.len() >= MAX_SPANS_PER_EXPORT || flushed.is_some() {
                break;
            }
            item = timeout_at(until, waiting.recv()).await.ok().flatten();
        }
        let Some(to) = live.now().collector.clone() else { return };
        let mut why = "it does not take them as fast as they come".to_owned();
        if !spans.is_empty()
            && let Err(failed) = timeout(EXPORT_TIMEOUT, to.export(&spans))
                .await
                .unwrap_or_else(|_| Err(format!("no answer within {EXPORT_TIMEOUT:?}")))
        {
            dropped.fetch_add(spans.len() as u64, Relaxed);
            why = failed;
        }
        let lost = dropped.load(Relaxed);
        if lost > told_of && said.is_none_or(|said| said.elapsed() > DROP_WARNING_INTERVAL) {
            (said, told_of) = (Some(Instant::now()), lost);
            tracing::warn!(collector = %to.collector, %why, dropped = lost, "traces cannot be sent; spans are dropped");
        }
        if let Some(done) = flushed {
            let _ = done.send(());
        }
    }
}

pub(crate) struct OtlpExporter {
    collector: Collector,
    server: OutboundClient,
    /// The attributes of all spans of this process.
    resource: Vec<Value>,
}

/// Distinguishes the gateways of one service. New at every start.
static INSTANCE_ID: LazyLock<String> = LazyLock::new(|| HEXLOWER.encode(&ClaimToken::mint().0));

impl OtlpExporter {
    /// Prepares the client; it connects on first use.
    pub(crate) fn new(trace: &TraceSettings) -> Result<Self, String> {
        let server = OutboundClient::new(&trace.collector.origin(), ("trace", "otlp"), &trace.tls, EXPORT_TIMEOUT)?;
        let fixed = [("service.version", env!("CARGO_PKG_VERSION")), ("service.instance.id", &INSTANCE_ID)];
        let named = trace.resource.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let is_set = |name: &str| trace.resource.iter().any(|(known, _)| known == name);
        let resource = named.chain(fixed.into_iter().filter(|(name, _)| !is_set(name)));
        let resource = resource.map(|(name, value)| text_attribute(name, value)).collect();
        Ok(Self { collector: trace.collector.clone(), server, resource })
    }

    async fn export(&self, spans: &[Box<FinishedSpan>]) -> Result<(), String> {
        let body = Bytes::from(export_request(&self.resource, spans).to_string());
        let mut request = Request::post(self.collector.path.as_str()).body(body).map_err(|why| why.to_string())?;
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let answer = self.server.send(request, 1 << 20).await.map_err(|why| why.to_string())?;
        if answer.status().is_success() {
            return Ok(());
        }
        let said: String = String::from_utf8_lossy(answer.body()).chars().take(200).collect();
        Err(format!("it says {}: {said}", answer.status()))
    }
}

fn export_request(resource: &[Value], spans: &[Box<FinishedSpan>]) -> Value {
    let version = env!("CARGO_PKG_VERSION");
    let spans: Vec<_> = spans.iter().map(|span| span.to_json()).collect();
    json!({ "resourceSpans": [{
        "resource": { "attributes": resource },
        "scopeSpans": [{ "scope": { "name": "ibid", "version": version }, "spans": spans }],
    }] })
}

fn text_attribute(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

impl FinishedSpan {
    pub(super) fn new(
        context: SpanContext, parent: Option<[u8; 8]>, name: String, kind: SpanKind, start: SystemTime, end: SystemTime,
    ) -> Self {
        Self { context, parent, name, kind, start, end, attributes: Vec::new(), link: None, failed: false }
    }

    pub(super) fn set_text(&mut self, key: &'static str, value: Option<String>) {
        self.attributes.extend(value.map(|value| (key, AttributeValue::Text(value))));
    }

    pub(super) fn set_number(&mut self, key: &'static str, value: Option<i64>) {
        self.attributes.extend(value.map(|value| (key, AttributeValue::Number(value))));
    }

    fn to_json(&self) -> Value {
        let nanos = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string();
        let links: Vec<_> = self
            .link
            .iter()
            .map(|to| json!({ "traceId": HEXLOWER.encode(&to.trace_id), "spanId": HEXLOWER.encode(&to.span_id) }))
            .collect();
        let attribute = |(key, value): &(&str, AttributeValue)| match value {
            AttributeValue::Text(text) => text_attribute(key, text),
            // OTLP/JSON writes 64-bit integers as strings.
            AttributeValue::Number(number) => json!({ "key": key, "value": { "intValue": number.to_string() } }),
        };
        json!({
            "traceId": HEXLOWER.encode(&self.context.trace_id),
            "spanId": HEXLOWER.encode(&self.context.span_id),
            "parentSpanId": self.parent.map(|parent| HEXLOWER.encode(&parent)).unwrap_or_default(),
            "flags": 1,
            "name": self.name,
            "kind": self.kind as u8,
            "startTimeUnixNano": nanos(self.start),
            "endTimeUnixNano": nanos(self.end.max(self.start)),
            "attributes": self.attributes.iter().map(attribute).collect::<Vec<_>>(),
            "links": links,
            "status": if self.failed { json!({ "code": 2 }) } else { json!({}) },
        })
    }
}
