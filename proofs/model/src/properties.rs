//! What must never happen, and what must be able to happen, or the model says nothing.
//!
//! A broken invariant is noted in the state the moment it breaks, so the path to that state is the counterexample.

use stateright::Property;

use crate::{
    ModelOnUnknown, ModelSetup, ModelState,
    gateway::{ClientOutcome, FrontOnlyCause, ModelRequest, ModelStep, UpstreamOutcome},
    store::{ModelEntry, ModelEntryState, ModelFingerprint, ModelStore, RequestIndex, StoreContents, token_owner},
};

/// The invariants that are judged when something happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Violation {
    SecondStart = 1,
    AnswersDiffer = 2,
    CompletedIsLost = 4,
    WrongRelease = 8,
    TakeoverReleasedAsFree = 16,
    FencesGrow = 32,
    StaleSettle = 64,
    ForeignTakeover = 128,
    ForeignReplay = 256,
}

pub const ONE_START: &str = "at most one start, except authorised re-runs and open windows";
pub const EQUAL_ANSWERS: &str = "all remembered answers are equal";
pub const COMPLETED_STAYS: &str = "what was seen as finished stays finished";
pub const RIGHT_RELEASE: &str = "released only if nothing was sent or the policy says so";
pub const RELEASED_TAKEOVER_UNKNOWN: &str = "a released takeover is unknown again";
pub const FENCES_GROW: &str = "fences only grow";
pub const STALE_WRITES_NOTHING: &str = "a stale settle writes nothing";
pub const SAME_FINGERPRINT_TAKES_OVER: &str = "a different body never takes over";
pub const SAME_FINGERPRINT_REPLAYS: &str = "a different body never gets the answer";
pub const EXPLAINED_UNKNOWN: &str = "every claim that runs or is unknown has its reason";

pub const REPLIES_RECORDED: &str = "a complete reply is recorded, unless the policy let another run in its place";

/// How a client got an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerSource {
    /// Its run's, recorded before.
    Recorded,
    /// Somebody else's, from a store.
    Replayed,
    /// Told to be pending: from a run that the deciding store has not heard of, or from the journal.
    PendingAnswer,
}

/// What the checker sees of a step in a store.
pub struct StoreMonitor<'a> {
    pub requests: &'a mut [ModelRequest],
    pub violations: &'a mut u16,
    /// A takeover here is one that the policy asked for.
    pub policy_allows_takeover: bool,
}

impl StoreMonitor<'_> {
    pub fn report_violation(&mut self, what: Violation) {
        *self.violations |= what as u16;
    }

    pub fn record_takeover(&mut self, entry: &ModelEntry, by: ModelFingerprint) {
        if entry.fingerprint != by {
            self.report_violation(Violation::ForeignTakeover);
        }
        if self.policy_allows_takeover {
            self.requests[token_owner(entry.token)].history.taken_over = true;
        }
    }
}

impl ModelState {
    pub fn has_violation(&self, what: Violation) -> bool {
        self.violations & what as u16 != 0
    }

    /// The upstream is called. Every other call must have been closed by the policy.
    pub(crate) fn check_start(&mut self, world: &ModelSetup, who: usize) {
        let excused = self.requests[who].history.taken_over || self.allows_second_run(world);
        let closed = |other: &ModelRequest| {
            other.history.taken_over || other.history.reply == Some(UpstreamOutcome::Unremembered)
        };
        let mut others = self.requests.iter().enumerate().filter(|(index, other)| *index != who && other.history.sent);
        if !excused && others.any(|(_, other)| !closed(other)) {
            self.violations |= Violation::SecondStart as u16;
        }
    }

    /// A claim is to be released.
    pub(crate) fn check_release(&mut self, who: usize) {
        let past = &self.requests[who].history;
        if past.sent && past.reply != Some(UpstreamOutcome::Unremembered) {
            self.violations |= Violation::WrongRelease as u16;
        }
    }

    /// A client gets an answer that counts as remembered.
    pub(crate) fn check_answer(&mut self, world: &ModelSetup, answer: RequestIndex, how: AnswerSource) {
        // Told to be pending: until the store has it, `retry` lets somebody else run, and answer.
        if how == AnswerSource::PendingAnswer && world.on_unknown == ModelOnUnknown::Retry {
            return;
        }
        if *self.first_answer.get_or_insert(answer) != answer && !self.allows_second_run(world) {
            self.violations |= Violation::AnswersDiffer as u16;
        }
        self.completed_seen |= how == AnswerSource::Recorded;
    }

    /// A client is told that it runs or that its end is unknown.
    pub(crate) fn check_refusal(&mut self, world: &ModelSetup, who: usize) {
        let past = &self.requests[who].history;
        // Loose, without the store that decides: the other one may not have the answer yet, and the refusal is safe.
        if past.after_completed && !past.authority_missed && !self.allows_second_run(world) {
            self.violations |= Violation::CompletedIsLost as u16;
        }
    }

    /// What the promise leaves open. A store alone: a failover that forgets. Tiered strict: nothing. Loose: see the docs
    /// of each.
    pub fn allows_second_run(&self, world: &ModelSetup) -> bool {
        let solo =
            self.requests.iter().any(|request| request.history.front_only == FrontOnlyCause::AuthorityUnreachable);
        let only_last = self.requests.iter().any(|request| request.history.front_missed);
        match world.stores {
            crate::StoreSetup::One => self.failover.is_some(),
            crate::StoreSetup::Strict => false,
            crate::StoreSetup::Loose => {
                // One gateway saw only the first store, another only the last: not necessarily at the same time.
                let split = solo && only_last;
                // The first store lost a solo claim before the last one had it.
                let solo_lost = self.failover == Some(true);
                // The first store lost a claim that the last one had decided, and then the last one was away.
                let copy_lost = solo
                    && self.failover.is_some()
                    && !world.rules.leaves_out(crate::red::ModelRule::LostCopyAllowsSecondRun);
                split || solo_lost || copy_lost
            }
        }
    }
}

/// Whoever is shown as running is at it, or there is a reason why nobody knows: a crash, a failover, an answer that was
/// cut off, an end that the store has not heard yet.
fn is_explained(state: &ModelState, store: &ModelStore, is_first: bool) -> bool {
    let StoreContents { entry: Some(ModelEntry { token, state: phase, .. }), .. } = &store.now else { return true };
    let request = &state.requests[token_owner(*token)];
    let past = &request.history;
    let at_it = request.token == *token && !matches!(request.step, ModelStep::Idle | ModelStep::Ended(_));
    let open_end = matches!(past.reply, Some(UpstreamOutcome::ConnectionLost | UpstreamOutcome::TimedOut));
    let excused = open_end
        || past.crashed
        || state.failover.is_some()
        || (is_first && (past.front_not_settled || past.claim_lost || past.gave_way));
    match phase {
        ModelEntryState::Running { .. } => at_it || !request.settle_queue.is_empty() || excused,
        ModelEntryState::OutcomeUnknown { released: false, .. } => open_end || past.reported_to_authority,
        ModelEntryState::OutcomeUnknown { released: true, .. }
        | ModelEntryState::Completed { .. }
        | ModelEntryState::Free => true,
    }
}

/// Whoever saw a complete reply, and is done with it, has left it in the store that decides.
fn is_recorded(state: &ModelState) -> bool {
    let done = matches!(state.authority.now.entry, Some(ModelEntry { state: ModelEntryState::Completed { .. }, .. }));
    let owes = |request: &ModelRequest| {
        let over = matches!(request.step, ModelStep::Ended(_)) && request.settle_queue.is_empty();
        let past = &request.history;
        over && past.reply == Some(UpstreamOutcome::Remembered) && !past.crashed && !past.taken_over
    };
    done || !any_request(state, owes)
}

fn any_request(state: &ModelState, what: impl Fn(&ModelRequest) -> bool) -> bool {
    state.requests.iter().any(what)
}

fn any_ended_as(state: &ModelState, verdict: ClientOutcome) -> bool {
    any_request(state, |request| request.step == ModelStep::Ended(verdict))
}

/// All that is checked in a world.
pub fn properties(world: &ModelSetup) -> Vec<Property<ModelSetup>> {
    let mut all = safety_properties();
    all.extend(reachability_properties(world));
    all
}

fn safety_properties() -> Vec<Property<ModelSetup>> {
    vec![
        Property::always(ONE_START, |_, state: &ModelState| !state.has_violation(Violation::SecondStart)),
        Property::always(EQUAL_ANSWERS, |_, state: &ModelState| !state.has_violation(Violation::AnswersDiffer)),
        Property::always(COMPLETED_STAYS, |_, state: &ModelState| !state.has_violation(Violation::CompletedIsLost)),
        Property::always(RIGHT_RELEASE, |_, state: &ModelState| !state.has_violation(Violation::WrongRelease)),
        Property::always(RELEASED_TAKEOVER_UNKNOWN, |_, state: &ModelState| {
            !state.has_violation(Violation::TakeoverReleasedAsFree)
        }),
        Property::always(FENCES_GROW, |_, state: &ModelState| !state.has_violation(Violation::FencesGrow)),
        Property::always(STALE_WRITES_NOTHING, |_, state: &ModelState| !state.has_violation(Violation::StaleSettle)),
        Property::always(SAME_FINGERPRINT_TAKES_OVER, |_, state: &ModelState| {
            !state.has_violation(Violation::ForeignTakeover)
        }),
        Property::always(SAME_FINGERPRINT_REPLAYS, |_, state: &ModelState| {
            !state.has_violation(Violation::ForeignReplay)
        }),
        Property::always(REPLIES_RECORDED, |world, state: &ModelState| {
            is_recorded(state) || state.failover.is_some() || state.allows_second_run(world)
        }),
        Property::always(EXPLAINED_UNKNOWN, |world, state: &ModelState| {
            // In an open window two claims may both be real, and a late heartbeat of the loser finds its place free.
            let in_window = world.stores == crate::StoreSetup::Loose && state.allows_second_run(world);
            in_window || (is_explained(state, &state.front, true) && is_explained(state, &state.authority, false))
        }),
    ]
}

/// Only what the world's faults allow: a world without crashes is not asked for one.
fn reachability_properties(world: &ModelSetup) -> Vec<Property<ModelSetup>> {
    let left = &world.faults;
    let mut all = vec![
        Property::sometimes("a request runs and is recorded", |_, state: &ModelState| {
            any_request(state, |request| matches!(request.step, ModelStep::Ended(ClientOutcome::Ran)))
        }),
        Property::sometimes("a request is replayed", |_, state: &ModelState| {
            any_ended_as(state, ClientOutcome::Replayed)
        }),
        Property::sometimes("a request is refused as in progress", |_, state: &ModelState| {
            any_ended_as(state, ClientOutcome::InProgress)
        }),
    ];
    if world.fingerprints.iter().any(|body| *body != world.fingerprints[0]) {
        all.push(Property::sometimes("a request is refused as reused", |_, state: &ModelState| {
            any_ended_as(state, ClientOutcome::KeyReused)
        }));
    }
    if world.replies.contains(&UpstreamOutcome::ConnectionLost) {
        all.push(Property::sometimes("a claim is parked", |_, state: &ModelState| {
            matches!(
                state.authority.now.entry,
                Some(ModelEntry { state: ModelEntryState::OutcomeUnknown { released: false, .. }, .. })
            )
        }));
    }
    if world.on_unknown == ModelOnUnknown::Retry {
        all.push(Property::sometimes("a takeover runs", |_, state: &ModelState| {
            state.authority.now.entry.as_ref().is_some_and(|entry| {
                entry.took_over && state.requests[token_owner(entry.token)].history.sent && !is_entry_settled(entry)
            })
        }));
        all.push(Property::sometimes("a holder lost its claim and answers the record", |_, state: &ModelState| {
            any_request(state, |request| {
                request.history.sent
                    && request.history.taken_over
                    && request.step == ModelStep::Ended(ClientOutcome::Replayed)
            })
        }));
    }
    if left.crashes > 0 {
        all.push(Property::sometimes("a crash leaves an unknown", |_, state: &ModelState| {
            any_request(state, |request| request.history.crashed) && any_ended_as(state, ClientOutcome::OutcomeUnknown)
        }));
    }
    if left.losses > 0 {
        all.push(Property::sometimes("a late copy finds its token spent", |_, state: &ModelState| {
            state.late_calls.iter().any(|mail| mail.is_spent_claim(state))
        }));
    }
    if left.failovers > 0 {
        all.push(Property::sometimes("a failover forgets something", |_, state: &ModelState| state.failover.is_some()));
    }
    all.extend(tiered_reachability_properties(world));
    all
}

fn tiered_reachability_properties(world: &ModelSetup) -> Vec<Property<ModelSetup>> {
    let left = &world.faults;
    let mut all = Vec::new();
    if world.stores == crate::StoreSetup::One {
        return all;
    }
    all.push(Property::sometimes("an answer is copied to the first store", |_, state: &ModelState| {
        matches!(state.front.now.entry, Some(ModelEntry { state: ModelEntryState::Completed { .. }, .. }))
    }));
    all.push(Property::sometimes(
        "a claim that never started is taken over in the first store",
        |_, state: &ModelState| any_request(state, |request| matches!(request.step, ModelStep::ReadMarkerAfter { .. })),
    ));
    if left.front_unreachable > 0 {
        all.push(Property::sometimes("the last store decides alone", |_, state: &ModelState| {
            any_request(state, |request| request.history.front_missed && request.history.sent)
        }));
    }
    if left.front_unreachable > 0 && left.authority_unreachable > 0 {
        all.push(Property::sometimes("both stores are down", |_, state: &ModelState| {
            any_request(state, |request| request.history.both_down)
        }));
    }
    if world.stores == crate::StoreSetup::Loose && left.authority_unreachable > 0 {
        all.push(Property::sometimes("a claim runs solo", |_, state: &ModelState| {
            any_request(state, |request| matches!(request.step, ModelStep::Running(lease) if lease.front_only))
        }));
        all.push(Property::sometimes("a solo claim reaches the last store", |_, state: &ModelState| {
            state.authority.now.entry.as_ref().is_some_and(|entry| {
                let past = &state.requests[token_owner(entry.token)].history;
                past.front_only == FrontOnlyCause::AuthorityUnreachable && past.sent
            })
        }));
    }
    if world.stores == crate::StoreSetup::Loose && left.authority_unreachable > 1 {
        all.push(Property::sometimes("a journaled answer is drained", |_, state: &ModelState| {
            any_request(state, |request| request.history.journaled && request.settle_queue.is_empty())
                && matches!(
                    state.authority.now.entry,
                    Some(ModelEntry { state: ModelEntryState::Completed { .. }, .. })
                )
        }));
    }
    all
}

fn is_entry_settled(entry: &ModelEntry) -> bool {
    matches!(entry.state, ModelEntryState::Completed { .. } | ModelEntryState::Free)
}
