//! The only thread that writes calls to the log. It takes calls from the queue, decides them in order, writes all
//! changes as one batch, syncs once, and then answers.
//!
//! Invariants: each call is decided against the durable state plus earlier decisions in the same batch, so duplicates
//! within a batch see each other. No caller gets an answer that depends on a batch before the batch is durable. A
//! failed batch leaves no trace in memory. A file whose sync failed is never written or synced again.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, atomic::Ordering::SeqCst, mpsc::Receiver},
    time::Duration,
};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ErrorKind, Fence, Lease, SettleOutcome, Settlement, StoreError, transitions,
};
use tokio::sync::oneshot;

use super::{
    entry::{LogEntry, UnixMicros},
    format::{BATCH_HEADER_LEN, FIRST_BATCH_OFFSET, SECTOR_LEN, pad_to_sector},
    index::IndexSlot,
    lane::{BatchWriteError, LaneTail},
    log::{SharedLog, store_error},
    recovery::RecoveredLog,
    segments::LogPosition,
};

/// Approximate maximum bytes of a batch.
const MAX_BATCH_BYTES: usize = 4 << 20;

pub(super) type WriterReply<T> = oneshot::Sender<Result<T, StoreError>>;

/// One call and the time at which it was made.
pub(super) struct WriterCall {
    pub(super) now: UnixMicros,
    pub(super) request: WriterRequest,
}

pub(super) enum WriterRequest {
    Claim(Arc<ClaimRequest>, WriterReply<ClaimOutcome>),
    Change(Address, EntryChange, WriterReply<SettleOutcome>),
}

pub(super) enum EntryChange {
    Extend(Lease, Duration),
    Settle(Lease, Settlement),
    Resolve(Fence, Settlement),
    Forget(Fence),
    Replace(Fence, Bytes),
}

/// An answer to send once the batch is durable.
enum PendingReply {
    Claim(WriterReply<ClaimOutcome>, ClaimOutcome),
    Settle(WriterReply<SettleOutcome>, SettleOutcome),
}

impl PendingReply {
    /// Sends the answer, or why it is not durable. A caller that has given up gets the result by calling again.
    fn send(self, written: Result<(), StoreError>) {
        match self {
            Self::Claim(reply, answer) => drop(reply.send(written.map(|()| answer))),
            Self::Settle(reply, answer) => drop(reply.send(written.map(|()| answer))),
        }
    }
}

/// An entry of the current batch. Only the latest one of an address counts.
struct StagedEntry {
    entry: Arc<LogEntry>,
    /// Offset within the batch.
    offset: usize,
    length: usize,
    /// The version that the index still has.
    supersedes: Option<u64>,
}

pub(super) struct LogWriter {
    log: Arc<SharedLog>,
    /// Bounded by the number of callers: each waits for its answer before it calls again.
    queue: Receiver<WriterCall>,
    tail: LaneTail,
    /// Sequence number of the next batch.
    sequence: u64,
    /// Version of the next entry.
    version: u64,
    highest_fence: u64,
    now: UnixMicros,
    batch: Vec<u8>,
    /// Offset and length of each entry in the batch.
    entry_spans: Vec<(usize, usize)>,
    staged_entries: HashMap<Address, StagedEntry>,
    pending_replies: Vec<PendingReply>,
}

impl LogWriter {
    /// Writes `last_written` again, which may have been read from a page cache that never reached the disk, and writes
    /// `renewed`, before it accepts calls.
    pub(super) fn new(
        log: Arc<SharedLog>, queue: Receiver<WriterCall>, tail: LaneTail, recovered: RecoveredLog,
    ) -> io::Result<Self> {
        let LogPosition { sequence, clock, highest_fence } = log.position();
        let mut writer = Self {
            log,
            queue,
            tail,
            sequence: sequence + 1,
            version: recovered.version,
            highest_fence,
            now: clock,
            batch: vec![0; BATCH_HEADER_LEN],
            entry_spans: Vec::new(),
            staged_entries: HashMap::new(),
            pending_replies: Vec::new(),
        };
        for entry in recovered.last_written {
            writer.encode_entry(entry.version, Some(entry.version), entry);
        }
        // The bytes stay as they were; in memory these claims are interrupted like all others.
        for staged in writer.staged_entries.values_mut() {
            Arc::make_mut(&mut staged.entry).mark_interrupted(recovered.opened_at);
        }
        writer.write_recovered()?;
        for entry in recovered.renewed {
            writer.version += 1;
            writer.encode_entry(writer.version, Some(entry.version), entry);
            if writer.batch.len() >= MAX_BATCH_BYTES.min(writer.segment_capacity() / 4) {
                writer.write_recovered()?;
            }
        }
        writer.write_recovered()?;
        Ok(writer)
    }

    fn write_recovered(&mut self) -> io::Result<()> {
        match self.append() {
            Ok(()) => self.publish_entries(),
            // The disk is full: the entries stay where they were found, and replays are served.
            Err(BatchWriteError::NotWritten(_)) => {}
            Err(BatchWriteError::NotSynced(error)) => return Err(error),
        }
        self.clear_batch();
        Ok(())
    }

    /// Runs until all senders are dropped.
    pub(super) fn run(mut self) {
        while let Ok(call) = self.queue.recv() {
            self.decide(call);
            while self.batch.len() < MAX_BATCH_BYTES.min(self.segment_capacity() / 4) {
                let Ok(call) = self.queue.try_recv() else { break };
                self.decide(call);
            }
            self.commit();
        }
        if self.log.read_only_reason().is_none() {
            // Record until when the store was open: claims that expire later expire while it is closed.
            self.now = self.now.max(self.log.clock.latest());
            // The next start seals the tail if this fails.
            let _ = self.seal_tail();
        }
    }

    /// Maximum bytes of a batch in a segment.
    fn segment_capacity(&self) -> usize {
        (self.tail.segment.header.size - FIRST_BATCH_OFFSET) as usize - SECTOR_LEN
    }

    fn decide(&mut self, call: WriterCall) {
        self.now = self.now.max(call.now);
        match call.request {
            WriterRequest::Claim(ask, reply) => match self.decide_claim(&ask) {
                Ok(answer) => self.pending_replies.push(PendingReply::Claim(reply, answer)),
                Err(error) => drop(reply.send(Err(error))),
            },
            WriterRequest::Change(at, change, reply) => match self.decide_change(&at, &change) {
                Ok(answer) => self.pending_replies.push(PendingReply::Settle(reply, answer)),
                Err(error) => drop(reply.send(Err(error))),
            },
        }
    }

    fn decide_claim(&mut self, ask: &Arc<ClaimRequest>) -> Result<ClaimOutcome, StoreError> {
        let (current, supersedes) = self.current_entry(&ask.address)?;
        let fence = Fence((self.highest_fence + 1).max(self.now));
        let before = current.as_deref();
        let (answer, granted) = transitions::claim(before.map(|before| &before.entry), ask, fence, self.now);
        if let Some(granted) = granted {
            self.check_claim_space()?;
            self.stage_entry(LogEntry::new(granted, before), supersedes)?;
            self.highest_fence = fence.0;
        }
        Ok(answer)
    }

    fn decide_change(&mut self, at: &Address, change: &EntryChange) -> Result<SettleOutcome, StoreError> {
        let (current, supersedes) = self.current_entry(at)?;
        let before = current.as_deref();
        let (there, now) = (before.map(|before| &before.entry), self.now);
        let (answer, changed) = match change {
            EntryChange::Extend(lease, hold) => transitions::extend(there, lease, *hold, now),
            EntryChange::Settle(lease, end) => transitions::settle(there, lease, end, now),
            EntryChange::Resolve(seen, end) => transitions::resolve(there, *seen, end, now),
            EntryChange::Forget(seen) => transitions::forget(there, *seen, now),
            EntryChange::Replace(seen, record) => transitions::replace_record(there, *seen, record, now),
        };
        if let Some(changed) = changed {
            // A restored holder may have a higher fence than a log that has lost its entry.
            let fence = changed.fence.0;
            self.stage_entry(LogEntry::new(changed, before), supersedes)?;
            self.highest_fence = self.highest_fence.max(fence);
        }
        Ok(answer)
    }

    /// Returns the entry at an address for the next call, and the version that the index has.
    fn current_entry(&self, at: &Address) -> Result<(Option<Arc<LogEntry>>, Option<u64>), StoreError> {
        if let Some(staged) = self.staged_entries.get(at) {
            return Ok((Some(staged.entry.clone()), staged.supersedes));
        }
        let loaded = self.log.load(at)?;
        let version = loaded.as_ref().map(|entry| entry.version);
        Ok((loaded, version))
    }

    /// Reserves the last quarter of the last segment for settlements.
    fn check_claim_space(&self) -> Result<(), StoreError> {
        let (size, taken) = (self.tail.segment.header.size, self.tail.offset + self.batch.len() as u64);
        if taken <= size / 4 * 3 {
            return Ok(());
        }
        self.log.segment_pool.wait_ready().map_err(|why| store_error(ErrorKind::Rejected, why))
    }

    fn stage_entry(&mut self, entry: LogEntry, supersedes: Option<u64>) -> Result<(), StoreError> {
        if let Some(why) = self.log.read_only_reason() {
            return Err(store_error(ErrorKind::Rejected, why));
        }
        let most = (self.segment_capacity() / 2 - BATCH_HEADER_LEN).min(IndexSlot::MAX_LENGTH - 1);
        let length = entry.encoded_length();
        if length > most {
            let why = format!("an entry of {length} bytes is too large; at most {most} fit");
            return Err(store_error(ErrorKind::Rejected, why));
        }
        self.version += 1;
        self.encode_entry(self.version, supersedes, entry);
        Ok(())
    }

    fn encode_entry(&mut self, version: u64, supersedes: Option<u64>, mut entry: LogEntry) {
        entry.version = version;
        let begin = self.batch.len();
        let length = entry.encode(&mut self.batch);
        let at = entry.request.address;
        self.entry_spans.push((begin, length));
        self.staged_entries.insert(at, StagedEntry { entry: Arc::new(entry), offset: begin, length, supersedes });
    }

    /// Makes the batch durable, publishes it, then answers.
    fn commit(&mut self) {
        match self.append() {
            Ok(()) => {
                self.publish_entries();
                self.pending_replies.drain(..).for_each(|waiting| waiting.send(Ok(())));
            }
            Err(BatchWriteError::NotWritten(why)) => self.fail_pending(ErrorKind::Rejected, &why.to_string()),
            Err(BatchWriteError::NotSynced(error)) => {
                self.log.set_read_only(&error);
                self.fail_pending(ErrorKind::Ambiguous, &format!("the disk failed to make it durable: {error}"));
            }
        }
        self.clear_batch();
    }

    fn clear_batch(&mut self) {
        self.batch.truncate(BATCH_HEADER_LEN);
        self.batch.shrink_to(MAX_BATCH_BYTES);
        self.entry_spans.clear();
        self.staged_entries.clear();
    }

    fn fail_pending(&mut self, kind: ErrorKind, why: &str) {
        self.pending_replies.drain(..).for_each(|waiting| waiting.send(Err(store_error(kind, why))));
    }

    /// Writes and syncs the batch. If that fails, tries once more in another segment.
    fn append(&mut self) -> Result<(), BatchWriteError> {
        if self.entry_spans.is_empty() {
            return Ok(());
        }
        if !self.tail.has_room_for(self.batch.len()) {
            let next = self.log.segment_pool.take().map_err(BatchWriteError::not_written)?;
            let is_sealed = self.seal_tail();
            self.tail.continue_in(next, self.sequence, is_sealed);
            self.log.segment_pool.request(false);
        }
        let span = pad_to_sector(self.batch.len()) as u64;
        // Only entries from larger segments of an earlier start can be too large.
        if !self.tail.has_room_for(self.batch.len()) {
            let why = format!("a batch of {span} bytes does not fit into a segment");
            return Err(BatchWriteError::not_written(why));
        }
        if let Err(first) = self.append_once() {
            // Without another segment, an incomplete batch counts as absent: the next one overwrites it.
            let Ok(next) = self.log.segment_pool.take() else { return Err(first) };
            self.tail.segment.mark_spoiled(self.tail.offset);
            self.tail.continue_in(next, self.sequence, false);
            self.append_once().map_err(|second| match (first, second) {
                (BatchWriteError::NotSynced(error), BatchWriteError::NotWritten(_))
                | (_, BatchWriteError::NotSynced(error)) => BatchWriteError::NotSynced(error),
                (BatchWriteError::NotWritten(_), refused) => refused,
            })?;
        }
        self.tail.offset += span;
        self.sequence += 1;
        self.log.sequence.store(self.sequence - 1, SeqCst);
        self.log.highest_fence.store(self.highest_fence, SeqCst);
        self.log.version.store(self.version, SeqCst);
        if self.tail.offset > self.tail.segment.header.size / 8 {
            self.log.segment_pool.request(self.tail.offset * 2 > self.tail.segment.header.size);
        }
        Ok(())
    }

    fn append_once(&mut self) -> Result<(), BatchWriteError> {
        let (at, spans) = (self.position(), self.entry_spans.iter().copied());
        self.tail.write_batch(&mut self.batch, spans, at, self.log.is_synced)
    }

    fn position(&self) -> LogPosition {
        LogPosition { sequence: self.sequence, clock: self.now, highest_fence: self.highest_fence }
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
    fn publish_entries(&mut self) {
        for staged in self.staged_entries.values() {
            let offset = self.tail.offset - pad_to_sector(self.batch.len()) as u64 + staged.offset as u64;
            let slot = IndexSlot::new(&staged.entry, self.tail.segment.header.id, offset as u32, staged.length);
            self.log.segments.add_slot(&slot);
            if let Some(before) = self.log.index.put(&staged.entry, slot, staged.supersedes) {
                self.log.segments.remove_slot(&before);
            }
        }
    }
}
