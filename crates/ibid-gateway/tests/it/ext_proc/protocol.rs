//! The messages between Envoy and ibid, one by one: a client that sends what Envoy sends, and a server that does what ibid
//! must not do.

use std::time::Duration;

use envoy_types::pb::envoy::{
    config::core::v3::{HeaderMap as EnvoyHeaders, HeaderValue as EnvoyHeader},
    service::ext_proc::v3::{
        HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
        external_processor_client::ExternalProcessorClient,
        external_processor_server::{ExternalProcessor, ExternalProcessorServer},
        processing_request::Request as EnvoyMessage,
        processing_response::Response as EnvoyResponse,
    },
};
use envoy_types::pb::google::protobuf::{Struct, Value, value::Kind};
use futures_util::{StreamExt as _, stream};
use testbed::{
    TestEnvoy,
    client::post,
    process::{GatewayProcess, ProcessSignal},
    upstream::TestUpstream,
};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming, transport::Channel};

use crate::support::{BIN, caller, policy, within};

const HEAD: [(&str, &str); 4] =
    [(":method", "POST"), (":path", "/pay"), (":authority", "a"), ("idempotency-key", "k1")];

/// ibid with a client in Envoy's place.
struct ProcessorSetup {
    upstream: TestUpstream,
    ibid: GatewayProcess,
    client: ExternalProcessorClient<Channel>,
}

/// What Envoy sends, and what it gets.
struct ProcessorCall {
    messages: mpsc::UnboundedSender<ProcessingRequest>,
    replies: Streaming<ProcessingResponse>,
}

impl ProcessorSetup {
    async fn start(config: &str) -> Self {
        let upstream = TestUpstream::start().await;
        let config = format!("[ext_proc]\nlisten = \"127.0.0.1:0\"\n{config}");
        let ibid = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).start().await;
        let line = ibid.wait_for_log("ibid: ext_proc on ").await;
        let address = line.rsplit(' ').next().expect("an address").to_owned();
        let client = ExternalProcessorClient::connect(format!("http://{address}")).await.expect("it listens");
        Self { upstream, ibid, client }
    }

    /// The stream stays open after these messages, as Envoy's does.
    async fn call(&mut self, messages: Vec<EnvoyMessage>) -> ProcessorCall {
        let (sender, receiver) = mpsc::unbounded_channel();
        let sent = stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
        let replies = self.client.process(sent.boxed()).await.expect("a stream").into_inner();
        let call = ProcessorCall { messages: sender, replies };
        messages.into_iter().for_each(|message| call.send(message));
        call
    }
}

impl ProcessorCall {
    /// Sends a message with the attributes of a response that came from the app.
    fn send(&self, message: EnvoyMessage) {
        let details = Value { kind: Some(Kind::StringValue("via_upstream".into())) };
        let fields = [("response.code_details".to_owned(), details)].into();
        let attributes = [("envoy.filters.http.ext_proc".to_owned(), Struct { fields })].into();
        let message = ProcessingRequest { request: Some(message), attributes, ..ProcessingRequest::default() };
        self.messages.send(message).expect("an open stream");
    }

    /// Sends a body when it is asked for. Returns once ibid has replied to it: Envoy then sends the request to the app.
    async fn let_pass(&mut self) {
        loop {
            let reply = within("a reply", self.replies.message()).await.expect("no error").expect("a reply");
            match reply.response {
                Some(EnvoyResponse::RequestHeaders(_)) => self.send(EnvoyMessage::RequestBody(body(true))),
                Some(EnvoyResponse::RequestBody(_)) => return,
                _ => {}
            }
        }
    }

    /// The status with which the stream ends.
    async fn end(mut self) -> Result<(), Status> {
        while within("the end of the stream", self.replies.message()).await?.is_some() {}
        Ok(())
    }
}

fn headers(pairs: &[(&str, &str)]) -> HttpHeaders {
    let header = |(name, value): &(&str, &str)| EnvoyHeader {
        key: (*name).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..EnvoyHeader::default()
    };
    let headers = Some(EnvoyHeaders { headers: pairs.iter().map(header).collect() });
    HttpHeaders { headers, ..HttpHeaders::default() }
}

fn request_headers(pairs: &[(&str, &str)]) -> EnvoyMessage {
    EnvoyMessage::RequestHeaders(headers(pairs))
}

fn body(end_of_stream: bool) -> HttpBody {
    HttpBody { body: b"{}".to_vec(), end_of_stream, ..HttpBody::default() }
}

/// Envoy goes on unprotected after a stream that ends with OK.
#[tokio::test]
async fn a_stream_with_wrong_messages_ends_with_an_error() {
    let mut setup = ProcessorSetup::start(&policy("")).await;
    let body = || EnvoyMessage::RequestBody(body(true));
    let cases: [(&str, Vec<EnvoyMessage>); 6] = [
        ("a body first", vec![body()]),
        ("an invalid path", vec![request_headers(&[(":method", "POST"), (":path", "\u{1}"), (":authority", "a")])]),
        ("an invalid header", vec![request_headers(&[&HEAD[..], &[("a", "\u{1}")]].concat())]),
        ("headers twice", vec![request_headers(&HEAD), request_headers(&HEAD)]),
        ("a body twice", vec![request_headers(&HEAD), body(), body()]),
        ("no response headers", vec![request_headers(&HEAD), body(), EnvoyMessage::ResponseBody(self::body(true))]),
    ];
    for (what, messages) in cases {
        let ended = setup.call(messages).await.end().await.expect_err(what);
        assert!(matches!(ended.code(), Code::InvalidArgument | Code::FailedPrecondition), "{what}: {ended}");
    }
    assert_eq!(setup.upstream.requests(), 0);
}

#[tokio::test]
async fn ibid_that_stops_never_ends_the_stream_of_a_claimed_request_with_ok() {
    for sent in 0..=3 {
        let mut setup = ProcessorSetup::start(&format!("[limits]\nshutdown = \"1s\"\n{}", policy(""))).await;
        let mut call = setup.call(vec![request_headers(&HEAD)]).await;
        call.let_pass().await;
        let response = [
            EnvoyMessage::ResponseHeaders(headers(&[(":status", "201")])),
            EnvoyMessage::ResponseBody(body(false)),
            EnvoyMessage::ResponseBody(body(false)),
        ];
        response.into_iter().take(sent).for_each(|message| call.send(message));
        tokio::time::sleep(Duration::from_millis(100)).await;
        setup.ibid.signal(ProcessSignal::Term);
        let ended = call.end().await.expect_err("an error");
        assert_eq!(ended.code(), Code::Unavailable, "after {sent} messages of the response: {ended}");
        setup.ibid.wait_exit(Duration::from_secs(20)).await;
    }
}

/// Ends every stream with OK after the first message.
struct ClosingProcessor;

#[tonic::async_trait]
impl ExternalProcessor for ClosingProcessor {
    type ProcessStream = stream::Empty<Result<ProcessingResponse, Status>>;

    async fn process(
        &self, request: tonic::Request<Streaming<ProcessingRequest>>,
    ) -> Result<tonic::Response<Self::ProcessStream>, Status> {
        let _ = request.into_inner().message().await;
        Ok(tonic::Response::new(stream::empty()))
    }
}

/// Why ibid must never do it.
#[tokio::test]
async fn envoy_goes_on_unprotected_after_a_stream_that_ends_with_ok() {
    let upstream = TestUpstream::start().await;
    let envoy = TestEnvoy::start(upstream.addr(), &[]);
    let server = tonic::transport::Server::builder().add_service(ExternalProcessorServer::new(ClosingProcessor));
    let server = tokio::spawn(server.serve(envoy.ext_proc_addr()));
    within("the request to pass", async {
        // Until the processor listens, Envoy answers 500.
        while caller(post(envoy.addr(), "/pay")).key("k1").json("{}").send().await.status == 500 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    assert_eq!(upstream.executions(), 1);
    server.abort();
}
