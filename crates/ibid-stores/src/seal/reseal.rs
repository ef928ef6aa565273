//! Old records under the first key, one at a time, while gateways go on.

use ibid::store::{Address, Claim, Held, Store as _, StoreError};

use super::{Sealed, place_of, sealed_with};

/// What became of one entry.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Resealed {
    /// It is sealed with the first key now; before it was with the named one, or with none.
    Done {
        /// The name of the key that it was sealed with.
        from: Option<String>,
    },
    /// It was sealed with the first key already.
    Current,
    /// There is no record any more, or none yet; or it has changed meanwhile.
    Gone,
}

impl Sealed {
    /// Seals the record at an address with the first key, if it is sealed with another or not at all. A
    /// compare-and-set: whoever changes the entry meanwhile wins.
    ///
    /// # Errors
    /// If the store fails, or the record does not open ([`ErrorKind::Corrupt`](ibid::store::ErrorKind::Corrupt)).
    pub async fn reseal(&self, at: &Address) -> Result<Resealed, StoreError> {
        let Some(Claim::Done(finished)) = self.store.get(at).await? else { return Ok(Resealed::Gone) };
        let from = sealed_with(&finished.record);
        let fence = finished.fence;
        // Also what has the right key already: whoever waits for all to be well wants to know if one is not.
        let opened = self.opened_record(at, finished)?;
        if from.as_deref() == Some(self.sealing.with().first().0) {
            return Ok(Resealed::Current);
        }
        let record = self.sealing.seal(&place_of(at, &opened.fingerprint, &opened), &opened.record);
        match self.store.operators().replace(at, fence, record).await? {
            Held::Held | Held::Restored => Ok(Resealed::Done { from }),
            Held::Lost(_) => Ok(Resealed::Gone),
        }
    }

    /// The name of the key that seals now.
    pub fn first_key(&self) -> String {
        self.sealing.with().first().0.to_owned()
    }

    /// The store beneath, which shows everything as it is held: for who has to deal with what does not open.
    pub fn beneath(&self) -> &dyn ibid::store::Store {
        &*self.store
    }
}
