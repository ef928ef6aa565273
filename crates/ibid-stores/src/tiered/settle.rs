//! How claims are kept alive and ended: `last` before the answer, `first` behind it.

use std::{sync::Arc, time::Duration};

use ibid::{
    Notice,
    store::{Ask, Claim, End, ErrorKind, Fence, Finished, Held, Lease, Outline, StoreError, Token},
};
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
            match self.tell_last(lease, Says::Extend(hold)).await {
                Ok(held) => {
                    self.landed(lease, &held);
                    // From now on it can be taken over there, so that `first` alone must not end it.
                    self.becomes_unclear(&lease.ask);
                    if !matches!(held, Held::Lost(_)) {
                        drop(self.behind(errand()));
                    }
                    return Ok(held);
                }
                Err(error) => {
                    if error.kind == ErrorKind::Ambiguous {
                        self.becomes_unclear(&lease.ask);
                    }
                    return self.extend_solo(lease, hold, error).await;
                }
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
            match self.tell_last(lease, Says::Settle(end)).await {
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
                // A release that came too late where it counts still stands in `first`. Loose leaves that to lapse: free,
                // it would invite a second run while `last` is away.
                Claim::Busy(_) | Claim::Unknown(_) | Claim::Granted(_) => {
                    (matches!(end, End::Release) && !self.is_loose()).then(Copied::release)
                }
            },
        };
        if let Some(copied) = copied {
            let errand = match end {
                End::Release if lease.solo && !matches!(held, Held::Lost(_)) => Errand::Abandon(in_first),
                _ => Errand::End { lease: in_first, copied },
            };
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
        // `last` may know the claim, and may have let somebody take it over: its word alone counts.
        if self.is_unclear(&lease.ask) {
            return Err(why);
        }
        let in_first = self.in_first(lease);
        let ended = match end {
            End::Release => self.abandon_in_first(&in_first).await,
            _ => self.first.settle(&in_first, &Copied::of_solo_end(lease, end, Instant::now()).now()).await,
        };
        match ended {
            Ok(Held::Held | Held::Restored) => Err(why),
            Ok(Held::Lost(found)) => match *found {
                Claim::Done(finished) => Ok(Held::Lost(Box::new(Claim::Done(copy::opened(finished).finished)))),
                // Somebody took over there, and may have given up since: what happened is told to `last` all the same.
                Claim::Busy(_) | Claim::Unknown(_) | Claim::Granted(_) | Claim::Spent => Err(why),
            },
            Err(error) => {
                self.fell_back("settle", &error);
                Err(why)
            }
        }
    }

    /// An answer that ran solo and of which `last` has not said that it has it. Told to `last` now: what that says,
    /// counts. `in_first` is the entry's fence there.
    pub(super) async fn confirm(
        &self, ask: &Arc<Ask>, in_first: Fence, token: Token, finished: Finished,
    ) -> Result<Claim, StoreError> {
        let ran = Ask { token, fingerprint: finished.fingerprint, over: None, ..Ask::clone(ask) };
        let lease = Lease { ask: Arc::new(ran), fence: finished.fence, attempt: finished.attempt, solo: true };
        let end = End::Complete {
            failed: finished.failed,
            record: finished.record.clone(),
            outline: Outline::default(),
            keep: finished.expires_in,
        };
        let answer = match self.last.settle(&lease, &end).await {
            Ok(Held::Held | Held::Restored) => finished.clone(),
            Ok(Held::Lost(found)) => match *found {
                Claim::Done(theirs) => theirs,
                Claim::Busy(_) | Claim::Unknown(_) => return Ok(*found),
                // `last` has nothing, and does not take it: an operator is forgetting it right now.
                Claim::Granted(_) | Claim::Spent => return Ok(Claim::Done(finished)),
            },
            // All that anybody knows.
            Err(_) if self.is_loose() => return Ok(Claim::Done(finished)),
            Err(error) => return Err(error),
        };
        if answer.fence != finished.fence {
            self.observer.noticed(&Notice::LostClaim(&ask.address));
        }
        // The entry keeps the life of the solo answer, which ended at about the same time.
        let record = copy::wrapped(answer.fence, answer.attempt, answer.fingerprint, &answer.record);
        if let Err(error) = self.first.operators().replace(&ask.address, in_first, record).await {
            self.fell_back("replace", &error);
        }
        Ok(Claim::Done(answer))
    }

    /// Tells `last` about a claim that it did not grant. What is absent there is put back, under `first`'s fence.
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
        Claim::Done(finished) => Ok(Held::Lost(Box::new(Claim::Done(copy::opened(finished).finished)))),
        Claim::Busy(_) | Claim::Unknown(_) => Ok(Held::Lost(found)),
        Claim::Granted(_) | Claim::Spent => Err(why),
    }
}
