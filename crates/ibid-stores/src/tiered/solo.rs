//! Claims that run on `first` alone, and the markers that say so.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::{
    Notice,
    store::{Address, Ask, Claim, ErrorKind, Fence, Fingerprint, Held, Lease, StoreError, Tags, Token},
};
use sha2::{Digest, Sha256};

use super::{Parts, behind::Errand, copy};

/// A marker outlives the claim that it is about: no operation runs for longer than this, or than several times its
/// own retention.
const MARKED_FOR: Duration = Duration::from_secs(24 * 60 * 60);
/// A marker is held for so long, and from then on there: then the next one may take its place.
const RIPENS_IN: Duration = Duration::from_millis(1);

impl Parts {
    /// `last` has provably not applied the claim: runs it on `first` alone, if it is certain that nobody else will.
    pub(super) async fn run_solo(
        self: &Arc<Self>, ask: &Arc<Ask>, mine: Lease, why: StoreError,
    ) -> Result<Claim, StoreError> {
        let extended = match self.mark(&mine).await {
            // After the marker: who takes over from here on finds it, who took over before has made this fail.
            Ok(()) => self.first.extend(&mine, ask.hold).await,
            Err(error) => Err(error),
        };
        let (found, is_there) = match extended {
            Ok(Held::Held) => {
                self.observer.noticed(&Notice::Solo(&ask.address));
                return Ok(Claim::Granted(lease(ask, &mine)));
            }
            Ok(Held::Lost(found)) => match *found {
                Claim::Done(finished) => (Ok(Claim::Done(copy::opened(finished).finished)), false),
                Claim::Busy(_) | Claim::Unknown(_) => (Ok(*found), false),
                Claim::Granted(_) | Claim::Spent => (Err(why), false),
            },
            // It was gone: others may have come and gone, and the marker with it.
            Ok(Held::Restored) => (Err(why), true),
            Err(error) => {
                self.fell_back("claim", &error);
                (Err(why), true)
            }
        };
        // It does not run: nobody is to believe that it did.
        let at = ask.address;
        drop(self.behind(if is_there { Errand::Abandon(mine) } else { Errand::Unmark(at, mine.fence) }));
        found
    }

    /// Says in `first` that its holder may run solo. There is one marker per address, and it names the latest to say so.
    async fn mark(&self, mine: &Lease) -> Result<(), StoreError> {
        let ask = &mine.ask;
        let keep = ask.hold.saturating_add(ask.keep).saturating_mul(4).max(MARKED_FOR);
        let marker = Ask {
            address: marker(&ask.address),
            token: ask.token,
            fingerprint: Marker { token: ask.token, fence: mine.fence }.written(),
            tags: Tags::default(),
            label: Bytes::new(),
            hold: RIPENS_IN,
            keep,
            over: None,
        };
        let mut found = self.first.claim(&Arc::new(marker.clone())).await?;
        if let Claim::Unknown(before) = found {
            // Somebody who has gone since did not take it away. In one step, so that what it does late misses this one.
            found = self.first.claim(&Arc::new(Ask { over: Some(before.fence), ..marker })).await?;
        }
        match found {
            Claim::Granted(_) => Ok(()),
            Claim::Busy(_) | Claim::Unknown(_) | Claim::Done(_) | Claim::Spent => {
                let why = "somebody else marks the same key as run without the store that decides";
                Err(StoreError::new(ErrorKind::NotApplied, "tiered", why))
            }
        }
    }

    /// Who has said that it may run solo here, and has not taken that back.
    ///
    /// It speaks for whoever holds the entry now: the one that it names may have been taken over by somebody who gave
    /// that back, or died.
    pub(super) async fn marked(&self, at: &Address) -> Result<Option<Marker>, StoreError> {
        Ok(match self.first.get(&marker(at)).await? {
            Some(Claim::Busy(holder) | Claim::Unknown(holder)) => Some(Marker::read(&holder.fingerprint)),
            Some(Claim::Granted(_) | Claim::Done(_) | Claim::Spent) | None => None,
        })
    }

    /// The holder with this fence does not run solo, or `last` knows of it.
    pub(super) async fn unmark(&self, at: &Address, fence: Fence) -> Result<(), StoreError> {
        let at = marker(at);
        if let Some(Claim::Busy(holder) | Claim::Unknown(holder)) = self.first.get(&at).await?
            && Marker::read(&holder.fingerprint).fence == fence
        {
            let _: Held = self.first.operators().forget(&at, holder.fence).await?;
        }
        Ok(())
    }
}

/// Whom a marker names: the holder's token and its fence in `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Marker {
    pub(super) token: Token,
    pub(super) fence: Fence,
}

impl Marker {
    /// A marker is an entry that nobody holds; all that a look at one shows of its owner is the fingerprint.
    fn written(self) -> Fingerprint {
        let mut digest = [0; 32];
        digest[..16].copy_from_slice(&self.token.0);
        digest[16..24].copy_from_slice(&self.fence.0.to_le_bytes());
        Fingerprint { version: 0, digest }
    }

    fn read(written: &Fingerprint) -> Self {
        let token = Token(written.digest[..16].try_into().expect("16 bytes"));
        Self { token, fence: Fence(u64::from_le_bytes(written.digest[16..24].try_into().expect("eight bytes"))) }
    }
}

/// The lease of a claim that runs solo: `first`'s fence names it.
pub(super) fn lease(ask: &Arc<Ask>, mine: &Lease) -> Lease {
    Lease { ask: ask.clone(), fence: mine.fence, attempt: mine.attempt, solo: true }
}

/// Where the marker of an address lives.
fn marker(at: &Address) -> Address {
    Address(Sha256::new().chain_update(b"solo").chain_update(at.0).finalize().into())
}
