//! `/readyz` says whether a new key would be granted, on stores that answer and refuse every new key.

use std::{fs, net::SocketAddr};

use serde_json::Value;
use testbed::{
    TestPostgres, TestRedis,
    client::get,
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};

use super::common::{migrated_database, pay, send_until_protected, wait_until_ready};
use crate::disk::TestMount;
use crate::support::{assert_ran, assert_refused, assert_replay, start_gateway};

async fn ready(gateway: &GatewayProcess) -> (u16, Value) {
    let answer = get(gateway.admin_addr(), "/readyz").send().await;
    (answer.status, answer.json())
}

/// Breaks the store, so that it refuses new keys for this reason, and mends it.
async fn assert_readiness_follows(gateway: &GatewayProcess, refuse: impl AsyncFn(), grant: impl AsyncFn(), why: &str) {
    let first = pay(gateway, "before").send().await;
    assert_ran(&first);
    let (status, said) = ready(gateway).await;
    assert_eq!(
        (status, &said["store"]["claims"], &said["store"]["replays"]),
        (200, &"full".into(), &"full".into()),
        "{said}"
    );

    refuse().await;
    wait_until_ready(gateway, false).await;
    assert_refused(&pay(gateway, "during").send().await, 503, "store-unavailable");
    assert_replay(&pay(gateway, "before").send().await, &first);
    let (status, said) = ready(gateway).await;
    let store = &said["store"];
    assert_eq!((status, &store["claims"], &store["replays"]), (503, &"none".into(), &"full".into()), "{said}");
    assert_eq!((&store["stores"][0]["state"], &store["stores"][0]["reads"]), (&"down".into(), &true.into()), "{said}");
    let trouble = store["error"].as_str().unwrap_or_default();
    assert!(trouble.starts_with("new keys are refused: ") && trouble.contains(why), "{trouble}");
    assert!(trouble.ends_with("; finished answers are still replayed"), "{trouble}");

    grant().await;
    wait_until_ready(gateway, true).await;
    assert_ran(&send_until_protected(&pay(gateway, "during")).await);
}

async fn gateway(store: &str, upstream: &TestUpstream) -> GatewayProcess {
    start_gateway(&format!("[store]\n{store}\nlocal_cache = \"0\"\ntimeout = \"1s\"\n"), upstream).await
}

#[tokio::test]
async fn of_a_postgresql_that_is_read_only() {
    let (server, upstream) = (TestPostgres::start(), TestUpstream::start().await);
    let (url, _) = migrated_database(&server, server.port()).await;
    let gateway = gateway(&format!("url = {url:?}"), &upstream).await;
    let set = |value: &str| {
        server.sql("postgres", &format!("ALTER SYSTEM SET default_transaction_read_only = {value}"));
        server.sql("postgres", "SELECT pg_reload_conf()");
    };
    let grant = async || {
        // The reset is a write itself, in a session that may.
        server.sql("postgres", "SET default_transaction_read_only = off");
        set("off");
    };
    assert_readiness_follows(&gateway, async || set("on"), grant, "read-only").await;
}

#[tokio::test]
async fn of_a_redis_that_is_out_of_memory() {
    let (server, upstream) = (TestRedis::start(), TestUpstream::start().await);
    let gateway = gateway(&format!("url = {:?}", server.url()), &upstream).await;
    let limit = |bytes: &str| drop(server.cli(&["CONFIG", "SET", "maxmemory", bytes]));
    assert_readiness_follows(&gateway, async || limit("1"), async || limit("0"), "maxmemory").await;
}

#[tokio::test]
async fn of_a_redis_that_is_a_replica() {
    let (server, upstream) = (TestRedis::start(), TestUpstream::start().await);
    let gateway = gateway(&format!("url = {:?}", server.url()), &upstream).await;
    // Of a master that is not there, so that it keeps what it has.
    let refuse = async || drop(server.cli(&["REPLICAOF", "127.0.0.1", "1"]));
    let grant = async || drop(server.cli(&["REPLICAOF", "NO", "ONE"]));
    assert_readiness_follows(&gateway, refuse, grant, "replica").await;
}

#[tokio::test]
async fn of_an_embedded_store_that_is_full() {
    let (mount, upstream) = (TestMount::tmpfs("24m"), TestUpstream::start().await);
    upstream.on("/pay", UpstreamReply::status(201).large(64 << 10));
    let url = format!("embedded:{}?max_size=16MiB", mount.path().join("data").display());
    let gateway = gateway(&format!("url = {url:?}"), &upstream).await;
    let refuse = async || {
        mount.fill();
        let mut keys = 0;
        while pay(&gateway, &format!("fills-{keys}")).send().await.status == 201 {
            keys += 1;
            assert!(keys < 1000, "it is never full");
        }
    };
    let grant = async || fs::remove_file(mount.path().join("ballast")).expect("the ballast goes");
    assert_readiness_follows(&gateway, refuse, grant, "No space left").await;
}

/// The probe leaves nothing behind that operators would have to look at.
#[tokio::test]
async fn the_probe_is_no_record() {
    let upstream = TestUpstream::start().await;
    let config = "[admin]\ntoken = \"token-of-the-admin\"\n[store]\nurl = \"embedded:data\"\n";
    let gateway = start_gateway(config, &upstream).await;
    let admin: SocketAddr = gateway.admin_addr();
    assert_eq!(ready(&gateway).await.0, 200);
    let records = get(admin, "/api/records").header("Authorization", "Bearer token-of-the-admin").send().await;
    assert_eq!((records.status, records.json()["records"].as_array().map(Vec::len)), (200, Some(0)), "{records:?}");
    let page = get(admin, "/metrics").send().await.text();
    for counted in ["idempotency_processing_gauge 0", "idempotency_outcome_unknown 0", "idempotency_cache_miss_total 0"]
    {
        assert!(page.contains(&format!("\n{counted}\n")), "{counted} is not in\n{page}");
    }
}
