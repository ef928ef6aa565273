//! Searches an order of events that the specification allows, key by key.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::{
    event::{HistoryEvent, RequestResult},
    spec::{KeyEvent, KeyState},
};

/// What the checker found.
#[derive(Clone, Debug, Default)]
pub struct HistoryVerdict {
    /// Keys that were looked at, each with its caller.
    pub keys: usize,
    /// Requests and executions.
    pub events: usize,
    /// Keys whose events no order explains.
    pub rejected: Vec<RejectedKey>,
}

/// A key whose events no order explains.
#[derive(Clone, Debug)]
pub struct RejectedKey {
    /// The caller.
    pub caller: String,
    /// The key.
    pub key: String,
    /// The first event that does not fit after all that do, and why.
    pub reason: String,
}

/// An event with the time in which it took effect.
#[derive(Clone, Debug)]
struct TimedEvent {
    from: u64,
    /// `u64::MAX` if no client saw the end.
    to: u64,
    event: KeyEvent,
}

/// Checks a history.
///
/// # Errors
///
/// If the lines contradict each other: two requests with one number, or a return without a request.
pub fn check_history(events: &[HistoryEvent]) -> Result<HistoryVerdict, String> {
    let by_key = group_by_key(events)?;
    let mut verdict = HistoryVerdict { keys: by_key.len(), ..HistoryVerdict::default() };
    for ((caller, key), timed) in by_key {
        verdict.events += timed.len();
        if let Err(reason) = explain(&timed) {
            verdict.rejected.push(RejectedKey { caller, key, reason });
        }
    }
    Ok(verdict)
}

type EventsByKey = BTreeMap<(String, String), Vec<TimedEvent>>;

fn group_by_key(events: &[HistoryEvent]) -> Result<EventsByKey, String> {
    let mut ends = HashMap::new();
    for event in events {
        if let HistoryEvent::Return { at, request, result } = event
            && ends.insert(*request, (*at, result)).is_some()
        {
            return Err(format!("request {request} returns twice"));
        }
    }
    let mut by_key = EventsByKey::new();
    let mut requests = HashSet::new();
    for event in events {
        let (place, timed) = match event {
            HistoryEvent::Return { .. } => continue,
            HistoryEvent::Execute { at, caller, key, answer } => {
                ((caller, key), TimedEvent { from: *at, to: *at, event: KeyEvent::Execute(answer.clone()) })
            }
            HistoryEvent::Invoke { at, request, caller, key, at_rest } => {
                if !requests.insert(*request) {
                    return Err(format!("request {request} is sent twice"));
                }
                let (to, result) = ends.get(request).copied().unwrap_or((u64::MAX, &RequestResult::Lost));
                if to < *at {
                    return Err(format!("request {request} returns before it is sent"));
                }
                let event = KeyEvent::Request { result: result.clone(), at_rest: *at_rest, has_cause: false };
                ((caller, key), TimedEvent { from: *at, to, event })
            }
        };
        by_key.entry((place.0.clone(), place.1.clone())).or_default().push(timed);
    }
    if let Some(unknown) = ends.keys().find(|request| !requests.contains(request)) {
        return Err(format!("request {unknown} returns, and was never sent"));
    }
    by_key.values_mut().for_each(|timed| mark_causes(timed));
    Ok(by_key)
}

/// Tells each request whether another one can have made the outcome unknown: it was lost before, or ran meanwhile.
fn mark_causes(timed: &mut [TimedEvent]) {
    let holders: Vec<(u64, u64)> = timed
        .iter()
        .map(|one| match &one.event {
            KeyEvent::Request { result: RequestResult::Lost, .. } => (one.from, u64::MAX),
            KeyEvent::Request { .. } => (one.from, one.to),
            KeyEvent::Execute(_) => (u64::MAX, 0),
        })
        .collect();
    for (nth, one) in timed.iter_mut().enumerate() {
        if let KeyEvent::Request { has_cause, .. } = &mut one.event {
            let others = holders.iter().enumerate().filter(|(other, _)| *other != nth);
            *has_cause = others.map(|(_, times)| times).any(|(from, to)| *from <= one.to && *to >= one.from);
        }
    }
}

/// Which events have been put in order.
type Placed = Vec<bool>;

/// Searches an order that the specification allows. The error names what does not fit.
fn explain(timed: &[TimedEvent]) -> Result<(), String> {
    let mut search = Search { timed, seen: HashSet::new(), best: (0, String::new()) };
    if search.place_rest(&mut vec![false; timed.len()], 0, KeyState::default()) { Ok(()) } else { Err(search.best.1) }
}

struct Search<'a> {
    timed: &'a [TimedEvent],
    /// What was tried before, in vain.
    seen: HashSet<(Placed, KeyState)>,
    /// How many events could be placed at most, and what did not fit then.
    best: (usize, String),
}

impl Search<'_> {
    fn place_rest(&mut self, placed: &mut Placed, mut count: usize, state: KeyState) -> bool {
        // Events that are allowed and change nothing can come at once: no other event is worse off for it.
        let mut unchanged = Vec::new();
        loop {
            // A candidate stays one while others are placed.
            let fitting = |nth: &usize| state.apply(&self.timed[*nth].event).as_ref() == Ok(&state);
            let found: Vec<usize> = self.candidates(placed).filter(fitting).collect();
            if found.is_empty() {
                break;
            }
            found.iter().for_each(|nth| placed[*nth] = true);
            count += found.len();
            unchanged.extend(found);
        }
        if count == self.timed.len() {
            return true;
        }
        let is_new = self.seen.insert((placed.clone(), state.clone()));
        let candidates: Vec<usize> = if is_new { self.candidates(placed).collect() } else { Vec::new() };
        for nth in candidates {
            match state.apply(&self.timed[nth].event) {
                Ok(next) => {
                    placed[nth] = true;
                    if self.place_rest(placed, count + 1, next) {
                        return true;
                    }
                    placed[nth] = false;
                }
                Err(why) if count >= self.best.0 => {
                    let TimedEvent { from, event, .. } = &self.timed[nth];
                    self.best = (count, format!("{event:?}, begun at {from} µs: {why}"));
                }
                Err(_) => {}
            }
        }
        unchanged.into_iter().for_each(|nth| placed[nth] = false);
        false
    }

    /// Events that may come next: nothing that is left ended before they began.
    fn candidates<'s>(&'s self, placed: &'s Placed) -> impl Iterator<Item = usize> + 's {
        let left = move || (0..self.timed.len()).filter(|nth| !placed[*nth]);
        let first_end = left().map(|nth| self.timed[nth].to).min().unwrap_or(0);
        left().filter(move |nth| self.timed[*nth].from <= first_end)
    }
}
