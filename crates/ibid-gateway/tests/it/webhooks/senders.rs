//! The senders' own libraries: what they sign is believed, and what this suite signs they believe.

use std::{path::Path, process::Stdio, time::Duration};

use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, process::Command, time::timeout};

use super::common::{OTHER_SECRET, SECRET, SignedDelivery, WebhookSender, now};
use crate::support::{TestGateway, assert_ran, assert_refused, assert_replay};

/// Whose libraries are there. GitHub and Shopify have none that signs in a general language's package.
const WITH_A_LIBRARY: [WebhookSender; 3] = [WebhookSender::Standard, WebhookSender::Svix, WebhookSender::Stripe];

/// A body with everything that careless code would change on its way.
const BODY: &str = "{ \"id\": \"evt_real\",\t\"n\": 1.50, \"text\": \"\u{e9}\\u00e9 \u{1f600}\", \"a\":[ ] }\n";

/// Asks `sign.py`, which hands the question to the library.
async fn library(question: Value) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("../../target/webhook-senders/bin/python");
    assert!(
        python.exists(),
        "{} is missing: `scripts/test` installs the senders' libraries (tests/webhooks/requirements.txt) there",
        python.display()
    );
    let mut command = Command::new(python);
    command.arg(root.join("tests/webhooks/sign.py")).kill_on_drop(true);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("python runs");
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(question.to_string().as_bytes()).await.unwrap();
    drop(stdin);
    let output = timeout(Duration::from_secs(60), child.wait_with_output()).await.expect("it answers").unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "the senders' libraries are not as they should be; run scripts/test once: {told}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|why| panic!("{why}: {told}"))
}

async fn signed_by_library(
    sender: WebhookSender, id: &str, at: u64, secret: &str, body: &str,
) -> Vec<(&'static str, String)> {
    let question = json!({"do": "sign", "sender": sender.name(), "secret": secret, "id": id, "at": at, "body": body});
    let answer = library(question).await;
    let headers = answer["headers"].as_object().expect("headers");
    headers.iter().map(|(name, value)| (&*name.clone().leak(), value.as_str().unwrap().to_owned())).collect()
}

#[tokio::test]
async fn what_the_senders_libraries_sign_is_believed_and_told_apart_from_forgeries() {
    let bench = TestGateway::webhooks("").await;
    for sender in WITH_A_LIBRARY {
        let delivery = SignedDelivery { body: BODY.into(), ..sender.delivery("evt_real") };
        let sign = |at, secret| signed_by_library(sender, "evt_real", at, secret, BODY);
        let forged = sign(now(), OTHER_SECRET).await;
        assert_refused(&delivery.request_with_headers(&bench, forged).send().await, 401, "identity-invalid");
        let stale = sign(now() - 301 - 60, SECRET).await;
        assert_refused(&delivery.request_with_headers(&bench, stale).send().await, 401, "identity-invalid");
        let first = delivery.request_with_headers(&bench, sign(now(), SECRET).await).send().await;
        assert_ran(&first);
        assert_eq!(bench.upstream.last().text(), BODY);
        assert_replay(&delivery.request_with_headers(&bench, sign(now() + 30, SECRET).await).send().await, &first);
    }
    bench.assert_executed(WITH_A_LIBRARY.len());
}

/// This suite's own signatures are what the senders mean, or its other tests would prove nothing.
#[tokio::test]
async fn what_this_suite_signs_the_senders_libraries_believe() {
    for sender in WITH_A_LIBRARY {
        let delivery = SignedDelivery { body: BODY.into(), ..sender.delivery("evt_real") };
        let verify = |delivery: SignedDelivery, body: &str| {
            let headers: serde_json::Map<_, _> =
                delivery.headers().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
            library(
                json!({"do": "verify", "sender": sender.name(), "secret": SECRET, "headers": headers, "body": body}),
            )
        };
        assert_eq!(verify(delivery.clone(), BODY).await["believed"], true, "{sender:?}");
        assert_eq!(verify(delivery.clone(), &BODY.replace("1.50", "9.50")).await["believed"], false, "{sender:?}");
        let forged = SignedDelivery { secret: OTHER_SECRET, ..delivery };
        assert_eq!(verify(forged, BODY).await["believed"], false, "{sender:?}");
    }
}
