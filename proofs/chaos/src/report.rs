//! A run's outcome for people, and as an exit code.

use std::{fmt, str::FromStr};

use crate::judge::{Finding, Outcome};

/// How many findings of a kind are shown in full.
const SHOWN: usize = 3;

/// What a promise excuses. Nothing else is excused, and what is excused is still counted and printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allow {
    /// A key that ran twice, diverged or was forgotten, if an answer of it said `Idempotency-Guarantee: degraded`.
    IfDegraded,
    /// As many keys that ran twice as the gateways themselves announced.
    IfAnnounced,
    /// An answer that was unknown for a while, and is given again by every gateway at the end.
    ForAWhile,
    /// Keys that ran twice, diverged or were forgotten: a loss that is measured, not excluded.
    Loss,
}

impl Allow {
    /// All of them with their names.
    pub const ALL: [(&str, Allow); 4] = [
        ("duplicates-if-degraded", Allow::IfDegraded),
        ("duplicates-if-announced", Allow::IfAnnounced),
        ("unknown-for-a-while", Allow::ForAWhile),
        ("loss", Allow::Loss),
    ];
}

impl FromStr for Allow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = Allow::ALL.map(|(name, _)| name).join(", ");
        let found = Allow::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, allow)| *allow).ok_or_else(|| format!("{text:?} is not one of {names}"))
    }
}

impl Outcome {
    /// What is wrong and not excused; nothing if the promise was kept.
    pub fn complaints(&self, allow: &[Allow]) -> Vec<String> {
        let mut complaints = self.broken.clone();
        let excused = |finding: &&Finding| {
            allow.contains(&Allow::Loss)
                || (finding.degraded && allow.contains(&Allow::IfDegraded))
                || (finding.for_a_while && allow.contains(&Allow::ForAWhile))
        };
        let mut complain = |what: &str, findings: &[Finding], announced: usize| {
            let left = findings.iter().filter(|finding| !excused(finding)).count();
            if left > announced {
                complaints.push(format!("{left} keys {what}"));
            }
        };
        let announced = if allow.contains(&Allow::IfAnnounced) { self.announced } else { 0 };
        complain("ran more than once", &self.duplicates, announced);
        complain("got different answers", &self.divergent, announced);
        complain("lost their answer", &self.lost, 0);
        if !self.unsettled.is_empty() {
            complaints.push(format!("{} keys are unsettled at the end", self.unsettled.len()));
        }
        complaints
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { name, seed, took, gateways, clients, .. } = self;
        writeln!(f, "{name}: {gateways} gateways, {clients} clients, {:.1}s, --seed {seed}", took.as_secs_f64())?;
        let rows: [(&str, usize); 17] = [
            ("requests", self.requests),
            ("  of them retries", self.retries),
            ("  answered by a replay", self.replays),
            ("keys", self.keys),
            ("  finished", self.finished),
            ("  unknown", self.unknown),
            ("    that had run", self.unknown_ran),
            ("  unknown, then finished", self.late),
            ("executions", self.executions),
            ("pending answers", self.pending_answers),
            ("degraded answers", self.degraded_answers),
            ("announced double runs", self.announced),
            ("faults", self.faults.values().sum()),
            ("DUPLICATES", self.duplicates.len()),
            ("DIVERGENT", self.divergent.len()),
            ("LOST", self.lost.len()),
            ("UNSETTLED", self.unsettled.len()),
        ];
        for (what, n) in rows {
            writeln!(f, "  {what:<46}{n:>9}")?;
            if what == "faults" {
                for (fault, times) in &self.faults {
                    writeln!(f, "    {fault:<44}{times:>9}")?;
                }
            }
        }
        let findings = [
            ("duplicate", &self.duplicates),
            ("divergent", &self.divergent),
            ("lost", &self.lost),
            ("unsettled", &self.unsettled),
        ];
        let mut shown: Vec<&str> = Vec::new();
        for (kind, findings) in findings {
            for finding in findings.iter().take(SHOWN) {
                writeln!(f, "  {kind}: {} {}", finding.key, finding.what)?;
                if !shown.contains(&finding.key.as_str()) {
                    shown.push(&finding.key);
                    finding.timeline.iter().try_for_each(|line| writeln!(f, "    {line}"))?;
                }
            }
            if findings.len() > SHOWN {
                writeln!(f, "  … and {} more that are {kind}", findings.len() - SHOWN)?;
            }
        }
        for broken in &self.broken {
            writeln!(f, "  BROKEN: {broken}")?;
        }
        if let Some(log) = &self.log {
            writeln!(f, "  every execution: {}", log.display())?;
        }
        Ok(())
    }
}
