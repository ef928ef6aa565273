//! The idle HTTP/1.1 connections of one upstream, and the bound on open ones.
//!
//! Invariants:
//! - At most `max` sockets are open: each holds a [`Permit`] until it is closed.
//! - At most three quarters of them are used by requests without a claim: each such use holds a [`Share`]. The rest is
//!   reserved for claimed requests, so that nobody can starve these without a key.
//! - If anyone waits, no connection stays idle unoffered: who gives back looks for waiters *after*
//!   making the slot visible, who waits looks at the lists *after* queueing (both sequentially consistent).
//!   Waiters are served in order and handed the connection itself, or regulars would starve them.
//!
//! Locks, outermost first: shard, slot. The gate's lock is taken with neither held.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;

use super::Care;
use super::slot::{Affinity, Lease, Slot, Taken};
use super::wire::Proof;

/// How often idle connections are looked through for those that are due or dead.
const SWEEP: Duration = Duration::from_millis(500);
/// How many connections too old for a claimed request are looked at per list before opening a new one.
const LOOK: usize = 64;

/// A place under the bound. Held by the socket.
pub(super) struct Permit<B> {
    gate: Option<Arc<Gate<B>>>,
}

impl<B> Drop for Permit<B> {
    fn drop(&mut self) {
        if let Some(gate) = self.gate.take() {
            let next = Permit { gate: Some(Arc::clone(&gate)) };
            if let Some(Grant::Permit(mut unwanted, _)) = gate.hand(Grant::Permit(next, None)) {
                unwanted.gate = None;
            }
        }
    }
}

/// What a request gets from the pool.
pub(super) enum Grant<B> {
    Lease(Lease<B>),
    /// Open a connection yourself; the share goes with it.
    Permit(Permit<B>, Option<Share>),
}

/// The right of a request without a claim to use a connection.
pub(super) type Share = OwnedSemaphorePermit;

/// The bound and those who wait at it.
pub(super) struct Gate<B> {
    max: usize,
    pub(super) idle_timeout: Duration,
    /// Length of the queue, readable without the lock.
    waiting: AtomicUsize,
    /// Locked to open, close and wait; a busy upstream below its bound does none of these.
    inner: Mutex<Queue<B>>,
}

struct Queue<B> {
    open: usize,
    waiters: VecDeque<oneshot::Sender<Grant<B>>>,
}

impl<B> Gate<B> {
    pub(super) fn has_waiters(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Gives it to the first live waiter. If there is none, comes back with it; a permit that comes back
    /// has been counted as closed.
    pub(super) fn hand(&self, mut grant: Grant<B>) -> Option<Grant<B>> {
        let mut queue = self.inner.lock();
        while let Some(waiter) = queue.waiters.pop_front() {
            self.waiting.store(queue.waiters.len(), Ordering::SeqCst);
            match waiter.send(grant) {
                Ok(()) => return None,
                Err(back) => grant = back,
            }
        }
        if matches!(grant, Grant::Permit(..)) {
            queue.open -= 1;
        }
        Some(grant)
    }

    fn enter(self: &Arc<Self>, queue: &mut Queue<B>) -> Option<Permit<B>> {
        (queue.open < self.max).then(|| {
            queue.open += 1;
            Permit { gate: Some(Arc::clone(self)) }
        })
    }
}

type Shard<B> = Mutex<Vec<Arc<Slot<B>>>>;

/// The idle connections of one upstream, and its bound.
pub(super) struct Pool<B> {
    gate: Arc<Gate<B>>,
    /// What requests without a claim may use.
    shares: Arc<Semaphore>,
    /// One list per core, so that HTTP/2 clients, whose streams share one affinity, do not queue here.
    shards: Box<[Shard<B>]>,
    swept: AtomicBool,
}

impl<B: Send + 'static> Pool<B> {
    pub(super) fn new(max: usize, idle_timeout: Duration) -> Arc<Self> {
        let shards = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
        let max = max.max(1);
        Arc::new(Self {
            gate: Arc::new(Gate {
                max,
                idle_timeout,
                waiting: AtomicUsize::new(0),
                inner: Mutex::new(Queue { open: 0, waiters: VecDeque::new() }),
            }),
            shares: Arc::new(Semaphore::new((max - max / 4).min(Semaphore::MAX_PERMITS))),
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            swept: AtomicBool::new(false),
        })
    }

    /// An idle connection, or leave to open one; waits if there is neither. `fresh`: no idle one.
    ///
    /// Cancel-safe: what was granted meanwhile goes on to the next.
    pub(super) async fn get(&self, care: Care, affinity: &Affinity<B>, fresh: bool) -> Grant<B> {
        let share = match care {
            Care::Claimed => None,
            Care::Plain => Some(Arc::clone(&self.shares).acquire_owned().await.expect("never closed")),
        };
        match self.grant(care, affinity, fresh).await {
            Grant::Lease(lease) => Grant::Lease(lease.with(share)),
            Grant::Permit(permit, _) => Grant::Permit(permit, share),
        }
    }

    async fn grant(&self, care: Care, affinity: &Affinity<B>, fresh: bool) -> Grant<B> {
        if !fresh {
            if let Some(slot) = affinity.last()
                && slot.belongs_to(&self.gate)
                && let Taken::Lease(lease) = slot.take(care, Instant::now())
            {
                return Grant::Lease(lease);
            }
            if let Some(lease) = self.idle(care) {
                return Grant::Lease(lease);
            }
        }
        let wait = {
            let mut queue = self.gate.inner.lock();
            if let Some(permit) = self.gate.enter(&mut queue) {
                return Grant::Permit(permit, None);
            }
            // Time-outs strike in order of arrival, so those who gave up are at the front.
            while queue.waiters.front().is_some_and(oneshot::Sender::is_closed) {
                queue.waiters.pop_front();
            }
            let (give, wait) = oneshot::channel();
            queue.waiters.push_back(give);
            self.gate.waiting.store(queue.waiters.len(), Ordering::SeqCst);
            wait
        };
        fence(Ordering::SeqCst);
        if !fresh && let Some(lease) = self.idle(care) {
            return Grant::Lease(lease);
        }
        if fresh || care == Care::Claimed {
            self.evict();
        }
        wait.await.expect("the gate outlives its waiters: they borrow the pool")
    }

    /// A new connection, leased to whoever opened it.
    pub(super) fn adopt(
        self: &Arc<Self>, sender: SendRequest<B>, proof: Arc<Proof>, driver: AbortHandle, share: Option<Share>,
    ) -> Lease<B> {
        if !self.swept.swap(true, Ordering::Relaxed) {
            tokio::spawn(sweep(Arc::downgrade(self)));
        }
        Slot::lease_new(sender, proof, driver, Arc::clone(&self.gate), Arc::downgrade(self)).with(share)
    }

    fn idle(&self, care: Care) -> Option<Lease<B>> {
        let now = Instant::now();
        let first = here() % self.shards.len();
        let (before, from) = self.shards.split_at(first);
        from.iter().chain(before).find_map(|shard| {
            let mut list = shard.lock();
            let mut unfit = 0;
            for n in (0..list.len()).rev() {
                match list[n].take_listed(care, now) {
                    Taken::Lease(lease) => {
                        list.swap_remove(n);
                        return Some(lease);
                    }
                    Taken::Gone => drop(list.swap_remove(n)),
                    Taken::Unfit if unfit == LOOK => break,
                    Taken::Unfit => unfit += 1,
                }
            }
            None
        })
    }

    /// Closes one idle connection to make room; its permit goes to the first waiter once it is closed.
    fn evict(&self) {
        // Lists grow at the end: the front has been idle for longest, more or less.
        self.shards.iter().any(|shard| shard.lock().iter().any(|slot| slot.evict()));
    }

    fn sweep(&self) {
        let now = Instant::now();
        for shard in &self.shards {
            shard.lock().retain(|slot| slot.keep(now));
        }
    }
}

impl<B> Pool<B> {
    /// Enters a slot that became idle.
    pub(super) fn list(&self, slot: Arc<Slot<B>>) {
        self.shards[here() % self.shards.len()].lock().push(slot);
    }
}

async fn sweep<B: Send + 'static>(pool: Weak<Pool<B>>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        match pool.upgrade() {
            Some(pool) => pool.sweep(),
            None => return,
        }
    }
}

/// A number for this thread, counted from nought.
fn here() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static HERE: usize = NEXT.fetch_add(1, Ordering::Relaxed));
    HERE.with(|n| *n)
}
