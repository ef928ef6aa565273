//! Whether two kinds of requests can be told apart by the time that their answers take.
//!
//! Times on a machine that does other things have long tails, so that means say little. What counts is the *probability of
//! superiority*: how likely it is that a request of the first kind took longer than one of the second, ties counting half
//! (the area under the ROC curve, AUC). One half means that whoever sees the times knows nothing. Without a difference its
//! standard error is known beforehand, whatever the distribution: `sqrt((n + m + 1) / 12nm)`.
//!
//! ```
//! use ibid_bench::timing::TimingDifference;
//!
//! let compared = TimingDifference::of(&[3.0, 4.0, 5.0], &[1.0, 2.0, 3.0]).unwrap();
//! assert!(compared.auc > 0.9 && compared.medians == [4.0, 2.0]);
//! ```

use crate::verdict::RoundSpread;

/// Beyond so many standard errors two kinds count as told apart. With a few dozen rows, chance gets there once in five hundred runs.
pub const DISTINGUISHABLE_ERRORS: f64 = 4.0;

/// Two sets of times beside each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimingDifference {
    /// The median of each.
    pub medians: [f64; 2],
    /// How likely one of the first is larger than one of the second.
    pub auc: f64,
    /// The standard error of that, if there is no difference.
    pub standard_error: f64,
}

impl TimingDifference {
    /// Of two sets; `None` if one of them is empty.
    #[must_use]
    pub fn of(first: &[f64], second: &[f64]) -> Option<Self> {
        let medians = [first, second].map(|times| RoundSpread::of(times.iter().copied()).map(|spread| spread.median));
        let [Some(one), Some(other)] = medians else { return None };
        let (n, m) = (first.len() as f64, second.len() as f64);
        let mut all: Vec<_> =
            first.iter().map(|time| (*time, true)).chain(second.iter().map(|time| (*time, false))).collect();
        all.sort_by(|one, other| one.0.total_cmp(&other.0));
        // The sum of the ranks of the first; equal times share their mean rank.
        let (mut ranks, mut before) = (0.0, 0.0);
        for equal in all.chunk_by(|one, other| one.0.total_cmp(&other.0).is_eq()) {
            let rank = before + (equal.len() as f64 + 1.0) / 2.0;
            ranks += rank * equal.iter().filter(|(_, is_first)| *is_first).count() as f64;
            before += equal.len() as f64;
        }
        let auc = (ranks - n * (n + 1.0) / 2.0) / (n * m);
        Some(Self { medians: [one, other], auc, standard_error: ((n + m + 1.0) / (12.0 * n * m)).sqrt() })
    }

    /// How many standard errors it is away from no difference.
    #[must_use]
    pub fn standard_errors_away(&self) -> f64 {
        (self.auc - 0.5) / self.standard_error
    }

    /// Whether the two are told apart.
    #[must_use]
    pub fn is_distinguishable(&self) -> bool {
        self.standard_errors_away().abs() > DISTINGUISHABLE_ERRORS
    }
}

/// Puts things into a random order: the same for the same seed, so that a run can be repeated.
pub fn shuffle<T>(things: &mut [T], seed: &mut u64) {
    for at in (1..things.len()).rev() {
        // xorshift64*
        *seed ^= *seed >> 12;
        *seed ^= *seed << 25;
        *seed ^= *seed >> 27;
        let random = seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11;
        things.swap(at, random as usize % (at + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: &mut u64) -> Vec<f64> {
        let mut numbers: Vec<_> = (0..count).map(|n| n as f64).collect();
        shuffle(&mut numbers, seed);
        numbers
    }

    #[test]
    fn it_counts_pairs() {
        let auc = |first: &[f64], second: &[f64]| TimingDifference::of(first, second).unwrap().auc;
        assert_eq!(auc(&[2.0, 3.0], &[0.0, 1.0]), 1.0);
        assert_eq!(auc(&[0.0, 1.0], &[2.0, 3.0]), 0.0);
        assert_eq!(auc(&[1.0, 1.0], &[1.0]), 0.5);
        assert_eq!(auc(&[1.0, 4.0], &[2.0, 3.0]), 0.5);
        // Of four pairs, one is larger, one a tie.
        assert_eq!(auc(&[1.0, 3.0], &[3.0, 2.0]), 1.5 / 4.0);
        assert_eq!(TimingDifference::of(&[], &[1.0]), None);
    }

    #[test]
    fn its_error_is_what_chance_brings_about() {
        // Halves of one set, over and over: the spread of their AUC must be what is said of it.
        let (mut seed, runs) = (7, 400);
        let mut squares = 0.0;
        for _ in 0..runs {
            let all = numbers(400, &mut seed);
            let compared = TimingDifference::of(&all[..200], &all[200..]).unwrap();
            squares += compared.standard_errors_away().powi(2);
            assert!(!compared.is_distinguishable(), "{compared:?}");
        }
        let spread = (squares / f64::from(runs)).sqrt();
        assert!((0.85..1.15).contains(&spread), "{spread} standard errors instead of one");
    }

    #[test]
    fn a_small_shift_under_long_tails_is_seen() {
        let mut seed = 9;
        let tail = |n: f64| 100.0 + 40.0 / (1.0 - n / 4001.0);
        let first: Vec<_> = numbers(4000, &mut seed).into_iter().map(|n| tail(n) + 5.0).collect();
        let second: Vec<_> = numbers(4000, &mut seed).into_iter().map(tail).collect();
        assert!(TimingDifference::of(&first, &second).unwrap().is_distinguishable());
        assert!(!TimingDifference::of(&first, &first).unwrap().is_distinguishable());
    }
}
