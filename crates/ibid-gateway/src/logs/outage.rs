//! Condenses the failures of one outage into a few log lines: one when it begins, one per [`REMINDER_INTERVAL`] while it
//! lasts, and one when it is over.

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// An outage is over once no call has failed for so long.
const QUIET_INTERVAL: Duration = Duration::from_secs(5);
const REMINDER_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct OutageLog {
    /// Whether `current` is set, so that requests take no lock while all is well.
    is_open: AtomicBool,
    current: Mutex<Option<Outage>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outage {
    since: Instant,
    last_failure: Instant,
    last_line: Instant,
    pub(super) failures: u64,
}

impl Outage {
    pub(super) fn seconds(&self) -> u64 {
        (self.last_failure - self.since).as_secs()
    }
}

impl OutageLog {
    /// Counts a failure. Returns the outage if a line about it is due.
    pub(super) fn record_failure(&self, now: Instant) -> Option<Outage> {
        let mut current = self.current.lock();
        let is_new = current.is_none();
        let outage = current.get_or_insert(Outage { since: now, last_failure: now, last_line: now, failures: 0 });
        outage.failures += 1;
        outage.last_failure = now.max(outage.last_failure);
        self.is_open.store(true, Relaxed);
        let is_due = is_new || now.saturating_duration_since(outage.last_line) >= REMINDER_INTERVAL;
        if is_due {
            outage.last_line = now;
        }
        is_due.then_some(*outage)
    }

    /// Returns the outage if it is over, once. Reads the clock only during an outage.
    pub(super) fn take_ended(&self, now: impl FnOnce() -> Instant) -> Option<Outage> {
        if !self.is_open.load(Relaxed) {
            return None;
        }
        let mut current = self.current.lock();
        let now = now();
        let ended = current.take_if(|outage| now.saturating_duration_since(outage.last_failure) >= QUIET_INTERVAL);
        self.is_open.store(current.is_some(), Relaxed);
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_has_a_first_line_a_reminder_and_an_end_with_its_count() {
        let (log, start) = (OutageLog::default(), Instant::now());
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        assert_eq!(log.take_ended(|| panic!("no clock is read while all is well")), None);
        assert_eq!(log.record_failure(at(0)).map(|outage| outage.failures), Some(1));
        for second in 1..60 {
            assert_eq!(log.record_failure(at(second)), None);
            assert_eq!(log.take_ended(|| at(second + 1)), None);
        }
        assert_eq!(log.record_failure(at(60)).map(|outage| outage.failures), Some(61));
        let ended = log.take_ended(|| at(65)).expect("it is over");
        assert_eq!((ended.failures, ended.seconds()), (61, 60));
        assert_eq!(log.take_ended(|| at(99)), None);
        assert_eq!(log.record_failure(at(100)).map(|outage| outage.failures), Some(1), "another one");
    }
}
