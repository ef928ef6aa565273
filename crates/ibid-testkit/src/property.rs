//! Runs random histories on a store and on the [reference store](crate::model), which must return the same results.
//!
//! With a [paused clock](HistoryClock::Paused) all durations are compared exactly. A store with its own clock gets the
//! [time-free subset](HistoryClock::Real), in which no lease and no entry expires. Invariant: results that the contract
//! leaves open are not compared: how long a token stays spent beyond [`SPENT_TOKEN_TTL`](ibid::store::SPENT_TOKEN_TTL),
//! and whether a spent token finds that it is spent, or later holders.
//!
//! ```
//! use std::sync::Arc;
//! use ibid::store::{Memory, Store};
//! use ibid_testkit::property::{HistoryClock, check_histories};
//!
//! check_histories(16, HistoryClock::Paused, async || Arc::new(Memory::default()) as Arc<dyn Store>);
//! ```

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Fence, Fingerprint, Holder, Lease, RecordSummary, SettleOutcome,
    Settlement, Store, Tags,
};
use proptest::{
    prelude::*,
    sample::select,
    test_runner::{Config, TestCaseError, TestRunner},
};

use crate::model::{
    ReferenceClaimOutcome, ReferenceHolder, ReferenceLease, ReferenceMicros, ReferenceRequest, ReferenceSettleOutcome,
    ReferenceSettlement, ReferenceStore,
};

const SECOND: ReferenceMicros = 1_000_000;
/// The number of addresses in a history.
pub const ADDRESSES: usize = 3;
/// The number of claimers at each address.
pub const CLAIMERS: usize = 4;

/// The clock of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HistoryClock {
    /// Tokio's paused clock: time advances only by steps of the history, and lifetimes are exact.
    Paused,
    /// The store's own clock: lifetimes are long, no time passes, durations are not compared.
    Real,
}

/// A claimer: the address and its number there.
pub type ClaimerId = (usize, usize);

/// The fence that a step names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FenceChoice {
    /// None, or one that never existed.
    NoFence,
    /// The current holder's.
    Current,
    /// The one before the current holder's.
    Stale,
}

/// One step of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after the call that it stands for")]
pub enum HistoryStep {
    /// With a fresh token.
    Claim {
        claimer: ClaimerId,
        over: FenceChoice,
        hold: ReferenceMicros,
        keep: ReferenceMicros,
    },
    /// The same claim again.
    RepeatClaim {
        claimer: ClaimerId,
    },
    Extend {
        claimer: ClaimerId,
        hold: ReferenceMicros,
    },
    Settle {
        claimer: ClaimerId,
        end: ReferenceSettlement,
    },
    /// A release by a claimer that received no outcome.
    UnseenRelease {
        claimer: ClaimerId,
    },
    Get {
        at: usize,
    },
    Resolve {
        at: usize,
        seen: FenceChoice,
        end: ReferenceSettlement,
    },
    Forget {
        at: usize,
        seen: FenceChoice,
    },
    Sweep {
        at_most: u32,
    },
    Advance {
        by: ReferenceMicros,
    },
    /// The store is closed and reopened. Only in histories [with restarts](check_restarts).
    Restart,
}

/// Generates histories for stores with this clock.
pub fn histories(clock: HistoryClock) -> impl Strategy<Value = Vec<HistoryStep>> {
    const LONG: ReferenceMicros = 100_000 * SECOND;
    let ops = match clock {
        HistoryClock::Paused => {
            let lives = vec![SECOND / 1000, SECOND, 10 * SECOND, 59 * SECOND, 200 * SECOND, LONG];
            history_steps(select(lives.clone()).boxed(), select(lives[..5].to_vec()).boxed())
        }
        HistoryClock::Real => history_steps(Just(LONG).boxed(), Just(0).boxed()),
    };
    proptest::collection::vec(ops, 1..80)
}

/// Generates histories for durable stores: lifetimes of minutes and of days, and occasional restarts.
pub fn histories_with_restarts() -> impl Strategy<Value = Vec<HistoryStep>> {
    const MINUTE: ReferenceMicros = 60 * SECOND;
    const DAY: ReferenceMicros = 24 * 60 * MINUTE;
    let lives = select(vec![SECOND, 59 * SECOND, 5 * MINUTE, 60 * MINUTE, DAY, 7 * DAY]).boxed();
    let advance = select(vec![SECOND, 59 * SECOND, 4 * MINUTE, 60 * MINUTE, DAY, 3 * DAY]).boxed();
    let ops = prop_oneof![15 => history_steps(lives, advance), 1 => Just(HistoryStep::Restart)];
    proptest::collection::vec(ops, 1..160)
}

fn history_steps(
    life: BoxedStrategy<ReferenceMicros>, advance: BoxedStrategy<ReferenceMicros>,
) -> BoxedStrategy<HistoryStep> {
    let seat = || (0..ADDRESSES, 0..CLAIMERS);
    let retry = prop_oneof![2 => Just(0), 1 => life.clone()];
    let ending = prop_oneof![
        (any::<u8>(), life.clone()).prop_map(|(record, keep)| ReferenceSettlement::Complete { record, keep }),
        Just(ReferenceSettlement::Release),
        (life.clone(), retry).prop_map(|(keep, retry_in)| ReferenceSettlement::Park { keep, retry_in }),
    ]
    .boxed();
    let named = || select(vec![FenceChoice::NoFence, FenceChoice::Current, FenceChoice::Current, FenceChoice::Stale]);
    prop_oneof![
        6 => (seat(), named(), life.clone(), life.clone())
            .prop_map(|(claimer, over, hold, keep)| HistoryStep::Claim { claimer, over, hold, keep }),
        3 => seat().prop_map(|claimer| HistoryStep::RepeatClaim { claimer }),
        2 => (seat(), life).prop_map(|(claimer, hold)| HistoryStep::Extend { claimer, hold }),
        6 => (seat(), ending.clone()).prop_map(|(claimer, end)| HistoryStep::Settle { claimer, end }),
        1 => seat().prop_map(|claimer| HistoryStep::UnseenRelease { claimer }),
        1 => (0..ADDRESSES).prop_map(|at| HistoryStep::Get { at }),
        1 => (0..ADDRESSES, named(), ending).prop_map(|(at, seen, end)| HistoryStep::Resolve { at, seen, end }),
        1 => (0..ADDRESSES, named()).prop_map(|(at, seen)| HistoryStep::Forget { at, seen }),
        1 => (0..20_u32).prop_map(|at_most| HistoryStep::Sweep { at_most }),
        4 => advance.prop_map(|by| HistoryStep::Advance { by }),
    ]
    .boxed()
}

/// Checks random histories, each on its own store. Must not be called within a runtime.
///
/// # Panics
/// If store and reference differ. The message contains the shortest history found.
pub fn check_histories(histories_to_try: u32, clock: HistoryClock, make_store: impl AsyncFn() -> Arc<dyn Store>) {
    check(histories_to_try, clock, histories(clock), async |history| {
        let store = make_store().await;
        check_history(&*store, &history, clock).await
    });
}

/// Checks random histories in which a durable store is closed and reopened, on a paused clock. `make_disk` is called
/// once per history, `open` whenever the store is opened; its clock continues in between.
///
/// # Panics
/// If store and reference differ. The message contains the shortest history found.
pub fn check_restarts<D>(
    histories_to_try: u32, make_disk: impl AsyncFn() -> D, open: impl AsyncFn(&D) -> Arc<dyn Store>,
) {
    check(histories_to_try, HistoryClock::Paused, histories_with_restarts(), async |history| {
        let disk = make_disk().await;
        let mut store = Some(open(&disk).await);
        let mut walk = HistoryRun::new(HistoryClock::Paused);
        for (step, op) in history.iter().enumerate() {
            if *op == HistoryStep::Restart {
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
    histories_to_try: u32, clock: HistoryClock, histories: impl Strategy<Value = Vec<HistoryStep>>,
    check: impl AsyncFn(Vec<HistoryStep>) -> Result<(), String>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(clock == HistoryClock::Paused)
        .build()
        .expect("a runtime");
    let config = Config { cases: histories_to_try, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config)
        .run(&histories, |history| runtime.block_on(check(history)).map_err(TestCaseError::fail));
    if let Err(difference) = outcome {
        panic!("{difference}");
    }
}

/// Runs one history on a store and on the reference.
///
/// # Errors
/// Returns the first step at which they differ, and how.
pub async fn check_history(store: &dyn Store, history: &[HistoryStep], clock: HistoryClock) -> Result<(), String> {
    let mut walk = HistoryRun::new(clock);
    for (step, op) in history.iter().enumerate() {
        walk.step(store, *op).await.map_err(|how| format!("step {step}, {op:?}: {how}"))?;
    }
    Ok(())
}

/// A request for the reference and for the store, and the reference's lease if it was granted.
type ClaimRecord = (ReferenceRequest, Arc<ClaimRequest>, Option<ReferenceLease>);

struct HistoryRun {
    clock: HistoryClock,
    model: ReferenceStore,
    addresses: [Address; ADDRESSES],
    /// The last claim of each claimer.
    claims: [[Option<ClaimRecord>; CLAIMERS]; ADDRESSES],
    /// Real fences by address; the reference's fence `n` is at index `n - 1`.
    fences: [Vec<Fence>; ADDRESSES],
    next_token: u32,
}

impl HistoryRun {
    fn new(clock: HistoryClock) -> Self {
        let address = |_| {
            let mut address = [0; 32];
            address[..16].copy_from_slice(&ClaimToken::mint().0);
            address[16..].copy_from_slice(&ClaimToken::mint().0);
            Address(address)
        };
        Self {
            clock,
            model: ReferenceStore::default(),
            addresses: std::array::from_fn(address),
            claims: Default::default(),
            fences: Default::default(),
            next_token: 0,
        }
    }

    async fn step(&mut self, store: &dyn Store, op: HistoryStep) -> Result<(), String> {
        match op {
            HistoryStep::Claim { claimer: (at, who), over, hold, keep } => {
                self.next_token += 1;
                let wish =
                    ReferenceRequest { at, token: self.next_token, hold, keep, over: self.choose_fence(at, over) };
                let ask = Arc::new(self.real_request(wish));
                self.claims[at][who] = Some((wish, ask, None));
                self.claim(store, (at, who)).await
            }
            HistoryStep::RepeatClaim { claimer: seat } => self.claim(store, seat).await,
            HistoryStep::Extend { claimer: (at, who), hold } => {
                let Some((_, ask, Some(grip))) = self.claims[at][who].clone() else { return Ok(()) };
                if self.model.is_unspecified(grip.request) {
                    return Ok(());
                }
                let answered = store.extend(&self.real_lease(&ask, grip), to_duration(hold)).await;
                let expected = self.model.extend(grip, hold);
                self.compare_settle(at, expected, answered.map_err(|error| error.to_string())?)
            }
            HistoryStep::Settle { claimer: (at, who), end } => {
                let Some((_, ask, Some(grip))) = self.claims[at][who].clone() else { return Ok(()) };
                self.settle(store, &ask, grip, end).await
            }
            HistoryStep::UnseenRelease { claimer: (at, who) } => {
                let Some((wish, ask, _)) = self.claims[at][who].clone() else { return Ok(()) };
                self.settle(
                    store,
                    &ask,
                    ReferenceLease { request: wish, fence: 0, attempt: 0 },
                    ReferenceSettlement::Release,
                )
                .await
            }
            HistoryStep::Get { at } => {
                let found = store.get(&self.addresses[at]).await.map_err(|error| error.to_string())?;
                match (self.model.get(at), found) {
                    (None, None) => Ok(()),
                    (Some(expected), Some(found)) => self.compare_claim(at, expected, &found),
                    (expected, found) => Err(format!("the model says {expected:?}, the store {found:?}")),
                }
            }
            HistoryStep::Resolve { at, seen, end } => {
                let seen = self.choose_fence(at, seen).unwrap_or(u64::MAX);
                let answered =
                    store.admin().resolve(&self.addresses[at], self.real_fence(at, seen), &real_settlement(end)).await;
                let expected = self.model.resolve(at, seen, end);
                self.compare_settle(at, expected, answered.map_err(|error| error.to_string())?)
            }
            HistoryStep::Forget { at, seen } => {
                let seen = self.choose_fence(at, seen).unwrap_or(u64::MAX);
                let answered = store.admin().forget(&self.addresses[at], self.real_fence(at, seen)).await;
                let expected = self.model.forget(at, seen);
                self.compare_settle(at, expected, answered.map_err(|error| error.to_string())?)
            }
            HistoryStep::Sweep { at_most } => {
                let swept = store.sweep(at_most).await.map_err(|error| error.to_string())?;
                let kept_to_it = swept.removed <= at_most;
                kept_to_it.then_some(()).ok_or_else(|| format!("a sweep removed {}", swept.removed))
            }
            HistoryStep::Restart => Ok(()),
            HistoryStep::Advance { by } => {
                if self.clock == HistoryClock::Paused {
                    tokio::time::advance(to_duration(by)).await;
                    self.model.advance(by);
                }
                Ok(())
            }
        }
    }

    async fn claim(&mut self, store: &dyn Store, (at, who): ClaimerId) -> Result<(), String> {
        let Some((wish, ask, _)) = self.claims[at][who].clone() else { return Ok(()) };
        if self.model.is_unspecified(wish) {
            return Ok(());
        }
        let found = store.claim(&ask).await.map_err(|error| error.to_string())?;
        if self.model.was_spent_and_replaced(wish) && !matches!(found, ClaimOutcome::Granted(_)) {
            return Ok(());
        }
        let expected = self.model.claim(wish);
        if let ReferenceClaimOutcome::Granted { fence, attempt } = expected {
            if let (ClaimOutcome::Granted(lease), true) = (&found, fence as usize > self.fences[at].len()) {
                if self.fences[at].iter().any(|before| *before >= lease.fence) {
                    return Err(format!("fence {} after {:?}", lease.fence, self.fences[at]));
                }
                self.fences[at].push(lease.fence);
            }
            self.claims[at][who] = Some((wish, ask, Some(ReferenceLease { request: wish, fence, attempt })));
        }
        self.compare_claim(at, expected, &found)
    }

    async fn settle(
        &mut self, store: &dyn Store, ask: &Arc<ClaimRequest>, grip: ReferenceLease, end: ReferenceSettlement,
    ) -> Result<(), String> {
        if self.model.is_unspecified(grip.request) {
            return Ok(());
        }
        let answered = store.settle(&self.real_lease(ask, grip), &real_settlement(end)).await;
        let expected = self.model.settle(grip, end);
        self.compare_settle(grip.request.at, expected, answered.map_err(|error| error.to_string())?)
    }

    fn compare_settle(
        &self, at: usize, expected: ReferenceSettleOutcome, answered: SettleOutcome,
    ) -> Result<(), String> {
        match (expected, &answered) {
            (ReferenceSettleOutcome::Held, SettleOutcome::Applied)
            | (ReferenceSettleOutcome::Restored, SettleOutcome::Restored) => Ok(()),
            (ReferenceSettleOutcome::ClaimLost(expected), SettleOutcome::ClaimLost(found)) => {
                self.compare_claim(at, expected, found)
            }
            _ => Err(format!("the model says {expected:?}, the store {answered:?}")),
        }
    }

    fn compare_claim(&self, at: usize, expected: ReferenceClaimOutcome, found: &ClaimOutcome) -> Result<(), String> {
        let time = |expected: ReferenceMicros, found: Duration| {
            self.clock == HistoryClock::Real || to_duration(expected) == found
        };
        let holder = |who: ReferenceHolder, holder: &Holder| {
            (self.real_fence(at, who.fence), who.attempt) == (holder.fence, holder.attempt)
                && time(who.age, holder.age)
                && time(who.takeover_in, holder.takeover_in)
        };
        let same = match (expected, found) {
            (ReferenceClaimOutcome::Granted { fence, attempt }, ClaimOutcome::Granted(lease)) => {
                (self.real_fence(at, fence), attempt) == (lease.fence, lease.attempt)
            }
            (ReferenceClaimOutcome::Busy(who), ClaimOutcome::InProgress(found))
            | (ReferenceClaimOutcome::Unknown(who), ClaimOutcome::OutcomeUnknown(found)) => holder(who, found),
            (ReferenceClaimOutcome::Done { fence, attempt, record, expires_in }, ClaimOutcome::Completed(done)) => {
                (self.real_fence(at, fence), attempt) == (done.fence, done.attempt)
                    && (done.record[..] == [record] && done.failed == (record % 2 == 1))
                    && time(expires_in, done.expires_in)
            }
            (ReferenceClaimOutcome::Spent, ClaimOutcome::TokenSpent) => true,
            _ => false,
        };
        let fences = &self.fences[at];
        same.then_some(()).ok_or_else(|| format!("the model says {expected:?}, the store {found:?}; fences {fences:?}"))
    }

    fn choose_fence(&self, at: usize, named: FenceChoice) -> Option<u64> {
        match named {
            FenceChoice::NoFence => None,
            FenceChoice::Current => self.model.current_fence(at),
            FenceChoice::Stale => Some(self.model.current_fence(at)?.saturating_sub(1)),
        }
    }

    fn real_fence(&self, at: usize, fence: u64) -> Fence {
        match fence {
            0 => Fence::UNSEEN,
            _ => self.fences[at].get(fence as usize - 1).copied().unwrap_or(Fence(u64::MAX >> 1)),
        }
    }

    fn real_lease(&self, ask: &Arc<ClaimRequest>, grip: ReferenceLease) -> Lease {
        Lease {
            request: ask.clone(),
            fence: self.real_fence(grip.request.at, grip.fence),
            attempt: grip.attempt,
            front_only: false,
        }
    }

    fn real_request(&self, wish: ReferenceRequest) -> ClaimRequest {
        ClaimRequest {
            address: self.addresses[wish.at],
            token: ClaimToken::mint(),
            fingerprint: Fingerprint::NONE,
            tags: Tags::default(),
            label: Bytes::new(),
            lease: to_duration(wish.hold),
            ttl: to_duration(wish.keep),
            take_over: wish.over.map(|fence| self.real_fence(wish.at, fence)),
        }
    }
}

/// Records are one byte; odd ones are failures.
fn real_settlement(end: ReferenceSettlement) -> Settlement {
    match end {
        ReferenceSettlement::Complete { record, keep } => Settlement::Complete {
            failed: record % 2 == 1,
            record: Bytes::copy_from_slice(&[record]),
            summary: RecordSummary::default(),
            ttl: to_duration(keep),
        },
        ReferenceSettlement::Release => Settlement::Release,
        ReferenceSettlement::Park { keep, retry_in } => {
            Settlement::Park { ttl: to_duration(keep), retry_in: to_duration(retry_in) }
        }
    }
}

fn to_duration(micros: ReferenceMicros) -> Duration {
    Duration::from_micros(micros)
}
