//! Two stores as one: the last (PostgreSQL) decides, the first (Redis) speeds it up or, if loose, stands in.
//!
//! How a claim reads:
//! 1. `ClaimFirst`. Finished: replay. Granted: `ClaimLast` with the same token. Held by another: `LookLast`. Not reached:
//!    the last store decides alone.
//! 2. `LookLast`: its answer wins. If it knows nothing and the first store's holder has lapsed, that holder never started,
//!    unless it ran solo: `ReadMarkBefore`, `TakeFirst`, `ReadMarkAfter`, then `ClaimLast`.
//! 3. Loose, and the last store certainly not reached: `Mark`, `Prove` (an extend in the first store that must say that it
//!    is still held), then run solo.
//!
//! Why the order `Mark`, `Prove` and `TakeFirst`, `ReadMarkAfter` is safe: either the takeover comes before the proof, and
//! the proof fails; or the proof, and with it the mark, comes before the takeover, and the mark is seen after it.

use crate::{
    OnUnknown, State, Stores, World,
    gateway::{Errand, InFirst, Lease, Outcome, Solo, Step, Verdict, Which},
    properties::Given,
    red::Rule,
    store::{Answer, Call, End, Fence, Holder, Marker, UNSEEN, owner},
};

impl World {
    pub(crate) fn is_tiered(&self) -> bool {
        self.stores != Stores::One
    }

    pub(crate) fn go_on_tiered(&self, state: &mut State, who: usize, step: Step, outcome: Outcome) {
        match step {
            Step::ClaimFirst => self.claimed_first(state, who, outcome),
            Step::LookLast { first, unknown } => self.looked_last(state, who, first, unknown, outcome),
            Step::ReadMarkBefore { first } => self.read_mark_before(state, who, first, outcome),
            Step::TakeFirst { over, by_name } => self.took_first(state, who, over, by_name, outcome),
            Step::ReadMarkAfter { took, mine, by_name } => {
                self.read_mark_after(state, who, took, mine, by_name, outcome);
            }
            Step::PutInLast { ran, mine } => self.put_in_last(state, who, ran, mine, outcome),
            Step::ShowInFirst { lease, took } => self.show_in_first(state, who, lease, took, outcome),
            Step::ReadMarkToShow { lease, took, there } => {
                self.read_mark_to_show(state, who, lease, took, there, outcome);
            }
            Step::MoveOver { lease, took, ripe, .. } => self.moved_over(state, who, lease, took, ripe, outcome),
            Step::Mark { fence } => self.marked(state, who, fence, outcome),
            Step::Prove { fence } => self.proved(state, who, fence, outcome),
            Step::SettleFirst { lease, end } => self.settled_first(state, who, lease, end, outcome),
            _ => {}
        }
    }

    fn claimed_first(&self, state: &mut State, who: usize, outcome: Outcome) {
        let claim_last = |first| Step::ClaimLast { first, over: None, doubt: false };
        state.requests[who].past.first_missed = !matches!(outcome, Outcome::Answered(_));
        match outcome {
            Outcome::Answered(Ok(Answer::Granted(fence))) => {
                state.requests[who].step = claim_last(InFirst::Claim(fence));
            }
            Outcome::Answered(Ok(Answer::Done(answer, body))) => self.found_done(state, who, answer, body),
            Outcome::Answered(Ok(Answer::Busy(holder))) if self.rules.breaks(Rule::LastWinsOverBusy) => {
                self.found_busy(state, who, holder);
            }
            Outcome::Answered(Ok(Answer::Busy(first))) => {
                state.requests[who].step = Step::LookLast { first, unknown: false };
            }
            Outcome::Answered(Ok(Answer::Unknown(first))) => {
                state.requests[who].step = Step::LookLast { first, unknown: true };
            }
            Outcome::Answered(_) => state.refuse(self, who, Verdict::InProgress),
            Outcome::NotApplied => state.requests[who].step = claim_last(InFirst::Nothing),
            Outcome::AskAgain | Outcome::GiveUp => state.requests[who].step = claim_last(InFirst::Perhaps),
        }
    }

    fn looked_last(&self, state: &mut State, who: usize, first: Holder, unknown: bool, outcome: Outcome) {
        match outcome {
            Outcome::Answered(Ok(Answer::Done(answer, body))) => self.found_done(state, who, answer, body),
            Outcome::Answered(Ok(Answer::Busy(holder))) => self.found_busy(state, who, holder),
            Outcome::Answered(Ok(Answer::Unknown(holder))) => {
                self.found_unknown_in_last(state, who, holder, InFirst::Nothing, false)
            }
            Outcome::Answered(_) if !unknown || !first.ripe => self.found_busy(state, who, first),
            // It never started, but another body must not stand in its place: should it have run solo after all, the
            // entry would name the wrong request.
            Outcome::Answered(_)
                if first.body != self.bodies[who] && !self.rules.breaks(Rule::SameBodyTakesOverInFirst) =>
            {
                state.end(who, Verdict::Reused);
            }
            Outcome::Answered(_) => state.requests[who].step = Step::ReadMarkBefore { first },
            Outcome::AskAgain => {}
            Outcome::NotApplied | Outcome::GiveUp if self.stores == Stores::Strict => {
                state.end(who, Verdict::Unavailable);
            }
            Outcome::NotApplied | Outcome::GiveUp => {
                state.requests[who].past.last_missed = true;
                match (unknown, self.on_unknown) {
                    (true, OnUnknown::Hold) if first.body == self.bodies[who] => {
                        state.refuse(self, who, Verdict::Unknown);
                    }
                    // Takeovers need the store that decides.
                    (true, OnUnknown::Retry) => state.end(who, Verdict::Unavailable),
                    _ => self.found_busy(state, who, first),
                }
            }
        }
    }

    fn read_mark_before(&self, state: &mut State, who: usize, first: Holder, outcome: Outcome) {
        let take = |by_name| Step::TakeFirst { over: first.fence, by_name };
        match outcome {
            Outcome::Answered(Ok(Answer::Marker(Some(named)))) if self.believes(named, first.fence) => {
                match self.on_unknown {
                    OnUnknown::Hold => state.refuse(self, who, Verdict::Unknown),
                    OnUnknown::Retry if self.rules.breaks(Rule::SoloIsTakenOverInFirst) => {
                        let over = Some(first.fence);
                        state.requests[who].step = Step::ClaimLast { first: InFirst::Nothing, over, doubt: false };
                    }
                    OnUnknown::Retry => state.requests[who].step = take(true),
                }
            }
            Outcome::Answered(_) => state.requests[who].step = take(false),
            Outcome::AskAgain => {}
            Outcome::NotApplied | Outcome::GiveUp => state.end(who, Verdict::Unavailable),
        }
    }

    /// A mark speaks for whoever holds the entry now: the one that it names may have been taken over by somebody who
    /// then gave it back, or died.
    fn believes(&self, named: Marker, current: Fence) -> bool {
        named.fence == current || !self.rules.breaks(Rule::AnyMarkIsBelieved)
    }

    fn took_first(&self, state: &mut State, who: usize, over: Fence, by_name: bool, outcome: Outcome) {
        let go_to_last = |mine| Step::ClaimLast { first: InFirst::Takeover(mine), over: None, doubt: false };
        match outcome {
            Outcome::Answered(Ok(Answer::Granted(mine))) => {
                let left_out = if by_name { Rule::SoloIsPutInLast } else { Rule::MarkIsReadAfterTakeover };
                state.requests[who].step = match self.rules.breaks(left_out) {
                    true => go_to_last(mine),
                    false => Step::ReadMarkAfter { took: over, mine, by_name },
                };
            }
            Outcome::Answered(Ok(Answer::Done(answer, body))) => self.found_done(state, who, answer, body),
            Outcome::Answered(_) => state.refuse(self, who, Verdict::InProgress),
            Outcome::NotApplied | Outcome::AskAgain | Outcome::GiveUp => {
                self.release_first(state, who, InFirst::Perhaps);
                state.end(who, Verdict::Unavailable);
            }
        }
    }

    fn read_mark_after(
        &self, state: &mut State, who: usize, took: Fence, mine: Fence, by_name: bool, outcome: Outcome,
    ) {
        match outcome {
            Outcome::Answered(Ok(Answer::Marker(Some(ran)))) if by_name => {
                state.requests[owner(ran.token)].past.told_of = true;
                state.requests[who].step = Step::PutInLast { ran, mine };
            }
            Outcome::Answered(Ok(Answer::Marker(Some(named)))) if self.believes(named, took) => {
                self.release_first(state, who, InFirst::Takeover(mine));
                state.refuse(self, who, Verdict::Unknown);
            }
            Outcome::Answered(_) => {
                let first = InFirst::Takeover(mine);
                state.requests[who].step = Step::ClaimLast { first, over: None, doubt: false };
            }
            Outcome::AskAgain => {}
            Outcome::NotApplied | Outcome::GiveUp => {
                self.release_first(state, who, InFirst::Takeover(mine));
                state.end(who, Verdict::Unavailable);
            }
        }
    }

    /// The solo claim that was taken over is unknown in the last store from now on, unless that knows better.
    fn put_in_last(&self, state: &mut State, who: usize, ran: Marker, mine: Fence, outcome: Outcome) {
        let first = InFirst::Takeover(mine);
        match outcome {
            Outcome::Answered(_) => {
                state.requests[who].step = Step::ClaimLast { first, over: Some(ran.fence), doubt: false };
            }
            Outcome::AskAgain => {}
            Outcome::NotApplied | Outcome::GiveUp => {
                self.release_first(state, who, first);
                state.end(who, Verdict::Unavailable);
            }
        }
    }

    fn show_in_first(&self, state: &mut State, who: usize, lease: Lease, took: Fence, outcome: Outcome) {
        let loose = self.stores == Stores::Loose;
        match outcome {
            Outcome::Answered(Ok(Answer::Done(answer, body))) if loose => {
                self.errand(state, who, Which::Last, lease.fence, lease.over, End::Release, false);
                self.found_done(state, who, answer, body);
            }
            Outcome::Answered(Ok(Answer::Busy(there) | Answer::Unknown(there))) => {
                // Another body's claim makes room: it is not taken over.
                let there = Holder { ripe: there.ripe && there.body == self.bodies[who], ..there };
                state.requests[who].step = match loose {
                    true => Step::ReadMarkToShow { lease, took, there },
                    false => Step::MoveOver { lease, took, there: there.fence, ripe: there.ripe },
                };
            }
            Outcome::Answered(_) => {
                state.requests[who].step = Step::Ready(Lease { in_first: true, ..lease });
            }
            Outcome::NotApplied | Outcome::AskAgain | Outcome::GiveUp => self.unshown(state, who, lease),
        }
    }

    /// Somebody who ran solo, and whom the last store does not know, stands.
    fn read_mark_to_show(
        &self, state: &mut State, who: usize, lease: Lease, took: Fence, there: Holder, outcome: Outcome,
    ) {
        match outcome {
            Outcome::Answered(Ok(Answer::Marker(Some(_)))) if there.fence != took => {
                self.errand(state, who, Which::Last, lease.fence, lease.over, End::Release, false);
                state.refuse(self, who, Verdict::Unknown);
            }
            Outcome::Answered(_) => {
                let (there, ripe) = (there.fence, there.ripe);
                state.requests[who].step = Step::MoveOver { lease, took, there, ripe };
            }
            Outcome::NotApplied | Outcome::AskAgain | Outcome::GiveUp => self.unshown(state, who, lease),
        }
    }

    fn moved_over(&self, state: &mut State, who: usize, lease: Lease, took: Fence, ripe: bool, outcome: Outcome) {
        match outcome {
            Outcome::Answered(Ok(Answer::Granted(_))) if ripe => {
                state.requests[who].step = Step::Ready(Lease { in_first: true, ..lease });
            }
            Outcome::Answered(_) => state.requests[who].step = Step::ShowInFirst { lease, took },
            Outcome::NotApplied | Outcome::AskAgain | Outcome::GiveUp => self.unshown(state, who, lease),
        }
    }

    /// The first store was not reached: the last one decides alone.
    fn unshown(&self, state: &mut State, who: usize, lease: Lease) {
        state.requests[who].past.first_missed = true;
        state.requests[who].step = Step::Ready(Lease { in_first: true, ..lease });
    }

    /// The last store was certainly not reached.
    pub(crate) fn last_is_away(&self, state: &mut State, who: usize, first: InFirst) {
        state.requests[who].past.both_down |= self.is_tiered() && first == InFirst::Nothing;
        if self.may_go_solo(first) {
            return self.go_solo(state, who, first, Solo::Refused);
        }
        self.release_first(state, who, first);
        state.end(who, Verdict::Unavailable);
    }

    /// Not after a takeover: whoever was taken over may be on its way to the last store, which would let it run.
    pub(crate) fn may_go_solo(&self, first: InFirst) -> bool {
        let held = match first {
            InFirst::Claim(_) => true,
            InFirst::Takeover(_) => self.rules.breaks(Rule::NoSoloAfterTakeover),
            InFirst::Nothing | InFirst::Perhaps => false,
        };
        held && self.stores == Stores::Loose
    }

    pub(crate) fn go_solo(&self, state: &mut State, who: usize, first: InFirst, why: Solo) {
        let (InFirst::Claim(fence) | InFirst::Takeover(fence)) = first else { return };
        state.requests[who].past.solo = why;
        state.requests[who].step = Step::Mark { fence };
    }

    fn marked(&self, state: &mut State, who: usize, fence: Fence, outcome: Outcome) {
        match outcome {
            Outcome::Answered(_) if self.rules.breaks(Rule::ProveBeforeRun) => {
                state.requests[who].step = Step::Ready(solo_lease(fence));
            }
            Outcome::Answered(_) => state.requests[who].step = Step::Prove { fence },
            Outcome::AskAgain => {}
            Outcome::NotApplied | Outcome::GiveUp => self.not_solo_after_all(state, who, fence),
        }
    }

    fn proved(&self, state: &mut State, who: usize, fence: Fence, outcome: Outcome) {
        match outcome {
            Outcome::Answered(Ok(Answer::Held)) => {
                state.requests[who].step = Step::Ready(solo_lease(fence));
            }
            Outcome::AskAgain => {}
            Outcome::Answered(_) | Outcome::NotApplied | Outcome::GiveUp => {
                self.not_solo_after_all(state, who, fence);
            }
        }
    }

    fn not_solo_after_all(&self, state: &mut State, who: usize, fence: Fence) {
        state.requests[who].past.solo = Solo::No;
        let unmark = Errand { to: Which::First, call: Call::Unmark(fence), durable: false };
        state.requests[who].later.push(unmark);
        self.release_first(state, who, InFirst::Claim(fence));
        state.end(who, Verdict::Unavailable);
    }

    /// A solo claim that the last store may know of can be taken over there: from now on only its word counts.
    pub(crate) fn no_longer_solo(&self, state: &mut State, who: usize) {
        if let Step::Running(lease) = &mut state.requests[who].step
            && !self.rules.breaks(Rule::SoloEndsWhenLastMayKnow)
        {
            lease.solo = false;
        }
    }

    /// Solo, and the last store away: the first one holds the end, the journal keeps it for the last one.
    fn settled_first(&self, state: &mut State, who: usize, lease: Lease, end: End, outcome: Outcome) {
        match outcome {
            // The first store's word is not the last: somebody may have taken over there and given up since. What
            // happened is told to the store that decides.
            Outcome::Answered(Err(now)) => {
                state.requests[who].past.lost = true;
                self.unmark(state, who, lease, end);
                if matches!(now, Answer::Done(..)) || self.rules.breaks(Rule::LostInFirstIsToldToLast) {
                    return self.lost(state, who, now);
                }
            }
            Outcome::AskAgain => return,
            Outcome::Answered(Ok(_)) => self.unmark(state, who, lease, end),
            Outcome::NotApplied | Outcome::GiveUp => {
                self.unmark(state, who, lease, end);
                self.errand(state, who, Which::First, lease.fence, lease.over, end, false);
            }
        }
        let complete = matches!(end, End::Complete { .. });
        self.errand(state, who, Which::Last, lease.fence, lease.over, end, complete);
        self.answer(state, who, end, Given::Pending);
    }

    /// A solo claim that is released leaves no mark; one that ended otherwise needs none any more, but it does no harm.
    pub(crate) fn unmark(&self, state: &mut State, who: usize, lease: Lease, end: End) {
        if lease.marked && end == End::Release {
            let unmark = Errand { to: Which::First, call: Call::Unmark(lease.fence), durable: false };
            state.requests[who].later.push(unmark);
        }
    }

    /// The last store has the end: the first one hears it behind the answer, by the token alone.
    pub(crate) fn settle_first_behind(&self, state: &mut State, who: usize, lease: Lease, end: End) {
        if self.is_tiered() && lease.in_first {
            self.unmark(state, who, lease, end);
            self.errand(state, who, Which::First, UNSEEN, lease.over, end, false);
        }
    }

    pub(crate) fn release_first(&self, state: &mut State, who: usize, first: InFirst) {
        self.tell_first(state, who, first, End::Release, self.bodies[who]);
    }

    /// What the last store said ends this claim in the first one, too.
    pub(crate) fn tell_first(&self, state: &mut State, who: usize, first: InFirst, end: End, body: u8) {
        if first == InFirst::Nothing || (end == End::Release && self.rules.breaks(Rule::FirstIsReleased)) {
            return;
        }
        // A copy of another body's answer would stand under the wrong body: better none.
        let same = body == self.bodies[who] || self.rules.breaks(Rule::CopyKeepsItsBody);
        let end = if same { end } else { End::Release };
        let taken = matches!(first, InFirst::Takeover(_));
        self.errand(state, who, Which::First, UNSEEN, taken, end, false);
    }
}

fn solo_lease(fence: Fence) -> Lease {
    Lease { fence, over: false, solo: true, marked: true, in_first: true }
}
