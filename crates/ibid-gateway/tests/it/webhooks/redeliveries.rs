//! What a sender's further attempts get.

use std::time::Duration;

use testbed::{
    client,
    upstream::{ReplyGate, UpstreamFault, UpstreamReply},
};
use tokio::time::timeout;

use super::common::{OTHER_SECRET, SENDERS, WebhookSender, now, routes};
use crate::support::{TestGateway, assert_ran, assert_refused, assert_replay};

#[tokio::test]
async fn another_attempt_with_a_new_time_and_signature_gets_the_first_answer() {
    let bench = TestGateway::webhooks("").await;
    for (count, sender) in SENDERS.into_iter().enumerate() {
        let delivery = sender.delivery("evt_1");
        let first = delivery.request(&bench).send().await;
        assert_ran(&first);
        for later in [delivery.resigned_later(7), delivery.resigned_later(60)] {
            assert_eq!(later.headers() == delivery.headers(), !sender.has_time(), "{sender:?}: the signature differs");
            assert_replay(&later.request(&bench).send().await, &first);
        }
        assert_ran(&sender.delivery("evt_2").request(&bench).send().await);
        bench.assert_executed(2 * count + 2);
    }
}

/// Stripe counts endpoints in the body, so that it may differ from one attempt to the next.
#[tokio::test]
async fn another_body_under_the_same_id_gets_the_first_answer_and_no_422() {
    let bench = TestGateway::webhooks("").await;
    for sender in SENDERS {
        let mut delivery = sender.delivery("evt_1");
        let first = delivery.request(&bench).send().await;
        assert_ran(&first);
        delivery.body = r#"{"id":"evt_1","pending_webhooks":0}"#.into();
        assert_replay(&delivery.request(&bench).send().await, &first);
    }
}

#[tokio::test]
async fn the_app_gets_the_delivery_as_it_was_sent() {
    let bench = TestGateway::webhooks("").await;
    for sender in SENDERS {
        let delivery = sender.delivery("evt_1");
        assert_ran(&delivery.request(&bench).send().await);
        let seen = bench.upstream.last();
        assert_eq!(seen.text(), delivery.body);
        for (name, value) in delivery.headers() {
            assert_eq!(seen.headers.get_all(name), [&value], "{name}");
        }
        assert_eq!(seen.attempt(), Some(1));
    }
}

/// GitHub sends up to 25 MB, and nothing a second time by itself: what is refused is lost.
#[tokio::test]
async fn a_large_push_of_github_passes() {
    let bench = TestGateway::webhooks("").await;
    let mut delivery = WebhookSender::GitHub.delivery("evt_1");
    delivery.body = format!(r#"{{"commits":"{}"}}"#, "x".repeat(3 << 20));
    assert_ran(&delivery.request(&bench).send().await);
    assert_eq!(bench.upstream.last().body.len(), delivery.body.len());
}

#[tokio::test]
async fn only_a_2xx_is_remembered_and_everything_else_reaches_the_sender_as_it_is() {
    let bench = TestGateway::webhooks("").await;
    for sender in SENDERS {
        for status in [500, 503, 400, 404, 409, 302, 410] {
            let delivery = sender.delivery(&format!("evt_{status}"));
            bench.upstream.reply_by_default(UpstreamReply::status(status).body(format!("the app says {status}")));
            let before = bench.upstream.executions();
            for _ in 0..2 {
                let answer = delivery.request(&bench).send().await;
                assert_eq!((answer.status, answer.text()), (status, format!("the app says {status}")), "{answer:?}");
                assert_eq!(answer.header("idempotency-stored"), Some("false"), "{answer:?}");
            }
            bench.upstream.clear_rules();
            let first = delivery.request(&bench).send().await;
            assert_ran(&first);
            assert_replay(&delivery.resigned_later(1).request(&bench).send().await, &first);
            bench.assert_executed(before + 3);
        }
        bench.upstream.reply_by_default(UpstreamReply::status(204));
        let delivery = sender.delivery("evt_204");
        assert_eq!(delivery.request(&bench).send().await.status, 204);
        bench.upstream.clear_rules();
        assert_eq!(delivery.request(&bench).send().await.status, 204);
    }
}

#[tokio::test]
async fn of_fifty_at_once_one_runs_and_all_get_its_answer() {
    let bench = TestGateway::webhooks("wait_timeout = \"1m\"").await;
    let gate = ReplyGate::new();
    bench.upstream.reply_by_default(UpstreamReply::usual().gated(&gate));
    let delivery = WebhookSender::Standard.delivery("evt_1");
    let mut nth = 0;
    let answers = client::many(50, || {
        nth += 1;
        delivery.resigned_later(nth).request(&bench)
    });
    let opens = async {
        gate.arrived(1).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        gate.open();
    };
    let (answers, ()) = tokio::join!(answers, opens);
    bench.assert_executed(1);
    let replayed = answers.iter().filter(|answer| answer.header("idempotent-replayed").is_some()).count();
    assert_eq!(replayed, 49);
    assert!(answers.iter().all(|answer| (answer.status, &answer.body) == (201, &answers[0].body)), "{answers:?}");
}

#[tokio::test]
async fn what_still_runs_is_a_503_to_come_back_after_and_no_409() {
    let bench = TestGateway::webhooks("wait_timeout = \"100ms\"").await;
    for sender in SENDERS {
        let gate = ReplyGate::new();
        bench.upstream.reply_by_default(UpstreamReply::usual().gated(&gate));
        let delivery = sender.delivery("evt_1");
        let mut first = delivery.request(&bench).start().await;
        gate.arrived(1).await;
        let answer = delivery.resigned_later(1).request(&bench).send().await;
        assert_refused(&answer, 503, "in-progress");
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
        gate.open();
        let first = first.read_response().await;
        assert_ran(&first);
        bench.upstream.clear_rules();
        assert_replay(&delivery.resigned_later(2).request(&bench).send().await, &first);
    }
}

/// Shopify hangs up after five seconds: its next attempt finds the answer of the run that went on.
#[tokio::test]
async fn a_sender_that_hangs_up_finds_the_answer_on_its_next_attempt() {
    let bench = TestGateway::webhooks("wait_timeout = \"1m\"").await;
    let gate = ReplyGate::new();
    bench.upstream.reply_by_default(UpstreamReply::usual().gated(&gate));
    let delivery = WebhookSender::Shopify.delivery("evt_1");
    let first = delivery.request(&bench).start().await;
    // A reset before the gateway has read the request would discard it.
    gate.arrived(1).await;
    first.abort();
    gate.open();
    let answer = delivery.request(&bench).send().await;
    assert_eq!(answer.header("idempotent-replayed"), Some("true"), "{answer:?}");
    bench.assert_executed(1);
}

#[tokio::test]
async fn an_answer_that_was_lost_is_run_again() {
    let bench = TestGateway::webhooks("lease = \"200ms\"").await;
    for (count, sender) in SENDERS.into_iter().enumerate() {
        let delivery = sender.delivery("evt_1");
        bench.upstream.reply_by_default(UpstreamFault::ResetAfterRequest);
        assert_refused(&delivery.request(&bench).send().await, 502, "upstream-lost");
        bench.upstream.clear_rules();
        assert_ran(&delivery.resigned_later(1).request(&bench).send().await);
        assert_eq!(bench.upstream.last().attempt(), Some(2));
        bench.assert_executed(2 * count + 2);
    }
}

/// GitHub and Svix deliver one event to several endpoints under one id.
#[tokio::test]
async fn endpoints_that_get_the_same_id_are_independent() {
    let bench = TestGateway::with_hook_secrets(
        "[[route]]\nmatch = \"POST /hooks/*\"\npreset = \"webhook:github\"\nsecrets = \"env:HOOK_SECRET\"\n",
    )
    .await;
    let delivery = WebhookSender::GitHub.delivery("72d3162e-cc78-11e3-81ab-4c9367dc0958");
    let to = |path: &str| {
        let request = client::post(bench.gateway.addr(), path).json(&delivery.body);
        delivery.headers().into_iter().fold(request, |request, (name, value)| request.header(name, value))
    };
    let one = to("/hooks/deploys").send().await;
    assert_ran(&one);
    assert_ran(&to("/hooks/audit").send().await);
    bench.assert_executed(2);
    assert_replay(&to("/hooks/deploys").send().await, &one);
    assert_replay(&to("/hooks/deploys?again=1").send().await, &one);
    // Nor is there a second way to write the path of one of them: the signature does not cover it.
    assert_refused(&to("/hooks/%64eploys").send().await, 400, "request-ambiguous");
    bench.assert_executed(2);
    let log = bench.gateway.logs().join("\n");
    assert!(!log.contains("two callers"), "{log}");
}

#[tokio::test]
async fn a_secret_is_replaced_without_losing_a_delivery() {
    let bench = TestGateway::with_hook_secrets(&routes("")).await;
    let delivery = WebhookSender::Stripe.delivery("evt_1");
    let first = delivery.request(&bench).send().await;
    assert_ran(&first);
    let mut renewed = WebhookSender::Stripe.delivery("evt_2");
    renewed.secret = OTHER_SECRET;
    assert_refused(&renewed.request(&bench).send().await, 401, "identity-invalid");

    let both = routes("").replace("[\"env:HOOK_SECRET\"]", "[\"env:OTHER_SECRET\", \"env:HOOK_SECRET\"]");
    bench.gateway.rewrite_config(&both);
    bench.gateway.wait_for_log("configuration taken up").await;
    assert_ran(&renewed.request(&bench).send().await);
    assert_replay(&delivery.request(&bench).send().await, &first);
    assert_ran(&WebhookSender::Stripe.delivery("evt_3").request(&bench).send().await);
    // Signed with both, as Stripe does meanwhile: either will do.
    let mut twice = WebhookSender::Stripe.delivery("evt_4");
    let old = twice.headers()[0].1.split_once(",v1=").unwrap().1.to_owned();
    twice.secret = OTHER_SECRET;
    let signature = format!("{},v1={old}", twice.headers()[0].1);
    assert_ran(&twice.request_with_headers(&bench, vec![("Stripe-Signature", signature)]).send().await);

    bench.gateway.rewrite_config(&both.replace(", \"env:HOOK_SECRET\"", ""));
    let gone = async {
        let old = WebhookSender::Stripe.delivery("evt_1");
        while old.request(&bench).send().await.status != 401 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(Duration::from_secs(20), gone).await.expect("the old secret is no longer believed");
    let mut known = delivery.resigned_later(now() - delivery.at);
    known.secret = OTHER_SECRET;
    assert_replay(&known.request(&bench).send().await, &first);
    bench.assert_executed(4);
}
