//! A store behind a network.
//!
//! Every call is a message that travels by itself: it arrives late, twice, or never, also if the gateway that sent it has
//! crashed meanwhile. Its answer travels back, late or never.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, Counters, ErrorKind, Fence, Guarantees, Lease, Memory, SettleOutcome,
    Settlement, Store, StoreAdmin, StoreError, StoreFuture, SweepResult,
};
use ibid_testkit::model::ReferenceStore;
use parking_lot::Mutex;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep},
};

use crate::random::SeededRandom;

/// How long a gateway waits for an answer that does not come.
const CALL_TIMEOUT: Duration = Duration::from_millis(300);
/// The latest that the second copy of a message arrives.
const MAX_REPEAT_DELAY_MS: u64 = 5_000;

/// The store itself, with the replica that a failover makes the store.
#[derive(Debug)]
pub struct SimulatedStore {
    state: Mutex<SimulatedStoreState>,
}

#[derive(Debug)]
struct SimulatedStoreState {
    contents: ReferenceStore,
    replica: ReferenceStore,
    /// When the contents were last brought up to time.
    at: Instant,
    clock: StoreClock,
    /// New claims are refused.
    is_full: bool,
    next_fence: u64,
}

/// How the store's clock differs from that of the gateways.
#[derive(Debug, Clone, Copy)]
struct StoreClock {
    /// How far it goes in a second, in milliseconds.
    millis_per_second: u32,
    stands_still: bool,
}

impl SimulatedStore {
    /// Creates an empty store.
    pub fn new() -> Self {
        let (contents, replica) = Default::default();
        let clock = StoreClock { millis_per_second: 1000, stands_still: false };
        let (at, is_full, next_fence) = (Instant::now(), false, 1);
        Self { state: Mutex::new(SimulatedStoreState { contents, replica, at, clock, is_full, next_fence }) }
    }

    /// Makes the store refuse new claims, or accept them again.
    pub fn set_full(&self, is_full: bool) {
        self.state.lock().is_full = is_full;
    }

    /// Makes the clock go faster or slower: 1000 is as fast as that of the gateways.
    pub fn set_clock_rate(&self, millis_per_second: u32) {
        let mut state = self.state.lock();
        state.advance();
        state.clock.millis_per_second = millis_per_second;
    }

    /// Steps the clock forwards.
    pub fn step_clock(&self, by: Duration) {
        let mut state = self.state.lock();
        state.advance();
        state.contents.advance(by);
        state.replica.advance(by);
    }

    /// Sets the clock back: it stands still from now on, so everything lasts longer.
    pub fn stop_clock(&self) {
        let mut state = self.state.lock();
        state.advance();
        state.clock.stands_still = true;
    }

    /// The clock goes on. What was claimed meanwhile expires at once, as it does if a clock that was set back is corrected.
    pub fn correct_clock(&self, by: Duration) {
        let mut state = self.state.lock();
        state.advance();
        state.clock.stands_still = false;
        drop(state);
        self.step_clock(by);
    }

    /// Brings the replica up to date.
    pub fn replicate(&self) {
        let mut state = self.state.lock();
        state.advance();
        state.replica = state.contents.clone();
    }

    /// The replica becomes the store. What was written since it was last brought up to date is lost.
    pub fn fail_over(&self) {
        let mut state = self.state.lock();
        state.advance();
        state.contents = state.replica.clone();
    }

    /// Whether new claims are refused.
    pub(crate) fn is_full(&self) -> bool {
        self.state.lock().is_full
    }

    /// Reads and changes the contents in one step. The number is the next fence.
    pub(crate) fn transact<T>(&self, run: impl FnOnce(&mut ReferenceStore, &mut u64) -> T) -> T {
        let mut state = self.state.lock();
        state.advance();
        let SimulatedStoreState { contents, next_fence, .. } = &mut *state;
        run(contents, next_fence)
    }

    fn apply(&self, call: &StoreCall) -> StoreReply {
        let mut state = self.state.lock();
        state.advance();
        match call {
            StoreCall::Claim(request) => {
                let fence = Fence(state.next_fence);
                let before = state.is_full.then(|| state.contents.clone());
                let outcome = state.contents.claim(request, fence);
                if matches!(&outcome, ClaimOutcome::Granted(lease) if lease.fence == fence) {
                    if let Some(before) = before {
                        state.contents = before;
                        return StoreReply::Full;
                    }
                    state.next_fence += 1;
                }
                StoreReply::Claim(outcome)
            }
            StoreCall::Extend(lease, by) => StoreReply::Settle(state.contents.extend(lease, *by)),
            StoreCall::Settle(lease, end) => StoreReply::Settle(state.contents.settle(lease, end)),
            StoreCall::Get(at) => StoreReply::Get(state.contents.get(at)),
        }
    }
}

impl Default for SimulatedStore {
    fn default() -> Self {
        Self::new()
    }
}

impl SimulatedStoreState {
    fn advance(&mut self) {
        let now = Instant::now();
        let rate = if self.clock.stands_still { 0 } else { self.clock.millis_per_second };
        let passed = (now - self.at) * rate / 1000;
        self.at = now;
        self.contents.advance(passed);
        self.replica.advance(passed);
    }
}

#[derive(Debug, Clone)]
enum StoreCall {
    Claim(Arc<ClaimRequest>),
    Extend(Lease, Duration),
    Settle(Lease, Settlement),
    Get(Address),
}

#[derive(Debug)]
enum StoreReply {
    Claim(ClaimOutcome),
    Settle(SettleOutcome),
    Get(Option<ClaimOutcome>),
    Full,
}

/// What can happen to a message, each so often in a thousand times.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinkFaults {
    /// The call is lost.
    pub lost_calls: u64,
    /// The answer is lost.
    pub lost_answers: u64,
    /// The call arrives twice, the second time later.
    pub repeated_calls: u64,
}

/// The way of one gateway to the store.
#[derive(Debug)]
pub struct SimulatedLink {
    store: Arc<SimulatedStore>,
    random: Arc<SeededRandom>,
    faults: Mutex<LinkFaults>,
    is_cut: AtomicBool,
    /// Whether the gateway has crashed: it sends nothing more, and hears nothing.
    is_dead: AtomicBool,
    /// For what the simulation does not use.
    unused: Memory,
}

impl SimulatedLink {
    /// Creates a link that works.
    pub fn new(store: &Arc<SimulatedStore>, random: &Arc<SeededRandom>) -> Self {
        Self {
            store: Arc::clone(store),
            random: Arc::clone(random),
            faults: Mutex::default(),
            is_cut: AtomicBool::new(false),
            is_dead: AtomicBool::new(false),
            unused: Memory::default(),
        }
    }

    /// Sets what happens to messages from now on.
    pub fn set_faults(&self, faults: LinkFaults) {
        *self.faults.lock() = faults;
    }

    /// Cuts the link, or mends it.
    pub fn set_cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, SeqCst);
    }

    /// The gateway crashes.
    pub fn kill(&self) {
        self.is_dead.store(true, SeqCst);
    }

    /// Never returns if the gateway has crashed.
    async fn wait_if_dead(&self) {
        if self.is_dead.load(SeqCst) {
            std::future::pending::<()>().await;
        }
    }

    async fn call(&self, call: StoreCall) -> Result<StoreReply, StoreError> {
        let fail = |kind, why: &'static str| Err(StoreError::new(kind, "simulated", why));
        self.wait_if_dead().await;
        let faults = *self.faults.lock();
        if self.is_cut.load(SeqCst) {
            sleep(self.random.millis(5)).await;
            return fail(ErrorKind::NotApplied, "cannot be reached");
        }
        if self.random.happens(faults.lost_calls) {
            sleep(CALL_TIMEOUT).await;
            return fail(ErrorKind::Ambiguous, "did not answer");
        }
        let (answered, answer) = oneshot::channel();
        self.send(call.clone(), self.random.millis(20), Some(answered));
        if self.random.happens(faults.repeated_calls) {
            self.send(call, self.random.millis(MAX_REPEAT_DELAY_MS), None);
        }
        let is_lost = self.random.happens(faults.lost_answers);
        let reply = tokio::time::timeout(CALL_TIMEOUT, answer).await;
        self.wait_if_dead().await;
        match reply {
            Ok(Ok(_)) if is_lost => {
                sleep(CALL_TIMEOUT).await;
                fail(ErrorKind::Ambiguous, "did not answer")
            }
            Ok(Ok(reply)) => {
                sleep(self.random.millis(20)).await;
                match reply {
                    StoreReply::Full => fail(ErrorKind::Rejected, "is full"),
                    reply => Ok(reply),
                }
            }
            _ => fail(ErrorKind::Ambiguous, "did not answer"),
        }
    }

    /// Sends a message, which arrives after `delay` whatever becomes of its sender.
    fn send(&self, call: StoreCall, delay: Duration, answered: Option<oneshot::Sender<StoreReply>>) {
        let store = Arc::clone(&self.store);
        tokio::spawn(async move {
            sleep(delay).await;
            let reply = store.apply(&call);
            answered.map(|answered| answered.send(reply));
        });
    }

    async fn settle_call(&self, call: StoreCall) -> Result<SettleOutcome, StoreError> {
        match self.call(call).await? {
            StoreReply::Settle(outcome) => Ok(outcome),
            other => unreachable!("{other:?}"),
        }
    }
}

impl Store for SimulatedLink {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        StoreFuture::boxed(async move {
            match self.call(StoreCall::Claim(Arc::clone(ask))).await? {
                StoreReply::Claim(outcome) => Ok(outcome),
                other => unreachable!("{other:?}"),
            }
        })
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.settle_call(StoreCall::Extend(lease.clone(), hold)))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.settle_call(StoreCall::Settle(lease.clone(), end.clone())))
    }

    fn wait<'a>(&'a self, _: &'a Address, _: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(async move {
            sleep(limit.min(self.random.millis(50))).await;
            Ok(())
        })
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::boxed(async move {
            match self.call(StoreCall::Get(*at)).await? {
                StoreReply::Get(found) => Ok(found),
                other => unreachable!("{other:?}"),
            }
        })
    }

    fn sweep(&self, _: u32) -> StoreFuture<'_, SweepResult> {
        self.unused.sweep(0)
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self.unused.admin()
    }

    fn counters(&self) -> Option<&dyn Counters> {
        None
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees { store: "simulated", durable: true, shared: true, warnings: Vec::new() }
    }
}
