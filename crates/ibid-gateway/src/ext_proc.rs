//! Envoy's external processing: Envoy asks ibid about each request, and sends it to the app itself.
//!
//! It is a transport around [`Ibid::handle`], as the exchange API is. Each HTTP request is one gRPC stream
//! ([`stream`]). The request begins when its body is complete and ends when the body of the response is, and Envoy goes
//! on only after ibid's reply ([`envoy_app`]). If a stream ends before the response was complete, the outcome is
//! unknown.

use std::{io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HeaderMutation, ProcessingRequest, ProcessingResponse,
    external_processor_server::{ExternalProcessor, ExternalProcessorServer},
    processing_request::Request as EnvoyRequest,
};
use futures_util::stream::BoxStream;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Full};
use ibid::{
    Ibid, Refusal, RefusalReason,
    http::{Protocol, RequestSender, ResponseBody, RouteMatch, carries_key, refusal_response},
};
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot, watch},
    time::{sleep, timeout},
};
use tonic::{
    Status, Streaming,
    transport::{Server, server::TcpIncoming},
};

use self::{
    envoy_app::{EnvoyApp, EnvoyBody, EnvoyEvent, RunMode},
    messages::{MessageKind, header_changes, immediate, pass},
    stream::{EnvoyStream, StreamError},
};
use crate::{
    api::ProbeClient,
    proxy::{Proxy, ProxyClient},
    server::ambiguity,
    snapshot::{RequestHead, RoutedUpstream},
    watch::LiveConfig,
};

mod envoy_app;
mod messages;
mod stream;

/// At shutdown: maximum time for the last streams to end.
const LAST_STREAMS_TIMEOUT: Duration = Duration::from_secs(2);
/// At shutdown: maximum time for the settlements of requests that were given up to reach the store.
const SETTLE_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// A listening external processor.
pub struct ExtProcServer {
    listener: TcpListener,
    state: Arc<ExtProcState>,
}

struct ExtProcState {
    live: Arc<LiveConfig>,
    ibid: Ibid,
    /// Becomes true at shutdown: nothing more begins.
    stop: watch::Receiver<bool>,
}

/// Serves the streams of all connections.
struct ExtProcService {
    state: Arc<ExtProcState>,
    /// Becomes true when the remaining streams must end.
    closing: watch::Receiver<bool>,
}

impl ExtProcServer {
    pub async fn bind(
        address: SocketAddr, live: Arc<LiveConfig>, ibid: Ibid, stop: watch::Receiver<bool>,
    ) -> Result<Self, String> {
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(|why| format!("ext_proc.listen: {address} cannot be bound: {why}"))?;
        Ok(Self { listener, state: Arc::new(ExtProcState { live, ibid, stop }) })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `ended`. Requests that began before a shutdown can end until then; the outcome of the others is
    /// unknown.
    pub async fn run(self, ended: oneshot::Receiver<()>) {
        let Self { listener, state } = self;
        let (max_message, max_streams) = {
            let settings = &state.live.now().settings;
            (usize::try_from(settings.buffer_memory / 4).unwrap_or(usize::MAX), settings.max_running)
        };
        let (close, mut closing) = watch::channel(false);
        let service = ExtProcService { state: state.clone(), closing: closing.clone() };
        let service = ExternalProcessorServer::new(service).max_decoding_message_size(max_message);
        let stopped = async move {
            let _ = ended.await;
            let _ = close.send(true);
            // Keeps the channel open until the streams have ended.
            close.closed().await;
        };
        let serving = Server::builder()
            .max_concurrent_streams(u32::try_from(max_streams).ok())
            .add_service(service)
            .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), stopped);
        let deadline = async {
            let _ = closing.wait_for(|is_closing| *is_closing).await;
            sleep(LAST_STREAMS_TIMEOUT).await;
        };
        tokio::select! {
            served = serving => {
                if let Err(why) = served {
                    tracing::error!(%why, "ext_proc: Envoy is no longer served");
                }
            }
            () = deadline => {}
        }
        let later = state.ibid.engine().settle_queue();
        let _ = timeout(SETTLE_FLUSH_TIMEOUT, later.wait_until_empty()).await;
    }
}

#[tonic::async_trait]
impl ExternalProcessor for ExtProcService {
    type ProcessStream = BoxStream<'static, Result<ProcessingResponse, Status>>;

    async fn process(
        &self, request: tonic::Request<Streaming<ProcessingRequest>>,
    ) -> Result<tonic::Response<Self::ProcessStream>, Status> {
        if *self.state.stop.borrow() {
            return Err(Status::unavailable("ibid is stopping; nothing began"));
        }
        let (mut stream, replies) = EnvoyStream::new(request.into_inner());
        let (state, mut closing) = (self.state.clone(), self.closing.clone());
        tokio::spawn(async move {
            let result = tokio::select! {
                result = state.handle(&mut stream) => result,
                _ = closing.wait_for(|is_closing| *is_closing) => {
                    Err(StreamError::Failed(Status::unavailable("ibid stops; the outcome of the request is unknown")))
                }
            };
            stream.end(result).await;
        });
        Ok(tonic::Response::new(Box::pin(replies)))
    }
}

/// A request whose headers Envoy has sent.
struct EnvoyExchange {
    request: Request<()>,
    /// As Envoy has them.
    sent_headers: HeaderMap,
    has_body: bool,
    sender: RequestSender,
    route_match: RouteMatch,
    probes: ProbeClient,
}

impl ExtProcState {
    /// Handles one request, from its headers to the end of its response.
    async fn handle(&self, stream: &mut EnvoyStream) -> Result<(), StreamError> {
        let first = stream.next().await?;
        let sender = RequestSender { peer: messages::peer(&first), ..RequestSender::default() };
        let Some(EnvoyRequest::RequestHeaders(headers)) = first.request else {
            let what =
                "Envoy did not begin with the request's headers; set processing_mode.request_header_mode to SEND";
            return Err(StreamError::Failed(Status::failed_precondition(what)));
        };
        if first.observability_mode {
            let what =
                "Envoy does not wait for ibid's replies, so nothing is protected; set observability_mode to false";
            return Err(StreamError::Failed(Status::failed_precondition(what)));
        }
        let has_body = !headers.end_of_stream;
        let request = messages::request_head(headers);
        let request = request.map_err(|why| StreamError::Failed(Status::invalid_argument(why)))?;
        match self.route(request, has_body, sender).await {
            Ok(exchange) => exchange.run(&self.ibid, stream).await,
            Err(refusal) => respond(stream, refusal).await,
        }
    }

    /// Finds the route of a request. `Err` contains the response to a request that no policy decides about.
    async fn route(
        &self, mut request: Request<()>, has_body: bool, mut sender: RequestSender,
    ) -> Result<EnvoyExchange, EnvoyAnswer> {
        let (now, sent_headers) = (self.live.now(), request.headers().clone());
        let settings = &now.settings;
        if let Some(detail) = ambiguity(&request) {
            let format = settings.routes.refusal_shape(request.uri().path());
            let refusal = Refusal::new(RefusalReason::RequestAmbiguous, detail);
            return Err(refusal_response(&refusal, format, Protocol::Http));
        }
        ibid::http::remove_ibid_headers(request.headers_mut());
        let (method, uri) = (request.method(), request.uri());
        let head = RequestHead { method, uri, version: request.version(), headers: request.headers() };
        let routed = now.route_request(head);
        if let Some(refusal) = refuse_grpc(&routed, &request) {
            return Err(refusal_response(&refusal, routed.refusals, Protocol::Grpc));
        }
        if let Some((verifier, wanted)) = now.verifier_for(&routed) {
            sender.identity = Some(Box::pin(verifier.identify_caller(request.headers(), &wanted)).await);
        }
        let peer = sender.peer.unwrap_or(std::net::Ipv4Addr::LOCALHOST.into());
        let client = ProxyClient::new(peer, false, &settings.trusted_proxies, &settings.limits, std::sync::Weak::new());
        let RoutedUpstream { upstream, refusals, route_match } = routed;
        let proxy = Proxy { client, upstream, refusals, trace: None };
        let probes = ProbeClient { method: method.clone(), uri: uri.clone(), proxy };
        Ok(EnvoyExchange { request, sent_headers, has_body, sender, route_match, probes })
    }
}

impl EnvoyExchange {
    async fn run(self, ibid: &Ibid, stream: &mut EnvoyStream) -> Result<(), StreamError> {
        let Self { request, sent_headers, has_body, sender, route_match, probes } = self;
        let (events, mut wanted) = mpsc::unbounded_channel();
        let (content, received) = oneshot::channel();
        let body = if has_body { EnvoyBody::NotRequested(events.clone(), received) } else { EnvoyBody::Empty };
        if !has_body && matches!(route_match, RouteMatch::Covered { .. }) {
            stream.extend_timeout().await?;
        }
        let app = EnvoyApp { events, timeout: response_timeout(&route_match), probes };
        // An app answers preflights itself.
        let work = ibid.handle(app, request.map(|()| body), sender, route_match, &|_, _| None);
        let (mut work, mut awaiting, mut content) = (pin!(work), MessageKind::RequestHeaders, Some(content));
        let (headers, mode, reply) = loop {
            let event = tokio::select! {
                biased;
                Some(event) = wanted.recv() => event,
                response = &mut work => match wanted.try_recv() {
                    Ok(event @ EnvoyEvent::Pass(_)) => event,
                    _ => return respond(stream, response.unwrap_or_else(|never| match never {})).await,
                },
                error = stream.ended() => return Err(error),
            };
            match event {
                EnvoyEvent::BodyWanted => {
                    let body = tokio::select! {
                        body = stream.read_request_body() => body?,
                        // It did not arrive in time. Envoy reads no further once its buffer is full.
                        response = &mut work => {
                            return respond(stream, response.unwrap_or_else(|never| match never {})).await;
                        }
                    };
                    stream.extend_timeout().await?;
                    let _ = content.take().expect("it is requested once").send(body.into());
                    awaiting = MessageKind::RequestBody;
                }
                EnvoyEvent::Pass(headers) => {
                    let further = (awaiting == MessageKind::RequestHeaders).then(messages::headers_only);
                    return stream.reply(pass(awaiting, header_changes(&sent_headers, &headers), further)).await;
                }
                EnvoyEvent::Run(headers, mode, reply) => break (headers, mode, reply),
            }
        };
        let further = (awaiting == MessageKind::RequestHeaders).then(messages::buffered);
        stream.reply(pass(awaiting, header_changes(&sent_headers, &headers), further)).await?;
        // An early return drops `reply`: the outcome is then unknown.
        let (awaiting, received) = tokio::select! {
            received = stream.read_response() => received?,
            // The route's `timeout` and `late_answer` have passed: Envoy gives up the request to the app.
            response = &mut work => return respond(stream, response.unwrap_or_else(|never| match never {})).await,
        };
        let from_app = received.as_ref().ok().cloned();
        // If Envoy has ended the stream, the response is recorded all the same.
        let _ = stream.extend_timeout().await;
        let _ = reply.send(received);
        let response = tokio::select! {
            biased;
            response = &mut work => response.unwrap_or_else(|never| match never {}),
            error = stream.ended() => return Err(error),
        };
        end(stream, awaiting, mode, from_app, response).await
    }
}

/// Gives Envoy the response for the client.
async fn end(
    stream: &EnvoyStream, awaiting: MessageKind, mode: RunMode, from_app: Option<Response<Full<Bytes>>>,
    response: EnvoyAnswer,
) -> Result<(), StreamError> {
    let Some(from_app) = from_app else {
        return match mode {
            RunMode::Enforced => respond(stream, response).await,
            // Envoy's own response.
            RunMode::Shadow => stream.reply(pass(awaiting, HeaderMutation::default(), None)).await,
        };
    };
    let (from_app, response) = (collect(from_app.map(ResponseBody::untouched)).await?, collect(response).await?);
    let is_app_response = (from_app.status(), from_app.body()) == (response.status(), response.body());
    stream
        .reply(if is_app_response {
            pass(awaiting, header_changes(from_app.headers(), response.headers()), None)
        } else {
            immediate(&response)
        })
        .await
}

type EnvoyAnswer = Response<ResponseBody<Full<Bytes>>>;

/// Responds in place of the app.
async fn respond(stream: &EnvoyStream, response: EnvoyAnswer) -> Result<(), StreamError> {
    stream.reply(immediate(&collect(response).await?)).await
}

async fn collect(response: EnvoyAnswer) -> Result<Response<Bytes>, StreamError> {
    let (head, body) = response.into_parts();
    let body = body.collect().await.map_err(|why| StreamError::Failed(Status::internal(why.to_string())))?;
    Ok(Response::from_parts(head, body.to_bytes()))
}

/// How long Envoy may take to bring the response.
fn response_timeout(route_match: &RouteMatch) -> Duration {
    let RouteMatch::Covered { route, alternatives } = route_match else { return Duration::ZERO };
    let all = std::iter::once(route).chain(alternatives);
    all.map(|route| route.policy.timeout + route.policy.late_answer_or_lease()).max().unwrap_or_default()
}

/// Refuses a gRPC call that would need a claim: Envoy cannot be given a remembered gRPC response with trailers while it
/// buffers the request.
fn refuse_grpc(routed: &RoutedUpstream, request: &Request<()>) -> Option<Refusal> {
    let RouteMatch::Covered { route, .. } = &routed.route_match else { return None };
    let policy = &route.policy;
    let needs_claim = policy.key.required || carries_key(policy, request.uri(), request.headers());
    let detail =
        "gRPC calls with a key are not protected through Envoy's external processing; send them through the gateway";
    (route.protocol == Protocol::Grpc && needs_claim).then(|| Refusal::new(RefusalReason::MethodUnknown, detail))
}
