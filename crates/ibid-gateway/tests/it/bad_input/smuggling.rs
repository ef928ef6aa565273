//! One request that could be taken for two, and connections on which several follow each other.

use testbed::client::RawClient;

use super::{BODY, HOST, TestGateway, WAIT_TIMEOUT, assert_problem, request_head};

/// What must never be taken for a request.
const SMUGGLED_REQUEST: &str = "POST /smuggled HTTP/1.1\r\nHost: shop.test\r\nContent-Length: 0\r\n\r\n";

async fn assert_nothing_smuggled(world: &TestGateway, case: &str) {
    assert_eq!(world.upstream.executions_at("/smuggled"), 0, "{case}: {:?}", world.upstream);
    assert_eq!(world.upstream.broken(), 0, "{case}");
}

#[tokio::test]
async fn a_length_beside_chunks_is_ignored_and_the_connection_closed() {
    let world = TestGateway::in_memory("").await;
    let chunks = format!("{:x}\r\n{BODY}\r\n0\r\n\r\n", BODY.len());
    for (at, (case, lines)) in [
        ("length first", "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"),
        ("length last", "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n"),
        ("a length that fits", "Content-Length: 22\r\nTransfer-Encoding: chunked\r\n"),
        ("two lengths", "Content-Length: 4\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n"),
        ("a length of everything", "Content-Length: 92\r\nTransfer-Encoding: chunked\r\n"),
    ]
    .into_iter()
    .enumerate()
    {
        for (key, first) in [
            (format!("both-{at}"), request_head("/pay", &format!("both-{at}"))),
            (String::new(), format!("POST /pay HTTP/1.1\r\nHost: {HOST}\r\n")),
        ] {
            let before = world.upstream.executions();
            let mut raw = world.connect().await;
            raw.send(format!("{first}{lines}\r\n{chunks}{SMUGGLED_REQUEST}")).await;
            assert_eq!(raw.read_response().await.status, 201, "{case} {key:?}");
            assert!(raw.is_closed_within(WAIT_TIMEOUT).await, "{case} {key:?}: the connection stays open");
            assert!(raw.try_read_response().await.is_err(), "{case} {key:?}: a second answer");
            let seen = world.upstream.last();
            let framing = [seen.headers.get_all("content-length"), seen.headers.get_all("transfer-encoding")].concat();
            assert_eq!(framing.len(), 1, "{case} {key:?}: {seen:?}");
            assert_eq!((seen.text().as_str(), world.upstream.executions()), (BODY, before + 1), "{case} {key:?}");
        }
        assert_nothing_smuggled(&world, case).await;
    }
}

#[tokio::test]
async fn an_empty_chunked_body_does_not_let_the_rest_through() {
    let world = TestGateway::in_memory("").await;
    for (key, first) in [
        ("empty-chunks", request_head("/pay", "empty-chunks")),
        ("", format!("POST /pay HTTP/1.1\r\nHost: {HOST}\r\n")),
    ] {
        let length = SMUGGLED_REQUEST.len() + 5;
        let mut raw = world.connect().await;
        let lines = format!("Content-Length: {length}\r\nTransfer-Encoding: chunked\r\n");
        raw.send(format!("{first}{lines}\r\n0\r\n\r\n{SMUGGLED_REQUEST}")).await;
        assert_eq!(raw.read_response().await.status, 201, "{key:?}");
        assert!(raw.is_closed_within(WAIT_TIMEOUT).await, "{key:?}");
        assert_nothing_smuggled(&world, key).await;
    }
    assert_eq!(world.upstream.executions(), 2);
}

/// Sends one refused request whose body looks like a request, then a good one on the same connection: either it is
/// answered as itself, or the connection is closed. Returns whether it was answered.
async fn send_refused_then_valid(world: &TestGateway, case: &str, mut raw: RawClient, key: &str) -> bool {
    let answered = match world.valid_request(key).try_send_on(&mut raw).await {
        Ok(answer) => {
            assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, None), "{case}: {answer:?}");
            assert_eq!(world.upstream.executions_with_key(key), 1, "{case}");
            true
        }
        Err(broken) => {
            assert!(!broken.is_timeout(), "{case}: {broken}");
            world.assert_runs_once(case, key).await;
            false
        }
    };
    assert_nothing_smuggled(world, case).await;
    answered
}

#[tokio::test]
async fn the_unread_body_of_a_refusal_is_not_the_next_request() {
    let world = TestGateway::in_memory("").await;
    let (small, large) = (SMUGGLED_REQUEST.to_owned(), SMUGGLED_REQUEST.repeat(40_000));
    for (at, body) in [&small, &large].into_iter().enumerate() {
        let length = body.len();
        let chunked = format!("Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n{body}\r\n0\r\n\r\n");
        for (framing, rest) in [("length", format!("Content-Length: {length}\r\n\r\n{body}")), ("chunks", chunked)] {
            let (case, key) = (format!("{framing}, {length} bytes"), format!("after-{framing}-{at}"));
            let mut raw = world.connect().await;
            raw.send(format!("POST /pay HTTP/1.1\r\nHost: {HOST}\r\nIdempotency-Key: \"unclosed\r\n{rest}")).await;
            match raw.try_read_response().await {
                Ok(answer) => assert_problem(&case, &answer, 400, "key-invalid", None),
                // Closed with megabytes unread, the answer can be lost.
                Err(broken) => assert!(at == 1 && broken.is_closed(), "{case}: {broken}"),
            }
            send_refused_then_valid(&world, &case, raw, &key).await;
        }
    }
}

#[tokio::test]
async fn an_oversized_retry_does_not_confuse_its_connection() {
    let world = TestGateway::in_memory("").await;
    world.assert_runs_once("first", "remembered").await;
    let body = SMUGGLED_REQUEST.repeat(20_000);
    for (at, chunked) in [false, true].into_iter().enumerate() {
        let (case, key) = (format!("chunked: {chunked}"), format!("after-oversized-{at}"));
        let retry = world.shop_post("/pay").key("remembered").body(body.clone());
        let retry = if chunked { retry.chunked() } else { retry };
        let mut raw = world.connect().await;
        match retry.try_send_on(&mut raw).await {
            Ok(answer) => assert_problem(&case, &answer, 413, "body-too-large", Some("remembered")),
            Err(broken) => assert!(broken.is_closed(), "{case}: {broken}"),
        }
        send_refused_then_valid(&world, &case, raw, &key).await;
    }
    let answer = world.valid_request("remembered").send().await;
    assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, Some("true")));
}

#[tokio::test]
async fn a_replay_leaves_its_connection_in_order() {
    let world = TestGateway::in_memory("").await;
    world.assert_runs_once("first", "replayed-here").await;
    let mut raw = world.connect().await;
    for _ in 0..3 {
        let answer = world.valid_request("replayed-here").send_on(&mut raw).await;
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, Some("true")));
    }
    assert!(
        send_refused_then_valid(&world, "after replays", raw, "after-replays").await,
        "a connection in order is kept"
    );
}

/// Where nothing of a body is compared, a replay could be given without having read it.
#[tokio::test]
async fn the_body_of_a_replay_is_not_the_next_request() {
    let world = TestGateway::in_memory("[policy]\npreset = \"appsportal\"\n").await;
    let head =
        format!("POST /pay HTTP/1.1\r\nHost: {HOST}\r\nX-Tenant-Id: t1\r\nX-Idempotency-Key: replayed-unread\r\n");
    let first = world.exchange(format!("{head}Content-Length: {}\r\n\r\n{BODY}", BODY.len())).await;
    assert_eq!((first.status, first.header("x-idempotency-replay")), (201, None), "{first:?}");
    for body in [SMUGGLED_REQUEST.to_owned(), SMUGGLED_REQUEST.repeat(10_000)] {
        let length = body.len();
        let chunked = format!("Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n{body}\r\n0\r\n\r\n");
        for (case, rest) in [("length", format!("Content-Length: {length}\r\n\r\n{body}")), ("chunks", chunked)] {
            let mut raw = world.connect().await;
            raw.send(format!("{head}{rest}")).await;
            let answer = raw.read_response().await;
            assert_eq!(
                (answer.status, answer.header("x-idempotency-replay")),
                (201, Some("true")),
                "{case}: {answer:?}"
            );
            // What follows on the same connection is a request of its own, or there is no connection any more.
            if raw.try_send(format!("GET /things HTTP/1.1\r\nHost: {HOST}\r\n\r\n")).await.is_ok() {
                match raw.try_read_response().await {
                    Ok(next) => assert_eq!(next.status, 200, "{case}: {next:?}"),
                    Err(broken) => assert!(broken.is_closed(), "{case}: {broken}"),
                }
            }
            assert_nothing_smuggled(&world, case).await;
        }
    }
    // One whose body never comes gets no replay for it, and no second answer later.
    let mut raw = world.connect().await;
    raw.send(format!("{head}Content-Length: 100\r\n\r\n{{")).await;
    raw.half_close().await;
    if let Ok(answer) = raw.try_read_response().await {
        assert_eq!(answer.status, 400, "{answer:?}");
    }
    assert!(raw.is_closed_within(WAIT_TIMEOUT).await);
    assert_eq!(world.upstream.executions(), 1);
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let world = TestGateway::in_memory("").await;
    let get = format!("GET /things HTTP/1.1\r\nHost: {HOST}\r\n\r\n").into_bytes();
    let bad = format!("POST /pay HTTP/1.1\r\nHost: {HOST}\r\nIdempotency-Key: a,b\r\n\r\n").into_bytes();
    let posts = |key: &str| world.valid_request(key).to_bytes();
    let mut raw = world.connect().await;
    raw.send([posts("pipe-1"), posts("pipe-2"), get, bad, posts("pipe-1"), posts("pipe-3")].concat()).await;
    let mut answers = Vec::new();
    for _ in 0..6 {
        let answer = raw.read_response().await;
        answers.push((answer.status, answer.json()["run"].as_u64()));
    }
    let run = |n| (201, Some(n));
    assert_eq!(answers, [run(1), run(2), (200, None), (400, None), run(1), run(3)]);
    assert_eq!(world.upstream.executions(), 3);
    // A length that is too small makes the rest of the body the next request, and that is malformed.
    let short = format!("{}Content-Length: 4\r\n\r\n{BODY}\r\n\r\n{SMUGGLED_REQUEST}", request_head("/pay", "pipe-4"));
    let mut raw = world.connect().await;
    raw.send(short).await;
    assert_eq!(raw.read_response().await.status, 201);
    assert_eq!(raw.read_response().await.status, 400);
    assert!(raw.is_closed_within(WAIT_TIMEOUT).await);
    assert_nothing_smuggled(&world, "a length that is too small").await;
}

#[tokio::test]
async fn an_http_1_0_client_is_served_and_hung_up_on() {
    let world = TestGateway::in_memory("").await;
    let length = BODY.len();
    let request = |more: &str| {
        format!(
            "POST /pay HTTP/1.0\r\nHost: {HOST}\r\nIdempotency-Key: old\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n{more}\r\n{BODY}"
        )
    };
    for replayed in [None, Some("true")] {
        let mut raw = world.connect().await;
        raw.send(request("")).await;
        let answer = raw.read_response().await;
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, replayed), "{answer:?}");
        assert!(!answer.headers.contains("transfer-encoding"), "{answer:?}");
        assert!(raw.is_closed_within(WAIT_TIMEOUT).await);
    }
    let mut raw = world.connect().await;
    for _ in 0..2 {
        raw.send(request("Connection: keep-alive\r\n")).await;
        assert_eq!(raw.read_response().await.status, 201);
    }
    assert_eq!(world.upstream.executions(), 1);
    // It need not name a host.
    let hostless = "POST /pay HTTP/1.0\r\nIdempotency-Key: older\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(world.exchange(hostless).await.status, 201);
    assert_eq!(world.upstream.last().headers.get_all("host").len(), 1, "{:?}", world.upstream.last());
    let chunked = format!(
        "POST /pay HTTP/1.0\r\nHost: {HOST}\r\nIdempotency-Key: old-chunks\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    );
    world.assert_rejected("chunks in 1.0", chunked, &[400]).await;
    world.assert_runs_once("chunks in 1.0", "old-chunks").await;
}

#[tokio::test]
async fn a_body_is_not_asked_for_where_it_will_not_be_read() {
    let world = TestGateway::in_memory("[policy]\nmax_request = \"1KiB\"\n").await;
    let length = BODY.len();
    let ask = |key: &str, length: usize| {
        let head = request_head("/pay", key);
        format!("{head}Content-Type: application/json\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n")
    };
    for (case, key, length, status, name, shown) in [
        ("a bad key", "\"expected", length, 400, "key-invalid", None),
        ("too large", "expected", 2000, 413, "body-too-large", Some("expected")),
    ] {
        let answer = world.exchange(ask(key, length)).await;
        assert_eq!(answer.interim, [] as [u16; 0], "{case}: {answer:?}");
        assert_problem(case, &answer, status, name, shown);
    }
    let mut raw = world.connect().await;
    raw.send(ask("expected", length)).await;
    assert_eq!(raw.read_next().await.status, 100);
    assert_eq!(world.upstream.requests(), 0, "nothing is sent before the body is there");
    raw.send(BODY).await;
    assert_eq!(raw.read_response().await.status, 201);
    assert_eq!((world.upstream.executions(), world.upstream.last().header("expect")), (1, None));
}
