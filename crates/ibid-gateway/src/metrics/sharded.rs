//! Counters that many threads update at once.
//!
//! Each thread adds to its own shard, so that threads do not share a cache line; a reader sums the shards. A sum
//! includes every addition that happened before the read, and never decreases.

use std::{
    ops::Add,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

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
