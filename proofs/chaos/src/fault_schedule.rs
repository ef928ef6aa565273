//! When which fault happens: a pure function of the seed.

use std::{ops::Range, time::Duration};

use crate::random::SplitMix64;

/// No script has more steps.
const MAX_STEPS: usize = 100_000;

/// What the script needs to know about a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultShape {
    /// What it acts on.
    pub targets: Vec<String>,
    /// How long it may last.
    pub durations: Range<Duration>,
}

impl FaultShape {
    /// Whether both act on the same thing.
    fn overlaps(&self, other: &FaultShape) -> bool {
        self.targets.iter().any(|target| other.targets.contains(target))
    }
}

/// One fault at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledFault {
    /// When it begins, from the start of the load.
    pub at: Duration,
    /// Which one it is.
    pub fault: usize,
    /// How long it lasts.
    pub duration: Duration,
}

/// How often faults happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRate {
    /// The load's length; every fault is over by then.
    pub load_duration: Duration,
    /// The mean time between the beginnings of two faults.
    pub mean_interval: Duration,
    /// How many may be at work at once.
    pub max_concurrent: usize,
}

/// The steps in order. Every fault comes before any comes twice, as far as targets are free, so that even a short run sees
/// many kinds.
pub fn schedule_faults(seed: u64, shapes: &[FaultShape], tempo: FaultRate) -> Vec<ScheduledFault> {
    let mut dice = SplitMix64::new(seed);
    let mut steps: Vec<ScheduledFault> = Vec::new();
    let mut deck: Vec<usize> = Vec::new();
    let mut at_work: Vec<ScheduledFault> = Vec::new();
    let mut now = Duration::ZERO;
    while steps.len() < MAX_STEPS && !shapes.is_empty() {
        now += dice.within(&(tempo.mean_interval / 2..tempo.mean_interval * 3 / 2)).max(Duration::from_millis(1));
        if now >= tempo.load_duration {
            break;
        }
        at_work.retain(|step| step.at + step.duration >= now);
        if at_work.len() >= tempo.max_concurrent {
            continue;
        }
        if deck.is_empty() {
            deck = (0..shapes.len()).collect();
        }
        let free = |fault: &usize| !at_work.iter().any(|step| shapes[step.fault].overlaps(&shapes[*fault]));
        let choices: Vec<usize> = (0..deck.len()).filter(|card| free(&deck[*card])).collect();
        if choices.is_empty() {
            continue;
        }
        let fault = deck.swap_remove(choices[dice.next_below(choices.len())]);
        let lasts = dice.within(&shapes[fault].durations).min(tempo.load_duration - now);
        let step = ScheduledFault { at: now, fault, duration: lasts };
        steps.push(step);
        at_work.push(step);
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEMPO: FaultRate = FaultRate {
        load_duration: Duration::from_secs(30),
        mean_interval: Duration::from_millis(300),
        max_concurrent: 3,
    };

    fn shapes() -> Vec<FaultShape> {
        let shape = |targets: &str, from, to| FaultShape {
            targets: targets.split(' ').map(str::to_owned).collect(),
            durations: Duration::from_millis(from)..Duration::from_millis(to),
        };
        vec![shape("a", 0, 500), shape("a", 200, 2000), shape("b", 0, 0), shape("c", 1000, 3000), shape("d a", 5, 50)]
    }

    #[test]
    fn a_seed_gives_its_script_and_no_other() {
        let first = schedule_faults(7, &shapes(), TEMPO);
        assert_eq!(first, schedule_faults(7, &shapes(), TEMPO));
        assert_ne!(first, schedule_faults(8, &shapes(), TEMPO));
    }

    #[test]
    fn a_target_has_one_fault_at_a_time_and_all_end_in_time() {
        for seed in 0..200 {
            let (shapes, steps) = (shapes(), schedule_faults(seed, &shapes(), TEMPO));
            assert!(steps.len() > 20, "seed {seed}: {steps:?}");
            for (nth, step) in steps.iter().enumerate() {
                assert!(step.at + step.duration <= TEMPO.load_duration, "seed {seed}: {step:?}");
                assert!(shapes[step.fault].durations.end >= step.duration);
                let before = steps[..nth].iter().filter(|other| other.at + other.duration >= step.at);
                let before: Vec<_> = before.collect();
                assert!(before.len() < TEMPO.max_concurrent, "seed {seed}: {before:?} and {step:?}");
                assert!(!before.iter().any(|other| shapes[other.fault].overlaps(&shapes[step.fault])));
            }
            for fault in 0..shapes.len() {
                assert!(steps.iter().any(|step| step.fault == fault), "seed {seed} has no fault {fault}");
            }
        }
    }

    #[test]
    fn without_faults_or_time_there_are_no_steps() {
        assert!(schedule_faults(1, &[], TEMPO).is_empty());
        assert!(schedule_faults(1, &shapes(), FaultRate { load_duration: Duration::ZERO, ..TEMPO }).is_empty());
    }
}
