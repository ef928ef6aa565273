//! A model of claims, leases and stores, checked in every order of events.
//!
//! Read [`store`] (the contract), then [`gateway`] (claim, run, settle), then [`tiered`] (two stores as one). What must
//! hold is in [`properties`], what breaks without each rule in [`red`], what is explored in [`setups`].
//!
//! One address, a few requests in two gateways. What may happen at any moment: a request takes its next step; a call is
//! delivered, delivered twice, delayed until later, loses its answer, or does not reach its store; a lease lapses; a
//! gateway crashes; a store fails over to a replica that has missed the latest writes. Faults are counted down, everything
//! else is unbounded, so a world is finite and every order of its events is looked at.

#![allow(missing_docs, reason = "an unpublished proof; its names are its docs")]

use stateright::{Model, Property};

pub mod gateway;
pub mod guard;
pub mod properties;
pub mod red;
pub mod redis;
pub mod setups;
pub mod state;
pub mod store;
pub mod tiered;

use gateway::{ModelLease, ModelRequest, ModelStep, RequestHistory, StoreCallOutcome, StoreRole, UpstreamOutcome};
use properties::StoreMonitor;
use red::ModelRules;
pub use state::{FaultBudget, LateCall, ModelState};
use store::{ModelAnswer, ModelCall, ModelStore, ModelToken, TOKENS_PER_REQUEST};

/// What is explored.
#[derive(Debug, Clone)]
pub struct ModelSetup {
    pub name: &'static str,
    pub stores: StoreSetup,
    pub on_unknown: ModelOnUnknown,
    /// One per request; requests take turns in two gateways.
    pub fingerprints: Vec<u8>,
    /// How the upstream may end.
    pub replies: Vec<UpstreamOutcome>,
    /// Gateways keep answers that the store cannot take. Solo answers are always kept.
    pub journal: bool,
    pub faults: FaultBudget,
    pub rules: ModelRules,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreSetup {
    One,
    /// `cache =`: the last store decides or nobody.
    Strict,
    /// `fallback =`: the first store stands in.
    Loose,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelOnUnknown {
    Hold,
    Retry,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelAction {
    Begin(usize),
    /// The call under way is applied and answered.
    Deliver(usize),
    /// The same, and a copy stays under way.
    DeliverAndRepeat(usize),
    /// It is applied; its answer is lost.
    LoseAnswer(usize, OnAmbiguous),
    /// It is not applied yet; the gateway stops waiting for it.
    Delay(usize, OnAmbiguous),
    /// It certainly is not applied.
    Unreachable(usize),
    /// The oldest unacknowledged end is told.
    DeliverTask(usize),
    DeliverTaskLoseAnswer(usize),
    DelayTask(usize),
    /// The first store is not told any more.
    AbandonFrontTasks(usize),
    /// A late copy arrives.
    DeliverLateCall(usize),
    SendToUpstream(usize),
    UpstreamEnds(usize, UpstreamOutcome),
    Heartbeat(usize),
    LateHeartbeat(usize),
    LeaseExpires(StoreRole),
    Crash(usize),
    Replicate,
    Failover,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnAmbiguous {
    Retry,
    GiveUp,
}

impl Default for ModelSetup {
    fn default() -> Self {
        Self {
            name: "",
            stores: StoreSetup::One,
            on_unknown: ModelOnUnknown::Hold,
            fingerprints: vec![0, 0],
            replies: vec![UpstreamOutcome::Remembered],
            journal: false,
            faults: FaultBudget::default(),
            rules: ModelRules::default(),
        }
    }
}

impl ModelSetup {
    pub fn gateway(&self, who: usize) -> usize {
        who % 2
    }

    /// Requests of one gateway with one body are interchangeable, and so are the gateways until one has begun.
    fn may_begin(&self, state: &ModelState, who: usize) -> bool {
        let idle = |other: usize| state.requests[other].step == ModelStep::Idle;
        let twin = |other: &usize| {
            self.fingerprints[*other] == self.fingerprints[who] && self.gateway(*other) == self.gateway(who)
        };
        let alike = self.fingerprints.iter().all(|body| *body == self.fingerprints[0])
            && self.fingerprints.len().is_multiple_of(2);
        idle(who) && !(0..who).filter(twin).any(idle) && (who == 0 || !alike || !idle(0))
    }

    fn call_actions(&self, state: &ModelState, who: usize, actions: &mut Vec<ModelAction>) {
        let Some((to, call)) = self.pending_call(state, who) else { return };
        let writes = !matches!(call, ModelCall::Get | ModelCall::ReadMarker);
        actions.push(ModelAction::Deliver(who));
        if state.faults_left.repeats > 0 && writes {
            actions.push(ModelAction::DeliverAndRepeat(who));
        }
        if state.faults_left.losses > 0 {
            for doubt in [OnAmbiguous::Retry, OnAmbiguous::GiveUp] {
                if writes {
                    actions.push(ModelAction::LoseAnswer(who, doubt));
                }
                actions.push(ModelAction::Delay(who, doubt));
            }
        }
        if state.faults_left.can_be_unreachable(to) {
            actions.push(ModelAction::Unreachable(who));
        }
    }

    fn request_actions(&self, state: &ModelState, who: usize, actions: &mut Vec<ModelAction>) {
        let request = &state.requests[who];
        match request.step {
            ModelStep::Idle if self.may_begin(state, who) => actions.push(ModelAction::Begin(who)),
            ModelStep::Ready(_) => {
                actions.push(ModelAction::SendToUpstream(who));
                if self.replies.contains(&UpstreamOutcome::NotSent) {
                    actions.push(ModelAction::UpstreamEnds(who, UpstreamOutcome::NotSent));
                }
            }
            ModelStep::Running(_) => {
                let replies = self.replies.iter().filter(|reply| **reply != UpstreamOutcome::NotSent);
                actions.extend(replies.map(|reply| ModelAction::UpstreamEnds(who, *reply)));
                if state.faults_left.heartbeats > 0 {
                    actions.push(ModelAction::Heartbeat(who));
                    if state.faults_left.losses > 0 {
                        actions.push(ModelAction::LateHeartbeat(who));
                    }
                }
            }
            _ => {}
        }
        if let Some(errand) = request.settle_queue.first() {
            actions.push(ModelAction::DeliverTask(who));
            if state.faults_left.losses > 0 {
                actions.extend([ModelAction::DeliverTaskLoseAnswer(who), ModelAction::DelayTask(who)]);
            }
            if errand.to == StoreRole::Front && state.faults_left.front_unreachable > 0 {
                actions.push(ModelAction::AbandonFrontTasks(who));
            }
        }
    }

    fn apply(&self, state: &mut ModelState, to: StoreRole, call: ModelCall) -> store::ModelCallResult {
        let retry = self.on_unknown == ModelOnUnknown::Retry;
        let authorises = retry && (to == StoreRole::Authority || state.front.now.marker.is_some());
        let ModelState { front: first, authority: last, requests, violations: broken, .. } = state;
        let store = if to == StoreRole::Front { first } else { last };
        store.apply(
            call,
            self.rules,
            &mut StoreMonitor { requests, violations: broken, policy_allows_takeover: authorises },
        )
    }

    fn expect_pending_call(&self, state: &ModelState, who: usize) -> (StoreRole, ModelCall) {
        self.pending_call(state, who).expect("only a waiting request has such actions")
    }

    /// A driver that sends a refused claim twice, unseen by the gateway, can bring it to life when its holder has left:
    /// no store can tell it from a new request. Drivers must not.
    fn repeat_call(&self, state: &mut ModelState, to: StoreRole, call: ModelCall, answer: store::ModelCallResult) {
        let refused = matches!(call, ModelCall::Claim { .. }) && !matches!(answer, Ok(store::ModelAnswer::Granted(_)));
        if !refused || self.rules.leaves_out(red::ModelRule::DriversDoNotRepeatRefusedClaims) {
            state.post_late_call(to, call);
        }
    }

    /// The lease is extended where it counts.
    fn heartbeat(&self, state: &mut ModelState, who: usize, late: bool) {
        let ModelStep::Running(ModelLease { fence, is_takeover: over, .. }) = state.requests[who].step else { return };
        let call = ModelCall::Extend {
            token: state.requests[who].token,
            fingerprint: self.fingerprints[who],
            fence,
            is_takeover: over,
        };
        state.faults_left.heartbeats -= 1;
        if late {
            state.faults_left.losses -= 1;
            state.post_late_call(StoreRole::Authority, call);
        } else {
            // A store that shows another holder has never heard of this one.
            if let Err(ModelAnswer::InProgress(_) | ModelAnswer::OutcomeUnknown(_)) =
                self.apply(state, StoreRole::Authority, call)
            {
                return;
            }
        }
        self.end_front_only(state, who);
    }

    fn apply_action(&self, state: &mut ModelState, action: ModelAction) {
        match action {
            ModelAction::Begin(who) => self.begin(state, who),
            ModelAction::Deliver(who) | ModelAction::DeliverAndRepeat(who) => {
                let (to, call) = self.expect_pending_call(state, who);
                let answer = self.apply(state, to, call);
                if matches!(action, ModelAction::DeliverAndRepeat(_)) {
                    state.faults_left.repeats -= 1;
                    self.repeat_call(state, to, call, answer);
                }
                self.on_call_ended(state, who, StoreCallOutcome::Answered(answer));
            }
            ModelAction::LoseAnswer(who, doubt) => {
                let (to, call) = self.expect_pending_call(state, who);
                state.faults_left.losses -= 1;
                let _ = self.apply(state, to, call);
                self.on_call_ended(state, who, doubt.outcome());
            }
            ModelAction::Delay(who, doubt) => {
                let (to, call) = self.expect_pending_call(state, who);
                state.faults_left.losses -= 1;
                state.post_late_call(to, call);
                self.on_call_ended(state, who, doubt.outcome());
            }
            ModelAction::Unreachable(who) => {
                let (to, _) = self.expect_pending_call(state, who);
                state.faults_left.use_unreachable(to);
                self.on_call_ended(state, who, StoreCallOutcome::NotApplied);
            }
            ModelAction::DeliverTask(who) | ModelAction::DeliverTaskLoseAnswer(who) => {
                let errand = state.requests[who].settle_queue[0].clone();
                let held = self.apply(state, errand.to, errand.call);
                match action {
                    ModelAction::DeliverTask(_) => self.on_task_delivered(state, who, held),
                    _ => state.faults_left.losses -= 1,
                }
            }
            ModelAction::DelayTask(who) => {
                let errand = state.requests[who].settle_queue[0].clone();
                state.faults_left.losses -= 1;
                state.post_late_call(errand.to, errand.call);
            }
            ModelAction::AbandonFrontTasks(who) => {
                state.faults_left.front_unreachable -= 1;
                state.requests[who].history.front_not_settled = true;
                state.requests[who].settle_queue.remove(0);
            }
            ModelAction::DeliverLateCall(index) => {
                let LateCall { to, call } = state.late_calls.remove(index);
                let _ = self.apply(state, to, call);
            }
            ModelAction::SendToUpstream(who) => self.send_to_upstream(state, who),
            ModelAction::UpstreamEnds(who, reply) => self.on_upstream_ended(state, who, reply),
            ModelAction::Heartbeat(who) | ModelAction::LateHeartbeat(who) => {
                self.heartbeat(state, who, matches!(action, ModelAction::LateHeartbeat(_)))
            }
            ModelAction::LeaseExpires(which) => state.store_mut(which).lapse(self.rules),
            ModelAction::Crash(gateway) => {
                state.faults_left.crashes -= 1;
                self.crash(state, gateway);
            }
            ModelAction::Replicate | ModelAction::Failover => self.fail_over(state, action == ModelAction::Failover),
        }
    }

    fn fail_over(&self, state: &mut ModelState, now: bool) {
        let which = if self.is_tiered() { StoreRole::Front } else { StoreRole::Authority };
        let undrained = state.requests.iter().enumerate().any(|(who, request)| {
            let in_last =
                state.authority.now.entry.as_ref().is_some_and(|entry| store::token_owner(entry.token) == who);
            request.history.front_only != gateway::FrontOnlyCause::NotFrontOnly && !in_last
        });
        let store = state.store_mut(which);
        if now {
            store.now = store.replica.clone();
            state.faults_left.failovers -= 1;
            state.failover = Some(undrained || state.failover == Some(true));
        } else {
            store.replica = store.now.clone();
            state.faults_left.replications -= 1;
        }
    }
}

impl Model for ModelSetup {
    type State = ModelState;
    type Action = ModelAction;

    fn init_states(&self) -> Vec<ModelState> {
        let request = |who: usize| ModelRequest {
            step: ModelStep::Idle,
            token: who as ModelToken * TOKENS_PER_REQUEST,
            settle_queue: Vec::new(),
            history: RequestHistory::default(),
        };
        vec![ModelState {
            front: ModelStore::default(),
            authority: ModelStore::default(),
            requests: (0..self.fingerprints.len()).map(request).collect(),
            late_calls: Vec::new(),
            faults_left: self.faults,
            first_answer: None,
            completed_seen: false,
            failover: None,
            violations: 0,
        }]
    }

    fn actions(&self, state: &ModelState, actions: &mut Vec<ModelAction>) {
        for who in 0..state.requests.len() {
            self.request_actions(state, who, actions);
            self.call_actions(state, who, actions);
        }
        actions.extend((0..state.late_calls.len()).map(ModelAction::DeliverLateCall));
        for (which, store) in [(StoreRole::Front, &state.front), (StoreRole::Authority, &state.authority)] {
            if store.can_lapse() {
                actions.push(ModelAction::LeaseExpires(which));
            }
        }
        if state.faults_left.crashes > 0 {
            actions.extend((0..2).map(ModelAction::Crash));
        }
        let store = if self.is_tiered() { &state.front } else { &state.authority };
        if state.faults_left.failovers > 0 && store.now != store.replica {
            actions.push(ModelAction::Failover);
            if state.faults_left.replications > 0 {
                actions.push(ModelAction::Replicate);
            }
        }
    }

    fn next_state(&self, state: &ModelState, action: ModelAction) -> Option<ModelState> {
        let mut next = state.clone();
        self.apply_action(&mut next, action);
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::properties(self)
    }
}

impl OnAmbiguous {
    fn outcome(self) -> StoreCallOutcome {
        match self {
            Self::Retry => StoreCallOutcome::AmbiguousRetry,
            Self::GiveUp => StoreCallOutcome::AmbiguousGiveUp,
        }
    }
}
