//! Traces for OpenTelemetry: what one request did, sent to a collector by OTLP over HTTP, in JSON.
//!
//! The caller's `traceparent` is continued, and the app is sent one of its own, so that its spans hang below the run. A request
//! has a span; below it each call of the store, and the run. A replay *links* to the request whose answer it got: its place in
//! that trace is kept with the answer, in a header that no client sees ([`KEPT`]).
//!
//! Invariant: tracing never holds a request up. Spans that the collector does not take in time are dropped and counted.
//!
//! ```text
//! POST /payments/*   ├───────────────────────────────┤   executed
//!   claim            ├───┤
//!   run                   ├──────────────────┤           → the app, by traceparent
//!   settle                                    ├────┤
//! ```

use std::{
    cell::RefCell,
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use http::{HeaderMap, HeaderName, Request, Response};
use ibid::{Answered, Notice, Observer, Outcome, StoreCall, http::Around, store::Token};
use parking_lot::Mutex;

pub(crate) use self::export::Collecting;
pub use self::export::Tracer;
use self::{
    export::{Kind, Span},
    ids::Place,
};

mod export;
mod ids;

/// Where the request of a remembered answer stands in its trace. Only ever between the app and the gateway.
pub const KEPT: HeaderName = HeaderName::from_static("x-ibid-trace");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The trace of one request. Its span ends when nobody works on the request any more.
#[derive(Clone)]
pub struct Trace(Arc<Traced>);

struct Traced {
    tracer: Tracer,
    place: Place,
    parent: Option<[u8; 8]>,
    began: Clock,
    method: String,
    path: String,
    noted: Mutex<Noted>,
}

/// What becomes known on the way.
#[derive(Default)]
struct Noted {
    route: Option<String>,
    outcome: Option<&'static str>,
    key: String,
    request_id: String,
    attempt: Option<u32>,
    status: Option<u16>,
    ended: Option<Instant>,
    run: Option<Run>,
    original: Option<Place>,
}

/// The app at work.
struct Run {
    place: Place,
    began: Instant,
    took: Option<Duration>,
    status: Option<u16>,
}

/// The time of day of moments, by one reading of it.
#[derive(Clone, Copy)]
struct Clock {
    wall: SystemTime,
    at: Instant,
}

impl Clock {
    fn now() -> Self {
        Self { wall: SystemTime::now(), at: Instant::now() }
    }

    fn wall(self, moment: Instant) -> SystemTime {
        match moment.checked_duration_since(self.at) {
            Some(later) => self.wall + later,
            None => self.wall - self.at.duration_since(moment),
        }
    }
}

thread_local!(static CURRENT: RefCell<Option<Trace>> = const { RefCell::new(None) });

impl Trace {
    /// Continues the caller's trace, or begins one. Nothing if the caller has decided that this one is not traced.
    pub fn begin<B>(tracer: &Tracer, request: &mut Request<B>) -> Option<Self> {
        let caller = Place::of_caller(request.headers(), &TRACEPARENT);
        if caller.is_some_and(|(_, sampled)| !sampled) {
            return None;
        }
        let parent = caller.map(|(place, _)| place);
        let place = parent.map_or_else(Place::first, Place::child);
        let traced = Traced {
            tracer: tracer.clone(),
            place,
            parent: parent.map(|parent| parent.span),
            began: Clock::now(),
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
            noted: Mutex::default(),
        };
        let trace = Self(Arc::new(traced));
        let inside = trace.clone();
        request.extensions_mut().insert(Around::new(move |poll| inside.enter(poll)));
        request.extensions_mut().insert(trace.clone());
        Some(trace)
    }

    /// Polls a future so that what observers are told meanwhile is told about this request.
    pub async fn around<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        poll_fn(|cx| self.enter(|| future.as_mut().poll(cx))).await
    }

    /// The request is answered. What was kept of the original's trace is taken off.
    pub fn answered<B>(&self, answer: &mut Response<B>) {
        let kept = take_kept(answer);
        let mut noted = self.0.noted.lock();
        noted.ended = Some(Instant::now());
        noted.status = Some(answer.status().as_u16());
        noted.original = kept.filter(|original| *original != self.0.place);
    }

    /// The request goes to the app, as a run under a claim or as it came.
    pub fn send(&self, headers: &mut HeaderMap, claimed: bool) -> Sent {
        let place = self.0.place.child();
        headers.insert(TRACEPARENT, place.header());
        let run = Run { place, began: Instant::now(), took: None, status: None };
        if !claimed {
            return Sent { trace: self.clone(), other: Some(run) };
        }
        self.0.noted.lock().run = Some(run);
        Sent { trace: self.clone(), other: None }
    }

    fn enter<R>(&self, inside: impl FnOnce() -> R) -> R {
        struct Leave(Option<Trace>);
        impl Drop for Leave {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _leave = Leave(CURRENT.replace(Some(self.clone())));
        inside()
    }
}

/// What was kept with an answer.
pub fn take_kept<B>(answer: &mut Response<B>) -> Option<Place> {
    answer.headers_mut().remove(KEPT).and_then(|kept| Place::read(&kept)).map(|(place, _)| place)
}

/// A request that the app has.
pub struct Sent {
    trace: Trace,
    /// No run under a claim: its span ends with the head of the answer.
    other: Option<Run>,
}

impl Sent {
    /// The head of the app's answer, or what the gateway makes of there being none.
    pub fn answered<B>(self, answer: &mut Response<B>) {
        let status = Some(answer.status().as_u16());
        let traced = &self.trace.0;
        match self.other {
            Some(run) => {
                let took = run.began.elapsed();
                traced.run("pass", &Run { took: Some(took), status, ..run });
            }
            None => {
                answer.headers_mut().insert(KEPT, traced.place.header());
                if let Some(run) = &mut traced.noted.lock().run {
                    run.took = Some(run.began.elapsed());
                    run.status = status;
                }
            }
        }
    }
}

impl Traced {
    /// A span below the request's.
    fn below(&self, place: Place, name: &str, began: Instant, took: Duration) -> Span {
        let start = self.began.wall(began);
        Span::new(place, Some(self.place.span), name.to_owned(), Kind::Client, start, start + took)
    }

    fn run(&self, name: &str, run: &Run) {
        let took = run.took.unwrap_or_else(|| run.began.elapsed());
        let mut span = self.below(run.place, name, run.began, took);
        span.number("http.response.status_code", run.status.map(i64::from));
        span.failed = run.status.is_none_or(|status| status >= 500);
        self.tracer.tell(span);
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let noted = std::mem::take(self.noted.get_mut());
        if let Some(run) = &noted.run {
            self.run("run", run);
        }
        let name = noted.route.as_ref().map_or_else(
            || self.method.clone(),
            |route| match route.as_str() {
                "*" => self.method.clone(),
                route => route.to_owned(),
            },
        );
        let end = self.began.wall(noted.ended.unwrap_or_else(Instant::now));
        let mut span = Span::new(self.place, self.parent, name, Kind::Server, self.began.wall, end);
        span.text("http.request.method", Some(self.method.clone()));
        span.text("url.path", Some(self.path.clone()));
        span.text("http.route", noted.route);
        span.number("http.response.status_code", noted.status.map(i64::from));
        span.text("ibid.outcome", noted.outcome.map(str::to_owned));
        span.text("ibid.key", Some(noted.key).filter(|key| !key.is_empty()));
        span.text("ibid.request_id", Some(noted.request_id).filter(|id| !id.is_empty()));
        span.number("ibid.attempt", noted.attempt.map(i64::from));
        // Its client has gone, and what it asked for was done all the same.
        span.text("ibid.client", noted.ended.is_none().then(|| "gone".to_owned()));
        span.failed = noted.status.is_some_and(|status| status >= 500);
        span.link = noted.original;
        self.tracer.tell(span);
    }
}

/// Notes what the engine tells about the request that it works on, then tells somebody else.
pub struct Watching(pub Arc<dyn Observer>);

impl Observer for Watching {
    fn answered(&self, request: &Answered<'_>) {
        CURRENT.with_borrow(|current| {
            let Some(Trace(traced)) = current else { return };
            let mut noted = traced.noted.lock();
            noted.route = Some(request.route.to_owned());
            noted.outcome = Some(request.outcome.name());
            noted.key = request.key.to_owned();
            noted.request_id = request.request_id.to_owned();
            noted.attempt = request.attempt;
            if let Some(run) = noted.run.as_mut().filter(|_| request.outcome != Outcome::Keyless) {
                // With the body of the answer, which came behind its head.
                run.took = Some(request.ran_for.max(run.took.unwrap_or_default()));
            }
        });
        self.0.answered(request);
    }

    fn asked(&self, call: StoreCall, took: Duration) {
        CURRENT.with_borrow(|current| {
            let Some(Trace(traced)) = current else { return };
            let now = Instant::now();
            let began = now.checked_sub(took).unwrap_or(now);
            traced.tracer.tell(traced.below(traced.place.child(), call.name(), began, took));
        });
        self.0.asked(call, took);
    }

    fn noticed(&self, notice: &Notice<'_>) {
        self.0.noticed(notice);
    }
}

/// Random, and never zero but for the odds.
fn random() -> [u8; 16] {
    Token::mint().0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_before_and_after_have_their_time_of_day() {
        let clock = Clock::now();
        let second = Duration::from_secs(1);
        assert_eq!(clock.wall(clock.at + second), clock.wall + second);
        assert_eq!(clock.wall(clock.at - second), clock.wall - second);
    }
}
