//! What a run shows: everything that was promised and not kept, key by key.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    time::Duration,
};

use crate::{
    board::{Heard, Stories, Told},
    run::Plan,
    upstream::Execution,
};

/// A timeline is cut off after so many lines.
const TIMELINE_LINES: usize = 40;
/// How long after its end a fault is still named in a timeline.
const AFTERMATH: Duration = Duration::from_secs(2);

/// One fault that happened.
#[derive(Clone, Debug)]
pub struct Injected {
    /// As the fault calls itself.
    pub name: String,
    /// When it was injected.
    pub from: Duration,
    /// When it was healed.
    pub to: Duration,
}

/// All that was seen in a run.
#[derive(Debug, Default)]
pub struct Seen {
    /// By key.
    pub executions: HashMap<String, Vec<Execution>>,
    /// How many executions are on the disk.
    pub logged: usize,
    /// What the clients were told.
    pub stories: Stories,
    /// The faults that happened.
    pub injected: Vec<Injected>,
    /// Keys about which the gateways did not agree, or did not answer, at the end.
    pub unsettled: Vec<String>,
    /// A gateway that ended by itself.
    pub crashed: Option<usize>,
    /// A gateway that did not come to rest.
    pub restless: Option<String>,
    /// How often the gateways said that an operation may have run twice.
    pub announced: usize,
    /// Requests sent.
    pub requests: usize,
    /// Those of them that were retries.
    pub retries: usize,
    /// From start to end.
    pub took: Duration,
}

/// A key that did not get what was promised.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The key.
    pub key: String,
    /// What is wrong with it.
    pub what: String,
    /// Whether an answer of it said `degraded`.
    pub degraded: bool,
    /// Of a loss: every gateway gives an answer again at the end.
    pub for_a_while: bool,
    /// Everything that happened to it.
    pub timeline: Vec<String>,
}

/// What a run shows.
#[derive(Debug)]
#[allow(missing_docs, reason = "the table that is printed says it")]
pub struct Outcome {
    pub name: String,
    pub seed: u64,
    pub took: Duration,
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
    pub unknown_ran: usize,
    /// Keys that were unknown for a while and then finished: a paused holder, a journal.
    pub late: usize,
    pub pending_answers: usize,
    pub degraded_answers: usize,
    /// Possible double runs that the gateways announced themselves.
    pub announced: usize,
    pub faults: BTreeMap<String, usize>,
    /// Keys that ran more than once.
    pub duplicates: Vec<Finding>,
    /// Keys with two different answers, or with an answer that no run of theirs gave.
    pub divergent: Vec<Finding>,
    /// Keys with an answer that was not replayed later.
    pub lost: Vec<Finding>,
    /// Keys about which the gateways disagree at the end, or do not answer, for none of the reasons above.
    pub unsettled: Vec<Finding>,
    /// What should not happen whatever is allowed.
    pub broken: Vec<String>,
    /// The upstream's log, kept where there is something to look at.
    pub log: Option<PathBuf>,
}

impl Outcome {
    /// Whether there is anything to look at.
    pub fn has_findings(&self) -> bool {
        self.findings() > 0 || !self.broken.is_empty()
    }

    /// How many keys did not get what was promised, by kind and added up, excused or not.
    pub fn findings(&self) -> usize {
        [&self.duplicates, &self.divergent, &self.lost, &self.unsettled].iter().map(|findings| findings.len()).sum()
    }
}

/// Judges what was seen.
pub(crate) fn judge(plan: &Plan, seen: Seen) -> Outcome {
    let mut outcome = Outcome {
        name: plan.name.clone(),
        seed: plan.seed,
        took: seen.took,
        gateways: plan.configs.len(),
        clients: plan.clients,
        requests: seen.requests,
        retries: seen.retries,
        replays: seen.stories.replays,
        keys: seen.stories.operations.len(),
        executions: seen.executions.values().map(Vec::len).sum(),
        finished: 0,
        unknown: 0,
        unknown_ran: 0,
        late: 0,
        pending_answers: 0,
        degraded_answers: 0,
        announced: seen.announced,
        faults: BTreeMap::new(),
        duplicates: Vec::new(),
        divergent: Vec::new(),
        lost: Vec::new(),
        unsettled: Vec::new(),
        broken: broken(&seen),
        log: None,
    };
    for one in &seen.injected {
        *outcome.faults.entry(one.name.clone()).or_default() += 1;
    }
    let unsettled: BTreeSet<&str> = seen.unsettled.iter().map(String::as_str).collect();
    for operation in &seen.stories.operations {
        let key = operation.key.as_str();
        let runs = seen.executions.get(key).map_or(&[][..], Vec::as_slice);
        let heard = seen.stories.heard.get(key).map_or(&[][..], Vec::as_slice);
        count(&mut outcome, runs, heard);
        let degraded = heard.iter().any(|heard| heard.degraded);
        let finding = |what: String| {
            let timeline = timeline(runs, heard, &seen.injected);
            Finding { key: key.to_owned(), what, degraded, for_a_while: false, timeline }
        };
        if runs.len() > 1 {
            outcome.duplicates.push(finding(format!("ran {} times", runs.len())));
        }
        let (divergence, loss) = (divergence(runs, heard), loss(heard));
        let explained = divergence.is_some() || loss.is_some();
        let for_a_while = divergence.is_none() && answered_at_the_end(heard);
        outcome.lost.extend(loss.map(|what| Finding { for_a_while, ..finding(what) }));
        outcome.divergent.extend(divergence.map(&finding));
        if unsettled.contains(key) && !explained {
            let said = heard.iter().filter(|heard| heard.verifying).map(|heard| say(&heard.told));
            let what = format!("at the end the gateways do not all answer alike: {:?}", said.collect::<Vec<_>>());
            outcome.unsettled.push(finding(what));
        }
    }
    outcome
}

/// What no promise excuses.
fn broken(seen: &Seen) -> Vec<String> {
    let mut broken = Vec::new();
    let known: BTreeSet<&str> = seen.stories.operations.iter().map(|operation| operation.key.as_str()).collect();
    let strange = seen.executions.keys().filter(|key| !known.contains(key.as_str())).count();
    let executions: usize = seen.executions.values().map(Vec::len).sum();
    if strange > 0 {
        broken.push(format!("{strange} keys ran that no client sent"));
    }
    if seen.logged != executions {
        broken.push(format!("{executions} executions were counted, but {} are in the log", seen.logged));
    }
    if let Some(nth) = seen.crashed {
        broken.push(format!("gateway {nth} ended by itself"));
    }
    broken.extend(seen.restless.clone());
    if seen.stories.surprised > 0 {
        broken.push(format!("{} answers that no client should get", seen.stories.surprised));
        broken.extend(seen.stories.surprises.iter().take(3).cloned());
    }
    if !seen.stories.gave_up.is_empty() {
        broken.push(format!("{} operations had no final answer in time", seen.stories.gave_up.len()));
        broken.extend(seen.stories.gave_up.iter().take(3).cloned());
    }
    if !seen.stories.heard.values().flatten().any(|heard| matches!(heard.told, Told::Done { .. })) {
        broken.push("no operation finished: the run shows nothing".to_owned());
    }
    broken
}

fn count(outcome: &mut Outcome, runs: &[Execution], heard: &[Heard]) {
    let done = heard.iter().any(|heard| matches!(heard.told, Told::Done { .. }));
    let unknown = heard.iter().any(|heard| heard.told == Told::Unknown);
    outcome.finished += usize::from(done);
    outcome.late += usize::from(done && unknown);
    outcome.unknown += usize::from(unknown && !done);
    outcome.unknown_ran += usize::from(unknown && !done && !runs.is_empty());
    outcome.pending_answers += heard.iter().filter(|heard| heard.pending).count();
    outcome.degraded_answers += heard.iter().filter(|heard| heard.degraded).count();
}

/// Two answers, or one that no run gave.
fn divergence(runs: &[Execution], heard: &[Heard]) -> Option<String> {
    let mut answers: Vec<&Told> = Vec::new();
    for heard in heard {
        let Told::Done { body, .. } = &heard.told else { continue };
        if !answers.contains(&&heard.told) {
            answers.push(&heard.told);
        }
        if !runs.iter().any(|run| run.answer == *body) {
            return Some(format!("was told {}, which no run of it answered", say(&heard.told)));
        }
    }
    (answers.len() > 1).then(|| format!("was told {:?}", answers.into_iter().map(say).collect::<Vec<_>>()))
}

/// An answer after which the outcome was unknown again. An answer that waits in a journal may be unknown elsewhere until
/// it has been drained, but not at the end; the gateway that has it replays it meanwhile, without saying that it waits.
fn loss(heard: &[Heard]) -> Option<String> {
    for first in heard.iter().filter(|heard| matches!(heard.told, Told::Done { .. })) {
        let waited = heard.iter().any(|other| other.pending && other.told == first.told);
        let forgot =
            |later: &&Heard| later.told == Told::Unknown && later.begun >= first.at && (later.verifying || !waited);
        if let Some(later) = heard.iter().find(forgot) {
            let (at, then) = (seconds(first.at), seconds(later.at));
            return Some(format!("was told {} at {at}, and \"unknown\" at {then}", say(&first.told)));
        }
    }
    None
}

/// Whether every gateway that was asked at the end gave an answer.
fn answered_at_the_end(heard: &[Heard]) -> bool {
    let mut at_the_end = heard.iter().filter(|heard| heard.verifying).peekable();
    at_the_end.peek().is_some() && at_the_end.all(|heard| matches!(heard.told, Told::Done { .. }))
}

fn timeline(runs: &[Execution], heard: &[Heard], injected: &[Injected]) -> Vec<String> {
    let mut events: Vec<(Duration, String)> = Vec::new();
    for run in runs {
        events.push((run.at, format!("ran, execution {}", run.number)));
    }
    for heard in heard {
        let mut words = format!("gateway {} said {}", heard.gateway, say(&heard.told));
        let flags = [(heard.replayed, "replayed"), (heard.pending, "pending"), (heard.degraded, "degraded")];
        flags.iter().filter(|(is_so, _)| *is_so).for_each(|(_, word)| words += &format!(", {word}"));
        let when = if heard.verifying { "at the end" } else { "asked" };
        events.push((heard.at, format!("{words} ({when} at {})", seconds(heard.begun))));
    }
    let from = events.iter().map(|(at, _)| *at).min().unwrap_or_default();
    let asked = heard.iter().filter(|heard| !heard.verifying).map(|heard| heard.at);
    let to = runs.iter().map(|run| run.at).chain(asked).max().unwrap_or(from);
    for fault in injected.iter().filter(|fault| fault.from <= to && fault.to + AFTERMATH >= from) {
        events.push((fault.from, format!("fault: {} until {}", fault.name, seconds(fault.to))));
    }
    events.sort();
    let lines = events.into_iter().map(|(at, what)| format!("{} {what}", seconds(at)));
    lines.take(TIMELINE_LINES).collect()
}

fn say(told: &Told) -> String {
    match told {
        Told::Done { status, body } => format!("{status} {}", String::from_utf8_lossy(body)),
        Told::Unknown => "unknown".to_owned(),
    }
}

fn seconds(at: Duration) -> String {
    format!("{:8.3}s", at.as_secs_f64())
}

#[cfg(test)]
mod tests;
