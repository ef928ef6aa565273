//! The thread behind the writer: makes the next segment ready before it is needed, and moves the last few that live on
//! out of segments that are otherwise dead.
//!
//! Invariants: the writer never fills a file with zeroes and never waits for one unless it writes faster than the disk
//! can. What is moved is durable at its new place before its slot points there, and the slot changes only if it is
//! still the one that was copied.

use std::{
    collections::HashSet,
    io, mem,
    sync::{Arc, atomic::Ordering::SeqCst},
    thread,
    time::Duration,
};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{
    entry::Micros,
    format::{BATCH_HEADER, BatchHeader, COLD, FIRST_BATCH, MAIN, SECTOR, padded, salted},
    index::Slot,
    log::Log,
    scan::{Scan, Step},
    segments::{NoRoom, Sealed, Segment, SoFar, seal},
    snapshot,
};

/// How often it looks for something to do, and tries again what failed.
const TICK: Duration = Duration::from_millis(200);
/// Between two pieces of zeroes, unless the writer is about to need them.
const PACE: Duration = Duration::from_millis(2);
/// How much is moved in one batch, with a [`PACE`] behind it.
const MOVE: usize = 256 << 10;
/// What dies within this is not worth moving, and neither is what stands beside it.
const WORTH: Micros = 600 * 1_000_000;
/// How many segments a start may have to read before a snapshot is worth writing.
const UNREAD: u64 = 4;
/// How many of the dead are dropped from the index before others may have a turn.
const SWEEP: u32 = 1000;

/// The next segment, on its way from the keeper to the writer.
#[derive(Debug, Default)]
pub(super) struct Spares {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ready: Option<Arc<Segment>>,
    wanted: bool,
    urgent: bool,
    /// Why there is none although one is wanted.
    problem: Option<String>,
    closing: bool,
}

impl Spares {
    /// Asks for the next segment to be made ready.
    pub(super) fn want(&self, urgent: bool) {
        let mut state = self.state.lock();
        if state.ready.is_none() && (!state.wanted || urgent != state.urgent) {
            (state.wanted, state.urgent) = (true, urgent);
            self.changed.notify_all();
        }
    }

    /// The next segment, as soon as it is ready; or why there will be none soon.
    pub(super) fn take(&self) -> Result<Arc<Segment>, String> {
        let mut state = self.settled()?;
        Ok(state.ready.take().expect("it is ready"))
    }

    /// Waits until the next segment is ready, or it is known why there will be none soon.
    pub(super) fn verdict(&self) -> Result<(), String> {
        self.settled().map(drop)
    }

    fn settled(&self) -> Result<MutexGuard<'_, State>, String> {
        let mut state = self.state.lock();
        loop {
            if state.ready.is_some() {
                return Ok(state);
            }
            if let Some(problem) = &state.problem {
                return Err(problem.clone());
            }
            (state.wanted, state.urgent) = (true, true);
            self.changed.notify_all();
            self.changed.wait(&mut state);
        }
    }

    /// Lets the keeper end.
    pub(super) fn close(&self) {
        self.state.lock().closing = true;
        self.changed.notify_all();
    }

    fn give(&self, made: Result<Arc<Segment>, NoRoom>) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        match made {
            Ok(segment) => {
                *state = State { ready: Some(segment), closing: state.closing, ..State::default() };
            }
            Err(why) => state.problem = Some(why.to_string()),
        }
        self.changed.notify_all();
        state
    }

    fn is_closing(&self) -> bool {
        self.state.lock().closing
    }

    fn is_urgent(&self) -> bool {
        let state = self.state.lock();
        state.urgent || state.closing
    }
}

/// Where the long-lived go.
#[derive(Debug)]
struct Lane {
    segment: Arc<Segment>,
    at: u64,
    /// The sequence number of its first batch.
    first: u64,
}

#[derive(Debug)]
pub(super) struct Keeper {
    log: Arc<Log>,
    lane: Option<Lane>,
    /// The next batch's, in its own lane.
    sequence: u64,
    /// The segments that the last snapshot covers.
    covered: HashSet<u32>,
    /// The last segment of the lane, if it could not be sealed: the next one proves where it ends.
    unsealed: u32,
}

/// An entry to be moved: its slot, and where it begins in the batch.
type Moved = (Slot, usize);

impl Keeper {
    pub(super) fn new(log: Arc<Log>, sequence: u64, covered: HashSet<u32>) -> Self {
        Self { log, lane: None, sequence, covered, unsealed: 0 }
    }

    /// Until it is told to end.
    pub(super) fn run(mut self) {
        let log = self.log.clone();
        let _ended = Ended(&log.spares);
        let mut state = log.spares.state.lock();
        while !state.closing {
            if state.wanted && state.ready.is_none() {
                drop(state);
                let made = self.make_ready();
                let failed = made.is_err();
                state = log.spares.give(made);
                if !failed {
                    continue;
                }
            }
            if !state.closing {
                log.spares.changed.wait_for(&mut state, TICK);
            }
            // When there is no room for the writer, moving may make some.
            if (!state.wanted || state.problem.is_some()) && !state.closing {
                drop(state);
                // What cannot be moved now stays where it is, and is tried again.
                let _ = self.move_stragglers();
                let index = self.log.index.bytes();
                self.snapshot(index.max(UNREAD * self.log.segments.room.segment_size), PACE);
                state = log.spares.state.lock();
            }
        }
        drop(state);
        self.seal();
        self.snapshot(self.log.segments.room.segment_size / 4, Duration::ZERO);
    }

    /// Between two pieces of something long: the writer's next segment comes first.
    fn breathe(&self, pace: Duration) {
        let wanted = {
            let state = self.log.spares.state.lock();
            state.wanted && state.ready.is_none() && state.problem.is_none()
        };
        if wanted {
            drop(self.log.spares.give(self.make_ready()));
        }
        rest(pace);
    }

    fn make_ready(&self) -> Result<Arc<Segment>, NoRoom> {
        let log = &self.log;
        let pace = || {
            if !log.spares.is_urgent() {
                rest(PACE);
            }
        };
        match log.segments.prepare(MAIN, log.so_far(), Some(&pace)) {
            Err(_) => {
                // Perhaps there is room after what died has been dropped.
                while log.index.sweep(log.clock.latest(), SWEEP, |slot| log.segments.lose(slot)).1 {}
                log.segments.prepare(MAIN, log.so_far(), Some(&pace))
            }
            made => made,
        }
    }

    /// Every start takes a segment of its own, and a process that is killed soon after each start never comes to tidying
    /// up: before such segments fill the store, what lives in them is moved together.
    pub(super) fn tidy_before_start(&mut self) {
        if self.log.segments.taken() > self.log.segments.room.max_size / 4 {
            // What cannot be moved now stays where it is, and is tried again.
            let _ = self.move_stragglers();
        }
    }

    fn move_stragglers(&mut self) -> Result<(), NoRoom> {
        let now = self.log.clock.latest();
        for segment in self.log.segments.stragglers() {
            if self.log.read_only().is_some() || self.log.spares.is_closing() {
                break;
            }
            if segment.look_again.load(SeqCst) <= now {
                self.move_from(&segment, now + WORTH, PACE)?;
            }
        }
        Ok(())
    }

    /// Moves everything that lives into as few segments as it fits, and removes the others. Nobody else may be there.
    pub(super) fn compact(mut self) -> Result<(), NoRoom> {
        for segment in self.log.segments.closed() {
            self.move_from(&segment, 0, Duration::ZERO)?;
            self.log.segments.remove_dead()?;
        }
        self.seal();
        self.log.segments.remove_dead()?;
        self.snapshot(0, Duration::ZERO);
        Ok(())
    }

    /// Moves what lives in a segment, unless some of that dies before `worth` by itself.
    fn move_from(&mut self, from: &Segment, worth: Micros, pace: Duration) -> Result<(), NoRoom> {
        let mut found: Vec<(Slot, Bytes)> = Vec::new();
        let mut scan = Scan::new(from)?;
        loop {
            match scan.step()? {
                Step::Batch(batch) => {
                    let entries = batch.entries().unwrap_or_default();
                    found.extend(entries.into_iter().filter_map(|(offset, bytes)| {
                        let slot = self.log.index.slot_at(&bytes, from.header.id, offset as u32)?;
                        // A copy: the window that it was read from is much larger.
                        Some((slot, Bytes::copy_from_slice(&bytes)))
                    }));
                }
                Step::Gap { .. } => {}
                Step::End { .. } => break,
            }
        }
        let soonest = found.iter().map(|(slot, _)| slot.dies_at()).min().unwrap_or(0);
        if soonest < worth {
            from.look_again.store(soonest.max(self.log.clock.latest() + 1), SeqCst);
            return Ok(());
        }
        // Segments may have become smaller since: what is too large for them stays where it is.
        let size = self.log.segments.room.segment_size as usize;
        if found.iter().any(|(_, bytes)| bytes.len() > size / 2) {
            from.look_again.store(Micros::MAX, SeqCst);
            return Ok(());
        }
        let most = MOVE.min(size / 4);
        let mut batch = vec![0; BATCH_HEADER];
        let mut moved: Vec<Moved> = Vec::new();
        for (nth, (slot, bytes)) in found.iter().enumerate() {
            moved.push((*slot, batch.len()));
            batch.extend_from_slice(bytes);
            if batch.len() >= most || nth + 1 == found.len() {
                self.append(&mut batch, &mem::take(&mut moved))?;
                batch.truncate(BATCH_HEADER);
                self.breathe(pace);
            }
        }
        Ok(())
    }

    fn append(&mut self, batch: &mut Vec<u8>, moved: &[Moved]) -> Result<(), NoRoom> {
        let length = batch.len();
        let span = padded(length) as u64;
        if self.lane.as_ref().is_none_or(|lane| lane.at + span + SECTOR as u64 > lane.segment.header.size) {
            let segment = self.log.segments.prepare(COLD, self.log.so_far(), None)?;
            self.seal();
            segment.proves.store(mem::take(&mut self.unsealed), SeqCst);
            self.lane = Some(Lane { segment, at: FIRST_BATCH, first: self.sequence });
        }
        let lane = self.lane.as_mut().expect("it was made above");
        let salt = lane.segment.header.salt;
        for (slot, begin) in moved {
            let crc = salted(salt, &batch[begin + 8..begin + slot.length()]);
            batch[begin + 4..begin + 8].copy_from_slice(&crc.to_le_bytes());
        }
        let SoFar { clock, fences, .. } = self.log.so_far();
        let (payload, count) = ((length - BATCH_HEADER) as u32, moved.len() as u32);
        BatchHeader { length: payload, count, sequence: self.sequence, clock, fences, lane: COLD, seal: false }
            .finish(batch, salt);
        batch.resize(span as usize, 0);
        if let Err(error) = write(lane, batch, self.log.synced) {
            // Nothing points there. Never again to a file that failed; the next one goes on with the same number.
            lane.segment.spoil(lane.at);
            self.unsealed = lane.segment.header.id;
            self.lane = None;
            return Err(error.into());
        }
        for (slot, begin) in moved {
            let to = slot.moved(lane.segment.header.id, (lane.at + *begin as u64) as u32);
            self.log.segments.gain(&to);
            let lost = if self.log.index.swap(slot, to) { slot } else { &to };
            self.log.segments.lose(lost);
        }
        lane.at += span;
        self.sequence += 1;
        Ok(())
    }

    fn seal(&mut self) {
        let Some(lane) = self.lane.take() else { return };
        let ends = Sealed { lane: COLD, first: lane.first, last: self.sequence, end: lane.at };
        match seal(&lane.segment, ends, self.log.so_far(), self.log.synced) {
            Ok(()) => self.sequence += 1,
            Err(_) => {
                lane.segment.spoil(lane.at);
                self.unsealed = lane.segment.header.id;
            }
        }
    }

    /// Writes a snapshot of the index once reading what it does not cover would take longer than reading it.
    fn snapshot(&mut self, least: u64, pace: Duration) {
        let closed = self.log.segments.closed();
        let news = closed.iter().filter(|segment| !self.covered.contains(&segment.header.id));
        let unread: u64 = news.map(|segment| segment.written.load(SeqCst)).sum();
        if unread < least || self.log.read_only().is_some() {
            return;
        }
        let version = self.log.version.load(SeqCst);
        // Without it the next start takes longer; it is not tried again before there is more.
        let _ = snapshot::write(&self.log, version, &|| self.breathe(pace));
        self.covered = closed.iter().map(|segment| segment.header.id).collect();
    }
}

/// A keeper that ends, however, must not leave the writer waiting.
struct Ended<'a>(&'a Spares);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.state.lock().problem.get_or_insert_with(|| "the thread that makes room has ended".into());
        self.0.changed.notify_all();
    }
}

fn write(lane: &Lane, batch: &[u8], synced: bool) -> io::Result<()> {
    lane.segment.file.write_at(batch, lane.at)?;
    if synced { lane.segment.file.sync_data() } else { Ok(()) }
}

/// The keeper has a thread of its own: nobody waits for it.
#[expect(clippy::disallowed_methods, reason = "no task shares this thread")]
fn rest(pace: Duration) {
    thread::sleep(pace);
}
