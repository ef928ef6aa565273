//! Administrative calls read and change the authority's entries, and then update the front.

use ibid::store::{EntryCounts, EntryFilter, EntryPage, ListCursor};

use super::*;
use ClaimOutcome::{Completed, Granted, InProgress, OutcomeUnknown, TokenSpent};
use SettleOutcome::{Applied, ClaimLost, Restored};

/// Maximum attempts at a change in the front while other calls change the same entry.
const MAX_ROUNDS: u32 = 4;

impl TieredInner {
    /// The authority has no entry: the call may mean a front-only claim.
    async fn resolve_in_front(
        &self, at: &Address, seen: Fence, end: &Settlement, otherwise: SettleOutcome,
    ) -> Result<SettleOutcome, StoreError> {
        let Some(OutcomeUnknown(holder)) = self.front.get(at).await? else { return Ok(otherwise) };
        if holder.fence != seen {
            return Ok(otherwise);
        }
        let head = |record: &Bytes| front_copy::encode_confirmed(seen, holder.attempt, holder.fingerprint, record);
        self.front.admin().resolve(at, seen, &end.map_record(head)).await
    }

    /// The authority has no entry: the front's entry is left from a forget that could not reach it, or from a
    /// front-only claim.
    async fn forget_front_leftovers(
        &self, at: &Address, seen: Fence, otherwise: SettleOutcome,
    ) -> Result<SettleOutcome, StoreError> {
        let (fence, is_meant) = match self.front.get(at).await? {
            Some(Completed(finished)) => (finished.fence, front_copy::decode(finished).entry.fence == seen),
            Some(InProgress(holder) | OutcomeUnknown(holder)) => {
                (holder.fence, holder.fence == seen && self.is_loose())
            }
            _ => return Ok(otherwise),
        };
        if !is_meant {
            return Ok(otherwise);
        }
        match self.front.admin().forget(at, fence).await? {
            Applied | Restored => Ok(Applied),
            ClaimLost(_) => Ok(otherwise),
        }
    }

    async fn replace_in_front(&self, at: &Address, record: &Bytes) -> Result<(), StoreError> {
        // A background task may still carry the old bytes to the front.
        self.recent_forgets.lock().add(at);
        let Some(Completed(here)) = self.front.get(at).await? else { return Ok(()) };
        let fence = here.fence;
        let of = front_copy::decode(here).entry;
        let record = front_copy::encode_confirmed(of.fence, of.attempt, of.fingerprint, record);
        match self.front.admin().replace_record(at, fence, record).await? {
            Applied | Restored => Ok(()),
            ClaimLost(_) => self.forget_in_front(at).await,
        }
    }

    /// Replaces an entry with unknown outcome in the front with the authority's answer.
    async fn copy_to_front(&self, at: &Address) -> Result<(), StoreError> {
        let told = Instant::now();
        if let (Some(Completed(finished)), Some(OutcomeUnknown(holder))) =
            (self.authority.get(at).await?, self.front.get(at).await?)
        {
            let end = FrontSettlement::from_completed(&finished, told).adjusted_for_delay();
            let _: SettleOutcome = self.front.admin().resolve(at, holder.fence, &end).await?;
        }
        Ok(())
    }

    /// Removes any entry in the front. This spends its token there, so calls still on their way find the claim lost.
    async fn forget_in_front(&self, at: &Address) -> Result<(), StoreError> {
        self.recent_forgets.lock().add(at);
        for _ in 0..MAX_ROUNDS {
            let fence = match self.front.get(at).await? {
                Some(Completed(finished)) => finished.fence,
                Some(InProgress(holder) | OutcomeUnknown(holder)) => holder.fence,
                Some(Granted(_) | TokenSpent) | None => return Ok(()),
            };
            if let Applied | Restored = self.front.admin().forget(at, fence).await? {
                return Ok(());
            }
        }
        Err(StoreError::new(ErrorKind::NotApplied, "tiered", "the entry changed in the first store at every try"))
    }
}

/// Without a generation counter, the operator has to repeat the call.
fn front_not_updated(error: StoreError) -> StoreError {
    let why = format!("done in the store that decides, but the first one could not be told; repeat it ({error})");
    StoreError::new(ErrorKind::Ambiguous, "tiered", why)
}

impl StoreAdmin for TieredInner {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        self.authority.admin().list(filter, from, at_most)
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let held = self.authority.admin().resolve(at, seen, end).await?;
            let told = match (&held, end) {
                (Applied | Restored, Settlement::Release) => self.forget_in_front(at).await,
                (Applied | Restored, Settlement::Complete { .. }) => self.copy_to_front(at).await,
                (Applied | Restored, Settlement::Park { .. }) => Ok(()),
                (ClaimLost(found), _) if **found == TokenSpent && self.is_loose() => {
                    return self.resolve_in_front(at, seen, end, held).await;
                }
                (ClaimLost(_), _) => Ok(()),
            };
            self.front_answer("resolve", told);
            Ok(held)
        })
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let held = self.authority.admin().forget(at, seen).await?;
            match &held {
                Applied | Restored => {
                    if let Err(error) = self.forget_in_front(at).await {
                        self.report_front_error("forget", &error);
                        self.generation.raise(front_not_updated(error)).await?;
                    }
                    Ok(held)
                }
                ClaimLost(found) if **found == TokenSpent => self.forget_front_leftovers(at, seen, held).await,
                ClaimLost(_) => Ok(held),
            }
        })
    }

    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let held = self.authority.admin().replace_record(at, seen, record.clone()).await?;
            if matches!(held, Applied | Restored)
                && let Err(error) = self.replace_in_front(at, &record).await
            {
                self.report_front_error("replace", &error);
                self.generation.raise(front_not_updated(error)).await?;
            }
            Ok(held)
        })
    }

    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        self.authority.admin().counts()
    }

    fn clock(&self) -> StoreFuture<'_, Option<Duration>> {
        self.authority.admin().clock()
    }
}
