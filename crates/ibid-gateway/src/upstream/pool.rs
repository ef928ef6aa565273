//! The idle HTTP/1.1 connections of one upstream, and the limit on open ones.
//!
//! Invariants:
//! - At most `max_open` sockets are open: each holds a [`ConnectionPermit`] until it is closed.
//! - Requests without a claim use at most three quarters of them: each such use holds an [`UnclaimedPermit`]. The rest
//!   is reserved for claimed requests, so that requests without a key cannot starve them.
//! - While a task waits, every idle connection is offered. A task that returns a connection checks for waiters *after*
//!   it publishes the connection; a task that waits checks the idle lists *after* it queues (both sequentially
//!   consistent). Waiters are served in order and receive the connection itself, so that new requests cannot starve
//!   them.
//!
//! Lock order: shard, then entry, then limit (a connection that is closed returns its permit).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::ReusePolicy;
use super::checkout::{Affinity, Checkout, CheckoutOutcome, PoolEntry};
use super::h1_connection::H1Connection;
use super::socket::UpstreamStream;
use crate::cores;

/// Interval of the search for expired and dead idle connections.
const IDLE_SWEEP_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of idle connections per list that a claimed request checks before it opens a new one.
const MAX_IDLE_SCANNED: usize = 64;

/// A permit for one open socket. The socket holds it.
pub(super) struct ConnectionPermit {
    limit: Option<Arc<ConnectionLimit>>,
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        if let Some(gate) = self.limit.take() {
            let next = ConnectionPermit { limit: Some(Arc::clone(&gate)) };
            if let Some(PoolTicket::Permit(mut unwanted, _)) = gate.offer(PoolTicket::Permit(next, None)) {
                unwanted.limit = None;
            }
        }
    }
}

/// The result of [`UpstreamPool::get`].
pub(super) enum PoolTicket {
    Connection(Checkout),
    /// The caller may open a connection; the `UnclaimedPermit` goes with it.
    Permit(ConnectionPermit, Option<UnclaimedPermit>),
}

/// The right of a request without a claim to use a connection.
pub(super) type UnclaimedPermit = OwnedSemaphorePermit;

/// The limit on open connections, and the queue of waiters.
pub(super) struct ConnectionLimit {
    max_open: usize,
    pub(super) idle_timeout: Duration,
    /// Length of the queue, readable without the lock.
    waiter_count: AtomicUsize,
    /// Locked to open, to close and to wait. A busy upstream below its limit does none of these.
    state: Mutex<LimitState>,
}

struct LimitState {
    open_count: usize,
    waiters: VecDeque<oneshot::Sender<PoolTicket>>,
}

impl ConnectionLimit {
    pub(super) fn has_waiters(&self) -> bool {
        self.waiter_count.load(Ordering::SeqCst) > 0
    }

    /// Gives the ticket to the first live waiter. Returns it if there is none; a permit that is returned
    /// is already counted as closed.
    pub(super) fn offer(&self, mut grant: PoolTicket) -> Option<PoolTicket> {
        let mut queue = self.state.lock();
        while let Some(waiter) = queue.waiters.pop_front() {
            self.waiter_count.store(queue.waiters.len(), Ordering::SeqCst);
            match waiter.send(grant) {
                Ok(()) => return None,
                Err(back) => grant = back,
            }
        }
        if matches!(grant, PoolTicket::Permit(..)) {
            queue.open_count -= 1;
        }
        Some(grant)
    }

    fn try_open(self: &Arc<Self>, queue: &mut LimitState) -> Option<ConnectionPermit> {
        (queue.open_count < self.max_open).then(|| {
            queue.open_count += 1;
            ConnectionPermit { limit: Some(Arc::clone(self)) }
        })
    }
}

type IdleList = Mutex<Vec<Arc<PoolEntry>>>;

pub(super) struct UpstreamPool {
    limit: Arc<ConnectionLimit>,
    /// For requests without a claim.
    unclaimed_permits: Arc<Semaphore>,
    /// One list per core, whose reactor reports the events of the connections in it.
    shards: Box<[IdleList]>,
    has_sweeper: AtomicBool,
}

impl UpstreamPool {
    pub(super) fn new(max: usize, idle_timeout: Duration) -> Arc<Self> {
        let max_open = max.max(1);
        let state = Mutex::new(LimitState { open_count: 0, waiters: VecDeque::new() });
        let limit = ConnectionLimit { max_open, idle_timeout, waiter_count: AtomicUsize::new(0), state };
        Arc::new(Self {
            limit: Arc::new(limit),
            unclaimed_permits: Arc::new(Semaphore::new((max_open - max_open / 4).min(Semaphore::MAX_PERMITS))),
            shards: (0..cores::count()).map(|_| Mutex::default()).collect(),
            has_sweeper: AtomicBool::new(false),
        })
    }

    /// Returns an idle connection without waiting.
    pub(super) fn try_get(&self, care: ReusePolicy, affinity: &Affinity) -> Option<Checkout> {
        let share = match care {
            ReusePolicy::Claimed => None,
            ReusePolicy::PassThrough => Some(Arc::clone(&self.unclaimed_permits).try_acquire_owned().ok()?),
        };
        self.checkout_idle(care, affinity).map(|lease| lease.with_permit(share))
    }

    /// Returns an idle connection or a permit to open one; waits if there is neither. With `fresh`, never an idle one.
    ///
    /// Cancel-safe: a ticket that was granted meanwhile goes to the next waiter.
    pub(super) async fn get(&self, care: ReusePolicy, affinity: &Affinity, fresh: bool) -> PoolTicket {
        let share = match care {
            ReusePolicy::Claimed => None,
            ReusePolicy::PassThrough => {
                Some(Arc::clone(&self.unclaimed_permits).acquire_owned().await.expect("never closed"))
            }
        };
        match self.next_ticket(care, affinity, fresh).await {
            PoolTicket::Connection(lease) => PoolTicket::Connection(lease.with_permit(share)),
            PoolTicket::Permit(permit, _) => PoolTicket::Permit(permit, share),
        }
    }

    async fn next_ticket(&self, care: ReusePolicy, affinity: &Affinity, fresh: bool) -> PoolTicket {
        if !fresh && let Some(lease) = self.checkout_idle(care, affinity) {
            return PoolTicket::Connection(lease);
        }
        let wait = {
            let mut queue = self.limit.state.lock();
            if let Some(permit) = self.limit.try_open(&mut queue) {
                return PoolTicket::Permit(permit, None);
            }
            // Timeouts occur in order of arrival, so cancelled waiters are at the front.
            while queue.waiters.front().is_some_and(oneshot::Sender::is_closed) {
                queue.waiters.pop_front();
            }
            let (give, wait) = oneshot::channel();
            queue.waiters.push_back(give);
            self.limit.waiter_count.store(queue.waiters.len(), Ordering::SeqCst);
            wait
        };
        fence(Ordering::SeqCst);
        if !fresh && let Some(lease) = self.take_idle(care) {
            return PoolTicket::Connection(lease);
        }
        if fresh || care == ReusePolicy::Claimed {
            self.evict();
        }
        wait.await.expect("the gate outlives its waiters: they borrow the pool")
    }

    fn checkout_idle(&self, care: ReusePolicy, affinity: &Affinity) -> Option<Checkout> {
        if let Some(entry) = affinity.last()
            && entry.belongs_to(&self.limit)
            && let CheckoutOutcome::Checkout(lease) = entry.try_checkout(care, Instant::now())
        {
            return Some(lease);
        }
        self.take_idle(care)
    }

    /// Adds a new connection, checked out by the caller.
    pub(super) fn register(self: &Arc<Self>, stream: UpstreamStream, share: Option<UnclaimedPermit>) -> Checkout {
        if !self.has_sweeper.swap(true, Ordering::Relaxed) {
            tokio::spawn(sweep_periodically(Arc::downgrade(self)));
        }
        let connection = Box::new(H1Connection::new(stream));
        PoolEntry::checkout_new(connection, Arc::clone(&self.limit), Arc::downgrade(self)).with_permit(share)
    }

    /// Whether no further connection may be opened.
    pub(super) fn is_full(&self) -> bool {
        self.limit.state.lock().open_count >= self.limit.max_open
    }

    fn take_idle(&self, care: ReusePolicy) -> Option<Checkout> {
        let now = Instant::now();
        let (before, from) = self.shards.split_at(cores::index());
        from.iter().chain(before).find_map(|shard| {
            let mut list = shard.lock();
            let mut unfit = 0;
            for n in (0..list.len()).rev() {
                match list[n].try_checkout_listed(care, now) {
                    CheckoutOutcome::Checkout(lease) => {
                        list.swap_remove(n);
                        return Some(lease);
                    }
                    CheckoutOutcome::Unavailable => drop(list.swap_remove(n)),
                    CheckoutOutcome::Unfit if unfit == MAX_IDLE_SCANNED => break,
                    CheckoutOutcome::Unfit => unfit += 1,
                }
            }
            None
        })
    }

    /// Closes one idle connection to free its permit, which goes to the first waiter once the socket is closed.
    fn evict(&self) {
        // Lists grow at the end, so the front has roughly been idle for longest.
        self.shards.iter().any(|shard| shard.lock().iter().any(|entry| entry.evict()));
    }

    /// Lists a connection that became idle.
    pub(super) fn add_idle(&self, entry: Arc<PoolEntry>) {
        self.shards[entry.core].lock().push(entry);
    }
}

async fn sweep_periodically(pool: Weak<UpstreamPool>) {
    loop {
        tokio::time::sleep(IDLE_SWEEP_INTERVAL).await;
        let Some(pool) = pool.upgrade() else { return };
        let now = Instant::now();
        pool.shards
            .iter()
            .for_each(|shard| shard.lock().retain(|entry| entry.close_if_expired(now, IDLE_SWEEP_INTERVAL)));
    }
}
