//! A latency histogram of logarithmic buckets: constant memory, one increment per sample, about 3 % resolution.

use std::time::Duration;

/// Each power of two of nanoseconds is divided into this many buckets.
const BUCKETS_PER_OCTAVE: u64 = 32;
const STEP_BITS: u32 = BUCKETS_PER_OCTAVE.trailing_zeros();
/// Up to 2^40 ns, about 18 minutes; longer samples land in the last bucket.
const BUCKETS: usize = (40 - STEP_BITS as usize + 1) * BUCKETS_PER_OCTAVE as usize;

/// Counts of samples per bucket.
#[derive(Clone, Debug)]
pub struct LatencyHistogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], total: 0 }
    }
}

impl LatencyHistogram {
    /// Counts one sample.
    pub fn record(&mut self, sample: Duration) {
        let nanos = u64::try_from(sample.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(nanos)] += 1;
        self.total += 1;
    }

    /// Adds all samples of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
    }

    /// The smallest bucket's upper bound that at least `share` (0–1) of the samples do not exceed; zero without samples.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Duration {
        let wanted = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return Duration::from_nanos(upper_bound(index));
            }
        }
        Duration::ZERO
    }
}

/// Below `BUCKETS_PER_OCTAVE` the buckets are exact; above, the leading bit chooses the row and the next `STEP_BITS` bits the bucket.
fn bucket(nanos: u64) -> usize {
    if nanos < BUCKETS_PER_OCTAVE {
        return nanos as usize;
    }
    let row = nanos.ilog2() - STEP_BITS;
    let index = u64::from(row + 1) * BUCKETS_PER_OCTAVE + ((nanos >> row) - BUCKETS_PER_OCTAVE);
    (index as usize).min(BUCKETS - 1)
}

fn upper_bound(index: usize) -> u64 {
    let index = index as u64;
    if index < BUCKETS_PER_OCTAVE {
        return index;
    }
    let row = index / BUCKETS_PER_OCTAVE - 1;
    ((BUCKETS_PER_OCTAVE + index % BUCKETS_PER_OCTAVE + 1) << row) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_within_4_percent_of_its_buckets_bound() {
        for nanos in (0..5_000).chain([65_535, 65_536, 1_000_003, 999_999_999, 30_000_000_000]) {
            let bound = upper_bound(bucket(nanos));
            assert!(bound >= nanos && bound as f64 <= nanos as f64 * 1.04 + 1.0, "{nanos}: {bound}");
        }
    }

    #[test]
    fn quantiles_of_a_uniform_ramp() {
        let mut ramp = LatencyHistogram::default();
        (1..=1000).for_each(|us| ramp.record(Duration::from_micros(us)));
        let p50 = ramp.quantile(0.5).as_micros();
        let p99 = ramp.quantile(0.99).as_micros();
        assert!((500..=520).contains(&p50), "{p50}");
        assert!((990..=1030).contains(&p99), "{p99}");
        assert_eq!(LatencyHistogram::default().quantile(0.5), Duration::ZERO);
    }
}
