//! Decides claims, in the steps of the [module docs](super).

use ibid::store::Holder;

use super::{
    front_only::{FrontOnlyMarker, front_only_lease},
    *,
};
use ClaimOutcome::{Completed, Granted, InProgress, OutcomeUnknown, TokenSpent};

/// Maximum attempts of one claim while the front's entry keeps changing.
const MAX_ROUNDS: u32 = 4;

/// Time that a new claim in the front is given to reach the authority.
const AUTHORITY_CLAIM_GRACE: Duration = Duration::from_millis(100);

/// Minimum remaining ttl of a trusted copy. A shorter-lived copy may outlive the original: two clocks are involved, and
/// the settlement may have been sent twice.
const MIN_TRUSTED_TTL: Duration = Duration::from_secs(1);

/// Upper limit of a lease, so that adding it does not overflow the clock.
const MAX_LEASE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The outcome of a claim, or `None` if another call changed the entry: start over.
type ClaimStep = Result<Option<ClaimOutcome>, StoreError>;

impl TieredInner {
    pub(super) async fn claim(self: &Arc<Self>, ask: &Arc<ClaimRequest>) -> Result<ClaimOutcome, StoreError> {
        for round in 0..MAX_ROUNDS {
            if let Some(claim) = self.claim_once(ask, round).await? {
                return Ok(claim);
            }
        }
        let why = "the entry changed in the first store at every try; ask again";
        Err(StoreError::new(ErrorKind::NotApplied, "tiered", why))
    }

    async fn claim_once(self: &Arc<Self>, ask: &Arc<ClaimRequest>, round: u32) -> ClaimStep {
        if ask.take_over.is_some() {
            match self.authority.get(&ask.address).await {
                Ok(Some(_)) => return self.take_over(ask).await,
                // The caller can only mean a holder that is known to the front alone.
                Ok(None) => {}
                Err(_) if self.is_loose() => {}
                Err(error) => return Err(error),
            }
        }
        match self.front.claim(&self.front_request(ask)).await {
            Ok(Completed(finished)) => self.completed_in_front(ask, finished, round).await,
            Ok(Granted(mine)) if ask.take_over.is_some() && self.is_loose() => {
                self.taken_over_in_front(ask, mine).await
            }
            Ok(Granted(mine)) => self.granted_in_front(ask, mine).await,
            Ok(found @ (InProgress(_) | OutcomeUnknown(_))) => self.occupied_in_front(ask, found).await,
            Ok(TokenSpent) => self.token_spent_in_front(ask).await,
            Err(error) => {
                self.report_front_error("claim", &error);
                self.claim_without_front(ask, error.kind == ErrorKind::Ambiguous).await
            }
        }
    }

    async fn completed_in_front(
        self: &Arc<Self>, ask: &Arc<ClaimRequest>, finished: CompletedEntry, round: u32,
    ) -> ClaimStep {
        if self.generation.is_front_current(self).await {
            let (fence, opened) = (finished.fence, front_copy::decode(finished));
            return match opened.front_only_token {
                None if opened.entry.expires_in < MIN_TRUSTED_TTL
                    && !self.is_still_in_authority(ask, fence).await? =>
                {
                    Ok(None)
                }
                None => Ok(Some(Completed(opened.entry))),
                Some(token) => self.confirm_front_only(ask, fence, token, opened.entry).await.map(Some),
            };
        }
        // Under another generation the answer may not exist.
        if round == 0 {
            return Ok(None);
        }
        // The generation could not be read, so the front is not trusted while the authority responds. Loose mode has no
        // alternative if it does not: a possibly forgotten answer is better than a second run.
        match self.claim_without_front(ask, false).await {
            Err(error) if self.is_loose() && error.kind == ErrorKind::NotApplied => {
                Ok(Some(Completed(front_copy::decode(finished).entry)))
            }
            answered => answered,
        }
    }

    /// Whether the authority still has the answer that the front copied under `fence`. If not, removes the copy. Loose
    /// mode trusts the copy while the authority is unreachable.
    async fn is_still_in_authority(&self, ask: &ClaimRequest, fence: Fence) -> Result<bool, StoreError> {
        match self.authority.get(&ask.address).await {
            Ok(Some(Completed(_))) => Ok(true),
            Err(_) if self.is_loose() => Ok(true),
            Err(error) => Err(error),
            Ok(_) => {
                let forgotten = self.front.admin().forget(&ask.address, fence).await;
                let _: SettleOutcome = forgotten.map_err(|error| self.as_not_applied(error))?;
                Ok(false)
            }
        }
    }

    /// Step 2: `mine` is the claim in the front; the authority decides.
    async fn granted_in_front(self: &Arc<Self>, ask: &Arc<ClaimRequest>, mine: Lease) -> ClaimStep {
        let told = Instant::now();
        let was_unclear = self.is_ambiguous(ask);
        let found = match self.claim_in_authority(ask, true).await {
            Ok(found) => found,
            Err(error) => {
                return match error.kind {
                    ErrorKind::NotApplied if self.is_loose() && !is_takeover(&mine) => {
                        self.run_front_only(ask, mine, error).await.map(Some)
                    }
                    // The authority may hold the claim: the caller claims again and finds the front unchanged, or
                    // releases both.
                    _ if was_unclear || error.kind == ErrorKind::Ambiguous => Err(error),
                    _ => {
                        self.give_back_front_claim(mine).await;
                        Err(error)
                    }
                };
            }
        };
        match &found {
            // The authority may have granted it a while ago: the front must not hold it for longer.
            Granted(_) if was_unclear => match self.authority.get(&ask.address).await {
                Ok(Some(InProgress(holder))) => {
                    let until = told.checked_add(holder.takeover_in).unwrap_or(told + MAX_LEASE);
                    self.spawn_and_wait_briefly(BackgroundTask::HoldUntil(mine, until)).await;
                }
                Ok(Some(OutcomeUnknown(_))) => {
                    self.spawn_and_wait_briefly(BackgroundTask::HoldUntil(mine, Instant::now())).await
                }
                _ => {}
            },
            Granted(_) => {}
            Completed(finished) => {
                let copied = FrontSettlement::from_completed(finished, told);
                drop(self.spawn_background(BackgroundTask::Settle { lease: mine, copied }));
            }
            // The token can never be granted again, so the claim in the front is not needed.
            TokenSpent => {
                self.forget_token(ask);
                self.spawn_and_wait_briefly(BackgroundTask::release_front_claim(mine)).await;
            }
            InProgress(_) | OutcomeUnknown(_) => {
                let marked = if self.is_loose() { self.find_marker(&ask.address).await } else { Ok(None) };
                if matches!(marked, Ok(Some(marker)) if marker.fence == mine.fence) {
                    // A front-only claim repeats its request: same token, same outcome.
                    return Ok(Some(Granted(front_only_lease(ask, &mine))));
                }
                self.give_back_front_claim(mine).await;
            }
        }
        Ok(Some(found))
    }

    /// Step 3: the front has a holder.
    async fn occupied_in_front(self: &Arc<Self>, ask: &Arc<ClaimRequest>, found: ClaimOutcome) -> ClaimStep {
        match self.wait_for_authority_entry(ask, &found).await {
            // The authority's entry may be this claim, granted while the front was unreachable.
            Ok(Some(_)) if self.is_ambiguous(ask) => self.claim_in_authority(ask, false).await.map(Some),
            Ok(Some(there)) => Ok(Some(there)),
            Ok(None) => match found {
                OutcomeUnknown(holder) if holder.takeover_in.is_zero() => self.take_over_expired(ask, holder).await,
                OutcomeUnknown(holder) => self.forget_stale_front_entry(ask, holder).await,
                found => Ok(Some(found)),
            },
            Err(_) if self.is_loose() => Ok(Some(found)),
            Err(error) => Err(error),
        }
    }

    /// Reads the authority's entry. A holder that is new in the front gets time to reach the authority, because callers
    /// need its fence there.
    async fn wait_for_authority_entry(
        &self, ask: &ClaimRequest, found: &ClaimOutcome,
    ) -> Result<Option<ClaimOutcome>, StoreError> {
        let began = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let there = self.authority.get(&ask.address).await?;
            let is_new =
                matches!(found, InProgress(holder) if holder.age + began.elapsed() + pause < AUTHORITY_CLAIM_GRACE);
            if there.is_some() || !is_new {
                return Ok(there);
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// The holder's lease expired in the front and it never reached the authority: it never started, unless it ran
    /// front-only.
    async fn take_over_expired(self: &Arc<Self>, ask: &Arc<ClaimRequest>, holder: Holder) -> ClaimStep {
        // A request with another fingerprint must not replace it: if the holder did run front-only, the entry would
        // name the wrong request.
        if holder.fingerprint != ask.fingerprint || self.is_marked(ask).await? {
            return Ok(Some(OutcomeUnknown(holder)));
        }
        let mine = match self.front.claim(&with_take_over(&self.front_request(ask), Some(holder.fence))).await {
            Ok(Granted(mine)) => mine,
            Ok(_) => return Ok(None),
            Err(error) => {
                self.report_front_error("claim", &error);
                return self.claim_without_front(ask, error.kind == ErrorKind::Ambiguous).await;
            }
        };
        if self.is_loose() {
            // After the takeover, the previous holder can no longer start a front-only run.
            let (fence, marked) = (mine.fence, self.find_marker_or_give_back(&mine).await?);
            if marked.is_some() {
                self.give_back_front_claim(mine).await;
                return Ok(Some(OutcomeUnknown(Holder { fence, ..holder })));
            }
        }
        self.granted_in_front(ask, mine).await
    }

    /// Finds the marker of an entry that `mine` took over in the front. Gives the takeover back if that fails.
    async fn find_marker_or_give_back(self: &Arc<Self>, mine: &Lease) -> Result<Option<FrontOnlyMarker>, StoreError> {
        match self.find_marker(&mine.request.address).await {
            Ok(marked) => Ok(marked),
            Err(error) => {
                self.give_back_front_claim(mine.clone()).await;
                Err(self.as_not_applied(error))
            }
        }
    }

    /// `mine` took over, in the front, a holder that the caller named and the authority did not know. If that holder
    /// ran front-only, the authority first records it as outcome unknown, and `mine` takes it over there, too.
    async fn taken_over_in_front(self: &Arc<Self>, ask: &Arc<ClaimRequest>, mine: Lease) -> ClaimStep {
        let Some(marker) = self.find_marker_or_give_back(&mine).await? else {
            return self.granted_in_front(ask, mine).await;
        };
        let ran = Lease {
            request: Arc::new(ClaimRequest { token: marker.token, take_over: None, ..ClaimRequest::clone(ask) }),
            fence: marker.fence,
            attempt: mine.attempt.saturating_sub(1).max(1),
            front_only: true,
        };
        let unknown = Settlement::Park { ttl: ask.lease.saturating_add(ask.ttl), retry_in: Duration::ZERO };
        if let Err(mut error) = self.authority.settle(&ran, &unknown).await {
            self.give_back_front_claim(mine).await;
            error.kind = ErrorKind::NotApplied;
            return Err(error);
        }
        let named = with_take_over(ask, Some(marker.fence));
        let step = self.granted_in_front(&named, mine).await?;
        // Any other outcome leaves the run unknown to the authority.
        if matches!(step, Some(Granted(_))) {
            self.spawn_and_wait_briefly(BackgroundTask::RemoveMarker(ask.address, marker.fence)).await;
        }
        Ok(step)
    }

    /// The holder is parked in the front and the authority has forgotten it: forgets it in the front, too, unless it
    /// ran front-only. A parked holder cannot start a front-only run.
    async fn forget_stale_front_entry(&self, ask: &Arc<ClaimRequest>, holder: Holder) -> ClaimStep {
        if self.is_marked(ask).await? {
            return Ok(Some(OutcomeUnknown(holder)));
        }
        let forgotten = self.front.admin().forget(&ask.address, holder.fence).await;
        let _: SettleOutcome = forgotten.map_err(|error| self.as_not_applied(error))?;
        Ok(None)
    }

    /// Whether a holder of the entry in the front may have run front-only.
    async fn is_marked(&self, ask: &ClaimRequest) -> Result<bool, StoreError> {
        let find_marker = self.find_marker(&ask.address);
        Ok(self.is_loose() && find_marker.await.map_err(|error| self.as_not_applied(error))?.is_some())
    }

    /// The front could not tell whether a claim ran front-only. Nothing was claimed.
    fn as_not_applied(&self, mut error: StoreError) -> StoreError {
        self.report_front_error("claim", &error);
        error.kind = ErrorKind::NotApplied;
        error
    }

    /// The token is spent in the front: by its owner, by an operator who forgot the answer copied there, or because the
    /// authority did not grant it.
    async fn token_spent_in_front(self: &Arc<Self>, ask: &Arc<ClaimRequest>) -> ClaimStep {
        if !self.is_loose() || self.authority.get(&ask.address).await?.is_some() {
            return self.claim_in_authority(ask, false).await.map(Some);
        }
        // A grant requires a claim in the front: otherwise other claims see no holder once the authority is
        // unreachable.
        let mut aliases = self.token_aliases.lock();
        if aliases.len() >= MAX_TRACKED_TOKENS {
            return Ok(Some(TokenSpent));
        }
        aliases.insert(ask.token, ClaimToken::mint());
        Ok(None)
    }

    /// Step 4. `may_be_there`: the claim may have reached the front.
    async fn claim_without_front(self: &Arc<Self>, ask: &Arc<ClaimRequest>, may_be_there: bool) -> ClaimStep {
        let told = Instant::now();
        let found = self.claim_in_authority(ask, false).await?;
        let lease = Lease::unseen(&self.front_request(ask));
        match &found {
            Completed(finished) if may_be_there => {
                let copied = FrontSettlement::from_completed(finished, told);
                drop(self.spawn_background(BackgroundTask::Settle { lease, copied }));
            }
            // Loose mode lets the lease expire: a released entry in the front would allow a second run.
            InProgress(_) | OutcomeUnknown(_) if may_be_there && !self.is_loose() => {
                let copied = FrontSettlement::release();
                drop(self.spawn_background(BackgroundTask::Settle { lease, copied }));
            }
            _ => {}
        }
        Ok(Some(found))
    }

    /// Step 5: the authority has an entry, and the caller requests a takeover.
    async fn take_over(self: &Arc<Self>, ask: &Arc<ClaimRequest>) -> ClaimStep {
        let lease = match self.claim_in_authority(ask, false).await? {
            Granted(lease) => lease,
            found => return Ok(Some(found)),
        };
        let Some(stands) = self.front_answer("claim", self.overwrite_front(ask).await) else {
            return Ok(Some(Granted(lease)));
        };
        if stands.is_some() {
            let _: SettleOutcome = self.authority.settle(&lease, &Settlement::Release).await?;
        }
        self.clear_ambiguous(ask);
        Ok(Some(stands.unwrap_or(Granted(lease))))
    }

    /// Makes this claim, which the authority has granted, the holder in the front. If another claim ran front-only or
    /// completed there, that claim is returned.
    async fn overwrite_front(&self, ask: &Arc<ClaimRequest>) -> Result<Option<ClaimOutcome>, StoreError> {
        let at = &ask.address;
        let mut displaced = None;
        for _ in 0..MAX_ROUNDS {
            let found = self.front.claim(&with_take_over(&self.front_request(ask), None)).await?;
            let (fence, is_ripe) = match &found {
                Granted(_) | TokenSpent => return self.find_displaced_run(ask, displaced).await,
                Completed(finished) => (finished.fence, false),
                InProgress(holder) => (holder.fence, false),
                OutcomeUnknown(holder) => {
                    (holder.fence, holder.takeover_in.is_zero() && holder.fingerprint == ask.fingerprint)
                }
            };
            match found {
                Completed(finished) if self.is_loose() && self.generation.is_front_current(self).await => {
                    return Ok(Some(Completed(front_copy::decode(finished).entry)));
                }
                InProgress(_) | OutcomeUnknown(_) if self.is_held_front_only_by_other(ask, fence).await? => {
                    return Ok(Some(found));
                }
                InProgress(holder) | OutcomeUnknown(holder) => displaced = Some(holder),
                _ => {}
            }
            if !is_ripe {
                let _: SettleOutcome = self.front.admin().forget(at, fence).await?;
            } else if let Granted(_) = self.front.claim(&with_take_over(&self.front_request(ask), Some(fence))).await? {
                return self.find_displaced_run(ask, displaced).await;
            }
        }
        Ok(None)
    }

    /// This claim is the holder in the front, in place of `displaced`, which can no longer start a front-only run. If it
    /// has started one since its marker was looked for, this claim gives way: its entry in the front stays until its
    /// lease expires, so that no other claim finds a free entry while that run lasts.
    async fn find_displaced_run(
        &self, ask: &ClaimRequest, displaced: Option<Holder>,
    ) -> Result<Option<ClaimOutcome>, StoreError> {
        let Some(holder) = displaced.filter(|_| self.is_loose()) else { return Ok(None) };
        let marker = self.find_marker(&ask.address).await?;
        Ok(marker.filter(|marker| ask.take_over != Some(marker.fence)).map(|_| InProgress(holder)))
    }

    async fn is_held_front_only_by_other(&self, ask: &ClaimRequest, fence: Fence) -> Result<bool, StoreError> {
        Ok(self.is_loose() && ask.take_over != Some(fence) && self.find_marker(&ask.address).await?.is_some())
    }

    /// Claims in the authority, and tracks the token while the authority may hold it and the front may not.
    async fn claim_in_authority(&self, ask: &Arc<ClaimRequest>, is_in_first: bool) -> Result<ClaimOutcome, StoreError> {
        let was_unclear = self.mark_ambiguous(ask);
        match self.authority.claim(ask).await {
            Ok(found) => {
                if is_in_first || !matches!(found, Granted(_)) {
                    self.clear_ambiguous(ask);
                }
                Ok(found)
            }
            // This call was not applied, but an earlier one may have been.
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

    /// Gives back a claim that the front granted and the authority did not.
    async fn give_back_front_claim(self: &Arc<Self>, mine: Lease) {
        // A released takeover becomes outcome unknown again and its token is spent, so it cannot return as a fresh
        // claim.
        self.spawn_and_wait_briefly(match self.is_loose() && !is_takeover(&mine) {
            true => BackgroundTask::HoldUntil(mine, Instant::now()),
            false => BackgroundTask::release_front_claim(mine),
        })
        .await;
    }

    /// Returns whether the token was already marked.
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

    /// Drops all state of a settled claim.
    pub(super) fn forget_token(&self, ask: &ClaimRequest) {
        self.clear_ambiguous(ask);
        self.token_aliases.lock().remove(&ask.token);
    }
}

/// Whether the front granted the claim by a takeover. The previous holder may still obtain its claim from the authority
/// and run, so this one must not run front-only.
fn is_takeover(mine: &Lease) -> bool {
    mine.request.take_over.is_some()
}

fn with_take_over(ask: &Arc<ClaimRequest>, take_over: Option<Fence>) -> Arc<ClaimRequest> {
    if ask.take_over == take_over {
        return ask.clone();
    }
    Arc::new(ClaimRequest { take_over, ..ClaimRequest::clone(ask) })
}
