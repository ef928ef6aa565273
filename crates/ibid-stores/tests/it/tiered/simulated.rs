//! Two gateways on the same two stores, links that fail at random, clients that retry: the real engine on simulated
//! time. One seed, one history; a seed that fails is printed and replays exactly.
//!
//! Invariants: strict never starts an operation twice, and all answers that were given for one key are equal. Loose
//! starts twice only if one of the starts was solo, and another gateway could not reach the first store when it
//! claimed; or if the first store lost everything.

use std::{collections::HashMap, sync::atomic::AtomicU64};

use bytes::Bytes;
use ibid::{
    Complete, Ended, Engine, OnConcurrent, OnUnknown, Operation, ParkedBy, Policy, Reason, Refusal, Stored, Verdict,
    store::{
        Address, Ask, Counts, Cursor, End, ErrorKind, Fence, Filter, Fingerprint, Held, Lease, Operators, Outline,
        Page, Promise, StoreError, StoreFuture, Swept, Tags, Token,
    },
};
use tokio::time::{Instant, sleep};

use super::{two::Swapped, *};

const KEYS: u8 = 3;
const CLIENTS: u8 = 3;
const LEASE: Duration = Duration::from_secs(2);
const FAULTS_FOR: Duration = Duration::from_secs(20);

/// xorshift64*, shared by all parts of one history.
#[derive(Debug)]
struct Dice(AtomicU64);

impl Dice {
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

    fn token(&self) -> Token {
        let mut token = [0; 16];
        token.iter_mut().for_each(|byte| *byte = self.below(256) as u8);
        Token(token)
    }

    fn millis(&self, at_most: u64) -> Duration {
        Duration::from_millis(self.below(at_most + 1))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weather {
    Fair,
    /// Calls are refused before they are sent.
    Cut,
    /// Calls vanish, and nobody knows.
    Swallows,
    /// Calls arrive, answers do not.
    OneWay,
    /// Any of these, call by call; and slow.
    Storm,
}

/// A gateway's link to a store.
#[derive(Debug)]
struct Way {
    to: Arc<dyn Store>,
    dice: Arc<Dice>,
    weather: Mutex<Weather>,
}

impl Way {
    async fn around<'a, T: Unpin>(&'a self, make: impl FnOnce() -> StoreFuture<'a, T>) -> Result<T, StoreError> {
        let weather = match *self.weather.lock() {
            Weather::Storm => [Weather::Fair, Weather::Fair, Weather::Cut, Weather::Swallows, Weather::OneWay]
                [self.dice.below(5) as usize],
            weather => weather,
        };
        let slow = if *self.weather.lock() == Weather::Storm { 1500 } else { 5 };
        let failed = |kind, why: &'static str| Err(StoreError::new(kind, "simulated", why));
        if weather == Weather::Cut {
            return failed(ErrorKind::NotApplied, "no connection");
        }
        sleep(self.dice.millis(slow)).await;
        if weather == Weather::Swallows {
            sleep(Duration::from_millis(500)).await;
            return failed(ErrorKind::Ambiguous, "no answer, and it never came");
        }
        let answered = make().await;
        sleep(self.dice.millis(slow)).await;
        if weather == Weather::OneWay {
            sleep(Duration::from_millis(500)).await;
            return failed(ErrorKind::Ambiguous, "no answer, though it came");
        }
        answered
    }
}

impl Store for Way {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        StoreFuture::boxed(self.around(move || self.to.claim(ask)))
    }
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.around(move || self.to.extend(lease, hold)))
    }
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.around(move || self.to.settle(lease, end)))
    }
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(self.around(move || self.to.wait(at, seen, limit)))
    }
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        StoreFuture::boxed(self.around(move || self.to.get(at)))
    }
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        StoreFuture::boxed(self.around(move || self.to.sweep(at_most)))
    }
    fn operators(&self) -> &dyn Operators {
        self
    }
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        self.to.counters()
    }
    fn promise(&self) -> Promise {
        self.to.promise()
    }
}

impl Operators for Way {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        StoreFuture::boxed(self.around(move || self.to.operators().list(filter, from, at_most)))
    }
    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.around(move || self.to.operators().resolve(at, seen, end)))
    }
    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.around(move || self.to.operators().forget(at, seen)))
    }
    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.around(move || self.to.operators().replace(at, seen, record)))
    }
    fn counts(&self) -> StoreFuture<'_, Counts> {
        StoreFuture::boxed(self.around(move || self.to.operators().counts()))
    }
}

/// One run of the operation.
#[derive(Debug, Clone)]
struct Start {
    gateway: usize,
    solo: bool,
    at: Instant,
}

#[derive(Debug, Default)]
struct Seen {
    starts: Mutex<HashMap<u8, Vec<Start>>>,
    /// Every remembered answer that a client was given.
    answers: Mutex<HashMap<u8, Vec<Bytes>>>,
    /// When each gateway could not reach the first store while it claimed.
    fell_back: Mutex<[Vec<Instant>; 2]>,
    lost: AtomicU64,
    flushed: Mutex<bool>,
}

struct Watch(usize, Arc<Seen>);

impl Observer for Watch {
    fn noticed(&self, notice: &Notice<'_>) {
        match notice {
            Notice::Fallback { call: "claim", .. } => self.1.fell_back.lock()[self.0].push(Instant::now()),
            Notice::LostClaim(_) => drop(self.1.lost.fetch_add(1, std::sync::atomic::Ordering::Relaxed)),
            _ => {}
        }
    }
}

struct Counted {
    key: u8,
    gateway: usize,
    seen: Arc<Seen>,
    dice: Arc<Dice>,
}

impl Operation for Counted {
    type Answer = Bytes;

    async fn run(&mut self, lease: Option<&Lease>) -> Ended<Bytes> {
        let fate = self.dice.below(10);
        if fate == 0 {
            return Ended::NotStarted(Refusal::new(Reason::UpstreamUnreachable, "nobody there"));
        }
        let lease = lease.expect("nothing runs without protection");
        let start = Start { gateway: self.gateway, solo: lease.solo, at: Instant::now() };
        let nth = {
            let mut starts = self.seen.starts.lock();
            let starts = starts.entry(self.key).or_default();
            starts.push(start);
            starts.len()
        };
        sleep(self.dice.millis(5000)).await;
        let record = Bytes::from(format!("key {}, run {nth}", self.key));
        if fate == 1 {
            return Ended::Park(record, ParkedBy::Answer);
        }
        Ended::Complete(record.clone(), Complete { failed: false, record, outline: Outline::default() })
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct Outcome {
    starts: usize,
    solo: usize,
    twice: usize,
    lost: u64,
    answers: usize,
}

/// What is simulated.
#[derive(Debug, Clone, Copy)]
struct Setup {
    mode: Mode,
    /// The first store may lose everything.
    flushes: bool,
    /// Every gateway has stores of its own: the red variant, which must be found out.
    apart: bool,
}

fn simulate(setup: Setup, seed: u64) -> Result<Outcome, String> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    runtime.block_on(history(setup, seed))
}

async fn history(setup: Setup, seed: u64) -> Result<Outcome, String> {
    let dice = Dice::new(seed);
    let seen = Arc::new(Seen::default());
    let stores = || (Arc::new(Swapped::default()), Arc::new(Memory::default()) as Arc<dyn Store>);
    let shared = stores();
    let mut ways = Vec::new();
    let mut engines = Vec::new();
    for gateway in 0..2 {
        let (first, last) = if setup.apart { stores() } else { shared.clone() };
        let way = |to: Arc<dyn Store>| Arc::new(Way { to, dice: dice.clone(), weather: Mutex::new(Weather::Fair) });
        let (first, last) = (way(first), way(last));
        let watch = Arc::new(Watch(gateway, seen.clone()));
        let store = Tiered::new(first.clone(), last.clone(), setup.mode, watch.clone(), None);
        engines.push(Engine::with(Arc::new(store), watch, None));
        ways.extend([first, last]);
    }
    let chaos = async {
        let until = Instant::now() + FAULTS_FOR;
        while Instant::now() < until {
            sleep(dice.millis(2000)).await;
            let weather =
                [Weather::Fair, Weather::Fair, Weather::Cut, Weather::Swallows, Weather::OneWay, Weather::Storm];
            *ways[dice.below(4) as usize].weather.lock() = weather[dice.below(6) as usize];
            if setup.flushes && dice.below(12) == 0 {
                *seen.flushed.lock() = true;
                shared.0.lose_everything();
            }
        }
        ways.iter().for_each(|way| *way.weather.lock() = Weather::Fair);
    };
    let clients = (0..KEYS * CLIENTS).map(|nth| client(nth % KEYS, engines.clone(), seen.clone(), dice.clone()));
    futures_util::future::join(chaos, futures_util::future::join_all(clients)).await;
    // All is well again: what waits for the stores gets there, and leases end.
    for engine in &engines {
        if tokio::time::timeout(Duration::from_secs(120), engine.later().flushed()).await.is_err() {
            return Err(format!("{} ends still wait for the stores", engine.later().waiting()));
        }
    }
    sleep(LEASE * 20).await;
    for key in 0..KEYS {
        agree(key, &engines, setup).await?;
    }
    judge(setup, &seen)
}

/// A client that retries until it is answered for good, through whichever gateway.
async fn client(key: u8, engines: Vec<Engine>, seen: Arc<Seen>, dice: Arc<Dice>) {
    let mut policy = Policy::ietf();
    policy.lease = LEASE;
    policy.wait_timeout = Duration::from_secs(3);
    policy.on_unknown = OnUnknown::Hold;
    policy.on_concurrent = if dice.below(2) == 0 { OnConcurrent::Wait } else { OnConcurrent::Reject };
    let policy = policy.checked().unwrap();
    for _ in 0..12 {
        sleep(dice.millis(2500)).await;
        let gateway = dice.below(2) as usize;
        let ask = Ask { token: dice.token(), ..ask_for(key) };
        let operation = Counted { key, gateway, seen: seen.clone(), dice: dice.clone() };
        let answer = match engines[gateway].execute(&policy, ask, operation).await {
            Verdict::Replay(finished, _) => Some(finished.record),
            Verdict::Ran(record, Stored::Yes | Stored::Degraded | Stored::Solo | Stored::Pending) => Some(record),
            _ => None,
        };
        if let Some(answer) = answer {
            seen.answers.lock().entry(key).or_default().push(answer);
        }
    }
}

fn ask_for(key: u8) -> Ask {
    Ask {
        address: Address([key + 1; 32]),
        token: Token([0; 16]),
        fingerprint: Fingerprint::NONE,
        tags: Tags::default(),
        label: Bytes::new(),
        hold: LEASE,
        keep: Duration::from_secs(24 * 60 * 60),
        over: None,
    }
}

/// After all has healed, both gateways say the same of a key, and it is not stuck.
async fn agree(key: u8, engines: &[Engine], setup: Setup) -> Result<(), String> {
    let mut found = Vec::new();
    for engine in engines {
        let claim = engine.store().get(&ask_for(key).address).await.map_err(|error| error.to_string())?;
        found.push(match claim {
            None => "free".to_owned(),
            Some(Claim::Done(finished)) => format!("{:?}", finished.record),
            Some(Claim::Unknown(_)) => "unknown".to_owned(),
            Some(other) => return Err(format!("key {key}: long after everything healed: {other:?}")),
        });
    }
    if found[0] != found[1] && !setup.apart {
        return Err(format!("key {key}: the gateways disagree: {found:?}"));
    }
    Ok(())
}

fn judge(setup: Setup, seen: &Seen) -> Result<Outcome, String> {
    let mut outcome = Outcome { lost: seen.lost.load(std::sync::atomic::Ordering::Relaxed), ..Outcome::default() };
    let starts = seen.starts.lock();
    for (key, starts) in &*starts {
        outcome.starts += starts.len();
        outcome.solo += starts.iter().filter(|start| start.solo).count();
        if starts.len() > 1 {
            outcome.twice += 1;
            let is_open = setup.mode == Mode::Loose && (*seen.flushed.lock() || window(starts, seen));
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
fn window(starts: &[Start], seen: &Seen) -> bool {
    let fell_back = seen.fell_back.lock();
    let blind = |start: &Start| {
        let since = start.at.checked_sub(Duration::from_secs(10)).unwrap_or(start.at);
        fell_back[start.gateway].iter().any(|at| (since..=start.at).contains(at))
    };
    starts.iter().any(|start| start.solo) && starts.iter().any(|start| !start.solo && blind(start))
}

/// `IBID_SIM_TIMES` in the environment makes it so many times as many seeds.
fn many(setup: Setup, seeds: u64) -> Outcome {
    let times = std::env::var("IBID_SIM_TIMES").map_or(1, |times| times.parse().expect("IBID_SIM_TIMES is a number"));
    let mut total = Outcome::default();
    for seed in 0..seeds * times {
        match simulate(setup, seed) {
            Ok(outcome) => {
                total.starts += outcome.starts;
                total.solo += outcome.solo;
                total.twice += outcome.twice;
                total.lost += outcome.lost;
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
        let total = many(Setup { mode: Mode::Strict, flushes, apart: false }, 400);
        assert_eq!((total.twice, total.solo), (0, 0));
        assert!(total.starts > 1000 && total.answers > 10_000, "too little happened: {total:?}");
    }
}

#[test]
fn loose_starts_twice_only_through_an_open_window() {
    let total = many(Setup { mode: Mode::Loose, flushes: false, apart: false }, 600);
    assert!(total.solo > 20, "too little ran solo: {total:?}");
    assert!(total.twice > 0, "the window never opened: {total:?}");
    assert!(total.lost > 0, "and nobody counted it: {total:?}");
    let total = many(Setup { mode: Mode::Loose, flushes: true, apart: false }, 200);
    assert!(total.solo > 10, "too little ran solo: {total:?}");
}

#[test]
fn gateways_on_stores_of_their_own_are_found_out() {
    let apart = Setup { mode: Mode::Strict, flushes: false, apart: true };
    assert!((0..20).any(|seed| simulate(apart, seed).is_err()), "the simulation cannot see a double start");
}

#[test]
fn a_seed_replays_exactly() {
    let setup = Setup { mode: Mode::Loose, flushes: true, apart: false };
    for seed in 0..5 {
        assert_eq!(format!("{:?}", simulate(setup, seed)), format!("{:?}", simulate(setup, seed)));
    }
}
