//! A request in a gateway: claim, run, settle. The steps that only a tiered store has are in [`crate::tiered`].
//!
//! A step that waits for a store has exactly one [`Call`] under way. It ends with the store's answer, with the
//! certainty that the store was not reached, or in doubt; what may still arrive of a doubted call is in
//! [`State::mail`]. A gateway that is paused is one whose requests take no step for a while.

use crate::{
    OnUnknown, State, World,
    properties::{Broken, Given},
    red::Rule,
    store::{Answer, Call, End, Fence, Holder, Marker, Token, UNSEEN},
};

/// One of the two stores. A store alone is the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Which {
    First,
    Last,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request {
    pub step: Step,
    pub token: Token,
    /// Ends that a store has not acknowledged yet, told again in order until it has.
    pub later: Vec<Errand>,
    /// For the properties only: no rule looks at it.
    pub past: Past,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Errand {
    pub to: Which,
    pub call: Call,
    /// In the journal: survives a crash.
    pub durable: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    Idle,
    // Tiered: see crate::tiered.
    ClaimFirst,
    LookLast {
        first: Holder,
        unknown: bool,
    },
    ReadMarkBefore {
        first: Holder,
    },
    TakeFirst {
        over: Fence,
        by_name: bool,
    },
    /// Tells the last store of a solo claim that was taken over in the first.
    PutInLast {
        ran: Marker,
        mine: Fence,
    },
    /// The last store let it take over: the first one is to show it before it runs.
    ShowInFirst {
        lease: Lease,
        took: Fence,
    },
    ReadMarkToShow {
        lease: Lease,
        took: Fence,
        there: Holder,
    },
    MoveOver {
        lease: Lease,
        took: Fence,
        there: Fence,
        ripe: bool,
    },
    ReadMarkAfter {
        took: Fence,
        mine: Fence,
        by_name: bool,
    },
    Mark {
        fence: Fence,
    },
    Prove {
        fence: Fence,
    },
    SettleFirst {
        lease: Lease,
        end: End,
    },
    // Every store.
    ClaimLast {
        first: InFirst,
        over: Option<Fence>,
        doubt: bool,
    },
    Ready(Lease),
    Running(Lease),
    SettleLast {
        lease: Lease,
        end: End,
    },
    Ended(Verdict),
}

/// What this request holds in the first store while the last one decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InFirst {
    Nothing,
    /// The claim's answer was lost.
    Perhaps,
    Claim(Fence),
    Takeover(Fence),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lease {
    pub fence: Fence,
    pub over: bool,
    /// Granted by the first store alone; the fence is its.
    pub solo: bool,
    /// It was solo, and a mark says so.
    pub marked: bool,
    pub in_first: bool,
}

/// How the upstream's part ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reply {
    /// Provably nothing was sent.
    NotSent,
    Remembered,
    /// A complete reply that the policy does not remember.
    Unremembered,
    Cut,
    TimedOut,
}

/// What the client got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    Ran,
    RanUnstored,
    RanUnknown,
    Replayed,
    InProgress,
    Unknown,
    Reused,
    Unreachable,
    Unavailable,
    /// Nothing: its gateway crashed.
    Nothing,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Past {
    /// It began when somebody had already got the recorded answer.
    pub after_finished: bool,
    /// At least a byte may have reached the upstream.
    pub sent: bool,
    pub reply: Option<Reply>,
    /// The policy let somebody run in its place.
    pub taken_over: bool,
    pub crashed: bool,
    pub solo: Solo,
    /// The first store was not reached, and the last one asked alone.
    pub first_missed: bool,
    /// The last store was not reached, and the first one's answer stood.
    pub last_missed: bool,
    /// The first store was never told the end.
    pub first_untold: bool,
    /// It was told that it no longer is the holder.
    pub lost: bool,
    pub journaled: bool,
    /// Whoever took over found its mark, and told the last store that it may have run.
    pub told_of: bool,
    pub both_down: bool,
}

/// Why it ran without the last store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Solo {
    #[default]
    No,
    /// The last store was certainly not reached.
    Refused,
    /// It was asked, and its answer is not known.
    Doubted,
}

/// How a call ended, as the gateway sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    Answered(Result<Answer, Answer>),
    /// The store was not reached.
    NotApplied,
    /// Nobody knows; ask again.
    AskAgain,
    /// Nobody knows; asked often enough.
    GiveUp,
}

impl World {
    /// The call that a request waits for.
    pub fn call(&self, state: &State, who: usize) -> Option<(Which, Call)> {
        let request = &state.requests[who];
        let (token, body) = (request.token, self.bodies[who]);
        let settle = |lease: Lease, end| Call::Settle { token, body, fence: lease.fence, over: lease.over, end };
        Some(match request.step {
            Step::ClaimFirst => (Which::First, Call::Claim { token, body, over: None }),
            Step::LookLast { .. } => (Which::Last, Call::Get),
            Step::ReadMarkBefore { .. } | Step::ReadMarkAfter { .. } => (Which::First, Call::ReadMark),
            Step::TakeFirst { over, .. } => (Which::First, Call::Claim { token, body, over: Some(over) }),
            Step::PutInLast { ran, .. } => {
                let end = End::Park { ripe: true };
                (Which::Last, Call::Settle { token: ran.token, body, fence: ran.fence, over: false, end })
            }
            Step::ShowInFirst { .. } => (Which::First, Call::Claim { token, body, over: None }),
            Step::ReadMarkToShow { .. } => (Which::First, Call::ReadMark),
            Step::MoveOver { there, ripe: true, .. } => (Which::First, Call::Claim { token, body, over: Some(there) }),
            Step::MoveOver { there, ripe: false, .. } => (Which::First, Call::Forget(there)),
            Step::Mark { fence } => (Which::First, Call::Mark(Marker { token, fence })),
            Step::Prove { fence } => (Which::First, Call::Extend { token, body, fence, over: false }),
            Step::SettleFirst { lease, end } => (Which::First, settle(lease, end)),
            Step::ClaimLast { over, .. } => (Which::Last, Call::Claim { token, body, over }),
            Step::SettleLast { lease, end } => (Which::Last, settle(lease, end)),
            Step::Idle | Step::Ready(_) | Step::Running(_) | Step::Ended(_) => return None,
        })
    }

    /// A request arrives. Answers in this gateway's journal come first.
    pub fn begin(&self, state: &mut State, who: usize) {
        state.requests[who].past.after_finished = state.finished;
        if let Some((writer, answer)) = self.journaled(state, self.gateway(who)) {
            return match self.bodies[writer] == self.bodies[who] {
                true => self.replay(state, who, answer, Given::Pending),
                false => state.end(who, Verdict::Reused),
            };
        }
        state.requests[who].step = match self.is_tiered() {
            true => Step::ClaimFirst,
            false => Step::ClaimLast { first: InFirst::Nothing, over: None, doubt: false },
        };
    }

    fn journaled(&self, state: &State, gateway: usize) -> Option<(usize, u8)> {
        let answers = state.requests.iter().enumerate().filter(|(writer, _)| self.gateway(*writer) == gateway);
        answers.flat_map(|(writer, request)| request.later.iter().map(move |errand| (writer, errand))).find_map(
            |(writer, errand)| match errand.call {
                Call::Settle { end: End::Complete { answer }, .. } if errand.durable => Some((writer, answer)),
                _ => None,
            },
        )
    }

    /// The call that a request waited for has ended.
    pub fn go_on(&self, state: &mut State, who: usize, outcome: Outcome) {
        match state.requests[who].step {
            Step::ClaimLast { first, over, doubt } => self.claimed_last(state, who, first, over, doubt, outcome),
            Step::SettleLast { lease, end } => self.settled_last(state, who, lease, end, outcome),
            Step::Idle | Step::Ready(_) | Step::Running(_) | Step::Ended(_) => {}
            step => self.go_on_tiered(state, who, step, outcome),
        }
    }

    fn claimed_last(
        &self, state: &mut State, who: usize, first: InFirst, over: Option<Fence>, doubt: bool, outcome: Outcome,
    ) {
        match outcome {
            Outcome::Answered(Ok(Answer::Granted(fence))) => {
                let in_first = first != InFirst::Nothing;
                let lease = Lease { fence, over: over.is_some(), solo: false, marked: false, in_first };
                let shown = !self.is_tiered() || in_first || self.rules.breaks(Rule::TakeoverIsShownInFirst);
                state.requests[who].step = match over {
                    Some(took) if !shown => Step::ShowInFirst { lease, took },
                    _ => Step::Ready(lease),
                };
            }
            Outcome::Answered(Ok(Answer::Done(answer, body))) => {
                self.tell_first(state, who, first, End::Complete { answer }, body);
                self.found_done(state, who, answer, body);
            }
            Outcome::Answered(Ok(Answer::Busy(holder))) => {
                self.found_busy(state, who, holder);
                self.refused_in_doubt(state, who, over, doubt);
                self.release_first(state, who, first);
            }
            Outcome::Answered(Ok(Answer::Unknown(holder))) => {
                self.found_unknown_in_last(state, who, holder, first, doubt);
                self.refused_in_doubt(state, who, over, doubt);
                if matches!(state.requests[who].step, Step::Ended(_)) {
                    self.release_first(state, who, first);
                }
            }
            Outcome::Answered(_) => {
                self.release_first(state, who, first);
                state.refuse(self, who, Verdict::InProgress);
            }
            Outcome::AskAgain => {
                if self.rules.breaks(Rule::RepeatedClaimKeepsItsToken) {
                    state.requests[who].token |= 1;
                }
                state.requests[who].step = Step::ClaimLast { first, over, doubt: true };
            }
            // Takeovers need the store that decides.
            Outcome::NotApplied if !doubt && over.is_some() => {
                self.release_first(state, who, first);
                state.end(who, Verdict::Unavailable);
            }
            Outcome::NotApplied if !doubt => self.last_is_away(state, who, first),
            Outcome::GiveUp if self.may_go_solo(first) && self.rules.breaks(Rule::NoSoloInDoubt) => {
                self.go_solo(state, who, first, Solo::Doubted);
            }
            // In doubt: never solo. Whatever may have been granted is released, in the last store first: whoever gets in
            // at the first store and runs solo must not find this claim in the last.
            Outcome::NotApplied | Outcome::GiveUp => {
                let first_before_last = self.rules.breaks(Rule::LastIsReleasedBeforeFirst);
                if first_before_last {
                    self.release_first(state, who, first);
                }
                self.errand(state, who, Which::Last, UNSEEN, over.is_some(), End::Release, false);
                if !first_before_last {
                    self.release_first(state, who, first);
                }
                state.end(who, Verdict::Unavailable);
            }
        }
    }

    /// An earlier copy of the claim may still be under way: refused or not, it must not come alive once the present
    /// holder has left.
    fn refused_in_doubt(&self, state: &mut State, who: usize, over: Option<Fence>, doubt: bool) {
        let refused = matches!(state.requests[who].step, Step::Ended(_));
        if refused && doubt && !self.rules.breaks(Rule::RefusedInDoubtReleases) {
            self.errand(state, who, Which::Last, UNSEEN, over.is_some(), End::Release, false);
        }
    }

    pub(crate) fn found_done(&self, state: &mut State, who: usize, answer: u8, body: u8) {
        match body == self.bodies[who] {
            true => self.replay(state, who, answer, Given::Replayed),
            false => state.end(who, Verdict::Reused),
        }
    }

    pub(crate) fn found_busy(&self, state: &mut State, who: usize, holder: Holder) {
        match holder.body == self.bodies[who] {
            true => state.refuse(self, who, Verdict::InProgress),
            false => state.end(who, Verdict::Reused),
        }
    }

    /// The fingerprint first, then the policy; a takeover names its holder.
    pub(crate) fn found_unknown_in_last(
        &self, state: &mut State, who: usize, holder: Holder, first: InFirst, doubt: bool,
    ) {
        let same = holder.body == self.bodies[who] || self.rules.breaks(Rule::FingerprintBeforeTakeover);
        match self.on_unknown {
            _ if !same => state.end(who, Verdict::Reused),
            OnUnknown::Hold => state.refuse(self, who, Verdict::Unknown),
            OnUnknown::Retry if holder.ripe => {
                let over = Some(holder.fence);
                state.requests[who].step = Step::ClaimLast { first, over, doubt };
            }
            OnUnknown::Retry => state.refuse(self, who, Verdict::InProgress),
        }
    }

    pub(crate) fn replay(&self, state: &mut State, who: usize, answer: u8, how: Given) {
        if self.bodies[usize::from(answer)] != self.bodies[who] {
            state.broken |= Broken::ForeignReplay as u16;
        }
        state.judge_answer(self, answer, how);
        state.end(who, Verdict::Replayed);
    }

    /// The first byte leaves for the upstream.
    pub fn start(&self, state: &mut State, who: usize) {
        let Step::Ready(lease) = state.requests[who].step else { return };
        state.requests[who].past.sent = true;
        state.judge_start(self, who);
        state.requests[who].step = Step::Running(lease);
    }

    /// The upstream's part is over.
    pub fn replied(&self, state: &mut State, who: usize, reply: Reply) {
        let (Step::Ready(lease) | Step::Running(lease)) = state.requests[who].step else { return };
        state.requests[who].past.reply = Some(reply);
        let end = match reply {
            Reply::Remembered => End::Complete { answer: who as u8 },
            Reply::NotSent | Reply::Unremembered => End::Release,
            Reply::Cut if self.rules.breaks(Rule::CutIsParked) => End::Release,
            Reply::Cut => End::Park { ripe: true },
            Reply::TimedOut => End::Park { ripe: false },
        };
        if end == End::Release {
            state.judge_release(who);
        }
        if reply == Reply::Remembered && self.rules.breaks(Rule::RecordThenAnswer) {
            state.judge_answer(self, who as u8, Given::Replayed);
        }
        state.requests[who].step = Step::SettleLast { lease, end };
    }

    fn settled_last(&self, state: &mut State, who: usize, lease: Lease, end: End, outcome: Outcome) {
        match outcome {
            Outcome::Answered(Ok(_)) => {
                self.settle_first_behind(state, who, lease, end);
                self.answer(state, who, end, Given::Recorded);
            }
            // It writes nothing, and answers what the record says.
            Outcome::Answered(Err(now)) => {
                state.requests[who].past.lost = end != End::Release;
                // Asked again after a lost answer, and somebody has come since: this claim still stands in the first store.
                if end == End::Release && !self.rules.breaks(Rule::LostReleaseIsToldToFirst) {
                    self.settle_first_behind(state, who, lease, end);
                }
                self.lost(state, who, now);
            }
            Outcome::AskAgain => {}
            Outcome::NotApplied | Outcome::GiveUp if lease.solo => {
                state.requests[who].step = Step::SettleFirst { lease, end };
            }
            Outcome::NotApplied | Outcome::GiveUp => {
                let complete = matches!(end, End::Complete { .. });
                self.errand(state, who, Which::Last, lease.fence, lease.over, end, complete && self.journal);
                self.settle_first_behind(state, who, lease, end);
                match complete && !self.journal {
                    // The answer is withheld until it is stored.
                    true => state.end(who, Verdict::Unavailable),
                    false => self.answer(state, who, end, Given::Pending),
                }
            }
        }
    }

    pub(crate) fn answer(&self, state: &mut State, who: usize, end: End, how: Given) {
        let verdict = match end {
            End::Complete { answer } => {
                state.judge_answer(self, answer, how);
                Verdict::Ran
            }
            End::Park { .. } => Verdict::RanUnknown,
            End::Release if state.requests[who].past.sent => Verdict::RanUnstored,
            End::Release => Verdict::Unreachable,
        };
        state.end(who, verdict);
    }

    /// What the record says, never its own reply; and never what it says to another body.
    pub(crate) fn lost(&self, state: &mut State, who: usize, now: Answer) {
        match now {
            Answer::Done(answer, _) if self.rules.breaks(Rule::LoserComparesBodies) => {
                self.replay(state, who, answer, Given::Replayed)
            }
            Answer::Done(answer, body) => self.found_done(state, who, answer, body),
            Answer::Unknown(_) => state.end(who, Verdict::Unknown),
            _ => state.end(who, Verdict::InProgress),
        }
    }

    /// To be told until acknowledged.
    #[expect(clippy::too_many_arguments, reason = "a lease and its end, taken apart")]
    pub(crate) fn errand(
        &self, state: &mut State, who: usize, to: Which, fence: Fence, over: bool, end: End, durable: bool,
    ) {
        let (token, body) = (state.requests[who].token, self.bodies[who]);
        let call = Call::Settle { token, body, fence, over, end };
        if end == End::Release {
            state.judge_release(who);
        }
        state.requests[who].past.journaled |= durable;
        state.requests[who].later.push(Errand { to, call, durable });
    }

    /// A store has heard the oldest errand. What the last store calls lost must not stand in the first.
    pub fn told(&self, state: &mut State, who: usize, held: Result<Answer, Answer>) {
        let request = &mut state.requests[who];
        let told = request.later.remove(0);
        if told.to == Which::Last && held.is_err() && !self.rules.breaks(Rule::LostIsNotToldToFirst) {
            let stands = |call| matches!(call, Call::Settle { end, .. } if end != End::Release);
            request.past.lost = true;
            request.later.retain(|errand| !stands(errand.call));
        }
    }

    /// A gateway dies: what it was at is gone, except its journal.
    pub fn crash(&self, state: &mut State, gateway: usize) {
        for who in (0..state.requests.len()).filter(|who| self.gateway(*who) == gateway) {
            let request = &mut state.requests[who];
            let at_work = !matches!(request.step, Step::Idle | Step::Ended(_));
            let before = request.later.len();
            request.later.retain(|errand| errand.durable);
            request.past.crashed |= at_work || request.later.len() < before;
            if at_work {
                request.step = Step::Ended(Verdict::Nothing);
            }
        }
    }
}

impl State {
    pub(crate) fn end(&mut self, who: usize, verdict: Verdict) {
        self.requests[who].step = Step::Ended(verdict);
    }

    pub(crate) fn refuse(&mut self, world: &World, who: usize, verdict: Verdict) {
        self.judge_refusal(world, who);
        self.end(who, verdict);
    }
}
