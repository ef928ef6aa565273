//! What a run shows: everything that was promised and not kept, key by key.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    time::Duration,
};

use ibid_histories::{
    checker::check_history,
    event::{HistoryEvent, RequestResult},
};

use crate::{
    answer_history::{AnswerSnapshot, FinalAnswer, ObservedAnswer},
    run::ChaosPlan,
    upstream::Execution,
};

/// A timeline is cut off after so many lines.
const MAX_TIMELINE_LINES: usize = 40;
/// How long after its end a fault is still named in a timeline.
const FAULT_TRAIL_DURATION: Duration = Duration::from_secs(2);

/// One fault that happened.
#[derive(Clone, Debug)]
pub struct FaultInterval {
    /// As the fault calls itself.
    pub name: String,
    /// When it was injected.
    pub from: Duration,
    /// When it was healed.
    pub healed_at: Duration,
}

/// All that was seen in a run.
#[derive(Debug, Default)]
pub struct RunObservations {
    /// By key.
    pub executions: HashMap<String, Vec<Execution>>,
    /// Every request and execution, for the checker of histories.
    pub history: Vec<HistoryEvent>,
    /// How many executions are on the disk.
    pub executions_on_disk: usize,
    /// What the clients were told.
    pub answers: AnswerSnapshot,
    /// The faults that happened.
    pub faults: Vec<FaultInterval>,
    /// Keys about which the gateways did not agree, or did not answer, at the end.
    pub unsettled: Vec<String>,
    /// A gateway that ended by itself.
    pub crashed: Option<usize>,
    /// A gateway that did not come to rest.
    pub busy_gateway: Option<String>,
    /// How often the gateways said that an operation may have run twice.
    pub double_runs_announced: usize,
    /// Requests sent.
    pub requests: usize,
    /// Those of them that were retries.
    pub retries: usize,
    /// From start to end.
    pub duration: Duration,
}

/// A key that did not get what was promised.
#[derive(Clone, Debug)]
pub struct KeyFinding {
    /// The key.
    pub key: String,
    /// What is wrong with it.
    pub description: String,
    /// Whether an answer of it said `degraded`.
    pub degraded: bool,
    /// Of a loss, or a history that is not explained: the answer was only in progress or unknown during the faults, and
    /// every gateway gives it at the end.
    pub is_temporary: bool,
    /// Everything that happened to it.
    pub timeline: Vec<String>,
}

/// What a run shows.
#[derive(Debug)]
#[allow(missing_docs, reason = "the table that is printed says it")]
pub struct ChaosReport {
    pub name: String,
    pub seed: u64,
    pub duration: Duration,
    pub gateways: usize,
    pub clients: usize,
    pub requests: usize,
    pub retries: usize,
    pub replays: usize,
    pub keys: usize,
    pub executions: usize,
    /// Keys with an answer of the upstream.
    pub finished: usize,
    /// Keys whose outcome is unknown for good, and those of them that had run.
    pub unknown: usize,
    pub unknown_but_ran: usize,
    /// Keys that were unknown for a while and then finished: a paused holder, a journal.
    pub late_answers: usize,
    pub pending_answers: usize,
    pub degraded_answers: usize,
    /// Possible double runs that the gateways announced themselves.
    pub double_runs_announced: usize,
    pub faults: BTreeMap<String, usize>,
    /// Keys that ran more than once.
    pub duplicates: Vec<KeyFinding>,
    /// Keys with two different answers, or with an answer that no run of theirs gave.
    pub divergent: Vec<KeyFinding>,
    /// Keys with an answer that was not replayed later.
    pub lost: Vec<KeyFinding>,
    /// Keys about which the gateways disagree at the end, or do not answer, for none of the reasons above.
    pub unsettled: Vec<KeyFinding>,
    /// Keys whose history the checker does not explain, and that are none of the above.
    pub unexplained: Vec<KeyFinding>,
    /// Requests and executions that the checker looked at.
    pub checked_events: usize,
    /// What should not happen whatever is allowed.
    pub violations: Vec<String>,
    /// The upstream's log, kept where there is something to look at.
    pub log: Option<PathBuf>,
}

impl ChaosReport {
    /// Whether there is anything to look at.
    pub fn has_findings(&self) -> bool {
        self.finding_count() > 0 || !self.violations.is_empty()
    }

    /// How many keys did not get what was promised, by kind and added up, excused or not.
    pub fn finding_count(&self) -> usize {
        let kinds = [&self.duplicates, &self.divergent, &self.lost, &self.unsettled, &self.unexplained];
        kinds.iter().map(|findings| findings.len()).sum()
    }
}

/// Judges what was seen.
pub(crate) fn evaluate_run(plan: &ChaosPlan, seen: RunObservations) -> ChaosReport {
    let mut outcome = ChaosReport {
        name: plan.name.clone(),
        seed: plan.seed,
        duration: seen.duration,
        gateways: plan.configs.len(),
        clients: plan.clients,
        requests: seen.requests,
        retries: seen.retries,
        replays: seen.answers.replays,
        keys: seen.answers.operations.len(),
        executions: seen.executions.values().map(Vec::len).sum(),
        finished: 0,
        unknown: 0,
        unknown_but_ran: 0,
        late_answers: 0,
        pending_answers: 0,
        degraded_answers: 0,
        double_runs_announced: seen.double_runs_announced,
        faults: BTreeMap::new(),
        duplicates: Vec::new(),
        divergent: Vec::new(),
        lost: Vec::new(),
        unsettled: Vec::new(),
        unexplained: Vec::new(),
        checked_events: 0,
        violations: find_violations(&seen),
        log: None,
    };
    for one in &seen.faults {
        *outcome.faults.entry(one.name.clone()).or_default() += 1;
    }
    let rejected = check(&seen.history, &mut outcome);
    let unsettled: BTreeSet<&str> = seen.unsettled.iter().map(String::as_str).collect();
    for operation in &seen.answers.operations {
        let key = operation.key.as_str();
        let runs = seen.executions.get(key).map_or(&[][..], Vec::as_slice);
        let heard = seen.answers.answers.get(key).map_or(&[][..], Vec::as_slice);
        count(&mut outcome, runs, heard);
        let degraded = heard.iter().any(|heard| heard.degraded);
        let finding = |what: String| {
            let timeline = timeline(runs, heard, &seen.faults);
            KeyFinding { key: key.to_owned(), description: what, degraded, is_temporary: false, timeline }
        };
        if runs.len() > 1 {
            outcome.duplicates.push(finding(format!("ran {} times", runs.len())));
        }
        let (divergence, loss) = (find_divergence(runs, heard), find_loss(heard));
        let explained = divergence.is_some() || loss.is_some();
        match rejected.get(key) {
            Some(why) if runs.len() < 2 && !explained => {
                let is_temporary = answered_at_the_end(heard) && is_explained_at_rest(&seen.history, key);
                outcome.unexplained.push(KeyFinding { is_temporary, ..finding(why.clone()) });
            }
            None if runs.len() > 1 || explained => {
                outcome.violations.push(format!("the checker of histories accepts {key}, which is wrong"));
            }
            _ => {}
        }
        let for_a_while = divergence.is_none() && answered_at_the_end(heard);
        outcome.lost.extend(loss.map(|what| KeyFinding { is_temporary: for_a_while, ..finding(what) }));
        outcome.divergent.extend(divergence.map(&finding));
        if unsettled.contains(key) && !explained {
            let said = heard.iter().filter(|heard| heard.during_verification).map(|heard| describe(&heard.told));
            let what = format!("at the end the gateways do not all answer alike: {:?}", said.collect::<Vec<_>>());
            outcome.unsettled.push(finding(what));
        }
    }
    outcome
}

/// The keys that the checker of histories rejects, and why.
fn check(history: &[HistoryEvent], outcome: &mut ChaosReport) -> HashMap<String, String> {
    match check_history(history) {
        Ok(verdict) => {
            outcome.checked_events = verdict.events;
            verdict.rejected.into_iter().map(|one| (one.key, one.reason)).collect()
        }
        Err(why) => {
            outcome.violations.push(format!("the history cannot be checked: {why}"));
            HashMap::new()
        }
    }
}

/// Whether a key's history is explained without the requests that were told "in progress" or "unknown" before
/// everything was at rest.
fn is_explained_at_rest(history: &[HistoryEvent], key: &str) -> bool {
    let mut events = Vec::new();
    let mut requests = HashMap::new();
    for event in history {
        match event {
            HistoryEvent::Invoke { request, key: its_key, at_rest, .. } if its_key == key => {
                requests.insert(*request, *at_rest);
            }
            HistoryEvent::Return { request, result, .. } => match (requests.get(request), result) {
                (None, _) | (Some(false), RequestResult::InProgress | RequestResult::OutcomeUnknown) => continue,
                (Some(_), _) => {}
            },
            HistoryEvent::Execute { key: its_key, .. } if its_key == key => {}
            _ => continue,
        }
        events.push(event.clone());
    }
    check_history(&events).is_ok_and(|verdict| verdict.rejected.is_empty())
}

/// What no promise excuses.
fn find_violations(seen: &RunObservations) -> Vec<String> {
    let mut broken = Vec::new();
    let known: BTreeSet<&str> = seen.answers.operations.iter().map(|operation| operation.key.as_str()).collect();
    let strange = seen.executions.keys().filter(|key| !known.contains(key.as_str())).count();
    let executions: usize = seen.executions.values().map(Vec::len).sum();
    if strange > 0 {
        broken.push(format!("{strange} keys ran that no client sent"));
    }
    if seen.executions_on_disk != executions {
        broken.push(format!("{executions} executions were counted, but {} are in the log", seen.executions_on_disk));
    }
    if let Some(nth) = seen.crashed {
        broken.push(format!("gateway {nth} ended by itself"));
    }
    broken.extend(seen.busy_gateway.clone());
    if seen.answers.unexpected_count > 0 {
        broken.push(format!("{} answers that no client should get", seen.answers.unexpected_count));
        broken.extend(seen.answers.unexpected.iter().take(3).cloned());
    }
    if !seen.answers.abandoned.is_empty() {
        broken.push(format!("{} operations had no final answer in time", seen.answers.abandoned.len()));
        broken.extend(seen.answers.abandoned.iter().take(3).cloned());
    }
    if !seen.answers.answers.values().flatten().any(|heard| matches!(heard.told, FinalAnswer::Completed { .. })) {
        broken.push("no operation finished: the run shows nothing".to_owned());
    }
    broken
}

fn count(outcome: &mut ChaosReport, runs: &[Execution], heard: &[ObservedAnswer]) {
    let done = heard.iter().any(|heard| matches!(heard.told, FinalAnswer::Completed { .. }));
    let unknown = heard.iter().any(|heard| heard.told == FinalAnswer::OutcomeUnknown);
    outcome.finished += usize::from(done);
    outcome.late_answers += usize::from(done && unknown);
    outcome.unknown += usize::from(unknown && !done);
    outcome.unknown_but_ran += usize::from(unknown && !done && !runs.is_empty());
    outcome.pending_answers += heard.iter().filter(|heard| heard.pending).count();
    outcome.degraded_answers += heard.iter().filter(|heard| heard.degraded).count();
}

/// Two answers, or one that no run gave.
fn find_divergence(runs: &[Execution], heard: &[ObservedAnswer]) -> Option<String> {
    let mut answers: Vec<&FinalAnswer> = Vec::new();
    for heard in heard {
        let FinalAnswer::Completed { body, .. } = &heard.told else { continue };
        if !answers.contains(&&heard.told) {
            answers.push(&heard.told);
        }
        if !runs.iter().any(|run| run.answer == *body) {
            return Some(format!("was told {}, which no run of it answered", describe(&heard.told)));
        }
    }
    (answers.len() > 1).then(|| format!("was told {:?}", answers.into_iter().map(describe).collect::<Vec<_>>()))
}

/// An answer after which the outcome was unknown again. An answer that waits in a journal may be unknown elsewhere until
/// it has been drained, but not at the end; the gateway that has it replays it meanwhile, without saying that it waits.
fn find_loss(heard: &[ObservedAnswer]) -> Option<String> {
    for first in heard.iter().filter(|heard| matches!(heard.told, FinalAnswer::Completed { .. })) {
        let waited = heard.iter().any(|other| other.pending && other.told == first.told);
        let forgot = |later: &&ObservedAnswer| {
            later.told == FinalAnswer::OutcomeUnknown
                && later.sent_at >= first.at
                && (later.during_verification || !waited)
        };
        if let Some(later) = heard.iter().find(forgot) {
            let (at, then) = (format_seconds(first.at), format_seconds(later.at));
            return Some(format!("was told {} at {at}, and \"unknown\" at {then}", describe(&first.told)));
        }
    }
    None
}

/// Whether every gateway that was asked at the end gave an answer.
fn answered_at_the_end(heard: &[ObservedAnswer]) -> bool {
    let mut at_the_end = heard.iter().filter(|heard| heard.during_verification).peekable();
    at_the_end.peek().is_some() && at_the_end.all(|heard| matches!(heard.told, FinalAnswer::Completed { .. }))
}

fn timeline(runs: &[Execution], heard: &[ObservedAnswer], injected: &[FaultInterval]) -> Vec<String> {
    let mut events: Vec<(Duration, String)> = Vec::new();
    for run in runs {
        events.push((run.at, format!("ran, execution {}", run.number)));
    }
    for heard in heard {
        let mut words = format!("gateway {} said {}", heard.gateway, describe(&heard.told));
        let flags = [(heard.replayed, "replayed"), (heard.pending, "pending"), (heard.degraded, "degraded")];
        flags.iter().filter(|(is_so, _)| *is_so).for_each(|(_, word)| words += &format!(", {word}"));
        let when = if heard.during_verification { "at the end" } else { "asked" };
        events.push((heard.at, format!("{words} ({when} at {})", format_seconds(heard.sent_at))));
    }
    let from = events.iter().map(|(at, _)| *at).min().unwrap_or_default();
    let asked = heard.iter().filter(|heard| !heard.during_verification).map(|heard| heard.at);
    let to = runs.iter().map(|run| run.at).chain(asked).max().unwrap_or(from);
    for fault in injected.iter().filter(|fault| fault.from <= to && fault.healed_at + FAULT_TRAIL_DURATION >= from) {
        events.push((fault.from, format!("fault: {} until {}", fault.name, format_seconds(fault.healed_at))));
    }
    events.sort();
    let lines = events.into_iter().map(|(at, what)| format!("{} {what}", format_seconds(at)));
    lines.take(MAX_TIMELINE_LINES).collect()
}

fn describe(told: &FinalAnswer) -> String {
    match told {
        FinalAnswer::Completed { status, body } => format!("{status} {}", String::from_utf8_lossy(body)),
        FinalAnswer::OutcomeUnknown => "unknown".to_owned(),
    }
}

fn format_seconds(at: Duration) -> String {
    format!("{:8.3}s", at.as_secs_f64())
}

#[cfg(test)]
mod tests;
