//! HTTP/2: floods, and requests that break its rules. Frames are written by hand where a client library would not.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::{SendStream, client::ResponseFuture};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, tcp::OwnedWriteHalf},
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::JoinHandle,
    time::timeout,
};

use super::{BODY, HOST, TestGateway, WAIT_TIMEOUT};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;

/// Why a connection is given up: the other side does too much.
const ENHANCE_YOUR_CALM: u32 = 11;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a small frame").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Header fields as HPACK literals: no table, no Huffman code.
fn encode_fields(fields: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| {
        assert!(text.len() < 127, "the length fits its byte");
        [&[text.len() as u8], text.as_bytes()].concat()
    };
    fields.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

fn request(key: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let usual = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/pay"),
        (":authority", HOST),
        ("idempotency-key", key),
        ("content-type", "application/json"),
    ];
    encode_fields(&[&usual[..], more].concat())
}

/// One connection, frame by frame. It is read all the time: what a server says last must be taken before it closes.
struct FrameConnection {
    writer: OwnedWriteHalf,
    /// Kind, stream and payload.
    received: UnboundedReceiver<(u8, u32, Vec<u8>)>,
}

impl FrameConnection {
    async fn open(world: &TestGateway) -> FrameConnection {
        let mut frames = FrameConnection::connect(world).await;
        frames.send(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &frame(SETTINGS, 0, 0, &[])].concat()).await;
        frames
    }

    async fn connect(world: &TestGateway) -> FrameConnection {
        let socket = TcpStream::connect(world.gateway.addr()).await.expect("it listens");
        let (mut reader, writer) = socket.into_split();
        let (tell, received) = unbounded_channel();
        tokio::spawn(async move {
            let mut head = [0; 9];
            // A reset ends it like a close.
            while reader.read_exact(&mut head).await.is_ok() {
                let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
                let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                if reader.read_exact(&mut payload).await.is_err() || tell.send((head[3], stream, payload)).is_err() {
                    return;
                }
            }
        });
        FrameConnection { writer, received }
    }

    /// Whether the other side still takes it.
    async fn send(&mut self, bytes: &[u8]) -> bool {
        timeout(WAIT_TIMEOUT, self.writer.write_all(bytes)).await.expect("the gateway reads").is_ok()
    }

    /// The kind and stream of the next frame; `None` at the end of the connection.
    async fn next(&mut self) -> Option<(u8, u32)> {
        let next = timeout(WAIT_TIMEOUT, self.received.recv()).await.expect("an answer, or the end");
        next.map(|(kind, stream, _)| (kind, stream))
    }

    /// Why the connection was given up, if that is said within a moment.
    async fn read_goaway_reason(&mut self) -> Option<u32> {
        while let Ok(Some((kind, _, payload))) = timeout(Duration::from_millis(50), self.received.recv()).await {
            if kind == GOAWAY {
                return Some(u32::from_be_bytes(payload[4..8].try_into().expect("eight bytes and more")));
            }
        }
        None
    }

    /// Reads until this stream is answered or reset, or the connection given up: what kind of frame did it.
    async fn read_stream_end(&mut self, on: u32) -> Option<u8> {
        while let Some((kind, stream)) = self.next().await {
            if kind == GOAWAY || stream == on && matches!(kind, HEADERS | RST_STREAM) {
                return Some(kind);
            }
        }
        None
    }
}

/// A client that keeps the rules.
struct ValidHttp2Client {
    sender: h2::client::SendRequest<Bytes>,
    driver: JoinHandle<Result<(), h2::Error>>,
}

impl ValidHttp2Client {
    async fn connect(world: &TestGateway) -> ValidHttp2Client {
        let socket = TcpStream::connect(world.gateway.addr()).await.expect("it listens");
        let (to, connection) = h2::client::handshake(socket).await.expect("it speaks HTTP/2");
        ValidHttp2Client { sender: to, driver: tokio::spawn(connection) }
    }

    /// Begins a request, of which only this much of the body is sent.
    async fn begin(&self, key: &str, body: &'static str, whole: bool) -> (ResponseFuture, SendStream<Bytes>) {
        let request = http::Request::post(format!("http://{HOST}/pay"))
            .header("idempotency-key", key)
            .header("content-type", "application/json");
        let mut to = self.sender.clone().ready().await.expect("a stream");
        let (answer, mut sending) = to.send_request(request.body(()).expect("a request"), false).expect("it is sent");
        sending.send_data(Bytes::from_static(body.as_bytes()), whole).expect("it is sent");
        (answer, sending)
    }

    /// The status and the body of the answer to a request.
    async fn send_valid(&self, key: &str) -> (u16, String) {
        let work = async {
            let (answer, _sending) = self.begin(key, BODY, true).await;
            let mut answer = answer.await.expect("an answer");
            let mut text = BytesMut::new();
            while let Some(data) = answer.body_mut().data().await {
                let data = data.expect("the whole answer");
                answer.body_mut().flow_control().release_capacity(data.len()).expect("just received");
                text.extend(data);
            }
            (answer.status().as_u16(), String::from_utf8(text.to_vec()).expect("text"))
        };
        timeout(WAIT_TIMEOUT, work).await.expect("an answer in time")
    }
}

impl Drop for ValidHttp2Client {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// A request on a connection of its own; its status and body.
async fn send_valid_request(world: &TestGateway, key: &str) -> (u16, String) {
    ValidHttp2Client::connect(world).await.send_valid(key).await
}

#[tokio::test]
async fn the_same_rules_hold_over_http2() {
    let world = TestGateway::in_memory("").await;
    let (status, body) = send_valid_request(&world, "a, b").await;
    assert!(status == 400 && body.contains("#key-invalid"), "{status} {body}");
    assert_eq!(world.upstream.requests(), 0);
    assert_eq!(send_valid_request(&world, "over-h2").await, (201, r#"{"id":1,"run":1}"#.to_owned()));
    // The same caller, host and request: the protocol makes no difference.
    let answer = world.valid_request("over-h2").send().await;
    assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, Some("true")), "{answer:?}");
    assert_eq!(send_valid_request(&world, "\"over-h2\"").await.1, r#"{"id":1,"run":1}"#);
}

#[tokio::test]
async fn requests_against_the_rules_of_http2_are_reset() {
    let world = TestGateway::in_memory("").await;
    let cases: [(&str, &[(&str, &str)]); 12] = [
        ("connection", &[("connection", "idempotency-key")]),
        ("transfer-encoding", &[("transfer-encoding", "chunked")]),
        ("keep-alive", &[("keep-alive", "5")]),
        ("proxy-connection", &[("proxy-connection", "close")]),
        ("upgrade", &[("upgrade", "websocket")]),
        ("te", &[("te", "gzip")]),
        ("capitals", &[("Idempotency-Key", "x")]),
        ("a pseudo-header at the end", &[(":path", "/smuggled")]),
        ("an unknown pseudo-header", &[(":nonsense", "x")]),
        ("a line feed in a value", &[("x", "a\nb: c")]),
        ("a longer length", &[("content-length", "100")]),
        ("no length at all", &[("content-length", "five")]),
    ];
    for (at, (case, lines)) in cases.into_iter().enumerate() {
        let key = format!("h2-rules-{at:02}");
        let mut frames = FrameConnection::open(&world).await;
        frames.send(&frame(HEADERS, END_HEADERS, 1, &request(&key, lines))).await;
        frames.send(&frame(DATA, END_STREAM, 1, BODY.as_bytes())).await;
        // h2 resets the stream, or gives up the connection.
        let verdict = frames.read_stream_end(1).await;
        assert!(matches!(verdict, Some(RST_STREAM | GOAWAY) | None), "{case}: {verdict:?}");
        assert_eq!(world.upstream.executions_with_key(&key), 0, "{case}");
        world.assert_runs_once(case, &key).await;
    }
    assert_eq!(world.upstream.executions(), cases.len());
}

#[tokio::test]
async fn what_a_pseudo_header_names_stays_in_its_place_upstream() {
    let world = TestGateway::in_memory("").await;
    // Written into a head of HTTP/1.1, each of these would be more than a method, a path or a host.
    for (at, (case, name, value)) in [
        ("a second line in the path", ":path", "/pay HTTP/1.1\r\nx: y"),
        ("a space in the path", ":path", "/pay /x"),
        ("an empty path", ":path", ""),
        ("a path without a slash", ":path", "pay"),
        ("an asterisk", ":path", "*"),
        ("dot segments", ":path", "/static/../pay"),
        ("a second line in the method", ":method", "POST / HTTP/1.1\r\nx: y"),
        ("a space in the method", ":method", "POST /x"),
        ("a tunnel", ":method", "CONNECT"),
        ("a user", ":authority", "me@shop.test"),
        ("two hosts", ":authority", "shop.test,other.test"),
        ("a second line in the host", ":authority", "shop.test\r\nx: y"),
        ("no host", ":authority", ""),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("h2-pseudo-{at:02}");
        let usual = [(":method", "POST"), (":scheme", "http"), (":path", "/pay"), (":authority", HOST)];
        let mut lines = usual.map(|(usual, good)| (usual, if usual == name { value } else { good })).to_vec();
        lines.push(("idempotency-key", &key));
        let mut frames = FrameConnection::open(&world).await;
        frames.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &encode_fields(&lines))).await;
        // Reset by h2 or answered by the gateway: the upstream tells that it was no 201.
        let _ = frames.read_stream_end(1).await;
        assert_eq!(world.upstream.requests(), at, "{case}: {:?}", world.upstream);
        world.assert_runs_once(case, &key).await;
    }
}

#[tokio::test]
async fn another_host_beside_the_authority_is_refused() {
    let world = TestGateway::in_memory("").await;
    for (case, key, host) in [("another", "h2-host-1", "other.test"), ("with a port", "h2-host-2", "shop.test:81")] {
        let mut frames = FrameConnection::open(&world).await;
        frames.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &request(key, &[("host", host)]))).await;
        assert_eq!(frames.read_stream_end(1).await, Some(HEADERS), "{case}: it is answered");
        world.assert_runs_once(case, key).await;
    }
}

#[tokio::test]
async fn a_stream_cut_short_is_never_claimed() {
    let world = TestGateway::in_memory("").await;
    let cancel = 8_u32.to_be_bytes();
    for (at, (case, frames)) in [
        ("reset after the head", vec![frame(RST_STREAM, 0, 1, &cancel)]),
        ("reset in the body", vec![frame(DATA, 0, 1, b"{"), frame(RST_STREAM, 0, 1, &cancel)]),
        ("closed in the body", vec![frame(DATA, 0, 1, b"{")]),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("h2-cut-{at}");
        let mut connection = FrameConnection::open(&world).await;
        connection.send(&[frame(HEADERS, END_HEADERS, 1, &request(&key, &[])), frames.concat()].concat()).await;
        if case.starts_with("closed") {
            drop(connection);
        }
        world.assert_runs_once(case, &key).await;
    }
}

#[tokio::test]
async fn a_rapid_reset_ends_in_goaway_and_others_are_served() {
    let world = TestGateway::in_memory("").await;
    let mut frames = FrameConnection::open(&world).await;
    let cancel = 8_u32.to_be_bytes();
    // Streams that are opened and reset before anybody can answer them: CVE-2023-44487.
    let mut flood = Vec::new();
    for stream in (1..20_000).step_by(2) {
        flood.extend(frame(HEADERS, END_HEADERS, stream, &request(&format!("rapid-{stream}"), &[])));
        flood.extend(frame(RST_STREAM, 0, stream, &cancel));
    }
    frames.send(&flood).await;
    // No stream was answered: the connection ends, with GOAWAY if that is not overtaken by the reset behind it.
    assert!(matches!(frames.read_stream_end(0).await, Some(GOAWAY) | None));
    assert_eq!(send_valid_request(&world, "after-rapid-reset").await.0, 201);
    // None of these streams had a body, so none was claimed.
    assert_eq!(world.upstream.executions(), 1);
    world.assert_runs_once("rapid reset", "rapid-1").await;
}

#[tokio::test]
async fn a_flood_of_continuations_ends_the_connection_and_others_are_served() {
    let world = TestGateway::in_memory("").await;
    let mut frames = FrameConnection::open(&world).await;
    frames.send(&frame(HEADERS, 0, 1, &request("continued", &[]))).await;
    let more: Vec<_> = (0..100).flat_map(|_| encode_fields(&[("x-filler", &"y".repeat(100))])).collect();
    let more = frame(CONTINUATION, 0, 1, &more);
    // 40 MB in all, were it read: CVE-2024-27316. The end of the connection ends the sending.
    let mut sent = 0;
    while sent < 4000 && frames.send(&more).await {
        sent += 1;
    }
    assert!(sent < 4000, "40 MB of headers were read");
    assert_eq!(world.upstream.requests(), 0);
    assert_eq!(send_valid_request(&world, "after-continuations").await.0, 201);
    world.assert_runs_once("continuations", "continued").await;
}

#[tokio::test]
async fn a_head_over_the_limit_is_refused_over_http2_too() {
    let world = TestGateway::in_memory("[limits]\nmax_header_bytes = \"8KiB\"\n").await;
    let mut frames = FrameConnection::open(&world).await;
    let filler = "y".repeat(100);
    let large = request("h2-large-head", &[("x-filler", filler.as_str()); 120]);
    frames.send(&frame(HEADERS, END_HEADERS, 1, &large)).await;
    frames.send(&frame(DATA, END_STREAM, 1, BODY.as_bytes())).await;
    // h2 answers 431 by itself, or gives up.
    assert!(frames.read_stream_end(1).await.is_some());
    assert_eq!(world.upstream.requests(), 0);
    world.assert_runs_once("a large head", "h2-large-head").await;
}

#[tokio::test]
async fn garbage_frames_end_the_connection_only() {
    let world = TestGateway::in_memory("").await;
    for (case, bytes) in [
        ("an unfinished preface", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n".to_vec()),
        ("a frame larger than allowed", vec![0xff, 0xff, 0xff, DATA, 0, 0, 0, 0, 1]),
        ("data on no stream", frame(DATA, 0, 0, b"x")),
        ("data on a stream that never began", frame(DATA, END_STREAM, 5, b"x")),
        ("a continuation of nothing", frame(CONTINUATION, END_HEADERS, 1, b"")),
        ("bad HPACK", frame(HEADERS, END_HEADERS | END_STREAM, 1, &[0xff; 16])),
        ("an even stream", frame(HEADERS, END_HEADERS | END_STREAM, 2, &request("even", &[]))),
        ("settings of odd length", frame(SETTINGS, 0, 0, b"x")),
    ] {
        let mut frames = if bytes.starts_with(b"PRI") {
            FrameConnection::connect(&world).await
        } else {
            FrameConnection::open(&world).await
        };
        frames.send(&bytes).await;
        println!("{case}");
        while frames.next().await.is_some() {}
    }
    assert_eq!(world.upstream.requests(), 0);
    assert_eq!(send_valid_request(&world, "after-garbage").await.0, 201);
}

/// In small pieces, so that nothing is left unread when the connection is given up, and its last word arrives.
#[tokio::test]
async fn floods_are_told_why_and_connections_that_were_there_before_are_served_on() {
    let world = TestGateway::in_memory("").await;
    let beside = ValidHttp2Client::connect(&world).await;
    assert_eq!(beside.send_valid("beside-0").await.0, 201);
    let cancel = 8_u32.to_be_bytes();
    let mut next = 1;
    let mut resets = || {
        let pair = |stream| {
            let head = frame(HEADERS, END_HEADERS, stream, &request(&format!("told-{stream}"), &[]));
            [head, frame(RST_STREAM, 0, stream, &cancel)].concat()
        };
        let burst: Vec<u8> = (0..40).flat_map(|at| pair(next + 2 * at)).collect();
        next += 80;
        burst
    };
    let mut begun = false;
    let mut continuations = || {
        let filler = encode_fields(&[("x-filler", &"y".repeat(100))]);
        if std::mem::replace(&mut begun, true) {
            frame(CONTINUATION, 0, 1, &filler)
        } else {
            frame(HEADERS, 0, 1, &request("continued", &[]))
        }
    };
    let floods: [(&str, &mut dyn FnMut() -> Vec<u8>); 2] =
        [("resets", &mut resets), ("continuations", &mut continuations)];
    for (case, flood) in floods {
        let mut frames = FrameConnection::open(&world).await;
        let mut why = None;
        for round in 0..200 {
            frames.send(&flood()).await;
            let (status, _) = beside.send_valid(&format!("beside-{case}-{round}")).await;
            assert_eq!(status, 201, "{case}: a connection that was there before");
            why = frames.read_goaway_reason().await;
            if why.is_some() {
                break;
            }
        }
        assert_eq!(why, Some(ENHANCE_YOUR_CALM), "{case}");
        while frames.next().await.is_some() {}
        assert_eq!(send_valid_request(&world, &format!("after-{case}")).await.0, 201, "{case}: a new connection");
    }
    world.assert_runs_once("resets", "told-1").await;
    world.assert_runs_once("continuations", "continued").await;
}

#[tokio::test]
async fn slow_heads_and_bodies_are_not_waited_for_over_http2_either() {
    let limits = "[limits]\nheader_timeout = \"300ms\"\nbody_timeout = \"300ms\"\nidle_timeout = \"300ms\"\n";
    let world = TestGateway::in_memory(limits).await;
    // A head that does not end, and one that has not begun.
    for (case, begun) in [("half a head", frame(HEADERS, 0, 1, &request("h2-slow-head", &[]))), ("nothing", Vec::new())]
    {
        let mut frames = FrameConnection::open(&world).await;
        frames.send(&begun).await;
        println!("{case}");
        while frames.next().await.is_some() {}
    }
    world.assert_runs_once("half a head", "h2-slow-head").await;
    for (key, begun) in [("h2-slow-body-0", ""), ("h2-slow-body-1", "{\"amou")] {
        let client = ValidHttp2Client::connect(&world).await;
        let (answer, _sending) = client.begin(key, begun, false).await;
        let answer = timeout(WAIT_TIMEOUT, answer).await.expect("in time").expect("an answer");
        assert_eq!(answer.status(), 408, "{key}");
        world.assert_runs_once("a slow body", key).await;
    }
}
