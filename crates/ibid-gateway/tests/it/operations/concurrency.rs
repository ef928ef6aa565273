//! Many clients at once.

use std::collections::HashMap;

use testbed::client::RawClient;

use crate::support::{TestGateway, anonymous_pay};

const KEY_COUNT: usize = 40;
const REQUESTS_PER_KEY: usize = 5;
const CONNECTION_COUNT: usize = 20;

/// A new order each time, without a crate for it.
fn shuffle(items: &mut [usize]) {
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64 | 1;
    println!("seed {seed}");
    let mut state = seed;
    for at in (1..items.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        items.swap(at, (state % (at as u64 + 1)) as usize);
    }
}

#[tokio::test]
async fn every_key_runs_once_and_all_its_answers_are_equal() {
    let TestGateway { upstream, gateway } = TestGateway::start("[policy]\non_concurrent = \"wait\"").await;
    let mut order: Vec<usize> = (0..KEY_COUNT * REQUESTS_PER_KEY).map(|n| n % KEY_COUNT).collect();
    shuffle(&mut order);
    let addr = gateway.addr();
    let clients: Vec<_> = order
        .chunks(order.len() / CONNECTION_COUNT)
        .map(|keys| {
            let keys = keys.to_vec();
            tokio::spawn(async move {
                let mut raw = RawClient::connect(addr).await;
                let mut answers = Vec::new();
                for key in keys {
                    let answer = anonymous_pay(addr, &format!("key-{key}")).send_on(&mut raw).await;
                    answers.push((key, answer));
                }
                answers
            })
        })
        .collect();
    assert_eq!(clients.len(), CONNECTION_COUNT);
    let mut by_key: HashMap<usize, Vec<(u16, String, bool)>> = HashMap::new();
    for client in clients {
        for (key, answer) in client.await.unwrap() {
            let replayed = answer.header("idempotent-replayed").is_some();
            by_key.entry(key).or_default().push((answer.status, answer.text(), replayed));
        }
    }
    assert_eq!((upstream.executions(), by_key.len()), (KEY_COUNT, KEY_COUNT));
    for (key, answers) in by_key {
        assert_eq!(upstream.executions_with_key(&format!("key-{key}")), 1);
        assert_eq!(answers.len(), REQUESTS_PER_KEY);
        assert_eq!(answers.iter().filter(|(.., replayed)| !replayed).count(), 1, "{key}: {answers:?}");
        let (status, body, _) = &answers[0];
        assert_eq!(*status, 201);
        assert!(answers.iter().all(|(s, b, _)| (s, b) == (status, body)), "{key}: {answers:?}");
    }
}
