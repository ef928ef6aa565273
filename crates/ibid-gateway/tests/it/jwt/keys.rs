//! Where the keys come from, and what happens when they change or cannot be had.

use std::{sync::Arc, time::Duration};

use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use serde_json::json;
use testbed::{
    certificates::CertificateAuthority,
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use super::{
    SCOPE_BY_SUB, assert_token_rejected, gateway, pay,
    signer::{ISSUER, TokenSigner, claims},
};
use crate::{
    support::tls::strict_server,
    support::{assert_ran, assert_refused, assert_replay, within},
};

use crate::support::run_ibid;

/// What an issuer publishes: its keys, and some that are not for us.
fn key_set(keys: &[(&str, &TokenSigner)]) -> String {
    let others = [json!({ "kty": "future", "kid": "x" }), json!({ "kty": "oct", "kid": "y", "k": "c2VjcmV0" })];
    let keys: Vec<_> = keys.iter().map(|(kid, signer)| signer.jwk(kid)).chain(others).collect();
    json!({ "keys": keys }).to_string()
}

fn publish_keys(issuer: &TestUpstream, keys: &[(&str, &TokenSigner)]) {
    issuer.on("/jwks", UpstreamReply::status(200).json(&key_set(keys)));
}

/// Asks until the answer is as wanted: the gateway looks again after a pause.
async fn wait_for_status(
    gateway: &GatewayProcess, token: &str, key: &str, status: u16,
) -> testbed::client::TestResponse {
    within("the gateway to look again", async {
        loop {
            let answer = pay(gateway, token, key).send().await;
            if answer.status == status {
                return answer;
            }
            sleep(Duration::from_millis(50)).await;
        }
    })
    .await
}

#[tokio::test]
async fn keys_of_every_kind_are_taken_from_a_url_and_rotate_by_their_names() {
    let (issuer, upstream) = (TestUpstream::start().await, TestUpstream::start().await);
    let (a, b) = (TokenSigner::rsa(), TokenSigner::p384());
    publish_keys(&issuer, &[("a", &a), ("ed", &TokenSigner::ed())]);
    let jwt = format!("jwks = \"{}/jwks\"\nissuer = \"{ISSUER}\"\nrefresh = \"1s\"", issuer.url());
    let gateway = gateway(&upstream, &jwt, SCOPE_BY_SUB).await;
    let first = pay(&gateway, &a.token_with_kid("a", &claims("u1")), "k-1").send().await;
    assert_ran(&first);
    assert_token_rejected(&pay(&gateway, &b.token_with_kid("b", &claims("u1")), "k-1").send().await, "no key is known");
    assert_token_rejected(
        &pay(&gateway, &b.token_with_kid("a", &claims("u1")), "k-1").send().await,
        "ES384 is no algorithm",
    );
    publish_keys(&issuer, &[("b", &b)]);
    // The same caller, by a token that the new key has signed; the old key is gone with its name.
    assert_replay(&wait_for_status(&gateway, &b.token_with_kid("b", &claims("u1")), "k-1", 201).await, &first);
    assert_replay(&pay(&gateway, &b.token(&claims("u1")), "k-1").send().await, &first);
    assert_token_rejected(&pay(&gateway, &a.token_with_kid("a", &claims("u1")), "k-1").send().await, "no key is known");
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn known_keys_stay_while_the_url_is_down_and_made_up_names_are_no_flood() {
    let (issuer, upstream) = (TestUpstream::start().await, TestUpstream::start().await);
    let a = TokenSigner::p256();
    publish_keys(&issuer, &[("a", &a)]);
    let jwt = format!("jwks = \"{}/jwks\"", issuer.url());
    let gateway = gateway(&upstream, &jwt, SCOPE_BY_SUB).await;
    assert_ran(&pay(&gateway, &a.token_with_kid("a", &claims("u1")), "k-1").send().await);
    for n in 0..20 {
        let made_up = a.token_with_kid(&format!("made-up-{n}"), &claims("u1"));
        assert_token_rejected(&pay(&gateway, &made_up, "k-2").send().await, "no key is known");
    }
    assert!(issuer.requests() <= 3, "twenty names, {} fetches", issuer.requests());
    for broken in [
        UpstreamReply::status(500).body("oops"),
        UpstreamReply::status(200).json("{}"),
        UpstreamReply::status(200).json(r#"{"keys":[]}"#),
    ] {
        issuer.on("/jwks", broken);
        assert_eq!(pay(&gateway, &a.token_with_kid("a", &claims("u1")), "k-1").send().await.status, 201);
    }
    issuer.stop().await;
    assert_eq!(pay(&gateway, &a.token_with_kid("a", &claims("u1")), "k-1").send().await.status, 201);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_url_that_breaks_leaves_the_known_keys_in_force() {
    let (issuer, upstream) = (TestUpstream::start().await, TestUpstream::start().await);
    let a = TokenSigner::ed();
    publish_keys(&issuer, &[("a", &a)]);
    let gateway =
        gateway(&upstream, &format!("jwks = \"{}/jwks\"\nrefresh = \"100ms\"", issuer.url()), SCOPE_BY_SUB).await;
    let token = a.token_with_kid("a", &claims("u1"));
    assert_ran(&pay(&gateway, &token, "k-1").send().await);
    issuer.on("/jwks", UpstreamReply::status(200).json(r#"{"keys":[]}"#));
    gateway.wait_for_log("the known ones stay").await;
    assert_eq!(pay(&gateway, &token, "k-1").send().await.status, 201);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn while_no_key_could_be_fetched_nothing_runs_and_nobody_is_called_a_forger() {
    let (issuer, upstream) = (TestUpstream::start().await, TestUpstream::start().await);
    let a = TokenSigner::p256();
    issuer.on("/jwks", UpstreamReply::status(503));
    let jwt = format!("jwks = \"{}/jwks\"\nrefresh = \"200ms\"", issuer.url());
    let gateway = gateway(&upstream, &jwt, &format!("{SCOPE_BY_SUB}\non_store_down = \"open\"")).await;
    let token = a.token_with_kid("a", &claims("u1"));
    assert_refused(&pay(&gateway, &token, "k-1").send().await, 503, "store-unavailable");
    assert_eq!(upstream.requests(), 0);
    publish_keys(&issuer, &[("a", &a)]);
    assert_ran(&wait_for_status(&gateway, &token, "k-1", 201).await);
}

#[tokio::test]
async fn keys_come_over_tls_only_from_a_server_that_somebody_vouches_for() {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let strangers = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let (tls, listener) = (TlsAcceptor::from(Arc::new(tls)), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let a = TokenSigner::p256();
    let body = key_set(&[("a", &a)]);
    let url = format!("https://localhost:{}/jwks", listener.local_addr().unwrap().port());
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let (tls, body) = (tls.clone(), body.clone());
            tokio::spawn(async move {
                let Ok(mut stream) = tls.accept(tcp).await else { return };
                let _ = stream.read(&mut [0; 4096]).await;
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
                let _ = stream.write_all((head + &body).as_bytes()).await;
                let _ = stream.shutdown().await;
            });
        }
    });
    let upstream = TestUpstream::start().await;
    let by = |ca: String| format!("jwks = \"{url}\"\nca = '''{ca}'''\nrefresh = \"200ms\"");
    let token = a.token_with_kid("a", &claims("u1"));
    let deceived = gateway(&upstream, &by(strangers.cert.pem()), SCOPE_BY_SUB).await;
    assert_refused(&pay(&deceived, &token, "k-1").send().await, 503, "store-unavailable");
    assert_eq!(upstream.requests(), 0);
    let gateway = gateway(&upstream, &by(made.cert.pem()), SCOPE_BY_SUB).await;
    assert_ran(&wait_for_status(&gateway, &token, "k-1", 201).await);
}

#[tokio::test]
async fn an_issuer_that_asks_is_shown_a_certificate() {
    let (ours, clients) = (CertificateAuthority::new(), CertificateAuthority::new());
    let (server, shown) = (ours.vouch("server"), clients.vouch("gateway"));
    let a = TokenSigner::p256();
    let keys = key_set(&[("a", &a)]);
    let addr = strict_server(&server, &clients, move |_, _| (http::StatusCode::OK, keys.clone().into())).await;
    let upstream = TestUpstream::start().await;
    let bare =
        format!("jwks = \"https://localhost:{}/jwks\"\nca = {:?}\nrefresh = \"200ms\"", addr.port(), ours.path());
    let token = a.token_with_kid("a", &claims("u1"));
    let unknown = gateway(&upstream, &bare, SCOPE_BY_SUB).await;
    assert_refused(&pay(&unknown, &token, "k-1").send().await, 503, "store-unavailable");
    assert_eq!(upstream.requests(), 0);
    let showing = format!("{bare}\ncert = {:?}\nkey = {:?}", shown.cert, shown.key);
    let gateway = gateway(&upstream, &showing, SCOPE_BY_SUB).await;
    assert_ran(&wait_for_status(&gateway, &token, "k-1", 201).await);
}

#[tokio::test]
async fn a_file_of_keys_is_watched() {
    let upstream = TestUpstream::start().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jwks.json");
    let (a, b) = (TokenSigner::p256(), TokenSigner::rsa());
    std::fs::write(&path, key_set(&[("a", &a)])).unwrap();
    let gateway = gateway(&upstream, &format!("jwks = \"file:{}\"", path.display()), SCOPE_BY_SUB).await;
    assert_ran(&pay(&gateway, &a.token_with_kid("a", &claims("u1")), "k-1").send().await);
    assert_token_rejected(&pay(&gateway, &b.token_with_kid("b", &claims("u1")), "k-2").send().await, "no key is known");
    std::fs::write(&path, "half a fi").unwrap();
    gateway.wait_for_log("the configuration in force stays").await;
    assert_eq!(pay(&gateway, &a.token_with_kid("a", &claims("u1")), "k-1").send().await.status, 201);
    std::fs::write(&path, key_set(&[("b", &b)])).unwrap();
    assert_ran(&wait_for_status(&gateway, &b.token_with_kid("b", &claims("u1")), "k-2", 201).await);
    assert_token_rejected(&pay(&gateway, &a.token_with_kid("a", &claims("u1")), "k-1").send().await, "no key is known");
}

#[tokio::test]
async fn a_file_with_a_public_key_is_watched() {
    let upstream = TestUpstream::start().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("issuer.pem");
    let (a, b) = (TokenSigner::ed(), TokenSigner::p256());
    std::fs::write(&path, a.pem()).unwrap();
    let gateway = gateway(&upstream, &format!("pem = \"file:{}\"", path.display()), SCOPE_BY_SUB).await;
    let first = pay(&gateway, &a.token(&claims("u1")), "k-1").send().await;
    assert_ran(&first);
    assert_token_rejected(&pay(&gateway, &b.token(&claims("u1")), "k-1").send().await, "ES256 is no algorithm");
    std::fs::write(&path, b.pem()).unwrap();
    assert_replay(&wait_for_status(&gateway, &b.token(&claims("u1")), "k-1", 201).await, &first);
    assert_token_rejected(&pay(&gateway, &a.token(&claims("u1")), "k-1").send().await, "EdDSA is no algorithm");
    assert_eq!(upstream.executions(), 1);
}

/// With nothing but a token of a new key to tell that there is one: it is asked for long before the next refresh.
#[tokio::test]
async fn a_key_that_is_not_known_is_asked_for_at_once() {
    let (issuer, upstream) = (TestUpstream::start().await, TestUpstream::start().await);
    let (a, b) = (TokenSigner::p256(), TokenSigner::ed());
    publish_keys(&issuer, &[("a", &a)]);
    let gateway =
        gateway(&upstream, &format!("jwks = \"{}/jwks\"\nrefresh = \"24h\"", issuer.url()), SCOPE_BY_SUB).await;
    assert_ran(&pay(&gateway, &a.token_with_kid("a", &claims("u1")), "k-1").send().await);
    publish_keys(&issuer, &[("a", &a), ("b", &b)]);
    let token = b.token_with_kid("b", &claims("u1"));
    let asked = async {
        while pay(&gateway, &token, "k-2").send().await.status != 201 {
            sleep(Duration::from_millis(200)).await;
        }
    };
    // Not more often than every ten seconds.
    timeout(Duration::from_secs(40), asked).await.expect("the new key is fetched");
    assert!(issuer.requests() <= 4, "{} fetches", issuer.requests());
    assert_ran(&pay(&gateway, &a.token_with_kid("a", &claims("u1")), "k-3").send().await);
}

#[tokio::test]
async fn settings_that_cannot_be_are_told_in_one_line_without_the_secret() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ibid.toml");
    let policy = "[policy]\nscope = [\"jwt:sub\"]\n";
    for (jwt, told) in [
        ("", "policy: \"jwt:sub\" needs keys to verify tokens with; add [jwt]"),
        ("[jwt]\nissuer = \"x\"\n", "jwt: found no keys; allowed is one of \"secret\" \"pem\" \"jwks\""),
        ("[jwt]\nsecret = \"short-secret\"\n", "jwt.secret: it has 12 bytes; allowed is 32 and more"),
        ("[jwt]\nsecret = 4711\n", "jwt.secret: found a number; allowed is text that is not empty"),
        ("[jwt]\nsecret = \"planted-planted-planted-planted-1\"\njwks = \"{}\"\n", "jwt: found keys in two places"),
        ("[jwt]\njwks = \"{\\\"keys\\\":[]}\"\n", "jwt.jwks: there is no key in it that tokens can be verified with"),
        ("[jwt]\njwks = \"jwks.json\"\n", "jwt.jwks: it is no JWK set; allowed is \"file:PATH\" or a URL"),
        ("[jwt]\njwks = \"http://id.example.com/jwks\"\n", "the keys could be exchanged on the way; use https"),
        ("[jwt]\njwks = \"https://u:planted@id.example.com/jwks\"\n", "jwt.jwks: a URL with a user's name"),
        (
            "[jwt]\npem = \"-----BEGIN PRIVATE KEY-----\\nplanted\\n-----END PRIVATE KEY-----\"\n",
            "jwt.pem: there is a private key in it",
        ),
        ("[jwt]\nkeys = 1\n", "jwt.keys: unknown key, did you mean \"key\"?"),
    ] {
        std::fs::write(&path, format!("upstream = \"http://127.0.0.1:1\"\n{jwt}{policy}")).unwrap();
        let output = run_ibid(&["check", path.to_str().unwrap()], &[]).await;
        let text = format!("{output:?}");
        let shown = text.replace("\\\"", "\"");
        assert!(shown.contains(told), "{told}: {shown}");
        for secret in ["planted", "short-secret", "4711"] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}
