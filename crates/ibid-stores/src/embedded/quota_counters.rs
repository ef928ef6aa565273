//! Quota usage per tenant, in a file beside the log, so that a restart does not reset quotas.
//!
//! The file `quota` has a slot of 64 bytes per tenant, which is overwritten in place. A slot lies within a sector, so
//! it is written completely or not at all. The log would have to carry counts from segment to segment, although only
//! the last value matters.
//!
//! Invariants: a count is written before it is returned, so it survives a crash of the process. It is not synced: after
//! a power loss, the last seconds may be missing. If the file cannot be read or written, counts may be lost, but no
//! request fails: counting continues in memory.

use std::{collections::HashMap, io, sync::Arc, time::Duration};

use ibid::store::{Address, CounterUsage, Counters, StoreFuture};
use parking_lot::Mutex;

use super::{
    disk::{Disk, DiskFile},
    entry::{UnixMicros, micros},
    log::SharedLog,
};

const FILE_NAME: &str = "quota";
const SLOT_LEN: usize = 64;
const MAGIC: [u8; 4] = *b"ibq1";
/// Maximum number of tenants counted individually. All others share one count.
const MAX_TENANTS: usize = 1 << 16;
/// The shared count of all other tenants.
const OVERFLOW_TENANT: Address = Address([0; 32]);
/// Number of slots by which the file grows.
const GROWTH_SLOTS: u32 = 256;
/// Minimum interval between two scans for expired counts, in microseconds. A scan visits all of them.
const EXPIRY_SCAN_INTERVAL_US: UnixMicros = 1_000_000;

pub(super) struct QuotaCounters {
    log: Arc<SharedLog>,
    disk: Arc<dyn Disk>,
    state: Mutex<QuotaState>,
}

#[derive(Default)]
struct QuotaState {
    counts: HashMap<Address, QuotaCount>,
    /// `None` until the first count.
    file: Option<Arc<dyn DiskFile>>,
    /// The file cannot be read or written: counting continues in memory.
    is_broken: bool,
    slot_count: u32,
    free_slots: Vec<u32>,
    last_expiry_scan: UnixMicros,
}

#[derive(Clone, Copy)]
struct QuotaCount {
    total: u64,
    until: UnixMicros,
    slot: Option<u32>,
}

impl QuotaCounters {
    /// `opened` is the current time. The log's clock is not read, so that no later time enters the log yet.
    pub(super) fn open(log: Arc<SharedLog>, disk: Arc<dyn Disk>, opened: UnixMicros) -> Self {
        let state = QuotaState::read(&*disk, opened)
            .unwrap_or_else(|_| QuotaState { is_broken: true, ..QuotaState::default() });
        Self { log, disk, state: Mutex::new(state) }
    }

    fn count(&self, who: &Address, n: u64, window: Duration) -> CounterUsage {
        let now = self.log.clock.now();
        let mut state = self.state.lock();
        let who = state.counted_as(who, now);
        let fresh = QuotaCount { total: 0, until: now.saturating_add(micros(window).max(1)), slot: None };
        let mut count = match state.counts.get(&who).copied() {
            Some(count) if count.until > now => count,
            Some(QuotaCount { slot, .. }) => QuotaCount { slot, ..fresh },
            None => fresh,
        };
        count.total = count.total.saturating_add(n);
        if state.write(&*self.disk, &who, &mut count).is_err() {
            state.is_broken = true;
            state.file = None;
        }
        state.counts.insert(who, count);
        CounterUsage { total: count.total, resets_in: Duration::from_micros(count.until - now) }
    }
}

impl QuotaState {
    fn read(disk: &dyn Disk, now: UnixMicros) -> io::Result<Self> {
        let mut state = Self::default();
        if !disk.list()?.iter().any(|name| name == FILE_NAME) {
            return Ok(state);
        }
        let file = disk.open(FILE_NAME)?;
        let most = (MAX_TENANTS + 1).next_multiple_of(GROWTH_SLOTS as usize) * SLOT_LEN;
        let mut bytes = vec![0; usize::try_from(file.length()?).unwrap_or(usize::MAX).min(most)];
        file.read_at(&mut bytes, 0)?;
        state.file = Some(file);
        for slot in bytes.chunks_exact(SLOT_LEN) {
            let at = state.slot_count;
            state.slot_count += 1;
            match decode(slot).filter(|(_, count)| count.until > now) {
                Some((who, count)) if !state.counts.contains_key(&who) => {
                    state.counts.insert(who, QuotaCount { slot: Some(at), ..count });
                }
                _ => state.free_slots.push(at),
            }
        }
        Ok(state)
    }

    /// Returns the address that counts for `who`: its own, or the shared one if there is no room.
    fn counted_as(&mut self, who: &Address, now: UnixMicros) -> Address {
        if self.counts.len() < MAX_TENANTS || self.counts.contains_key(who) {
            return *who;
        }
        if now >= self.last_expiry_scan + EXPIRY_SCAN_INTERVAL_US {
            self.last_expiry_scan = now;
            let gone = self.counts.extract_if(|_, count| count.until <= now);
            self.free_slots.extend(gone.filter_map(|(_, count)| count.slot));
        }
        if self.counts.len() < MAX_TENANTS { *who } else { OVERFLOW_TENANT }
    }

    fn write(&mut self, disk: &dyn Disk, who: &Address, count: &mut QuotaCount) -> io::Result<()> {
        if self.is_broken {
            return Ok(());
        }
        let file = match &self.file {
            Some(file) => file.clone(),
            None => {
                let file = disk.create(FILE_NAME)?;
                disk.sync_dir()?;
                self.file = Some(file.clone());
                file
            }
        };
        let slot = match count.slot.or_else(|| self.free_slots.pop()) {
            Some(slot) => slot,
            None => {
                let first = self.slot_count;
                file.allocate(u64::from(first + GROWTH_SLOTS) * SLOT_LEN as u64)?;
                self.slot_count += GROWTH_SLOTS;
                self.free_slots.extend((first + 1..self.slot_count).rev());
                first
            }
        };
        count.slot = Some(slot);
        file.write_at(&encode(who, count), u64::from(slot) * SLOT_LEN as u64)
    }
}

fn encode(who: &Address, count: &QuotaCount) -> [u8; SLOT_LEN] {
    let mut slot = [0; SLOT_LEN];
    slot[..4].copy_from_slice(&MAGIC);
    slot[8..40].copy_from_slice(&who.0);
    slot[40..48].copy_from_slice(&count.total.to_le_bytes());
    slot[48..56].copy_from_slice(&count.until.to_le_bytes());
    let sum = crc32c::crc32c(&slot[8..]);
    slot[4..8].copy_from_slice(&sum.to_le_bytes());
    slot
}

fn decode(slot: &[u8]) -> Option<(Address, QuotaCount)> {
    let number = |at: usize| Some(u64::from_le_bytes(slot.get(at..at + 8)?.try_into().ok()?));
    let sum = u32::from_le_bytes(slot.get(4..8)?.try_into().ok()?);
    if slot[..4] != MAGIC || crc32c::crc32c(&slot[8..]) != sum {
        return None;
    }
    let who = Address(slot[8..40].try_into().ok()?);
    Some((who, QuotaCount { total: number(40)?, until: number(48)?, slot: None }))
}

impl Counters for QuotaCounters {
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, CounterUsage> {
        StoreFuture::ready(Ok(self.count(who, n, window)))
    }
}
