//! Two gateways on the same two stores, links that fail at random, clients that retry: the real engine on simulated
//! time. One seed, one history; a seed that fails is printed and replays exactly.
//!
//! Invariants: strict never starts an operation twice, and all answers that were given for one key are equal. Loose
//! starts twice only if one of the starts was solo, and another gateway could not reach the first store when it
//! claimed; or if the first store lost everything.

use std::{collections::HashMap, sync::atomic::AtomicU64};

use bytes::Bytes;
use ibid::{
    Decision, Engine, Operation, Policy, Refusal, RefusalReason, RunOutcome,
    engine::{CompletedAnswer, StoredAs, UnknownCause},
    policy::{OnConcurrent, OnUnknown},
    store::{
        Address, ClaimRequest, ClaimToken, EntryCounts, EntryFilter, EntryPage, ErrorKind, Fence, Fingerprint,
        Guarantees, Lease, ListCursor, RecordSummary, SettleOutcome, Settlement, StoreAdmin, StoreError, StoreFuture,
        SweepResult, Tags,
    },
};
use tokio::time::{Instant, sleep};

use super::{common::LosableStore, *};

const KEY_COUNT: u8 = 3;
const CLIENT_COUNT: u8 = 3;
const LEASE: Duration = Duration::from_secs(2);
const FAULT_DURATION: Duration = Duration::from_secs(20);

/// xorshift64*, shared by all parts of one history.
#[derive(Debug)]
struct SharedRandom(AtomicU64);

impl SharedRandom {
    fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)))
    }

    fn below(&self, sides: u64) -> u64 {
        use std::sync::atomic::Ordering::Relaxed;
        let mut state = self.0.load(Relaxed);
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        self.0.store(state, Relaxed);
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % sides
    }

    fn token(&self) -> ClaimToken {
        let mut token = [0; 16];
        token.iter_mut().for_each(|byte| *byte = self.below(256) as u8);
        ClaimToken(token)
    }

    fn millis(&self, at_most: u64) -> Duration {
        Duration::from_millis(self.below(at_most + 1))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SimulatedFault {
    Healthy,
    /// Calls are refused before they are sent.
    Refuses,
    /// Calls vanish, and nobody knows.
    LosesCalls,
    /// Calls arrive, answers do not.
    LosesAnswers,
    /// Any of these, call by call; and slow.
    Random,
}

/// A gateway's link to a store.
#[derive(Debug)]
struct SimulatedLink {
    to: Arc<dyn Store>,
    random: Arc<SharedRandom>,
    fault: Mutex<SimulatedFault>,
}

impl SimulatedLink {
    async fn around<'a, T: Unpin>(&'a self, make: impl FnOnce() -> StoreFuture<'a, T>) -> Result<T, StoreError> {
        let weather = match *self.fault.lock() {
            SimulatedFault::Random => [
                SimulatedFault::Healthy,
                SimulatedFault::Healthy,
                SimulatedFault::Refuses,
                SimulatedFault::LosesCalls,
                SimulatedFault::LosesAnswers,
            ][self.random.below(5) as usize],
            weather => weather,
        };
        let slow = if *self.fault.lock() == SimulatedFault::Random { 1500 } else { 5 };
        let failed = |kind, why: &'static str| Err(StoreError::new(kind, "simulated", why));
        if weather == SimulatedFault::Refuses {
            return failed(ErrorKind::NotApplied, "no connection");
        }
        sleep(self.random.millis(slow)).await;
        if weather == SimulatedFault::LosesCalls {
            sleep(Duration::from_millis(500)).await;
            return failed(ErrorKind::Ambiguous, "no answer, and it never came");
        }
        let answered = make().await;
        sleep(self.random.millis(slow)).await;
        if weather == SimulatedFault::LosesAnswers {
            sleep(Duration::from_millis(500)).await;
            return failed(ErrorKind::Ambiguous, "no answer, though it came");
        }
        answered
    }
}

impl Store for SimulatedLink {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        StoreFuture::boxed(self.around(move || self.to.claim(ask)))
    }
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.around(move || self.to.extend(lease, hold)))
    }
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.around(move || self.to.settle(lease, end)))
    }
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(self.around(move || self.to.wait(at, seen, limit)))
    }
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::boxed(self.around(move || self.to.get(at)))
    }
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        StoreFuture::boxed(self.around(move || self.to.sweep(at_most)))
    }
    fn admin(&self) -> &dyn StoreAdmin {
        self
    }
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        self.to.counters()
    }
    fn guarantees(&self) -> Guarantees {
        self.to.guarantees()
    }
}

impl StoreAdmin for SimulatedLink {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        StoreFuture::boxed(self.around(move || self.to.admin().list(filter, from, at_most)))
    }
    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.around(move || self.to.admin().resolve(at, seen, end)))
    }
    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.around(move || self.to.admin().forget(at, seen)))
    }
    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.around(move || self.to.admin().replace_record(at, seen, record)))
    }
    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        StoreFuture::boxed(self.around(move || self.to.admin().counts()))
    }
}

/// One run of the operation.
#[derive(Debug, Clone)]
struct OperationStart {
    gateway: usize,
    front_only: bool,
    at: Instant,
}

#[derive(Debug, Default)]
struct SimulationLog {
    starts: Mutex<HashMap<u8, Vec<OperationStart>>>,
    /// Every remembered answer that a client was given.
    answers: Mutex<HashMap<u8, Vec<Bytes>>>,
    /// When each gateway could not reach the first store while it claimed.
    fallback_times: Mutex<[Vec<Instant>; 2]>,
    lost_claims: AtomicU64,
    front_flushed: Mutex<bool>,
}

struct SimulationObserver(usize, Arc<SimulationLog>);

impl Observer for SimulationObserver {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        match notice {
            EngineEvent::Fallback("claim", ..) => self.1.fallback_times.lock()[self.0].push(Instant::now()),
            EngineEvent::ClaimLost(_) => drop(self.1.lost_claims.fetch_add(1, std::sync::atomic::Ordering::Relaxed)),
            _ => {}
        }
    }
}

struct SimulatedOperation {
    key: u8,
    gateway: usize,
    log: Arc<SimulationLog>,
    random: Arc<SharedRandom>,
}

impl ibid::Claimant for SimulatedOperation {}

impl Operation for SimulatedOperation {
    type Answer = Bytes;

    async fn run(&mut self, lease: Option<&Lease>) -> RunOutcome<Bytes> {
        let fate = self.random.below(10);
        if fate == 0 {
            return RunOutcome::NotStarted(Refusal::new(RefusalReason::UpstreamUnreachable, "nobody there"));
        }
        let lease = lease.expect("nothing runs without protection");
        let start = OperationStart { gateway: self.gateway, front_only: lease.front_only, at: Instant::now() };
        let nth = {
            let mut starts = self.log.starts.lock();
            let starts = starts.entry(self.key).or_default();
            starts.push(start);
            starts.len()
        };
        sleep(self.random.millis(5000)).await;
        let record = Bytes::from(format!("key {}, run {nth}", self.key));
        if fate == 1 {
            return RunOutcome::Park(record, UnknownCause::AppSaidSo);
        }
        RunOutcome::Complete(
            record.clone(),
            CompletedAnswer { failed: false, record, summary: RecordSummary::default() },
        )
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct SimulationResult {
    starts: usize,
    front_only: usize,
    double_starts: usize,
    lost_claims: u64,
    answers: usize,
}

/// What is simulated.
#[derive(Debug, Clone, Copy)]
struct SimulationSetup {
    mode: TieredMode,
    /// The first store may lose everything.
    front_may_flush: bool,
    /// Every gateway has stores of its own: the red variant, which must be found out.
    separate_stores: bool,
}

fn simulate(setup: SimulationSetup, seed: u64) -> Result<SimulationResult, String> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    runtime.block_on(history(setup, seed))
}

async fn history(setup: SimulationSetup, seed: u64) -> Result<SimulationResult, String> {
    let dice = SharedRandom::new(seed);
    let seen = Arc::new(SimulationLog::default());
    let stores = || (Arc::new(LosableStore::default()), Arc::new(Memory::default()) as Arc<dyn Store>);
    let shared = stores();
    let mut ways = Vec::new();
    let mut engines = Vec::new();
    for gateway in 0..2 {
        let (first, last) = if setup.separate_stores { stores() } else { shared.clone() };
        let way = |to: Arc<dyn Store>| {
            Arc::new(SimulatedLink { to, random: dice.clone(), fault: Mutex::new(SimulatedFault::Healthy) })
        };
        let (first, last) = (way(first), way(last));
        let watch = Arc::new(SimulationObserver(gateway, seen.clone()));
        let store = TieredStore::new(first.clone(), last.clone(), setup.mode, watch.clone(), None);
        engines.push(Engine::with_observer(Arc::new(store), watch, None));
        ways.extend([first, last]);
    }
    let chaos = async {
        let until = Instant::now() + FAULT_DURATION;
        while Instant::now() < until {
            sleep(dice.millis(2000)).await;
            let weather = [
                SimulatedFault::Healthy,
                SimulatedFault::Healthy,
                SimulatedFault::Refuses,
                SimulatedFault::LosesCalls,
                SimulatedFault::LosesAnswers,
                SimulatedFault::Random,
            ];
            *ways[dice.below(4) as usize].fault.lock() = weather[dice.below(6) as usize];
            if setup.front_may_flush && dice.below(12) == 0 {
                *seen.front_flushed.lock() = true;
                shared.0.lose_everything();
            }
        }
        ways.iter().for_each(|way| *way.fault.lock() = SimulatedFault::Healthy);
    };
    let clients =
        (0..KEY_COUNT * CLIENT_COUNT).map(|nth| client(nth % KEY_COUNT, engines.clone(), seen.clone(), dice.clone()));
    futures_util::future::join(chaos, futures_util::future::join_all(clients)).await;
    // All is well again: what waits for the stores gets there, and leases end.
    for engine in &engines {
        if tokio::time::timeout(Duration::from_secs(120), engine.settle_queue().wait_until_empty()).await.is_err() {
            return Err(format!("{} ends still wait for the stores", engine.settle_queue().pending()));
        }
    }
    sleep(LEASE * 20).await;
    for key in 0..KEY_COUNT {
        check_agreement(key, &engines, setup).await?;
    }
    check_invariants(setup, &seen)
}

/// A client that retries until it is answered for good, through whichever gateway.
async fn client(key: u8, engines: Vec<Engine>, seen: Arc<SimulationLog>, dice: Arc<SharedRandom>) {
    let mut policy = Policy::ietf();
    policy.lease = LEASE;
    policy.wait_timeout = Duration::from_secs(3);
    policy.on_unknown = OnUnknown::Hold;
    policy.on_concurrent = if dice.below(2) == 0 { OnConcurrent::Wait } else { OnConcurrent::Reject };
    let policy = policy.checked().unwrap();
    for _ in 0..12 {
        sleep(dice.millis(2500)).await;
        let gateway = dice.below(2) as usize;
        let ask = ClaimRequest { token: dice.token(), ..claim_request(key) };
        let operation = SimulatedOperation { key, gateway, log: seen.clone(), random: dice.clone() };
        let answer = match engines[gateway].execute(policy.terms(), ask, operation).await {
            Decision::Replay(finished, _) => Some(finished.record),
            Decision::Ran(
                record,
                StoredAs::Recorded | StoredAs::Unprotected | StoredAs::FrontOnly | StoredAs::Pending,
            ) => Some(record),
            _ => None,
        };
        if let Some(answer) = answer {
            seen.answers.lock().entry(key).or_default().push(answer);
        }
    }
}

fn claim_request(key: u8) -> ClaimRequest {
    ClaimRequest {
        address: Address([key + 1; 32]),
        token: ClaimToken([0; 16]),
        fingerprint: Fingerprint::NONE,
        tags: Tags::default(),
        label: Bytes::new(),
        lease: LEASE,
        ttl: Duration::from_secs(24 * 60 * 60),
        take_over: None,
    }
}

/// After all has healed, both gateways say the same of a key, and it is not stuck.
async fn check_agreement(key: u8, engines: &[Engine], setup: SimulationSetup) -> Result<(), String> {
    let mut found = Vec::new();
    for engine in engines {
        let claim = engine.store().get(&claim_request(key).address).await.map_err(|error| error.to_string())?;
        found.push(match claim {
            None => "free".to_owned(),
            Some(ClaimOutcome::Completed(finished)) => format!("{:?}", finished.record),
            Some(ClaimOutcome::OutcomeUnknown(_)) => "unknown".to_owned(),
            Some(other) => return Err(format!("key {key}: long after everything healed: {other:?}")),
        });
    }
    if found[0] != found[1] && !setup.separate_stores {
        return Err(format!("key {key}: the gateways disagree: {found:?}"));
    }
    Ok(())
}

fn check_invariants(setup: SimulationSetup, seen: &SimulationLog) -> Result<SimulationResult, String> {
    let mut outcome = SimulationResult {
        lost_claims: seen.lost_claims.load(std::sync::atomic::Ordering::Relaxed),
        ..SimulationResult::default()
    };
    let starts = seen.starts.lock();
    for (key, starts) in &*starts {
        outcome.starts += starts.len();
        outcome.front_only += starts.iter().filter(|start| start.front_only).count();
        if starts.len() > 1 {
            outcome.double_starts += 1;
            let is_open = setup.mode == TieredMode::Loose
                && (*seen.front_flushed.lock() || is_allowed_double_start(starts, seen));
            if !is_open {
                return Err(format!("key {key} was started {} times: {starts:?}", starts.len()));
            }
        }
    }
    for (key, answers) in &*seen.answers.lock() {
        outcome.answers += answers.len();
        let is_single = starts.get(key).is_none_or(|starts| starts.len() == 1);
        if is_single && answers.iter().any(|answer| *answer != answers[0]) {
            return Err(format!("key {key} was answered differently: {answers:?}"));
        }
    }
    Ok(outcome)
}

/// One saw only the first store, and another only the last.
fn is_allowed_double_start(starts: &[OperationStart], seen: &SimulationLog) -> bool {
    let fell_back = seen.fallback_times.lock();
    let blind = |start: &OperationStart| {
        let since = start.at.checked_sub(Duration::from_secs(10)).unwrap_or(start.at);
        fell_back[start.gateway].iter().any(|at| (since..=start.at).contains(at))
    };
    starts.iter().any(|start| start.front_only) && starts.iter().any(|start| !start.front_only && blind(start))
}

/// `IBID_SIM_TIMES` in the environment makes it so many times as many seeds.
fn simulate_many(setup: SimulationSetup, seeds: u64) -> SimulationResult {
    let times = std::env::var("IBID_SIM_TIMES").map_or(1, |times| times.parse().expect("IBID_SIM_TIMES is a number"));
    let mut total = SimulationResult::default();
    for seed in 0..seeds * times {
        match simulate(setup, seed) {
            Ok(outcome) => {
                total.starts += outcome.starts;
                total.front_only += outcome.front_only;
                total.double_starts += outcome.double_starts;
                total.lost_claims += outcome.lost_claims;
                total.answers += outcome.answers;
            }
            Err(why) => panic!("{setup:?}, seed {seed}: {why}"),
        }
    }
    println!("{setup:?}: {total:?}");
    total
}

#[test]
fn strict_never_starts_twice() {
    for flushes in [false, true] {
        let total = simulate_many(
            SimulationSetup { mode: TieredMode::Strict, front_may_flush: flushes, separate_stores: false },
            400,
        );
        assert_eq!((total.double_starts, total.front_only), (0, 0));
        assert!(total.starts > 1000 && total.answers > 10_000, "too little happened: {total:?}");
    }
}

#[test]
fn loose_starts_twice_only_through_an_open_window() {
    let total =
        simulate_many(SimulationSetup { mode: TieredMode::Loose, front_may_flush: false, separate_stores: false }, 600);
    assert!(total.front_only > 20, "too little ran solo: {total:?}");
    assert!(total.double_starts > 0, "the window never opened: {total:?}");
    assert!(total.lost_claims > 0, "and nobody counted it: {total:?}");
    let total =
        simulate_many(SimulationSetup { mode: TieredMode::Loose, front_may_flush: true, separate_stores: false }, 200);
    assert!(total.front_only > 10, "too little ran solo: {total:?}");
}

#[test]
fn gateways_on_stores_of_their_own_are_found_out() {
    let apart = SimulationSetup { mode: TieredMode::Strict, front_may_flush: false, separate_stores: true };
    assert!((0..20).any(|seed| simulate(apart, seed).is_err()), "the simulation cannot see a double start");
}

#[test]
fn a_seed_replays_exactly() {
    let setup = SimulationSetup { mode: TieredMode::Loose, front_may_flush: true, separate_stores: false };
    for seed in 0..5 {
        assert_eq!(format!("{:?}", simulate(setup, seed)), format!("{:?}", simulate(setup, seed)));
    }
}
