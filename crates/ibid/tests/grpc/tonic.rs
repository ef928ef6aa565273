//! The layer in a real tonic server, called by a real tonic client.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, BufMut, Bytes};
use http_body_util::BodyExt;
use ibid::{Ibid, Policy, grpc::UnaryMethods, policy::OnConcurrent, store::Memory};
use testbed::grpc::message;
use tokio::{net::TcpListener, sync::Semaphore};
use tonic::{
    Code, Request, Response, Status,
    client::Grpc,
    codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder},
    server::{NamedService, UnaryService},
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};
use tower::{Service, ServiceExt};

use super::common::{with_changes, within};

/// Messages as they are.
#[derive(Default, Clone)]
struct RawCodec;

impl Codec for RawCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = RawCodec;
    type Decoder = RawCodec;

    fn encoder(&mut self) -> RawCodec {
        RawCodec
    }

    fn decoder(&mut self) -> RawCodec {
        RawCodec
    }
}

impl Encoder for RawCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for RawCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

#[derive(Clone)]
struct Orders(Arc<State>);

struct State {
    runs: AtomicUsize,
    gate: Semaphore,
}

impl NamedService for Orders {
    const NAME: &'static str = "shop.Orders";
}

type GrpcResponseFuture<T> = Pin<Box<dyn Future<Output = Result<T, Status>> + Send>>;

impl UnaryService<Bytes> for Orders {
    type Response = Bytes;
    type Future = GrpcResponseFuture<Response<Bytes>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        let state = self.0.clone();
        Box::pin(async move {
            let run = state.runs.fetch_add(1, SeqCst) + 1;
            let said = String::from_utf8(request.get_ref().to_vec()).unwrap();
            match said.as_str() {
                "slow" => state.gate.acquire().await.unwrap().forget(),
                "gone" => return Err(Status::not_found("no such order")),
                _ => {}
            }
            let mut answer = Response::new(Bytes::from(format!("{said} in run {run}")));
            answer.metadata_mut().insert("x-run", run.to_string().parse().unwrap());
            Ok(answer)
        })
    }
}

impl Service<http::Request<tonic::body::Body>> for Orders {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let orders = self.clone();
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(RawCodec)
                .accept_compressed(CompressionEncoding::Gzip)
                .send_compressed(CompressionEncoding::Gzip);
            Ok(grpc.unary(orders, request).await)
        })
    }
}

struct TonicShop {
    state: Arc<State>,
    ibid: Ibid,
    channel: Channel,
}

async fn shop(policy: Policy) -> TonicShop {
    let state = Arc::new(State { runs: AtomicUsize::new(0), gate: Semaphore::new(0) });
    let ibid = Ibid::new(Arc::new(Memory::default()));
    let layer = ibid.grpc_layer(UnaryMethods::methods(["shop.Orders/Create"]), policy).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let server = Server::builder().layer(layer).add_service(Orders(state.clone()));
    tokio::spawn(async move { server.serve_with_incoming(TcpIncoming::from(listener)).await.unwrap() });
    let channel = Endpoint::from_shared(format!("http://{addr}")).unwrap().connect().await.unwrap();
    TonicShop { state, ibid, channel }
}

impl TonicShop {
    fn request(said: &'static str) -> Request<Bytes> {
        let mut request = Request::new(Bytes::from(said));
        request.metadata_mut().insert("idempotency-key", "key-1".parse().unwrap());
        request
    }

    async fn send(&self, request: Request<Bytes>, gzip: bool) -> Result<Response<Bytes>, Status> {
        let mut client = Grpc::new(self.channel.clone());
        if gzip {
            client = client.send_compressed(CompressionEncoding::Gzip).accept_compressed(CompressionEncoding::Gzip);
        }
        client.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/shop.Orders/Create");
        within("an answer", client.unary(request, path, RawCodec)).await
    }

    async fn create(&self, said: &'static str) -> Result<Response<Bytes>, Status> {
        self.send(Self::request(said), false).await
    }

    fn runs(&self) -> usize {
        self.state.runs.load(SeqCst)
    }
}

#[tokio::test]
async fn a_retry_gets_the_first_answer_or_the_first_failure() {
    let shop = shop(Policy::platform()).await;
    for _ in 0..3 {
        let answer = shop.create("ten").await.unwrap();
        assert_eq!(answer.metadata().get("x-run").unwrap(), "1");
        assert_eq!(answer.into_inner(), "ten in run 1");
    }
    let reused = shop.create("eleven").await.unwrap_err();
    assert_eq!(reused.code(), Code::InvalidArgument);
    assert!(reused.message().contains("different request"), "{reused}");
    assert!(!reused.details().is_empty());
    let missing = shop.send(Request::new(Bytes::from("ten")), false).await.unwrap_err();
    assert_eq!(missing.code(), Code::InvalidArgument);
    for _ in 0..2 {
        let mut request = TonicShop::request("gone");
        request.metadata_mut().insert("idempotency-key", "key-2".parse().unwrap());
        let failed = shop.send(request, false).await.unwrap_err();
        assert_eq!((failed.code(), failed.message()), (Code::NotFound, "no such order"));
    }
    assert_eq!(shop.runs(), 2);
}

/// tonic drops the handler's future at the client's deadline; the layer must not let it be lost.
#[tokio::test]
async fn a_deadline_in_the_middle_of_a_run_costs_no_second_run() {
    let shop = shop(Policy::platform()).await;
    let mut hasty = TonicShop::request("slow");
    hasty.set_timeout(Duration::from_millis(150));
    let late = shop.send(hasty, false).await.unwrap_err();
    assert!(matches!(late.code(), Code::DeadlineExceeded | Code::Cancelled), "{late}");
    assert_eq!(shop.runs(), 1);
    let meanwhile = shop.create("slow").await.unwrap_err();
    assert_eq!(meanwhile.code(), Code::Aborted);
    assert_eq!(meanwhile.metadata().get("grpc-retry-pushback-ms").unwrap(), "1000");
    shop.state.gate.add_permits(1);
    within("the end of what runs", shop.ibid.drained()).await;
    assert_eq!(shop.create("slow").await.unwrap().into_inner(), "slow in run 1");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_client_that_compresses_and_one_that_does_not_share_an_answer() {
    let shop = shop(Policy::platform()).await;
    let first = shop.send(TonicShop::request("ten"), true).await.unwrap().into_inner();
    assert_eq!(shop.create("ten").await.unwrap().into_inner(), first);
    assert_eq!(shop.send(TonicShop::request("ten"), true).await.unwrap().into_inner(), first);
    assert_eq!(shop.runs(), 1);
}

/// Without a server of tonic's: its routes as an axum router, with both layers, and no HTTP/2 in sight.
#[tokio::test]
async fn the_layer_fits_around_routes_and_beside_the_one_for_http() {
    let state = Arc::new(State { runs: AtomicUsize::new(0), gate: Semaphore::new(0) });
    let ibid = Ibid::new(Arc::new(Memory::default()));
    let router = tonic::service::Routes::new(Orders(state.clone()))
        .into_axum_router()
        .route("/pay", axum::routing::post(|| async { "paid" }))
        .layer(ibid.layer(Policy::ietf()).unwrap())
        .layer(ibid.grpc_layer(UnaryMethods::methods(["shop.Orders/Create"]), Policy::platform()).unwrap());
    let send = async |path: &str, kind: &str| {
        let request = http::Request::post(path)
            .version(http::Version::HTTP_2)
            .header("host", "shop")
            .header("content-type", kind)
            .header("idempotency-key", "key-1");
        let request = request.body(axum::body::Body::from(message("ten"))).unwrap();
        router.clone().oneshot(request).await.unwrap()
    };
    for _ in 0..2 {
        let answer = send("/shop.Orders/Create", "application/grpc").await;
        assert!(!answer.headers().contains_key("idempotent-replayed"), "not of the HTTP layer's making");
        let body = answer.into_body().collect().await.unwrap();
        assert_eq!(body.trailers().unwrap()["grpc-status"], "0");
        assert_eq!(body.to_bytes(), message("ten in run 1"));
    }
    assert_eq!(state.runs.load(SeqCst), 1);
    assert!(!send("/pay", "text/plain").await.headers().contains_key("idempotent-replayed"));
    assert_eq!(send("/pay", "text/plain").await.headers()["idempotent-replayed"], "true");
}

#[tokio::test]
async fn fifty_calls_at_once_run_once() {
    let shop =
        Arc::new(shop(with_changes(Policy::platform(), |policy| policy.on_concurrent = OnConcurrent::Wait)).await);
    let calls: Vec<_> = (0..50)
        .map(|_| {
            let shop = shop.clone();
            tokio::spawn(async move { shop.create("ten").await.unwrap().into_inner() })
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap(), "ten in run 1");
    }
    assert_eq!(shop.runs(), 1);
}
