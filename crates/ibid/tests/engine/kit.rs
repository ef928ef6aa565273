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
    Complete, Ended, Engine, Journal, Notice, Observer, Operation, Otherwise, ParkedBy, Policy, Probed, Reason,
    Refusal, Scope, Stored, Verdict,
    store::{Ask, Claim, End, Fingerprint, Held, Lease, Outline, Store, Tags, Token},
};
use parking_lot::Mutex;
use tokio::{task::JoinHandle, time::sleep};

pub(crate) struct World<S: ?Sized> {
    pub(crate) store: Arc<S>,
    pub(crate) engine: Engine,
    log: Arc<Log>,
}

#[derive(Default)]
struct Log {
    attempts: Mutex<Vec<u32>>,
    lost: AtomicUsize,
}

impl Observer for Log {
    fn noticed(&self, notice: &Notice<'_>) {
        if matches!(notice, Notice::LostClaim(_)) {
            self.lost.fetch_add(1, SeqCst);
        }
    }
}

impl<S: Store> World<S> {
    pub(crate) fn new(store: S) -> Self {
        Self::on(Arc::new(store), None)
    }

    pub(crate) fn on(store: Arc<S>, journal: Option<Arc<Journal>>) -> Self {
        let log = Arc::new(Log::default());
        let engine = Engine::with(store.clone(), log.clone(), journal);
        Self { store, engine, log }
    }

    pub(crate) async fn execute(&self, policy: &Policy, ask: Ask, op: Op) -> Verdict<()> {
        let store = self.engine.store().clone();
        let policy = policy.clone().checked().unwrap();
        self.engine.execute(&policy, ask, Counted { op, log: self.log.clone(), store }).await
    }

    pub(crate) fn spawn(&self, policy: &Policy, ask: Ask, op: Op) -> JoinHandle<Verdict<()>> {
        let (engine, policy, log) = (self.engine.clone(), policy.clone().checked().unwrap(), self.log.clone());
        let store = engine.store().clone();
        tokio::spawn(async move { engine.execute(&policy, ask, Counted { op, log, store }).await })
    }

    /// A holder that claims and is never heard of again.
    pub(crate) async fn silent_claim(&self, key: &str) {
        let claim = self.store.claim(&Arc::new(ask(key))).await.unwrap();
        assert!(matches!(claim, Claim::Granted(_)), "{claim:?}");
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

pub(crate) struct Op {
    lasts: Duration,
    how: How,
    probed: Option<Probed>,
}

enum How {
    Complete,
    Release,
    NotStarted,
    Park(ParkedBy),
    /// With whether its own transaction was committed.
    Entrust(Otherwise, bool),
}

impl Op {
    fn new(lasts: Duration, how: How) -> Self {
        Self { lasts, how, probed: None }
    }

    pub(crate) fn quick() -> Self {
        Self::lasting(Duration::ZERO)
    }

    pub(crate) fn lasting(lasts: Duration) -> Self {
        Self::new(lasts, How::Complete)
    }

    pub(crate) fn releasing(lasts: Duration) -> Self {
        Self::new(lasts, How::Release)
    }

    pub(crate) fn not_starting() -> Self {
        Self::new(Duration::ZERO, How::NotStarted)
    }

    pub(crate) fn parking() -> Self {
        Self::new(Duration::ZERO, How::Park(ParkedBy::Answer))
    }

    pub(crate) fn timing_out() -> Self {
        Self::new(Duration::ZERO, How::Park(ParkedBy::Timeout))
    }

    /// Writes its answer in a transaction of its own, which is committed or not.
    pub(crate) fn entrusting(otherwise: Otherwise, committed: bool) -> Self {
        Self::new(Duration::ZERO, How::Entrust(otherwise, committed))
    }

    pub(crate) fn probing(mut self, probed: Probed) -> Self {
        self.probed = Some(probed);
        self
    }
}

struct Counted {
    op: Op,
    log: Arc<Log>,
    store: Arc<dyn Store>,
}

impl Operation for Counted {
    type Answer = ();

    async fn run(&mut self, lease: Option<&Lease>) -> Ended<()> {
        if let How::NotStarted = self.op.how {
            return Ended::NotStarted(Refusal::new(Reason::UpstreamUnreachable, "nobody there"));
        }
        let run = {
            let mut attempts = self.log.attempts.lock();
            attempts.push(lease.map_or(0, |lease| lease.attempt));
            attempts.len()
        };
        sleep(self.op.lasts).await;
        match self.op.how {
            How::Complete => Ended::Complete((), complete(format!("run {run}").as_bytes())),
            How::Release => Ended::Release(()),
            How::Park(by) => Ended::Park((), by),
            How::NotStarted => unreachable!("returned above"),
            How::Entrust(otherwise, committed) => {
                if committed {
                    let Complete { failed, record, outline } = complete(format!("run {run}").as_bytes());
                    let end = End::Complete { failed, record, outline, keep: Policy::ietf().ttl };
                    let held = self.store.settle(lease.expect("it is protected"), &end).await;
                    assert_eq!(held.expect("its own transaction reaches the store"), Held::Held);
                }
                Ended::Entrusted((), otherwise)
            }
        }
    }

    async fn probe(&mut self) -> Probed {
        self.op.probed.take().unwrap_or(Probed::Unclear)
    }
}

pub(crate) fn complete(record: &[u8]) -> Complete {
    Complete { failed: false, record: Bytes::copy_from_slice(record), outline: Outline::default() }
}

pub(crate) fn ask(key: &str) -> Ask {
    ask_for(key, Fingerprint::of_bytes(b"the request"))
}

pub(crate) fn ask_for(key: &str, fingerprint: Fingerprint) -> Ask {
    let policy = Policy::ietf();
    Ask {
        address: Scope::from_parts(&["test"]).address(key, None, None),
        token: Token::mint(),
        fingerprint,
        tags: Tags::new("", "", "test", key),
        label: Bytes::new(),
        hold: policy.lease,
        keep: policy.ttl,
        over: None,
    }
}

pub(crate) fn ran(verdict: Verdict<()>) -> Stored {
    match verdict {
        Verdict::Ran((), stored) => stored,
        other => panic!("expected a run, got {other:?}"),
    }
}

pub(crate) fn is_replay(verdict: Verdict<()>, record: &[u8]) {
    match verdict {
        Verdict::Replay(finished, _) => assert_eq!(finished.record, record),
        other => panic!("expected a replay of {}, got {other:?}", String::from_utf8_lossy(record)),
    }
}

pub(crate) fn is_refused(verdict: Verdict<()>, reason: Reason) {
    match verdict {
        Verdict::Refused(refusal) => assert_eq!(refusal.reason, reason),
        other => panic!("expected {reason}, got {other:?}"),
    }
}
