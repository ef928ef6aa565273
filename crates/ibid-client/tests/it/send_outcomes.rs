//! How a call ends, and whether its key stays, against a server that answers by script.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http_body_util::Full;
use ibid_client::{
    ClientKey, JournalError, JournalFuture, KeyGenerator, KeyJournal, LastAttempt, MemoryJournal, PendingOperation,
    Schedule, SendOptions, StoredKey, send,
};
use testbed::upstream::{TestUpstream, UpstreamReply, filler};

use crate::common::{KeyFolder, client, only_key, payment, problem, reason};

const FAST_SCHEDULE: Schedule = Schedule::exponential().first(Duration::from_millis(2)).attempts(3);

#[tokio::test]
async fn final_answers_end_the_operation_and_others_keep_its_key() {
    for (status, stays) in [
        (200, false),
        (204, false),
        (400, false),
        (404, false),
        (422, false),
        (401, true),
        (403, true),
        (408, true),
        (425, true),
        (500, true),
        (502, true),
    ] {
        let upstream = TestUpstream::start().await;
        upstream.reply_by_default(UpstreamReply::status(status));
        let keys = KeyFolder::new();
        let answer = send(&client(), payment(&upstream.url()), &keys.options().schedule(FAST_SCHEDULE)).await.unwrap();
        assert_eq!((answer.response.status().as_u16(), answer.attempts), (status, 1));
        assert_eq!((upstream.requests(), keys.files()), (1, usize::from(stays)), "{status}");
    }
}

#[tokio::test]
async fn what_is_refused_for_good_is_not_tried_again_and_keeps_its_key() {
    for (name, expected) in [
        ("outcome-unknown", "outcome-unknown"),
        ("key-reused", "key-reused"),
        ("scope-missing", "refused"),
        ("identity-invalid", "refused"),
        ("body-too-large", "refused"),
        ("of-tomorrow", "refused"),
    ] {
        let upstream = TestUpstream::start().await;
        upstream.reply_by_default(problem(name, 409).header("retry-after", "1"));
        let keys = KeyFolder::new();
        let stopped = send(&client(), payment(&upstream.url()), &keys.options()).await.unwrap_err();
        assert_eq!((reason(&stopped), stopped.attempts, upstream.requests()), (expected, 1, 1), "{stopped}");
        assert!(!stopped.is_retryable());
        assert_eq!(keys.pending_key().await, Some(only_key(&upstream)), "{name}");
        let LastAttempt::Response { response, problem: Some(problem) } = stopped.last_attempt else {
            panic!("{stopped:?}")
        };
        assert_eq!((response.status().as_u16(), problem.name()), (409, Some(name)));
        assert!(response.text().await.unwrap().contains(name), "what it said can still be read");
    }
}

#[tokio::test]
async fn why_it_stopped_is_told_to_people() {
    let upstream = TestUpstream::start().await;
    upstream.reply_by_default(problem("outcome-unknown", 409));
    let keys = KeyFolder::new();
    let stopped = send(&client(), payment(&upstream.url()), &keys.options()).await.unwrap_err();
    let key = ibid::mask(&only_key(&upstream));
    assert_eq!(
        stopped.to_string(),
        format!(
            "stopped after one attempt: it is not known whether the operation happened. Do not send it with a fresh key: \
             look up whether it happened, or ask the operator to resolve it. The server said 409: it is \
             outcome-unknown. The key {key} is kept for \"order-17\""
        )
    );
    upstream.stop().await;
    let stopped = send(&client(), payment(&upstream.url()), &keys.options().schedule(FAST_SCHEDULE)).await.unwrap_err();
    let said = stopped.to_string();
    assert!(said.starts_with("stopped after 3 attempts: no whole answer arrived."), "{said}");
    assert!(said.contains("onnection refused"), "the cause is told: {said}");
    assert!(std::error::Error::source(&stopped).is_some());
}

#[tokio::test]
async fn a_5xx_is_retried_only_if_asked_for() {
    let upstream = TestUpstream::start().await;
    upstream.reply_by_default(UpstreamReply::status(500));
    let options = SendOptions::in_memory().schedule(FAST_SCHEDULE).retry_5xx(true);
    let stopped = send(&client(), payment(&upstream.url()), &options).await.unwrap_err();
    assert_eq!((reason(&stopped), stopped.attempts, upstream.requests()), ("server-error", 3, 3));
    // What is remembered will not change: the second attempt sees that it is, and is the last.
    upstream.on_each(
        "/kept",
        [UpstreamReply::status(500), UpstreamReply::status(500).header("x-idempotency-replay", "true")],
    );
    let answer = send(&client(), payment(&format!("{}/kept", upstream.url())), &options).await.unwrap();
    assert_eq!((answer.attempts, answer.replayed), (2, true));
}

#[tokio::test]
async fn a_replay_is_told_by_any_of_its_signs() {
    let upstream = TestUpstream::start().await;
    let signs = [
        (UpstreamReply::usual().header("idempotent-replayed", "true"), true),
        (UpstreamReply::usual().header("x-idempotency-replay", "true"), true),
        (UpstreamReply::usual().header("x-idempotency-cached", "true"), true),
        (UpstreamReply::status(200).json(r#"{"metadata":{"cached":true}}"#), true),
        (UpstreamReply::usual().header("x-idempotency-cached", "false"), false),
        (UpstreamReply::status(200).json(r#"{"metadata":{"cached":false}}"#), false),
        (UpstreamReply::usual(), false),
    ];
    for (reply, replayed) in signs {
        upstream.reply_by_default(reply.clone());
        let answer = send(&client(), payment(&upstream.url()), &SendOptions::in_memory()).await.unwrap();
        assert_eq!(answer.replayed, replayed, "{reply:?}");
    }
    upstream.reply_by_default(UpstreamReply::usual().header("idempotency-guarantee", "degraded"));
    assert!(send(&client(), payment(&upstream.url()), &SendOptions::in_memory()).await.unwrap().degraded);
}

#[tokio::test]
async fn large_answers_and_streams_are_handed_on_whole() {
    let upstream = TestUpstream::start().await;
    let body = filler(300_000);
    let chunks: Vec<_> = body.chunks(7_000).map(Bytes::copy_from_slice).collect();
    upstream.on("/length", UpstreamReply::status(200).body(body.clone()));
    upstream.on("/chunks", UpstreamReply::chunks(chunks));
    for max in [1 << 20, 50_000, 0] {
        for path in ["/length", "/chunks"] {
            let url = format!("{}{path}", upstream.url());
            let options = SendOptions::in_memory().max_response(max);
            let answer = send(&client(), payment(&url), &options).await.unwrap();
            assert_eq!(answer.response.url().as_str(), url);
            assert_eq!(answer.response.bytes().await.unwrap(), body, "{path} {max}");
        }
    }
    // The head is enough for a stream: it may never end.
    upstream.on("/events", UpstreamReply::events(3, Duration::from_millis(100)));
    let url = format!("{}/events", upstream.url());
    let answer = send(&client(), payment(&url), &SendOptions::in_memory()).await.unwrap();
    assert!(answer.response.text().await.unwrap().contains("data: 3"));
}

#[tokio::test]
async fn a_streaming_body_is_refused_before_it_is_sent() {
    let upstream = TestUpstream::start().await;
    let keys = KeyFolder::new();
    let body = reqwest::Body::wrap(Full::new(Bytes::from_static(b"once")));
    let request = client().post(upstream.url()).body(body).build().unwrap();
    let stopped = send(&client(), request, &keys.options()).await.unwrap_err();
    assert_eq!((reason(&stopped), stopped.attempts, upstream.requests()), ("body", 0, 0));
    assert!(stopped.to_string().contains("read it into bytes first"), "{stopped}");
    assert_eq!(keys.files(), 0);
}

#[tokio::test]
async fn a_key_that_was_set_by_hand_is_taken() {
    let upstream = TestUpstream::start().await;
    let keys = KeyFolder::new();
    let mut request = payment(&upstream.url());
    request.headers_mut().insert("idempotency-key", "\"by,hand\"".parse().unwrap());
    let answer = send(&client(), request, &keys.options()).await.unwrap();
    assert_eq!((answer.key.as_str(), upstream.last().key()), ("by,hand", Some("by,hand")));
    let mut request = payment(&upstream.url());
    request.headers_mut().insert("idempotency-key", "a, b".parse().unwrap());
    let stopped = send(&client(), request, &keys.options()).await.unwrap_err();
    assert_eq!((reason(&stopped), upstream.requests()), ("bad-key", 1));
}

#[tokio::test]
async fn keys_are_made_as_asked_and_sent_in_the_header_asked_for() {
    let upstream = TestUpstream::start().await;
    let options = SendOptions::in_memory().header(http::HeaderName::from_static("x-idempotency-key"));
    let operation = KeyGenerator::Operation { user: "u1".into(), operation: "pay".into(), resource: "r9".into() };
    let given = KeyGenerator::Fixed(ClientKey::new("mine").unwrap());
    for (mint, start) in [(operation, "u1:pay:r9:1"), (given, "mine"), (KeyGenerator::derived(["a", "b"]), "")] {
        let options = options.clone().operation("order-17").key_generator(mint);
        let answer = send(&client(), payment(&upstream.url()), &options).await.unwrap();
        assert_eq!(upstream.last().header("x-idempotency-key"), Some(answer.key.as_str()));
        assert!(answer.key.as_str().starts_with(start), "{}", answer.key.as_str());
    }
    let bad = KeyGenerator::Operation { user: "u:1".into(), operation: "pay".into(), resource: "r9".into() };
    let stopped = send(&client(), payment(&upstream.url()), &options.key_generator(bad)).await.unwrap_err();
    assert_eq!((reason(&stopped), upstream.requests()), ("bad-key", 3));
}

/// A journal that misbehaves.
#[derive(Debug, Default)]
struct FaultyJournal {
    inner: MemoryJournal,
    key_age: Duration,
    can_store: bool,
    can_forget: bool,
}

fn journal_error() -> JournalError {
    JournalError::Other("the disk is on fire".into())
}

impl KeyJournal for FaultyJournal {
    fn load_or_store<'a>(&'a self, operation: &'a str, fresh: ClientKey) -> JournalFuture<'a, StoredKey> {
        Box::pin(async move {
            if !self.can_store {
                return Err(journal_error());
            }
            let kept = self.inner.load_or_store(operation, fresh).await?;
            Ok(StoredKey { created_at: SystemTime::now() - self.key_age, ..kept })
        })
    }

    fn finish<'a>(&'a self, operation: &'a str, key: &'a ClientKey, until: SystemTime) -> JournalFuture<'a, ()> {
        Box::pin(async move {
            if self.can_forget { self.inner.finish(operation, key, until).await } else { Err(journal_error()) }
        })
    }

    fn forget<'a>(&'a self, operation: &'a str, key: Option<&'a ClientKey>) -> JournalFuture<'a, ()> {
        Box::pin(
            async move { if self.can_forget { self.inner.forget(operation, key).await } else { Err(journal_error()) } },
        )
    }

    fn pending(&self) -> JournalFuture<'_, Vec<PendingOperation>> {
        self.inner.pending()
    }
}

#[tokio::test]
async fn what_cannot_be_kept_is_not_sent() {
    let upstream = TestUpstream::start().await;
    let options = SendOptions::with_journal(Arc::new(FaultyJournal::default())).operation("order-17");
    let stopped = send(&client(), payment(&upstream.url()), &options).await.unwrap_err();
    assert_eq!((reason(&stopped), upstream.requests()), ("journal", 0));
    assert!(stopped.to_string().ends_with("the journal failed: the disk is on fire"), "{stopped}");
}

#[tokio::test]
async fn an_answer_is_not_withheld_because_the_journal_fails() {
    let upstream = TestUpstream::start().await;
    let journal = FaultyJournal { can_store: true, ..FaultyJournal::default() };
    let options = SendOptions::with_journal(Arc::new(journal)).operation("order-17");
    let answer = send(&client(), payment(&upstream.url()), &options).await.unwrap();
    assert!(answer.journal_error.is_some(), "{answer:?}");
}

#[tokio::test]
async fn what_was_begun_too_long_ago_is_not_sent_again() {
    let upstream = TestUpstream::start().await;
    let journal = FaultyJournal {
        can_store: true,
        can_forget: true,
        key_age: Duration::from_secs(600),
        ..FaultyJournal::default()
    };
    let options = SendOptions::with_journal(Arc::new(journal)).operation("order-17");
    let late = options.clone().server_ttl(Duration::from_secs(300));
    let stopped = send(&client(), payment(&upstream.url()), &late).await.unwrap_err();
    assert_eq!((reason(&stopped), upstream.requests()), ("key-too-old", 0), "{stopped}");
    send(&client(), payment(&upstream.url()), &options).await.unwrap();
    assert_eq!(upstream.requests(), 1);
}
