//! Random histories, told to a store and to the [model](crate::model), which must answer alike.
//!
//! With a [paused clock](Clock::Paused) every duration is compared exactly; a store that has a clock of its own gets
//! the [time-free subset](Clock::Real), in which nothing lapses or expires. Invariant: what the contract leaves open is
//! not compared: for how long beyond [`FREE_FOR`](ibid::store::FREE_FOR) a token stays spent, and whether a spent token
//! finds that it is, or the others that have come since.
//!
//! ```
//! use std::sync::Arc;
//! use ibid::store::{Memory, Store};
//! use ibid_testkit::property::{Clock, check_histories};
//!
//! check_histories(16, Clock::Paused, async || Arc::new(Memory::default()) as Arc<dyn Store>);
//! ```

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{Address, Ask, Claim, End, Fence, Fingerprint, Held, Holder, Lease, Outline, Store, Tags, Token};
use proptest::{
    prelude::*,
    sample::select,
    test_runner::{Config, TestCaseError, TestRunner},
};

use crate::model::{Answer, Ending, Found, Grip, Micros, Model, Who, Wish};

const SECOND: Micros = 1_000_000;
/// How many addresses a history is about.
pub const ADDRESSES: usize = 3;
/// How many there are at each address that claim.
pub const CLAIMERS: usize = 4;

/// Which clock the store runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Tokio's, paused: time passes only as the history says, and lifetimes are exact.
    Paused,
    /// Its own: lifetimes are long, no time passes, durations are not compared.
    Real,
}

/// Somebody at an address: address, claimer.
pub type Seat = (usize, usize);

/// Which fence is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// None, or one that never was.
    Nobody,
    /// That of the holder that is there.
    Current,
    /// The one before it.
    Stale,
}

/// One step of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after the call that it stands for")]
pub enum Op {
    /// With a fresh token.
    Claim {
        seat: Seat,
        over: Named,
        hold: Micros,
        keep: Micros,
    },
    /// The same claim again.
    Again {
        seat: Seat,
    },
    Extend {
        seat: Seat,
        hold: Micros,
    },
    Settle {
        seat: Seat,
        end: Ending,
    },
    /// A release by a claimer that saw no answer.
    Unseen {
        seat: Seat,
    },
    Get {
        at: usize,
    },
    Resolve {
        at: usize,
        seen: Named,
        end: Ending,
    },
    Forget {
        at: usize,
        seen: Named,
    },
    Sweep {
        at_most: u32,
    },
    Advance {
        by: Micros,
    },
    /// The store is closed and opened again. Only in histories [with restarts](check_restarts).
    Restart,
}

/// Histories for stores with such a clock.
pub fn histories(clock: Clock) -> impl Strategy<Value = Vec<Op>> {
    const LONG: Micros = 100_000 * SECOND;
    let ops = match clock {
        Clock::Paused => {
            let lives = vec![SECOND / 1000, SECOND, 10 * SECOND, 59 * SECOND, 200 * SECOND, LONG];
            ops(select(lives.clone()).boxed(), select(lives[..5].to_vec()).boxed())
        }
        Clock::Real => ops(Just(LONG).boxed(), Just(0).boxed()),
    };
    proptest::collection::vec(ops, 1..80)
}

/// Histories for durable stores: lives of minutes and of days side by side, and a restart now and then.
pub fn histories_with_restarts() -> impl Strategy<Value = Vec<Op>> {
    const MINUTE: Micros = 60 * SECOND;
    const DAY: Micros = 24 * 60 * MINUTE;
    let lives = select(vec![SECOND, 59 * SECOND, 5 * MINUTE, 60 * MINUTE, DAY, 7 * DAY]).boxed();
    let advance = select(vec![SECOND, 59 * SECOND, 4 * MINUTE, 60 * MINUTE, DAY, 3 * DAY]).boxed();
    let ops = prop_oneof![15 => ops(lives, advance), 1 => Just(Op::Restart)];
    proptest::collection::vec(ops, 1..160)
}

fn ops(life: BoxedStrategy<Micros>, advance: BoxedStrategy<Micros>) -> BoxedStrategy<Op> {
    let seat = || (0..ADDRESSES, 0..CLAIMERS);
    let retry = prop_oneof![2 => Just(0), 1 => life.clone()];
    let ending = prop_oneof![
        (any::<u8>(), life.clone()).prop_map(|(record, keep)| Ending::Complete { record, keep }),
        Just(Ending::Release),
        (life.clone(), retry).prop_map(|(keep, retry_in)| Ending::Park { keep, retry_in }),
    ]
    .boxed();
    let named = || select(vec![Named::Nobody, Named::Current, Named::Current, Named::Stale]);
    prop_oneof![
        6 => (seat(), named(), life.clone(), life.clone())
            .prop_map(|(seat, over, hold, keep)| Op::Claim { seat, over, hold, keep }),
        3 => seat().prop_map(|seat| Op::Again { seat }),
        2 => (seat(), life).prop_map(|(seat, hold)| Op::Extend { seat, hold }),
        6 => (seat(), ending.clone()).prop_map(|(seat, end)| Op::Settle { seat, end }),
        1 => seat().prop_map(|seat| Op::Unseen { seat }),
        1 => (0..ADDRESSES).prop_map(|at| Op::Get { at }),
        1 => (0..ADDRESSES, named(), ending).prop_map(|(at, seen, end)| Op::Resolve { at, seen, end }),
        1 => (0..ADDRESSES, named()).prop_map(|(at, seen)| Op::Forget { at, seen }),
        1 => (0..20_u32).prop_map(|at_most| Op::Sweep { at_most }),
        4 => advance.prop_map(|by| Op::Advance { by }),
    ]
    .boxed()
}

/// Checks random histories, each on a store of its own. Not to be called from within a runtime.
///
/// # Panics
/// With the shortest history found on which store and model differ.
pub fn check_histories(histories_to_try: u32, clock: Clock, make_store: impl AsyncFn() -> Arc<dyn Store>) {
    check(histories_to_try, clock, histories(clock), async |history| {
        let store = make_store().await;
        check_history(&*store, &history, clock).await
    });
}

/// Checks random histories in which a durable store is closed and opened again, on a paused clock. `make_disk` is called
/// once per history, `open` whenever the store on it is opened: the time that it tells goes on in between.
///
/// # Panics
/// With the shortest history found on which store and model differ.
pub fn check_restarts<D>(
    histories_to_try: u32, make_disk: impl AsyncFn() -> D, open: impl AsyncFn(&D) -> Arc<dyn Store>,
) {
    check(histories_to_try, Clock::Paused, histories_with_restarts(), async |history| {
        let disk = make_disk().await;
        let mut store = Some(open(&disk).await);
        let mut walk = Walk::new(Clock::Paused);
        for (step, op) in history.iter().enumerate() {
            if *op == Op::Restart {
                drop(store.take());
                store = Some(open(&disk).await);
                walk.model.restart();
            }
            let store = &**store.as_ref().expect("it is always opened again");
            walk.step(store, *op).await.map_err(|how| format!("step {step}, {op:?}: {how}"))?;
        }
        Ok(())
    });
}

fn check(
    histories_to_try: u32, clock: Clock, histories: impl Strategy<Value = Vec<Op>>,
    check: impl AsyncFn(Vec<Op>) -> Result<(), String>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(clock == Clock::Paused)
        .build()
        .expect("a runtime");
    let config = Config { cases: histories_to_try, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config)
        .run(&histories, |history| runtime.block_on(check(history)).map_err(TestCaseError::fail));
    if let Err(difference) = outcome {
        panic!("{difference}");
    }
}

/// Tells one history to a store and to the model. The error says at which step they differ, and how.
///
/// # Errors
/// If they do.
pub async fn check_history(store: &dyn Store, history: &[Op], clock: Clock) -> Result<(), String> {
    let mut walk = Walk::new(clock);
    for (step, op) in history.iter().enumerate() {
        walk.step(store, *op).await.map_err(|how| format!("step {step}, {op:?}: {how}"))?;
    }
    Ok(())
}

/// What was asked, in the model's words and in the store's, and what was granted.
type Asked = (Wish, Arc<Ask>, Option<Grip>);

/// A history on its way.
struct Walk {
    clock: Clock,
    model: Model,
    addresses: [Address; ADDRESSES],
    /// What was last asked, by seat, and what was granted to it.
    seats: [[Option<Asked>; CLAIMERS]; ADDRESSES],
    /// Real fences by address; the model's fence `n` stands at `n - 1`.
    fences: [Vec<Fence>; ADDRESSES],
    tokens: u32,
}

impl Walk {
    fn new(clock: Clock) -> Self {
        let address = |_| {
            let mut address = [0; 32];
            address[..16].copy_from_slice(&Token::mint().0);
            address[16..].copy_from_slice(&Token::mint().0);
            Address(address)
        };
        Self {
            clock,
            model: Model::default(),
            addresses: std::array::from_fn(address),
            seats: Default::default(),
            fences: Default::default(),
            tokens: 0,
        }
    }

    async fn step(&mut self, store: &dyn Store, op: Op) -> Result<(), String> {
        match op {
            Op::Claim { seat: (at, who), over, hold, keep } => {
                self.tokens += 1;
                let wish = Wish { at, token: self.tokens, hold, keep, over: self.named(at, over) };
                let ask = Arc::new(self.ask(wish));
                self.seats[at][who] = Some((wish, ask, None));
                self.claim(store, (at, who)).await
            }
            Op::Again { seat } => self.claim(store, seat).await,
            Op::Extend { seat: (at, who), hold } => {
                let Some((_, ask, Some(grip))) = self.seats[at][who].clone() else { return Ok(()) };
                if self.model.leaves_open(grip.wish) {
                    return Ok(());
                }
                let answered = store.extend(&self.lease(&ask, grip), micros(hold)).await;
                let expected = self.model.extend(grip, hold);
                self.same_answer(at, expected, answered.map_err(|error| error.to_string())?)
            }
            Op::Settle { seat: (at, who), end } => {
                let Some((_, ask, Some(grip))) = self.seats[at][who].clone() else { return Ok(()) };
                self.settle(store, &ask, grip, end).await
            }
            Op::Unseen { seat: (at, who) } => {
                let Some((wish, ask, _)) = self.seats[at][who].clone() else { return Ok(()) };
                self.settle(store, &ask, Grip { wish, fence: 0, attempt: 0 }, Ending::Release).await
            }
            Op::Get { at } => {
                let found = store.get(&self.addresses[at]).await.map_err(|error| error.to_string())?;
                match (self.model.get(at), found) {
                    (None, None) => Ok(()),
                    (Some(expected), Some(found)) => self.same_found(at, expected, &found),
                    (expected, found) => Err(format!("the model says {expected:?}, the store {found:?}")),
                }
            }
            Op::Resolve { at, seen, end } => {
                let seen = self.named(at, seen).unwrap_or(u64::MAX);
                let answered = store.operators().resolve(&self.addresses[at], self.fence(at, seen), &real(end)).await;
                let expected = self.model.resolve(at, seen, end);
                self.same_answer(at, expected, answered.map_err(|error| error.to_string())?)
            }
            Op::Forget { at, seen } => {
                let seen = self.named(at, seen).unwrap_or(u64::MAX);
                let answered = store.operators().forget(&self.addresses[at], self.fence(at, seen)).await;
                let expected = self.model.forget(at, seen);
                self.same_answer(at, expected, answered.map_err(|error| error.to_string())?)
            }
            Op::Sweep { at_most } => {
                let swept = store.sweep(at_most).await.map_err(|error| error.to_string())?;
                let kept_to_it = swept.removed <= at_most;
                kept_to_it.then_some(()).ok_or_else(|| format!("a sweep removed {}", swept.removed))
            }
            Op::Restart => Ok(()),
            Op::Advance { by } => {
                if self.clock == Clock::Paused {
                    tokio::time::advance(micros(by)).await;
                    self.model.advance(by);
                }
                Ok(())
            }
        }
    }

    async fn claim(&mut self, store: &dyn Store, (at, who): Seat) -> Result<(), String> {
        let Some((wish, ask, _)) = self.seats[at][who].clone() else { return Ok(()) };
        if self.model.leaves_open(wish) {
            return Ok(());
        }
        let found = store.claim(&ask).await.map_err(|error| error.to_string())?;
        if self.model.was_spent_before(wish) && !matches!(found, Claim::Granted(_)) {
            return Ok(());
        }
        let expected = self.model.claim(wish);
        if let Found::Granted { fence, attempt } = expected {
            if let (Claim::Granted(lease), true) = (&found, fence as usize > self.fences[at].len()) {
                if self.fences[at].iter().any(|before| *before >= lease.fence) {
                    return Err(format!("fence {} after {:?}", lease.fence, self.fences[at]));
                }
                self.fences[at].push(lease.fence);
            }
            self.seats[at][who] = Some((wish, ask, Some(Grip { wish, fence, attempt })));
        }
        self.same_found(at, expected, &found)
    }

    async fn settle(&mut self, store: &dyn Store, ask: &Arc<Ask>, grip: Grip, end: Ending) -> Result<(), String> {
        if self.model.leaves_open(grip.wish) {
            return Ok(());
        }
        let answered = store.settle(&self.lease(ask, grip), &real(end)).await;
        let expected = self.model.settle(grip, end);
        self.same_answer(grip.wish.at, expected, answered.map_err(|error| error.to_string())?)
    }

    fn same_answer(&self, at: usize, expected: Answer, answered: Held) -> Result<(), String> {
        match (expected, &answered) {
            (Answer::Held, Held::Held) | (Answer::Restored, Held::Restored) => Ok(()),
            (Answer::Lost(expected), Held::Lost(found)) => self.same_found(at, expected, found),
            _ => Err(format!("the model says {expected:?}, the store {answered:?}")),
        }
    }

    fn same_found(&self, at: usize, expected: Found, found: &Claim) -> Result<(), String> {
        let time = |expected: Micros, found: Duration| self.clock == Clock::Real || micros(expected) == found;
        let holder = |who: Who, holder: &Holder| {
            (self.fence(at, who.fence), who.attempt) == (holder.fence, holder.attempt)
                && time(who.age, holder.age)
                && time(who.takeover_in, holder.takeover_in)
        };
        let same = match (expected, found) {
            (Found::Granted { fence, attempt }, Claim::Granted(lease)) => {
                (self.fence(at, fence), attempt) == (lease.fence, lease.attempt)
            }
            (Found::Busy(who), Claim::Busy(found)) | (Found::Unknown(who), Claim::Unknown(found)) => holder(who, found),
            (Found::Done { fence, attempt, record, expires_in }, Claim::Done(done)) => {
                (self.fence(at, fence), attempt) == (done.fence, done.attempt)
                    && (done.record[..] == [record] && done.failed == (record % 2 == 1))
                    && time(expires_in, done.expires_in)
            }
            (Found::Spent, Claim::Spent) => true,
            _ => false,
        };
        let fences = &self.fences[at];
        same.then_some(()).ok_or_else(|| format!("the model says {expected:?}, the store {found:?}; fences {fences:?}"))
    }

    fn named(&self, at: usize, named: Named) -> Option<u64> {
        match named {
            Named::Nobody => None,
            Named::Current => self.model.current(at),
            Named::Stale => Some(self.model.current(at)?.saturating_sub(1)),
        }
    }

    fn fence(&self, at: usize, fence: u64) -> Fence {
        match fence {
            0 => Fence::UNSEEN,
            _ => self.fences[at].get(fence as usize - 1).copied().unwrap_or(Fence(u64::MAX >> 1)),
        }
    }

    fn lease(&self, ask: &Arc<Ask>, grip: Grip) -> Lease {
        Lease { ask: ask.clone(), fence: self.fence(grip.wish.at, grip.fence), attempt: grip.attempt, solo: false }
    }

    fn ask(&self, wish: Wish) -> Ask {
        Ask {
            address: self.addresses[wish.at],
            token: Token::mint(),
            fingerprint: Fingerprint::NONE,
            tags: Tags::default(),
            label: Bytes::new(),
            hold: micros(wish.hold),
            keep: micros(wish.keep),
            over: wish.over.map(|fence| self.fence(wish.at, fence)),
        }
    }
}

/// Records are one byte; the odd ones are failures.
fn real(end: Ending) -> End {
    match end {
        Ending::Complete { record, keep } => End::Complete {
            failed: record % 2 == 1,
            record: Bytes::copy_from_slice(&[record]),
            outline: Outline::default(),
            keep: micros(keep),
        },
        Ending::Release => End::Release,
        Ending::Park { keep, retry_in } => End::Park { keep: micros(keep), retry_in: micros(retry_in) },
    }
}

fn micros(micros: Micros) -> Duration {
    Duration::from_micros(micros)
}
