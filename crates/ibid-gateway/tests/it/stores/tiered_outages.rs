//! `bookings` with its shipped configuration on Redis with PostgreSQL behind it, while one of them is away, or both.

use testbed::{
    TestPostgres, TestRedis,
    client::{TestRequest, TestResponse, get, post},
    process::GatewayProcess,
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};

use super::common::{assert_degraded, migrated_database, read_counter, start_two};
use crate::presets::shipped_config;
use crate::support::until_some;

const FALLBACK_METRIC: &str = "idempotency_fallback_total";
/// Keys that are used up, at most, until the outage has been noticed.
const MAX_KEYS: usize = 50;

struct TieredGateways {
    redis: TestRedis,
    postgres: TestPostgres,
    database: String,
    upstream: TestUpstream,
    first_gateway: GatewayProcess,
    second_gateway: GatewayProcess,
}

impl TieredGateways {
    async fn start() -> TieredGateways {
        let (redis, postgres) = (TestRedis::start(), TestPostgres::start());
        let (url, database) = migrated_database(&postgres, postgres.port()).await;
        let upstream = TestUpstream::start().await;
        let store = format!(
            "[store]\nurl = {:?}\nfallback = {url:?}\nlocal_cache = \"0\"\ntimeout = \"1s\"\nstrict = false\n",
            redis.url()
        );
        let [one, other] = start_two(&format!("{}\n{store}", shipped_config("bookings")), &upstream).await;
        TieredGateways { redis, postgres, database, upstream, first_gateway: one, second_gateway: other }
    }

    /// How many records PostgreSQL has of answers.
    fn recorded_answers(&self) -> String {
        self.postgres.sql(&self.database, "SELECT count(*) FROM ibid.idempotency_keys WHERE state = 'done'")
    }
}

fn booking_request(gateway: &GatewayProcess, nth: usize) -> TestRequest {
    let key = format!("usr_1:booking.create:res_1:{nth}");
    post(gateway.addr(), "/bookings").key(key).json(r#"{"holdId":"hold_1"}"#)
}

#[track_caller]
fn assert_protected(answer: &TestResponse) {
    assert_eq!(answer.status, 201, "{answer:?}");
    for name in ["idempotency-guarantee", "idempotency-stored"] {
        assert!(!answer.headers.contains(name), "{answer:?}");
    }
}

/// Sends with fresh keys, from `from` on, until an answer is as wanted. Returns its number and the answer.
async fn send_until(
    gateway: &GatewayProcess, from: usize, what: &str, wanted: impl Fn(&TestResponse) -> bool,
) -> (usize, TestResponse) {
    for nth in from..from + MAX_KEYS {
        let answer = booking_request(gateway, nth).send().await;
        assert_eq!(answer.status, 201, "{answer:?}");
        if wanted(&answer) {
            return (nth, answer);
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    panic!("no answer with {MAX_KEYS} keys was {what}");
}

#[tokio::test]
async fn without_redis_postgres_decides_and_it_is_counted() {
    let stage = TieredGateways::start().await;
    let before = booking_request(&stage.first_gateway, 1).send().await;
    assert_protected(&before);
    assert_eq!(read_counter(&stage.first_gateway, FALLBACK_METRIC).await, 0);

    stage.redis.kill();
    let first = booking_request(&stage.first_gateway, 2).send().await;
    assert_protected(&first);
    assert!(read_counter(&stage.first_gateway, FALLBACK_METRIC).await > 0, "it is counted");
    stage.first_gateway.wait_for_log("decided by the fallback store").await;
    for (nth, answer) in [(1, &before), (2, &first)] {
        for gateway in [&stage.second_gateway, &stage.first_gateway] {
            let again = booking_request(gateway, nth).send().await;
            assert_protected(&again);
            assert_eq!(again.body, answer.body, "{again:?}");
        }
    }
    let gate = ReplyGate::new();
    stage.upstream.reply_by_default(UpstreamReply::usual().gated(&gate));
    let mut running = booking_request(&stage.first_gateway, 3).start().await;
    gate.arrived(1).await;
    assert_eq!(booking_request(&stage.second_gateway, 3).send().await.status, 409);
    gate.open();
    assert_protected(&running.read_response().await);

    stage.redis.restart();
    for gateway in [&stage.first_gateway, &stage.second_gateway] {
        assert_eq!(booking_request(gateway, 2).send().await.body, first.body);
    }
    assert_eq!(stage.upstream.executions(), 3);
    // In sight again, it is used again: nothing more is counted.
    let quiet = until_some("no more fallbacks", || async {
        let counted = read_counter(&stage.first_gateway, FALLBACK_METRIC).await;
        assert_eq!(booking_request(&stage.first_gateway, 2).send().await.body, first.body);
        (read_counter(&stage.first_gateway, FALLBACK_METRIC).await == counted).then_some(counted)
    })
    .await;
    assert_protected(&booking_request(&stage.first_gateway, 4).send().await);
    assert_eq!((read_counter(&stage.first_gateway, FALLBACK_METRIC).await, stage.upstream.executions()), (quiet, 4));
}

#[tokio::test]
async fn without_postgres_redis_goes_on_alone_and_its_answers_are_drained() {
    let mut stage = TieredGateways::start().await;
    assert_protected(&booking_request(&stage.first_gateway, 1).send().await);
    let recorded: usize = stage.recorded_answers().parse().expect("a number");
    assert_eq!(recorded, 1);

    stage.postgres.kill();
    // The first call on a connection that has just died has no answer: it may have been applied, and never runs solo.
    let is_solo = |answer: &TestResponse| {
        assert_degraded(answer);
        answer.header("idempotency-stored") == Some("pending")
    };
    let (nth, first) = send_until(&stage.first_gateway, 100, "solo", is_solo).await;
    assert!(read_counter(&stage.first_gateway, FALLBACK_METRIC).await > 0, "it is counted");
    stage.first_gateway.wait_for_log("claimed without the store that decides; degraded").await;
    let runs = stage.upstream.executions();
    for gateway in [&stage.first_gateway, &stage.second_gateway] {
        let again = booking_request(gateway, nth).send().await;
        assert_eq!((again.status, &again.body), (201, &first.body), "{again:?}");
        assert_degraded(&again);
        assert_eq!(again.header("idempotency-stored"), Some("pending"), "{again:?}");
        assert_eq!(stage.upstream.executions(), runs, "Redis has the answer");
    }
    // Not even one that has never seen PostgreSQL runs it again.
    stage.second_gateway.restart().await;
    let again = booking_request(&stage.second_gateway, nth).send().await;
    assert_eq!((again.status, &again.body), (201, &first.body), "{again:?}");
    assert_eq!(stage.upstream.executions(), runs);
    // What runs solo is seen by whoever sees Redis.
    let gate = ReplyGate::new();
    stage.upstream.reply_by_default(UpstreamReply::usual().gated(&gate));
    let mut running = booking_request(&stage.first_gateway, 200).start().await;
    gate.arrived(1).await;
    assert_eq!(booking_request(&stage.second_gateway, 200).send().await.status, 409);
    gate.open();
    let second = running.read_response().await;
    assert_degraded(&second);
    assert_eq!(second.header("idempotency-stored"), Some("pending"), "{second:?}");
    let runs = stage.upstream.executions();

    stage.postgres.restart();
    until_some("both answers to reach PostgreSQL", || async {
        let drained = stage.first_gateway.logs();
        let drained = drained.iter().filter(|line| line.contains("the journal's answer has reached the store"));
        (drained.count() >= 2).then_some(())
    })
    .await;
    // A gateway that has not noticed yet that PostgreSQL is back would run unprotected.
    until_some("the second gateway to use PostgreSQL again", || async {
        let ready = get(stage.second_gateway.admin_addr(), "/readyz").send().await;
        (ready.json()["store"]["claims"] == "full").then_some(())
    })
    .await;
    // Without Redis, so that only PostgreSQL can know.
    stage.redis.kill();
    for (nth, answer) in [(nth, &first), (200, &second)] {
        let again = until_some("PostgreSQL to be used again", || async {
            let again = booking_request(&stage.second_gateway, nth).send().await;
            (!again.headers.contains("idempotency-guarantee")).then_some(again)
        })
        .await;
        assert_protected(&again);
        assert_eq!(again.body, answer.body, "{again:?}");
    }
    assert_eq!(stage.upstream.executions(), runs);
    assert_eq!(
        read_counter(&stage.first_gateway, "idempotency_lost_claims_total").await,
        0,
        "nothing was started twice"
    );
    assert_eq!(stage.recorded_answers(), (recorded + 2).to_string());
}

#[tokio::test]
async fn without_both_it_is_open_as_the_preset_says() {
    let stage = TieredGateways::start().await;
    let before = booking_request(&stage.first_gateway, 1).send().await;
    assert_protected(&before);

    stage.redis.kill();
    stage.postgres.kill();
    for runs in [2, 3] {
        let answer = booking_request(&stage.first_gateway, 2).send().await;
        assert_degraded(&answer);
        assert!(!answer.headers.contains("idempotency-stored"), "{answer:?}");
        assert_eq!(stage.upstream.executions(), runs);
    }

    stage.redis.restart();
    stage.postgres.restart();
    let is_protected = |answer: &TestResponse| !answer.headers.contains("idempotency-guarantee");
    for gateway in [&stage.first_gateway, &stage.second_gateway] {
        send_until(
            gateway,
            if std::ptr::eq(gateway, &stage.first_gateway) { 300 } else { 400 },
            "protected",
            is_protected,
        )
        .await;
    }
    let runs = stage.upstream.executions();
    for gateway in [&stage.first_gateway, &stage.second_gateway] {
        let again = booking_request(gateway, 1).send().await;
        assert_protected(&again);
        assert_eq!(again.body, before.body, "{again:?}");
    }
    assert_eq!(stage.upstream.executions(), runs);
}
