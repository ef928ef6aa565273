use std::{
    array,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use ibid::{RefusalReason, RequestOutcome, ShadowOutcome, StoreCall};

use super::{GatewayCounters, Metrics, sharded::HistogramSnapshot};

/// All counters at one moment. The difference of two is what happened in between.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MetricsSnapshot {
    pub(crate) requests: RequestCounts,
    /// Requests that were replayed and ran nothing.
    pub(crate) hits: u64,
    /// Store calls that one of two stores decided alone.
    pub(crate) fallbacks: u64,
    /// Claims taken over while their operation ran.
    pub(crate) lost_claims: u64,
    /// Time that requests took beyond their operation.
    pub(crate) overhead: HistogramSnapshot,
    /// Duration of store calls, in the order of [`StoreCall::ALL`].
    pub(crate) store: [HistogramSnapshot; StoreCall::ALL.len()],
}

/// Requests by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RequestCounts {
    /// Ran, and the answer is stored or about to be.
    pub(crate) stored: u64,
    /// Ran, and the answer is not remembered.
    pub(crate) released: u64,
    /// Ran, outcome unknown.
    pub(crate) unknown: u64,
    /// Ran without protection.
    pub(crate) degraded: u64,
    pub(crate) replayed: u64,
    /// Refused because another request with the key was in progress.
    pub(crate) conflicts: u64,
    /// Refused because the key was used for a different request.
    pub(crate) reused: u64,
    /// Refused for another reason.
    pub(crate) refused: u64,
    /// Had no key and passed through.
    pub(crate) keyless: u64,
    /// Passed through in shadow mode.
    pub(crate) shadowed: u64,
}

impl Metrics {
    pub(crate) fn snapshot(&self) -> MetricsSnapshot {
        let total =
            |of: fn(&GatewayCounters) -> &AtomicU64| self.counters.iter().map(|shard| of(shard).load(Relaxed)).sum();
        let spread = |of: &dyn Fn(&GatewayCounters) -> HistogramSnapshot| {
            self.counters.iter().fold(HistogramSnapshot::default(), |sum, shard| sum + of(shard))
        };
        let requests = self.by_route().iter().fold(RequestCounts::default(), |sum, (_, more)| sum.plus(more));
        MetricsSnapshot {
            requests,
            hits: total(|rest| &rest.hits),
            fallbacks: total(|rest| &rest.fallbacks),
            lost_claims: total(|rest| &rest.lost_claims),
            overhead: spread(&|rest| rest.overhead.snapshot()),
            store: array::from_fn(|call| spread(&|rest| rest.store[call].snapshot())),
        }
    }

    /// The request counts of each route.
    pub(crate) fn by_route(&self) -> Vec<(&str, RequestCounts)> {
        let routes = self.requests.iter().map(|tally| {
            let mut requests = RequestCounts::default();
            tally.counts_by_outcome().for_each(|(outcome, count)| requests.add(outcome, count));
            (tally.route(), requests)
        });
        routes.collect()
    }
}

impl MetricsSnapshot {
    /// The counts since `before`, an earlier snapshot.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            requests: self.requests.since(&before.requests),
            hits: self.hits.saturating_sub(before.hits),
            fallbacks: self.fallbacks.saturating_sub(before.fallbacks),
            lost_claims: self.lost_claims.saturating_sub(before.lost_claims),
            overhead: self.overhead.since(&before.overhead),
            store: array::from_fn(|call| self.store[call].since(&before.store[call])),
        }
    }
}

impl RequestCounts {
    fn add(&mut self, outcome: RequestOutcome, count: u64) {
        *self.counter_mut(outcome) += count;
    }

    fn counter_mut(&mut self, outcome: RequestOutcome) -> &mut u64 {
        match outcome {
            RequestOutcome::Executed | RequestOutcome::Pending => &mut self.stored,
            RequestOutcome::Released => &mut self.released,
            RequestOutcome::Unknown => &mut self.unknown,
            RequestOutcome::Degraded => &mut self.degraded,
            RequestOutcome::Replayed => &mut self.replayed,
            RequestOutcome::Refused(RefusalReason::InProgress) => &mut self.conflicts,
            RequestOutcome::Refused(RefusalReason::KeyReused) => &mut self.reused,
            RequestOutcome::Refused(_) => &mut self.refused,
            RequestOutcome::Keyless => &mut self.keyless,
            RequestOutcome::Shadow(ShadowOutcome::Replay | ShadowOutcome::Refusal(_)) => &mut self.shadowed,
        }
    }

    fn as_array(&self) -> [u64; 10] {
        [
            self.stored,
            self.released,
            self.unknown,
            self.degraded,
            self.replayed,
            self.conflicts,
            self.reused,
            self.refused,
            self.keyless,
            self.shadowed,
        ]
    }

    fn since(&self, before: &Self) -> Self {
        let (now, then) = (self.as_array(), before.as_array());
        let [stored, released, unknown, degraded, replayed, conflicts, reused, refused, keyless, shadowed] =
            array::from_fn(|at| now[at].saturating_sub(then[at]));
        Self { stored, released, unknown, degraded, replayed, conflicts, reused, refused, keyless, shadowed }
    }

    pub(crate) fn plus(&self, more: &Self) -> Self {
        let (mine, theirs) = (self.as_array(), more.as_array());
        let [stored, released, unknown, degraded, replayed, conflicts, reused, refused, keyless, shadowed] =
            array::from_fn(|at| mine[at] + theirs[at]);
        Self { stored, released, unknown, degraded, replayed, conflicts, reused, refused, keyless, shadowed }
    }

    pub(crate) fn total(&self) -> u64 {
        self.as_array().iter().sum()
    }

    /// Ran under a claim with a known outcome.
    pub(crate) fn ran(&self) -> u64 {
        self.stored + self.released
    }

    /// Refused for any reason.
    pub(crate) fn total_refused(&self) -> u64 {
        self.conflicts + self.reused + self.refused
    }

    /// Passed through without a claim.
    pub(crate) fn passed_through(&self) -> u64 {
        self.keyless + self.shadowed
    }

    /// Ran without a known outcome or without protection.
    pub(crate) fn open(&self) -> u64 {
        self.unknown + self.degraded
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ibid::{Observer, RequestReport};

    use super::{super::all_outcomes, *};

    fn tell(metrics: &Metrics, route: &str, outcome: RequestOutcome) {
        metrics.answered(&RequestReport {
            route,
            method: "POST",
            path: "/",
            key: "",
            address: Some(ibid::store::Address([1; 32])),
            outcome,
            status: 200,
            attempt: None,
            took: Duration::from_millis(3),
            run_took: Duration::from_millis(1),
            client_address: None,
            request_id: "",
            user_agent: None,
            parts: None,
        });
    }

    #[test]
    fn every_outcome_is_in_the_sum_once() {
        let metrics = Metrics::default();
        let all = all_outcomes();
        all.iter().for_each(|outcome| tell(&metrics, "POST /a", *outcome));
        let before = metrics.snapshot();
        assert_eq!(before.requests.total(), all.len() as u64);
        let requests = before.requests;
        let parts =
            requests.ran() + requests.total_refused() + requests.passed_through() + requests.open() + requests.replayed;
        assert_eq!(parts, requests.total(), "every part is drawn once");
        tell(&metrics, "POST /b", RequestOutcome::Replayed);
        let since = metrics.snapshot().since(&before);
        assert_eq!(since.requests, RequestCounts { replayed: 1, ..RequestCounts::default() });
        assert_eq!(since.overhead.count(), 1);
        let by_route = metrics.by_route();
        assert_eq!(by_route.len(), 2);
        assert_eq!(by_route[1], ("POST /b", RequestCounts { replayed: 1, ..RequestCounts::default() }));
    }
}
