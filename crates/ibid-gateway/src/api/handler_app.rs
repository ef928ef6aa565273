//! A handler in another process, as [`Ibid::handle`](ibid::Ibid::handle) sees it: it gets the request by the answer to
//! `begin`, and responds by `end`.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, Uri, header};
use http_body_util::{BodyExt, Full};
use ibid::http::{App, AppCall, AppError, DispatchOutcome, RequestBody, Route};
use tokio::time::{Instant, sleep_until};

use super::{
    handle::HandleSealer,
    messages::{HandlerFailure, RunGrant},
    pending::{EncodedGrant, HandlerReply, PendingExchange},
};
use crate::{proxy::Proxy, server::client_body::ClientBody};

/// The handler of one exchange.
#[derive(Clone)]
pub(super) struct HandlerApp {
    pub(super) exchange: Arc<PendingExchange>,
    pub(super) sealer: Arc<HandleSealer>,
    pub(super) requested_at_ms: u64,
    /// Limits the handler if no claim names its route.
    pub(super) route: Option<Arc<Route>>,
    /// Asks the app about an unknown outcome. `None` if the exchange continues one that was decided earlier.
    pub(super) probes: Option<ProbeClient>,
    /// The handle of an exchange that was decided earlier.
    pub(super) resumed: Option<String>,
}

#[derive(Clone)]
pub(crate) struct ProbeClient {
    /// The target of the exchange's own request. A probe has another one.
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    pub(crate) proxy: Proxy,
}

type HandlerResponse = Result<Response<Full<Bytes>>, AppError<Full<Bytes>>>;

impl App<Full<Bytes>> for HandlerApp {
    type Body = Full<Bytes>;
    type PassError = Infallible;
    type PassFuture = Ready<Result<Response<Full<Bytes>>, Infallible>>;

    const USES_CLAIM: bool = true;
    const HAS_OWN_DEADLINE: bool = true;

    fn pass(&mut self, _: Request<RequestBody<Full<Bytes>>>) -> Self::PassFuture {
        self.exchange.pass();
        ready(Ok(Response::default()))
    }

    async fn send(&mut self, request: Request<RequestBody<Full<Bytes>>>, call: AppCall<'_>) -> HandlerResponse {
        match &self.probes {
            Some(probes) if call.run.is_none() && call.send_state.is_some() && probes.is_probe(&request) => {
                probes.clone().send(request, call).await
            }
            _ => self.run(&request, call).await,
        }
    }
}

impl HandlerApp {
    /// Lets the app run its handler, and waits for the reply until the deadline and `late_answer` have passed.
    async fn run<B>(&self, request: &Request<B>, call: AppCall<'_>) -> HandlerResponse {
        let failed = |outcome| AppError { outcome, response: None };
        let route =
            call.claim.map(|claim| claim.route()).or(self.route.as_ref()).expect("a covered request has a route");
        let (timeout, late_answer) = (route.policy.timeout, route.policy.late_answer_or_lease());
        let grant = self.grant(request, call, route, timeout);
        let Some(mut replied) = self.exchange.start(grant, Instant::now() + timeout, self.resumed.is_none()) else {
            return Err(failed(DispatchOutcome::NotSent("the app no longer waits to run its handler".into())));
        };
        loop {
            let until = self.exchange.deadline().expect("it was started") + late_answer;
            tokio::select! {
                biased;
                reply = &mut replied => return match reply {
                    Ok(HandlerReply::Response(response)) => Ok(response),
                    Ok(HandlerReply::Failed(HandlerFailure::NotStarted)) => {
                        Err(failed(DispatchOutcome::NotSent("the app says that its handler did not start".into())))
                    }
                    Ok(HandlerReply::Failed(HandlerFailure::Unknown)) => {
                        Err(failed(DispatchOutcome::ResponseLost("the app says that its handler failed".into())))
                    }
                    Err(_) => Err(failed(DispatchOutcome::ResponseLost("the exchange was given up".into()))),
                },
                // The deadline may have been extended meanwhile.
                () = sleep_until(until) => if self.exchange.deadline().is_some_and(|now| now + late_answer <= until) {
                    return Err(failed(DispatchOutcome::TimedOut("the handler did not end in time".into())));
                }
            }
        }
    }

    fn grant<B>(&self, request: &Request<B>, call: AppCall<'_>, route: &Route, timeout: Duration) -> EncodedGrant {
        let lease = call.claim.map(|claim| claim.lease());
        let handle = self.resumed.clone().unwrap_or_else(|| {
            let claim = lease.map(|lease| (route, lease));
            self.sealer.seal(self.exchange.id, self.requested_at_ms, request, claim)
        });
        let own = ["ibid-attempt", "ibid-fence", "ibid-operation", "x-request-id"].into_iter();
        let headers = own.filter_map(|name| {
            let value = request.headers().get(name)?.to_str().ok()?;
            Some((name, value))
        });
        let grant = RunGrant {
            attempt: call.run.map(|run| run.attempt),
            fence: call.run.map(|run| run.fence),
            operation: call.run.map(|run| run.operation.to_string()),
            key: lease.map(|lease| lease.request.tags.key()).unwrap_or_default(),
            deadline_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            headers: headers.collect(),
        };
        EncodedGrant { message: grant.encode(&handle), handle }
    }
}

impl ProbeClient {
    pub(crate) fn is_probe<B>(&self, request: &Request<B>) -> bool {
        *request.method() != self.method || request.uri().path_and_query() != self.uri.path_and_query()
    }

    /// Sends a probe, which has no body, to the upstream.
    pub(crate) async fn send<B>(mut self, request: Request<B>, call: AppCall<'_>) -> HandlerResponse {
        let mut request: Request<RequestBody<ClientBody>> = request.map(|_| RequestBody::default());
        request.headers_mut().remove(header::CONTENT_LENGTH);
        let lost = |outcome| AppError { outcome, response: None };
        let response = self.proxy.send(request, call).await.map_err(|error| lost(error.outcome))?;
        let (head, body) = response.into_parts();
        let body = body.collect().await.map_err(|why| lost(DispatchOutcome::ResponseLost(why.to_string())))?;
        Ok(Response::from_parts(head, Full::new(body.to_bytes())))
    }
}
