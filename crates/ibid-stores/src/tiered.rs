//! Combines two stores: the `authority` decides, the `front` store makes it faster or stands in for it.
//!
//! In practice the front is Redis and the authority is PostgreSQL, but any two stores that fulfil the contract work.
//! One token identifies a claim in both. Callers receive the authority's fences and attempts; the front is settled by
//! token alone.
//!
//! # Claim
//!
//! 1. Claim in the front. Completed → replay, in one round trip.
//! 2. Granted → claim in the authority with the same token; its outcome counts. If it is not a grant, the claim in the
//!    front is given back, or completed with a copy of the answer. *Strict* gives it back by releasing it. *Loose* lets
//!    its lease expire at once: the front then still shows a holder, should the authority become unreachable, and the
//!    token is not spent, because the caller may claim again with it.
//! 3. In progress or outcome unknown in the front → read the authority, whose entry counts. If it has none, the front's
//!    holder is between its two claims. If its lease has expired, it never started: take it over in the front, then
//!    step 2. Only a request with the same fingerprint may do so, because the entry would carry its name. (If the
//!    front's holder is parked, the authority has known and forgotten it, so the front forgets it too.)
//! 4. Front unreachable → the authority decides alone ([`EngineEvent::Fallback`]).
//! 5. A takeover requested by the caller goes to the authority if that has the holder, and then overwrites the front.
//!    If that displaces another claim, it looks for a marker **afterwards**: the displaced claim may have started a
//!    front-only run just before, and the takeover then gives way.
//!    If only the front has the holder, it is taken over there. If that holder ran front-only, the authority first
//!    records it as outcome unknown; then it is taken over there.
//!
//! # Front-only claims (loose only)
//!
//! If the authority provably did not apply a claim, it may run on the front alone ([`EngineEvent::FrontOnlyClaim`]):
//! write a marker in the front, **then** extend the claim there. Only if that returns `Applied` is the claim granted. A
//! claim that takes over an expired lease in the front looks for a marker **after** the takeover, and gives the
//! takeover back if it finds one. Let U be about to run front-only, and V want to take over:
//!
//! - U marks, U extends, V tries: V is refused, because U's lease is fresh.
//! - U's lease expires, V takes over and finds no marker, U marks, U's extend reports a lost claim: V runs, U does not.
//! - U marks, U's lease expires, V takes over, finds the marker and gives back, U's extend reports a lost claim:
//!   neither runs, and the outcome is unknown until U removes its marker. Safe, if cautious.
//! - U marks, extends, runs, stops sending heartbeats, its lease expires: V finds the marker and gives back. The
//!   outcome is unknown, as it should be.
//!
//! There is one marker per address. It names the latest holder that wrote it, and applies to any holder of the entry,
//! because V may crash before it gives back. So U removes the marker before it releases, and U's late removal does not
//! affect a later holder's marker.
//!
//! A claim that took over an entry in the front never runs front-only: the previous holder may still obtain its claim
//! from the authority and run.
//!
//! After an ambiguous error from the authority, a claim never runs front-only, even if the next call is provably not
//! applied: the earlier call may have been.
//!
//! # Settle
//!
//! The authority is settled before the caller gets its result, the front afterwards, in the background. A release waits
//! briefly for the front, because a refused client retries at once. A front-only claim is settled in the authority
//! first, too: the authority restores an absent entry. That is how a running front-only claim enters the authority once
//! it is reachable again, and how the journal inserts its answer. While the authority is unreachable, the front is
//! settled and the error is returned, even if the front has lost the claim, so that the engine journals the answer.
//! Once the authority may know the claim, it can be taken over there; from then on the front is not settled before it.
//! A claim lost in the authority is a double start; the engine counts it as a lost claim. One exception: if the authority
//! has never known the front-only claim and shows another holder, its heartbeats go to the front and its answer is
//! journaled. That holder gives way, or its own end decides.
//!
//! A front-only answer carries a flag in the front. A claim that finds it reports it to the authority before it
//! replays, unless the authority is unreachable. The authority's response counts, and replaces the answer.
//!
//! # Limits of loose mode
//!
//! A key can start twice if one claim reaches only the front and another, then or later, reaches only the authority; if
//! the front loses a front-only claim before the authority has it; or if the front loses its copy of a decision while
//! the authority is unreachable. Each leaves a trace: [`EngineEvent::FrontOnlyClaim`], [`EngineEvent::Fallback`],
//! [`EngineEvent::ClaimLost`]. Strict mode has none of these windows.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use ibid::{
    Observer,
    observe::EngineEvent,
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, ErrorKind, Fence, Fingerprint, Guarantees,
        Lease, RecordSummary, SettleOutcome, Settlement, Store, StoreAdmin, StoreError, StoreFuture, SweepResult,
    },
};
use parking_lot::Mutex;
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep},
};

pub use self::generation::GenerationCounter;
use self::{
    background::{BackgroundTask, RecentForgets},
    front_copy::FrontSettlement,
    generation::GenerationTracker,
};
use ClaimOutcome::{Completed, InProgress, OutcomeUnknown};

mod admin;
mod background;
mod claim;
mod front_copy;
mod front_only;
mod generation;
mod settle;

/// Whether the front store may decide without the authority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TieredMode {
    /// Never: without the authority nothing is claimed.
    Strict,
    /// While the authority is unreachable, claims run front-only and are flagged as such.
    Loose,
}

/// Two stores combined into one. Clones share the same state.
#[derive(Clone)]
pub struct TieredStore(Arc<TieredInner>);

struct TieredInner {
    front: Arc<dyn Store>,
    authority: Arc<dyn Store>,
    mode: TieredMode,
    observer: Arc<dyn Observer>,
    generation: GenerationTracker,
    background: Arc<Semaphore>,
    /// Tokens that were sent to the authority and may hold a claim there, while the front's state is absent or
    /// uncertain. At most [`MAX_TRACKED_TOKENS`].
    ambiguous: Mutex<HashSet<ClaimToken>>,
    /// Replacement tokens in the front for running claims whose own token was spent there, but not by the owner. A
    /// replacement is fresh, so late calls under the old token do not affect it. At most [`MAX_TRACKED_TOKENS`]; loose
    /// only.
    token_aliases: Mutex<HashMap<ClaimToken, ClaimToken>>,
    /// Addresses that operators have recently freed.
    recent_forgets: Mutex<RecentForgets>,
}

/// Maximum number of tokens tracked. Beyond it, a key may stay blocked for its lease; it never runs twice.
const MAX_TRACKED_TOKENS: usize = 16 * 1024;
/// Maximum number of concurrent background tasks. Beyond it, entries in the front are left to expire.
const MAX_BACKGROUND_TASKS: usize = 1024;
/// Interval at which the authority is asked whether the holder still runs, while the front is waited on.
const AUTHORITY_POLL_INTERVAL: Duration = Duration::from_secs(1);

impl TieredStore {
    /// Creates a store in which `last` is the authority and `first` the front. Without `generations`, a forget that
    /// cannot reach the front fails and must be repeated.
    pub fn new(
        first: Arc<dyn Store>, last: Arc<dyn Store>, mode: TieredMode, observer: Arc<dyn Observer>,
        generations: Option<Arc<dyn GenerationCounter>>,
    ) -> Self {
        Self(Arc::new(TieredInner {
            front: first,
            authority: last,
            mode,
            observer,
            generation: GenerationTracker::new(generations),
            background: Arc::new(Semaphore::new(MAX_BACKGROUND_TASKS)),
            ambiguous: Mutex::default(),
            token_aliases: Mutex::default(),
            recent_forgets: Mutex::default(),
        }))
    }

    /// Reads the generation now, if possible, and every few seconds from now on. Call it after opening the store: a
    /// process without the current generation uses other key names in the front than everybody else, and trusts nothing
    /// there.
    pub async fn follow_generation(&self) {
        self.0.generation.refresh(&self.0).await;
        tokio::spawn(generation::refresh_periodically(Arc::downgrade(&self.0)));
    }
}

impl TieredInner {
    fn is_loose(&self) -> bool {
        self.mode == TieredMode::Loose
    }

    /// Reports a failure of the front. Its answers are confirmed before they are trusted again.
    fn report_front_error(&self, call: &'static str, error: &StoreError) {
        self.generation.mark_front_unconfirmed();
        self.observer.on_event(&EngineEvent::Fallback(call, error));
    }

    /// Returns what the front answered to a call, or `None` after a failure, which is reported.
    fn front_answer<T>(&self, call: &'static str, answered: Result<T, StoreError>) -> Option<T> {
        answered.inspect_err(|error| self.report_front_error(call, error)).ok()
    }

    async fn get(&self, at: &Address) -> Result<Option<ClaimOutcome>, StoreError> {
        let there = match self.authority.get(at).await {
            Ok(None) if self.is_loose() => Ok(None),
            Err(error) if self.is_loose() => Err(error),
            answered => return answered,
        };
        // The authority has no entry or is unreachable: front-only claims are in the front alone.
        let Some(here) = self.front_answer("get", self.front.get(at).await) else { return there };
        match here {
            Some(Completed(finished)) if self.generation.is_front_current(self).await => {
                Ok(Some(Completed(front_copy::decode(finished).entry)))
            }
            Some(InProgress(holder)) => Ok(Some(InProgress(holder))),
            // A claim would take over an entry that never started, so it is reported as absent.
            Some(OutcomeUnknown(holder)) if there.is_err() => Ok(Some(OutcomeUnknown(holder))),
            Some(OutcomeUnknown(holder)) => match self.front_answer("get", self.find_marker(at).await) {
                Some(None) => Ok(None),
                Some(Some(_)) | None => Ok(Some(OutcomeUnknown(holder))),
            },
            _ => there,
        }
    }

    /// Waits in the front if it has the holder, because it notifies sooner. Only the authority decides whether `seen`
    /// still runs.
    async fn wait(&self, at: &Address, seen: Fence, limit: Duration) -> Result<(), StoreError> {
        let began = Instant::now();
        // The front's holder may differ from the awaited one. If a front wait ends while the authority still reports
        // the holder running, wait at the authority instead.
        let mut misled = false;
        loop {
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            let there = self.authority.get(at).await;
            let runs_there = matches!(&there, Ok(Some(InProgress(holder))) if holder.fence == seen);
            let here = match self.front_answer("wait", self.front.get(at).await) {
                Some(Some(InProgress(holder))) => Some(holder.fence),
                _ => None,
            };
            let slice = left.min(AUTHORITY_POLL_INTERVAL);
            let asked = Instant::now();
            let waited = match (here, &there) {
                (Some(fence), _) if runs_there && !misled => self.front.wait(at, fence, slice).await,
                (Some(fence), Ok(None)) if fence == seen => self.front.wait(at, seen, slice).await,
                // The authority is unreachable, so the front's holder is the best information available.
                (Some(fence), Err(_)) => return self.front.wait(at, fence, slice).await,
                _ if runs_there => return self.authority.wait(at, seen, left).await,
                (_, Ok(_)) => return Ok(()),
                (None, Err(_)) => return there.map(|_| ()),
            };
            misled = self.front_answer("wait", waited).is_none_or(|()| asked.elapsed() < slice);
        }
    }
}

impl Store for TieredStore {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        StoreFuture::boxed(self.0.claim(ask))
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.0.extend(lease, hold))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a ibid::store::Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.0.settle(lease, end))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(self.0.wait(at, seen, limit))
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::boxed(self.0.get(at))
    }

    /// Sweeps both stores. The result is the authority's.
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        StoreFuture::boxed(async move {
            self.0.front_answer("sweep", self.0.front.sweep(at_most).await);
            self.0.authority.sweep(at_most).await
        })
    }

    fn admin(&self) -> &dyn StoreAdmin {
        &*self.0
    }

    /// Uses the faster store: losing a counter does not lose an effect.
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        self.0.front.counters().or_else(|| self.0.authority.counters())
    }

    fn guarantees(&self) -> Guarantees {
        let (first, last) = (self.0.front.guarantees(), self.0.authority.guarantees());
        match self.0.mode {
            TieredMode::Strict => Guarantees { store: "tiered", ..last },
            // A front-only claim is only as durable and as shared as the front.
            TieredMode::Loose => Guarantees {
                store: "tiered",
                durable: first.durable && last.durable,
                shared: first.shared && last.shared,
                warnings: first.warnings.into_iter().chain(last.warnings).collect(),
            },
        }
    }
}

impl fmt::Debug for TieredStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TieredStore")
            .field("mode", &self.0.mode)
            .field("first", &self.0.front)
            .field("last", &self.0.authority)
            .finish_non_exhaustive()
    }
}
