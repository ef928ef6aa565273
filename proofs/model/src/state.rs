//! All that a world is made of at one moment.

use crate::{
    gateway::{ModelRequest, StoreRole},
    store::{ModelCall, ModelEntryState, ModelStore},
};

/// How often each fault may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct FaultBudget {
    /// Calls whose answer is lost, or that are delayed.
    pub losses: u8,
    /// Calls that are delivered and arrive once more later.
    pub repeats: u8,
    /// Calls that certainly do not reach the store.
    pub front_unreachable: u8,
    pub authority_unreachable: u8,
    pub crashes: u8,
    /// Of the first store, or of the only one.
    pub failovers: u8,
    /// How often the replica catches up before.
    pub replications: u8,
    /// Heartbeats.
    pub heartbeats: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelState {
    pub front: ModelStore,
    pub authority: ModelStore,
    pub requests: Vec<ModelRequest>,
    /// Late copies that nobody waits for. Sorted.
    pub late_calls: Vec<LateCall>,
    pub faults_left: FaultBudget,
    /// The remembered answer that was given first.
    pub first_answer: Option<u8>,
    /// Somebody was given an answer that the store holds.
    pub completed_seen: bool,
    /// A failover happened; whether it lost a solo claim that the last store does not have.
    pub failover: Option<bool>,
    /// Invariants that broke.
    pub violations: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LateCall {
    pub to: StoreRole,
    pub call: ModelCall,
}

impl FaultBudget {
    /// Whether a call may still fail to reach a store.
    pub(crate) fn can_be_unreachable(&self, to: StoreRole) -> bool {
        match to {
            StoreRole::Front => self.front_unreachable > 0,
            StoreRole::Authority => self.authority_unreachable > 0,
        }
    }

    pub(crate) fn use_unreachable(&mut self, to: StoreRole) {
        match to {
            StoreRole::Front => self.front_unreachable -= 1,
            StoreRole::Authority => self.authority_unreachable -= 1,
        }
    }
}

impl ModelState {
    pub(crate) fn store_mut(&mut self, which: StoreRole) -> &mut ModelStore {
        match which {
            StoreRole::Front => &mut self.front,
            StoreRole::Authority => &mut self.authority,
        }
    }

    /// Reads that nobody waits for are of no use to anybody.
    pub(crate) fn post_late_call(&mut self, to: StoreRole, call: ModelCall) {
        if !matches!(call, ModelCall::Get | ModelCall::ReadMarker) {
            self.late_calls.push(LateCall { to, call });
            self.late_calls.sort_unstable();
        }
    }
}

impl LateCall {
    /// A claim that can never come alive.
    pub fn is_spent_claim(&self, state: &ModelState) -> bool {
        let store = if self.to == StoreRole::Front { &state.front } else { &state.authority };
        match (self.call, &store.now.entry) {
            (ModelCall::Claim { token, .. }, Some(entry)) => {
                entry.token == token && entry.state == ModelEntryState::Free
            }
            _ => false,
        }
    }
}
