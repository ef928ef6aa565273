//! Certificates that the URL names change while the store runs.

use std::path::{Path, PathBuf};

use ibid::store::{ErrorKind, Store};
use ibid_stores::redis::Redis;
use tempfile::TempDir;
use testbed::{
    RedisOptions, TestRedis,
    certificates::{CertificateAuthority, IssuedCertificate, replace},
};

use super::{claim_and_complete, claim_granted, claim_request, expect_completed, remote, wait_for};

/// What an operator has: three files, which the URL names.
struct CertificateFiles {
    folder: TempDir,
}

impl CertificateFiles {
    fn new(authority: &CertificateAuthority, own: &IssuedCertificate) -> CertificateFiles {
        let files = CertificateFiles { folder: tempfile::tempdir().unwrap() };
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
fn redis_cli(server: &TestRedis, authority: &CertificateAuthority, own: &IssuedCertificate, args: &[&str]) -> String {
    let (ca, text) = (authority.path(), |path: &Path| path.to_str().unwrap().to_owned());
    let (ca, cert, key) = (text(&ca), text(&own.cert), text(&own.key));
    let login = ["--cacert", &ca, "--cert", &cert, "--key", &key];
    server.cli(&[&login[..], args].concat())
}

/// The words that give a server another certificate, and others who vouch for its clients.
fn renewal_arguments(authority: &CertificateAuthority, server: &IssuedCertificate) -> Vec<String> {
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

fn as_strs(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}

/// `beside` gives others, whom the store asks as well, a certificate of the authority.
async fn assert_certificates_renewed(server: TestRedis, place: &str, beside: impl Fn(&CertificateAuthority)) {
    let (ours, next) = (CertificateAuthority::new(), CertificateAuthority::new());
    let (of_server, of_client) = (ours.vouch("server"), ours.vouch("client"));
    let (next_server, next_client) = (next.vouch("server"), next.vouch("client"));
    assert_eq!(server.cli(&as_strs(&renewal_arguments(&ours, &of_server))), "OK");
    beside(&ours);
    let files = CertificateFiles::new(&ours, &of_client);
    let store = Redis::open(&files.url(place), remote()).await.unwrap();
    let asked = claim_request();
    claim_and_complete(&store, &asked, b"before").await;

    // One of a pair is there before the other: whoever connects meanwhile shows the old one.
    replace(&next_client.cert, &files.path("cert.pem"));
    let kill = ["CLIENT", "KILL", "TYPE", "normal"];
    redis_cli(&server, &ours, &of_client, &kill);
    wait_until_usable(&store).await;

    // Everything else, on both sides, and every connection is cut.
    assert_eq!(redis_cli(&server, &ours, &of_client, &as_strs(&renewal_arguments(&next, &next_server))), "OK");
    beside(&next);
    redis_cli(&server, &next, &next_client, &kill);
    let error = store.claim(&claim_request()).await.expect_err("neither side knows the other");
    assert!(matches!(error.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous), "{error}");
    replace(&next.path(), &files.path("ca.pem"));
    replace(&next_client.key, &files.path("key.pem"));
    wait_until_usable(&store).await;
    assert_eq!(expect_completed(&store, &asked).await, &b"before"[..]);

    // And it was not the server that had become careless.
    let old = CertificateFiles::new(&next, &of_client);
    let error = Redis::open(&old.url(place), remote()).await.unwrap().claim(&claim_request()).await;
    assert_eq!(error.unwrap_err().kind, ErrorKind::NotApplied);
}

/// Until the store can be used.
async fn wait_until_usable(store: &Redis) {
    wait_for("the store to connect again", async || store.claim(&claim_request()).await.ok().map(drop)).await;
    claim_granted(store, &claim_request()).await;
}

#[tokio::test]
async fn they_are_taken_up_without_a_restart() {
    let server = TestRedis::start_with(RedisOptions { tls: true, ..RedisOptions::default() });
    let place = format!("rediss://127.0.0.1:{}/0", server.port());
    assert_certificates_renewed(server, &place, |_| {}).await;
}

#[tokio::test]
async fn they_are_taken_up_behind_sentinels_too() {
    let server = TestRedis::start_with(RedisOptions { tls: true, ..RedisOptions::default() });
    let sentinel = server.start_sentinel();
    let place = format!("redis+sentinel+tls://127.0.0.1:{}/{}", sentinel.port(), sentinel.sentinel_url_suffix());
    // A sentinel cannot be told, only started again with other files.
    assert_certificates_renewed(server, &place, |authority| {
        let own = authority.vouch("sentinel");
        for (from, name) in [(&authority.path(), "ca.pem"), (&own.cert, "cert.pem"), (&own.key, "key.pem")] {
            replace(from, &sentinel.path(name));
        }
        sentinel.restart();
    })
    .await;
}

#[tokio::test]
async fn they_are_taken_up_for_a_cluster_too() {
    let config = ["cluster-enabled yes", "tls-cluster yes"].map(str::to_owned).to_vec();
    let server = TestRedis::start_with(RedisOptions { tls: true, config, ..RedisOptions::default() });
    server.cli(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    wait_for("the cluster", async || server.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok").then_some(())).await;
    let place = format!("redis+cluster+tls://127.0.0.1:{}/", server.port());
    assert_certificates_renewed(server, &place, |_| {}).await;
}
