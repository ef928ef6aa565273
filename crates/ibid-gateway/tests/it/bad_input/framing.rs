//! Requests whose end, head or host cannot be told for certain.

use super::{BODY, HOST, TestGateway, WAIT_TIMEOUT, assert_problem, request_head};

const CHUNKED: &str = "Transfer-Encoding: chunked\r\n";

#[tokio::test]
async fn a_content_length_that_is_no_number_is_turned_away() {
    let world = TestGateway::in_memory("").await;
    let cases = [
        ("a sign", "Content-Length: +5"),
        ("negative", "Content-Length: -1"),
        ("a list of equal lengths", "Content-Length: 5, 5"),
        ("a list", "Content-Length: 5, 6"),
        ("empty", "Content-Length:"),
        ("hexadecimal", "Content-Length: 0x5"),
        ("a fraction", "Content-Length: 5.0"),
        ("two numbers", "Content-Length: 5 5"),
        ("letters", "Content-Length: five"),
        ("quoted", "Content-Length: \"5\""),
        ("more than 64 bits", "Content-Length: 99999999999999999999999"),
        ("conflicting", "Content-Length: 5\r\nContent-Length: 6"),
        ("conflicting with zero", "Content-Length: 0\r\nContent-Length: 5"),
        ("good, then malformed", "Content-Length: 5\r\nContent-Length: +5"),
        ("conflicting after a while", "Content-Length: 5\r\nX: y\r\ncontent-LENGTH: 5\r\nContent-Length: 4"),
    ];
    for (at, (case, lines)) in cases.into_iter().enumerate() {
        let key = format!("length-{at:02}");
        // hyper answers 400 and closes.
        world.assert_rejected(case, format!("{}{lines}\r\n\r\nhello", request_head("/pay", &key)), &[400]).await;
        world.assert_runs_once(case, &key).await;
        // The same without a key, where nothing buffers the body.
        let keyless = format!("POST /keyless HTTP/1.1\r\nHost: {HOST}\r\n{lines}\r\n\r\nhello");
        world.assert_rejected(case, keyless, &[400]).await;
    }
    assert_eq!((world.upstream.requests(), world.upstream.broken()), (cases.len(), 0));
}

#[tokio::test]
async fn a_length_beyond_all_measure_is_refused_unread() {
    let world = TestGateway::in_memory("").await;
    for (at, length) in [u64::MAX, u64::MAX - 1, u64::MAX - 2, u64::MAX - 3, 1 << 63, 1 << 40].into_iter().enumerate() {
        let (case, key) = (length.to_string(), format!("huge-{at:02}"));
        // hyper keeps the last values for itself (431); all others are over max_request.
        let bytes = format!("{}Content-Length: {length}\r\n\r\nhello", request_head("/pay", &key));
        world.assert_rejected(&case, bytes, &[413, 431]).await;
        world.assert_runs_once(&case, &key).await;
    }
}

#[tokio::test]
async fn equal_lengths_are_one_length_upstream() {
    let world = TestGateway::in_memory("").await;
    let length = BODY.len();
    let bytes =
        format!("{}Content-Length: {length}\r\nContent-Length: {length}\r\n\r\n{BODY}", request_head("/pay", "equal"));
    assert_eq!(world.exchange(bytes).await.status, 201);
    let seen = world.upstream.last();
    assert_eq!(seen.headers.get_all("content-length"), [length.to_string()]);
    assert!(!seen.headers.contains("transfer-encoding"), "{seen:?}");
    assert_eq!((seen.text().as_str(), world.upstream.executions()), (BODY, 1));
}

#[tokio::test]
async fn a_coding_other_than_chunked_is_turned_away() {
    let world = TestGateway::in_memory("").await;
    let cases = [
        ("unknown", "Transfer-Encoding: xchunked"),
        ("gzip", "Transfer-Encoding: gzip"),
        ("identity", "Transfer-Encoding: identity"),
        ("empty", "Transfer-Encoding:"),
        ("chunked is not the last", "Transfer-Encoding: chunked, identity"),
        ("chunked is not the last, by lines", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity"),
        ("unknown before chunked", "Transfer-Encoding: x, chunked"),
        ("gzip before chunked", "Transfer-Encoding: gzip, chunked"),
        ("unknown before chunked, by lines", "Transfer-Encoding: x\r\nTransfer-Encoding: chunked"),
        ("chunked twice", "Transfer-Encoding: chunked, chunked"),
        ("chunked twice, by lines", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
        ("an empty element before chunked", "Transfer-Encoding: , chunked"),
        ("a parameter", "Transfer-Encoding: chunked;q=1"),
        ("quoted", "Transfer-Encoding: \"chunked\""),
        ("a vertical tab", "Transfer-Encoding: \x0bchunked"),
        ("not ASCII", "Transfer-Encoding: chunked\u{e9}"),
        ("a space before the colon", "Transfer-Encoding : chunked"),
    ];
    for (at, (case, lines)) in cases.into_iter().enumerate() {
        let (key, chunks) = (format!("coding-{at:02}"), "5\r\nhello\r\n0\r\n\r\n");
        // hyper answers 400 and closes where chunked is not the last coding; the gateway where it is not the only one.
        world.assert_rejected(case, format!("{}{lines}\r\n\r\n{chunks}", request_head("/pay", &key)), &[400]).await;
        world.assert_runs_once(case, &key).await;
        let keyless = format!("POST /keyless HTTP/1.1\r\nHost: {HOST}\r\n{lines}\r\n\r\n{chunks}");
        world.assert_rejected(case, keyless, &[400]).await;
        let get = format!("GET /keyless HTTP/1.1\r\nHost: {HOST}\r\n{lines}\r\n\r\n{chunks}");
        world.assert_rejected(case, get, &[400]).await;
    }
    assert_eq!((world.upstream.requests(), world.upstream.broken()), (cases.len(), 0));
    let shouted = format!("{}Transfer-Encoding: CHUNKED\r\n\r\n0\r\n\r\n", request_head("/pay", "shouted"));
    assert_eq!(world.exchange(shouted).await.status, 201);
}

#[tokio::test]
async fn malformed_chunks_are_turned_away() {
    let world = TestGateway::in_memory("").await;
    let cases = [
        ("no digit", "\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("not hexadecimal", "g\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("a prefix", "0x5\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("a sign", "+5\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("negative", "-5\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("a space first", " 5\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("digits after a space", "5 5\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("more than 64 bits", "10000000000000005\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("a line feed alone", "5\nhello\r\n0\r\n\r\n".to_owned()),
        ("a carriage return alone", "5\rhello\r\n0\r\n\r\n".to_owned()),
        ("longer than announced", "4\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("shorter than announced", "6\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("no end of the chunk", "5\r\nhello0\r\n\r\n".to_owned()),
        ("a line feed in an extension", "5;a\nb\r\nhello\r\n0\r\n\r\n".to_owned()),
        ("an extension of 20 kB", format!("5;{}\r\nhello\r\n0\r\n\r\n", "e".repeat(20_000))),
        ("20 kB of extensions", format!("{}0\r\n\r\n", format!("1;{}\r\nx\r\n", "e".repeat(100)).repeat(200))),
        ("a trailer without a colon", "5\r\nhello\r\n0\r\nnonsense\r\n\r\n".to_owned()),
        ("a trailer with a space in its name", "5\r\nhello\r\n0\r\na b: c\r\n\r\n".to_owned()),
        ("20 kB of trailers", format!("5\r\nhello\r\n0\r\nt: {}\r\n\r\n", "t".repeat(20_000))),
        ("200 trailers", format!("5\r\nhello\r\n0\r\n{}\r\n", "t: v\r\n".repeat(200))),
    ];
    let count = cases.len();
    for (at, (case, chunks)) in cases.into_iter().enumerate() {
        let key = format!("chunks-{at:02}");
        // The gateway answers 400: it was reading the body.
        world.assert_rejected(case, format!("{}{CHUNKED}\r\n{chunks}", request_head("/pay", &key)), &[400]).await;
        world.assert_runs_once(case, &key).await;
    }
    assert_eq!((world.upstream.requests(), world.upstream.broken()), (count, 0));
}

#[tokio::test]
async fn malformed_chunks_without_a_key_end_the_request_upstream_too() {
    let world = TestGateway::in_memory("").await;
    let bytes = format!("POST /keyless HTTP/1.1\r\nHost: {HOST}\r\n{CHUNKED}\r\n5\r\nhello\r\nnonsense\r\n\r\n");
    let mut raw = world.connect().await;
    raw.send(bytes).await;
    if let Ok(answer) = raw.try_read_response().await {
        assert!(matches!(answer.status, 400 | 502), "{answer:?}");
    }
    assert!(raw.is_closed_within(WAIT_TIMEOUT).await);
    assert_eq!(world.upstream.executions(), 0, "half a request is not carried out");
    world.assert_runs_once("afterwards", "after-nonsense").await;
}

#[tokio::test]
async fn a_body_cut_short_is_never_claimed() {
    let world = TestGateway::in_memory("").await;
    let cases = [
        ("no byte of it", "Content-Length: 100\r\n\r\n".to_owned()),
        ("half of it", format!("Content-Length: 24\r\n\r\n{BODY}")),
        ("all but one byte", format!("Content-Length: 13\r\n\r\n{BODY}")),
        ("no chunk", format!("{CHUNKED}\r\n")),
        ("half a chunk size", format!("{CHUNKED}\r\n1")),
        ("half a chunk", format!("{CHUNKED}\r\n64\r\nhello")),
        ("no last chunk", format!("{CHUNKED}\r\n5\r\nhello\r\n")),
        ("no end of the last chunk", format!("{CHUNKED}\r\n5\r\nhello\r\n0\r\n")),
        ("half a trailer", format!("{CHUNKED}\r\n5\r\nhello\r\n0\r\nt: v")),
        ("half a head", "X-More: to co".to_owned()),
    ];
    for (at, (case, rest)) in cases.into_iter().enumerate() {
        // The client stops sending but still listens: 400, or nothing.
        let key = format!("cut-{at:02}-half");
        let mut raw = world.connect().await;
        raw.send(format!("{}{rest}", request_head("/pay", &key))).await;
        raw.half_close().await;
        match raw.try_read_response().await {
            Ok(answer) => assert_eq!(answer.status, 400, "{case}: {answer:?}"),
            Err(broken) => assert!(broken.is_closed(), "{case}: {broken}"),
        }
        world.assert_runs_once(case, &key).await;
        // The client is gone, in good order or in pieces.
        let (closed, reset) = (format!("cut-{at:02}-closed"), format!("cut-{at:02}-reset"));
        let mut raw = world.connect().await;
        raw.send(format!("{}{rest}", request_head("/pay", &closed))).await;
        drop(raw);
        world.assert_runs_once(case, &closed).await;
        let mut raw = world.connect().await;
        raw.send(format!("{}{rest}", request_head("/pay", &reset))).await;
        raw.abort();
        world.assert_runs_once(case, &reset).await;
    }
    assert_eq!(world.upstream.broken(), 0);
}

#[tokio::test]
async fn a_head_that_can_be_read_in_two_ways_is_turned_away() {
    let world = TestGateway::in_memory("").await;
    let cases: [(&str, &str); 16] = [
        ("a folded header", "X: a\r\n b"),
        ("a folded key", "Idempotency-Key: a\r\n\tb"),
        ("a space before the colon", "X : a"),
        ("a tab before the colon", "X\t: a"),
        ("a space before the name", " X: a"),
        ("NUL in a value", "X: a\0b"),
        ("NUL in a name", "X\0: a"),
        ("no colon", "nonsense"),
        ("no name", ": a"),
        ("a carriage return in a value", "X: a\rb"),
        ("a carriage return in a name", "X\rY: a"),
        ("not ASCII in a name", "X\u{e9}: a"),
        ("brackets in a name", "X(y): a"),
        ("a quote in a name", "\"X\": a"),
        ("a second request line", "POST /smuggled HTTP/1.1"),
        ("DEL in a name", "X\x7f: a"),
    ];
    for (at, (case, line)) in cases.into_iter().enumerate() {
        let key = format!("head-{at:02}");
        let rest = format!("Content-Length: {}\r\n\r\n{BODY}", BODY.len());
        // hyper answers 400 and closes.
        world.assert_rejected(case, format!("{}{line}\r\n{rest}", request_head("/pay", &key)), &[400]).await;
        world.assert_runs_once(case, &key).await;
    }
    for (case, line) in [
        ("no version", "POST /pay"),
        ("an unknown version", "POST /pay HTTP/3.0"),
        ("a version in small letters", "POST /pay http/1.1"),
        ("no target", "POST HTTP/1.1"),
        ("two spaces", "POST  /pay HTTP/1.1"),
        ("a space in the target", "POST /pay /more HTTP/1.1"),
        ("a tab", "POST\t/pay HTTP/1.1"),
        ("a control byte in the target", "POST /pay\x01 HTTP/1.1"),
        ("a control byte in the method", "PO\x01ST /pay HTTP/1.1"),
        ("no method", "/pay HTTP/1.1"),
        ("no slash", "POST pay HTTP/1.1"),
    ] {
        let bytes = format!("{line}\r\nHost: {HOST}\r\nIdempotency-Key: line\r\nContent-Length: 0\r\n\r\n");
        world.assert_rejected(case, bytes, &[400]).await;
    }
    assert_eq!(world.upstream.requests(), cases.len());
    world.assert_runs_once("request lines", "line").await;
}

#[tokio::test]
async fn line_feeds_alone_end_lines_and_go_upstream_as_they_should() {
    let world = TestGateway::in_memory("").await;
    // RFC 9112 lets a server take them for line ends, and hyper does. What matters: the app sees the same headers.
    let bytes = format!("POST /pay HTTP/1.1\nHost: {HOST}\nIdempotency-Key: lines\nX: a\nContent-Length: 2\n\n{{}}");
    assert_eq!(world.exchange(bytes).await.status, 201);
    let seen = world.upstream.last();
    assert_eq!(
        (seen.header("x"), seen.header("idempotency-key"), seen.text().as_str()),
        (Some("a"), Some("lines"), "{}")
    );
    assert_eq!(world.upstream.executions(), 1);
}

#[tokio::test]
async fn a_request_names_one_host() {
    let world = TestGateway::in_memory("").await;
    let length = BODY.len();
    for (at, (case, target, lines)) in [
        ("none", "/pay", ""),
        ("none, absolute form", "http://shop.test/pay", ""),
        ("two", "/pay", "Host: shop.test\r\nHost: other.test\r\n"),
        ("the same twice", "/pay", "Host: shop.test\r\nhost: shop.test\r\n"),
        ("another in the target", "http://other.test/pay", "Host: shop.test\r\n"),
        ("another port in the target", "http://shop.test:81/pay", "Host: shop.test\r\n"),
        ("a user in the target", "http://me@shop.test/pay", "Host: shop.test\r\n"),
        ("a list", "/pay", "Host: shop.test, other.test\r\n"),
        ("a space inside", "/pay", "Host: shop.test other.test\r\n"),
        ("a path", "/pay", "Host: shop.test/other\r\n"),
        ("a user", "/pay", "Host: me@shop.test\r\n"),
        ("not ASCII", "/pay", "Host: shop\u{e9}.test\r\n"),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("host-{at:02}");
        let rest = format!("Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{BODY}");
        let post = format!("POST {target} HTTP/1.1\r\n{lines}Idempotency-Key: {key}\r\n{rest}");
        let answer = world.exchange(post).await;
        assert_problem(case, &answer, 400, "request-ambiguous", None);
        world.assert_runs_once(case, &key).await;
        // It decides what the app serves, so it holds for every request.
        let answer = world.exchange(format!("GET {target} HTTP/1.1\r\n{lines}\r\n")).await;
        assert_eq!(answer.status, 400, "{case}: {answer:?}");
        assert_eq!(world.upstream.requests(), at + 1, "{case}");
    }
    let absolute = format!(
        "POST http://{HOST}/pay HTTP/1.1\r\nHost: {HOST}\r\nIdempotency-Key: host-00\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{BODY}"
    );
    let answer = world.exchange(absolute).await;
    assert_eq!(
        (answer.status, answer.header("idempotent-replayed")),
        (201, Some("true")),
        "the same request: {answer:?}"
    );
}
