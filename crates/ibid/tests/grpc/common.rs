//! A server by hand that counts what it runs.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use ibid::{Ibid, Policy, grpc::UnaryMethods, http::RequestBody, store::Memory};
use parking_lot::Mutex;
use testbed::grpc::{GrpcTestClient, frame_message, message};
use tokio::{
    net::TcpListener,
    sync::{Notify, Semaphore},
    time::timeout,
};
use tower::{Layer, Service};

/// Everything that is waited for comes within this.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// A policy with some dials turned.
pub(crate) fn with_changes(mut policy: Policy, turn: impl FnOnce(&mut Policy)) -> Policy {
    turn(&mut policy);
    policy
}

pub(crate) async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    timeout(WAIT_TIMEOUT, work).await.unwrap_or_else(|_| panic!("waited {WAIT_TIMEOUT:?} for {what}"))
}

/// What the server by hand shares with the test.
#[derive(Clone)]
pub(crate) struct GrpcLayerShop {
    pub(crate) addr: SocketAddr,
    pub(crate) ibid: Ibid,
    pub(crate) state: Arc<State>,
}

pub(crate) struct State {
    pub(crate) runs: AtomicUsize,
    /// One call passes `Gated` for each permit.
    pub(crate) gate: Semaphore,
    pub(crate) entered: Notify,
    pub(crate) seen: Mutex<Vec<(HeaderMap, Bytes)>>,
}

/// The methods that the server knows to be unary. `Chat` streams.
pub(crate) const METHODS: [&str; 7] = [
    "shop.Orders/Create",
    "shop.Orders/Gated",
    "shop.Orders/Status",
    "shop.Orders/Cut",
    "shop.Orders/Large",
    "shop.Orders/LargeCut",
    "shop.Orders/Bins",
];

impl GrpcLayerShop {
    pub(crate) async fn open(policy: Policy) -> Self {
        let ibid = Ibid::new(Arc::new(Memory::default()));
        let state = Arc::new(State {
            runs: AtomicUsize::new(0),
            gate: Semaphore::new(0),
            entered: Notify::new(),
            seen: Mutex::default(),
        });
        let inner = {
            let state = state.clone();
            tower::service_fn(move |request| handle(state.clone(), request))
        };
        let service = ibid.grpc_layer(UnaryMethods::methods(METHODS), policy).unwrap().layer(inner);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let service = service.clone();
                let service =
                    hyper::service::service_fn(move |request: Request<Incoming>| service.clone().call(request));
                let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(socket), service);
                tokio::spawn(async move { drop(serving.await) });
            }
        });
        Self { addr, ibid, state }
    }

    pub(crate) async fn client(&self) -> GrpcTestClient {
        GrpcTestClient::connect(self.addr).await
    }

    pub(crate) fn runs(&self) -> usize {
        self.state.runs.load(SeqCst)
    }
}

async fn handle(state: Arc<State>, request: Request<RequestBody<Incoming>>) -> Result<Response<Body>, Infallible> {
    let (parts, body) = request.into_parts();
    let method = parts.uri.path().rsplit('/').next().unwrap().to_owned();
    if method == "Chat" {
        // Each piece comes back before the next is sent.
        let end = trailers(&[("grpc-status", "0")]);
        let echo = body.map_err(io::Error::other).with_trailers(async { Some(Ok(end)) });
        return Ok(Response::builder().header("content-type", "application/grpc").body(echo.boxed_unsync()).unwrap());
    }
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let run = state.runs.fetch_add(1, SeqCst) + 1;
    state.seen.lock().push((parts.headers.clone(), body.clone()));
    if method == "Gated" {
        state.entered.notify_one();
        state.gate.acquire().await.unwrap().forget();
    }
    let head = Response::builder().header("content-type", "application/grpc").header("x-run", run);
    let text = String::from_utf8_lossy(body.get(5..).unwrap_or_default()).into_owned();
    Ok(match method.as_str() {
        "Status" => {
            let code = parts.headers.get("want").map_or("0", |value| value.to_str().unwrap());
            let head = head.header("grpc-status", code).header("grpc-message", "by%20request");
            head.header("x-detail", "kept").body(whole_body(Bytes::new(), None)).unwrap()
        }
        "Cut" => head.body(whole_body(message("no end"), None)).unwrap(),
        "Large" => {
            head.body(whole_body(frame_message(0, &vec![7; 3 << 20]), Some(trailers(&[("grpc-status", "0")])))).unwrap()
        }
        "LargeCut" => head.body(whole_body(frame_message(0, &vec![7; 3 << 20]), None)).unwrap(),
        "Bins" => {
            let head = head.header("trace-bin", "AAEC").header("trace-bin", "AwQF");
            let end = trailers(&[("grpc-status", "0"), ("sum-bin", "AA"), ("sum-bin", "AQ"), ("sum-bin", "Ag,Aw")]);
            head.body(whole_body(message("bins"), Some(end))).unwrap()
        }
        _ => {
            let end = trailers(&[("grpc-status", "0"), ("grpc-message", ""), ("x-after", "done")]);
            head.body(whole_body(message(&format!("{text} in run {run}")), Some(end))).unwrap()
        }
    })
}

fn whole_body(data: Bytes, end: Option<HeaderMap>) -> Body {
    let body = Full::new(data).map_err(|never: Infallible| -> io::Error { match never {} });
    match end {
        Some(end) => body.with_trailers(async { Some(Ok(end)) }).boxed_unsync(),
        None => body.boxed_unsync(),
    }
}

pub(crate) fn trailers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in lines {
        map.append(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    map
}
