//! The one thread that changes the log: it takes what callers ask, decides in that order, writes all of it as one
//! batch, syncs once, and only then answers.
//!
//! Invariants: each call is decided against what is durable plus what the same batch has decided before, so that
//! duplicates within a batch see each other. Nobody hears an answer that depends on a batch before it is durable. A
//! batch that failed leaves no trace in memory. A file whose sync failed is never written or synced again.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, atomic::Ordering::SeqCst, mpsc::Receiver},
    time::Duration,
};

use bytes::Bytes;
use ibid::store::{Address, Ask, Claim, End, ErrorKind, Fence, Held, Lease, StoreError};
use tokio::sync::oneshot;

use super::{
    decide,
    entry::{Entry, Micros},
    format::{BATCH_HEADER, BatchHeader, FIRST_BATCH, MAIN, SECTOR, padded, salted},
    index::Slot,
    log::{Log, failed},
    segments::{Sealed, Segment, SoFar, seal},
};

/// No more is put into a batch than fits, roughly.
const BATCH: usize = 4 << 20;

pub(super) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// One call, with the time at which it was made.
pub(super) struct Call {
    pub(super) now: Micros,
    pub(super) what: What,
}

pub(super) enum What {
    Claim(Arc<Ask>, Reply<Claim>),
    Change(Address, Change, Reply<Held>),
}

pub(super) enum Change {
    Extend(Lease, Duration),
    Settle(Lease, End),
    Resolve(Fence, End),
    Forget(Fence),
    Replace(Fence, Bytes),
}

/// An answer that waits for its batch.
enum Waiting {
    Claim(Reply<Claim>, Claim),
    Held(Reply<Held>, Held),
}

/// An entry of the batch on its way: the latest one of its address counts.
struct Staged {
    entry: Arc<Entry>,
    /// Within the batch.
    begin: usize,
    length: usize,
    /// The version that the index still has.
    supersedes: Option<u64>,
}

/// A segment that is written to, and where the next batch goes.
pub(super) struct Tail {
    segment: Arc<Segment>,
    at: u64,
    /// The sequence number of its first batch.
    first: u64,
    sealed: bool,
}

impl Tail {
    /// Of which `first` will be the first batch.
    pub(super) fn new(segment: Arc<Segment>, first: u64) -> Self {
        Self { segment, at: FIRST_BATCH, first, sealed: false }
    }

    /// Of a store that has no room for another segment: nothing fits.
    pub(super) fn full(segment: Arc<Segment>) -> Self {
        let at = segment.header.size;
        Self { segment, at, first: 0, sealed: true }
    }
}

/// What a start found, as far as the writer goes on from it.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) opened: Micros,
    /// The highest that was given to an entry.
    pub(super) version: u64,
    /// What was written last, in each lane, as far as it still counts.
    pub(super) last: Vec<Entry>,
    /// Claims that get a new retention.
    pub(super) renewed: Vec<Entry>,
}

/// Why a batch is not in the log.
enum Failure {
    /// Certainly not.
    Refused(String),
    /// It may be.
    Unsynced(io::Error),
}

pub(super) struct Writer {
    log: Arc<Log>,
    /// As long as there are callers: each waits for its answer before it calls again.
    queue: Receiver<Call>,
    tail: Tail,
    /// The next batch's.
    sequence: u64,
    /// The next entry's.
    version: u64,
    fences: u64,
    now: Micros,
    batch: Vec<u8>,
    /// Of all entries in the batch: where each begins, and its length.
    spans: Vec<(usize, usize)>,
    staged: HashMap<Address, Staged>,
    waiting: Vec<Waiting>,
}

impl Writer {
    /// Rewrites `last`, which may have been read from a cache that never reached the disk, and writes what was `renewed`,
    /// before it takes any call.
    pub(super) fn new(log: Arc<Log>, queue: Receiver<Call>, tail: Tail, found: Found) -> io::Result<Self> {
        let Found { opened, version, last, renewed } = found;
        let (sequence, fences) = (log.sequence.load(SeqCst) + 1, log.fences.load(SeqCst));
        let now = log.clock.latest();
        let mut writer = Self {
            log,
            queue,
            tail,
            sequence,
            version,
            fences,
            now,
            batch: vec![0; BATCH_HEADER],
            spans: Vec::new(),
            staged: HashMap::new(),
            waiting: Vec::new(),
        };
        for entry in last {
            writer.write(entry.version, Some(entry.version), entry);
        }
        // Its bytes stay as they were; who ran is as unknown as all others.
        for staged in writer.staged.values_mut() {
            Arc::make_mut(&mut staged.entry).interrupt(opened);
        }
        writer.rewrite()?;
        for entry in renewed {
            writer.version += 1;
            writer.write(writer.version, Some(entry.version), entry);
            if writer.batch.len() >= BATCH.min(writer.capacity() / 4) {
                writer.rewrite()?;
            }
        }
        writer.rewrite()?;
        Ok(writer)
    }

    /// Writes the batch before the first call.
    fn rewrite(&mut self) -> io::Result<()> {
        match self.append() {
            Ok(()) => self.merge(),
            // A full disk: it stays where it was found, and replays are served.
            Err(Failure::Refused(_)) => {}
            Err(Failure::Unsynced(error)) => return Err(error),
        }
        self.clear();
        Ok(())
    }

    /// Until nobody can call any more.
    pub(super) fn run(mut self) {
        while let Ok(call) = self.queue.recv() {
            self.admit(call);
            while self.batch.len() < BATCH.min(self.capacity() / 4) {
                let Ok(call) = self.queue.try_recv() else { break };
                self.admit(call);
            }
            self.commit();
        }
        if self.log.read_only().is_none() {
            // Until when it was open: what dies later has died while nobody could ask for it.
            self.now = self.now.max(self.log.clock.latest());
            // The next start seals what is not.
            let _ = self.seal();
        }
    }

    /// What fits into a segment.
    fn capacity(&self) -> usize {
        (self.tail.segment.header.size - FIRST_BATCH) as usize - SECTOR
    }

    fn admit(&mut self, call: Call) {
        self.now = self.now.max(call.now);
        match call.what {
            What::Claim(ask, reply) => match self.decide_claim(&ask) {
                Ok(answer) => self.waiting.push(Waiting::Claim(reply, answer)),
                Err(error) => drop(reply.send(Err(error))),
            },
            What::Change(at, change, reply) => match self.decide_change(&at, &change) {
                Ok(answer) => self.waiting.push(Waiting::Held(reply, answer)),
                Err(error) => drop(reply.send(Err(error))),
            },
        }
    }

    fn decide_claim(&mut self, ask: &Arc<Ask>) -> Result<Claim, StoreError> {
        let (current, supersedes) = self.current(&ask.address)?;
        let fence = Fence((self.fences + 1).max(self.now));
        let (answer, granted) = decide::claim(current.as_deref(), ask, fence, self.now);
        if let Some(granted) = granted {
            self.may_claim()?;
            self.stage(granted, supersedes)?;
            self.fences = fence.0;
        }
        Ok(answer)
    }

    fn decide_change(&mut self, at: &Address, change: &Change) -> Result<Held, StoreError> {
        let (current, supersedes) = self.current(at)?;
        let (there, now) = (current.as_deref(), self.now);
        let (answer, changed) = match change {
            Change::Extend(lease, hold) => decide::extend(there, lease, *hold, now),
            Change::Settle(lease, end) => decide::settle(there, lease, end, now),
            Change::Resolve(seen, end) => decide::resolve(there, *seen, end, now),
            Change::Forget(seen) => decide::forget(there, *seen, now),
            Change::Replace(seen, record) => decide::replace(there, *seen, record, now),
        };
        if let Some(changed) = changed {
            // A holder that is put back may know a higher fence than a log that has lost it.
            let fence = changed.fence.0;
            self.stage(changed, supersedes)?;
            self.fences = self.fences.max(fence);
        }
        Ok(answer)
    }

    /// What is at an address for the next call, and the version of it that the index has.
    fn current(&self, at: &Address) -> Result<(Option<Arc<Entry>>, Option<u64>), StoreError> {
        if let Some(staged) = self.staged.get(at) {
            return Ok((Some(staged.entry.clone()), staged.supersedes));
        }
        let loaded = self.log.load(at)?;
        let version = loaded.as_ref().map(|entry| entry.version);
        Ok((loaded, version))
    }

    /// The last quarter of the last segment is for those who have run already.
    fn may_claim(&self) -> Result<(), StoreError> {
        let (size, taken) = (self.tail.segment.header.size, self.tail.at + self.batch.len() as u64);
        if taken <= size / 4 * 3 {
            return Ok(());
        }
        self.log.spares.verdict().map_err(|why| failed(ErrorKind::Rejected, why))
    }

    fn stage(&mut self, entry: Entry, supersedes: Option<u64>) -> Result<(), StoreError> {
        if let Some(why) = self.log.read_only() {
            return Err(failed(ErrorKind::Rejected, why));
        }
        let most = (self.capacity() / 2 - BATCH_HEADER).min(Slot::MAX_LENGTH - 1);
        let length = entry.encoded_length();
        if length > most {
            let why = format!("an entry of {length} bytes is too large; at most {most} fit");
            return Err(failed(ErrorKind::Rejected, why));
        }
        self.version += 1;
        self.write(self.version, supersedes, entry);
        Ok(())
    }

    fn write(&mut self, version: u64, supersedes: Option<u64>, mut entry: Entry) {
        entry.version = version;
        let begin = self.batch.len();
        let length = entry.encode(&mut self.batch);
        let at = entry.ask.address;
        self.spans.push((begin, length));
        self.staged.insert(at, Staged { entry: Arc::new(entry), begin, length, supersedes });
    }

    /// Makes the batch durable, then known, then answered.
    fn commit(&mut self) {
        match self.append() {
            Ok(()) => {
                self.merge();
                for waiting in self.waiting.drain(..) {
                    // Whoever has given up asking finds out by asking again.
                    match waiting {
                        Waiting::Claim(reply, answer) => drop(reply.send(Ok(answer))),
                        Waiting::Held(reply, answer) => drop(reply.send(Ok(answer))),
                    }
                }
            }
            Err(Failure::Refused(why)) => self.fail(ErrorKind::Rejected, &why),
            Err(Failure::Unsynced(error)) => {
                self.log.stop_writing(&error);
                self.fail(ErrorKind::Ambiguous, &format!("the disk failed to make it durable: {error}"));
            }
        }
        self.clear();
    }

    fn clear(&mut self) {
        self.batch.truncate(BATCH_HEADER);
        self.batch.shrink_to(BATCH);
        self.spans.clear();
        self.staged.clear();
    }

    fn fail(&mut self, kind: ErrorKind, why: &str) {
        for waiting in self.waiting.drain(..) {
            match waiting {
                Waiting::Claim(reply, _) => drop(reply.send(Err(failed(kind, why)))),
                Waiting::Held(reply, _) => drop(reply.send(Err(failed(kind, why)))),
            }
        }
    }

    /// Writes and syncs the batch; if that fails, once more into another segment.
    fn append(&mut self) -> Result<(), Failure> {
        if self.spans.is_empty() {
            return Ok(());
        }
        let span = padded(self.batch.len()) as u64;
        if self.tail.at + span + SECTOR as u64 > self.tail.segment.header.size {
            let next = self.log.spares.take().map_err(Failure::Refused)?;
            if !self.seal() {
                next.proves.store(self.tail.segment.header.id, SeqCst);
            }
            self.tail = Tail::new(next, self.sequence);
            self.log.spares.want(false);
        }
        // Only what an earlier start wrote into larger segments can be too large for one.
        if self.tail.at + span + SECTOR as u64 > self.tail.segment.header.size {
            return Err(Failure::Refused(format!("a batch of {span} bytes does not fit into a segment")));
        }
        if let Err(first) = self.append_once() {
            // Without another segment, a batch that was not written whole is nowhere: the next one goes over it.
            let Ok(next) = self.log.spares.take() else { return Err(first) };
            next.proves.store(self.tail.segment.header.id, SeqCst);
            self.tail.segment.spoil(self.tail.at);
            self.tail = Tail::new(next, self.sequence);
            self.append_once().map_err(|second| match (first, second) {
                (Failure::Unsynced(error), Failure::Refused(_)) | (_, Failure::Unsynced(error)) => {
                    Failure::Unsynced(error)
                }
                (Failure::Refused(_), refused) => refused,
            })?;
        }
        self.tail.at += span;
        self.sequence += 1;
        self.log.sequence.store(self.sequence - 1, SeqCst);
        self.log.fences.store(self.fences, SeqCst);
        self.log.version.store(self.version, SeqCst);
        if self.tail.at > self.tail.segment.header.size / 8 {
            self.log.spares.want(self.tail.at * 2 > self.tail.segment.header.size);
        }
        Ok(())
    }

    fn append_once(&mut self) -> Result<(), Failure> {
        let salt = self.tail.segment.header.salt;
        for (begin, length) in &self.spans {
            let crc = salted(salt, &self.batch[begin + 8..begin + length]);
            self.batch[begin + 4..begin + 8].copy_from_slice(&crc.to_le_bytes());
        }
        let header = BatchHeader {
            length: (self.batch.len() - BATCH_HEADER) as u32,
            count: self.spans.len() as u32,
            sequence: self.sequence,
            clock: self.now,
            fences: self.fences,
            lane: MAIN,
            seal: false,
        };
        header.finish(&mut self.batch, salt);
        let length = self.batch.len();
        self.batch.resize(padded(length), 0);
        let written = self.tail.segment.file.write_at(&self.batch, self.tail.at);
        self.batch.truncate(length);
        written.map_err(|error| Failure::Refused(format!("the disk refused to write: {error}")))?;
        if self.log.synced { self.tail.segment.file.sync_data().map_err(Failure::Unsynced) } else { Ok(()) }
    }

    /// Says that nothing follows in this segment. One that cannot be sealed is proved complete by the next one.
    #[must_use]
    fn seal(&mut self) -> bool {
        if self.tail.sealed {
            return true;
        }
        let so_far = SoFar { sequence: self.sequence, clock: self.now, fences: self.fences };
        let ends = Sealed { lane: MAIN, first: self.tail.first, last: self.sequence, end: self.tail.at };
        let sealed = seal(&self.tail.segment, ends, so_far, self.log.synced).is_ok();
        if sealed {
            self.sequence += 1;
            self.log.sequence.store(self.sequence - 1, SeqCst);
        } else {
            self.tail.segment.spoil(self.tail.at);
        }
        sealed
    }

    /// Lets everybody see what is durable now.
    fn merge(&mut self) {
        for staged in self.staged.values() {
            let offset = self.tail.at - padded(self.batch.len()) as u64 + staged.begin as u64;
            let slot = Slot::new(&staged.entry, self.tail.segment.header.id, offset as u32, staged.length);
            self.log.segments.gain(&slot);
            if let Some(before) = self.log.index.put(&staged.entry, slot, staged.supersedes) {
                self.log.segments.lose(&before);
            }
        }
    }
}
