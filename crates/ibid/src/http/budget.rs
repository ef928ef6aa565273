//! Bounds the memory of all buffered bodies, and the share of each client.
//!
//! Memory is reserved as bytes arrive, never by a declared length. A connection may use an eighth of the budget, and a
//! client address a quarter (a trusted proxy represents many clients, so only its connections are bounded); a single
//! body may always use what is free. When the budget is exhausted, the slowest transfers are evicted first: a request
//! whose body is still arriving is refused, and a response that its client does not read is aborted. A transfer that
//! has just started, or is faster than [`SAFE_BYTES_PER_SECOND`], is not evicted for a new one. Responses of operations
//! that ran are counted, never refused.

use std::{
    cmp::Reverse,
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::context::{PeerConnection, RequestSender, ResponseAbort};
use crate::scope::TrustedProxies;

/// The minimum size of a transfer that waits for its client, in bytes: about what its task needs.
const MIN_TRANSFER_BYTES: u64 = 4 << 10;
/// The minimum age of a transfer that is evicted.
const EVICTION_GRACE: Duration = Duration::from_secs(1);
/// The minimum age if the evicted client is heavy and the memory is for a light one. Heavy clients must not refill the
/// memory at once.
const HEAVY_EVICTION_GRACE: Duration = Duration::from_millis(100);
/// Transfers above this rate are evicted only for faster ones.
const SAFE_BYTES_PER_SECOND: u64 = 64 << 10;
/// The time over which the rate of a transfer is measured.
const RATE_WINDOW: Duration = Duration::from_secs(2);
/// How long a replay waits for memory.
const MAX_RESPONSE_WAIT: Duration = Duration::from_secs(5);
/// The first delay between two attempts to reserve memory for a replay.
const INITIAL_BACKOFF: Duration = Duration::from_millis(10);
const MAX_BACKOFF: Duration = Duration::from_millis(320);

/// The memory budget. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct MemoryBudget(pub(super) Arc<MemoryBudgetState>);

#[derive(Debug)]
pub(super) struct MemoryBudgetState {
    pub(super) limit: u64,
    used: AtomicU64,
    trusted: TrustedProxies,
    /// The transfers that can be evicted.
    transfers: Mutex<TransferTable>,
    /// The accounts of client addresses. Dead entries are removed occasionally.
    addresses: Mutex<HashMap<IpAddr, Weak<MemoryAccount>>>,
    /// Responses to clients without a known connection wait here, one after the other.
    wait_queue: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct TransferTable {
    next_id: u64,
    by_id: HashMap<u64, Arc<Transfer>>,
}

/// The bytes used by one connection or client address.
#[derive(Debug, Default)]
pub(super) struct MemoryAccount {
    used: AtomicU64,
    /// The connection's responses wait here for memory, one after the other.
    wait_queue: tokio::sync::Mutex<()>,
}

/// The client that memory is reserved for.
#[derive(Debug, Clone, Default)]
pub(crate) struct BudgetClient {
    address: Option<IpAddr>,
    connection: Option<PeerConnection>,
    abort: Option<ResponseAbort>,
}

/// A reserved part of the memory for buffered bodies, released on drop. See [`Ibid::reserve`](super::Ibid::reserve).
#[derive(Debug)]
pub struct MemoryReservation {
    budget: Arc<MemoryBudgetState>,
    bytes: u64,
}

/// Memory reserved for one transfer of a client, a request or a response body. Released on drop.
#[derive(Debug)]
pub(crate) struct TransferReservation(Arc<Transfer>);

#[derive(Debug)]
struct Transfer {
    budget: Arc<MemoryBudgetState>,
    id: u64,
    connection: Option<Arc<MemoryAccount>>,
    address: Option<Arc<MemoryAccount>>,
    is_response: bool,
    abort: Option<ResponseAbort>,
    state: Mutex<TransferState>,
}

#[derive(Debug)]
struct TransferState {
    held_bytes: u64,
    evicted: bool,
    waker: Option<Waker>,
    began_at: Instant,
    /// The start of the current window of [`RATE_WINDOW`]; the next two fields count its bytes and those of the window
    /// before.
    window_start: Instant,
    window_bytes: u64,
    previous_window_bytes: u64,
}

/// The eviction order: the slowest first, by the binary logarithm of the bytes per second, and of equally slow
/// transfers the largest.
type EvictionRank = (u32, Reverse<u64>);

/// The budget is exhausted, or the transfer was evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BudgetExhausted;

impl MemoryBudget {
    pub(crate) fn new(limit: u64, trusted: TrustedProxies) -> Self {
        let (used, transfers, addresses) = (AtomicU64::new(0), Mutex::default(), Mutex::default());
        let wait_queue = tokio::sync::Mutex::default();
        Self(Arc::new(MemoryBudgetState { limit, used, trusted, transfers, addresses, wait_queue }))
    }

    /// Reserves memory that belongs to no client.
    pub(crate) fn reserve(&self, bytes: u64) -> Option<MemoryReservation> {
        self.0.try_take(bytes).then(|| MemoryReservation { budget: self.0.clone(), bytes })
    }

    /// A reservation that can count bytes later.
    pub(crate) fn reserve_nothing(&self) -> MemoryReservation {
        MemoryReservation { budget: self.0.clone(), bytes: 0 }
    }

    /// Starts a request body.
    pub(crate) fn begin_receive(&self, client: &BudgetClient) -> TransferReservation {
        self.begin_transfer(client, false)
    }

    /// Starts a response body.
    pub(crate) fn send(&self, client: &BudgetClient) -> TransferReservation {
        self.begin_transfer(client, true)
    }

    fn begin_transfer(&self, client: &BudgetClient, is_response: bool) -> TransferReservation {
        let bounded = client.address.filter(|address| !self.0.trusted.trusts(Some(*address)));
        let address = bounded.map(|address| self.0.account(address));
        let connection = client.connection.as_ref().map(|connection| connection.0.clone());
        let mut transfers = self.0.transfers.lock();
        transfers.next_id += 1;
        let (budget, id, state) = (self.0.clone(), transfers.next_id, Mutex::new(TransferState::new(Instant::now())));
        let abort = client.abort.clone().filter(|_| is_response);
        let transfer = Arc::new(Transfer { budget, id, connection, address, is_response, abort, state });
        transfers.by_id.insert(id, transfer.clone());
        TransferReservation(transfer)
    }

    /// Reserves memory for a response that can still be refused. Waits up to [`MAX_RESPONSE_WAIT`]; only one response
    /// per connection tries at a time.
    pub(crate) async fn answer(
        &self, client: &BudgetClient, bytes: u64,
    ) -> Result<TransferReservation, BudgetExhausted> {
        let deadline = Instant::now() + MAX_RESPONSE_WAIT;
        let line = client.connection.as_ref().map_or(&self.0.wait_queue, |connection| &connection.0.wait_queue);
        let Ok(_turn) = timeout_at(deadline, line.lock()).await else { return Err(BudgetExhausted) };
        let mut pause = INITIAL_BACKOFF;
        loop {
            let reservation = self.send(client);
            if reservation.grow_to(bytes).is_ok() {
                return Ok(reservation);
            }
            drop(reservation);
            let now = Instant::now();
            if now >= deadline {
                return Err(BudgetExhausted);
            }
            sleep_until(deadline.min(now + pause)).await;
            pause = (pause * 2).min(MAX_BACKOFF);
        }
    }
}

impl MemoryBudgetState {
    /// Returns whether enough memory was free.
    fn try_take(&self, bytes: u64) -> bool {
        if self.used.fetch_add(bytes, Relaxed) + bytes > self.limit {
            self.used.fetch_sub(bytes, Relaxed);
            return false;
        }
        true
    }

    /// The account of a client address. An IPv6 client is identified by its /64.
    fn account(&self, address: IpAddr) -> Arc<MemoryAccount> {
        let address = match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
            v4 => v4,
        };
        let mut addresses = self.addresses.lock();
        if let Some(account) = addresses.get(&address).and_then(Weak::upgrade) {
            return account;
        }
        if addresses.len() == addresses.capacity() {
            addresses.retain(|_, account| account.strong_count() > 0);
        }
        let account = Arc::new(MemoryAccount::default());
        addresses.insert(address, Arc::downgrade(&account));
        account
    }
}

impl MemoryAccount {
    /// Reserves `bytes` if they fit under `bound`. A transfer that is the account's only one (`own` is its size) may
    /// exceed the bound.
    fn try_take(&self, bytes: u64, own: u64, bound: u64) -> bool {
        let before = self.used.fetch_add(bytes, Relaxed);
        if before + bytes > bound && before > own {
            self.used.fetch_sub(bytes, Relaxed);
            return false;
        }
        true
    }
}

impl BudgetClient {
    pub(super) fn new(sender: &RequestSender) -> Self {
        Self { address: sender.peer, connection: sender.connection.clone(), abort: sender.abort.clone() }
    }
}

impl MemoryReservation {
    /// Reserves more memory. Returns `false` and changes nothing if too little is free.
    #[must_use]
    pub fn grow(&mut self, bytes: u64) -> bool {
        let has_room = self.budget.try_take(bytes);
        self.bytes += if has_room { bytes } else { 0 };
        has_room
    }

    /// Starts a response that cannot be refused.
    pub(crate) fn send(&self, client: &BudgetClient) -> TransferReservation {
        MemoryBudget(self.budget.clone()).send(client)
    }

    /// Counts bytes that cannot be refused.
    pub(crate) fn count(&mut self, bytes: u64) {
        self.budget.used.fetch_add(bytes, Relaxed);
        self.bytes += bytes;
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Relaxed);
    }
}

impl TransferReservation {
    /// Grows the reservation to `bytes` in total. Evicts slower transfers if needed.
    pub(crate) fn grow_to(&self, bytes: u64) -> Result<(), BudgetExhausted> {
        let bytes = bytes.max(MIN_TRANSFER_BYTES);
        // Another transfer may take the freed memory: three attempts.
        for _ in 0..3 {
            match self.0.grow_to(bytes) {
                Ok(()) => return Ok(()),
                Err(None) => return Err(BudgetExhausted),
                Err(Some(at_bound)) => self.0.make_room(bytes, at_bound)?,
            }
        }
        Err(BudgetExhausted)
    }

    /// Counts bytes that cannot be refused.
    pub(crate) fn count(&self, bytes: u64) {
        self.0.count(bytes);
    }

    /// Releases memory of bytes that were sent to the client.
    pub(crate) fn release_sent(&self, bytes: u64) {
        self.record_progress(bytes);
        let mut state = self.0.state.lock();
        let bytes = bytes.min(state.held_bytes);
        self.0.release(&mut state, bytes);
    }

    pub(crate) fn record_progress(&self, bytes: u64) {
        self.0.state.lock().record_progress(bytes);
    }

    /// Completes the transfer: its memory stays reserved, and it can no longer be evicted.
    ///
    /// # Errors
    /// If it was already evicted.
    pub(crate) fn complete(&self) -> Result<(), BudgetExhausted> {
        self.0.unregister();
        if self.0.state.lock().evicted { Err(BudgetExhausted) } else { Ok(()) }
    }

    /// Ready once the transfer is evicted.
    pub(crate) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.state.lock();
        if state.evicted {
            return Poll::Ready(());
        }
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            state.waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Returns a counter for the task that queues response chunks.
    pub(crate) fn in_flight_counter(&self) -> InFlightCounter {
        InFlightCounter(self.0.clone())
    }
}

impl Drop for TransferReservation {
    fn drop(&mut self) {
        self.0.unregister();
        let mut state = self.0.state.lock();
        let held = state.held_bytes;
        self.0.release(&mut state, held);
        // Ignore later counts, because nothing would release them.
        state.evicted = true;
    }
}

/// Counts bytes in flight to a client; its [`TransferReservation`] releases them.
#[derive(Debug)]
pub(crate) struct InFlightCounter(Arc<Transfer>);

impl InFlightCounter {
    pub(crate) fn count(&self, bytes: u64) {
        self.0.count(bytes);
    }
}

impl Transfer {
    fn accounts(&self) -> impl Iterator<Item = &Arc<MemoryAccount>> {
        self.connection.iter().chain(&self.address)
    }

    /// Whether the client uses a large share.
    fn is_heavy(&self) -> bool {
        self.accounts().any(|account| account.used.load(Relaxed) > self.budget.limit / 64)
    }

    /// `Err(None)` if the transfer was evicted, otherwise the bound that was reached.
    fn grow_to(&self, bytes: u64) -> Result<(), Option<BudgetBound>> {
        let mut state = self.state.lock();
        if state.evicted {
            return Err(None);
        }
        let (own, more) = (state.held_bytes, bytes.saturating_sub(state.held_bytes));
        let fits = |account: &Option<Arc<MemoryAccount>>, bound: u64| {
            account.as_ref().is_none_or(|account| account.try_take(more, own, bound))
        };
        let give_back = |account: &Option<Arc<MemoryAccount>>| {
            if let Some(account) = account {
                account.used.fetch_sub(more, Relaxed);
            }
        };
        if !fits(&self.connection, self.budget.limit / 8) {
            return Err(Some(BudgetBound::Connection));
        }
        if !fits(&self.address, self.budget.limit / 4) {
            give_back(&self.connection);
            return Err(Some(BudgetBound::Address));
        }
        if !self.budget.try_take(more) {
            give_back(&self.connection);
            give_back(&self.address);
            return Err(Some(BudgetBound::Budget));
        }
        state.held_bytes += more;
        Ok(())
    }

    fn count(&self, bytes: u64) {
        let mut state = self.state.lock();
        if !state.evicted {
            self.budget.used.fetch_add(bytes, Relaxed);
            for account in self.accounts() {
                account.used.fetch_add(bytes, Relaxed);
            }
            state.held_bytes += bytes;
        }
    }

    fn release(&self, state: &mut TransferState, bytes: u64) {
        for account in self.accounts() {
            account.used.fetch_sub(bytes, Relaxed);
        }
        state.held_bytes -= bytes;
        self.budget.used.fetch_sub(bytes, Relaxed);
    }

    fn unregister(&self) {
        self.budget.transfers.lock().by_id.remove(&self.id);
    }

    /// Evicts transfers that are slower than this one, until `bytes` should fit.
    fn make_room(&self, bytes: u64, at_bound: BudgetBound) -> Result<(), BudgetExhausted> {
        let now = Instant::now();
        let is_same = |ours: &Option<Arc<MemoryAccount>>, theirs: &Option<Arc<MemoryAccount>>| {
            ours.as_ref().zip(theirs.as_ref()).is_some_and(|(ours, theirs)| Arc::ptr_eq(ours, theirs))
        };
        let newcomer = (log2_ceil(SAFE_BYTES_PER_SECOND), Reverse(u64::MAX));
        let own_rank = self.state.lock().rank(now, EVICTION_GRACE).unwrap_or(newcomer);
        let is_light = !self.is_heavy();
        if self.is_response && !is_light && at_bound == BudgetBound::Budget {
            // The response waits in its queue.
            return Err(BudgetExhausted);
        }
        let mut slower: Vec<(EvictionRank, Arc<Transfer>)> = {
            let transfers = self.budget.transfers.lock();
            let others = transfers.by_id.values().filter(|other| match at_bound {
                BudgetBound::Connection => is_same(&self.connection, &other.connection),
                BudgetBound::Address => is_same(&self.address, &other.address),
                BudgetBound::Budget => true,
            });
            let ranked = others.filter(|other| other.id != self.id).filter_map(|other| {
                let grace = if is_light && other.is_heavy() { HEAVY_EVICTION_GRACE } else { EVICTION_GRACE };
                let rank = other.state.lock().rank(now, grace)?;
                (rank < own_rank).then(|| (rank, other.clone()))
            });
            ranked.collect()
        };
        slower.sort_unstable_by_key(|(rank, _)| *rank);
        // Free some more than needed, because this search is expensive.
        let wanted = bytes.max(self.budget.limit / 64);
        let mut freed = 0;
        for (_, other) in slower {
            if freed >= wanted {
                break;
            }
            freed += other.evict();
        }
        if freed == 0 { Err(BudgetExhausted) } else { Ok(()) }
    }

    /// Frees the transfer's memory immediately and wakes the task that serves it.
    fn evict(&self) -> u64 {
        let mut state = self.state.lock();
        let held = state.held_bytes;
        self.release(&mut state, held);
        state.evicted = true;
        let waker = state.waker.take();
        drop(state);
        self.unregister();
        waker.into_iter().for_each(Waker::wake);
        self.abort.iter().for_each(ResponseAbort::cut);
        held
    }
}

/// The bound that was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BudgetBound {
    Connection,
    Address,
    Budget,
}

impl TransferState {
    fn new(began_at: Instant) -> Self {
        let (held_bytes, window_bytes, previous_window_bytes) = (0, 0, 0);
        let (evicted, waker, window_start) = (false, None, began_at);
        Self { held_bytes, evicted, waker, began_at, window_start, window_bytes, previous_window_bytes }
    }

    fn record_progress(&mut self, bytes: u64) {
        self.advance_window(Instant::now());
        self.window_bytes += bytes;
    }

    fn advance_window(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.window_start);
        if passed >= RATE_WINDOW {
            self.previous_window_bytes = if passed < RATE_WINDOW * 2 { self.window_bytes } else { 0 };
            self.window_bytes = 0;
            self.window_start = now;
        }
    }

    /// Returns `None` if the transfer cannot be evicted.
    fn rank(&mut self, now: Instant, grace: Duration) -> Option<EvictionRank> {
        if self.evicted || self.held_bytes == 0 || now.saturating_duration_since(self.began_at) < grace {
            return None;
        }
        self.advance_window(now);
        let span = (RATE_WINDOW + now.saturating_duration_since(self.window_start)).as_secs().max(1);
        let speed = log2_ceil((self.window_bytes + self.previous_window_bytes) / span);
        Some((speed, Reverse(self.held_bytes)))
    }
}

/// The number of significant bits; 0 for 0.
fn log2_ceil(number: u64) -> u32 {
    u64::BITS - number.leading_zeros()
}

#[cfg(test)]
mod tests;
