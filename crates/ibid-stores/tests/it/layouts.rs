//! Stores put together as a gateway has them, on real servers: with copies of finished answers near.

use std::{sync::Arc, time::Duration};

use ibid::{
    Silent,
    store::{Store, Token},
};
use ibid_stores::{Layout, Parts};
use ibid_testkit::{
    servers::redis::Server,
    wrappers::{LosesAnswers, Resending},
};

fn parts(url: &str) -> Parts {
    let prefix: String = Token::mint().0[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    Parts {
        url: url.parse().unwrap(),
        fallback: None,
        cache: None,
        prefix: format!("layout-{prefix}"),
        timeout: Duration::from_secs(20),
        wait_replicas: 0,
        near: None,
    }
}

async fn opened(parts: Parts) -> Arc<dyn Store> {
    Layout::new(parts).unwrap().open(Arc::new(Silent)).await.unwrap().store
}

async fn open(url: &str) -> Arc<dyn Store> {
    opened(parts(url)).await
}

/// PostgreSQL with Redis in front of it.
async fn strict() -> Arc<dyn Store> {
    let cache = Some(Server::shared().url().parse().unwrap());
    opened(Parts { cache, ..parts(&crate::postgres::url()) }).await
}

/// Redis with PostgreSQL to fall back on.
async fn loose() -> Arc<dyn Store> {
    let fallback = Some(crate::postgres::url().parse().unwrap());
    opened(Parts { fallback, ..parts(&Server::shared().url()) }).await
}

fn losing(store: Arc<dyn Store>) -> Arc<dyn Store> {
    let seed = u64::from_le_bytes(Token::mint().0[..8].try_into().unwrap());
    println!("seed {seed}");
    Arc::new(Resending::new(LosesAnswers::new(store, seed, 3)))
}

ibid_testkit::contract_tests!(redis_near, open(&Server::shared().url()));
ibid_testkit::contract_tests!(redis_near_losing_answers, async { losing(open(&Server::shared().url()).await) });
ibid_testkit::contract_tests!(postgres_near, open(&crate::postgres::url()));
ibid_testkit::contract_tests!(postgres_with_redis_in_front, strict());
ibid_testkit::contract_tests!(postgres_with_redis_in_front_losing_answers, async { losing(strict().await) });
ibid_testkit::contract_tests!(redis_with_postgres_behind, loose());
ibid_testkit::contract_tests!(redis_with_postgres_behind_losing_answers, async { losing(loose().await) });
