//! Callers known by the verified claims of their tokens.

mod keys;
mod signer;

use serde_json::{Value, json};
use testbed::{
    client::{TestRequest, TestResponse, post},
    grpc::{GrpcTestClient, message},
    process::GatewayProcess,
    upstream::TestUpstream,
};

use self::signer::{ISSUER, SECRET, TokenSigner, base64url, claims, now};
use crate::support::{BIN, assert_ran, assert_refused, assert_replay};

/// A gateway that knows callers by `sub`, with this in `[jwt]` and these dials.
async fn gateway(upstream: &TestUpstream, jwt: &str, dials: &str) -> GatewayProcess {
    let config = format!("[log]\nlevel = \"trace\"\n[jwt]\n{jwt}\n[policy]\npreset = \"ietf\"\n{dials}\n");
    let launch = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).env("JWT_SECRET", SECRET);
    launch.arg("--store").arg("memory:").start().await
}

const SCOPE_BY_SUB: &str = "scope = [\"jwt:sub\"]";

fn secret_config() -> String {
    format!("secret = \"env:JWT_SECRET\"\nissuer = \"{ISSUER}\"")
}

fn pay(gateway: &GatewayProcess, token: &str, key: &str) -> TestRequest {
    post(gateway.addr(), "/pay").header("Authorization", format!("Bearer {token}")).key(key).json("{}")
}

/// The token is not believed, and the client is told how to do better.
#[track_caller]
fn assert_token_rejected(answer: &TestResponse, why: &str) {
    assert_refused(answer, 401, "identity-invalid");
    assert_eq!(answer.header("www-authenticate"), Some("Bearer error=\"invalid_token\""), "{answer:?}");
    let detail = answer.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains(why), "{why}: {detail}");
}

#[tokio::test]
async fn every_algorithm_is_verified_and_a_refreshed_token_is_the_same_caller() {
    for signer in
        [TokenSigner::secret(), TokenSigner::rsa(), TokenSigner::p256(), TokenSigner::p384(), TokenSigner::ed()]
    {
        let upstream = TestUpstream::start().await;
        let jwt = match &signer {
            TokenSigner::Secret(_) => secret_config(),
            public => format!("pem = '''{}'''\nissuer = \"{ISSUER}\"", public.pem()),
        };
        let gateway = gateway(&upstream, &jwt, SCOPE_BY_SUB).await;
        for (before, algorithm) in signer.algorithms().iter().enumerate() {
            let sign = |claims: &Value| signer.signed(&json!({ "alg": algorithm, "typ": "JWT" }), claims);
            let first = pay(&gateway, &sign(&claims(algorithm)), "k-1").send().await;
            assert_ran(&first);
            let mut refreshed = claims(algorithm);
            refreshed["exp"] = json!(now() + 900);
            refreshed["jti"] = json!("another");
            assert_replay(&pay(&gateway, &sign(&refreshed), "k-1").send().await, &first);
            let other = pay(&gateway, &sign(&claims(&format!("not-{algorithm}"))), "k-1").send().await;
            assert_ran(&other);
            assert_ne!(other.body, first.body, "another subject's key is another key");
            assert_eq!(upstream.executions(), 2 * (before + 1), "{algorithm}");
            let mut forged = sign(&claims("somebody"));
            forged.replace_range(forged.len() - 8.., "AAAAAAAA");
            assert_token_rejected(&pay(&gateway, &forged, "k-2").send().await, "its signature is invalid");
        }
    }
}

#[tokio::test]
async fn the_key_decides_which_algorithm_is_good_for_it() {
    let (rsa, ec) = (TokenSigner::rsa(), TokenSigner::p256());
    let upstream = TestUpstream::start().await;
    let public = gateway(&upstream, &format!("pem = '''{}'''", rsa.pem()), SCOPE_BY_SUB).await;
    // The public key as a secret, with and without the newline that `file:` takes off.
    for secret in [rsa.pem(), rsa.pem().trim_end().to_owned()] {
        let forged = TokenSigner::Secret(secret.into()).token(&claims("u1"));
        assert_token_rejected(&pay(&public, &forged, "k-1").send().await, "HS256 is no algorithm for the key");
    }
    assert_token_rejected(
        &pay(&public, &ec.token(&claims("u1")), "k-1").send().await,
        "ES256 is no algorithm for the key",
    );
    let shared = gateway(&upstream, &secret_config(), SCOPE_BY_SUB).await;
    assert_token_rejected(
        &pay(&shared, &rsa.token(&claims("u1")), "k-1").send().await,
        "RS256 is no algorithm for the key",
    );
    for (gateway, header) in [(&public, r#"{"alg":"none"}"#), (&shared, r#"{"alg":"None"}"#), (&shared, "{}")] {
        for signature in ["", ".", ".AAAA"] {
            let token = format!("{}.{}{signature}", base64url(header), base64url(claims("u1").to_string()));
            assert_token_rejected(&pay(gateway, &token, "k-1").send().await, "not a signed token");
        }
    }
    // A key that the token brings along is nobody's.
    let own = json!({ "alg": "ES256", "jwk": ec.jwk("mine"), "jku": "http://127.0.0.1:1/", "kid": "mine" });
    assert_token_rejected(&pay(&public, &ec.signed(&own, &claims("u1")), "k-1").send().await, "ES256 is no algorithm");
    let crit = json!({ "alg": "HS256", "crit": ["b64"], "b64": false });
    let token = TokenSigner::secret().signed(&crit, &claims("u1"));
    assert_token_rejected(&pay(&shared, &token, "k-1").send().await, "extensions (crit)");
    assert_eq!(upstream.requests(), 0);
    assert_ran(&pay(&public, &rsa.token(&claims("u1")), "k-1").send().await);
}

#[tokio::test]
async fn what_is_not_believed_is_refused_before_anything_is_claimed() {
    let upstream = TestUpstream::start().await;
    let jwt = format!("{}\naudience = [\"shop\", \"till\"]\nleeway = \"5s\"", secret_config());
    let gateway = gateway(&upstream, &jwt, SCOPE_BY_SUB).await;
    let good = json!({ "iss": ISSUER, "aud": "till", "sub": "u1", "exp": now() + 300 });
    let with = |name: &str, value: Value| {
        let mut claims = good.clone();
        claims[name] = value;
        TokenSigner::secret().token(&claims)
    };
    for (token, why) in [
        (with("exp", json!(now() - 30)), "it has expired"),
        (with("exp", Value::Null), "no claim \"exp\""),
        (with("exp", json!("soon")), "no claim \"exp\""),
        (with("nbf", json!(now() + 60)), "not valid yet"),
        (with("iss", json!("https://evil.example")), "another issuer"),
        (with("iss", Value::Null), "no claim \"iss\""),
        (with("aud", json!("bank")), "for another audience"),
        (with("aud", Value::Null), "no claim \"aud\""),
        (TokenSigner::Secret(b"another-secret-of-somebody-else-0123".to_vec()).token(&good), "signature is invalid"),
        ("garbage".into(), "not a signed token"),
        (String::new(), "there is none"),
    ] {
        assert_token_rejected(&pay(&gateway, &token, "k-1").send().await, why);
    }
    let bare = || post(gateway.addr(), "/pay").key("k-1").json("{}");
    assert_token_rejected(&bare().send().await, "there is none");
    assert_token_rejected(&bare().header("Authorization", "Basic dTpw").send().await, "there is none");
    let token = TokenSigner::secret().token(&good);
    let twice = pay(&gateway, &token, "k-1").header("Authorization", "Bearer x").send().await;
    assert_refused(&twice, 400, "request-ambiguous");
    for value in [Value::Null, json!(""), json!(1.5), json!(true)] {
        assert_refused(&pay(&gateway, &with("sub", value), "k-1").send().await, 400, "scope-missing");
    }
    for value in [json!(["u1"]), json!({ "id": "u1" })] {
        assert_token_rejected(&pay(&gateway, &with("sub", value), "k-1").send().await, "not a signed token");
    }
    // The key is looked at first.
    assert_refused(&post(gateway.addr(), "/pay").key("a, b").json("{}").send().await, 400, "key-invalid");
    assert_eq!(upstream.requests(), 0);
    // Nothing of all that used up the key; clocks may differ a little; numbers name callers as well.
    let first = pay(&gateway, &token, "k-1").send().await;
    assert_ran(&first);
    assert_replay(&pay(&gateway, &with("exp", json!(now() - 2)), "k-1").send().await, &first);
    assert_replay(&pay(&gateway, &with("aud", json!(["bank", "shop"])), "k-1").send().await, &first);
    assert_ran(&pay(&gateway, &with("sub", json!(42)), "k-1").send().await);
    // Without a key nothing is remembered, so nobody need say who they are.
    assert_eq!(post(gateway.addr(), "/pay").json("{}").send().await.status, 201);
}

#[tokio::test]
async fn a_token_is_found_in_every_place_that_is_configured() {
    let upstream = TestUpstream::start().await;
    let from = "from = [\"header:Authorization\", \"cookie:sb-access-token\", \"header:X-Token\"]";
    let gateway = gateway(&upstream, &format!("{}\n{from}", secret_config()), SCOPE_BY_SUB).await;
    let token = TokenSigner::secret().token(&claims("u1"));
    let bare = || post(gateway.addr(), "/pay").key("k-1").json("{}");
    let first = pay(&gateway, &token, "k-1").send().await;
    assert_ran(&first);
    assert_replay(&bare().header("Cookie", format!("a=1; sb-access-token={token}")).send().await, &first);
    assert_replay(&bare().header("X-Token", token.clone()).send().await, &first);
    assert_replay(&bare().header("X-Token", format!("Bearer {token}")).send().await, &first);
    // The first place that is present counts, whatever the others hold.
    let other = TokenSigner::secret().token(&claims("u2"));
    let both = bare().header("Cookie", format!("sb-access-token={token}")).header("X-Token", other.clone());
    assert_replay(&both.send().await, &first);
    let bad = bare().header("Authorization", "Bearer garbage").header("X-Token", token.clone());
    assert_token_rejected(&bad.send().await, "not a signed token");
    let twice = bare().header("Cookie", format!("sb-access-token={token}; sb-access-token={other}"));
    assert_refused(&twice.send().await, 400, "request-ambiguous");
    assert_token_rejected(
        &bare().send().await,
        "Authorization: Bearer TOKEN or cookie \"sb-access-token\" or header x-token",
    );
    // A cookie whose name only begins like it is another cookie.
    assert_token_rejected(&bare().header("Cookie", format!("sb-access-token2={token}")).send().await, "there is none");
}

#[tokio::test]
async fn neither_tokens_nor_secrets_are_ever_logged() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway(&upstream, &secret_config(), SCOPE_BY_SUB).await;
    let token = TokenSigner::secret().token(&claims("u1"));
    assert_ran(&pay(&gateway, &token, "k-1").send().await);
    let mut forged = token.clone();
    forged.replace_range(token.len() - 8.., "AAAAAAAA");
    assert_token_rejected(&pay(&gateway, &forged, "k-1").send().await, "signature");
    gateway.wait_for_log("identity-invalid").await;
    let parts: Vec<&str> = token.split('.').collect();
    for line in gateway.logs() {
        for secret in [SECRET, parts[1], parts[2]] {
            assert!(!line.contains(secret), "{line}");
        }
    }
}

#[tokio::test]
async fn a_key_that_names_its_user_is_good_for_that_user_only() {
    let upstream = TestUpstream::start().await;
    let by_label = "key.format = \"operation\"\nscope = [\"global\"]\nlabel.user = \"jwt:sub\"";
    let by_scope = "key.format = \"operation\"\nscope = [\"jwt:sub\"]";
    let by_header = "key.format = \"operation\"\nscope = [\"header:X-User-Id\"]";
    let in_body = "key.from = [\"json:/id\"]\nkey.format = \"operation\"\nscope = [\"jwt:sub\"]";
    let token = TokenSigner::secret().token(&claims("u1"));
    for dials in [by_label, by_scope] {
        let gateway = gateway(&upstream, &secret_config(), dials).await;
        let before = upstream.requests();
        assert_refused(&pay(&gateway, &token, "u2:pay:r1:17").send().await, 403, "scope-refused");
        assert_refused(&pay(&gateway, &token, "u11:pay:r1:17").send().await, 403, "scope-refused");
        assert_refused(&pay(&gateway, "bad", "u2:pay:r1:17").send().await, 401, "identity-invalid");
        assert_eq!(upstream.requests(), before);
        let first = pay(&gateway, &token, "u1:pay:r1:17").send().await;
        assert_ran(&first);
        assert_replay(&pay(&gateway, &token, "u1:pay:r1:17").send().await, &first);
    }
    let headed = gateway(&upstream, &secret_config(), by_header).await;
    let named = |user: &str| post(headed.addr(), "/pay").header("X-User-Id", user).key("u1:pay:r1:17").json("{}");
    assert_refused(&named("u2").send().await, 403, "scope-refused");
    assert_ran(&named("u1").send().await);
    let bodied = gateway(&upstream, &secret_config(), in_body).await;
    let sent = |id: &str| {
        let request = post(bodied.addr(), "/pay").header("Authorization", format!("Bearer {token}"));
        request.json(&json!({ "id": id }).to_string())
    };
    assert_refused(&sent("u2:pay:r1:17").send().await, 403, "scope-refused");
    assert_ran(&sent("u1:pay:r1:17").send().await);
}

#[tokio::test]
async fn a_call_with_a_bad_token_is_unauthenticated() {
    let upstream = TestUpstream::start_h2c().await;
    let config = format!(
        "[jwt]\n{}\n[[route]]\nmatch = \"grpc shop.Orders/Create\"\npreset = \"platform\"\nscope = [\"jwt:sub\"]\n",
        secret_config()
    );
    let launch = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).env("JWT_SECRET", SECRET);
    let gateway = launch.start().await;
    let client = GrpcTestClient::connect(gateway.addr()).await;
    let key = ("idempotency-key", "key-1");
    let expired = TokenSigner::secret().token(&json!({ "iss": ISSUER, "sub": "u1", "exp": now() - 600 }));
    for authorization in ["Bearer x".to_owned(), format!("Bearer {expired}")] {
        let call = client.call("/shop.Orders/Create", &[key, ("authorization", &authorization)], message("ten")).await;
        call.assert_refused(16, "IDENTITY_INVALID");
    }
    assert_eq!(upstream.requests(), 0);
    let good = format!("Bearer {}", TokenSigner::secret().token(&claims("u1")));
    client.call("/shop.Orders/Create", &[key, ("authorization", &good)], message("ten")).await;
    assert_eq!(upstream.requests(), 1);
}

#[tokio::test]
async fn in_shadow_mode_a_bad_token_refuses_nobody() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway(&upstream, &secret_config(), &format!("{SCOPE_BY_SUB}\nmode = \"shadow\"")).await;
    assert_eq!(pay(&gateway, "bad", "k-1").send().await.status, 201);
    assert_eq!(upstream.executions(), 1);
}
