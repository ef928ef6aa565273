//! The app behind Envoy, as [`Ibid::handle`](ibid::Ibid::handle) sees it: Envoy sends the request once ibid lets it
//! pass, and brings the response.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::{Either, Full};
use ibid::http::{App, AppCall, AppError, DispatchOutcome, RequestBody};
use tokio::{
    sync::{
        mpsc::{self, UnboundedSender},
        oneshot, watch,
    },
    time::timeout,
};

use crate::api::ProbeClient;

/// What Envoy does with a request.
pub(super) enum EnvoyEvent {
    /// No claim protects the request, which passes like this.
    Pass(EnvoyRequest),
    /// The claimed request passes like this. If the sender is dropped, the outcome is unknown.
    Run(EnvoyRequest, oneshot::Sender<EnvoyReply>),
}

pub(super) type EnvoyRequest = Request<RequestBody<EnvoyBody>>;

/// How the request ended.
pub(super) type EnvoyReply = Result<Response<AppBody>, AppError<AppBody>>;

/// The body of a probe's response, or of a response that Envoy brings.
pub(super) type AppBody = Either<Full<Bytes>, EnvoyBody>;

#[derive(Clone)]
pub(super) struct EnvoyApp {
    pub(super) events: UnboundedSender<EnvoyEvent>,
    /// How long Envoy may take to bring the response.
    pub(super) timeout: Duration,
    /// Asks the app about an unknown outcome.
    pub(super) probes: ProbeClient,
}

/// A body that Envoy sends. By default it is empty.
#[derive(Default)]
pub(super) struct EnvoyBody {
    /// Becomes true when the body is read.
    wanted: Option<watch::Sender<bool>>,
    /// `None` after the end.
    parts: Option<mpsc::Receiver<BodyPart>>,
}

pub(super) enum BodyPart {
    Frame(Frame<Bytes>),
    End,
}

/// Envoy gave up the message before its body was complete.
#[derive(Debug, thiserror::Error)]
#[error("Envoy ended the message before its body was complete")]
pub(super) struct LostBody;

impl App<EnvoyBody> for EnvoyApp {
    type Body = AppBody;
    type PassError = Infallible;
    type PassFuture = Ready<Result<Response<AppBody>, Infallible>>;

    const HAS_OWN_DEADLINE: bool = true;

    fn pass(&mut self, request: EnvoyRequest) -> Self::PassFuture {
        let _ = self.events.send(EnvoyEvent::Pass(request));
        ready(Ok(Response::new(Either::Left(Full::default()))))
    }

    async fn send(&mut self, request: EnvoyRequest, call: AppCall<'_>) -> EnvoyReply {
        let failed = |outcome| AppError { outcome, response: None };
        if call.run.is_none() && call.send_state.is_some() && self.probes.is_probe(&request) {
            let probed = self.probes.clone().send(request, call).await;
            return probed.map(|response| response.map(Either::Left)).map_err(|error| failed(error.outcome));
        }
        let (reply, replied) = oneshot::channel();
        if self.events.send(EnvoyEvent::Run(request, reply)).is_err() {
            // Envoy sends a request only after it was let pass.
            let why = "Envoy gave up the request before it was let pass";
            return Err(failed(DispatchOutcome::NotSent(why.into())));
        }
        timeout(self.timeout, replied)
            .await
            .map_err(|_| failed(DispatchOutcome::TimedOut("Envoy brought no response in time".into())))?
            .map_err(|_| {
                let why = "Envoy gave up the request: the client disconnected, the connection to the app broke, or a \
                           time-out of Envoy was over";
                failed(DispatchOutcome::ResponseLost(why.into()))
            })?
    }
}

impl EnvoyBody {
    /// Also returns where Envoy's messages go. `wanted` becomes true when the body is read.
    pub(super) fn channel(wanted: Option<watch::Sender<bool>>) -> (mpsc::Sender<BodyPart>, Self) {
        let (sender, parts) = mpsc::channel(1);
        (sender, Self { wanted, parts: Some(parts) })
    }
}

impl Body for EnvoyBody {
    type Data = Bytes;
    type Error = LostBody;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, LostBody>>> {
        if let Some(wanted) = self.wanted.take() {
            let _ = wanted.send(true);
        }
        let Some(parts) = &mut self.parts else { return Poll::Ready(None) };
        let part = ready!(parts.poll_recv(cx));
        if !matches!(part, Some(BodyPart::Frame(_))) {
            self.parts = None;
        }
        Poll::Ready(match part {
            Some(BodyPart::Frame(frame)) => Some(Ok(frame)),
            Some(BodyPart::End) => None,
            None => Some(Err(LostBody)),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.parts.is_none()
    }
}
