use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use ibid::store::{
    Address, Ask, Claim, Counters, Counts, Cursor, End, Fence, Filter, Held, Lease, Memory, Operators, Page, Promise,
    State, Store, StoreError, StoreFuture, Swept, Token,
};
use parking_lot::Mutex;

use super::{Bug, counting::Miscounting};

/// How many entries a store that evicts keeps.
const ROOM: usize = 400;

/// A [`Memory`] store with one bug.
#[derive(Debug)]
pub struct Broken {
    inner: Memory,
    bug: Bug,
    notes: Mutex<Notes>,
    counters: Miscounting,
}

/// What the bugs need to remember.
#[derive(Debug, Default)]
struct Notes {
    /// The latest lease at each address.
    latest: HashMap<Address, Lease>,
    granted: HashSet<(Address, Fence)>,
    parked: HashSet<(Address, Fence)>,
    by_age: VecDeque<(Address, Fence)>,
    /// What restarting fences stand for.
    restarted: HashMap<(Address, Fence), Fence>,
}

impl Broken {
    /// A store with this bug.
    pub fn new(bug: Bug) -> Self {
        Self { inner: Memory::default(), bug, notes: Mutex::default(), counters: Miscounting::new(bug) }
    }

    async fn claim_so(&self, ask: &Arc<Ask>) -> Result<Claim, StoreError> {
        let at = &ask.address;
        let asked = Arc::new(Ask { over: ask.over.map(|fence| self.inwards(at, fence)), ..(**ask).clone() });
        let seen = self.inner.get(at).await?;
        if matches!(self.bug, Bug::ChecksThenActs | Bug::TakeoverRaces) {
            tokio::task::yield_now().await;
        }
        let found = self.inner.claim(&asked).await?;
        let found = match (self.bug, found) {
            (Bug::GrantsEveryone, Claim::Busy(_) | Claim::Unknown(_) | Claim::Done(_)) => self.grant(ask, 0),
            (Bug::ChecksThenActs, Claim::Busy(_)) if seen.is_none() => self.grant(ask, 0),
            (Bug::TakeoverRaces, Claim::Busy(holder)) if matches!(&seen, Some(Claim::Unknown(holder)) if Some(holder.fence) == ask.over) => {
                self.grant(ask, holder.fence.0)
            }
            (Bug::ForgetsTokens, Claim::Granted(lease)) if self.notes.lock().granted.contains(&(*at, lease.fence)) => {
                self.inner.get(at).await?.unwrap_or(Claim::Spent)
            }
            (Bug::LapsedIsFree, Claim::Unknown(holder)) if !self.notes.lock().parked.contains(&(*at, holder.fence)) => {
                self.claim_as(ask, Ask { over: Some(holder.fence), ..(**ask).clone() }).await?
            }
            (Bug::TakeoverIgnoresFence, Claim::Unknown(holder)) if ask.over.is_some() => {
                self.claim_as(ask, Ask { over: Some(holder.fence), ..(**ask).clone() }).await?
            }
            (Bug::ReleaseLeavesNothing, Claim::Spent) => {
                self.claim_as(ask, Ask { token: Token::mint(), ..(**ask).clone() }).await?
            }
            (_, found) => found,
        };
        if let Claim::Granted(lease) = &found {
            self.note(lease).await?;
        }
        Ok(self.outwards(at, found, Some(ask)))
    }

    /// Claims as somebody else, and answers as if `ask` had.
    async fn claim_as(&self, ask: &Arc<Ask>, other: Ask) -> Result<Claim, StoreError> {
        Ok(match self.inner.claim(&Arc::new(other)).await? {
            Claim::Granted(lease) => Claim::Granted(Lease { ask: ask.clone(), ..lease }),
            found => found,
        })
    }

    fn grant(&self, ask: &Arc<Ask>, after: u64) -> Claim {
        let fence = Fence(after + 1 + self.notes.lock().granted.len() as u64);
        Claim::Granted(Lease { ask: ask.clone(), fence, attempt: 1, solo: false })
    }

    async fn note(&self, lease: &Lease) -> Result<(), StoreError> {
        let at = lease.ask.address;
        let evicted = {
            let mut notes = self.notes.lock();
            notes.latest.insert(at, lease.clone());
            notes.granted.insert((at, lease.fence));
            notes.by_age.push_back((at, lease.fence));
            if notes.by_age.len() > ROOM { notes.by_age.pop_front() } else { None }
        };
        if let (Bug::EvictsLive, Some((at, fence))) = (self.bug, evicted) {
            let _ = self.inner.operators().forget(&at, fence).await?;
        }
        Ok(())
    }

    async fn extend_so(&self, lease: &Lease, hold: Duration) -> Result<Held, StoreError> {
        let at = &lease.ask.address;
        if self.bug == Bug::NeverRestores && self.inner.get(at).await?.is_none() {
            return Ok(Held::Lost(Box::new(Claim::Spent)));
        }
        match self.inner.extend(&self.lease_inwards(lease), hold).await? {
            Held::Lost(_) if self.bug == Bug::ExtendIgnoresHolder => Ok(Held::Held),
            answered => Ok(self.held_outwards(at, answered)),
        }
    }

    async fn settle_so(&self, lease: &Lease, end: &End) -> Result<Held, StoreError> {
        let at = &lease.ask.address;
        let seen = self.inner.get(at).await?;
        if self.bug == Bug::NeverRestores && seen.is_none() && lease.fence != Fence::UNSEEN {
            return Ok(Held::Lost(Box::new(Claim::Spent)));
        }
        let latest = self.notes.lock().latest.get(at).cloned();
        let holder = match (self.bug, latest) {
            (Bug::SettleIgnoresHolder, Some(latest)) => latest,
            (Bug::UnseenIgnoresToken, Some(latest)) if lease.fence == Fence::UNSEEN => latest,
            _ => self.lease_inwards(lease),
        };
        let answered = self.inner.settle(&holder, &self.ends(end, seen)).await?;
        match (self.bug, end) {
            (Bug::ReleasedTakeoverIsFree, End::Release) => {
                if let Some(Claim::Unknown(unknown)) = self.inner.get(at).await? {
                    let _ = self.inner.operators().resolve(at, unknown.fence, end).await?;
                }
            }
            (Bug::CompleteOverwrites, End::Complete { record, .. }) if answered == Held::Held => {
                let _ = self.inner.operators().replace(at, holder.fence, record.clone()).await?;
            }
            (_, End::Park { .. }) => drop(self.notes.lock().parked.insert((*at, holder.fence))),
            _ => {}
        }
        Ok(self.held_outwards(at, answered))
    }

    /// The end that is written in place of this one.
    fn ends(&self, end: &End, seen: Option<Claim>) -> End {
        match (self.bug, end.clone(), seen) {
            (Bug::TakeoverIgnoresRetryIn, End::Park { keep, .. }, _) => End::Park { keep, retry_in: Duration::ZERO },
            (Bug::ParkIsRelease, End::Park { .. }, _) => End::Release,
            (Bug::KeepCountsFromClaim, End::Complete { failed, record, outline, keep }, Some(Claim::Busy(holder))) => {
                End::Complete { failed, record, outline, keep: keep.saturating_sub(holder.age) }
            }
            (Bug::CutsRecords, End::Complete { failed, mut record, outline, keep }, _) => {
                record.truncate(1 << 20);
                End::Complete { failed, record, outline, keep }
            }
            (_, end, _) => end,
        }
    }

    /// The fence that the inner store knows.
    fn inwards(&self, at: &Address, fence: Fence) -> Fence {
        match self.bug {
            Bug::FencesRestart => {
                self.notes.lock().restarted.get(&(*at, fence)).copied().unwrap_or(Fence(u64::MAX >> 2))
            }
            _ => fence,
        }
    }

    fn lease_inwards(&self, lease: &Lease) -> Lease {
        let fence = match lease.fence {
            Fence::UNSEEN => Fence::UNSEEN,
            fence => self.inwards(&lease.ask.address, fence),
        };
        Lease { fence, ..lease.clone() }
    }

    /// What is found, under the fences that the caller sees: restarted ones are the numbers of the attempts.
    fn outwards(&self, at: &Address, found: Claim, ask: Option<&Arc<Ask>>) -> Claim {
        if self.bug != Bug::FencesRestart {
            return found;
        }
        let out = |fence: &mut Fence, attempt: u32| {
            let outer = Fence(attempt.into());
            self.notes.lock().restarted.insert((*at, outer), *fence);
            *fence = outer;
        };
        let mut found = found;
        match &mut found {
            Claim::Granted(lease) => {
                out(&mut lease.fence, lease.attempt);
                if let Some(ask) = ask {
                    lease.ask = ask.clone();
                }
            }
            Claim::Busy(holder) | Claim::Unknown(holder) => out(&mut holder.fence, holder.attempt),
            Claim::Done(done) => out(&mut done.fence, done.attempt),
            Claim::Spent => {}
        }
        found
    }

    fn held_outwards(&self, at: &Address, answered: Held) -> Held {
        match answered {
            Held::Lost(found) => Held::Lost(Box::new(self.outwards(at, *found, None))),
            answered => answered,
        }
    }
}

impl Store for Broken {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        StoreFuture::boxed(self.claim_so(ask))
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.extend_so(lease, hold))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.settle_so(lease, end))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        match self.bug {
            Bug::WaitSleeps => StoreFuture::boxed(async move {
                tokio::time::sleep(limit).await;
                Ok(())
            }),
            Bug::WaitReturns => StoreFuture::ready(Ok(())),
            _ => {
                let seen = self.inwards(at, seen);
                StoreFuture::boxed(async move { self.inner.wait(at, seen, limit).await })
            }
        }
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        StoreFuture::boxed(async move { Ok(self.inner.get(at).await?.map(|found| self.outwards(at, found, None))) })
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        StoreFuture::boxed(async move {
            if self.bug == Bug::SweepsFinished {
                let filter = Filter { state: Some(State::Done), ..Filter::default() };
                let page = self.inner.operators().list(&filter, Cursor::default(), at_most).await?;
                for entry in page.entries {
                    let _ = self.inner.operators().forget(&entry.address, entry.fence).await?;
                }
            }
            self.inner.sweep(at_most).await
        })
    }

    fn operators(&self) -> &dyn Operators {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(&self.counters)
    }

    fn promise(&self) -> Promise {
        Promise { store: "broken", ..self.inner.promise() }
    }
}

impl Operators for Broken {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        StoreFuture::boxed(async move {
            let mut page = match self.bug {
                Bug::ListIgnoresCursor => self.inner.operators().list(filter, Cursor::default(), at_most).await?,
                Bug::ListIgnoresAtMost => self.inner.operators().list(filter, from, u32::MAX).await?,
                _ => self.inner.operators().list(filter, from, at_most).await?,
            };
            if self.bug == Bug::FencesRestart {
                page.entries.iter_mut().for_each(|entry| entry.fence = Fence(entry.attempt.into()));
            }
            Ok(page)
        })
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move {
            let answered = self.inner.operators().resolve(at, self.inwards(at, seen), end).await?;
            let latest = self.notes.lock().latest.get(at).cloned();
            match (self.bug, &answered, latest) {
                (Bug::ResolveKillsLive, Held::Lost(found), Some(latest)) if matches!(**found, Claim::Busy(_)) => {
                    self.inner.settle(&latest, end).await
                }
                _ => Ok(self.held_outwards(at, answered)),
            }
        })
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move {
            let seen = match (self.bug, self.inner.get(at).await?) {
                (Bug::ForgetIgnoresSeen, Some(Claim::Busy(holder) | Claim::Unknown(holder))) => holder.fence,
                (Bug::ForgetIgnoresSeen, Some(Claim::Done(done))) => done.fence,
                _ => self.inwards(at, seen),
            };
            Ok(self.held_outwards(at, self.inner.operators().forget(at, seen).await?))
        })
    }

    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move {
            let answered = self.inner.operators().replace(at, self.inwards(at, seen), record).await?;
            Ok(self.held_outwards(at, answered))
        })
    }

    fn counts(&self) -> StoreFuture<'_, Counts> {
        self.inner.operators().counts()
    }
}
