//! What tenants have used of their quotas, in a file beside the log: a restart gives nobody a new allowance.
//!
//! The file `quota` has a slot of 64 bytes for each tenant, which is overwritten in place; a slot is within a sector, so it is
//! written wholly or not at all. The log would have to carry counts from segment to segment, for numbers of which only
//! the last one matters.
//!
//! Invariants: a count is written before it is answered, so that it survives the end of the process, however that comes. It is
//! not synced: after a loss of power the last seconds may be missing. What cannot be read or written costs counts, never
//! requests: counting goes on in memory.

use std::{collections::HashMap, fmt, io, sync::Arc, time::Duration};

use ibid::store::{Address, Counters, StoreFuture, Used};
use parking_lot::Mutex;

use super::{
    disk::{Disk, DiskFile},
    entry::{Micros, micros},
    log::Log,
};

const NAME: &str = "quota";
const SLOT: usize = 64;
const MAGIC: [u8; 4] = *b"ibq1";
/// So many are told apart; all others share one count.
const MOST: usize = 1 << 16;
/// Where all others are counted.
const OTHERS: Address = Address([0; 32]);
/// The file grows by so many slots.
const GROWS_BY: u32 = 256;
/// Between two looks for what can go: each looks at everything.
const PAUSE: Micros = 1_000_000;

pub(super) struct Counts {
    log: Arc<Log>,
    disk: Arc<dyn Disk>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    all: HashMap<Address, Count>,
    /// None until something is to be counted.
    file: Option<Arc<dyn DiskFile>>,
    /// It cannot be read or written: counting goes on without it.
    broken: bool,
    /// How many the file has room for.
    slots: u32,
    free: Vec<u32>,
    looked: Micros,
}

#[derive(Clone, Copy)]
struct Count {
    total: u64,
    until: Micros,
    slot: Option<u32>,
}

impl Counts {
    /// `opened` is the time now. The log's own clock is not asked, so that nothing is written with its time yet.
    pub(super) fn open(log: Arc<Log>, disk: Arc<dyn Disk>, opened: Micros) -> Self {
        let state = State::read(&*disk, opened).unwrap_or_else(|_| State { broken: true, ..State::default() });
        Self { log, disk, state: Mutex::new(state) }
    }

    fn count(&self, who: &Address, n: u64, window: Duration) -> Used {
        let now = self.log.clock.now();
        let mut state = self.state.lock();
        let who = state.place(who, now);
        let fresh = Count { total: 0, until: now.saturating_add(micros(window).max(1)), slot: None };
        let mut count = match state.all.get(&who).copied() {
            Some(count) if count.until > now => count,
            Some(Count { slot, .. }) => Count { slot, ..fresh },
            None => fresh,
        };
        count.total = count.total.saturating_add(n);
        if state.write(&*self.disk, &who, &mut count).is_err() {
            state.broken = true;
            state.file = None;
        }
        state.all.insert(who, count);
        Used { total: count.total, resets_in: Duration::from_micros(count.until - now) }
    }
}

impl State {
    fn read(disk: &dyn Disk, now: Micros) -> io::Result<Self> {
        let mut state = Self::default();
        if !disk.list()?.iter().any(|name| name == NAME) {
            return Ok(state);
        }
        let file = disk.open(NAME)?;
        let most = (MOST + 1).next_multiple_of(GROWS_BY as usize) * SLOT;
        let mut bytes = vec![0; usize::try_from(file.length()?).unwrap_or(usize::MAX).min(most)];
        file.read_at(&mut bytes, 0)?;
        state.file = Some(file);
        for slot in bytes.chunks_exact(SLOT) {
            let at = state.slots;
            state.slots += 1;
            match decode(slot).filter(|(_, count)| count.until > now) {
                Some((who, count)) if !state.all.contains_key(&who) => {
                    state.all.insert(who, Count { slot: Some(at), ..count });
                }
                _ => state.free.push(at),
            }
        }
        Ok(state)
    }

    /// Where somebody is counted: among all others, if there is no room.
    fn place(&mut self, who: &Address, now: Micros) -> Address {
        if self.all.len() < MOST || self.all.contains_key(who) {
            return *who;
        }
        if now >= self.looked + PAUSE {
            self.looked = now;
            let gone = self.all.extract_if(|_, count| count.until <= now);
            self.free.extend(gone.filter_map(|(_, count)| count.slot));
        }
        if self.all.len() < MOST { *who } else { OTHERS }
    }

    fn write(&mut self, disk: &dyn Disk, who: &Address, count: &mut Count) -> io::Result<()> {
        if self.broken {
            return Ok(());
        }
        let file = match &self.file {
            Some(file) => file.clone(),
            None => {
                let file = disk.create(NAME)?;
                disk.sync_dir()?;
                self.file = Some(file.clone());
                file
            }
        };
        let slot = match count.slot.or_else(|| self.free.pop()) {
            Some(slot) => slot,
            None => {
                let first = self.slots;
                file.allocate(u64::from(first + GROWS_BY) * SLOT as u64)?;
                self.slots += GROWS_BY;
                self.free.extend((first + 1..self.slots).rev());
                first
            }
        };
        count.slot = Some(slot);
        file.write_at(&encode(who, count), u64::from(slot) * SLOT as u64)
    }
}

fn encode(who: &Address, count: &Count) -> [u8; SLOT] {
    let mut slot = [0; SLOT];
    slot[..4].copy_from_slice(&MAGIC);
    slot[8..40].copy_from_slice(&who.0);
    slot[40..48].copy_from_slice(&count.total.to_le_bytes());
    slot[48..56].copy_from_slice(&count.until.to_le_bytes());
    let sum = crc32c::crc32c(&slot[8..]);
    slot[4..8].copy_from_slice(&sum.to_le_bytes());
    slot
}

fn decode(slot: &[u8]) -> Option<(Address, Count)> {
    let number = |at: usize| Some(u64::from_le_bytes(slot.get(at..at + 8)?.try_into().ok()?));
    let sum = u32::from_le_bytes(slot.get(4..8)?.try_into().ok()?);
    if slot[..4] != MAGIC || crc32c::crc32c(&slot[8..]) != sum {
        return None;
    }
    let who = Address(slot[8..40].try_into().ok()?);
    Some((who, Count { total: number(40)?, until: number(48)?, slot: None }))
}

impl Counters for Counts {
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, Used> {
        StoreFuture::ready(Ok(self.count(who, n, window)))
    }
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Counts({})", self.state.lock().all.len())
    }
}
