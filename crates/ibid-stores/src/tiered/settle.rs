//! Extends and settles claims: the authority before the caller gets the result, the front afterwards.

use super::*;
use ClaimOutcome::{Completed, Granted, InProgress, OutcomeUnknown, TokenSpent};
use SettleOutcome::{Applied, ClaimLost, Restored};
use Settlement::{Complete, Park, Release};

/// How long a holder may be paused before it gives way to a front-only run, in leases. After that, it counts as crashed.
const MAX_PAUSE_LEASES: u32 = 4;

impl TieredInner {
    pub(super) async fn extend(self: &Arc<Self>, lease: &Lease, hold: Duration) -> Result<SettleOutcome, StoreError> {
        let told = Instant::now();
        let errand = || BackgroundTask::Extend { lease: self.front_lease(lease), duration: hold, sent_at: told };
        // An absent entry of a front-only claim is restored under the front's fence.
        let held = self.authority.extend(lease, hold).await;
        if lease.front_only {
            if let Ok(ClaimLost(found)) = &held
                && let Some(why) = self.other_holder(lease, found).await
            {
                return self.extend_front_only(lease, hold, why).await;
            }
            // From now on the claim can be taken over in the authority, so it must not be settled in the front alone.
            if !matches!(&held, Err(error) if error.kind != ErrorKind::Ambiguous) {
                self.mark_ambiguous(&lease.request);
            }
            let held = match held {
                Ok(held) => held,
                Err(error) => return self.extend_front_only(lease, hold, error).await,
            };
            self.note_known_to_authority(lease, &held);
            if !matches!(held, ClaimLost(_)) {
                drop(self.spawn_background(errand()));
            }
            return Ok(held);
        }
        // After a restore in the authority, the front's entry may belong to another holder.
        if matches!(held, Ok(Restored)) {
            self.mark_ambiguous(&lease.request);
        }
        // Also if the authority is unreachable: the front must show that the claim is running.
        if !matches!(held, Ok(ClaimLost(_))) && lease.fence != Fence::UNSEEN {
            drop(self.spawn_background(errand()));
        }
        held
    }

    pub(super) async fn settle(self: &Arc<Self>, lease: &Lease, end: &Settlement) -> Result<SettleOutcome, StoreError> {
        let told = Instant::now();
        let held = if lease.front_only {
            let held = match self.authority.settle(lease, end).await {
                Ok(held) => held,
                Err(error) => return self.settle_front_only(lease, end, error).await,
            };
            if let (ClaimLost(found), Complete { .. }) = (&held, end)
                && let Some(why) = self.other_holder(lease, found).await
            {
                return self.settle_front_only(lease, end, why).await;
            }
            self.note_known_to_authority(lease, &held);
            // It did not run, so its marker must go.
            if matches!((&held, end), (ClaimLost(_), Release)) {
                drop(self.spawn_background(BackgroundTask::RemoveMarker(lease.request.address, lease.fence)));
            }
            held
        } else {
            self.authority.settle(lease, end).await?
        };
        let in_first = self.front_lease(lease);
        if !matches!(end, Park { .. }) {
            self.forget_token(&lease.request);
        }
        let copied = match &held {
            // The fence of the stored answer is unknown; the next claim copies it.
            Applied | Restored if lease.fence == Fence::UNSEEN && matches!(end, Complete { .. }) => None,
            Applied | Restored => Some(FrontSettlement::new(lease, end, told, false)),
            ClaimLost(found) => match &**found {
                Completed(finished) => Some(FrontSettlement::from_completed(finished, told)),
                TokenSpent => Some(FrontSettlement::release()),
                // A release that came too late for the authority still applies to the front. Loose mode lets the lease
                // expire instead: a released entry would allow a second run while the authority is unreachable.
                InProgress(_) | OutcomeUnknown(_) | Granted(_) => {
                    (matches!(end, Release) && !self.is_loose()).then(FrontSettlement::release)
                }
            },
        };
        if let Some(copied) = copied {
            let errand = match end {
                Release if lease.front_only && !matches!(held, ClaimLost(_)) => BackgroundTask::Abandon(in_first),
                _ => BackgroundTask::Settle { lease: background::without_fence(&in_first), copied },
            };
            if matches!(end, Release) {
                self.spawn_and_wait_briefly(errand).await;
            } else {
                drop(self.spawn_background(errand));
            }
        }
        Ok(held)
    }

    /// The authority has never known this front-only claim, and shows another holder. That holder looks for front-only
    /// runs before it starts, and gives way; or it runs in a window of loose mode, and its own end decides. Until then
    /// the claim stays front-only, as if the authority were unreachable. Its marker says that no takeover has reported
    /// it to the authority.
    async fn other_holder(&self, lease: &Lease, found: &ClaimOutcome) -> Option<StoreError> {
        let may_give_way = match found {
            InProgress(_) => true,
            OutcomeUnknown(holder) => holder.age < lease.request.lease.saturating_mul(MAX_PAUSE_LEASES),
            Granted(_) | Completed(_) | TokenSpent => false,
        };
        if !may_give_way || self.is_ambiguous(&lease.request) {
            return None;
        }
        let marker = self.front_answer("settle", self.find_marker(&lease.request.address).await);
        let is_other = marker.is_none_or(|marker| marker.is_some_and(|marker| marker.fence == lease.fence));
        let why = "another claim holds the key in the last store, which does not know this run yet";
        is_other.then(|| StoreError::new(ErrorKind::NotApplied, "tiered", why))
    }

    /// The authority is unreachable: extends the claim in the front.
    async fn extend_front_only(
        &self, lease: &Lease, hold: Duration, why: StoreError,
    ) -> Result<SettleOutcome, StoreError> {
        match self.front_answer("extend", self.extend_in_front(&self.front_lease(lease), hold).await) {
            Some(Applied | Restored) => Ok(Applied),
            Some(ClaimLost(found)) => lost_in_front(found, why),
            None => Err(why),
        }
    }

    /// The authority is unreachable: settles the front and returns the error, so that the engine journals the
    /// settlement.
    async fn settle_front_only(
        &self, lease: &Lease, end: &Settlement, why: StoreError,
    ) -> Result<SettleOutcome, StoreError> {
        // The authority may know the claim, and may have granted a takeover: only it can decide.
        if self.is_ambiguous(&lease.request) {
            return Err(why);
        }
        let in_first = self.front_lease(lease);
        let ended = match end {
            Release => self.abandon_in_front(&in_first).await,
            _ => {
                let copied = FrontSettlement::new(lease, end, Instant::now(), true);
                self.front.settle(&in_first, &copied.adjusted_for_delay()).await
            }
        };
        match self.front_answer("settle", ended) {
            Some(ClaimLost(found)) if matches!(*found, Completed(_)) => lost_in_front(found, why),
            // If another claim took over in the front, it may have given up since. The engine still reports the
            // settlement to the authority.
            _ => Err(why),
        }
    }

    /// Reports a front-only answer to the authority, whose response counts. `in_first` is the fence of the entry in the
    /// front.
    pub(super) async fn confirm_front_only(
        &self, ask: &Arc<ClaimRequest>, in_first: Fence, token: ClaimToken, finished: CompletedEntry,
    ) -> Result<ClaimOutcome, StoreError> {
        let ran =
            ClaimRequest { token, fingerprint: finished.fingerprint, take_over: None, ..ClaimRequest::clone(ask) };
        let lease =
            Lease { request: Arc::new(ran), fence: finished.fence, attempt: finished.attempt, front_only: true };
        let end = Complete {
            failed: finished.failed,
            record: finished.record.clone(),
            summary: RecordSummary::default(),
            ttl: finished.expires_in,
        };
        let answer = match self.authority.settle(&lease, &end).await {
            Ok(Applied | Restored) => CompletedEntry { front_only: false, ..finished.clone() },
            Ok(ClaimLost(found)) => match *found {
                Completed(theirs) => theirs,
                InProgress(_) | OutcomeUnknown(_) => return Ok(*found),
                // The authority has no entry and does not accept this one: an operator is forgetting it right now.
                Granted(_) | TokenSpent => return Ok(Completed(finished)),
            },
            // The front's answer is the best information available.
            Err(_) if self.is_loose() => return Ok(Completed(finished)),
            Err(error) => return Err(error),
        };
        if answer.fence != finished.fence {
            self.observer.on_event(&EngineEvent::ClaimLost(&ask.address));
        }
        // The front's entry keeps the ttl of the front-only answer, which was settled at about the same time.
        let record = front_copy::encode_confirmed(answer.fence, answer.attempt, answer.fingerprint, &answer.record);
        self.front_answer("replace", self.front.admin().replace_record(&ask.address, in_first, record).await);
        Ok(Completed(answer))
    }

    /// Removes the marker of a front-only claim that the authority now knows.
    fn note_known_to_authority(self: &Arc<Self>, lease: &Lease, held: &SettleOutcome) {
        if *held == Restored {
            drop(self.spawn_background(BackgroundTask::RemoveMarker(lease.request.address, lease.fence)));
        }
    }
}

/// Handles a claim lost in the front while the authority is unreachable. A missing entry there proves nothing: the
/// authority will decide.
fn lost_in_front(found: Box<ClaimOutcome>, why: StoreError) -> Result<SettleOutcome, StoreError> {
    match *found {
        Completed(finished) => Ok(ClaimLost(Box::new(Completed(front_copy::decode(finished).entry)))),
        InProgress(_) | OutcomeUnknown(_) => Ok(ClaimLost(found)),
        Granted(_) | TokenSpent => Err(why),
    }
}
