//! The trail in the store: of all gateways that use it, and of `ibid keys`. Entry `n` is a note whose address follows
//! from `n`, and there are no gaps, so nothing is ever searched for.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use ibid::store::{Address, Store, StoreError};

use super::{AuditEntry, AuditEntryPage};
use crate::records::notes::{self, RecordNote};

/// How long an entry is kept: 400 days.
const ENTRY_TTL: Duration = Duration::from_secs(400 * 86_400);
/// How long the number of the last entry is kept: a century.
const LAST_ID_TTL: Duration = Duration::from_secs(100 * 365 * 86_400);
const MAX_CONCURRENT_READS: usize = 16;
/// Entries that one page reads at most, while it looks for those of one user.
const MAX_READ_PER_PAGE: usize = 5000;

#[derive(Debug)]
pub(super) struct StoreTrail {
    store: Arc<dyn Store>,
    /// The highest id that this process has seen.
    last: AtomicU64,
}

impl StoreTrail {
    pub(super) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, last: AtomicU64::new(0) }
    }

    /// Writes an entry with the next free id.
    pub(super) async fn append(&self, mut entry: AuditEntry) -> Result<AuditEntry, StoreError> {
        entry.id = self.last_id().await?;
        loop {
            entry.id += 1;
            // Another gateway may have taken the id.
            if notes::create(&*self.store, entry_address(entry.id), ENTRY_TTL, &entry).await? {
                break;
            }
        }
        self.last.fetch_max(entry.id, Relaxed);
        self.link(&entry).await;
        Ok(entry)
    }

    /// Writes down the last id, and the entry's id with its record. Without them entries are still found, later.
    async fn link(&self, entry: &AuditEntry) {
        let store = &*self.store;
        let last = async {
            if !notes::replace(store, &last_id_address(), &entry.id).await? {
                notes::create(store, last_id_address(), LAST_ID_TTL, &entry.id).await?;
            }
            Ok::<(), StoreError>(())
        };
        let record = async {
            match entry.address.as_deref().and_then(Address::from_hex) {
                Some(record) => RecordNote::update(store, &record, |note| note.changes.push(entry.id)).await,
                None => Ok(()),
            }
        };
        if let Err(why) = last.await.and(record.await) {
            tracing::warn!(id = entry.id, %why, "the audit trail's index could not be written");
        }
    }

    pub(super) async fn amend(&self, entry: &AuditEntry) -> Result<(), StoreError> {
        notes::replace(&*self.store, &entry_address(entry.id), entry).await.map(drop)
    }

    /// Starts from what is known and looks for later entries in growing steps.
    async fn last_id(&self) -> Result<u64, StoreError> {
        let store = &*self.store;
        let written: Option<u64> = notes::read(store, &last_id_address()).await?;
        let mut last = self.last.load(Relaxed).max(written.unwrap_or(0));
        let mut step = 1;
        while notes::exists(store, &entry_address(last + step)).await? {
            last += step;
            step *= 2;
        }
        while step > 1 {
            step /= 2;
            if notes::exists(store, &entry_address(last + step)).await? {
                last += step;
            }
        }
        self.last.fetch_max(last, Relaxed);
        Ok(last)
    }

    pub(super) async fn page(
        &self, before: Option<u64>, limit: usize, user: Option<&str>,
    ) -> Result<AuditEntryPage, StoreError> {
        let last = self.last_id().await?;
        let newest = before.map_or(last, |before| last.min(before.saturating_sub(1)));
        let ids = (1..=newest).rev().take(MAX_READ_PER_PAGE);
        let reads = stream::iter(ids.map(|id| self.entry(id))).buffered(MAX_CONCURRENT_READS);
        let mut reads = std::pin::pin!(reads);
        let mut entries: Vec<AuditEntry> = Vec::new();
        while let Some(read) = reads.next().await {
            // Older ones have expired as well.
            let Some(entry) = read? else { break };
            if user.is_none_or(|user| entry.user == user) {
                entries.push(entry);
            }
            if entries.len() > limit {
                break;
            }
        }
        let more = entries.len() > limit;
        entries.truncate(limit);
        let next = entries.last().filter(|_| more).map(|last| last.id);
        Ok(AuditEntryPage { entries, next })
    }

    pub(super) fn previous_page_start(&self, before: u64, limit: usize) -> Option<u64> {
        let start = before.saturating_add(limit as u64);
        (start <= self.last.load(Relaxed)).then_some(start)
    }

    pub(super) async fn entries_for(&self, record: &Address, at_most: usize) -> Result<Vec<AuditEntry>, StoreError> {
        let ids = RecordNote::read(&*self.store, record).await?.changes;
        let mut entries = Vec::new();
        for id in ids.into_iter().rev().take(at_most) {
            entries.extend(self.entry(id).await?);
        }
        Ok(entries)
    }

    /// Reads an entry; `None` if it is absent. One that cannot be read is shown as such: `ibid keys` without the keys
    /// of `[seal]` wrote it, or with other keys.
    async fn entry(&self, id: u64) -> Result<Option<AuditEntry>, StoreError> {
        let at = entry_address(id);
        match notes::read(&*self.store, &at).await? {
            Some(entry) => Ok(Some(entry)),
            None => Ok(notes::exists(&*self.store, &at).await?.then(|| AuditEntry::unreadable(id))),
        }
    }
}

fn entry_address(id: u64) -> Address {
    notes::address("audit", &id.to_be_bytes())
}

fn last_id_address() -> Address {
    notes::address("audit", b"last")
}
