//! The counts that charts and the overview show: requests by outcome, hits, fallbacks and overhead.

use std::time::Duration;

use ibid::{RefusalReason, RequestOutcome, observe::ShadowOutcome};

use super::{Metrics, sharded::HistogramSnapshot};

/// Counts since the process started, or of a period.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TrafficCounts {
    /// End of the period, in milliseconds since the Unix epoch.
    pub(crate) at_ms: u64,
    /// Length of the period. Longer than planned if the process was suspended.
    pub(crate) over: Duration,
    pub(crate) requests: RequestCounts,
    /// Requests that were replayed and ran nothing.
    pub(crate) hits: u64,
    /// Store calls that one of two stores decided alone.
    pub(crate) fallbacks: u64,
    /// Time that requests took beyond their operation.
    pub(crate) overhead: HistogramSnapshot,
}

/// Defines the counts, and the operations that work on each of them.
macro_rules! request_counts {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// Requests by outcome.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub(crate) struct RequestCounts {
            $($(#[$doc])* pub(crate) $name: u64,)+
        }

        impl RequestCounts {
            fn combine(&self, other: &Self, with: fn(u64, u64) -> u64) -> Self {
                Self { $($name: with(self.$name, other.$name),)+ }
            }

            pub(crate) fn total(&self) -> u64 {
                [$(self.$name),+].iter().sum()
            }
        }
    };
}

request_counts! {
    /// Ran, and the answer is stored or about to be.
    stored,
    /// Ran, and the answer is not remembered.
    released,
    /// Ran, outcome unknown.
    unknown,
    /// Ran without protection.
    degraded,
    replayed,
    /// Refused because another request with the key was in progress.
    conflicts,
    /// Refused because the key was used for a different request.
    reused,
    /// Refused for another reason.
    refused,
    /// Had no key and passed through.
    keyless,
    /// Passed through in shadow mode.
    shadowed,
}

impl Metrics {
    /// The counts since the process started.
    pub(crate) fn snapshot(&self) -> TrafficCounts {
        TrafficCounts {
            requests: self
                .by_route()
                .fold(RequestCounts::default(), |sum, (_, more)| sum.combine(&more, u64::wrapping_add)),
            hits: self.total(|counters| &counters.hits),
            fallbacks: self.total(|counters| &counters.fallbacks),
            overhead: self.overhead(),
            ..TrafficCounts::default()
        }
    }

    pub(crate) fn by_route(&self) -> impl Iterator<Item = (&str, RequestCounts)> {
        self.routes().map(|route| {
            let mut requests = RequestCounts::default();
            route.by_outcome().for_each(|(outcome, count)| *requests.counter_mut(outcome) += count);
            (route.name(), requests)
        })
    }
}

impl TrafficCounts {
    /// The counts since `before`, an earlier snapshot.
    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            requests: self.requests.combine(&before.requests, u64::saturating_sub),
            hits: self.hits.saturating_sub(before.hits),
            fallbacks: self.fallbacks.saturating_sub(before.fallbacks),
            overhead: self.overhead.since(&before.overhead),
            ..*self
        }
    }

    pub(super) fn add(&mut self, more: &Self) {
        self.at_ms = self.at_ms.max(more.at_ms);
        self.over += more.over;
        self.requests = self.requests.combine(&more.requests, u64::wrapping_add);
        self.hits += more.hits;
        self.fallbacks += more.fallbacks;
        self.overhead = self.overhead + more.overhead;
    }

    pub(crate) fn per_second(&self) -> f64 {
        self.requests.total() as f64 / self.over.as_secs_f64().max(1.0)
    }

    /// `of` as a share of all requests; `None` if there are none.
    pub(crate) fn share_of(&self, of: u64) -> Option<f64> {
        let all = self.requests.total();
        (all > 0).then(|| of as f64 / all as f64)
    }
}

impl RequestCounts {
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
    use ibid::{Observer, RequestReport};

    use super::{super::all_outcomes, *};

    fn tell(metrics: &Metrics, route: &str, outcome: RequestOutcome) {
        metrics.on_request(&RequestReport {
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
        let by_route: Vec<_> = metrics.by_route().collect();
        assert_eq!(by_route.len(), 2);
        assert_eq!(by_route[1], ("POST /b", RequestCounts { replayed: 1, ..RequestCounts::default() }));
    }
}
