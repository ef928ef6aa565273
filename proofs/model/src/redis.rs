//! The rules of the Redis store that the contract does not show: fences minted by clients, compare-and-set, claim lists.
//!
//! One address, three holders, a clock that ticks. A claim is minted (its fence is the clock) and written later. A key
//! lives for `KEY_LIFE` ticks; a claim is written within `MAX_UNWRITTEN` ticks or never. A completion compares the
//! stored bytes; if they differ, the script decides.

use stateright::{Checker, HasDiscoveries, Model, Property};

const HOLDERS: usize = 3;
const LAST_TICK: u8 = 5;
/// How long a key stays after it was written.
const KEY_LIFE: u8 = 2;
/// How long after it was minted a claim may be written.
const MAX_UNWRITTEN: u8 = 1;
/// A tick is long, and a takeover's fence may be ahead of the clock by one only.
const FENCES_PER_TICK: u8 = 8;

pub const FENCES_GROW: &str = "fences only grow";
pub const STALE_WRITES_NOTHING: &str = "a stale settle writes nothing";
pub const HOLDER_COMPLETES: &str = "a holder that nobody replaced is not told that it lost its claim";
pub const CLAIMS_ARE_FOUND: &str = "every unfinished claim is in a list or in the index";

/// A rule that a red variant leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RedisRule {
    WrittenSoonAfterItIsMinted,
    CompleteCompares,
    NilProvesNothing,
    ClaimsAreListedFirst,
}

/// Every red variant: its name, the rule that it leaves out, and the property that must break.
pub const RED_VARIANTS: [(&str, RedisRule, &str); 4] = [
    ("a fence is minted early and written late", RedisRule::WrittenSoonAfterItIsMinted, FENCES_GROW),
    ("complete without compare", RedisRule::CompleteCompares, STALE_WRITES_NOTHING),
    ("nil of a compare-and-set is read as lost", RedisRule::NilProvesNothing, HOLDER_COMPLETES),
    ("claims are not listed before they are made", RedisRule::ClaimsAreListedFirst, CLAIMS_ARE_FOUND),
];

/// All rules, less at most one.
#[derive(Debug, Clone, Copy, Default)]
pub struct RedisModel {
    pub left_out: Option<RedisRule>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RedisState {
    tick: u8,
    key: Option<RedisKey>,
    steps: [HolderStep; HOLDERS],
    /// Whom a list names, and whom the index names.
    listed: [bool; HOLDERS],
    indexed: [bool; HOLDERS],
    highest_fence: u8,
    answers_lost: u8,
    crashes: u8,
    fences_shrank: bool,
    stale_write: bool,
    wrongly_lost: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RedisKey {
    holder: usize,
    fence: u8,
    done: bool,
    /// The stored bytes are not those that the claim wrote: they remember a spent token, or name a takeover.
    bytes_differ: bool,
    expires_at: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum HolderStep {
    Idle,
    Minted {
        tick: u8,
    },
    Holding {
        fence: u8,
    },
    /// The compare-and-set was not applied.
    AskingScript {
        fence: u8,
    },
    Completed,
    Lost,
    Crashed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RedisAction {
    Tick,
    Mint(usize),
    /// The command reaches the server: the list first, then the claim.
    WriteClaim(usize),
    TakeOver(usize),
    /// A claim of which only the token is known is released beside the holder.
    SpendOther,
    CompareAndSet(usize),
    /// The same, and its answer is lost: it is sent again.
    CompareAndSetLosingAnswer(usize),
    RunScript(usize),
    Crash(usize),
    /// The holder's own process, or a sweep if that has crashed.
    IndexAndDeleteList(usize),
}

impl RedisModel {
    fn leaves_out(&self, rule: RedisRule) -> bool {
        self.left_out == Some(rule)
    }

    fn can_write(&self, state: &RedisState, minted: u8) -> bool {
        state.tick - minted <= MAX_UNWRITTEN || self.leaves_out(RedisRule::WrittenSoonAfterItIsMinted)
    }

    fn grant(&self, state: &mut RedisState, who: usize, fence: u8, bytes_differ: bool) {
        state.fences_shrank |= fence <= state.highest_fence;
        state.highest_fence = state.highest_fence.max(fence);
        let expires_at = state.tick + KEY_LIFE;
        state.key = Some(RedisKey { holder: who, fence, done: false, bytes_differ, expires_at });
        state.steps[who] = HolderStep::Holding { fence };
    }

    fn list(&self, state: &mut RedisState, who: usize) {
        state.listed[who] = !self.leaves_out(RedisRule::ClaimsAreListedFirst);
    }

    /// Returns whether the completion was applied.
    fn compare_and_set(&self, state: &mut RedisState, who: usize, fence: u8) -> bool {
        let expires_at = state.tick + KEY_LIFE;
        if self.leaves_out(RedisRule::CompleteCompares) {
            state.stale_write |= state.key.is_some_and(|key| key.holder != who);
            state.key = Some(RedisKey { holder: who, fence, done: true, bytes_differ: true, expires_at });
            return true;
        }
        match &mut state.key {
            Some(key) if key.holder == who && key.fence == fence && !key.bytes_differ && !key.done => {
                (key.done, key.expires_at) = (true, expires_at);
                true
            }
            _ => false,
        }
    }

    fn run_script(&self, state: &mut RedisState, who: usize, fence: u8) {
        let expires_at = state.tick + KEY_LIFE;
        let restored = RedisKey { holder: who, fence, done: true, bytes_differ: true, expires_at };
        state.steps[who] = match &mut state.key {
            None => {
                state.key = Some(restored);
                HolderStep::Completed
            }
            Some(key) if key.holder == who && key.fence == fence => {
                (key.done, key.expires_at) = (true, expires_at);
                HolderStep::Completed
            }
            Some(_) => HolderStep::Lost,
        };
    }

    fn apply(&self, state: &mut RedisState, action: RedisAction) {
        match (action, Self::step_of(state, action)) {
            (RedisAction::Tick, _) => {
                state.tick += 1;
                state.key = state.key.filter(|key| key.expires_at > state.tick);
            }
            (RedisAction::Mint(who), _) => state.steps[who] = HolderStep::Minted { tick: state.tick },
            (RedisAction::WriteClaim(who), Some(HolderStep::Minted { tick })) => {
                self.list(state, who);
                if state.key.is_none() {
                    self.grant(state, who, tick * FENCES_PER_TICK, false);
                } else {
                    state.steps[who] = HolderStep::Lost;
                }
            }
            (RedisAction::TakeOver(who), _) => {
                let before = state.key.map_or(0, |key| key.fence);
                self.list(state, who);
                self.grant(state, who, (state.tick * FENCES_PER_TICK).max(before + 1), true);
            }
            (RedisAction::SpendOther, _) => {
                if let Some(key) = &mut state.key {
                    key.bytes_differ = true;
                }
            }
            (RedisAction::CompareAndSet(who), Some(HolderStep::Holding { fence })) => {
                state.steps[who] = if self.compare_and_set(state, who, fence) {
                    HolderStep::Completed
                } else if self.leaves_out(RedisRule::NilProvesNothing) {
                    state.wrongly_lost |= state.key.is_none_or(|key| key.holder == who);
                    HolderStep::Lost
                } else {
                    HolderStep::AskingScript { fence }
                };
            }
            (RedisAction::CompareAndSetLosingAnswer(who), Some(HolderStep::Holding { fence })) => {
                state.answers_lost += 1;
                self.compare_and_set(state, who, fence);
            }
            (RedisAction::RunScript(who), Some(HolderStep::AskingScript { fence })) => {
                self.run_script(state, who, fence)
            }
            (RedisAction::Crash(who), _) => {
                state.crashes += 1;
                state.steps[who] = HolderStep::Crashed;
            }
            (RedisAction::IndexAndDeleteList(who), _) => {
                state.indexed[who] |= state.key.is_some_and(|key| key.holder == who && !key.done);
                state.listed[who] = false;
            }
            _ => {}
        }
    }

    fn step_of(state: &RedisState, action: RedisAction) -> Option<HolderStep> {
        match action {
            RedisAction::WriteClaim(who)
            | RedisAction::CompareAndSet(who)
            | RedisAction::CompareAndSetLosingAnswer(who)
            | RedisAction::RunScript(who) => Some(state.steps[who]),
            _ => None,
        }
    }
}

impl Model for RedisModel {
    type State = RedisState;
    type Action = RedisAction;

    fn init_states(&self) -> Vec<RedisState> {
        vec![RedisState {
            // The clock is above 0, which no fence is.
            tick: 1,
            key: None,
            steps: [HolderStep::Idle; HOLDERS],
            listed: [false; HOLDERS],
            indexed: [false; HOLDERS],
            highest_fence: 0,
            answers_lost: 0,
            crashes: 0,
            fences_shrank: false,
            stale_write: false,
            wrongly_lost: false,
        }]
    }

    fn actions(&self, state: &RedisState, actions: &mut Vec<RedisAction>) {
        if state.tick < LAST_TICK {
            actions.push(RedisAction::Tick);
        }
        if state.key.is_some_and(|key| !key.bytes_differ) {
            actions.push(RedisAction::SpendOther);
        }
        for who in 0..HOLDERS {
            match state.steps[who] {
                HolderStep::Idle => {
                    actions.push(RedisAction::Mint(who));
                    if state.key.is_some_and(|key| !key.done) {
                        actions.push(RedisAction::TakeOver(who));
                    }
                }
                HolderStep::Minted { tick } if self.can_write(state, tick) => {
                    actions.push(RedisAction::WriteClaim(who));
                }
                // It is minted anew.
                HolderStep::Minted { .. } => actions.push(RedisAction::Mint(who)),
                HolderStep::Holding { .. } => {
                    actions.push(RedisAction::CompareAndSet(who));
                    if state.answers_lost == 0 {
                        actions.push(RedisAction::CompareAndSetLosingAnswer(who));
                    }
                    if state.crashes == 0 {
                        actions.push(RedisAction::Crash(who));
                    }
                }
                HolderStep::AskingScript { .. } => actions.push(RedisAction::RunScript(who)),
                HolderStep::Completed | HolderStep::Lost | HolderStep::Crashed => {}
            }
            if state.listed[who] {
                actions.push(RedisAction::IndexAndDeleteList(who));
            }
        }
    }

    fn next_state(&self, state: &RedisState, action: RedisAction) -> Option<RedisState> {
        let mut next = state.clone();
        self.apply(&mut next, action);
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(FENCES_GROW, |_, state: &RedisState| !state.fences_shrank),
            Property::always(STALE_WRITES_NOTHING, |_, state: &RedisState| !state.stale_write),
            Property::always(HOLDER_COMPLETES, |_, state: &RedisState| !state.wrongly_lost),
            Property::always(CLAIMS_ARE_FOUND, |_, state: &RedisState| {
                state.key.is_none_or(|key| key.done || state.listed[key.holder] || state.indexed[key.holder])
            }),
            Property::sometimes("a claim follows one that has expired", |_, state: &RedisState| {
                state.key.is_some_and(|key| !key.bytes_differ) && state.indexed.iter().any(|indexed| *indexed)
            }),
            Property::sometimes("the script completes what a compare-and-set did not", |_, state: &RedisState| {
                state.key.is_some_and(|key| key.done && key.bytes_differ)
            }),
            Property::sometimes("a claim of a crashed process is indexed", |_, state: &RedisState| {
                (0..HOLDERS).any(|who| state.steps[who] == HolderStep::Crashed && state.indexed[who])
            }),
            Property::sometimes("a holder lost its claim to a takeover", |_, state: &RedisState| {
                state.key.is_some_and(|key| key.bytes_differ) && state.steps.contains(&HolderStep::Lost)
            }),
        ]
    }
}

/// Explores every order of events. Returns the number of states, and what is wrong.
pub fn explore(model: RedisModel) -> (usize, Vec<String>) {
    let checker = model.checker().threads(1).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let wrong = model.properties().into_iter().filter_map(|property| {
        let is_always = matches!(property.expectation, stateright::Expectation::Always);
        match (is_always, checker.discovery(property.name)) {
            (true, Some(path)) => Some(format!("broken: {}: {:?}", property.name, path.into_actions())),
            (false, None) => Some(format!("never seen: {}", property.name)),
            _ => None,
        }
    });
    (checker.unique_state_count(), wrong.collect())
}
