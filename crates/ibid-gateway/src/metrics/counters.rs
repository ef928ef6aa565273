//! Counters that many threads update at once.
//!
//! Each thread adds to its own shard, so that threads do not share a cache line; a reader sums the shards. A sum
//! includes every addition that happened before the read, and never decreases.
//!
//! Routes are identified by name, so that their counts survive a reload. A lookup uses the address of the route's name
//! as a hint and verifies it by comparing the names, so the hot path takes no lock and hashes no string. Bound:
//! [`MAX_ROUTES`] routes over all configurations since the start; more are counted together.

use std::{
    collections::BTreeMap,
    ops::Add,
    sync::{
        OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use ibid::RequestOutcome;
use parking_lot::Mutex;

use super::{OUTCOME_COUNT, all_outcomes, outcome_index};

const SHARD_COUNT: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Sharded<T>(Box<[CacheAligned<T>; SHARD_COUNT]>);

/// Aligned to two cache lines, because processors prefetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CacheAligned<T>(T);

impl<T> Sharded<T> {
    pub(super) fn local(&self) -> &T {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static MINE: usize = NEXT.fetch_add(1, Relaxed) % SHARD_COUNT);
        &self.0[MINE.with(|mine| *mine) % SHARD_COUNT].0
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|shard| &shard.0)
    }
}

/// Upper bounds of the buckets, in nanoseconds and as Prometheus labels: from an in-process call to a wait for another
/// request's run.
#[rustfmt::skip]
const BUCKET_BOUNDS: [(u64, &str); 20] = [
    (10_000, "0.00001"), (25_000, "0.000025"), (50_000, "0.00005"),
    (100_000, "0.0001"), (250_000, "0.00025"), (500_000, "0.0005"),
    (1_000_000, "0.001"), (2_500_000, "0.0025"), (5_000_000, "0.005"),
    (10_000_000, "0.01"), (25_000_000, "0.025"), (50_000_000, "0.05"),
    (100_000_000, "0.1"), (250_000_000, "0.25"), (500_000_000, "0.5"),
    (1_000_000_000, "1"), (2_500_000_000, "2.5"), (5_000_000_000, "5"),
    (10_000_000_000, "10"), (30_000_000_000, "30"),
];

#[derive(Debug, Default)]
pub(super) struct Histogram {
    /// Not cumulative. The last bucket counts durations above all bounds.
    buckets: [AtomicU64; BUCKET_BOUNDS.len() + 1],
    /// Nanoseconds: enough for 584 years.
    sum: AtomicU64,
}

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct HistogramSnapshot {
    buckets: [u64; BUCKET_BOUNDS.len() + 1],
    sum: u64,
}

impl Histogram {
    pub(super) fn observe(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BUCKET_BOUNDS.partition_point(|(bound, _)| *bound < nanos);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.sum.fetch_add(nanos, Relaxed);
    }

    pub(super) fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            buckets: self.buckets.each_ref().map(|bucket| bucket.load(Relaxed)),
            sum: self.sum.load(Relaxed),
        }
    }
}

impl HistogramSnapshot {
    /// For each bound, the number of durations up to it; the last item is the total.
    pub(super) fn cumulative(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let bounds = BUCKET_BOUNDS.iter().map(|(_, bound)| *bound).chain(["+Inf"]);
        let mut sum = 0;
        let counts = self.buckets.map(|bucket| {
            sum += bucket;
            sum
        });
        bounds.zip(counts)
    }

    pub(crate) fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    pub(crate) fn since(&self, before: &Self) -> Self {
        let mut since = *self;
        since.buckets.iter_mut().zip(before.buckets).for_each(|(now, then)| *now = now.saturating_sub(then));
        since.sum = self.sum.wrapping_sub(before.sum);
        since
    }

    /// `None` if it is empty.
    pub(crate) fn mean(&self) -> Option<Duration> {
        Some(Duration::from_nanos(self.sum.checked_div(self.count())?))
    }

    /// The quantile `part` (0 to 1), interpolated linearly within a bucket. `None` if it is empty.
    pub(crate) fn quantile(&self, part: f64) -> Option<Duration> {
        let count = self.count();
        let rank = part.clamp(0.0, 1.0) * count as f64;
        let mut below = 0;
        for (at, held) in self.buckets.iter().copied().enumerate().filter(|(_, held)| *held > 0) {
            if rank <= (below + held) as f64 {
                let from = at.checked_sub(1).map_or(0, |lower| BUCKET_BOUNDS[lower].0);
                // Durations above all bounds count as the last bound, as in Prometheus.
                let to = BUCKET_BOUNDS.get(at).map_or(from, |(bound, _)| *bound);
                let within = (rank - below as f64) / held as f64;
                return Some(Duration::from_nanos(from + ((to - from) as f64 * within) as u64));
            }
            below += held;
        }
        None
    }

    pub(super) fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum)
    }
}

impl Add for HistogramSnapshot {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self.buckets.iter_mut().zip(other.buckets).for_each(|(sum, more)| *sum += more);
        self.sum = self.sum.wrapping_add(other.sum);
        self
    }
}

/// Routes with counters of their own.
const MAX_ROUTES: usize = 200;
/// The name for all further routes. No route has it: they are called `*`, or by a method and a path.
const OTHER_ROUTES: &str = "other";
const HINT_SLOTS: usize = 1024;

#[derive(Debug)]
pub(super) struct RouteCounters {
    /// Filled from the front and never removed; the last one is for [`OTHER_ROUTES`].
    all: Box<[OnceLock<RouteCounter>]>,
    /// Locked while a route is added.
    adding: Mutex<()>,
    /// The counter that a name at this memory address had last. Only a hint.
    hints: Box<[AtomicUsize]>,
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
        self.all[at].get_or_init(|| RouteCounter::new(OTHER_ROUTES))
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

    pub(super) fn iter(&self) -> impl Iterator<Item = &RouteCounter> {
        self.all.iter().filter_map(OnceLock::get)
    }

    pub(super) fn total(&self, outcome: RequestOutcome) -> u64 {
        self.iter().map(|tally| tally.count(outcome)).sum()
    }
}

impl Default for RouteCounters {
    fn default() -> Self {
        Self {
            all: (0..=MAX_ROUTES).map(|_| OnceLock::new()).collect(),
            adding: Mutex::default(),
            hints: (0..HINT_SLOTS).map(|_| AtomicUsize::new(0)).collect(),
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
    use std::thread;

    use super::*;

    #[test]
    fn a_bound_belongs_to_its_own_bucket() {
        let histogram = Histogram::default();
        for nanos in [0, 10_000, 10_001, 30_000_000_000, 30_000_000_001] {
            histogram.observe(Duration::from_nanos(nanos));
        }
        histogram.observe(Duration::MAX);
        let read: Vec<_> = histogram.snapshot().cumulative().collect();
        assert_eq!(read[..2], [("0.00001", 2), ("0.000025", 3)]);
        assert_eq!(read[19..], [("30", 4), ("+Inf", 6)]);
    }

    #[test]
    fn a_part_of_them_took_at_most_so_long() {
        let histogram = Histogram::default();
        assert_eq!(histogram.snapshot().quantile(0.5), None);
        (0..100).for_each(|_| histogram.observe(Duration::from_micros(700)));
        let first = histogram.snapshot();
        assert_eq!(first.quantile(0.5), Some(Duration::from_micros(750)), "half way from 500 to 1000");
        histogram.observe(Duration::from_secs(100));
        assert_eq!(histogram.snapshot().quantile(1.0), Some(Duration::from_secs(30)));
        let since = histogram.snapshot().since(&first);
        assert_eq!((since.count(), since.sum()), (1, Duration::from_secs(100)));
        assert_eq!(since.quantile(0.01), Some(Duration::from_secs(30)));
    }

    #[test]
    fn bounds_are_what_they_say_and_grow() {
        assert!(BUCKET_BOUNDS.is_sorted_by(|a, b| a.0 < b.0));
        for (nanos, text) in BUCKET_BOUNDS {
            let seconds: f64 = text.parse().unwrap();
            assert_eq!((seconds * 1e9).round() as u64, nanos, "{text}");
        }
    }

    #[test]
    fn no_addition_is_lost_between_more_threads_than_shards() {
        let sharded = Sharded::<Histogram>::default();
        thread::scope(|scope| {
            for _ in 0..SHARD_COUNT * 2 {
                scope.spawn(|| (0..1000).for_each(|n| sharded.local().observe(Duration::from_nanos(n))));
            }
        });
        let all = sharded.iter().fold(HistogramSnapshot::default(), |sum, shard| sum + shard.snapshot());
        assert_eq!(all.count(), SHARD_COUNT as u64 * 2000);
        assert_eq!(all.sum(), Duration::from_nanos(SHARD_COUNT as u64 * 2 * 499_500));
        assert!(sharded.iter().filter(|shard| shard.snapshot().count() > 0).count() > 1, "more than one shard is used");
    }
}

#[cfg(test)]
mod route_counters_tests {
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
