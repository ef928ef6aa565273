//! The store contract as a sequential model: one map, explicit time, no cleverness.
//!
//! Invariant: it says exactly what a store with a perfect clock answers, durations included. Addresses, tokens and
//! fences are small numbers here; [`crate::property`] knows which real ones they stand for. Fences count from 1 per
//! address, 0 is [`Fence::UNSEEN`](ibid::store::Fence::UNSEEN).
//!
//! ```
//! use ibid_testkit::model::{Ending, Found, Grip, Model, Wish};
//!
//! let mut model = Model::default();
//! let wish = Wish { at: 0, token: 1, hold: 1_000, keep: 5_000, over: None };
//! assert_eq!(model.claim(wish), Found::Granted { fence: 1, attempt: 1 });
//! model.advance(1_000);
//! assert!(matches!(model.claim(Wish { token: 2, ..wish }), Found::Unknown(_)));
//! assert_eq!(model.claim(Wish { token: 2, over: Some(1), ..wish }), Found::Granted { fence: 2, attempt: 2 });
//! # let _ = (Ending::Release, Grip { wish, fence: 1, attempt: 1 });
//! ```

use std::collections::HashMap;

use ibid::store::FREE_FOR;

/// Microseconds: of time, and of lifetimes.
pub type Micros = u64;

/// What is asked, see [`Ask`](ibid::store::Ask).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub struct Wish {
    pub at: usize,
    pub token: u32,
    pub hold: Micros,
    pub keep: Micros,
    pub over: Option<u64>,
}

/// What a holder has in its hand, see [`Lease`](ibid::store::Lease).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub struct Grip {
    pub wish: Wish,
    pub fence: u64,
    pub attempt: u32,
}

/// What a claim finds, see [`Claim`](ibid::store::Claim).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub enum Found {
    Granted { fence: u64, attempt: u32 },
    Busy(Who),
    Unknown(Who),
    Done { fence: u64, attempt: u32, record: u8, expires_in: Micros },
    Spent,
}

/// Who runs or ran, see [`Holder`](ibid::store::Holder).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub struct Who {
    pub fence: u64,
    pub attempt: u32,
    pub age: Micros,
    pub takeover_in: Micros,
}

/// How a claim ends, see [`End`](ibid::store::End). A record is one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub enum Ending {
    Complete { record: u8, keep: Micros },
    Release,
    Park { keep: Micros, retry_in: Micros },
}

/// Whether a holder still was the holder, see [`Held`](ibid::store::Held).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after what it stands for")]
pub enum Answer {
    Held,
    Restored,
    Lost(Found),
}

/// The model.
#[derive(Debug, Default)]
pub struct Model {
    now: Micros,
    entries: HashMap<usize, Entry>,
    /// The highest fence ever given, per address: it outlives the entries.
    fences: HashMap<usize, u64>,
    /// Every token that was ever released or forgotten, and until when that has to be remembered.
    spent: HashMap<u32, Micros>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    wish: Wish,
    fence: u64,
    attempt: u32,
    took_over: bool,
    claimed: Micros,
    expires: Micros,
    phase: Phase,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Running { until: Micros, takeover: Micros },
    Unknown { takeover: Micros, released: bool },
    Done { record: u8, resolved: bool },
    Free,
}

impl Model {
    /// Lets time pass.
    pub fn advance(&mut self, by: Micros) {
        self.now += by;
        self.entries.retain(|_, entry| self.now < entry.expires);
    }

    /// What a durable store that serves one process says after that has started again: whatever ran is unknown at once,
    /// and is not taken over before a full hold from now.
    pub fn restart(&mut self) {
        let now = self.now;
        for entry in self.entries.values_mut() {
            if let Phase::Running { until, takeover } = &mut entry.phase {
                *takeover = (now + entry.wish.hold).max(*takeover);
                *until = now.min(*until);
            }
        }
    }

    /// See [`Store::claim`](ibid::store::Store::claim).
    pub fn claim(&mut self, wish: Wish) -> Found {
        if self.spent.get(&wish.token).is_some_and(|until| self.now < *until) {
            return Found::Spent;
        }
        let before = self.entries.get(&wish.at).copied();
        if let Some(entry) = before {
            let found = entry.view(self.now);
            let same = entry.wish.token == wish.token;
            match (entry.phase, found) {
                (Phase::Running { .. }, _) if same => {
                    return Found::Granted { fence: entry.fence, attempt: entry.attempt };
                }
                (Phase::Unknown { released: true, .. }, _) if same => return Found::Spent,
                (Phase::Free, _) => {}
                (_, Found::Unknown(who)) if who.takeover_in == 0 && wish.over == Some(who.fence) => {}
                _ => return found,
            }
        }
        let fence = self.fences.entry(wish.at).or_default();
        *fence += 1;
        let entry = Entry {
            wish,
            fence: *fence,
            attempt: before.map_or(1, |before| before.attempt + 1),
            took_over: before.is_some_and(|before| !matches!(before.phase, Phase::Free)),
            claimed: self.now,
            expires: self.now + wish.hold + wish.keep,
            phase: Phase::running(self.now + wish.hold),
        };
        self.put(entry);
        Found::Granted { fence: entry.fence, attempt: entry.attempt }
    }

    /// See [`Store::extend`](ibid::store::Store::extend).
    pub fn extend(&mut self, grip: Grip, hold: Micros) -> Answer {
        let phase = Phase::running(self.now + hold);
        let least = self.now + hold + grip.wish.keep;
        match self.entries.get_mut(&grip.wish.at).filter(|entry| !entry.gives_way_to(grip, &self.spent, self.now)) {
            None => self.restore(grip, phase, least),
            Some(entry) if entry.is_held_by(grip) && matches!(entry.phase, Phase::Running { .. }) => {
                entry.phase = phase;
                entry.expires = entry.expires.max(least);
                Answer::Held
            }
            Some(entry) => Answer::Lost(entry.view(self.now)),
        }
    }

    /// See [`Store::settle`](ibid::store::Store::settle).
    pub fn settle(&mut self, grip: Grip, end: Ending) -> Answer {
        let now = self.now;
        let spent_until = now + grip.wish.hold.max(FREE_FOR.as_micros() as Micros);
        let released = Phase::Unknown { takeover: now, released: true };
        let there = self.entries.get_mut(&grip.wish.at).filter(|entry| !entry.gives_way_to(grip, &self.spent, now));
        let Some(entry) = there else {
            if end == Ending::Release {
                let until = self.spent.entry(grip.wish.token).or_default();
                *until = spent_until.max(*until);
            }
            return match end {
                Ending::Release if grip.fence == 0 => {
                    self.restore(grip, Phase::Free, spent_until);
                    Answer::Held
                }
                Ending::Release if grip.wish.over.is_some() => {
                    self.restore(grip, released, spent_until.max(now + grip.wish.keep))
                }
                Ending::Release => self.restore(grip, Phase::Free, spent_until),
                Ending::Complete { keep, .. } | Ending::Park { keep, .. } => {
                    self.restore(grip, Phase::of(end, now), now + keep)
                }
            };
        };
        if !entry.is_held_by(grip) {
            let spent = self.spent.get(&grip.wish.token).is_some_and(|until| now < *until);
            if grip.fence == 0 && !spent {
                self.spent.insert(grip.wish.token, spent_until);
            } else if grip.fence != 0 && spent && end == Ending::Release {
                return Answer::Held;
            }
            return Answer::Lost(entry.view(now));
        }
        match (entry.phase, end) {
            (Phase::Running { .. }, Ending::Release) if entry.took_over => {
                entry.phase = released;
                entry.expires = entry.expires.max(spent_until);
            }
            (Phase::Running { .. }, _) | (Phase::Unknown { released: false, .. }, Ending::Complete { .. }) => {
                entry.end(end, now);
            }
            (Phase::Done { resolved: false, .. }, Ending::Complete { .. })
            | (Phase::Unknown { released: false, .. }, Ending::Park { .. })
            | (Phase::Unknown { released: true, .. } | Phase::Free, Ending::Release) => {}
            _ => return Answer::Lost(entry.view(now)),
        }
        if end == Ending::Release {
            self.spent.entry(grip.wish.token).or_insert(spent_until);
        }
        Answer::Held
    }

    /// See [`Store::get`](ibid::store::Store::get).
    pub fn get(&self, at: usize) -> Option<Found> {
        let entry = self.entries.get(&at)?;
        (!matches!(entry.phase, Phase::Free)).then(|| entry.view(self.now))
    }

    /// See [`Operators::resolve`](ibid::store::Operators::resolve).
    pub fn resolve(&mut self, at: usize, seen: u64, end: Ending) -> Answer {
        let now = self.now;
        let Some(entry) = self.entries.get_mut(&at) else { return Answer::Lost(Found::Spent) };
        match entry.view(now) {
            Found::Unknown(who) if who.fence == seen => {}
            found => return Answer::Lost(found),
        }
        let was_released = matches!(entry.phase, Phase::Unknown { released: true, .. });
        entry.end(end, now);
        match &mut entry.phase {
            Phase::Done { resolved, .. } => *resolved = true,
            Phase::Unknown { released, .. } => *released = was_released,
            Phase::Free => drop(self.spent.entry(entry.wish.token).or_insert(entry.expires)),
            Phase::Running { .. } => {}
        }
        Answer::Held
    }

    /// See [`Operators::forget`](ibid::store::Operators::forget).
    pub fn forget(&mut self, at: usize, seen: u64) -> Answer {
        let now = self.now;
        match self.entries.get_mut(&at) {
            None => Answer::Lost(Found::Spent),
            Some(entry) if entry.fence != seen || matches!(entry.phase, Phase::Free) => Answer::Lost(entry.view(now)),
            Some(entry) => {
                entry.end(Ending::Release, now);
                self.spent.entry(entry.wish.token).or_insert(entry.expires);
                Answer::Held
            }
        }
    }

    /// The fence that is there, if any is, even if it is free.
    pub fn current(&self, at: usize) -> Option<u64> {
        self.entries.get(&at).map(|entry| entry.fence)
    }

    /// Whether the contract leaves open what this claim, or its holder, finds: its token was spent, and that need not be remembered any
    /// more.
    pub fn leaves_open(&self, wish: Wish) -> bool {
        self.spent.get(&wish.token).is_some_and(|until| *until <= self.now)
    }

    /// Whether this token was spent and others have been here since. It may then find them, or its own end if that was put
    /// back after they had gone, but is never granted.
    pub fn was_spent_before(&self, wish: Wish) -> bool {
        let is_other = |entry: &Entry| entry.wish.token != wish.token || matches!(entry.phase, Phase::Done { .. });
        self.spent.contains_key(&wish.token) && self.entries.get(&wish.at).is_none_or(is_other)
    }

    fn restore(&mut self, grip: Grip, phase: Phase, expires: Micros) -> Answer {
        let Grip { wish, fence, attempt } = grip;
        self.put(Entry { wish, fence, attempt, took_over: wish.over.is_some(), claimed: self.now, expires, phase });
        Answer::Restored
    }

    fn put(&mut self, entry: Entry) {
        if self.now < entry.expires {
            self.entries.insert(entry.wish.at, entry);
        } else {
            self.entries.remove(&entry.wish.at);
        }
    }
}

impl Entry {
    fn is_held_by(&self, grip: Grip) -> bool {
        self.wish.token == grip.wish.token && (grip.fence == self.fence || grip.fence == 0)
    }

    /// Somebody else was here and has gone: for this holder, of whom nothing is said, it is as if nothing were here.
    fn gives_way_to(&self, grip: Grip, spent: &HashMap<u32, Micros>, now: Micros) -> bool {
        matches!(self.phase, Phase::Free)
            && grip.fence != 0
            && self.wish.token != grip.wish.token
            && spent.get(&grip.wish.token).is_none_or(|until| *until <= now)
    }

    fn end(&mut self, end: Ending, now: Micros) {
        self.phase = Phase::of(end, now);
        self.expires = now
            + match end {
                Ending::Complete { keep, .. } | Ending::Park { keep, .. } => keep,
                Ending::Release => self.wish.hold.max(FREE_FOR.as_micros() as Micros),
            };
    }

    fn view(&self, now: Micros) -> Found {
        let Self { fence, attempt, .. } = *self;
        let who = |from: Micros| Who { fence, attempt, age: now - self.claimed, takeover_in: from.saturating_sub(now) };
        match self.phase {
            Phase::Running { until, takeover } if now < until => Found::Busy(who(takeover)),
            Phase::Running { takeover, .. } | Phase::Unknown { takeover, .. } => Found::Unknown(who(takeover)),
            Phase::Done { record, .. } => Found::Done { fence, attempt, record, expires_in: self.expires - now },
            Phase::Free => Found::Spent,
        }
    }
}

impl Phase {
    fn running(until: Micros) -> Self {
        Self::Running { until, takeover: until }
    }

    fn of(end: Ending, now: Micros) -> Self {
        match end {
            Ending::Complete { record, .. } => Self::Done { record, resolved: false },
            Ending::Release => Self::Free,
            Ending::Park { retry_in, .. } => Self::Unknown { takeover: now + retry_in, released: false },
        }
    }
}
