//! Idempotency for handlers without a layer.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    sync::oneshot,
    task::JoinError,
    time::{Instant, timeout},
};

use crate::{
    engine::{
        Claimant, CompletedAnswer, Decision, Engine, Operation, RunOutcome, ShadowRunOutcome, StoredAs, UnknownCause,
    },
    key::{IdempotencyKey, mask},
    policy::{CheckedPolicy, InvalidPolicy, LabelKeyDisplay, OnMismatch, Policy, PolicyMode},
    refusal::{Refusal, RefusalReason},
    scope::Scope,
    store::{ClaimRequest, Fingerprint, Lease, Store, Tags, key_hash},
    time::now_ms,
};

/// An idempotency key, optionally with the fingerprint of its request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunKey {
    key: String,
    fingerprint: Fingerprint,
}

/// The result of [`run`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunResult {
    /// The operation ran now.
    First(Bytes),
    /// An earlier call ran the operation; this was its result.
    Replayed(Bytes),
}

/// Why [`run`] has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The operation failed. The failure is not remembered: the next call runs the operation again.
    #[error("the operation failed: {0}")]
    Failed(#[source] E),
    /// The operation was not run, or its outcome is unknown; the refusal says which.
    #[error("{0}")]
    Refused(Refusal),
    /// The policy is invalid. Nothing was run.
    #[error("the policy cannot be used: {0}")]
    Policy(#[source] InvalidPolicy),
    /// The operation panicked or was cancelled. Its outcome is recorded as unknown.
    #[error("the operation was aborted: {0}")]
    Aborted(#[source] JoinError),
}

/// Runs an operation at most once per key and scope, and remembers its result.
///
/// The operation runs in its own task: dropping the returned future does not cancel it. `Ok` is remembered for the
/// policy's `ttl`. `Err` means that the operation did not happen; the next call runs it again. A panic leaves the
/// outcome unknown. If a run exceeds the policy's `timeout`, the caller is refused and the run continues: a result
/// within `late_answer` is remembered, otherwise the outcome is unknown. The key must match the policy's `key` and is
/// lower-cased like in a layer. Settings about HTTP requests and responses have no effect here.
///
/// ```
/// # use std::sync::Arc;
/// # use bytes::Bytes;
/// # use ibid::{Policy, RunResult, Scope, run, store::{Memory, Store}};
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let store: Arc<dyn Store> = Arc::new(Memory::default());
/// let charge = |_attempt| async { Ok::<_, std::io::Error>(Bytes::from("charged")) };
///
/// let scope = Scope::from_parts(&["acme"]);
/// let first = run(&store, &Policy::ietf(), "order-17", &scope, charge).await.unwrap();
/// let again = run(&store, &Policy::ietf(), "order-17", &scope, charge).await.unwrap();
/// assert_eq!(first, RunResult::First(Bytes::from("charged")));
/// assert_eq!(again, RunResult::Replayed(Bytes::from("charged")));
/// # }
/// ```
///
/// # Errors
/// See [`RunError`].
pub async fn run<F, R, E>(
    store: &Arc<dyn Store>, policy: &Policy, key: impl Into<RunKey>, scope: &Scope, operation: F,
) -> Result<RunResult, RunError<E>>
where
    F: FnOnce(u32) -> R + Send + 'static,
    R: Future<Output = Result<Bytes, E>> + Send + 'static,
    E: Send + 'static,
{
    let policy = policy.clone().checked().map_err(RunError::Policy)?;
    let RunKey { key, fingerprint } = key.into();
    let key = IdempotencyKey::new(&policy.key, key)
        .map_err(|why| RunError::Refused(Refusal::new(RefusalReason::KeyInvalid, why)))?
        .into_string();
    let own_entry = (policy.on_mismatch == OnMismatch::New).then_some(&fingerprint);
    let shown = if policy.label.key == LabelKeyDisplay::Clear { key.clone() } else { mask(&key) };
    let (address, tags) =
        (scope.address(&key, own_entry, None), Tags::from_parts(["", "", "run", &shown, &key_hash(&key)]));
    let ask = ClaimRequest::new(address, fingerprint, tags, Bytes::new(), policy.terms());
    let engine = Engine::new(store.clone());
    if policy.mode == PolicyMode::Shadow {
        return run_in_shadow(&engine, policy, ask, operation).await;
    }
    let (late, is_late) = oneshot::channel();
    let operation = FunctionOperation {
        operation: Some(operation),
        fingerprint,
        timeout: policy.timeout,
        late_answer: policy.late_answer_or_lease(),
        late_sender: Some(late),
        marker: std::marker::PhantomData,
    };
    let task = tokio::spawn(async move { engine.execute(policy.terms(), ask, operation).await });
    let late = || {
        let detail = format!("the operation did not end in time; whether it took place is not known ({})", mask(&key));
        Err(RunError::Refused(Refusal::new(RefusalReason::UpstreamTimeout, detail)))
    };
    let ended = tokio::select! {
        biased;
        ended = task => ended,
        Ok(()) = is_late => return late(),
    };
    match ended.map_err(RunError::Aborted)? {
        Decision::Ran(Ok(bytes), stored) if stored != StoredAs::OutcomeUnknown => Ok(RunResult::First(bytes)),
        Decision::Ran(Err(Some(error)), _) => Err(RunError::Failed(error)),
        Decision::Ran(_, _) => late(),
        Decision::Replay(finished, _) => Ok(RunResult::Replayed(finished.record)),
        Decision::Refused(refusal) => Err(RunError::Refused(refusal)),
    }
}

/// Always runs the operation, and observes in parallel what enforcement would have done.
async fn run_in_shadow<F, R, E>(
    engine: &Engine, policy: CheckedPolicy, ask: ClaimRequest, operation: F,
) -> Result<RunResult, RunError<E>>
where
    F: FnOnce(u32) -> R + Send + 'static,
    R: Future<Output = Result<Bytes, E>> + Send + 'static,
    E: Send + 'static,
{
    let (started, requested_at_ms, own) = (Instant::now(), now_ms(), ask.fingerprint);
    let by_version = move |version| (version <= Fingerprint::VERSION).then_some(Fingerprint { version, ..own });
    let observation = engine.observe(*policy.terms(), ask, by_version, None, |_| {});
    match tokio::spawn(operation(1)).await.map_err(RunError::Aborted)? {
        Ok(bytes) => {
            let answer = CompletedAnswer::of_bytes(&bytes, false, requested_at_ms, started);
            observation.end(ShadowRunOutcome::Complete(answer));
            Ok(RunResult::First(bytes))
        }
        Err(error) => {
            observation.end(ShadowRunOutcome::Release);
            Err(RunError::Failed(error))
        }
    }
}

struct FunctionOperation<F, R> {
    operation: Option<F>,
    fingerprint: Fingerprint,
    timeout: Duration,
    late_answer: Duration,
    /// Signals the caller that `timeout` has passed and that the operation continues in the background.
    late_sender: Option<oneshot::Sender<()>>,
    marker: std::marker::PhantomData<fn() -> R>,
}

impl<F, R, E> Operation for FunctionOperation<F, R>
where
    F: FnOnce(u32) -> R + Send,
    R: Future<Output = Result<Bytes, E>> + Send,
    E: Send,
{
    /// `Err(None)`: the run exceeded `timeout`.
    type Answer = Result<Bytes, Option<E>>;

    async fn run(&mut self, lease: Option<&Lease>) -> RunOutcome<Self::Answer> {
        let (started, requested_at_ms) = (Instant::now(), now_ms());
        let operation = self.operation.take().expect("an operation runs once");
        let attempt = lease.map_or(1, |lease| lease.attempt);
        let mut running = pin!(operation(attempt));
        let mut result = timeout(self.timeout, &mut running).await;
        let mut by = UnknownCause::TimedOut;
        if result.is_err() && lease.is_some() && !self.late_answer.is_zero() {
            let _ = self.late_sender.take().map(|late| late.send(()));
            result = timeout(self.late_answer, running).await;
            by = UnknownCause::NoLateAnswer;
        }
        match result {
            Err(_) => RunOutcome::Park(Err(None), by),
            Ok(Err(error)) => RunOutcome::Release(Err(Some(error))),
            Ok(Ok(bytes)) => {
                let answer = CompletedAnswer::of_bytes(&bytes, false, requested_at_ms, started);
                RunOutcome::Complete(Ok(bytes), answer)
            }
        }
    }
}

impl<F: Send, R> Claimant for FunctionOperation<F, R> {
    /// The fingerprint of plain bytes is the same in every version.
    fn fingerprint(&self, version: u8) -> Option<Fingerprint> {
        (version <= Fingerprint::VERSION).then_some(Fingerprint { version, ..self.fingerprint })
    }
}

impl RunKey {
    /// Binds the key to these request bytes: the policy decides what a reuse with other bytes gets.
    pub fn with_request(key: impl Into<String>, request: &[u8]) -> Self {
        Self { key: key.into(), fingerprint: Fingerprint::of_bytes(request) }
    }
}

impl From<&str> for RunKey {
    fn from(key: &str) -> Self {
        key.to_owned().into()
    }
}

impl From<String> for RunKey {
    fn from(key: String) -> Self {
        Self { key, fingerprint: Fingerprint::NONE }
    }
}
