//! How claims are kept alive and ended: `last` before the answer, `first` behind it.

use std::{sync::Arc, time::Duration};

use ibid::store::{Ask, Claim, End, Fence, Held, Lease, StoreError};
use tokio::time::Instant;

use super::{
    Parts,
    behind::Errand,
    copy::{self, Copied},
};

/// What a holder says.
#[derive(Clone, Copy)]
enum Says<'a> {
    Extend(Duration),
    Settle(&'a End),
}

impl Parts {
    pub(super) async fn extend(self: &Arc<Self>, lease: &Lease, hold: Duration) -> Result<Held, StoreError> {
        let told = Instant::now();
        let errand = || Errand::Extend { lease: self.in_first(lease), hold, told };
        if lease.solo {
            match self.solo_to_last(lease, Says::Extend(hold)).await {
                Ok(held) => {
                    self.landed(lease, &held);
                    self.restored(lease, &held);
                    if !matches!(held, Held::Lost(_)) {
                        drop(self.behind(errand()));
                    }
                    return Ok(held);
                }
                Err(error) => return self.extend_solo(lease, hold, error).await,
            }
        }
        let held = self.last.extend(lease, hold).await;
        if let Ok(held) = &held {
            self.restored(lease, held);
        }
        // Also if `last` is away: `first` is to show that somebody runs.
        if !matches!(held, Ok(Held::Lost(_))) && lease.fence != Fence::UNSEEN {
            drop(self.behind(errand()));
        }
        held
    }

    pub(super) async fn settle(self: &Arc<Self>, lease: &Lease, end: &End) -> Result<Held, StoreError> {
        let told = Instant::now();
        let held = if lease.solo {
            match self.solo_to_last(lease, Says::Settle(end)).await {
                Ok(held) => {
                    self.landed(lease, &held);
                    held
                }
                Err(error) => return self.settle_solo(lease, end, error).await,
            }
        } else {
            self.last.settle(lease, end).await?
        };
        let in_first = self.in_first(lease);
        if !matches!(end, End::Park { .. }) {
            self.is_over(&lease.ask);
        }
        let copied = match &held {
            // Nobody knows under which fence it is remembered; the next to ask brings a copy.
            Held::Held | Held::Restored if lease.fence == Fence::UNSEEN && matches!(end, End::Complete { .. }) => None,
            Held::Held | Held::Restored => Some(Copied::of_end(lease, end, told)),
            Held::Lost(found) => match &**found {
                Claim::Done(finished) => Some(Copied::of_finished(finished, told)),
                Claim::Spent => Some(Copied::release()),
                // `first` keeps what it has: free, it would invite a second run while `last` is away.
                Claim::Busy(_) | Claim::Unknown(_) | Claim::Granted(_) => None,
            },
        };
        if let Some(copied) = copied {
            let errand = Errand::End { lease: in_first, copied };
            if matches!(end, End::Release) {
                self.soon(errand).await;
            } else {
                drop(self.behind(errand));
            }
        }
        Ok(held)
    }

    /// `last` is away: the claim goes on in `first`.
    async fn extend_solo(&self, lease: &Lease, hold: Duration, why: StoreError) -> Result<Held, StoreError> {
        match self.extend_in_first(&self.in_first(lease), hold).await {
            Ok(Held::Held | Held::Restored) => Ok(Held::Held),
            Ok(Held::Lost(found)) => lost_in_first(found, why),
            Err(error) => {
                self.fell_back("extend", &error);
                Err(why)
            }
        }
    }

    /// `last` is away: `first` remembers the end, and the error goes up, so that it is journaled for `last`.
    async fn settle_solo(&self, lease: &Lease, end: &End, why: StoreError) -> Result<Held, StoreError> {
        let end = Copied::of_end(lease, end, Instant::now()).now();
        match self.end_in_first(&self.in_first(lease), &end).await {
            Ok(Held::Held | Held::Restored) => Err(why),
            Ok(Held::Lost(found)) => lost_in_first(found, why),
            Err(error) => {
                self.fell_back("settle", &error);
                Err(why)
            }
        }
    }

    /// Tells `last` about a claim that it did not grant. What is absent there is put back, under `first`'s fence.
    ///
    /// Two cases are not that simple. Somebody else's release may have left a free entry: then the claim is made, under
    /// a fence of `last`'s. And from then on, or if a claim reached `last` against all appearance, its token alone names it.
    async fn solo_to_last(&self, lease: &Lease, says: Says<'_>) -> Result<Held, StoreError> {
        let held = self.tell_last(lease, says).await?;
        let Held::Lost(found) = &held else { return Ok(held) };
        match (&**found, says) {
            (Claim::Spent, Says::Settle(End::Release)) => Ok(held),
            (Claim::Spent, _) => {
                let ask = Arc::new(Ask { over: None, ..Ask::clone(&lease.ask) });
                match self.last.claim(&ask).await? {
                    Claim::Granted(own) => match self.tell_last(&own, says).await? {
                        Held::Held | Held::Restored => Ok(Held::Restored),
                        lost => Ok(lost),
                    },
                    found => Ok(Held::Lost(Box::new(found))),
                }
            }
            _ => self.tell_last(&Lease { fence: Fence::UNSEEN, ..lease.clone() }, says).await,
        }
    }

    async fn tell_last(&self, lease: &Lease, says: Says<'_>) -> Result<Held, StoreError> {
        match says {
            Says::Extend(hold) => self.last.extend(lease, hold).await,
            Says::Settle(end) => self.last.settle(lease, end).await,
        }
    }

    /// A claim that was put back in `last` is not in `first` for certain: somebody else may be there by now.
    fn restored(&self, lease: &Lease, held: &Held) {
        if *held == Held::Restored {
            self.becomes_unclear(&lease.ask);
        }
    }

    /// A solo claim that `last` knows is solo no more.
    fn landed(self: &Arc<Self>, lease: &Lease, held: &Held) {
        if *held == Held::Restored {
            drop(self.behind(Errand::Unmark(lease.ask.address, lease.fence)));
        }
    }
}

/// While `last` is away, `first` says who lost. That it has forgotten the claim says nothing: `last` will decide.
fn lost_in_first(found: Box<Claim>, why: StoreError) -> Result<Held, StoreError> {
    match *found {
        Claim::Done(finished) => Ok(Held::Lost(Box::new(Claim::Done(copy::opened(finished))))),
        Claim::Busy(_) | Claim::Unknown(_) => Ok(Held::Lost(found)),
        Claim::Granted(_) | Claim::Spent => Err(why),
    }
}
