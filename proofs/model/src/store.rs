//! One store, one address: the contract's rules, each as short as it can be said.
//!
//! Time is abstract. A lease does not end at an hour: "it has lapsed" is an event that may come at any moment, so a
//! holder that goes on after it is a gateway that was paused. The fence is the store's clock, which no failover turns back.

use crate::{
    properties::{Broken, Watch},
    red::{Rule, Rules},
};

/// A request's index, which is also what its run answers: two runs never answer the same.
pub type Task = u8;
/// Names a claim.
pub type Token = u8;
/// Names a holder.
pub type Fence = u8;
/// What makes two requests the same.
pub type Body = u8;

/// The claim's answer was lost: the token alone names it.
pub const UNSEEN: Fence = 0;
/// How many tokens a request may mint.
pub const TOKENS: u8 = 2;

/// Whose token it is.
pub fn owner(token: Token) -> usize {
    usize::from(token / TOKENS)
}

/// A store: what it holds, and what its replica would hold if it took over now.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Store {
    pub now: Contents,
    pub replica: Contents,
    /// The latest fence given, by the clock.
    pub clock: Fence,
}

/// What a failover can lose.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Contents {
    pub entry: Option<Entry>,
    /// Tokens of earlier holders that can never be granted again, one bit each.
    pub spent: u16,
    /// Tiered, first only: this holder may run without the store that decides.
    pub marker: Option<Marker>,
    /// How many grants it remembers.
    pub grants: u8,
}

/// Whom a mark names: a holder in the first store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Marker {
    pub token: Token,
    pub fence: Fence,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Entry {
    pub token: Token,
    pub fence: Fence,
    pub body: Body,
    /// Its holder took over an unknown one.
    pub took_over: bool,
    pub phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    Running {
        lapsed: bool,
    },
    /// `ripe`: may be taken over. `released`: its takeover was, and has spent its token.
    Unknown {
        ripe: bool,
        released: bool,
    },
    Done {
        answer: Task,
    },
    Free,
}

/// What a gateway sends to a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Call {
    Claim {
        token: Token,
        body: Body,
        over: Option<Fence>,
    },
    Extend {
        token: Token,
        body: Body,
        fence: Fence,
        over: bool,
    },
    Settle {
        token: Token,
        body: Body,
        fence: Fence,
        over: bool,
        end: End,
    },
    Get,
    Mark(Marker),
    Unmark(Fence),
    ReadMark,
    /// An operator's: takes the entry from whoever has this fence.
    Forget(Fence),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum End {
    Complete {
        answer: Task,
    },
    Release,
    /// `ripe`: may be taken over at once, not only once the lease has lapsed.
    Park {
        ripe: bool,
    },
}

/// What a store answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Answer {
    Granted(Fence),
    Busy(Holder),
    Unknown(Holder),
    Done(Task, Body),
    Spent,
    Absent,
    Held,
    Restored,
    Marker(Option<Marker>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Holder {
    pub fence: Fence,
    pub body: Body,
    pub ripe: bool,
}

/// Whether a holder still was the holder; if not, what is there now.
pub type Held = Result<Answer, Answer>;

impl Store {
    /// One atomic step. `Err` only for a holder that lost its claim.
    pub fn apply(&mut self, call: Call, rules: Rules, watch: &mut Watch) -> Held {
        match call {
            Call::Claim { token, body, over } => Ok(self.claim(token, body, over, rules, watch)),
            Call::Extend { token, body, fence, over } => self.extend(token, body, fence, over, rules),
            Call::Settle { token, body, fence, over, end } => {
                let before = self.now.clone();
                let held = self.settle(token, body, fence, over, end, rules, watch);
                // A token that is spent is no write: nobody sees it but its own late copies.
                if held.is_err() && (self.now.view(), self.now.marker) != (before.view(), before.marker) {
                    watch.broke(Broken::StaleSettle);
                }
                held
            }
            Call::Get => Ok(self.now.view()),
            Call::Mark(marker) => {
                self.now.marker = Some(marker);
                Ok(Answer::Held)
            }
            Call::Forget(fence) => {
                if self.now.entry.as_ref().is_some_and(|entry| entry.fence == fence) {
                    self.now.free(rules);
                }
                Ok(Answer::Held)
            }
            Call::Unmark(fence) => {
                if self.now.marker.is_some_and(|marker| marker.fence == fence) {
                    self.now.marker = None;
                }
                Ok(Answer::Held)
            }
            Call::ReadMark => Ok(Answer::Marker(self.now.marker)),
        }
    }

    fn claim(&mut self, token: Token, body: Body, over: Option<Fence>, rules: Rules, watch: &mut Watch) -> Answer {
        if self.now.is_spent(token) {
            return Answer::Spent;
        }
        let mut took_over = false;
        if let Some(entry) = &self.now.entry {
            let same = entry.token == token;
            let named = over == Some(entry.fence) || (over.is_some() && rules.breaks(Rule::TakeoverNamesItsHolder));
            match entry.phase {
                Phase::Running { .. } if same => return Answer::Granted(entry.fence),
                Phase::Free | Phase::Unknown { released: true, .. } if same => return Answer::Spent,
                Phase::Free => {}
                Phase::Running { lapsed: true } if rules.breaks(Rule::LapsedIsUnknown) => {}
                _ if named && entry.is_ripe() => took_over = true,
                _ => return self.now.view(),
            }
            if took_over {
                watch.taken_over(entry, body);
            }
        }
        let fence = self.next_fence(rules, watch);
        self.now.remember_spent();
        self.now.entry = Some(Entry { token, fence, body, took_over, phase: Phase::Running { lapsed: false } });
        Answer::Granted(fence)
    }

    fn next_fence(&mut self, rules: Rules, watch: &mut Watch) -> Fence {
        self.now.grants += 1;
        let fence = if rules.breaks(Rule::FencesComeFromTheClock) { self.now.grants } else { self.clock + 1 };
        if fence <= self.clock {
            watch.broke(Broken::FencesGrow);
        }
        self.clock = self.clock.max(fence);
        fence
    }

    fn extend(&mut self, token: Token, body: Body, fence: Fence, over: bool, rules: Rules) -> Held {
        self.now.make_room(token, rules);
        match &mut self.now.entry {
            None => {
                self.restore(token, body, fence, over, Phase::Running { lapsed: false });
                Ok(Answer::Restored)
            }
            Some(entry) if entry.is_held_by(token, fence) && matches!(entry.phase, Phase::Running { .. }) => {
                entry.phase = Phase::Running { lapsed: false };
                Ok(Answer::Held)
            }
            Some(_) => Err(self.now.view_for_loser()),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a lease and its end, taken apart")]
    fn settle(
        &mut self, token: Token, body: Body, fence: Fence, over: bool, end: End, rules: Rules, watch: &mut Watch,
    ) -> Held {
        if fence != UNSEEN {
            self.now.make_room(token, rules);
        }
        let Some(entry) = &mut self.now.entry else {
            return self.settle_absent(token, body, fence, over, end, rules);
        };
        if !entry.is_held_by(token, fence) && !rules.breaks(Rule::SettlesAreFenced) {
            // A claim whose answer never came, and which may still be on its way, must not come alive later.
            if fence == UNSEEN && !rules.breaks(Rule::ReleaseUnderAnotherHolderSpends) {
                self.now.spent |= 1 << token;
            }
            return Err(self.now.view_for_loser());
        }
        match (entry.phase, end) {
            (Phase::Running { .. }, _) | (Phase::Unknown { released: false, .. }, End::Complete { .. }) => {}
            (Phase::Done { .. }, End::Complete { .. })
            | (Phase::Unknown { released: false, .. }, End::Park { .. })
            | (Phase::Unknown { released: true, .. } | Phase::Free, End::Release) => return Ok(Answer::Held),
            _ => return Err(self.now.view_for_loser()),
        }
        match end {
            End::Complete { answer } => entry.phase = Phase::Done { answer },
            End::Park { ripe } => entry.phase = Phase::Unknown { ripe, released: false },
            End::Release => {
                if !entry.took_over {
                    self.now.free(rules);
                } else if rules.breaks(Rule::ReleasedTakeoverIsUnknown) {
                    watch.broke(Broken::TakeoverReleasedAsFree);
                    self.now.free(rules);
                } else {
                    entry.phase = Phase::Unknown { ripe: true, released: true };
                }
            }
        }
        Ok(Answer::Held)
    }

    /// Nobody is there: an end is put back; a release, and a claim that never came, leave a spent token.
    fn settle_absent(&mut self, token: Token, body: Body, fence: Fence, over: bool, end: End, rules: Rules) -> Held {
        let phase = match end {
            _ if fence == UNSEEN => Phase::Free,
            End::Release if over => Phase::Unknown { ripe: true, released: true },
            End::Release => Phase::Free,
            End::Complete { answer } => Phase::Done { answer },
            End::Park { ripe } => Phase::Unknown { ripe, released: false },
        };
        if phase == Phase::Free && rules.breaks(Rule::ReleaseLeavesFreeEntry) {
            return Ok(Answer::Restored);
        }
        self.restore(token, body, fence, over, phase);
        match end {
            End::Release => Ok(Answer::Restored),
            _ if fence == UNSEEN => Err(Answer::Spent),
            _ => Ok(Answer::Restored),
        }
    }

    /// Puts an entry back; the next fence is above its.
    fn restore(&mut self, token: Token, body: Body, fence: Fence, over: bool, phase: Phase) {
        self.clock = self.clock.max(fence);
        self.now.entry = Some(Entry { token, fence, body, took_over: over, phase });
    }

    /// Whether time can still change something here.
    pub fn can_lapse(&self) -> bool {
        let phase = self.now.entry.as_ref().map(|entry| entry.phase);
        matches!(phase, Some(Phase::Running { lapsed: false } | Phase::Unknown { ripe: false, .. }))
    }

    /// The holder has been silent for longer than its lease.
    pub fn lapse(&mut self, rules: Rules) {
        let Some(entry) = &mut self.now.entry else { return };
        match &mut entry.phase {
            Phase::Running { .. } if rules.breaks(Rule::LeaseIsNotTheTtl) => self.now.entry = None,
            Phase::Running { lapsed } => *lapsed = true,
            Phase::Unknown { ripe, .. } => *ripe = true,
            Phase::Done { .. } | Phase::Free => {}
        }
    }
}

impl Contents {
    fn is_spent(&self, token: Token) -> bool {
        self.spent & (1 << token) != 0
    }

    fn free(&mut self, rules: Rules) {
        if rules.breaks(Rule::ReleaseLeavesFreeEntry) {
            self.entry = None;
        } else if let Some(entry) = &mut self.entry {
            entry.phase = Phase::Free;
        }
    }

    /// A holder that this store has never heard of, or has lost, finds a released entry: nobody is there, so its own is
    /// put back as on an absent one.
    fn make_room(&mut self, token: Token, rules: Rules) {
        let freed = self.entry.as_ref().is_some_and(|entry| entry.phase == Phase::Free && entry.token != token);
        if freed && !self.is_spent(token) && !rules.breaks(Rule::FreeIsAbsentForAHolder) {
            self.remember_spent();
            self.entry = None;
        }
    }

    /// Before somebody else becomes the holder.
    fn remember_spent(&mut self) {
        if let Some(Entry { token, phase: Phase::Free | Phase::Unknown { released: true, .. }, .. }) = self.entry {
            self.spent |= 1 << token;
        }
    }

    fn view(&self) -> Answer {
        self.entry.as_ref().map_or(Answer::Absent, Entry::view)
    }

    fn view_for_loser(&self) -> Answer {
        match self.view() {
            Answer::Absent => Answer::Spent,
            view => view,
        }
    }
}

impl Entry {
    fn is_held_by(&self, token: Token, fence: Fence) -> bool {
        self.token == token && (self.fence == fence || fence == UNSEEN)
    }

    fn is_ripe(&self) -> bool {
        matches!(self.phase, Phase::Running { lapsed: true } | Phase::Unknown { ripe: true, .. })
    }

    fn view(&self) -> Answer {
        let holder = Holder { fence: self.fence, body: self.body, ripe: self.is_ripe() };
        match self.phase {
            Phase::Running { lapsed: false } => Answer::Busy(holder),
            Phase::Running { lapsed: true } | Phase::Unknown { .. } => Answer::Unknown(holder),
            Phase::Done { answer } => Answer::Done(answer, self.body),
            Phase::Free => Answer::Absent,
        }
    }
}
