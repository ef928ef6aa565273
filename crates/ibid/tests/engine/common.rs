//! An engine on a store, operations that count themselves, and short ways to say what is expected.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use ibid::{
    Claimant, Decision, Engine, Observer, Operation, Policy, Refusal, RefusalReason, RunOutcome, Scope,
    engine::{CompletedAnswer, OnRollback, ProbeOutcome, StoredAs, UnknownCause},
    journal::Journal,
    observe::EngineEvent,
    store::{
        ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Lease, RecordSummary, SettleOutcome, Settlement, Store,
        Tags,
    },
};
use parking_lot::Mutex;
use tokio::{task::JoinHandle, time::sleep};

pub(crate) struct EngineFixture<S: ?Sized> {
    pub(crate) store: Arc<S>,
    pub(crate) engine: Engine,
    log: Arc<EngineLog>,
}

#[derive(Default)]
struct EngineLog {
    attempts: Mutex<Vec<u32>>,
    lost: AtomicUsize,
}

impl Observer for EngineLog {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        if matches!(notice, EngineEvent::ClaimLost(_)) {
            self.lost.fetch_add(1, SeqCst);
        }
    }
}

impl<S: Store> EngineFixture<S> {
    pub(crate) fn new(store: S) -> Self {
        Self::on(Arc::new(store), None)
    }

    pub(crate) fn on(store: Arc<S>, journal: Option<Arc<Journal>>) -> Self {
        let log = Arc::new(EngineLog::default());
        let engine = Engine::with_observer(store.clone(), log.clone(), journal);
        Self { store, engine, log }
    }

    pub(crate) async fn execute(&self, policy: &Policy, ask: ClaimRequest, op: TestOperation) -> Decision<()> {
        let store = self.engine.store().clone();
        let policy = policy.clone().checked().unwrap();
        self.engine.execute(policy.terms(), ask, CountedOperation { op, log: self.log.clone(), store }).await
    }

    pub(crate) fn spawn(&self, policy: &Policy, ask: ClaimRequest, op: TestOperation) -> JoinHandle<Decision<()>> {
        let (engine, policy, log) = (self.engine.clone(), policy.clone().checked().unwrap(), self.log.clone());
        let store = engine.store().clone();
        tokio::spawn(async move { engine.execute(policy.terms(), ask, CountedOperation { op, log, store }).await })
    }

    /// A holder that claims and is never heard of again.
    pub(crate) async fn claim_and_vanish(&self, key: &str) {
        let claim = self.store.claim(&Arc::new(claim_request(key))).await.unwrap();
        assert!(matches!(claim, ClaimOutcome::Granted(_)), "{claim:?}");
    }

    pub(crate) fn runs(&self) -> usize {
        self.log.attempts.lock().len()
    }

    pub(crate) fn attempts(&self) -> Vec<u32> {
        self.log.attempts.lock().clone()
    }

    pub(crate) fn lost_claims(&self) -> usize {
        self.log.lost.load(SeqCst)
    }
}

pub(crate) struct TestOperation {
    duration: Duration,
    ending: OperationEnding,
    probe_outcome: Option<ProbeOutcome>,
}

enum OperationEnding {
    Complete,
    Release,
    NotStarted,
    Park(UnknownCause),
    /// With whether its own transaction was committed.
    DelegateToTransaction(OnRollback, bool),
}

impl TestOperation {
    fn new(duration: Duration, ending: OperationEnding) -> Self {
        Self { duration, ending, probe_outcome: None }
    }

    pub(crate) fn quick() -> Self {
        Self::lasting(Duration::ZERO)
    }

    pub(crate) fn lasting(lasts: Duration) -> Self {
        Self::new(lasts, OperationEnding::Complete)
    }

    pub(crate) fn releasing(lasts: Duration) -> Self {
        Self::new(lasts, OperationEnding::Release)
    }

    pub(crate) fn not_starting() -> Self {
        Self::new(Duration::ZERO, OperationEnding::NotStarted)
    }

    pub(crate) fn parking() -> Self {
        Self::new(Duration::ZERO, OperationEnding::Park(UnknownCause::AppSaidSo))
    }

    pub(crate) fn timing_out() -> Self {
        Self::new(Duration::ZERO, OperationEnding::Park(UnknownCause::TimedOut))
    }

    /// Writes its answer in a transaction of its own, which is committed or not.
    pub(crate) fn delegating(otherwise: OnRollback, committed: bool) -> Self {
        Self::new(Duration::ZERO, OperationEnding::DelegateToTransaction(otherwise, committed))
    }

    pub(crate) fn probing(mut self, probed: ProbeOutcome) -> Self {
        self.probe_outcome = Some(probed);
        self
    }
}

struct CountedOperation {
    op: TestOperation,
    log: Arc<EngineLog>,
    store: Arc<dyn Store>,
}

impl Operation for CountedOperation {
    type Answer = ();

    async fn run(&mut self, lease: Option<&Lease>) -> RunOutcome<()> {
        if let OperationEnding::NotStarted = self.op.ending {
            return RunOutcome::NotStarted(Refusal::new(RefusalReason::UpstreamUnreachable, "nobody there"));
        }
        let run = {
            let mut attempts = self.log.attempts.lock();
            attempts.push(lease.map_or(0, |lease| lease.attempt));
            attempts.len()
        };
        sleep(self.op.duration).await;
        match self.op.ending {
            OperationEnding::Complete => RunOutcome::Complete((), complete(format!("run {run}").as_bytes())),
            OperationEnding::Release => RunOutcome::Release(()),
            OperationEnding::Park(by) => RunOutcome::Park((), by),
            OperationEnding::NotStarted => unreachable!("returned above"),
            OperationEnding::DelegateToTransaction(otherwise, committed) => {
                if committed {
                    let CompletedAnswer { failed, record, summary: outline } =
                        complete(format!("run {run}").as_bytes());
                    let end = Settlement::Complete { failed, record, summary: outline, ttl: Policy::ietf().ttl };
                    let held = self.store.settle(lease.expect("it is protected"), &end).await;
                    assert_eq!(held.expect("its own transaction reaches the store"), SettleOutcome::Applied);
                }
                RunOutcome::DelegatedToTransaction((), otherwise)
            }
        }
    }
}

impl Claimant for CountedOperation {
    async fn probe(&mut self) -> ProbeOutcome {
        self.op.probe_outcome.take().unwrap_or(ProbeOutcome::Inconclusive)
    }
}

pub(crate) fn complete(record: &[u8]) -> CompletedAnswer {
    CompletedAnswer { failed: false, record: Bytes::copy_from_slice(record), summary: RecordSummary::default() }
}

pub(crate) fn claim_request(key: &str) -> ClaimRequest {
    claim_request_for(key, Fingerprint::of_bytes(b"the request"))
}

pub(crate) fn claim_request_for(key: &str, fingerprint: Fingerprint) -> ClaimRequest {
    let policy = Policy::ietf();
    ClaimRequest {
        address: Scope::from_parts(&["test"]).address(key, None, None),
        token: ClaimToken::mint(),
        fingerprint,
        tags: Tags::new("", "", "test", key),
        label: Bytes::new(),
        lease: policy.lease,
        ttl: policy.ttl,
        take_over: None,
    }
}

pub(crate) fn expect_ran(verdict: Decision<()>) -> StoredAs {
    match verdict {
        Decision::Ran((), stored) => stored,
        other => panic!("expected a run, got {other:?}"),
    }
}

pub(crate) fn assert_replay(verdict: Decision<()>, record: &[u8]) {
    match verdict {
        Decision::Replay(finished, _) => assert_eq!(finished.record, record),
        other => panic!("expected a replay of {}, got {other:?}", String::from_utf8_lossy(record)),
    }
}

pub(crate) fn assert_refused(verdict: Decision<()>, reason: RefusalReason) {
    match verdict {
        Decision::Refused(refusal) => assert_eq!(refusal.reason, reason),
        other => panic!("expected {reason}, got {other:?}"),
    }
}
