//! The numbers that this process has reserved in its tenants' windows. The store hands them out from 1 upwards; each
//! stands for one new key or one byte.
//!
//! A reserved number is valid if it is at most the current limit. Changing the limit therefore needs no bookkeeping: a
//! lower limit invalidates the numbers above it, and a higher limit makes them valid again. No change grants a second
//! allowance.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

use super::{QuotaLimit, RETRY_SOON};
use crate::store::{Address, CounterUsage, counters::BoundedTable};

/// The number used when the store could not count: valid under every limit.
const UNCOUNTED_NUMBER: u64 = 0;

/// Two window ends closer together than this belong to the same window.
const WINDOW_END_TOLERANCE: Duration = Duration::from_secs(60);

pub(super) struct QuotaReservations {
    /// The maximum size of one reservation.
    max_batch: u64,
    pub(super) limit: Option<QuotaLimit>,
    windows: BoundedTable<ReservationWindow>,
}

struct ReservationWindow {
    /// Reserved ranges (first, last), unordered. At most one starts above the limit; every other range was reserved by
    /// a request that is about to use it.
    ranges: VecDeque<(u64, u64)>,
    ends_at: Instant,
}

/// Whether a tenant may start one more operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allowance {
    Available,
    /// Reserve this many numbers in the store, in a window of this length.
    NeedsReservation(u64, Duration),
    /// The limit is reached. The window ends after this time.
    Exhausted(Duration),
}

impl QuotaReservations {
    pub(super) fn new(max_batch: u64) -> Self {
        Self { max_batch, limit: None, windows: BoundedTable::default() }
    }

    /// Looks for a valid number, and uses it if `take`.
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

    /// Uses `n` numbers for bytes that are already recorded. Returns how many are missing and must be reserved.
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

    /// Adds `some` numbers that the store handed out, the last of which is `used.total`.
    pub(super) fn add_reserved(&mut self, who: &Address, some: u64, used: CounterUsage) {
        let until = Instant::now() + used.resets_in.max(Duration::from_millis(1));
        let last = used.total.max(1);
        self.add_range(who, (last.saturating_sub(some - 1).max(1), last), until);
    }

    /// Allows one operation without a count, because the store cannot count.
    pub(super) fn add_uncounted(&mut self, who: &Address) {
        self.add_range(who, (UNCOUNTED_NUMBER, UNCOUNTED_NUMBER), Instant::now() + RETRY_SOON);
    }

    fn add_range(&mut self, who: &Address, range: (u64, u64), until: Instant) {
        let Some(QuotaLimit { most, per }) = self.limit else { return };
        let now = Instant::now();
        if self.windows.slot_for(who, now, |window| window.ends_at <= now) != *who {
            // The table is full. Clearing it wastes the reservations of other tenants.
            self.windows.entries.clear();
        }
        let window =
            self.windows.entries.entry(*who).or_insert(ReservationWindow { ranges: VecDeque::new(), ends_at: until });
        // The store's windows end a little earlier than they seem to from here, and the end tells which window a
        // reservation belongs to.
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
