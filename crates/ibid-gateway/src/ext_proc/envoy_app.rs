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
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame};
use http_body_util::Full;
use ibid::http::{App, AppCall, AppError, DispatchOutcome, RequestBody};
use tokio::{
    sync::{mpsc::UnboundedSender, oneshot},
    time::timeout,
};

use crate::api::ProbeClient;

/// What the work on a request needs from Envoy.
pub(super) enum EnvoyEvent {
    /// The body is read now.
    BodyWanted,
    /// No claim protects the request, which passes with these headers.
    Pass(HeaderMap),
    /// The claimed request passes with these headers. If the sender is dropped, the outcome is unknown.
    Run(HeaderMap, RunMode, oneshot::Sender<EnvoyReply>),
}

/// Whether ibid decides about the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunMode {
    Enforced,
    /// The client gets the response unchanged.
    Shadow,
}

/// How the request ended.
pub(super) type EnvoyReply = Result<Response<Full<Bytes>>, DispatchOutcome>;

#[derive(Clone)]
pub(super) struct EnvoyApp {
    pub(super) events: UnboundedSender<EnvoyEvent>,
    /// How long Envoy may take to bring the response.
    pub(super) timeout: Duration,
    /// Asks the app about an unknown outcome.
    pub(super) probes: ProbeClient,
}

/// The body of a request, which Envoy sends when it is asked for it.
pub(super) enum EnvoyBody {
    Empty,
    NotRequested(UnboundedSender<EnvoyEvent>, oneshot::Receiver<Bytes>),
    Awaited(oneshot::Receiver<Bytes>),
}

/// Envoy gave up the request before its body was complete.
#[derive(Debug, thiserror::Error)]
#[error("Envoy ended the request before its body was complete")]
pub(super) struct LostBody;

impl App<EnvoyBody> for EnvoyApp {
    type Body = Full<Bytes>;
    type PassError = Infallible;
    type PassFuture = Ready<Result<Response<Full<Bytes>>, Infallible>>;

    const HAS_OWN_DEADLINE: bool = true;

    fn pass(&mut self, request: Request<RequestBody<EnvoyBody>>) -> Self::PassFuture {
        let _ = self.events.send(EnvoyEvent::Pass(request.into_parts().0.headers));
        ready(Ok(Response::default()))
    }

    async fn send(
        &mut self, request: Request<RequestBody<EnvoyBody>>, call: AppCall<'_>,
    ) -> Result<Response<Full<Bytes>>, AppError<Full<Bytes>>> {
        if call.run.is_none() && call.send_state.is_some() && self.probes.is_probe(&request) {
            return self.probes.clone().send(request, call).await;
        }
        let mode = if call.send_state.is_some() { RunMode::Enforced } else { RunMode::Shadow };
        let (reply, replied) = oneshot::channel();
        let reply = match self.events.send(EnvoyEvent::Run(request.into_parts().0.headers, mode, reply)) {
            // Envoy sends a request only after it was let pass.
            Err(_) => Err(DispatchOutcome::NotSent("Envoy gave up the request before it was let pass".into())),
            Ok(()) => match timeout(self.timeout, replied).await {
                Ok(Ok(reply)) => reply,
                Ok(Err(_)) => Err(DispatchOutcome::ResponseLost(
                    "Envoy gave up the request: the client disconnected, the connection to the app broke, or a time-out \
                     of Envoy was over"
                        .into(),
                )),
                Err(_) => Err(DispatchOutcome::TimedOut("Envoy brought no response in time".into())),
            },
        };
        reply.map_err(|outcome| AppError { outcome, response: None })
    }
}

impl Body for EnvoyBody {
    type Data = Bytes;
    type Error = LostBody;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, LostBody>>> {
        loop {
            match std::mem::replace(&mut *self, Self::Empty) {
                Self::Empty => return Poll::Ready(None),
                Self::NotRequested(events, content) => {
                    let _ = events.send(EnvoyEvent::BodyWanted);
                    *self = Self::Awaited(content);
                }
                Self::Awaited(mut content) => {
                    let received = Pin::new(&mut content).poll(cx);
                    if received.is_pending() {
                        *self = Self::Awaited(content);
                    }
                    return Poll::Ready(Some(ready!(received).map(Frame::data).map_err(|_| LostBody)));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Empty)
    }
}
