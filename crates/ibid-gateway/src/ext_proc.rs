//! Envoy's external processing: Envoy asks ibid about each request, and sends it to the app itself.
//!
//! It is a transport around [`Ibid::handle`], as the exchange API is. Each HTTP request is one gRPC stream
//! ([`stream`]). The request begins when its body is complete and ends when the body of the response is, and Envoy goes
//! on only after ibid's reply ([`envoy_app`]). If a stream ends before the response was complete, the outcome is
//! unknown.

use std::{
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{Arc, OnceLock},
    time::Duration,
};

use envoy_types::pb::envoy::{
    extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode,
    service::ext_proc::v3::{
        ProcessingRequest, ProcessingResponse,
        external_processor_server::{ExternalProcessor, ExternalProcessorServer},
        processing_request::Request as EnvoyMessage,
    },
};
use futures_util::{FutureExt as _, stream::BoxStream};
use http::{HeaderMap, Request, Response};
use http_body::Body as _;
use http_body_util::{BodyExt as _, Either};
use ibid::{
    Ibid, Refusal, RefusalReason,
    http::{AppError, Protocol, RequestSender, ResponseBody, RouteMatch, refusal_response},
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
    envoy_app::{AppBody, EnvoyApp, EnvoyBody, EnvoyEvent, EnvoyReply, EnvoyRequest},
    messages::{AwaitedMessage, BodyDirection, header_changes, immediate, pass},
    stream::{EnvoySender, EnvoyStream, RequestMode, ResponseHead, StreamError},
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
    mode: RequestMode,
    sender: RequestSender,
    route_match: RouteMatch,
    probes: ProbeClient,
}

impl ExtProcState {
    /// Handles one request, from its headers to the end of its response.
    async fn handle(&self, stream: &mut EnvoyStream) -> Result<(), StreamError> {
        let first = stream.received.next().await?;
        let sender = RequestSender { peer: messages::peer(&first), ..RequestSender::default() };
        let Some(EnvoyMessage::RequestHeaders(headers)) = first.request else {
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
            Err(refusal) => respond(&stream.replies, RequestMode::Buffered, refusal).await,
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
        if let Some((verifier, wanted)) = now.verifier_for(&routed) {
            sender.identity = Some(Box::pin(verifier.identify_caller(request.headers(), &wanted)).await);
        }
        let peer = sender.peer.unwrap_or(std::net::Ipv4Addr::LOCALHOST.into());
        let client = ProxyClient::new(peer, false, &settings.trusted_proxies, &settings.limits, std::sync::Weak::new());
        let RoutedUpstream { upstream, refusals, route_match } = routed;
        let proxy = Proxy { client, upstream, refusals, trace: None };
        let probes = ProbeClient { method: method.clone(), uri: uri.clone(), proxy };
        let is_grpc = matches!(&route_match, RouteMatch::Covered { route, .. } if route.protocol == Protocol::Grpc);
        let mode = if is_grpc { RequestMode::Streamed } else { RequestMode::Buffered };
        Ok(EnvoyExchange { request, sent_headers, has_body, mode, sender, route_match, probes })
    }
}

impl EnvoyExchange {
    async fn run(self, ibid: &Ibid, stream: &mut EnvoyStream) -> Result<(), StreamError> {
        let Self { request, sent_headers, has_body, mode, sender, route_match, probes } = self;
        let EnvoyStream { received, replies } = stream;
        let ((events, mut passed), (wanted, is_wanted)) = (mpsc::unbounded_channel(), watch::channel(false));
        let (parts, body) = EnvoyBody::channel(Some(wanted));
        if !has_body && matches!(route_match, RouteMatch::Covered { .. }) {
            replies.extend_timeout().await?;
        }
        let app = EnvoyApp { events, timeout: response_timeout(&route_match), probes };
        let request = request.map(|()| if has_body { body } else { EnvoyBody::default() });
        // An app answers preflights itself.
        let work = ibid.handle(app, request, sender, route_match, &|_, _| None);
        let mut work = pin!(work.map(|response| response.unwrap_or_else(|never| match never {})));
        let reply = {
            let trailers = OnceLock::new();
            let mut reading = pin!(received.read_request(replies, mode, is_wanted.clone(), parts, &trailers));
            let event = tokio::select! {
                biased;
                Some(event) = passed.recv() => event,
                response = &mut work => match passed.try_recv() {
                    Ok(event @ EnvoyEvent::Pass(_)) => event,
                    _ => return respond(replies, mode, response).await,
                },
                error = &mut reading => return Err(error),
            };
            let (request, reply) = match event {
                EnvoyEvent::Pass(request) => (request, None),
                EnvoyEvent::Run(request, reply) => (request, Some(reply)),
            };
            let mode = Some(mode).filter(|_| *is_wanted.borrow());
            tokio::select! {
                biased;
                sent = send_request(replies, mode, &sent_headers, request, reply.is_some(), &trailers) => sent?,
                error = &mut reading => return Err(error),
            }
            reply
        };
        match reply {
            // If it fails, it drops `reply`: the outcome is then unknown.
            Some(reply) => finish(stream, work, reply).await,
            None => Ok(()),
        }
    }
}

/// Lets a request pass. `mode` is `None` if Envoy was not asked for its body.
async fn send_request(
    replies: &EnvoySender, mode: Option<RequestMode>, sent_headers: &HeaderMap, request: EnvoyRequest,
    is_claimed: bool, trailers: &OnceLock<HeaderMap>,
) -> Result<(), StreamError> {
    let (head, body) = request.into_parts();
    let (changes, mut body) = (header_changes(sent_headers, &head.headers), pin!(body));
    match mode {
        None => {
            let run_mode = messages::run_mode(BodySendMode::None);
            let further = if is_claimed { run_mode } else { messages::headers_only() };
            replies.reply(pass(AwaitedMessage::RequestHeaders, changes, Some(further))).await
        }
        Some(RequestMode::Buffered) => {
            // Envoy has it.
            while let Some(Ok(_)) = body.frame().await {}
            replies.reply(pass(AwaitedMessage::RequestBody, changes, None)).await
        }
        Some(RequestMode::Streamed) => {
            replies.reply(pass(AwaitedMessage::RequestHeaders, changes, None)).await?;
            replies.send_body(BodyDirection::Request, body, trailers).await
        }
    }
}

/// Gives the response to a claimed request to `work`, and what that makes of it to Envoy.
async fn finish(
    stream: &mut EnvoyStream, mut work: Pin<&mut impl Future<Output = EnvoyAnswer>>, reply: oneshot::Sender<EnvoyReply>,
) -> Result<(), StreamError> {
    let EnvoyStream { received, replies } = stream;
    let ResponseHead { origin, head, has_body } = tokio::select! {
        head = received.read_response_head() => head?,
        // The route's `timeout` and `late_answer` have passed: Envoy gives up the request to the app.
        response = &mut work => return respond(replies, RequestMode::Buffered, response).await,
    };
    let (parts, body) = EnvoyBody::channel(None);
    let response = head.clone().map(|()| Either::Right(if has_body { body } else { EnvoyBody::default() }));
    let _ = reply.send(match origin {
        Ok(()) => Ok(response),
        Err(outcome) => Err(AppError { outcome, response: Some(response) }),
    });
    let trailers = OnceLock::new();
    let answering = async { end(replies, &head, has_body, work.await, &trailers).await };
    let reading = async { if has_body { received.read_body(parts, &trailers).await } else { received.ended().await } };
    tokio::select! {
        biased;
        ended = answering => ended,
        // A response that was complete is recorded all the same.
        error = reading => Err(error),
    }
}

type EnvoyAnswer = Response<ResponseBody<AppBody>>;

/// Gives Envoy the response for the client: as changes of the one that Envoy has, if it has the same form.
async fn end(
    replies: &EnvoySender, from_app: &Response<()>, has_body: bool, response: EnvoyAnswer,
    trailers: &OnceLock<HeaderMap>,
) -> Result<(), StreamError> {
    let is_empty = response.body().is_end_stream();
    let is_trailers_only = is_empty && response.headers().contains_key("grpc-status");
    let has_same_form = if has_body { !is_trailers_only } else { is_empty };
    if !has_same_form || response.status() != from_app.status() {
        return respond(replies, RequestMode::Buffered, response).await;
    }
    let (head, body) = response.into_parts();
    let mut changes = header_changes(from_app.headers(), &head.headers);
    if !has_body {
        return replies.reply(pass(AwaitedMessage::ResponseHeaders, changes, None)).await;
    }
    messages::change_length(&mut changes, from_app.headers(), body.size_hint().exact());
    replies.reply(pass(AwaitedMessage::ResponseHeaders, changes, None)).await?;
    replies.send_body(BodyDirection::Response, pin!(body), trailers).await
}

/// Responds in place of the app. `mode` is the request's while Envoy waits for a reply to its headers.
async fn respond(replies: &EnvoySender, mode: RequestMode, response: EnvoyAnswer) -> Result<(), StreamError> {
    let (head, body) = response.into_parts();
    let body = body.collect().await.map_err(|why| StreamError::Failed(Status::internal(why.to_string())))?;
    let (trailers, response) = (body.trailers().cloned(), Response::from_parts(head, body.to_bytes()));
    match trailers.filter(|trailers| trailers.contains_key("grpc-status")) {
        None => replies.reply(immediate(&response)).await,
        Some(trailers) if mode == RequestMode::Streamed => {
            for part in messages::streamed_immediate(response, &trailers) {
                replies.reply(part).await?;
            }
            Ok(())
        }
        // Another run of the call was recorded, and Envoy already has a response of another form.
        Some(_) => {
            let what = "Envoy cannot be given the recorded response of a gRPC call any more; a retry gets it";
            Err(StreamError::Failed(Status::unavailable(what)))
        }
    }
}

/// How long Envoy may take to bring the response.
fn response_timeout(route_match: &RouteMatch) -> Duration {
    let RouteMatch::Covered { route, alternatives } = route_match else { return Duration::ZERO };
    let all = std::iter::once(route).chain(alternatives);
    all.map(|route| route.policy.timeout + route.policy.late_answer_or_lease()).max().unwrap_or_default()
}
