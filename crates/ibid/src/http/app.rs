//! The app behind the layer, as a tower service or as a server's own client, and the claim under which a handler runs.
//!
//! Invariant: once a handler has [delegated](HandlerClaim::delegate) its answer to a transaction, only that transaction
//! can record it. The layer asks the store afterwards whether it did, and never records an answer itself.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_service::Service;

use super::{
    Route,
    body::{BoxError, RequestBody},
    rules,
};
use crate::{
    engine::{ClaimedRun, CompletedAnswer},
    key::OperationId,
    record::Record,
    store::Lease,
};

/// The app that a layer protects. [`IbidLayer`](super::IbidLayer) makes one of every tower service; a server that sends
/// requests itself implements it to report [how a request failed](AppError).
pub trait App<B>: Clone + Send + 'static {
    /// The body of the app's responses.
    type Body: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static;
    /// The error of [`pass`](Self::pass).
    type PassError;
    /// The future of [`pass`](Self::pass).
    type PassFuture: Future<Output = Result<Response<Self::Body>, Self::PassError>> + Send;

    /// Whether [`AppCall::claim`] is used. An app that does not use it saves the claim's allocation.
    const USES_CLAIM: bool = false;

    /// Whether [`send`](Self::send) adds the headers of [`AppCall`] to the request. Otherwise they are in it already. An
    /// app that writes them out itself saves their places in the map.
    const ADDS_HEADERS: bool = false;

    /// Whether [`send`](Self::send) ends by itself in time. The layer then does not apply the policy's `timeout`.
    const HAS_OWN_DEADLINE: bool = false;

    /// Whether [`send`](Self::send) also sends other requests than the operation's own, such as a probe.
    const SENDS_OTHERS: bool = false;

    /// Sends a request that no claim protects.
    fn pass(&mut self, request: Request<RequestBody<B>>) -> Self::PassFuture;

    /// Sends a request of a claim.
    fn send(
        &mut self, request: Request<RequestBody<B>>, call: AppCall<'_>,
    ) -> impl Future<Output = Result<Response<Self::Body>, AppError<Self::Body>>> + Send;
}

/// The run that a request to the app belongs to.
#[derive(Debug, Clone, Copy)]
pub struct AppCall<'a> {
    /// Identifies the run, for the headers `Ibid-Attempt` and `Ibid-Fence`. `None` for a probe, and if the operation runs
    /// unprotected.
    pub run: Option<RunInfo>,
    /// The value of `X-Request-Id`, if an app that [adds headers](App::ADDS_HEADERS) must add it.
    pub request_id: Option<&'a HeaderValue>,
    /// The claim for the handler. `None` if `run` is, for gRPC calls, and without [`App::USES_CLAIM`].
    pub claim: Option<&'a HandlerClaim>,
    /// Tells the layer whether the request has been sent. `None` in shadow mode, where no claim protects the request.
    pub send_state: Option<&'a SendState>,
}

/// A request without a response of the app.
#[derive(Debug)]
pub struct AppError<B> {
    /// What is known about the request.
    pub outcome: DispatchOutcome,
    /// The response for the client in shadow mode, which does not refuse by itself.
    pub response: Option<Response<B>>,
}

/// How a request to the app failed.
#[derive(Debug, Clone)]
pub enum DispatchOutcome {
    /// No byte of the request was sent.
    NotSent(String),
    /// The request may have been executed.
    ResponseLost(String),
    /// No response came in time, and none is awaited any more.
    TimedOut(String),
}

/// Identifies a run. The layer puts it into the extensions of the handler's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunInfo {
    /// The number of the run, from 1.
    pub attempt: u32,
    /// Grows with every run of the same operation. A resource can refuse a lower fence than it has seen.
    pub fence: u64,
    /// The operation, for [`outbound_key`](crate::outbound_key).
    pub operation: OperationId,
}

impl RunInfo {
    pub(super) fn of(lease: &Lease) -> Self {
        Self { attempt: lease.attempt, fence: lease.fence.0, operation: OperationId::of(&lease.request.address) }
    }
}

/// Tracks whether a request may have been sent. If the request is abandoned while unsent, it provably did not happen.
/// Without [`mark_unsent`](Self::mark_unsent) a request counts as sent.
#[derive(Debug, Default)]
pub struct SendState(AtomicBool);

impl SendState {
    /// Marks the request as unsent until [`mark_sending`](Self::mark_sending).
    pub fn mark_unsent(&self) {
        self.0.store(true, SeqCst);
    }

    /// Marks that bytes of the request may have been sent.
    pub fn mark_sending(&self) {
        self.0.store(false, SeqCst);
    }

    pub(super) fn is_unsent(&self) -> bool {
        self.0.load(SeqCst)
    }
}

/// A tower service as an app. Its handlers find [`RunInfo`] and [`HandlerClaim`] in their request's extensions.
#[derive(Clone)]
pub(super) struct ServiceApp<S>(pub(super) S);

impl<S, B, RB> App<B> for ServiceApp<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: Send + 'static,
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    type Body = RB;
    type PassError = S::Error;
    type PassFuture = S::Future;

    const USES_CLAIM: bool = true;
    const SENDS_OTHERS: bool = true;

    fn pass(&mut self, request: Request<RequestBody<B>>) -> S::Future {
        self.0.call(request)
    }

    // Not an `async fn`, which would store the request twice.
    fn send(
        &mut self, mut request: Request<RequestBody<B>>, call: AppCall<'_>,
    ) -> impl Future<Output = Result<Response<RB>, AppError<RB>>> + Send {
        let Some(run) = call.run else {
            // A probe is sent with a clone of the service, which is not ready yet.
            return SentCall::Probe {
                future: Box::pin(async move {
                    std::future::poll_fn(|cx| self.0.poll_ready(cx)).await?;
                    self.0.call(request).await
                }),
            };
        };
        request.extensions_mut().insert(run);
        call.claim.map(|claim| request.extensions_mut().insert(claim.clone()));
        SentCall::Run { future: self.0.call(request) }
    }
}

pin_project! {
    /// The response of a tower service.
    #[project = SentCallProject]
    enum SentCall<F, P> {
        Run { #[pin] future: F },
        Probe { future: Pin<Box<P>> },
    }
}

impl<F, P, RB, E> Future for SentCall<F, P>
where
    F: Future<Output = Result<Response<RB>, E>>,
    P: Future<Output = Result<Response<RB>, E>>,
    E: Into<BoxError>,
{
    type Output = Result<Response<RB>, AppError<RB>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let sent = match self.project() {
            SentCallProject::Run { future } => future.poll(cx),
            SentCallProject::Probe { future } => future.as_mut().poll(cx),
        };
        sent.map_err(lost)
    }
}

fn lost<B>(error: impl Into<BoxError>) -> AppError<B> {
    let why = format!("the app's answer was lost: {}", error.into());
    AppError { outcome: DispatchOutcome::ResponseLost(why), response: None }
}

/// The claim under which a handler runs, in its request's extensions. gRPC calls have none, because their responses are
/// frames that their handlers do not see.
///
/// `ibid_postgres_tx::complete_in` uses it to record the answer in the handler's own transaction.
#[derive(Clone)]
pub struct HandlerClaim(Arc<dyn HoldsClaim>);

/// A value that contains the claim for a handler, so that the claim needs no allocation of its own.
pub(super) trait HoldsClaim: Send + Sync {
    /// The claim, which is set before the handler runs.
    fn claim(&self) -> &HandlerClaimState;
}

pub(super) struct HandlerClaimState {
    lease: Lease,
    route: Arc<Route>,
    requested_at_ms: u64,
    started: Instant,
    /// The last record that was delegated to a transaction.
    delegated_record: Mutex<Option<Bytes>>,
}

impl HandlerClaimState {
    pub(super) fn new(run: &ClaimedRun, route: &Arc<Route>, requested_at_ms: u64) -> Self {
        Self {
            lease: run.lease().clone(),
            route: route.clone(),
            requested_at_ms,
            started: run.claimed_at(),
            delegated_record: Mutex::new(None),
        }
    }
}

/// The policy does not remember responses with this status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the policy remembers no answer with status {0}; roll back, and answer with it")]
pub struct NotRememberedError(pub StatusCode);

impl HandlerClaim {
    /// Returns a handle to the claim in `by`, which must be set.
    pub(super) fn held(by: Arc<dyn HoldsClaim>) -> Self {
        Self(by)
    }

    /// The lease of the claim.
    pub fn lease(&self) -> &Lease {
        &self.0.claim().lease
    }

    /// The operation, for [`outbound_key`](crate::outbound_key).
    pub fn operation(&self) -> OperationId {
        OperationId::of(&self.0.claim().lease.request.address)
    }

    /// The route that governs the request.
    pub fn route(&self) -> &Arc<Route> {
        &self.0.claim().route
    }

    /// How long to remember the answer.
    pub fn ttl(&self) -> Duration {
        self.0.claim().route.policy.ttl
    }

    /// Encodes the answer for a transaction, as the layer would. From now on only that transaction can record an
    /// answer: call it immediately before the write.
    ///
    /// # Errors
    /// If the policy does not remember such an answer. Nothing has changed then.
    pub fn delegate(&self, response: &Response<Bytes>) -> Result<CompletedAnswer, NotRememberedError> {
        let claim = self.0.claim();
        let policy = &claim.route.policy;
        if !rules::is_remembered(policy, response.status()) {
            return Err(NotRememberedError(response.status()));
        }
        let complete = rules::completed_answer_of(policy, response, claim.requested_at_ms, claim.started);
        *claim.delegated_record.lock() = Some(complete.record.clone());
        Ok(complete)
    }

    /// Returns `None` if no answer was delegated, otherwise whether `with` is that answer, ignoring times.
    pub(super) fn is_delegated(&self, with: Option<&Bytes>) -> Option<bool> {
        let entrusted = self.0.claim().delegated_record.lock().clone()?;
        let timeless = |record: &Bytes| {
            let record = Record::decode(record.clone()).ok()?;
            Some(Record { requested_at_ms: 0, completed_at_ms: 0, cookies: Vec::new(), ..record })
        };
        Some(with.is_some_and(|with| timeless(with).is_some_and(|with| Some(with) == timeless(&entrusted))))
    }
}

impl fmt::Debug for HandlerClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerClaim").field("lease", self.lease()).finish_non_exhaustive()
    }
}
