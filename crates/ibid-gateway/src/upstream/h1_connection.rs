//! One HTTP/1.1 connection and the right to use it.
//!
//! An [`H1Connection`] owns its sender. A [`Checkout`] is the right to use the connection for one
//! exchange. The pool's lists own idle connections. A client connection remembers its last upstream connection by
//! a weak pointer ([`Affinity`]) and takes it from there; the list entry stays where it was. So
//! a typical request takes one uncontended lock to check out and one to return, and touches no list.
//!
//! Invariant: a connection has at most one checkout. An idle connection is in exactly one list, or about to be pushed.

use std::pin::Pin;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use http::Request;
use hyper::body::{Body, Incoming};
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::SendRequest;
use parking_lot::{Mutex, MutexGuard};
use tokio::task::AbortHandle;

use super::ReusePolicy;
use super::pool::{ConnectionLimit, PoolTicket, UnclaimedPermit, UpstreamPool};
use super::socket::WriteProof;
use crate::cores;

/// Maximum idle time of a connection for a claimed request. The shorter it was idle, the less
/// likely it is that the upstream is just closing it.
const MAX_CLAIMED_IDLE: Duration = Duration::from_secs(1);

/// Remembers the upstream connection that a client connection used last. A hint: nothing is reserved.
pub struct Affinity<B>(Mutex<Weak<H1Connection<B>>>);

impl<B> Default for Affinity<B> {
    fn default() -> Self {
        Self(Mutex::new(Weak::new()))
    }
}

impl<B> Affinity<B> {
    /// Returns that connection if it still exists.
    pub(super) fn last(&self) -> Option<Arc<H1Connection<B>>> {
        self.0.lock().upgrade()
    }

    /// Remembers a connection of this core. Others cost a wake-up of their core per request.
    pub(super) fn remember(&self, lease: &Checkout<B>) {
        if lease.slot().core != cores::index() {
            return;
        }
        let mut last = self.0.lock();
        if !std::ptr::eq(last.as_ptr(), Arc::as_ptr(lease.slot())) {
            *last = Arc::downgrade(lease.slot());
        }
    }
}

pub(super) struct H1Connection<B> {
    proof: Arc<WriteProof>,
    limit: Arc<ConnectionLimit<B>>,
    /// Weak, because the pool owns idle connections. Used only to enter a list.
    pool: Weak<UpstreamPool<B>>,
    driver: AbortHandle,
    /// The index of the core that drives the connection.
    pub(super) core: usize,
    /// Contended only by scans of the lists.
    state: Mutex<H1ConnectionState<B>>,
}

struct H1ConnectionState<B> {
    /// `None` once the connection is given up. Dropping the sender lets the driver finish and close.
    sender: Option<SendRequest<B>>,
    is_idle: bool,
    is_listed: bool,
    last_used: Instant,
    /// The connection must not be used after this.
    reuse_until: Instant,
}

pub(super) enum CheckoutOutcome<B> {
    Checkout(Checkout<B>),
    /// Idle, but not fit for this request.
    Unfit,
    /// In use or dead: not worth a list entry.
    Unavailable,
}

impl<B> H1ConnectionState<B> {
    /// Gives up the connection. An idle driver notices that its sender is gone and closes gracefully.
    fn close(&mut self) {
        self.is_idle = false;
        self.sender = None;
    }
}

impl<B> H1Connection<B> {
    /// Creates a connection that is checked out by the caller.
    pub(super) fn checkout_new(
        sender: SendRequest<B>, proof: Arc<WriteProof>, driver: AbortHandle, gate: Arc<ConnectionLimit<B>>,
        pool: Weak<UpstreamPool<B>>,
    ) -> Checkout<B> {
        let last_used = Instant::now();
        let (sender, reuse_until) = (Some(sender), last_used + gate.idle_timeout);
        let state = H1ConnectionState { sender, is_idle: false, is_listed: false, last_used, reuse_until };
        let state = Mutex::new(state);
        Checkout::new(Arc::new(Self { proof, limit: gate, pool, driver, core: cores::index(), state }), false)
    }

    /// Whether the connection belongs to the upstream that `gate` limits.
    pub(super) fn belongs_to(&self, gate: &Arc<ConnectionLimit<B>>) -> bool {
        Arc::ptr_eq(&self.limit, gate)
    }

    pub(super) fn try_checkout(self: &Arc<Self>, care: ReusePolicy, now: Instant) -> CheckoutOutcome<B> {
        self.try_checkout_locked(&mut self.state.lock(), care, now)
    }

    /// Like `try_checkout`, for an entry of a locked list. The caller removes the entry unless the result is `Unfit`.
    pub(super) fn try_checkout_listed(self: &Arc<Self>, care: ReusePolicy, now: Instant) -> CheckoutOutcome<B> {
        let mut state = self.state.lock();
        let taken = self.try_checkout_locked(&mut state, care, now);
        state.is_listed = matches!(taken, CheckoutOutcome::Unfit);
        taken
    }

    fn try_checkout_locked(
        self: &Arc<Self>, state: &mut MutexGuard<'_, H1ConnectionState<B>>, care: ReusePolicy, now: Instant,
    ) -> CheckoutOutcome<B> {
        if !state.is_idle {
            return CheckoutOutcome::Unavailable;
        }
        let dead = self.proof.is_unusable() || state.sender.as_ref().is_none_or(SendRequest::is_closed);
        if dead || now >= state.reuse_until {
            state.close();
            return CheckoutOutcome::Unavailable;
        }
        if care == ReusePolicy::Claimed && now.duration_since(state.last_used) >= MAX_CLAIMED_IDLE {
            return CheckoutOutcome::Unfit;
        }
        state.is_idle = false;
        CheckoutOutcome::Checkout(Checkout::new(Arc::clone(self), true))
    }

    /// For the sweep, under the list's lock: closes expired and dead connections. Returns whether the entry stays
    /// listed.
    pub(super) fn close_if_expired(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        if state.is_idle && (now >= state.reuse_until || self.proof.is_unusable()) {
            state.close();
        }
        // Connections in use leave the list too, and return when they are idle.
        state.is_listed = state.is_idle;
        state.is_listed
    }

    /// Closes the connection if it is idle.
    pub(super) fn evict(&self) -> bool {
        let mut state = self.state.lock();
        state.is_idle && {
            state.close();
            true
        }
    }

    /// Frees the connection for the next exchange.
    fn release(self: Arc<Self>) {
        let list = {
            let mut state = self.state.lock();
            let dead = self.proof.is_unusable() || state.sender.as_ref().is_none_or(SendRequest::is_closed);
            if dead || Instant::now() >= state.reuse_until {
                state.close();
                return;
            }
            if self.limit.has_waiters() {
                drop(state);
                let lease = Checkout::new(Arc::clone(&self), true);
                // Rejected only if the queue is empty; dropping the checkout then calls `release` again.
                drop(self.limit.offer(PoolTicket::Connection(lease)));
                return;
            }
            state.is_idle = true;
            !std::mem::replace(&mut state.is_listed, true)
        };
        if list && let Some(pool) = self.pool.upgrade() {
            pool.add_idle(Arc::clone(&self));
        }
        // Pairs with the fence in `UpstreamPool::get`: either it sees this connection, or we see its queue entry.
        fence(Ordering::SeqCst);
        if self.limit.has_waiters()
            && let CheckoutOutcome::Checkout(lease) = self.try_checkout(ReusePolicy::PassThrough, Instant::now())
        {
            drop(self.limit.offer(PoolTicket::Connection(lease)));
        }
    }

    /// Closes the socket at once after a broken exchange. hyper would flush first, and
    /// so wait for a peer that has stopped reading.
    fn abort_driver(&self) {
        self.state.lock().close();
        self.driver.abort();
    }
}

/// The part of a connection that a reply's body needs, independent of the request's body type.
pub(super) trait ReturnConnection: Send + Sync {
    /// The reply was read to its end. The upstream closes the connection at `limit`. `share` is dropped when the
    /// connection is free.
    fn return_after_reply(self: Arc<Self>, limit: Option<Instant>, share: Option<UnclaimedPermit>);
    /// The exchange was broken off.
    fn abort(&self);
}

impl<B: Send + 'static> ReturnConnection for H1Connection<B> {
    fn return_after_reply(self: Arc<Self>, limit: Option<Instant>, share: Option<UnclaimedPermit>) {
        let ready = {
            let mut state = self.state.lock();
            state.last_used = Instant::now();
            let retire = state.last_used + self.limit.idle_timeout;
            state.reuse_until = limit.map_or(retire, |limit| limit.min(retire));
            state.sender.as_ref().is_none_or(|s| s.is_ready() || s.is_closed())
        };
        if ready {
            self.release();
        } else if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // The driver is a step behind on another thread, or the upstream answered before it had
            // the whole request, which is still being sent. Rare, so a task is cheap enough.
            runtime.spawn(async move {
                let ready = std::future::poll_fn(|cx| match self.state.lock().sender.as_mut() {
                    Some(sender) => sender.poll_ready(cx).map(|r| r.is_ok()),
                    None => std::task::Poll::Ready(false),
                });
                if ready.await {
                    self.release();
                } else {
                    self.state.lock().close();
                }
                drop(share);
            });
        } else {
            H1Connection::abort_driver(&self);
        }
    }

    fn abort(&self) {
        H1Connection::abort_driver(self);
    }
}

/// hyper's result of a request. On failure it may return the request.
type SendResult<B> = Result<http::Response<Incoming>, TrySendError<Request<B>>>;

/// The right to one exchange on a connection. Dropping it returns an unused connection and closes a used one.
pub(super) struct Checkout<B> {
    slot: Option<Arc<H1Connection<B>>>,
    is_sent: bool,
    /// Whether the connection was idle before, so that the upstream may have been about to close it.
    pub(super) is_reused: bool,
    unclaimed_permit: Option<UnclaimedPermit>,
}

impl<B> Checkout<B> {
    fn new(slot: Arc<H1Connection<B>>, is_reused: bool) -> Self {
        Self { slot: Some(slot), is_sent: false, is_reused, unclaimed_permit: None }
    }

    pub(super) fn with_permit(mut self, share: Option<UnclaimedPermit>) -> Self {
        self.unclaimed_permit = share;
        self
    }

    fn slot(&self) -> &Arc<H1Connection<B>> {
        self.slot.as_ref().expect("a lease has its slot until it is consumed")
    }

    /// Hands the request to the driver.
    #[allow(clippy::result_large_err)]
    pub(super) fn send(
        &mut self, request: Request<B>,
    ) -> Result<impl Future<Output = SendResult<B>> + use<B>, Request<B>>
    where
        B: Body + 'static,
    {
        self.is_sent = true;
        let slot = self.slot();
        let mut state = slot.state.lock();
        match state.sender.as_mut() {
            // Arm before queueing: the driver may write before the call returns.
            Some(sender) if slot.proof.arm() => Ok(sender.try_send_request(request)),
            _ => Err(request),
        }
    }

    /// Waits for the reply.
    ///
    /// A request that is queued at the moment when its driver ends would stay in hyper's channel for as long as the
    /// channel has a sender. So this drops the sender when the driver is gone, and hyper returns the request.
    pub(super) async fn await_reply<T>(&self, mut reply: Pin<&mut impl Future<Output = T>>) -> T {
        tokio::select! {
            biased;
            reply = &mut reply => return reply,
            () = self.slot().proof.wait_dropped() => {}
        }
        self.slot().state.lock().close();
        reply.await
    }

    pub(super) fn proof(&self) -> &WriteProof {
        &self.slot().proof
    }

    /// Hands the connection over to an upgrade, after which it is neither reused nor closed from here.
    pub(super) fn detach(mut self) -> Option<UnclaimedPermit> {
        self.slot = None;
        self.unclaimed_permit.take()
    }

    /// For the reply's body, which returns or closes the connection.
    pub(super) fn into_connection(mut self) -> (Arc<dyn ReturnConnection>, Option<UnclaimedPermit>)
    where
        B: Send + 'static,
    {
        (self.slot.take().expect("a lease has its slot until it is consumed"), self.unclaimed_permit.take())
    }
}

impl<B> Drop for Checkout<B> {
    fn drop(&mut self) {
        match self.slot.take() {
            Some(slot) if self.is_sent => slot.abort_driver(),
            Some(slot) => slot.release(),
            None => {}
        }
    }
}
