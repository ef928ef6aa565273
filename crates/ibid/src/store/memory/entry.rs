//! One entry of the in-process store: who holds it, how it ended, when it may be forgotten.

use std::{mem, sync::Arc, time::Duration};

use bytes::Bytes;

use super::super::{Ask, Claim, End, Fence, Finished, Holder, Lease, Listed, Outline, State, Token};

/// An entry's fixed cost: its slot in the table, the ask behind it and its place in the wheel.
pub(super) const ENTRY_BYTES: u64 = 480;
/// How many spent tokens an address remembers beside its latest; beyond that the oldest goes.
const SPENT: usize = 32;

/// Microseconds since the store was made.
pub(super) type Micros = u64;

#[derive(Debug)]
pub(super) struct Entry {
    /// Of the current holder, the last one if there is none.
    pub(super) ask: Arc<Ask>,
    pub(super) fence: Fence,
    pub(super) attempt: u32,
    /// The current holder took over an unknown one: its release restores that.
    pub(super) took_over: bool,
    pub(super) claimed: Micros,
    pub(super) expires: Micros,
    /// The second under which the wheel knows it.
    pub(super) turn: u64,
    /// Tokens of earlier holders that were released or forgotten, each until when it is remembered as such. At most
    /// [`SPENT`]. They outlive the entry: it stays in the table until the last of them may be forgotten.
    pub(super) spent: Vec<(Token, Micros)>,
    pub(super) phase: Phase,
}

/// `released`: its takeover was, and has spent its token. `resolved`: by an operator, so that a holder that comes back
/// with an answer of its own has lost.
#[derive(Debug)]
pub(super) enum Phase {
    Running { until: Micros },
    Unknown { takeover: Micros, released: bool },
    Done { failed: bool, record: Bytes, outline: Outline, resolved: bool },
    Free,
}

impl Entry {
    pub(super) fn is_held_by(&self, lease: &Lease) -> bool {
        self.ask.token == lease.ask.token && (self.fence == lease.fence || lease.fence == Fence::UNSEEN)
    }

    /// Somebody else was here and has gone: for this holder, of whom nothing is said, it is as if nothing were here.
    pub(super) fn gives_way_to(&self, lease: &Lease, now: Micros) -> bool {
        matches!(self.phase, Phase::Free)
            && lease.fence != Fence::UNSEEN
            && self.ask.token != lease.ask.token
            && !self.remembers_as_spent(lease.ask.token, now)
    }

    /// When nothing about it has to be remembered any more.
    pub(super) fn removable_at(&self) -> Micros {
        self.spent.iter().map(|(_, until)| *until).fold(self.expires, Micros::max)
    }

    pub(super) fn remembers_as_spent(&self, token: Token, now: Micros) -> bool {
        self.spent.iter().any(|(spent, until)| *spent == token && now < *until)
    }

    /// Whether that token can never be granted here any more.
    pub(super) fn has_spent(&self, token: Token, now: Micros) -> bool {
        let own = matches!(self.phase, Phase::Free | Phase::Unknown { released: true, .. }) && self.ask.token == token;
        own || self.remembers_as_spent(token, now)
    }

    /// What is remembered as spent here once somebody else is the holder.
    pub(super) fn into_spent(mut self, now: Micros) -> Vec<(Token, Micros)> {
        if matches!(self.phase, Phase::Free | Phase::Unknown { released: true, .. }) {
            self.spent.push((self.ask.token, self.expires));
        }
        self.trim_spent(now);
        self.spent
    }

    /// A claim of which nobody knows whether it will still come: it shall find its token spent.
    pub(super) fn spend(&mut self, token: Token, until: Micros, now: Micros) {
        self.spent.push((token, until));
        self.trim_spent(now);
    }

    fn trim_spent(&mut self, now: Micros) {
        self.spent.retain(|(_, until)| now < *until);
        let too_many = self.spent.len().saturating_sub(SPENT);
        self.spent.drain(..too_many);
    }

    pub(super) fn lease(&self) -> Lease {
        Lease { ask: self.ask.clone(), fence: self.fence, attempt: self.attempt, solo: false }
    }

    /// When `seen` lapses, if it runs.
    pub(super) fn runs_until(&self, seen: Fence, now: Micros) -> Option<Micros> {
        match self.phase {
            Phase::Running { until } if self.fence == seen && now < until => Some(until),
            _ => None,
        }
    }

    /// When it may be taken over; `None` if never.
    pub(super) fn takeover_in(&self, now: Micros) -> Option<Micros> {
        match self.phase {
            Phase::Running { until } => Some(until.saturating_sub(now)),
            Phase::Unknown { takeover, .. } => Some(takeover.saturating_sub(now)),
            Phase::Done { .. } | Phase::Free => None,
        }
    }

    /// What somebody else's claim finds here, and what a holder that lost its claim is told.
    pub(super) fn view(&self, now: Micros) -> Claim {
        let holder = || Holder {
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.ask.fingerprint,
            age: Duration::from_micros(now.saturating_sub(self.claimed)),
            takeover_in: Duration::from_micros(self.takeover_in(now).unwrap_or(0)),
        };
        match &self.phase {
            Phase::Running { until } if now < *until => Claim::Busy(holder()),
            Phase::Running { .. } | Phase::Unknown { .. } => Claim::Unknown(holder()),
            Phase::Done { failed, record, .. } => Claim::Done(Finished {
                fence: self.fence,
                attempt: self.attempt,
                fingerprint: self.ask.fingerprint,
                failed: *failed,
                record: record.clone(),
                expires_in: Duration::from_micros(self.expires.saturating_sub(now)),
            }),
            Phase::Free => Claim::Spent,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        let record = match &self.phase {
            Phase::Done { record, .. } => record.len() as u64,
            _ => 0,
        };
        ENTRY_BYTES + ask_bytes(&self.ask) + mem::size_of_val(&self.spent[..]) as u64 + record
    }

    pub(super) fn listed(&self, now: Micros) -> Option<Listed> {
        let (state, outline) = match &self.phase {
            Phase::Running { until } if now < *until => (State::Processing, None),
            Phase::Running { .. } | Phase::Unknown { .. } => (State::Unknown, None),
            Phase::Done { failed: false, outline, .. } => (State::Done, Some(*outline)),
            Phase::Done { failed: true, outline, .. } => (State::Failed, Some(*outline)),
            Phase::Free => return None,
        };
        (now < self.expires).then(|| Listed {
            address: self.ask.address,
            state,
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.ask.fingerprint,
            tags: self.ask.tags.clone(),
            label: self.ask.label.clone(),
            age: Duration::from_micros(now.saturating_sub(self.claimed)),
            expires_in: Duration::from_micros(self.expires - now),
            outline,
        })
    }
}

impl Phase {
    pub(super) fn of(end: &End, now: Micros) -> Self {
        match end {
            End::Complete { failed, record, outline, .. } => {
                Self::Done { failed: *failed, record: record.clone(), outline: *outline, resolved: false }
            }
            End::Release => Self::Free,
            End::Park { retry_in, .. } => Self::Unknown { takeover: now + micros(*retry_in), released: false },
        }
    }
}

pub(super) fn ask_bytes(ask: &Ask) -> u64 {
    (mem::size_of::<Ask>() + ask.tags.as_bytes().len() + ask.label.len()) as u64
}

pub(super) fn turn_of(at: Micros) -> u64 {
    at.div_ceil(1_000_000)
}

pub(super) fn micros(duration: Duration) -> Micros {
    // Sums of a few must not overflow.
    duration.as_micros().min(u128::from(u64::MAX / 8)) as Micros
}
