//! Each preset with its shipped configuration on the kind of store that its page names, at two gateways.

use std::{net::SocketAddr, time::Duration};

use testbed::{
    client::{TestRequest, TestResponse, post},
    process::GatewayProcess,
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};
use tokio::{task::JoinSet, time::timeout};

use super::common::start_two;
use crate::support::{assert_refused, run_ibid};
use crate::{
    keys::{self, TestStore},
    presets::shipped_config,
};

/// Of the same request at the same time, over both gateways.
const DUPLICATE_COUNT: usize = 8;
/// How long nobody may be answered before the test believes that all of them wait.
const SILENCE_DURATION: Duration = Duration::from_millis(300);

/// What is said of a preset in its own words.
struct PresetCase {
    preset: &'static str,
    endpoint: &'static str,
    request: fn(SocketAddr, &str) -> TestRequest,
    keys: [&'static str; 2],
    bodies: [&'static str; 2],
    /// The same key with another body.
    on_reuse: ReuseOutcome,
    /// Whether a duplicate waits for the first; else it is refused.
    duplicates_wait: bool,
    /// What a replay says of itself.
    replay_header: Option<(&'static str, &'static str)>,
}

#[derive(PartialEq)]
enum ReuseOutcome {
    Refused,
    Replayed,
    New,
}

impl PresetCase {
    fn send(&self, gateway: &GatewayProcess, key: usize) -> TestRequest {
        (self.request)(gateway.addr(), self.keys[key]).json(self.bodies[0])
    }

    fn send_other(&self, gateway: &GatewayProcess, key: usize) -> TestRequest {
        (self.request)(gateway.addr(), self.keys[key]).json(self.bodies[1])
    }

    #[track_caller]
    fn assert_first(&self, answer: &TestResponse, run: usize) {
        assert_eq!((answer.status, execution_number(answer)), (201, run), "{answer:?}");
        assert!(self.replay_header.is_none_or(|(name, value)| answer.header(name) != Some(value)), "{answer:?}");
        for name in ["idempotency-guarantee", "idempotency-stored"] {
            assert!(!answer.headers.contains(name), "{answer:?}");
        }
    }

    #[track_caller]
    fn assert_replay(&self, answer: &TestResponse, run: usize) {
        assert_eq!((answer.status, execution_number(answer)), (201, run), "{answer:?}");
        assert!(self.replay_header.is_none_or(|(name, value)| answer.header(name) == Some(value)), "{answer:?}");
        assert!(!answer.headers.contains("idempotency-guarantee"), "{answer:?}");
    }
}

/// Which execution of the upstream an answer is of.
fn execution_number(answer: &TestResponse) -> usize {
    answer.json()["run"].as_u64().unwrap_or_else(|| panic!("no answer of the upstream's: {answer:?}")) as usize
}

async fn assert_preset_holds(case: &PresetCase, place: TestStore) {
    let upstream = TestUpstream::start().await;
    let config = format!("{}\n{}", shipped_config(case.preset), place.settings());
    let [mut one, other] = start_two(&config, &upstream).await;

    case.assert_first(&case.send(&one, 0).send().await, 1);
    for gateway in [&other, &one, &other] {
        case.assert_replay(&case.send(gateway, 0).send().await, 1);
    }
    assert_record_shown(case, &one).await;

    let reused = case.send_other(&other, 0).send().await;
    match case.on_reuse {
        ReuseOutcome::Refused => drop(assert_refused(&reused, 422, "key-reused")),
        ReuseOutcome::Replayed => case.assert_replay(&reused, 1),
        ReuseOutcome::New => {
            case.assert_first(&reused, 2);
            case.assert_replay(&case.send_other(&one, 0).send().await, 2);
        }
    }
    let before = upstream.executions();
    assert_eq!(before, if case.on_reuse == ReuseOutcome::New { 2 } else { 1 });

    of_duplicates_at_both_one_runs(case, &upstream, [&one, &other]).await;

    one.restart().await;
    case.assert_replay(&case.send(&one, 0).send().await, 1);
    case.assert_replay(&case.send(&one, 1).send().await, before + 1);
    assert_eq!(upstream.executions(), before + 1, "{:#?}", upstream.log());
}

async fn of_duplicates_at_both_one_runs(case: &PresetCase, upstream: &TestUpstream, gateways: [&GatewayProcess; 2]) {
    let run = upstream.executions() + 1;
    let gate = ReplyGate::new();
    upstream.reply_by_default(UpstreamReply::usual().gated(&gate));
    let mut answers = JoinSet::new();
    for n in 0..DUPLICATE_COUNT {
        let request = case.send(gateways[n % 2], 1);
        answers.spawn(async move { request.send().await });
    }
    gate.arrived(1).await;
    if case.duplicates_wait {
        let early = timeout(SILENCE_DURATION, answers.join_next()).await;
        assert!(early.is_err(), "answered while the first is running: {early:?}");
    } else {
        for _ in 1..DUPLICATE_COUNT {
            let refused = answers.join_next().await.expect("one of them").expect("an answer");
            assert_refused(&refused, 409, "in-progress");
        }
    }
    gate.open();
    let last = answers.join_all().await;
    assert_eq!(last.len(), if case.duplicates_wait { DUPLICATE_COUNT } else { 1 });
    assert!(last.iter().all(|answer| answer.status == 201 && execution_number(answer) == run), "{last:?}");
    assert_eq!((gate.count(), upstream.executions()), (1, run));
    upstream.clear_rules();
    for gateway in gateways {
        case.assert_replay(&case.send(gateway, 1).send().await, run);
    }
}

/// The record is in the store that the gateways share, for people to see.
async fn assert_record_shown(case: &PresetCase, gateway: &GatewayProcess) {
    let file = gateway.dir().join("ibid.toml");
    let file = file.to_str().expect("a plain path");
    let shown = run_ibid(&["keys", "show", "--key", case.keys[0], "--json", "--config", file], &[]).await;
    let said = &shown.stderr;
    assert!(shown.code == Some(0) && said.is_empty(), "{said}");
    let record = shown.json();
    assert_eq!((&record["state"], &record["status"], &record["attempt"]), (&"done".into(), &201.into(), &1.into()));
    assert_eq!(record["endpoint"], case.endpoint, "{record}");
    assert_eq!(record["response"]["body"]["text"], r#"{"id":1,"run":1}"#, "{record}");
    assert!(!record.to_string().contains(case.keys[0]), "it is kept masked: {record}");
}

#[tokio::test]
async fn leads_on_redis() {
    let case = PresetCase {
        preset: "leads",
        endpoint: "POST /api/leads",
        request: |addr, key| post(addr, "/api/leads").header("X-Idempotency-Key", key),
        keys: ["550e8400-e29b-41d4-a716-446655440000", "7c9e6679-7425-40de-944b-e07fc1f90ae7"],
        bodies: [r#"{"name":"Test","email":"test@example.com"}"#, r#"{"name":"Test2","email":"test@example.com"}"#],
        on_reuse: ReuseOutcome::New,
        duplicates_wait: true,
        replay_header: None,
    };
    assert_preset_holds(&case, keys::redis().await).await;
}

#[tokio::test]
async fn appsportal_on_redis() {
    let case = PresetCase {
        preset: "appsportal",
        endpoint: "POST|PUT|PATCH /api/*",
        request: |addr, key| {
            post(addr, "/api/invoices").header("X-Tenant-Id", "tenant-a").header("X-Idempotency-Key", key)
        },
        keys: ["invoice-of-customer-123", "invoice-of-customer-124"],
        bodies: [r#"{"customer":123}"#, r#"{"customer":999}"#],
        on_reuse: ReuseOutcome::Replayed,
        duplicates_wait: false,
        replay_header: Some(("x-idempotency-replay", "true")),
    };
    assert_preset_holds(&case, keys::redis().await).await;
}

#[tokio::test]
async fn bookings_on_redis_with_postgres_behind_it() {
    let case = PresetCase {
        preset: "bookings",
        endpoint: "POST /bookings",
        request: |addr, key| post(addr, "/bookings").key(key),
        keys: ["usr_abc123:booking.create:res_xyz:1704067200000", "usr_abc123:booking.create:res_xyz:1704067200001"],
        bodies: [r#"{"holdId":"hold_123"}"#, r#"{"holdId":"hold_999"}"#],
        on_reuse: ReuseOutcome::Replayed,
        duplicates_wait: false,
        replay_header: None,
    };
    assert_preset_holds(&case, keys::fallback().await).await;
}

#[tokio::test]
async fn platform_on_postgres() {
    let case = PresetCase {
        preset: "platform",
        endpoint: "POST /orders",
        request: |addr, key| post(addr, "/orders").key(key),
        keys: ["order-1841-of-today", "order-1842-of-today"],
        bodies: [r#"{"sku":"A1","count":2}"#, r#"{"sku":"A1","count":3}"#],
        on_reuse: ReuseOutcome::Refused,
        duplicates_wait: false,
        replay_header: None,
    };
    assert_preset_holds(&case, keys::postgres().await).await;
}

#[tokio::test]
async fn membership_on_postgres() {
    let case = PresetCase {
        preset: "membership",
        endpoint: "POST /api/membership/apply",
        request: |addr, key| post(addr, "/api/membership/apply").header("X-User-Id", "user-1").key(key),
        keys: ["application_of_user_1_today", "application_of_user_1_later"],
        bodies: [r#"{"club_id":"club-1"}"#, r#"{"club_id":"club-2"}"#],
        on_reuse: ReuseOutcome::Replayed,
        duplicates_wait: true,
        replay_header: Some(("x-idempotency-cached", "true")),
    };
    assert_preset_holds(&case, keys::postgres().await).await;
}
