//! A record that somebody has put where it does not belong: refused, reported, never answered, never run again.

use testbed::{
    TestRedis,
    client::get,
    upstream::{TestUpstream, UpstreamReply},
};

use super::{pay, table};
use crate::support::{assert_ran, assert_refused, assert_replay, start_gateway};

#[tokio::test]
async fn an_answer_at_another_key_is_refused_and_reported() {
    let (server, upstream) = (TestRedis::start(), TestUpstream::start().await);
    upstream.on_each(
        "/pay",
        [UpstreamReply::status(201).json(r#"{"of":"one"}"#), UpstreamReply::status(201).json(r#"{"of":"two"}"#)],
    );
    // Open to a store that is away, not to one that holds something else than was written.
    let open = "[policy]\non_store_down = \"open\"";
    let config = format!("{open}\n[store]\nurl = {:?}\nlocal_cache = \"0\"\n{}", server.url(), table(&["k"]));
    let gateway = start_gateway(&config, &upstream).await;
    let one = pay(&gateway, "one").send().await;
    assert_ran(&one);
    let only = server.cli(&["KEYS", "idempotency:*"]);
    let of_one = only.lines().find(|key| server.cli(&["TYPE", key]) == "string").expect("an entry").to_owned();
    assert_ran(&pay(&gateway, "two").send().await);
    let all = server.cli(&["KEYS", "idempotency:*"]);
    let of_two = all.lines().find(|key| *key != of_one && server.cli(&["TYPE", key]) == "string").expect("another");
    assert_eq!(server.cli(&["COPY", &of_one, of_two, "REPLACE"]), "1");

    for _ in 0..2 {
        let refused = pay(&gateway, "two").send().await;
        assert_refused(&refused, 503, "store-unavailable");
        assert!(!refused.text().contains("\"of\""), "{refused:?}");
    }
    assert_eq!(upstream.executions(), 2, "it is not run again either");
    let line = gateway.wait_for_log("was altered, or belongs to another key, attempt or state").await;
    assert!(line.contains("ERROR"), "{line}");
    gateway.wait_for_log("the record cannot be read and was not answered from").await;
    let metrics = get(gateway.admin_addr(), "/metrics").send().await.text();
    let counted = metrics.lines().any(|line| {
        line.starts_with("idempotency_requests_total") && line.contains("store-unavailable") && line.ends_with(" 2")
    });
    assert!(counted, "{metrics}");
    assert_replay(&pay(&gateway, "one").send().await, &one);
}
