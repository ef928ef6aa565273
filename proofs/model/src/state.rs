//! All that a world is made of at one moment.

use crate::{
    gateway::{Request, Which},
    store::{Call, Phase, Store},
};

/// How often each fault may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Faults {
    /// Calls whose answer is lost, or that are delayed.
    pub losses: u8,
    /// Calls that are delivered and arrive once more later.
    pub repeats: u8,
    /// Calls that certainly do not reach the store.
    pub first_unreachable: u8,
    pub last_unreachable: u8,
    pub crashes: u8,
    /// Of the first store, or of the only one.
    pub failovers: u8,
    /// How often the replica catches up before.
    pub replications: u8,
    /// Heartbeats.
    pub beats: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    pub first: Store,
    pub last: Store,
    pub requests: Vec<Request>,
    /// Late copies that nobody waits for. Sorted.
    pub mail: Vec<Mail>,
    pub left: Faults,
    /// The remembered answer that was given first.
    pub given: Option<u8>,
    /// Somebody was given an answer that the store holds.
    pub finished: bool,
    /// A failover happened; whether it lost a solo claim that the last store does not have.
    pub failover: Option<bool>,
    /// Invariants that broke.
    pub broken: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mail {
    pub to: Which,
    pub call: Call,
}

impl Faults {
    /// Whether a call may still fail to reach a store.
    pub(crate) fn can_miss(&self, to: Which) -> bool {
        match to {
            Which::First => self.first_unreachable > 0,
            Which::Last => self.last_unreachable > 0,
        }
    }

    pub(crate) fn spend(&mut self, to: Which) {
        match to {
            Which::First => self.first_unreachable -= 1,
            Which::Last => self.last_unreachable -= 1,
        }
    }
}

impl State {
    pub(crate) fn store(&mut self, which: Which) -> &mut Store {
        match which {
            Which::First => &mut self.first,
            Which::Last => &mut self.last,
        }
    }

    /// Reads that nobody waits for are of no use to anybody.
    pub(crate) fn post(&mut self, to: Which, call: Call) {
        if !matches!(call, Call::Get | Call::ReadMark) {
            self.mail.push(Mail { to, call });
            self.mail.sort_unstable();
        }
    }
}

impl Mail {
    /// A claim that can never come alive.
    pub fn is_spent_claim(&self, state: &State) -> bool {
        let store = if self.to == Which::First { &state.first } else { &state.last };
        match (self.call, &store.now.entry) {
            (Call::Claim { token, .. }, Some(entry)) => entry.token == token && entry.phase == Phase::Free,
            _ => false,
        }
    }
}
