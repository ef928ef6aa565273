//! The store contract: who may run, who must wait, what was answered.
//!
//! A store keeps one entry per [`Address`] and decides, atomically, who runs. It knows no policy: it compares tokens
//! and fences, never fingerprints, and never looks inside a record.
//!
//! What every implementation must hold (the suite in `ibid-testkit` checks each point):
//!
//! - **Same token, same answer.** Every call may be sent again after a lost answer. A token that was released or
//!   forgotten is [`ClaimOutcome::TokenSpent`], for at least [`SPENT_TOKEN_TTL`].
//! - **What a holder says counts** until its claim is taken over, released or forgotten: if the store has lost the entry,
//!   or somebody else came there and left, it is put back ([`SettleOutcome::Restored`]).
//! - **A claim whose answer was lost** is settled by its token alone ([`Fence::UNSEEN`]); that spends the token wherever
//!   it is not the holder, so that a late copy of the claim finds it spent.
//! - **A lapsed claim is unknown, never free.** It runs again only through [`ClaimRequest::take_over`], in the same atomic step that
//!   proves that this very holder is still current, and lapsed or parked.
//! - **Fences only grow** per address, beyond the entry's life.
//! - **The store's clock alone** decides lapse and expiry. Only `Duration`s cross this contract.
//! - **A live entry is never evicted.** A full store refuses new claims.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;

pub use self::{
    admin::{EntryCounts, EntryFilter, EntryInfo, EntryPage, EntryState, ListCursor, StoreAdmin},
    counters::{CounterUsage, Counters, InMemoryCounters},
    error::{ErrorKind, StoreError},
    memory::{Memory, MemoryLimits},
    types::{Address, ClaimToken, Fence, Fingerprint, Tags, key_hash},
};

mod admin;
pub(crate) mod counters;
mod error;
mod memory;
mod types;

/// How long at least the token of a released or forgotten claim is remembered, so that a late copy of that claim
/// cannot come alive.
pub const SPENT_TOKEN_TTL: Duration = Duration::from_secs(60);

/// Remembers what was asked and answered. See the [module docs](self) for what an implementation must hold.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Decides who runs.
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome>;

    /// Re-arms lease and expiry of a claim. On an absent entry, puts it back ([`SettleOutcome::Restored`]).
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome>;

    /// Ends a claim. Repeatable; a holder that lost its claim writes nothing and learns what is there now.
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome>;

    /// Returns once `seen` is no longer the running holder at `at`, or after `limit`. A hint: callers claim again.
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()>;

    /// What a claim would find, without claiming. `None` if nothing is there or it was released.
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>>;

    /// Removes at most `at_most` expired entries, and marks lapsed ones where a store keeps such a mark. Of several
    /// processes on a shared store one sweeps at a time; the others find nothing to do.
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult>;

    /// What operators may see and change.
    fn admin(&self) -> &dyn StoreAdmin;

    /// Counts that all who use this store share; `None` if it keeps none.
    fn counters(&self) -> Option<&dyn Counters>;

    /// What this store promises, and what start-up found wanting.
    fn guarantees(&self) -> Guarantees;
}

/// One request to run, named by its token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRequest {
    /// Where the entry lives.
    pub address: Address,
    /// Names this claim; minted by the caller, so that it can ask again after a lost answer.
    pub token: ClaimToken,
    /// What makes two requests the same. Stored, never compared by the store.
    pub fingerprint: Fingerprint,
    /// What operators can search by.
    pub tags: Tags,
    /// Opaque to the store; shown to operators.
    pub label: Bytes,
    /// How long the holder may stay silent.
    pub lease: Duration,
    /// How long an unfinished entry is kept after its lease ends.
    pub ttl: Duration,
    /// Take over this holder, if it is still current and lapsed or parked.
    pub take_over: Option<Fence>,
}

/// A granted claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// What was asked.
    pub request: Arc<ClaimRequest>,
    /// Names this holder. [`Fence::UNSEEN`] if the claim's answer was lost: then the token alone names it.
    pub fence: Fence,
    /// 1 for the first run at this address, 2 for the next.
    pub attempt: u32,
    /// Granted by a part of the store that could not reach the part that decides. The answer is called degraded.
    pub front_only: bool,
}

impl Lease {
    /// Of a claim whose answer was lost: the token alone names it.
    pub fn unseen(ask: &Arc<ClaimRequest>) -> Self {
        Self { request: ask.clone(), fence: Fence::UNSEEN, attempt: 0, front_only: false }
    }
}

/// What a claim found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum ClaimOutcome {
    /// The caller runs.
    Granted(Lease),
    /// Another holder runs.
    InProgress(Holder),
    /// A holder started and nobody knows how it ended: parked, or silent for longer than its lease.
    OutcomeUnknown(Holder),
    /// Finished; here is the record.
    Completed(CompletedEntry),
    /// This token was released or forgotten and can never be granted again.
    TokenSpent,
}

/// Who runs, or ran with an unknown end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Names the holder.
    pub fence: Fence,
    /// Which run at this address it is.
    pub attempt: u32,
    /// Of the request that it runs.
    pub fingerprint: Fingerprint,
    /// Since the claim was granted.
    pub age: Duration,
    /// When a takeover may be granted at the earliest.
    pub takeover_in: Duration,
}

/// A remembered end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompletedEntry {
    /// Of the holder that finished.
    pub fence: Fence,
    /// Which run finished.
    pub attempt: u32,
    /// Of the request that was run.
    pub fingerprint: Fingerprint,
    /// Whether the remembered answer is a failure.
    pub failed: bool,
    /// The answer, see [`crate::Record`].
    pub record: Bytes,
    /// How long it still answers.
    pub expires_in: Duration,
}

/// How a claim ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settlement {
    /// Remember this answer for `keep`.
    Complete {
        /// Whether the answer is a failure.
        failed: bool,
        /// The answer, see [`crate::Record`].
        record: Bytes,
        /// The same in a form that people query.
        summary: RecordSummary,
        /// From now on.
        ttl: Duration,
    },
    /// It did not happen, or is not to be remembered. Of a takeover: unknown again.
    Release,
    /// Nobody knows how it ended.
    Park {
        /// How long to remember that, from now on.
        ttl: Duration,
        /// Not to be taken over before.
        retry_in: Duration,
    },
}

impl Settlement {
    /// How long an entry that ended so is kept.
    pub fn ttl(&self) -> Duration {
        match self {
            Self::Complete { ttl, .. } | Self::Park { ttl, .. } => *ttl,
            Self::Release => SPENT_TOKEN_TTL,
        }
    }
}

/// A finished entry for people: columns to query, not to decide by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecordSummary {
    /// The protocol's status: an HTTP status (100 to 999); of a gRPC call 1000 and its code, which
    /// [`Code::from_summary_status`](crate::grpc::GrpcStatusCode::from_summary_status) tells apart; 0 where there is none.
    pub status: u16,
    /// Milliseconds since the Unix epoch, by the holder's clock.
    pub requested_at_ms: u64,
    /// Milliseconds since the Unix epoch, by the holder's clock.
    pub completed_at_ms: u64,
    /// How long the operation ran.
    pub took: Duration,
}

/// Whether a holder still was the holder.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum SettleOutcome {
    /// It was.
    Applied,
    /// The entry was gone, nobody else has been there: it was put back.
    Restored,
    /// It was not; nothing was written. What is there now.
    ClaimLost(Box<ClaimOutcome>),
}

/// What a sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SweepResult {
    /// Entries removed.
    pub removed: u32,
    /// Claims found silent for longer than their lease, and marked so for people who look.
    pub lapsed: u32,
    /// Whether more were waiting when it stopped.
    pub more: bool,
}

/// What a store promises.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guarantees {
    /// The store's name, for people.
    pub store: &'static str,
    /// Survives a crash of its process.
    pub durable: bool,
    /// Several gateways share it.
    pub shared: bool,
    /// What start-up found that weakens the promise.
    pub warnings: Vec<String>,
}

/// The answer of a store call: ready at once for in-process stores, boxed for the others.
///
/// A call may be applied as soon as it is made: one whose answer nobody awaits is ambiguous, not undone.
#[must_use = "a store's answer decides who runs"]
pub struct StoreFuture<'a, T>(StoreFutureKind<'a, T>);

enum StoreFutureKind<'a, T> {
    Ready(Option<Result<T, StoreError>>),
    Boxed(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>),
}

impl<'a, T> StoreFuture<'a, T> {
    /// An answer that is there already.
    pub fn ready(answer: Result<T, StoreError>) -> Self {
        Self(StoreFutureKind::Ready(Some(answer)))
    }

    /// An answer that takes time.
    pub fn boxed(answer: impl Future<Output = Result<T, StoreError>> + Send + 'a) -> Self {
        Self(StoreFutureKind::Boxed(Box::pin(answer)))
    }
}

impl<T: Unpin> Future for StoreFuture<'_, T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            StoreFutureKind::Ready(answer) => Poll::Ready(answer.take().expect("polled after it was ready")),
            StoreFutureKind::Boxed(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for StoreFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreFuture")
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        (**self).claim(ask)
    }
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        (**self).extend(lease, hold)
    }
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        (**self).settle(lease, end)
    }
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        (**self).wait(at, seen, limit)
    }
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        (**self).get(at)
    }
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        (**self).sweep(at_most)
    }
    fn admin(&self) -> &dyn StoreAdmin {
        (**self).admin()
    }
    fn counters(&self) -> Option<&dyn Counters> {
        (**self).counters()
    }
    fn guarantees(&self) -> Guarantees {
        (**self).guarantees()
    }
}
