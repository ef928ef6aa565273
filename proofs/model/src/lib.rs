//! A model of claims, leases and stores, checked in every order of events.
//!
//! Read [`store`] (the contract), then [`gateway`] (claim, run, settle), then [`tiered`] (two stores as one). What must
//! hold is in [`properties`], what breaks without each rule in [`red`], what is explored in [`worlds`].
//!
//! One address, a few requests in two gateways. What may happen at any moment: a request takes its next step; a call is
//! delivered, delivered twice, delayed until later, loses its answer, or does not reach its store; a lease lapses; a
//! gateway crashes; a store fails over to a replica that has missed the latest writes. Faults are counted down, everything
//! else is unbounded, so a world is finite and every order of its events is looked at.

#![allow(missing_docs, reason = "an unpublished proof; its names are its docs")]

use stateright::{Model, Property};

pub mod gateway;
pub mod properties;
pub mod red;
pub mod state;
pub mod store;
pub mod tiered;
pub mod worlds;

use gateway::{Lease, Outcome, Past, Reply, Request, Step, Which};
use properties::Watch;
use red::Rules;
pub use state::{Faults, Mail, State};
use store::{Call, Store, TOKENS, Token};

/// What is explored.
#[derive(Debug, Clone)]
pub struct World {
    pub name: &'static str,
    pub stores: Stores,
    pub on_unknown: OnUnknown,
    /// One per request; requests take turns in two gateways.
    pub bodies: Vec<u8>,
    /// How the upstream may end.
    pub replies: Vec<Reply>,
    /// Gateways keep answers that the store cannot take. Solo answers are always kept.
    pub journal: bool,
    pub faults: Faults,
    pub rules: Rules,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    One,
    /// `cache =`: the last store decides or nobody.
    Strict,
    /// `fallback =`: the first store stands in.
    Loose,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnUnknown {
    Hold,
    Retry,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Begin(usize),
    /// The call under way is applied and answered.
    Deliver(usize),
    /// The same, and a copy stays under way.
    DeliverAndRepeat(usize),
    /// It is applied; its answer is lost.
    LoseAnswer(usize, Doubt),
    /// It is not applied yet; the gateway stops waiting for it.
    Delay(usize, Doubt),
    /// It certainly is not applied.
    Unreachable(usize),
    /// The oldest unacknowledged end is told.
    Tell(usize),
    TellAndLoseAnswer(usize),
    TellLate(usize),
    /// The first store is not told any more.
    StopTellingFirst(usize),
    /// A late copy arrives.
    Arrive(usize),
    Start(usize),
    Replied(usize, Reply),
    Beat(usize),
    BeatLate(usize),
    Lapse(Which),
    Crash(usize),
    Replicate,
    Failover,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    AskAgain,
    GiveUp,
}

impl Default for World {
    fn default() -> Self {
        Self {
            name: "",
            stores: Stores::One,
            on_unknown: OnUnknown::Hold,
            bodies: vec![0, 0],
            replies: vec![Reply::Remembered],
            journal: false,
            faults: Faults::default(),
            rules: Rules::default(),
        }
    }
}

impl World {
    pub fn gateway(&self, who: usize) -> usize {
        who % 2
    }

    /// Requests of one gateway with one body are interchangeable, and so are the gateways until one has begun.
    fn may_begin(&self, state: &State, who: usize) -> bool {
        let idle = |other: usize| state.requests[other].step == Step::Idle;
        let twin = |other: &usize| self.bodies[*other] == self.bodies[who] && self.gateway(*other) == self.gateway(who);
        let alike = self.bodies.iter().all(|body| *body == self.bodies[0]) && self.bodies.len().is_multiple_of(2);
        idle(who) && !(0..who).filter(twin).any(idle) && (who == 0 || !alike || !idle(0))
    }

    fn call_actions(&self, state: &State, who: usize, actions: &mut Vec<Action>) {
        let Some((to, call)) = self.call(state, who) else { return };
        let writes = !matches!(call, Call::Get | Call::ReadMark);
        actions.push(Action::Deliver(who));
        if state.left.repeats > 0 && writes {
            actions.push(Action::DeliverAndRepeat(who));
        }
        if state.left.losses > 0 {
            for doubt in [Doubt::AskAgain, Doubt::GiveUp] {
                if writes {
                    actions.push(Action::LoseAnswer(who, doubt));
                }
                actions.push(Action::Delay(who, doubt));
            }
        }
        if state.left.can_miss(to) {
            actions.push(Action::Unreachable(who));
        }
    }

    fn request_actions(&self, state: &State, who: usize, actions: &mut Vec<Action>) {
        let request = &state.requests[who];
        match request.step {
            Step::Idle if self.may_begin(state, who) => actions.push(Action::Begin(who)),
            Step::Ready(_) => {
                actions.push(Action::Start(who));
                if self.replies.contains(&Reply::NotSent) {
                    actions.push(Action::Replied(who, Reply::NotSent));
                }
            }
            Step::Running(_) => {
                let replies = self.replies.iter().filter(|reply| **reply != Reply::NotSent);
                actions.extend(replies.map(|reply| Action::Replied(who, *reply)));
                if state.left.beats > 0 {
                    actions.push(Action::Beat(who));
                    if state.left.losses > 0 {
                        actions.push(Action::BeatLate(who));
                    }
                }
            }
            _ => {}
        }
        if let Some(errand) = request.later.first() {
            actions.push(Action::Tell(who));
            if state.left.losses > 0 {
                actions.extend([Action::TellAndLoseAnswer(who), Action::TellLate(who)]);
            }
            if errand.to == Which::First && state.left.first_unreachable > 0 {
                actions.push(Action::StopTellingFirst(who));
            }
        }
    }

    fn apply(&self, state: &mut State, to: Which, call: Call) -> store::Held {
        let retry = self.on_unknown == OnUnknown::Retry;
        let authorises = retry && (to == Which::Last || state.first.now.marker.is_some());
        let State { first, last, requests, broken, .. } = state;
        let store = if to == Which::First { first } else { last };
        store.apply(call, self.rules, &mut Watch { requests, broken, authorises })
    }

    fn under_way(&self, state: &State, who: usize) -> (Which, Call) {
        self.call(state, who).expect("only a waiting request has such actions")
    }

    /// A driver that sends a refused claim twice, unseen by the gateway, can bring it to life when its holder has left:
    /// no store can tell it from a new request. Drivers must not.
    fn repeat(&self, state: &mut State, to: Which, call: Call, answer: store::Held) {
        let refused = matches!(call, Call::Claim { .. }) && !matches!(answer, Ok(store::Answer::Granted(_)));
        if !refused || self.rules.breaks(red::Rule::DriversDoNotRepeatRefusedClaims) {
            state.post(to, call);
        }
    }

    /// The lease is extended where it counts.
    fn beat(&self, state: &mut State, who: usize, late: bool) {
        let Step::Running(Lease { fence, over, .. }) = state.requests[who].step else { return };
        let call = Call::Extend { token: state.requests[who].token, body: self.bodies[who], fence, over };
        state.left.beats -= 1;
        if late {
            state.left.losses -= 1;
            state.post(Which::Last, call);
        } else {
            let _ = self.apply(state, Which::Last, call);
        }
        self.no_longer_solo(state, who);
    }

    fn step(&self, state: &mut State, action: Action) {
        match action {
            Action::Begin(who) => self.begin(state, who),
            Action::Deliver(who) | Action::DeliverAndRepeat(who) => {
                let (to, call) = self.under_way(state, who);
                let answer = self.apply(state, to, call);
                if matches!(action, Action::DeliverAndRepeat(_)) {
                    state.left.repeats -= 1;
                    self.repeat(state, to, call, answer);
                }
                self.go_on(state, who, Outcome::Answered(answer));
            }
            Action::LoseAnswer(who, doubt) => {
                let (to, call) = self.under_way(state, who);
                state.left.losses -= 1;
                let _ = self.apply(state, to, call);
                self.go_on(state, who, doubt.outcome());
            }
            Action::Delay(who, doubt) => {
                let (to, call) = self.under_way(state, who);
                state.left.losses -= 1;
                state.post(to, call);
                self.go_on(state, who, doubt.outcome());
            }
            Action::Unreachable(who) => {
                let (to, _) = self.under_way(state, who);
                state.left.spend(to);
                self.go_on(state, who, Outcome::NotApplied);
            }
            Action::Tell(who) | Action::TellAndLoseAnswer(who) => {
                let errand = state.requests[who].later[0].clone();
                let held = self.apply(state, errand.to, errand.call);
                match action {
                    Action::Tell(_) => self.told(state, who, held),
                    _ => state.left.losses -= 1,
                }
            }
            Action::TellLate(who) => {
                let errand = state.requests[who].later[0].clone();
                state.left.losses -= 1;
                state.post(errand.to, errand.call);
            }
            Action::StopTellingFirst(who) => {
                state.left.first_unreachable -= 1;
                state.requests[who].past.first_untold = true;
                state.requests[who].later.remove(0);
            }
            Action::Arrive(index) => {
                let Mail { to, call } = state.mail.remove(index);
                let _ = self.apply(state, to, call);
            }
            Action::Start(who) => self.start(state, who),
            Action::Replied(who, reply) => self.replied(state, who, reply),
            Action::Beat(who) | Action::BeatLate(who) => self.beat(state, who, matches!(action, Action::BeatLate(_))),
            Action::Lapse(which) => state.store(which).lapse(self.rules),
            Action::Crash(gateway) => {
                state.left.crashes -= 1;
                self.crash(state, gateway);
            }
            Action::Replicate | Action::Failover => self.fail_over(state, action == Action::Failover),
        }
    }

    fn fail_over(&self, state: &mut State, now: bool) {
        let which = if self.is_tiered() { Which::First } else { Which::Last };
        let undrained = state.requests.iter().enumerate().any(|(who, request)| {
            let in_last = state.last.now.entry.as_ref().is_some_and(|entry| store::owner(entry.token) == who);
            request.past.solo != gateway::Solo::No && !in_last
        });
        let store = state.store(which);
        if now {
            store.now = store.replica.clone();
            state.left.failovers -= 1;
            state.failover = Some(undrained || state.failover == Some(true));
        } else {
            store.replica = store.now.clone();
            state.left.replications -= 1;
        }
    }
}

impl Model for World {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let request = |who: usize| Request {
            step: Step::Idle,
            token: who as Token * TOKENS,
            later: Vec::new(),
            past: Past::default(),
        };
        vec![State {
            first: Store::default(),
            last: Store::default(),
            requests: (0..self.bodies.len()).map(request).collect(),
            mail: Vec::new(),
            left: self.faults,
            given: None,
            finished: false,
            failover: None,
            broken: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for who in 0..state.requests.len() {
            self.request_actions(state, who, actions);
            self.call_actions(state, who, actions);
        }
        actions.extend((0..state.mail.len()).map(Action::Arrive));
        for (which, store) in [(Which::First, &state.first), (Which::Last, &state.last)] {
            if store.can_lapse() {
                actions.push(Action::Lapse(which));
            }
        }
        if state.left.crashes > 0 {
            actions.extend((0..2).map(Action::Crash));
        }
        let store = if self.is_tiered() { &state.first } else { &state.last };
        if state.left.failovers > 0 && store.now != store.replica {
            actions.push(Action::Failover);
            if state.left.replications > 0 {
                actions.push(Action::Replicate);
            }
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.step(&mut next, action);
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::properties(self)
    }
}

impl Doubt {
    fn outcome(self) -> Outcome {
        match self {
            Self::AskAgain => Outcome::AskAgain,
            Self::GiveUp => Outcome::GiveUp,
        }
    }
}
