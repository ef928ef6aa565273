//! Claims that run on `first` alone, and the markers that say so.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::{
    Notice,
    store::{Address, Ask, Claim, End, ErrorKind, Fence, Fingerprint, Held, Lease, Outline, StoreError, Tags},
};
use sha2::{Digest, Sha256};

use super::{
    Parts,
    behind::Errand,
    copy::{self, Copied},
};

/// A marker outlives the claim that it is about: no operation runs for longer than this, or than several times its
/// own retention.
const MARKED_FOR: Duration = Duration::from_secs(24 * 60 * 60);

impl Parts {
    /// `last` has provably not applied the claim: runs it on `first` alone, if it is certain that nobody else will.
    pub(super) async fn run_solo(
        self: &Arc<Self>, ask: &Arc<Ask>, mine: Lease, why: StoreError,
    ) -> Result<Claim, StoreError> {
        let extended = match self.mark(ask, mine.fence).await {
            // After the marker: who takes over from here on finds it, who took over before has made this fail.
            Ok(()) => self.first.extend(&mine, ask.hold).await,
            Err(error) => Err(error),
        };
        match extended {
            Ok(Held::Held) => {
                self.observer.noticed(&Notice::Solo(&ask.address));
                Ok(Claim::Granted(lease(ask, &mine)))
            }
            Ok(Held::Lost(found)) => match *found {
                Claim::Done(finished) => Ok(Claim::Done(copy::opened(finished))),
                Claim::Busy(_) | Claim::Unknown(_) => Ok(*found),
                Claim::Granted(_) | Claim::Spent => Err(why),
            },
            // It was gone: others may have come and gone, and the marker with it.
            Ok(Held::Restored) => {
                drop(self.behind(Errand::Own { lease: mine, copied: Copied::release() }));
                Err(why)
            }
            Err(error) => {
                self.fell_back("claim", &error);
                drop(self.behind(Errand::Own { lease: mine, copied: Copied::release() }));
                Err(why)
            }
        }
    }

    /// Says in `first` that the holder with this fence may run solo.
    pub(super) async fn mark(&self, ask: &Ask, fence: Fence) -> Result<(), StoreError> {
        let lives = ask.hold.saturating_add(ask.keep).saturating_mul(4).max(MARKED_FOR);
        let marker = Arc::new(Ask {
            address: marker(&ask.address, fence),
            token: ask.token,
            fingerprint: Fingerprint::NONE,
            tags: Tags::default(),
            label: Bytes::new(),
            hold: lives,
            keep: Duration::ZERO,
            over: None,
        });
        let found = self.first.claim(&marker).await?;
        let refused =
            || StoreError::new(ErrorKind::NotApplied, "tiered", "somebody else marks the same holder as solo");
        match found {
            Claim::Done(_) => Ok(()),
            Claim::Granted(lease) => {
                let record = Bytes::copy_from_slice(&fence.0.to_le_bytes());
                let end = End::Complete { failed: false, record, outline: Outline::default(), keep: lives };
                match self.first.settle(&lease, &end).await? {
                    Held::Held | Held::Restored => Ok(()),
                    Held::Lost(_) => Err(refused()),
                }
            }
            Claim::Busy(_) | Claim::Unknown(_) | Claim::Spent => Err(refused()),
        }
    }

    pub(super) async fn is_marked(&self, at: &Address, fence: Fence) -> Result<bool, StoreError> {
        Ok(matches!(self.first.get(&marker(at, fence)).await?, Some(Claim::Done(_))))
    }

    /// `last` knows the claim now.
    pub(super) async fn unmark(&self, at: &Address, fence: Fence) -> Result<(), StoreError> {
        let at = marker(at, fence);
        if let Some(Claim::Done(marker)) = self.first.get(&at).await? {
            let _: Held = self.first.operators().forget(&at, marker.fence).await?;
        }
        Ok(())
    }
}

/// The lease of a claim that runs solo: `first`'s fence names it.
pub(super) fn lease(ask: &Arc<Ask>, mine: &Lease) -> Lease {
    Lease { ask: ask.clone(), fence: mine.fence, attempt: mine.attempt, solo: true }
}

/// Where the marker of a holder lives.
fn marker(at: &Address, fence: Fence) -> Address {
    let hash = Sha256::new().chain_update(b"solo").chain_update(at.0).chain_update(fence.0.to_le_bytes());
    Address(hash.finalize().into())
}
