//! The store contract as pure functions, for stores that keep entries in this process. Each function maps the current
//! entry, a call and the time to an outcome and, if the entry changes, the next entry.
//!
//! Invariant: nothing here reads a clock, a disk or a table. The caller passes the entry at the address even if it has
//! expired, because it may still remember spent tokens. The caller stores the next entry before it reports the outcome.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;

use super::{
    ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, EntryInfo, EntryState, Fence, Holder, Lease, RecordSummary,
    SPENT_TOKEN_TTL, SettleOutcome, Settlement,
};

/// The maximum number of spent tokens per address besides the latest; the oldest is dropped.
pub const MAX_SPENT_TOKENS: usize = 32;

/// Microseconds since the Unix epoch, by the store's clock.
pub type UnixMicros = u64;

/// An outcome, and the entry to store before it is reported.
pub type EntryDecision<T> = (T, Option<StoredEntry>);

/// The state of one address: its holder, its outcome and its expiry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredEntry {
    /// The request of the current holder, or of the last one.
    pub request: Arc<ClaimRequest>,
    /// The fence of that holder.
    pub fence: Fence,
    /// The number of that holder's run, from 1.
    pub attempt: u32,
    /// The holder took over an unknown outcome. Its release restores that outcome.
    pub took_over: bool,
    /// When the claim was granted.
    pub claimed_at: UnixMicros,
    /// From then on, claims find no entry.
    pub expires_at: UnixMicros,
    /// Released or forgotten tokens of earlier holders, each with the time until which it is remembered. At most
    /// [`MAX_SPENT_TOKENS`].
    pub spent_tokens: Vec<(ClaimToken, UnixMicros)>,
    /// The state of the entry.
    pub phase: EntryPhase,
}

/// The state of a [`StoredEntry`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryPhase {
    /// The holder runs, until its lease expires.
    Running {
        /// When the lease expires.
        lease_until: UnixMicros,
        /// The earliest takeover.
        takeover_at: UnixMicros,
    },
    /// The holder was parked.
    OutcomeUnknown {
        /// The earliest takeover.
        takeover_at: UnixMicros,
        /// A takeover was released, which spent its token.
        released: bool,
    },
    /// The operation has completed.
    Completed {
        /// Whether the answer is a failure.
        failed: bool,
        /// The encoded answer.
        record: Bytes,
        /// The columns that operators query.
        summary: RecordSummary,
        /// An operator set the outcome. A holder that settles afterwards has lost its claim.
        resolved: bool,
    },
    /// The entry is free. It only remembers spent tokens.
    Released,
}

/// Decides a claim. `fence` is the fence of the new holder if the claim is granted.
pub fn claim(
    current: Option<&StoredEntry>, request: &Arc<ClaimRequest>, fence: Fence, now: UnixMicros,
) -> EntryDecision<ClaimOutcome> {
    if current.is_some_and(|entry| entry.remembers_as_spent(request.token, now)) {
        return (ClaimOutcome::TokenSpent, None);
    }
    let live = current.filter(|entry| entry.is_live(now));
    if let Some(entry) = live {
        let same = entry.request.token == request.token;
        match &entry.phase {
            EntryPhase::Running { .. } if same => return (ClaimOutcome::Granted(entry.lease()), None),
            _ if same && entry.has_spent_its_token() => return (ClaimOutcome::TokenSpent, None),
            EntryPhase::Released => {}
            _ if request.take_over == Some(entry.fence) && entry.takeover_in(now) == Some(0) => {}
            _ => return (entry.claim_outcome(now), None),
        }
    }
    let until = now + micros(request.lease);
    let granted = StoredEntry {
        request: request.clone(),
        fence,
        attempt: live.map_or(1, |before| before.attempt.saturating_add(1)),
        took_over: live.is_some_and(|before| before.phase != EntryPhase::Released),
        claimed_at: now,
        expires_at: until + micros(request.ttl),
        spent_tokens: current.map(|before| before.spent_after_handover(now)).unwrap_or_default(),
        phase: EntryPhase::Running { lease_until: until, takeover_at: until },
    };
    (ClaimOutcome::Granted(granted.lease()), Some(granted))
}

/// Renews a lease for `hold` from now.
pub fn extend(
    current: Option<&StoredEntry>, lease: &Lease, hold: Duration, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let until = now + micros(hold);
    let phase = EntryPhase::Running { lease_until: until, takeover_at: until };
    match current.filter(|entry| entry.is_live(now) && !entry.yields_to(lease, now)) {
        None => restore(current, lease, phase, hold.saturating_add(lease.request.ttl), now),
        Some(entry) if entry.is_held_by(lease) && matches!(entry.phase, EntryPhase::Running { .. }) => {
            let expires_at = entry.expires_at.max(until + micros(entry.request.ttl));
            (SettleOutcome::Applied, Some(entry.with_phase(phase, expires_at)))
        }
        Some(entry) => entry.claim_lost(now),
    }
}

/// Whether completing the claim of `lease` only sets the answer and the expiry of this entry: the holder runs, and no
/// token is spent. [`settle`] decides everything else.
pub(super) fn only_completes(entry: &StoredEntry, lease: &Lease, now: UnixMicros) -> bool {
    let is_running = matches!(entry.phase, EntryPhase::Running { .. }) && entry.spent_tokens.is_empty();
    is_running && entry.is_live(now) && entry.is_held_by(lease)
}

/// Ends a claim.
pub fn settle(
    current: Option<&StoredEntry>, lease: &Lease, end: &Settlement, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let Some(entry) = current.filter(|entry| entry.is_live(now) && !entry.yields_to(lease, now)) else {
        return settle_absent(current, lease, end, now);
    };
    if !entry.is_held_by(lease) {
        return settle_held_by_other(entry, lease, end, now);
    }
    match (&entry.phase, end) {
        (EntryPhase::Running { .. }, _)
        | (EntryPhase::OutcomeUnknown { released: false, .. }, Settlement::Complete { .. }) => {}
        (EntryPhase::Completed { resolved: false, .. }, Settlement::Complete { .. })
        | (EntryPhase::OutcomeUnknown { released: false, .. }, Settlement::Park { .. })
        | (EntryPhase::OutcomeUnknown { released: true, .. } | EntryPhase::Released, Settlement::Release) => {
            return (SettleOutcome::Applied, None);
        }
        _ => return entry.claim_lost(now),
    }
    if entry.took_over && matches!(end, Settlement::Release) {
        let spent_until = now + micros(SPENT_TOKEN_TTL.max(entry.request.lease));
        let phase = EntryPhase::OutcomeUnknown { takeover_at: now, released: true };
        return (SettleOutcome::Applied, Some(entry.with_phase(phase, entry.expires_at.max(spent_until))));
    }
    (SettleOutcome::Applied, Some(entry.settled(end, now)))
}

fn settle_held_by_other(
    entry: &StoredEntry, lease: &Lease, end: &Settlement, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let token = lease.request.token;
    let spent = entry.request.token == token && entry.has_spent_its_token() || entry.remembers_as_spent(token, now);
    if lease.fence == Fence::UNSEEN && !spent {
        let mut next = entry.clone();
        next.spent_tokens.push((token, now + micros(SPENT_TOKEN_TTL.max(lease.request.lease))));
        trim_spent(&mut next.spent_tokens, now);
        return (entry.claim_lost(now).0, Some(next));
    }
    if spent && lease.fence != Fence::UNSEEN && matches!(end, Settlement::Release) {
        return (SettleOutcome::Applied, None);
    }
    entry.claim_lost(now)
}

fn settle_absent(
    current: Option<&StoredEntry>, lease: &Lease, end: &Settlement, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let spent_for = SPENT_TOKEN_TTL.max(lease.request.lease);
    match end {
        // The claim never arrived, so there is nothing to restore. A delayed copy of it must find its token spent.
        _ if lease.fence == Fence::UNSEEN => {
            let (_, mark) = restore(current, lease, EntryPhase::Released, spent_for, now);
            let outcome = if matches!(end, Settlement::Release) { SettleOutcome::Applied } else { token_spent() };
            (outcome, mark)
        }
        Settlement::Release if lease.request.take_over.is_some() => {
            let phase = EntryPhase::OutcomeUnknown { takeover_at: now, released: true };
            restore(current, lease, phase, spent_for.max(lease.request.ttl), now)
        }
        Settlement::Release => restore(current, lease, EntryPhase::Released, spent_for, now),
        _ => restore(current, lease, EntryPhase::after(end, now), end.ttl(), now),
    }
}

/// Sets an unknown outcome, for [`StoreAdmin::resolve`](super::StoreAdmin::resolve).
pub fn resolve(
    current: Option<&StoredEntry>, seen: Fence, end: &Settlement, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let Some(entry) = current.filter(|entry| entry.is_live(now)) else { return (token_spent(), None) };
    // `takeover_in` does not matter: a parked entry can be resolved before it may be taken over.
    if entry.fence != seen || !matches!(entry.claim_outcome(now), ClaimOutcome::OutcomeUnknown(_)) {
        return entry.claim_lost(now);
    }
    let was_released = entry.has_spent_its_token();
    let mut next = entry.settled(end, now);
    match &mut next.phase {
        EntryPhase::Completed { resolved, .. } => *resolved = true,
        EntryPhase::OutcomeUnknown { released, .. } => *released = was_released,
        EntryPhase::Running { .. } | EntryPhase::Released => {}
    }
    (SettleOutcome::Applied, Some(next))
}

/// Forgets an entry, for [`StoreAdmin::forget`](super::StoreAdmin::forget).
pub fn forget(current: Option<&StoredEntry>, seen: Fence, now: UnixMicros) -> EntryDecision<SettleOutcome> {
    let Some(entry) = current.filter(|entry| entry.is_live(now)) else { return (token_spent(), None) };
    if entry.fence != seen || entry.phase == EntryPhase::Released {
        return entry.claim_lost(now);
    }
    (SettleOutcome::Applied, Some(entry.settled(&Settlement::Release, now)))
}

/// Replaces a record, for [`StoreAdmin::replace_record`](super::StoreAdmin::replace_record).
pub fn replace_record(
    current: Option<&StoredEntry>, seen: Fence, with: &Bytes, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let Some(entry) = current.filter(|entry| entry.is_live(now)) else { return (token_spent(), None) };
    let mut next = entry.clone();
    match &mut next.phase {
        EntryPhase::Completed { record, .. } if entry.fence == seen => *record = with.clone(),
        _ => return entry.claim_lost(now),
    }
    (SettleOutcome::Applied, Some(next))
}

fn restore(
    current: Option<&StoredEntry>, lease: &Lease, phase: EntryPhase, keep: Duration, now: UnixMicros,
) -> EntryDecision<SettleOutcome> {
    let restored = StoredEntry {
        request: lease.request.clone(),
        fence: lease.fence,
        attempt: lease.attempt,
        took_over: lease.request.take_over.is_some(),
        claimed_at: now,
        expires_at: now + micros(keep),
        spent_tokens: current.map(|before| before.spent_after_handover(now)).unwrap_or_default(),
        phase,
    };
    (SettleOutcome::Restored, Some(restored))
}

fn token_spent() -> SettleOutcome {
    SettleOutcome::ClaimLost(Box::new(ClaimOutcome::TokenSpent))
}

fn trim_spent(spent: &mut Vec<(ClaimToken, UnixMicros)>, now: UnixMicros) {
    spent.retain(|(_, until)| now < *until);
    let too_many = spent.len().saturating_sub(MAX_SPENT_TOKENS);
    spent.drain(..too_many);
}

/// Converts a duration. Leaves headroom, so that sums of several such values and the current time do not overflow.
pub fn micros(duration: Duration) -> UnixMicros {
    duration.as_micros().min(u128::from(u64::MAX / 16)) as UnixMicros
}

impl EntryPhase {
    fn after(end: &Settlement, now: UnixMicros) -> Self {
        match end {
            Settlement::Complete { failed, record, summary, .. } => {
                Self::Completed { failed: *failed, record: record.clone(), summary: *summary, resolved: false }
            }
            Settlement::Release => Self::Released,
            Settlement::Park { retry_in, .. } => {
                Self::OutcomeUnknown { takeover_at: now + micros(*retry_in), released: false }
            }
        }
    }
}

impl StoredEntry {
    /// Returns `true` until the entry expires.
    pub fn is_live(&self, now: UnixMicros) -> bool {
        now < self.expires_at
    }

    /// Returns when neither the entry nor its spent tokens are needed any more.
    pub fn removable_at(&self) -> UnixMicros {
        self.spent_tokens.iter().map(|(_, until)| *until).fold(self.expires_at, UnixMicros::max)
    }

    /// Returns the lease of the holder.
    pub fn lease(&self) -> Lease {
        Lease { request: self.request.clone(), fence: self.fence, attempt: self.attempt, front_only: false }
    }

    /// Returns how long the lease of `seen` is still valid, if it is running.
    pub fn runs_for(&self, seen: Fence, now: UnixMicros) -> Option<Duration> {
        match self.phase {
            EntryPhase::Running { lease_until, .. } if self.fence == seen && now < lease_until && self.is_live(now) => {
                Some(Duration::from_micros(lease_until - now))
            }
            _ => None,
        }
    }

    /// Returns what [`Store::get`](super::Store::get) finds.
    pub fn read(&self, now: UnixMicros) -> Option<ClaimOutcome> {
        self.state(now).map(|_| self.claim_outcome(now))
    }

    /// Returns the state as operators see it: `None` if the entry has expired or is released.
    pub fn state(&self, now: UnixMicros) -> Option<EntryState> {
        match self.phase {
            _ if !self.is_live(now) => None,
            EntryPhase::Running { lease_until, .. } if now < lease_until => Some(EntryState::Processing),
            EntryPhase::Running { .. } | EntryPhase::OutcomeUnknown { .. } => Some(EntryState::Unknown),
            EntryPhase::Completed { failed: false, .. } => Some(EntryState::Done),
            EntryPhase::Completed { failed: true, .. } => Some(EntryState::Failed),
            EntryPhase::Released => None,
        }
    }

    /// Returns the entry as operators see it.
    pub fn entry_info(&self, now: UnixMicros) -> Option<EntryInfo> {
        Some(EntryInfo {
            address: self.request.address,
            state: self.state(now)?,
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.request.fingerprint,
            tags: self.request.tags.clone(),
            label: self.request.label.clone(),
            age: Duration::from_micros(now.saturating_sub(self.claimed_at)),
            expires_in: Duration::from_micros(self.expires_at - now),
            summary: match self.phase {
                EntryPhase::Completed { summary, .. } => Some(summary),
                _ => None,
            },
        })
    }

    fn is_held_by(&self, lease: &Lease) -> bool {
        self.request.token == lease.request.token && (self.fence == lease.fence || lease.fence == Fence::UNSEEN)
    }

    fn remembers_as_spent(&self, token: ClaimToken, now: UnixMicros) -> bool {
        self.spent_tokens.iter().any(|(spent, until)| *spent == token && now < *until)
    }

    /// Whether the holder's own token can never be granted again.
    fn has_spent_its_token(&self) -> bool {
        matches!(self.phase, EntryPhase::Released | EntryPhase::OutcomeUnknown { released: true, .. })
    }

    /// Returns the tokens that stay spent after another holder has claimed the entry.
    fn spent_after_handover(&self, now: UnixMicros) -> Vec<(ClaimToken, UnixMicros)> {
        let mut spent = self.spent_tokens.clone();
        if self.has_spent_its_token() {
            spent.push((self.request.token, self.expires_at));
        }
        trim_spent(&mut spent, now);
        spent
    }

    /// Returns `true` if a later holder has released this entry and the entry says nothing about `lease`; the lease is
    /// then restored as if the entry were absent.
    fn yields_to(&self, lease: &Lease, now: UnixMicros) -> bool {
        self.phase == EntryPhase::Released
            && lease.fence != Fence::UNSEEN
            && self.request.token != lease.request.token
            && !self.remembers_as_spent(lease.request.token, now)
    }

    /// The time until a takeover is allowed; `None` if never.
    fn takeover_in(&self, now: UnixMicros) -> Option<UnixMicros> {
        match self.phase {
            EntryPhase::Running { takeover_at, .. } | EntryPhase::OutcomeUnknown { takeover_at, .. } => {
                Some(takeover_at.saturating_sub(now))
            }
            EntryPhase::Completed { .. } | EntryPhase::Released => None,
        }
    }

    /// What a claim by another caller finds here, and what a holder that lost its claim receives.
    fn claim_outcome(&self, now: UnixMicros) -> ClaimOutcome {
        let holder = || Holder {
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.request.fingerprint,
            age: Duration::from_micros(now.saturating_sub(self.claimed_at)),
            takeover_in: Duration::from_micros(self.takeover_in(now).unwrap_or(0)),
        };
        match &self.phase {
            EntryPhase::Running { lease_until, .. } if now < *lease_until => ClaimOutcome::InProgress(holder()),
            EntryPhase::Running { .. } | EntryPhase::OutcomeUnknown { .. } => ClaimOutcome::OutcomeUnknown(holder()),
            EntryPhase::Completed { failed, record, .. } => ClaimOutcome::Completed(CompletedEntry {
                fence: self.fence,
                attempt: self.attempt,
                fingerprint: self.request.fingerprint,
                failed: *failed,
                record: record.clone(),
                expires_in: Duration::from_micros(self.expires_at.saturating_sub(now)),
                front_only: false,
            }),
            EntryPhase::Released => ClaimOutcome::TokenSpent,
        }
    }

    fn claim_lost(&self, now: UnixMicros) -> EntryDecision<SettleOutcome> {
        (SettleOutcome::ClaimLost(Box::new(self.claim_outcome(now))), None)
    }

    fn with_phase(&self, phase: EntryPhase, expires_at: UnixMicros) -> Self {
        let (request, spent_tokens) = (self.request.clone(), self.spent_tokens.clone());
        Self { request, spent_tokens, phase, expires_at, ..*self }
    }

    fn settled(&self, end: &Settlement, now: UnixMicros) -> Self {
        let least = if matches!(end, Settlement::Release) { micros(self.request.lease) } else { 0 };
        let mut next = self.with_phase(EntryPhase::after(end, now), now + micros(end.ttl()).max(least));
        if matches!(self.phase, EntryPhase::OutcomeUnknown { released: true, .. })
            && !self.remembers_as_spent(self.request.token, now)
        {
            next.spent_tokens = self.spent_after_handover(now);
        }
        next
    }
}
