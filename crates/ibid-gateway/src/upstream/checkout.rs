//! The right to use an HTTP/1.1 connection for one exchange.
//!
//! A [`PoolEntry`] owns its connection while that is idle. A [`Checkout`] takes it out for one exchange. The pool's
//! lists own the entries. A client connection remembers the entry of its last upstream connection by a weak pointer
//! ([`Affinity`]) and takes the connection from there; the list entry stays where it was. So a typical request takes one
//! uncontended lock to check out and one to return, and touches no list.
//!
//! Invariant: a connection has at most one owner. The entry of an idle one is in exactly one list, or about to be
//! pushed.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use http_body::SizeHint;
use parking_lot::Mutex;

use super::ReusePolicy;
use super::body::UnsentBody;
use super::h1_connection::H1Connection;
use super::pool::{ConnectionLimit, PoolTicket, UnclaimedPermit, UpstreamPool};
use crate::cores;

/// Maximum idle time of a connection for a claimed request. The shorter it was idle, the less
/// likely it is that the upstream is just closing it.
const MAX_CLAIMED_IDLE: Duration = Duration::from_secs(1);

/// Remembers the upstream connection that a client connection used last. A hint: nothing is reserved.
#[derive(Default)]
pub struct Affinity(Mutex<Weak<PoolEntry>>);

impl Affinity {
    /// Returns that connection's entry if it still exists.
    pub(super) fn last(&self) -> Option<Arc<PoolEntry>> {
        self.0.lock().upgrade()
    }

    /// Remembers a connection of this core. Others cost a wake-up of their core per request.
    pub(super) fn remember(&self, checkout: &Checkout) {
        if checkout.entry.core != cores::index() {
            return;
        }
        let mut last = self.0.lock();
        if !std::ptr::eq(last.as_ptr(), Arc::as_ptr(&checkout.entry)) {
            *last = Arc::downgrade(&checkout.entry);
        }
    }
}

pub(super) struct PoolEntry {
    limit: Arc<ConnectionLimit>,
    /// Weak, because the pool owns idle connections. Used only to enter a list.
    pool: Weak<UpstreamPool>,
    /// The index of the core that opened the connection, whose reactor reports its events.
    pub(super) core: usize,
    /// Contended only by scans of the lists.
    state: Mutex<PoolEntryState>,
}

struct PoolEntryState {
    /// The connection, if it is idle.
    idle: Option<Box<H1Connection>>,
    is_listed: bool,
    last_used: Instant,
    /// The connection must not be used after this.
    reuse_until: Instant,
}

pub(super) enum CheckoutOutcome {
    Checkout(Checkout),
    /// Idle, but not fit for this request.
    Unfit,
    /// In use or dead: not worth a list entry.
    Unavailable,
}

impl PoolEntryState {
    fn close(&mut self) {
        if let Some(connection) = self.idle.take() {
            connection.close();
        }
    }
}

impl PoolEntry {
    /// Creates the entry of a new connection, which is checked out by the caller.
    pub(super) fn checkout_new(
        connection: Box<H1Connection>, limit: Arc<ConnectionLimit>, pool: Weak<UpstreamPool>,
    ) -> Checkout {
        let last_used = Instant::now();
        let reuse_until = last_used + limit.idle_timeout;
        let state = Mutex::new(PoolEntryState { idle: None, is_listed: false, last_used, reuse_until });
        Checkout::new(Arc::new(Self { limit, pool, core: cores::index(), state }), connection, false)
    }

    /// Whether the connection belongs to the upstream that `limit` limits.
    pub(super) fn belongs_to(&self, limit: &Arc<ConnectionLimit>) -> bool {
        Arc::ptr_eq(&self.limit, limit)
    }

    pub(super) fn try_checkout(self: &Arc<Self>, care: ReusePolicy, now: Instant) -> CheckoutOutcome {
        self.try_checkout_locked(&mut self.state.lock(), care, now)
    }

    /// Like `try_checkout`, for an entry of a locked list. The caller removes the entry unless the result is `Unfit`.
    pub(super) fn try_checkout_listed(self: &Arc<Self>, care: ReusePolicy, now: Instant) -> CheckoutOutcome {
        let mut state = self.state.lock();
        let outcome = self.try_checkout_locked(&mut state, care, now);
        state.is_listed = matches!(outcome, CheckoutOutcome::Unfit);
        outcome
    }

    fn try_checkout_locked(
        self: &Arc<Self>, state: &mut PoolEntryState, care: ReusePolicy, now: Instant,
    ) -> CheckoutOutcome {
        if now >= state.reuse_until {
            state.close();
        }
        if care == ReusePolicy::Claimed && state.idle.is_some() && now - state.last_used >= MAX_CLAIMED_IDLE {
            return CheckoutOutcome::Unfit;
        }
        match state.idle.take() {
            Some(connection) => CheckoutOutcome::Checkout(Checkout::new(Arc::clone(self), connection, true)),
            None => CheckoutOutcome::Unavailable,
        }
    }

    /// For the sweep, under the list's lock: closes expired connections, and those that the upstream has closed.
    /// Returns whether the entry stays listed.
    pub(super) fn close_if_expired(&self, now: Instant, min_idle: Duration) -> bool {
        let mut state = self.state.lock();
        let is_quiet = now.saturating_duration_since(state.last_used) >= min_idle;
        let cx = &mut Context::from_waker(Waker::noop());
        let is_dead = |idle: &mut Box<H1Connection>| is_quiet && !idle.is_silent(cx);
        if now >= state.reuse_until || state.idle.as_mut().is_some_and(is_dead) {
            state.close();
        }
        // Connections in use leave the list too, and return when they are idle.
        state.is_listed = state.idle.is_some();
        state.is_listed
    }

    /// Closes the connection if it is idle.
    pub(super) fn evict(&self) -> bool {
        let mut state = self.state.lock();
        state.idle.is_some() && {
            state.close();
            true
        }
    }

    /// Frees the connection for the next exchange.
    fn release(self: Arc<Self>, connection: Box<H1Connection>) {
        if self.limit.has_waiters() {
            // Rejected only if the queue is empty; dropping the checkout then calls `release` again.
            drop(self.limit.offer(PoolTicket::Connection(Checkout::new(self.clone(), connection, true))));
            return;
        }
        let must_list = {
            let mut state = self.state.lock();
            state.idle = Some(connection);
            !std::mem::replace(&mut state.is_listed, true)
        };
        if must_list && let Some(pool) = self.pool.upgrade() {
            pool.add_idle(Arc::clone(&self));
        }
        // Pairs with the fence in `UpstreamPool::get`: either it sees this connection, or we see its queue entry.
        fence(Ordering::SeqCst);
        if self.limit.has_waiters()
            && let CheckoutOutcome::Checkout(checkout) = self.try_checkout(ReusePolicy::PassThrough, Instant::now())
        {
            drop(self.limit.offer(PoolTicket::Connection(checkout)));
        }
    }

    /// Like [`release`](Self::release), after a complete exchange. Closes the connection if it must not be reused.
    fn release_after_exchange(self: Arc<Self>, connection: Box<H1Connection>) {
        let now = Instant::now();
        let retire = now + self.limit.idle_timeout;
        let reuse_until = connection.reuse_until.map_or(retire, |until| until.min(retire));
        if !connection.may_reuse() || now >= reuse_until {
            connection.close();
            return;
        }
        {
            let mut state = self.state.lock();
            (state.last_used, state.reuse_until) = (now, reuse_until);
        }
        self.release(connection);
    }
}

/// The right to one exchange on a connection. Dropping it returns an unused connection and closes a used one.
pub(super) struct Checkout {
    entry: Arc<PoolEntry>,
    /// `None` once the connection is returned.
    connection: Option<Box<H1Connection>>,
    /// Whether a request has begun to use the connection.
    pub(super) is_used: bool,
    /// Whether the connection was idle before, so that the upstream may have been about to close it.
    pub(super) is_reused: bool,
    unclaimed_permit: Option<UnclaimedPermit>,
}

impl Checkout {
    fn new(entry: Arc<PoolEntry>, connection: Box<H1Connection>, is_reused: bool) -> Self {
        Self { entry, connection: Some(connection), is_used: false, is_reused, unclaimed_permit: None }
    }

    pub(super) fn with_permit(mut self, permit: Option<UnclaimedPermit>) -> Self {
        self.unclaimed_permit = permit;
        self
    }

    pub(super) fn connection(&mut self) -> &mut H1Connection {
        self.connection.as_mut().expect("a checkout has its connection until it is consumed")
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.connection.as_ref().map_or_else(SizeHint::default, |connection| connection.size_hint())
    }

    /// Returns the connection after a complete reply. If the upstream answered before it had the whole request, sends
    /// the rest first.
    pub(super) fn finish(mut self, unsent: Option<UnsentBody>) {
        let Some(mut connection) = self.connection.take() else { return };
        let entry = self.entry.clone();
        let Some(mut body) = unsent.filter(|_| connection.may_reuse()) else {
            entry.release_after_exchange(connection);
            return;
        };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if std::future::poll_fn(|cx| connection.poll_send(cx, &mut body)).await.is_ok() {
                    entry.release_after_exchange(connection);
                }
                drop(self);
            });
        }
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take()
            && !self.is_used
        {
            self.entry.clone().release(connection);
        }
    }
}
