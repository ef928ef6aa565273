//! When requests are sent again, by the clock of the server that they are sent to.

use std::time::Duration;

use ibid_client::{Schedule, SendErrorReason, SendOptions, send};
use testbed::upstream::{TestUpstream, UpstreamFault, UpstreamReply};
use tokio::time::{sleep, timeout};

use crate::common::{KeyFolder, assert_schedule, client, only_key, payment, problem, reason};

const FAST_SCHEDULE: Schedule = Schedule::exponential().first(Duration::from_millis(5));

#[tokio::test]
async fn a_storm_of_409_follows_the_schedule() {
    for (schedule, waits) in
        [(Schedule::exponential(), &[100, 200, 400, 800][..]), (Schedule::linear(), &[1000, 2000][..])]
    {
        let upstream = TestUpstream::start().await;
        // What 409 asks for is no matter: the schedule decides.
        upstream.reply_by_default(problem("in-progress", 409).header("retry-after", "30"));
        let options = SendOptions::in_memory().schedule(schedule);
        let stopped = send(&client(), payment(&upstream.url()), &options).await.unwrap_err();
        assert_eq!(reason(&stopped), "in-progress", "{stopped}");
        assert_eq!(stopped.attempts as usize, waits.len() + 1);
        assert_schedule(&upstream, waits);
        only_key(&upstream);
    }
}

#[tokio::test]
async fn it_ends_as_soon_as_there_is_an_answer() {
    let upstream = TestUpstream::start().await;
    upstream.on_each("/pay", [problem("in-progress", 409), UpstreamReply::status(409), UpstreamReply::usual()]);
    let url = format!("{}/pay", upstream.url());
    let answer = send(&client(), payment(&url), &SendOptions::in_memory()).await.unwrap();
    assert_eq!((answer.attempts, answer.response.status().as_u16()), (3, 201));
    assert_schedule(&upstream, &[100, 200]);
}

#[tokio::test]
async fn retry_after_is_honoured_as_seconds_and_as_a_date() {
    let upstream = TestUpstream::start().await;
    let dated = UpstreamReply::status(503).header("date", "Sun, 06 Nov 1994 08:49:37 GMT");
    upstream.on_each(
        "/pay",
        [
            UpstreamReply::status(429).header("retry-after", "1"),
            dated.header("retry-after", "Sun, 06 Nov 1994 08:49:38 GMT"),
            problem("overloaded", 503).header("retry-after", "1"),
            // Nothing asked for, or less than the schedule: the schedule.
            UpstreamReply::status(503).header("retry-after", "0"),
            UpstreamReply::usual(),
        ],
    );
    let url = format!("{}/pay", upstream.url());
    let answer = send(&client(), payment(&url), &SendOptions::in_memory()).await.unwrap();
    assert_eq!((answer.attempts, answer.response.status().as_u16()), (5, 201));
    assert_schedule(&upstream, &[1000, 1000, 1000, 800]);
}

#[tokio::test]
async fn a_server_that_asks_for_too_much_patience_ends_it() {
    let upstream = TestUpstream::start().await;
    upstream.reply_by_default(problem("store-unavailable", 503).header("retry-after", "61"));
    let keys = KeyFolder::new();
    let stopped = send(&client(), payment(&upstream.url()), &keys.options()).await.unwrap_err();
    let asked =
        matches!(stopped.reason, SendErrorReason::RetryAfterTooLong { asked, .. } if asked == Duration::from_secs(61));
    assert!(asked && stopped.is_retryable(), "{stopped}");
    assert_eq!((stopped.attempts, upstream.requests()), (1, 1));
    assert_eq!(keys.pending_key().await, Some(only_key(&upstream)));
    let said = stopped.to_string();
    assert!(said.contains("61s") && said.contains("max_retry_after") && said.contains("it is store-un"), "{said}");
}

#[tokio::test]
async fn a_network_that_comes_back_brings_the_answer() {
    let upstream = TestUpstream::start_refusing().await;
    let url = upstream.url();
    let keys = KeyFolder::new();
    let options = keys.options().schedule(Schedule::exponential().attempts(8));
    let call = tokio::spawn(async move { send(&client(), payment(&url), &options).await });
    sleep(Duration::from_millis(250)).await;
    let kept = keys.pending_key().await;
    upstream.restart().await;
    let answer = call.await.unwrap().unwrap();
    assert!(answer.attempts > 1, "{answer:?}");
    assert_eq!((Some(only_key(&upstream)), upstream.executions()), (kept, 1));
    assert_eq!(keys.files(), 0);
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_asked_for_again() {
    let upstream = TestUpstream::start().await;
    let faults = [
        UpstreamFault::ResetAfterRequest.into(),
        UpstreamFault::CloseWithoutReply.into(),
        UpstreamFault::Truncated { content_length: 20, sent: 3 }.into(),
        UpstreamFault::TruncatedChunked.into(),
        UpstreamReply::usual(),
    ];
    upstream.on_each("/pay", faults);
    let keys = KeyFolder::new();
    let url = format!("{}/pay", upstream.url());
    let answer = send(&client(), payment(&url), &keys.options().schedule(FAST_SCHEDULE)).await.unwrap();
    assert_eq!((answer.attempts, answer.response.text().await.unwrap().as_str()), (5, r#"{"id":5,"run":5}"#));
    only_key(&upstream);
    assert_eq!(keys.files(), 0);
}

#[tokio::test]
async fn one_attempt_and_all_of_them_have_their_time() {
    let upstream = TestUpstream::start().await;
    upstream.reply_by_default(UpstreamFault::Hang);
    let options =
        SendOptions::in_memory().attempt_timeout(Duration::from_millis(50)).schedule(FAST_SCHEDULE.attempts(2));
    let stopped = send(&client(), payment(&upstream.url()), &options).await.unwrap_err();
    assert_eq!((reason(&stopped), stopped.attempts), ("network", 2));
    assert!(stopped.to_string().contains("no whole answer within 50ms"), "{stopped}");

    // There is no time for the second wait, so it is not begun.
    let late = options.schedule(Schedule::linear().first(Duration::from_secs(3600))).deadline(Duration::from_secs(5));
    let (sender, request) = (client(), payment(&upstream.url()));
    let call = timeout(Duration::from_secs(4), send(&sender, request, &late));
    let stopped = call.await.expect("not waited for").unwrap_err();
    assert_eq!((reason(&stopped), stopped.attempts), ("deadline", 1));

    // Nor may an attempt outlast everything.
    let short = SendOptions::in_memory().deadline(Duration::from_millis(50));
    let stopped = send(&client(), payment(&upstream.url()), &short).await.unwrap_err();
    assert_eq!((reason(&stopped), stopped.attempts), ("deadline", 1));
    assert!(stopped.to_string().ends_with("no whole answer before the deadline"), "{stopped}");
}

#[tokio::test]
async fn a_call_that_is_dropped_leaves_its_key_to_the_next() {
    let upstream = TestUpstream::start().await;
    let hang: [UpstreamReply; 3] = [UpstreamFault::Hang.into(), problem("in-progress", 409), UpstreamReply::usual()];
    upstream.on_each("/pay", hang);
    let url = format!("{}/pay", upstream.url());
    let keys = KeyFolder::new();
    // Once while it is sent, once while it waits.
    for requests in 1..=2 {
        let options = keys.options().schedule(Schedule::linear().first(Duration::from_secs(3600)));
        let (client, request) = (client(), payment(&url));
        let call = send(&client, request, &options);
        tokio::select! {
            end = call => panic!("{end:?}"),
            () = async { upstream.wait_for(requests).await; sleep(Duration::from_millis(50)).await } => {}
        }
        assert_eq!(keys.pending_key().await, Some(only_key(&upstream)));
    }
    let answer = send(&client(), payment(&url), &keys.options()).await.unwrap();
    assert_eq!(answer.key.as_str(), only_key(&upstream));
    assert_eq!((upstream.requests(), keys.files()), (3, 0));
}
