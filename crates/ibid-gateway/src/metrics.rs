//! What Prometheus is told: `GET /metrics` on the admin port.
//!
//! [`FAMILIES`] is the one list of what there is; the page and the table in `docs/operating.md` follow it. Everything is
//! there from the start, at zero. Counting takes no lock and allocates nothing; what can be summed up from other
//! counters when somebody asks is not counted a second time.
//!
//! A [`Metrics`] lives as long as its process: a reload changes which routes there are, never what was counted.

use std::{
    array,
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use ibid::{Answered, Notice, Observer, Outcome, Reason, Shadow, StoreCall, store::Counts};
use serde::Serialize;

use self::{
    exposition::Exposition,
    sharded::{Histogram, Sharded},
    tallies::Tallies,
};
pub use self::{
    gauges::Gauges,
    history::History,
    refusals::{Refusals, Refused},
    shadow::{ShadowReport, Unkeyed},
};
pub(crate) use self::{
    history::{CONFLICTS_LIMIT, HITS_LIMIT, Lately, Window},
    reading::{Reading, Requests},
    sharded::Spread,
};
use crate::{logs, routes::RouteTable};

mod exposition;
mod gauges;
mod history;
mod reading;
mod refusals;
mod shadow;
mod sharded;
mod tallies;

/// What the page is, in the words of HTTP.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// All values of one name.
#[derive(Debug)]
pub struct Family {
    /// As Prometheus knows it.
    pub name: &'static str,
    /// What its samples are told apart by.
    pub labels: &'static [&'static str],
    /// What it is.
    pub kind: Kind,
    /// What it means, on one line.
    pub help: &'static str,
}

/// What a family is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, until the process ends.
    Counter,
    /// Rises and falls.
    Gauge,
    /// How many were at most so large.
    Histogram,
}

/// Everything that there is, in the order of the page.
#[rustfmt::skip]
pub const FAMILIES: [Family; 20] = [
    Family { name: "idempotency_requests_total", labels: &["route", "outcome"], kind: Kind::Counter,
             help: "Covered requests by route and by what they got." },
    Family { name: "idempotency_cache_hit_total", labels: &[], kind: Kind::Counter,
             help: "Requests that were answered from the record and ran nothing." },
    Family { name: "idempotency_cache_miss_total", labels: &[], kind: Kind::Counter,
             help: "Requests that found no answer and were granted a run." },
    Family { name: "idempotency_conflicts_total", labels: &["reason"], kind: Kind::Counter,
             help: "Requests refused because of another one with their key: in_progress (it was still running) or mismatch (it was a different request)." },
    Family { name: "idempotency_mismatches_total", labels: &[], kind: Kind::Counter,
             help: "Requests refused as key-reused: their key was first used for a different request." },
    Family { name: "idempotency_retries_total", labels: &[], kind: Kind::Counter,
             help: "Requests beyond the first for their key: replayed, refused because of an earlier one, or run again." },
    Family { name: "idempotency_uncovered_total", labels: &[], kind: Kind::Counter,
             help: "Requests that carried a key and that no policy covers: they passed through unprotected." },
    Family { name: "idempotency_fallback_total", labels: &[], kind: Kind::Counter,
             help: "Store calls that one of two stores decided alone because the other could not be reached." },
    Family { name: "idempotency_processing_gauge", labels: &[], kind: Kind::Gauge,
             help: "Entries in the store that run and were heard of within their lease." },
    Family { name: "idempotency_outcome_unknown", labels: &[], kind: Kind::Gauge,
             help: "Entries in the store whose end nobody knows: silent for longer than their lease, or parked." },
    Family { name: "idempotency_unknown_total", labels: &[], kind: Kind::Counter,
             help: "Runs that were parked: whether the operation took place is not known." },
    Family { name: "idempotency_late_answers_total", labels: &[], kind: Kind::Counter,
             help: "Answers that came after timeout and within late_answer: a retry gets them." },
    Family { name: "idempotency_lost_claims_total", labels: &[], kind: Kind::Counter,
             help: "Claims found taken over while their operation ran: it may have run twice." },
    Family { name: "idempotency_dropped_total", labels: &[], kind: Kind::Counter,
             help: "Results that the store did not take and that were given up: their outcome is unknown." },
    Family { name: "idempotency_shared_keys_total", labels: &[], kind: Kind::Counter,
             help: "Requests whose key another caller had sent with the same request: mostly one client whose credential changed." },
    Family { name: "idempotency_store_seconds", labels: &["op"], kind: Kind::Histogram,
             help: "How long the store took, by call; wait lasts as long as another request's run." },
    Family { name: "idempotency_overhead_seconds", labels: &[], kind: Kind::Histogram,
             help: "What requests with a key took beyond their operation, from head to answer, waiting included." },
    Family { name: "idempotency_store_bytes", labels: &[], kind: Kind::Gauge,
             help: "What the entries in the store take up, roughly." },
    Family { name: "idempotency_store_up", labels: &["store"], kind: Kind::Gauge,
             help: "Whether a store answers and grants new keys: 1, else 0. Of two stores, each." },
    Family { name: "idempotency_log_lines_lost_total", labels: &[], kind: Kind::Counter,
             help: "Log lines that were never written, because standard error did not take them." },
];

/// Counts what an engine tells.
#[derive(Debug, Default)]
pub struct Metrics {
    requests: Tallies,
    rest: Sharded<Rest>,
}

/// What is counted once per gateway, not per route.
#[derive(Debug, Default)]
struct Rest {
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
    overhead: Histogram,
    store: [Histogram; StoreCall::ALL.len()],
}

/// What was counted since the process began, under the names of the families.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// `idempotency_cache_hit_total`.
    pub hits: u64,
    /// `idempotency_cache_miss_total`.
    pub misses: u64,
    /// `idempotency_conflicts_total` with the reason `in_progress`.
    pub conflicts: u64,
    /// `idempotency_mismatches_total`.
    pub mismatches: u64,
    /// `idempotency_retries_total`.
    pub retries: u64,
    /// `idempotency_fallback_total`.
    pub fallbacks: u64,
    /// `idempotency_unknown_total`.
    pub unknown: u64,
    /// `idempotency_lost_claims_total`.
    pub lost_claims: u64,
    /// `idempotency_requests_total`.
    pub routes: Vec<RouteTotals>,
}

/// The requests of one route.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RouteTotals {
    /// Its name.
    pub route: String,
    /// By what they got; every outcome is there.
    pub outcomes: BTreeMap<&'static str, u64>,
}

/// Counts, then tells somebody else.
pub struct Watched {
    metrics: Arc<Metrics>,
    shadow: Arc<ShadowReport>,
    refusals: Arc<Refusals>,
    then: Arc<dyn Observer>,
}

impl Metrics {
    /// Shows these routes from now on, at zero if nothing was counted for them.
    pub fn show(&self, routes: &RouteTable) {
        routes.iter().for_each(|route| self.requests.show(&route.name));
    }

    /// All of it, in Prometheus' text format. `up` says of each store whether it is.
    pub fn render(&self, stored: Counts, up: &[(&str, bool)]) -> String {
        let mut page = Exposition::default();
        for family in &FAMILIES {
            page.begin(family);
            self.family(&mut page, family.name, stored, up);
        }
        page.into_text()
    }

    /// The same numbers for people and programs that are not Prometheus.
    pub fn totals(&self) -> Totals {
        let total = |of: fn(&Rest) -> &AtomicU64| self.rest.iter().map(|shard| of(shard).load(Relaxed)).sum::<u64>();
        let routes = self.requests.shown().map(|tally| RouteTotals {
            route: tally.route().into(),
            outcomes: tally.read().map(|(outcome, count)| (outcome.name(), count)).collect(),
        });
        Totals {
            hits: total(|rest| &rest.hits),
            misses: total(|rest| &rest.misses),
            conflicts: self.requests.all_of(Outcome::Refused(Reason::InProgress)),
            mismatches: self.requests.all_of(Outcome::Refused(Reason::KeyReused)),
            retries: total(|rest| &rest.retries),
            fallbacks: total(|rest| &rest.fallbacks),
            unknown: self.requests.all_of(Outcome::Unknown) + total(|rest| &rest.late_unknown),
            lost_claims: total(|rest| &rest.lost_claims),
            routes: routes.collect(),
        }
    }

    fn family(&self, page: &mut Exposition<'_>, name: &str, stored: Counts, up: &[(&str, bool)]) {
        let outcome = |outcome| self.requests.all_of(outcome);
        let total = |of: fn(&Rest) -> &AtomicU64| self.rest.iter().map(|shard| of(shard).load(Relaxed)).sum::<u64>();
        let spread = |of: &dyn Fn(&Rest) -> &Histogram| {
            self.rest.iter().fold(Spread::default(), |sum, shard| sum + of(shard).read())
        };
        match name {
            "idempotency_requests_total" => {
                for tally in self.requests.shown() {
                    for (outcome, count) in tally.read() {
                        page.sample(&[tally.route(), outcome.name()], count);
                    }
                }
            }
            "idempotency_cache_hit_total" => page.sample(&[], total(|rest| &rest.hits)),
            "idempotency_cache_miss_total" => page.sample(&[], total(|rest| &rest.misses)),
            "idempotency_conflicts_total" => {
                page.sample(&["in_progress"], outcome(Outcome::Refused(Reason::InProgress)));
                page.sample(&["mismatch"], outcome(Outcome::Refused(Reason::KeyReused)));
            }
            "idempotency_mismatches_total" => page.sample(&[], outcome(Outcome::Refused(Reason::KeyReused))),
            "idempotency_retries_total" => page.sample(&[], total(|rest| &rest.retries)),
            "idempotency_uncovered_total" => page.sample(&[], total(|rest| &rest.uncovered)),
            "idempotency_fallback_total" => page.sample(&[], total(|rest| &rest.fallbacks)),
            "idempotency_processing_gauge" => page.sample(&[], stored.processing),
            "idempotency_outcome_unknown" => page.sample(&[], stored.unknown),
            "idempotency_unknown_total" => {
                page.sample(&[], outcome(Outcome::Unknown) + total(|rest| &rest.late_unknown));
            }
            "idempotency_late_answers_total" => page.sample(&[], total(|rest| &rest.late_answers)),
            "idempotency_lost_claims_total" => page.sample(&[], total(|rest| &rest.lost_claims)),
            "idempotency_dropped_total" => page.sample(&[], total(|rest| &rest.dropped)),
            "idempotency_shared_keys_total" => page.sample(&[], total(|rest| &rest.shared_keys)),
            "idempotency_store_seconds" => {
                for call in StoreCall::ALL {
                    page.histogram(&[call.name()], &spread(&|rest| &rest.store[call as usize]));
                }
            }
            "idempotency_overhead_seconds" => page.histogram(&[], &spread(&|rest| &rest.overhead)),
            "idempotency_store_bytes" => page.sample(&[], stored.bytes),
            "idempotency_store_up" => up.iter().for_each(|(store, is_up)| page.sample(&[store], u64::from(*is_up))),
            "idempotency_log_lines_lost_total" => page.sample(&[], logs::lost()),
            _ => unreachable!("{name} is in the list and has no value"),
        }
    }
}

impl Observer for Metrics {
    fn answered(&self, request: &Answered<'_>) {
        self.requests.of(request.route).add(request.outcome);
        // Without an address nothing was asked of the store, and a request without a key has only begun.
        if request.address.is_none() {
            return;
        }
        let mine = self.rest.mine();
        mine.overhead.observe(request.took.saturating_sub(request.ran_for));
        match request.attempt {
            // Whatever it was answered with: one that lost its claim ran, and got the record of another.
            Some(_) => mine.misses.fetch_add(1, Relaxed),
            None if request.outcome == Outcome::Replayed => mine.hits.fetch_add(1, Relaxed),
            None => 0,
        };
        if is_retry(request) {
            mine.retries.fetch_add(1, Relaxed);
        }
    }

    fn asked(&self, call: StoreCall, took: Duration) {
        self.rest.mine().store[call as usize].observe(took);
    }

    fn noticed(&self, notice: &Notice<'_>) {
        let mine = self.rest.mine();
        match notice {
            Notice::LostClaim(_) => mine.lost_claims.fetch_add(1, Relaxed),
            Notice::LateAnswer { outcome: Outcome::Unknown, .. } => mine.late_unknown.fetch_add(1, Relaxed),
            Notice::LateAnswer { outcome: Outcome::Executed | Outcome::Pending | Outcome::Released, .. } => {
                mine.late_answers.fetch_add(1, Relaxed)
            }
            Notice::Dropped(_) => mine.dropped.fetch_add(1, Relaxed),
            Notice::Uncovered { .. } => mine.uncovered.fetch_add(1, Relaxed),
            Notice::SharedKey(_) => mine.shared_keys.fetch_add(1, Relaxed),
            // A store that had to do without the first, or without the one that decides: never both for one call.
            Notice::Fallback { .. } | Notice::Solo(_) => mine.fallbacks.fetch_add(1, Relaxed),
            _ => return,
        };
    }
}

impl Watched {
    /// Counts from zero what `then` is told.
    pub fn new(then: impl Observer) -> Arc<Self> {
        Self::by(Arc::new(then))
    }

    /// As [`new`](Self::new), for an observer that somebody else has, too.
    pub fn by(then: Arc<dyn Observer>) -> Arc<Self> {
        Arc::new(Self { metrics: Arc::default(), shadow: Arc::default(), refusals: Arc::default(), then })
    }

    /// What shadow mode saw, and who sent no key.
    pub fn shadow(&self) -> &Arc<ShadowReport> {
        &self.shadow
    }

    /// The last refusals.
    pub fn refusals(&self) -> &Arc<Refusals> {
        &self.refusals
    }

    /// What was counted.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }
}

impl Observer for Watched {
    fn answered(&self, request: &Answered<'_>) {
        self.metrics.answered(request);
        self.shadow.answered(request);
        self.refusals.answered(request);
        self.then.answered(request);
    }

    fn asked(&self, call: StoreCall, took: Duration) {
        self.metrics.asked(call, took);
        self.then.asked(call, took);
    }

    fn noticed(&self, notice: &Notice<'_>) {
        self.metrics.noticed(notice);
        self.then.noticed(notice);
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("metrics", &self.metrics).finish_non_exhaustive()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        })
    }
}

/// Whether the request met an earlier one with its key. One that ran is the first if its attempt is: a holder that lost its
/// claim gets the record of another, and was there before it.
fn is_retry(request: &Answered<'_>) -> bool {
    if let Some(attempt) = request.attempt {
        return attempt > 1;
    }
    let met = |reason| matches!(reason, Reason::InProgress | Reason::KeyReused | Reason::OutcomeUnknown);
    match request.outcome {
        Outcome::Replayed | Outcome::Shadow(Shadow::Replay) => true,
        Outcome::Refused(reason) | Outcome::Shadow(Shadow::Refusal(reason)) => met(reason),
        _ => false,
    }
}

/// How many outcomes there are.
const OUTCOMES: usize = NOT_REFUSED.len() + Reason::COUNT;

/// Outcomes but refusals. What a shadow refusal would have been for is in the log.
const NOT_REFUSED: [Outcome; 9] = [
    Outcome::Executed,
    Outcome::Released,
    Outcome::Pending,
    Outcome::Unknown,
    Outcome::Degraded,
    Outcome::Replayed,
    Outcome::Keyless,
    Outcome::Shadow(Shadow::Replay),
    Outcome::Shadow(Shadow::Refusal(Reason::KeyMissing)),
];

/// All outcomes that have a name of their own, each at its [`place`].
fn outcomes() -> [Outcome; OUTCOMES] {
    let mut refusals = Reason::all().map(Outcome::Refused);
    array::from_fn(|at| NOT_REFUSED.get(at).copied().or_else(|| refusals.next()).expect("as many as are counted"))
}

/// Where an outcome is counted.
fn place(outcome: Outcome) -> usize {
    match outcome {
        Outcome::Executed => 0,
        Outcome::Released => 1,
        Outcome::Pending => 2,
        Outcome::Unknown => 3,
        Outcome::Degraded => 4,
        Outcome::Replayed => 5,
        Outcome::Keyless => 6,
        Outcome::Shadow(Shadow::Replay) => 7,
        Outcome::Shadow(Shadow::Refusal(_)) => 8,
        Outcome::Refused(reason) => NOT_REFUSED.len() + reason as usize,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_outcome_has_a_place_and_a_name_of_its_own() {
        let all = outcomes();
        for (at, outcome) in all.into_iter().enumerate() {
            assert_eq!(place(outcome), at, "{outcome:?}");
        }
        let names: HashSet<_> = all.iter().map(|outcome| outcome.name()).collect();
        assert_eq!(names.len(), OUTCOMES);
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
        metrics.noticed(&Notice::Fallback { call: "claim", error: &error });
        metrics.noticed(&Notice::Solo(&at));
        metrics.noticed(&Notice::StoreFailed { call: "claim", error: &error });
        metrics.noticed(&Notice::Restored(&at));
        let page = metrics.render(Counts::default(), &[]);
        assert!(page.contains("\nidempotency_fallback_total 2\n"), "{page}");
        assert!(page.contains("\nidempotency_lost_claims_total 0\n"), "{page}");
    }
}
