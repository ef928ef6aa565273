//! The next batch. Callers decide their calls and encode the changes into it on their own threads, while the writer
//! makes the previous batch durable.
//!
//! Invariants: each call is decided against the durable state plus earlier decisions in the same batch, so duplicates
//! within a batch see each other. A call never depends on the batch that is being written, which may still fail: it
//! waits for that batch first. Nothing under the lock waits for the disk.

use std::{
    collections::HashMap,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use ibid::store::{
    Address, AddressHashBuilder, ErrorKind, Fence, StoreError,
    transitions::{EntryDecision, StoredEntry},
};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{
    completion::{BatchCompletion, BatchResult},
    entry::{LogEntry, UnixMicros},
    format::{BATCH_HEADER_LEN, FIRST_BATCH_OFFSET, SECTOR_LEN, pad_to_sector},
    index::{IndexLookup, IndexSlot},
    log::{LoadedEntry, SharedLog, store_error},
    segments::LogPosition,
};

/// Approximate maximum bytes of a batch.
const MAX_BATCH_BYTES: usize = 4 << 20;
/// Number of concurrent callers from which on the writer waits for more of them before it writes.
const MIN_GATHERED_CALLERS: usize = 8;
/// Maximum of [`CallerReturns::round_us`], so that a pause of the callers is soon forgotten.
const MAX_ROUND_US: u64 = 10_000;

#[derive(Debug, Default)]
pub(super) struct Staging {
    state: Mutex<StagingState>,
    /// Notified when the writer has something to do.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct StagingState {
    batch: StagedBatch,
    /// The batch that is being written.
    in_flight: Option<InFlightBatch>,
    clock: UnixMicros,
    highest_fence: u64,
    /// Version of the last entry.
    version: u64,
    tail: TailSpace,
    /// Number of recently concurrent callers: the peak, which decays with each batch.
    callers: usize,
    returns: CallerReturns,
    /// Number of staged entries at which the writer is notified, if it waits.
    notify_at: Option<usize>,
    is_closed: bool,
}

/// How soon callers that were answered make their next call.
#[derive(Debug, Clone, Copy, Default)]
struct CallerReturns {
    answered_at: UnixMicros,
    last_call_at: UnixMicros,
    /// Number of calls since the last batch was answered.
    calls: usize,
    /// Smoothed time in microseconds in which as many calls arrive as there are callers.
    round_us: u64,
}

/// The segment that the staged batch will be written to, if it fits.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TailSpace {
    pub(super) segment_size: u64,
    /// Position of the next batch.
    pub(super) offset: u64,
}

#[derive(Debug)]
struct InFlightBatch {
    entries: Arc<StagedEntries>,
    completion: Arc<BatchCompletion>,
}

pub(super) type StagedEntries = HashMap<Address, StagedEntry, AddressHashBuilder>;

/// An entry of a batch. Only the latest one of an address counts.
#[derive(Debug)]
pub(super) struct StagedEntry {
    pub(super) entry: Arc<LogEntry>,
    /// Offset within the batch.
    pub(super) offset: usize,
    pub(super) length: usize,
    /// The version that the index still has.
    pub(super) supersedes: Option<u64>,
}

#[derive(Debug)]
pub(super) struct StagedBatch {
    /// Space for the header, then the entries.
    pub(super) bytes: Vec<u8>,
    /// Offset and length of each entry.
    pub(super) spans: Vec<(usize, usize)>,
    pub(super) entries: Arc<StagedEntries>,
    pub(super) completion: Arc<BatchCompletion>,
    pub(super) clock: UnixMicros,
    pub(super) highest_fence: u64,
    pub(super) version: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallKind {
    /// A claim is refused if there is no room to settle it.
    Claim,
    Change,
}

/// What became of a call.
pub(super) enum Submission<T> {
    /// The outcome follows from durable data.
    Decided(T),
    /// The outcome counts once the batch is durable.
    Staged(T, Arc<BatchCompletion>),
    /// The call can be decided after this batch.
    WaitForBatch(Arc<BatchCompletion>),
    /// The call can be decided once the next segment is prepared.
    WaitForSegment,
    /// The entry must be loaded first.
    LoadEntry,
}

/// How long the last batch took, and what that means for the next.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct BatchTiming {
    /// Time of the write and the sync.
    pub(super) write_time: Duration,
    /// Maximum time that the writer waits for further callers.
    pub(super) gather_limit: Duration,
}

/// What the writer does next.
pub(super) enum WriterTask {
    Write(StagedBatch),
    /// Nothing was staged in the given time.
    Idle,
    Exit,
}

impl SharedLog {
    /// Decides a call. If it changes the entry, the change becomes part of the next batch. `loaded` is the entry at the
    /// address if an earlier attempt had to load it.
    pub(super) fn submit<T>(
        &self, at: &Address, call: CallKind, loaded: Option<&LoadedEntry>,
        decide: impl Fn(Option<&StoredEntry>, Fence, UnixMicros) -> EntryDecision<T>,
    ) -> Result<Submission<T>, StoreError> {
        let now = self.clock.now();
        let mut state = self.staging.state.lock();
        if state.is_closed {
            return Err(store_error(ErrorKind::NotApplied, "the store is closed"));
        }
        state.clock = state.clock.max(now);
        let staged = state.batch.entries.get(at).map(|staged| (staged.entry.clone(), staged.supersedes));
        let is_staged = staged.is_some();
        let (current, supersedes) = match staged {
            Some((entry, supersedes)) => (Some(entry), supersedes),
            None if let Some(batch) = state.in_flight.as_ref().filter(|batch| batch.entries.contains_key(at)) => {
                return Ok(Submission::WaitForBatch(batch.completion.clone()));
            }
            None => match (self.index.find(at), loaded) {
                (IndexLookup::Running(entry), _) => (Some(entry.clone()), Some(entry.version)),
                (IndexLookup::Slots(slots), _) if slots.is_empty() => (None, None),
                (IndexLookup::Slots(slots), Some(loaded)) if loaded.is_current(&slots) => {
                    (loaded.entry.clone(), loaded.entry.as_ref().map(|entry| entry.version))
                }
                _ => return Ok(Submission::LoadEntry),
            },
        };
        let before = current.as_deref();
        let fence = Fence((state.highest_fence + 1).max(state.clock));
        let (outcome, changed) = decide(before.map(|before| &before.entry), fence, state.clock);
        let Some(changed) = changed else {
            let completion = is_staged.then(|| state.batch.completion.clone());
            return Ok(match completion {
                Some(completion) => Submission::Staged(outcome, completion),
                None => Submission::Decided(outcome),
            });
        };
        if let Some(why) = self.read_only_reason() {
            return Err(store_error(ErrorKind::Rejected, why));
        }
        if call == CallKind::Claim && !state.tail.has_room_for_claims(state.batch.bytes.len()) {
            match self.segment_pool.poll_ready() {
                Some(ready) => ready.map_err(|why| store_error(ErrorKind::Rejected, why))?,
                // The batch that is being written may move on to a fresh segment.
                None => return Ok(state.wait_for_in_flight().unwrap_or(Submission::WaitForSegment)),
            }
        }
        if state.batch.is_full(state.tail) {
            return Ok(Submission::WaitForBatch(state.batch.completion.clone()));
        }
        // A restored holder may have a higher fence than a log that has lost its entry.
        let fence = changed.fence.0;
        state.stage(LogEntry::new(changed, before), supersedes)?;
        state.highest_fence = state.highest_fence.max(fence);
        let completion = state.batch.completion.clone();
        if state.should_notify() {
            drop(state);
            self.staging.changed.notify_one();
        }
        Ok(Submission::Staged(outcome, completion))
    }
}

impl Staging {
    /// Begins with the state of a recovered log.
    pub(super) fn open(&self, so_far: LogPosition, version: u64, tail: TailSpace) {
        let mut state = self.state.lock();
        (state.clock, state.highest_fence, state.version, state.tail) =
            (so_far.clock, so_far.highest_fence, version, tail);
    }

    /// Returns the next batch to write, once there is one, and stages further calls in `spare`. Waits for at most
    /// `limit` for the first call, then for at most the gather limit for more of them.
    pub(super) fn take(
        &self, spare: &mut Option<StagedBatch>, limit: Option<Duration>, last: BatchTiming,
    ) -> WriterTask {
        let mut state = self.state.lock();
        let deadline = limit.map(|limit| Instant::now() + limit);
        while state.batch.spans.is_empty() {
            if state.is_closed {
                return WriterTask::Exit;
            }
            if !self.wait_for_entries(&mut state, 1, deadline) {
                return WriterTask::Idle;
            }
        }
        let wanted = state.wanted_calls(last.write_time);
        if state.batch.spans.len() < wanted && !last.gather_limit.is_zero() {
            let deadline = Some(Instant::now() + last.gather_limit);
            while state.batch.spans.len() < wanted && !state.is_closed && !state.batch.is_full(state.tail) {
                if !self.wait_for_entries(&mut state, wanted, deadline) {
                    break;
                }
            }
        }
        let next = spare.take().unwrap_or_default();
        let mut batch = mem::replace(&mut state.batch, next);
        (batch.clock, batch.highest_fence, batch.version) = (state.clock, state.highest_fence, state.version);
        state.tail.offset += pad_to_sector(batch.bytes.len()) as u64;
        let (entries, completion) = (batch.entries.clone(), batch.completion.clone());
        state.in_flight = Some(InFlightBatch { entries, completion });
        WriterTask::Write(batch)
    }

    /// Waits until so many entries are staged, or for another notification. Returns `false` at the deadline.
    fn wait_for_entries(
        &self, state: &mut MutexGuard<'_, StagingState>, number: usize, until: Option<Instant>,
    ) -> bool {
        state.notify_at = Some(number);
        let in_time = match until {
            Some(until) => !self.changed.wait_until(state, until).timed_out(),
            None => {
                self.changed.wait(state);
                true
            }
        };
        state.notify_at = None;
        in_time
    }

    /// Ends the batch that was taken: its entries are in the index, or its callers will be refused. They are answered
    /// now.
    pub(super) fn retire(&self, tail: TailSpace, now: UnixMicros) {
        let mut state = self.state.lock();
        let callers = state.batch.spans.len() + state.in_flight.as_ref().map_or(0, |batch| batch.entries.len());
        state.callers = callers.max(state.callers - state.callers.div_ceil(8));
        let callers = state.callers;
        state.returns.on_answers(callers, now);
        (state.in_flight, state.tail) = (None, tail);
    }

    pub(super) fn set_tail(&self, tail: TailSpace) {
        self.state.lock().tail = tail;
    }

    /// Refuses further calls. The writer ends once it has written what is staged.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_one();
    }

    /// Refuses all calls that are not answered yet.
    pub(super) fn fail_all(&self, result: &BatchResult) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let in_flight = state.in_flight.take().map(|batch| batch.completion);
        let staged = mem::take(&mut state.batch).completion;
        drop(state);
        for completion in in_flight.into_iter().chain([staged]) {
            completion.finish(result.clone());
            completion.wake_all();
        }
    }
}

impl StagingState {
    fn stage(&mut self, entry: LogEntry, supersedes: Option<u64>) -> Result<(), StoreError> {
        let most = (self.tail.capacity() / 2 - BATCH_HEADER_LEN).min(IndexSlot::MAX_LENGTH - 1);
        let length = entry.encoded_length();
        if length > most {
            let why = format!("an entry of {length} bytes is too large; at most {most} fit");
            return Err(store_error(ErrorKind::Rejected, why));
        }
        self.version += 1;
        self.returns.on_call(self.clock);
        self.batch.push(self.version, supersedes, entry);
        Ok(())
    }

    /// Number of staged calls that is worth waiting for.
    ///
    /// If the disk takes longer than callers take to come back, one batch with all of them gets the most out of it.
    /// Otherwise two batches in turn do: while one is written, the callers of the other use the processor. Two thirds
    /// of the callers may then be busy elsewhere.
    fn wanted_calls(&self, write_time: Duration) -> usize {
        match self.callers {
            ..MIN_GATHERED_CALLERS => 1,
            callers if Duration::from_micros(self.returns.round_us) < write_time => callers,
            callers => callers.div_ceil(3),
        }
    }

    /// Whether the writer waits for what is staged now.
    fn should_notify(&mut self) -> bool {
        let (staged, is_full) = (self.batch.spans.len(), self.batch.is_full(self.tail));
        self.notify_at.take_if(|number| staged >= *number || is_full).is_some()
    }

    fn wait_for_in_flight<T>(&self) -> Option<Submission<T>> {
        self.in_flight.as_ref().map(|batch| Submission::WaitForBatch(batch.completion.clone()))
    }
}

impl CallerReturns {
    fn on_call(&mut self, now: UnixMicros) {
        self.calls += 1;
        self.last_call_at = now;
    }

    fn on_answers(&mut self, callers: usize, now: UnixMicros) {
        if self.calls > 0 {
            let took = self.last_call_at.saturating_sub(self.answered_at).min(MAX_ROUND_US);
            let round_us = (took * callers as u64 / self.calls as u64).min(MAX_ROUND_US);
            self.round_us = (self.round_us * 3 + round_us) / 4;
        }
        (self.answered_at, self.calls) = (now, 0);
    }
}

impl TailSpace {
    /// Maximum bytes of a batch in a segment.
    pub(super) fn capacity(&self) -> usize {
        (self.segment_size - FIRST_BATCH_OFFSET) as usize - SECTOR_LEN
    }

    /// The last quarter of the last segment is reserved for settlements.
    fn has_room_for_claims(&self, batch_len: usize) -> bool {
        self.offset + batch_len as u64 <= self.segment_size / 4 * 3
    }
}

impl Default for StagedBatch {
    fn default() -> Self {
        Self {
            bytes: vec![0; BATCH_HEADER_LEN],
            spans: Vec::new(),
            entries: Arc::default(),
            completion: Arc::default(),
            clock: 0,
            highest_fence: 0,
            version: 0,
        }
    }
}

impl StagedBatch {
    pub(super) fn push(&mut self, version: u64, supersedes: Option<u64>, mut entry: LogEntry) {
        entry.version = version;
        let offset = self.bytes.len();
        let length = entry.encode(&mut self.bytes);
        let at = entry.request.address;
        self.spans.push((offset, length));
        let staged = StagedEntry { entry: Arc::new(entry), offset, length, supersedes };
        self.entries_mut().insert(at, staged);
    }

    /// The map is shared only while the batch is being written.
    pub(super) fn entries_mut(&mut self) -> &mut StagedEntries {
        Arc::get_mut(&mut self.entries).expect("nobody reads the entries of a batch that is still staged")
    }

    /// Removes all entries, but keeps their memory.
    pub(super) fn clear(&mut self) {
        self.completion = Arc::default();
        self.bytes.truncate(BATCH_HEADER_LEN);
        self.bytes.shrink_to(MAX_BATCH_BYTES);
        self.spans.clear();
        self.entries_mut().clear();
    }

    pub(super) fn is_full(&self, tail: TailSpace) -> bool {
        self.bytes.len() >= MAX_BATCH_BYTES.min(tail.capacity() / 4)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use bytes::Bytes;
    use ibid::store::{ClaimRequest, ClaimToken, Fingerprint, Tags, transitions};

    use super::*;

    /// Longer than any test may take: the writer must not wait for it.
    const FOREVER: Duration = Duration::from_secs(600);

    fn staging() -> Staging {
        let staging = Staging::default();
        staging.set_tail(TailSpace { segment_size: 1 << 20, offset: FIRST_BATCH_OFFSET });
        staging
    }

    fn stage(staging: &Staging, nth: usize) {
        let ask = ClaimRequest {
            address: Address([nth as u8; 32]),
            token: ClaimToken([1; 16]),
            fingerprint: Fingerprint::NONE,
            tags: Tags::new("", "", "", ""),
            label: Bytes::new(),
            lease: Duration::from_secs(1),
            ttl: Duration::from_secs(1),
            take_over: None,
        };
        let (_, claimed) = transitions::claim(None, &Arc::new(ask), Fence(1), 1);
        let mut state = staging.state.lock();
        state.stage(LogEntry::new(claimed.unwrap(), None), None).unwrap();
        if state.should_notify() {
            staging.changed.notify_one();
        }
    }

    fn take(staging: &Staging) -> StagedBatch {
        let last = BatchTiming { write_time: FOREVER, gather_limit: FOREVER };
        match staging.take(&mut None, None, last) {
            WriterTask::Write(batch) => batch,
            WriterTask::Idle | WriterTask::Exit => panic!("something is staged"),
        }
    }

    #[test]
    fn the_writer_waits_for_as_many_callers_as_there_were() {
        let staging = staging();
        (0..MIN_GATHERED_CALLERS - 3).for_each(|nth| stage(&staging, nth));
        assert_eq!(take(&staging).spans.len(), MIN_GATHERED_CALLERS - 3, "before, there was nobody");
        (0..3).for_each(|nth| stage(&staging, 100 + nth));
        let tail = staging.state.lock().tail;
        staging.retire(tail, 1);
        let batch = thread::scope(|scope| {
            let writer = scope.spawn(|| take(&staging));
            (3..MIN_GATHERED_CALLERS).for_each(|nth| stage(&staging, 100 + nth));
            writer.join().unwrap()
        });
        assert_eq!(batch.spans.len(), MIN_GATHERED_CALLERS);
    }

    /// Answers at time 0, and then as many calls as there are callers, the last one `after` microseconds later.
    fn wanted_after(callers: usize, after: UnixMicros, write_time: Duration) -> usize {
        let mut state = StagingState { callers, ..StagingState::default() };
        for _ in 0..20 {
            (1..=callers as u64).for_each(|nth| state.returns.on_call(after * nth / callers as u64));
            state.returns.on_answers(callers, 0);
        }
        state.wanted_calls(write_time)
    }

    #[test]
    fn a_slow_disk_gets_one_batch_of_all_callers_and_a_fast_one_smaller_batches_in_turn() {
        let disk = Duration::from_micros(300);
        assert_eq!(wanted_after(64, 200, disk), 64);
        assert_eq!(wanted_after(64, 400, disk), 22);
        assert_eq!(wanted_after(MIN_GATHERED_CALLERS - 1, 400, disk), 1);
    }

    #[test]
    fn the_writer_waits_neither_for_few_callers_nor_when_the_store_closes() {
        let staging = staging();
        staging.state.lock().callers = MIN_GATHERED_CALLERS - 1;
        stage(&staging, 0);
        assert_eq!(take(&staging).spans.len(), 1);
        staging.state.lock().callers = MIN_GATHERED_CALLERS;
        stage(&staging, 1);
        thread::scope(|scope| {
            let writer = scope.spawn(|| take(&staging));
            staging.close();
            assert_eq!(writer.join().unwrap().spans.len(), 1);
        });
    }
}
