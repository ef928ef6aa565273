//! What this process has reserved of its tenants' windows: places, numbered from 1 in the order that the store gave them out.
//! A place is a new key, or a byte.
//!
//! A place is good if its number is within the limit that holds *now*. So a limit that changes needs no bookkeeping: under a
//! lower one the places beyond it are worth nothing any more, under a higher one those that were reserved in vain are
//! good after all; and nobody gets a second allowance by the change.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

use super::{QuotaLimit, RETRY_SOON};
use crate::store::{Address, CounterUsage, counters::BoundedTable};

/// The number of a place that a store could not count: within every limit.
const UNCOUNTED_NUMBER: u64 = 0;

/// Ends that are closer to each other than this are that of one window.
const WINDOW_END_TOLERANCE: Duration = Duration::from_secs(60);

/// By tenant.
pub(super) struct QuotaReservations {
    /// At most so many are reserved at a time.
    max_batch: u64,
    limit: Option<QuotaLimit>,
    windows: BoundedTable<ReservationWindow>,
}

/// What is reserved in a window.
struct ReservationWindow {
    /// First and last, in no order. At most one range begins beyond the limit; the others are each asked for by
    /// somebody who is about to take one.
    ranges: VecDeque<(u64, u64)>,
    ends_at: Instant,
}

/// Whether a tenant may begin one more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allowance {
    /// Yes.
    Available,
    /// The store knows: this many are to be reserved there, in such a window.
    NeedsReservation(u64, Duration),
    /// No, and the store has none either. There is when the window has ended.
    Exhausted(Duration),
}

impl QuotaReservations {
    pub(super) fn new(max_batch: u64) -> Self {
        Self { max_batch, limit: None, windows: BoundedTable::default() }
    }

    pub(super) fn set(&mut self, limit: Option<QuotaLimit>) {
        self.limit = limit;
    }

    pub(super) fn limit(&self) -> Option<QuotaLimit> {
        self.limit
    }

    /// Looks for a good place, and takes it if `take`.
    pub(super) fn check(&mut self, who: &Address, take: bool) -> Allowance {
        let Some(QuotaLimit { most, per }) = self.limit else { return Allowance::Available };
        let ask = Allowance::NeedsReservation((most / 100).clamp(1, self.max_batch), per);
        let now = Instant::now();
        let Some(window) = self.windows.entries.get_mut(who).filter(|window| window.ends_at > now) else { return ask };
        match window.ranges.iter().position(|(first, _)| *first <= most) {
            None if window.ranges.is_empty() => ask,
            None => Allowance::Exhausted(window.ends_at - now),
            Some(at) if take => {
                let (first, last) = &mut window.ranges[at];
                if first == last {
                    window.ranges.remove(at);
                } else {
                    *first += 1;
                }
                Allowance::Available
            }
            Some(_) => Allowance::Available,
        }
    }

    /// Takes `n` places for what has been done already. Returns how many are missing: those are to be reserved.
    pub(super) fn charge(&mut self, who: &Address, n: u64) -> u64 {
        let Some(QuotaLimit { most, .. }) = self.limit else { return 0 };
        let now = Instant::now();
        let Some(window) = self.windows.entries.get_mut(who).filter(|window| window.ends_at > now) else { return n };
        let mut missing = n;
        while missing > 0
            && let Some(at) = window.ranges.iter().position(|(first, _)| *first <= most)
        {
            let (first, last) = &mut window.ranges[at];
            if *first == UNCOUNTED_NUMBER {
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
    pub(super) fn add_reserved(&mut self, who: &Address, some: u64, used: CounterUsage) {
        let until = Instant::now() + used.resets_in.max(Duration::from_millis(1));
        let last = used.total.max(1);
        self.add_range(who, (last.saturating_sub(some - 1).max(1), last), until);
    }

    /// The store cannot count: nobody is refused for want of a count.
    pub(super) fn add_uncounted(&mut self, who: &Address) {
        self.add_range(who, (UNCOUNTED_NUMBER, UNCOUNTED_NUMBER), Instant::now() + RETRY_SOON);
    }

    fn add_range(&mut self, who: &Address, range: (u64, u64), until: Instant) {
        let Some(QuotaLimit { most, per }) = self.limit else { return };
        let now = Instant::now();
        if self.windows.slot_for(who, now, |window| window.ends_at <= now) != *who {
            // Of so many at once, what some have reserved is lost to them.
            self.windows.entries.clear();
        }
        let window =
            self.windows.entries.entry(*who).or_insert(ReservationWindow { ranges: VecDeque::new(), ends_at: until });
        // The store's windows end a little earlier than they seem to from here. Which of two an answer belongs to is
        // told by when they end.
        let about = (per / 2).min(WINDOW_END_TOLERANCE);
        if window.ends_at <= now || until > window.ends_at + about {
            window.ranges.clear();
        } else if until + about < window.ends_at && range.0 != UNCOUNTED_NUMBER {
            return;
        }
        window.ends_at = until;
        if range.0 <= most || window.ranges.iter().all(|(first, _)| *first <= most) {
            window.ranges.push_back(range);
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.windows.entries.len()
    }
}
