//! Prometheus metrics: `GET /metrics` on the admin port.
//!
//! [`FAMILIES`] is the one list of metrics: each row says how its samples are read. The table in `docs/operating.md`
//! follows it. Every metric exists from the start, at zero. Counting takes no lock and allocates nothing; sums of other
//! counters are computed on read.
//!
//! A [`Metrics`] lives as long as the process: a reload changes the routes, never the counts.

use std::{
    array, fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use ibid::{
    Observer, RefusalReason, RequestOutcome, RequestReport,
    observe::{EngineEvent, ShadowOutcome, StoreCall},
    policy::OnMatch,
    store::EntryCounts,
};
use serde_json::{Value, json};

pub(crate) use self::{
    counters::HistogramSnapshot,
    history::{ALERT_WINDOW, CONFLICT_RATE_ALERT, ChartWindow, HIT_RATE_ALERT, conflict_share, hit_share},
    history::{RequestCounts, TrafficCounts},
};
use self::{
    counters::{Histogram, RouteCounter, RouteCounters, Sharded},
    exposition::FamilyWriter,
    process::{ProcessStats, unix_seconds},
};
pub use self::{
    gauges::StoreGauges,
    history::MetricsHistory,
    recent::{RecentRequest, RecentRequests},
    refusals::{RefusalLog, RefusedRequest, ShadowCounters, UserAgentCount},
};
use crate::{logs, routes::RouteTable};

mod counters;
mod exposition;
mod gauges;
mod history;
mod process;
mod recent;
mod refusals;

pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[derive(Debug)]
pub struct MetricFamily {
    pub name: &'static str,
    pub labels: &'static [&'static str],
    pub kind: MetricKind,
    pub help: &'static str,
    read: fn(&MetricSources<'_>, &mut FamilyWriter<'_>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

struct MetricSources<'a> {
    metrics: &'a Metrics,
    stored: EntryCounts,
    up: &'a [(&'a str, bool)],
    process: ProcessStats,
}

const ON_MATCH: [OnMatch; 3] = [OnMatch::Reject, OnMatch::Hold, OnMatch::Count];
const IN_PROGRESS: RequestOutcome = RequestOutcome::Refused(RefusalReason::InProgress);
const KEY_REUSED: RequestOutcome = RequestOutcome::Refused(RefusalReason::KeyReused);

/// All metrics, in the order of the page.
#[rustfmt::skip]
pub const FAMILIES: [MetricFamily; 28] = [
    MetricFamily { name: "idempotency_requests_total", labels: &["route", "outcome"], kind: MetricKind::Counter,
             help: "Covered requests by route and outcome.",
             read: |of, page| for route in of.metrics.routes() {
                       route.by_outcome().for_each(|(outcome, count)| page.sample(&[route.name(), outcome.name()], count));
                   } },
    MetricFamily { name: "idempotency_cache_hit_total", labels: &[], kind: MetricKind::Counter,
             help: "Requests that were answered from the record and ran nothing.",
             read: |of, page| page.sample(&[], of.metrics.total(|counters| &counters.hits)) },
    MetricFamily { name: "idempotency_cache_miss_total", labels: &[], kind: MetricKind::Counter,
             help: "Requests that found no answer and were granted a run.",
             read: |of, page| page.sample(&[], of.metrics.total(|counters| &counters.misses)) },
    MetricFamily { name: "idempotency_conflicts_total", labels: &["reason"], kind: MetricKind::Counter,
             help: "Requests refused because of another one with their key: in_progress (it was still running) or mismatch (it was a different request).",
             read: |of, page| {
                       page.sample(&["in_progress"], of.metrics.requests.total(IN_PROGRESS));
                       page.sample(&["mismatch"], of.metrics.requests.total(KEY_REUSED));
                   } },
    MetricFamily { name: "idempotency_mismatches_total", labels: &[], kind: MetricKind::Counter,
             help: "Requests refused as key-reused: their key was first used for a different request.",
             read: |of, page| page.sample(&[], of.metrics.requests.total(KEY_REUSED)) },
    MetricFamily { name: "idempotency_retries_total", labels: &[], kind: MetricKind::Counter,
             help: "Requests beyond the first for their key: replayed, refused because of an earlier one, or run again.",
             read: |of, page| page.sample(&[], of.metrics.total(|counters| &counters.retries)) },
    MetricFamily { name: "idempotency_uncovered_total", labels: &[], kind: MetricKind::Counter,
             help: "Requests that carried a key and that no policy covers: they passed through unprotected.",
             read: |of, page| page.sample(&[], of.metrics.total(|counters| &counters.uncovered)) },
    MetricFamily { name: "idempotency_fallback_total", labels: &[], kind: MetricKind::Counter,
             help: "Store calls that one of two stores decided alone because the other could not be reached.",
             read: |of, page| page.sample(&[], of.metrics.total(|counters| &counters.fallbacks)) },
    MetricFamily { name: "idempotency_processing_gauge", labels: &[], kind: MetricKind::Gauge,
             help: "Entries in the store that are in progress, with a valid lease.",
             read: |of, page| page.sample(&[], of.stored.processing) },
    MetricFamily { name: "idempotency_outcome_unknown", labels: &[], kind: MetricKind::Gauge,
             help: "Entries in the store with an unknown outcome: the lease expired, or the run ended without a result.",
             read: |of, page| page.sample(&[], of.stored.unknown) },
    MetricFamily { name: "idempotency_unknown_total", labels: &[], kind: MetricKind::Counter,
             help: "Runs that ended with an unknown outcome: the operation may have taken place.",
             read: |of, page| page.sample(&[], of.metrics.unknown()) },
    MetricFamily { name: "idempotency_late_answers_total", labels: &[], kind: MetricKind::Counter,
             help: "Answers that came after timeout and within late_answer: a retry gets them.",
             read: |of, page| page.sample(&[], of.metrics.total(|counters| &counters.late_answers)) },
    MetricFamily { name: "idempotency_lost_claims_total", labels: &[], kind: MetricKind::Counter,
             help: "Claims found taken over while their operation ran: it may have run twice.",
             read: |of, page| page.sample(&[], of.metrics.total(|counters| &counters.lost_claims)) },
    MetricFamily { name: "idempotency_dropped_total", labels: &[], kind: MetricKind::Counter,
             help: "Results that could not be saved in the store: their outcome is unknown.",
             read: |of, page| page.sample(&[], of.metrics.total(|counters| &counters.dropped)) },
    MetricFamily { name: "idempotency_shared_keys_total", labels: &[], kind: MetricKind::Counter,
             help: "Requests whose key another caller had sent with the same request: mostly one client whose credential changed.",
             read: |of, page| page.sample(&[], of.metrics.total(|counters| &counters.shared_keys)) },
    MetricFamily { name: "idempotency_duplicate_intents_total", labels: &["on_match"], kind: MetricKind::Counter,
             help: "Requests that an intent guard recognized as an operation of another key, by what they got: reject, hold or count (they ran).",
             read: |of, page| for (nth, on_match) in ON_MATCH.into_iter().enumerate() {
                       let count = of.metrics.counters.iter().map(|shard| shard.duplicate_intents[nth].load(Relaxed)).sum();
                       page.sample(&[&on_match.to_string()], count);
                   } },
    MetricFamily { name: "idempotency_store_seconds", labels: &["op"], kind: MetricKind::Histogram,
             help: "How long the store took, by call; wait lasts as long as another request's run.",
             read: |of, page| of.metrics.store_calls().for_each(|(call, took)| page.histogram(&[call.name()], &took)) },
    MetricFamily { name: "idempotency_overhead_seconds", labels: &[], kind: MetricKind::Histogram,
             help: "Time that requests with a key took beyond their operation, from head to answer, including waits.",
             read: |of, page| page.histogram(&[], &of.metrics.histogram(|counters| &counters.overhead)) },
    MetricFamily { name: "idempotency_store_bytes", labels: &[], kind: MetricKind::Gauge,
             help: "Approximate size of the entries in the store, in bytes.",
             read: |of, page| page.sample(&[], of.stored.bytes) },
    MetricFamily { name: "idempotency_store_up", labels: &["store"], kind: MetricKind::Gauge,
             help: "1 if a store answers and grants new keys, else 0; one value per store.",
             read: |of, page| of.up.iter().for_each(|(store, is_up)| page.sample(&[store], u64::from(*is_up))) },
    MetricFamily { name: "idempotency_log_lines_lost_total", labels: &[], kind: MetricKind::Counter,
             help: "Log lines that were dropped because standard error blocked.",
             read: |_, page| page.sample(&[], logs::lost_lines()) },
    MetricFamily { name: "ibid_build_info", labels: &["version"], kind: MetricKind::Gauge,
             help: "Always 1; the label is the version of this gateway.",
             read: |_, page| page.sample(&[env!("CARGO_PKG_VERSION")], 1) },
    MetricFamily { name: "process_start_time_seconds", labels: &[], kind: MetricKind::Gauge,
             help: "When the process started, in seconds since 1970.",
             read: |of, page| page.number(Some(unix_seconds(of.metrics.started))) },
    MetricFamily { name: "process_cpu_seconds_total", labels: &[], kind: MetricKind::Counter,
             help: "CPU time that the process used, in seconds.",
             read: |of, page| page.number(of.process.cpu_seconds) },
    MetricFamily { name: "process_resident_memory_bytes", labels: &[], kind: MetricKind::Gauge,
             help: "Memory of the process that is in RAM, in bytes.",
             read: |of, page| page.number(of.process.resident_bytes) },
    MetricFamily { name: "process_virtual_memory_bytes", labels: &[], kind: MetricKind::Gauge,
             help: "Address space of the process, in bytes.",
             read: |of, page| page.number(of.process.virtual_bytes) },
    MetricFamily { name: "process_open_fds", labels: &[], kind: MetricKind::Gauge,
             help: "Open file descriptors: connections and files.",
             read: |of, page| page.number(of.process.open_files) },
    MetricFamily { name: "process_max_fds", labels: &[], kind: MetricKind::Gauge,
             help: "The limit of open file descriptors.",
             read: |of, page| page.number(of.process.max_open_files) },
];

#[derive(Debug)]
pub struct Metrics {
    pub(crate) started: SystemTime,
    requests: RouteCounters,
    counters: Sharded<GatewayCounters>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { started: SystemTime::now(), requests: RouteCounters::default(), counters: Sharded::default() }
    }
}

/// Counters per gateway, not per route.
#[derive(Debug, Default)]
struct GatewayCounters {
    hits: AtomicU64,
    misses: AtomicU64,
    retries: AtomicU64,
    uncovered: AtomicU64,
    fallbacks: AtomicU64,
    late_answers: AtomicU64,
    /// Operations that did not answer within `late_answer` either.
    late_unknown: AtomicU64,
    lost_claims: AtomicU64,
    dropped: AtomicU64,
    shared_keys: AtomicU64,
    /// In the order of [`ON_MATCH`].
    duplicate_intents: [AtomicU64; ON_MATCH.len()],
    overhead: Histogram,
    store: [Histogram; StoreCall::ALL.len()],
}

/// Counts, then forwards to another observer.
pub struct MetricsObserver {
    pub metrics: Arc<Metrics>,
    /// The counts of shadow mode and of missing keys.
    pub shadow: Arc<ShadowCounters>,
    pub refusals: Arc<RefusalLog>,
    pub recent: Arc<RecentRequests>,
    next: Arc<dyn Observer>,
}

impl Metrics {
    /// Adds these routes at zero, unless they are already counted.
    pub fn register_routes(&self, routes: &RouteTable) {
        for route in routes.iter() {
            self.requests.get_or_insert(&route.name);
        }
    }

    pub fn render(&self, stored: EntryCounts, up: &[(&str, bool)]) -> String {
        let mut page = String::new();
        let sources = MetricSources { metrics: self, stored, up, process: ProcessStats::read() };
        for family in &FAMILIES {
            (family.read)(&sources, &mut FamilyWriter::begin(&mut page, family));
        }
        page
    }

    /// The totals since the process started, for `GET /api/stats`.
    pub fn totals(&self) -> Value {
        let routes = self.routes().map(|route| json!({ "route": route.name(), "outcomes": route.by_name() }));
        json!({
            "hits": self.total(|counters| &counters.hits),
            "misses": self.total(|counters| &counters.misses),
            "conflicts": self.requests.total(IN_PROGRESS),
            "mismatches": self.requests.total(KEY_REUSED),
            "retries": self.total(|counters| &counters.retries),
            "fallbacks": self.total(|counters| &counters.fallbacks),
            "unknown": self.unknown(),
            "lost_claims": self.lost_claims(),
            "routes": routes.collect::<Vec<_>>(),
        })
    }

    pub(crate) fn routes(&self) -> impl Iterator<Item = &RouteCounter> {
        self.requests.iter()
    }

    pub(crate) fn lost_claims(&self) -> u64 {
        self.total(|counters| &counters.lost_claims)
    }

    pub(crate) fn store_calls(&self) -> impl Iterator<Item = (StoreCall, HistogramSnapshot)> {
        StoreCall::ALL.into_iter().map(|call| (call, self.histogram(|counters| &counters.store[call as usize])))
    }

    fn unknown(&self) -> u64 {
        self.requests.total(RequestOutcome::Unknown) + self.total(|counters| &counters.late_unknown)
    }

    fn total(&self, of: fn(&GatewayCounters) -> &AtomicU64) -> u64 {
        self.counters.iter().map(|shard| of(shard).load(Relaxed)).sum()
    }

    fn histogram(&self, of: impl Fn(&GatewayCounters) -> &Histogram) -> HistogramSnapshot {
        self.counters.iter().fold(HistogramSnapshot::default(), |sum, shard| sum + of(shard).snapshot())
    }
}

impl Observer for Metrics {
    fn on_request(&self, request: &RequestReport<'_>) {
        self.requests.get_or_insert(request.route).increment(request.outcome);
        // Without an address the request never reached the store, and a keyless request has only started.
        if request.address.is_none() {
            return;
        }
        let mine = self.counters.local();
        mine.overhead.observe(request.took.saturating_sub(request.run_took));
        match request.attempt {
            // Counted whatever the response: a request that lost its claim ran, and got another request's record.
            Some(_) => mine.misses.fetch_add(1, Relaxed),
            None if request.outcome == RequestOutcome::Replayed => mine.hits.fetch_add(1, Relaxed),
            None => 0,
        };
        if is_retry(request) {
            mine.retries.fetch_add(1, Relaxed);
        }
    }

    fn on_store_call(&self, call: StoreCall, took: Duration) {
        self.counters.local().store[call as usize].observe(took);
    }

    fn on_event(&self, notice: &EngineEvent<'_>) {
        let mine = self.counters.local();
        match notice {
            EngineEvent::ClaimLost(_) => mine.lost_claims.fetch_add(1, Relaxed),
            EngineEvent::LateAnswer { outcome: RequestOutcome::Unknown, .. } => mine.late_unknown.fetch_add(1, Relaxed),
            EngineEvent::LateAnswer {
                outcome: RequestOutcome::Executed | RequestOutcome::Pending | RequestOutcome::Released,
                ..
            } => mine.late_answers.fetch_add(1, Relaxed),
            EngineEvent::SettlementDropped(_) => mine.dropped.fetch_add(1, Relaxed),
            EngineEvent::UncoveredKey { .. } => mine.uncovered.fetch_add(1, Relaxed),
            EngineEvent::DuplicateIntent { on_match, .. } => {
                mine.duplicate_intents[*on_match as usize].fetch_add(1, Relaxed)
            }
            EngineEvent::SharedKey(_) => mine.shared_keys.fetch_add(1, Relaxed),
            // Either the front store or the authority was unreachable; one call never reports both.
            EngineEvent::Fallback(..) | EngineEvent::FrontOnlyClaim(_) => mine.fallbacks.fetch_add(1, Relaxed),
            _ => return,
        };
    }
}

impl MetricsObserver {
    /// Counts from zero, and forwards to `then`.
    pub fn new(then: impl Observer) -> Arc<Self> {
        Self::with_shared_observer(Arc::new(then))
    }

    /// Like [`new`](Self::new), with an observer that is shared.
    pub fn with_shared_observer(then: Arc<dyn Observer>) -> Arc<Self> {
        Arc::new(Self {
            metrics: Arc::default(),
            shadow: Arc::default(),
            refusals: Arc::default(),
            recent: Arc::default(),
            next: then,
        })
    }
}

impl Observer for MetricsObserver {
    fn on_request(&self, request: &RequestReport<'_>) {
        self.metrics.on_request(request);
        self.shadow.on_request(request);
        self.refusals.on_request(request);
        self.recent.on_request(request);
        self.next.on_request(request);
    }

    fn on_store_call(&self, call: StoreCall, took: Duration) {
        self.metrics.on_store_call(call, took);
        self.next.on_store_call(call, took);
    }

    fn on_event(&self, notice: &EngineEvent<'_>) {
        self.metrics.on_event(notice);
        self.recent.on_event(notice);
        self.next.on_event(notice);
    }
}

impl fmt::Debug for MetricsObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetricsObserver").field("metrics", &self.metrics).finish_non_exhaustive()
    }
}

impl fmt::Display for MetricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        })
    }
}

/// Whether the request followed an earlier one with its key. For a request that ran, its attempt decides: one that lost
/// its claim gets another's record, but may have been the first.
fn is_retry(request: &RequestReport<'_>) -> bool {
    if let Some(attempt) = request.attempt {
        return attempt > 1;
    }
    let met =
        |reason| matches!(reason, RefusalReason::InProgress | RefusalReason::KeyReused | RefusalReason::OutcomeUnknown);
    match request.outcome {
        RequestOutcome::Replayed | RequestOutcome::Shadow(ShadowOutcome::Replay) => true,
        RequestOutcome::Refused(reason) | RequestOutcome::Shadow(ShadowOutcome::Refusal(reason)) => met(reason),
        _ => false,
    }
}

const OUTCOME_COUNT: usize = NON_REFUSAL_OUTCOMES.len() + RefusalReason::COUNT;

/// All outcomes except refusals. One entry stands for all shadow refusals; the log has their reasons.
const NON_REFUSAL_OUTCOMES: [RequestOutcome; 9] = [
    RequestOutcome::Executed,
    RequestOutcome::Released,
    RequestOutcome::Pending,
    RequestOutcome::Unknown,
    RequestOutcome::Degraded,
    RequestOutcome::Replayed,
    RequestOutcome::Keyless,
    RequestOutcome::Shadow(ShadowOutcome::Replay),
    RequestOutcome::Shadow(ShadowOutcome::Refusal(RefusalReason::KeyMissing)),
];

/// All outcomes that have a name, each at its [`outcome_index`].
fn all_outcomes() -> [RequestOutcome; OUTCOME_COUNT] {
    let mut refusals = RefusalReason::all().map(RequestOutcome::Refused);
    array::from_fn(|at| {
        NON_REFUSAL_OUTCOMES.get(at).copied().or_else(|| refusals.next()).expect("as many as are counted")
    })
}

fn outcome_index(outcome: RequestOutcome) -> usize {
    match outcome {
        RequestOutcome::Executed => 0,
        RequestOutcome::Released => 1,
        RequestOutcome::Pending => 2,
        RequestOutcome::Unknown => 3,
        RequestOutcome::Degraded => 4,
        RequestOutcome::Replayed => 5,
        RequestOutcome::Keyless => 6,
        RequestOutcome::Shadow(ShadowOutcome::Replay) => 7,
        RequestOutcome::Shadow(ShadowOutcome::Refusal(_)) => 8,
        RequestOutcome::Refused(reason) => NON_REFUSAL_OUTCOMES.len() + reason as usize,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_outcome_has_a_place_and_a_name_of_its_own() {
        let all = all_outcomes();
        for (at, outcome) in all.into_iter().enumerate() {
            assert_eq!(outcome_index(outcome), at, "{outcome:?}");
        }
        let names: HashSet<_> = all.iter().map(|outcome| outcome.name()).collect();
        assert_eq!(names.len(), OUTCOME_COUNT);
    }

    #[test]
    fn every_store_call_has_a_place_of_its_own() {
        for (at, call) in StoreCall::ALL.into_iter().enumerate() {
            assert_eq!(call as usize, at);
        }
    }

    #[test]
    fn a_call_that_one_of_two_stores_decided_alone_is_a_fallback() {
        let metrics = Metrics::default();
        let error = ibid::store::StoreError::new(ibid::store::ErrorKind::NotApplied, "redis", "gone");
        let at = ibid::store::Address([7; 32]);
        metrics.on_event(&EngineEvent::Fallback("claim", &error));
        metrics.on_event(&EngineEvent::FrontOnlyClaim(&at));
        metrics.on_event(&EngineEvent::StoreFailed("claim", &error));
        metrics.on_event(&EngineEvent::EntryRestored(&at));
        let page = metrics.render(EntryCounts::default(), &[]);
        assert!(page.contains("\nidempotency_fallback_total 2\n"), "{page}");
        assert!(page.contains("\nidempotency_lost_claims_total 0\n"), "{page}");
    }
}
