//! Re-encrypts old records with the first key, one at a time, while gateways keep running.

use ibid::store::{Address, ClaimOutcome, SettleOutcome, Store as _, StoreError};

use super::{SealedStore, record_data, sealing_key_id};

/// The result of [`SealedStore::reseal`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum ResealOutcome {
    /// The record is now encrypted with the first key.
    Done {
        /// Id of the previous key, or `None` if the record was not encrypted.
        from: Option<String>,
    },
    /// The record was already encrypted with the first key.
    AlreadyCurrent,
    /// There is no completed record, or it changed meanwhile.
    NoRecord,
}

impl SealedStore {
    /// Encrypts the record at an address with the first key, if it has another key or none. This is a compare-and-set:
    /// a concurrent change of the entry wins.
    ///
    /// # Errors
    /// Returns an error if the store fails, or if the record cannot be decrypted
    /// ([`ErrorKind::Corrupt`](ibid::store::ErrorKind::Corrupt)).
    pub async fn reseal(&self, at: &Address) -> Result<ResealOutcome, StoreError> {
        let Some(ClaimOutcome::Completed(finished)) = self.store.get(at).await? else {
            return Ok(ResealOutcome::NoRecord);
        };
        let from = sealing_key_id(&finished.record);
        let fence = finished.fence;
        // Decrypt even if the key is current: an operator wants to know about unreadable records.
        let opened = self.open_record(at, finished)?;
        if from.as_deref() == Some(self.sealer.key_ring().sealing_key().0) {
            return Ok(ResealOutcome::AlreadyCurrent);
        }
        let record = self.sealer.seal(&record_data(at, &opened.fingerprint, &opened), &opened.record);
        match self.store.admin().replace_record(at, fence, record).await? {
            SettleOutcome::Applied | SettleOutcome::Restored => Ok(ResealOutcome::Done { from }),
            SettleOutcome::ClaimLost(_) => Ok(ResealOutcome::NoRecord),
        }
    }

    /// Returns the id of the key that encrypts.
    pub fn current_key_id(&self) -> String {
        self.sealer.key_ring().sealing_key().0.to_owned()
    }

    /// Returns the inner store, which shows everything in its stored form, for handling unreadable records.
    pub fn inner_store(&self) -> &dyn ibid::store::Store {
        &*self.store
    }
}
