//! One store, one address: the contract's rules, each as short as it can be said.
//!
//! Time is abstract. A lease does not end at an hour: "it has lapsed" is an event that may come at any moment, so a
//! holder that goes on after it is a gateway that was paused. The fence is the store's clock, which no failover turns back.

use crate::{
    properties::{StoreMonitor, Violation},
    red::{ModelRule, ModelRules},
};

/// A request's index, which is also what its run answers: two runs never answer the same.
pub type RequestIndex = u8;
/// Names a claim.
pub type ModelToken = u8;
/// Names a holder.
pub type ModelFence = u8;
/// What makes two requests the same.
pub type ModelFingerprint = u8;

/// The claim's answer was lost: the token alone names it.
pub const UNSEEN: ModelFence = 0;
/// How many tokens a request may mint.
pub const TOKENS_PER_REQUEST: u8 = 2;

/// Whose token it is.
pub fn token_owner(token: ModelToken) -> usize {
    usize::from(token / TOKENS_PER_REQUEST)
}

/// A store: what it holds, and what its replica would hold if it took over now.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ModelStore {
    pub now: StoreContents,
    pub replica: StoreContents,
    /// The latest fence given, by the clock.
    pub clock: ModelFence,
}

/// What a failover can lose.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct StoreContents {
    pub entry: Option<ModelEntry>,
    /// Tokens of earlier holders that can never be granted again, one bit each.
    pub spent_tokens: u16,
    /// Tiered, first only: this holder may run without the store that decides.
    pub marker: Option<ModelMarker>,
    /// How many grants it remembers.
    pub grants: u8,
}

/// Whom a mark names: a holder in the first store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelMarker {
    pub token: ModelToken,
    pub fence: ModelFence,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelEntry {
    pub token: ModelToken,
    pub fence: ModelFence,
    pub fingerprint: ModelFingerprint,
    /// Its holder took over an unknown one.
    pub took_over: bool,
    pub state: ModelEntryState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ModelEntryState {
    Running {
        lapsed: bool,
    },
    /// `ripe`: may be taken over. `released`: its takeover was, and has spent its token.
    OutcomeUnknown {
        can_take_over: bool,
        released: bool,
    },
    Completed {
        answer: RequestIndex,
    },
    Free,
}

/// What a gateway sends to a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ModelCall {
    Claim {
        token: ModelToken,
        fingerprint: ModelFingerprint,
        take_over: Option<ModelFence>,
    },
    Extend {
        token: ModelToken,
        fingerprint: ModelFingerprint,
        fence: ModelFence,
        is_takeover: bool,
    },
    Settle {
        token: ModelToken,
        fingerprint: ModelFingerprint,
        fence: ModelFence,
        is_takeover: bool,
        settlement: ModelSettlement,
    },
    Get,
    WriteMarker(ModelMarker),
    RemoveMarker(ModelFence),
    ReadMarker,
    /// An operator's: takes the entry from whoever has this fence.
    Forget(ModelFence),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ModelSettlement {
    Complete {
        answer: RequestIndex,
    },
    Release,
    /// `ripe`: may be taken over at once, not only once the lease has lapsed.
    Park {
        can_take_over: bool,
    },
}

/// What a store answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ModelAnswer {
    Granted(ModelFence),
    InProgress(ModelHolder),
    OutcomeUnknown(ModelHolder),
    Completed(RequestIndex, ModelFingerprint),
    TokenSpent,
    Absent,
    Applied,
    Restored,
    Marker(Option<ModelMarker>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelHolder {
    pub fence: ModelFence,
    pub fingerprint: ModelFingerprint,
    pub can_take_over: bool,
}

/// Whether a holder still was the holder; if not, what is there now.
pub type ModelCallResult = Result<ModelAnswer, ModelAnswer>;

impl ModelStore {
    /// One atomic step. `Err` only for a holder that lost its claim.
    pub fn apply(&mut self, call: ModelCall, rules: ModelRules, watch: &mut StoreMonitor) -> ModelCallResult {
        match call {
            ModelCall::Claim { token, fingerprint: body, take_over: over } => {
                Ok(self.claim(token, body, over, rules, watch))
            }
            ModelCall::Extend { token, fingerprint: body, fence, is_takeover: over } => {
                self.extend(token, body, fence, over, rules)
            }
            ModelCall::Settle { token, fingerprint: body, fence, is_takeover: over, settlement: end } => {
                let before = self.now.clone();
                let held = self.settle(token, body, fence, over, end, rules, watch);
                // A token that is spent is no write: nobody sees it but its own late copies.
                if held.is_err() && (self.now.view(), self.now.marker) != (before.view(), before.marker) {
                    watch.report_violation(Violation::StaleSettle);
                }
                held
            }
            ModelCall::Get => Ok(self.now.view()),
            ModelCall::WriteMarker(marker) => {
                self.now.marker = Some(marker);
                Ok(ModelAnswer::Applied)
            }
            ModelCall::Forget(fence) => {
                if self.now.entry.as_ref().is_some_and(|entry| entry.fence == fence) {
                    self.now.release(rules);
                }
                Ok(ModelAnswer::Applied)
            }
            ModelCall::RemoveMarker(fence) => {
                if self.now.marker.is_some_and(|marker| marker.fence == fence) {
                    self.now.marker = None;
                }
                Ok(ModelAnswer::Applied)
            }
            ModelCall::ReadMarker => Ok(ModelAnswer::Marker(self.now.marker)),
        }
    }

    fn claim(
        &mut self, token: ModelToken, body: ModelFingerprint, over: Option<ModelFence>, rules: ModelRules,
        watch: &mut StoreMonitor,
    ) -> ModelAnswer {
        if self.now.is_spent(token) {
            return ModelAnswer::TokenSpent;
        }
        let mut took_over = false;
        if let Some(entry) = &self.now.entry {
            let same = entry.token == token;
            let named =
                over == Some(entry.fence) || (over.is_some() && rules.leaves_out(ModelRule::TakeoverNamesItsHolder));
            match entry.state {
                ModelEntryState::Running { .. } if same => return ModelAnswer::Granted(entry.fence),
                ModelEntryState::Free | ModelEntryState::OutcomeUnknown { released: true, .. } if same => {
                    return ModelAnswer::TokenSpent;
                }
                ModelEntryState::Free => {}
                ModelEntryState::Running { lapsed: true } if rules.leaves_out(ModelRule::LapsedIsUnknown) => {}
                _ if named && entry.can_take_over() => took_over = true,
                _ => return self.now.view(),
            }
            if took_over {
                watch.record_takeover(entry, body);
            }
        }
        let fence = self.next_fence(rules, watch);
        self.now.record_spent_token();
        self.now.entry = Some(ModelEntry {
            token,
            fence,
            fingerprint: body,
            took_over,
            state: ModelEntryState::Running { lapsed: false },
        });
        ModelAnswer::Granted(fence)
    }

    fn next_fence(&mut self, rules: ModelRules, watch: &mut StoreMonitor) -> ModelFence {
        self.now.grants += 1;
        let fence = if rules.leaves_out(ModelRule::FencesComeFromTheClock) { self.now.grants } else { self.clock + 1 };
        if fence <= self.clock {
            watch.report_violation(Violation::FencesGrow);
        }
        self.clock = self.clock.max(fence);
        fence
    }

    fn extend(
        &mut self, token: ModelToken, body: ModelFingerprint, fence: ModelFence, over: bool, rules: ModelRules,
    ) -> ModelCallResult {
        self.now.remove_released(token, rules);
        match &mut self.now.entry {
            None => {
                self.restore(token, body, fence, over, ModelEntryState::Running { lapsed: false });
                Ok(ModelAnswer::Restored)
            }
            Some(entry) if entry.is_held_by(token, fence) && matches!(entry.state, ModelEntryState::Running { .. }) => {
                entry.state = ModelEntryState::Running { lapsed: false };
                Ok(ModelAnswer::Applied)
            }
            Some(_) => Err(self.now.view_for_loser()),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a lease and its end, taken apart")]
    fn settle(
        &mut self, token: ModelToken, body: ModelFingerprint, fence: ModelFence, over: bool, end: ModelSettlement,
        rules: ModelRules, watch: &mut StoreMonitor,
    ) -> ModelCallResult {
        if fence != UNSEEN {
            self.now.remove_released(token, rules);
        }
        let Some(entry) = &mut self.now.entry else {
            return self.settle_absent(token, body, fence, over, end, rules);
        };
        if !entry.is_held_by(token, fence) && !rules.leaves_out(ModelRule::SettlesAreFenced) {
            // A claim whose answer never came, and which may still be on its way, must not come alive later.
            if fence == UNSEEN && !rules.leaves_out(ModelRule::ReleaseUnderAnotherHolderSpends) {
                self.now.spent_tokens |= 1 << token;
            }
            return Err(self.now.view_for_loser());
        }
        match (entry.state, end) {
            (ModelEntryState::Running { .. }, _)
            | (ModelEntryState::OutcomeUnknown { released: false, .. }, ModelSettlement::Complete { .. }) => {}
            (ModelEntryState::Completed { .. }, ModelSettlement::Complete { .. })
            | (ModelEntryState::OutcomeUnknown { released: false, .. }, ModelSettlement::Park { .. })
            | (
                ModelEntryState::OutcomeUnknown { released: true, .. } | ModelEntryState::Free,
                ModelSettlement::Release,
            ) => return Ok(ModelAnswer::Applied),
            _ => return Err(self.now.view_for_loser()),
        }
        match end {
            ModelSettlement::Complete { answer } => entry.state = ModelEntryState::Completed { answer },
            ModelSettlement::Park { can_take_over: ripe } => {
                entry.state = ModelEntryState::OutcomeUnknown { can_take_over: ripe, released: false }
            }
            ModelSettlement::Release => {
                if !entry.took_over {
                    self.now.release(rules);
                } else if rules.leaves_out(ModelRule::ReleasedTakeoverIsUnknown) {
                    watch.report_violation(Violation::TakeoverReleasedAsFree);
                    self.now.release(rules);
                } else {
                    entry.state = ModelEntryState::OutcomeUnknown { can_take_over: true, released: true };
                }
            }
        }
        Ok(ModelAnswer::Applied)
    }

    /// Nobody is there: an end is put back; a release, and a claim that never came, leave a spent token.
    fn settle_absent(
        &mut self, token: ModelToken, body: ModelFingerprint, fence: ModelFence, over: bool, end: ModelSettlement,
        rules: ModelRules,
    ) -> ModelCallResult {
        let phase = match end {
            _ if fence == UNSEEN => ModelEntryState::Free,
            ModelSettlement::Release if over => ModelEntryState::OutcomeUnknown { can_take_over: true, released: true },
            ModelSettlement::Release => ModelEntryState::Free,
            ModelSettlement::Complete { answer } => ModelEntryState::Completed { answer },
            ModelSettlement::Park { can_take_over: ripe } => {
                ModelEntryState::OutcomeUnknown { can_take_over: ripe, released: false }
            }
        };
        if phase == ModelEntryState::Free && rules.leaves_out(ModelRule::ReleaseLeavesFreeEntry) {
            return Ok(ModelAnswer::Restored);
        }
        self.restore(token, body, fence, over, phase);
        match end {
            ModelSettlement::Release => Ok(ModelAnswer::Restored),
            _ if fence == UNSEEN => Err(ModelAnswer::TokenSpent),
            _ => Ok(ModelAnswer::Restored),
        }
    }

    /// Puts an entry back; the next fence is above its.
    fn restore(
        &mut self, token: ModelToken, body: ModelFingerprint, fence: ModelFence, over: bool, phase: ModelEntryState,
    ) {
        self.clock = self.clock.max(fence);
        self.now.entry = Some(ModelEntry { token, fence, fingerprint: body, took_over: over, state: phase });
    }

    /// Whether time can still change something here.
    pub fn can_lapse(&self) -> bool {
        let phase = self.now.entry.as_ref().map(|entry| entry.state);
        matches!(
            phase,
            Some(
                ModelEntryState::Running { lapsed: false }
                    | ModelEntryState::OutcomeUnknown { can_take_over: false, .. }
            )
        )
    }

    /// The holder has been silent for longer than its lease.
    pub fn lapse(&mut self, rules: ModelRules) {
        let Some(entry) = &mut self.now.entry else { return };
        match &mut entry.state {
            ModelEntryState::Running { .. } if rules.leaves_out(ModelRule::LeaseIsNotTheTtl) => self.now.entry = None,
            ModelEntryState::Running { lapsed } => *lapsed = true,
            ModelEntryState::OutcomeUnknown { can_take_over: ripe, .. } => *ripe = true,
            ModelEntryState::Completed { .. } | ModelEntryState::Free => {}
        }
    }
}

impl StoreContents {
    fn is_spent(&self, token: ModelToken) -> bool {
        self.spent_tokens & (1 << token) != 0
    }

    fn release(&mut self, rules: ModelRules) {
        if rules.leaves_out(ModelRule::ReleaseLeavesFreeEntry) {
            self.entry = None;
        } else if let Some(entry) = &mut self.entry {
            entry.state = ModelEntryState::Free;
        }
    }

    /// A holder that this store has never heard of, or has lost, finds a released entry: nobody is there, so its own is
    /// put back as on an absent one.
    fn remove_released(&mut self, token: ModelToken, rules: ModelRules) {
        let freed =
            self.entry.as_ref().is_some_and(|entry| entry.state == ModelEntryState::Free && entry.token != token);
        if freed && !self.is_spent(token) && !rules.leaves_out(ModelRule::FreeIsAbsentForAHolder) {
            self.record_spent_token();
            self.entry = None;
        }
    }

    /// Before somebody else becomes the holder.
    fn record_spent_token(&mut self) {
        if let Some(ModelEntry {
            token,
            state: ModelEntryState::Free | ModelEntryState::OutcomeUnknown { released: true, .. },
            ..
        }) = self.entry
        {
            self.spent_tokens |= 1 << token;
        }
    }

    fn view(&self) -> ModelAnswer {
        self.entry.as_ref().map_or(ModelAnswer::Absent, ModelEntry::view)
    }

    fn view_for_loser(&self) -> ModelAnswer {
        match self.view() {
            ModelAnswer::Absent => ModelAnswer::TokenSpent,
            view => view,
        }
    }
}

impl ModelEntry {
    fn is_held_by(&self, token: ModelToken, fence: ModelFence) -> bool {
        self.token == token && (self.fence == fence || fence == UNSEEN)
    }

    fn can_take_over(&self) -> bool {
        matches!(
            self.state,
            ModelEntryState::Running { lapsed: true } | ModelEntryState::OutcomeUnknown { can_take_over: true, .. }
        )
    }

    fn view(&self) -> ModelAnswer {
        let holder =
            ModelHolder { fence: self.fence, fingerprint: self.fingerprint, can_take_over: self.can_take_over() };
        match self.state {
            ModelEntryState::Running { lapsed: false } => ModelAnswer::InProgress(holder),
            ModelEntryState::Running { lapsed: true } | ModelEntryState::OutcomeUnknown { .. } => {
                ModelAnswer::OutcomeUnknown(holder)
            }
            ModelEntryState::Completed { answer } => ModelAnswer::Completed(answer, self.fingerprint),
            ModelEntryState::Free => ModelAnswer::Absent,
        }
    }
}
