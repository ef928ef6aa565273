//! What each call finds and what it changes: the store contract as pure functions of what is there and what time it is.
//!
//! Invariant: nothing here reads a clock, a disk or a table. Whoever decides on behalf of a caller passes the entry
//! that is at the address, even if it has expired (it may still remember spent tokens), and writes the change that
//! comes back, if any, before anybody hears the answer.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{Ask, Claim, End, FREE_FOR, Fence, Held, Lease};

use super::entry::{Entry, Micros, Phase, micros};

/// An answer, and what must be written before it is given.
pub(super) type Decision<T> = (T, Option<Entry>);

/// `fence` is given to whoever is granted.
pub(super) fn claim(current: Option<&Entry>, ask: &Arc<Ask>, fence: Fence, now: Micros) -> Decision<Claim> {
    if current.is_some_and(|entry| entry.remembers_as_spent(ask.token, now)) {
        return (Claim::Spent, None);
    }
    let live = current.filter(|entry| entry.is_live(now));
    if let Some(entry) = live {
        let same = entry.ask.token == ask.token;
        match &entry.phase {
            Phase::Running { .. } if same => return (Claim::Granted(entry.lease()), None),
            Phase::Free | Phase::Unknown { released: true, .. } if same => return (Claim::Spent, None),
            Phase::Free => {}
            _ if ask.over == Some(entry.fence) && entry.takeover_in(now) == Some(0) => {}
            _ => return (entry.view(now), None),
        }
    }
    let until = now + micros(ask.hold);
    let mut granted = Entry {
        ask: ask.clone(),
        fence,
        attempt: live.map_or(1, |before| before.attempt.saturating_add(1)),
        took_over: live.is_some_and(|before| !matches!(before.phase, Phase::Free)),
        claimed: now,
        expires: until + micros(ask.keep),
        dies_at: 0,
        version: 0,
        spent: current.map(|before| before.spent_for_next(now)).unwrap_or_default(),
        phase: Phase::Running { until, takeover: until },
    };
    granted.outlive(current);
    (Claim::Granted(granted.lease()), Some(granted))
}

pub(super) fn extend(current: Option<&Entry>, lease: &Lease, hold: Duration, now: Micros) -> Decision<Held> {
    let until = now + micros(hold);
    let phase = Phase::Running { until, takeover: until };
    match current.filter(|entry| entry.is_live(now) && !entry.gives_way_to(lease, now)) {
        None => restore(current, lease, phase, hold.saturating_add(lease.ask.keep), now),
        Some(entry) if entry.is_held_by(lease) && matches!(entry.phase, Phase::Running { .. }) => {
            let expires = entry.expires.max(until + micros(entry.ask.keep));
            (Held::Held, Some(changed(entry, phase, expires)))
        }
        Some(entry) => lost(entry, now),
    }
}

pub(super) fn settle(current: Option<&Entry>, lease: &Lease, end: &End, now: Micros) -> Decision<Held> {
    let Some(entry) = current.filter(|entry| entry.is_live(now) && !entry.gives_way_to(lease, now)) else {
        return settle_absent(current, lease, end, now);
    };
    if !entry.is_held_by(lease) {
        return settle_anothers(entry, lease, end, now);
    }
    match (&entry.phase, end) {
        (Phase::Running { .. }, _) | (Phase::Unknown { released: false, .. }, End::Complete { .. }) => {}
        (Phase::Done { resolved: false, .. }, End::Complete { .. })
        | (Phase::Unknown { released: false, .. }, End::Park { .. })
        | (Phase::Unknown { released: true, .. } | Phase::Free, End::Release) => return (Held::Held, None),
        _ => return lost(entry, now),
    }
    if entry.took_over && matches!(end, End::Release) {
        let spent_until = now + micros(FREE_FOR.max(entry.ask.hold));
        let phase = Phase::Unknown { takeover: now, released: true };
        return (Held::Held, Some(changed(entry, phase, entry.expires.max(spent_until))));
    }
    (Held::Held, Some(ended(entry, end, now)))
}

/// The end of a claim where somebody else is.
fn settle_anothers(entry: &Entry, lease: &Lease, end: &End, now: Micros) -> Decision<Held> {
    let spent = entry.has_spent(lease.ask.token, now);
    if lease.fence == Fence::UNSEEN && !spent {
        let mut next = entry.clone();
        next.spend(lease.ask.token, now + micros(FREE_FOR.max(lease.ask.hold)), now);
        next.outlive(Some(entry));
        return (lost(entry, now).0, Some(next));
    }
    if spent && lease.fence != Fence::UNSEEN && matches!(end, End::Release) {
        return (Held::Held, None);
    }
    lost(entry, now)
}

/// The end of a claim whose entry is gone.
fn settle_absent(current: Option<&Entry>, lease: &Lease, end: &End, now: Micros) -> Decision<Held> {
    let spent_for = FREE_FOR.max(lease.ask.hold);
    match end {
        // A lost claim never came: nothing to put back, but a late copy of it must find its token spent.
        _ if lease.fence == Fence::UNSEEN => {
            let (_, mark) = restore(current, lease, Phase::Free, spent_for, now);
            let answer = if matches!(end, End::Release) { Held::Held } else { Held::Lost(Box::new(Claim::Spent)) };
            (answer, mark)
        }
        End::Release if lease.ask.over.is_some() => {
            let phase = Phase::Unknown { takeover: now, released: true };
            restore(current, lease, phase, spent_for.max(lease.ask.keep), now)
        }
        End::Release => restore(current, lease, Phase::Free, spent_for, now),
        _ => restore(current, lease, phase_of(end, now), end.keep(), now),
    }
}

pub(super) fn resolve(current: Option<&Entry>, seen: Fence, end: &End, now: Micros) -> Decision<Held> {
    let Some(entry) = current.filter(|entry| entry.is_live(now)) else { return nothing_there() };
    // Not `takeover_in`: a parked entry that may not be taken over yet may well be resolved.
    if entry.fence != seen || !matches!(entry.view(now), Claim::Unknown(_)) {
        return lost(entry, now);
    }
    let was_released = matches!(entry.phase, Phase::Unknown { released: true, .. });
    let mut next = ended(entry, end, now);
    match &mut next.phase {
        Phase::Done { resolved, .. } => *resolved = true,
        Phase::Unknown { released, .. } => *released = was_released,
        Phase::Running { .. } | Phase::Free => {}
    }
    (Held::Held, Some(next))
}

pub(super) fn forget(current: Option<&Entry>, seen: Fence, now: Micros) -> Decision<Held> {
    let Some(entry) = current.filter(|entry| entry.is_live(now)) else { return nothing_there() };
    if entry.fence != seen || matches!(entry.phase, Phase::Free) {
        return lost(entry, now);
    }
    (Held::Held, Some(ended(entry, &End::Release, now)))
}

pub(super) fn replace(current: Option<&Entry>, seen: Fence, with: &Bytes, now: Micros) -> Decision<Held> {
    let Some(entry) = current.filter(|entry| entry.is_live(now)) else { return nothing_there() };
    let mut next = entry.clone();
    match &mut next.phase {
        Phase::Done { record, .. } if entry.fence == seen => *record = with.clone(),
        _ => return lost(entry, now),
    }
    next.outlive(Some(entry));
    (Held::Held, Some(next))
}

fn restore(current: Option<&Entry>, lease: &Lease, phase: Phase, keep: Duration, now: Micros) -> Decision<Held> {
    let mut restored = Entry {
        ask: lease.ask.clone(),
        fence: lease.fence,
        attempt: lease.attempt,
        took_over: lease.ask.over.is_some(),
        claimed: now,
        expires: now + micros(keep),
        dies_at: 0,
        version: 0,
        spent: current.map(|before| before.spent_for_next(now)).unwrap_or_default(),
        phase,
    };
    restored.outlive(current);
    (Held::Restored, Some(restored))
}

/// What becomes of an entry that ends so.
fn ended(entry: &Entry, end: &End, now: Micros) -> Entry {
    let least = if matches!(end, End::Release) { micros(entry.ask.hold) } else { 0 };
    let mut next = changed(entry, phase_of(end, now), now + micros(end.keep()).max(least));
    if matches!(entry.phase, Phase::Unknown { released: true, .. }) && !entry.remembers_as_spent(entry.ask.token, now) {
        next.spent = entry.spent_for_next(now);
        next.outlive(Some(entry));
    }
    next
}

fn changed(entry: &Entry, phase: Phase, expires: Micros) -> Entry {
    let mut next = Entry { phase, expires, spent: entry.spent.clone(), ask: entry.ask.clone(), ..*entry };
    next.outlive(Some(entry));
    next
}

fn phase_of(end: &End, now: Micros) -> Phase {
    match end {
        End::Complete { failed, record, outline, .. } => {
            Phase::Done { failed: *failed, record: record.clone(), outline: *outline, resolved: false }
        }
        End::Release => Phase::Free,
        End::Park { retry_in, .. } => Phase::Unknown { takeover: now + micros(*retry_in), released: false },
    }
}

fn lost(entry: &Entry, now: Micros) -> Decision<Held> {
    (Held::Lost(Box::new(entry.view(now))), None)
}

fn nothing_there() -> Decision<Held> {
    (Held::Lost(Box::new(Claim::Spent)), None)
}
