//! A sequential reference implementation of the store contract: one map and explicit time.
//!
//! Invariant: it returns exactly what a store with a perfect clock returns, durations included. Addresses, tokens and
//! fences are small numbers here; [`crate::property`] maps them to real ones. Fences count from 1 per
//! address; 0 is [`Fence::UNSEEN`](ibid::store::Fence::UNSEEN).
//!
//! ```
//! use ibid_testkit::model::{ReferenceClaimOutcome, ReferenceRequest, ReferenceStore};
//!
//! let mut store = ReferenceStore::default();
//! let request = ReferenceRequest { at: 0, token: 1, hold: 1_000, keep: 5_000, over: None };
//! assert_eq!(store.claim(request), ReferenceClaimOutcome::Granted { fence: 1, attempt: 1 });
//! store.advance(1_000);
//! let other = ReferenceRequest { token: 2, ..request };
//! assert!(matches!(store.claim(other), ReferenceClaimOutcome::Unknown(_)));
//! let takeover = ReferenceRequest { over: Some(1), ..other };
//! assert_eq!(store.claim(takeover), ReferenceClaimOutcome::Granted { fence: 2, attempt: 2 });
//! ```

use std::collections::HashMap;

use ibid::store::SPENT_TOKEN_TTL;

/// Microseconds, for points in time and for durations.
pub type ReferenceMicros = u64;

/// See [`ClaimRequest`](ibid::store::ClaimRequest).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub struct ReferenceRequest {
    pub at: usize,
    pub token: u32,
    pub hold: ReferenceMicros,
    pub keep: ReferenceMicros,
    pub over: Option<u64>,
}

/// See [`Lease`](ibid::store::Lease).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub struct ReferenceLease {
    pub request: ReferenceRequest,
    pub fence: u64,
    pub attempt: u32,
}

/// See [`ClaimOutcome`](ibid::store::ClaimOutcome).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub enum ReferenceClaimOutcome {
    Granted { fence: u64, attempt: u32 },
    Busy(ReferenceHolder),
    Unknown(ReferenceHolder),
    Done { fence: u64, attempt: u32, record: u8, expires_in: ReferenceMicros },
    Spent,
}

/// See [`Holder`](ibid::store::Holder).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub struct ReferenceHolder {
    pub fence: u64,
    pub attempt: u32,
    pub age: ReferenceMicros,
    pub takeover_in: ReferenceMicros,
}

/// See [`Settlement`](ibid::store::Settlement). A record is one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub enum ReferenceSettlement {
    Complete { record: u8, keep: ReferenceMicros },
    Release,
    Park { keep: ReferenceMicros, retry_in: ReferenceMicros },
}

/// See [`SettleOutcome`](ibid::store::SettleOutcome).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub enum ReferenceSettleOutcome {
    Held,
    Restored,
    ClaimLost(ReferenceClaimOutcome),
}

/// The reference store.
#[derive(Debug, Default)]
pub struct ReferenceStore {
    now: ReferenceMicros,
    entries: HashMap<usize, ReferenceEntry>,
    /// The highest fence ever granted per address. It outlives the entries.
    fences: HashMap<usize, u64>,
    /// Every token that was released or forgotten, and until when a store must remember that.
    spent_tokens: HashMap<u32, ReferenceMicros>,
}

#[derive(Debug, Clone, Copy)]
struct ReferenceEntry {
    request: ReferenceRequest,
    fence: u64,
    attempt: u32,
    took_over: bool,
    claimed_at: ReferenceMicros,
    expires_at: ReferenceMicros,
    phase: ReferenceState,
}

#[derive(Debug, Clone, Copy)]
enum ReferenceState {
    Running { lease_until: ReferenceMicros, takeover_from: ReferenceMicros },
    OutcomeUnknown { takeover_from: ReferenceMicros, released: bool },
    Completed { record: u8, resolved: bool },
    Free,
}

impl ReferenceStore {
    /// Advances the time.
    pub fn advance(&mut self, by: ReferenceMicros) {
        self.now += by;
        self.entries.retain(|_, entry| self.now < entry.expires_at);
    }

    /// Simulates the restart of a durable store that serves one process: every entry in progress gets an unknown
    /// outcome at once, and cannot be taken over for a full lease from now.
    pub fn restart(&mut self) {
        let now = self.now;
        for entry in self.entries.values_mut() {
            if let ReferenceState::Running { lease_until: until, takeover_from: takeover } = &mut entry.phase {
                *takeover = (now + entry.request.hold).max(*takeover);
                *until = now.min(*until);
            }
        }
    }

    /// See [`Store::claim`](ibid::store::Store::claim).
    pub fn claim(&mut self, wish: ReferenceRequest) -> ReferenceClaimOutcome {
        if self.spent_tokens.get(&wish.token).is_some_and(|until| self.now < *until) {
            return ReferenceClaimOutcome::Spent;
        }
        let before = self.entries.get(&wish.at).copied();
        if let Some(entry) = before {
            let found = entry.view(self.now);
            let same = entry.request.token == wish.token;
            match (entry.phase, found) {
                (ReferenceState::Running { .. }, _) if same => {
                    return ReferenceClaimOutcome::Granted { fence: entry.fence, attempt: entry.attempt };
                }
                (ReferenceState::OutcomeUnknown { released: true, .. }, _) if same => {
                    return ReferenceClaimOutcome::Spent;
                }
                (ReferenceState::Free, _) => {}
                (_, ReferenceClaimOutcome::Unknown(who)) if who.takeover_in == 0 && wish.over == Some(who.fence) => {}
                _ => return found,
            }
        }
        let fence = self.fences.entry(wish.at).or_default();
        *fence += 1;
        let entry = ReferenceEntry {
            request: wish,
            fence: *fence,
            attempt: before.map_or(1, |before| before.attempt + 1),
            took_over: before.is_some_and(|before| !matches!(before.phase, ReferenceState::Free)),
            claimed_at: self.now,
            expires_at: self.now + wish.hold + wish.keep,
            phase: ReferenceState::running(self.now + wish.hold),
        };
        self.insert(entry);
        ReferenceClaimOutcome::Granted { fence: entry.fence, attempt: entry.attempt }
    }

    /// See [`Store::extend`](ibid::store::Store::extend).
    pub fn extend(&mut self, grip: ReferenceLease, hold: ReferenceMicros) -> ReferenceSettleOutcome {
        let phase = ReferenceState::running(self.now + hold);
        let least = self.now + hold + grip.request.keep;
        match self
            .entries
            .get_mut(&grip.request.at)
            .filter(|entry| !entry.yields_to(grip, &self.spent_tokens, self.now))
        {
            None => self.restore(grip, phase, least),
            Some(entry) if entry.is_held_by(grip) && matches!(entry.phase, ReferenceState::Running { .. }) => {
                entry.phase = phase;
                entry.expires_at = entry.expires_at.max(least);
                ReferenceSettleOutcome::Held
            }
            Some(entry) => ReferenceSettleOutcome::ClaimLost(entry.view(self.now)),
        }
    }

    /// See [`Store::settle`](ibid::store::Store::settle).
    pub fn settle(&mut self, grip: ReferenceLease, end: ReferenceSettlement) -> ReferenceSettleOutcome {
        let now = self.now;
        let spent_until = now + grip.request.hold.max(SPENT_TOKEN_TTL.as_micros() as ReferenceMicros);
        let released = ReferenceState::OutcomeUnknown { takeover_from: now, released: true };
        let there =
            self.entries.get_mut(&grip.request.at).filter(|entry| !entry.yields_to(grip, &self.spent_tokens, now));
        let Some(entry) = there else {
            if end == ReferenceSettlement::Release {
                let until = self.spent_tokens.entry(grip.request.token).or_default();
                *until = spent_until.max(*until);
            }
            return match end {
                ReferenceSettlement::Release if grip.fence == 0 => {
                    self.restore(grip, ReferenceState::Free, spent_until);
                    ReferenceSettleOutcome::Held
                }
                ReferenceSettlement::Release if grip.request.over.is_some() => {
                    self.restore(grip, released, spent_until.max(now + grip.request.keep))
                }
                ReferenceSettlement::Release => self.restore(grip, ReferenceState::Free, spent_until),
                ReferenceSettlement::Complete { keep, .. } | ReferenceSettlement::Park { keep, .. } => {
                    self.restore(grip, ReferenceState::of(end, now), now + keep)
                }
            };
        };
        if !entry.is_held_by(grip) {
            let spent = self.spent_tokens.get(&grip.request.token).is_some_and(|until| now < *until);
            if grip.fence == 0 && !spent {
                self.spent_tokens.insert(grip.request.token, spent_until);
            } else if grip.fence != 0 && spent && end == ReferenceSettlement::Release {
                return ReferenceSettleOutcome::Held;
            }
            return ReferenceSettleOutcome::ClaimLost(entry.view(now));
        }
        match (entry.phase, end) {
            (ReferenceState::Running { .. }, ReferenceSettlement::Release) if entry.took_over => {
                entry.phase = released;
                entry.expires_at = entry.expires_at.max(spent_until);
            }
            (ReferenceState::Running { .. }, _)
            | (ReferenceState::OutcomeUnknown { released: false, .. }, ReferenceSettlement::Complete { .. }) => {
                entry.end(end, now);
            }
            (ReferenceState::Completed { resolved: false, .. }, ReferenceSettlement::Complete { .. })
            | (ReferenceState::OutcomeUnknown { released: false, .. }, ReferenceSettlement::Park { .. })
            | (
                ReferenceState::OutcomeUnknown { released: true, .. } | ReferenceState::Free,
                ReferenceSettlement::Release,
            ) => {}
            _ => return ReferenceSettleOutcome::ClaimLost(entry.view(now)),
        }
        if end == ReferenceSettlement::Release {
            self.spent_tokens.entry(grip.request.token).or_insert(spent_until);
        }
        ReferenceSettleOutcome::Held
    }

    /// See [`Store::get`](ibid::store::Store::get).
    pub fn get(&self, at: usize) -> Option<ReferenceClaimOutcome> {
        let entry = self.entries.get(&at)?;
        (!matches!(entry.phase, ReferenceState::Free)).then(|| entry.view(self.now))
    }

    /// See [`StoreAdmin::resolve`](ibid::store::StoreAdmin::resolve).
    pub fn resolve(&mut self, at: usize, seen: u64, end: ReferenceSettlement) -> ReferenceSettleOutcome {
        let now = self.now;
        let Some(entry) = self.entries.get_mut(&at) else {
            return ReferenceSettleOutcome::ClaimLost(ReferenceClaimOutcome::Spent);
        };
        match entry.view(now) {
            ReferenceClaimOutcome::Unknown(who) if who.fence == seen => {}
            found => return ReferenceSettleOutcome::ClaimLost(found),
        }
        let was_released = matches!(entry.phase, ReferenceState::OutcomeUnknown { released: true, .. });
        entry.end(end, now);
        match &mut entry.phase {
            ReferenceState::Completed { resolved, .. } => *resolved = true,
            ReferenceState::OutcomeUnknown { released, .. } => *released = was_released,
            ReferenceState::Free => drop(self.spent_tokens.entry(entry.request.token).or_insert(entry.expires_at)),
            ReferenceState::Running { .. } => {}
        }
        ReferenceSettleOutcome::Held
    }

    /// See [`StoreAdmin::forget`](ibid::store::StoreAdmin::forget).
    pub fn forget(&mut self, at: usize, seen: u64) -> ReferenceSettleOutcome {
        let now = self.now;
        match self.entries.get_mut(&at) {
            None => ReferenceSettleOutcome::ClaimLost(ReferenceClaimOutcome::Spent),
            Some(entry) if entry.fence != seen || matches!(entry.phase, ReferenceState::Free) => {
                ReferenceSettleOutcome::ClaimLost(entry.view(now))
            }
            Some(entry) => {
                entry.end(ReferenceSettlement::Release, now);
                self.spent_tokens.entry(entry.request.token).or_insert(entry.expires_at);
                ReferenceSettleOutcome::Held
            }
        }
    }

    /// The fence of the entry, if any, even if the entry is free.
    pub fn current_fence(&self, at: usize) -> Option<u64> {
        self.entries.get(&at).map(|entry| entry.fence)
    }

    /// Whether the contract leaves the result for this claim or its holder open: its token is spent, and the store need
    /// not remember that any more.
    pub fn is_unspecified(&self, wish: ReferenceRequest) -> bool {
        self.spent_tokens.get(&wish.token).is_some_and(|until| *until <= self.now)
    }

    /// Whether this token is spent and others have claimed since. The token may then find them, or its own settlement
    /// if that was restored after they had gone, but it is never granted.
    pub fn was_spent_and_replaced(&self, wish: ReferenceRequest) -> bool {
        let is_other = |entry: &ReferenceEntry| {
            entry.request.token != wish.token || matches!(entry.phase, ReferenceState::Completed { .. })
        };
        self.spent_tokens.contains_key(&wish.token) && self.entries.get(&wish.at).is_none_or(is_other)
    }

    fn restore(
        &mut self, grip: ReferenceLease, phase: ReferenceState, expires: ReferenceMicros,
    ) -> ReferenceSettleOutcome {
        let ReferenceLease { request: wish, fence, attempt } = grip;
        self.insert(ReferenceEntry {
            request: wish,
            fence,
            attempt,
            took_over: wish.over.is_some(),
            claimed_at: self.now,
            expires_at: expires,
            phase,
        });
        ReferenceSettleOutcome::Restored
    }

    fn insert(&mut self, entry: ReferenceEntry) {
        if self.now < entry.expires_at {
            self.entries.insert(entry.request.at, entry);
        } else {
            self.entries.remove(&entry.request.at);
        }
    }
}

impl ReferenceEntry {
    fn is_held_by(&self, grip: ReferenceLease) -> bool {
        self.request.token == grip.request.token && (grip.fence == self.fence || grip.fence == 0)
    }

    /// Another holder claimed and released this entry. For a holder that the entry does not mention, the entry counts
    /// as absent.
    fn yields_to(&self, grip: ReferenceLease, spent: &HashMap<u32, ReferenceMicros>, now: ReferenceMicros) -> bool {
        matches!(self.phase, ReferenceState::Free)
            && grip.fence != 0
            && self.request.token != grip.request.token
            && spent.get(&grip.request.token).is_none_or(|until| *until <= now)
    }

    fn end(&mut self, end: ReferenceSettlement, now: ReferenceMicros) {
        self.phase = ReferenceState::of(end, now);
        self.expires_at = now
            + match end {
                ReferenceSettlement::Complete { keep, .. } | ReferenceSettlement::Park { keep, .. } => keep,
                ReferenceSettlement::Release => self.request.hold.max(SPENT_TOKEN_TTL.as_micros() as ReferenceMicros),
            };
    }

    fn view(&self, now: ReferenceMicros) -> ReferenceClaimOutcome {
        let Self { fence, attempt, .. } = *self;
        let who = |from: ReferenceMicros| ReferenceHolder {
            fence,
            attempt,
            age: now - self.claimed_at,
            takeover_in: from.saturating_sub(now),
        };
        match self.phase {
            ReferenceState::Running { lease_until: until, takeover_from: takeover } if now < until => {
                ReferenceClaimOutcome::Busy(who(takeover))
            }
            ReferenceState::Running { takeover_from: takeover, .. }
            | ReferenceState::OutcomeUnknown { takeover_from: takeover, .. } => {
                ReferenceClaimOutcome::Unknown(who(takeover))
            }
            ReferenceState::Completed { record, .. } => {
                ReferenceClaimOutcome::Done { fence, attempt, record, expires_in: self.expires_at - now }
            }
            ReferenceState::Free => ReferenceClaimOutcome::Spent,
        }
    }
}

impl ReferenceState {
    fn running(lease_until: ReferenceMicros) -> Self {
        Self::Running { lease_until, takeover_from: lease_until }
    }

    fn of(end: ReferenceSettlement, now: ReferenceMicros) -> Self {
        match end {
            ReferenceSettlement::Complete { record, .. } => Self::Completed { record, resolved: false },
            ReferenceSettlement::Release => Self::Free,
            ReferenceSettlement::Park { retry_in, .. } => {
                Self::OutcomeUnknown { takeover_from: now + retry_in, released: false }
            }
        }
    }
}
