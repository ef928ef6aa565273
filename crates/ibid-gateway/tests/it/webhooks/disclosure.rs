//! What operators and senders are shown of a route for webhooks, and what nobody is.

use testbed::{client, process::ProcessSignal};

use super::common::{OTHER_SECRET, SECRET, SENDERS, SignedDelivery, WebhookSender, now, routes};
use crate::support::{TestGateway, run_ibid};

/// What must be nowhere: the secrets, as they are written and as they are used.
const SECRETS: [&str; 4] = [
    "cGxhbnRlZC1zZWNyZXQtb2YtMjQtYnl0ZXM",
    "planted-secret-of-24-bytes",
    "b3RoZXItc2VjcmV0LXRoYXQtdGFrZXMtb3Zlcg",
    "other-secret-that-takes-over",
];

#[track_caller]
fn assert_no_secret(text: &str) {
    for secret in SECRETS {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
}

async fn check(config: &str) -> (Option<i32>, String) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("upstream = \"http://127.0.0.1:3000\"\n{config}")).unwrap();
    let env = [("HOOK_SECRET", SECRET), ("OTHER_SECRET", OTHER_SECRET)];
    let output = run_ibid(&["check", file.path().to_str().unwrap()], &env).await;
    (output.code, output.all())
}

#[tokio::test]
async fn check_shows_the_preset_and_how_many_secrets_there_are() {
    let config = routes("").replace("[\"env:HOOK_SECRET\"]", "[\"env:HOOK_SECRET\", \"env:OTHER_SECRET\"]");
    let (code, text) = check(&config).await;
    assert_eq!(code, Some(0), "{text}");
    assert_no_secret(&text);
    for sender in SENDERS {
        let name = sender.name();
        let route = text.split(&format!("(preset webhook:{name})")).nth(1).expect("the route is shown");
        let route = route.split("\n\n").next().unwrap().to_owned() + "\n";
        assert!(route.contains(&format!("\n  signature       {name}\n  secrets         2\n")), "{route}");
        assert_eq!(route.contains("\n  tolerance       5m\n"), sender.has_time(), "{route}");
        assert!(!route.contains("\n* "), "nothing but the preset: {route}");
    }
    assert!(!text.contains("warnings"), "{text}");
}

#[tokio::test]
async fn check_warns_of_deliveries_from_anybody() {
    let config = "[[route]]\nmatch = \"POST /hooks\"\npreset = \"webhook:github\"\nunsigned = true\n";
    let (code, text) = check(config).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("\n* signature       none: deliveries are taken from anybody\n"), "{text}");
    assert!(text.contains("route[1] (POST /hooks): unsigned: whoever knows the address can send deliveries"), "{text}");
}

#[tokio::test]
async fn no_secret_is_in_an_error() {
    for (dials, told) in [
        ("preset = \"webhook:standard\"\nsecrets = [\"planted-secret-of-24-bytes\"]", "secrets[1]: it is no secret"),
        (
            "preset = \"webhook:standard\"\nsecrets = \"whpk_cGxhbnRlZC1zZWNyZXQtb2YtMjQtYnl0ZXM=\"",
            "secrets[1]: it is one of a key pair",
        ),
        ("preset = \"webhook:custom\"\nsignature = \"planted-secret-of-24-bytes\"", "signature: found text"),
        ("preset = \"ietf\"\nsecrets = \"env:HOOK_SECRET\"", "secrets: only presets for webhooks"),
        ("preset = \"webhook:github\"\nunsigned = true\nsecrets = \"env:HOOK_SECRET\"", "secrets: there is nothing"),
        ("preset = \"webhook:github\"\nsecrets = { a = \"planted-secret-of-24-bytes\" }", "secrets: found a table"),
    ] {
        let (code, text) = check(&format!("[[route]]\nmatch = \"POST /hooks\"\n{dials}\n")).await;
        assert_eq!(code, Some(64), "{text}");
        assert!(text.contains(told), "{text}");
        assert_no_secret(&text);
    }
}

#[tokio::test]
async fn no_secret_and_no_signature_is_logged() {
    let config = format!("log = {{ level = \"trace\", format = \"json\" }}\n{}", routes(""));
    let mut bench = TestGateway::with_hook_secrets(&config).await;
    let mut signatures = Vec::new();
    for sender in SENDERS {
        let genuine = sender.delivery("evt_planted_id_of_the_delivery");
        let forged = SignedDelivery { secret: OTHER_SECRET, ..genuine.clone() };
        let stale = SignedDelivery { at: now() - 1000, ..genuine.clone() };
        for (delivery, statuses) in [(&forged, [401, 401]), (&genuine, [201, 201]), (&stale, [401, 201])] {
            let answer = delivery.request(&bench).send().await;
            assert!(statuses.contains(&answer.status), "{answer:?}");
            let signature =
                delivery.headers().into_iter().find(|(name, _)| *name == sender.signature_header()).unwrap();
            assert!(!answer.text().contains(&signature.1), "{answer:?}");
            assert_no_secret(&answer.text());
            signatures.push(signature.1);
        }
    }
    bench.gateway.signal(ProcessSignal::Term);
    bench.gateway.wait_exit(std::time::Duration::from_secs(10)).await;
    let log = bench.gateway.logs().join("\n");
    assert_no_secret(&log);
    assert!(!log.contains("planted_id_of"), "ids are masked: {log}");
    assert!(signatures.iter().all(|signature| !log.contains(signature.as_str())));
    assert!(log.contains("evt_****very") && log.contains("identity-invalid"), "{log}");
}

#[tokio::test]
async fn the_contract_says_how_a_sender_signs() {
    let bench = TestGateway::webhooks("").await;
    let ask = |kind: &str| client::get(bench.gateway.addr(), "/.well-known/idempotency").header("Accept", kind);
    let json = ask("application/json").send().await;
    assert_no_secret(&json.text());
    let routes = json.json()["routes"].as_array().unwrap().clone();
    for (sender, route) in SENDERS.into_iter().zip(&routes) {
        assert_eq!(route["path"], sender.path());
        assert_eq!(route["signature"]["scheme"], sender.name());
        let headers = route["signature"]["headers"].as_array().unwrap();
        assert!(headers.iter().any(|header| header.as_str().unwrap().eq_ignore_ascii_case(sender.signature_header())));
        assert_eq!(route["signature"]["tolerance_seconds"].as_u64(), sender.has_time().then_some(300));
        let refusals = route["refusals"].as_array().unwrap();
        let status = |name: &str| refusals.iter().find(|refusal| refusal["name"] == name).map(|known| &known["status"]);
        assert_eq!(status("identity-invalid"), Some(&401.into()));
        assert_eq!(status("in-progress"), Some(&503.into()));
        assert_eq!(status("key-reused"), None);
    }
    let html = ask("text/html").send().await.text();
    assert_no_secret(&html);
    for part in
        ["<dt>Signed</dt><dd>As GitHub has it (X-Hub-Signature-256)</dd>", "webhook-signature, v1); at most 5 minutes"]
    {
        assert!(html.contains(part), "{part}");
    }
}

/// The key is the sender's id: what operators see of it is masked, as every key.
#[tokio::test]
async fn a_refusal_has_the_masked_id() {
    let bench = TestGateway::webhooks("").await;
    let forged = SignedDelivery {
        secret: OTHER_SECRET,
        ..WebhookSender::GitHub.delivery("72d3162e-cc78-11e3-81ab-4c9367dc0958")
    };
    assert_eq!(forged.request(&bench).send().await.json()["key"], "72d3****0958");
}
