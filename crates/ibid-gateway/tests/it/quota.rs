//! Quotas: what a tenant may begin. Retries are never refused for it, and never charged.

use std::time::Duration;

use testbed::{
    TestPostgres, TestRedis,
    client::{TestRequest, post},
    grpc::{GrpcTestClient, message},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};
use tokio::time::sleep;

use crate::support::{BIN, assert_ran, assert_replay, run_ibid, start_gateway, within};

fn config(quota: &str, dials: &str) -> String {
    format!("[quota]\n{quota}\n[policy]\npreset = \"ietf\"\nscope = [\"header:X-Tenant-Id\"]\n{dials}\n")
}

async fn gateway(upstream: &TestUpstream, quota: &str, dials: &str, store: &str) -> GatewayProcess {
    GatewayProcess::launch(BIN)
        .config(config(quota, dials))
        .upstream(&upstream.url())
        .arg("--store")
        .arg(store)
        .start()
        .await
}

fn pay(gateway: &GatewayProcess, tenant: &str, key: &str) -> TestRequest {
    post(gateway.addr(), "/pay").header("X-Tenant-Id", tenant).key(key).json("{}")
}

/// Refused for now; returns when to try again, in seconds.
async fn over(request: TestRequest) -> u64 {
    let answer = request.send().await;
    assert_eq!(answer.status, 429, "{answer:?}");
    assert_eq!(answer.json()["type"], "/.well-known/idempotency#quota-exceeded", "{answer:?}");
    answer.header("retry-after").expect("it says when").parse().expect("seconds")
}

#[tokio::test]
async fn new_keys_are_limited_per_tenant_and_retries_are_not() {
    for store in ["memory:", "embedded:data"] {
        let upstream = TestUpstream::start().await;
        let gateway = gateway(&upstream, "new_keys = \"3/1h\"", "", store).await;
        let mut firsts = Vec::new();
        for key in ["k-1", "k-2", "k-3"] {
            firsts.push((key, pay(&gateway, "a", key).send().await));
            // Replays in between cost nothing.
            assert_replay(&pay(&gateway, "a", key).send().await, &firsts[firsts.len() - 1].1);
        }
        let after = over(pay(&gateway, "a", "k-4")).await;
        assert!((3500..=3600).contains(&after), "{after}");
        for (key, first) in &firsts {
            assert_ran(first);
            assert_replay(&pay(&gateway, "a", key).send().await, first);
        }
        // The key that was refused is not used up; other tenants are not concerned.
        assert!(over(pay(&gateway, "a", "k-4")).await <= after);
        assert_ran(&pay(&gateway, "b", "k-4").send().await);
        assert_eq!(upstream.executions(), 4);
        assert_eq!(refused_metric(&gateway).await, 2);
    }
}

/// How often requests were refused for their quota, as the metrics say.
async fn refused_metric(gateway: &GatewayProcess) -> usize {
    let text = testbed::client::get(gateway.admin_addr(), "/metrics").send().await.text();
    let line =
        text.lines().find(|line| line.starts_with("idempotency_requests_total") && line.contains("quota-exceeded"));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("it is not counted: {text}"))
}

#[tokio::test]
async fn bytes_are_limited_per_tenant_and_retries_are_not() {
    for store in ["memory:", "embedded:data"] {
        let upstream = TestUpstream::start().await;
        upstream.on("/pay", UpstreamReply::status(201).body(vec![b'x'; 4096]));
        let plain = "[store]\ncompress = false";
        let gateway = gateway(&upstream, "new_bytes = \"10KiB/1h\"", plain, store).await;
        let mut firsts = Vec::new();
        for key in ["k-1", "k-2", "k-3"] {
            firsts.push((key, pay(&gateway, "a", key).send().await));
        }
        let after = over(pay(&gateway, "a", "k-4")).await;
        assert!((3500..=3600).contains(&after), "{after}");
        for (key, first) in &firsts {
            assert_eq!(first.status, 201);
            assert_replay(&pay(&gateway, "a", key).send().await, first);
        }
        // Other tenants are not concerned, nor is what has no key.
        assert_eq!(pay(&gateway, "b", "k-4").send().await.status, 201);
        let keyless = post(gateway.addr(), "/pay").header("X-Tenant-Id", "a").json("{}").send().await;
        assert_eq!((keyless.status, upstream.executions()), (201, 5), "{keyless:?}");
    }
}

#[tokio::test]
async fn a_window_ends_and_the_next_begins() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway(&upstream, "new_keys = \"2/2s\"", "", "memory:").await;
    assert_ran(&pay(&gateway, "a", "k-1").send().await);
    assert_ran(&pay(&gateway, "a", "k-2").send().await);
    assert!(over(pay(&gateway, "a", "k-3")).await <= 2);
    within("the next window", async {
        while pay(&gateway, "a", "k-3").send().await.status == 429 {
            sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
    assert_eq!(upstream.executions(), 3);
}

#[tokio::test]
async fn gateways_on_one_store_share_the_count() {
    let redis = TestRedis::start();
    let postgres = TestPostgres::shared();
    let database = postgres.create_database();
    let migrated = run_ibid(&["migrate", "--store", &postgres.url("migrator", &database)], &[]).await;
    assert!(migrated.code == Some(0), "{migrated:?}");
    for store in [redis.url(), postgres.url("gateway", &database)] {
        let upstream = TestUpstream::start().await;
        let one = gateway(&upstream, "new_keys = \"4/1h\"", "", &store).await;
        let other = gateway(&upstream, "new_keys = \"4/1h\"", "", &store).await;
        for n in 0..2 {
            assert_ran(&pay(&one, "a", &format!("one-{n}")).send().await);
            assert_ran(&pay(&other, "a", &format!("other-{n}")).send().await);
        }
        for gateway in [&one, &other] {
            let after = over(pay(gateway, "a", "k-5")).await;
            assert!((3500..=3600).contains(&after), "{after}");
            assert_eq!(pay(gateway, "a", "one-0").send().await.header("idempotent-replayed"), Some("true"));
        }
        assert_ran(&pay(&one, "b", "k-1").send().await);
        assert_eq!(upstream.executions(), 5, "{store}");
    }
}

#[tokio::test]
async fn a_crowd_begins_exactly_what_it_may() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway(&upstream, "new_keys = \"7/1h\"", "", "memory:").await;
    let all = (0..60).map(|n| {
        let request = pay(&gateway, "a", &format!("k-{n}"));
        tokio::spawn(async move { request.send().await.status })
    });
    let mut ran = 0;
    for task in all.collect::<Vec<_>>() {
        match task.await.unwrap() {
            201 => ran += 1,
            status => assert_eq!(status, 429),
        }
    }
    assert_eq!((ran, upstream.executions()), (7, 7));
}

#[tokio::test]
async fn duplicates_of_a_running_request_are_told_so_and_not_that_the_quota_is_used_up() {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/pay");
    let gateway = gateway(&upstream, "new_keys = \"1/1h\"", "", "memory:").await;
    let first = pay(&gateway, "a", "k-1");
    let running = tokio::spawn(async move { first.send().await });
    upstream.wait_for(1).await;
    assert_eq!(pay(&gateway, "a", "k-1").send().await.status, 409);
    over(pay(&gateway, "a", "k-2")).await;
    gate.open();
    assert_ran(&running.await.unwrap());
}

#[tokio::test]
async fn what_did_not_happen_may_be_tried_again_without_another_charge() {
    let upstream = TestUpstream::start().await;
    upstream.on_each("/pay", [UpstreamReply::status(503), UpstreamReply::usual()]);
    let gateway = gateway(&upstream, "new_keys = \"2/1h\"", "", "memory:").await;
    assert_eq!(pay(&gateway, "a", "k-1").send().await.status, 503);
    assert_ran(&pay(&gateway, "a", "k-1").send().await);
    assert_ran(&pay(&gateway, "a", "k-2").send().await);
    over(pay(&gateway, "a", "k-3")).await;
}

#[tokio::test]
async fn a_rate_holds_per_user_and_gives_way_with_time() {
    let upstream = TestUpstream::start().await;
    let dials = "label.user = \"header:X-User-Id\"";
    let gateway = gateway(&upstream, "rate = \"3/1m\"", dials, "memory:").await;
    let of = |user: &str, key: &str| pay(&gateway, "a", key).header("X-User-Id", user);
    for key in ["k-1", "k-2", "k-3"] {
        assert_ran(&of("u1", key).send().await);
    }
    let after = over(of("u1", "k-4")).await;
    assert!((10..=20).contains(&after), "{after}");
    assert_eq!(of("u1", "k-1").send().await.header("idempotent-replayed"), Some("true"));
    assert_ran(&of("u2", "k-4").send().await);
}

#[tokio::test]
async fn a_rate_is_counted_per_tenant_and_user() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway(&upstream, "rate = \"2/1h\"", "label.user = \"header:X-User-Id\"", "memory:").await;
    let of =
        |tenant: &str, user: &str, n: u32| pay(&gateway, tenant, &format!("k-{user}-{n}")).header("X-User-Id", user);
    // Users of one name at two tenants are two users, and users of one tenant are, too.
    for (tenant, user) in [("a", "u1"), ("a", "u2"), ("b", "u1"), ("b", "u2"), ("au", "1")] {
        for n in 0..2 {
            assert_ran(&of(tenant, user, n).send().await);
        }
        over(of(tenant, user, 2)).await;
    }
    assert_eq!(upstream.executions(), 10);
}

/// Changes the limits in the file, and waits until they hold.
async fn change(gateway: &GatewayProcess, quota: &str, taken: usize) {
    gateway.rewrite_config(&config(quota, ""));
    within("the file is taken up", async {
        while gateway.logs().iter().filter(|line| line.contains("configuration taken up")).count() < taken {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_changed_file_changes_the_limits_and_gives_nobody_a_new_allowance() {
    let redis = TestRedis::start();
    for store in ["memory:".to_owned(), "embedded:data".to_owned(), redis.url()] {
        let upstream = TestUpstream::start().await;
        let gateway = gateway(&upstream, "", "", &store).await;
        let begin = async |keys: std::ops::Range<u32>| {
            for n in keys {
                assert_ran(&pay(&gateway, "a", &format!("k-{n}")).send().await);
            }
        };
        // From none to some, to more, to fewer, to none and back.
        begin(0..1).await;
        change(&gateway, "new_keys = \"3/1h\"", 1).await;
        begin(1..4).await;
        over(pay(&gateway, "a", "k-4")).await;
        change(&gateway, "new_keys = \"5/1h\"", 2).await;
        begin(4..6).await;
        over(pay(&gateway, "a", "k-6")).await;
        change(&gateway, "new_keys = \"2/1h\"", 3).await;
        over(pay(&gateway, "a", "k-6")).await;
        assert_eq!(pay(&gateway, "a", "k-5").send().await.header("idempotent-replayed"), Some("true"));
        assert_ran(&pay(&gateway, "b", "k-1").send().await);
        change(&gateway, "", 4).await;
        begin(6..7).await;
        change(&gateway, "new_keys = \"5/1h\"", 5).await;
        over(pay(&gateway, "a", "k-7")).await;
        // Other windows begin when those that run have ended.
        change(&gateway, "new_keys = \"5/1s\"", 6).await;
        assert!(over(pay(&gateway, "a", "k-7")).await > 3000);
        assert_eq!(upstream.executions(), 8, "{store}");
        assert!(!gateway.logs().iter().any(|line| line.contains("needs_restart")), "{:?}", gateway.logs());
        let page = testbed::client::get(gateway.addr(), "/.well-known/idempotency").send().await;
        assert!(page.text().contains("quota-exceeded"), "the contract says so: {}", page.text());
    }
}

#[tokio::test]
async fn a_restart_gives_nobody_a_new_allowance_where_the_store_outlives_it() {
    let upstream = TestUpstream::start().await;
    let mut gateway = gateway(&upstream, "new_keys = \"2/1h\"", "", "embedded:data").await;
    for key in ["k-1", "k-2"] {
        assert_ran(&pay(&gateway, "a", key).send().await);
    }
    over(pay(&gateway, "a", "k-3")).await;
    gateway.kill().await;
    gateway.restart().await;
    over(pay(&gateway, "a", "k-3")).await;
    assert_eq!(pay(&gateway, "a", "k-1").send().await.header("idempotent-replayed"), Some("true"));
    assert_ran(&pay(&gateway, "b", "k-1").send().await);
}

#[tokio::test]
async fn a_changed_rate_holds_at_once() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway(&upstream, "rate = \"2/1h\"", "", "memory:").await;
    for key in ["k-1", "k-2"] {
        assert_ran(&pay(&gateway, "a", key).send().await);
    }
    over(pay(&gateway, "a", "k-3")).await;
    change(&gateway, "rate = \"3/1h\"", 1).await;
    assert_ran(&pay(&gateway, "a", "k-3").send().await);
    let after = over(pay(&gateway, "a", "k-4")).await;
    assert!((1100..=1200).contains(&after), "a third of an hour: {after}");
    change(&gateway, "rate = \"1/1h\"", 2).await;
    let after = over(pay(&gateway, "a", "k-4")).await;
    assert!((3500..=3600).contains(&after), "what was begun is not forgotten: {after}");
}

#[tokio::test]
async fn in_shadow_mode_nobody_is_refused() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway(&upstream, "new_keys = \"1/1h\"\nrate = \"1/1h\"", "mode = \"shadow\"", "memory:").await;
    for n in 0..3 {
        assert_eq!(pay(&gateway, "a", &format!("k-{n}")).send().await.status, 201);
    }
    assert_eq!(upstream.executions(), 3);
}

#[tokio::test]
async fn a_call_over_its_quota_is_resource_exhausted() {
    let upstream = TestUpstream::start_h2c().await;
    let config =
        "[quota]\nnew_keys = \"1/1h\"\n[[route]]\nmatch = \"grpc shop.Orders/Create\"\npreset = \"platform\"\n";
    let gateway = start_gateway(config, &upstream).await;
    let client = GrpcTestClient::connect(gateway.addr()).await;
    client.call("/shop.Orders/Create", &[("idempotency-key", "k-1")], message("ten")).await;
    let second = client.call("/shop.Orders/Create", &[("idempotency-key", "k-2")], message("ten")).await;
    second.assert_refused(8, "QUOTA_EXCEEDED");
    assert_eq!(upstream.requests(), 1);
}
