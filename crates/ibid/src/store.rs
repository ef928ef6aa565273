//! The store contract: who may run, who must wait, what was answered.
//!
//! A store keeps one entry per [`Address`] and decides, atomically, who runs. It knows no policy: it compares tokens
//! and fences, never fingerprints, and never looks inside a record.
//!
//! What every implementation must hold (the suite in `ibid-testkit` checks each point):
//!
//! - **Same token, same answer.** Every call may be sent again after a lost answer. A token that was released or
//!   forgotten is [`Claim::Spent`], for at least [`FREE_FOR`].
//! - **What a holder says counts** until its claim is taken over, released or forgotten: if the store has lost the entry,
//!   or somebody else came there and left, it is put back ([`Held::Restored`]).
//! - **A claim whose answer was lost** is settled by its token alone ([`Fence::UNSEEN`]); that spends the token wherever
//!   it is not the holder, so that a late copy of the claim finds it spent.
//! - **A lapsed claim is unknown, never free.** It runs again only through [`Ask::over`], in the same atomic step that
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
    counters::{Counters, Used, Windows},
    error::{ErrorKind, StoreError},
    memory::{Memory, MemoryLimits},
    operators::{Counts, Cursor, Filter, Listed, Operators, Page, State},
    words::{Address, Fence, Fingerprint, Tags, Token, key_hash},
};

pub(crate) mod counters;
mod error;
mod memory;
mod operators;
mod words;

/// How long at least the token of a released or forgotten claim is remembered, so that a late copy of that claim
/// cannot come alive.
pub const FREE_FOR: Duration = Duration::from_secs(60);

/// Remembers what was asked and answered. See the [module docs](self) for what an implementation must hold.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Decides who runs.
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim>;

    /// Re-arms lease and expiry of a claim. On an absent entry, puts it back ([`Held::Restored`]).
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held>;

    /// Ends a claim. Repeatable; a holder that lost its claim writes nothing and learns what is there now.
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held>;

    /// Returns once `seen` is no longer the running holder at `at`, or after `limit`. A hint: callers claim again.
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()>;

    /// What a claim would find, without claiming. `None` if nothing is there or it was released.
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>>;

    /// Removes at most `at_most` expired entries, and marks lapsed ones where a store keeps such a mark. Of several
    /// processes on a shared store one sweeps at a time; the others find nothing to do.
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept>;

    /// What operators may see and change.
    fn operators(&self) -> &dyn Operators;

    /// Counts that all who use this store share; `None` if it keeps none.
    fn counters(&self) -> Option<&dyn Counters>;

    /// What this store promises, and what start-up found wanting.
    fn promise(&self) -> Promise;
}

/// One request to run, named by its token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// Where the entry lives.
    pub address: Address,
    /// Names this claim; minted by the caller, so that it can ask again after a lost answer.
    pub token: Token,
    /// What makes two requests the same. Stored, never compared by the store.
    pub fingerprint: Fingerprint,
    /// What operators can search by.
    pub tags: Tags,
    /// Opaque to the store; shown to operators.
    pub label: Bytes,
    /// How long the holder may stay silent.
    pub hold: Duration,
    /// How long an unfinished entry is kept after its lease ends.
    pub keep: Duration,
    /// Take over this holder, if it is still current and lapsed or parked.
    pub over: Option<Fence>,
}

/// A granted claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// What was asked.
    pub ask: Arc<Ask>,
    /// Names this holder. [`Fence::UNSEEN`] if the claim's answer was lost: then the token alone names it.
    pub fence: Fence,
    /// 1 for the first run at this address, 2 for the next.
    pub attempt: u32,
    /// Granted by a part of the store that could not reach the part that decides. The answer is called degraded.
    pub solo: bool,
}

impl Lease {
    /// Of a claim whose answer was lost: the token alone names it.
    pub fn unseen(ask: &Arc<Ask>) -> Self {
        Self { ask: ask.clone(), fence: Fence::UNSEEN, attempt: 0, solo: false }
    }
}

/// What a claim found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Claim {
    /// The caller runs.
    Granted(Lease),
    /// Another holder runs.
    Busy(Holder),
    /// A holder started and nobody knows how it ended: parked, or silent for longer than its lease.
    Unknown(Holder),
    /// Finished; here is the record.
    Done(Finished),
    /// This token was released or forgotten and can never be granted again.
    Spent,
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
pub struct Finished {
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
pub enum End {
    /// Remember this answer for `keep`.
    Complete {
        /// Whether the answer is a failure.
        failed: bool,
        /// The answer, see [`crate::Record`].
        record: Bytes,
        /// The same in a form that people query.
        outline: Outline,
        /// From now on.
        keep: Duration,
    },
    /// It did not happen, or is not to be remembered. Of a takeover: unknown again.
    Release,
    /// Nobody knows how it ended.
    Park {
        /// How long to remember that, from now on.
        keep: Duration,
        /// Not to be taken over before.
        retry_in: Duration,
    },
}

impl End {
    /// How long an entry that ended so is kept.
    pub fn keep(&self) -> Duration {
        match self {
            Self::Complete { keep, .. } | Self::Park { keep, .. } => *keep,
            Self::Release => FREE_FOR,
        }
    }
}

/// A finished entry for people: columns to query, not to decide by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outline {
    /// The protocol's status: an HTTP status (100 to 999); of a gRPC call 1000 and its code, which
    /// [`Code::of_outline`](crate::grpc::Code::of_outline) tells apart; 0 where there is none.
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
pub enum Held {
    /// It was.
    Held,
    /// The entry was gone, nobody else has been there: it was put back.
    Restored,
    /// It was not; nothing was written. What is there now.
    Lost(Box<Claim>),
}

/// What a sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Swept {
    /// Entries removed.
    pub removed: u32,
    /// Claims found silent for longer than their lease, and marked so for people who look.
    pub lapsed: u32,
    /// Whether more were waiting when it stopped.
    pub more: bool,
}

/// What a store promises.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promise {
    /// The store's name, for people.
    pub store: &'static str,
    /// Survives a crash of its process.
    pub durable: bool,
    /// Several gateways share it.
    pub shared: bool,
    /// What start-up found that weakens the promise.
    pub wanting: Vec<String>,
}

/// The answer of a store call: ready at once for in-process stores, boxed for the others.
///
/// A call may be applied as soon as it is made: one whose answer nobody awaits is ambiguous, not undone.
#[must_use = "a store's answer decides who runs"]
pub struct StoreFuture<'a, T>(Inner<'a, T>);

enum Inner<'a, T> {
    Ready(Option<Result<T, StoreError>>),
    Boxed(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>),
}

impl<'a, T> StoreFuture<'a, T> {
    /// An answer that is there already.
    pub fn ready(answer: Result<T, StoreError>) -> Self {
        Self(Inner::Ready(Some(answer)))
    }

    /// An answer that takes time.
    pub fn boxed(answer: impl Future<Output = Result<T, StoreError>> + Send + 'a) -> Self {
        Self(Inner::Boxed(Box::pin(answer)))
    }
}

impl<T: Unpin> Future for StoreFuture<'_, T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Inner::Ready(answer) => Poll::Ready(answer.take().expect("polled after it was ready")),
            Inner::Boxed(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for StoreFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreFuture")
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        (**self).claim(ask)
    }
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        (**self).extend(lease, hold)
    }
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        (**self).settle(lease, end)
    }
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        (**self).wait(at, seen, limit)
    }
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        (**self).get(at)
    }
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        (**self).sweep(at_most)
    }
    fn operators(&self) -> &dyn Operators {
        (**self).operators()
    }
    fn counters(&self) -> Option<&dyn Counters> {
        (**self).counters()
    }
    fn promise(&self) -> Promise {
        (**self).promise()
    }
}
