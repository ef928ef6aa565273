//! What this process has reserved of its tenants' windows: places, numbered from 1 in the order that the store gave them out.
//! A place is a new key, or a byte.
//!
//! A place is good if its number is within the limit that holds *now*. So a limit that changes needs no bookkeeping: under a
//! lower one the places beyond it are worth nothing any more, under a higher one those that were reserved in vain are
//! good after all; and nobody gets a second allowance by the change.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

use super::{Limit, SOON};
use crate::store::{Address, Used, counters::Table};

/// The number of a place that a store could not count: within every limit.
const UNCOUNTED: u64 = 0;

/// Ends that are closer to each other than this are that of one window.
const AROUND: Duration = Duration::from_secs(60);

/// By tenant.
pub(super) struct Places {
    /// At most so many are reserved at a time.
    at_once: u64,
    limit: Option<Limit>,
    table: Table<Window>,
}

/// What is reserved in a window.
struct Window {
    /// First and last, in no order. At most one range begins beyond the limit; the others are each asked for by
    /// somebody who is about to take one.
    ranges: VecDeque<(u64, u64)>,
    until: Instant,
}

/// Whether a tenant may begin one more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// Yes.
    Free,
    /// The store knows: this many are to be reserved there, in such a window.
    Ask(u64, Duration),
    /// No, and the store has none either. There is when the window has ended.
    UsedUp(Duration),
}

impl Places {
    pub(super) fn new(at_once: u64) -> Self {
        Self { at_once, limit: None, table: Table::default() }
    }

    pub(super) fn set(&mut self, limit: Option<Limit>) {
        self.limit = limit;
    }

    pub(super) fn limit(&self) -> Option<Limit> {
        self.limit
    }

    /// Looks for a good place, and takes it if `take`.
    pub(super) fn room(&mut self, who: &Address, take: bool) -> Room {
        let Some(Limit { most, per }) = self.limit else { return Room::Free };
        let ask = Room::Ask((most / 100).clamp(1, self.at_once), per);
        let now = Instant::now();
        let Some(window) = self.table.all.get_mut(who).filter(|window| window.until > now) else { return ask };
        match window.ranges.iter().position(|(first, _)| *first <= most) {
            None if window.ranges.is_empty() => ask,
            None => Room::UsedUp(window.until - now),
            Some(at) if take => {
                let (first, last) = &mut window.ranges[at];
                if first == last {
                    window.ranges.remove(at);
                } else {
                    *first += 1;
                }
                Room::Free
            }
            Some(_) => Room::Free,
        }
    }

    /// Takes `n` places for what has been done already. Returns how many are missing: those are to be reserved.
    pub(super) fn charge(&mut self, who: &Address, n: u64) -> u64 {
        let Some(Limit { most, .. }) = self.limit else { return 0 };
        let now = Instant::now();
        let Some(window) = self.table.all.get_mut(who).filter(|window| window.until > now) else { return n };
        let mut missing = n;
        while missing > 0
            && let Some(at) = window.ranges.iter().position(|(first, _)| *first <= most)
        {
            let (first, last) = &mut window.ranges[at];
            if *first == UNCOUNTED {
                return 0;
            }
            let there = *last - *first + 1;
            if there <= missing {
                window.ranges.remove(at);
            } else {
                *first += missing;
            }
            missing = missing.saturating_sub(there);
        }
        missing
    }

    /// The store has given out `some` places, the last of which has the number `used.total`.
    pub(super) fn reserved(&mut self, who: &Address, some: u64, used: Used) {
        let until = Instant::now() + used.resets_in.max(Duration::from_millis(1));
        let last = used.total.max(1);
        self.put(who, (last.saturating_sub(some - 1).max(1), last), until);
    }

    /// The store cannot count: nobody is refused for want of a count.
    pub(super) fn uncounted(&mut self, who: &Address) {
        self.put(who, (UNCOUNTED, UNCOUNTED), Instant::now() + SOON);
    }

    fn put(&mut self, who: &Address, range: (u64, u64), until: Instant) {
        let Some(Limit { most, per }) = self.limit else { return };
        let now = Instant::now();
        if self.table.place(who, now, |window| window.until <= now) != *who {
            // Of so many at once, what some have reserved is lost to them.
            self.table.all.clear();
        }
        let window = self.table.all.entry(*who).or_insert(Window { ranges: VecDeque::new(), until });
        // The store's windows end a little earlier than they seem to from here. Which of two an answer belongs to is
        // told by when they end.
        let about = (per / 2).min(AROUND);
        if window.until <= now || until > window.until + about {
            window.ranges.clear();
        } else if until + about < window.until && range.0 != UNCOUNTED {
            return;
        }
        window.until = until;
        if range.0 <= most || window.ranges.iter().all(|(first, _)| *first <= most) {
            window.ranges.push_back(range);
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.table.all.len()
    }
}
