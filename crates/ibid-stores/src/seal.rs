//! Encryption at rest around any store: a reader of the store learns little, and cannot change records unnoticed.
//!
//! - **Records and labels** are encrypted and authenticated (XChaCha20-Poly1305, random nonces); records are compressed
//!   first. Address and fingerprint are authenticated with them, and for a record also the attempt and whether it is a
//!   failure. Moved or changed bytes do not decrypt.
//! - **Tags and fingerprints** are keyed. With the secret, a tag can still be searched for.
//! - **Unreadable records are never served.** The call fails with [`ErrorKind::Corrupt`], and the observer receives
//!   [`EngineEvent::RecordUnreadable`]. A holder that finds such a record in place of its claim gets an unknown
//!   outcome.
//! - **Plain records** are treated like unreadable ones, unless [`SealOptions::accept_plain`] is set.
//! - **Several keys**: the first one encrypts, all decrypt, and they can change at run time ([`Sealer::rekey`]).
//!
//! Not encrypted: times, durations and states; status, attempt, fence, token and size; which entries share a tag. The
//! local cache ([`crate::local_cache`]) sits outside this layer and holds plain answers in this process's memory.
//!
//! ```
//! use std::sync::Arc;
//! use ibid::{observe::NoopObserver, store::{Memory, Store}};
//! use ibid_stores::seal::{SealKey, SealOptions, SealedStore, Sealer};
//!
//! let key = SealKey::new("2026-11", [7; 32]).unwrap();
//! let sealer = Sealer::new(key, Vec::new(), &[9; 32], SealOptions::default());
//! let store: Arc<dyn Store> = Arc::new(SealedStore::new(Arc::new(Memory::default()), sealer, Arc::new(NoopObserver)));
//! assert_eq!(store.guarantees().store, "memory");
//! ```

use std::{fmt, sync::Arc, time::Duration};

use bytes::{BufMut, Bytes, BytesMut};
use ibid::{
    Observer, mask,
    observe::EngineEvent,
    store::{
        Address, ClaimOutcome, ClaimRequest, CompletedEntry, EntryCounts, EntryFilter, EntryInfo, EntryPage, ErrorKind,
        Fence, Fingerprint, Guarantees, Holder, Lease, ListCursor, SettleOutcome, Settlement, Store, StoreAdmin,
        StoreError, StoreFuture, SweepResult, Tags,
    },
};

use self::{
    format::{AssociatedData, SealedKind},
    sealed_requests::SealedRequests,
};
pub use self::{
    format::{UnsealError, sealing_key_id},
    keys::{SealKey, SealKeyIdError, SealOptions, Sealer},
};

mod blind_index;
mod format;
mod keys;
mod reseal;
mod sealed_requests;

pub use self::reseal::ResealOutcome;
use ClaimOutcome::{Completed, Granted, InProgress, OutcomeUnknown, TokenSpent};

/// A store that encrypts everything it persists.
pub struct SealedStore {
    store: Arc<dyn Store>,
    sealer: Sealer,
    observer: Arc<dyn Observer>,
    sealed_requests: SealedRequests,
}

/// Returns `true` if a stored fingerprint was written by an encrypting gateway.
pub fn is_sealed(fingerprint: &Fingerprint) -> bool {
    blind_index::is_enciphered(fingerprint)
}

impl SealedStore {
    /// Wraps `store`. `observer` is notified of records that cannot be decrypted.
    pub fn new(store: Arc<dyn Store>, sealer: Sealer, observer: Arc<dyn Observer>) -> Self {
        Self { store, sealer, observer, sealed_requests: SealedRequests::default() }
    }

    /// Returns the request as the inner store sees it.
    fn seal_request(&self, ask: &ClaimRequest) -> Result<Arc<ClaimRequest>, StoreError> {
        if is_sealed(&ask.fingerprint) {
            let why =
                format!("fingerprints of version {} cannot be sealed; allowed is 0 to 127", ask.fingerprint.version);
            return Err(StoreError::new(ErrorKind::Rejected, self.store_name(), why));
        }
        Ok(Arc::new(self.sealer.seal_request_fields(ask)))
    }

    /// Returns the lease as the inner store granted it. A request is encrypted once, so that its holder can name the
    /// stored bytes again.
    fn seal_lease(&self, lease: &Lease) -> Result<Lease, StoreError> {
        let request = match self.sealed_requests.find(&lease.request) {
            Some(sealed) => sealed,
            None => self.seal_request(&lease.request)?,
        };
        Ok(Lease { request, ..lease.clone() })
    }

    fn seal_settlement(&self, at: &Address, fingerprint: &Fingerprint, attempt: u32, end: &Settlement) -> Settlement {
        let failed = matches!(end, Settlement::Complete { failed: true, .. });
        let place = AssociatedData { kind: SealedKind::Record, address: at, fingerprint, attempt, failed };
        end.map_record(|record| self.sealer.seal(&place, record))
    }

    /// Decrypts the outcome of a claim or read.
    fn open_outcome(&self, at: &Address, found: ClaimOutcome) -> Result<ClaimOutcome, StoreError> {
        Ok(match found {
            InProgress(holder) => InProgress(self.open_holder(at, holder)?),
            OutcomeUnknown(holder) => OutcomeUnknown(self.open_holder(at, holder)?),
            Completed(finished) => Completed(self.open_record(at, finished)?),
            found @ (Granted(_) | TokenSpent) => found,
        })
    }

    fn open_holder(&self, at: &Address, holder: Holder) -> Result<Holder, StoreError> {
        Ok(Holder { fingerprint: self.open_fingerprint(at, &holder.fingerprint)?, ..holder })
    }

    fn open_record(&self, at: &Address, finished: CompletedEntry) -> Result<CompletedEntry, StoreError> {
        // A record that was encrypted later may have a plain fingerprint. It is authenticated with the record, so it is
        // genuine.
        let fingerprint = self.sealer.0.blind_index.decipher(at, &finished.fingerprint).unwrap_or(finished.fingerprint);
        let opened = self.sealer.open(&record_data(at, &fingerprint, &finished), finished.record.clone());
        let record = opened.map_err(|why| self.corrupt_error(at, &why))?;
        Ok(CompletedEntry { fingerprint, record, ..finished })
    }

    fn open_fingerprint(&self, at: &Address, stored: &Fingerprint) -> Result<Fingerprint, StoreError> {
        self.sealer.decipher_fingerprint(at, stored).ok_or_else(|| self.corrupt_error(at, &UnsealError::NotSealed))
    }

    /// Decrypts the outcome for a holder or an operator. A rejected change does not fail because the current record is
    /// unreadable: the outcome is then reported as unknown.
    fn open_settle_outcome(&self, at: &Address, held: SettleOutcome) -> SettleOutcome {
        match held {
            SettleOutcome::ClaimLost(found) => self.claim_lost(at, Some(*found)),
            SettleOutcome::Applied | SettleOutcome::Restored => held,
        }
    }

    fn claim_lost(&self, at: &Address, found: Option<ClaimOutcome>) -> SettleOutcome {
        let told = match found.unwrap_or(TokenSpent) {
            Completed(finished) => {
                let unknown = Holder {
                    fence: finished.fence,
                    attempt: finished.attempt,
                    fingerprint: finished.fingerprint,
                    age: Duration::ZERO,
                    takeover_in: finished.expires_in,
                };
                let unknown = self.open_holder_lossy(at, unknown);
                self.open_record(at, finished).map_or(OutcomeUnknown(unknown), Completed)
            }
            InProgress(holder) => InProgress(self.open_holder_lossy(at, holder)),
            OutcomeUnknown(holder) => OutcomeUnknown(self.open_holder_lossy(at, holder)),
            found @ (Granted(_) | TokenSpent) => found,
        };
        SettleOutcome::ClaimLost(Box::new(told))
    }

    fn open_holder_lossy(&self, at: &Address, holder: Holder) -> Holder {
        let fingerprint = self.sealer.decipher_fingerprint(at, &holder.fingerprint).unwrap_or(holder.fingerprint);
        Holder { fingerprint, ..holder }
    }

    fn corrupt_error(&self, at: &Address, why: &UnsealError) -> StoreError {
        self.observer.on_event(&EngineEvent::RecordUnreadable(at));
        let at = mask(&at.to_string());
        let why = format!("what is at {at} {why}; it is not answered from");
        StoreError::new(ErrorKind::Corrupt, self.store_name(), why)
    }

    fn store_name(&self) -> &'static str {
        self.store.guarantees().store
    }
}

fn record_data<'a>(at: &'a Address, fingerprint: &'a Fingerprint, finished: &CompletedEntry) -> AssociatedData<'a> {
    let CompletedEntry { attempt, failed, .. } = *finished;
    AssociatedData { kind: SealedKind::Record, address: at, fingerprint, attempt, failed }
}

impl Sealer {
    /// Encrypts the label together with the tags, which cannot be recovered from their keyed form.
    fn seal_request_fields(&self, ask: &ClaimRequest) -> ClaimRequest {
        let tags = ask.tags.as_bytes();
        let mut label = BytesMut::with_capacity(4 + tags.len() + ask.label.len());
        label.put_u32_le(tags.len() as u32);
        label.put_slice(tags);
        label.put_slice(&ask.label);
        ClaimRequest {
            fingerprint: self.0.blind_index.encipher(&ask.address, &ask.fingerprint),
            tags: self.0.blind_index.index_tags(&ask.tags),
            label: self.seal(&label_data(&ask.address, &ask.fingerprint), &label),
            ..ask.clone()
        }
    }

    /// Returns the request's own fingerprint, or `None` if it is stored plain and plain records are not accepted.
    fn decipher_fingerprint(&self, at: &Address, stored: &Fingerprint) -> Option<Fingerprint> {
        let deciphered = self.0.blind_index.decipher(at, stored);
        deciphered.or_else(|| self.key_ring().options.accept_plain.then_some(*stored))
    }

    /// Decrypts an entry for operators. If its label cannot be decrypted, the label stays encrypted and the tags stay
    /// keyed.
    fn open_entry_info(&self, listed: &mut EntryInfo) {
        let Some(fingerprint) = self.0.blind_index.decipher(&listed.address, &listed.fingerprint) else { return };
        listed.fingerprint = fingerprint;
        let opened = self.open(&label_data(&listed.address, &fingerprint), listed.label.clone());
        if let Some((tags, label)) = opened.ok().and_then(split_label) {
            (listed.tags, listed.label) = (tags, label);
        }
    }
}

fn label_data<'a>(at: &'a Address, fingerprint: &'a Fingerprint) -> AssociatedData<'a> {
    AssociatedData { kind: SealedKind::Label, address: at, fingerprint, attempt: 0, failed: false }
}

fn split_label(mut opened: Bytes) -> Option<(Tags, Bytes)> {
    let (length, _) = opened.split_first_chunk::<4>()?;
    let tags = u32::from_le_bytes(*length) as usize;
    let label = (opened.len() - 4 >= tags).then(|| opened.split_off(4 + tags))?;
    Some((Tags::from_bytes(opened.slice(4..))?, label))
}

/// Encrypts journal files, because they contain complete answers.
impl ibid::journal::JournalSeal for Sealer {
    fn seal(&self, at: &Address, plain: &[u8]) -> Bytes {
        self.seal(&journal_data(at), plain)
    }

    fn open(&self, at: &Address, sealed: Bytes) -> Option<Bytes> {
        self.open(&journal_data(at), sealed).ok()
    }
}

fn journal_data(at: &Address) -> AssociatedData<'_> {
    let fingerprint = &Fingerprint::NONE;
    AssociatedData { kind: SealedKind::Journal, address: at, fingerprint, attempt: 0, failed: false }
}

impl Store for SealedStore {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        StoreFuture::boxed(async move {
            let sealed = match self.sealed_requests.find(ask) {
                Some(sealed) => sealed,
                None => self.seal_request(ask)?,
            };
            match self.store.claim(&sealed).await? {
                Granted(lease) => {
                    self.sealed_requests.insert(ask, sealed);
                    Ok(Granted(Lease { request: ask.clone(), ..lease }))
                }
                found => self.open_outcome(&ask.address, found),
            }
        })
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let held = self.store.extend(&self.seal_lease(lease)?, hold).await?;
            Ok(self.open_settle_outcome(&lease.request.address, held))
        })
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let Lease { request: ask, attempt, .. } = lease;
            let end = self.seal_settlement(&ask.address, &ask.fingerprint, *attempt, end);
            let held = self.store.settle(&self.seal_lease(lease)?, &end).await?;
            self.sealed_requests.remove(&ask.token);
            Ok(self.open_settle_outcome(&ask.address, held))
        })
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        self.store.wait(at, seen, limit)
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::boxed(
            async move { self.store.get(at).await?.map(|found| self.open_outcome(at, found)).transpose() },
        )
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        self.store.sweep(at_most)
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self
    }

    /// Not encrypted: counters see only hashes of tenants.
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        self.store.counters()
    }

    fn guarantees(&self) -> Guarantees {
        self.store.guarantees()
    }
}

impl StoreAdmin for SealedStore {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        StoreFuture::boxed(async move {
            let filter = self.sealer.0.blind_index.index_filter(filter);
            let mut page = self.store.admin().list(&filter, from, at_most).await?;
            page.entries.iter_mut().for_each(|listed| self.sealer.open_entry_info(listed));
            Ok(page)
        })
    }

    /// Encrypts the record for the holder `seen`. If that holder is not there, or is replaced meanwhile, nothing is
    /// written.
    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let mut sealed = end.clone();
            if matches!(end, Settlement::Complete { .. }) {
                match self.store.get(at).await? {
                    Some(InProgress(holder) | OutcomeUnknown(holder)) if holder.fence == seen => {
                        let fingerprint = self.open_fingerprint(at, &holder.fingerprint)?;
                        sealed = self.seal_settlement(at, &fingerprint, holder.attempt, end);
                    }
                    found => return Ok(self.claim_lost(at, found)),
                }
            }
            Ok(self.open_settle_outcome(at, self.store.admin().resolve(at, seen, &sealed).await?))
        })
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        let forgotten = self.store.admin().forget(at, seen);
        StoreFuture::boxed(async move { Ok(self.open_settle_outcome(at, forgotten.await?)) })
    }

    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let finished = match self.store.get(at).await? {
                Some(Completed(finished)) if finished.fence == seen => finished,
                found => return Ok(self.claim_lost(at, found)),
            };
            let plain = self.sealer.0.blind_index.decipher(at, &finished.fingerprint).unwrap_or(finished.fingerprint);
            let record = self.sealer.seal(&record_data(at, &plain, &finished), &record);
            Ok(self.open_settle_outcome(at, self.store.admin().replace_record(at, seen, record).await?))
        })
    }

    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        self.store.admin().counts()
    }

    fn clock(&self) -> StoreFuture<'_, Option<Duration>> {
        self.store.admin().clock()
    }
}

impl fmt::Debug for SealedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedStore").field("store", &self.store).field("sealer", &self.sealer).finish_non_exhaustive()
    }
}
