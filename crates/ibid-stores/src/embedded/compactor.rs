//! The background thread behind the writer. It prepares the next segment before it is needed, and moves the last live
//! entries out of segments that are otherwise dead.
//!
//! Invariants: the writer never zero-fills a file, and waits for a segment only if it writes faster than the disk can.
//! A moved entry is durable at its new location before its slot points there, and the slot changes only if it is still
//! the one that was copied.

use std::{
    collections::HashSet,
    mem,
    sync::{Arc, atomic::Ordering::SeqCst},
    thread,
    time::Duration,
};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::Notify;

use super::{
    entry::UnixMicros,
    format::{BATCH_HEADER_LEN, COLD_LANE, MAIN_LANE, pad_to_sector},
    index::IndexSlot,
    lane::{BatchWriteError, LaneTail},
    log::SharedLog,
    recovery::RecoveredLog,
    segment_reader::{ScanStep, SegmentScan},
    segments::{LogPosition, LogSegment, SegmentError},
    snapshot,
};

/// Interval at which the thread looks for work and retries failures.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Pause after each chunk of background I/O, unless the writer needs a segment urgently.
const BACKGROUND_IO_PAUSE: Duration = Duration::from_millis(2);
/// Maximum bytes moved in one batch, which a [`BACKGROUND_IO_PAUSE`] follows.
const MAX_MOVE_BATCH_BYTES: usize = 256 << 10;
/// Minimum remaining life in microseconds. A segment with an entry that dies sooner is not worth compacting.
const MIN_REMAINING_LIFE_US: UnixMicros = 600 * 1_000_000;
/// Number of segments that a start may have to read before a snapshot is worth writing.
const SNAPSHOT_SEGMENT_THRESHOLD: u64 = 4;
/// Maximum number of dead slots removed from the index per step.
const MAX_SWEEP_BATCH: u32 = 1000;

/// Hands the next segment from the compactor to the writer.
#[derive(Debug, Default)]
pub(super) struct SegmentPool {
    state: Mutex<SegmentPoolState>,
    changed: Condvar,
    /// Notified when a segment is ready, or when there will be none soon.
    settled: Notify,
}

#[derive(Debug, Default)]
struct SegmentPoolState {
    ready_segment: Option<Arc<LogSegment>>,
    is_wanted: bool,
    is_urgent: bool,
    /// Why no segment is ready although one is wanted.
    failure: Option<String>,
    is_closing: bool,
}

impl SegmentPool {
    pub(super) fn request(&self, urgent: bool) {
        let mut state = self.state.lock();
        if state.ready_segment.is_none() && (!state.is_wanted || urgent != state.is_urgent) {
            (state.is_wanted, state.is_urgent) = (true, urgent);
            self.changed.notify_all();
        }
    }

    /// Takes the next segment once it is ready, or returns why none will be ready soon.
    pub(super) fn take(&self) -> Result<Arc<LogSegment>, String> {
        let mut state = self.state.lock();
        loop {
            if let Some(ready) = self.check_ready(&mut state) {
                return ready.map(|()| state.ready_segment.take().expect("it is ready"));
            }
            self.changed.wait(&mut state);
        }
    }

    /// Returns whether the next segment is ready, or why none will be ready soon. Returns `None` while it is being
    /// prepared.
    pub(super) fn poll_ready(&self) -> Option<Result<(), String>> {
        self.check_ready(&mut self.state.lock())
    }

    fn check_ready(&self, state: &mut SegmentPoolState) -> Option<Result<(), String>> {
        if state.ready_segment.is_some() {
            return Some(Ok(()));
        }
        if let Some(problem) = &state.failure {
            return Some(Err(problem.clone()));
        }
        (state.is_wanted, state.is_urgent) = (true, true);
        self.changed.notify_all();
        None
    }

    /// Waits until [`Self::poll_ready`] returns a result.
    pub(super) async fn wait_ready(&self) {
        loop {
            let settled = self.settled.notified();
            tokio::pin!(settled);
            settled.as_mut().enable();
            if self.poll_ready().is_some() {
                return;
            }
            settled.await;
        }
    }

    /// Stops the compactor.
    pub(super) fn close(&self) {
        self.state.lock().is_closing = true;
        self.changed.notify_all();
    }

    fn provide(&self, made: Result<Arc<LogSegment>, SegmentError>) -> MutexGuard<'_, SegmentPoolState> {
        let mut state = self.state.lock();
        match made {
            Ok(segment) => {
                let is_closing = state.is_closing;
                *state = SegmentPoolState { ready_segment: Some(segment), is_closing, ..SegmentPoolState::default() };
            }
            Err(why) => state.failure = Some(why.to_string()),
        }
        self.changed.notify_all();
        self.settled.notify_waiters();
        state
    }

    fn is_closing(&self) -> bool {
        self.state.lock().is_closing
    }

    fn is_urgent(&self) -> bool {
        let state = self.state.lock();
        state.is_urgent || state.is_closing
    }
}

#[derive(Debug)]
pub(super) struct Compactor {
    log: Arc<SharedLog>,
    /// The segment that receives moved entries.
    cold_segment: Option<LaneTail>,
    /// Sequence number of the next batch in the cold lane.
    sequence: u64,
    snapshot_segments: HashSet<u32>,
    /// The lane's last segment if it could not be sealed: the next one proves where it ends. 0 if there is none.
    unsealed_segment: u32,
}

impl Compactor {
    pub(super) fn new(log: Arc<SharedLog>, recovered: &RecoveredLog) -> Self {
        let sequence = recovered.sequences[usize::from(COLD_LANE)] + 1;
        let snapshot_segments = recovered.snapshot_segments.clone();
        Self { log, cold_segment: None, sequence, snapshot_segments, unsealed_segment: 0 }
    }

    /// Runs until the pool is closed.
    pub(super) fn run(mut self) {
        let log = self.log.clone();
        let _ended = CompactorExitGuard(&log.segment_pool);
        let mut state = log.segment_pool.state.lock();
        while !state.is_closing {
            if state.is_wanted && state.ready_segment.is_none() {
                drop(state);
                let made = self.prepare_segment();
                let failed = made.is_err();
                state = log.segment_pool.provide(made);
                if !failed {
                    continue;
                }
            }
            if !state.is_closing {
                log.segment_pool.changed.wait_for(&mut state, POLL_INTERVAL);
            }
            // If the writer has no space, compaction may free some.
            if (!state.is_wanted || state.failure.is_some()) && !state.is_closing {
                drop(state);
                // A failed move is retried later.
                let _ = self.compact_sparse_segments();
                let least = log.index.bytes().max(SNAPSHOT_SEGMENT_THRESHOLD * log.segments.limits.segment_size);
                self.write_snapshot_if_due(least, BACKGROUND_IO_PAUSE);
                state = log.segment_pool.state.lock();
            }
        }
        drop(state);
        self.seal_cold_segment();
        self.write_snapshot_if_due(self.log.segments.limits.segment_size / 4, Duration::ZERO);
    }

    /// Pauses between two chunks of background I/O. Prepares the writer's next segment first, if it needs one.
    fn yield_to_writer(&self, pace: Duration) {
        let wanted = {
            let state = self.log.segment_pool.state.lock();
            state.is_wanted && state.ready_segment.is_none() && state.failure.is_none()
        };
        if wanted {
            drop(self.log.segment_pool.provide(self.prepare_segment()));
        }
        pause(pace);
    }

    fn prepare_segment(&self) -> Result<Arc<LogSegment>, SegmentError> {
        let log = &self.log;
        let pace = || {
            if !log.segment_pool.is_urgent() {
                pause(BACKGROUND_IO_PAUSE);
            }
            true
        };
        match log.segments.prepare_segment(MAIN_LANE, &|| log.position(), Some(&pace)) {
            Err(_) => {
                // Removing dead entries may free a segment.
                while log.index.sweep(log.clock.latest(), MAX_SWEEP_BATCH, |slot| log.segments.remove_slot(slot)).1 {}
                log.segments.prepare_segment(MAIN_LANE, &|| log.position(), Some(&pace))
            }
            made => made,
        }
    }

    /// Compacts before the writer starts. Every start uses a new segment, and a process that is killed soon after each
    /// start never compacts: this keeps such segments from filling the store.
    pub(super) fn compact_before_start(&mut self) {
        if self.log.segments.used_bytes() > self.log.segments.limits.max_size / 4 {
            // A failed move is retried later.
            let _ = self.compact_sparse_segments();
        }
    }

    fn compact_sparse_segments(&mut self) -> Result<(), SegmentError> {
        let now = self.log.clock.latest();
        for segment in self.log.segments.sparse_segments() {
            if self.log.read_only_reason().is_some() || self.log.segment_pool.is_closing() {
                break;
            }
            if segment.compact_not_before.load(SeqCst) <= now {
                self.compact_segment(&segment, now + MIN_REMAINING_LIFE_US, BACKGROUND_IO_PAUSE)?;
            }
        }
        Ok(())
    }

    /// Moves all live entries into as few segments as possible and removes the others. Requires exclusive access.
    pub(super) fn compact(mut self) -> Result<(), SegmentError> {
        for segment in self.log.segments.closed_segments() {
            self.compact_segment(&segment, 0, Duration::ZERO)?;
            self.log.segments.remove_recyclable()?;
        }
        self.seal_cold_segment();
        self.log.segments.remove_recyclable()?;
        self.write_snapshot_if_due(0, Duration::ZERO);
        Ok(())
    }

    /// Moves the live entries of a segment, unless one of them dies before `worth`.
    fn compact_segment(&mut self, from: &LogSegment, worth: UnixMicros, pace: Duration) -> Result<(), SegmentError> {
        let mut found: Vec<(IndexSlot, Bytes)> = Vec::new();
        let mut scan = SegmentScan::new(from)?;
        loop {
            match scan.next_step()? {
                ScanStep::Batch(batch) => {
                    let entries = batch.entries().unwrap_or_default();
                    found.extend(entries.into_iter().filter_map(|(offset, bytes)| {
                        let slot = self.log.index.slot_at(&bytes, from.header.id, offset as u32)?;
                        // Copy the bytes: the read window that they belong to is much larger.
                        Some((slot, Bytes::copy_from_slice(&bytes)))
                    }));
                }
                ScanStep::Gap { .. } => {}
                ScanStep::End { .. } => break,
            }
        }
        let soonest = found.iter().map(|(slot, _)| slot.dies_at()).min().unwrap_or(0);
        if soonest < worth {
            from.compact_not_before.store(soonest.max(self.log.clock.latest() + 1), SeqCst);
            return Ok(());
        }
        // The segment size may have been reduced since. Entries too large for it stay where they are.
        let size = self.log.segments.limits.segment_size as usize;
        if found.iter().any(|(_, bytes)| bytes.len() > size / 2) {
            from.compact_not_before.store(UnixMicros::MAX, SeqCst);
            return Ok(());
        }
        let most = MAX_MOVE_BATCH_BYTES.min(size / 4);
        let mut batch = vec![0; BATCH_HEADER_LEN];
        // The slot of each entry, and its offset in the batch.
        let mut moved: Vec<(IndexSlot, usize)> = Vec::new();
        for (nth, (slot, bytes)) in found.iter().enumerate() {
            moved.push((*slot, batch.len()));
            batch.extend_from_slice(bytes);
            if batch.len() >= most || nth + 1 == found.len() {
                self.append_moved(&mut batch, &mem::take(&mut moved))?;
                batch.truncate(BATCH_HEADER_LEN);
                self.yield_to_writer(pace);
            }
        }
        Ok(())
    }

    fn append_moved(&mut self, batch: &mut Vec<u8>, moved: &[(IndexSlot, usize)]) -> Result<(), SegmentError> {
        if self.cold_segment.as_ref().is_none_or(|lane| !lane.has_room_for(batch.len())) {
            let segment = self.log.segments.prepare_segment(COLD_LANE, &|| self.log.position(), None)?;
            self.seal_cold_segment();
            segment.proves_end_of.store(mem::take(&mut self.unsealed_segment), SeqCst);
            self.cold_segment = Some(LaneTail::new(COLD_LANE, segment, self.sequence));
        }
        let lane = self.cold_segment.as_mut().expect("it was made above");
        let at = LogPosition { sequence: self.sequence, ..self.log.position() };
        let spans = moved.iter().map(|(slot, begin)| (*begin, slot.length()));
        if let Err(BatchWriteError::NotWritten(error) | BatchWriteError::NotSynced(error)) =
            lane.write_batch(batch, spans, at, self.log.is_synced)
        {
            // No slot points to the batch. The failed file is never written again; the next segment reuses the sequence
            // number.
            lane.segment.mark_spoiled(lane.offset);
            self.unsealed_segment = lane.segment.header.id;
            self.cold_segment = None;
            return Err(error.into());
        }
        for (slot, begin) in moved {
            let to = slot.moved_to(lane.segment.header.id, (lane.offset + *begin as u64) as u32);
            self.log.segments.add_slot(&to);
            let lost = if self.log.index.swap(slot, to) { slot } else { &to };
            self.log.segments.remove_slot(lost);
        }
        lane.offset += pad_to_sector(batch.len()) as u64;
        self.sequence += 1;
        Ok(())
    }

    fn seal_cold_segment(&mut self) {
        let Some(lane) = self.cold_segment.take() else { return };
        if lane.seal(LogPosition { sequence: self.sequence, ..self.log.position() }, self.log.is_synced) {
            self.sequence += 1;
        } else {
            self.unsealed_segment = lane.segment.header.id;
        }
    }

    /// Writes a snapshot of the index once reading the uncovered segments would take longer than reading the snapshot.
    fn write_snapshot_if_due(&mut self, least: u64, pace: Duration) {
        let closed = self.log.segments.closed_segments();
        let news = closed.iter().filter(|segment| !self.snapshot_segments.contains(&segment.header.id));
        let unread: u64 = news.map(|segment| segment.written_len.load(SeqCst)).sum();
        if unread < least || self.log.read_only_reason().is_some() {
            return;
        }
        let version = self.log.version.load(SeqCst);
        // Without the snapshot the next start is slower. It is retried once there is more to cover.
        let _ = snapshot::write_snapshot(&self.log, version, &|| self.yield_to_writer(pace));
        self.snapshot_segments = closed.iter().map(|segment| segment.header.id).collect();
    }
}

/// Unblocks the writer if the compactor ends for any reason.
struct CompactorExitGuard<'a>(&'a SegmentPool);

impl Drop for CompactorExitGuard<'_> {
    fn drop(&mut self) {
        self.0.state.lock().failure.get_or_insert_with(|| "the thread that makes room has ended".into());
        self.0.changed.notify_all();
        self.0.settled.notify_waiters();
    }
}

/// Blocking is fine: the compactor has its own thread.
#[expect(clippy::disallowed_methods, reason = "no task shares this thread")]
fn pause(pace: Duration) {
    thread::sleep(pace);
}
