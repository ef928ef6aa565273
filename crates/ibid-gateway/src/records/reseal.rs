//! Seals stored records with the first key, in slices and by compare-and-set, while gateways serve.
//!
//! It can be interrupted and restarted at any time: records that already have the first key are skipped.

use std::{collections::BTreeMap, time::Duration};

use futures_util::future::join_all;
use ibid::store::{Address, EntryFilter, EntryInfo, EntryState, ErrorKind, ListCursor, StoreError};
use ibid_stores::seal::{ResealOutcome as One, SealedStore, sealing_key_id};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// Concurrent reseals: enough to hide the store's latency, too few to slow the gateways down.
const RESEAL_CONCURRENCY: usize = 16;
/// Maximum number of unopened records that a report lists.
const MAX_UNOPENED_LISTED: usize = 20;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResealReport {
    /// The name of the key that seals new records.
    pub key: String,
    /// Entries looked at, in any state.
    pub looked: u64,
    /// Records that now have this key and had another or none.
    pub resealed: u64,
    /// `resealed` by previous key; the empty name stands for none.
    pub from: BTreeMap<String, u64>,
    pub current: u64,
    /// Records that disappeared or changed between the list and the reseal.
    pub changed: u64,
    /// Records that could not be opened, and stay as they are.
    pub unopened: u64,
    /// The first [`MAX_UNOPENED_LISTED`] of them.
    pub unopened_at: Vec<UnopenedRecord>,
    /// Entries whose label is sealed with another key. Labels are not resealed; they expire with the entry.
    pub older_labels: u64,
    /// Cursor of the next slice; `None` at the end.
    pub next: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnopenedRecord {
    pub address: String,
    pub why: String,
}

impl ResealReport {
    /// Reseals up to `at_most` entries after `from`, for about `lasts`. If the store fails midway, the counts are still
    /// right and the work done stays done.
    ///
    /// # Errors
    /// If the store fails. `next` is then the start of this slice.
    pub async fn run_slice(
        &mut self, sealed: &SealedStore, from: Option<Address>, at_most: u32, lasts: Duration,
    ) -> Result<(), StoreError> {
        self.key = sealed.current_key_id();
        self.next = from.map(|from| from.to_string());
        let begun = Instant::now();
        let page = sealed.inner_store().admin().list(&EntryFilter::default(), ListCursor(from), at_most).await?;
        let mut last = None;
        for some in page.entries.chunks(RESEAL_CONCURRENCY) {
            if let Some(last) = last
                && begun.elapsed() >= lasts
            {
                self.next = Some(Address::to_string(last));
                return Ok(());
            }
            self.reseal_entries(sealed, some).await?;
            last = some.last().map(|listed| &listed.address);
        }
        // A cursor that does not advance would loop forever.
        let next = page.next.and_then(|next| next.0).filter(|next| Some(*next) > from);
        self.next = next.map(|next| next.to_string());
        Ok(())
    }

    async fn reseal_entries(&mut self, sealed: &SealedStore, some: &[EntryInfo]) -> Result<(), StoreError> {
        let finished = some.iter().filter(|listed| matches!(listed.state, EntryState::Done | EntryState::Failed));
        let finished: Vec<&Address> = finished.map(|listed| &listed.address).collect();
        let done = join_all(finished.iter().map(|at| sealed.reseal(at))).await;
        let mut failed = None;
        for (at, done) in finished.into_iter().zip(done) {
            match done {
                Err(error) if error.kind != ErrorKind::Corrupt => failed = Some(error),
                // Notes are resealed too, and are no records.
                _ if at.is_note() => {}
                Ok(One::Done { from }) => {
                    self.resealed += 1;
                    *self.from.entry(from.unwrap_or_default()).or_default() += 1;
                }
                Ok(One::AlreadyCurrent) => self.current += 1,
                Ok(One::NoRecord) => self.changed += 1,
                Err(error) => {
                    let why = error.source.to_string();
                    self.list_unopened(UnopenedRecord { address: at.to_string(), why });
                    self.unopened += 1;
                }
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let other_key = |listed: &&EntryInfo| sealing_key_id(&listed.label).is_some_and(|key| key != self.key);
        let records = || some.iter().filter(|listed| !listed.address.is_note());
        self.older_labels += records().filter(other_key).count() as u64;
        self.looked += records().count() as u64;
        Ok(())
    }

    fn list_unopened(&mut self, unopened: UnopenedRecord) {
        if self.unopened_at.len() < MAX_UNOPENED_LISTED {
            self.unopened_at.push(unopened);
        }
    }

    pub fn merge(&mut self, more: Self) {
        let Self { key, looked, resealed, from, current, changed, unopened, unopened_at, older_labels, next } = more;
        (self.key, self.next) = (key, next);
        self.looked += looked;
        self.resealed += resealed;
        self.current += current;
        self.changed += changed;
        self.unopened += unopened;
        self.older_labels += older_labels;
        from.into_iter().for_each(|(key, count)| *self.from.entry(key).or_default() += count);
        unopened_at.into_iter().for_each(|unopened| self.list_unopened(unopened));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use ibid::store::{
        ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Memory, RecordSummary, Settlement, Store, Tags,
    };
    use ibid_stores::seal::{SealKey, SealOptions, Sealer};
    use ibid_testkit::wrappers::{CallFilter, DelayedStore};

    use super::*;

    async fn filled(entries: u8) -> (SealedStore, Arc<DelayedStore<Memory>>) {
        let store = Arc::new(DelayedStore::new(Memory::default()));
        let key = |id: &str, byte| SealKey::new(id, [byte; 32]).unwrap();
        let sealing = Sealer::new(key("old", 1), Vec::new(), &[9; 32], SealOptions::default());
        let sealed = SealedStore::new(store.clone(), sealing.clone(), Arc::new(ibid::observe::NoopObserver));
        for at in 0..entries {
            let ask = ClaimRequest {
                address: Address([at; 32]),
                token: ClaimToken::mint(),
                fingerprint: Fingerprint::NONE,
                tags: Tags::new("acme", "u", "POST /pay", "k"),
                label: Bytes::new(),
                lease: Duration::from_secs(5),
                ttl: Duration::from_secs(6000),
                take_over: None,
            };
            let Ok(ClaimOutcome::Granted(lease)) = Store::claim(&sealed, &Arc::new(ask)).await else {
                panic!("it is free")
            };
            let (record, outline, keep) =
                (Bytes::from_static(b"r"), RecordSummary::default(), Duration::from_secs(6000));
            let end = Settlement::Complete { failed: false, record, summary: outline, ttl: keep };
            assert!(Store::settle(&sealed, &lease, &end).await.is_ok());
        }
        sealing.rekey(key("new", 2), vec![key("old", 1)], SealOptions::default());
        (sealed, store)
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_store_ends_it_early_and_the_next_goes_on_behind() {
        let (sealed, store) = filled(100).await;
        store.delay(CallFilter::All, Duration::from_secs(1), Duration::ZERO);
        let (mut sum, mut from, mut times) = (ResealReport::default(), None, 0);
        loop {
            let mut done = ResealReport::default();
            done.run_slice(&sealed, from, 1000, Duration::from_secs(4)).await.unwrap();
            assert!(done.looked > 0 && times < 100, "each comes further: {done:?}");
            times += 1;
            from = done.next.as_deref().and_then(Address::from_hex);
            sum.merge(done);
            if from.is_none() {
                break;
            }
        }
        assert!(times > 2, "{times}");
        assert_eq!(
            (sum.looked, sum.resealed, sum.current, sum.older_labels),
            (100, 100, 0, 100),
            "none twice: {sum:?}"
        );
        store.heal();
        let mut again = ResealReport::default();
        again.run_slice(&sealed, None, 1000, Duration::MAX).await.unwrap();
        assert_eq!((again.current, again.resealed, again.next), (100, 0, None));
    }
}
