//! From samples to verdicts: compare within each round, then take the median over rounds.

use crate::{
    rows::{BenchmarkTarget, TargetMeasure},
    runner::ContenderResult,
};

/// Median and extremes over the rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoundSpread {
    /// The middle value, or the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl RoundSpread {
    /// Of at least one value; none gives `None`.
    #[must_use]
    pub fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = match values.len() % 2 {
            0 => (values[middle - 1] + values[middle]) / 2.0,
            _ => values[middle],
        };
        Some(Self { median, min, max })
    }
}

/// How a target came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetVerdict {
    /// The median keeps the bound.
    Met,
    /// It does not.
    Missed,
    /// There is no bound, or too few rounds.
    NotJudged,
    /// The contender or its baseline did not work.
    Invalid,
}

impl TargetVerdict {
    /// How it is printed.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "missed",
            Self::NotJudged => "not judged",
            Self::Invalid => "INVALID",
        }
    }
}

/// A target with its result.
#[derive(Debug)]
pub struct TargetResult {
    /// The target.
    pub target: &'static BenchmarkTarget,
    /// The per-round comparison with the baseline.
    pub spread: Option<RoundSpread>,
    /// How it came out.
    pub verdict: TargetVerdict,
}

/// Compares a contender with a target's baseline; without `judging`, figures only.
#[must_use]
pub fn judge_target(
    target: &'static BenchmarkTarget, own: &ContenderResult, baseline: &ContenderResult, judging: bool,
) -> TargetResult {
    if own.problem.is_some() || baseline.problem.is_some() {
        return TargetResult { target, spread: None, verdict: TargetVerdict::Invalid };
    }
    // Both have a sample for every round, in the order of rounds, because neither has a problem.
    let rounds = own.samples.iter().zip(&baseline.samples);
    let spread = RoundSpread::of(rounds.map(|(own, base)| match target.measure {
        TargetMeasure::Speed(_) | TargetMeasure::SpeedNotJudged => own.per_second / base.per_second,
        TargetMeasure::CpuRatio(_) => own.cpu_us / base.cpu_us,
    }));
    let kept = spread.and_then(|spread| match target.measure {
        TargetMeasure::Speed(at_least) => Some(spread.median >= at_least),
        TargetMeasure::CpuRatio(at_most) => Some(spread.median <= at_most),
        TargetMeasure::SpeedNotJudged => None,
    });
    let verdict = match kept {
        Some(true) if judging => TargetVerdict::Met,
        Some(false) if judging => TargetVerdict::Missed,
        _ => TargetVerdict::NotJudged,
    };
    TargetResult { target, spread, verdict }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::RoundSample;

    const SPEED: &BenchmarkTarget = &BenchmarkTarget { baseline: "nginx", measure: TargetMeasure::Speed(0.9) };
    const CPU: &BenchmarkTarget = &BenchmarkTarget { baseline: "nginx", measure: TargetMeasure::CpuRatio(1.4) };

    fn measured(name: &'static str, speeds: &[f64], problem: Option<&str>) -> ContenderResult {
        let sample = |per_second| RoundSample {
            per_second,
            p50_us: Some(1.0),
            p99_us: Some(2.0),
            cpu_us: 1_000.0 / per_second,
            store_cpu_us: None,
            load_cpu_us: 9.0,
            idle: 0.0,
            foreign_load: 0.0,
        };
        ContenderResult {
            name,
            samples: speeds.iter().copied().map(sample).collect(),
            problem: problem.map(str::to_owned),
        }
    }

    fn miss(own: &ContenderResult, base: &ContenderResult) -> TargetResult {
        judge_target(SPEED, own, base, true)
    }

    #[test]
    fn more_cpu_than_the_ratio_misses() {
        let base = measured("nginx", &[100.0; 5], None);
        let verdict = |speed| judge_target(CPU, &measured("ibid-miss", &[speed; 5], None), &base, true);
        assert_eq!(verdict(80.0).verdict, TargetVerdict::Met);
        assert_eq!(verdict(80.0).spread.map(|spread| spread.median), Some(1.25));
        assert_eq!(verdict(50.0).verdict, TargetVerdict::Missed);
    }

    #[test]
    fn the_median_of_per_round_ratios_decides_not_the_ratio_of_medians() {
        let base = measured("nginx", &[100.0, 200.0, 400.0, 100.0, 100.0], None);
        let own = measured("ibid-miss", &[95.0, 190.0, 200.0, 95.0, 95.0], None);
        let judged = miss(&own, &base);
        assert_eq!(judged.verdict, TargetVerdict::Met);
        assert_eq!(judged.spread, Some(RoundSpread { median: 0.95, min: 0.5, max: 0.95 }));
    }

    #[test]
    fn a_problem_on_either_side_makes_the_row_invalid() {
        let good = measured("nginx", &[1.0], None);
        let bad = measured("ibid-miss", &[], Some("status 503"));
        assert_eq!(miss(&bad, &good).verdict, TargetVerdict::Invalid);
        assert_eq!(miss(&good, &bad).verdict, TargetVerdict::Invalid);
    }
}
