//! Old records under the first key, one at a time, while gateways go on.

use ibid::store::{Address, ClaimOutcome, SettleOutcome, Store as _, StoreError};

use super::{SealedStore, record_data, sealing_key_id};

/// What became of one entry.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum ResealOutcome {
    /// It is sealed with the first key now; before it was with the named one, or with none.
    Done {
        /// The name of the key that it was sealed with.
        from: Option<String>,
    },
    /// It was sealed with the first key already.
    AlreadyCurrent,
    /// There is no record any more, or none yet; or it has changed meanwhile.
    NoRecord,
}

impl SealedStore {
    /// Seals the record at an address with the first key, if it is sealed with another or not at all. A
    /// compare-and-set: whoever changes the entry meanwhile wins.
    ///
    /// # Errors
    /// If the store fails, or the record does not open ([`ErrorKind::Corrupt`](ibid::store::ErrorKind::Corrupt)).
    pub async fn reseal(&self, at: &Address) -> Result<ResealOutcome, StoreError> {
        let Some(ClaimOutcome::Completed(finished)) = self.store.get(at).await? else {
            return Ok(ResealOutcome::NoRecord);
        };
        let from = sealing_key_id(&finished.record);
        let fence = finished.fence;
        // Also what has the right key already: whoever waits for all to be well wants to know if one is not.
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

    /// The name of the key that seals now.
    pub fn current_key_id(&self) -> String {
        self.sealer.key_ring().sealing_key().0.to_owned()
    }

    /// The store beneath, which shows everything as it is held: for who has to deal with what does not open.
    pub fn inner_store(&self) -> &dyn ibid::store::Store {
        &*self.store
    }
}
