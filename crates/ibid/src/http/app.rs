//! The app behind the layer, as a tower service or as a server's own client.

use std::{
    future::Future,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
};

use bytes::Buf;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::{
    HandlerClaim,
    body::{BoxError, RequestBody},
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
    /// Identifies the run. `None` for a probe, and if the operation runs unprotected.
    pub run: Option<RunInfo>,
    /// The claim for the handler. `None` if `run` is, and for gRPC calls.
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
}

/// Identifies a run. The layer puts it into the extensions of the handler's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunInfo {
    /// The number of the run, from 1.
    pub attempt: u32,
    /// Grows with every run of the same operation. A resource can refuse a lower fence than it has seen.
    pub fence: u64,
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

    fn pass(&mut self, request: Request<RequestBody<B>>) -> S::Future {
        self.0.call(request)
    }

    async fn send(
        &mut self, mut request: Request<RequestBody<B>>, call: AppCall<'_>,
    ) -> Result<Response<RB>, AppError<RB>> {
        match call.run {
            Some(run) => {
                request.extensions_mut().insert(run);
                call.claim.map(|claim| request.extensions_mut().insert(claim.clone()));
            }
            // A probe is sent with a clone of the service, which is not ready yet.
            None => std::future::poll_fn(|cx| self.0.poll_ready(cx)).await.map_err(lost)?,
        }
        self.0.call(request).await.map_err(lost)
    }
}

fn lost<B>(error: impl Into<BoxError>) -> AppError<B> {
    let why = format!("the app's answer was lost: {}", error.into());
    AppError { outcome: DispatchOutcome::ResponseLost(why), response: None }
}
