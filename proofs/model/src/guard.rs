//! The intent guard: two keys with one intent, each claim an entry of the contract in [`crate::store`].
//!
//! Three requests: two with the first key (a retry), one with the second. A lease lapses at any moment, a gateway crashes
//! between any two calls, and an unknown outcome of a key is retried. Settlements of key and intent are two calls.

use stateright::{Checker, HasDiscoveries, Model, Property};

/// The key of each request.
const KEYS: [usize; 3] = [0, 0, 1];
const CRASHES: u8 = 2;

pub const ONE_KEY_RUNS: &str = "of two keys with one intent, one runs until it has failed or its window is over";
pub const REFUSALS_NAME_A_TAKEN_KEY: &str = "a refusal names a key that is taken";

/// A rule that a red variant leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GuardRule {
    LapsedIntentIsUnknown,
    UnknownHoldsTheIntent,
    IntentIsTakenOverAtomically,
    KeyIsCompletedFirst,
    IntentIsReleasedFirst,
    AbandonedIntentIsLookedUp,
    LostKeyLeavesItsIntent,
}

/// Every red variant: its name, the rule that it leaves out, and the property that must break.
pub const RED_GUARDS: [(&str, GuardRule, &str); 7] = [
    ("a lapsed intent is free", GuardRule::LapsedIntentIsUnknown, ONE_KEY_RUNS),
    ("an unknown outcome frees the intent", GuardRule::UnknownHoldsTheIntent, ONE_KEY_RUNS),
    ("a retry forgets the intent and claims it", GuardRule::IntentIsTakenOverAtomically, ONE_KEY_RUNS),
    ("the intent is completed before its key", GuardRule::KeyIsCompletedFirst, ONE_KEY_RUNS),
    ("the key is released before its intent", GuardRule::IntentIsReleasedFirst, REFUSALS_NAME_A_TAKEN_KEY),
    ("an abandoned intent is never looked up", GuardRule::AbandonedIntentIsLookedUp, REFUSALS_NAME_A_TAKEN_KEY),
    ("a holder that lost its key completes the intent", GuardRule::LostKeyLeavesItsIntent, ONE_KEY_RUNS),
];

/// All rules, less at most one.
#[derive(Debug, Clone, Copy, Default)]
pub struct GuardModel {
    pub left_out: Option<GuardRule>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct GuardEntry {
    state: GuardEntryState,
    /// Grows with each holder.
    fence: u8,
    /// Of an intent: the key that it names.
    names: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum GuardEntryState {
    Free,
    Held { by: usize, unknown: bool, took_over: bool },
    Completed { failed: bool },
}

use GuardEntryState::{Completed, Free, Held};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum GuardStep {
    Idle,
    ClaimIntent,
    /// The intent is of another key, and its lease has lapsed.
    LookUpKey {
        seen: u8,
    },
    TakeOver {
        seen: u8,
    },
    /// Another key has the intent: the own key is released.
    GiveUp,
    Ready,
    Running,
    Settle(GuardReply),
    /// The second of the two settlements. Whether the first found another holder.
    SettleSecond(GuardReply, bool),
    Ended,
    Crashed,
}

/// How the upstream's part ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GuardReply {
    Succeeded,
    /// A remembered failure.
    Failed,
    /// A reply that is not remembered.
    Unremembered,
    Lost,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct GuardHistory {
    sent: bool,
    /// Its operation failed, or its window is over.
    closed: bool,
    /// The policy let another request with its key run in its place.
    taken_over_by: Option<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GuardState {
    keys: [GuardEntry; 2],
    intent: GuardEntry,
    steps: [GuardStep; KEYS.len()],
    history: [GuardHistory; KEYS.len()],
    crashes: u8,
    wrongly_refused: bool,
    refused: bool,
    took_over_abandoned: bool,
    ran_after_window: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GuardAction {
    Step(usize),
    UpstreamEnds(usize, GuardReply),
    Crash(usize),
    KeyLapses(usize),
    IntentLapses,
    WindowEnds,
}

impl GuardEntry {
    fn claim(&mut self, by: usize, names: usize, took_over: bool) {
        *self = Self { state: Held { by, unknown: false, took_over }, fence: self.fence + 1, names };
    }

    fn is_unknown(&self) -> bool {
        matches!(self.state, Held { unknown: true, .. })
    }

    /// Settles a claim. A holder that lost it changes nothing; a released takeover is unknown again. Returns whether it was the holder's.
    fn settle(&mut self, who: usize, end: GuardEntryState) -> bool {
        self.state = match self.state {
            Held { by, took_over: true, .. } if by == who && end == Free => Held { by, unknown: true, took_over: true },
            Held { by, .. } if by == who => end,
            _ => return false,
        };
        true
    }
}

impl GuardModel {
    fn leaves_out(&self, rule: GuardRule) -> bool {
        self.left_out == Some(rule)
    }

    fn step(&self, state: &mut GuardState, who: usize) {
        let key = KEYS[who];
        state.steps[who] = match state.steps[who] {
            GuardStep::Idle => self.claim_key(state, who),
            GuardStep::ClaimIntent => self.claim_intent(state, who),
            GuardStep::LookUpKey { seen } => self.look_up(state, who, seen),
            GuardStep::TakeOver { seen } if state.intent.fence == seen && state.intent.is_unknown() => {
                state.took_over_abandoned |= state.intent.names != key;
                state.intent.claim(who, key, state.intent.names == key);
                GuardStep::Ready
            }
            GuardStep::TakeOver { .. } => GuardStep::ClaimIntent,
            GuardStep::GiveUp => {
                state.keys[key].settle(who, Free);
                // What it took over is open again.
                for past in state.history.iter_mut().filter(|past| past.taken_over_by == Some(who)) {
                    past.taken_over_by = None;
                }
                GuardStep::Ended
            }
            GuardStep::Ready => {
                state.history[who].sent = true;
                state.ran_after_window |= state.history.iter().any(|past| past.closed);
                GuardStep::Running
            }
            GuardStep::Settle(reply) => GuardStep::SettleSecond(reply, !self.settle(state, who, reply, None)),
            GuardStep::SettleSecond(reply, was_lost) => {
                self.settle(state, who, reply, Some(was_lost));
                GuardStep::Ended
            }
            step @ (GuardStep::Running | GuardStep::Ended | GuardStep::Crashed) => step,
        };
    }

    fn claim_key(&self, state: &mut GuardState, who: usize) -> GuardStep {
        let entry = &mut state.keys[KEYS[who]];
        match entry.state {
            Free => entry.claim(who, KEYS[who], false),
            Held { by, unknown: true, .. } => {
                entry.claim(who, KEYS[who], true);
                state.history[by].taken_over_by = Some(who);
            }
            Held { .. } => return GuardStep::Idle,
            Completed { .. } => return GuardStep::Ended,
        }
        GuardStep::ClaimIntent
    }

    fn claim_intent(&self, state: &mut GuardState, who: usize) -> GuardStep {
        let (key, entry) = (KEYS[who], &mut state.intent);
        match entry.state {
            Free => {}
            Held { unknown: true, .. } if self.leaves_out(GuardRule::LapsedIntentIsUnknown) => {}
            Held { unknown: true, .. } if entry.names == key => {
                if self.leaves_out(GuardRule::IntentIsTakenOverAtomically) {
                    entry.state = Free;
                    return GuardStep::ClaimIntent;
                }
                return GuardStep::TakeOver { seen: entry.fence };
            }
            Held { unknown: true, .. } if !self.leaves_out(GuardRule::AbandonedIntentIsLookedUp) => {
                return GuardStep::LookUpKey { seen: entry.fence };
            }
            // An earlier run of the same key: waits for its lease, or is within its window.
            Held { .. } if entry.names == key => return GuardStep::ClaimIntent,
            Completed { .. } if entry.names == key => return GuardStep::Ready,
            Held { .. } | Completed { .. } => return refuse(state),
        }
        entry.claim(who, key, false);
        GuardStep::Ready
    }

    /// Reads the key that an expired intent names.
    fn look_up(&self, state: &mut GuardState, _who: usize, seen: u8) -> GuardStep {
        match state.keys[state.intent.names].state {
            Free | Completed { failed: true } => GuardStep::TakeOver { seen },
            Completed { failed: false } => {
                if state.intent.fence == seen && state.intent.is_unknown() {
                    state.intent.state = Completed { failed: false };
                }
                refuse(state)
            }
            Held { .. } => refuse(state),
        }
    }

    /// The first settlement, or the second (`first_was_lost`: the first found another holder). Returns whether the entry
    /// was the holder's.
    fn settle(&self, state: &mut GuardState, who: usize, reply: GuardReply, first_was_lost: Option<bool>) -> bool {
        let key_first = match reply {
            GuardReply::Succeeded => !self.leaves_out(GuardRule::KeyIsCompletedFirst),
            GuardReply::Unremembered => self.leaves_out(GuardRule::IntentIsReleasedFirst),
            GuardReply::Failed | GuardReply::Lost => true,
        };
        let unknown = |entry: &GuardEntry| match entry.state {
            Held { by, took_over, .. } => Held { by, unknown: true, took_over },
            state => state,
        };
        if key_first != first_was_lost.is_some() {
            let entry = &mut state.keys[KEYS[who]];
            let end = match reply {
                GuardReply::Succeeded => Completed { failed: false },
                GuardReply::Failed => Completed { failed: true },
                GuardReply::Unremembered => Free,
                GuardReply::Lost => unknown(entry),
            };
            return entry.settle(who, end);
        }
        let leaves_it = first_was_lost == Some(true) && !self.leaves_out(GuardRule::LostKeyLeavesItsIntent);
        let end = match reply {
            _ if leaves_it => unknown(&state.intent),
            GuardReply::Succeeded => Completed { failed: false },
            GuardReply::Failed | GuardReply::Unremembered => Free,
            GuardReply::Lost if self.leaves_out(GuardRule::UnknownHoldsTheIntent) => Free,
            GuardReply::Lost => unknown(&state.intent),
        };
        state.intent.settle(who, end)
    }
}

fn refuse(state: &mut GuardState) -> GuardStep {
    let (named, holder) = (state.keys[state.intent.names].state, state.intent.state);
    // A holder may be between its two settlements until its lease lapses.
    let has_lapsed = matches!(holder, Held { unknown: true, .. });
    state.wrongly_refused |= named == Free || named == Completed { failed: true } && has_lapsed;
    state.refused = true;
    GuardStep::GiveUp
}

impl GuardState {
    /// The operation of this request may have taken effect, and still counts.
    fn is_open(&self, who: usize) -> bool {
        let past = &self.history[who];
        past.sent && !past.closed && past.taken_over_by.is_none()
    }

    fn two_keys_ran(&self) -> bool {
        let open = |key| (0..KEYS.len()).any(|who| KEYS[who] == key && self.is_open(who));
        open(0) && open(1)
    }
}

impl Model for GuardModel {
    type State = GuardState;
    type Action = GuardAction;

    fn init_states(&self) -> Vec<GuardState> {
        let free = GuardEntry { state: Free, fence: 0, names: 0 };
        vec![GuardState {
            keys: [free; 2],
            intent: free,
            steps: [GuardStep::Idle; KEYS.len()],
            history: [GuardHistory::default(); KEYS.len()],
            crashes: CRASHES,
            wrongly_refused: false,
            refused: false,
            took_over_abandoned: false,
            ran_after_window: false,
        }]
    }

    fn actions(&self, state: &GuardState, actions: &mut Vec<GuardAction>) {
        for (who, step) in state.steps.iter().enumerate() {
            match step {
                GuardStep::Running => actions.extend(
                    [GuardReply::Succeeded, GuardReply::Failed, GuardReply::Unremembered, GuardReply::Lost]
                        .map(|reply| GuardAction::UpstreamEnds(who, reply)),
                ),
                GuardStep::Ended | GuardStep::Crashed => continue,
                _ => actions.push(GuardAction::Step(who)),
            }
            if state.crashes > 0 && *step != GuardStep::Idle {
                actions.push(GuardAction::Crash(who));
            }
        }
        let can_lapse = |entry: &GuardEntry| matches!(entry.state, Held { unknown: false, .. });
        actions.extend((0..2).filter(|key| can_lapse(&state.keys[*key])).map(GuardAction::KeyLapses));
        if can_lapse(&state.intent) {
            actions.push(GuardAction::IntentLapses);
        }
        if matches!(state.intent.state, Completed { .. }) {
            actions.push(GuardAction::WindowEnds);
        }
    }

    fn next_state(&self, state: &GuardState, action: GuardAction) -> Option<GuardState> {
        let mut next = state.clone();
        let lapse = |entry: &mut GuardEntry| {
            if let Held { unknown, .. } = &mut entry.state {
                *unknown = true;
            }
        };
        match action {
            GuardAction::Step(who) => self.step(&mut next, who),
            GuardAction::UpstreamEnds(who, reply) => {
                next.history[who].closed = matches!(reply, GuardReply::Failed | GuardReply::Unremembered);
                next.steps[who] = GuardStep::Settle(reply);
            }
            GuardAction::Crash(who) => {
                next.crashes -= 1;
                next.steps[who] = GuardStep::Crashed;
            }
            GuardAction::KeyLapses(key) => lapse(&mut next.keys[key]),
            GuardAction::IntentLapses => lapse(&mut next.intent),
            GuardAction::WindowEnds => {
                for who in (0..KEYS.len()).filter(|who| KEYS[*who] == next.intent.names) {
                    next.history[who].closed |= next.steps[who] != GuardStep::Running;
                }
                next.intent.state = Free;
            }
        }
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE_KEY_RUNS, |_, state: &GuardState| !state.two_keys_ran()),
            Property::always(REFUSALS_NAME_A_TAKEN_KEY, |_, state: &GuardState| !state.wrongly_refused),
            Property::sometimes("another key is refused", |_, state: &GuardState| state.refused),
            Property::sometimes("an abandoned intent is taken over", |_, state: &GuardState| state.took_over_abandoned),
            Property::sometimes("another key runs later", |_, state: &GuardState| state.ran_after_window),
        ]
    }
}

/// Explores every order of events. Returns the number of states, and what is wrong, one line each.
pub fn explore(model: GuardModel) -> (usize, Vec<String>) {
    let checker = model.checker().threads(1).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let mut wrong = Vec::new();
    for property in model.properties() {
        match (property.expectation, checker.discovery(property.name)) {
            (stateright::Expectation::Sometimes, None) => wrong.push(format!("never seen: {}", property.name)),
            (stateright::Expectation::Sometimes, Some(_)) | (_, None) => {}
            (_, Some(path)) => {
                let steps: Vec<String> = path.into_actions().iter().map(|step| format!("{step:?}")).collect();
                wrong.push(format!("broken: {}: {}", property.name, steps.join(", ")));
            }
        }
    }
    (checker.unique_state_count(), wrong)
}
