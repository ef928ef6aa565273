//! Runs random histories on a store and on the [reference store](crate::model), which must return the same results.
//!
//! With a [paused clock](HistoryClock::Paused) all durations are compared exactly. A store with its own clock gets the
//! [time-free subset](HistoryClock::Real), in which no lease and no entry expires. Invariant: results that the contract
//! leaves open are not compared: how long a token stays spent beyond [`SPENT_TOKEN_TTL`](ibid::store::SPENT_TOKEN_TTL),
//! and whether a spent token finds that it is spent, or later holders.
//!
//! ```
//! use ibid::store::Memory;
//! use ibid_testkit::property::{HistoryClock, check_histories};
//!
//! check_histories(16, HistoryClock::Paused, async || Memory::default());
//! ```

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Fence, Fingerprint, Lease, RecordSummary, SettleOutcome,
    Settlement, Store, StoreError, Tags,
};
use proptest::{
    prelude::*,
    sample::select,
    test_runner::{Config, TestCaseError, TestRunner},
};

use crate::model::ReferenceStore;
use ClaimOutcome::{Completed, Granted, InProgress, OutcomeUnknown};

const SECOND: Duration = Duration::from_secs(1);
const ADDRESSES: usize = 3;
/// The number of claimers at each address.
const CLAIMERS: usize = 4;
/// No store grants so many claims.
const UNKNOWN_FENCE: Fence = Fence(u64::MAX >> 1);

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

/// One step of a history, named after the call that it stands for.
///
/// `Claim` has a fresh token, and `RepeatClaim` is the same claim again; an `UnseenRelease` is by a claimer that received
/// no outcome; at a `Restart`, the store is closed and reopened: only in histories [with restarts](check_restarts).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HistoryStep {
    Claim { claimer: ClaimerId, take_over: FenceChoice, lease: Duration, ttl: Duration },
    RepeatClaim { claimer: ClaimerId },
    Extend { claimer: ClaimerId, lease: Duration },
    Settle { claimer: ClaimerId, end: Settlement },
    UnseenRelease { claimer: ClaimerId },
    Get { at: usize },
    Resolve { at: usize, seen: FenceChoice, end: Settlement },
    Forget { at: usize, seen: FenceChoice },
    Sweep { at_most: u32 },
    Advance { by: Duration },
    Restart,
}

/// Generates histories for stores with this clock.
pub fn histories(clock: HistoryClock) -> impl Strategy<Value = Vec<HistoryStep>> {
    const LONG: Duration = Duration::from_secs(100_000);
    let steps = match clock {
        HistoryClock::Paused => {
            let lives = vec![SECOND / 1000, SECOND, 10 * SECOND, 59 * SECOND, 200 * SECOND, LONG];
            history_steps(select(lives.clone()).boxed(), select(lives[..5].to_vec()).boxed())
        }
        HistoryClock::Real => history_steps(Just(LONG).boxed(), Just(Duration::ZERO).boxed()),
    };
    proptest::collection::vec(steps, 1..80)
}

/// Generates histories for durable stores: lifetimes of minutes and of days, and occasional restarts.
fn histories_with_restarts() -> impl Strategy<Value = Vec<HistoryStep>> {
    const MINUTE: Duration = Duration::from_secs(60);
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let lives = select(vec![SECOND, 59 * SECOND, 5 * MINUTE, 60 * MINUTE, DAY, 7 * DAY]).boxed();
    let advance = select(vec![SECOND, 59 * SECOND, 4 * MINUTE, 60 * MINUTE, DAY, 3 * DAY]).boxed();
    let steps = prop_oneof![15 => history_steps(lives, advance), 1 => Just(HistoryStep::Restart)];
    proptest::collection::vec(steps, 1..160)
}

fn history_steps(life: BoxedStrategy<Duration>, advance: BoxedStrategy<Duration>) -> BoxedStrategy<HistoryStep> {
    let claimer = || (0..ADDRESSES, 0..CLAIMERS);
    let retry = prop_oneof![2 => Just(Duration::ZERO), 1 => life.clone()];
    // Records are one byte; odd ones are failures.
    let complete = |(record, ttl): (u8, _)| Settlement::Complete {
        failed: record % 2 == 1,
        record: Bytes::copy_from_slice(&[record]),
        summary: RecordSummary::default(),
        ttl,
    };
    let ending = prop_oneof![
        (any::<u8>(), life.clone()).prop_map(complete),
        Just(Settlement::Release),
        (life.clone(), retry).prop_map(|(ttl, retry_in)| Settlement::Park { ttl, retry_in }),
    ]
    .boxed();
    let named = || select(vec![FenceChoice::NoFence, FenceChoice::Current, FenceChoice::Current, FenceChoice::Stale]);
    prop_oneof![
        6 => (claimer(), named(), life.clone(), life.clone())
            .prop_map(|(claimer, take_over, lease, ttl)| HistoryStep::Claim { claimer, take_over, lease, ttl }),
        3 => claimer().prop_map(|claimer| HistoryStep::RepeatClaim { claimer }),
        2 => (claimer(), life).prop_map(|(claimer, lease)| HistoryStep::Extend { claimer, lease }),
        6 => (claimer(), ending.clone()).prop_map(|(claimer, end)| HistoryStep::Settle { claimer, end }),
        1 => claimer().prop_map(|claimer| HistoryStep::UnseenRelease { claimer }),
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
pub fn check_histories<S: Store>(histories_to_try: u32, clock: HistoryClock, make_store: impl AsyncFn() -> S) {
    check(histories_to_try, clock, histories(clock), async |history| {
        check_history(&make_store().await, &history, clock).await
    });
}

/// Checks random histories in which a durable store is closed and reopened, on a paused clock. `make_disk` is called
/// once per history, `open` whenever the store is opened; its clock continues in between.
///
/// # Panics
/// If store and reference differ. The message contains the shortest history found.
pub fn check_restarts<D, S: Store>(histories_to_try: u32, make_disk: impl AsyncFn() -> D, open: impl AsyncFn(&D) -> S) {
    check(histories_to_try, HistoryClock::Paused, histories_with_restarts(), async |history| {
        let disk = make_disk().await;
        let mut run = HistoryRun::new(HistoryClock::Paused);
        // Each part begins with a restart, except the first.
        for part in history.chunk_by(|_, next| *next != HistoryStep::Restart) {
            run.steps(&open(&disk).await, part).await?;
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
    HistoryRun::new(clock).steps(store, history).await
}

/// A request, and its lease if it was granted.
type LastClaim = (Arc<ClaimRequest>, Option<Lease>);

struct HistoryRun {
    clock: HistoryClock,
    model: ReferenceStore,
    addresses: [Address; ADDRESSES],
    claims: [[Option<LastClaim>; CLAIMERS]; ADDRESSES],
}

impl HistoryRun {
    fn new(clock: HistoryClock) -> Self {
        let random_address = |_| {
            let [first, second] = [ClaimToken::mint(), ClaimToken::mint()];
            Address(std::array::from_fn(|i| if i < 16 { first.0[i] } else { second.0[i - 16] }))
        };
        let addresses = std::array::from_fn(random_address);
        Self { clock, model: ReferenceStore::default(), addresses, claims: Default::default() }
    }

    async fn steps(&mut self, store: &dyn Store, steps: &[HistoryStep]) -> Result<(), String> {
        for (index, step) in steps.iter().enumerate() {
            self.step(store, step).await.map_err(|how| format!("step {index}, {step:?}: {how}"))?;
        }
        Ok(())
    }

    async fn step(&mut self, store: &dyn Store, step: &HistoryStep) -> Result<(), String> {
        match step {
            HistoryStep::Claim { claimer: (at, who), take_over, lease, ttl } => {
                let request = ClaimRequest {
                    address: self.addresses[*at],
                    token: ClaimToken::mint(),
                    fingerprint: Fingerprint::NONE,
                    tags: Tags::default(),
                    label: Bytes::new(),
                    lease: *lease,
                    ttl: *ttl,
                    take_over: self.choose_fence(*at, *take_over),
                };
                self.claims[*at][*who] = Some((Arc::new(request), None));
                self.claim(store, (*at, *who)).await
            }
            HistoryStep::RepeatClaim { claimer } => self.claim(store, *claimer).await,
            HistoryStep::Extend { claimer: (at, who), lease: by } => {
                let Some((request, Some(lease))) = self.claims[*at][*who].clone() else { return Ok(()) };
                if self.model.is_unspecified(&request) {
                    return Ok(());
                }
                let answered = store.extend(&lease, *by).await;
                compare_settle(self.clock, self.model.extend(&lease, *by), answered)
            }
            HistoryStep::Settle { claimer: (at, who), end } => match self.claims[*at][*who].clone() {
                Some((_, Some(lease))) => self.settle(store, &lease, end).await,
                _ => Ok(()),
            },
            HistoryStep::UnseenRelease { claimer: (at, who) } => match self.claims[*at][*who].clone() {
                Some((request, _)) => self.settle(store, &Lease::unseen(&request), &Settlement::Release).await,
                None => Ok(()),
            },
            HistoryStep::Get { at } => {
                let found = store.get(&self.addresses[*at]).await.map_err(|error| error.to_string())?;
                match (self.model.get(&self.addresses[*at]), found) {
                    (None, None) => Ok(()),
                    (Some(expected), Some(found)) => compare_claim(self.clock, expected, &found),
                    (expected, found) => Err(format!("the model says {expected:?}, the store {found:?}")),
                }
            }
            HistoryStep::Resolve { at, seen, end } => {
                let (seen, at) = (self.seen_fence(*at, *seen), &self.addresses[*at]);
                let answered = store.admin().resolve(at, seen, end).await;
                compare_settle(self.clock, self.model.resolve(at, seen, end), answered)
            }
            HistoryStep::Forget { at, seen } => {
                let (seen, at) = (self.seen_fence(*at, *seen), &self.addresses[*at]);
                let answered = store.admin().forget(at, seen).await;
                compare_settle(self.clock, self.model.forget(at, seen), answered)
            }
            HistoryStep::Sweep { at_most } => {
                let removed = store.sweep(*at_most).await.map_err(|error| error.to_string())?.removed;
                (removed <= *at_most).then_some(()).ok_or_else(|| format!("a sweep removed {removed}"))
            }
            HistoryStep::Advance { by } if self.clock == HistoryClock::Paused => {
                tokio::time::advance(*by).await;
                self.model.advance(*by);
                Ok(())
            }
            HistoryStep::Restart => {
                self.model.restart();
                Ok(())
            }
            HistoryStep::Advance { .. } => Ok(()),
        }
    }

    async fn claim(&mut self, store: &dyn Store, (at, who): ClaimerId) -> Result<(), String> {
        let Some((request, _)) = self.claims[at][who].clone() else { return Ok(()) };
        if self.model.is_unspecified(&request) {
            return Ok(());
        }
        let found = store.claim(&request).await.map_err(|error| error.to_string())?;
        if self.model.was_spent_and_replaced(&request) && !matches!(found, Granted(_)) {
            return Ok(());
        }
        let fence = if let Granted(lease) = &found { lease.fence } else { UNKNOWN_FENCE };
        let expected = self.model.claim(&request, fence);
        if !self.model.granted_fences(&request.address).is_sorted_by(|before, after| before < after) {
            return Err(format!("fence {fence} after {:?}", self.model.granted_fences(&request.address)));
        }
        if let Granted(lease) = &expected {
            self.claims[at][who] = Some((request, Some(lease.clone())));
        }
        compare_claim(self.clock, expected, &found)
    }

    async fn settle(&mut self, store: &dyn Store, lease: &Lease, end: &Settlement) -> Result<(), String> {
        if self.model.is_unspecified(&lease.request) {
            return Ok(());
        }
        let answered = store.settle(lease, end).await;
        compare_settle(self.clock, self.model.settle(lease, end), answered)
    }

    fn choose_fence(&self, at: usize, named: FenceChoice) -> Option<Fence> {
        let current = || self.model.current_fence(&self.addresses[at]);
        match named {
            FenceChoice::NoFence => None,
            FenceChoice::Current => current(),
            FenceChoice::Stale => {
                let (current, granted) = (current()?, self.model.granted_fences(&self.addresses[at]));
                Some(granted.iter().rfind(|fence| **fence < current).copied().unwrap_or(Fence::UNSEEN))
            }
        }
    }

    fn seen_fence(&self, at: usize, named: FenceChoice) -> Fence {
        self.choose_fence(at, named).unwrap_or(UNKNOWN_FENCE)
    }
}

fn compare_settle(
    clock: HistoryClock, expected: SettleOutcome, answered: Result<SettleOutcome, StoreError>,
) -> Result<(), String> {
    match (expected, answered.map_err(|error| error.to_string())?) {
        (SettleOutcome::ClaimLost(expected), SettleOutcome::ClaimLost(found)) => {
            compare_claim(clock, *expected, &found)
        }
        (expected, answered) if expected == answered => Ok(()),
        (expected, answered) => Err(format!("the model says {expected:?}, the store {answered:?}")),
    }
}

fn compare_claim(clock: HistoryClock, mut expected: ClaimOutcome, found: &ClaimOutcome) -> Result<(), String> {
    match (&mut expected, found) {
        (Granted(lease), Granted(found)) => lease.front_only = found.front_only,
        _ if clock == HistoryClock::Paused => {}
        (InProgress(holder), InProgress(found)) | (OutcomeUnknown(holder), OutcomeUnknown(found)) => {
            (holder.age, holder.takeover_in) = (found.age, found.takeover_in);
        }
        (Completed(done), Completed(found)) => done.expires_in = found.expires_in,
        _ => {}
    }
    (expected == *found).then_some(()).ok_or_else(|| format!("the model says {expected:?}, the store {found:?}"))
}
