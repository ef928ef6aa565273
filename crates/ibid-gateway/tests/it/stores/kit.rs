//! Two gateways on one store, a store that can be broken, and what the tests ask of their answers.

use std::{
    future::Future,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use ibid_testkit::{
    client::{Request, Response, get, post},
    process::{Gateway, run},
    servers::{link::Link, postgres, redis},
    upstream::Upstream,
};
use tokio::time::{Instant, sleep};

pub(super) use crate::faults::kit::{BIN, assert_ran, assert_refused, assert_replay};

/// How long a server that was broken, and whoever uses it, may take to be well again on few cores.
const PATIENCE: Duration = Duration::from_secs(30);

/// Two gateways with the same configuration in front of the same upstream.
pub(super) async fn two(config: &str, upstream: &Upstream) -> [Gateway; 2] {
    let url = upstream.url();
    let (one, other) = tokio::join!(Gateway::spawn(BIN, config, &url), Gateway::spawn(BIN, config, &url));
    [one, other]
}

/// A payment by the same caller whichever gateway takes it: the host is part of a scope.
pub(super) fn pay(gateway: &Gateway, key: &str) -> Request {
    post(gateway.addr(), "/pay").header("Host", "shop.example").key(key).json(r#"{"amount":1}"#)
}

/// Returns once this gives something.
pub(crate) async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < end, "waited {PATIENCE:?} for {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Sends until the store can decide again: until then it is refused, or the answer would say that it is degraded.
pub(super) async fn once_protected(request: &Request) -> Response {
    until("the store to decide again", || async {
        let answer = request.send().await;
        (answer.status != 503).then_some(answer)
    })
    .await
}

/// Returns once the gateway says that it is ready, or that it is not.
pub(super) async fn until_ready(gateway: &Gateway, ready: bool) {
    let wanted = if ready { 200 } else { 503 };
    until("its readiness to change", || async {
        let answer = get(gateway.admin_addr(), "/readyz").send().await;
        assert_eq!(answer.json()["store"]["trouble"].is_null(), answer.status == 200, "{answer:?}");
        (answer.status == wanted).then_some(())
    })
    .await;
}

/// A counter at `/metrics`.
pub(super) async fn counter(gateway: &Gateway, name: &str) -> u64 {
    let page = get(gateway.admin_addr(), "/metrics").send().await.text();
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{page}"))
}

/// It ran without protection, and says so.
#[track_caller]
pub(super) fn assert_degraded(answer: &Response) {
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.header("idempotency-guarantee"), Some("degraded"), "{answer:?}");
}

/// A fresh PostgreSQL database with the store's tables, by `ibid migrate`. Returns how the gateway reaches it, and its name.
pub(super) async fn migrated(server: &postgres::Server, port: u16) -> (String, String) {
    let database = server.create_database();
    let migrated = run(BIN, &["migrate", "--store", &server.url("migrator", &database)], &[]).await;
    assert!(migrated.status.success(), "{}", String::from_utf8_lossy(&migrated.stderr));
    (format!("postgres://gateway@127.0.0.1:{port}/{database}"), database)
}

pub(super) fn link_to(port: u16) -> Link {
    Link::to(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
}

/// A store that only one test has, and a way to lose it.
pub(super) enum Breakable {
    KilledRedis(redis::Server),
    PausedRedis(redis::Server),
    /// Behind a link that drops its connections and takes no new ones.
    RefusedRedis {
        _server: redis::Server,
        link: Link,
    },
    KilledPostgres(postgres::Server, String),
}

impl Breakable {
    pub(super) fn killed_redis() -> Breakable {
        Breakable::KilledRedis(redis::Server::start())
    }

    pub(super) fn paused_redis() -> Breakable {
        Breakable::PausedRedis(redis::Server::start())
    }

    pub(super) fn refused_redis() -> Breakable {
        let server = redis::Server::start();
        let link = link_to(server.port());
        Breakable::RefusedRedis { _server: server, link }
    }

    pub(super) async fn killed_postgres() -> Breakable {
        let server = postgres::Server::start();
        let (url, _) = migrated(&server, server.port()).await;
        Breakable::KilledPostgres(server, url)
    }

    /// The whole configuration: every path under `ietf` with these dials on top, nothing kept near, and a deadline that a
    /// silent server does not make long.
    pub(super) fn config(&self, dials: &str) -> String {
        let url = match self {
            Breakable::KilledRedis(server) | Breakable::PausedRedis(server) => server.url(),
            Breakable::RefusedRedis { link, .. } => format!("redis://{}/0", link.addr()),
            Breakable::KilledPostgres(_, url) => url.clone(),
        };
        format!("[store]\nurl = {url:?}\nnear = \"0\"\ntimeout = \"300ms\"\n[policy]\npreset = \"ietf\"\n{dials}\n")
    }

    pub(super) fn lose(&self) {
        match self {
            Breakable::KilledRedis(server) => server.kill(),
            Breakable::PausedRedis(server) => server.pause(),
            Breakable::RefusedRedis { link, .. } => {
                link.refuse();
                link.reset();
            }
            Breakable::KilledPostgres(server, _) => server.kill(),
        }
    }

    pub(super) fn bring_back(&self) {
        match self {
            Breakable::KilledRedis(server) => server.restart(),
            Breakable::PausedRedis(server) => server.resume(),
            Breakable::RefusedRedis { link, .. } => link.heal(),
            Breakable::KilledPostgres(server, _) => server.restart(),
        }
    }
}

/// The names of the answers in a journal, without its lock, and the audit trail that is beside them.
pub(crate) fn journaled(folder: &std::path::Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).expect("a journal");
    let names = files.map(|file| file.expect("a file").file_name().into_string().expect("a plain name"));
    names.filter(|name| name != "journal.lock" && !name.starts_with("audit.jsonl")).collect()
}
