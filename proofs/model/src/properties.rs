//! What must never happen, and what must be able to happen, or the model says nothing.
//!
//! A broken invariant is noted in the state the moment it breaks, so the path to that state is the counterexample.

use stateright::Property;

use crate::{
    OnUnknown, State, World,
    gateway::{Reply, Request, Solo, Step, Verdict},
    store::{Body, Contents, Entry, Phase, Store, Task, owner},
};

/// The invariants that are judged when something happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Broken {
    SecondStart = 1,
    AnswersDiffer = 2,
    FinishedIsLost = 4,
    WrongRelease = 8,
    TakeoverReleasedAsFree = 16,
    FencesGrow = 32,
    StaleSettle = 64,
    ForeignTakeover = 128,
    ForeignReplay = 256,
}

pub const ONE_START: &str = "at most one start, except authorised re-runs and open windows";
pub const EQUAL_ANSWERS: &str = "all remembered answers are equal";
pub const FINISHED_STAYS: &str = "what was seen as finished stays finished";
pub const RIGHT_RELEASE: &str = "released only if nothing was sent or the policy says so";
pub const UNKNOWN_AGAIN: &str = "a released takeover is unknown again";
pub const FENCES_GROW: &str = "fences only grow";
pub const STALE_WRITES_NOTHING: &str = "a stale settle writes nothing";
pub const SAME_BODY: &str = "a different body never takes over";
pub const SAME_BODY_REPLAYS: &str = "a different body never gets the answer";
pub const REAL_UNKNOWN: &str = "every claim that runs or is unknown has its reason";

pub const RECORDED: &str = "a complete reply is recorded, unless the policy let another run in its place";

/// How a client got an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// Its run's, recorded before.
    Recorded,
    /// Somebody else's, from a store.
    Replayed,
    /// Told to be pending: from a run that the deciding store has not heard of, or from the journal.
    Pending,
}

/// What the checker sees of a step in a store.
pub struct Watch<'a> {
    pub requests: &'a mut [Request],
    pub broken: &'a mut u16,
    /// A takeover here is one that the policy asked for.
    pub authorises: bool,
}

impl Watch<'_> {
    pub fn broke(&mut self, what: Broken) {
        *self.broken |= what as u16;
    }

    pub fn taken_over(&mut self, entry: &Entry, by: Body) {
        if entry.body != by {
            self.broke(Broken::ForeignTakeover);
        }
        if self.authorises {
            self.requests[owner(entry.token)].past.taken_over = true;
        }
    }
}

impl State {
    pub fn has(&self, what: Broken) -> bool {
        self.broken & what as u16 != 0
    }

    /// The upstream is called. Every other call must have been closed by the policy.
    pub(crate) fn judge_start(&mut self, world: &World, who: usize) {
        let excused = self.requests[who].past.taken_over || self.window_is_open(world);
        let closed = |other: &Request| other.past.taken_over || other.past.reply == Some(Reply::Unremembered);
        let mut others = self.requests.iter().enumerate().filter(|(index, other)| *index != who && other.past.sent);
        if !excused && others.any(|(_, other)| !closed(other)) {
            self.broken |= Broken::SecondStart as u16;
        }
    }

    /// A claim is to be released.
    pub(crate) fn judge_release(&mut self, who: usize) {
        let past = &self.requests[who].past;
        if past.sent && past.reply != Some(Reply::Unremembered) {
            self.broken |= Broken::WrongRelease as u16;
        }
    }

    /// A client gets an answer that counts as remembered.
    pub(crate) fn judge_answer(&mut self, world: &World, answer: Task, how: Given) {
        // Told to be pending: until the store has it, `retry` lets somebody else run, and answer.
        if how == Given::Pending && world.on_unknown == OnUnknown::Retry {
            return;
        }
        if *self.given.get_or_insert(answer) != answer && !self.window_is_open(world) {
            self.broken |= Broken::AnswersDiffer as u16;
        }
        self.finished |= how == Given::Recorded;
    }

    /// A client is told that it runs or that its end is unknown.
    pub(crate) fn judge_refusal(&mut self, world: &World, who: usize) {
        let past = &self.requests[who].past;
        // Loose, without the store that decides: the other one may not have the answer yet, and the refusal is safe.
        if past.after_finished && !past.last_missed && !self.window_is_open(world) {
            self.broken |= Broken::FinishedIsLost as u16;
        }
    }

    /// What the promise leaves open. A store alone: a failover that forgets. Tiered strict: nothing. Loose: see the docs
    /// of each.
    pub fn window_is_open(&self, world: &World) -> bool {
        let solo = self.requests.iter().any(|request| request.past.solo == Solo::Refused);
        let only_last = self.requests.iter().any(|request| request.past.first_missed);
        match world.stores {
            crate::Stores::One => self.failover.is_some(),
            crate::Stores::Strict => false,
            crate::Stores::Loose => {
                // One gateway saw only the first store, another only the last: not necessarily at the same time.
                let split = solo && only_last;
                // The first store lost a solo claim before the last one had it.
                let solo_lost = self.failover == Some(true);
                // The first store lost a claim that the last one had decided, and then the last one was away.
                let copy_lost =
                    solo && self.failover.is_some() && !world.rules.breaks(crate::red::Rule::LostCopyIsAWindow);
                split || solo_lost || copy_lost
            }
        }
    }
}

/// Whoever is shown as running is at it, or there is a reason why nobody knows: a crash, a failover, an answer that was
/// cut off, an end that the store has not heard yet.
fn has_its_reason(state: &State, store: &Store, is_first: bool) -> bool {
    let Contents { entry: Some(Entry { token, phase, .. }), .. } = &store.now else { return true };
    let request = &state.requests[owner(*token)];
    let past = &request.past;
    let at_it = request.token == *token && !matches!(request.step, Step::Idle | Step::Ended(_));
    let open_end = matches!(past.reply, Some(Reply::Cut | Reply::TimedOut));
    let excused =
        open_end || past.crashed || state.failover.is_some() || (is_first && (past.first_untold || past.lost));
    match phase {
        Phase::Running { .. } => at_it || !request.later.is_empty() || excused,
        Phase::Unknown { released: false, .. } => open_end || past.told_of,
        Phase::Unknown { released: true, .. } | Phase::Done { .. } | Phase::Free => true,
    }
}

/// Whoever saw a complete reply, and is done with it, has left it in the store that decides.
fn is_recorded(state: &State) -> bool {
    let done = matches!(state.last.now.entry, Some(Entry { phase: Phase::Done { .. }, .. }));
    let owes = |request: &Request| {
        let over = matches!(request.step, Step::Ended(_)) && request.later.is_empty();
        let past = &request.past;
        over && past.reply == Some(Reply::Remembered) && !past.crashed && !past.taken_over
    };
    done || !some(state, owes)
}

fn some(state: &State, what: impl Fn(&Request) -> bool) -> bool {
    state.requests.iter().any(what)
}

fn ended_as(state: &State, verdict: Verdict) -> bool {
    some(state, |request| request.step == Step::Ended(verdict))
}

/// All that is checked in a world.
pub fn properties(world: &World) -> Vec<Property<World>> {
    let mut all = always();
    all.extend(sometimes(world));
    all
}

fn always() -> Vec<Property<World>> {
    vec![
        Property::always(ONE_START, |_, state: &State| !state.has(Broken::SecondStart)),
        Property::always(EQUAL_ANSWERS, |_, state: &State| !state.has(Broken::AnswersDiffer)),
        Property::always(FINISHED_STAYS, |_, state: &State| !state.has(Broken::FinishedIsLost)),
        Property::always(RIGHT_RELEASE, |_, state: &State| !state.has(Broken::WrongRelease)),
        Property::always(UNKNOWN_AGAIN, |_, state: &State| !state.has(Broken::TakeoverReleasedAsFree)),
        Property::always(FENCES_GROW, |_, state: &State| !state.has(Broken::FencesGrow)),
        Property::always(STALE_WRITES_NOTHING, |_, state: &State| !state.has(Broken::StaleSettle)),
        Property::always(SAME_BODY, |_, state: &State| !state.has(Broken::ForeignTakeover)),
        Property::always(SAME_BODY_REPLAYS, |_, state: &State| !state.has(Broken::ForeignReplay)),
        Property::always(RECORDED, |world, state: &State| {
            is_recorded(state) || state.failover.is_some() || state.window_is_open(world)
        }),
        Property::always(REAL_UNKNOWN, |world, state: &State| {
            // In an open window two claims may both be real, and a late heartbeat of the loser finds its place free.
            let in_window = world.stores == crate::Stores::Loose && state.window_is_open(world);
            in_window || (has_its_reason(state, &state.first, true) && has_its_reason(state, &state.last, false))
        }),
    ]
}

/// Only what the world's faults allow: a world without crashes is not asked for one.
fn sometimes(world: &World) -> Vec<Property<World>> {
    let left = &world.faults;
    let mut all = vec![
        Property::sometimes("a request runs and is recorded", |_, state: &State| {
            some(state, |request| matches!(request.step, Step::Ended(Verdict::Ran)))
        }),
        Property::sometimes("a request is replayed", |_, state: &State| ended_as(state, Verdict::Replayed)),
        Property::sometimes("a request is refused as in progress", |_, state: &State| {
            ended_as(state, Verdict::InProgress)
        }),
    ];
    if world.bodies.iter().any(|body| *body != world.bodies[0]) {
        all.push(Property::sometimes("a request is refused as reused", |_, state: &State| {
            ended_as(state, Verdict::Reused)
        }));
    }
    if world.replies.contains(&Reply::Cut) {
        all.push(Property::sometimes("a claim is parked", |_, state: &State| {
            matches!(state.last.now.entry, Some(Entry { phase: Phase::Unknown { released: false, .. }, .. }))
        }));
    }
    if world.on_unknown == OnUnknown::Retry {
        all.push(Property::sometimes("a takeover runs", |_, state: &State| {
            state.last.now.entry.as_ref().is_some_and(|entry| {
                entry.took_over && state.requests[owner(entry.token)].past.sent && !entry_is_over(entry)
            })
        }));
        all.push(Property::sometimes("a holder lost its claim and answers the record", |_, state: &State| {
            some(state, |request| {
                request.past.sent && request.past.taken_over && request.step == Step::Ended(Verdict::Replayed)
            })
        }));
    }
    if left.crashes > 0 {
        all.push(Property::sometimes("a crash leaves an unknown", |_, state: &State| {
            some(state, |request| request.past.crashed) && ended_as(state, Verdict::Unknown)
        }));
    }
    if left.losses > 0 {
        all.push(Property::sometimes("a late copy finds its token spent", |_, state: &State| {
            state.mail.iter().any(|mail| mail.is_spent_claim(state))
        }));
    }
    if left.failovers > 0 {
        all.push(Property::sometimes("a failover forgets something", |_, state: &State| state.failover.is_some()));
    }
    all.extend(sometimes_tiered(world));
    all
}

fn sometimes_tiered(world: &World) -> Vec<Property<World>> {
    let left = &world.faults;
    let mut all = Vec::new();
    if world.stores == crate::Stores::One {
        return all;
    }
    all.push(Property::sometimes("an answer is copied to the first store", |_, state: &State| {
        matches!(state.first.now.entry, Some(Entry { phase: Phase::Done { .. }, .. }))
    }));
    all.push(Property::sometimes("a claim that never started is taken over in the first store", |_, state: &State| {
        some(state, |request| matches!(request.step, Step::ReadMarkAfter { .. }))
    }));
    if left.first_unreachable > 0 {
        all.push(Property::sometimes("the last store decides alone", |_, state: &State| {
            some(state, |request| request.past.first_missed && request.past.sent)
        }));
    }
    if left.first_unreachable > 0 && left.last_unreachable > 0 {
        all.push(Property::sometimes("both stores are down", |_, state: &State| {
            some(state, |request| request.past.both_down)
        }));
    }
    if world.stores == crate::Stores::Loose && left.last_unreachable > 0 {
        all.push(Property::sometimes("a claim runs solo", |_, state: &State| {
            some(state, |request| matches!(request.step, Step::Running(lease) if lease.solo))
        }));
        all.push(Property::sometimes("a solo claim reaches the last store", |_, state: &State| {
            state.last.now.entry.as_ref().is_some_and(|entry| {
                let past = &state.requests[owner(entry.token)].past;
                past.solo == Solo::Refused && past.sent
            })
        }));
    }
    if world.stores == crate::Stores::Loose && left.last_unreachable > 1 {
        all.push(Property::sometimes("a journaled answer is drained", |_, state: &State| {
            some(state, |request| request.past.journaled && request.later.is_empty())
                && matches!(state.last.now.entry, Some(Entry { phase: Phase::Done { .. }, .. }))
        }));
    }
    all
}

fn entry_is_over(entry: &Entry) -> bool {
    matches!(entry.phase, Phase::Done { .. } | Phase::Free)
}
