//! One entry of the in-process store: its holder, its outcome and its expiry.

use std::{mem, sync::Arc, time::Duration};

use bytes::Bytes;

use super::super::{
    ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, EntryInfo, EntryState, Fence, Holder, Lease, RecordSummary,
    Settlement,
};

/// The fixed memory cost of an entry in bytes: table slot, claim request and wheel slot.
pub(super) const ENTRY_OVERHEAD_BYTES: u64 = 480;
/// The maximum number of spent tokens per address besides the latest; the oldest is dropped.
const MAX_SPENT_TOKENS: usize = 32;

/// Microseconds since the store was created.
pub(super) type MemoryMicros = u64;

#[derive(Debug)]
pub(super) struct MemoryEntry {
    /// The request of the current holder, or of the last one.
    pub(super) request: Arc<ClaimRequest>,
    pub(super) fence: Fence,
    pub(super) attempt: u32,
    /// The current holder took over an unknown outcome. Its release restores that outcome.
    pub(super) took_over: bool,
    pub(super) claimed_at: MemoryMicros,
    pub(super) expires_at: MemoryMicros,
    /// The second under which the wheel lists the entry.
    pub(super) wheel_second: u64,
    /// Released or forgotten tokens of earlier holders, with their expiry. At most [`MAX_SPENT_TOKENS`]. The entry
    /// stays in the table until the last of them expires.
    pub(super) spent_tokens: Vec<(ClaimToken, MemoryMicros)>,
    pub(super) phase: MemoryEntryPhase,
}

/// `released`: the takeover was released, which spent its token. `resolved`: an operator set the outcome; a holder that
/// settles afterwards gets `ClaimLost`.
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

    /// Returns true if a later holder has released this entry and the entry says nothing about `lease`; the lease can
    /// then be restored.
    pub(super) fn is_restorable_by(&self, lease: &Lease, now: MemoryMicros) -> bool {
        matches!(self.phase, MemoryEntryPhase::Released)
            && lease.fence != Fence::UNSEEN
            && self.request.token != lease.request.token
            && !self.remembers_as_spent(lease.request.token, now)
    }

    /// When the entry and all its spent tokens have expired.
    pub(super) fn removable_at(&self) -> MemoryMicros {
        self.spent_tokens.iter().map(|(_, until)| *until).fold(self.expires_at, MemoryMicros::max)
    }

    pub(super) fn remembers_as_spent(&self, token: ClaimToken, now: MemoryMicros) -> bool {
        self.spent_tokens.iter().any(|(spent, until)| *spent == token && now < *until)
    }

    /// Whether the token can never be granted here again.
    pub(super) fn has_spent(&self, token: ClaimToken, now: MemoryMicros) -> bool {
        let own =
            matches!(self.phase, MemoryEntryPhase::Released | MemoryEntryPhase::OutcomeUnknown { released: true, .. })
                && self.request.token == token;
        own || self.remembers_as_spent(token, now)
    }

    /// Returns the tokens that stay spent after another holder has claimed the entry.
    pub(super) fn into_spent(mut self, now: MemoryMicros) -> Vec<(ClaimToken, MemoryMicros)> {
        if matches!(self.phase, MemoryEntryPhase::Released | MemoryEntryPhase::OutcomeUnknown { released: true, .. }) {
            self.spent_tokens.push((self.request.token, self.expires_at));
        }
        self.trim_spent(now);
        self.spent_tokens
    }

    /// Spends the token of a claim that may still arrive.
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

    /// When the lease of `seen` expires, if `seen` is running.
    pub(super) fn runs_until(&self, seen: Fence, now: MemoryMicros) -> Option<MemoryMicros> {
        match self.phase {
            MemoryEntryPhase::Running { lease_ends_at: until } if self.fence == seen && now < until => Some(until),
            _ => None,
        }
    }

    /// The time until a takeover is allowed; `None` if never.
    pub(super) fn takeover_in(&self, now: MemoryMicros) -> Option<MemoryMicros> {
        match self.phase {
            MemoryEntryPhase::Running { lease_ends_at: until } => Some(until.saturating_sub(now)),
            MemoryEntryPhase::OutcomeUnknown { takeover_at: takeover, .. } => Some(takeover.saturating_sub(now)),
            MemoryEntryPhase::Completed { .. } | MemoryEntryPhase::Released => None,
        }
    }

    /// What a claim by another caller finds here, and what a holder that lost its claim receives.
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
    // Leaves headroom, so that sums of a few durations do not overflow.
    duration.as_micros().min(u128::from(u64::MAX / 8)) as MemoryMicros
}
