//! What operators do about intents: free the intent of a key, and let a held key run.
//!
//! The [guard](crate::policy::IntentGuard) of a route claims the intent of each request at an address of its own. The
//! entry there [names](Fingerprint::key_address) the key that came first. A key that the guard holds is parked, and a
//! note says so.

use bytes::Bytes;

use crate::{
    label::LabelText,
    store::{Address, ClaimOutcome, EntryInfo, Fence, Fingerprint, SettleOutcome, Store, StoreError},
};

/// The version of a fingerprint that is the address of a key.
const KEY_ADDRESS_VERSION: u8 = 100;

/// The content of a hold's note.
pub(crate) const HELD: &[u8] = b"held";
const PERMITTED: &[u8] = b"permitted";

impl Fingerprint {
    pub(crate) fn of_key_address(address: &Address) -> Self {
        Self { version: KEY_ADDRESS_VERSION, digest: address.0 }
    }

    /// The address of the key that an intent, or the note of a hold, names. `None` if the entry is neither.
    pub fn key_address(&self) -> Option<Address> {
        (self.version == KEY_ADDRESS_VERSION).then_some(Address(self.digest))
    }
}

/// The note of a key that an intent guard holds, or held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldKey {
    /// The address of the key that began the same operation first.
    pub first: Address,
    /// Whether an operator lets the key run.
    pub is_permitted: bool,
    fence: Fence,
}

impl HeldKey {
    /// Reads the note of the key at this address. `None` if no guard held it.
    ///
    /// # Errors
    /// The store failed.
    pub async fn find(store: &dyn Store, key: &Address) -> Result<Option<Self>, StoreError> {
        let Some(ClaimOutcome::Completed(note)) = store.get(&key.of_hold()).await? else { return Ok(None) };
        let Some(first) = note.fingerprint.key_address() else { return Ok(None) };
        Ok(Some(Self { first, is_permitted: note.record == PERMITTED, fence: note.fence }))
    }

    /// Lets the key at this address run, although another key has its intent. Call it before the key is released.
    /// Returns `false` if the note has changed meanwhile.
    ///
    /// # Errors
    /// The store failed.
    pub async fn permit(&self, store: &dyn Store, key: &Address) -> Result<bool, StoreError> {
        let permitted = Bytes::from_static(PERMITTED);
        let replaced = store.admin().replace_record(&key.of_hold(), self.fence, permitted).await?;
        Ok(!matches!(replaced, SettleOutcome::ClaimLost(_)))
    }
}

/// Frees the intent of a key that an operator releases or forgets. Call it before the key itself is changed, so that a
/// failure in between leaves no intent whose key is free.
///
/// # Errors
/// The store failed; the intent may still be there.
pub async fn free_intent(store: &dyn Store, key: &EntryInfo) -> Result<(), StoreError> {
    let Some(intent) = LabelText::decode(&key.label).and_then(|label| label.intent) else { return Ok(()) };
    let (fence, fingerprint) = match store.get(&intent).await? {
        Some(ClaimOutcome::InProgress(holder) | ClaimOutcome::OutcomeUnknown(holder)) => {
            (holder.fence, holder.fingerprint)
        }
        Some(ClaimOutcome::Completed(entry)) => (entry.fence, entry.fingerprint),
        Some(ClaimOutcome::Granted(_) | ClaimOutcome::TokenSpent) | None => return Ok(()),
    };
    if fingerprint.key_address() == Some(key.address) {
        let _: SettleOutcome = store.admin().forget(&intent, fence).await?;
    }
    Ok(())
}

/// Forgets that a guard held, or permitted, the key at this address.
///
/// # Errors
/// The store failed.
pub async fn forget_hold(store: &dyn Store, key: &Address) -> Result<(), StoreError> {
    if let Some(held) = HeldKey::find(store, key).await? {
        let _: SettleOutcome = store.admin().forget(&key.of_hold(), held.fence).await?;
    }
    Ok(())
}
