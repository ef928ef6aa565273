use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Method, Request};
use http_body_util::{Empty, Full, StreamBody};

use super::*;

/// A reply as a reader of the connection sees it.
#[derive(Debug, PartialEq)]
struct ReadReply {
    status: u16,
    headers: HeaderMap,
    body: Vec<u8>,
    trailers: Option<HeaderMap>,
    keeps_alive: bool,
    /// The bytes that follow the reply.
    rest: Vec<u8>,
}

/// Reads a reply that arrives in the given pieces. `None`: it is incomplete.
fn read(method: &Method, pieces: &[&[u8]]) -> Result<Option<ReadReply>, String> {
    let mut input = BytesMut::new();
    let (mut head, mut body, mut trailers, mut is_complete) = (None, Vec::new(), None, false);
    for piece in pieces {
        input.extend_from_slice(piece);
        if head.is_none() {
            head = decode_head(&mut input, method)?;
        }
        let Some(ReplyHead { framing, .. }) = &mut head else { continue };
        while !is_complete {
            match framing {
                ReplyFraming::Length(left) => {
                    let data = input.split_to(input.len().min(*left as usize));
                    *left -= data.len() as u64;
                    body.extend_from_slice(&data);
                    is_complete = *left == 0;
                    break;
                }
                ReplyFraming::UntilClose => {
                    body.extend_from_slice(&input.split());
                    break;
                }
                ReplyFraming::Chunked(decoder) => match decoder.decode(&mut input)? {
                    DecodedChunk::Data(data) => body.extend_from_slice(&data),
                    DecodedChunk::Incomplete => break,
                    DecodedChunk::End(with) => (trailers, is_complete) = (with, true),
                },
            }
        }
    }
    let Some(head) = head.filter(|head| is_complete || matches!(head.framing, ReplyFraming::UntilClose)) else {
        return Ok(None);
    };
    let (status, headers) = (head.response.status().as_u16(), head.response.headers().clone());
    Ok(Some(ReadReply { status, headers, body, trailers, keeps_alive: head.keeps_alive, rest: input.to_vec() }))
}

fn read_get(reply: &str) -> Result<Option<ReadReply>, String> {
    read(&Method::GET, &[reply.as_bytes()])
}

#[test]
fn replies_are_read_alike_wherever_they_are_split() {
    let many: String = (0..100).map(|n| format!("x-{n}: v\r\n")).collect();
    let replies = [
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-a: 1\r\nX-A:  2 \r\n\r\nhello".to_owned(),
        "HTTP/1.1 299 Not quite usual\r\nContent-Length: 0\r\n\r\n".to_owned(),
        "HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok".to_owned(),
        "HTTP/1.1 200 OK\r\n\r\nuntil the end".to_owned(),
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n00C ; a=\"b\"\r\nhello, world\r\n0\r\n\r\n"
            .to_owned(),
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0;x\r\nx-sum: 7\r\nx-more: 8\r\n\r\n"
            .to_owned(),
        format!("HTTP/1.1 204 No Content\r\n{many}\r\n"),
    ];
    for reply in replies {
        let whole = read_get(&reply).unwrap().unwrap_or_else(|| panic!("incomplete: {reply}"));
        assert!(whole.rest.is_empty(), "{reply}");
        for at in 1..reply.len() {
            let (one, other) = reply.as_bytes().split_at(at);
            assert_eq!(read(&Method::GET, &[one, other]).unwrap().as_ref(), Some(&whole), "{at} of {reply}");
        }
        let bytes: Vec<&[u8]> = reply.as_bytes().chunks(1).collect();
        assert_eq!(read(&Method::GET, &bytes).unwrap(), Some(whole), "{reply}");
    }
}

#[test]
fn malformed_replies_are_errors() {
    let long_extension = format!("transfer-encoding: chunked\r\n\r\n1;{}", "x".repeat(MAX_CHUNK_META_BYTES));
    let extensions =
        format!("transfer-encoding: chunked\r\n\r\n{}", format!("1;{}\r\na\r\n", "x".repeat(1000)).repeat(17));
    let trailers = format!("transfer-encoding: chunked\r\n\r\n0\r\nx: {}", "x".repeat(MAX_CHUNK_META_BYTES));
    let headers = format!("{}\r\n", "x: y\r\n".repeat(MAX_REPLY_HEADERS + 1));
    for (what, rest) in [
        ("two lengths", "content-length: 5\r\ncontent-length: 6\r\n\r\nhello"),
        ("two lengths in a line", "content-length: 5, 6\r\n\r\nhello"),
        ("signed length", "content-length: +5\r\n\r\nhello"),
        ("negative length", "content-length: -5\r\n\r\nhello"),
        ("empty length", "content-length: \r\n\r\n"),
        ("length that is no number", "content-length: five\r\n\r\n"),
        ("length with a fraction", "content-length: 5.0\r\n\r\nhello"),
        ("too large a length", "content-length: 18446744073709551616\r\n\r\n"),
        ("folded line", "x-a: 1\r\n 2\r\ncontent-length: 0\r\n\r\n"),
        ("space before the colon", "x-a : 1\r\ncontent-length: 0\r\n\r\n"),
        ("NUL in a value", "x-a: a\0b\r\ncontent-length: 0\r\n\r\n"),
        ("CR in a value", "x-a: a\rb\r\ncontent-length: 0\r\n\r\n"),
        ("bad byte in a name", "x\u{e9}: a\r\ncontent-length: 0\r\n\r\n"),
        ("line without a colon", "x-a\r\ncontent-length: 0\r\n\r\n"),
        ("no chunk size", "transfer-encoding: chunked\r\n\r\n\r\n"),
        ("chunk size that is no number", "transfer-encoding: chunked\r\n\r\nx\r\n"),
        ("signed chunk size", "transfer-encoding: chunked\r\n\r\n+1\r\na\r\n"),
        ("prefixed chunk size", "transfer-encoding: chunked\r\n\r\n0x1\r\na\r\n"),
        ("space inside a chunk size", "transfer-encoding: chunked\r\n\r\n1 1\r\n"),
        ("too large a chunk size", "transfer-encoding: chunked\r\n\r\n10000000000000000\r\n"),
        ("chunk size before LF", "transfer-encoding: chunked\r\n\r\n1\na\r\n"),
        ("extension before LF", "transfer-encoding: chunked\r\n\r\n1;x\na\r\n"),
        ("CR in an extension", "transfer-encoding: chunked\r\n\r\n1;x\ry\r\na\r\n"),
        ("chunk that is longer", "transfer-encoding: chunked\r\n\r\n1\r\nab\r\n"),
        ("chunk that ends with LF", "transfer-encoding: chunked\r\n\r\n1\r\na\n0\r\n\r\n"),
        ("trailer without a colon", "transfer-encoding: chunked\r\n\r\n0\r\nx\r\n\r\n"),
        ("too long an extension", &long_extension),
        ("too many extensions", &extensions),
        ("too long trailers", &trailers),
        ("too many headers", &headers),
    ] {
        let read = read_get(&format!("HTTP/1.1 200 OK\r\n{rest}"));
        assert!(read.is_err(), "{what}: {read:?}");
    }
    for (what, reply) in [
        ("another protocol", "SSH-2.0-OpenSSH_9.2\r\n\r\n"),
        ("HTTP/2", "HTTP/2.0 200 OK\r\n\r\n"),
        ("HTTP/0.9", "<html>\r\n\r\n"),
        ("status of two digits", "HTTP/1.1 20 OK\r\n\r\n"),
        ("status of four digits", "HTTP/1.1 2000 OK\r\n\r\n"),
        ("status that is no number", "HTTP/1.1 2x0 OK\r\n\r\n"),
        ("NUL in the reason", "HTTP/1.1 200 O\0K\r\n\r\n"),
        ("status below 100", "HTTP/1.1 099 Low\r\n\r\n"),
        ("chunks in HTTP/1.0", "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    ] {
        let read = read_get(reply);
        assert!(read.is_err(), "{what}: {read:?}");
    }
}

#[test]
fn the_framing_decides_what_a_body_is_and_whether_the_connection_stays() {
    for (what, method, head, body, keeps_alive) in [
        ("equal lengths", Method::GET, "200 OK\r\ncontent-length: 2, 2\r\ncontent-length: 2", "ab", true),
        ("no length", Method::GET, "200 OK\r\nx: y", "abc", false),
        ("HEAD", Method::HEAD, "200 OK\r\ncontent-length: 2", "", true),
        ("HEAD with a malformed length", Method::HEAD, "200 OK\r\ncontent-length: x", "", true),
        ("204", Method::GET, "204 No Content\r\ncontent-length: 2", "", true),
        ("304", Method::GET, "304 Not Modified\r\ntransfer-encoding: chunked", "", true),
        (
            "closes",
            Method::GET,
            "200 OK\r\nconnection: keep-alive\r\nconnection: x, Close\r\ncontent-length: 2",
            "ab",
            false,
        ),
        ("chunked last", Method::GET, "200 OK\r\ntransfer-encoding: gzip, Chunked", "a", true),
        ("chunked not last", Method::GET, "200 OK\r\ntransfer-encoding: chunked, gzip", "1\r\na\r\n0\r\n\r\n", false),
        ("coding and length", Method::GET, "200 OK\r\ncontent-length: 9\r\ntransfer-encoding: chunked", "a", false),
    ] {
        let sent = if body == "a" { "1\r\na\r\n0\r\n\r\n" } else { body };
        let reply = format!("HTTP/1.1 {head}\r\n\r\n{sent}");
        let read = read(&method, &[reply.as_bytes()]).unwrap().unwrap_or_else(|| panic!("incomplete: {what}"));
        assert_eq!((read.body.as_slice(), read.keeps_alive), (body.as_bytes(), keeps_alive), "{what}");
        let lengths = read.headers.contains_key("content-length") && read.headers.contains_key("transfer-encoding");
        assert!(!lengths, "{what}: {read:?}");
    }
    let read = read_get("HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nab and more").unwrap().unwrap();
    assert_eq!((read.rest.as_slice(), read.keeps_alive), (&b" and more"[..], false));
}

#[test]
fn keep_alive_is_read() {
    let secs = |value: &'static str| keep_alive_timeout(&HeaderValue::from_static(value));
    assert_eq!(secs("timeout=5"), Some(5));
    assert_eq!(secs("max=100, Timeout = \"2\""), Some(2));
    assert_eq!(secs("max=3"), None);
    assert_eq!(secs("timeout=soon"), None);
}

fn encode<B: Body>(request: &Request<B>) -> (String, RequestFraming, bool) {
    let mut out = Vec::new();
    let (framing, is_last) =
        encode_head(request, AddedHeaders::default(), &HeaderValue::from_static("upstream:80"), &mut out);
    (String::from_utf8(out).unwrap(), framing, is_last)
}

#[test]
fn a_request_is_encoded_with_one_host_one_cookie_line_and_one_framing() {
    let request = Request::get("http://a.example?x=1").header("cookie", "a=1").header("cookie", "b=2").header("x", "y");
    let request = request.header("connection", "Close").body(Empty::<Bytes>::new()).unwrap();
    let head = "GET /?x=1 HTTP/1.1\r\nhost: a.example\r\ncookie: a=1; b=2\r\nx: y\r\nconnection: Close\r\n\r\n";
    assert_eq!(encode(&request), (head.to_owned(), RequestFraming::Length(0), true));
    let request = Request::post("/a").body(Full::new(Bytes::from("hello"))).unwrap();
    let head = "POST /a HTTP/1.1\r\nhost: upstream:80\r\ncontent-length: 5\r\n\r\n";
    assert_eq!(encode(&request), (head.to_owned(), RequestFraming::Length(5), false));
    let request = Request::options("*").header("host", "h").header("transfer-encoding", "gzip");
    let request =
        request.header("content-length", "5").header("content-length", "5").body(Full::new(Bytes::from("hello")));
    let head = "OPTIONS * HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\n";
    assert_eq!(encode(&request.unwrap()), (head.to_owned(), RequestFraming::Length(5), false));
    let none = futures_util::stream::empty::<Result<http_body::Frame<Bytes>, std::convert::Infallible>>();
    let request = Request::post("/a").header("trailer", "x-sum, Content-Length").header("content-length", "x");
    let (head, framing, _) = encode(&request.body(StreamBody::new(none)).unwrap());
    let lines = "host: upstream:80\r\ntrailer: x-sum, Content-Length\r\ntransfer-encoding: chunked\r\n";
    assert_eq!(head, format!("POST /a HTTP/1.1\r\n{lines}\r\n"));
    let RequestFraming::Chunked(announced) = framing else { panic!("{framing:?}") };
    assert_eq!(announced, ["x-sum"], "a trailer must not change the framing");
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", HeaderValue::from_static("7"));
    trailers.insert("x-other", HeaderValue::from_static("8"));
    let mut out = Vec::new();
    encode_last_chunk(&mut out, Some(&trailers), &announced);
    assert_eq!(out, b"0\r\nx-sum: 7\r\n\r\n");
}

#[test]
fn the_headers_of_the_run_follow_those_of_the_request() {
    let request = Request::get("/a").header("host", "h").body(Empty::<Bytes>::new()).unwrap();
    let (id, proto) = (HeaderValue::from_static("r-1"), HeaderValue::from_static("https"));
    let operation = ibid::key::OperationId::of(&ibid::store::Address([0xa5; 32]));
    let more = AddedHeaders {
        run: Some(ibid::http::RunInfo { attempt: 2, fence: 1_700_000_000_000_007, operation }),
        request_id: Some(&id),
        others: &[(HeaderName::from_static("x-forwarded-proto"), proto)],
    };
    let mut out = Vec::new();
    encode_head(&request, more, &HeaderValue::from_static("upstream:80"), &mut out);
    let run = format!("ibid-attempt: 2\r\nibid-fence: 1700000000000007\r\nibid-operation: {}\r\n", "a5".repeat(16));
    let lines = format!("host: h\r\n{run}x-request-id: r-1\r\nx-forwarded-proto: https\r\n");
    assert_eq!(String::from_utf8(out).unwrap(), format!("GET /a HTTP/1.1\r\n{lines}\r\n"));
    let listed: Vec<_> =
        more.to_list().into_iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
    assert_eq!(listed.join("\r\n"), lines.trim_start_matches("host: h\r\n").trim_end());
}
