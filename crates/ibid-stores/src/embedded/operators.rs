//! What operators see and change. Listings go shard by shard, in the order of addresses, and read a bounded number of
//! entries per page.

use std::{future::poll_fn, mem, task::Poll};

use bytes::Bytes;
use ibid::store::{
    Address, Counts, Cursor, End, Fence, Filter, Held, Listed, Operators, Page, StoreError, StoreFuture,
};

use super::{
    Embedded,
    entry::{Entry, Kind, Micros, Phase},
    index::{SHARDS, Slot, shard_of},
    writer::Change,
};

/// How many entries one page reads at most; it may then come short.
const READ: usize = 2000;

impl Operators for Embedded {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        StoreFuture::ready(match &filter.address {
            Some(at) => self.list_one(at, filter, from),
            None if at_most == 0 => Ok(Page::default()),
            None => Ok(self.list_page(filter, from, at_most as usize)),
        })
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        self.change(at, Change::Resolve(seen, end.clone()))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        self.change(at, Change::Forget(seen))
    }

    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        self.change(at, Change::Replace(seen, record))
    }

    fn counts(&self) -> StoreFuture<'_, Counts> {
        StoreFuture::boxed(async move {
            let now = self.log.clock.now();
            let mut counts = Counts::default();
            for nth in 0..SHARDS {
                self.count(nth, now, &mut counts);
                if nth % 32 == 31 {
                    others_first().await;
                }
            }
            Ok(counts)
        })
    }
}

impl Embedded {
    fn count(&self, nth: usize, now: Micros, counts: &mut Counts) {
        let shard = self.log.index.nth(nth);
        for entry in shard.running.values().filter(|entry| entry.is_live(now)) {
            match entry.phase {
                Phase::Running { until, .. } if now < until => counts.processing += 1,
                _ => counts.unknown += 1,
            }
        }
        for slot in shard.slots() {
            counts.bytes += (slot.length() + size_of::<Slot>()) as u64;
            match slot.kind() {
                _ if slot.has_expired(now) => {}
                Kind::Done | Kind::Failed => counts.finished += 1,
                Kind::Unknown => counts.unknown += 1,
                Kind::Claim | Kind::Free => {}
            }
        }
    }

    fn list_one(&self, at: &Address, filter: &Filter, from: Cursor) -> Result<Page, StoreError> {
        let now = self.log.clock.now();
        let listed = self.log.load(at)?.and_then(|entry| entry.listed(now));
        let wanted = |listed: &Listed| from.0.is_none_or(|from| listed.address > from) && filter.matches(listed);
        Ok(Page { entries: listed.into_iter().filter(wanted).collect(), next: None })
    }

    fn list_page(&self, filter: &Filter, from: Cursor, at_most: usize) -> Page {
        let now = self.log.clock.now();
        let mut entries: Vec<Listed> = Vec::new();
        let mut read = 0;
        let mut passed = from.0;
        for nth in passed.map_or(0, |from| shard_of(&from.0))..SHARDS {
            for entry in self.in_shard(nth, filter, passed, now, READ - read + 1) {
                if read == READ || entries.len() == at_most {
                    return Page { entries, next: Some(Cursor(passed)) };
                }
                read += 1;
                passed = Some(entry.ask.address);
                entries.extend(entry.listed(now).filter(|listed| filter.matches(listed)));
            }
        }
        Page { entries, next: None }
    }

    /// The first entries of a shard behind `from`, in the order of their addresses. With a hash of a key in the filter,
    /// only those that may have it are read.
    fn in_shard(&self, nth: usize, filter: &Filter, from: Option<Address>, now: Micros, at_most: usize) -> Vec<Entry> {
        let mut slots: Vec<Slot> = {
            let shard = self.log.index.nth(nth);
            let behind = |slot: &&Slot| from.is_none_or(|from| slot.prefix()[..] >= from.0[..16]);
            let shown = |slot: &&Slot| slot.kind() != Kind::Free && !slot.has_expired(now);
            let fits = |slot: &&Slot| filter.key_hash.as_deref().is_none_or(|hash| slot.may_have(hash));
            shard.slots().filter(behind).filter(shown).filter(fits).copied().collect()
        };
        slots.sort_unstable_by_key(|slot| *slot.prefix());
        let mut entries: Vec<Entry> = Vec::new();
        for same in slots.chunk_by(|a, b| a.prefix() == b.prefix()) {
            if entries.len() >= at_most {
                break;
            }
            let mut group: Vec<Entry> = same.iter().filter_map(|slot| self.read_current(slot)).collect();
            group.retain(|entry| from.is_none_or(|from| entry.ask.address > from));
            group.sort_unstable_by_key(|entry| entry.ask.address);
            entries.extend(group);
        }
        entries
    }

    /// What a slot stood for a moment ago, as it is now. What does not read is not shown.
    fn read_current(&self, slot: &Slot) -> Option<Entry> {
        let Ok(entry) = self.log.segments.read(slot) else {
            let slot = self.log.index.relocated(slot)?;
            return self.log.segments.read(&slot).ok();
        };
        // What runs is known better in memory: nothing on the disk says that it was interrupted.
        match self.log.index.shard(&entry.ask.address).running.get(&entry.ask.address) {
            Some(running) => Some((**running).clone()),
            None => Some(entry),
        }
    }
}

/// Lets other tasks of the same thread run: millions of slots take a while.
async fn others_first() {
    let mut waited = false;
    poll_fn(|cx| {
        if mem::replace(&mut waited, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
