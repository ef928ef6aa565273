//! The admin port with TLS: who is let in, who is told what about certificates, and what changes without a restart.

use std::path::Path;

use bytes::Bytes;
use http::{Request, header};
use http_body_util::Full;
use testbed::{
    certificates::{CertificateAuthority, IssuedCertificate, replace},
    client::{get, post},
    process::GatewayProcess,
    upstream::TestUpstream,
};
use tokio::time::{Duration, sleep};

use super::common::ADMIN_TOKEN;
use crate::{
    support::tls::{TlsExchange, send_over_tls},
    support::{BIN, policy, start_gateway, within},
};

use crate::support::run_ibid;

/// A gateway whose admin port has this certificate, and lets in whom `clients` vouches for.
async fn office(upstream: &TestUpstream, cert: &Path, key: &Path, clients: Option<&Path>) -> GatewayProcess {
    start_gateway(&config(cert, key, clients), upstream).await
}

fn config(cert: &Path, key: &Path, clients: Option<&Path>) -> String {
    let clients = clients.map(|clients| format!("client_ca = {clients:?}\n")).unwrap_or_default();
    format!(
        "[admin]\ntoken = {ADMIN_TOKEN:?}\n[admin.tls]\ncert = {cert:?}\nkey = {key:?}\n{clients}\n[store]\nurl = \"memory:\"\n{}",
        policy("")
    )
}

async fn ask(
    gateway: &GatewayProcess, trusts: &CertificateAuthority, shows: Option<&IssuedCertificate>, path: &str,
) -> Option<TlsExchange> {
    let request =
        Request::get(path).header("host", "localhost").header("authorization", format!("Bearer {ADMIN_TOKEN}"));
    send_over_tls(gateway.admin_addr(), trusts, shows, request.body(Full::default()).unwrap()).await
}

/// A command against this gateway: exit code, output, and what it said aside.
async fn run_as_admin(args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let env: Vec<_> = [("IBID_ADMIN_TOKEN", ADMIN_TOKEN)].into_iter().chain(env.iter().copied()).collect();
    let done = run_ibid(args, &env).await;
    (done.code, done.text(), done.stderr)
}

/// What asks a gateway how it is: its own file, and the port that it got.
fn health(gateway: &GatewayProcess) -> [String; 5] {
    let file = gateway.dir().join("ibid.toml").display().to_string();
    ["health".into(), "--config".into(), file, "--admin".into(), gateway.admin_addr().to_string()]
}

#[tokio::test]
async fn it_speaks_tls_and_nothing_else() {
    let (ours, strangers) = (CertificateAuthority::new(), CertificateAuthority::new());
    let server = ours.vouch("server");
    let upstream = TestUpstream::start().await;
    let gateway = office(&upstream, &server.cert, &server.key, None).await;
    gateway.wait_for_log("ibid: admin on https://127.0.0.1:").await;
    for (path, part) in [
        ("/healthz", "ok"),
        ("/readyz", "\"ready\":true"),
        ("/metrics", "idempotency_requests_total"),
        ("/api/records", "\"records\""),
        ("/", "<!doctype html>"),
    ] {
        let seen = ask(&gateway, &ours, None, path).await.expect("an answer");
        let body = String::from_utf8_lossy(seen.answer.body()).to_lowercase();
        assert!(seen.answer.status() == 200 && seen.server == server.der, "{path}: {body}");
        assert!(body.contains(part), "{path}: {body}");
    }
    assert!(get(gateway.admin_addr(), "/healthz").try_send().await.is_err(), "without TLS there is nothing");
    assert!(ask(&gateway, &strangers, None, "/healthz").await.is_none(), "a client that does not trust it goes away");
    // The port of clients is its own affair.
    assert_eq!(post(gateway.addr(), "/pay").key("k-1").json("{}").send().await.status, 201);
}

#[tokio::test]
async fn commands_check_the_gateway_and_say_what_is_wrong() {
    let (ours, strangers) = (CertificateAuthority::new(), CertificateAuthority::new());
    let server = ours.vouch("server");
    let upstream = TestUpstream::start().await;
    let gateway = office(&upstream, &server.cert, &server.key, None).await;
    assert_eq!(post(gateway.addr(), "/pay").key("key-of-a-payment").json("{}").send().await.status, 201);
    let (url, plain) = (format!("https://{}", gateway.admin_addr()), format!("http://{}", gateway.admin_addr()));
    let (ca, theirs) = (ours.path().display().to_string(), strangers.path().display().to_string());
    let list = ["keys", "list", "--json", "--admin", &url];
    let report = ["report", "--json", "--admin", &url];
    let with_ca = ["--admin-ca", &ca];
    for (args, env) in [([&list[..], &with_ca].concat(), &[][..]), (list.to_vec(), &[("IBID_ADMIN_CA", &*ca)])] {
        let (code, out, aside) = run_as_admin(&args, env).await;
        assert_eq!(code, Some(0), "{aside}");
        assert!(out.contains("\"key\":\"key-****ment\""), "{out}");
    }
    let (code, out, aside) = run_as_admin(&[&report[..], &with_ca].concat(), &[]).await;
    assert!(code == Some(0) && out.contains("\"requests\": 1"), "{out}{aside}");
    let key = server.key.display().to_string();
    for (args, code, part) in [
        (list.to_vec(), 69, "certificate"),
        ([&list[..], &["--admin-ca", &theirs]].concat(), 69, "certificate"),
        ([&report[..], &["--admin-ca", &theirs]].concat(), 69, "certificate"),
        (vec!["keys", "list", "--admin", &plain], 69, "lost"),
        (vec!["keys", "list", "--admin", &plain, "--admin-ca", &ca], 64, "write https://"),
        (vec!["keys", "list", "--store", "memory:", "--admin-ca", &ca], 64, "name one with --admin"),
        ([&list[..], &["--admin-ca", "/no/such.pem"]].concat(), 64, "--admin-ca: cannot read \"/no/such.pem\""),
        ([&list[..], &["--admin-ca", &key]].concat(), 64, "--admin-ca: there is no certificate in it"),
        ([&list[..], &["--admin-cert", &ca]].concat(), 64, "--admin-key: missing"),
        ([&list[..], &["--admin-key", &key]].concat(), 64, "--admin-cert: missing"),
    ] {
        // As on a machine whose system trusts none of both.
        let (found, _, said) = run_as_admin(&args, &[("SSL_CERT_FILE", &theirs)]).await;
        assert!(found == Some(code) && said.contains(part), "{args:?}: {found:?} {said}");
        assert!(!said.contains(ADMIN_TOKEN), "{said}");
    }
    let asked = health(&gateway);
    let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
    for more in [&[][..], &["--ready"], &with_ca] {
        let (code, _, aside) = run_as_admin(&[&asked, more].concat(), &[]).await;
        assert_eq!((code, aside.as_str()), (Some(0), ""));
    }
    let (code, _, aside) = run_as_admin(&[&asked[..], &["--admin-ca", &theirs]].concat(), &[]).await;
    assert!(code == Some(1) && aside.contains("no answer from https://"), "{aside}");
}

#[tokio::test]
async fn with_client_ca_only_who_shows_a_certificate_is_let_in_health_included() {
    let (ours, strangers) = (CertificateAuthority::new(), CertificateAuthority::new());
    let (server, client, stranger) = (ours.vouch("server"), ours.vouch("operator"), strangers.vouch("operator"));
    let upstream = TestUpstream::start().await;
    let gateway = office(&upstream, &server.cert, &server.key, Some(&ours.path())).await;
    assert!(ask(&gateway, &ours, None, "/healthz").await.is_none());
    assert!(ask(&gateway, &ours, Some(&stranger), "/healthz").await.is_none());
    assert_eq!(ask(&gateway, &ours, Some(&client), "/api/records").await.expect("an answer").answer.status(), 200);
    let text = |path: &Path| path.display().to_string();
    let shown = |of: &IssuedCertificate| [("IBID_ADMIN_CERT", text(&of.cert)), ("IBID_ADMIN_KEY", text(&of.key))];
    let (url, ca) = (format!("https://{}", gateway.admin_addr()), text(&ours.path()));
    let asked = health(&gateway);
    let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
    let commands = [
        vec!["keys", "list", "--admin", &url, "--admin-ca", &ca],
        vec!["report", "--admin", &url, "--admin-ca", &ca],
        asked,
    ];
    for args in &commands {
        let good = shown(&client);
        let (code, _, aside) = run_as_admin(args, &good.each_ref().map(|(name, value)| (*name, value.as_str()))).await;
        assert_eq!(code, Some(0), "{args:?}: {aside}");
        let bad = shown(&stranger);
        let refused = if args[0] == "health" { 1 } else { 69 };
        let (code, _, aside) = run_as_admin(args, &bad.each_ref().map(|(name, value)| (*name, value.as_str()))).await;
        assert_eq!(code, Some(refused), "{args:?}: {aside}");
        let (code, _, aside) = run_as_admin(args, &[]).await;
        assert_eq!(code, Some(refused), "{args:?}: {aside}");
        let key = text(&client.key);
        let by_flags =
            run_as_admin(&[&args[..], &["--admin-cert", &text(&client.cert), "--admin-key", &key]].concat(), &[]).await;
        assert_eq!(by_flags.0, Some(0), "{args:?}: {}", by_flags.2);
    }
}

#[tokio::test]
async fn its_certificates_change_without_a_restart_and_a_pair_that_does_not_fit_is_refused() {
    let (ours, next) = (CertificateAuthority::new(), CertificateAuthority::new());
    let (server, client, next_client) = (ours.vouch("server"), ours.vouch("client"), next.vouch("client"));
    let folder = tempfile::tempdir().unwrap();
    let [cert, key, clients] = ["cert.pem", "key.pem", "clients.pem"].map(|name| folder.path().join(name));
    replace(&server.cert, &cert);
    replace(&server.key, &key);
    replace(&ours.path(), &clients);
    let upstream = TestUpstream::start().await;
    let gateway = office(&upstream, &cert, &key, Some(&clients)).await;
    let seen =
        async |shows: &IssuedCertificate| ask(&gateway, &ours, Some(shows), "/healthz").await.map(|seen| seen.server);
    assert_eq!(seen(&client).await, Some(server.der.clone()));
    let renewed = ours.vouch("renewed");
    replace(&renewed.cert, &cert);
    let line = gateway.wait_for_log("the configuration in force stays").await;
    assert!(line.contains("admin.tls: "), "{line}");
    assert_eq!(seen(&client).await, Some(server.der), "the old pair serves");
    replace(&renewed.key, &key);
    replace(&next.path(), &clients);
    within("the new certificates", async {
        while seen(&next_client).await.is_none() {
            sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
    assert_eq!(seen(&next_client).await, Some(renewed.der.clone()));
    assert_eq!(seen(&client).await, None, "the old authority is gone");
    assert!(!gateway.logs().iter().any(|line| line.contains("needs_restart")), "{:#?}", gateway.logs());
    // TLS is not turned off without a restart.
    let plain = config(&cert, &key, None);
    let (before, after) = plain.split_once("[admin.tls]").unwrap();
    gateway.rewrite_config(&format!("{before}{}", &after[after.find("[store]").unwrap()..]));
    gateway.wait_for_log("needs_restart=\"admin.tls\"").await;
    assert!(get(gateway.admin_addr(), "/healthz").try_send().await.is_err());
    assert_eq!(seen(&next_client).await, Some(renewed.der));
}

#[tokio::test]
async fn the_consoles_cookie_is_secure_where_the_port_is() {
    let ours = CertificateAuthority::new();
    let server = ours.vouch("server");
    let upstream = TestUpstream::start().await;
    let gateway = office(&upstream, &server.cert, &server.key, None).await;
    let log_in = || {
        let request = Request::post("/login").header("host", "localhost").header("sec-fetch-site", "same-origin");
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        request.body(Full::new(Bytes::from(format!("token={ADMIN_TOKEN}")))).unwrap()
    };
    let seen = send_over_tls(gateway.admin_addr(), &ours, None, log_in()).await.expect("an answer");
    let cookie = seen.answer.headers()[header::SET_COOKIE].to_str().unwrap();
    assert!(cookie.ends_with("; Secure") && cookie.contains("HttpOnly; SameSite=Strict"), "{cookie}");
    let session = cookie.split_once(';').unwrap().0;
    let page = Request::get("/records").header("host", "localhost").header("cookie", session);
    let page = send_over_tls(gateway.admin_addr(), &ours, None, page.body(Full::default()).unwrap()).await;
    assert_eq!(page.expect("an answer").answer.status(), 200);
    let plain = start_gateway(&format!("[admin]\ntoken = {ADMIN_TOKEN:?}\n"), &upstream).await;
    let answer = post(plain.admin_addr(), "/login").header("content-type", "application/x-www-form-urlencoded");
    let answer = answer.header("sec-fetch-site", "same-origin").body(format!("token={ADMIN_TOKEN}")).send().await;
    let cookie = answer.header("set-cookie").expect("a cookie");
    assert!(!cookie.contains("Secure"), "a browser would keep it to itself: {cookie}");
}

#[tokio::test]
async fn an_open_port_without_tls_is_warned_of_by_check_and_by_serve() {
    let ours = CertificateAuthority::new();
    let server = ours.vouch("server");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ibid.toml");
    let part = "is reachable from other machines without TLS";
    let open = "listen = \"0.0.0.0:0\"\ntoken = \"token-of-the-admin\"\n";
    let tls = format!("[admin.tls]\ncert = {:?}\nkey = {:?}\n", server.cert, server.key);
    for (admin, warned) in [(open.to_owned(), true), (format!("{open}{tls}"), false), (tls, false)] {
        std::fs::write(&file, format!("upstream = \"http://127.0.0.1:1\"\n[admin]\n{admin}")).unwrap();
        let (code, out, aside) = run_as_admin(&["check", file.to_str().unwrap()], &[]).await;
        assert_eq!((code, out.contains(part)), (Some(0), warned), "{out}{aside}");
        assert_eq!(out.contains(" (TLS), "), !warned, "{out}");
    }
    let upstream = TestUpstream::start().await;
    let config = format!("store.url = \"memory:\"\n[admin]\n{open}");
    let gateway = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).without_admin().start().await;
    gateway.wait_for_log(part).await;
    for (text, told) in [
        ("cert = \"x\"", "admin.tls.key: missing; [admin.tls] needs a cert and a key"),
        ("key = \"x\"", "admin.tls.cert: missing; [admin.tls] needs a cert and a key"),
        ("cert = \"/no/such\"\nkey = \"x\"", "admin.tls.cert: cannot read \"/no/such\""),
        ("cert = 7\nkey = \"x\"", "admin.tls.cert: found a number; allowed is text"),
        ("certificate = \"x\"", "admin.tls.certificate: unknown key; allowed are \"cert\" \"key\" \"client_ca\""),
    ] {
        std::fs::write(&file, format!("upstream = \"http://127.0.0.1:1\"\n[admin.tls]\n{text}\n")).unwrap();
        let (code, _, said) = run_as_admin(&["check", file.to_str().unwrap()], &[]).await;
        assert!(code == Some(64) && said.contains(told), "{text}: {said}");
    }
}
