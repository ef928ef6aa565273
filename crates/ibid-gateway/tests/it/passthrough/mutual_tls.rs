//! Client certificates on either side, and certificates that change while the gateway runs.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use http::{Request, StatusCode};
use http_body_util::Full;
use parking_lot::Mutex;
use testbed::{
    certificates::{CertificateAuthority, IssuedCertificate, replace},
    client::post,
    process::GatewayProcess,
    upstream::TestUpstream,
};
use tokio::time::sleep;

use crate::{
    support::tls::{send_over_tls, strict_server},
    support::{BIN, assert_ran, policy, start_gateway, within},
};

use crate::support::run_ibid;

/// What a client of the gateway gets to see: the server's certificate and the answer's status, or nothing.
async fn pay(
    addr: SocketAddr, trusts: &CertificateAuthority, shows: Option<&IssuedCertificate>, key: &str,
) -> Option<(Vec<u8>, StatusCode)> {
    let request = Request::post("/pay").header("host", "shop.example").header("idempotency-key", key);
    let seen = send_over_tls(addr, trusts, shows, request.body(Full::default()).unwrap()).await?;
    Some((seen.server, seen.answer.status()))
}

#[tokio::test]
async fn only_clients_with_a_certificate_of_the_given_authority_are_let_in() {
    let (ours, strangers) = (CertificateAuthority::new(), CertificateAuthority::new());
    let (server, client, stranger) = (ours.vouch("server"), ours.vouch("client"), strangers.vouch("client"));
    let upstream = TestUpstream::start().await;
    let config = format!(
        "[tls]\ncert = {:?}\nkey = {:?}\nclient_ca = {:?}\n{}",
        server.cert,
        server.key,
        ours.path(),
        policy("")
    );
    let gateway = start_gateway(&config, &upstream).await;
    assert_eq!(pay(gateway.addr(), &ours, None, "k-1").await, None);
    assert_eq!(pay(gateway.addr(), &ours, Some(&stranger), "k-1").await, None);
    assert_eq!(upstream.requests(), 0);
    let (seen, status) = pay(gateway.addr(), &ours, Some(&client), "k-1").await.expect("an answer");
    assert_eq!((seen, status), (server.der, StatusCode::CREATED));
}

#[tokio::test]
async fn certificates_and_those_who_vouch_for_clients_change_without_a_restart() {
    let (ours, next) = (CertificateAuthority::new(), CertificateAuthority::new());
    let (server, client, next_client) = (ours.vouch("server"), ours.vouch("client"), next.vouch("client"));
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let put = |from: &Path, name: &str| replace(from, &path(name));
    put(&server.cert, "cert.pem");
    put(&server.key, "key.pem");
    put(&ours.path(), "clients.pem");
    let upstream = TestUpstream::start().await;
    let config = format!(
        "[tls]\ncert = {:?}\nkey = {:?}\nclient_ca = {:?}\n{}",
        path("cert.pem"),
        path("key.pem"),
        path("clients.pem"),
        policy("")
    );
    let gateway = start_gateway(&config, &upstream).await;
    assert_eq!(pay(gateway.addr(), &ours, Some(&client), "k-1").await.expect("an answer").0, server.der);
    // The certificate first, the key later: in between the old pair serves.
    let renewed = ours.vouch("renewed");
    put(&renewed.cert, "cert.pem");
    gateway.wait_for_log("the configuration in force stays").await;
    assert_eq!(pay(gateway.addr(), &ours, Some(&client), "k-1").await.expect("an answer").0, server.der);
    put(&renewed.key, "key.pem");
    put(&next.path(), "clients.pem");
    within("the new certificates", async {
        while pay(gateway.addr(), &ours, Some(&next_client), "k-1").await.is_none() {
            sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
    let (seen, status) = pay(gateway.addr(), &ours, Some(&next_client), "k-1").await.expect("an answer");
    assert_eq!((seen, status), (renewed.der.clone(), StatusCode::CREATED));
    assert_eq!(pay(gateway.addr(), &ours, Some(&client), "k-1").await, None, "the old authority is gone");
    assert!(gateway.logs().iter().all(|line| !line.contains("needs_restart")), "{:?}", gateway.logs());
    // TLS is not turned off without a restart, least of all by a slip of the pen.
    gateway.rewrite_config(&policy(""));
    gateway.wait_for_log("needs_restart=\"tls\"").await;
    assert!(post(gateway.addr(), "/pay").key("k-2").json("{}").try_send().await.is_err());
    assert!(pay(gateway.addr(), &ours, Some(&client), "k-2").await.is_none());
    let (seen, _) = pay(gateway.addr(), &ours, Some(&next_client), "k-1").await.expect("an answer");
    assert_eq!(seen, renewed.der);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn an_upstream_that_asks_is_shown_the_gateways_certificate_and_the_next_one_after_a_change() {
    let (ours, clients) = (CertificateAuthority::new(), CertificateAuthority::new());
    let (server, shown) = (ours.vouch("server"), clients.vouch("gateway"));
    // It answers with who called it, by certificate.
    let addr = strict_server(&server, &clients, |_, shown| (StatusCode::CREATED, shown.to_vec().into())).await;
    let url = format!("https://localhost:{}", addr.port());
    let bare = GatewayProcess::spawn(BIN, &format!("upstream_ca = {:?}\n{}", ours.path(), policy("")), &url).await;
    let refused = post(bare.addr(), "/pay").key("k-1").json("{}").send().await;
    assert!(refused.status == 502, "{refused:?}");
    let config = format!(
        "upstream_ca = {:?}\nupstream_cert = {:?}\nupstream_key = {:?}\n{}",
        ours.path(),
        shown.cert,
        shown.key,
        policy("")
    );
    let gateway = GatewayProcess::spawn(BIN, &config, &url).await;
    let first = post(gateway.addr(), "/pay").key("k-1").json("{}").send().await;
    assert_ran(&first);
    assert_eq!(first.body, shown.der);
    let renewed = clients.vouch("gateway");
    within("the new certificate", async {
        for n in 0.. {
            let answer = post(gateway.addr(), "/pay").key(format!("n-{n}")).json("{}").send().await;
            if answer.body == renewed.der {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_collector_that_asks_is_shown_a_certificate_and_the_next_one_after_a_change() {
    let (ours, clients) = (CertificateAuthority::new(), CertificateAuthority::new());
    let (server, shown) = (ours.vouch("server"), clients.vouch("gateway"));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sees = seen.clone();
    let addr = strict_server(&server, &clients, move |path, shown| {
        sees.lock().push((path.to_owned(), shown.to_vec()));
        (StatusCode::OK, "{}".into())
    })
    .await;
    let upstream = TestUpstream::start().await;
    let trace = format!("[trace]\notlp = \"https://localhost:{}\"\nca = {:?}\n", addr.port(), ours.path());
    let bare = start_gateway(&format!("{}{trace}", policy("")), &upstream).await;
    assert_ran(&post(bare.addr(), "/pay").key("k-1").json("{}").send().await);
    bare.wait_for_log("traces cannot be sent; spans are dropped").await;
    assert_eq!(*seen.lock(), []);
    let trace = format!("{trace}cert = {:?}\nkey = {:?}\n", shown.cert, shown.key);
    let gateway = start_gateway(&format!("{}{trace}", policy("")), &upstream).await;
    let traced_by = async |certificate: &[u8], run: &str| {
        within("a trace", async {
            for n in 0.. {
                assert_ran(&post(gateway.addr(), "/pay").key(format!("{run}-{n}")).json("{}").send().await);
                if seen.lock().drain(..).any(|(path, shown)| path == "/v1/traces" && shown == certificate) {
                    break;
                }
                sleep(Duration::from_millis(200)).await;
            }
        })
        .await;
    };
    traced_by(&shown.der, "first").await;
    let renewed = clients.vouch("gateway");
    traced_by(&renewed.der, "renewed").await;
    assert!(!gateway.logs().iter().any(|line| line.contains("needs_restart")), "{:#?}", gateway.logs());
}

#[tokio::test]
async fn half_an_identity_is_no_configuration() {
    let authority = CertificateAuthority::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ibid.toml");
    for (text, told) in [
        (format!("upstream_cert = {:?}\n", authority.path()), "upstream_key: missing; a certificate and its key"),
        (format!("upstream_key = {:?}\n", authority.path()), "upstream_cert: missing; a certificate and its key"),
        (
            format!("[trace]\notlp = \"https://h\"\ncert = {:?}\n", authority.path()),
            "trace.key: missing; a certificate and its key",
        ),
        (
            format!("[trace]\notlp = \"http://h\"\nca = {:?}\n", authority.path()),
            "trace.ca: certificates are for a collector at https",
        ),
        (
            format!("[jwt]\njwks = \"https://h\"\nkey = {:?}\n", authority.path()),
            "jwt.cert: missing; a certificate and its key",
        ),
        (
            format!("[jwt]\nsecret = \"{}\"\ncert = {:?}\n", "s".repeat(32), authority.path()),
            "jwt.cert: certificates are only for keys from a URL",
        ),
    ] {
        std::fs::write(&path, format!("upstream = \"https://127.0.0.1:1\"\n{text}")).unwrap();
        let output = run_ibid(&["check", path.to_str().unwrap()], &[]).await;
        let shown = output.stderr;
        assert!(shown.contains(told), "{shown}");
    }
}
