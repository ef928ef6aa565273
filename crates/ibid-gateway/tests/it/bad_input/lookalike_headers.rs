//! Headers that the app might take for those that decide about keys and callers; and what only the gateway may say.

use testbed::client::get;

use super::{BODY, HOST, TestGateway, assert_problem, request_head};

const MEMBERSHIP_ROUTES: &str =
    "[[route]]\nmatch = \"POST /members\"\npreset = \"membership\"\n[[route]]\nmatch = \"POST /*\"\n";

#[tokio::test]
async fn twins_repeats_and_nominations_are_ambiguous() {
    let world = TestGateway::in_memory(MEMBERSHIP_ROUTES).await;
    let cases = [
        ("an underscore twin of the key", "Idempotency_Key: other"),
        ("a twin in capitals", "IDEMPOTENCY_KEY: other"),
        ("a mixed twin of X-Api-Key", "X_Api-Key: a"),
        ("a twin of X-Api-Key", "X_Api_Key: a"),
        ("a twin of If-Match", "If_Match: a"),
        ("a twin of Content-Type", "Content_Type: text/plain"),
        ("a twin of a header of ours", "Ibid_Fence: 7"),
        ("another twin of ours", "Ibid_Attempt: 1"),
        ("Connection names the key", "Connection: Idempotency-Key"),
        ("Connection names the key among others", "Connection: keep-alive , idempotency-KEY"),
        ("Connection names the key's twin", "Connection: Idempotency_Key"),
        ("a second Connection names the key", "Connection: keep-alive\r\nConnection: Idempotency-Key"),
        ("Connection names the credential", "Authorization: a\r\nConnection: authorization"),
        ("Connection names Host", "Connection: Host"),
        ("Connection names Ibid-Fence", "Connection: Ibid-Fence"),
        ("two Authorizations", "Authorization: a\r\nAuthorization: b"),
        ("the same Authorization twice", "Authorization: a\r\nAuthorization: a"),
        ("two X-Api-Keys", "X-Api-Key: a\r\nX-Api-Key: b"),
        ("two X-Api-Keys beside Authorization", "Authorization: a\r\nX-Api-Key: a\r\nX-Api-Key: b"),
        ("two Api-Keys", "Api-Key: a\r\nApi-Key: b"),
        ("two X-Auth-Tokens", "X-Auth-Token: a\r\nX-Auth-Token: a"),
        ("a twin of X-Auth-Token", "X_Auth_Token: a"),
        ("Connection names X-Auth-Token", "X-Auth-Token: a\r\nConnection: x-auth-token"),
        ("two preconditions", "If-Match: a\r\nIf-Match: b"),
        ("two content types", "Content-Type: text/plain\r\nContent-Type: application/json"),
        ("two content codings", "Content-Encoding: gzip\r\nContent-Encoding: br"),
        ("two Forwarded", "Forwarded: for=1.1.1.1\r\nForwarded: for=2.2.2.2"),
    ];
    for (at, (case, lines)) in cases.into_iter().enumerate() {
        let key = format!("twin-{at:02}-of-many");
        let length = BODY.len();
        let bytes = format!("{}{lines}\r\nContent-Length: {length}\r\n\r\n{BODY}", request_head("/pay", &key));
        let answer = world.exchange(bytes).await;
        assert_problem(case, &answer, 400, "request-ambiguous", Some(&key));
        world.assert_runs_once(case, &key).await;
    }
}

#[tokio::test]
async fn a_twin_without_a_key_is_refused_too() {
    let world = TestGateway::in_memory("").await;
    for line in ["Idempotency_Key: only-the-twin", "Connection: Idempotency-Key", "X_Api_Key: a", "Ibid_Fence: 1"] {
        let bytes = format!("POST /pay HTTP/1.1\r\nHost: {HOST}\r\n{line}\r\nContent-Length: 0\r\n\r\n");
        let answer = world.exchange(bytes).await;
        assert_problem(line, &answer, 400, "request-ambiguous", None);
    }
    assert_eq!(world.upstream.requests(), 0);
    world.assert_runs_once("only the twin", "only-the-twin").await;
}

#[tokio::test]
async fn scope_headers_have_no_twins_either() {
    let world = TestGateway::in_memory(MEMBERSHIP_ROUTES).await;
    let members = |key: &str| world.shop_post("/members").header("Idempotency-Key", key).json(BODY);
    for (at, (case, name, lines)) in [
        ("a twin of X-User-Id", "request-ambiguous", &[("X-User-Id", "u1"), ("X_User_Id", "u2")][..]),
        ("X-User-Id twice", "request-ambiguous", &[("X-User-Id", "u1"), ("X-User-Id", "u2")]),
        ("Connection names X-User-Id", "request-ambiguous", &[("X-User-Id", "u1"), ("Connection", "X-User-Id")]),
        ("no X-User-Id", "scope-missing", &[]),
        ("an empty X-User-Id", "scope-missing", &[("X-User-Id", "")]),
        ("only the twin", "scope-missing", &[("X_User_Id", "u2")]),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("member-request-{at:04}");
        let bad = lines.iter().fold(members(&key), |request, (name, value)| request.header(*name, *value));
        let answer = bad.send().await;
        assert_problem(case, &answer, 400, name, Some(&key));
        world.assert_request_runs_once(case, &key, &members(&key).header("X-User-Id", "u1")).await;
    }
    // Under another policy the same header is nobody's business.
    let answer = world.valid_request("twin-elsewhere").header("X_User_Id", "u1").header("X-User-Id", "u2").send().await;
    assert_eq!(answer.status, 201);
}

#[tokio::test]
async fn a_scope_header_is_believed_only_from_trusted_proxies() {
    let world = TestGateway::in_memory(&format!("trusted_proxies = [\"10.0.0.0/8\"]\n{MEMBERSHIP_ROUTES}")).await;
    let key = "req-1234567890abcdef";
    let answer = world.shop_post("/members").key(key).header("X-User-Id", "u1").json(BODY).send().await;
    assert_problem("not trusted", &answer, 403, "scope-refused", Some(key));
    // Where a request came from is what the connection says, not what it says itself.
    for (name, value) in [
        ("X-Forwarded-For", "10.0.0.1"),
        ("Forwarded", "for=10.0.0.1"),
        ("X-Real-Ip", "10.0.0.1"),
        ("Via", "1.1 10.0.0.1"),
    ] {
        let request = world.shop_post("/members").key(key).header("X-User-Id", "u1").header(name, value).json(BODY);
        assert_problem(name, &request.send().await, 403, "scope-refused", Some(key));
    }
    assert_eq!(world.upstream.requests(), 0);
    // The same from a trusted one, whatever it says about those behind it.
    let world = TestGateway::in_memory(&format!("trusted_proxies = [\"127.0.0.0/8\"]\n{MEMBERSHIP_ROUTES}")).await;
    let trusted = world.shop_post("/members").key(key).header("X-User-Id", "u1").header("X-Forwarded-For", "8.8.8.8");
    world.assert_request_runs_once("trusted", key, &trusted.json(BODY)).await;
}

#[tokio::test]
async fn a_caller_known_by_cookies_only_is_refused() {
    let world = TestGateway::in_memory("").await;
    let key = "key-of-a-browser";
    let answer = world.valid_request(key).header("Cookie", "session=1").send().await;
    assert_problem("cookies only", &answer, 400, "scope-missing", Some(key));
    assert!(answer.text().contains("cookie:session"), "it names the setting: {answer:?}");
    world.assert_runs_once("cookies only", key).await;
}

#[tokio::test]
async fn what_only_we_may_say_is_stripped() {
    let world = TestGateway::in_memory("").await;
    let lies = [("Ibid-Fence", "999"), ("Ibid-Attempt", "77"), ("ibid-anything", "x"), ("IBID-KEY", "y")];
    let lie = |request: testbed::client::TestRequest| {
        lies.iter().fold(request, |request, (name, value)| request.header(*name, *value))
    };
    let own = |world: &TestGateway| {
        let seen = world.upstream.last();
        let own = |(name, value): &(String, String)| (name.to_ascii_lowercase(), value.to_owned());
        seen.headers.iter().map(own).filter(|(name, _)| name.starts_with("ibid")).collect::<Vec<_>>()
    };
    assert_eq!(lie(world.valid_request("told-by-a-client")).send().await.status, 201);
    assert_eq!(world.upstream.last().attempt(), Some(1));
    assert_eq!(world.upstream.last().headers.get_all("ibid-fence").len(), 1);
    assert!(
        own(&world)
            .iter()
            .all(|(name, _)| matches!(&name[..], "ibid-fence" | "ibid-attempt" | "ibid-operation" | "ibid-key"))
    );
    assert!(own(&world).iter().all(|(_, value)| !matches!(&value[..], "999" | "77" | "x" | "y")), "{:?}", own(&world));
    assert_eq!(lie(world.shop_post("/pay").json(BODY)).send().await.status, 201);
    assert_eq!(own(&world), [], "without a key");
    assert_eq!(lie(get(world.gateway.addr(), "/things")).send().await.status, 200);
    assert_eq!(own(&world), [], "on a method that is not covered");
}

#[tokio::test]
async fn a_client_cannot_say_that_its_request_is_a_replay() {
    let portal = "[[route]]\nmatch = \"POST /portal\"\npreset = \"appsportal\"\n";
    let world = TestGateway::in_memory(&format!("{portal}{MEMBERSHIP_ROUTES}")).await;
    let told = |request: testbed::client::TestRequest, lies: &[&str]| {
        lies.iter().fold(request, |request, name| request.header(*name, "true")).header("X-Request-Id", "r-1")
    };
    let cached = ["X-Idempotency-Cached", "X-Original-Timestamp"];
    let member = world.shop_post("/members").header("X-User-Id", "u1").key("member-key-1234567").json(BODY);
    let portal =
        world.shop_post("/portal").header("X-Tenant-Id", "t1").header("X-Idempotency-Key", "portal").json(BODY);
    for (case, request, lies) in [
        ("ietf", world.valid_request("replay-of-a-client"), &["Idempotent-Replayed"][..]),
        ("ietf, no key", world.shop_post("/pay").json(BODY), &["Idempotent-Replayed"]),
        ("appsportal", portal, &["X-Idempotency-Replay"]),
        ("membership", member, &cached),
    ] {
        let answer = told(request, lies).send().await;
        assert_eq!(answer.status, 201, "{case}: {answer:?}");
        let seen = world.upstream.last();
        for name in lies {
            assert_eq!(seen.header(name), None, "{case}: {seen:?}");
        }
        // Ids are the client's own business.
        assert_eq!(seen.header("x-request-id"), Some("r-1"), "{case}: {seen:?}");
    }
}
