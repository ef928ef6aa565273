//! A run's outcome for people, and as an exit code.

use std::{fmt, str::FromStr};

use crate::evaluation::{ChaosReport, KeyFinding};

/// How many findings of a kind are shown in full.
const MAX_FINDINGS_SHOWN: usize = 3;

/// What a promise excuses. Nothing else is excused, and what is excused is still counted and printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exemption {
    /// A key that ran twice, diverged or was forgotten, if an answer of it said `Idempotency-Guarantee: degraded`.
    IfDegraded,
    /// As many keys that ran twice as the gateways themselves announced.
    IfAnnounced,
    /// An answer that was in progress or unknown again for a while, and is given by every gateway at the end.
    Temporary,
    /// Keys that ran twice, diverged or were forgotten: a loss that is measured, not excluded.
    Loss,
}

impl Exemption {
    /// All of them with their names.
    pub const ALL: [(&str, Exemption); 4] = [
        ("duplicates-if-degraded", Exemption::IfDegraded),
        ("duplicates-if-announced", Exemption::IfAnnounced),
        ("unknown-for-a-while", Exemption::Temporary),
        ("loss", Exemption::Loss),
    ];
}

impl FromStr for Exemption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = Exemption::ALL.map(|(name, _)| name).join(", ");
        let found = Exemption::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, allow)| *allow).ok_or_else(|| format!("{text:?} is not one of {names}"))
    }
}

impl ChaosReport {
    /// What is wrong and not excused; nothing if the promise was kept.
    pub fn failures(&self, allow: &[Exemption]) -> Vec<String> {
        let mut complaints = self.violations.clone();
        let excused = |finding: &&KeyFinding| {
            allow.contains(&Exemption::Loss)
                || (finding.degraded && allow.contains(&Exemption::IfDegraded))
                || (finding.is_temporary && allow.contains(&Exemption::Temporary))
        };
        let mut complain = |what: &str, findings: &[KeyFinding], announced: usize| {
            let left = findings.iter().filter(|finding| !excused(finding)).count();
            if left > announced {
                complaints.push(format!("{left} keys {what}"));
            }
        };
        let announced = if allow.contains(&Exemption::IfAnnounced) { self.double_runs_announced } else { 0 };
        complain("ran more than once", &self.duplicates, announced);
        complain("got different answers", &self.divergent, announced);
        complain("lost their answer", &self.lost, 0);
        complain("have a history that one run does not explain", &self.unexplained, 0);
        if !self.unsettled.is_empty() {
            complaints.push(format!("{} keys are unsettled at the end", self.unsettled.len()));
        }
        complaints
    }
}

impl fmt::Display for ChaosReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ChaosReport { name, seed, duration: took, gateways, clients, .. } = self;
        writeln!(f, "{name}: {gateways} gateways, {clients} clients, {:.1}s, --seed {seed}", took.as_secs_f64())?;
        let rows: [(&str, usize); 19] = [
            ("requests", self.requests),
            ("  of them retries", self.retries),
            ("  answered by a replay", self.replays),
            ("keys", self.keys),
            ("  finished", self.finished),
            ("  unknown", self.unknown),
            ("    that had run", self.unknown_but_ran),
            ("  unknown, then finished", self.late_answers),
            ("executions", self.executions),
            ("pending answers", self.pending_answers),
            ("degraded answers", self.degraded_answers),
            ("announced double runs", self.double_runs_announced),
            ("faults", self.faults.values().sum()),
            ("DUPLICATES", self.duplicates.len()),
            ("DIVERGENT", self.divergent.len()),
            ("LOST", self.lost.len()),
            ("UNSETTLED", self.unsettled.len()),
            ("events checked as histories", self.checked_events),
            ("UNEXPLAINED", self.unexplained.len()),
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
            ("unexplained", &self.unexplained),
        ];
        let mut shown: Vec<&str> = Vec::new();
        for (kind, findings) in findings {
            for finding in findings.iter().take(MAX_FINDINGS_SHOWN) {
                writeln!(f, "  {kind}: {} {}", finding.key, finding.description)?;
                if !shown.contains(&finding.key.as_str()) {
                    shown.push(&finding.key);
                    finding.timeline.iter().try_for_each(|line| writeln!(f, "    {line}"))?;
                }
            }
            if findings.len() > MAX_FINDINGS_SHOWN {
                writeln!(f, "  … and {} more that are {kind}", findings.len() - MAX_FINDINGS_SHOWN)?;
            }
        }
        for broken in &self.violations {
            writeln!(f, "  BROKEN: {broken}")?;
        }
        if let Some(log) = &self.log {
            writeln!(f, "  every execution: {}, every request: history.jsonl beside it", log.display())?;
        }
        Ok(())
    }
}
