//! The memory that buffered bodies may take, all together.
//!
//! Requests reserve before they are claimed and are refused when nothing is left. Answers are only counted: an
//! operation that has run cannot be refused any more, and how many run is bounded.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

#[derive(Debug, Clone)]
pub(crate) struct Budget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limit: u64,
    used: AtomicU64,
}

/// A part of the budget, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reserved {
    budget: Arc<Inner>,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Self {
        Self(Arc::new(Inner { limit, used: AtomicU64::new(0) }))
    }

    pub(crate) fn reserve(&self, bytes: u64) -> Option<Reserved> {
        let mut reserved = Reserved { budget: self.0.clone(), bytes: 0 };
        reserved.grow_to(bytes).then_some(reserved)
    }
}

impl Reserved {
    /// Reserves up to `bytes` in all. Whether there was room.
    pub(crate) fn grow_to(&mut self, bytes: u64) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        if self.budget.used.fetch_add(more, Relaxed) + more > self.budget.limit {
            self.budget.used.fetch_sub(more, Relaxed);
            return false;
        }
        self.bytes += more;
        true
    }

    /// Counts bytes that can no longer be refused.
    pub(crate) fn count(&mut self, bytes: u64) {
        self.budget.used.fetch_add(bytes, Relaxed);
        self.bytes += bytes;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_can_be_reserved_again() {
        let budget = Budget::new(10);
        let mut first = budget.reserve(4).unwrap();
        assert!(budget.reserve(7).is_none());
        assert!(first.grow_to(10));
        assert!(!first.grow_to(11));
        drop(first);
        assert!(budget.reserve(10).is_some());
    }

    #[test]
    fn answers_are_counted_beyond_the_limit() {
        let budget = Budget::new(10);
        let mut running = budget.reserve(1).unwrap();
        running.count(100);
        assert!(budget.reserve(1).is_none());
        drop(running);
        assert!(budget.reserve(1).is_some());
    }
}
