//! The only thread that writes calls to the log. It takes the batch that callers have staged, writes it, syncs once,
//! makes its entries visible, and wakes the callers. With many concurrent callers, it waits a moment for more of them: a
//! write, a sync and the wake-ups cost the same for a large batch as for a small one.
//!
//! Invariants: no caller gets an answer that depends on a batch before the batch is durable. A failed batch leaves no
//! trace in memory. A file whose sync failed is never written or synced again.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::{Duration, Instant},
};

use ibid::store::ErrorKind;

use super::{
    completion::{BatchCompletion, BatchResult},
    entry::{UnixMicros, micros},
    format::pad_to_sector,
    index::IndexSlot,
    lane::{BatchWriteError, LaneTail},
    log::SharedLog,
    recovery::RecoveredLog,
    segments::LogPosition,
    staging::{BatchTiming, StagedBatch, Staging, TailSpace, WriterTask},
};

/// How long a caller that is woken for its thread may leave the others of that thread asleep.
const MAX_WAKE_DELAY: Duration = Duration::from_millis(20);
/// Maximum time that the writer waits for further callers before it writes a batch.
const MAX_GATHER_TIME: Duration = Duration::from_millis(1);

pub(super) struct LogWriter {
    log: Arc<SharedLog>,
    tail: LaneTail,
    /// Sequence number of the next batch.
    sequence: u64,
    highest_fence: u64,
    now: UnixMicros,
    /// End of the last batch's write and sync.
    written_at: Instant,
    /// Batches whose callers are not all awake yet, and since when.
    undelivered: VecDeque<(Instant, Arc<BatchCompletion>)>,
}

impl LogWriter {
    /// Writes `last_written` again, which may have been read from a page cache that never reached the disk, and writes
    /// `renewed`, before it accepts calls.
    pub(super) fn new(log: Arc<SharedLog>, tail: LaneTail, recovered: RecoveredLog) -> io::Result<Self> {
        let so_far @ LogPosition { sequence, clock, highest_fence } = log.position();
        let (written_at, undelivered) = (Instant::now(), VecDeque::new());
        let mut writer = Self { log, tail, sequence: sequence + 1, highest_fence, now: clock, written_at, undelivered };
        let mut version = recovered.version;
        let mut batch = StagedBatch { clock, highest_fence, ..StagedBatch::default() };
        for entry in recovered.last_written {
            batch.push(entry.version, Some(entry.version), entry);
        }
        // The bytes stay as they were; in memory these claims are interrupted like all others.
        for staged in batch.entries_mut().values_mut() {
            Arc::make_mut(&mut staged.entry).mark_interrupted(recovered.opened_at);
        }
        writer.write_recovered(&mut batch, version)?;
        for entry in recovered.renewed {
            version += 1;
            batch.push(version, Some(entry.version), entry);
            if batch.is_full(writer.tail_space()) {
                writer.write_recovered(&mut batch, version)?;
            }
        }
        writer.write_recovered(&mut batch, version)?;
        writer.log.staging.open(so_far, version, writer.tail_space());
        Ok(writer)
    }

    fn write_recovered(&mut self, batch: &mut StagedBatch, version: u64) -> io::Result<()> {
        batch.version = version;
        match self.append(batch) {
            Ok(()) => self.publish_entries(batch),
            // The disk is full: the entries stay where they were found, and replays are served.
            Err(BatchWriteError::NotWritten(_)) => {}
            Err(BatchWriteError::NotSynced(error)) => return Err(error),
        }
        batch.clear();
        Ok(())
    }

    /// Runs until the staging is closed.
    pub(super) fn run(mut self) {
        let log = self.log.clone();
        let _exit = WriterExitGuard(&log.staging);
        let mut spare = None;
        let mut last = BatchTiming::default();
        loop {
            self.wake_left_behind();
            let limit = (!self.undelivered.is_empty()).then_some(MAX_WAKE_DELAY);
            match log.staging.take(&mut spare, limit, last) {
                WriterTask::Write(mut batch) => {
                    let (began, began_at) = (Instant::now(), log.clock.latest());
                    let result = self.commit(&mut batch);
                    log.staging.retire(self.tail_space(), began_at + micros(began.elapsed()));
                    batch.completion.finish(result);
                    let ended = Instant::now();
                    // As long as the last batch took: waiting at most doubles the time of a call.
                    let gather_limit = (ended - began).min(MAX_GATHER_TIME);
                    last = BatchTiming { write_time: self.written_at - began, gather_limit };
                    self.undelivered.push_back((ended, batch.completion.clone()));
                    batch.clear();
                    spare = Some(batch);
                }
                WriterTask::Idle => {}
                WriterTask::Exit => break,
            }
        }
        if log.read_only_reason().is_none() {
            // Record until when the store was open: claims that expire later expire while it is closed.
            self.now = self.now.max(log.clock.latest());
            // The next start seals the tail if this fails.
            let _ = self.seal_tail();
        }
    }

    /// Wakes callers whose thread is awake and busy with something else.
    fn wake_left_behind(&mut self) {
        while let Some((since, completion)) = self.undelivered.front() {
            if !completion.is_delivered() {
                if since.elapsed() < MAX_WAKE_DELAY {
                    break;
                }
                completion.wake_all();
            }
            self.undelivered.pop_front();
        }
    }

    /// Makes the batch durable and publishes it.
    fn commit(&mut self, batch: &mut StagedBatch) -> BatchResult {
        self.written_at = Instant::now();
        if let Some(why) = self.log.read_only_reason() {
            return Err((ErrorKind::Rejected, why.into()));
        }
        let appended = self.append(batch);
        self.written_at = Instant::now();
        match appended {
            Ok(()) => {
                self.publish_entries(batch);
                Ok(())
            }
            Err(BatchWriteError::NotWritten(why)) => Err((ErrorKind::Rejected, why.to_string().into())),
            Err(BatchWriteError::NotSynced(error)) => {
                self.log.set_read_only(&error);
                Err((ErrorKind::Ambiguous, format!("the disk failed to make it durable: {error}").into()))
            }
        }
    }

    /// Writes and syncs the batch. If that fails, tries once more in another segment.
    fn append(&mut self, batch: &mut StagedBatch) -> Result<(), BatchWriteError> {
        if batch.spans.is_empty() {
            return Ok(());
        }
        (self.now, self.highest_fence) = (batch.clock, batch.highest_fence);
        let length = batch.bytes.len();
        if !self.tail.has_room_for(length) {
            let next = self.log.segment_pool.take().map_err(BatchWriteError::not_written)?;
            let is_sealed = self.seal_tail();
            self.tail.continue_in(next, self.sequence, is_sealed);
            self.log.staging.set_tail(TailSpace { offset: self.tail.offset + length as u64, ..self.tail_space() });
            self.log.segment_pool.request(false);
        }
        let span = pad_to_sector(length) as u64;
        // Only entries from larger segments of an earlier start can be too large.
        if !self.tail.has_room_for(length) {
            let why = format!("a batch of {span} bytes does not fit into a segment");
            return Err(BatchWriteError::not_written(why));
        }
        if let Err(first) = self.append_once(batch) {
            // Without another segment, an incomplete batch counts as absent: the next one overwrites it.
            let Ok(next) = self.log.segment_pool.take() else { return Err(first) };
            self.tail.segment.mark_spoiled(self.tail.offset);
            self.tail.continue_in(next, self.sequence, false);
            self.append_once(batch).map_err(|second| match (first, second) {
                (BatchWriteError::NotSynced(error), BatchWriteError::NotWritten(_))
                | (_, BatchWriteError::NotSynced(error)) => BatchWriteError::NotSynced(error),
                (BatchWriteError::NotWritten(_), refused) => refused,
            })?;
        }
        self.tail.offset += span;
        self.sequence += 1;
        self.log.sequence.store(self.sequence - 1, SeqCst);
        self.log.highest_fence.store(self.highest_fence, SeqCst);
        self.log.version.store(batch.version, SeqCst);
        if self.tail.offset > self.tail.segment.header.size / 8 {
            self.log.segment_pool.request(self.tail.offset * 2 > self.tail.segment.header.size);
        }
        Ok(())
    }

    fn append_once(&mut self, batch: &mut StagedBatch) -> Result<(), BatchWriteError> {
        let spans = batch.spans.iter().copied();
        self.tail.write_batch(&mut batch.bytes, spans, self.position(), self.log.is_synced)
    }

    fn position(&self) -> LogPosition {
        LogPosition { sequence: self.sequence, clock: self.now, highest_fence: self.highest_fence }
    }

    fn tail_space(&self) -> TailSpace {
        TailSpace { segment_size: self.tail.segment.header.size, offset: self.tail.offset }
    }

    /// Seals the segment. If that fails, the next segment proves where this one ends.
    #[must_use]
    fn seal_tail(&mut self) -> bool {
        let sealed = self.tail.seal(self.position(), self.log.is_synced);
        if sealed && !self.tail.is_sealed {
            self.sequence += 1;
            self.log.sequence.store(self.sequence - 1, SeqCst);
        }
        sealed
    }

    /// Makes the durable entries visible in the index.
    fn publish_entries(&self, batch: &StagedBatch) {
        let segment = &self.tail.segment;
        let begin = self.tail.offset - pad_to_sector(batch.bytes.len()) as u64;
        for staged in batch.entries.values() {
            let offset = begin + staged.offset as u64;
            let slot = IndexSlot::new(&staged.entry, segment.header.id, offset as u32, staged.length);
            segment.add_slot(&slot);
            if let Some(before) = self.log.index.put(&staged.entry, slot, staged.supersedes) {
                self.log.segments.remove_slot(&before);
            }
        }
    }
}

/// Answers all callers if the writer ends for any reason.
struct WriterExitGuard<'a>(&'a Staging);

impl Drop for WriterExitGuard<'_> {
    fn drop(&mut self) {
        self.0.fail_all(&Err((ErrorKind::Ambiguous, "the store ended before it answered".into())));
    }
}
