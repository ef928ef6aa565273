//! What operators see and change: `last`'s entries. What they change there, `first` is told.

use bytes::Bytes;
use ibid::store::{
    Address, Claim, Counts, Cursor, End, ErrorKind, Fence, Filter, Held, Operators, Page, StoreError, StoreFuture,
};
use tokio::time::Instant;

use super::{
    Parts, Tiered,
    copy::{self, Copied},
};

/// How often a change is tried in `first` while others change the same entry.
const ROUNDS: u32 = 4;

impl Parts {
    async fn resolve(&self, at: &Address, seen: Fence, end: &End) -> Result<Held, StoreError> {
        let held = self.last.operators().resolve(at, seen, end).await?;
        let told = match (&held, end) {
            (Held::Held | Held::Restored, End::Release) => self.forget_in_first(at).await,
            (Held::Held | Held::Restored, End::Complete { .. }) => self.copy_to_first(at).await,
            (Held::Held | Held::Restored, End::Park { .. }) => Ok(()),
            (Held::Lost(found), _) if **found == Claim::Spent && self.is_loose() => {
                return self.resolve_in_first(at, seen, end, held).await;
            }
            (Held::Lost(_), _) => Ok(()),
        };
        if let Err(error) = told {
            self.fell_back("resolve", &error);
        }
        Ok(held)
    }

    /// `last` has nothing: the holder that is meant may be one that ran solo.
    async fn resolve_in_first(
        &self, at: &Address, seen: Fence, end: &End, otherwise: Held,
    ) -> Result<Held, StoreError> {
        let Some(Claim::Unknown(holder)) = self.first.get(at).await? else { return Ok(otherwise) };
        if holder.fence != seen {
            return Ok(otherwise);
        }
        let end = match end {
            End::Complete { failed, record, outline, keep } => {
                let record = copy::wrapped(seen, holder.attempt, holder.fingerprint, record);
                End::Complete { failed: *failed, record, outline: *outline, keep: *keep }
            }
            other => other.clone(),
        };
        self.first.operators().resolve(at, seen, &end).await
    }

    async fn forget(&self, at: &Address, seen: Fence) -> Result<Held, StoreError> {
        let held = self.last.operators().forget(at, seen).await?;
        match &held {
            Held::Held | Held::Restored => {
                if let Err(error) = self.forget_in_first(at).await {
                    self.fell_back("forget", &error);
                    self.trust.raise(unforgotten(error)).await?;
                }
                Ok(held)
            }
            Held::Lost(found) if **found == Claim::Spent => self.forget_leftovers(at, seen, held).await,
            Held::Lost(_) => Ok(held),
        }
    }

    /// `last` has nothing: what is in `first` is what an earlier forget could not reach, or what ran solo.
    async fn forget_leftovers(&self, at: &Address, seen: Fence, otherwise: Held) -> Result<Held, StoreError> {
        let (fence, is_meant) = match self.first.get(at).await? {
            Some(Claim::Done(finished)) => (finished.fence, copy::opened(finished).finished.fence == seen),
            Some(Claim::Busy(holder) | Claim::Unknown(holder)) => {
                (holder.fence, holder.fence == seen && self.is_loose())
            }
            _ => return Ok(otherwise),
        };
        if !is_meant {
            return Ok(otherwise);
        }
        match self.first.operators().forget(at, fence).await? {
            Held::Held | Held::Restored => Ok(Held::Held),
            Held::Lost(_) => Ok(otherwise),
        }
    }

    async fn replace(&self, at: &Address, seen: Fence, record: Bytes) -> Result<Held, StoreError> {
        let held = self.last.operators().replace(at, seen, record.clone()).await?;
        if matches!(held, Held::Held | Held::Restored)
            && let Err(error) = self.replace_in_first(at, &record).await
        {
            self.fell_back("replace", &error);
            self.trust.raise(unforgotten(error)).await?;
        }
        Ok(held)
    }

    async fn replace_in_first(&self, at: &Address, record: &Bytes) -> Result<(), StoreError> {
        // The old bytes may still be on their way there.
        self.forgets.lock().add(at);
        let Some(Claim::Done(here)) = self.first.get(at).await? else { return Ok(()) };
        let fence = here.fence;
        let of = copy::opened(here).finished;
        let record = copy::wrapped(of.fence, of.attempt, of.fingerprint, record);
        match self.first.operators().replace(at, fence, record).await? {
            Held::Held | Held::Restored => Ok(()),
            Held::Lost(_) => self.forget_in_first(at).await,
        }
    }

    /// Puts what `last` has remembered in the place of an unknown entry.
    async fn copy_to_first(&self, at: &Address) -> Result<(), StoreError> {
        let told = Instant::now();
        if let (Some(Claim::Done(finished)), Some(Claim::Unknown(holder))) =
            (self.last.get(at).await?, self.first.get(at).await?)
        {
            let end = Copied::of_finished(&finished, told).now();
            let _: Held = self.first.operators().resolve(at, holder.fence, &end).await?;
        }
        Ok(())
    }

    /// Forgets whatever is in `first`. Its token is spent there, so that what is still on its way there is lost.
    async fn forget_in_first(&self, at: &Address) -> Result<(), StoreError> {
        self.forgets.lock().add(at);
        for _ in 0..ROUNDS {
            let fence = match self.first.get(at).await? {
                Some(Claim::Done(finished)) => finished.fence,
                Some(Claim::Busy(holder) | Claim::Unknown(holder)) => holder.fence,
                Some(Claim::Granted(_) | Claim::Spent) | None => return Ok(()),
            };
            if let Held::Held | Held::Restored = self.first.operators().forget(at, fence).await? {
                return Ok(());
            }
        }
        Err(StoreError::new(ErrorKind::NotApplied, "tiered", "the entry changed in the first store at every try"))
    }
}

/// Without a generation to raise, whoever asked has to ask again.
fn unforgotten(error: StoreError) -> StoreError {
    let why = format!("done in the store that decides, but the first one could not be told; repeat it ({error})");
    StoreError::new(ErrorKind::Ambiguous, "tiered", why)
}

impl Operators for Tiered {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        self.0.last.operators().list(filter, from, at_most)
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.0.resolve(at, seen, end))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.0.forget(at, seen))
    }

    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.0.replace(at, seen, record))
    }

    fn counts(&self) -> StoreFuture<'_, Counts> {
        self.0.last.operators().counts()
    }
}
