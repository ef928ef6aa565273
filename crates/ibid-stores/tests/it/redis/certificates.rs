//! Certificates that the URL names change while the store runs.

use std::path::{Path, PathBuf};

use ibid::store::{ErrorKind, Store};
use ibid_stores::redis::Redis;
use ibid_testkit::{
    certificates::{Authority, Vouched, replace},
    servers::redis::{Options, Server},
};
use tempfile::TempDir;

use super::{ask, done, finished, granted, remote, until};

/// What an operator has: three files, which the URL names.
struct Files {
    folder: TempDir,
}

impl Files {
    fn new(authority: &Authority, own: &Vouched) -> Files {
        let files = Files { folder: tempfile::tempdir().unwrap() };
        replace(&authority.path(), &files.path("ca.pem"));
        replace(&own.cert, &files.path("cert.pem"));
        replace(&own.key, &files.path("key.pem"));
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn url(&self, place: &str) -> String {
        let path = |name: &str| self.path(name).display().to_string();
        let (ca, cert, key) = (path("ca.pem"), path("cert.pem"), path("key.pem"));
        format!("{place}?ca={ca}&cert={cert}&key={key}")
    }
}

/// What `redis-cli` prints to a server that lets in only whom `authority` vouches for.
fn cli(server: &Server, authority: &Authority, own: &Vouched, args: &[&str]) -> String {
    let (ca, text) = (authority.path(), |path: &Path| path.to_str().unwrap().to_owned());
    let (ca, cert, key) = (text(&ca), text(&own.cert), text(&own.key));
    let login = ["--cacert", &ca, "--cert", &cert, "--key", &key];
    server.cli(&[&login[..], args].concat())
}

/// The words that give a server another certificate, and others who vouch for its clients.
fn renewal(authority: &Authority, server: &Vouched) -> Vec<String> {
    let text = |path: &Path| path.display().to_string();
    let words = [
        "CONFIG",
        "SET",
        "tls-ca-cert-file",
        &text(&authority.path()),
        "tls-cert-file",
        &text(&server.cert),
        "tls-key-file",
        &text(&server.key),
        "tls-auth-clients",
        "yes",
    ];
    words.map(str::to_owned).to_vec()
}

fn words(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}

/// `beside` gives others, whom the store asks as well, a certificate of the authority.
async fn change(server: Server, place: &str, beside: impl Fn(&Authority)) {
    let (ours, next) = (Authority::new(), Authority::new());
    let (of_server, of_client) = (ours.vouch("server"), ours.vouch("client"));
    let (next_server, next_client) = (next.vouch("server"), next.vouch("client"));
    assert_eq!(server.cli(&words(&renewal(&ours, &of_server))), "OK");
    beside(&ours);
    let files = Files::new(&ours, &of_client);
    let store = Redis::open(&files.url(place), remote()).await.unwrap();
    let asked = ask();
    finished(&store, &asked, b"before").await;

    // One of a pair is there before the other: whoever connects meanwhile shows the old one.
    replace(&next_client.cert, &files.path("cert.pem"));
    let kill = ["CLIENT", "KILL", "TYPE", "normal"];
    cli(&server, &ours, &of_client, &kill);
    again(&store).await;

    // Everything else, on both sides, and every connection is cut.
    assert_eq!(cli(&server, &ours, &of_client, &words(&renewal(&next, &next_server))), "OK");
    beside(&next);
    cli(&server, &next, &next_client, &kill);
    let error = store.claim(&ask()).await.expect_err("neither side knows the other");
    assert!(matches!(error.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous), "{error}");
    replace(&next.path(), &files.path("ca.pem"));
    replace(&next_client.key, &files.path("key.pem"));
    again(&store).await;
    assert_eq!(done(&store, &asked).await, &b"before"[..]);

    // And it was not the server that had become careless.
    let old = Files::new(&next, &of_client);
    let error = Redis::open(&old.url(place), remote()).await.unwrap().claim(&ask()).await;
    assert_eq!(error.unwrap_err().kind, ErrorKind::NotApplied);
}

/// Until the store can be used.
async fn again(store: &Redis) {
    until("the store to connect again", async || store.claim(&ask()).await.ok().map(drop)).await;
    granted(store, &ask()).await;
}

#[tokio::test]
async fn they_are_taken_up_without_a_restart() {
    let server = Server::with(Options { tls: true, ..Options::default() });
    let place = format!("rediss://127.0.0.1:{}/0", server.port());
    change(server, &place, |_| {}).await;
}

#[tokio::test]
async fn they_are_taken_up_behind_sentinels_too() {
    let server = Server::with(Options { tls: true, ..Options::default() });
    let sentinel = server.sentinel();
    let place = format!("redis+sentinel+tls://127.0.0.1:{}/{}", sentinel.port(), sentinel.sentinels_name());
    // A sentinel cannot be told, only started again with other files.
    change(server, &place, |authority| {
        let own = authority.vouch("sentinel");
        for (from, name) in [(&authority.path(), "ca.pem"), (&own.cert, "cert.pem"), (&own.key, "key.pem")] {
            replace(from, &sentinel.file(name));
        }
        sentinel.restart();
    })
    .await;
}

#[tokio::test]
async fn they_are_taken_up_for_a_cluster_too() {
    let config = ["cluster-enabled yes", "tls-cluster yes"].map(str::to_owned).to_vec();
    let server = Server::with(Options { tls: true, config, ..Options::default() });
    server.cli(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    until("the cluster", async || server.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok").then_some(())).await;
    let place = format!("redis+cluster+tls://127.0.0.1:{}/", server.port());
    change(server, &place, |_| {}).await;
}
