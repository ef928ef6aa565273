//! Two stores as one: `last` decides, `first` speeds it up or stands in.
//!
//! In practice `first` is Redis and `last` is PostgreSQL, but any two stores that keep the contract do. The same token
//! names a claim in both. What a caller gets are `last`'s fences and attempts; `first` is settled by the token alone.
//!
//! # Claim
//!
//! 1. `first.claim`. Done → replay: one round trip.
//! 2. Granted → `last.claim` with the same token, whose answer counts. If it is not a grant, `first` is given back, or
//!    gets a copy of what is done. *Strict* gives back by releasing. *Loose* lets its claim there lapse at once: then
//!    `first` still shows that somebody is there, should `last` go away now; and the token, which may be asked with
//!    again, is not spent.
//! 3. Busy or unknown in `first` → `last.get`, whose answer counts. Nothing there: the holder in `first` stands between
//!    its two claims. If it has lapsed, it never started: it is taken over in `first`, then step 2; but not by another
//!    request, whose name the entry would bear. (If it is parked, `last` has known and forgotten it: `first` forgets it
//!    too.)
//! 4. `first` cannot be reached → `last.claim` decides ([`EngineEvent::Fallback`]).
//! 5. A takeover that the caller asks for goes to `last`, if that has the holder, and then overwrites `first`. If only
//!    `first` has it, it is taken over there; if it ran solo, `last` is told so, as unknown; then it is taken over in `last`.
//!
//! # Solo (loose only)
//!
//! `last.claim` provably not applied → the claim may run on `first` alone ([`EngineEvent::FrontOnlyClaim`]): write a marker in `first`,
//! **then** extend the claim there, which must say `Held`; only then is it granted. Whoever takes over a lapsed claim in
//! `first` looks for a marker **after** the takeover; if it is there, it gives the takeover back. U is about to run solo, V
//! wants to take over:
//!
//! - U marks, U extends, V tries: V is refused, because U's lease is fresh.
//! - U lapses, V takes over and finds no marker, U marks, U's extend is lost: V runs, U does not.
//! - U marks, U lapses, V takes over and finds the marker, V gives back, U's extend is lost: nobody runs, the key is
//!   unknown until U has taken its marker away. Safe, if cautious.
//! - U marks, extends, runs, falls silent, lapses: V finds the marker and gives back. Unknown, as it is.
//!
//! There is one marker per address. It names the latest holder to say so, and is believed whoever holds the entry: V may
//! have died before it gave back. So U takes it away before it releases; U's late word does not touch a later one's.
//!
//! Who took over in `first` never runs solo: whoever was there may be on its way to `last`, which would let it run.
//!
//! An ambiguous answer of `last` is never followed by a run on `first` alone, not even if the next call to `last` is
//! provably not applied: the first one may have been.
//!
//! # Settle
//!
//! `last` before the answer, `first` behind it, in the background; a release waits a moment for `first`, because who
//! was refused will come back at once. A solo claim goes to `last` first too: what is absent there is put back, which is
//! how a running solo claim claims there once `last` is back, and how the journal inserts its answer. While `last` is
//! away, `first` is settled and the error goes up, so that the engine journals the answer; also if it is lost in `first`.
//! Once `last` may have heard of the claim, it can be taken over there: then `first` is not settled before it. Lost in
//! `last` is a double start, and counted as a lost claim by the engine.
//!
//! A solo answer in `first` is marked as such. Whoever finds it tells `last` before it answers, unless that is away; what
//! `last` says counts, and takes its place.
//!
//! # What loose does not promise
//!
//! Two starts of one key are possible if one claim sees only `first` and another, then or later, sees only `last`; if
//! `first` loses a solo claim before `last` has it; or if `first` loses its copy of what `last` decided, and `last` is away
//! then. They leave traces: [`EngineEvent::FrontOnlyClaim`], [`EngineEvent::Fallback`], [`EngineEvent::ClaimLost`]. Strict has none of these windows.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use ibid::{
    EngineEvent, Observer,
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, Fence, Guarantees, Lease, SettleOutcome, Store, StoreAdmin,
        StoreError, StoreFuture, SweepResult,
    },
};
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

pub use self::generation::GenerationCounter;
use self::{background::RecentForgets, generation::GenerationTracker};

mod admin;
mod background;
mod claim;
mod front_copy;
mod front_only;
mod generation;
mod settle;

/// How much the second store may stand in for the one that decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TieredMode {
    /// Never: without `last` nothing is claimed.
    Strict,
    /// While `last` is away, claims run on `first` alone, and say so.
    Loose,
}

/// Two stores as one. Cheap to clone.
#[derive(Clone)]
pub struct TieredStore(Arc<TieredInner>);

struct TieredInner {
    front: Arc<dyn Store>,
    authority: Arc<dyn Store>,
    mode: TieredMode,
    observer: Arc<dyn Observer>,
    generation: GenerationTracker,
    /// Bounds what is done behind the answers.
    background: Arc<Semaphore>,
    /// Tokens that `last` was asked for and may hold, while `first` does not or nobody knows. At most [`MAX_TRACKED_TOKENS`].
    ambiguous: Mutex<HashSet<ClaimToken>>,
    /// Running claims whose token was spent in `first` though not by its owner, and the token that they have there
    /// instead. A fresh one, so that nothing that is still on its way there under the old one reaches it. At most
    /// [`MAX_TRACKED_TOKENS`]; loose only.
    token_aliases: Mutex<HashMap<ClaimToken, ClaimToken>>,
    /// What operators have freed here lately.
    recent_forgets: Mutex<RecentForgets>,
}

/// More are not remembered. Forgetting one costs a key its lease at worst, never a second run.
const MAX_TRACKED_TOKENS: usize = 16 * 1024;
/// How many things are done behind the answers at the same time; beyond that, `first` is left to lapse.
const MAX_BACKGROUND_TASKS: usize = 1024;
/// While a holder is waited for in `first`, `last` is asked so often whether it still runs there.
const AUTHORITY_POLL_INTERVAL: Duration = Duration::from_secs(1);

impl TieredStore {
    /// `last` decides, `first` is asked first. Without `generations`, a forget that cannot reach `first` fails and has to
    /// be repeated.
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

    /// Reads the generation now, if it can be read, and every few seconds from now on. For whoever opens the store: one
    /// that does not know it is under another number in `first` than everybody else, and believes nothing there.
    pub async fn follow_generation(&self) {
        self.0.generation.refresh(&self.0).await;
        tokio::spawn(generation::refresh_periodically(Arc::downgrade(&self.0)));
    }
}

impl TieredInner {
    fn is_loose(&self) -> bool {
        self.mode == TieredMode::Loose
    }

    /// `first` could not: told to the observer, and its answers are confirmed before they are believed again.
    fn report_front_error(&self, call: &'static str, error: &StoreError) {
        self.generation.mark_front_unconfirmed();
        self.observer.on_event(&EngineEvent::Fallback { call, error });
    }

    /// What a claim would find.
    async fn get(&self, at: &Address) -> Result<Option<ClaimOutcome>, StoreError> {
        let there = match self.authority.get(at).await {
            Ok(None) if self.is_loose() => Ok(None),
            Err(error) if self.is_loose() => Err(error),
            answered => return answered,
        };
        // Nothing there, or nobody knows: what ran solo is in `first` only.
        let here = match self.front.get(at).await {
            Ok(here) => here,
            Err(error) => {
                self.report_front_error("get", &error);
                return there;
            }
        };
        match here {
            Some(ClaimOutcome::Completed(finished)) if self.generation.is_front_current(self).await => {
                Ok(Some(ClaimOutcome::Completed(front_copy::decode(finished).entry)))
            }
            Some(ClaimOutcome::InProgress(holder)) => Ok(Some(ClaimOutcome::InProgress(holder))),
            // A claim would take over what never started.
            Some(ClaimOutcome::OutcomeUnknown(holder)) if there.is_err() => {
                Ok(Some(ClaimOutcome::OutcomeUnknown(holder)))
            }
            Some(ClaimOutcome::OutcomeUnknown(holder)) => match self.find_marker(at).await {
                Ok(None) => Ok(None),
                Ok(Some(_)) => Ok(Some(ClaimOutcome::OutcomeUnknown(holder))),
                Err(error) => {
                    self.report_front_error("get", &error);
                    Ok(Some(ClaimOutcome::OutcomeUnknown(holder)))
                }
            },
            _ => there,
        }
    }

    /// Waits in `first`, if that has the holder: it tells sooner. But whether `seen` runs, `last` says.
    async fn wait(&self, at: &Address, seen: Fence, limit: Duration) -> Result<(), StoreError> {
        let began = Instant::now();
        // Whoever is in `first` need not be the one that is waited for: a wait there that ends for no reason that
        // `last` knows of is not tried again.
        let mut misled = false;
        loop {
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            let there = self.authority.get(at).await;
            let runs_there = matches!(&there, Ok(Some(ClaimOutcome::InProgress(holder))) if holder.fence == seen);
            let here = match self.front.get(at).await {
                Ok(Some(ClaimOutcome::InProgress(holder))) => Some(holder.fence),
                Ok(_) => None,
                Err(error) => {
                    self.report_front_error("wait", &error);
                    None
                }
            };
            let slice = left.min(AUTHORITY_POLL_INTERVAL);
            let asked = Instant::now();
            let waited = match (here, &there) {
                (Some(fence), _) if runs_there && !misled => self.front.wait(at, fence, slice).await,
                (Some(fence), Ok(None)) if fence == seen => self.front.wait(at, seen, slice).await,
                // Nobody knows whether it runs there: whoever is here is all there is to go by.
                (Some(fence), Err(_)) => return self.front.wait(at, fence, slice).await,
                _ if runs_there => return self.authority.wait(at, seen, left).await,
                (_, Ok(_)) => return Ok(()),
                (None, Err(_)) => return there.map(|_| ()),
            };
            match waited {
                Ok(()) => misled = asked.elapsed() < slice,
                Err(error) => {
                    self.report_front_error("wait", &error);
                    misled = true;
                }
            }
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

    /// Sweeps both; what is counted is what the store that decides removed.
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        StoreFuture::boxed(async move {
            if let Err(error) = self.0.front.sweep(at_most).await {
                self.0.report_front_error("sweep", &error);
            }
            self.0.authority.sweep(at_most).await
        })
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self
    }

    /// On the faster of both: a count that is lost with it costs nobody their effect.
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        self.0.front.counters().or_else(|| self.0.authority.counters())
    }

    fn guarantees(&self) -> Guarantees {
        let (first, last) = (self.0.front.guarantees(), self.0.authority.guarantees());
        match self.0.mode {
            TieredMode::Strict => Guarantees { store: "tiered", ..last },
            // What runs on `first` alone is as durable and as shared as that is.
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
