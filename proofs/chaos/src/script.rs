//! When which fault happens: a pure function of the seed.

use std::{ops::Range, time::Duration};

use crate::dice::Dice;

/// No script has more steps.
const MAX_STEPS: usize = 100_000;

/// What the script needs to know about a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// What it acts on.
    pub targets: Vec<String>,
    /// How long it may last.
    pub lasts: Range<Duration>,
}

impl Shape {
    /// Whether both act on the same thing.
    fn meets(&self, other: &Shape) -> bool {
        self.targets.iter().any(|target| other.targets.contains(target))
    }
}

/// One fault at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// When it begins, from the start of the load.
    pub at: Duration,
    /// Which one it is.
    pub fault: usize,
    /// How long it lasts.
    pub lasts: Duration,
}

/// How often faults happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tempo {
    /// The load's length; every fault is over by then.
    pub length: Duration,
    /// The mean time between the beginnings of two faults.
    pub pace: Duration,
    /// How many may be at work at once.
    pub at_once: usize,
}

/// The steps in order. Every fault comes before any comes twice, as far as targets are free, so that even a short run sees
/// many kinds.
pub fn script(seed: u64, shapes: &[Shape], tempo: Tempo) -> Vec<Step> {
    let mut dice = Dice::new(seed);
    let mut steps: Vec<Step> = Vec::new();
    let mut deck: Vec<usize> = Vec::new();
    let mut at_work: Vec<Step> = Vec::new();
    let mut now = Duration::ZERO;
    while steps.len() < MAX_STEPS && !shapes.is_empty() {
        now += dice.within(&(tempo.pace / 2..tempo.pace * 3 / 2)).max(Duration::from_millis(1));
        if now >= tempo.length {
            break;
        }
        at_work.retain(|step| step.at + step.lasts >= now);
        if at_work.len() >= tempo.at_once {
            continue;
        }
        if deck.is_empty() {
            deck = (0..shapes.len()).collect();
        }
        let free = |fault: &usize| !at_work.iter().any(|step| shapes[step.fault].meets(&shapes[*fault]));
        let choices: Vec<usize> = (0..deck.len()).filter(|card| free(&deck[*card])).collect();
        if choices.is_empty() {
            continue;
        }
        let fault = deck.swap_remove(choices[dice.below(choices.len())]);
        let lasts = dice.within(&shapes[fault].lasts).min(tempo.length - now);
        let step = Step { at: now, fault, lasts };
        steps.push(step);
        at_work.push(step);
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEMPO: Tempo = Tempo { length: Duration::from_secs(30), pace: Duration::from_millis(300), at_once: 3 };

    fn shapes() -> Vec<Shape> {
        let shape = |targets: &str, from, to| Shape {
            targets: targets.split(' ').map(str::to_owned).collect(),
            lasts: Duration::from_millis(from)..Duration::from_millis(to),
        };
        vec![shape("a", 0, 500), shape("a", 200, 2000), shape("b", 0, 0), shape("c", 1000, 3000), shape("d a", 5, 50)]
    }

    #[test]
    fn a_seed_gives_its_script_and_no_other() {
        let first = script(7, &shapes(), TEMPO);
        assert_eq!(first, script(7, &shapes(), TEMPO));
        assert_ne!(first, script(8, &shapes(), TEMPO));
    }

    #[test]
    fn a_target_has_one_fault_at_a_time_and_all_end_in_time() {
        for seed in 0..200 {
            let (shapes, steps) = (shapes(), script(seed, &shapes(), TEMPO));
            assert!(steps.len() > 20, "seed {seed}: {steps:?}");
            for (nth, step) in steps.iter().enumerate() {
                assert!(step.at + step.lasts <= TEMPO.length, "seed {seed}: {step:?}");
                assert!(shapes[step.fault].lasts.end >= step.lasts);
                let before = steps[..nth].iter().filter(|other| other.at + other.lasts >= step.at);
                let before: Vec<_> = before.collect();
                assert!(before.len() < TEMPO.at_once, "seed {seed}: {before:?} and {step:?}");
                assert!(!before.iter().any(|other| shapes[other.fault].meets(&shapes[step.fault])));
            }
            for fault in 0..shapes.len() {
                assert!(steps.iter().any(|step| step.fault == fault), "seed {seed} has no fault {fault}");
            }
        }
    }

    #[test]
    fn without_faults_or_time_there_are_no_steps() {
        assert!(script(1, &[], TEMPO).is_empty());
        assert!(script(1, &shapes(), Tempo { length: Duration::ZERO, ..TEMPO }).is_empty());
    }
}
