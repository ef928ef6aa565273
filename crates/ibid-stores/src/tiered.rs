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
//! 4. `first` cannot be reached → `last.claim` decides ([`Notice::Fallback`]).
//! 5. A takeover that the caller asks for goes to `last`, if that has the holder, and then overwrites `first`. If only
//!    `first` has it, it is taken over there; if it ran solo, `last` is told so, as unknown; then it is taken over in `last`.
//!
//! # Solo (loose only)
//!
//! `last.claim` provably not applied → the claim may run on `first` alone ([`Notice::Solo`]): write a marker in `first`,
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
//! then. They leave traces: [`Notice::Solo`], [`Notice::Fallback`], [`Notice::LostClaim`]. Strict has none of these windows.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use ibid::{
    Notice, Observer,
    store::{
        Address, Ask, Claim, Fence, Held, Lease, Operators, Promise, Store, StoreError, StoreFuture, Swept, Token,
    },
};
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

pub use self::generation::Generations;
use self::{behind::Forgets, generation::Trust};

mod behind;
mod claim;
mod copy;
mod generation;
mod operate;
mod settle;
mod solo;

/// How much the second store may stand in for the one that decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Never: without `last` nothing is claimed.
    Strict,
    /// While `last` is away, claims run on `first` alone, and say so.
    Loose,
}

/// Two stores as one. Cheap to clone.
#[derive(Clone)]
pub struct Tiered(Arc<Parts>);

struct Parts {
    first: Arc<dyn Store>,
    last: Arc<dyn Store>,
    mode: Mode,
    observer: Arc<dyn Observer>,
    trust: Trust,
    /// Bounds what is done behind the answers.
    behind: Arc<Semaphore>,
    /// Tokens that `last` was asked for and may hold, while `first` does not or nobody knows. At most [`UNCLEAR`].
    unclear: Mutex<HashSet<Token>>,
    /// Running claims whose token was spent in `first` though not by its owner, and the token that they have there
    /// instead. A fresh one, so that nothing that is still on its way there under the old one reaches it. At most
    /// [`UNCLEAR`]; loose only.
    other_names: Mutex<HashMap<Token, Token>>,
    /// What operators have freed here lately.
    forgets: Mutex<Forgets>,
}

/// More are not remembered. Forgetting one costs a key its lease at worst, never a second run.
const UNCLEAR: usize = 16 * 1024;
/// How many things are done behind the answers at the same time; beyond that, `first` is left to lapse.
const BEHIND: usize = 1024;
/// While a holder is waited for in `first`, `last` is asked so often whether it still runs there.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

impl Tiered {
    /// `last` decides, `first` is asked first. Without `generations`, a forget that cannot reach `first` fails and has to
    /// be repeated.
    pub fn new(
        first: Arc<dyn Store>, last: Arc<dyn Store>, mode: Mode, observer: Arc<dyn Observer>,
        generations: Option<Arc<dyn Generations>>,
    ) -> Self {
        Self(Arc::new(Parts {
            first,
            last,
            mode,
            observer,
            trust: Trust::new(generations),
            behind: Arc::new(Semaphore::new(BEHIND)),
            unclear: Mutex::default(),
            other_names: Mutex::default(),
            forgets: Mutex::default(),
        }))
    }

    /// Reads the generation now, if it can be read, and every few seconds from now on. For whoever opens the store: one
    /// that does not know it is under another number in `first` than everybody else, and believes nothing there.
    pub async fn follow(&self) {
        self.0.trust.refresh(&self.0).await;
        tokio::spawn(generation::follow(Arc::downgrade(&self.0)));
    }
}

impl Parts {
    fn is_loose(&self) -> bool {
        self.mode == Mode::Loose
    }

    /// `first` could not: told to the observer, and its answers are confirmed before they are believed again.
    fn fell_back(&self, call: &'static str, error: &StoreError) {
        self.trust.lost_sight();
        self.observer.noticed(&Notice::Fallback { call, error });
    }

    /// What a claim would find.
    async fn get(&self, at: &Address) -> Result<Option<Claim>, StoreError> {
        let there = match self.last.get(at).await {
            Ok(None) if self.is_loose() => Ok(None),
            Err(error) if self.is_loose() => Err(error),
            answered => return answered,
        };
        // Nothing there, or nobody knows: what ran solo is in `first` only.
        let here = match self.first.get(at).await {
            Ok(here) => here,
            Err(error) => {
                self.fell_back("get", &error);
                return there;
            }
        };
        match here {
            Some(Claim::Done(finished)) if self.trust.holds(self).await => {
                Ok(Some(Claim::Done(copy::opened(finished).finished)))
            }
            Some(Claim::Busy(holder)) => Ok(Some(Claim::Busy(holder))),
            // A claim would take over what never started.
            Some(Claim::Unknown(holder)) if there.is_err() => Ok(Some(Claim::Unknown(holder))),
            Some(Claim::Unknown(holder)) => match self.marked(at).await {
                Ok(None) => Ok(None),
                Ok(Some(_)) => Ok(Some(Claim::Unknown(holder))),
                Err(error) => {
                    self.fell_back("get", &error);
                    Ok(Some(Claim::Unknown(holder)))
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
            let there = self.last.get(at).await;
            let runs_there = matches!(&there, Ok(Some(Claim::Busy(holder))) if holder.fence == seen);
            let here = match self.first.get(at).await {
                Ok(Some(Claim::Busy(holder))) => Some(holder.fence),
                Ok(_) => None,
                Err(error) => {
                    self.fell_back("wait", &error);
                    None
                }
            };
            let slice = left.min(LOOK_AGAIN);
            let asked = Instant::now();
            let waited = match (here, &there) {
                (Some(fence), _) if runs_there && !misled => self.first.wait(at, fence, slice).await,
                (Some(fence), Ok(None)) if fence == seen => self.first.wait(at, seen, slice).await,
                // Nobody knows whether it runs there: whoever is here is all there is to go by.
                (Some(fence), Err(_)) => return self.first.wait(at, fence, slice).await,
                _ if runs_there => return self.last.wait(at, seen, left).await,
                (_, Ok(_)) => return Ok(()),
                (None, Err(_)) => return there.map(|_| ()),
            };
            match waited {
                Ok(()) => misled = asked.elapsed() < slice,
                Err(error) => {
                    self.fell_back("wait", &error);
                    misled = true;
                }
            }
        }
    }
}

impl Store for Tiered {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        StoreFuture::boxed(self.0.claim(ask))
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.0.extend(lease, hold))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a ibid::store::End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.0.settle(lease, end))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(self.0.wait(at, seen, limit))
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        StoreFuture::boxed(self.0.get(at))
    }

    /// Sweeps both; what is counted is what the store that decides removed.
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        StoreFuture::boxed(async move {
            if let Err(error) = self.0.first.sweep(at_most).await {
                self.0.fell_back("sweep", &error);
            }
            self.0.last.sweep(at_most).await
        })
    }

    fn operators(&self) -> &dyn Operators {
        self
    }

    /// On the faster of both: a count that is lost with it costs nobody their effect.
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        self.0.first.counters().or_else(|| self.0.last.counters())
    }

    fn promise(&self) -> Promise {
        let (first, last) = (self.0.first.promise(), self.0.last.promise());
        match self.0.mode {
            Mode::Strict => Promise { store: "tiered", ..last },
            // What runs on `first` alone is as durable and as shared as that is.
            Mode::Loose => Promise {
                store: "tiered",
                durable: first.durable && last.durable,
                shared: first.shared && last.shared,
                wanting: first.wanting.into_iter().chain(last.wanting).collect(),
            },
        }
    }
}

impl fmt::Debug for Tiered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tiered")
            .field("mode", &self.0.mode)
            .field("first", &self.0.first)
            .field("last", &self.0.last)
            .finish_non_exhaustive()
    }
}
