use std::{
    array,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use ibid::{Outcome, Reason, Shadow, StoreCall};

use super::{Metrics, Rest, sharded::Spread};

/// Everything that was counted up to one moment. Two of them say what happened in between.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reading {
    /// Requests.
    pub(crate) requests: Requests,
    /// Requests that were answered from the record and ran nothing.
    pub(crate) hits: u64,
    /// Store calls that one of two stores decided alone.
    pub(crate) fallbacks: u64,
    /// Claims found taken over while their operation ran.
    pub(crate) lost_claims: u64,
    /// What requests took beyond their operation.
    pub(crate) overhead: Spread,
    /// What calls of the store took, in the order of [`StoreCall::ALL`].
    pub(crate) store: [Spread; StoreCall::ALL.len()],
}

/// Requests by what they got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Requests {
    /// Ran, and their answer is stored or about to be.
    pub(crate) stored: u64,
    /// Ran, and their answer is not remembered.
    pub(crate) released: u64,
    /// Ran, and nobody knows how they ended.
    pub(crate) unknown: u64,
    /// Ran without protection.
    pub(crate) degraded: u64,
    /// Answered from the record.
    pub(crate) replayed: u64,
    /// Refused because another with the same key ran.
    pub(crate) conflicts: u64,
    /// Refused because their key was used for another request.
    pub(crate) reused: u64,
    /// Refused for another reason.
    pub(crate) refused: u64,
    /// Had no key and passed through.
    pub(crate) keyless: u64,
    /// Passed through in shadow mode.
    pub(crate) shadowed: u64,
}

impl Metrics {
    /// What was counted up to now.
    pub(crate) fn reading(&self) -> Reading {
        let total = |of: fn(&Rest) -> &AtomicU64| self.rest.iter().map(|shard| of(shard).load(Relaxed)).sum();
        let spread =
            |of: &dyn Fn(&Rest) -> Spread| self.rest.iter().fold(Spread::default(), |sum, shard| sum + of(shard));
        let requests = self.by_route().iter().fold(Requests::default(), |sum, (_, more)| sum.plus(more));
        Reading {
            requests,
            hits: total(|rest| &rest.hits),
            fallbacks: total(|rest| &rest.fallbacks),
            lost_claims: total(|rest| &rest.lost_claims),
            overhead: spread(&|rest| rest.overhead.read()),
            store: array::from_fn(|call| spread(&|rest| rest.store[call].read())),
        }
    }

    /// The same by route, requests only.
    pub(crate) fn by_route(&self) -> Vec<(&str, Requests)> {
        let routes = self.requests.shown().map(|tally| {
            let mut requests = Requests::default();
            tally.read().for_each(|(outcome, count)| requests.add(outcome, count));
            (tally.route(), requests)
        });
        routes.collect()
    }
}

impl Reading {
    /// What was counted since `before`, which was read earlier.
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

impl Requests {
    fn add(&mut self, outcome: Outcome, count: u64) {
        *self.of(outcome) += count;
    }

    fn of(&mut self, outcome: Outcome) -> &mut u64 {
        match outcome {
            Outcome::Executed | Outcome::Pending => &mut self.stored,
            Outcome::Released => &mut self.released,
            Outcome::Unknown => &mut self.unknown,
            Outcome::Degraded => &mut self.degraded,
            Outcome::Replayed => &mut self.replayed,
            Outcome::Refused(Reason::InProgress) => &mut self.conflicts,
            Outcome::Refused(Reason::KeyReused) => &mut self.reused,
            Outcome::Refused(_) => &mut self.refused,
            Outcome::Keyless => &mut self.keyless,
            Outcome::Shadow(Shadow::Replay | Shadow::Refusal(_)) => &mut self.shadowed,
        }
    }

    fn each(&self) -> [u64; 10] {
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
        let (now, then) = (self.each(), before.each());
        let [stored, released, unknown, degraded, replayed, conflicts, reused, refused, keyless, shadowed] =
            array::from_fn(|at| now[at].saturating_sub(then[at]));
        Self { stored, released, unknown, degraded, replayed, conflicts, reused, refused, keyless, shadowed }
    }

    /// The sum of both.
    pub(crate) fn plus(&self, more: &Self) -> Self {
        let (mine, theirs) = (self.each(), more.each());
        let [stored, released, unknown, degraded, replayed, conflicts, reused, refused, keyless, shadowed] =
            array::from_fn(|at| mine[at] + theirs[at]);
        Self { stored, released, unknown, degraded, replayed, conflicts, reused, refused, keyless, shadowed }
    }

    /// All of them.
    pub(crate) fn all(&self) -> u64 {
        self.each().iter().sum()
    }

    /// Those that ran under a claim and ended in a known way.
    pub(crate) fn ran(&self) -> u64 {
        self.stored + self.released
    }

    /// Those that were refused, for whatever reason.
    pub(crate) fn all_refused(&self) -> u64 {
        self.conflicts + self.reused + self.refused
    }

    /// Those that the store had no part in.
    pub(crate) fn passed(&self) -> u64 {
        self.keyless + self.shadowed
    }

    /// Those that ran and nobody can vouch for.
    pub(crate) fn open(&self) -> u64 {
        self.unknown + self.degraded
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ibid::{Answered, Observer};

    use super::{super::outcomes, *};

    fn tell(metrics: &Metrics, route: &str, outcome: Outcome) {
        metrics.answered(&Answered {
            route,
            method: "POST",
            path: "/",
            key: "",
            address: Some(ibid::store::Address([1; 32])),
            outcome,
            status: 200,
            attempt: None,
            took: Duration::from_millis(3),
            ran_for: Duration::from_millis(1),
            peer: None,
            request_id: "",
            user_agent: None,
            parts: None,
        });
    }

    #[test]
    fn every_outcome_is_in_the_sum_once() {
        let metrics = Metrics::default();
        let all = outcomes();
        all.iter().for_each(|outcome| tell(&metrics, "POST /a", *outcome));
        let before = metrics.reading();
        assert_eq!(before.requests.all(), all.len() as u64);
        let requests = before.requests;
        let parts = requests.ran() + requests.all_refused() + requests.passed() + requests.open() + requests.replayed;
        assert_eq!(parts, requests.all(), "every part is drawn once");
        tell(&metrics, "POST /b", Outcome::Replayed);
        let since = metrics.reading().since(&before);
        assert_eq!(since.requests, Requests { replayed: 1, ..Requests::default() });
        assert_eq!(since.overhead.count(), 1);
        let by_route = metrics.by_route();
        assert_eq!(by_route.len(), 2);
        assert_eq!(by_route[1], ("POST /b", Requests { replayed: 1, ..Requests::default() }));
    }
}
