//! A sequential reference implementation of the store contract: one map and explicit time.
//!
//! Invariant: it returns exactly what a store with a perfect clock returns, durations included. Only fences are not its
//! own choice: the caller passes the fence that a grant gets, so that it can be the one of the store under test.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use bytes::Bytes;
//! use ibid::store::{Address, ClaimOutcome, ClaimRequest, ClaimToken, Fence, Fingerprint, Tags};
//! use ibid_testkit::model::ReferenceStore;
//!
//! let mut store = ReferenceStore::default();
//! let request = ClaimRequest {
//!     address: Address([0; 32]),
//!     token: ClaimToken::mint(),
//!     fingerprint: Fingerprint::NONE,
//!     tags: Tags::default(),
//!     label: Bytes::new(),
//!     lease: Duration::from_secs(1),
//!     ttl: Duration::from_secs(5),
//!     take_over: None,
//! };
//! assert!(matches!(store.claim(&Arc::new(request.clone()), Fence(1)), ClaimOutcome::Granted(_)));
//! store.advance(Duration::from_secs(1));
//! let other = ClaimRequest { token: ClaimToken::mint(), ..request };
//! assert!(matches!(store.claim(&Arc::new(other.clone()), Fence(2)), ClaimOutcome::OutcomeUnknown(_)));
//! let takeover = ClaimRequest { take_over: Some(Fence(1)), ..other };
//! let ClaimOutcome::Granted(lease) = store.claim(&Arc::new(takeover), Fence(2)) else { panic!() };
//! assert_eq!((lease.fence, lease.attempt), (Fence(2), 2));
//! ```

use std::{collections::HashMap, sync::Arc, time::Duration};

use ClaimOutcome::{Completed, Granted, InProgress, OutcomeUnknown, TokenSpent};
use SettleOutcome::{Applied, ClaimLost, Restored};
use Settlement::{Complete, Park, Release};
use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, Fence, Holder, Lease, SPENT_TOKEN_TTL,
    SettleOutcome, Settlement,
};

/// Its methods answer like those of a store. Points in time are durations since its creation.
#[derive(Debug, Default, Clone)]
pub struct ReferenceStore {
    now: Duration,
    entries: HashMap<Address, ReferenceEntry>,
    /// All fences ever granted per address, in order. They outlive the entries.
    fences: HashMap<Address, Vec<Fence>>,
    /// Every token that was released or forgotten, and until when a store must remember that.
    spent_tokens: HashMap<ClaimToken, Duration>,
}

#[derive(Debug, Clone)]
struct ReferenceEntry {
    lease: Lease,
    took_over: bool,
    claimed_at: Duration,
    expires_at: Duration,
    state: ReferenceState,
}

#[derive(Debug, Clone)]
enum ReferenceState {
    Running { lease_until: Duration, takeover_from: Duration },
    OutcomeUnknown { takeover_from: Duration, released: bool },
    Completed { record: Bytes, failed: bool, resolved: bool },
    Free,
}

impl ReferenceStore {
    pub fn advance(&mut self, by: Duration) {
        self.now += by;
        self.entries.retain(|_, entry| self.now < entry.expires_at);
    }

    /// Simulates the restart of a durable store that serves one process: every entry in progress gets an unknown
    /// outcome at once, and cannot be taken over for a full lease from now.
    pub fn restart(&mut self) {
        let now = self.now;
        for entry in self.entries.values_mut() {
            if let ReferenceState::Running { lease_until, takeover_from } = &mut entry.state {
                *takeover_from = (now + entry.lease.request.lease).max(*takeover_from);
                *lease_until = now.min(*lease_until);
            }
        }
    }

    /// A new grant gets this fence.
    pub fn claim(&mut self, request: &Arc<ClaimRequest>, fence: Fence) -> ClaimOutcome {
        if self.is_spent(&request.token) {
            return TokenSpent;
        }
        let before = self.entries.get(&request.address).cloned();
        if let Some(entry) = &before {
            let found = entry.view(self.now);
            let same = entry.lease.request.token == request.token;
            match (&entry.state, &found) {
                (ReferenceState::Running { .. }, _) if same => return Granted(entry.lease.clone()),
                (ReferenceState::OutcomeUnknown { released: true, .. }, _) if same => return TokenSpent,
                (ReferenceState::Free, _) => {}
                (_, OutcomeUnknown(holder))
                    if holder.takeover_in.is_zero() && request.take_over == Some(holder.fence) => {}
                _ => return found,
            }
        }
        self.fences.entry(request.address).or_default().push(fence);
        let attempt = before.as_ref().map_or(1, |before| before.lease.attempt + 1);
        let lease = Lease { request: request.clone(), fence, attempt, front_only: false };
        self.insert(ReferenceEntry {
            lease: lease.clone(),
            took_over: before.is_some_and(|before| !before.is_free()),
            claimed_at: self.now,
            expires_at: self.now + request.lease + request.ttl,
            state: ReferenceState::running(self.now + request.lease),
        });
        Granted(lease)
    }

    pub fn extend(&mut self, lease: &Lease, by: Duration) -> SettleOutcome {
        let state = ReferenceState::running(self.now + by);
        let least = self.now + by + lease.request.ttl;
        let now = self.now;
        match self.entry_for(lease) {
            None => self.restore(lease, state, least),
            Some(entry) if entry.is_held_by(lease) && matches!(entry.state, ReferenceState::Running { .. }) => {
                entry.state = state;
                entry.expires_at = entry.expires_at.max(least);
                Applied
            }
            Some(entry) => entry.lost(now),
        }
    }

    pub fn settle(&mut self, lease: &Lease, end: &Settlement) -> SettleOutcome {
        let (now, token) = (self.now, lease.request.token);
        let spent_until = now + lease.request.lease.max(SPENT_TOKEN_TTL);
        let spent = self.is_spent(&token);
        let released = ReferenceState::OutcomeUnknown { takeover_from: now, released: true };
        let is_release = *end == Release;
        let Some(entry) = self.entry_for(lease) else {
            if !is_release {
                return self.restore(lease, ReferenceState::of(end, now), now + end.ttl());
            }
            let until = self.spent_tokens.entry(token).or_default();
            *until = spent_until.max(*until);
            if lease.fence != Fence::UNSEEN && lease.request.take_over.is_some() {
                return self.restore(lease, released, spent_until.max(now + lease.request.ttl));
            }
            let restored = self.restore(lease, ReferenceState::Free, spent_until);
            return if lease.fence == Fence::UNSEEN { Applied } else { restored };
        };
        if !entry.is_held_by(lease) {
            if lease.fence != Fence::UNSEEN && spent && is_release {
                return Applied;
            }
            let lost = entry.lost(now);
            if lease.fence == Fence::UNSEEN && !spent {
                self.spent_tokens.insert(token, spent_until);
            }
            return lost;
        }
        match (&entry.state, end) {
            (ReferenceState::Running { .. }, Release) if entry.took_over => {
                entry.state = released;
                entry.expires_at = entry.expires_at.max(spent_until);
            }
            (ReferenceState::Running { .. }, _)
            | (ReferenceState::OutcomeUnknown { released: false, .. }, Complete { .. }) => {
                entry.end(end, now);
            }
            (ReferenceState::Completed { resolved: false, .. }, Complete { .. })
            | (ReferenceState::OutcomeUnknown { released: false, .. }, Park { .. })
            | (ReferenceState::OutcomeUnknown { released: true, .. } | ReferenceState::Free, Release) => {}
            _ => return entry.lost(now),
        }
        if is_release {
            self.spent_tokens.entry(token).or_insert(spent_until);
        }
        Applied
    }

    pub fn get(&self, at: &Address) -> Option<ClaimOutcome> {
        self.entries.get(at).filter(|entry| !entry.is_free()).map(|entry| entry.view(self.now))
    }

    pub fn resolve(&mut self, at: &Address, seen: Fence, end: &Settlement) -> SettleOutcome {
        let now = self.now;
        let Some(entry) = self.entries.get_mut(at) else {
            return ClaimLost(Box::new(TokenSpent));
        };
        if !matches!(entry.view(now), OutcomeUnknown(holder) if holder.fence == seen) {
            return entry.lost(now);
        }
        let was_released = matches!(entry.state, ReferenceState::OutcomeUnknown { released: true, .. });
        entry.end(end, now);
        match &mut entry.state {
            ReferenceState::Completed { resolved, .. } => *resolved = true,
            ReferenceState::OutcomeUnknown { released, .. } => *released = was_released,
            ReferenceState::Free => {
                self.spent_tokens.entry(entry.lease.request.token).or_insert(entry.expires_at);
            }
            ReferenceState::Running { .. } => {}
        }
        Applied
    }

    pub fn forget(&mut self, at: &Address, seen: Fence) -> SettleOutcome {
        let now = self.now;
        match self.entries.get_mut(at) {
            None => ClaimLost(Box::new(TokenSpent)),
            Some(entry) if entry.lease.fence != seen || entry.is_free() => entry.lost(now),
            Some(entry) => {
                entry.end(&Release, now);
                self.spent_tokens.entry(entry.lease.request.token).or_insert(entry.expires_at);
                Applied
            }
        }
    }

    /// The fence of the entry, if any, even if the entry is free.
    pub fn current_fence(&self, at: &Address) -> Option<Fence> {
        self.entries.get(at).map(|entry| entry.lease.fence)
    }

    /// All fences that were granted at an address, in order.
    pub fn granted_fences(&self, at: &Address) -> &[Fence] {
        self.fences.get(at).map_or(&[], Vec::as_slice)
    }

    /// Whether the contract leaves the result for this claim or its holder open: its token is spent, and the store need
    /// not remember that any more.
    pub fn is_unspecified(&self, request: &ClaimRequest) -> bool {
        self.spent_tokens.get(&request.token).is_some_and(|until| *until <= self.now)
    }

    /// Whether this token is spent and others have claimed since. The token may then find them, or its own settlement
    /// if that was restored after they had gone, but it is never granted.
    pub fn was_spent_and_replaced(&self, request: &ClaimRequest) -> bool {
        let is_other = |entry: &ReferenceEntry| {
            entry.lease.request.token != request.token || matches!(entry.state, ReferenceState::Completed { .. })
        };
        self.spent_tokens.contains_key(&request.token) && self.entries.get(&request.address).is_none_or(is_other)
    }

    fn is_spent(&self, token: &ClaimToken) -> bool {
        self.spent_tokens.get(token).is_some_and(|until| self.now < *until)
    }

    /// The entry that a holder finds. If another holder claimed and released it, then for a holder that the entry does
    /// not mention it counts as absent.
    fn entry_for(&mut self, lease: &Lease) -> Option<&mut ReferenceEntry> {
        let spent = self.is_spent(&lease.request.token);
        let yields = |entry: &ReferenceEntry| {
            entry.is_free()
                && lease.fence != Fence::UNSEEN
                && entry.lease.request.token != lease.request.token
                && !spent
        };
        self.entries.get_mut(&lease.request.address).filter(|entry| !yields(entry))
    }

    fn restore(&mut self, lease: &Lease, state: ReferenceState, expires_at: Duration) -> SettleOutcome {
        let took_over = lease.request.take_over.is_some();
        self.insert(ReferenceEntry { lease: lease.clone(), took_over, claimed_at: self.now, expires_at, state });
        Restored
    }

    fn insert(&mut self, entry: ReferenceEntry) {
        if self.now < entry.expires_at {
            self.entries.insert(entry.lease.request.address, entry);
        } else {
            self.entries.remove(&entry.lease.request.address);
        }
    }
}

impl ReferenceEntry {
    fn is_free(&self) -> bool {
        matches!(self.state, ReferenceState::Free)
    }

    fn is_held_by(&self, lease: &Lease) -> bool {
        self.lease.request.token == lease.request.token
            && (lease.fence == self.lease.fence || lease.fence == Fence::UNSEEN)
    }

    fn end(&mut self, end: &Settlement, now: Duration) {
        self.state = ReferenceState::of(end, now);
        self.expires_at = now
            + match end {
                Release => self.lease.request.lease.max(SPENT_TOKEN_TTL),
                end => end.ttl(),
            };
    }

    fn lost(&self, now: Duration) -> SettleOutcome {
        ClaimLost(Box::new(self.view(now)))
    }

    fn view(&self, now: Duration) -> ClaimOutcome {
        let Lease { fence, attempt, .. } = self.lease;
        let fingerprint = self.lease.request.fingerprint;
        let holder = |takeover_from: Duration| Holder {
            fence,
            attempt,
            fingerprint,
            age: now - self.claimed_at,
            takeover_in: takeover_from.saturating_sub(now),
        };
        match &self.state {
            ReferenceState::Running { lease_until, takeover_from } if now < *lease_until => {
                InProgress(holder(*takeover_from))
            }
            ReferenceState::Running { takeover_from, .. } | ReferenceState::OutcomeUnknown { takeover_from, .. } => {
                OutcomeUnknown(holder(*takeover_from))
            }
            ReferenceState::Completed { record, failed, .. } => Completed(CompletedEntry {
                fence,
                attempt,
                fingerprint,
                failed: *failed,
                record: record.clone(),
                expires_in: self.expires_at - now,
                front_only: false,
            }),
            ReferenceState::Free => TokenSpent,
        }
    }
}

impl ReferenceState {
    fn running(lease_until: Duration) -> Self {
        Self::Running { lease_until, takeover_from: lease_until }
    }

    fn of(end: &Settlement, now: Duration) -> Self {
        match end {
            Complete { record, failed, .. } => {
                Self::Completed { record: record.clone(), failed: *failed, resolved: false }
            }
            Release => Self::Free,
            Park { retry_in, .. } => Self::OutcomeUnknown { takeover_from: now + *retry_in, released: false },
        }
    }
}
