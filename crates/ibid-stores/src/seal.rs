//! Sealing at rest, around any store: what the store holds is of no use to who reads it, and cannot be altered unnoticed.
//!
//! - **Records and labels** are encrypted and authenticated (XChaCha20-Poly1305, a random nonce each), records after they
//!   were compressed. What they belong to is authenticated with them: the address, the fingerprint, and of a record the
//!   attempt and whether it is a failure. What was moved or changed does not open.
//! - **Tags and fingerprints** are keyed. A tag can still be searched for, by who has the secret.
//! - **What does not open is never answered.** The call fails as [`ErrorKind::Corrupt`], and the observer is told
//!   ([`Notice::Unreadable`]). A holder that comes back to such a record learns that the outcome is unknown.
//! - **What is not sealed** is treated alike, unless [`Rules::accept_plain`] says otherwise.
//! - **Several keys**: the first seals, all open, and they may change while the store is in use ([`Sealing::rekey`]).
//!
//! In clear remain: when, for how long and in what state something was; its status, attempt, fence, token and size; which
//! entries share a tag. Copies of answers near this store ([`crate::near`]) are outside of it: this process's memory holds
//! them in clear.
//!
//! ```
//! use std::sync::Arc;
//! use ibid::{Silent, store::{Memory, Store}};
//! use ibid_stores::seal::{Rules, SealKey, Sealed, Sealing};
//!
//! let key = SealKey::new("2026-11", [7; 32]).unwrap();
//! let sealing = Sealing::new(key, Vec::new(), &[9; 32], Rules::default());
//! let store: Arc<dyn Store> = Arc::new(Sealed::new(Arc::new(Memory::default()), sealing, Arc::new(Silent)));
//! assert_eq!(store.promise().store, "memory");
//! ```

use std::{sync::Arc, time::Duration};

use bytes::{BufMut, Bytes, BytesMut};
use ibid::{
    Notice, Observer, mask,
    store::{
        Address, Ask, Claim, Counts, Cursor, End, ErrorKind, Fence, Filter, Fingerprint, Finished, Held, Holder, Lease,
        Listed, Operators, Page, Promise, Store, StoreError, StoreFuture, Swept, Tags,
    },
};

use self::sealed::{Kind, Place};
pub use self::{
    keys::{Rules, SealKey, Sealing},
    sealed::{Unopened, sealed_with},
};

mod hidden;
mod keys;
mod reseal;
mod sealed;

pub use self::reseal::Resealed;

/// A store that holds nothing in clear.
#[derive(Debug)]
pub struct Sealed {
    store: Arc<dyn Store>,
    sealing: Sealing,
    observer: Told,
}

/// Who is told what does not open.
struct Told(Arc<dyn Observer>);

/// Whether a fingerprint, as a store holds it, was written by a gateway that seals.
pub fn is_sealed(fingerprint: &Fingerprint) -> bool {
    hidden::is_enciphered(fingerprint)
}

impl Sealed {
    /// Around `store`. `observer` is told what does not open.
    pub fn new(store: Arc<dyn Store>, sealing: Sealing, observer: Arc<dyn Observer>) -> Self {
        Self { store, sealing, observer: Told(observer) }
    }

    /// An ask as the store is to see it.
    fn hidden(&self, ask: &Ask) -> Result<Arc<Ask>, StoreError> {
        if is_sealed(&ask.fingerprint) {
            let why =
                format!("fingerprints of version {} cannot be sealed; allowed is 0 to 127", ask.fingerprint.version);
            return Err(StoreError::new(ErrorKind::Rejected, self.name(), why));
        }
        Ok(Arc::new(self.sealing.hide(ask)))
    }

    fn hidden_lease(&self, lease: &Lease) -> Result<Lease, StoreError> {
        Ok(Lease { ask: self.hidden(&lease.ask)?, ..lease.clone() })
    }

    async fn claim(&self, ask: &Arc<Ask>) -> Result<Claim, StoreError> {
        match self.store.claim(&self.hidden(ask)?).await? {
            Claim::Granted(lease) => Ok(Claim::Granted(Lease { ask: ask.clone(), ..lease })),
            found => self.opened(&ask.address, found),
        }
    }

    async fn extend(&self, lease: &Lease, hold: Duration) -> Result<Held, StoreError> {
        let held = self.store.extend(&self.hidden_lease(lease)?, hold).await?;
        Ok(self.answered(&lease.ask.address, held))
    }

    async fn settle(&self, lease: &Lease, end: &End) -> Result<Held, StoreError> {
        let Lease { ask, attempt, .. } = lease;
        let end = self.sealed_end(&ask.address, &ask.fingerprint, *attempt, end);
        let held = self.store.settle(&self.hidden_lease(lease)?, &end).await?;
        Ok(self.answered(&ask.address, held))
    }

    async fn get(&self, at: &Address) -> Result<Option<Claim>, StoreError> {
        self.store.get(at).await?.map(|found| self.opened(at, found)).transpose()
    }

    async fn list(&self, filter: &Filter, from: Cursor, at_most: u32) -> Result<Page, StoreError> {
        let filter = self.sealing.0.hiding.filter(filter);
        let mut page = self.store.operators().list(&filter, from, at_most).await?;
        page.entries.iter_mut().for_each(|listed| self.sealing.show(listed));
        Ok(page)
    }

    /// The record is sealed for the holder that was seen. If that is no longer there, or never was, nothing is written;
    /// if it goes meanwhile, the store writes nothing either.
    async fn resolve(&self, at: &Address, seen: Fence, end: &End) -> Result<Held, StoreError> {
        let end = match end {
            End::Complete { .. } => match self.store.get(at).await? {
                Some(Claim::Busy(holder) | Claim::Unknown(holder)) if holder.fence == seen => {
                    let fingerprint = self.fingerprint(at, &holder.fingerprint)?;
                    self.sealed_end(at, &fingerprint, holder.attempt, end)
                }
                found => return Ok(self.lost(at, found)),
            },
            End::Release | End::Park { .. } => end.clone(),
        };
        Ok(self.answered(at, self.store.operators().resolve(at, seen, &end).await?))
    }

    async fn replace(&self, at: &Address, seen: Fence, record: &[u8]) -> Result<Held, StoreError> {
        let finished = match self.store.get(at).await? {
            Some(Claim::Done(finished)) if finished.fence == seen => finished,
            found => return Ok(self.lost(at, found)),
        };
        let fingerprint = self.sealing.0.hiding.decipher(at, &finished.fingerprint).unwrap_or(finished.fingerprint);
        let record = self.sealing.seal(&place_of(at, &fingerprint, &finished), record);
        Ok(self.answered(at, self.store.operators().replace(at, seen, record).await?))
    }

    fn sealed_end(&self, at: &Address, fingerprint: &Fingerprint, attempt: u32, end: &End) -> End {
        match end {
            End::Complete { failed, record, outline, keep } => {
                let place = Place { kind: Kind::Record, at, fingerprint, attempt, failed: *failed };
                let record = self.sealing.seal(&place, record);
                End::Complete { failed: *failed, record, outline: *outline, keep: *keep }
            }
            End::Release | End::Park { .. } => end.clone(),
        }
    }

    /// What a claim or a look found, in clear.
    fn opened(&self, at: &Address, found: Claim) -> Result<Claim, StoreError> {
        Ok(match found {
            Claim::Busy(holder) => Claim::Busy(self.opened_holder(at, holder)?),
            Claim::Unknown(holder) => Claim::Unknown(self.opened_holder(at, holder)?),
            Claim::Done(finished) => Claim::Done(self.opened_record(at, finished)?),
            found @ (Claim::Granted(_) | Claim::Spent) => found,
        })
    }

    fn opened_holder(&self, at: &Address, holder: Holder) -> Result<Holder, StoreError> {
        Ok(Holder { fingerprint: self.fingerprint(at, &holder.fingerprint)?, ..holder })
    }

    fn opened_record(&self, at: &Address, finished: Finished) -> Result<Finished, StoreError> {
        // In clear it may be, of a record that was sealed later: it is sealed along, so it is none but the true one.
        let fingerprint = self.sealing.0.hiding.decipher(at, &finished.fingerprint).unwrap_or(finished.fingerprint);
        let opened = self.sealing.open(&place_of(at, &fingerprint, &finished), finished.record.clone());
        let record = opened.map_err(|why| self.corrupt(at, &why))?;
        Ok(Finished { fingerprint, record, ..finished })
    }

    fn fingerprint(&self, at: &Address, stored: &Fingerprint) -> Result<Fingerprint, StoreError> {
        self.sealing.fingerprint(at, stored).ok_or_else(|| self.corrupt(at, &Unopened::Plain))
    }

    /// What a holder or an operator is told. A change that was not made need not fail because of what is there instead:
    /// of a record that does not open they learn that nobody knows how it ended.
    fn answered(&self, at: &Address, held: Held) -> Held {
        match held {
            Held::Lost(found) => self.lost(at, Some(*found)),
            Held::Held | Held::Restored => held,
        }
    }

    fn lost(&self, at: &Address, found: Option<Claim>) -> Held {
        let told = match found.unwrap_or(Claim::Spent) {
            Claim::Done(finished) => {
                let unknown = Holder {
                    fence: finished.fence,
                    attempt: finished.attempt,
                    fingerprint: self.sealing.fingerprint(at, &finished.fingerprint).unwrap_or(finished.fingerprint),
                    age: Duration::ZERO,
                    takeover_in: finished.expires_in,
                };
                self.opened_record(at, finished).map_or(Claim::Unknown(unknown), Claim::Done)
            }
            Claim::Busy(holder) => Claim::Busy(self.told_holder(at, holder)),
            Claim::Unknown(holder) => Claim::Unknown(self.told_holder(at, holder)),
            found @ (Claim::Granted(_) | Claim::Spent) => found,
        };
        Held::Lost(Box::new(told))
    }

    fn told_holder(&self, at: &Address, holder: Holder) -> Holder {
        Holder {
            fingerprint: self.sealing.fingerprint(at, &holder.fingerprint).unwrap_or(holder.fingerprint),
            ..holder
        }
    }

    fn corrupt(&self, at: &Address, why: &Unopened) -> StoreError {
        self.observer.0.noticed(&Notice::Unreadable(at));
        let at = mask(&at.to_string());
        StoreError::new(ErrorKind::Corrupt, self.name(), format!("what is at {at} {why}; it is not answered from"))
    }

    fn name(&self) -> &'static str {
        self.store.promise().store
    }
}

fn place_of<'a>(at: &'a Address, fingerprint: &'a Fingerprint, finished: &Finished) -> Place<'a> {
    Place { kind: Kind::Record, at, fingerprint, attempt: finished.attempt, failed: finished.failed }
}

impl Sealing {
    /// The label is sealed with the tags, which cannot be had back from what the store sees of them.
    fn hide(&self, ask: &Ask) -> Ask {
        let tags = ask.tags.as_bytes();
        let mut label = BytesMut::with_capacity(4 + tags.len() + ask.label.len());
        label.put_u32_le(tags.len() as u32);
        label.put_slice(tags);
        label.put_slice(&ask.label);
        Ask {
            fingerprint: self.0.hiding.encipher(&ask.address, &ask.fingerprint),
            tags: self.0.hiding.tags(&ask.tags),
            label: self.seal(&label_at(&ask.address, &ask.fingerprint), &label),
            ..ask.clone()
        }
    }

    /// As the request has it. `None` if it is in clear, and what is in clear is not believed.
    fn fingerprint(&self, at: &Address, stored: &Fingerprint) -> Option<Fingerprint> {
        let deciphered = self.0.hiding.decipher(at, stored);
        deciphered.or_else(|| self.with().rules.accept_plain.then_some(*stored))
    }

    /// Shows operators what can be shown: an entry whose label does not open keeps it sealed, and its tags keyed.
    fn show(&self, listed: &mut Listed) {
        let Some(fingerprint) = self.0.hiding.decipher(&listed.address, &listed.fingerprint) else { return };
        listed.fingerprint = fingerprint;
        let opened = self.open(&label_at(&listed.address, &fingerprint), listed.label.clone());
        if let Some((tags, label)) = opened.ok().and_then(label_parts) {
            (listed.tags, listed.label) = (tags, label);
        }
    }
}

fn label_at<'a>(at: &'a Address, fingerprint: &'a Fingerprint) -> Place<'a> {
    Place { kind: Kind::Label, at, fingerprint, attempt: 0, failed: false }
}

fn label_parts(mut opened: Bytes) -> Option<(Tags, Bytes)> {
    let (length, _) = opened.split_first_chunk::<4>()?;
    let tags = u32::from_le_bytes(*length) as usize;
    let label = (opened.len() - 4 >= tags).then(|| opened.split_off(4 + tags))?;
    Some((Tags::from_bytes(opened.slice(4..))?, label))
}

/// The journal's files are sealed like what the store holds: an answer waits there in full.
impl ibid::JournalSeal for Sealing {
    fn seal(&self, at: &Address, plain: &[u8]) -> Bytes {
        self.seal(&journal_at(at), plain)
    }

    fn open(&self, at: &Address, sealed: Bytes) -> Option<Bytes> {
        self.open(&journal_at(at), sealed).ok()
    }
}

fn journal_at(at: &Address) -> Place<'_> {
    Place { kind: Kind::Journal, at, fingerprint: &Fingerprint::NONE, attempt: 0, failed: false }
}

impl Store for Sealed {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        StoreFuture::boxed(self.claim(ask))
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.extend(lease, hold))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.settle(lease, end))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        self.store.wait(at, seen, limit)
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        StoreFuture::boxed(self.get(at))
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        self.store.sweep(at_most)
    }

    fn operators(&self) -> &dyn Operators {
        self
    }

    /// It is told hashes of tenants only.
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        self.store.counters()
    }

    fn promise(&self) -> Promise {
        self.store.promise()
    }
}

impl Operators for Sealed {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        StoreFuture::boxed(self.list(filter, from, at_most))
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.resolve(at, seen, end))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        let forgotten = self.store.operators().forget(at, seen);
        StoreFuture::boxed(async move { Ok(self.answered(at, forgotten.await?)) })
    }

    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move { self.replace(at, seen, &record).await })
    }

    fn counts(&self) -> StoreFuture<'_, Counts> {
        self.store.operators().counts()
    }
}

impl std::fmt::Debug for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Told")
    }
}
