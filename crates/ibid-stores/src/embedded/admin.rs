//! Administrative calls. A listing goes shard by shard in address order, and reads a bounded number of entries per
//! page.

use bytes::Bytes;
use ibid::store::{
    Address, EntryCounts, EntryFilter, EntryInfo, EntryPage, Fence, ListCursor, SettleOutcome, Settlement, StoreAdmin,
    StoreError, StoreFuture, transitions,
};

use super::{
    Embedded,
    entry::{LogEntry, LogEntryKind, UnixMicros},
    index::{IndexSlot, SHARD_COUNT, shard_of},
    log::SharedLog,
    segments::ReadMode,
};

/// Maximum number of entries read for one page. A page may return fewer entries than requested.
const MAX_READ_PER_PAGE: usize = 2000;

impl StoreAdmin for Embedded {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        StoreFuture::boxed(async move {
            match &filter.address {
                Some(at) => self.list_one(at, filter, from).await,
                None if at_most == 0 => Ok(EntryPage::default()),
                None => {
                    let filter = filter.clone();
                    Ok(self.read_blocking(move |log| log.list_page(&filter, from, at_most as usize)).await)
                }
            }
        })
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        self.change(at, move |current, now| transitions::resolve(current, seen, end, now))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        self.change(at, move |current, now| transitions::forget(current, seen, now))
    }

    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        self.change(at, move |current, now| transitions::replace_record(current, seen, &record, now))
    }

    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        StoreFuture::boxed(async move {
            let now = self.log.clock.now();
            let mut counts = EntryCounts::default();
            for nth in 0..SHARD_COUNT {
                self.count_shard(nth, now, &mut counts);
                // Scanning millions of slots takes a while.
                if nth % 32 == 31 {
                    tokio::task::yield_now().await;
                }
            }
            Ok(counts)
        })
    }
}

impl Embedded {
    fn count_shard(&self, nth: usize, now: UnixMicros, counts: &mut EntryCounts) {
        let shard = self.log.index.shard_by_number(nth);
        shard.running_entries.values().filter_map(|entry| entry.state(now)).for_each(|state| counts.add(state));
        for slot in shard.slots() {
            counts.bytes += (slot.length() + size_of::<IndexSlot>()) as u64;
            match slot.kind() {
                _ if slot.has_expired(now) => {}
                LogEntryKind::Completed | LogEntryKind::Failed => counts.finished += 1,
                LogEntryKind::OutcomeUnknown => counts.unknown += 1,
                LogEntryKind::Running | LogEntryKind::Released => {}
            }
        }
    }

    async fn list_one(&self, at: &Address, filter: &EntryFilter, from: ListCursor) -> Result<EntryPage, StoreError> {
        let listed = self.load(at).await?.entry.and_then(|entry| entry.entry_info(self.log.clock.now()));
        let wanted = |listed: &EntryInfo| from.0.is_none_or(|from| listed.address > from) && filter.matches(listed);
        Ok(EntryPage { entries: listed.into_iter().filter(wanted).collect(), next: None })
    }
}

impl SharedLog {
    fn list_page(&self, filter: &EntryFilter, from: ListCursor, at_most: usize) -> EntryPage {
        let now = self.clock.now();
        let mut entries: Vec<EntryInfo> = Vec::new();
        let mut read = 0;
        let mut passed = from.0;
        for nth in passed.map_or(0, |from| shard_of(&from.0))..SHARD_COUNT {
            for entry in self.shard_entries(nth, filter, passed, now, MAX_READ_PER_PAGE - read + 1) {
                if read == MAX_READ_PER_PAGE || entries.len() == at_most {
                    return EntryPage { entries, next: Some(ListCursor(passed)) };
                }
                read += 1;
                passed = Some(entry.request.address);
                entries.extend(entry.entry_info(now).filter(|listed| filter.matches(listed)));
            }
        }
        EntryPage { entries, next: None }
    }

    /// Returns the first entries of a shard after `from`, in address order. If the filter has a key hash, reads only
    /// entries that may match it.
    fn shard_entries(
        &self, nth: usize, filter: &EntryFilter, from: Option<Address>, now: UnixMicros, at_most: usize,
    ) -> Vec<LogEntry> {
        let mut slots: Vec<IndexSlot> = {
            let shard = self.index.shard_by_number(nth);
            let behind = |slot: &&IndexSlot| from.is_none_or(|from| slot.prefix[..] >= from.0[..16]);
            let shown = |slot: &&IndexSlot| slot.kind() != LogEntryKind::Released && !slot.has_expired(now);
            let fits = |slot: &&IndexSlot| filter.key_hash.as_deref().is_none_or(|hash| slot.may_match_key_hash(hash));
            shard.slots().filter(behind).filter(shown).filter(fits).copied().collect()
        };
        slots.sort_unstable_by_key(|slot| slot.prefix);
        let mut entries: Vec<LogEntry> = Vec::new();
        for same in slots.chunk_by(|a, b| a.prefix == b.prefix) {
            if entries.len() >= at_most {
                break;
            }
            let mut group: Vec<LogEntry> = same.iter().filter_map(|slot| self.read_current(slot)).collect();
            group.retain(|entry| from.is_none_or(|from| entry.request.address > from));
            group.sort_unstable_by_key(|entry| entry.request.address);
            entries.extend(group);
        }
        entries
    }

    /// Reads the current entry of a slot that may have been moved meanwhile. Returns `None` if it cannot be read.
    fn read_current(&self, slot: &IndexSlot) -> Option<LogEntry> {
        let Ok(entry) = self.segments.read(slot, ReadMode::Blocking) else {
            let slot = self.index.current_slot(slot)?;
            return self.segments.read(&slot, ReadMode::Blocking).ok();
        };
        // Memory is more current for running claims: the disk does not show that a restart interrupted them.
        let shard = self.index.shard(&entry.request.address);
        let running = shard.running_entries.get(&entry.request.address);
        Some(running.map_or(entry, |running| (**running).clone()))
    }
}
