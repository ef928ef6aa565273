//! Who is granted a claim: the steps in the order of the [module docs](super).

use std::{sync::Arc, time::Duration};

use ibid::store::{
    ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, ErrorKind, Fence, Holder, Lease, SettleOutcome, Settlement,
    StoreError,
};
use tokio::time::Instant;

use super::{
    MAX_TRACKED_TOKENS, TieredInner,
    background::BackgroundTask,
    front_copy::{self, FrontSettlement},
};

/// How often one claim starts over because `first` changed under its hands.
const MAX_ROUNDS: u32 = 4;

/// A claim that is younger than this in `first` may still be on its way to `last`.
const AUTHORITY_CLAIM_GRACE: Duration = Duration::from_millis(100);

/// A copy with less than this to live may outlive what it is a copy of: there are two clocks, and an end may have been told
/// twice.
const MIN_TRUSTED_TTL: Duration = Duration::from_secs(1);

/// Longer than any lease that a clock can count.
const MAX_LEASE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How a claim came to stand in `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FrontClaimOrigin {
    /// Nobody stood there.
    Fresh,
    /// It took over. Whoever was there may be on its way to `last`, which would let it run: never solo after this.
    TakenOver,
}

/// What a step comes to.
enum ClaimStep {
    Outcome(ClaimOutcome),
    /// Somebody was faster: look again.
    Retry,
}

impl TieredInner {
    pub(super) async fn claim(self: &Arc<Self>, ask: &Arc<ClaimRequest>) -> Result<ClaimOutcome, StoreError> {
        for round in 0..MAX_ROUNDS {
            if let ClaimStep::Outcome(claim) = self.claim_once(ask, round).await? {
                return Ok(claim);
            }
        }
        let why = "the entry changed in the first store at every try; ask again";
        Err(StoreError::new(ErrorKind::NotApplied, "tiered", why))
    }

    async fn claim_once(self: &Arc<Self>, ask: &Arc<ClaimRequest>, round: u32) -> Result<ClaimStep, StoreError> {
        if ask.take_over.is_some() {
            match self.authority.get(&ask.address).await {
                Ok(Some(_)) => return self.take_over(ask).await,
                // The holder that is meant can only be one that `first` alone knows.
                Ok(None) => {}
                Err(_) if self.is_loose() => {}
                Err(error) => return Err(error),
            }
        }
        match self.front.claim(&self.front_request(ask)).await {
            Ok(ClaimOutcome::Completed(finished)) => self.completed_in_front(ask, finished, round).await,
            Ok(ClaimOutcome::Granted(mine)) if ask.take_over.is_some() && self.is_loose() => {
                self.taken_over_in_front(ask, mine).await
            }
            Ok(ClaimOutcome::Granted(mine)) => self.granted_in_front(ask, mine, FrontClaimOrigin::Fresh).await,
            Ok(ClaimOutcome::InProgress(holder)) => self.occupied_in_front(ask, ClaimOutcome::InProgress(holder)).await,
            Ok(ClaimOutcome::OutcomeUnknown(holder)) => {
                self.occupied_in_front(ask, ClaimOutcome::OutcomeUnknown(holder)).await
            }
            Ok(ClaimOutcome::TokenSpent) => self.token_spent_in_front(ask).await,
            Err(error) => {
                self.report_front_error("claim", &error);
                self.claim_without_front(ask, error.kind == ErrorKind::Ambiguous).await
            }
        }
    }

    async fn completed_in_front(
        self: &Arc<Self>, ask: &Arc<ClaimRequest>, finished: CompletedEntry, round: u32,
    ) -> Result<ClaimStep, StoreError> {
        if self.generation.is_front_current(self).await {
            let (fence, opened) = (finished.fence, front_copy::decode(finished));
            return match opened.front_only_token {
                None if opened.entry.expires_in < MIN_TRUSTED_TTL
                    && !self.is_still_in_authority(ask, fence).await? =>
                {
                    Ok(ClaimStep::Retry)
                }
                None => Ok(ClaimStep::Outcome(ClaimOutcome::Completed(opened.entry))),
                Some(token) => self.confirm_front_only(ask, fence, token, opened.entry).await.map(ClaimStep::Outcome),
            };
        }
        // Under another generation it may not be there.
        if round == 0 {
            return Ok(ClaimStep::Retry);
        }
        // If that cannot be read, `first` is not believed, as long as `last` can be asked. Loose then has nothing else
        // to go by: an answer that may have been forgotten is better than a second run.
        match self.claim_without_front(ask, false).await {
            Err(error) if self.is_loose() && error.kind == ErrorKind::NotApplied => {
                Ok(ClaimStep::Outcome(ClaimOutcome::Completed(front_copy::decode(finished).entry)))
            }
            answered => answered,
        }
    }

    /// Whether `last` has an answer of which `first` has a copy, with this fence. If not, the copy goes. Loose believes it as
    /// long as `last` cannot be asked.
    async fn is_still_in_authority(&self, ask: &ClaimRequest, fence: Fence) -> Result<bool, StoreError> {
        match self.authority.get(&ask.address).await {
            Ok(Some(ClaimOutcome::Completed(_))) => Ok(true),
            Err(_) if self.is_loose() => Ok(true),
            Err(error) => Err(error),
            Ok(_) => {
                let forgotten = self.front.admin().forget(&ask.address, fence).await;
                let _: SettleOutcome = forgotten.map_err(|error| self.into_not_applied(error))?;
                Ok(false)
            }
        }
    }

    /// Step 2: `mine` is the claim in `first`; `last` decides.
    async fn granted_in_front(
        self: &Arc<Self>, ask: &Arc<ClaimRequest>, mine: Lease, stands: FrontClaimOrigin,
    ) -> Result<ClaimStep, StoreError> {
        let told = Instant::now();
        let was_unclear = self.is_ambiguous(ask);
        let found = match self.claim_in_authority(ask, true).await {
            Ok(found) => found,
            Err(error) => {
                return match error.kind {
                    ErrorKind::NotApplied if self.is_loose() && stands == FrontClaimOrigin::Fresh => {
                        self.run_front_only(ask, mine, error).await.map(ClaimStep::Outcome)
                    }
                    // The claim may be there: whoever asked asks again, and finds `first` as it is; or releases it,
                    // there before here.
                    _ if was_unclear || error.kind == ErrorKind::Ambiguous => Err(error),
                    _ => {
                        self.give_back_front_claim(mine, stands).await;
                        Err(error)
                    }
                };
            }
        };
        match &found {
            // `last` may have had it for a while: `first`, where it may be new, is not to hold it for longer.
            ClaimOutcome::Granted(_) if was_unclear => match self.authority.get(&ask.address).await {
                Ok(Some(ClaimOutcome::InProgress(holder))) => {
                    let until = told.checked_add(holder.takeover_in).unwrap_or(told + MAX_LEASE);
                    self.spawn_and_wait_briefly(BackgroundTask::HoldUntil(mine, until)).await;
                }
                Ok(Some(ClaimOutcome::OutcomeUnknown(_))) => {
                    self.spawn_and_wait_briefly(BackgroundTask::HoldUntil(mine, Instant::now())).await
                }
                _ => {}
            },
            ClaimOutcome::Granted(_) => {}
            ClaimOutcome::Completed(finished) => {
                let copied = FrontSettlement::from_completed(finished, told);
                drop(self.spawn_background(BackgroundTask::SettleFrontClaim { lease: mine, copied }));
            }
            // Nobody will be granted anything under this token: there is nothing to come back to.
            ClaimOutcome::TokenSpent => {
                self.forget_token(ask);
                self.spawn_and_wait_briefly(BackgroundTask::SettleFrontClaim {
                    lease: mine,
                    copied: FrontSettlement::release(),
                })
                .await;
            }
            ClaimOutcome::InProgress(_) | ClaimOutcome::OutcomeUnknown(_) => {
                let marked = if self.is_loose() { self.find_marker(&ask.address).await } else { Ok(None) };
                if matches!(marked, Ok(Some(marker)) if marker.fence == mine.fence) {
                    // Asked again by a claim that was granted solo: same token, same answer.
                    return Ok(ClaimStep::Outcome(ClaimOutcome::Granted(super::front_only::front_only_lease(
                        ask, &mine,
                    ))));
                }
                self.give_back_front_claim(mine, stands).await;
            }
        }
        Ok(ClaimStep::Outcome(found))
    }

    /// Step 3: somebody is in `first`.
    async fn occupied_in_front(
        self: &Arc<Self>, ask: &Arc<ClaimRequest>, found: ClaimOutcome,
    ) -> Result<ClaimStep, StoreError> {
        match self.wait_for_authority_entry(ask, &found).await {
            // It may be this very claim, granted while `first` could not be reached.
            Ok(Some(_)) if self.is_ambiguous(ask) => self.claim_in_authority(ask, false).await.map(ClaimStep::Outcome),
            Ok(Some(there)) => Ok(ClaimStep::Outcome(there)),
            Ok(None) => match found {
                ClaimOutcome::OutcomeUnknown(holder) if holder.takeover_in.is_zero() => {
                    self.take_over_expired(ask, holder).await
                }
                ClaimOutcome::OutcomeUnknown(holder) => self.forget_stale_front_entry(ask, holder).await,
                found => Ok(ClaimStep::Outcome(found)),
            },
            Err(_) if self.is_loose() => Ok(ClaimStep::Outcome(found)),
            Err(error) => Err(error),
        }
    }

    /// What `last` has. A holder that has only just come to `first` is given the time to come there too: the fence under
    /// which it runs is that of `last`.
    async fn wait_for_authority_entry(
        &self, ask: &ClaimRequest, found: &ClaimOutcome,
    ) -> Result<Option<ClaimOutcome>, StoreError> {
        let began = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let there = self.authority.get(&ask.address).await?;
            let is_new = matches!(found, ClaimOutcome::InProgress(holder) if holder.age + began.elapsed() + pause < AUTHORITY_CLAIM_GRACE);
            if there.is_some() || !is_new {
                return Ok(there);
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// A holder that lapsed in `first` and never came to `last`: it never started, unless it ran solo.
    async fn take_over_expired(
        self: &Arc<Self>, ask: &Arc<ClaimRequest>, holder: Holder,
    ) -> Result<ClaimStep, StoreError> {
        let at = &ask.address;
        // Another request must not stand in its place: should it have run solo after all, the entry would name the
        // wrong one.
        if holder.fingerprint != ask.fingerprint
            || (self.is_loose() && self.find_marker(at).await.map_err(|error| self.into_not_applied(error))?.is_some())
        {
            return Ok(ClaimStep::Outcome(ClaimOutcome::OutcomeUnknown(holder)));
        }
        let mine = match self.front.claim(&with_take_over(&self.front_request(ask), Some(holder.fence))).await {
            Ok(ClaimOutcome::Granted(mine)) => mine,
            Ok(_) => return Ok(ClaimStep::Retry),
            Err(error) => {
                self.report_front_error("claim", &error);
                return self.claim_without_front(ask, error.kind == ErrorKind::Ambiguous).await;
            }
        };
        if self.is_loose() {
            // After the takeover: from here on the holder that was taken over cannot begin to run solo any more.
            match self.find_marker(at).await {
                Ok(None) => {}
                Ok(Some(_)) => {
                    let fence = mine.fence;
                    self.give_back_front_claim(mine, FrontClaimOrigin::TakenOver).await;
                    return Ok(ClaimStep::Outcome(ClaimOutcome::OutcomeUnknown(Holder { fence, ..holder })));
                }
                Err(error) => {
                    self.give_back_front_claim(mine, FrontClaimOrigin::TakenOver).await;
                    return Err(self.into_not_applied(error));
                }
            }
        }
        self.granted_in_front(ask, mine, FrontClaimOrigin::TakenOver).await
    }

    /// `mine` has taken over, in `first`, a holder that the caller named and that `last` did not know. If that ran solo,
    /// `last` is told of it before it is asked: it is unknown there, and taken over.
    async fn taken_over_in_front(
        self: &Arc<Self>, ask: &Arc<ClaimRequest>, mine: Lease,
    ) -> Result<ClaimStep, StoreError> {
        let marked = match self.find_marker(&ask.address).await {
            Ok(marked) => marked,
            Err(error) => {
                self.give_back_front_claim(mine, FrontClaimOrigin::TakenOver).await;
                return Err(self.into_not_applied(error));
            }
        };
        let Some(marker) = marked else {
            return self.granted_in_front(ask, mine, FrontClaimOrigin::TakenOver).await;
        };
        let ran = Lease {
            request: Arc::new(ClaimRequest { token: marker.token, take_over: None, ..ClaimRequest::clone(ask) }),
            fence: marker.fence,
            attempt: mine.attempt.saturating_sub(1).max(1),
            front_only: true,
        };
        let unknown = Settlement::Park { ttl: ask.lease.saturating_add(ask.ttl), retry_in: Duration::ZERO };
        if let Err(mut error) = self.authority.settle(&ran, &unknown).await {
            self.give_back_front_claim(mine, FrontClaimOrigin::TakenOver).await;
            error.kind = ErrorKind::NotApplied;
            return Err(error);
        }
        let named = with_take_over(ask, Some(marker.fence));
        let step = self.granted_in_front(&named, mine, FrontClaimOrigin::TakenOver).await?;
        drop(self.spawn_background(BackgroundTask::RemoveMarker(ask.address, marker.fence)));
        Ok(step)
    }

    /// A holder that is parked in `first` and that `last` has forgotten: so does `first`, unless it ran solo. What is
    /// parked cannot begin to.
    async fn forget_stale_front_entry(&self, ask: &Arc<ClaimRequest>, holder: Holder) -> Result<ClaimStep, StoreError> {
        let at = &ask.address;
        if self.is_loose() && self.find_marker(at).await.map_err(|error| self.into_not_applied(error))?.is_some() {
            return Ok(ClaimStep::Outcome(ClaimOutcome::OutcomeUnknown(holder)));
        }
        let _: SettleOutcome =
            self.front.admin().forget(at, holder.fence).await.map_err(|error| self.into_not_applied(error))?;
        Ok(ClaimStep::Retry)
    }

    /// `first` could not say whether somebody ran solo. Nothing was claimed.
    fn into_not_applied(&self, mut error: StoreError) -> StoreError {
        self.report_front_error("claim", &error);
        error.kind = ErrorKind::NotApplied;
        error
    }

    /// The token was spent in `first`: by its owner, by an operator who forgot what it had copied there, or because
    /// `last` did not grant it then.
    async fn token_spent_in_front(self: &Arc<Self>, ask: &Arc<ClaimRequest>) -> Result<ClaimStep, StoreError> {
        if !self.is_loose() || self.authority.get(&ask.address).await?.is_some() {
            return self.claim_in_authority(ask, false).await.map(ClaimStep::Outcome);
        }
        // Nothing may be granted without a claim in `first`: should `last` go away, others would see nobody here.
        let other_name = ClaimToken::mint();
        {
            let mut other_names = self.token_aliases.lock();
            if other_names.len() >= MAX_TRACKED_TOKENS {
                return Ok(ClaimStep::Outcome(ClaimOutcome::TokenSpent));
            }
            other_names.insert(ask.token, other_name);
        }
        Ok(ClaimStep::Retry)
    }

    /// Step 4. `may_be_there`: the claim may have reached `first`.
    async fn claim_without_front(
        self: &Arc<Self>, ask: &Arc<ClaimRequest>, may_be_there: bool,
    ) -> Result<ClaimStep, StoreError> {
        let told = Instant::now();
        let found = self.claim_in_authority(ask, false).await?;
        let lease = Lease { request: self.front_request(ask), fence: Fence::UNSEEN, attempt: 0, front_only: false };
        match &found {
            ClaimOutcome::Completed(finished) if may_be_there => {
                let copied = FrontSettlement::from_completed(finished, told);
                drop(self.spawn_background(BackgroundTask::SettleByToken { lease, copied }));
            }
            // Loose lets it lapse: what is free in `first` while `last` knows of a holder invites a second run.
            ClaimOutcome::InProgress(_) | ClaimOutcome::OutcomeUnknown(_) if may_be_there && !self.is_loose() => {
                drop(
                    self.spawn_background(BackgroundTask::SettleByToken { lease, copied: FrontSettlement::release() }),
                );
            }
            _ => {}
        }
        Ok(ClaimStep::Outcome(found))
    }

    /// Step 5: `last` has an entry, and the caller asked to take over.
    async fn take_over(self: &Arc<Self>, ask: &Arc<ClaimRequest>) -> Result<ClaimStep, StoreError> {
        let lease = match self.claim_in_authority(ask, false).await? {
            ClaimOutcome::Granted(lease) => lease,
            found => return Ok(ClaimStep::Outcome(found)),
        };
        match self.overwrite_front(ask).await {
            Ok(None) => {
                self.clear_ambiguous(ask);
                Ok(ClaimStep::Outcome(ClaimOutcome::Granted(lease)))
            }
            Ok(Some(stands)) => {
                let _: SettleOutcome = self.authority.settle(&lease, &Settlement::Release).await?;
                self.clear_ambiguous(ask);
                Ok(ClaimStep::Outcome(stands))
            }
            Err(error) => {
                self.report_front_error("claim", &error);
                Ok(ClaimStep::Outcome(ClaimOutcome::Granted(lease)))
            }
        }
    }

    /// Makes this claim the holder in `first`, whoever is there: `last` has granted it. Except if somebody else runs
    /// there solo, or has finished: that stands, and is returned.
    async fn overwrite_front(&self, ask: &Arc<ClaimRequest>) -> Result<Option<ClaimOutcome>, StoreError> {
        let at = &ask.address;
        for _ in 0..MAX_ROUNDS {
            let (fence, is_ripe) = match self.front.claim(&with_take_over(&self.front_request(ask), None)).await? {
                ClaimOutcome::Granted(_) | ClaimOutcome::TokenSpent => return Ok(None),
                ClaimOutcome::Completed(finished)
                    if self.is_loose() && self.generation.is_front_current(self).await =>
                {
                    return Ok(Some(ClaimOutcome::Completed(front_copy::decode(finished).entry)));
                }
                ClaimOutcome::Completed(finished) => (finished.fence, false),
                ClaimOutcome::InProgress(holder) => {
                    if self.is_held_front_only_by_other(ask, holder.fence).await? {
                        return Ok(Some(ClaimOutcome::InProgress(holder)));
                    }
                    (holder.fence, false)
                }
                ClaimOutcome::OutcomeUnknown(holder) => {
                    if self.is_held_front_only_by_other(ask, holder.fence).await? {
                        return Ok(Some(ClaimOutcome::OutcomeUnknown(holder)));
                    }
                    (holder.fence, holder.takeover_in.is_zero() && holder.fingerprint == ask.fingerprint)
                }
            };
            if !is_ripe {
                let _: SettleOutcome = self.front.admin().forget(at, fence).await?;
            } else if let ClaimOutcome::Granted(_) =
                self.front.claim(&with_take_over(&self.front_request(ask), Some(fence))).await?
            {
                return Ok(None);
            }
        }
        Ok(None)
    }

    async fn is_held_front_only_by_other(&self, ask: &ClaimRequest, fence: Fence) -> Result<bool, StoreError> {
        Ok(self.is_loose() && ask.take_over != Some(fence) && self.find_marker(&ask.address).await?.is_some())
    }

    /// Asks `last`, and remembers the token while it may be there and `first` does not hold it for certain.
    async fn claim_in_authority(&self, ask: &Arc<ClaimRequest>, is_in_first: bool) -> Result<ClaimOutcome, StoreError> {
        let was_unclear = self.mark_ambiguous(ask);
        match self.authority.claim(ask).await {
            Ok(ClaimOutcome::Granted(lease)) => {
                if is_in_first {
                    self.clear_ambiguous(ask);
                }
                Ok(ClaimOutcome::Granted(lease))
            }
            Ok(found) => {
                self.clear_ambiguous(ask);
                Ok(found)
            }
            // This one was not applied, but an earlier one may have been.
            Err(mut error) if error.kind == ErrorKind::NotApplied && was_unclear => {
                error.kind = ErrorKind::Ambiguous;
                Err(error)
            }
            Err(error) => {
                if error.kind != ErrorKind::Ambiguous && !was_unclear {
                    self.clear_ambiguous(ask);
                }
                Err(error)
            }
        }
    }

    /// `last` did not grant what `first` did.
    async fn give_back_front_claim(self: &Arc<Self>, mine: Lease, stands: FrontClaimOrigin) {
        // A takeover that is released is unknown again, and its token spent: it cannot come back as if it stood there anew.
        if self.is_loose() && stands == FrontClaimOrigin::Fresh {
            self.spawn_and_wait_briefly(BackgroundTask::HoldUntil(mine, Instant::now())).await;
        } else {
            self.spawn_and_wait_briefly(BackgroundTask::SettleFrontClaim {
                lease: mine,
                copied: FrontSettlement::release(),
            })
            .await;
        }
    }

    /// Whether it was before.
    pub(super) fn mark_ambiguous(&self, ask: &ClaimRequest) -> bool {
        let mut unclear = self.ambiguous.lock();
        if unclear.len() >= MAX_TRACKED_TOKENS {
            return unclear.contains(&ask.token);
        }
        !unclear.insert(ask.token)
    }

    pub(super) fn is_ambiguous(&self, ask: &ClaimRequest) -> bool {
        self.ambiguous.lock().contains(&ask.token)
    }

    fn clear_ambiguous(&self, ask: &ClaimRequest) {
        self.ambiguous.lock().remove(&ask.token);
    }

    /// The claim has ended.
    pub(super) fn forget_token(&self, ask: &ClaimRequest) {
        self.clear_ambiguous(ask);
        self.token_aliases.lock().remove(&ask.token);
    }
}

fn with_take_over(ask: &Arc<ClaimRequest>, over: Option<Fence>) -> Arc<ClaimRequest> {
    if ask.take_over == over {
        ask.clone()
    } else {
        Arc::new(ClaimRequest { take_over: over, ..ClaimRequest::clone(ask) })
    }
}
