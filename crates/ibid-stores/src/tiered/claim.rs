//! Who is granted a claim: the steps in the order of the [module docs](super).

use std::{sync::Arc, time::Duration};

use ibid::store::{Ask, Claim, End, ErrorKind, Fence, Finished, Held, Holder, Lease, StoreError, Token};
use tokio::time::Instant;

use super::{
    Parts, UNCLEAR,
    behind::Errand,
    copy::{self, Copied},
};

/// How often one claim starts over because `first` changed under its hands.
const ROUNDS: u32 = 4;

/// A claim that is younger than this in `first` may still be on its way to `last`.
const ON_ITS_WAY: Duration = Duration::from_millis(100);

/// A copy with less than this to live may outlive what it is a copy of: there are two clocks, and an end may have been told
/// twice.
const AT_ITS_END: Duration = Duration::from_secs(1);

/// Longer than any lease that a clock can count.
const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How a claim came to stand in `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stands {
    /// Nobody stood there.
    Anew,
    /// It took over. Whoever was there may be on its way to `last`, which would let it run: never solo after this.
    InPlaceOfAnother,
}

/// What a step comes to.
enum Step {
    Answer(Claim),
    /// Somebody was faster: look again.
    Again,
}

impl Parts {
    pub(super) async fn claim(self: &Arc<Self>, ask: &Arc<Ask>) -> Result<Claim, StoreError> {
        for round in 0..ROUNDS {
            if let Step::Answer(claim) = self.claim_once(ask, round).await? {
                return Ok(claim);
            }
        }
        let why = "the entry changed in the first store at every try; ask again";
        Err(StoreError::new(ErrorKind::NotApplied, "tiered", why))
    }

    async fn claim_once(self: &Arc<Self>, ask: &Arc<Ask>, round: u32) -> Result<Step, StoreError> {
        if ask.over.is_some() {
            match self.last.get(&ask.address).await {
                Ok(Some(_)) => return self.take_over(ask).await,
                // The holder that is meant can only be one that `first` alone knows.
                Ok(None) => {}
                Err(_) if self.is_loose() => {}
                Err(error) => return Err(error),
            }
        }
        match self.first.claim(&self.ask_in_first(ask)).await {
            Ok(Claim::Done(finished)) => self.done_in_first(ask, finished, round).await,
            Ok(Claim::Granted(mine)) if ask.over.is_some() && self.is_loose() => {
                self.took_over_in_first(ask, mine).await
            }
            Ok(Claim::Granted(mine)) => self.granted_in_first(ask, mine, Stands::Anew).await,
            Ok(Claim::Busy(holder)) => self.occupied(ask, Claim::Busy(holder)).await,
            Ok(Claim::Unknown(holder)) => self.occupied(ask, Claim::Unknown(holder)).await,
            Ok(Claim::Spent) => self.spent_in_first(ask).await,
            Err(error) => {
                self.fell_back("claim", &error);
                self.without_first(ask, error.kind == ErrorKind::Ambiguous).await
            }
        }
    }

    async fn done_in_first(
        self: &Arc<Self>, ask: &Arc<Ask>, finished: Finished, round: u32,
    ) -> Result<Step, StoreError> {
        if self.trust.holds(self).await {
            let (fence, opened) = (finished.fence, copy::opened(finished));
            return match opened.solo {
                None if opened.finished.expires_in < AT_ITS_END && !self.has_it_still(ask, fence).await? => {
                    Ok(Step::Again)
                }
                None => Ok(Step::Answer(Claim::Done(opened.finished))),
                Some(token) => self.confirm(ask, fence, token, opened.finished).await.map(Step::Answer),
            };
        }
        // Under another generation it may not be there.
        if round == 0 {
            return Ok(Step::Again);
        }
        // If that cannot be read, `first` is not believed, as long as `last` can be asked. Loose then has nothing else
        // to go by: an answer that may have been forgotten is better than a second run.
        match self.without_first(ask, false).await {
            Err(error) if self.is_loose() && error.kind == ErrorKind::NotApplied => {
                Ok(Step::Answer(Claim::Done(copy::opened(finished).finished)))
            }
            answered => answered,
        }
    }

    /// Whether `last` has an answer of which `first` has a copy, with this fence. If not, the copy goes. Loose believes it as
    /// long as `last` cannot be asked.
    async fn has_it_still(&self, ask: &Ask, fence: Fence) -> Result<bool, StoreError> {
        match self.last.get(&ask.address).await {
            Ok(Some(Claim::Done(_))) => Ok(true),
            Err(_) if self.is_loose() => Ok(true),
            Err(error) => Err(error),
            Ok(_) => {
                let forgotten = self.first.operators().forget(&ask.address, fence).await;
                let _: Held = forgotten.map_err(|error| self.cannot_tell(error))?;
                Ok(false)
            }
        }
    }

    /// Step 2: `mine` is the claim in `first`; `last` decides.
    async fn granted_in_first(
        self: &Arc<Self>, ask: &Arc<Ask>, mine: Lease, stands: Stands,
    ) -> Result<Step, StoreError> {
        let told = Instant::now();
        let was_unclear = self.is_unclear(ask);
        let found = match self.claim_in_last(ask, true).await {
            Ok(found) => found,
            Err(error) => {
                return match error.kind {
                    ErrorKind::NotApplied if self.is_loose() && stands == Stands::Anew => {
                        self.run_solo(ask, mine, error).await.map(Step::Answer)
                    }
                    // The claim may be there: whoever asked asks again, and finds `first` as it is; or releases it,
                    // there before here.
                    _ if was_unclear || error.kind == ErrorKind::Ambiguous => Err(error),
                    _ => {
                        self.give_back(mine, stands).await;
                        Err(error)
                    }
                };
            }
        };
        match &found {
            // `last` may have had it for a while: `first`, where it may be new, is not to hold it for longer.
            Claim::Granted(_) if was_unclear => match self.last.get(&ask.address).await {
                Ok(Some(Claim::Busy(holder))) => {
                    let until = told.checked_add(holder.takeover_in).unwrap_or(told + YEAR);
                    self.soon(Errand::Hold(mine, until)).await;
                }
                Ok(Some(Claim::Unknown(_))) => self.soon(Errand::Hold(mine, Instant::now())).await,
                _ => {}
            },
            Claim::Granted(_) => {}
            Claim::Done(finished) => {
                let copied = Copied::of_finished(finished, told);
                drop(self.behind(Errand::Own { lease: mine, copied }));
            }
            // Nobody will be granted anything under this token: there is nothing to come back to.
            Claim::Spent => {
                self.is_over(ask);
                self.soon(Errand::Own { lease: mine, copied: Copied::release() }).await;
            }
            Claim::Busy(_) | Claim::Unknown(_) => {
                let marked = if self.is_loose() { self.marked(&ask.address).await } else { Ok(None) };
                if matches!(marked, Ok(Some(marker)) if marker.fence == mine.fence) {
                    // Asked again by a claim that was granted solo: same token, same answer.
                    return Ok(Step::Answer(Claim::Granted(super::solo::lease(ask, &mine))));
                }
                self.give_back(mine, stands).await;
            }
        }
        Ok(Step::Answer(found))
    }

    /// Step 3: somebody is in `first`.
    async fn occupied(self: &Arc<Self>, ask: &Arc<Ask>, found: Claim) -> Result<Step, StoreError> {
        match self.after_it_came(ask, &found).await {
            // It may be this very claim, granted while `first` could not be reached.
            Ok(Some(_)) if self.is_unclear(ask) => self.claim_in_last(ask, false).await.map(Step::Answer),
            Ok(Some(there)) => Ok(Step::Answer(there)),
            Ok(None) => match found {
                Claim::Unknown(holder) if holder.takeover_in.is_zero() => self.start_over(ask, holder).await,
                Claim::Unknown(holder) => self.left_behind(ask, holder).await,
                found => Ok(Step::Answer(found)),
            },
            Err(_) if self.is_loose() => Ok(Step::Answer(found)),
            Err(error) => Err(error),
        }
    }

    /// What `last` has. A holder that has only just come to `first` is given the time to come there too: the fence under
    /// which it runs is that of `last`.
    async fn after_it_came(&self, ask: &Ask, found: &Claim) -> Result<Option<Claim>, StoreError> {
        let began = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let there = self.last.get(&ask.address).await?;
            let is_new = matches!(found, Claim::Busy(holder) if holder.age + began.elapsed() + pause < ON_ITS_WAY);
            if there.is_some() || !is_new {
                return Ok(there);
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// A holder that lapsed in `first` and never came to `last`: it never started, unless it ran solo.
    async fn start_over(self: &Arc<Self>, ask: &Arc<Ask>, holder: Holder) -> Result<Step, StoreError> {
        let at = &ask.address;
        // Another request must not stand in its place: should it have run solo after all, the entry would name the
        // wrong one.
        if holder.fingerprint != ask.fingerprint
            || (self.is_loose() && self.marked(at).await.map_err(|error| self.cannot_tell(error))?.is_some())
        {
            return Ok(Step::Answer(Claim::Unknown(holder)));
        }
        let mine = match self.first.claim(&over(&self.ask_in_first(ask), Some(holder.fence))).await {
            Ok(Claim::Granted(mine)) => mine,
            Ok(_) => return Ok(Step::Again),
            Err(error) => {
                self.fell_back("claim", &error);
                return self.without_first(ask, error.kind == ErrorKind::Ambiguous).await;
            }
        };
        if self.is_loose() {
            // After the takeover: from here on the holder that was taken over cannot begin to run solo any more.
            match self.marked(at).await {
                Ok(None) => {}
                Ok(Some(_)) => {
                    let fence = mine.fence;
                    self.give_back(mine, Stands::InPlaceOfAnother).await;
                    return Ok(Step::Answer(Claim::Unknown(Holder { fence, ..holder })));
                }
                Err(error) => {
                    self.give_back(mine, Stands::InPlaceOfAnother).await;
                    return Err(self.cannot_tell(error));
                }
            }
        }
        self.granted_in_first(ask, mine, Stands::InPlaceOfAnother).await
    }

    /// `mine` has taken over, in `first`, a holder that the caller named and that `last` did not know. If that ran solo,
    /// `last` is told of it before it is asked: it is unknown there, and taken over.
    async fn took_over_in_first(self: &Arc<Self>, ask: &Arc<Ask>, mine: Lease) -> Result<Step, StoreError> {
        let marked = match self.marked(&ask.address).await {
            Ok(marked) => marked,
            Err(error) => {
                self.give_back(mine, Stands::InPlaceOfAnother).await;
                return Err(self.cannot_tell(error));
            }
        };
        let Some(marker) = marked else {
            return self.granted_in_first(ask, mine, Stands::InPlaceOfAnother).await;
        };
        let ran = Lease {
            ask: Arc::new(Ask { token: marker.token, over: None, ..Ask::clone(ask) }),
            fence: marker.fence,
            attempt: mine.attempt.saturating_sub(1).max(1),
            solo: true,
        };
        let unknown = End::Park { keep: ask.hold.saturating_add(ask.keep), retry_in: Duration::ZERO };
        if let Err(mut error) = self.last.settle(&ran, &unknown).await {
            self.give_back(mine, Stands::InPlaceOfAnother).await;
            error.kind = ErrorKind::NotApplied;
            return Err(error);
        }
        let named = over(ask, Some(marker.fence));
        let step = self.granted_in_first(&named, mine, Stands::InPlaceOfAnother).await?;
        drop(self.behind(Errand::Unmark(ask.address, marker.fence)));
        Ok(step)
    }

    /// A holder that is parked in `first` and that `last` has forgotten: so does `first`, unless it ran solo. What is
    /// parked cannot begin to.
    async fn left_behind(&self, ask: &Arc<Ask>, holder: Holder) -> Result<Step, StoreError> {
        let at = &ask.address;
        if self.is_loose() && self.marked(at).await.map_err(|error| self.cannot_tell(error))?.is_some() {
            return Ok(Step::Answer(Claim::Unknown(holder)));
        }
        let _: Held = self.first.operators().forget(at, holder.fence).await.map_err(|error| self.cannot_tell(error))?;
        Ok(Step::Again)
    }

    /// `first` could not say whether somebody ran solo. Nothing was claimed.
    fn cannot_tell(&self, mut error: StoreError) -> StoreError {
        self.fell_back("claim", &error);
        error.kind = ErrorKind::NotApplied;
        error
    }

    /// The token was spent in `first`: by its owner, by an operator who forgot what it had copied there, or because
    /// `last` did not grant it then.
    async fn spent_in_first(self: &Arc<Self>, ask: &Arc<Ask>) -> Result<Step, StoreError> {
        if !self.is_loose() || self.last.get(&ask.address).await?.is_some() {
            return self.claim_in_last(ask, false).await.map(Step::Answer);
        }
        // Nothing may be granted without a claim in `first`: should `last` go away, others would see nobody here.
        let other_name = Token::mint();
        {
            let mut other_names = self.other_names.lock();
            if other_names.len() >= UNCLEAR {
                return Ok(Step::Answer(Claim::Spent));
            }
            other_names.insert(ask.token, other_name);
        }
        Ok(Step::Again)
    }

    /// Step 4. `may_be_there`: the claim may have reached `first`.
    async fn without_first(self: &Arc<Self>, ask: &Arc<Ask>, may_be_there: bool) -> Result<Step, StoreError> {
        let told = Instant::now();
        let found = self.claim_in_last(ask, false).await?;
        let lease = Lease { ask: self.ask_in_first(ask), fence: Fence::UNSEEN, attempt: 0, solo: false };
        match &found {
            Claim::Done(finished) if may_be_there => {
                let copied = Copied::of_finished(finished, told);
                drop(self.behind(Errand::End { lease, copied }));
            }
            // Loose lets it lapse: what is free in `first` while `last` knows of a holder invites a second run.
            Claim::Busy(_) | Claim::Unknown(_) if may_be_there && !self.is_loose() => {
                drop(self.behind(Errand::End { lease, copied: Copied::release() }));
            }
            _ => {}
        }
        Ok(Step::Answer(found))
    }

    /// Step 5: `last` has an entry, and the caller asked to take over.
    async fn take_over(self: &Arc<Self>, ask: &Arc<Ask>) -> Result<Step, StoreError> {
        let lease = match self.claim_in_last(ask, false).await? {
            Claim::Granted(lease) => lease,
            found => return Ok(Step::Answer(found)),
        };
        match self.overwrite(ask).await {
            Ok(None) => {
                self.is_clear(ask);
                Ok(Step::Answer(Claim::Granted(lease)))
            }
            Ok(Some(stands)) => {
                let _: Held = self.last.settle(&lease, &End::Release).await?;
                self.is_clear(ask);
                Ok(Step::Answer(stands))
            }
            Err(error) => {
                self.fell_back("claim", &error);
                Ok(Step::Answer(Claim::Granted(lease)))
            }
        }
    }

    /// Makes this claim the holder in `first`, whoever is there: `last` has granted it. Except if somebody else runs
    /// there solo, or has finished: that stands, and is returned.
    async fn overwrite(&self, ask: &Arc<Ask>) -> Result<Option<Claim>, StoreError> {
        let at = &ask.address;
        for _ in 0..ROUNDS {
            let (fence, is_ripe) = match self.first.claim(&over(&self.ask_in_first(ask), None)).await? {
                Claim::Granted(_) | Claim::Spent => return Ok(None),
                Claim::Done(finished) if self.is_loose() && self.trust.holds(self).await => {
                    return Ok(Some(Claim::Done(copy::opened(finished).finished)));
                }
                Claim::Done(finished) => (finished.fence, false),
                Claim::Busy(holder) => {
                    if self.is_others_solo(ask, holder.fence).await? {
                        return Ok(Some(Claim::Busy(holder)));
                    }
                    (holder.fence, false)
                }
                Claim::Unknown(holder) => {
                    if self.is_others_solo(ask, holder.fence).await? {
                        return Ok(Some(Claim::Unknown(holder)));
                    }
                    (holder.fence, holder.takeover_in.is_zero() && holder.fingerprint == ask.fingerprint)
                }
            };
            if !is_ripe {
                let _: Held = self.first.operators().forget(at, fence).await?;
            } else if let Claim::Granted(_) = self.first.claim(&over(&self.ask_in_first(ask), Some(fence))).await? {
                return Ok(None);
            }
        }
        Ok(None)
    }

    async fn is_others_solo(&self, ask: &Ask, fence: Fence) -> Result<bool, StoreError> {
        Ok(self.is_loose() && ask.over != Some(fence) && self.marked(&ask.address).await?.is_some())
    }

    /// Asks `last`, and remembers the token while it may be there and `first` does not hold it for certain.
    async fn claim_in_last(&self, ask: &Arc<Ask>, is_in_first: bool) -> Result<Claim, StoreError> {
        let was_unclear = self.becomes_unclear(ask);
        match self.last.claim(ask).await {
            Ok(Claim::Granted(lease)) => {
                if is_in_first {
                    self.is_clear(ask);
                }
                Ok(Claim::Granted(lease))
            }
            Ok(found) => {
                self.is_clear(ask);
                Ok(found)
            }
            // This one was not applied, but an earlier one may have been.
            Err(mut error) if error.kind == ErrorKind::NotApplied && was_unclear => {
                error.kind = ErrorKind::Ambiguous;
                Err(error)
            }
            Err(error) => {
                if error.kind != ErrorKind::Ambiguous && !was_unclear {
                    self.is_clear(ask);
                }
                Err(error)
            }
        }
    }

    /// `last` did not grant what `first` did.
    async fn give_back(self: &Arc<Self>, mine: Lease, stands: Stands) {
        // A takeover that is released is unknown again, and its token spent: it cannot come back as if it stood there anew.
        if self.is_loose() && stands == Stands::Anew {
            self.soon(Errand::Hold(mine, Instant::now())).await;
        } else {
            self.soon(Errand::Own { lease: mine, copied: Copied::release() }).await;
        }
    }

    /// Whether it was before.
    pub(super) fn becomes_unclear(&self, ask: &Ask) -> bool {
        let mut unclear = self.unclear.lock();
        if unclear.len() >= UNCLEAR {
            return unclear.contains(&ask.token);
        }
        !unclear.insert(ask.token)
    }

    pub(super) fn is_unclear(&self, ask: &Ask) -> bool {
        self.unclear.lock().contains(&ask.token)
    }

    fn is_clear(&self, ask: &Ask) {
        self.unclear.lock().remove(&ask.token);
    }

    /// The claim has ended.
    pub(super) fn is_over(&self, ask: &Ask) {
        self.is_clear(ask);
        self.other_names.lock().remove(&ask.token);
    }
}

fn over(ask: &Arc<Ask>, over: Option<Fence>) -> Arc<Ask> {
    if ask.over == over { ask.clone() } else { Arc::new(Ask { over, ..Ask::clone(ask) }) }
}
