//! The SQL functions, and what they share with the store, the layer and `run_tx`.

use std::{sync::Arc, time::Duration};

use axum::{Router, body::Body, routing::post};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::BodyExt as _;
use ibid::{
    Ibid, Policy, Scope,
    policy::OnMismatch,
    record::{Record, RecordBody},
    scope::{Credentials, ScopeInput, ScopePart, TrustedProxies},
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Lease, RecordSummary, SettleOutcome, Settlement,
        Store, Tags,
    },
};
use ibid_postgres_tx::{IdempotentCall, TxError, TxOutcome};
use ibid_stores::postgres::{MigrateAction, migrate};
use tokio_postgres::{Client, NoTls, Row};
use tower::ServiceExt as _;

use crate::support::{TestDriver, TestError, TokioPostgresDriver, TxDatabase, paid_response, patient_policy, run};

mod clients;

async fn session(scene: &TxDatabase, role: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(&scene.server.url(role, &scene.name), NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    client
}

fn address(key: &str) -> Address {
    Scope::from_parts(&["acme"]).address(key, None, None)
}

const CLAIM: &str = "SELECT outcome, token, attempt, status, headers::text, body, body_length, body_sha256, failed, record \
    FROM ibid.claim(ibid.address(ARRAY['acme'], $1), ibid.fingerprint($2), key => $1)";

async fn claim(db: &Client, key: &str, request: &str) -> Row {
    db.query_one(CLAIM, &[&key, &request.as_bytes()]).await.unwrap()
}

fn outcome(row: &Row) -> String {
    row.get("outcome")
}

async fn complete(db: &Client, key: &str, token: &[u8], status: i32, headers: &str, body: &[u8]) -> Result<(), String> {
    let sql = "SELECT ibid.complete(ibid.address(ARRAY['acme'], $1), $2, $3, $4::text::jsonb, $5)";
    let done = db.query_one(sql, &[&key, &token, &status, &headers, &body]).await;
    done.map(drop).map_err(|error| {
        let answer = error.as_db_error().unwrap();
        format!("{} {}", answer.code().code(), answer.message())
    })
}

/// A whole transaction: claim, effect, answer.
async fn pay_in_transaction(db: &Client, key: &str, headers: &str, body: &[u8]) {
    db.batch_execute("BEGIN").await.unwrap();
    let found = claim(db, key, "12.50").await;
    assert_eq!(outcome(&found), "run");
    db.execute("INSERT INTO effects VALUES ($1)", &[&key]).await.unwrap();
    complete(db, key, found.get("token"), 201, headers, body).await.unwrap();
    db.batch_execute("COMMIT").await.unwrap();
}

fn asked(key: &str, fingerprint: Fingerprint) -> Arc<ClaimRequest> {
    Arc::new(ClaimRequest {
        address: address(key),
        token: ClaimToken::mint(),
        fingerprint,
        tags: Tags::new("acme", "u1", "POST /payments", key),
        label: Bytes::new(),
        lease: Duration::from_secs(600),
        ttl: Duration::from_secs(600),
        take_over: None,
    })
}

async fn granted(store: &dyn Store, ask: &Arc<ClaimRequest>) -> Lease {
    match store.claim(ask).await.unwrap() {
        ClaimOutcome::Granted(lease) => lease,
        other => panic!("not granted: {other:?}"),
    }
}

fn complete_settlement(record: Bytes) -> Settlement {
    let outline =
        RecordSummary { status: 201, requested_at_ms: 1000, completed_at_ms: 2000, took: Duration::from_secs(1) };
    Settlement::Complete { failed: false, record, summary: outline, ttl: Duration::from_secs(600) }
}

#[tokio::test]
async fn addresses_and_fingerprints_are_those_of_the_library() {
    let scene = TxDatabase::new();
    let db = session(&scene, "gateway").await;
    let long = "x".repeat(70_000);
    for (parts, key) in [
        (vec!["acme", "payments"], "k-1"),
        (vec![], "k"),
        (vec![""], "ключ"),
        (vec!["a", "b", "é\u{1F600}"], long.as_str()),
        (vec!["ab", "c"], "k"),
    ] {
        let row = db.query_one("SELECT ibid.address($1, $2)", &[&parts, &key]).await.unwrap();
        assert_eq!(row.get::<_, &[u8]>(0), Scope::from_parts(&parts).address(key, None, None).0, "{parts:?} {key}");
    }
    for request in [&b""[..], b"12.50 EUR", b"\0\xff", long.as_bytes()] {
        let row = db.query_one("SELECT ibid.fingerprint($1)", &[&request]).await.unwrap();
        assert_eq!(row.get::<_, &[u8]>(0), Fingerprint::of_bytes(request).digest);
    }
}

#[tokio::test]
async fn the_scopes_of_a_gateway_can_be_made_part_by_part() {
    let scene = TxDatabase::new();
    let db = session(&scene, "gateway").await;
    let mut headers = HeaderMap::new();
    for (name, value) in
        [("host", "Shop.Example.com:8080"), ("authorization", "Bearer 7f"), ("x-user-id", "u1"), ("cookie", "sid=s1")]
    {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let identity =
        ibid::scope::TokenVerification(Ok(ibid::scope::TokenClaims([("sub".to_owned(), "s-7".to_owned())].into())));
    let caller = ScopeInput {
        method: &Method::POST,
        uri: &Uri::from_static("/pay"),
        headers: &headers,
        peer: None,
        identity: Some(&identity),
        route: "POST /pay",
        trusted: &TrustedProxies::everyone(),
        credentials: &Credentials::default(),
    };
    for (part, kind, value) in [
        ("host", "host", "Shop.Example.com"),
        ("host", "host", "shop.example.com:8082"),
        ("credential", "credential", "Bearer 7f"),
        ("header:x-user-id", "header", "u1"),
        ("header:x-user-id?", "header", "u1"),
        ("header:x-org?", "missing", ""),
        ("cookie:sid", "cookie", "s1"),
        ("jwt:sub", "jwt", "s-7"),
        ("method", "method", "POST"),
        ("path", "path", "/pay"),
        ("route", "route", "POST /pay"),
        ("global", "global", ""),
    ] {
        let parts: [ScopePart; 2] = [part.parse().unwrap(), ScopePart::Global];
        let ours = Scope::of(&parts, &caller).unwrap().address("k-1", None, None);
        let sql = "SELECT ibid.address_in(ibid.part($1, $2) || ibid.part('global', ''), 'k-1')";
        let row = db.query_one(sql, &[&kind, &value]).await.unwrap();
        assert_eq!(row.get::<_, &[u8]>(0), ours.0, "{part}");
    }
    for host in ["[2001:DB8::1]:8080", "[2001:DB8::1]", "::1", "shop.example:", "a:x", ""] {
        let headers: HeaderMap = [(http::header::HOST, HeaderValue::from_static(host))].into_iter().collect();
        let caller = ScopeInput { headers: &headers, ..caller };
        let ours = Scope::of(&[ScopePart::Host], &caller).unwrap().address("k-1", None, None);
        let row = db.query_one("SELECT ibid.address_in(ibid.part('host', $1), 'k-1')", &[&host]).await.unwrap();
        assert_eq!(row.get::<_, &[u8]>(0), ours.0, "{host}");
    }
    for sent in [
        serde_json::json!({}),
        serde_json::json!({"Authorization": "Bearer 7f", "X-Api-Key": "k"}),
        serde_json::json!({"x-auth-token": "t", "Api-Key": "k", "X-Api-Key": ""}),
    ] {
        let sent: std::collections::BTreeMap<String, String> = serde_json::from_value(sent).unwrap();
        let headers: HeaderMap =
            sent.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        let caller = ScopeInput { headers: &headers, ..caller };
        let ours = Scope::of(&[ScopePart::Credential], &caller).unwrap().address("k-1", None, None);
        let sql = "SELECT ibid.address_in(ibid.credentials($1::text::jsonb), 'k-1')";
        let row = db.query_one(sql, &[&serde_json::to_string(&sent).unwrap()]).await.unwrap();
        assert_eq!(row.get::<_, &[u8]>(0), ours.0, "{sent:?}");
    }
    let error = db.query_one("SELECT ibid.part('tenant', 'x')", &[]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "22023");
}

#[tokio::test]
async fn what_sql_remembers_the_store_and_run_tx_replay() {
    let scene = TxDatabase::new();
    let (db, store) = (session(&scene, "gateway").await, scene.store().await);
    let headers = r#"{"Content-Type": "text/plain", "Link": ["</a>", "</b>"], "Set-Cookie": "a=b", "Date": "now"}"#;
    pay_in_transaction(&db, "k-1", headers, b"\0\xff paid").await;
    assert_eq!(scene.sql("SELECT record IS NULL, state, key FROM ibid.idempotency_keys"), "t|done|k-1");

    let ask = asked("k-1", Fingerprint::of_bytes(b"12.50"));
    let ClaimOutcome::Completed(done) = store.claim(&ask).await.unwrap() else { panic!("it is done") };
    assert_eq!(done.fingerprint, ask.fingerprint);
    assert!(done.expires_in > Duration::from_secs(23 * 3600) && done.expires_in <= Duration::from_secs(24 * 3600));
    let record = Record::decode(done.record).unwrap();
    assert_eq!((record.status, record.body.clone()), (StatusCode::CREATED, whole(b"\0\xff paid")));
    let links: Vec<_> = record.headers.get_all("link").iter().collect();
    assert_eq!(links, ["</a>", "</b>"]);
    assert_eq!(record.headers.len(), 3, "what belongs to one client or one moment is not kept: {record:?}");

    let pool = TokioPostgresDriver::pool(&scene.url(), 2).await;
    let call = IdempotentCall::new(&Scope::from_parts(&["acme"]), "k-1").request(b"12.50");
    let ran = run::<TokioPostgresDriver, _, _>(&pool, patient_policy(), call, |_| {
        Box::pin(async { Ok::<_, TestError>(paid_response("no")) })
    });
    let TxOutcome::Replayed(replayed) = ran.await.unwrap() else { panic!("it was done before") };
    assert_eq!(replayed, record);
    let call = IdempotentCall::new(&Scope::from_parts(&["acme"]), "k-1").request(b"99.00");
    let ran = run::<TokioPostgresDriver, _, _>(&pool, patient_policy(), call, |_| {
        Box::pin(async { Ok::<_, TestError>(paid_response("no")) })
    });
    assert!(matches!(ran.await.unwrap_err(), TxError::KeyReused));
    assert_eq!(scene.effects(), 1);
}

fn whole(body: &'static [u8]) -> RecordBody {
    RecordBody::Whole(Bytes::from_static(body))
}

#[tokio::test]
async fn what_the_store_and_run_tx_remember_sql_replays() {
    let scene = TxDatabase::new();
    let (db, store) = (session(&scene, "gateway").await, scene.store().await);
    let fingerprint = Fingerprint::of_bytes(b"12.50");
    let mut headers = HeaderMap::new();
    headers.append("content-type", HeaderValue::from_static("application/json"));
    headers.append("link", HeaderValue::from_static("</a>"));
    headers.append("link", HeaderValue::from_static("</b>"));
    headers.append("x-latin", HeaderValue::from_bytes(b"caf\xe9").unwrap());
    headers.append("x-utf8", HeaderValue::from_bytes("café".as_bytes()).unwrap());
    let trailers: HeaderMap = [("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))].into_iter().collect();
    let large: &'static [u8] = vec![b'x'; 300_000].leak();
    let bodies = [
        whole(b"\0\xff paid"),
        whole(b""),
        whole(large),
        RecordBody::Digest { length: 1 << 40, sha256: [9; 32] },
        RecordBody::None,
    ];
    for (nth, body) in bodies.into_iter().enumerate() {
        for (headers, trailers) in [(headers.clone(), trailers.clone()), (HeaderMap::new(), HeaderMap::new())] {
            let key = format!("k-{nth}-{}", headers.len());
            let record = Record {
                status: StatusCode::CREATED,
                requested_at_ms: 1000,
                completed_at_ms: 2000,
                headers: headers.clone(),
                body: body.clone(),
                trailers,
                // Only an anonymous caller's record has them.
                cookies: if headers.is_empty() { vec![[7; 32]; 2] } else { Vec::new() },
            };
            let lease = granted(&store, &asked(&key, fingerprint)).await;
            assert_eq!(
                store.settle(&lease, &complete_settlement(record.encode())).await.unwrap(),
                SettleOutcome::Applied
            );
            let found = claim(&db, &key, "12.50").await;
            assert_eq!((outcome(&found).as_str(), found.get::<_, i32>("status")), ("done", 201), "{key}");
            let seen: serde_json::Value = serde_json::from_str(found.get("headers")).unwrap();
            let expected = if headers.is_empty() {
                serde_json::json!({})
            } else {
                serde_json::json!({"content-type": "application/json", "link": ["</a>", "</b>"], "x-latin": "café", "x-utf8": "café"})
            };
            assert_eq!(seen, expected);
            let (kept, length, digest): (Option<&[u8]>, Option<i64>, Option<&[u8]>) =
                (found.get("body"), found.get("body_length"), found.get("body_sha256"));
            match &body {
                RecordBody::Whole(body) => assert_eq!((kept, length, digest), (Some(&body[..]), None, None)),
                RecordBody::Digest { sha256, .. } => {
                    assert_eq!((kept, length, digest), (None, Some(1 << 40), Some(&sha256[..])));
                }
                RecordBody::None => assert_eq!((kept, length, digest), (None, None, None)),
            }
            assert_eq!(outcome(&claim(&db, &key, "99.00").await), "reused");
        }
    }
    let pool = TokioPostgresDriver::pool(&scene.url(), 2).await;
    let call = IdempotentCall::new(&Scope::from_parts(&["acme"]), "k-tx").request(b"12.50");
    let ran = run::<TokioPostgresDriver, _, _>(&pool, patient_policy(), call, |_| {
        Box::pin(async { Ok::<_, TestError>(paid_response("tx")) })
    });
    assert!(!ran.await.unwrap().is_replay());
    let found = claim(&db, "k-tx", "12.50").await;
    assert_eq!((outcome(&found).as_str(), found.get::<_, &[u8]>("body")), ("done", &b"tx"[..]));
}

#[tokio::test]
async fn what_is_no_record_is_opaque_and_never_an_error() {
    let scene = TxDatabase::new();
    let (db, store) = (session(&scene, "gateway").await, scene.store().await);
    let record = Record {
        status: StatusCode::CREATED,
        requested_at_ms: 1,
        completed_at_ms: 2,
        headers: [("a".parse().unwrap(), HeaderValue::from_static("b"))].into_iter().collect(),
        body: whole(b"hello"),
        trailers: HeaderMap::new(),
        cookies: Vec::new(),
    };
    let good = record.encode();
    let mut later = good.to_vec();
    later[0] = 3;
    let mut endless = good.to_vec();
    endless[20..22].copy_from_slice(&u16::MAX.to_le_bytes());
    let mut huge = good.to_vec();
    huge[25..29].copy_from_slice(&u32::MAX.to_le_bytes());
    let cuts = (0..good.len()).map(|cut| good.slice(..cut));
    for (nth, bytes) in
        [later.into(), endless.into(), huge.into(), Bytes::from_static(b"charged")].into_iter().chain(cuts).enumerate()
    {
        let key = format!("k-{nth}");
        let lease = granted(&store, &asked(&key, Fingerprint::NONE)).await;
        let _ = store.settle(&lease, &complete_settlement(bytes.clone())).await.unwrap();
        let seen = db.query_one("SELECT * FROM ibid.seen(ibid.address(ARRAY['acme'], $1))", &[&key]).await.unwrap();
        assert_eq!((outcome(&seen).as_str(), seen.get::<_, &[u8]>("record")), ("opaque", &bytes[..]), "{nth}");
    }
}

#[tokio::test]
async fn the_layer_replays_what_sql_remembers_and_the_other_way_round() {
    let scene = TxDatabase::new();
    let (db, store) = (session(&scene, "gateway").await, Arc::new(scene.store().await));
    let mut policy = Policy::ietf();
    policy.on_mismatch = OnMismatch::Ignore;
    let app = Router::new().route("/pay", post(|| async { (StatusCode::ACCEPTED, [("x-by", "app")], "by the app") }));
    let app = app.layer(Ibid::new(store).layer(policy).unwrap());
    let ask = async |key: &str| {
        let request = Request::post("/pay").header("host", "shop").header("authorization", "Bearer a");
        let request = request.header("idempotency-key", key).body(Body::from("12.50")).unwrap();
        let (parts, body) = app.clone().oneshot(request).await.unwrap().into_parts();
        (parts, body.collect().await.unwrap().to_bytes())
    };
    const AT: &str = "ibid.address_in(ibid.part('host', 'shop') || ibid.part('credential', 'Bearer a'), $1)";
    let sql = format!("SELECT ibid.complete({AT}, (ibid.claim({AT})).token, 201, '{{\"x-by\": \"sql\"}}', 'by sql')");
    db.query_one(&sql, &[&"k-1"]).await.unwrap();
    let (parts, body) = ask("k-1").await;
    assert_eq!((parts.status, &body[..]), (StatusCode::CREATED, &b"by sql"[..]));
    assert_eq!(parts.headers["x-by"], "sql");
    assert_eq!(parts.headers["idempotent-replayed"], "true");

    let (parts, _) = ask("k-2").await;
    assert_eq!(parts.status, StatusCode::ACCEPTED);
    let sql = format!("SELECT outcome, status, body, headers->>'x-by' FROM ibid.claim({AT})");
    let found = db.query_one(&sql, &[&"k-2"]).await.unwrap();
    assert_eq!((outcome(&found).as_str(), found.get::<_, i32>(1)), ("done", 202));
    assert_eq!((found.get::<_, &[u8]>(2), found.get::<_, &str>(3)), (&b"by the app"[..], "app"));
}

#[tokio::test]
async fn a_second_claim_is_busy_at_once_and_a_rollback_gives_the_key_back() {
    let scene = TxDatabase::new();
    let (one, two) = (session(&scene, "gateway").await, session(&scene, "gateway").await);
    one.batch_execute("BEGIN").await.unwrap();
    let first = claim(&one, "k-1", "12.50").await;
    assert_eq!((outcome(&first).as_str(), first.get::<_, i32>("attempt")), ("run", 1));
    assert_eq!(outcome(&claim(&two, "k-1", "12.50").await), "busy", "although it is not committed");
    assert_eq!(outcome(&claim(&one, "k-1", "12.50").await), "busy", "also for itself");
    one.batch_execute("ROLLBACK").await.unwrap();
    two.batch_execute("BEGIN").await.unwrap();
    let second = claim(&two, "k-1", "12.50").await;
    assert_eq!(outcome(&second), "run");
    // The token of the one that was rolled back is nobody's.
    two.batch_execute("SAVEPOINT s").await.unwrap();
    let error = complete(&two, "k-1", first.get("token"), 201, "{}", b"").await.unwrap_err();
    assert!(error.starts_with("IB002"), "{error}");
    two.batch_execute("ROLLBACK TO s").await.unwrap();
    complete(&two, "k-1", second.get("token"), 404, "{}", b"none").await.unwrap();
    complete(&two, "k-1", second.get("token"), 200, "{}", b"said again").await.unwrap();
    two.batch_execute("COMMIT").await.unwrap();
    let found = claim(&one, "k-1", "12.50").await;
    assert_eq!((found.get::<_, &[u8]>("body"), found.get::<_, bool>("failed")), (&b"none"[..], true));
    let error = complete(&one, "k-9", first.get("token"), 201, "{}", b"").await.unwrap_err();
    assert!(error.starts_with("IB001"), "{error}");
}

#[tokio::test]
async fn a_claim_that_was_committed_alone_is_a_claim_like_any_other() {
    let scene = TxDatabase::new();
    let (db, store) = (session(&scene, "gateway").await, scene.store().await);
    let found = claim(&db, "k-1", "12.50").await;
    let ask = asked("k-1", Fingerprint::of_bytes(b"12.50"));
    assert!(matches!(store.claim(&ask).await.unwrap(), ClaimOutcome::InProgress(_)));
    let release = "SELECT ibid.release(ibid.address(ARRAY['acme'], 'k-1'), $1)";
    let released = db.query_one(release, &[&found.get::<_, &[u8]>("token")]).await.unwrap();
    assert!(released.get::<_, bool>(0));
    let named = "SELECT outcome FROM ibid.claim(ibid.address(ARRAY['acme'], 'k-1'), token => $1)";
    let late = db.query_one(named, &[&found.get::<_, &[u8]>("token")]).await.unwrap();
    assert_eq!(outcome(&late), "spent");
    assert_eq!(outcome(&claim(&db, "k-1", "12.50").await), "run");
    // Silent for longer than its lease: unknown, and run again only if asked for, by the same request.
    let brief = "SELECT outcome, attempt FROM ibid.claim(ibid.address(ARRAY['acme'], 'k-2'), ibid.fingerprint($1), \
        lease => '1 millisecond', take_over => $2)";
    let brief = async |request: &str, over: bool| db.query_one(brief, &[&request.as_bytes(), &over]).await.unwrap();
    assert_eq!(outcome(&brief("12.50", false).await), "run");
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(outcome(&brief("12.50", false).await), "unknown");
    assert_eq!(outcome(&brief("99.00", true).await), "reused");
    let again = brief("12.50", true).await;
    assert_eq!((outcome(&again).as_str(), again.get::<_, i32>(1)), ("run", 2));
}

#[tokio::test]
async fn what_could_not_be_replayed_is_refused() {
    let scene = TxDatabase::new();
    let db = session(&scene, "gateway").await;
    let found = claim(&db, "k-1", "12.50").await;
    let token: &[u8] = found.get("token");
    for (status, headers) in [
        (99, "{}"),
        (100, "{}"),
        (1000, "{}"),
        (200, "[]"),
        (200, r#"{"a b": "c"}"#),
        (200, r#"{"": "c"}"#),
        (200, r#"{"a": 1}"#),
        (200, r#"{"a": ["b", null]}"#),
        (200, r#"{"a": {"b": "c"}}"#),
        (200, r#"{"a": "b\r\nset-cookie: c"}"#),
        (200, r#"{"a": "\u007f"}"#),
    ] {
        let error = complete(&db, "k-1", token, status, headers, b"").await.unwrap_err();
        assert!(error.starts_with("22023"), "{status} {headers}: {error}");
    }
    let wild = r#"{"x-!#$%&'*+.^_`|~0": "tab\t é \u0080 ~", "empty": "", "none": []}"#;
    complete(&db, "k-1", token, 999, wild, b"").await.unwrap();
    let store = scene.store().await;
    let Some(ClaimOutcome::Completed(done)) = store.get(&address("k-1")).await.unwrap() else { panic!("it is done") };
    assert_eq!(Record::decode(done.record).unwrap().headers.len(), 2);
    let error = db.query_one("SELECT ibid.claim('\\x00')", &[]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "22023");
}

#[tokio::test]
async fn cleanup_removes_what_has_expired() {
    let scene = TxDatabase::new();
    let db = session(&scene, "gateway").await;
    let sql = "SELECT ibid.complete(ibid.address('{}', k), (ibid.claim(ibid.address('{}', k), ttl => $1::text::interval)).token, 200) \
        FROM unnest(ARRAY['k-1', 'k-2']) k";
    db.query(sql, &[&"1 millisecond"]).await.unwrap();
    pay_in_transaction(&db, "k-3", "{}", b"").await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let removed = db.query_one("SELECT ibid.cleanup(1), ibid.cleanup()", &[]).await.unwrap();
    assert_eq!((removed.get::<_, i64>(0), removed.get::<_, i64>(1)), (1, 1));
    assert_eq!(scene.remembered_answers(), 1);
}

#[tokio::test]
async fn only_members_of_the_service_role_may_and_rows_are_guarded_all_the_same() {
    let scene = TxDatabase::new();
    let db = session(&scene, "gateway").await;
    pay_in_transaction(&db, "k-1", "{}", b"secret").await;
    const CLAIM: &str = "SELECT outcome FROM ibid.claim(ibid.address(ARRAY['acme'], 'k-1'))";
    for role in ["alice", "auditor"] {
        let refused = scene.server.sql_as(role, &scene.name, CLAIM).unwrap_err();
        assert!(refused.contains("permission denied"), "{role}: {refused}");
    }
    // With every grant but the membership: the rows of others are not there, and none can be made.
    scene.sql(
        "GRANT USAGE ON SCHEMA ibid TO alice; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ibid TO alice; \
         GRANT ALL ON ALL TABLES IN SCHEMA ibid TO alice",
    );
    let seen = "SELECT outcome FROM ibid.seen(ibid.address(ARRAY['acme'], 'k-1'))";
    assert_eq!(scene.server.sql_as("alice", &scene.name, seen).unwrap(), "new");
    let fresh = "SELECT outcome FROM ibid.claim(ibid.address(ARRAY['acme'], 'k-2'))";
    let refused = scene.server.sql_as("alice", &scene.name, fresh).unwrap_err();
    assert!(refused.contains("row-level security"), "{refused}");
    // A user sees its own.
    let own = "SELECT ibid.complete(a, (ibid.claim(a, user_id => 'u1')).token, 200, '{}', 'mine') \
        FROM ibid.address(ARRAY['acme'], 'k-3') a";
    scene.server.sql_as("gateway", &scene.name, own).unwrap();
    let seen = "SET ibid.user_id = 'u1'; SELECT outcome FROM ibid.seen(ibid.address(ARRAY['acme'], 'k-3'))";
    assert_eq!(scene.server.sql_as("alice", &scene.name, seen).unwrap(), "done");
    let definers = "SELECT count(*) FROM pg_proc WHERE pronamespace = 'ibid'::regnamespace AND prosecdef";
    assert_eq!(scene.sql(definers), "0", "nothing runs with other rights than the caller's");
    let public = "SELECT count(*) FROM pg_proc p, aclexplode(p.proacl) a WHERE p.pronamespace = 'ibid'::regnamespace AND a.grantee = 0";
    assert_eq!(scene.sql(public), "0", "everybody may nothing");
}

#[tokio::test]
async fn the_functions_come_and_go_with_the_schema() {
    let scene = TxDatabase::new();
    let url = scene.server.url("migrator", &scene.name);
    let functions = "SELECT count(DISTINCT proname) FROM pg_proc WHERE proname IN \
        ('claim', 'complete', 'release', 'seen', 'cleanup', 'address', 'address_in', 'part', 'fingerprint') \
        AND pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'ibid')";
    assert_eq!(scene.sql(functions), "9");
    migrate(&url, MigrateAction::Down).await.unwrap();
    assert_eq!(scene.sql("SELECT count(*) FROM pg_namespace WHERE nspname = 'ibid'"), "0");
    migrate(&url, MigrateAction::Up).await.unwrap();
    assert_eq!(scene.sql(functions), "9");
    pay_in_transaction(&session(&scene, "gateway").await, "k-1", "{}", b"").await;
}
