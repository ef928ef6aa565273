//! OpenTelemetry traces, exported as OTLP over HTTP in JSON.
//!
//! The gateway continues the caller's `traceparent` and sends its own to the app, so that the app's spans are children
//! of the run. Each request has a span, with child spans for store calls and the run. A replay *links* to the request
//! that produced its answer: that request's span context is stored with the answer, in a header that no client sees
//! ([`ORIGINAL_TRACE_HEADER`]).
//!
//! Invariant: tracing never delays a request. Spans that the collector does not accept in time are dropped and counted.
//!
//! ```text
//! POST /payments/*   ├───────────────────────────────┤   executed
//!   claim            ├───┤
//!   run                   ├──────────────────┤           → the app, by traceparent
//!   settle                                    ├────┤
//! ```

use std::{
    cell::{Cell, RefCell},
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use data_encoding::HEXLOWER;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use ibid::{
    Observer, RequestOutcome, RequestReport,
    http::PollHook,
    observe::{EngineEvent, StoreCall},
    store::ClaimToken,
};
use parking_lot::Mutex;

pub(crate) use self::export::OtlpExporter;
pub use self::export::Tracer;
use self::export::{FinishedSpan, SpanKind};

mod export;

/// Carries the original request's span context in a stored answer. Clients and the app never see it.
pub const ORIGINAL_TRACE_HEADER: HeaderName = HeaderName::from_static("x-ibid-trace");
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The trace of one request. Its span ends when the last clone is dropped.
#[derive(Clone)]
pub struct RequestTrace(Arc<RequestSpan>);

struct RequestSpan {
    tracer: Tracer,
    context: SpanContext,
    parent: Option<[u8; 8]>,
    began: TraceClock,
    method: String,
    path: String,
    details: Mutex<SpanDetails>,
}

#[derive(Default)]
struct SpanDetails {
    route: Option<String>,
    outcome: Option<&'static str>,
    key: String,
    request_id: String,
    attempt: Option<u32>,
    status: Option<u16>,
    ended: Option<Instant>,
    run: Option<RunSpan>,
    original: Option<SpanContext>,
}

struct RunSpan {
    context: SpanContext,
    began: Instant,
    took: Option<Duration>,
    status: Option<u16>,
}

/// Converts instants to wall-clock times, based on one reading of the clock.
#[derive(Clone, Copy)]
struct TraceClock {
    wall: SystemTime,
    at: Instant,
}

impl TraceClock {
    fn wall_time(self, moment: Instant) -> SystemTime {
        match moment.checked_duration_since(self.at) {
            Some(later) => self.wall + later,
            None => self.wall - self.at.duration_since(moment),
        }
    }
}

thread_local!(static CURRENT: RefCell<Option<RequestTrace>> = const { RefCell::new(None) });

thread_local!(static CURRENT_CALLER: Cell<Option<CallerTrace>> = const { Cell::new(None) });

/// The id of the trace that the running request belongs to, if the gateway traces it or its caller does.
pub(crate) fn current_trace_id() -> Option<String> {
    let traced = CURRENT.with_borrow(|current| current.as_ref().map(|trace| trace.0.context.trace_id));
    let id = traced.or_else(|| CURRENT_CALLER.get().map(|caller| caller.0))?;
    Some(HEXLOWER.encode(&id))
}

/// The caller's trace of a request that the gateway does not trace. Log lines name it.
#[derive(Clone, Copy)]
pub struct CallerTrace([u8; 16]);

impl CallerTrace {
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        SpanContext::from_headers(headers, &TRACEPARENT).map(|(caller, _)| Self(caller.trace_id))
    }

    /// See [`RequestTrace::poll_hook`].
    pub fn poll_hook(self) -> PollHook {
        PollHook::new(move |poll| self.enter(poll))
    }

    /// See [`RequestTrace::scope`].
    pub async fn scope<F: Future>(self, mut future: Pin<&mut F>) -> F::Output {
        poll_fn(|cx| self.enter(|| future.as_mut().poll(cx))).await
    }

    fn enter<R>(self, inside: impl FnOnce() -> R) -> R {
        struct CurrentCallerGuard(Option<CallerTrace>);
        impl Drop for CurrentCallerGuard {
            fn drop(&mut self) {
                CURRENT_CALLER.set(self.0);
            }
        }
        let _leave = CurrentCallerGuard(CURRENT_CALLER.replace(Some(self)));
        inside()
    }
}

impl RequestTrace {
    /// Continues the caller's trace, or starts one. `None` if the caller's `traceparent` is not sampled.
    pub fn begin<B>(tracer: &Tracer, request: &Request<B>) -> Option<Self> {
        let caller = SpanContext::from_headers(request.headers(), &TRACEPARENT);
        if caller.is_some_and(|(_, sampled)| !sampled) {
            return None;
        }
        let parent = caller.map(|(place, _)| place);
        let place = parent.map_or_else(SpanContext::new_root, SpanContext::child);
        Some(Self(Arc::new(RequestSpan {
            tracer: tracer.clone(),
            context: place,
            parent: parent.map(|parent| parent.span_id),
            began: TraceClock { wall: SystemTime::now(), at: Instant::now() },
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
            details: Mutex::default(),
        })))
    }

    /// Polls the work on the request with this trace as the current one, also after the client has left.
    pub fn poll_hook(&self) -> PollHook {
        let trace = self.clone();
        PollHook::new(move |poll| trace.enter(poll))
    }

    /// Polls a future with this trace as the current one, so that observer calls are recorded in it.
    pub async fn scope<F: Future>(&self, mut future: Pin<&mut F>) -> F::Output {
        poll_fn(|cx| self.enter(|| future.as_mut().poll(cx))).await
    }

    /// Records the response, and removes [`ORIGINAL_TRACE_HEADER`] from it.
    pub fn answered<B>(&self, answer: &mut Response<B>) {
        let kept = take_original_context(answer);
        let mut noted = self.0.details.lock();
        noted.ended = Some(Instant::now());
        noted.status = Some(answer.status().as_u16());
        noted.original = kept.filter(|original| *original != self.0.context);
    }

    /// Starts the span of the request to the app and sets its `traceparent`. `claimed`: whether it runs under a claim.
    pub fn send(&self, headers: &mut HeaderMap, claimed: bool) -> UpstreamSpan {
        let place = self.0.context.child();
        headers.insert(TRACEPARENT, place.to_header());
        let mut run = Some(RunSpan { context: place, began: Instant::now(), took: None, status: None });
        if claimed {
            self.0.details.lock().run = run.take();
        }
        UpstreamSpan { trace: self.clone(), unclaimed_run: run }
    }

    fn enter<R>(&self, inside: impl FnOnce() -> R) -> R {
        struct CurrentTraceGuard(Option<RequestTrace>);
        impl Drop for CurrentTraceGuard {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _leave = CurrentTraceGuard(CURRENT.replace(Some(self.clone())));
        inside()
    }
}

/// Removes [`ORIGINAL_TRACE_HEADER`] from a response and parses it.
pub fn take_original_context<B>(answer: &mut Response<B>) -> Option<SpanContext> {
    // Most responses have few headers, and not this one: comparing names is cheaper than hashing.
    if !answer.headers().keys().any(|name| *name == ORIGINAL_TRACE_HEADER) {
        return None;
    }
    let kept = answer.headers_mut().remove(ORIGINAL_TRACE_HEADER)?;
    SpanContext::parse(&kept).map(|(place, _)| place)
}

pub struct UpstreamSpan {
    trace: RequestTrace,
    /// Set if the request runs without a claim: the span ends with the response head.
    unclaimed_run: Option<RunSpan>,
}

impl UpstreamSpan {
    /// Records the app's response head, or the gateway's error response if there is none.
    pub fn answered<B>(self, answer: &mut Response<B>) {
        let status = Some(answer.status().as_u16());
        let traced = &self.trace.0;
        match self.unclaimed_run {
            Some(run) => {
                let took = run.began.elapsed();
                traced.export_run("pass", &RunSpan { took: Some(took), status, ..run });
            }
            None => {
                answer.headers_mut().insert(ORIGINAL_TRACE_HEADER, traced.context.to_header());
                if let Some(run) = &mut traced.details.lock().run {
                    run.took = Some(run.began.elapsed());
                    run.status = status;
                }
            }
        }
    }
}

impl RequestSpan {
    fn child_span(&self, place: SpanContext, name: &str, began: Instant, took: Duration) -> FinishedSpan {
        let start = self.began.wall_time(began);
        FinishedSpan::new(place, Some(self.context.span_id), name.to_owned(), SpanKind::Client, start, start + took)
    }

    fn export_run(&self, name: &str, run: &RunSpan) {
        let took = run.took.unwrap_or_else(|| run.began.elapsed());
        let mut span = self.child_span(run.context, name, run.began, took);
        span.set_number("http.response.status_code", run.status.map(i64::from));
        span.failed = run.status.is_none_or(|status| status >= 500);
        self.tracer.submit(span);
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        let noted = std::mem::take(self.details.get_mut());
        if let Some(run) = &noted.run {
            self.export_run("run", run);
        }
        let name = match noted.route.as_deref() {
            None | Some("*") => self.method.clone(),
            Some(route) => route.to_owned(),
        };
        let end = self.began.wall_time(noted.ended.unwrap_or_else(Instant::now));
        let mut span = FinishedSpan::new(self.context, self.parent, name, SpanKind::Server, self.began.wall, end);
        span.set_text("http.request.method", Some(self.method.clone()));
        span.set_text("url.path", Some(self.path.clone()));
        span.set_text("http.route", noted.route);
        span.set_number("http.response.status_code", noted.status.map(i64::from));
        span.set_text("ibid.outcome", noted.outcome.map(str::to_owned));
        span.set_text("ibid.key", Some(noted.key).filter(|key| !key.is_empty()));
        span.set_text("ibid.request_id", Some(noted.request_id).filter(|id| !id.is_empty()));
        span.set_number("ibid.attempt", noted.attempt.map(i64::from));
        // The client disconnected, and the operation ran all the same.
        span.set_text("ibid.client", noted.ended.is_none().then(|| "gone".to_owned()));
        span.failed = noted.status.is_some_and(|status| status >= 500);
        span.link = noted.original;
        self.tracer.submit(span);
    }
}

pub struct TraceObserver(pub Arc<dyn Observer>);

impl Observer for TraceObserver {
    fn on_request(&self, request: &RequestReport<'_>) {
        CURRENT.with_borrow(|current| {
            let Some(RequestTrace(traced)) = current else { return };
            let mut noted = traced.details.lock();
            noted.route = Some(request.route.to_owned());
            noted.outcome = Some(request.outcome.name());
            noted.key = request.key.to_owned();
            noted.request_id = request.request_id.to_owned();
            noted.attempt = request.attempt;
            if let Some(run) = noted.run.as_mut().filter(|_| request.outcome != RequestOutcome::Keyless) {
                // Includes the response body, which arrives after the head.
                run.took = Some(request.run_took.max(run.took.unwrap_or_default()));
            }
        });
        self.0.on_request(request);
    }

    fn on_store_call(&self, call: StoreCall, took: Duration) {
        CURRENT.with_borrow(|current| {
            let Some(RequestTrace(traced)) = current else { return };
            let now = Instant::now();
            let began = now.checked_sub(took).unwrap_or(now);
            traced.tracer.submit(traced.child_span(traced.context.child(), call.name(), began, took));
        });
        self.0.on_store_call(call, took);
    }

    fn on_event(&self, notice: &EngineEvent<'_>) {
        self.0.on_event(notice);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    trace_id: [u8; 16],
    span_id: [u8; 8],
}

impl SpanContext {
    fn new_root() -> Self {
        // Random bits are zero only with negligible probability.
        Self { trace_id: ClaimToken::mint().0, span_id: [0; 8] }.child()
    }

    fn child(self) -> Self {
        let [span @ .., _, _, _, _, _, _, _, _] = ClaimToken::mint().0;
        Self { span_id: span, ..self }
    }

    /// Parses the caller's header; also returns whether the trace is sampled. Ignored if the header occurs twice.
    fn from_headers(headers: &HeaderMap, name: &HeaderName) -> Option<(Self, bool)> {
        let mut all = headers.get_all(name).iter();
        let only = all.next()?;
        if all.next().is_some() { None } else { Self::parse(only) }
    }

    /// Accepts later versions, which may append fields.
    fn parse(header: &HeaderValue) -> Option<(Self, bool)> {
        let text = header.to_str().ok()?;
        let mut parts = text.splitn(4, '-');
        let [version] = hex_decode(parts.next()?)?;
        let place = Self { trace_id: hex_decode(parts.next()?)?, span_id: hex_decode(parts.next()?)? };
        let rest = parts.next()?;
        let [flags] = match version {
            0 => hex_decode(rest)?,
            255 => return None,
            _ => hex_decode(rest.split('-').next()?)?,
        };
        let said = place.trace_id != [0; 16] && place.span_id != [0; 8];
        said.then_some((place, flags & 1 == 1))
    }

    /// The header value, marked as sampled.
    fn to_header(self) -> HeaderValue {
        let text = format!("00-{}-{}-01", HEXLOWER.encode(&self.trace_id), HEXLOWER.encode(&self.span_id));
        HeaderValue::from_str(&text).expect("hex digits and dashes")
    }
}

fn hex_decode<const N: usize>(text: &str) -> Option<[u8; N]> {
    HEXLOWER.decode(text.as_bytes()).ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_before_and_after_have_their_time_of_day() {
        let clock = TraceClock { wall: SystemTime::now(), at: Instant::now() };
        let second = Duration::from_secs(1);
        assert_eq!(clock.wall_time(clock.at + second), clock.wall + second);
        assert_eq!(clock.wall_time(clock.at - second), clock.wall - second);
    }
}

#[cfg(test)]
mod span_context_tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let place = SpanContext::new_root();
        assert_eq!(SpanContext::parse(&place.to_header()), Some((place, true)));
        assert_eq!(place.child().trace_id, place.trace_id);
        assert_ne!(place.child().span_id, place.span_id);
    }

    #[test]
    fn what_is_no_traceparent_says_nothing() {
        const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
        const SPAN: &str = "b7ad6b7169203331";
        let read = |text: &str| SpanContext::parse(&HeaderValue::from_str(text).unwrap());
        assert!(read(&format!("00-{TRACE}-{SPAN}-01")).is_some_and(|(_, sampled)| sampled));
        assert!(read(&format!("00-{TRACE}-{SPAN}-00")).is_some_and(|(_, sampled)| !sampled));
        assert!(read(&format!("01-{TRACE}-{SPAN}-03-more")).is_some_and(|(_, sampled)| sampled));
        for wrong in [
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}-{SPAN}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{TRACE}{SPAN}-01"),
            "00-é".to_owned(),
            String::new(),
        ] {
            assert_eq!(
                HeaderValue::from_bytes(wrong.as_bytes()).ok().and_then(|it| SpanContext::parse(&it)),
                None,
                "{wrong}"
            );
        }
    }

    #[test]
    fn two_callers_are_none() {
        let name = HeaderName::from_static("traceparent");
        let mut headers = HeaderMap::new();
        assert_eq!(SpanContext::from_headers(&headers, &name), None);
        let place = SpanContext::new_root();
        headers.append(&name, place.to_header());
        assert_eq!(SpanContext::from_headers(&headers, &name), Some((place, true)));
        headers.append(&name, SpanContext::new_root().to_header());
        assert_eq!(SpanContext::from_headers(&headers, &name), None);
    }
}
