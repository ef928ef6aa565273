//! Requests by route and outcome.
//!
//! Routes are known by name, so that their counts outlive the configuration that they came from. Who counts finds the
//! route by where its name lies in memory, and compares the name to be sure: no lock, and nothing is hashed.
//!
//! Bound: [`MOST`] routes over all configurations that were ever in force; further ones are counted together.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

use ibid::Outcome;
use parking_lot::Mutex;

use super::{OUTCOMES, outcomes, place, sharded::Sharded};

/// Routes that are told apart.
const MOST: usize = 200;
/// What further ones are called together. No route has this name: theirs are `*`, or have a method and a path.
const OTHER: &str = "other";
/// Names that can be found by where they lie.
const HINTS: usize = 1024;

/// One [`Tally`] per route.
#[derive(Debug)]
pub(super) struct Tallies {
    /// Filled from the front and never emptied; the last one is [`OTHER`].
    all: Box<[OnceLock<Tally>; MOST + 1]>,
    /// Held while one is added.
    adding: Mutex<()>,
    /// Which tally a name at this place in memory belonged to last. Only a hint.
    hints: Box<[AtomicUsize; HINTS]>,
}

/// The requests of one route.
#[derive(Debug)]
pub(super) struct Tally {
    route: Box<str>,
    outcomes: Sharded<[AtomicU64; OUTCOMES]>,
}

impl Tallies {
    /// The tally of a route, which is added if it is new.
    pub(super) fn of(&self, route: &str) -> &Tally {
        // Names lie at least 8 bytes apart. The multiplier is 2^64 divided by the golden ratio.
        let place = (route.as_ptr() as u64 >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - HINTS.ilog2());
        let hint = &self.hints[place as usize % HINTS];
        match self.all[hint.load(Relaxed) % self.all.len()].get() {
            Some(tally) if *tally.route == *route => tally,
            _ => self.search(route, hint),
        }
    }

    #[cold]
    fn search(&self, route: &str, hint: &AtomicUsize) -> &Tally {
        // Looked at before the search: if it is full then, what the search does not find will never be there.
        let full = self.all[MOST - 1].get().is_some();
        let at = self.find(route).unwrap_or_else(|| if full { MOST } else { self.add(route) });
        hint.store(at, Relaxed);
        self.all[at].get().unwrap_or_else(|| self.other())
    }

    fn find(&self, route: &str) -> Option<usize> {
        let known = self.all[..MOST].iter().map_while(OnceLock::get);
        known.enumerate().find(|(_, tally)| *tally.route == *route).map(|(at, _)| at)
    }

    fn add(&self, route: &str) -> usize {
        let _adding = self.adding.lock();
        // Somebody else may have been faster.
        if let Some(at) = self.find(route) {
            return at;
        }
        let at = self.all[..MOST].iter().position(|tally| tally.get().is_none()).unwrap_or(MOST);
        if at < MOST {
            self.all[at].get_or_init(|| Tally::new(route));
        }
        at
    }

    fn other(&self) -> &Tally {
        self.all[MOST].get_or_init(|| Tally::new(OTHER))
    }

    /// Adds a route if it is new, with nothing counted.
    pub(super) fn show(&self, route: &str) {
        self.of(route);
    }

    /// All of them.
    pub(super) fn shown(&self) -> impl Iterator<Item = &Tally> {
        self.all.iter().filter_map(OnceLock::get)
    }

    /// Requests of all routes that ended so.
    pub(super) fn all_of(&self, outcome: Outcome) -> u64 {
        self.shown().map(|tally| tally.count(outcome)).sum()
    }
}

impl Default for Tallies {
    fn default() -> Self {
        let new = <[_; MOST + 1]>::try_from(Vec::from_iter((0..=MOST).map(|_| OnceLock::new())));
        let hints = Vec::from_iter((0..HINTS).map(|_| AtomicUsize::new(0)));
        Self {
            all: Box::new(new.expect("of this length")),
            adding: Mutex::default(),
            hints: hints.into_boxed_slice().try_into().expect("of this length"),
        }
    }
}

impl Tally {
    fn new(route: &str) -> Self {
        Self { route: route.into(), outcomes: Sharded::default() }
    }

    pub(super) fn route(&self) -> &str {
        &self.route
    }

    pub(super) fn add(&self, outcome: Outcome) {
        self.outcomes.mine()[place(outcome)].fetch_add(1, Relaxed);
    }

    fn count(&self, outcome: Outcome) -> u64 {
        self.outcomes.iter().map(|shard| shard[place(outcome)].load(Relaxed)).sum()
    }

    /// How many ended in each way there is.
    pub(super) fn read(&self) -> impl Iterator<Item = (Outcome, u64)> {
        outcomes().into_iter().map(|outcome| (outcome, self.count(outcome)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(tallies: &Tallies) -> Vec<(&str, u64)> {
        tallies.shown().map(|tally| (tally.route(), tally.count(Outcome::Executed))).collect()
    }

    #[test]
    fn a_name_is_one_route_wherever_it_lies() {
        let tallies = Tallies::default();
        for _ in 0..100 {
            // Kept until the end of the turn, so that each has another place.
            let names: Vec<String> = (0..10).map(|n| format!("POST /{n}")).collect();
            names.iter().for_each(|name| tallies.of(name).add(Outcome::Executed));
        }
        assert_eq!(counts(&tallies).len(), 10);
        assert!(counts(&tallies).iter().all(|(_, count)| *count == 100));
    }

    #[test]
    fn a_place_in_memory_that_has_another_name_now_is_another_route() {
        let tallies = Tallies::default();
        let mut name = String::from("POST /a");
        tallies.of(&name).add(Outcome::Executed);
        name.replace_range(6.., "b");
        tallies.of(&name).add(Outcome::Executed);
        tallies.of(&name).add(Outcome::Executed);
        assert_eq!(counts(&tallies), [("POST /a", 1), ("POST /b", 2)]);
    }

    #[test]
    fn routes_beyond_the_bound_are_counted_together_and_nothing_is_lost() {
        let tallies = Tallies::default();
        let names: Vec<String> = (0..MOST + 50).map(|n| format!("POST /{n}")).collect();
        for _ in 0..3 {
            names.iter().for_each(|name| tallies.of(name).add(Outcome::Executed));
        }
        let counts = counts(&tallies);
        assert_eq!(counts.len(), MOST + 1);
        assert!(counts[..MOST].iter().all(|(_, count)| *count == 3));
        assert_eq!(counts[MOST], ("other", 150));
        assert_eq!(tallies.all_of(Outcome::Executed), 3 * names.len() as u64);
    }

    #[test]
    fn a_route_that_many_meet_at_once_is_added_once() {
        let tallies = Tallies::default();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    (0..MOST).for_each(|n| tallies.of(&format!("POST /{n}")).add(Outcome::Executed));
                });
            }
        });
        assert_eq!(counts(&tallies).len(), MOST);
        assert!(counts(&tallies).iter().all(|(_, count)| *count == 8));
    }
}
