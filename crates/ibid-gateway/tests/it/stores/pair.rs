//! `bookings` with its shipped configuration on Redis with PostgreSQL behind it, while one of them is away, or both.

use ibid_testkit::{
    client::{Request, Response, post},
    process::Gateway,
    servers::{postgres, redis},
    upstream::{Gate, Reply, Upstream},
};

use super::kit::{assert_degraded, counter, migrated, two, until};
use crate::presets::shipped;

const FALLBACKS: &str = "idempotency_fallback_total";
/// Keys that are used up, at most, until the outage has been noticed.
const KEYS: usize = 50;

struct Stage {
    redis: redis::Server,
    postgres: postgres::Server,
    database: String,
    upstream: Upstream,
    one: Gateway,
    other: Gateway,
}

impl Stage {
    async fn start() -> Stage {
        let (redis, postgres) = (redis::Server::start(), postgres::Server::start());
        let (url, database) = migrated(&postgres, postgres.port()).await;
        let upstream = Upstream::start().await;
        let store = format!(
            "[store]\nurl = {:?}\nfallback = {url:?}\nnear = \"0\"\ntimeout = \"1s\"\nstrict = false\n",
            redis.url()
        );
        let [one, other] = two(&format!("{}\n{store}", shipped("bookings")), &upstream).await;
        Stage { redis, postgres, database, upstream, one, other }
    }

    /// How many records PostgreSQL has of answers.
    fn recorded(&self) -> String {
        self.postgres.sql(&self.database, "SELECT count(*) FROM ibid.idempotency_keys WHERE state = 'done'")
    }
}

fn book(gateway: &Gateway, nth: usize) -> Request {
    let key = format!("usr_1:booking.create:res_1:{nth}");
    post(gateway.addr(), "/bookings").key(key).json(r#"{"holdId":"hold_1"}"#)
}

#[track_caller]
fn assert_protected(answer: &Response) {
    assert_eq!(answer.status, 201, "{answer:?}");
    for name in ["idempotency-guarantee", "idempotency-stored"] {
        assert!(!answer.headers.contains(name), "{answer:?}");
    }
}

/// Sends with fresh keys, from `from` on, until an answer is as wanted. Returns its number and the answer.
async fn first_that(
    gateway: &Gateway, from: usize, what: &str, wanted: impl Fn(&Response) -> bool,
) -> (usize, Response) {
    for nth in from..from + KEYS {
        let answer = book(gateway, nth).send().await;
        assert_eq!(answer.status, 201, "{answer:?}");
        if wanted(&answer) {
            return (nth, answer);
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    panic!("no answer with {KEYS} keys was {what}");
}

#[tokio::test]
async fn without_redis_postgres_decides_and_it_is_counted() {
    let stage = Stage::start().await;
    let before = book(&stage.one, 1).send().await;
    assert_protected(&before);
    assert_eq!(counter(&stage.one, FALLBACKS).await, 0);

    stage.redis.kill();
    let first = book(&stage.one, 2).send().await;
    assert_protected(&first);
    assert!(counter(&stage.one, FALLBACKS).await > 0, "it is counted");
    stage.one.wait_for_log("decided by the fallback store").await;
    for (nth, answer) in [(1, &before), (2, &first)] {
        for gateway in [&stage.other, &stage.one] {
            let again = book(gateway, nth).send().await;
            assert_protected(&again);
            assert_eq!(again.body, answer.body, "{again:?}");
        }
    }
    let gate = Gate::new();
    stage.upstream.on_any(Reply::usual().gated(&gate));
    let mut running = book(&stage.one, 3).start().await;
    gate.arrived(1).await;
    assert_eq!(book(&stage.other, 3).send().await.status, 409);
    gate.open();
    assert_protected(&running.read_response().await);

    stage.redis.restart();
    for gateway in [&stage.one, &stage.other] {
        assert_eq!(book(gateway, 2).send().await.body, first.body);
    }
    assert_eq!(stage.upstream.executions(), 3);
    // In sight again, it is used again: nothing more is counted.
    let quiet = until("no more fallbacks", || async {
        let counted = counter(&stage.one, FALLBACKS).await;
        assert_eq!(book(&stage.one, 2).send().await.body, first.body);
        (counter(&stage.one, FALLBACKS).await == counted).then_some(counted)
    })
    .await;
    assert_protected(&book(&stage.one, 4).send().await);
    assert_eq!((counter(&stage.one, FALLBACKS).await, stage.upstream.executions()), (quiet, 4));
}

#[tokio::test]
async fn without_postgres_redis_goes_on_alone_and_its_answers_are_drained() {
    let mut stage = Stage::start().await;
    assert_protected(&book(&stage.one, 1).send().await);
    let recorded: usize = stage.recorded().parse().expect("a number");
    assert_eq!(recorded, 1);

    stage.postgres.kill();
    // The first call on a connection that has just died has no answer: it may have been applied, and never runs solo.
    let is_solo = |answer: &Response| {
        assert_degraded(answer);
        answer.header("idempotency-stored") == Some("pending")
    };
    let (nth, first) = first_that(&stage.one, 100, "solo", is_solo).await;
    assert!(counter(&stage.one, FALLBACKS).await > 0, "it is counted");
    stage.one.wait_for_log("claimed without the store that decides; degraded").await;
    let runs = stage.upstream.executions();
    for gateway in [&stage.one, &stage.other] {
        let again = book(gateway, nth).send().await;
        assert_eq!((again.status, &again.body), (201, &first.body), "{again:?}");
        assert_eq!(stage.upstream.executions(), runs, "Redis has the answer");
    }
    // Not even one that has never seen PostgreSQL runs it again.
    stage.other.restart().await;
    let again = book(&stage.other, nth).send().await;
    assert_eq!((again.status, &again.body), (201, &first.body), "{again:?}");
    assert_eq!(stage.upstream.executions(), runs);
    // What runs solo is seen by whoever sees Redis.
    let gate = Gate::new();
    stage.upstream.on_any(Reply::usual().gated(&gate));
    let mut running = book(&stage.one, 200).start().await;
    gate.arrived(1).await;
    assert_eq!(book(&stage.other, 200).send().await.status, 409);
    gate.open();
    let second = running.read_response().await;
    assert_degraded(&second);
    assert_eq!(second.header("idempotency-stored"), Some("pending"), "{second:?}");
    let runs = stage.upstream.executions();

    stage.postgres.restart();
    until("both answers to reach PostgreSQL", || async {
        let drained = stage.one.logs();
        let drained = drained.iter().filter(|line| line.contains("the journal's answer has reached the store"));
        (drained.count() >= 2).then_some(())
    })
    .await;
    // Without Redis, so that only PostgreSQL can know.
    stage.redis.kill();
    for (nth, answer) in [(nth, &first), (200, &second)] {
        let again = until("PostgreSQL to be used again", || async {
            let again = book(&stage.other, nth).send().await;
            (!again.headers.contains("idempotency-guarantee")).then_some(again)
        })
        .await;
        assert_protected(&again);
        assert_eq!(again.body, answer.body, "{again:?}");
    }
    assert_eq!(stage.upstream.executions(), runs);
    assert_eq!(counter(&stage.one, "idempotency_lost_claims_total").await, 0, "nothing was started twice");
    assert_eq!(stage.recorded(), (recorded + 2).to_string());
}

#[tokio::test]
async fn without_both_it_is_open_as_the_preset_says() {
    let stage = Stage::start().await;
    let before = book(&stage.one, 1).send().await;
    assert_protected(&before);

    stage.redis.kill();
    stage.postgres.kill();
    for runs in [2, 3] {
        let answer = book(&stage.one, 2).send().await;
        assert_degraded(&answer);
        assert!(!answer.headers.contains("idempotency-stored"), "{answer:?}");
        assert_eq!(stage.upstream.executions(), runs);
    }

    stage.redis.restart();
    stage.postgres.restart();
    let is_protected = |answer: &Response| !answer.headers.contains("idempotency-guarantee");
    for gateway in [&stage.one, &stage.other] {
        first_that(gateway, if std::ptr::eq(gateway, &stage.one) { 300 } else { 400 }, "protected", is_protected).await;
    }
    let runs = stage.upstream.executions();
    for gateway in [&stage.one, &stage.other] {
        let again = book(gateway, 1).send().await;
        assert_protected(&again);
        assert_eq!(again.body, before.body, "{again:?}");
    }
    assert_eq!(stage.upstream.executions(), runs);
}
