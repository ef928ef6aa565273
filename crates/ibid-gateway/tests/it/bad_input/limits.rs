//! Too much, or too slow. Time is the subject here: the limits are set to a fraction of a second.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::{BODY, HOST, TestGateway, WAIT_TIMEOUT, assert_problem, request_head};

const SMALL_LIMITS: &str = r#"
[limits]
max_headers = 20
max_header_bytes = "8KiB"
[policy]
max_request = "1KiB"
"#;

const SHORT_TIMEOUTS: &str = "[limits]\nheader_timeout = \"300ms\"\nbody_timeout = \"300ms\"\n";

#[tokio::test]
async fn a_head_over_the_limits_is_turned_away() {
    let world = TestGateway::in_memory(SMALL_LIMITS).await;
    let rest = format!("Content-Length: {}\r\n\r\n{BODY}", BODY.len());
    let many = |count: usize| "x: y\r\n".repeat(count);
    for (at, (case, lines)) in [
        ("one large header", format!("x: {}\r\n", "y".repeat(9000))),
        ("many small headers", format!("x: {}\r\n", "y".repeat(1000)).repeat(10)),
        ("a large name", format!("{}: y\r\n", "x".repeat(9000))),
        ("21 headers", many(18)),
        ("a thousand headers", many(1000)),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("large-head-{at}");
        // hyper answers 431 and closes.
        world.assert_rejected(case, format!("{}{lines}{rest}", request_head("/pay", &key)), &[431]).await;
        world.assert_runs_once(case, &key).await;
    }
    let twenty = world.exchange(format!("{}{}{rest}", request_head("/pay", "twenty"), many(17))).await;
    assert_eq!(twenty.status, 201, "20 headers: {twenty:?}");
}

#[tokio::test]
async fn a_target_over_the_limits_is_turned_away() {
    let world = TestGateway::in_memory("[limits]\nmax_header_bytes = \"256KiB\"\n").await;
    let rest = format!("Content-Length: {}\r\n\r\n{BODY}", BODY.len());
    for (case, target) in
        [("path", format!("/{}", "p".repeat(65_600))), ("query", format!("/pay?{}", "q".repeat(65_600)))]
    {
        // hyper answers 414 and closes: 65,534 bytes is its limit, whatever the size of the head.
        world.assert_rejected(case, format!("{}{rest}", request_head(&target, "long-target")), &[414]).await;
    }
    world.assert_runs_once("a long target", "long-target").await;
    // With usual limits such a head is too large before its target is looked at.
    let world = TestGateway::in_memory("").await;
    let target = format!("/{}", "p".repeat(70_000));
    world.assert_rejected("usual limits", format!("{}{rest}", request_head(&target, "long-target")), &[414, 431]).await;
    world.assert_runs_once("a long target", "long-target").await;
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_before_the_app_is_called() {
    let world = TestGateway::in_memory(SMALL_LIMITS).await;
    for (at, (case, length, chunked)) in [
        ("one byte too many", 1025, false),
        ("one byte too many, in chunks", 1025, true),
        ("a megabyte", 1 << 20, false),
        ("a megabyte in chunks", 1 << 20, true),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("large-body-{at}");
        let request = world.shop_post("/pay").key(&key).body(vec![b'x'; length]);
        let request = if chunked { request.chunked() } else { request };
        match request.try_send().await {
            Ok(answer) => assert_problem(case, &answer, 413, "body-too-large", Some(&key)),
            // Closed while most of a megabyte is unread, the answer can be lost.
            Err(broken) => assert!(at >= 2 && broken.is_closed(), "{case}: {broken}"),
        }
        assert_eq!(world.upstream.requests(), at, "{case}");
        world.assert_runs_once(case, &key).await;
    }
    for chunked in [false, true] {
        let request = world.shop_post("/pay").key(format!("just-fits-{chunked}")).body(vec![b'x'; 1024]);
        let request = if chunked { request.chunked() } else { request };
        assert_eq!(request.send().await.status, 201);
    }
    // Without a key nothing is kept, so nothing limits it.
    assert_eq!(world.shop_post("/pay").body(vec![b'x'; 1 << 20]).send().await.status, 201);
}

#[tokio::test]
async fn a_declared_length_over_the_limit_is_refused_without_a_byte_of_it() {
    let world = TestGateway::in_memory(SMALL_LIMITS).await;
    let answer = world.exchange(format!("{}Content-Length: 1025\r\n\r\n", request_head("/pay", "declared-only"))).await;
    assert_problem("declared", &answer, 413, "body-too-large", Some("declared-only"));
    world.assert_runs_once("declared", "declared-only").await;
}

#[tokio::test]
async fn slow_heads_are_not_waited_for() {
    let world = TestGateway::in_memory(SHORT_TIMEOUTS).await;
    for (at, rest) in ["", "X: y\r\n", "Content-Length: 12\r\n"].into_iter().enumerate() {
        let key = format!("slow-head-{at}");
        let begun = Instant::now();
        // Closed without a word.
        world.assert_rejected("slow head", format!("{}{rest}", request_head("/pay", &key)), &[408]).await;
        assert!(begun.elapsed() >= Duration::from_millis(250), "not before its time: {:?}", begun.elapsed());
        world.assert_runs_once("slow head", &key).await;
    }
    // An idle connection is not a slow head; the next head on it can be one.
    let mut raw = world.connect().await;
    for key in ["idle-1", "idle-2"] {
        assert_eq!(world.valid_request(key).send_on(&mut raw).await.status, 201);
        tokio::time::sleep(Duration::from_millis(600)).await;
    }
    raw.send(request_head("/pay", "slow-after-idle")).await;
    assert!(raw.is_closed_within(WAIT_TIMEOUT).await);
    // One byte at a time is no way to stay either.
    let mut raw = world.connect().await;
    let begun = Instant::now();
    let mut bytes = request_head("/pay", "trickled").into_bytes().into_iter();
    while !raw.is_closed_within(Duration::from_millis(50)).await {
        assert!(begun.elapsed() < WAIT_TIMEOUT, "still open");
        raw.send(bytes.next().map_or([b'x'], |byte| [byte])).await;
    }
    world.assert_runs_once("trickled", "trickled").await;
}

#[tokio::test]
async fn a_connection_that_does_not_begin_is_closed_when_idle() {
    let world = TestGateway::in_memory("[limits]\nheader_timeout = \"300ms\"\nidle_timeout = \"300ms\"\n").await;
    // `P` and `PRI` may still become HTTP/2, so the protocol is not known yet.
    for begun in ["", "P", "PRI * HTTP/2.0\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r"] {
        let mut raw = world.connect().await;
        raw.send(begun).await;
        assert!(raw.is_closed_within(WAIT_TIMEOUT).await, "{begun:?}");
    }
    world.assert_runs_once("afterwards", "after-silence").await;
}

#[tokio::test]
async fn slow_bodies_are_not_waited_for_and_not_claimed() {
    let world = TestGateway::in_memory(SHORT_TIMEOUTS).await;
    for (at, (case, rest)) in [
        ("no byte", "Content-Length: 12\r\n\r\n"),
        ("half", "Content-Length: 12\r\n\r\n{\"amou"),
        ("no chunk", "Transfer-Encoding: chunked\r\n\r\n"),
        ("no last chunk", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"),
        ("no end of the last chunk", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("slow-body-{at}");
        let mut raw = world.connect().await;
        raw.send(format!("{}{rest}", request_head("/pay", &key))).await;
        let answer = raw.read_response().await;
        assert_eq!(answer.status, 408, "{case}: {answer:?}");
        assert!(raw.is_closed_within(WAIT_TIMEOUT).await, "{case}");
        world.assert_runs_once(case, &key).await;
    }
    // The limit is for the whole body, not for each piece.
    let mut raw = world.connect().await;
    raw.send(format!("{}Content-Length: 1000\r\n\r\n", request_head("/pay", "trickled-body"))).await;
    let begun = Instant::now();
    while !raw.is_closed_within(Duration::from_millis(50)).await {
        assert!(begun.elapsed() < WAIT_TIMEOUT, "still open");
        raw.send("x").await;
    }
    assert_eq!(raw.read_response().await.status, 408);
    world.assert_runs_once("trickled", "trickled-body").await;
}

#[tokio::test]
async fn slow_clients_do_not_hold_up_others() {
    let world = TestGateway::in_memory("").await;
    let mut slow = Vec::new();
    for at in 0..100 {
        let mut raw = world.connect().await;
        let head = request_head("/pay", &format!("held-up-{at}"));
        raw.send(if at % 2 == 0 { head } else { format!("{head}Content-Length: 12\r\n\r\n{{") }).await;
        slow.push(raw);
    }
    for at in 0..100 {
        world.assert_runs_once("beside a slow one", &format!("held-up-{at}")).await;
    }
    assert_eq!(world.upstream.executions(), 100);
    drop(slow);
    let fresh = format!("GET /things HTTP/1.1\r\nHost: {HOST}\r\n\r\n");
    assert_eq!(world.exchange(fresh).await.status, 200);
    // A body that comes in pieces, but in time, is a body like any other.
    let mut raw = world.connect().await;
    for piece in
        [request_head("/pay", "in-pieces"), "Content-Length: 12\r\n\r\n".into(), "{\"amou".into(), "nt\":1}".into()]
    {
        raw.send(piece).await;
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(raw.read_response().await.status, 201);
    assert_eq!(world.upstream.executions_with_key("in-pieces"), 1);
}
