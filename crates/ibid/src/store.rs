//! The store contract: which request runs, which waits, and which answer is remembered.
//!
//! A store keeps one entry per [`Address`] and decides atomically which claim is granted. It knows no policy: it
//! compares tokens and fences, never fingerprints, and never reads a record.
//!
//! Every implementation guarantees the following (the suite in `ibid-testkit` checks each point):
//!
//! - **Calls are repeatable.** A caller may resend any call after a lost response; the same token gets the same
//!   outcome. A released or forgotten token yields [`ClaimOutcome::TokenSpent`] for at least [`SPENT_TOKEN_TTL`].
//! - **A holder's settlement is valid** until its claim is taken over, released or forgotten. If the entry is missing,
//!   or a later claim there has ended without a result, the store restores the entry ([`SettleOutcome::Restored`]).
//! - **A claim whose response was lost** is settled by its token alone ([`Fence::UNSEEN`]). If that token is not the
//!   holder, settling spends it, so a delayed copy of the claim is not granted.
//! - **An expired lease means outcome unknown, never free.** The operation runs again only through
//!   [`ClaimRequest::take_over`]. The takeover checks in one atomic step that this holder is still current and that its
//!   outcome is unknown.
//! - **Fences only grow** per address, even beyond the entry's lifetime.
//! - **Only the store's clock** decides about expiry. Only `Duration`s cross this contract.
//! - **A live entry is never evicted.** A full store refuses new claims.

use std::{
    error::Error,
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;

use crate::policy::Terms;

pub(crate) use self::types::{cut_tag, key_hash_digits};
pub use self::{
    address_hasher::AddressHashBuilder,
    admin::{EntryCounts, EntryFilter, EntryInfo, EntryPage, EntryState, ListCursor, StoreAdmin},
    counters::{CounterUsage, Counters, InMemoryCounters},
    memory::Memory,
    shared_map::{HolderWaits, SharedMap, SharedValue},
    types::{Address, ClaimToken, Fence, Fingerprint, Tags, key_hash, with_jitter},
};

mod address_hasher;
mod admin;
pub(crate) mod counters;
mod memory;
mod shared_map;
pub mod transitions;
mod types;

/// The minimum time for which a store remembers the token of a released or forgotten claim, so that a delayed copy of
/// that claim is not granted.
pub const SPENT_TOKEN_TTL: Duration = Duration::from_secs(60);

/// Remembers claims and their outcomes. The [module docs](self) list the guarantees of an implementation.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Claims an address, atomically.
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome>;

    /// Renews the lease and the expiry of a claim. Restores a missing entry ([`SettleOutcome::Restored`]).
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome>;

    /// Ends a claim. Repeatable. If the claim was lost, nothing is written and the outcome contains the current entry.
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome>;

    /// Returns once `seen` is no longer the running holder at `at`, or after `limit`. This is only a hint: callers
    /// claim again.
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()>;

    /// Returns what a claim would find, without claiming. `None` if the entry is missing or released.
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>>;

    /// Returns the remembered answer at `at` if it is in memory and a claim would return it now. `None` says nothing
    /// about the entry.
    fn find_completed(&self, at: &Address) -> Option<CompletedEntry> {
        let _ = at;
        None
    }

    /// Removes at most `at_most` expired entries, and marks expired leases if the store keeps such a mark. Of several
    /// processes on a shared store, one sweeps at a time; the others find nothing to do.
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult>;

    /// The operations for operators: list, resolve, forget.
    fn admin(&self) -> &dyn StoreAdmin;

    /// Counters shared by all users of this store; `None` if the store has none.
    fn counters(&self) -> Option<&dyn Counters>;

    /// The store's guarantees, and the weaknesses found at start-up.
    fn guarantees(&self) -> Guarantees;
}

/// A request to claim an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRequest {
    /// The address of the entry.
    pub address: Address,
    /// Identifies this claim. The caller creates it, so that it can resend the claim after a lost response.
    pub token: ClaimToken,
    /// The fingerprint of the request. The store saves it and never compares it.
    pub fingerprint: Fingerprint,
    /// The tags that operators search by.
    pub tags: Tags,
    /// Opaque to the store; shown to operators.
    pub label: Bytes,
    /// How long the claim is valid without being extended.
    pub lease: Duration,
    /// How long an unfinished entry is kept after its lease has expired.
    pub ttl: Duration,
    /// Take over this holder if it is still current and its outcome is unknown.
    pub take_over: Option<Fence>,
}

impl ClaimRequest {
    /// Creates a request with a new token and no takeover.
    pub(crate) fn new(address: Address, fingerprint: Fingerprint, tags: Tags, label: Bytes, terms: &Terms) -> Self {
        let (token, lease, ttl) = (ClaimToken::mint(), terms.lease, terms.ttl);
        Self { address, token, fingerprint, tags, label, lease, ttl, take_over: None }
    }
}

/// A granted claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The request that was granted.
    pub request: Arc<ClaimRequest>,
    /// Identifies this holder. [`Fence::UNSEEN`] if the claim's response was lost; the token alone then identifies it.
    pub fence: Fence,
    /// 1 for the first run at this address, 2 for the second, and so on.
    pub attempt: u32,
    /// The front store granted the claim without reaching the authority. The response is marked as degraded.
    pub front_only: bool,
}

impl Lease {
    /// Creates a lease for a claim whose response was lost. Only its token identifies it.
    pub fn unseen(ask: &Arc<ClaimRequest>) -> Self {
        Self { request: ask.clone(), fence: Fence::UNSEEN, attempt: 0, front_only: false }
    }
}

/// The outcome of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum ClaimOutcome {
    /// The caller holds the claim and runs the operation.
    Granted(Lease),
    /// Another holder runs the operation.
    InProgress(Holder),
    /// A holder started and its outcome is unknown: it was parked, or its lease expired.
    OutcomeUnknown(Holder),
    /// The operation has completed with this record.
    Completed(CompletedEntry),
    /// The token was released or forgotten and is never granted again.
    TokenSpent,
}

/// A holder that is running, or whose outcome is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Identifies the holder.
    pub fence: Fence,
    /// The number of this run at the address, from 1.
    pub attempt: u32,
    /// The fingerprint of the holder's request.
    pub fingerprint: Fingerprint,
    /// The time since the claim was granted.
    pub age: Duration,
    /// The time until a takeover may be granted.
    pub takeover_in: Duration,
}

/// A remembered answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompletedEntry {
    /// The fence of the holder that completed.
    pub fence: Fence,
    /// The number of the run that completed, from 1.
    pub attempt: u32,
    /// The fingerprint of the completed request.
    pub fingerprint: Fingerprint,
    /// Whether the remembered answer is a failure.
    pub failed: bool,
    /// The encoded answer, see [`crate::record::Record`].
    pub record: Bytes,
    /// How long the answer is still remembered.
    pub expires_in: Duration,
    /// Whether only the front of two stores has the answer: the authority may still decide otherwise.
    pub front_only: bool,
}

/// How a claim is settled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settlement {
    /// Remember this answer for `ttl`.
    Complete {
        /// Whether the answer is a failure.
        failed: bool,
        /// The encoded answer, see [`crate::record::Record`].
        record: Bytes,
        /// The columns that operators query.
        summary: RecordSummary,
        /// How long to remember the answer, from now.
        ttl: Duration,
    },
    /// The operation did not happen, or its answer is not remembered. Releasing a takeover restores the unknown
    /// outcome.
    Release,
    /// The outcome is unknown.
    Park {
        /// How long to remember that, from now.
        ttl: Duration,
        /// The earliest time for a takeover, from now.
        retry_in: Duration,
    },
}

impl Settlement {
    /// How long the settled entry is kept.
    pub fn ttl(&self) -> Duration {
        match self {
            Self::Complete { ttl, .. } | Self::Park { ttl, .. } => *ttl,
            Self::Release => SPENT_TOKEN_TTL,
        }
    }

    /// Returns the same settlement with another record, if it has one.
    pub fn map_record(&self, map: impl FnOnce(&Bytes) -> Bytes) -> Self {
        match self {
            Self::Complete { failed, record, summary, ttl } => {
                Self::Complete { failed: *failed, record: map(record), summary: *summary, ttl: *ttl }
            }
            other => other.clone(),
        }
    }
}

/// A summary of a completed entry, for queries by people. The engine never decides by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecordSummary {
    /// The HTTP status (100 to 999), or 1000 plus the gRPC code (see
    /// [`GrpcStatusCode::from_summary_status`](crate::grpc::GrpcStatusCode::from_summary_status)), or 0 without a
    /// status.
    pub status: u16,
    /// When the request arrived: milliseconds since the Unix epoch, by the holder's clock.
    pub requested_at_ms: u64,
    /// When the answer was complete: milliseconds since the Unix epoch, by the holder's clock.
    pub completed_at_ms: u64,
    /// How long the operation ran.
    pub took: Duration,
}

/// The outcome of [`Store::settle`] and [`Store::extend`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum SettleOutcome {
    /// The caller held the claim, and the change was written.
    Applied,
    /// The entry was missing and no other claim had a result there; the store restored it.
    Restored,
    /// The claim was lost and nothing was written. Contains the current entry.
    ClaimLost(Box<ClaimOutcome>),
}

/// The result of [`Store::sweep`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SweepResult {
    /// The number of entries removed.
    pub removed: u32,
    /// The number of claims whose lease had expired and that were marked accordingly.
    pub lapsed: u32,
    /// Whether more expired entries remain.
    pub more: bool,
}

/// The guarantees of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guarantees {
    /// The store's name.
    pub store: &'static str,
    /// Entries survive a crash of the process.
    pub durable: bool,
    /// Several gateways share the store.
    pub shared: bool,
    /// Weaknesses that start-up found.
    pub warnings: Vec<String>,
}

/// A failed store call. Its [kind](ErrorKind) tells how the caller may proceed.
#[derive(Debug, thiserror::Error)]
#[error("the {store} store {}: {source}", kind.description())]
#[non_exhaustive]
pub struct StoreError {
    /// How the caller may proceed.
    pub kind: ErrorKind,
    /// The name of the store.
    pub store: &'static str,
    /// The underlying error.
    pub source: Box<dyn Error + Send + Sync>,
}

/// How a caller may proceed after a failed store call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Nothing was changed; another store may be tried.
    NotApplied,
    /// The call may have been applied. Repeat it at the same store with the same token.
    Ambiguous,
    /// The stored data cannot be read and must not be used for an answer.
    Corrupt,
    /// The store is reachable and refuses the call: it is full, read-only or of the wrong version.
    Rejected,
}

impl ErrorKind {
    fn description(self) -> &'static str {
        match self {
            Self::NotApplied => "did not apply the call",
            Self::Ambiguous => "gave no answer: the call may have been applied",
            Self::Corrupt => "holds something unreadable",
            Self::Rejected => "refused the call",
        }
    }
}

impl StoreError {
    /// Creates an error of `store`.
    pub fn new(kind: ErrorKind, store: &'static str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind, store, source: source.into() }
    }
}

/// The future of a store call: ready at once for in-process stores, boxed for the others.
///
/// The store may apply a call as soon as it is made. Dropping the future leaves the call ambiguous; it does not undo
/// it.
#[must_use = "a store's answer decides who runs"]
pub struct StoreFuture<'a, T>(StoreFutureKind<'a, T>);

enum StoreFutureKind<'a, T> {
    Ready(Option<Result<T, StoreError>>),
    Boxed(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>),
}

impl<'a, T> StoreFuture<'a, T> {
    /// Creates a future that is ready.
    pub fn ready(answer: Result<T, StoreError>) -> Self {
        Self(StoreFutureKind::Ready(Some(answer)))
    }

    /// Boxes a future.
    pub fn boxed(answer: impl Future<Output = Result<T, StoreError>> + Send + 'a) -> Self {
        Self(StoreFutureKind::Boxed(Box::pin(answer)))
    }
}

impl<T> StoreFuture<'_, T> {
    /// Whether the call was decided at once.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.0, StoreFutureKind::Ready(_))
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
    fn find_completed(&self, at: &Address) -> Option<CompletedEntry> {
        (**self).find_completed(at)
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
