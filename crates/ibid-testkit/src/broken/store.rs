use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, CounterUsage, Counters, EntryCounts, EntryFilter,
    EntryPage, EntryState, Fence, Guarantees, Lease, ListCursor, Memory, SettleOutcome, Settlement, Store, StoreAdmin,
    StoreError, StoreFuture, SweepResult,
};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::Bug;
use ClaimOutcome::{Completed, Granted, InProgress, OutcomeUnknown, TokenSpent};
use SettleOutcome::{Applied, ClaimLost};
use Settlement::{Complete, Park, Release};

/// Maximum number of entries of a store that evicts.
const MAX_ENTRIES: usize = 400;

/// Maximum length of a window.
const MAX_WINDOW: Duration = Duration::from_secs(365 * 24 * 3600);

/// A [`Memory`] store with one bug.
#[derive(Debug)]
pub struct FaultyStore {
    inner: Memory,
    bug: Bug,
    state: Mutex<FaultyStoreState>,
    counters: FaultyCounters,
}

#[derive(Debug, Default)]
struct FaultyStoreState {
    latest: HashMap<Address, Lease>,
    granted: HashSet<(Address, Fence)>,
    parked: HashSet<(Address, Fence)>,
    by_age: VecDeque<(Address, Fence)>,
    /// The inner fences of restarted fences.
    restarted: HashMap<(Address, Fence), Fence>,
    at_hand: HashMap<Address, CompletedEntry>,
}

impl FaultyStore {
    pub fn new(bug: Bug) -> Self {
        let counters = FaultyCounters { bug, windows: Mutex::default() };
        Self { inner: Memory::default(), bug, state: Mutex::default(), counters }
    }

    async fn claim_with_bug(&self, ask: &Arc<ClaimRequest>) -> Result<ClaimOutcome, StoreError> {
        let at = &ask.address;
        let asked = Arc::new(ClaimRequest {
            take_over: ask.take_over.map(|fence| self.to_inner_fence(at, fence)),
            ..(**ask).clone()
        });
        let seen = self.inner.get(at).await?;
        if matches!(self.bug, Bug::ChecksThenActs | Bug::TakeoverRaces) {
            tokio::task::yield_now().await;
        }
        let found = self.inner.claim(&asked).await?;
        let found = match (self.bug, found) {
            (Bug::GrantsEveryone, InProgress(_) | OutcomeUnknown(_) | Completed(_)) => self.grant(ask, 0),
            (Bug::ChecksThenActs, InProgress(_)) if seen.is_none() => self.grant(ask, 0),
            (Bug::TakeoverRaces, InProgress(holder)) if matches!(&seen, Some(OutcomeUnknown(holder)) if Some(holder.fence) == ask.take_over) => {
                self.grant(ask, holder.fence.0)
            }
            (Bug::ForgetsTokens, Granted(lease)) if self.state.lock().granted.contains(&(*at, lease.fence)) => {
                self.inner.get(at).await?.unwrap_or(TokenSpent)
            }
            (Bug::LapsedIsFree, OutcomeUnknown(holder)) if !self.state.lock().parked.contains(&(*at, holder.fence)) => {
                self.claim_as_other(ask, ClaimRequest { take_over: Some(holder.fence), ..(**ask).clone() }).await?
            }
            (Bug::TakeoverIgnoresFence, OutcomeUnknown(holder)) if ask.take_over.is_some() => {
                self.claim_as_other(ask, ClaimRequest { take_over: Some(holder.fence), ..(**ask).clone() }).await?
            }
            (Bug::ReleaseLeavesNothing, TokenSpent) => {
                self.claim_as_other(ask, ClaimRequest { token: ClaimToken::mint(), ..(**ask).clone() }).await?
            }
            (_, found) => found,
        };
        if let Granted(lease) = &found {
            self.record_claim(lease).await?;
        }
        Ok(self.to_outer_outcome(at, found, Some(ask)))
    }

    /// Claims with another request, and returns the outcome as that of `ask`.
    async fn claim_as_other(&self, ask: &Arc<ClaimRequest>, other: ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        Ok(match self.inner.claim(&Arc::new(other)).await? {
            Granted(lease) => Granted(Lease { request: ask.clone(), ..lease }),
            found => found,
        })
    }

    fn grant(&self, ask: &Arc<ClaimRequest>, after: u64) -> ClaimOutcome {
        let fence = Fence(after + 1 + self.state.lock().granted.len() as u64);
        Granted(Lease { request: ask.clone(), fence, attempt: 1, front_only: false })
    }

    async fn record_claim(&self, lease: &Lease) -> Result<(), StoreError> {
        let at = lease.request.address;
        let evicted = {
            let mut notes = self.state.lock();
            notes.latest.insert(at, lease.clone());
            notes.granted.insert((at, lease.fence));
            notes.by_age.push_back((at, lease.fence));
            if notes.by_age.len() > MAX_ENTRIES { notes.by_age.pop_front() } else { None }
        };
        if let (Bug::EvictsLive, Some((at, fence))) = (self.bug, evicted) {
            let _ = self.inner.admin().forget(&at, fence).await?;
        }
        Ok(())
    }

    async fn extend_with_bug(&self, lease: &Lease, hold: Duration) -> Result<SettleOutcome, StoreError> {
        let at = &lease.request.address;
        if self.bug == Bug::NeverRestores && self.inner.get(at).await?.is_none() {
            return Ok(ClaimLost(Box::new(TokenSpent)));
        }
        match self.inner.extend(&self.to_inner_lease(lease), hold).await? {
            ClaimLost(_) if self.bug == Bug::ExtendIgnoresHolder => Ok(Applied),
            answered => Ok(self.to_outer_settle_outcome(at, answered)),
        }
    }

    async fn settle_with_bug(&self, lease: &Lease, end: &Settlement) -> Result<SettleOutcome, StoreError> {
        let at = &lease.request.address;
        let seen = self.inner.get(at).await?;
        if self.bug == Bug::NeverRestores && seen.is_none() && lease.fence != Fence::UNSEEN {
            return Ok(ClaimLost(Box::new(TokenSpent)));
        }
        let latest = self.state.lock().latest.get(at).cloned();
        let holder = match (self.bug, latest) {
            (Bug::SettleIgnoresHolder, Some(latest)) => latest,
            (Bug::UnseenReleaseIgnoresToken, Some(latest)) if lease.fence == Fence::UNSEEN => latest,
            _ => self.to_inner_lease(lease),
        };
        let answered = self.inner.settle(&holder, &self.settlement_with_bug(end, seen)).await?;
        match (self.bug, end) {
            (Bug::ReleasedTakeoverIsFree, Release) => {
                if let Some(OutcomeUnknown(unknown)) = self.inner.get(at).await? {
                    let _ = self.inner.admin().resolve(at, unknown.fence, end).await?;
                }
            }
            (Bug::CompleteOverwrites, Complete { record, .. }) if answered == Applied => {
                let _ = self.inner.admin().replace_record(at, holder.fence, record.clone()).await?;
            }
            (_, Park { .. }) => drop(self.state.lock().parked.insert((*at, holder.fence))),
            _ => {}
        }
        Ok(self.to_outer_settle_outcome(at, answered))
    }

    /// Returns the settlement that is written instead of this one.
    fn settlement_with_bug(&self, end: &Settlement, seen: Option<ClaimOutcome>) -> Settlement {
        match (self.bug, end.clone(), seen) {
            (Bug::TakeoverIgnoresRetryIn, Park { ttl: keep, .. }, _) => Park { ttl: keep, retry_in: Duration::ZERO },
            (Bug::ParkIsRelease, Park { .. }, _) => Release,
            (
                Bug::TtlCountsFromClaim,
                Complete { failed, record, summary: outline, ttl: keep },
                Some(InProgress(holder)),
            ) => Complete { failed, record, summary: outline, ttl: keep.saturating_sub(holder.age) },
            (Bug::TruncatesRecords, Complete { failed, mut record, summary: outline, ttl: keep }, _) => {
                record.truncate(1 << 20);
                Complete { failed, record, summary: outline, ttl: keep }
            }
            (_, end, _) => end,
        }
    }

    /// Translates a fence to the inner store's.
    fn to_inner_fence(&self, at: &Address, fence: Fence) -> Fence {
        match self.bug {
            Bug::FencesRestart => {
                self.state.lock().restarted.get(&(*at, fence)).copied().unwrap_or(Fence(u64::MAX >> 2))
            }
            _ => fence,
        }
    }

    fn to_inner_lease(&self, lease: &Lease) -> Lease {
        let fence = match lease.fence {
            Fence::UNSEEN => Fence::UNSEEN,
            fence => self.to_inner_fence(&lease.request.address, fence),
        };
        Lease { fence, ..lease.clone() }
    }

    /// Translates the fences of an outcome to the caller's: a restarted fence is the number of the attempt.
    fn to_outer_outcome(&self, at: &Address, found: ClaimOutcome, ask: Option<&Arc<ClaimRequest>>) -> ClaimOutcome {
        if self.bug != Bug::FencesRestart {
            return found;
        }
        let out = |fence: &mut Fence, attempt: u32| {
            let outer = Fence(attempt.into());
            self.state.lock().restarted.insert((*at, outer), *fence);
            *fence = outer;
        };
        let mut found = found;
        match &mut found {
            Granted(lease) => {
                out(&mut lease.fence, lease.attempt);
                if let Some(ask) = ask {
                    lease.request = ask.clone();
                }
            }
            InProgress(holder) | OutcomeUnknown(holder) => out(&mut holder.fence, holder.attempt),
            Completed(done) => out(&mut done.fence, done.attempt),
            TokenSpent => {}
        }
        found
    }

    fn to_outer_settle_outcome(&self, at: &Address, answered: SettleOutcome) -> SettleOutcome {
        match answered {
            ClaimLost(found) => ClaimLost(Box::new(self.to_outer_outcome(at, *found, None))),
            answered => answered,
        }
    }
}

impl Store for FaultyStore {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        StoreFuture::boxed(self.claim_with_bug(ask))
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.extend_with_bug(lease, hold))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.settle_with_bug(lease, end))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        match self.bug {
            Bug::WaitSleeps => StoreFuture::boxed(async move {
                tokio::time::sleep(limit).await;
                Ok(())
            }),
            Bug::WaitReturns => StoreFuture::ready(Ok(())),
            _ => {
                let seen = self.to_inner_fence(at, seen);
                StoreFuture::boxed(async move { self.inner.wait(at, seen, limit).await })
            }
        }
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::boxed(
            async move { Ok(self.inner.get(at).await?.map(|found| self.to_outer_outcome(at, found, None))) },
        )
    }

    fn find_completed(&self, at: &Address) -> Option<CompletedEntry> {
        if self.bug != Bug::StaleAnswerAtHand {
            return None;
        }
        let mut state = self.state.lock();
        if !state.at_hand.contains_key(at) {
            let found = self.inner.find_completed(at)?;
            state.at_hand.insert(*at, found);
        }
        state.at_hand.get(at).cloned()
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        StoreFuture::boxed(async move {
            if self.bug == Bug::SweepsFinished {
                let filter = EntryFilter { state: Some(EntryState::Done), ..EntryFilter::default() };
                let page = self.inner.admin().list(&filter, ListCursor::default(), at_most).await?;
                for entry in page.entries {
                    let _ = self.inner.admin().forget(&entry.address, entry.fence).await?;
                }
            }
            self.inner.sweep(at_most).await
        })
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(&self.counters)
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees { store: "broken", ..self.inner.guarantees() }
    }
}

impl StoreAdmin for FaultyStore {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        StoreFuture::boxed(async move {
            let mut page = match self.bug {
                Bug::ListIgnoresCursor => self.inner.admin().list(filter, ListCursor::default(), at_most).await?,
                Bug::ListIgnoresAtMost => self.inner.admin().list(filter, from, u32::MAX).await?,
                _ => self.inner.admin().list(filter, from, at_most).await?,
            };
            if self.bug == Bug::FencesRestart {
                page.entries.iter_mut().for_each(|entry| entry.fence = Fence(entry.attempt.into()));
            }
            Ok(page)
        })
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let answered = self.inner.admin().resolve(at, self.to_inner_fence(at, seen), end).await?;
            let latest = self.state.lock().latest.get(at).cloned();
            match (self.bug, &answered, latest) {
                (Bug::ResolveKillsLive, ClaimLost(found), Some(latest)) if matches!(**found, InProgress(_)) => {
                    self.inner.settle(&latest, end).await
                }
                _ => Ok(self.to_outer_settle_outcome(at, answered)),
            }
        })
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let seen = match (self.bug, self.inner.get(at).await?) {
                (Bug::ForgetIgnoresSeen, Some(InProgress(holder) | OutcomeUnknown(holder))) => holder.fence,
                (Bug::ForgetIgnoresSeen, Some(Completed(done))) => done.fence,
                _ => self.to_inner_fence(at, seen),
            };
            Ok(self.to_outer_settle_outcome(at, self.inner.admin().forget(at, seen).await?))
        })
    }

    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let answered = self.inner.admin().replace_record(at, self.to_inner_fence(at, seen), record).await?;
            Ok(self.to_outer_settle_outcome(at, answered))
        })
    }

    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        self.inner.admin().counts()
    }
}

/// Counters with one bug, if the bug concerns counters.
#[derive(Debug)]
struct FaultyCounters {
    bug: Bug,
    /// The count and the end of each window.
    windows: Mutex<HashMap<Address, (u64, Instant)>>,
}

impl FaultyCounters {
    async fn count(&self, who: &Address, n: u64, window: Duration) -> CounterUsage {
        let who = if self.bug == Bug::CountsAllTenantsTogether { Address([0; 32]) } else { *who };
        let window = match self.bug {
            // Milliseconds in a signed 32-bit number.
            Bug::WindowsOverflow => Duration::from_millis(u64::try_from(window.as_millis() as i32).unwrap_or(0)),
            _ => window.min(MAX_WINDOW),
        };
        let seen = self.windows.lock().get(&who).copied();
        if self.bug == Bug::CountsRace {
            tokio::task::yield_now().await;
        }
        let now = Instant::now();
        let mut windows = self.windows.lock();
        let seen = if self.bug == Bug::CountsRace { seen } else { windows.get(&who).copied() };
        let (used, until) = match (self.bug, seen) {
            (Bug::WindowsNeverEnd, Some(seen)) => seen,
            (Bug::WindowsSlide, Some((used, until))) if until > now => (used, now + window),
            (_, Some(seen)) if seen.1 > now => seen,
            _ => (0, now + window),
        };
        let used = used.saturating_add(n);
        windows.insert(who, (used, until));
        CounterUsage { total: used, resets_in: until.saturating_duration_since(now) }
    }
}

impl Counters for FaultyCounters {
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, CounterUsage> {
        StoreFuture::boxed(async move { Ok(self.count(who, n, window).await) })
    }
}
