//! One HTTP/1.1 connection and the right to use it.
//!
//! A [`Slot`] is one connection; its sender never leaves it. A [`Lease`] is the right to use it for one
//! exchange. Idle slots are owned by the pool's lists; a client connection remembers its last slot by a
//! weak pointer ([`Affinity`]), takes it straight from there, and the list entry stays where it was. So
//! the usual request takes one uncontended lock to borrow and one to give back, and no list is touched.
//!
//! Invariant: a slot has at most one lease; an idle slot is in exactly one list, or about to be pushed.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use http::Request;
use hyper::body::{Body, Incoming};
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::SendRequest;
use parking_lot::{Mutex, MutexGuard};
use tokio::task::AbortHandle;

use super::Care;
use super::pool::{Gate, Grant, Pool, Share};
use super::wire::Proof;

/// A claimed request takes only a connection used within this time: the shorter it was idle, the less
/// likely the upstream is closing it at this very moment.
const CLAIMED_IDLE: Duration = Duration::from_secs(1);

/// A client connection's memory of the upstream connection it used last: a hint, nothing is reserved.
pub struct Affinity<B>(Mutex<Weak<Slot<B>>>);

impl<B> Default for Affinity<B> {
    fn default() -> Self {
        Self(Mutex::new(Weak::new()))
    }
}

impl<B> Affinity<B> {
    /// The slot it was, if that still exists.
    pub(super) fn last(&self) -> Option<Arc<Slot<B>>> {
        self.0.lock().upgrade()
    }

    pub(super) fn remember(&self, lease: &Lease<B>) {
        let mut last = self.0.lock();
        if !std::ptr::eq(last.as_ptr(), Arc::as_ptr(lease.slot())) {
            *last = Arc::downgrade(lease.slot());
        }
    }
}

/// One connection.
pub(super) struct Slot<B> {
    proof: Arc<Proof>,
    gate: Arc<Gate<B>>,
    /// Weak, because the pool owns idle slots. Only needed to enter a list.
    pool: Weak<Pool<B>>,
    driver: AbortHandle,
    /// Contended only by a scan of the lists.
    state: Mutex<State<B>>,
}

struct State<B> {
    /// None once the connection is given up. Dropping it lets the driver finish and close.
    sender: Option<SendRequest<B>>,
    idle: bool,
    listed: bool,
    /// When it was last used.
    since: Instant,
    /// When it must not be used any more.
    retire: Instant,
}

pub(super) enum Taken<B> {
    Lease(Lease<B>),
    /// Idle, but not fit for this request.
    Unfit,
    /// Busy or dead: not worth a place in a list.
    Gone,
}

impl<B> State<B> {
    /// Gives the connection up. An idle driver sees its sender gone and closes in good order.
    fn close(&mut self) {
        self.idle = false;
        self.sender = None;
    }
}

impl<B> Slot<B> {
    /// A new connection, leased to whoever opened it.
    pub(super) fn lease_new(
        sender: SendRequest<B>, proof: Arc<Proof>, driver: AbortHandle, gate: Arc<Gate<B>>, pool: Weak<Pool<B>>,
    ) -> Lease<B> {
        let since = Instant::now();
        let retire = since + gate.idle_timeout;
        let state = Mutex::new(State { sender: Some(sender), idle: false, listed: false, since, retire });
        Lease::new(Arc::new(Self { proof, gate, pool, driver, state }), false)
    }

    /// Whether this is a connection of the upstream that `gate` bounds.
    pub(super) fn belongs_to(&self, gate: &Arc<Gate<B>>) -> bool {
        Arc::ptr_eq(&self.gate, gate)
    }

    pub(super) fn take(self: &Arc<Self>, care: Care, now: Instant) -> Taken<B> {
        self.take_locked(&mut self.state.lock(), care, now)
    }

    /// As `take`, from a list whose lock is held. Unless it is unfit, the caller removes the entry.
    pub(super) fn take_listed(self: &Arc<Self>, care: Care, now: Instant) -> Taken<B> {
        let mut state = self.state.lock();
        let taken = self.take_locked(&mut state, care, now);
        state.listed = matches!(taken, Taken::Unfit);
        taken
    }

    fn take_locked(self: &Arc<Self>, state: &mut MutexGuard<'_, State<B>>, care: Care, now: Instant) -> Taken<B> {
        if !state.idle {
            return Taken::Gone;
        }
        let dead = self.proof.is_spent() || state.sender.as_ref().is_none_or(SendRequest::is_closed);
        if dead || now >= state.retire {
            state.close();
            return Taken::Gone;
        }
        if care == Care::Claimed && now.duration_since(state.since) >= CLAIMED_IDLE {
            return Taken::Unfit;
        }
        state.idle = false;
        Taken::Lease(Lease::new(Arc::clone(self), true))
    }

    /// For the sweep, under the list's lock: closes what is due or dead, and says what may stay listed.
    pub(super) fn keep(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        if state.idle && (now >= state.retire || self.proof.is_spent()) {
            state.close();
        }
        // Busy ones leave the list too and come back when they are idle.
        state.listed = state.idle;
        state.listed
    }

    /// Closes the connection if it is idle.
    pub(super) fn evict(&self) -> bool {
        let mut state = self.state.lock();
        let was_idle = state.idle;
        if was_idle {
            state.close();
        }
        was_idle
    }

    /// Frees the connection for the next exchange.
    fn settle(self: Arc<Self>) {
        let list = {
            let mut state = self.state.lock();
            let dead = self.proof.is_spent() || state.sender.as_ref().is_none_or(SendRequest::is_closed);
            if dead || Instant::now() >= state.retire {
                state.close();
                return;
            }
            if self.gate.has_waiters() {
                drop(state);
                let lease = Lease::new(Arc::clone(&self), true);
                // Refused only if the queue turned out empty; the lease's drop then comes back here.
                drop(self.gate.hand(Grant::Lease(lease)));
                return;
            }
            state.idle = true;
            !std::mem::replace(&mut state.listed, true)
        };
        if list && let Some(pool) = self.pool.upgrade() {
            pool.list(Arc::clone(&self));
        }
        // Pairs with the fence in `Pool::get`: either it sees this slot, or we see its place in the queue.
        fence(Ordering::SeqCst);
        if self.gate.has_waiters()
            && let Taken::Lease(lease) = self.take(Care::Plain, Instant::now())
        {
            drop(self.gate.hand(Grant::Lease(lease)));
        }
    }

    /// The exchange was broken off: close the socket now. Left to itself hyper would flush first, and
    /// so wait for a peer that has stopped reading.
    fn kill(&self) {
        self.state.lock().close();
        self.driver.abort();
    }
}

/// What a reply's body needs of a slot, whatever the request's body type was.
pub(super) trait Home: Send + Sync {
    /// The reply was read to its end; `limit` is when the upstream will have closed. The share is let go when the
    /// connection is free.
    fn finish(self: Arc<Self>, limit: Option<Instant>, share: Option<Share>);
    /// The exchange was broken off.
    fn kill(&self);
}

impl<B: Send + 'static> Home for Slot<B> {
    fn finish(self: Arc<Self>, limit: Option<Instant>, share: Option<Share>) {
        let ready = {
            let mut state = self.state.lock();
            state.since = Instant::now();
            let retire = state.since + self.gate.idle_timeout;
            state.retire = limit.map_or(retire, |limit| limit.min(retire));
            state.sender.as_ref().is_none_or(|s| s.is_ready() || s.is_closed())
        };
        if ready {
            self.settle();
        } else if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // The driver is a step behind us on another thread, or the upstream answered before it
            // had the whole request and that is still being sent. Rare: worth a task, not a lock.
            runtime.spawn(async move {
                let ready = std::future::poll_fn(|cx| match self.state.lock().sender.as_mut() {
                    Some(sender) => sender.poll_ready(cx).map(|r| r.is_ok()),
                    None => std::task::Poll::Ready(false),
                });
                if ready.await {
                    self.settle();
                } else {
                    self.state.lock().close();
                }
                drop(share);
            });
        } else {
            Slot::kill(&self);
        }
    }

    fn kill(&self) {
        Slot::kill(self);
    }
}

/// What hyper makes of a request; on failure it may hand it back.
type Sent<B> = Result<http::Response<Incoming>, TrySendError<Request<B>>>;

/// The right to one exchange on a connection. Dropped unused it goes back, dropped in use it closes.
pub(super) struct Lease<B> {
    slot: Option<Arc<Slot<B>>>,
    sent: bool,
    reused: bool,
    share: Option<Share>,
}

impl<B> Lease<B> {
    fn new(slot: Arc<Slot<B>>, reused: bool) -> Self {
        Self { slot: Some(slot), sent: false, reused, share: None }
    }

    pub(super) fn with(mut self, share: Option<Share>) -> Self {
        self.share = share;
        self
    }

    /// Whether the connection was idle before: the upstream may have been about to close it.
    pub(super) fn is_reused(&self) -> bool {
        self.reused
    }

    fn slot(&self) -> &Arc<Slot<B>> {
        self.slot.as_ref().expect("a lease has its slot until it is consumed")
    }

    /// Hands the request to the driver.
    #[allow(clippy::result_large_err)]
    pub(super) fn send(&mut self, request: Request<B>) -> Result<impl Future<Output = Sent<B>> + use<B>, Request<B>>
    where
        B: Body + 'static,
    {
        self.sent = true;
        let slot = self.slot();
        let mut state = slot.state.lock();
        match state.sender.as_mut() {
            // Armed before it is queued: the driver may be writing before we are back.
            Some(sender) if slot.proof.arm() => Ok(sender.try_send_request(request)),
            _ => Err(request),
        }
    }

    /// Waits for the reply.
    ///
    /// A request that is queued at the very moment in which its driver ends stays in hyper's channel, unanswered, for
    /// as long as that has a sender. So when the driver is gone the sender goes too, and the request comes back.
    pub(super) async fn answered<T>(&self, reply: impl Future<Output = T>) -> T {
        tokio::pin!(reply);
        tokio::select! {
            biased;
            reply = &mut reply => return reply,
            () = self.slot().proof.gone() => {}
        }
        self.slot().state.lock().close();
        reply.await
    }

    /// See [`Proof::seal`].
    pub(super) fn never_written(&self) -> bool {
        self.slot().proof.seal()
    }

    /// Whether a byte of the answer has come. See [`Proof::is_answered`].
    pub(super) fn is_answered(&self) -> bool {
        self.slot().proof.is_answered()
    }

    /// Gives the connection away to an upgrade: it is neither reused nor closed from here.
    pub(super) fn detach(mut self) -> Option<Share> {
        self.slot = None;
        self.share.take()
    }

    /// For the body of the reply, which decides what becomes of the connection.
    pub(super) fn into_home(mut self) -> (Arc<dyn Home>, Option<Share>)
    where
        B: Send + 'static,
    {
        (self.slot.take().expect("a lease has its slot until it is consumed"), self.share.take())
    }
}

impl<B> Drop for Lease<B> {
    fn drop(&mut self) {
        match self.slot.take() {
            Some(slot) if self.sent => slot.kill(),
            Some(slot) => slot.settle(),
            None => {}
        }
    }
}
