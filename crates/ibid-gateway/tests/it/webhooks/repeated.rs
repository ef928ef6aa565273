//! What a sender's further attempts get.

use std::time::Duration;

use ibid_testkit::{
    client,
    upstream::{Fault, Gate, Reply},
};
use tokio::time::timeout;

use super::kit::{Bench, OTHER_SECRET, SENDERS, Sender, is_refusal, is_replay, now, ran, routes};

#[tokio::test]
async fn another_attempt_with_a_new_time_and_signature_gets_the_first_answer() {
    let bench = Bench::start().await;
    for (count, sender) in SENDERS.into_iter().enumerate() {
        let delivery = sender.delivery("evt_1");
        let first = delivery.request(&bench).send().await;
        ran(&first);
        for later in [delivery.later(7), delivery.later(60)] {
            assert_eq!(later.headers() == delivery.headers(), !sender.has_time(), "{sender:?}: the signature differs");
            is_replay(&later.request(&bench).send().await, &first);
        }
        ran(&sender.delivery("evt_2").request(&bench).send().await);
        bench.executed(2 * count + 2);
    }
}

/// Stripe counts endpoints in the body, so that it may differ from one attempt to the next.
#[tokio::test]
async fn another_body_under_the_same_id_gets_the_first_answer_and_no_422() {
    let bench = Bench::start().await;
    for sender in SENDERS {
        let mut delivery = sender.delivery("evt_1");
        let first = delivery.request(&bench).send().await;
        ran(&first);
        delivery.body = r#"{"id":"evt_1","pending_webhooks":0}"#.into();
        is_replay(&delivery.request(&bench).send().await, &first);
    }
}

#[tokio::test]
async fn the_app_gets_the_delivery_as_it_was_sent() {
    let bench = Bench::start().await;
    for sender in SENDERS {
        let delivery = sender.delivery("evt_1");
        ran(&delivery.request(&bench).send().await);
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
    let bench = Bench::start().await;
    let mut delivery = Sender::GitHub.delivery("evt_1");
    delivery.body = format!(r#"{{"commits":"{}"}}"#, "x".repeat(3 << 20));
    ran(&delivery.request(&bench).send().await);
    assert_eq!(bench.upstream.last().body.len(), delivery.body.len());
}

#[tokio::test]
async fn only_a_2xx_is_remembered_and_everything_else_reaches_the_sender_as_it_is() {
    let bench = Bench::start().await;
    for sender in SENDERS {
        for status in [500, 503, 400, 404, 409, 302, 410] {
            let delivery = sender.delivery(&format!("evt_{status}"));
            bench.upstream.on_any(Reply::status(status).body(format!("the app says {status}")));
            let before = bench.upstream.executions();
            for _ in 0..2 {
                let answer = delivery.request(&bench).send().await;
                assert_eq!((answer.status, answer.text()), (status, format!("the app says {status}")), "{answer:?}");
                assert_eq!(answer.header("idempotency-stored"), Some("false"), "{answer:?}");
            }
            bench.upstream.clear_rules();
            let first = delivery.request(&bench).send().await;
            ran(&first);
            is_replay(&delivery.later(1).request(&bench).send().await, &first);
            bench.executed(before + 3);
        }
        bench.upstream.on_any(Reply::status(204));
        let delivery = sender.delivery("evt_204");
        assert_eq!(delivery.request(&bench).send().await.status, 204);
        bench.upstream.clear_rules();
        assert_eq!(delivery.request(&bench).send().await.status, 204);
    }
}

#[tokio::test]
async fn of_fifty_at_once_one_runs_and_all_get_its_answer() {
    let bench = Bench::with("wait_timeout = \"1m\"").await;
    let gate = Gate::new();
    bench.upstream.on_any(Reply::usual().gated(&gate));
    let delivery = Sender::Standard.delivery("evt_1");
    let mut nth = 0;
    let answers = client::many(50, || {
        nth += 1;
        delivery.later(nth).request(&bench)
    });
    let opens = async {
        gate.arrived(1).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        gate.open();
    };
    let (answers, ()) = tokio::join!(answers, opens);
    bench.executed(1);
    let replayed = answers.iter().filter(|answer| answer.header("idempotent-replayed").is_some()).count();
    assert_eq!(replayed, 49);
    assert!(answers.iter().all(|answer| (answer.status, &answer.body) == (201, &answers[0].body)), "{answers:?}");
}

#[tokio::test]
async fn what_still_runs_is_a_503_to_come_back_after_and_no_409() {
    let bench = Bench::with("wait_timeout = \"100ms\"").await;
    for sender in SENDERS {
        let gate = Gate::new();
        bench.upstream.on_any(Reply::usual().gated(&gate));
        let delivery = sender.delivery("evt_1");
        let mut first = delivery.request(&bench).start().await;
        gate.arrived(1).await;
        let answer = delivery.later(1).request(&bench).send().await;
        is_refusal(&answer, 503, "in-progress");
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
        gate.open();
        let first = first.read_response().await;
        ran(&first);
        bench.upstream.clear_rules();
        is_replay(&delivery.later(2).request(&bench).send().await, &first);
    }
}

/// Shopify hangs up after five seconds: its next attempt finds the answer of the run that went on.
#[tokio::test]
async fn a_sender_that_hangs_up_finds_the_answer_on_its_next_attempt() {
    let bench = Bench::with("wait_timeout = \"1m\"").await;
    let gate = Gate::new();
    bench.upstream.on_any(Reply::usual().gated(&gate));
    let delivery = Sender::Shopify.delivery("evt_1");
    delivery.request(&bench).start().await.abort();
    gate.arrived(1).await;
    gate.open();
    let answer = delivery.request(&bench).send().await;
    assert_eq!(answer.header("idempotent-replayed"), Some("true"), "{answer:?}");
    bench.executed(1);
}

#[tokio::test]
async fn an_answer_that_was_lost_is_run_again() {
    let bench = Bench::with("lease = \"200ms\"").await;
    for (count, sender) in SENDERS.into_iter().enumerate() {
        let delivery = sender.delivery("evt_1");
        bench.upstream.on_any(Fault::ResetAfterRequest);
        is_refusal(&delivery.request(&bench).send().await, 502, "upstream-lost");
        bench.upstream.clear_rules();
        ran(&delivery.later(1).request(&bench).send().await);
        assert_eq!(bench.upstream.last().attempt(), Some(2));
        bench.executed(2 * count + 2);
    }
}

/// GitHub and Svix deliver one event to several endpoints under one id.
#[tokio::test]
async fn endpoints_that_get_the_same_id_are_independent() {
    let bench =
        Bench::of("[[route]]\nmatch = \"POST /hooks/*\"\npreset = \"webhook:github\"\nsecrets = \"env:HOOK_SECRET\"\n")
            .await;
    let delivery = Sender::GitHub.delivery("72d3162e-cc78-11e3-81ab-4c9367dc0958");
    let to = |path: &str| {
        let request = client::post(bench.gateway.addr(), path).json(&delivery.body);
        delivery.headers().into_iter().fold(request, |request, (name, value)| request.header(name, value))
    };
    let one = to("/hooks/deploys").send().await;
    ran(&one);
    ran(&to("/hooks/audit").send().await);
    bench.executed(2);
    is_replay(&to("/hooks/deploys").send().await, &one);
    is_replay(&to("/hooks/deploys?again=1").send().await, &one);
    // Nor is there a second way to write the path of one of them: the signature does not cover it.
    is_refusal(&to("/hooks/%64eploys").send().await, 400, "request-ambiguous");
    bench.executed(2);
    let log = bench.gateway.logs().join("\n");
    assert!(!log.contains("two callers"), "{log}");
}

#[tokio::test]
async fn a_secret_is_replaced_without_losing_a_delivery() {
    let bench = Bench::of(&routes("")).await;
    let delivery = Sender::Stripe.delivery("evt_1");
    let first = delivery.request(&bench).send().await;
    ran(&first);
    let mut renewed = Sender::Stripe.delivery("evt_2");
    renewed.secret = OTHER_SECRET;
    is_refusal(&renewed.request(&bench).send().await, 401, "identity-invalid");

    let both = routes("").replace("[\"env:HOOK_SECRET\"]", "[\"env:OTHER_SECRET\", \"env:HOOK_SECRET\"]");
    bench.gateway.rewrite_config(&both);
    bench.gateway.wait_for_log("configuration taken up").await;
    ran(&renewed.request(&bench).send().await);
    is_replay(&delivery.request(&bench).send().await, &first);
    ran(&Sender::Stripe.delivery("evt_3").request(&bench).send().await);
    // Signed with both, as Stripe does meanwhile: either will do.
    let mut twice = Sender::Stripe.delivery("evt_4");
    let old = twice.headers()[0].1.split_once(",v1=").unwrap().1.to_owned();
    twice.secret = OTHER_SECRET;
    let signature = format!("{},v1={old}", twice.headers()[0].1);
    ran(&twice.with(&bench, vec![("Stripe-Signature", signature)]).send().await);

    bench.gateway.rewrite_config(&both.replace(", \"env:HOOK_SECRET\"", ""));
    let gone = async {
        let old = Sender::Stripe.delivery("evt_1");
        while old.request(&bench).send().await.status != 401 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(Duration::from_secs(20), gone).await.expect("the old secret is no longer believed");
    let mut known = delivery.later(now() - delivery.at);
    known.secret = OTHER_SECRET;
    is_replay(&known.request(&bench).send().await, &first);
    bench.executed(4);
}
