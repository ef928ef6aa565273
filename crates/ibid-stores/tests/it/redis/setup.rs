//! How a server is set up: what start-up finds wanting, users and TLS, and what is never shown.

use std::{sync::Arc, time::Duration};

use ibid::store::{ClaimOutcome, EntryFilter, EntryState, ErrorKind, ListCursor, SettleOutcome, Store};
use ibid_stores::{RemoteOptions, StoreUrl, redis::Redis};
use ibid_testkit::broken::failing_cases;
use testbed::{
    RedisCluster, RedisOptions, RedisSentinels, TestRedis,
    certificates::{CertificateAuthority, IssuedCertificate},
};
use tokio::net::{TcpListener, TcpStream};

use super::{
    claim_and_complete, claim_granted, claim_request, claim_request_in_bucket, complete, expect_completed, open,
    remote, wait_for,
};

/// The page that users read, from which the tests take what they check.
const REDIS_DOC_PAGE: &str = include_str!("../../../../../docs/redis.md");

#[tokio::test]
async fn nothing_is_wanting_on_a_server_that_is_set_up_well() {
    let promise = open(&TestRedis::shared().url()).await.guarantees();
    assert_eq!((promise.durable, promise.shared, promise.warnings), (true, true, Vec::<String>::new()));
    let promise = open(&RedisCluster::shared().url()).await.guarantees();
    assert!(promise.durable && promise.warnings.iter().all(|wanting| wanting.contains("asynchronous")), "{promise:?}");
}

#[tokio::test]
async fn what_weakens_the_promise_is_said() {
    let server =
        TestRedis::start_with_config(&["maxmemory 100mb", "maxmemory-policy allkeys-lru", "appendfsync everysec"]);
    let promise = open(&server.url()).await.guarantees();
    let [evicts, loses] = &promise.warnings[..] else { panic!("{promise:?}") };
    assert!(evicts.contains("allkeys-lru") && evicts.contains("noeviction"), "{evicts}");
    assert!(loses.contains("everysec") && loses.contains("two seconds"), "{loses}");
    assert!(promise.durable);
    let server = TestRedis::start_with_config(&["appendonly no"]);
    let promise = open(&server.url()).await.guarantees();
    assert!(!promise.durable && promise.warnings[0].contains("appendonly is no"), "{promise:?}");
}

/// The line of the page that sets up the user.
fn documented_rules() -> Vec<&'static str> {
    let line = REDIS_DOC_PAGE
        .lines()
        .find(|line| line.starts_with("user ibid on >PASSWORD "))
        .expect("the page has the user's line");
    line.strip_prefix("user ibid on >PASSWORD ").unwrap().split(' ').collect()
}

#[tokio::test]
async fn a_user_with_exactly_the_documented_rules_can_do_everything() {
    assert_documented_rules_suffice(TestRedis::start()).await;
    assert_documented_rules_suffice(TestRedis::start_valkey()).await;
}

async fn assert_documented_rules_suffice(server: TestRedis) {
    let mut set = vec!["ACL", "SETUSER", "ibid", "reset", "on", ">s3cret/word"];
    set.extend(documented_rules());
    assert_eq!(server.cli(&set), "OK");
    server.cli(&["ACL", "SETUSER", "default", "off"]);
    let url = format!("redis://ibid:s3cret%2Fword@127.0.0.1:{}/0", server.port());
    let store = Redis::open(&url, RemoteOptions { prefix: "idempotency".into(), ..remote() }).await.unwrap();
    assert_eq!(store.guarantees().warnings, Vec::<String>::new());
    let copies = RemoteOptions {
        prefix: "idempotency".into(),
        answer_cache: Some(Default::default()),
        wait_replicas: 0,
        ..remote()
    };
    let _listens = Redis::open(&url, copies).await.unwrap();

    let (first, second) = (claim_request(), claim_request());
    let lease = claim_granted(&store, &first).await;
    assert_eq!(store.extend(&lease, super::LONG_LEASE).await.unwrap(), SettleOutcome::Applied);
    let waits = store.wait(&first.address, lease.fence, Duration::from_secs(60));
    let settles = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        store.settle(&lease, &complete(b"done")).await
    };
    let (waited, settled) = tokio::join!(waits, settles);
    waited.unwrap();
    assert_eq!(settled.unwrap(), SettleOutcome::Applied);
    assert_eq!(expect_completed(&store, &first).await, &b"done"[..]);
    let operators = store.admin();
    assert_eq!(operators.counts().await.unwrap().finished, 1);
    for state in [None, Some(EntryState::Done)] {
        let filter = EntryFilter { state, ..EntryFilter::default() };
        assert_eq!(operators.list(&filter, ListCursor::default(), 10).await.unwrap().entries.len(), 1);
    }
    assert_eq!(
        operators.replace_record(&first.address, lease.fence, "again".into()).await.unwrap(),
        SettleOutcome::Applied
    );
    assert_eq!(operators.forget(&first.address, lease.fence).await.unwrap(), SettleOutcome::Applied);
    claim_granted(&store, &second).await;
    let filter = EntryFilter { state: Some(EntryState::Processing), ..EntryFilter::default() };
    assert_eq!(operators.list(&filter, ListCursor::default(), 10).await.unwrap().entries.len(), 1);
    assert_eq!(store.sweep(10).await.unwrap().removed, 0);

    // With replicas waited for, WAIT is used: nobody has it in time, and it is allowed.
    let waits =
        RemoteOptions { prefix: "idempotency".into(), wait_replicas: 1, timeout: Duration::from_secs(2), ..remote() };
    let error = Redis::open(&url, waits).await.unwrap().claim(&claim_request()).await.unwrap_err();
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");

    // No more than it needs.
    let other = Redis::open(&url, remote()).await.unwrap();
    let error = other.claim(&claim_request()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Rejected, "another prefix is not its own: {error}");
    assert!(error.to_string().contains("docs/redis.md"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_rules_are_enough_on_a_cluster_and_behind_sentinels() {
    let (cluster, sentinels) = (RedisCluster::shared(), RedisSentinels::shared());
    let user: String = remote().prefix;
    let mut set = vec!["ACL", "SETUSER", &user, "reset", "on", ">pw"];
    set.extend(documented_rules());
    for server in cluster.primaries.iter().chain(&cluster.replicas).chain([&sentinels.primary, &sentinels.replica]) {
        assert_eq!(server.cli(&set), "OK");
    }
    for url in [cluster.url(), sentinels.url()] {
        let url = url.replace("://", &format!("://{user}:pw@"));
        let with = RemoteOptions {
            prefix: "idempotency".into(),
            wait_replicas: 1,
            answer_cache: Some(Default::default()),
            ..remote()
        };
        let store = Redis::open(&url, with).await.unwrap();
        for bucket in [0x00, 0x55, 0xaa, 0xff] {
            let ask = claim_request_in_bucket(bucket);
            let lease = claim_granted(&store, &ask).await;
            let end = complete(b"done");
            let (waited, settled) =
                tokio::join!(store.wait(&ask.address, lease.fence, Duration::from_secs(60)), async {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    store.settle(&lease, &end).await
                });
            waited.unwrap();
            assert_eq!(settled.unwrap(), SettleOutcome::Applied);
            assert_eq!(store.admin().forget(&ask.address, lease.fence).await.unwrap(), SettleOutcome::Applied);
        }
        assert!(store.admin().counts().await.is_ok() && store.sweep(1).await.is_ok());
        assert!(store.admin().list(&EntryFilter::default(), ListCursor::default(), 10).await.is_ok());
    }
    let denied = cluster.primaries.iter().chain([&sentinels.primary]).map(|server| {
        let log = server.cli(&["ACL", "LOG"]);
        server.cli(&["ACL", "LOG", "RESET"]);
        log.lines().filter(|line| line.contains(&user)).count()
    });
    assert_eq!(denied.sum::<usize>(), 0, "something was denied");
}

#[tokio::test]
async fn half_the_rules_never_pass_for_a_refusal() {
    // May claim and complete, but not list claims: that is said where it is noticed.
    for server in [TestRedis::start(), TestRedis::start_valkey()] {
        let rules: Vec<&str> = documented_rules().into_iter().filter(|rule| *rule != "+zadd").collect();
        let set = [vec!["ACL", "SETUSER", "ibid", "reset", "on", ">pw"], rules].concat();
        assert_eq!(server.cli(&set), "OK");
        let url = format!("redis://ibid:pw@127.0.0.1:{}/0", server.port());
        let store = Redis::open(&url, RemoteOptions { prefix: "idempotency".into(), ..remote() }).await.unwrap();
        claim_and_complete(&store, &claim_request(), b"answer").await;
        claim_granted(&store, &claim_request()).await;
        wait_for("the missing right to be noticed", async || {
            let error = store.admin().counts().await.err().or(store.sweep(1).await.err())?;
            assert!(error.to_string().contains("docs/redis.md"), "{error}");
            Some(())
        })
        .await;
    }
}

#[tokio::test]
async fn what_may_not_be_looked_up_is_said_to_be_unchecked() {
    let server = TestRedis::start();
    let rules: Vec<&str> = documented_rules().into_iter().filter(|rule| !rule.starts_with("+config")).collect();
    let set = [vec!["ACL", "SETUSER", "ibid", "reset", "on", ">pw"], rules].concat();
    assert_eq!(server.cli(&set), "OK");
    let url = format!("redis://ibid:pw@127.0.0.1:{}/0", server.port());
    let with = || RemoteOptions { prefix: "idempotency".into(), ..remote() };
    let store = Redis::open(&url, with()).await.unwrap();
    let [unchecked] = &store.guarantees().warnings[..] else { panic!("{:?}", store.guarantees()) };
    assert!(unchecked.contains("could not be checked"), "{unchecked}");
    claim_granted(&store, &claim_request()).await;
}

#[tokio::test]
async fn passwords_open_the_store_and_are_never_shown() {
    let server = TestRedis::start_with(RedisOptions { password: Some("hunter2".into()), ..RedisOptions::default() });
    let store = open(&server.url()).await;
    claim_granted(&store, &claim_request()).await;
    assert!(!format!("{store:?}").contains("hunter2"));
    let wrong = server.url().replace("hunter2", "hunter3");
    let store = open(&wrong).await;
    let error = store.claim(&claim_request()).await.unwrap_err();
    let shown = format!("{store:?} {error} {error:?} {:?}", store.guarantees());
    assert!(!shown.contains("hunter3") && shown.contains("login was refused"), "{shown}");
    let none = open(&format!("redis://127.0.0.1:{}", server.port())).await;
    let error = none.claim(&claim_request()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Rejected, "{error}");
}

#[tokio::test]
async fn tls_is_spoken_and_the_server_is_verified() {
    let server =
        TestRedis::start_with(RedisOptions { tls: true, password: Some("pw".into()), ..RedisOptions::default() });
    let store = open(&server.url()).await;
    let ask = claim_request();
    claim_and_complete(&store, &ask, b"sealed").await;
    assert_eq!(expect_completed(&store, &ask).await, &b"sealed"[..]);
    // With a certificate of its own too.
    let (cert, key) = (server.path("cert.pem"), server.path("key.pem"));
    let own = format!("{}&cert={}&key={}", server.url(), cert.display(), key.display());
    server.cli(&["CONFIG", "SET", "tls-auth-clients", "yes"]);
    claim_granted(&open(&own).await, &super::claim_request()).await;
    server.cli(&[
        "--cert",
        cert.to_str().unwrap(),
        "--key",
        key.to_str().unwrap(),
        "CONFIG",
        "SET",
        "tls-auth-clients",
        "no",
    ]);

    let other = TestRedis::start_with(RedisOptions { tls: true, ..RedisOptions::default() });
    let foreign = format!("rediss://:pw@127.0.0.1:{}/0?ca={}", server.port(), other.path("ca.pem").display());
    let error = open(&foreign).await.claim(&super::claim_request()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotApplied, "{error}");
    assert!(error.to_string().contains("TLS"), "{error}");
    let error = Redis::open("rediss://127.0.0.1?ca=/nowhere.pem", remote()).await.unwrap_err().to_string();
    assert!(error.contains("/nowhere.pem cannot be used"), "{error}");
}

#[tokio::test]
async fn every_url_form_of_the_page_is_understood() {
    let forms: Vec<&str> =
        REDIS_DOC_PAGE.lines().filter_map(|line| line.trim().strip_prefix("url = \"")?.split('"').next()).collect();
    assert!(forms.len() >= 6, "{forms:?}");
    for form in forms {
        form.parse::<StoreUrl>().unwrap_or_else(|why| panic!("{form}: {why}"));
    }
    assert!("redis://h:port".parse::<StoreUrl>().is_err());
    let error =
        Redis::open("redis://127.0.0.1", RemoteOptions { prefix: "a{b}".into(), ..remote() }).await.unwrap_err();
    assert!(error.to_string().contains("prefix"), "{error}");
}

#[tokio::test]
async fn keys_are_laid_out_as_the_page_says_and_leave_when_their_time_is_over() {
    let server = TestRedis::start();
    let store = Redis::open(&server.url(), RemoteOptions { prefix: "idempotency".into(), ..remote() }).await.unwrap();
    let ask = claim_request_in_bucket(0xa5);
    let lease = claim_granted(&store, &ask).await;
    let keys = server.cli(&["KEYS", "*"]);
    let mut keys: Vec<&str> = keys.lines().collect();
    keys.sort_unstable_by_key(|key| (!key.contains(":claims"), *key));
    let entry = format!("idempotency:{{a5}}:{}", ask.address);
    let [list, registry, kept] = &keys[..] else { panic!("{keys:?}") };
    assert!(list.starts_with("idempotency:{a5}:claims:") || *list == "idempotency:{a5}:claims", "{keys:?}");
    assert!(registry.starts_with("idempotency:{a5}:claims"), "{keys:?}");
    assert_eq!(*kept, entry);
    let ttl = |key: &str| server.cli(&["PTTL", key]).parse::<i64>().unwrap();
    let in_flight = ttl(&entry);
    let whole = (ask.lease + ask.ttl).as_millis() as i64;
    assert!(in_flight <= whole + 2 && in_flight > whole - 120_000, "lease end + keep: {in_flight} of {whole} ms");
    assert_eq!(store.settle(&lease, &ibid::store::Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    assert!(ttl(&entry) >= 60_000 - 5_000, "a spent token is remembered");
    wait_for("the list to go", async || (server.cli(&["KEYS", "*"]) == entry).then_some(())).await;
}

#[tokio::test]
async fn a_lapsed_claim_is_counted_by_one_sweep_only_and_one_sweeps_at_a_time() {
    let server = TestRedis::start();
    let with = remote();
    let store = Redis::open(&server.url(), with.clone()).await.unwrap();
    let short = ibid::store::ClaimRequest { lease: Duration::from_millis(20), ..(*claim_request()).clone() };
    let short = std::sync::Arc::new(short);
    claim_granted(&store, &short).await;
    wait_for("the lapse", async || {
        matches!(store.get(&short.address).await.unwrap(), Some(ClaimOutcome::OutcomeUnknown(_))).then_some(())
    })
    .await;
    let lock = format!("{}:{{00}}:sweeper", with.prefix);
    server.cli(&["SET", &lock, "somebody else", "PX", "60000"]);
    assert_eq!(store.sweep(10).await.unwrap(), Default::default(), "somebody else sweeps");
    server.cli(&["DEL", &lock]);
    assert_eq!(store.sweep(10).await.unwrap().lapsed, 1);
    assert_eq!(store.sweep(10).await.unwrap().lapsed, 0, "counted once");
    assert_eq!(server.cli(&["EXISTS", &lock]), "0", "the lock is given back");
    assert_eq!(store.admin().counts().await.unwrap().unknown, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn each_thread_has_its_connection_and_gives_it_up_when_it_ends() {
    let server = TestRedis::start();
    let store = std::sync::Arc::new(open(&server.url()).await);
    let connections = || server.cli(&["CLIENT", "LIST"]).lines().filter(|line| !line.contains("cmd=client")).count();
    claim_granted(&*store, &claim_request()).await;
    // This thread's, and that of the worker, on which background tasks run.
    let before = 2;
    let (runtime, used) = (tokio::runtime::Handle::current(), store.clone());
    let thread = std::thread::spawn(move || {
        runtime.block_on(async {
            for _ in 0..100 {
                claim_granted(&*used, &claim_request()).await;
            }
        });
    });
    tokio::task::block_in_place(|| thread.join()).unwrap();
    wait_for("its connection to close", async || (connections() <= before).then_some(())).await;
    // A runtime of its own, of which nothing is left afterwards.
    let used = store.clone();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { claim_granted(&*used, &claim_request()).await });
    });
    tokio::task::block_in_place(|| thread.join()).unwrap();
    claim_granted(&*store, &claim_request()).await;
    wait_for("its connection to close", async || (connections() <= before).then_some(())).await;
}

/// A TLS endpoint in front of a server: the Valkey of the tests is built without TLS. Returns its port.
async fn serve_tls_in_front_of(server: u16, certificate: &IssuedCertificate) -> u16 {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let key = rustls::pki_types::PrivateKeyDer::try_from(certificate.key_der.clone()).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der.clone().into()], key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let (mut client, mut server) =
                    (acceptor.accept(client).await?, TcpStream::connect(("127.0.0.1", server)).await?);
                tokio::io::copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn valkey_is_used_over_tls() {
    let authority = CertificateAuthority::new();
    let port = serve_tls_in_front_of(TestRedis::shared_valkey().port(), &authority.vouch("server")).await;
    let url = format!("valkeys://127.0.0.1:{port}/0?ca={}", authority.path().display());
    let store = Arc::new(open(&url).await);
    assert_eq!(failing_cases(store, Duration::from_secs(120)).await, [""; 0]);
    let other = CertificateAuthority::new();
    let foreign = format!("valkeys://127.0.0.1:{port}/0?ca={}", other.path().display());
    let error = open(&foreign).await.claim(&claim_request()).await.unwrap_err();
    assert!(error.to_string().contains("TLS"), "{error}");
}
