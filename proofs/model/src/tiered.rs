//! Two stores as one: the last (PostgreSQL) decides, the first (Redis) speeds it up or, if loose, stands in.
//!
//! How a claim reads:
//! 1. `ClaimFront`. Finished: replay. Granted: `ClaimAuthority` with the same token. Held by another: `ReadAuthority`. Not reached:
//!    the last store decides alone.
//! 2. `ReadAuthority`: its answer wins. If it knows nothing and the first store's holder has lapsed, that holder never started,
//!    unless it ran solo: `ReadMarkerBefore`, `TakeOverInFront`, `ReadMarkerAfter`, then `ClaimAuthority`.
//! 3. Loose, and the last store certainly not reached: `WriteMarker`, `VerifyMarker` (an extend in the first store that must say that it
//!    is still held), then run solo.
//!
//! Why the order `WriteMarker`, `VerifyMarker` and `TakeOverInFront`, `ReadMarkerAfter` is safe: either the takeover comes before the proof, and
//! the proof fails; or the proof, and with it the mark, comes before the takeover, and the mark is seen after it.

use crate::{
    ModelOnUnknown, ModelSetup, ModelState, StoreSetup,
    gateway::{
        ClientOutcome, FrontHold, FrontOnlyCause, ModelBackgroundTask, ModelLease, ModelStep, StoreCallOutcome,
        StoreRole,
    },
    properties::AnswerSource,
    red::ModelRule,
    store::{ModelAnswer, ModelCall, ModelFence, ModelHolder, ModelMarker, ModelSettlement, UNSEEN, token_owner},
};

impl ModelSetup {
    pub(crate) fn is_tiered(&self) -> bool {
        self.stores != StoreSetup::One
    }

    pub(crate) fn on_tiered_call_ended(
        &self, state: &mut ModelState, who: usize, step: ModelStep, outcome: StoreCallOutcome,
    ) {
        match step {
            ModelStep::ClaimFront => self.on_front_claimed(state, who, outcome),
            ModelStep::ReadAuthority { front: first, unknown } => {
                self.on_authority_read(state, who, first, unknown, outcome)
            }
            ModelStep::ReadMarkerBefore { front: first } => self.on_marker_read_before(state, who, first, outcome),
            ModelStep::TakeOverInFront { take_over: over, names_holder: by_name } => {
                self.on_front_taken_over(state, who, over, by_name, outcome)
            }
            ModelStep::ReadMarkerAfter { taken_over: took, own_fence: mine, names_holder: by_name } => {
                self.on_marker_read_after(state, who, took, mine, by_name, outcome);
            }
            ModelStep::RecordInAuthority { front_only_run: ran, own_fence: mine } => {
                self.on_recorded_in_authority(state, who, ran, mine, outcome)
            }
            ModelStep::ShowInFront { lease, taken_over: took, displaced } => {
                self.on_shown_in_front(state, who, lease, took, displaced, outcome)
            }
            ModelStep::ReadMarkerAfterShown { lease, taken_over: took } => {
                self.on_marker_read_after_shown(state, who, lease, took, outcome);
            }
            ModelStep::ReadMarkerToShow { lease, taken_over: took, found: there } => {
                self.on_marker_read_to_show(state, who, lease, took, there, outcome);
            }
            ModelStep::ReplaceInFront { lease, taken_over: took, can_take_over: ripe, .. } => {
                self.on_replaced_in_front(state, who, lease, took, ripe, outcome)
            }
            ModelStep::WriteMarker { fence } => self.on_marker_written(state, who, fence, outcome),
            ModelStep::VerifyMarker { fence } => self.on_marker_verified(state, who, fence, outcome),
            ModelStep::SettleFront { lease, settlement: end } => self.on_front_settled(state, who, lease, end, outcome),
            _ => {}
        }
    }

    fn on_front_claimed(&self, state: &mut ModelState, who: usize, outcome: StoreCallOutcome) {
        let claim_last = |first| ModelStep::ClaimAuthority { front: first, take_over: None, is_ambiguous: false };
        state.requests[who].history.front_missed = !matches!(outcome, StoreCallOutcome::Answered(_));
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Granted(fence))) => {
                state.requests[who].step = claim_last(FrontHold::Claim(fence));
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::Completed(answer, body))) => {
                self.on_completed(state, who, answer, body)
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::InProgress(holder)))
                if self.rules.leaves_out(ModelRule::AuthorityWinsOverInProgress) =>
            {
                self.on_in_progress(state, who, holder);
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::InProgress(first))) => {
                state.requests[who].step = ModelStep::ReadAuthority { front: first, unknown: false };
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::OutcomeUnknown(first))) => {
                state.requests[who].step = ModelStep::ReadAuthority { front: first, unknown: true };
            }
            StoreCallOutcome::Answered(_) => state.refuse(self, who, ClientOutcome::InProgress),
            StoreCallOutcome::NotApplied => state.requests[who].step = claim_last(FrontHold::Nothing),
            StoreCallOutcome::AmbiguousRetry | StoreCallOutcome::AmbiguousGiveUp => {
                state.requests[who].step = claim_last(FrontHold::Ambiguous)
            }
        }
    }

    fn on_authority_read(
        &self, state: &mut ModelState, who: usize, first: ModelHolder, unknown: bool, outcome: StoreCallOutcome,
    ) {
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Completed(answer, body))) => {
                self.on_completed(state, who, answer, body)
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::InProgress(holder))) => self.on_in_progress(state, who, holder),
            StoreCallOutcome::Answered(Ok(ModelAnswer::OutcomeUnknown(holder))) => {
                self.on_unknown_in_authority(state, who, holder, FrontHold::Nothing, false)
            }
            StoreCallOutcome::Answered(_) if !unknown || !first.can_take_over => self.on_in_progress(state, who, first),
            // It never started, but another body must not stand in its place: should it have run solo after all, the
            // entry would name the wrong request.
            StoreCallOutcome::Answered(_)
                if first.fingerprint != self.fingerprints[who]
                    && !self.rules.leaves_out(ModelRule::SameFingerprintTakesOverInFront) =>
            {
                state.end(who, ClientOutcome::KeyReused);
            }
            StoreCallOutcome::Answered(_) => state.requests[who].step = ModelStep::ReadMarkerBefore { front: first },
            StoreCallOutcome::AmbiguousRetry => {}
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp if self.stores == StoreSetup::Strict => {
                state.end(who, ClientOutcome::Unavailable);
            }
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp => {
                state.requests[who].history.authority_missed = true;
                match (unknown, self.on_unknown) {
                    (true, ModelOnUnknown::Hold) if first.fingerprint == self.fingerprints[who] => {
                        state.refuse(self, who, ClientOutcome::OutcomeUnknown);
                    }
                    // Takeovers need the store that decides.
                    (true, ModelOnUnknown::Retry) => state.end(who, ClientOutcome::Unavailable),
                    _ => self.on_in_progress(state, who, first),
                }
            }
        }
    }

    fn on_marker_read_before(&self, state: &mut ModelState, who: usize, first: ModelHolder, outcome: StoreCallOutcome) {
        let take = |by_name| ModelStep::TakeOverInFront { take_over: first.fence, names_holder: by_name };
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Marker(Some(named))))
                if self.trusts_marker(named, first.fence) =>
            {
                match self.on_unknown {
                    ModelOnUnknown::Hold => state.refuse(self, who, ClientOutcome::OutcomeUnknown),
                    ModelOnUnknown::Retry if self.rules.leaves_out(ModelRule::FrontOnlyIsTakenOverInFront) => {
                        let over = Some(first.fence);
                        state.requests[who].step = ModelStep::ClaimAuthority {
                            front: FrontHold::Nothing,
                            take_over: over,
                            is_ambiguous: false,
                        };
                    }
                    ModelOnUnknown::Retry => state.requests[who].step = take(true),
                }
            }
            StoreCallOutcome::Answered(_) => state.requests[who].step = take(false),
            StoreCallOutcome::AmbiguousRetry => {}
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp => {
                state.end(who, ClientOutcome::Unavailable)
            }
        }
    }

    /// A mark speaks for whoever holds the entry now: the one that it names may have been taken over by somebody who
    /// then gave it back, or died.
    fn trusts_marker(&self, named: ModelMarker, current: ModelFence) -> bool {
        named.fence == current || !self.rules.leaves_out(ModelRule::AnyMarkerIsTrusted)
    }

    fn on_front_taken_over(
        &self, state: &mut ModelState, who: usize, over: ModelFence, by_name: bool, outcome: StoreCallOutcome,
    ) {
        let go_to_last =
            |mine| ModelStep::ClaimAuthority { front: FrontHold::Takeover(mine), take_over: None, is_ambiguous: false };
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Granted(mine))) => {
                let left_out = if by_name {
                    ModelRule::FrontOnlyIsRecordedInAuthority
                } else {
                    ModelRule::MarkerIsReadAfterTakeover
                };
                state.requests[who].step = match self.rules.leaves_out(left_out) {
                    true => go_to_last(mine),
                    false => ModelStep::ReadMarkerAfter { taken_over: over, own_fence: mine, names_holder: by_name },
                };
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::Completed(answer, body))) => {
                self.on_completed(state, who, answer, body)
            }
            StoreCallOutcome::Answered(_) => state.refuse(self, who, ClientOutcome::InProgress),
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousRetry | StoreCallOutcome::AmbiguousGiveUp => {
                self.release_front(state, who, FrontHold::Ambiguous);
                state.end(who, ClientOutcome::Unavailable);
            }
        }
    }

    fn on_marker_read_after(
        &self, state: &mut ModelState, who: usize, took: ModelFence, mine: ModelFence, by_name: bool,
        outcome: StoreCallOutcome,
    ) {
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Marker(Some(ran)))) if by_name => {
                state.requests[token_owner(ran.token)].history.reported_to_authority = true;
                state.requests[who].step = ModelStep::RecordInAuthority { front_only_run: ran, own_fence: mine };
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::Marker(Some(named)))) if self.trusts_marker(named, took) => {
                self.release_front(state, who, FrontHold::Takeover(mine));
                state.refuse(self, who, ClientOutcome::OutcomeUnknown);
            }
            StoreCallOutcome::Answered(_) => {
                let first = FrontHold::Takeover(mine);
                state.requests[who].step =
                    ModelStep::ClaimAuthority { front: first, take_over: None, is_ambiguous: false };
            }
            StoreCallOutcome::AmbiguousRetry => {}
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp => {
                self.release_front(state, who, FrontHold::Takeover(mine));
                state.end(who, ClientOutcome::Unavailable);
            }
        }
    }

    /// The solo claim that was taken over is unknown in the last store from now on, unless that knows better.
    fn on_recorded_in_authority(
        &self, state: &mut ModelState, who: usize, ran: ModelMarker, mine: ModelFence, outcome: StoreCallOutcome,
    ) {
        let first = FrontHold::Takeover(mine);
        match outcome {
            StoreCallOutcome::Answered(_) => {
                state.requests[who].step =
                    ModelStep::ClaimAuthority { front: first, take_over: Some(ran.fence), is_ambiguous: false };
            }
            StoreCallOutcome::AmbiguousRetry => {}
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp => {
                self.release_front(state, who, first);
                state.end(who, ClientOutcome::Unavailable);
            }
        }
    }

    fn on_shown_in_front(
        &self, state: &mut ModelState, who: usize, lease: ModelLease, took: ModelFence, displaced: bool,
        outcome: StoreCallOutcome,
    ) {
        let loose = self.stores == StoreSetup::Loose;
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Completed(answer, body))) if loose => {
                self.queue_background_task(
                    state,
                    who,
                    StoreRole::Authority,
                    lease.fence,
                    lease.is_takeover,
                    ModelSettlement::Release,
                    false,
                );
                self.on_completed(state, who, answer, body);
            }
            StoreCallOutcome::Answered(Ok(ModelAnswer::InProgress(there) | ModelAnswer::OutcomeUnknown(there))) => {
                // Another body's claim makes room: it is not taken over.
                let there = ModelHolder {
                    can_take_over: there.can_take_over && there.fingerprint == self.fingerprints[who],
                    ..there
                };
                state.requests[who].step = match loose {
                    true => ModelStep::ReadMarkerToShow { lease, taken_over: took, found: there },
                    false => ModelStep::ReplaceInFront {
                        lease,
                        taken_over: took,
                        found: there.fence,
                        can_take_over: there.can_take_over,
                    },
                };
            }
            StoreCallOutcome::Answered(_) if displaced => self.on_displaced(state, who, lease, took),
            StoreCallOutcome::Answered(_) => {
                state.requests[who].step = ModelStep::Ready(ModelLease { in_front: true, ..lease });
            }
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousRetry | StoreCallOutcome::AmbiguousGiveUp => {
                self.run_without_front(state, who, lease)
            }
        }
    }

    /// It stands in the first store in place of another. From now on that one cannot begin to run solo; it may have
    /// begun since its mark was looked for.
    fn on_displaced(&self, state: &mut ModelState, who: usize, lease: ModelLease, took: ModelFence) {
        let looks = self.stores == StoreSetup::Loose && !self.rules.leaves_out(ModelRule::MarkerIsReadAfterShown);
        state.requests[who].step = match looks {
            true => ModelStep::ReadMarkerAfterShown { lease, taken_over: took },
            false => ModelStep::Ready(ModelLease { in_front: true, ..lease }),
        };
    }

    /// It gives way to a solo run. Its claim in the first store stays until it lapses: nobody finds a free entry there.
    fn on_marker_read_after_shown(
        &self, state: &mut ModelState, who: usize, lease: ModelLease, took: ModelFence, outcome: StoreCallOutcome,
    ) {
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Marker(Some(ran)))) if ran.fence != took => {}
            StoreCallOutcome::Answered(_) => {
                state.requests[who].step = ModelStep::Ready(ModelLease { in_front: true, ..lease });
                return;
            }
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousRetry | StoreCallOutcome::AmbiguousGiveUp => {
                return self.run_without_front(state, who, lease);
            }
        }
        state.requests[who].history.gave_way = true;
        self.queue_background_task(
            state,
            who,
            StoreRole::Authority,
            lease.fence,
            lease.is_takeover,
            ModelSettlement::Release,
            false,
        );
        state.refuse(self, who, ClientOutcome::InProgress);
    }

    /// Somebody who ran solo, and whom the last store does not know, stands.
    fn on_marker_read_to_show(
        &self, state: &mut ModelState, who: usize, lease: ModelLease, took: ModelFence, there: ModelHolder,
        outcome: StoreCallOutcome,
    ) {
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Marker(Some(_)))) if there.fence != took => {
                self.queue_background_task(
                    state,
                    who,
                    StoreRole::Authority,
                    lease.fence,
                    lease.is_takeover,
                    ModelSettlement::Release,
                    false,
                );
                state.refuse(self, who, ClientOutcome::OutcomeUnknown);
            }
            StoreCallOutcome::Answered(_) => {
                let (there, ripe) = (there.fence, there.can_take_over);
                state.requests[who].step =
                    ModelStep::ReplaceInFront { lease, taken_over: took, found: there, can_take_over: ripe };
            }
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousRetry | StoreCallOutcome::AmbiguousGiveUp => {
                self.run_without_front(state, who, lease)
            }
        }
    }

    fn on_replaced_in_front(
        &self, state: &mut ModelState, who: usize, lease: ModelLease, took: ModelFence, ripe: bool,
        outcome: StoreCallOutcome,
    ) {
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Granted(_))) if ripe => {
                self.on_displaced(state, who, lease, took);
            }
            StoreCallOutcome::Answered(_) => {
                state.requests[who].step = ModelStep::ShowInFront { lease, taken_over: took, displaced: !ripe }
            }
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousRetry | StoreCallOutcome::AmbiguousGiveUp => {
                self.run_without_front(state, who, lease)
            }
        }
    }

    /// The first store was not reached: the last one decides alone.
    fn run_without_front(&self, state: &mut ModelState, who: usize, lease: ModelLease) {
        state.requests[who].history.front_missed = true;
        state.requests[who].step = ModelStep::Ready(ModelLease { in_front: true, ..lease });
    }

    /// The last store was certainly not reached.
    pub(crate) fn on_authority_unreachable(&self, state: &mut ModelState, who: usize, first: FrontHold) {
        state.requests[who].history.both_down |= self.is_tiered() && first == FrontHold::Nothing;
        if self.may_run_front_only(first) {
            return self.run_front_only(state, who, first, FrontOnlyCause::AuthorityUnreachable);
        }
        self.release_front(state, who, first);
        state.end(who, ClientOutcome::Unavailable);
    }

    /// Not after a takeover: whoever was taken over may be on its way to the last store, which would let it run.
    pub(crate) fn may_run_front_only(&self, first: FrontHold) -> bool {
        let held = match first {
            FrontHold::Claim(_) => true,
            FrontHold::Takeover(_) => self.rules.leaves_out(ModelRule::NoFrontOnlyAfterTakeover),
            FrontHold::Nothing | FrontHold::Ambiguous => false,
        };
        held && self.stores == StoreSetup::Loose
    }

    pub(crate) fn run_front_only(&self, state: &mut ModelState, who: usize, first: FrontHold, why: FrontOnlyCause) {
        let (FrontHold::Claim(fence) | FrontHold::Takeover(fence)) = first else { return };
        state.requests[who].history.front_only = why;
        state.requests[who].step = ModelStep::WriteMarker { fence };
    }

    fn on_marker_written(&self, state: &mut ModelState, who: usize, fence: ModelFence, outcome: StoreCallOutcome) {
        match outcome {
            StoreCallOutcome::Answered(_) if self.rules.leaves_out(ModelRule::VerifyMarkerBeforeRun) => {
                state.requests[who].step = ModelStep::Ready(front_only_lease(fence));
            }
            StoreCallOutcome::Answered(_) => state.requests[who].step = ModelStep::VerifyMarker { fence },
            StoreCallOutcome::AmbiguousRetry => {}
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp => {
                self.abandon_front_only(state, who, fence)
            }
        }
    }

    fn on_marker_verified(&self, state: &mut ModelState, who: usize, fence: ModelFence, outcome: StoreCallOutcome) {
        match outcome {
            StoreCallOutcome::Answered(Ok(ModelAnswer::Applied)) => {
                state.requests[who].step = ModelStep::Ready(front_only_lease(fence));
            }
            StoreCallOutcome::AmbiguousRetry => {}
            StoreCallOutcome::Answered(_) | StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp => {
                self.abandon_front_only(state, who, fence);
            }
        }
    }

    fn abandon_front_only(&self, state: &mut ModelState, who: usize, fence: ModelFence) {
        state.requests[who].history.front_only = FrontOnlyCause::NotFrontOnly;
        let unmark = ModelBackgroundTask {
            to: StoreRole::Front,
            call: ModelCall::RemoveMarker(fence),
            is_journaled: false,
            is_front_only: false,
        };
        state.requests[who].settle_queue.push(unmark);
        self.release_front(state, who, FrontHold::Claim(fence));
        state.end(who, ClientOutcome::Unavailable);
    }

    /// A solo claim that the last store may know of can be taken over there: from now on only its word counts.
    pub(crate) fn end_front_only(&self, state: &mut ModelState, who: usize) {
        if let ModelStep::Running(lease) = &mut state.requests[who].step
            && !self.rules.leaves_out(ModelRule::FrontOnlyEndsWhenAuthorityMayKnow)
        {
            lease.front_only = false;
        }
    }

    /// The last store has never heard of this solo run, and shows another holder. That one finds the run in the first
    /// store before it starts, and gives way; or it is in a window, and its own end decides. Until then the answer waits.
    pub(crate) fn waits_for_holder(&self, end: ModelSettlement, now: ModelAnswer) -> bool {
        matches!(now, ModelAnswer::InProgress(_) | ModelAnswer::OutcomeUnknown(_))
            && matches!(end, ModelSettlement::Complete { .. })
            && !self.rules.leaves_out(ModelRule::FrontOnlyEndWaitsForHolder)
    }

    /// Solo, and the last store away: the first one holds the end, the journal keeps it for the last one.
    fn on_front_settled(
        &self, state: &mut ModelState, who: usize, lease: ModelLease, end: ModelSettlement, outcome: StoreCallOutcome,
    ) {
        match outcome {
            // The first store's word is not the last: somebody may have taken over there and given up since. What
            // happened is told to the store that decides.
            StoreCallOutcome::Answered(Err(now)) => {
                state.requests[who].history.claim_lost = true;
                self.remove_marker(state, who, lease, end);
                if matches!(now, ModelAnswer::Completed(..))
                    || self.rules.leaves_out(ModelRule::LostInFrontReachesAuthority)
                {
                    return self.on_claim_lost(state, who, now);
                }
            }
            StoreCallOutcome::AmbiguousRetry => return,
            StoreCallOutcome::Answered(Ok(_)) => self.remove_marker(state, who, lease, end),
            StoreCallOutcome::NotApplied | StoreCallOutcome::AmbiguousGiveUp => {
                self.remove_marker(state, who, lease, end);
                self.queue_background_task(state, who, StoreRole::Front, lease.fence, lease.is_takeover, end, false);
            }
        }
        let complete = matches!(end, ModelSettlement::Complete { .. });
        self.queue_background_task(state, who, StoreRole::Authority, lease.fence, lease.is_takeover, end, complete);
        state.requests[who]
            .settle_queue
            .iter_mut()
            .for_each(|task| task.is_front_only = task.to == StoreRole::Authority);
        self.answer(state, who, end, AnswerSource::PendingAnswer);
    }

    /// A solo claim that is released leaves no mark; one that ended otherwise needs none any more, but it does no harm.
    pub(crate) fn remove_marker(&self, state: &mut ModelState, who: usize, lease: ModelLease, end: ModelSettlement) {
        if lease.has_marker && end == ModelSettlement::Release {
            let unmark = ModelBackgroundTask {
                to: StoreRole::Front,
                call: ModelCall::RemoveMarker(lease.fence),
                is_journaled: false,
                is_front_only: false,
            };
            state.requests[who].settle_queue.push(unmark);
        }
    }

    /// The last store has the end: the first one hears it behind the answer, by the token alone.
    pub(crate) fn settle_front_in_background(
        &self, state: &mut ModelState, who: usize, lease: ModelLease, end: ModelSettlement,
    ) {
        if self.is_tiered() && lease.in_front {
            self.remove_marker(state, who, lease, end);
            self.queue_background_task(state, who, StoreRole::Front, UNSEEN, lease.is_takeover, end, false);
        }
    }

    pub(crate) fn release_front(&self, state: &mut ModelState, who: usize, first: FrontHold) {
        self.settle_front(state, who, first, ModelSettlement::Release, self.fingerprints[who]);
    }

    /// What the last store said ends this claim in the first one, too.
    pub(crate) fn settle_front(
        &self, state: &mut ModelState, who: usize, first: FrontHold, end: ModelSettlement, body: u8,
    ) {
        if first == FrontHold::Nothing
            || (end == ModelSettlement::Release && self.rules.leaves_out(ModelRule::FrontIsReleased))
        {
            return;
        }
        // A copy of another body's answer would stand under the wrong body: better none.
        let same = body == self.fingerprints[who] || self.rules.leaves_out(ModelRule::CopyKeepsItsFingerprint);
        let end = if same { end } else { ModelSettlement::Release };
        let taken = matches!(first, FrontHold::Takeover(_));
        self.queue_background_task(state, who, StoreRole::Front, UNSEEN, taken, end, false);
    }
}

fn front_only_lease(fence: ModelFence) -> ModelLease {
    ModelLease { fence, is_takeover: false, front_only: true, has_marker: true, in_front: true }
}
