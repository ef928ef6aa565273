//! Certificates that the URL names change while the store runs.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use ibid::store::{ClaimOutcome, ErrorKind, SettleOutcome, Store};
use ibid_stores::{RemoteOptions, postgres::Postgres};
use testbed::{
    TestPostgres,
    certificates::{CertificateAuthority, replace},
};

use super::common::{claim_granted, claim_request, competing_request, complete, database, patient_options};

/// Operators come as they are; the gateway shows a certificate that names it.
const HBA_LINES: &str = "host all postgres,migrator 127.0.0.1/32 trust\n\
                   hostssl all gateway 127.0.0.1/32 trust clientcert=verify-full\n";

fn url(server: &TestPostgres, database: &str, folder: &Path) -> String {
    let file = |name: &str| folder.join(name).display().to_string();
    let (ca, cert, key) = (file("ca.pem"), file("cert.pem"), file("key.pem"));
    let files = format!("sslrootcert={ca}&sslcert={cert}&sslkey={key}");
    format!("postgres://gateway@localhost:{}/{database}?sslmode=verify-full&pool=2&{files}", server.port())
}

fn install_file(folder: &Path, name: &str, from: &Path) {
    replace(from, &folder.join(name));
}

/// Cuts the connections of the store, and waits until they are gone.
fn cut_connections(server: &TestPostgres) {
    server.sql("postgres", "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = 'gateway'");
}

/// Until the store can be used.
async fn wait_until_usable(store: &Postgres) {
    let began = Instant::now();
    while let Err(error) = store.claim(&claim_request()).await {
        assert!(began.elapsed() < Duration::from_secs(60), "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_are_taken_up_without_a_restart() {
    let (server, _) = TestPostgres::start_with_tls();
    let name = database(&server);
    let (ours, next) = (CertificateAuthority::new(), CertificateAuthority::new());
    let (of_gateway, next_of_gateway) = (ours.vouch("gateway"), next.vouch("gateway"));
    server.renew_certificate(&ours.vouch("server"), &ours);
    server.set_hba(HBA_LINES);
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    install_file(at, "ca.pem", &ours.path());
    install_file(at, "cert.pem", &of_gateway.cert);
    install_file(at, "key.pem", &of_gateway.key);
    let store = Postgres::open(&url(&server, &name, at), patient_options()).await.unwrap();
    wait_until_usable(&store).await;
    let asked = claim_request();
    let lease = claim_granted(&store, &asked).await;
    assert_eq!(store.settle(&lease, &complete(b"before")).await.unwrap(), SettleOutcome::Applied);
    let shown = format!(
        "SELECT DISTINCT s.client_dn FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) WHERE a.datname = '{name}' AND a.usename = 'gateway'"
    );
    assert_eq!(server.sql("postgres", &shown), "/CN=gateway");

    // One of a pair is there before the other: whoever connects meanwhile shows the old one.
    install_file(at, "cert.pem", &next_of_gateway.cert);
    cut_connections(&server);
    wait_until_usable(&store).await;

    // Everything else, on both sides, and every connection is cut. Until the server has the new ones, sessions with the
    // old ones may come back: they are cut as well.
    server.renew_certificate(&next.vouch("server"), &next);
    let began = Instant::now();
    loop {
        cut_connections(&server);
        match store.claim(&claim_request()).await {
            Err(error) if error.to_string().contains("certificate") => break,
            _ => assert!(began.elapsed() < Duration::from_secs(60), "both sides still know each other"),
        }
    }
    install_file(at, "ca.pem", &next.path());
    install_file(at, "key.pem", &next_of_gateway.key);
    wait_until_usable(&store).await;
    assert!(
        matches!(store.claim(&competing_request(&asked)).await.unwrap(), ClaimOutcome::Completed(done) if done.record == b"before"[..])
    );

    // And it was not the server that had become careless.
    for shown in [&of_gateway, &next.vouch("somebody-else")] {
        let others = tempfile::tempdir().unwrap();
        install_file(others.path(), "ca.pem", &next.path());
        install_file(others.path(), "cert.pem", &shown.cert);
        install_file(others.path(), "key.pem", &shown.key);
        let refused = Postgres::open(&url(&server, &name, others.path()), RemoteOptions::default()).await.unwrap();
        let error = refused.claim(&claim_request()).await.unwrap_err();
        assert!(matches!(error.kind, ErrorKind::NotApplied | ErrorKind::Rejected), "{error}");
    }
}

#[tokio::test]
async fn a_file_that_is_gone_for_a_while_changes_nothing() {
    let (server, certificate) = TestPostgres::start_with_tls();
    let name = database(&server);
    let folder = tempfile::tempdir().unwrap();
    let file: PathBuf = folder.path().join("ca.pem");
    replace(&certificate, &file);
    let url = format!(
        "postgres://gateway@localhost:{}/{name}?sslmode=verify-full&sslrootcert={}",
        server.port(),
        file.display()
    );
    let store = Postgres::open(&url, patient_options()).await.unwrap();
    wait_until_usable(&store).await;
    for content in [None, Some(""), Some("-----BEGIN CERTIFICATE-----\nAAAA\n")] {
        match content {
            None => std::fs::remove_file(&file).unwrap(),
            Some(content) => std::fs::write(&file, content).unwrap(),
        }
        cut_connections(&server);
        wait_until_usable(&store).await;
    }
}

#[tokio::test]
async fn a_password_is_bound_to_the_tls_connection() {
    let (server, _) = TestPostgres::start_with_tls();
    let name = database(&server);
    server.sql("postgres", "SET password_encryption = 'scram-sha-256'; ALTER ROLE gateway PASSWORD 'secret'");
    server.set_hba("host all postgres,migrator 127.0.0.1/32 trust\nhostssl all gateway 127.0.0.1/32 scram-sha-256\n");
    // The driver refuses to log in without the binding.
    let url =
        format!("postgres://gateway:secret@localhost:{}/{name}?sslmode=require&channel_binding=require", server.port());
    let store = Postgres::open(&url, patient_options()).await.unwrap();
    wait_until_usable(&store).await;
}
