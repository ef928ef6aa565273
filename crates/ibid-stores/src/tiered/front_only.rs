//! Front-only claims and their markers.

use ibid::store::Tags;
use sha2::{Digest, Sha256};

use super::*;
use ClaimOutcome::{Completed, Granted, InProgress, OutcomeUnknown, TokenSpent};

/// Minimum ttl of a marker. A marker outlives its claim: no operation runs longer than this, or than several times its
/// own ttl.
const MIN_MARKER_TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// Lease of a marker's own entry. Once it has expired, the next holder can take the marker over.
const MARKER_LEASE: Duration = Duration::from_millis(1);

impl TieredInner {
    /// Grants the claim on the front alone, if no other claim can run. The authority has provably not applied it.
    pub(super) async fn run_front_only(
        self: &Arc<Self>, ask: &Arc<ClaimRequest>, mine: Lease, why: StoreError,
    ) -> Result<ClaimOutcome, StoreError> {
        let extended = match self.write_marker(&mine).await {
            // The marker comes first: a later takeover finds it, and an earlier takeover makes this extend fail.
            Ok(()) => self.front.extend(&mine, ask.lease).await,
            Err(error) => Err(error),
        };
        let (found, is_there) = match extended {
            Ok(SettleOutcome::Applied) => {
                self.observer.on_event(&EngineEvent::FrontOnlyClaim(&ask.address));
                return Ok(Granted(front_only_lease(ask, &mine)));
            }
            Ok(SettleOutcome::ClaimLost(found)) => match *found {
                Completed(finished) => (Ok(Completed(front_copy::decode(finished).entry)), false),
                InProgress(_) | OutcomeUnknown(_) => (Ok(*found), false),
                Granted(_) | TokenSpent => (Err(why), false),
            },
            // The claim was gone: other claims may have run since, and removed the marker.
            Ok(SettleOutcome::Restored) => (Err(why), true),
            Err(error) => {
                self.report_front_error("claim", &error);
                (Err(why), true)
            }
        };
        // The claim does not run, so its marker must go.
        let at = ask.address;
        drop(self.spawn_background(if is_there {
            BackgroundTask::Abandon(mine)
        } else {
            BackgroundTask::RemoveMarker(at, mine.fence)
        }));
        found
    }

    /// Writes the marker of a holder that is about to run front-only. There is one per address, naming the latest
    /// holder.
    async fn write_marker(&self, mine: &Lease) -> Result<(), StoreError> {
        let ask = &mine.request;
        let marker = ClaimRequest {
            address: marker_address(&ask.address),
            fingerprint: FrontOnlyMarker { token: ask.token, fence: mine.fence }.encode(),
            tags: Tags::default(),
            label: Bytes::new(),
            lease: MARKER_LEASE,
            ttl: ask.lease.saturating_add(ask.ttl).saturating_mul(4).max(MIN_MARKER_TTL),
            take_over: None,
            ..ClaimRequest::clone(ask)
        };
        let mut found = self.front.claim(&Arc::new(marker.clone())).await?;
        if let OutcomeUnknown(before) = found {
            // A previous holder left its marker. Replace it in one step, so that its late removal does not affect this
            // one.
            found = self.front.claim(&Arc::new(ClaimRequest { take_over: Some(before.fence), ..marker })).await?;
        }
        match found {
            Granted(_) => Ok(()),
            _ => {
                let why = "somebody else marks the same key as run without the store that decides";
                Err(StoreError::new(ErrorKind::NotApplied, "tiered", why))
            }
        }
    }

    /// Returns the marker of an address.
    ///
    /// It applies to any current holder of the entry: the holder that it names may have been taken over by a claim that
    /// gave the entry back, or crashed.
    pub(super) async fn find_marker(&self, at: &Address) -> Result<Option<FrontOnlyMarker>, StoreError> {
        Ok(match self.front.get(&marker_address(at)).await? {
            Some(InProgress(holder) | OutcomeUnknown(holder)) => Some(FrontOnlyMarker::decode(&holder.fingerprint)),
            Some(Granted(_) | Completed(_) | TokenSpent) | None => None,
        })
    }

    /// Removes the marker of the holder with this fence, which does not run front-only or is known to the authority.
    pub(super) async fn remove_marker(&self, at: &Address, fence: Fence) -> Result<(), StoreError> {
        let at = marker_address(at);
        if let Some(InProgress(holder) | OutcomeUnknown(holder)) = self.front.get(&at).await?
            && FrontOnlyMarker::decode(&holder.fingerprint).fence == fence
        {
            let _: SettleOutcome = self.front.admin().forget(&at, holder.fence).await?;
        }
        Ok(())
    }
}

/// Identifies the holder: its token and its fence in the front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrontOnlyMarker {
    pub(super) token: ClaimToken,
    pub(super) fence: Fence,
}

impl FrontOnlyMarker {
    /// Encodes the marker as a fingerprint, the only field of an entry that a read returns.
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

/// The lease of a front-only claim. It has the front's fence.
pub(super) fn front_only_lease(ask: &Arc<ClaimRequest>, mine: &Lease) -> Lease {
    Lease { request: ask.clone(), fence: mine.fence, attempt: mine.attempt, front_only: true }
}

fn marker_address(at: &Address) -> Address {
    Address(Sha256::new().chain_update(b"solo").chain_update(at.0).finalize().into())
}
