//! A gRPC client that shows every frame, and a server by hand that counts what it runs.

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

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use ibid::{Ibid, Policy, grpc::Unary, http::RequestBody, store::Memory};
use parking_lot::Mutex;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Notify, Semaphore},
    time::timeout,
};
use tower::{Layer, Service};

/// Everything that is waited for comes within this.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// A policy with some dials turned.
pub(crate) fn turned(mut policy: Policy, turn: impl FnOnce(&mut Policy)) -> Policy {
    turn(&mut policy);
    policy
}

pub(crate) async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    timeout(DEADLINE, work).await.unwrap_or_else(|_| panic!("waited {DEADLINE:?} for {what}"))
}

/// One message in its frame.
pub(crate) fn framed(flag: u8, message: &[u8]) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(flag);
    frame.put_u32(u32::try_from(message.len()).unwrap());
    frame.put_slice(message);
    frame.freeze()
}

pub(crate) fn message(text: &str) -> Bytes {
    framed(0, text.as_bytes())
}

/// What a call ended with.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) headers: HeaderMap,
    /// The headers were the end of it.
    pub(crate) trailers_only: bool,
    pub(crate) body: Bytes,
    pub(crate) trailers: HeaderMap,
}

impl Answer {
    /// From wherever it is.
    pub(crate) fn value(&self, name: &str) -> Option<&str> {
        self.trailers.get(name).or(self.headers.get(name)).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn code(&self) -> i32 {
        self.value("grpc-status").unwrap_or_else(|| panic!("no status: {self:?}")).parse().unwrap()
    }

    /// The message without its frame.
    pub(crate) fn text(&self) -> String {
        assert!(self.body.len() >= 5, "no message: {self:?}");
        String::from_utf8(self.body[5..].to_vec()).unwrap()
    }

    /// Without what every answer has of its own.
    pub(crate) fn stripped(mut self) -> Self {
        self.headers.remove("date");
        self.headers.remove("idempotent-replayed");
        self
    }

    /// The answer is this refusal: one block of headers.
    #[track_caller]
    pub(crate) fn assert_refused(&self, code: i32, reason: &str) {
        assert!(self.trailers_only, "{self:?}");
        assert_eq!(self.headers["content-type"], "application/grpc");
        assert_eq!(self.code(), code, "{self:?}");
        let details = self.value("grpc-status-details-bin").expect("details");
        let details = decoded(details);
        let text = String::from_utf8_lossy(&details);
        assert!(text.contains(reason) && text.contains("type.googleapis.com/google.rpc.ErrorInfo"), "{text}");
    }
}

/// Base64 without padding.
fn decoded(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("{text:?} is no base64"),
    };
    let (mut bits, mut have, mut out) = (0u32, 0, Vec::new());
    for byte in text.bytes() {
        bits = bits << 6 | u32::from(digit(byte));
        have += 6;
        if have >= 8 {
            have -= 8;
            out.push((bits >> have) as u8);
        }
    }
    out
}

/// A connection.
#[derive(Clone)]
pub(crate) struct Client(h2::client::SendRequest<Bytes>);

/// A call whose answer has not come yet.
pub(crate) struct Call {
    pub(crate) answer: h2::client::ResponseFuture,
    pub(crate) send: h2::SendStream<Bytes>,
}

impl Client {
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        let tcp = TcpStream::connect(addr).await.unwrap();
        let (send, connection) = h2::client::handshake(tcp).await.unwrap();
        tokio::spawn(async move { drop(connection.await) });
        Self(send)
    }

    /// Sends the headers only.
    pub(crate) async fn open(&self, path: &str, headers: &[(&str, &str)]) -> Call {
        let mut request = Request::post(format!("http://shop{path}"))
            .header("te", "trailers")
            .header("authorization", "Bearer one")
            .header("content-type", "application/grpc");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut ready = self.0.clone().ready().await.unwrap();
        let (answer, send) = ready.send_request(request.body(()).unwrap(), false).unwrap();
        Call { answer, send }
    }

    /// Sends all of it, each piece in a frame of its own.
    pub(crate) async fn start(&self, path: &str, headers: &[(&str, &str)], pieces: &[Bytes]) -> Call {
        let mut call = self.open(path, headers).await;
        for piece in pieces {
            call.send.send_data(piece.clone(), false).unwrap();
            tokio::task::yield_now().await;
        }
        call.send.send_data(Bytes::new(), true).unwrap();
        call
    }

    pub(crate) async fn call(&self, path: &str, headers: &[(&str, &str)], body: Bytes) -> Answer {
        self.start(path, headers, &[body]).await.end().await
    }
}

impl Call {
    pub(crate) async fn end(self) -> Answer {
        within("an answer", self.try_end()).await.expect("a whole answer")
    }

    pub(crate) async fn try_end(self) -> Result<Answer, h2::Error> {
        let response = self.answer.await?;
        assert_eq!(response.status(), 200);
        let (parts, mut stream) = response.into_parts();
        let trailers_only = stream.is_end_stream();
        let mut body = BytesMut::new();
        while let Some(data) = stream.data().await {
            let data = data?;
            let _ = stream.flow_control().release_capacity(data.len());
            body.extend_from_slice(&data);
        }
        let trailers = stream.trailers().await?.unwrap_or_default();
        Ok(Answer { headers: parts.headers, trailers_only, body: body.freeze(), trailers })
    }
}

/// What the server by hand shares with the test.
#[derive(Clone)]
pub(crate) struct Shop {
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
pub(crate) const METHODS: [&str; 6] = [
    "shop.Orders/Create",
    "shop.Orders/Gated",
    "shop.Orders/Status",
    "shop.Orders/Cut",
    "shop.Orders/Large",
    "shop.Orders/Bins",
];

impl Shop {
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
        let service = ibid.grpc_layer(Unary::methods(METHODS), policy).layer(inner);
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

    pub(crate) async fn client(&self) -> Client {
        Client::connect(self.addr).await
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
            head.header("x-detail", "kept").body(whole(Bytes::new(), None)).unwrap()
        }
        "Cut" => head.body(whole(message("no end"), None)).unwrap(),
        "Large" => head.body(whole(framed(0, &vec![7; 3 << 20]), Some(trailers(&[("grpc-status", "0")])))).unwrap(),
        "Bins" => {
            let head = head.header("trace-bin", "AAEC").header("trace-bin", "AwQF");
            let end = trailers(&[("grpc-status", "0"), ("sum-bin", "AA"), ("sum-bin", "AQ"), ("sum-bin", "Ag,Aw")]);
            head.body(whole(message("bins"), Some(end))).unwrap()
        }
        _ => {
            let end = trailers(&[("grpc-status", "0"), ("grpc-message", ""), ("x-after", "done")]);
            head.body(whole(message(&format!("{text} in run {run}")), Some(end))).unwrap()
        }
    })
}

fn whole(data: Bytes, end: Option<HeaderMap>) -> Body {
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
