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

async fn open(url: &str) -> Arc<dyn Store> {
    let prefix: String = Token::mint().0[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = Parts {
        url: url.parse().unwrap(),
        fallback: None,
        cache: None,
        prefix: format!("layout-{prefix}"),
        timeout: Duration::from_secs(20),
        wait_replicas: 0,
        near: None,
    };
    Layout::new(parts).unwrap().open(Arc::new(Silent)).await.unwrap()
}

async fn losing(url: &str) -> Arc<dyn Store> {
    let seed = u64::from_le_bytes(Token::mint().0[..8].try_into().unwrap());
    println!("seed {seed}");
    Arc::new(Resending::new(LosesAnswers::new(open(url).await, seed, 3)))
}

ibid_testkit::contract_tests!(redis_near, open(&Server::shared().url()));
ibid_testkit::contract_tests!(redis_near_losing_answers, losing(&Server::shared().url()));
ibid_testkit::contract_tests!(postgres_near, open(&crate::postgres::url()));
