//! Requests by route and outcome.
//!
//! Routes are identified by name, so that their counts survive a reload. A lookup uses the address of the route's name
//! as a hint and verifies it by comparing the names, so the hot path takes no lock and hashes no string.
//!
//! Bound: [`MAX_ROUTES`] routes over all configurations since the start; more are counted together.

use std::{
    collections::BTreeMap,
    sync::{
        OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use ibid::RequestOutcome;
use parking_lot::Mutex;

use super::{OUTCOME_COUNT, all_outcomes, outcome_index, sharded::Sharded};

/// Routes with counters of their own.
const MAX_ROUTES: usize = 200;
/// The name for all further routes. No route has it: they are called `*`, or by a method and a path.
const OTHER_ROUTES: &str = "other";
const HINT_SLOTS: usize = 1024;

#[derive(Debug)]
pub(super) struct RouteCounters {
    /// Filled from the front and never removed; the last one is for [`OTHER_ROUTES`].
    all: Box<[OnceLock<RouteCounter>; MAX_ROUTES + 1]>,
    /// Locked while a route is added.
    adding: Mutex<()>,
    /// The counter that a name at this memory address had last. Only a hint.
    hints: Box<[AtomicUsize; HINT_SLOTS]>,
}

#[derive(Debug)]
pub(crate) struct RouteCounter {
    route: Box<str>,
    outcomes: Sharded<[AtomicU64; OUTCOME_COUNT]>,
}

impl RouteCounters {
    pub(super) fn get_or_insert(&self, route: &str) -> &RouteCounter {
        // Names are at least 8 bytes apart. The multiplier is 2^64 divided by the golden ratio.
        let place = (route.as_ptr() as u64 >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - HINT_SLOTS.ilog2());
        let hint = &self.hints[place as usize % HINT_SLOTS];
        match self.all[hint.load(Relaxed) % self.all.len()].get() {
            Some(tally) if *tally.route == *route => tally,
            _ => self.find_or_insert(route, hint),
        }
    }

    #[cold]
    fn find_or_insert(&self, route: &str, hint: &AtomicUsize) -> &RouteCounter {
        // Checked before the search: if the table is full now, a route that the search misses is never added.
        let full = self.all[MAX_ROUTES - 1].get().is_some();
        let at = self.find(route).unwrap_or_else(|| if full { MAX_ROUTES } else { self.insert(route) });
        hint.store(at, Relaxed);
        self.all[at].get().unwrap_or_else(|| self.other_routes())
    }

    fn find(&self, route: &str) -> Option<usize> {
        let known = self.all[..MAX_ROUTES].iter().map_while(OnceLock::get);
        known.enumerate().find(|(_, tally)| *tally.route == *route).map(|(at, _)| at)
    }

    fn insert(&self, route: &str) -> usize {
        let _adding = self.adding.lock();
        // Another thread may have added it.
        if let Some(at) = self.find(route) {
            return at;
        }
        let at = self.all[..MAX_ROUTES].iter().position(|tally| tally.get().is_none()).unwrap_or(MAX_ROUTES);
        if at < MAX_ROUTES {
            self.all[at].get_or_init(|| RouteCounter::new(route));
        }
        at
    }

    fn other_routes(&self) -> &RouteCounter {
        self.all[MAX_ROUTES].get_or_init(|| RouteCounter::new(OTHER_ROUTES))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &RouteCounter> {
        self.all.iter().filter_map(OnceLock::get)
    }

    pub(super) fn total(&self, outcome: RequestOutcome) -> u64 {
        self.iter().map(|tally| tally.count(outcome)).sum()
    }
}

impl Default for RouteCounters {
    fn default() -> Self {
        let new = <[_; MAX_ROUTES + 1]>::try_from(Vec::from_iter((0..=MAX_ROUTES).map(|_| OnceLock::new())));
        let hints = Vec::from_iter((0..HINT_SLOTS).map(|_| AtomicUsize::new(0)));
        Self {
            all: Box::new(new.expect("of this length")),
            adding: Mutex::default(),
            hints: hints.into_boxed_slice().try_into().expect("of this length"),
        }
    }
}

impl RouteCounter {
    fn new(route: &str) -> Self {
        Self { route: route.into(), outcomes: Sharded::default() }
    }

    pub(crate) fn name(&self) -> &str {
        &self.route
    }

    pub(super) fn increment(&self, outcome: RequestOutcome) {
        self.outcomes.local()[outcome_index(outcome)].fetch_add(1, Relaxed);
    }

    fn count(&self, outcome: RequestOutcome) -> u64 {
        self.outcomes.iter().map(|shard| shard[outcome_index(outcome)].load(Relaxed)).sum()
    }

    /// The counts by the names of outcomes; every outcome is present.
    pub(crate) fn by_name(&self) -> BTreeMap<&'static str, u64> {
        self.by_outcome().map(|(outcome, count)| (outcome.name(), count)).collect()
    }

    pub(crate) fn by_outcome(&self) -> impl Iterator<Item = (RequestOutcome, u64)> {
        all_outcomes().into_iter().map(|outcome| (outcome, self.count(outcome)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(tallies: &RouteCounters) -> Vec<(&str, u64)> {
        tallies.iter().map(|tally| (tally.name(), tally.count(RequestOutcome::Executed))).collect()
    }

    #[test]
    fn a_name_is_one_route_wherever_it_lies() {
        let tallies = RouteCounters::default();
        for _ in 0..100 {
            // Kept until the end of the round, so that each name has another address.
            let names: Vec<String> = (0..10).map(|n| format!("POST /{n}")).collect();
            names.iter().for_each(|name| tallies.get_or_insert(name).increment(RequestOutcome::Executed));
        }
        assert_eq!(counts(&tallies).len(), 10);
        assert!(counts(&tallies).iter().all(|(_, count)| *count == 100));
    }

    #[test]
    fn a_place_in_memory_that_has_another_name_now_is_another_route() {
        let tallies = RouteCounters::default();
        let mut name = String::from("POST /a");
        tallies.get_or_insert(&name).increment(RequestOutcome::Executed);
        name.replace_range(6.., "b");
        tallies.get_or_insert(&name).increment(RequestOutcome::Executed);
        tallies.get_or_insert(&name).increment(RequestOutcome::Executed);
        assert_eq!(counts(&tallies), [("POST /a", 1), ("POST /b", 2)]);
    }

    #[test]
    fn routes_beyond_the_bound_are_counted_together_and_nothing_is_lost() {
        let tallies = RouteCounters::default();
        let names: Vec<String> = (0..MAX_ROUTES + 50).map(|n| format!("POST /{n}")).collect();
        for _ in 0..3 {
            names.iter().for_each(|name| tallies.get_or_insert(name).increment(RequestOutcome::Executed));
        }
        let counts = counts(&tallies);
        assert_eq!(counts.len(), MAX_ROUTES + 1);
        assert!(counts[..MAX_ROUTES].iter().all(|(_, count)| *count == 3));
        assert_eq!(counts[MAX_ROUTES], ("other", 150));
        assert_eq!(tallies.total(RequestOutcome::Executed), 3 * names.len() as u64);
    }

    #[test]
    fn a_route_that_many_meet_at_once_is_added_once() {
        let tallies = RouteCounters::default();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    (0..MAX_ROUTES)
                        .for_each(|n| tallies.get_or_insert(&format!("POST /{n}")).increment(RequestOutcome::Executed));
                });
            }
        });
        assert_eq!(counts(&tallies).len(), MAX_ROUTES);
        assert!(counts(&tallies).iter().all(|(_, count)| *count == 8));
    }
}
