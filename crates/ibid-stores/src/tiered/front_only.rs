//! Claims that run on `first` alone, and the markers that say so.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::{
    EngineEvent,
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, ErrorKind, Fence, Fingerprint, Lease, SettleOutcome,
        StoreError, Tags,
    },
};
use sha2::{Digest, Sha256};

use super::{TieredInner, background::BackgroundTask, front_copy};

/// A marker outlives the claim that it is about: no operation runs for longer than this, or than several times its
/// own retention.
const MIN_MARKER_TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// A marker is held for so long, and from then on there: then the next one may take its place.
const MARKER_LEASE: Duration = Duration::from_millis(1);

impl TieredInner {
    /// `last` has provably not applied the claim: runs it on `first` alone, if it is certain that nobody else will.
    pub(super) async fn run_front_only(
        self: &Arc<Self>, ask: &Arc<ClaimRequest>, mine: Lease, why: StoreError,
    ) -> Result<ClaimOutcome, StoreError> {
        let extended = match self.write_marker(&mine).await {
            // After the marker: who takes over from here on finds it, who took over before has made this fail.
            Ok(()) => self.front.extend(&mine, ask.lease).await,
            Err(error) => Err(error),
        };
        let (found, is_there) = match extended {
            Ok(SettleOutcome::Applied) => {
                self.observer.on_event(&EngineEvent::FrontOnlyClaim(&ask.address));
                return Ok(ClaimOutcome::Granted(front_only_lease(ask, &mine)));
            }
            Ok(SettleOutcome::ClaimLost(found)) => match *found {
                ClaimOutcome::Completed(finished) => {
                    (Ok(ClaimOutcome::Completed(front_copy::decode(finished).entry)), false)
                }
                ClaimOutcome::InProgress(_) | ClaimOutcome::OutcomeUnknown(_) => (Ok(*found), false),
                ClaimOutcome::Granted(_) | ClaimOutcome::TokenSpent => (Err(why), false),
            },
            // It was gone: others may have come and gone, and the marker with it.
            Ok(SettleOutcome::Restored) => (Err(why), true),
            Err(error) => {
                self.report_front_error("claim", &error);
                (Err(why), true)
            }
        };
        // It does not run: nobody is to believe that it did.
        let at = ask.address;
        drop(self.spawn_background(if is_there {
            BackgroundTask::Abandon(mine)
        } else {
            BackgroundTask::RemoveMarker(at, mine.fence)
        }));
        found
    }

    /// Says in `first` that its holder may run solo. There is one marker per address, and it names the latest to say so.
    async fn write_marker(&self, mine: &Lease) -> Result<(), StoreError> {
        let ask = &mine.request;
        let keep = ask.lease.saturating_add(ask.ttl).saturating_mul(4).max(MIN_MARKER_TTL);
        let marker = ClaimRequest {
            address: marker_address(&ask.address),
            token: ask.token,
            fingerprint: FrontOnlyMarker { token: ask.token, fence: mine.fence }.encode(),
            tags: Tags::default(),
            label: Bytes::new(),
            lease: MARKER_LEASE,
            ttl: keep,
            take_over: None,
        };
        let mut found = self.front.claim(&Arc::new(marker.clone())).await?;
        if let ClaimOutcome::OutcomeUnknown(before) = found {
            // Somebody who has gone since did not take it away. In one step, so that what it does late misses this one.
            found = self.front.claim(&Arc::new(ClaimRequest { take_over: Some(before.fence), ..marker })).await?;
        }
        match found {
            ClaimOutcome::Granted(_) => Ok(()),
            ClaimOutcome::InProgress(_)
            | ClaimOutcome::OutcomeUnknown(_)
            | ClaimOutcome::Completed(_)
            | ClaimOutcome::TokenSpent => {
                let why = "somebody else marks the same key as run without the store that decides";
                Err(StoreError::new(ErrorKind::NotApplied, "tiered", why))
            }
        }
    }

    /// Who has said that it may run solo here, and has not taken that back.
    ///
    /// It speaks for whoever holds the entry now: the one that it names may have been taken over by somebody who gave
    /// that back, or died.
    pub(super) async fn find_marker(&self, at: &Address) -> Result<Option<FrontOnlyMarker>, StoreError> {
        Ok(match self.front.get(&marker_address(at)).await? {
            Some(ClaimOutcome::InProgress(holder) | ClaimOutcome::OutcomeUnknown(holder)) => {
                Some(FrontOnlyMarker::decode(&holder.fingerprint))
            }
            Some(ClaimOutcome::Granted(_) | ClaimOutcome::Completed(_) | ClaimOutcome::TokenSpent) | None => None,
        })
    }

    /// The holder with this fence does not run solo, or `last` knows of it.
    pub(super) async fn remove_marker(&self, at: &Address, fence: Fence) -> Result<(), StoreError> {
        let at = marker_address(at);
        if let Some(ClaimOutcome::InProgress(holder) | ClaimOutcome::OutcomeUnknown(holder)) =
            self.front.get(&at).await?
            && FrontOnlyMarker::decode(&holder.fingerprint).fence == fence
        {
            let _: SettleOutcome = self.front.admin().forget(&at, holder.fence).await?;
        }
        Ok(())
    }
}

/// Whom a marker names: the holder's token and its fence in `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrontOnlyMarker {
    pub(super) token: ClaimToken,
    pub(super) fence: Fence,
}

impl FrontOnlyMarker {
    /// A marker is an entry that nobody holds; all that a look at one shows of its owner is the fingerprint.
    fn encode(self) -> Fingerprint {
        let mut digest = [0; 32];
        digest[..16].copy_from_slice(&self.token.0);
        digest[16..24].copy_from_slice(&self.fence.0.to_le_bytes());
        Fingerprint { version: 0, digest }
    }

    fn decode(written: &Fingerprint) -> Self {
        let token = ClaimToken(written.digest[..16].try_into().expect("16 bytes"));
        Self { token, fence: Fence(u64::from_le_bytes(written.digest[16..24].try_into().expect("eight bytes"))) }
    }
}

/// The lease of a claim that runs solo: `first`'s fence names it.
pub(super) fn front_only_lease(ask: &Arc<ClaimRequest>, mine: &Lease) -> Lease {
    Lease { request: ask.clone(), fence: mine.fence, attempt: mine.attempt, front_only: true }
}

/// Where the marker of an address lives.
fn marker_address(at: &Address) -> Address {
    Address(Sha256::new().chain_update(b"solo").chain_update(at.0).finalize().into())
}
