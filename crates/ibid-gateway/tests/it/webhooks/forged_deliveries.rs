//! What is not the sender's is refused, and leaves no trace: the genuine delivery with the same id runs.

use std::time::Duration;

use testbed::{
    client::{self, RawClient},
    process::ProcessSignal,
};

use super::common::{OTHER_SECRET, SENDERS, SignedDelivery, WebhookSender, hook_secrets, now, routes};
use crate::support::{TestGateway, assert_ran, assert_refused, run_ibid};

/// What is forged, and the delivery with its headers.
type ForgedDelivery = (&'static str, SignedDelivery, Vec<(&'static str, String)>);

fn forgeries(delivery: &SignedDelivery) -> Vec<ForgedDelivery> {
    let header = delivery.sender.signature_header();
    let genuine = delivery.headers();
    let signed = |signature: &dyn Fn(&str) -> String| {
        let with = |(name, value): (&'static str, String)| match name == header {
            true => (name, signature(&value)),
            false => (name, value),
        };
        genuine.clone().into_iter().map(with).collect::<Vec<_>>()
    };
    let other = SignedDelivery { secret: OTHER_SECRET, ..delivery.clone() };
    let tampered = SignedDelivery { body: delivery.body.replace("1.50", "9.50"), ..delivery.clone() };
    let spaced = SignedDelivery { body: format!("{} ", delivery.body), ..delivery.clone() };
    let mut all = vec![
        ("another secret", other.clone(), other.headers()),
        ("a changed body", tampered, genuine.clone()),
        ("a longer body", spaced, genuine.clone()),
        ("no signature", delivery.clone(), genuine.iter().filter(|(name, _)| *name != header).cloned().collect()),
        ("an empty signature", delivery.clone(), signed(&|_| String::new())),
        ("a cut signature", delivery.clone(), signed(&|value| value[..value.len() - 5].to_owned())),
        ("a signature of nothing", delivery.clone(), signed(&|_| "v1,".into())),
        ("something behind it", delivery.clone(), signed(&|value| format!("{value}A"))),
    ];
    // Shopify's signatures have no version.
    if delivery.sender != WebhookSender::Shopify {
        let version = |value: &str| value.replacen("v1", "v0", 1).replacen("sha256", "sha1", 1);
        all.push(("another version", delivery.clone(), signed(&version)));
    }
    if delivery.sender.has_time() {
        for at in [now() - 400, now() + 400, 0] {
            let stale = SignedDelivery { at, ..delivery.clone() };
            all.push(("another time", stale.clone(), stale.headers()));
        }
        let time = delivery.at.to_string();
        let shift =
            |(name, value): (&'static str, String)| (name, value.replace(&time, &(delivery.at + 1).to_string()));
        all.push(("a time that was not signed", delivery.clone(), genuine.into_iter().map(shift).collect()));
    }
    all
}

#[tokio::test]
async fn a_forged_delivery_leaves_no_trace() {
    let bench = TestGateway::webhooks("").await;
    for (count, sender) in SENDERS.into_iter().enumerate() {
        let delivery = sender.delivery("evt_1");
        for (what, forged, headers) in forgeries(&delivery) {
            let answer = forged.request_with_headers(&bench, headers).send().await;
            assert_refused(&answer, 401, "identity-invalid");
            assert!(!answer.headers.contains("retry-after"), "{what}: {answer:?}");
            bench.assert_executed(count);
        }
        assert_eq!(bench.upstream.requests(), count);
        assert_ran(&delivery.request(&bench).send().await);
        bench.assert_executed(count + 1);
    }
}

/// Not even for a moment: an entry that came and went would be in the log of this store.
#[tokio::test]
async fn a_forged_delivery_is_nowhere_in_the_store() {
    let launch = |launch| hook_secrets(launch).arg("--store").arg("embedded:data");
    let mut bench = TestGateway::launch(&routes(""), launch).await;
    for sender in SENDERS {
        for (_, forged, headers) in forgeries(&sender.delivery("evt_1")) {
            assert_refused(&forged.request_with_headers(&bench, headers).send().await, 401, "identity-invalid");
        }
    }
    let log = bench.gateway.dir().join("data");
    let written = || -> u64 {
        let files = std::fs::read_dir(&log).unwrap().map(|file| file.unwrap().path());
        let bytes = files.map(|file| std::fs::read(file).unwrap());
        bytes.flatten().filter(|byte| *byte != 0).count() as u64
    };
    let before = written();
    for sender in SENDERS {
        for (_, forged, headers) in forgeries(&sender.delivery("evt_2")) {
            assert_refused(&forged.request_with_headers(&bench, headers).send().await, 401, "identity-invalid");
        }
    }
    assert_eq!(written(), before, "forged deliveries were written down");
    assert_ran(&WebhookSender::GitHub.delivery("evt_1").request(&bench).send().await);
    assert!(written() > before, "a genuine one is");
    bench.gateway.signal(ProcessSignal::Term);
    bench.gateway.wait_exit(Duration::from_secs(10)).await;
    let dump = run_ibid(&["store", "dump", log.to_str().unwrap()], &[]).await;
    let dump = dump.text();
    assert_eq!(dump.lines().filter(|line| line.contains("/hooks/")).count(), 1, "{dump}");
}

/// Whoever has not signed learns nothing about what is remembered.
#[tokio::test]
async fn a_forged_delivery_does_not_get_the_remembered_answer() {
    let bench = TestGateway::webhooks("").await;
    for sender in SENDERS {
        let delivery = sender.delivery("evt_1");
        assert_ran(&delivery.request(&bench).send().await);
        for (_, forged, headers) in forgeries(&delivery) {
            assert_refused(&forged.request_with_headers(&bench, headers).send().await, 401, "identity-invalid");
        }
    }
    bench.assert_executed(SENDERS.len());
}

#[tokio::test]
async fn the_sender_is_told_what_is_wrong() {
    let bench = TestGateway::webhooks("").await;
    let detail = |answer: &client::TestResponse| answer.json()["detail"].as_str().unwrap().to_owned();
    let delivery = WebhookSender::Standard.delivery("evt_1");
    let stale = SignedDelivery { at: 1_614_265_330, ..delivery.clone() };
    let told = detail(&stale.request(&bench).send().await);
    assert_eq!(
        told,
        "the delivery is not believed: it was signed at 1614265330, more than 300s from now; every attempt has to be signed anew"
    );
    let headers = delivery.headers().into_iter().filter(|(name, _)| *name != "webhook-timestamp").collect();
    let told = detail(&delivery.request_with_headers(&bench, headers).send().await);
    assert_eq!(
        told,
        "the delivery is not believed: the header webhook-timestamp, which every signed delivery has, is missing"
    );
    let forged = SignedDelivery { secret: OTHER_SECRET, ..delivery };
    let told = detail(&forged.request(&bench).send().await);
    assert_eq!(
        told,
        "the delivery is not believed: no signature in the header webhook-signature is one of this body under a secret of \
         this route"
    );
}

#[tokio::test]
async fn a_delivery_without_its_id_is_a_400() {
    let bench = TestGateway::webhooks("").await;
    for sender in SENDERS {
        let delivery = sender.delivery("evt_1");
        let ids = ["webhook-id", "svix-id", "X-GitHub-Delivery", "X-Shopify-Webhook-Id"];
        let without = delivery.headers().into_iter().filter(|(name, _)| !ids.contains(name)).collect();
        let answer = match sender {
            WebhookSender::Stripe => {
                let nameless = SignedDelivery { body: r#"{"object":"event"}"#.into(), ..delivery };
                nameless.request(&bench).send().await
            }
            _ => delivery.request_with_headers(&bench, without).send().await,
        };
        assert_refused(&answer, 400, "key-missing");
    }
    // What says that it is no JSON has no id either.
    let delivery = WebhookSender::Stripe.delivery("evt_1");
    let request = client::post(bench.gateway.addr(), delivery.sender.path()).header("Content-Type", "text/plain");
    let request = request.header("Stripe-Signature", delivery.headers()[0].1.clone()).body(delivery.body.clone());
    assert_refused(&request.send().await, 400, "key-missing");
    assert_eq!(bench.upstream.requests(), 0);
}

#[tokio::test]
async fn headers_that_decide_come_once_and_under_one_name() {
    let bench = TestGateway::webhooks("").await;
    for sender in SENDERS {
        let delivery = sender.delivery("evt_1");
        let headers = delivery.headers();
        let (name, value) = headers.iter().find(|(name, _)| *name == sender.signature_header()).unwrap().clone();
        let request = delivery.request(&bench);
        for twice in [
            request.clone().header(name, value.clone()),
            request.clone().header(name, "v1,AAAA"),
            request.clone().header(name.replace('-', "_"), value),
            request.clone().header("Connection", name),
        ] {
            assert_refused(&twice.send().await, 400, "request-ambiguous");
        }
    }
    assert_eq!(bench.upstream.requests(), 0);
}

#[tokio::test]
async fn a_body_that_is_too_large_is_a_413_signed_or_not() {
    let bench = TestGateway::webhooks("max_request = \"1KiB\"").await;
    for sender in SENDERS {
        let mut delivery = sender.delivery("evt_1");
        delivery.body = format!("{{\"id\":\"evt_1\",\"filler\":\"{}\"}}", "x".repeat(2048));
        assert_refused(&delivery.request(&bench).send().await, 413, "body-too-large");
        assert_refused(&delivery.request(&bench).chunked().send().await, 413, "body-too-large");
        assert_eq!(bench.upstream.requests(), 0);
    }
    // Nothing was claimed: a smaller one under the same id runs, however it is framed.
    for (count, sender) in SENDERS.into_iter().enumerate() {
        assert_ran(&sender.delivery("evt_1").request(&bench).chunked().send().await);
        bench.assert_executed(count + 1);
    }
}

/// Two thousand signatures that are none, seeded: nothing passes, nothing breaks, and the genuine delivery runs.
#[tokio::test]
async fn no_made_up_signature_passes() {
    let bench = TestGateway::webhooks("").await;
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for sender in SENDERS {
        let delivery = sender.delivery("evt_1");
        let genuine = delivery.headers();
        let mut raw = RawClient::connect(bench.gateway.addr()).await;
        for _ in 0..400 {
            let mutate = |value: &str, random: &mut dyn FnMut() -> u64| {
                let mut bytes = value.as_bytes().to_vec();
                for _ in 0..=random() % 4 {
                    let at = (random() % bytes.len().max(1) as u64) as usize;
                    let byte = b' ' + (random() % 95) as u8;
                    match random() % 4 {
                        0 if bytes.len() > 1 => drop(bytes.remove(at)),
                        1 => bytes.insert(at, byte),
                        2 => bytes.truncate(at + 1),
                        _ => bytes[at] = byte,
                    }
                }
                String::from_utf8(bytes).unwrap()
            };
            let forged: Vec<_> = genuine
                .iter()
                .map(|(name, value)| match *name == sender.signature_header() {
                    true => (*name, mutate(value, &mut random)),
                    false => (*name, value.clone()),
                })
                .collect();
            // Blanks around a value and the case of hexadecimal digits do not count.
            let digits = matches!(sender, WebhookSender::GitHub | WebhookSender::Stripe);
            let folded = |text: &str| if digits { text.trim().to_lowercase() } else { text.trim().to_owned() };
            let answer = delivery.request_with_headers(&bench, forged.clone()).send_on(&mut raw).await;
            // One more signature, or a member that is left alone, is no forgery: the genuine one is still there.
            let holds = forged.iter().zip(&genuine).all(|((_, forged), (_, value))| {
                let members = |text: &str| folded(text).split([' ', ',']).map(str::to_owned).collect::<Vec<_>>();
                let there = members(forged);
                members(value).iter().all(|member| there.contains(member))
            });
            if !holds {
                assert!([400, 401].contains(&answer.status), "{sender:?} {forged:?}: {answer:?}");
            }
        }
    }
    let before = bench.upstream.executions();
    for (count, sender) in SENDERS.into_iter().enumerate() {
        assert_ran(&sender.delivery("evt_2").request(&bench).send().await);
        bench.assert_executed(before + count + 1);
    }
}

/// In shadow mode nothing is refused, so that a new route can be tried on genuine traffic; it is told.
#[tokio::test]
async fn in_shadow_mode_a_forged_delivery_is_told_and_passes() {
    let bench = TestGateway::webhooks("mode = \"shadow\"").await;
    let forged = SignedDelivery { secret: OTHER_SECRET, ..WebhookSender::GitHub.delivery("evt_1") };
    let answer = forged.request(&bench).send().await;
    assert_eq!(answer.status, 201, "{answer:?}");
    bench.gateway.wait_for_log("shadow-refusal").await;
}
