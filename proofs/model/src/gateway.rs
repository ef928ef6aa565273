//! A request in a gateway: claim, run, settle. The steps that only a tiered store has are in [`crate::tiered`].
//!
//! A step that waits for a store has exactly one [`ModelCall`] under way. It ends with the store's answer, with the
//! certainty that the store was not reached, or in doubt; what may still arrive of a doubted call is in
//! [`ModelState::late_calls`]. A gateway that is paused is one whose requests take no step for a while.

use crate::{
    ModelOnUnknown, ModelSetup, ModelState,
    properties::{AnswerSource, Violation},
    red::ModelRule,
    store::{ModelAnswer, ModelCall, ModelFence, ModelHolder, ModelMarker, ModelSettlement, ModelToken, UNSEEN},
};

/// One of the two stores. A store alone is the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StoreRole {
    Front,
    Authority,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelRequest {
    pub step: ModelStep,
    pub token: ModelToken,
    /// Ends that a store has not acknowledged yet, told again in order until it has.
    pub settle_queue: Vec<ModelBackgroundTask>,
    /// For the properties only: no rule looks at it.
    pub history: RequestHistory,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelBackgroundTask {
    pub to: StoreRole,
    pub call: ModelCall,
    /// In the journal: survives a crash.
    pub is_journaled: bool,
    /// The end of a run that the last store has never heard of.
    pub is_front_only: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ModelStep {
    Idle,
    // Tiered: see crate::tiered.
    ClaimFront,
    ReadAuthority {
        front: ModelHolder,
        unknown: bool,
    },
    ReadMarkerBefore {
        front: ModelHolder,
    },
    TakeOverInFront {
        take_over: ModelFence,
        names_holder: bool,
    },
    /// Tells the last store of a solo claim that was taken over in the first.
    RecordInAuthority {
        front_only_run: ModelMarker,
        own_fence: ModelFence,
    },
    /// The last store let it take over: the first one is to show it before it runs.
    ShowInFront {
        lease: ModelLease,
        taken_over: ModelFence,
        /// It removed another holder's entry before.
        displaced: bool,
    },
    ReadMarkerToShow {
        lease: ModelLease,
        taken_over: ModelFence,
        found: ModelHolder,
    },
    ReplaceInFront {
        lease: ModelLease,
        taken_over: ModelFence,
        found: ModelFence,
        can_take_over: bool,
    },
    /// It is shown in place of another holder, who may have begun to run solo before.
    ReadMarkerAfterShown {
        lease: ModelLease,
        taken_over: ModelFence,
    },
    ReadMarkerAfter {
        taken_over: ModelFence,
        own_fence: ModelFence,
        names_holder: bool,
    },
    WriteMarker {
        fence: ModelFence,
    },
    VerifyMarker {
        fence: ModelFence,
    },
    SettleFront {
        lease: ModelLease,
        settlement: ModelSettlement,
    },
    // Every store.
    ClaimAuthority {
        front: FrontHold,
        take_over: Option<ModelFence>,
        is_ambiguous: bool,
    },
    Ready(ModelLease),
    Running(ModelLease),
    SettleAuthority {
        lease: ModelLease,
        settlement: ModelSettlement,
    },
    Ended(ClientOutcome),
}

/// What this request holds in the first store while the last one decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FrontHold {
    Nothing,
    /// The claim's answer was lost.
    Ambiguous,
    Claim(ModelFence),
    Takeover(ModelFence),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelLease {
    pub fence: ModelFence,
    pub is_takeover: bool,
    /// Granted by the first store alone; the fence is its.
    pub front_only: bool,
    /// It was solo, and a mark says so.
    pub has_marker: bool,
    pub in_front: bool,
}

/// How the upstream's part ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UpstreamOutcome {
    /// Provably nothing was sent.
    NotSent,
    Remembered,
    /// A complete reply that the policy does not remember.
    Unremembered,
    ConnectionLost,
    TimedOut,
}

/// What the client got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ClientOutcome {
    Ran,
    RanNotRecorded,
    RanOutcomeUnknown,
    Replayed,
    InProgress,
    OutcomeUnknown,
    KeyReused,
    Unreachable,
    Unavailable,
    /// Nothing: its gateway crashed.
    NoResponse,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct RequestHistory {
    /// It began when somebody had already got the recorded answer.
    pub after_completed: bool,
    /// At least a byte may have reached the upstream.
    pub sent: bool,
    pub reply: Option<UpstreamOutcome>,
    /// The policy let somebody run in its place.
    pub taken_over: bool,
    pub crashed: bool,
    pub front_only: FrontOnlyCause,
    /// The first store was not reached, and the last one asked alone.
    pub front_missed: bool,
    /// The last store was not reached, and the first one's answer stood.
    pub authority_missed: bool,
    /// The first store was never told the end.
    pub front_not_settled: bool,
    /// It gave way to a run on the first store alone.
    pub gave_way: bool,
    /// It was told that it no longer is the holder.
    pub claim_lost: bool,
    pub journaled: bool,
    /// Whoever took over found its mark, and told the last store that it may have run.
    pub reported_to_authority: bool,
    pub both_down: bool,
}

/// Why it ran without the last store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum FrontOnlyCause {
    #[default]
    NotFrontOnly,
    /// The last store was certainly not reached.
    AuthorityUnreachable,
    /// It was asked, and its answer is not known.
    AuthorityAmbiguous,
}

/// How a call ended, as the gateway sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreCallOutcome {
    Answered(Result<ModelAnswer, ModelAnswer>),
    /// The store was not reached.
    NotApplied,
    /// Nobody knows; ask again.
    AmbiguousRetry,
    /// Nobody knows; asked often enough.
    AmbiguousGiveUp,
}

impl ModelSetup {
    /// The call that a request waits for.
    pub fn pending_call(&self, state: &ModelState, who: usize) -> Option<(StoreRole, ModelCall)> {
        let request = &state.requests[who];
        let (token, body) = (request.token, self.fingerprints[who]);
        let settle = |lease: ModelLease, end| ModelCall::Settle {
            token,
            fingerprint: body,
            fence: lease.fence,
            is_takeover: lease.is_takeover,
            settlement: end,
        };
        Some(match request.step {
            ModelStep::ClaimFront => (StoreRole::Front, ModelCall::Claim { token, fingerprint: body, take_over: None }),
            ModelStep::ReadAuthority { .. } => (StoreRole::Authority, ModelCall::Get),
            ModelStep::ReadMarkerBefore { .. } | ModelStep::ReadMarkerAfter { .. } => {
                (StoreRole::Front, ModelCall::ReadMarker)
            }
            ModelStep::TakeOverInFront { take_over: over, .. } => {
                (StoreRole::Front, ModelCall::Claim { token, fingerprint: body, take_over: Some(over) })
            }
            ModelStep::RecordInAuthority { front_only_run: ran, .. } => {
                let end = ModelSettlement::Park { can_take_over: true };
                (
                    StoreRole::Authority,
                    ModelCall::Settle {
                        token: ran.token,
                        fingerprint: body,
                        fence: ran.fence,
                        is_takeover: false,
                        settlement: end,
                    },
                )
            }
            ModelStep::ShowInFront { .. } => {
                (StoreRole::Front, ModelCall::Claim { token, fingerprint: body, take_over: None })
            }
            ModelStep::ReadMarkerToShow { .. } | ModelStep::ReadMarkerAfterShown { .. } => {
                (StoreRole::Front, ModelCall::ReadMarker)
            }
            ModelStep::ReplaceInFront { found: there, can_take_over: true, .. } => {
                (StoreRole::Front, ModelCall::Claim { token, fingerprint: body, take_over: Some(there) })
            }
            ModelStep::ReplaceInFront { found: there, can_take_over: false, .. } => {
                (StoreRole::Front, ModelCall::Forget(there))
            }
            ModelStep::WriteMarker { fence } => {
                (StoreRole::Front, ModelCall::WriteMarker(ModelMarker { token, fence }))
            }
            ModelStep::VerifyMarker { fence } => {
                (StoreRole::Front, ModelCall::Extend { token, fingerprint: body, fence, is_takeover: false })
            }
            ModelStep::SettleFront { lease, settlement: end } => (StoreRole::Front, settle(lease, end)),
            ModelStep::ClaimAuthority { take_over: over, .. } => {
                (StoreRole::Authority, ModelCall::Claim { token, fingerprint: body, take_over: over })
            }
            ModelStep::SettleAuthority { lease, settlement: end } => (StoreRole::Authority, settle(lease, end)),
            ModelStep::Idle | ModelStep::Ready(_) | ModelStep::Running(_) | ModelStep::Ended(_) => return None,
        })
    }

    /// A request arrives. Answers in this gateway's journal come first.
    pub fn begin(&self, state: &mut ModelState, who: usize) {
        state.requests[who].history.after_completed = state.completed_seen;
        if let Some((writer, answer)) = self.journaled_answer(state, self.gateway(who)) {
            return match self.fingerprints[writer] == self.fingerprints[who] {
                true => self.replay(state, who, answer, AnswerSource::PendingAnswer),
                false => state.end(who, ClientOutcome::KeyReused),
            };
        }
        state.requests[who].step = match self.is_tiered() {
            true => ModelStep::ClaimFront,
            false => ModelStep::ClaimAuthority { front: FrontHold::Nothing, take_over: None, is_ambiguous: false },
        };
    }

    fn journaled_answer(&self, state: &ModelState, gateway: usize) -> Option<(usize, u8)> {
        let answers = state.requests.iter().enumerate().filter(|(writer, _)| self.gateway(*writer) == gateway);
        answers.flat_map(|(writer, request)| request.settle_queue.iter().map(move |errand| (writer, errand))).find_map(
            |(writer, errand)| match errand.call {
                ModelCall::Settle { settlement: ModelSettlement::Complete { answer }, .. } if errand.is_journaled => {
                    Some((writer, answer))
                }
                _ => None,
            },
        )
    }

    /// The call that a request waited for has ended.
    pub fn on_call_ended(&self, state: &mut ModelState, who: usize, outcome: StoreCallOutcome) {
        match state.requests[who].step {
            ModelStep::ClaimAuthority { front: first, take_over: over, is_ambiguous: doubt } => {
                self.on_authority_claimed(state, who, first, over, doubt, outcome)
            }
            ModelStep::SettleAuthority { lease, settlement: end } => {
                self.on_authority_settled(state, who, lease, end, outcome)
            }
            ModelStep::Idle | ModelStep::Ready(_) | ModelStep::Running(_) | ModelStep::Ended(_) => {}
            step => self.on_tiered_call_ended(state, who, step, outcome),
        }
    }

    fn on_authority_claimed(
        &self, state: &mut ModelState, who: usize, first: FrontHold, over: Option<ModelFence>, doubt: bool,
        outcome: StoreCallOutcome,
    ) {
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Granted(fence))) => {
                let in_first = first != FrontHold::Nothing;
                let lease = ModelLease {
                    fence,
                    is_takeover: over.is_some(),
                    front_only: false,
                    has_marker: false,
                    in_front: in_first,
                };
                let shown = !self.is_tiered() || in_first || self.rules.leaves_out(ModelRule::TakeoverIsShownInFront);
                state.requests[who].step = match over {
                    Some(took) if !shown => ModelStep::ShowInFront { lease, taken_over: took, displaced: false },
                    _ => ModelStep::Ready(lease),
                };
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::Completed(answer, body))) => {
                self.settle_front(state, who, first, ModelSettlement::Complete { answer }, body);
                self.on_completed(state, who, answer, body);
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::InProgress(holder))) => {
                self.on_in_progress(state, who, holder);
                self.refuse_ambiguous(state, who, over, doubt);
                self.release_front(state, who, first);
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::OutcomeUnknown(holder))) => {
                self.on_unknown_in_authority(state, who, holder, first, doubt);
                self.refuse_ambiguous(state, who, over, doubt);
                if matches!(state.requests[who].step, ModelStep::Ended(_)) {
                    self.release_front(state, who, first);
                }
            }
            StoreCallOutcome::Answered(_) => {
                self.release_front(state, who, first);
                state.refuse(self, who, ClientOutcome::InProgress);
            }
            StoreCallOutcome::AmbiguousRetry => {
                if self.rules.leaves_out(ModelRule::RepeatedClaimKeepsItsToken) {
                    state.requests[who].token |= 1;
                }
                state.requests[who].step =
                    ModelStep::ClaimAuthority { front: first, take_over: over, is_ambiguous: true };
            }
            // Takeovers need the store that decides.
            StoreCallOutcome::NotApplied if !doubt && over.is_some() => {
                self.release_front(state, who, first);
                state.end(who, ClientOutcome::Unavailable);
            }
            StoreCallOutcome::NotApplied if !doubt => self.on_authority_unreachable(state, who, first),
            StoreCallOutcome::AmbiguousGiveUp
                if self.may_run_front_only(first) && self.rules.leaves_out(ModelRule::NoFrontOnlyIfAmbiguous) =>
            {
                self.run_front_only(state, who, first, FrontOnlyCause::AuthorityAmbiguous);
            }
            // In doubt: never solo. Whatever may have been granted is released, in the last store first: whoever gets in
            // at the first store and runs solo waits with its answer while it finds this claim in the last.
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp => {
                self.queue_background_task(
                    state,
                    who,
                    StoreRole::Authority,
                    UNSEEN,
                    over.is_some(),
                    ModelSettlement::Release,
                    false,
                );
                self.release_front(state, who, first);
                state.end(who, ClientOutcome::Unavailable);
            }
        }
    }

    /// An earlier copy of the claim may still be under way: refused or not, it must not come alive once the present
    /// holder has left.
    fn refuse_ambiguous(&self, state: &mut ModelState, who: usize, over: Option<ModelFence>, doubt: bool) {
        let refused = matches!(state.requests[who].step, ModelStep::Ended(_));
        if refused && doubt && !self.rules.leaves_out(ModelRule::AmbiguousRefusalReleases) {
            self.queue_background_task(
                state,
                who,
                StoreRole::Authority,
                UNSEEN,
                over.is_some(),
                ModelSettlement::Release,
                false,
            );
        }
    }

    pub(crate) fn on_completed(&self, state: &mut ModelState, who: usize, answer: u8, body: u8) {
        match body == self.fingerprints[who] {
            true => self.replay(state, who, answer, AnswerSource::Replayed),
            false => state.end(who, ClientOutcome::KeyReused),
        }
    }

    pub(crate) fn on_in_progress(&self, state: &mut ModelState, who: usize, holder: ModelHolder) {
        match holder.fingerprint == self.fingerprints[who] {
            true => state.refuse(self, who, ClientOutcome::InProgress),
            false => state.end(who, ClientOutcome::KeyReused),
        }
    }

    /// The fingerprint first, then the policy; a takeover names its holder.
    pub(crate) fn on_unknown_in_authority(
        &self, state: &mut ModelState, who: usize, holder: ModelHolder, first: FrontHold, doubt: bool,
    ) {
        let same =
            holder.fingerprint == self.fingerprints[who] || self.rules.leaves_out(ModelRule::FingerprintBeforeTakeover);
        match self.on_unknown {
            _ if !same => state.end(who, ClientOutcome::KeyReused),
            ModelOnUnknown::Hold => state.refuse(self, who, ClientOutcome::OutcomeUnknown),
            ModelOnUnknown::Retry if holder.can_take_over => {
                let over = Some(holder.fence);
                state.requests[who].step =
                    ModelStep::ClaimAuthority { front: first, take_over: over, is_ambiguous: doubt };
            }
            ModelOnUnknown::Retry => state.refuse(self, who, ClientOutcome::InProgress),
        }
    }

    pub(crate) fn replay(&self, state: &mut ModelState, who: usize, answer: u8, how: AnswerSource) {
        if self.fingerprints[usize::from(answer)] != self.fingerprints[who] {
            state.violations |= Violation::ForeignReplay as u16;
        }
        state.check_answer(self, answer, how);
        state.end(who, ClientOutcome::Replayed);
    }

    /// The first byte leaves for the upstream.
    pub fn send_to_upstream(&self, state: &mut ModelState, who: usize) {
        let ModelStep::Ready(lease) = state.requests[who].step else { return };
        state.requests[who].history.sent = true;
        state.check_start(self, who);
        state.requests[who].step = ModelStep::Running(lease);
    }

    /// The upstream's part is over.
    pub fn on_upstream_ended(&self, state: &mut ModelState, who: usize, reply: UpstreamOutcome) {
        let (ModelStep::Ready(lease) | ModelStep::Running(lease)) = state.requests[who].step else { return };
        state.requests[who].history.reply = Some(reply);
        let end = match reply {
            UpstreamOutcome::Remembered => ModelSettlement::Complete { answer: who as u8 },
            UpstreamOutcome::NotSent | UpstreamOutcome::Unremembered => ModelSettlement::Release,
            UpstreamOutcome::ConnectionLost if self.rules.leaves_out(ModelRule::ConnectionLostIsParked) => {
                ModelSettlement::Release
            }
            UpstreamOutcome::ConnectionLost => ModelSettlement::Park { can_take_over: true },
            UpstreamOutcome::TimedOut => ModelSettlement::Park { can_take_over: false },
        };
        if end == ModelSettlement::Release {
            state.check_release(who);
        }
        if reply == UpstreamOutcome::Remembered && self.rules.leaves_out(ModelRule::RecordThenAnswer) {
            state.check_answer(self, who as u8, AnswerSource::Replayed);
        }
        state.requests[who].step = ModelStep::SettleAuthority { lease, settlement: end };
    }

    fn on_authority_settled(
        &self, state: &mut ModelState, who: usize, lease: ModelLease, end: ModelSettlement, outcome: StoreCallOutcome,
    ) {
        match outcome {
            StoreCallOutcome::Answered(Ok(_)) => {
                self.settle_front_in_background(state, who, lease, end);
                self.answer(state, who, end, AnswerSource::Recorded);
            }
            StoreCallOutcome::Answered(Err(now)) if lease.front_only && self.waits_for_holder(end, now) => {
                state.requests[who].step = ModelStep::SettleFront { lease, settlement: end };
            }
            // It writes nothing, and answers what the record says.
            StoreCallOutcome::Answered(Err(now)) => {
                state.requests[who].history.claim_lost = end != ModelSettlement::Release;
                // Asked again after a lost answer, and somebody has come since: this claim still stands in the first store.
                if end == ModelSettlement::Release && !self.rules.leaves_out(ModelRule::LostReleaseReachesFront) {
                    self.settle_front_in_background(state, who, lease, end);
                }
                self.on_claim_lost(state, who, now);
            }
            StoreCallOutcome::AmbiguousRetry => {}
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp if lease.front_only => {
                state.requests[who].step = ModelStep::SettleFront { lease, settlement: end };
            }
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp => {
                let complete = matches!(end, ModelSettlement::Complete { .. });
                self.queue_background_task(
                    state,
                    who,
                    StoreRole::Authority,
                    lease.fence,
                    lease.is_takeover,
                    end,
                    complete && self.journal,
                );
                self.settle_front_in_background(state, who, lease, end);
                match complete && !self.journal {
                    // The answer is withheld until it is stored.
                    true => state.end(who, ClientOutcome::Unavailable),
                    false => self.answer(state, who, end, AnswerSource::PendingAnswer),
                }
            }
        }
    }

    pub(crate) fn answer(&self, state: &mut ModelState, who: usize, end: ModelSettlement, how: AnswerSource) {
        let verdict = match end {
            ModelSettlement::Complete { answer } => {
                state.check_answer(self, answer, how);
                ClientOutcome::Ran
            }
            ModelSettlement::Park { .. } => ClientOutcome::RanOutcomeUnknown,
            ModelSettlement::Release if state.requests[who].history.sent => ClientOutcome::RanNotRecorded,
            ModelSettlement::Release => ClientOutcome::Unreachable,
        };
        state.end(who, verdict);
    }

    /// What the record says, never its own reply; and never what it says to another body.
    pub(crate) fn on_claim_lost(&self, state: &mut ModelState, who: usize, now: ModelAnswer) {
        match now {
            ModelAnswer::Completed(answer, _) if self.rules.leaves_out(ModelRule::LoserComparesFingerprints) => {
                self.replay(state, who, answer, AnswerSource::Replayed)
            }
            ModelAnswer::Completed(answer, body) => self.on_completed(state, who, answer, body),
            ModelAnswer::OutcomeUnknown(_) => state.end(who, ClientOutcome::OutcomeUnknown),
            _ => state.end(who, ClientOutcome::InProgress),
        }
    }

    /// To be told until acknowledged.
    #[expect(clippy::too_many_arguments, reason = "a lease and its end, taken apart")]
    pub(crate) fn queue_background_task(
        &self, state: &mut ModelState, who: usize, to: StoreRole, fence: ModelFence, over: bool, end: ModelSettlement,
        durable: bool,
    ) {
        let (token, body) = (state.requests[who].token, self.fingerprints[who]);
        let call = ModelCall::Settle { token, fingerprint: body, fence, is_takeover: over, settlement: end };
        if end == ModelSettlement::Release {
            state.check_release(who);
        }
        state.requests[who].history.journaled |= durable;
        state.requests[who].settle_queue.push(ModelBackgroundTask {
            to,
            call,
            is_journaled: durable,
            is_front_only: false,
        });
    }

    /// A store has heard the oldest errand. What the last store calls lost must not stand in the first.
    pub fn on_task_delivered(&self, state: &mut ModelState, who: usize, held: Result<ModelAnswer, ModelAnswer>) {
        let request = &mut state.requests[who];
        if let (ModelBackgroundTask { is_front_only: true, call: ModelCall::Settle { settlement, .. }, .. }, Err(now)) =
            (&request.settle_queue[0], held)
            && self.waits_for_holder(*settlement, now)
        {
            return;
        }
        let told = request.settle_queue.remove(0);
        if told.to == StoreRole::Authority
            && held.is_err()
            && !self.rules.leaves_out(ModelRule::ClaimLostStaysOutOfFront)
        {
            let stands =
                |call| matches!(call, ModelCall::Settle { settlement, .. } if settlement != ModelSettlement::Release);
            request.history.claim_lost = true;
            request.settle_queue.retain(|errand| !stands(errand.call));
        }
    }

    /// A gateway dies: what it was at is gone, except its journal.
    pub fn crash(&self, state: &mut ModelState, gateway: usize) {
        for who in (0..state.requests.len()).filter(|who| self.gateway(*who) == gateway) {
            let request = &mut state.requests[who];
            let at_work = !matches!(request.step, ModelStep::Idle | ModelStep::Ended(_));
            let before = request.settle_queue.len();
            request.settle_queue.retain(|errand| errand.is_journaled);
            request.history.crashed |= at_work || request.settle_queue.len() < before;
            if at_work {
                request.step = ModelStep::Ended(ClientOutcome::NoResponse);
            }
        }
    }
}

impl ModelState {
    pub(crate) fn end(&mut self, who: usize, verdict: ClientOutcome) {
        self.requests[who].step = ModelStep::Ended(verdict);
    }

    pub(crate) fn refuse(&mut self, world: &ModelSetup, who: usize, verdict: ClientOutcome) {
        self.check_refusal(world, who);
        self.end(who, verdict);
    }
}
