//! Stores put together as a gateway has them, on real servers: with copies of finished answers near.

use std::{sync::Arc, time::Duration};

use ibid::{
    observe::NoopObserver,
    store::{ClaimToken, Store},
};
use ibid_stores::{StoreConfig, StoreOptions};
use ibid_testkit::wrappers::losing_answers;
use testbed::TestRedis;

fn config_parts(url: &str) -> StoreOptions {
    let prefix: String = ClaimToken::mint().0[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    StoreOptions {
        url: url.parse().unwrap(),
        fallback: None,
        cache: None,
        prefix: format!("layout-{prefix}"),
        timeout: Duration::from_secs(20),
        wait_replicas: 0,
        local_cache: None,
    }
}

async fn open_parts(parts: StoreOptions) -> Arc<dyn Store> {
    StoreConfig::new(parts).unwrap().open(Arc::new(NoopObserver)).await.unwrap().store
}

async fn open(url: &str) -> Arc<dyn Store> {
    open_parts(config_parts(url)).await
}

/// PostgreSQL with Redis in front of it.
async fn open_strict() -> Arc<dyn Store> {
    let cache = Some(TestRedis::shared().url().parse().unwrap());
    open_parts(StoreOptions { cache, ..config_parts(&crate::postgres::url()) }).await
}

/// Redis with PostgreSQL to fall back on.
async fn open_loose() -> Arc<dyn Store> {
    let fallback = Some(crate::postgres::url().parse().unwrap());
    open_parts(StoreOptions { fallback, ..config_parts(&TestRedis::shared().url()) }).await
}

ibid_testkit::contract_tests!(redis_near, open(&TestRedis::shared().url()));
ibid_testkit::contract_tests!(redis_near_losing_answers, async {
    losing_answers(open(&TestRedis::shared().url()).await)
});
ibid_testkit::contract_tests!(postgres_near, open(&crate::postgres::url()));
ibid_testkit::contract_tests!(postgres_with_redis_in_front, open_strict());
ibid_testkit::contract_tests!(postgres_with_redis_in_front_losing_answers, async {
    losing_answers(open_strict().await)
});
ibid_testkit::contract_tests!(redis_with_postgres_behind, open_loose());
ibid_testkit::contract_tests!(redis_with_postgres_behind_losing_answers, async { losing_answers(open_loose().await) });
