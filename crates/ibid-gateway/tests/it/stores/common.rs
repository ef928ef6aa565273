//! Two gateways on one store, a store that can be broken, and what the tests ask of their answers.

use std::net::{Ipv4Addr, SocketAddr};

use testbed::{
    FaultProxy, TestPostgres, TestRedis,
    client::{TestRequest, TestResponse, get, post},
    process::GatewayProcess,
    upstream::TestUpstream,
};

use crate::support::{BIN, refusal_name, run_ibid, until_some};

/// Two gateways with the same configuration in front of the same upstream.
pub(super) async fn start_two(config: &str, upstream: &TestUpstream) -> [GatewayProcess; 2] {
    let url = upstream.url();
    let (one, other) = tokio::join!(GatewayProcess::spawn(BIN, config, &url), GatewayProcess::spawn(BIN, config, &url));
    [one, other]
}

/// A payment by the same caller whichever gateway takes it: the host is part of a scope.
pub(super) fn pay(gateway: &GatewayProcess, key: &str) -> TestRequest {
    post(gateway.addr(), "/pay").header("Host", "shop.example").key(key).json(r#"{"amount":1}"#)
}

/// Sends until the store can decide again: until then it is refused, or the answer would say that it is degraded. A claim
/// that a paused store took late is in progress until its release is repeated, within two seconds.
pub(super) async fn send_until_protected(request: &TestRequest) -> TestResponse {
    until_some("the store to decide again", || async {
        let answer = request.send().await;
        let is_refused = answer.status == 503 || (answer.status == 409 && refusal_name(&answer) == "in-progress");
        (!is_refused).then_some(answer)
    })
    .await
}

/// Returns once the gateway says that it is ready, or that it is not.
pub(super) async fn wait_until_ready(gateway: &GatewayProcess, ready: bool) {
    let wanted = if ready { 200 } else { 503 };
    until_some("its readiness to change", || async {
        let answer = get(gateway.admin_addr(), "/readyz").send().await;
        assert_eq!(answer.json()["store"]["error"].is_null(), answer.status == 200, "{answer:?}");
        (answer.status == wanted).then_some(())
    })
    .await;
}

/// A counter at `/metrics`.
pub(super) async fn read_counter(gateway: &GatewayProcess, name: &str) -> u64 {
    let page = get(gateway.admin_addr(), "/metrics").send().await.text();
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{page}"))
}

/// It ran without protection, and says so.
#[track_caller]
pub(super) fn assert_degraded(answer: &TestResponse) {
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.header("idempotency-guarantee"), Some("degraded"), "{answer:?}");
}

/// A fresh PostgreSQL database with the store's tables, by `ibid migrate`. Returns how the gateway reaches it, and its name.
pub(crate) async fn migrated_database(server: &TestPostgres, port: u16) -> (String, String) {
    let database = server.create_database();
    let migrated = run_ibid(&["migrate", "--store", &server.url("migrator", &database)], &[]).await;
    assert!(migrated.code == Some(0), "{}", &migrated.stderr);
    (format!("postgres://gateway@127.0.0.1:{port}/{database}"), database)
}

pub(super) fn proxy_to(port: u16) -> FaultProxy {
    FaultProxy::to(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
}

/// A store that only one test has, and a way to lose it.
pub(super) enum BreakableStore {
    KilledRedis(TestRedis),
    PausedRedis(TestRedis),
    /// Behind a link that drops its connections and takes no new ones.
    RefusedRedis {
        _server: TestRedis,
        link: FaultProxy,
    },
    KilledPostgres(TestPostgres, String),
}

impl BreakableStore {
    pub(super) fn killed_redis() -> BreakableStore {
        BreakableStore::KilledRedis(TestRedis::start())
    }

    pub(super) fn paused_redis() -> BreakableStore {
        BreakableStore::PausedRedis(TestRedis::start())
    }

    pub(super) fn refused_redis() -> BreakableStore {
        let server = TestRedis::start();
        let link = proxy_to(server.port());
        BreakableStore::RefusedRedis { _server: server, link }
    }

    pub(super) async fn killed_postgres() -> BreakableStore {
        let server = TestPostgres::start();
        let (url, _) = migrated_database(&server, server.port()).await;
        BreakableStore::KilledPostgres(server, url)
    }

    /// The whole configuration: every path under `ietf` with these dials on top, nothing kept near, and a deadline that a
    /// silent server does not make long.
    pub(super) fn config(&self, dials: &str) -> String {
        let url = match self {
            BreakableStore::KilledRedis(server) | BreakableStore::PausedRedis(server) => server.url(),
            BreakableStore::RefusedRedis { link, .. } => format!("redis://{}/0", link.addr()),
            BreakableStore::KilledPostgres(_, url) => url.clone(),
        };
        format!(
            "[store]\nurl = {url:?}\nlocal_cache = \"0\"\ntimeout = \"300ms\"\n[policy]\npreset = \"ietf\"\n{dials}\n"
        )
    }

    pub(super) fn take_down(&self) {
        match self {
            BreakableStore::KilledRedis(server) => server.kill(),
            BreakableStore::PausedRedis(server) => server.pause(),
            BreakableStore::RefusedRedis { link, .. } => {
                link.refuse();
                link.reset();
            }
            BreakableStore::KilledPostgres(server, _) => server.kill(),
        }
    }

    pub(super) fn restore(&self) {
        match self {
            BreakableStore::KilledRedis(server) => server.restart(),
            BreakableStore::PausedRedis(server) => server.resume(),
            BreakableStore::RefusedRedis { link, .. } => link.heal(),
            BreakableStore::KilledPostgres(server, _) => server.restart(),
        }
    }
}

/// The names of the answers in a journal, without its lock, and the audit trail that is beside them.
pub(crate) fn journal_files(folder: &std::path::Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).expect("a journal");
    let names = files.map(|file| file.expect("a file").file_name().into_string().expect("a plain name"));
    names.filter(|name| name != "journal.lock" && !name.starts_with("audit.jsonl")).collect()
}
