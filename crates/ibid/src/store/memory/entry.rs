//! One entry of the in-process store: who holds it, how it ended, when it may be forgotten.

use std::{mem, sync::Arc, time::Duration};

use bytes::Bytes;

use super::super::{
    ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, EntryInfo, EntryState, Fence, Holder, Lease, RecordSummary,
    Settlement,
};

/// An entry's fixed cost: its slot in the table, the ask behind it and its place in the wheel.
pub(super) const ENTRY_OVERHEAD_BYTES: u64 = 480;
/// How many spent tokens an address remembers beside its latest; beyond that the oldest goes.
const MAX_SPENT_TOKENS: usize = 32;

/// Microseconds since the store was made.
pub(super) type MemoryMicros = u64;

#[derive(Debug)]
pub(super) struct MemoryEntry {
    /// Of the current holder, the last one if there is none.
    pub(super) request: Arc<ClaimRequest>,
    pub(super) fence: Fence,
    pub(super) attempt: u32,
    /// The current holder took over an unknown one: its release restores that.
    pub(super) took_over: bool,
    pub(super) claimed_at: MemoryMicros,
    pub(super) expires_at: MemoryMicros,
    /// The second under which the wheel knows it.
    pub(super) wheel_second: u64,
    /// Tokens of earlier holders that were released or forgotten, each until when it is remembered as such. At most
    /// [`MAX_SPENT_TOKENS`]. They outlive the entry: it stays in the table until the last of them may be forgotten.
    pub(super) spent_tokens: Vec<(ClaimToken, MemoryMicros)>,
    pub(super) phase: MemoryEntryPhase,
}

/// `released`: its takeover was, and has spent its token. `resolved`: by an operator, so that a holder that comes back
/// with an answer of its own has lost.
#[derive(Debug)]
pub(super) enum MemoryEntryPhase {
    Running { lease_ends_at: MemoryMicros },
    OutcomeUnknown { takeover_at: MemoryMicros, released: bool },
    Completed { failed: bool, record: Bytes, summary: RecordSummary, resolved: bool },
    Released,
}

impl MemoryEntry {
    pub(super) fn is_held_by(&self, lease: &Lease) -> bool {
        self.request.token == lease.request.token && (self.fence == lease.fence || lease.fence == Fence::UNSEEN)
    }

    /// Somebody else was here and has gone: for this holder, of whom nothing is said, it is as if nothing were here.
    pub(super) fn is_restorable_by(&self, lease: &Lease, now: MemoryMicros) -> bool {
        matches!(self.phase, MemoryEntryPhase::Released)
            && lease.fence != Fence::UNSEEN
            && self.request.token != lease.request.token
            && !self.remembers_as_spent(lease.request.token, now)
    }

    /// When nothing about it has to be remembered any more.
    pub(super) fn removable_at(&self) -> MemoryMicros {
        self.spent_tokens.iter().map(|(_, until)| *until).fold(self.expires_at, MemoryMicros::max)
    }

    pub(super) fn remembers_as_spent(&self, token: ClaimToken, now: MemoryMicros) -> bool {
        self.spent_tokens.iter().any(|(spent, until)| *spent == token && now < *until)
    }

    /// Whether that token can never be granted here any more.
    pub(super) fn has_spent(&self, token: ClaimToken, now: MemoryMicros) -> bool {
        let own =
            matches!(self.phase, MemoryEntryPhase::Released | MemoryEntryPhase::OutcomeUnknown { released: true, .. })
                && self.request.token == token;
        own || self.remembers_as_spent(token, now)
    }

    /// What is remembered as spent here once somebody else is the holder.
    pub(super) fn into_spent(mut self, now: MemoryMicros) -> Vec<(ClaimToken, MemoryMicros)> {
        if matches!(self.phase, MemoryEntryPhase::Released | MemoryEntryPhase::OutcomeUnknown { released: true, .. }) {
            self.spent_tokens.push((self.request.token, self.expires_at));
        }
        self.trim_spent(now);
        self.spent_tokens
    }

    /// A claim of which nobody knows whether it will still come: it shall find its token spent.
    pub(super) fn spend(&mut self, token: ClaimToken, until: MemoryMicros, now: MemoryMicros) {
        self.spent_tokens.push((token, until));
        self.trim_spent(now);
    }

    fn trim_spent(&mut self, now: MemoryMicros) {
        self.spent_tokens.retain(|(_, until)| now < *until);
        let too_many = self.spent_tokens.len().saturating_sub(MAX_SPENT_TOKENS);
        self.spent_tokens.drain(..too_many);
    }

    pub(super) fn lease(&self) -> Lease {
        Lease { request: self.request.clone(), fence: self.fence, attempt: self.attempt, front_only: false }
    }

    /// When `seen` lapses, if it runs.
    pub(super) fn runs_until(&self, seen: Fence, now: MemoryMicros) -> Option<MemoryMicros> {
        match self.phase {
            MemoryEntryPhase::Running { lease_ends_at: until } if self.fence == seen && now < until => Some(until),
            _ => None,
        }
    }

    /// When it may be taken over; `None` if never.
    pub(super) fn takeover_in(&self, now: MemoryMicros) -> Option<MemoryMicros> {
        match self.phase {
            MemoryEntryPhase::Running { lease_ends_at: until } => Some(until.saturating_sub(now)),
            MemoryEntryPhase::OutcomeUnknown { takeover_at: takeover, .. } => Some(takeover.saturating_sub(now)),
            MemoryEntryPhase::Completed { .. } | MemoryEntryPhase::Released => None,
        }
    }

    /// What somebody else's claim finds here, and what a holder that lost its claim is told.
    pub(super) fn claim_outcome(&self, now: MemoryMicros) -> ClaimOutcome {
        let holder = || Holder {
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.request.fingerprint,
            age: Duration::from_micros(now.saturating_sub(self.claimed_at)),
            takeover_in: Duration::from_micros(self.takeover_in(now).unwrap_or(0)),
        };
        match &self.phase {
            MemoryEntryPhase::Running { lease_ends_at: until } if now < *until => ClaimOutcome::InProgress(holder()),
            MemoryEntryPhase::Running { .. } | MemoryEntryPhase::OutcomeUnknown { .. } => {
                ClaimOutcome::OutcomeUnknown(holder())
            }
            MemoryEntryPhase::Completed { failed, record, .. } => ClaimOutcome::Completed(CompletedEntry {
                fence: self.fence,
                attempt: self.attempt,
                fingerprint: self.request.fingerprint,
                failed: *failed,
                record: record.clone(),
                expires_in: Duration::from_micros(self.expires_at.saturating_sub(now)),
            }),
            MemoryEntryPhase::Released => ClaimOutcome::TokenSpent,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        let record = match &self.phase {
            MemoryEntryPhase::Completed { record, .. } => record.len() as u64,
            _ => 0,
        };
        ENTRY_OVERHEAD_BYTES + request_bytes(&self.request) + mem::size_of_val(&self.spent_tokens[..]) as u64 + record
    }

    pub(super) fn entry_info(&self, now: MemoryMicros) -> Option<EntryInfo> {
        let (state, outline) = match &self.phase {
            MemoryEntryPhase::Running { lease_ends_at: until } if now < *until => (EntryState::Processing, None),
            MemoryEntryPhase::Running { .. } | MemoryEntryPhase::OutcomeUnknown { .. } => (EntryState::Unknown, None),
            MemoryEntryPhase::Completed { failed: false, summary: outline, .. } => (EntryState::Done, Some(*outline)),
            MemoryEntryPhase::Completed { failed: true, summary: outline, .. } => (EntryState::Failed, Some(*outline)),
            MemoryEntryPhase::Released => return None,
        };
        (now < self.expires_at).then(|| EntryInfo {
            address: self.request.address,
            state,
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.request.fingerprint,
            tags: self.request.tags.clone(),
            label: self.request.label.clone(),
            age: Duration::from_micros(now.saturating_sub(self.claimed_at)),
            expires_in: Duration::from_micros(self.expires_at - now),
            summary: outline,
        })
    }
}

impl MemoryEntryPhase {
    pub(super) fn of(end: &Settlement, now: MemoryMicros) -> Self {
        match end {
            Settlement::Complete { failed, record, summary: outline, .. } => {
                Self::Completed { failed: *failed, record: record.clone(), summary: *outline, resolved: false }
            }
            Settlement::Release => Self::Released,
            Settlement::Park { retry_in, .. } => {
                Self::OutcomeUnknown { takeover_at: now + micros(*retry_in), released: false }
            }
        }
    }
}

pub(super) fn request_bytes(ask: &ClaimRequest) -> u64 {
    (mem::size_of::<ClaimRequest>() + ask.tags.as_bytes().len() + ask.label.len()) as u64
}

pub(super) fn wheel_second_of(at: MemoryMicros) -> u64 {
    at.div_ceil(1_000_000)
}

pub(super) fn micros(duration: Duration) -> MemoryMicros {
    // Sums of a few must not overflow.
    duration.as_micros().min(u128::from(u64::MAX / 8)) as MemoryMicros
}
