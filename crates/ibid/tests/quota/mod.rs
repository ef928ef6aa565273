//! One tenant floods; the others do not notice, and the memory does not either.

use std::{sync::Arc, time::Duration};

use ibid::{
    Ended, Engine, Limit, Operation, Policy, Quota, Reason, Verdict,
    store::{Address, Ask, Claim, Fingerprint, Lease, Memory, Store as _, Tags, Token},
};

/// Short enough for every run; the example `one_tenant_floods` does the same with a million.
const KEYS: u64 = 50_000;
const QUOTA: u64 = 1_000;

struct Paid;

impl Operation for Paid {
    type Answer = ();

    async fn run(&mut self, _: Option<&Lease>) -> Ended<()> {
        let record = bytes::Bytes::from_static(b"paid");
        Ended::Complete((), ibid::Complete { failed: false, record, outline: Default::default() })
    }
}

fn ask(tenant: &str, key: u64) -> Ask {
    let mut address = [0; 32];
    address[..8].copy_from_slice(&key.to_le_bytes());
    address[8] = tenant.as_bytes()[0];
    Ask {
        address: Address(address),
        token: Token::mint(),
        fingerprint: Fingerprint::NONE,
        tags: Tags::new(tenant, "", "POST /pay", ""),
        label: bytes::Bytes::new(),
        hold: Duration::from_secs(30),
        keep: Duration::from_secs(3600),
        over: None,
    }
}

#[tokio::test]
async fn a_tenant_who_floods_is_stopped_before_anything_is_claimed_and_the_others_go_on() {
    let store = Arc::new(Memory::default());
    let limit = Limit { most: QUOTA, per: Duration::from_secs(3600) };
    let engine = Engine::new(store.clone()).limited(Arc::new(Quota::new(Some(limit), None)));
    let policy = Policy::ietf().checked().unwrap();
    let (mut ran, mut refused) = (0, 0);
    for key in 0..KEYS {
        match engine.execute(&policy, ask("flood", key), Paid).await {
            Verdict::Ran((), _) => ran += 1,
            Verdict::Refused(refusal) => {
                assert_eq!(refusal.reason, Reason::QuotaExceeded);
                assert!(refusal.retry_after.is_some_and(|after| after <= Duration::from_secs(3600)));
                assert_eq!(store.get(&ask("flood", key).address).await.unwrap(), None, "nothing is left behind");
                refused += 1;
            }
            Verdict::Replay(..) => panic!("every key was new"),
        }
        if key % 100 == 0 {
            let other = engine.execute(&policy, ask("other", key), Paid).await;
            assert!(matches!(other, Verdict::Ran((), _)), "{other:?}");
        }
    }
    assert_eq!((ran, refused), (QUOTA, KEYS - QUOTA));
    let counts = store.operators().counts().await.unwrap();
    assert_eq!(counts.finished, QUOTA + KEYS / 100, "only what ran takes room");
    println!("{KEYS} keys of one tenant: {ran} ran, {refused} refused, {} bytes in the store", counts.bytes);
    // What ran is answered still, however much is over.
    let again = engine.execute(&policy, ask("flood", 0), Paid).await;
    assert!(matches!(again, Verdict::Replay(..)), "{again:?}");
    assert!(matches!(store.get(&ask("flood", 0).address).await, Ok(Some(Claim::Done(_)))));
}
