//! Against the real gateway.

use std::time::Duration;

use http::HeaderName;
use ibid_client::{KeyGenerator, Schedule, SendOptions, send};
use testbed::{
    FaultProxy,
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};

use crate::common::{KeyFolder, client, gateway, only_key, payment, reason};

const FAST_SCHEDULE: Schedule = Schedule::exponential().first(Duration::from_millis(2)).attempts(3);

#[tokio::test]
async fn a_first_answer_and_its_replay_are_told_apart_whatever_the_preset() {
    let upstream = TestUpstream::start().await;
    let config = ["appsportal", "membership", "stripe", "ietf"].map(|preset| {
        let data = "[[route]]\nmatch = \"POST /NAME\"\npreset = \"NAME\"\n";
        data.replace("NAME", preset)
    });
    let gateway = gateway(&config.concat(), &upstream).await;
    for (runs, (preset, header)) in [
        ("appsportal", "x-idempotency-key"),
        ("membership", "idempotency-key"),
        ("stripe", "idempotency-key"),
        ("ietf", "idempotency-key"),
    ]
    .into_iter()
    .enumerate()
    {
        let options = SendOptions::in_memory()
            .key_generator(KeyGenerator::derived([preset]))
            .header(HeaderName::from_static(header));
        let mut seen = Vec::new();
        for _ in 0..3 {
            let mut request = payment(&format!("http://{}/{preset}", gateway.addr()));
            request.headers_mut().insert("x-tenant-id", "t1".parse().unwrap());
            request.headers_mut().insert("x-user-id", "u1".parse().unwrap());
            let answer = send(&client(), request, &options).await.unwrap();
            seen.push((answer.replayed, answer.response.status().as_u16()));
        }
        assert_eq!(seen, [(false, 201), (true, 201), (true, 201)], "{preset}");
        assert_eq!(upstream.executions(), runs + 1);
    }
}

#[tokio::test]
async fn the_network_cut_in_mid_request_costs_an_attempt_and_nothing_else() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway("", &upstream).await;
    let link = FaultProxy::to(gateway.addr());
    link.break_answers(2);
    let keys = KeyFolder::new();
    let answer = send(&client(), payment(&format!("http://{}/pay", link.addr())), &keys.options()).await.unwrap();
    assert_eq!((answer.attempts, answer.replayed), (3, true));
    assert_eq!(answer.response.text().await.unwrap(), r#"{"id":1,"run":1}"#);
    assert_eq!((upstream.executions(), keys.files()), (1, 0));
}

#[tokio::test]
async fn an_operation_that_is_run_twice_to_success_pays_once() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway("", &upstream).await;
    let url = format!("http://{}/pay", gateway.addr());
    let keys = KeyFolder::new();
    for (runs, options) in [keys.options(), SendOptions::in_memory().operation("order-17")].into_iter().enumerate() {
        let mut answers = Vec::new();
        for _ in 0..2 {
            let answer = send(&client(), payment(&url), &options).await.unwrap();
            answers.push((answer.replayed, answer.key.clone(), answer.response.text().await.unwrap()));
        }
        assert_eq!((answers[0].0, answers[1].0), (false, true));
        assert_eq!((&answers[0].1, &answers[0].2), (&answers[1].1, &answers[1].2));
        assert_eq!(upstream.executions(), 2 * runs + 1);
        assert_eq!(options.journal().pending().await.unwrap(), []);
        // A name that is freed is a new operation.
        options.forget("order-17").await.unwrap();
        assert!(!send(&client(), payment(&url), &options).await.unwrap().replayed);
        assert_eq!(upstream.executions(), 2 * runs + 2);
    }
}

#[tokio::test]
async fn while_the_first_runs_others_are_told_so_and_then_get_its_answer() {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/pay");
    let gateway = gateway("", &upstream).await;
    let url = format!("http://{}/pay", gateway.addr());
    let keys = KeyFolder::new();
    let begin = |schedule| {
        let (url, options) = (url.clone(), keys.options().schedule(schedule));
        tokio::spawn(async move { send(&client(), payment(&url), &options).await })
    };
    let first = begin(Schedule::once());
    gate.arrived(1).await;
    let stopped = begin(FAST_SCHEDULE).await.unwrap().unwrap_err();
    assert_eq!((reason(&stopped), stopped.attempts), ("in-progress", 3), "{stopped}");
    let second = begin(Schedule::exponential().attempts(8));
    gate.open();
    let (first, second) = (first.await.unwrap().unwrap(), second.await.unwrap().unwrap());
    assert_eq!((first.replayed, second.replayed), (false, true));
    assert_eq!((first.key, upstream.executions()), (second.key, 1));
}

#[tokio::test]
async fn an_unknown_outcome_is_never_retried() {
    let upstream = TestUpstream::start().await;
    upstream.on("/pay", UpstreamFault::ResetAfterRequest);
    let gateway = gateway("", &upstream).await;
    let url = format!("http://{}/pay", gateway.addr());
    let keys = KeyFolder::new();
    // The first attempt is told that the answer was lost; the second, that nobody knows. There is no third.
    let stopped = send(&client(), payment(&url), &keys.options()).await.unwrap_err();
    assert_eq!((reason(&stopped), stopped.attempts, upstream.executions()), ("outcome-unknown", 2, 1), "{stopped}");
    let again = send(&client(), payment(&url), &keys.options()).await.unwrap_err();
    assert_eq!((reason(&again), again.attempts, upstream.executions()), ("outcome-unknown", 1, 1));
    assert_eq!(keys.pending_key().await, Some(only_key(&upstream)));
}

#[tokio::test]
async fn an_app_that_comes_back_is_reached_by_the_same_call() {
    let upstream = TestUpstream::start_refusing().await;
    let gateway = gateway("", &upstream).await;
    let url = format!("http://{}/pay", gateway.addr());
    let keys = KeyFolder::new();
    let stopped = send(&client(), payment(&url), &keys.options().schedule(FAST_SCHEDULE)).await.unwrap_err();
    assert_eq!((reason(&stopped), stopped.attempts), ("unavailable", 3), "{stopped}");
    let kept = keys.pending_key().await;
    upstream.restart().await;
    let answer = send(&client(), payment(&url), &keys.options()).await.unwrap();
    assert_eq!((Some(answer.key.as_str().to_owned()), upstream.executions()), (kept, 1));
}

#[tokio::test]
async fn another_request_under_a_name_in_use_is_told_so() {
    let upstream = TestUpstream::start().await;
    upstream.on("/pay", UpstreamReply::status(500));
    let gateway = gateway("[policy]\nremember = \"all\"\n", &upstream).await;
    let url = format!("http://{}/pay", gateway.addr());
    let keys = KeyFolder::new();
    // A failure that may have had an effect: its key stays.
    assert_eq!(send(&client(), payment(&url), &keys.options()).await.unwrap().response.status(), 500);
    let other = client().post(&url).body("another").build().unwrap();
    let stopped = send(&client(), other, &keys.options()).await.unwrap_err();
    assert_eq!((reason(&stopped), stopped.attempts), ("key-reused", 1), "{stopped}");
    // The first one again: the server has remembered its failure, and so it is final.
    let answer = send(&client(), payment(&url), &keys.options()).await.unwrap();
    assert_eq!((answer.response.status().as_u16(), answer.replayed, keys.files()), (500, true, 0));
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_key_in_the_wrong_form_is_not_kept() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway("[policy]\nkey.format = \"uuid4\"\n", &upstream).await;
    let url = format!("http://{}/pay", gateway.addr());
    let keys = KeyFolder::new();
    let stopped =
        send(&client(), payment(&url), &keys.options().key_generator(KeyGenerator::UuidV7)).await.unwrap_err();
    assert_eq!((reason(&stopped), stopped.attempts, keys.files()), ("refused", 1, 0), "{stopped}");
    assert!(stopped.to_string().contains("version 4") && stopped.operation.is_none(), "{stopped}");
    let answer = send(&client(), payment(&url), &keys.options()).await.unwrap();
    assert_eq!(answer.response.status(), 201);
}

#[tokio::test]
async fn every_form_of_key_is_let_in_where_it_is_asked_for() {
    let upstream = TestUpstream::start().await;
    let operation = KeyGenerator::Operation { user: "u1".into(), operation: "pay".into(), resource: "r9".into() };
    for (format, mint) in [
        ("uuid4", KeyGenerator::UuidV4),
        ("uuid", KeyGenerator::UuidV7),
        ("operation", operation),
        ("uuid4", KeyGenerator::derived(["invoice", "17"])),
    ] {
        let gateway = gateway(&format!("[policy]\nkey.format = \"{format}\"\n"), &upstream).await;
        let options = SendOptions::in_memory().key_generator(mint.clone());
        let answer = send(&client(), payment(&format!("http://{}/pay", gateway.addr())), &options).await.unwrap();
        assert_eq!(answer.response.status(), 201, "{mint:?}");
    }
}
