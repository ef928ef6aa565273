//! The store contract as pure functions: each maps the current entry, a call and the time to an outcome and a change.
//!
//! Invariant: nothing here reads a clock, a disk or a table. The caller passes the entry at the address even if it has
//! expired (it may still remember spent tokens), and writes the returned change, if any, before it reports the outcome.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{ClaimOutcome, ClaimRequest, Fence, Lease, SPENT_TOKEN_TTL, SettleOutcome, Settlement};

use super::entry::{LogEntry, LogEntryPhase, UnixMicros, micros};

/// An outcome, and the entry to write before it is reported.
pub(super) type EntryDecision<T> = (T, Option<LogEntry>);

/// `fence` is the fence of the new holder if the claim is granted.
pub(super) fn claim(
    current: Option<&LogEntry>, ask: &Arc<ClaimRequest>, fence: Fence, now: UnixMicros,
) -> EntryDecision<ClaimOutcome> {
    if current.is_some_and(|entry| entry.remembers_as_spent(ask.token, now)) {
        return (ClaimOutcome::TokenSpent, None);
    }
    let live = current.filter(|entry| entry.is_live(now));
    if let Some(entry) = live {
        let same = entry.ask.token == ask.token;
        match &entry.phase {
            LogEntryPhase::Running { .. } if same => return (ClaimOutcome::Granted(entry.lease()), None),
            LogEntryPhase::Released | LogEntryPhase::OutcomeUnknown { released: true, .. } if same => {
                return (ClaimOutcome::TokenSpent, None);
            }
            LogEntryPhase::Released => {}
            _ if ask.take_over == Some(entry.fence) && entry.takeover_in(now) == Some(0) => {}
            _ => return (entry.claim_outcome(now), None),
        }
    }
    let until = now + micros(ask.lease);
    let mut granted = LogEntry {
        ask: ask.clone(),
        fence,
        attempt: live.map_or(1, |before| before.attempt.saturating_add(1)),
        took_over: live.is_some_and(|before| !matches!(before.phase, LogEntryPhase::Released)),
        claimed_at: now,
        expires_at: until + micros(ask.ttl),
        dies_at: 0,
        version: 0,
        spent_tokens: current.map(|before| before.spent_after_handover(now)).unwrap_or_default(),
        phase: LogEntryPhase::Running { lease_until: until, takeover_at: until },
    };
    granted.extend_death(current);
    (ClaimOutcome::Granted(granted.lease()), Some(granted))
}

pub(super) fn extend(
    current: Option<&LogEntry>, lease: &Lease, hold: Duration, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let until = now + micros(hold);
    let phase = LogEntryPhase::Running { lease_until: until, takeover_at: until };
    match current.filter(|entry| entry.is_live(now) && !entry.yields_to(lease, now)) {
        None => restore(current, lease, phase, hold.saturating_add(lease.request.ttl), now),
        Some(entry) if entry.is_held_by(lease) && matches!(entry.phase, LogEntryPhase::Running { .. }) => {
            let expires = entry.expires_at.max(until + micros(entry.ask.ttl));
            (SettleOutcome::Applied, Some(changed_entry(entry, phase, expires)))
        }
        Some(entry) => claim_lost(entry, now),
    }
}

pub(super) fn settle(
    current: Option<&LogEntry>, lease: &Lease, end: &Settlement, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let Some(entry) = current.filter(|entry| entry.is_live(now) && !entry.yields_to(lease, now)) else {
        return settle_absent(current, lease, end, now);
    };
    if !entry.is_held_by(lease) {
        return settle_held_by_other(entry, lease, end, now);
    }
    match (&entry.phase, end) {
        (LogEntryPhase::Running { .. }, _)
        | (LogEntryPhase::OutcomeUnknown { released: false, .. }, Settlement::Complete { .. }) => {}
        (LogEntryPhase::Completed { resolved: false, .. }, Settlement::Complete { .. })
        | (LogEntryPhase::OutcomeUnknown { released: false, .. }, Settlement::Park { .. })
        | (LogEntryPhase::OutcomeUnknown { released: true, .. } | LogEntryPhase::Released, Settlement::Release) => {
            return (SettleOutcome::Applied, None);
        }
        _ => return claim_lost(entry, now),
    }
    if entry.took_over && matches!(end, Settlement::Release) {
        let spent_until = now + micros(SPENT_TOKEN_TTL.max(entry.ask.lease));
        let phase = LogEntryPhase::OutcomeUnknown { takeover_at: now, released: true };
        return (SettleOutcome::Applied, Some(changed_entry(entry, phase, entry.expires_at.max(spent_until))));
    }
    (SettleOutcome::Applied, Some(settled_entry(entry, end, now)))
}

fn settle_held_by_other(
    entry: &LogEntry, lease: &Lease, end: &Settlement, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let spent = entry.has_spent_token(lease.request.token, now);
    if lease.fence == Fence::UNSEEN && !spent {
        let mut next = entry.clone();
        next.add_spent(lease.request.token, now + micros(SPENT_TOKEN_TTL.max(lease.request.lease)), now);
        next.extend_death(Some(entry));
        return (claim_lost(entry, now).0, Some(next));
    }
    if spent && lease.fence != Fence::UNSEEN && matches!(end, Settlement::Release) {
        return (SettleOutcome::Applied, None);
    }
    claim_lost(entry, now)
}

fn settle_absent(
    current: Option<&LogEntry>, lease: &Lease, end: &Settlement, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let spent_for = SPENT_TOKEN_TTL.max(lease.request.lease);
    match end {
        // The claim never arrived: restore nothing, but let a late copy of it find its token spent.
        _ if lease.fence == Fence::UNSEEN => {
            let (_, mark) = restore(current, lease, LogEntryPhase::Released, spent_for, now);
            let answer = if matches!(end, Settlement::Release) {
                SettleOutcome::Applied
            } else {
                SettleOutcome::ClaimLost(Box::new(ClaimOutcome::TokenSpent))
            };
            (answer, mark)
        }
        Settlement::Release if lease.request.take_over.is_some() => {
            let phase = LogEntryPhase::OutcomeUnknown { takeover_at: now, released: true };
            restore(current, lease, phase, spent_for.max(lease.request.ttl), now)
        }
        Settlement::Release => restore(current, lease, LogEntryPhase::Released, spent_for, now),
        _ => restore(current, lease, phase_after(end, now), end.ttl(), now),
    }
}

pub(super) fn resolve(
    current: Option<&LogEntry>, seen: Fence, end: &Settlement, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let Some(entry) = current.filter(|entry| entry.is_live(now)) else { return no_entry() };
    // Not `takeover_in`: a parked entry can be resolved even before it can be taken over.
    if entry.fence != seen || !matches!(entry.claim_outcome(now), ClaimOutcome::OutcomeUnknown(_)) {
        return claim_lost(entry, now);
    }
    let was_released = matches!(entry.phase, LogEntryPhase::OutcomeUnknown { released: true, .. });
    let mut next = settled_entry(entry, end, now);
    match &mut next.phase {
        LogEntryPhase::Completed { resolved, .. } => *resolved = true,
        LogEntryPhase::OutcomeUnknown { released, .. } => *released = was_released,
        LogEntryPhase::Running { .. } | LogEntryPhase::Released => {}
    }
    (SettleOutcome::Applied, Some(next))
}

pub(super) fn forget(current: Option<&LogEntry>, seen: Fence, now: UnixMicros) -> EntryDecision<SettleOutcome> {
    let Some(entry) = current.filter(|entry| entry.is_live(now)) else { return no_entry() };
    if entry.fence != seen || matches!(entry.phase, LogEntryPhase::Released) {
        return claim_lost(entry, now);
    }
    (SettleOutcome::Applied, Some(settled_entry(entry, &Settlement::Release, now)))
}

pub(super) fn replace(
    current: Option<&LogEntry>, seen: Fence, with: &Bytes, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let Some(entry) = current.filter(|entry| entry.is_live(now)) else { return no_entry() };
    let mut next = entry.clone();
    match &mut next.phase {
        LogEntryPhase::Completed { record, .. } if entry.fence == seen => *record = with.clone(),
        _ => return claim_lost(entry, now),
    }
    next.extend_death(Some(entry));
    (SettleOutcome::Applied, Some(next))
}

fn restore(
    current: Option<&LogEntry>, lease: &Lease, phase: LogEntryPhase, keep: Duration, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let mut restored = LogEntry {
        ask: lease.request.clone(),
        fence: lease.fence,
        attempt: lease.attempt,
        took_over: lease.request.take_over.is_some(),
        claimed_at: now,
        expires_at: now + micros(keep),
        dies_at: 0,
        version: 0,
        spent_tokens: current.map(|before| before.spent_after_handover(now)).unwrap_or_default(),
        phase,
    };
    restored.extend_death(current);
    (SettleOutcome::Restored, Some(restored))
}

fn settled_entry(entry: &LogEntry, end: &Settlement, now: UnixMicros) -> LogEntry {
    let least = if matches!(end, Settlement::Release) { micros(entry.ask.lease) } else { 0 };
    let mut next = changed_entry(entry, phase_after(end, now), now + micros(end.ttl()).max(least));
    if matches!(entry.phase, LogEntryPhase::OutcomeUnknown { released: true, .. })
        && !entry.remembers_as_spent(entry.ask.token, now)
    {
        next.spent_tokens = entry.spent_after_handover(now);
        next.extend_death(Some(entry));
    }
    next
}

fn changed_entry(entry: &LogEntry, phase: LogEntryPhase, expires: UnixMicros) -> LogEntry {
    let mut next = LogEntry {
        phase,
        expires_at: expires,
        spent_tokens: entry.spent_tokens.clone(),
        ask: entry.ask.clone(),
        ..*entry
    };
    next.extend_death(Some(entry));
    next
}

fn phase_after(end: &Settlement, now: UnixMicros) -> LogEntryPhase {
    match end {
        Settlement::Complete { failed, record, summary: outline, .. } => {
            LogEntryPhase::Completed { failed: *failed, record: record.clone(), outline: *outline, resolved: false }
        }
        Settlement::Release => LogEntryPhase::Released,
        Settlement::Park { retry_in, .. } => {
            LogEntryPhase::OutcomeUnknown { takeover_at: now + micros(*retry_in), released: false }
        }
    }
}

fn claim_lost(entry: &LogEntry, now: UnixMicros) -> EntryDecision<SettleOutcome> {
    (SettleOutcome::ClaimLost(Box::new(entry.claim_outcome(now))), None)
}

fn no_entry() -> EntryDecision<SettleOutcome> {
    (SettleOutcome::ClaimLost(Box::new(ClaimOutcome::TokenSpent)), None)
}
