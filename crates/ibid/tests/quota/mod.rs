//! One tenant floods; the others do not notice, and the memory does not either.

use std::{sync::Arc, time::Duration};

use ibid::{
    Decision, Engine, Operation, Policy, RefusalReason, RunOutcome,
    quota::{Quota, QuotaLimit},
    store::{Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Lease, Memory, Store as _, Tags},
};

/// Short enough for every run; the example `one_tenant_floods` does the same with a million.
const KEYS: u64 = 50_000;
const QUOTA: u64 = 1_000;

struct QuotaPayment;

impl ibid::Claimant for QuotaPayment {}

impl Operation for QuotaPayment {
    type Answer = ();

    async fn run(&mut self, _: Option<&Lease>) -> RunOutcome<()> {
        let record = bytes::Bytes::from_static(b"paid");
        RunOutcome::Complete((), ibid::engine::CompletedAnswer { failed: false, record, summary: Default::default() })
    }
}

fn ask(tenant: &str, key: u64) -> ClaimRequest {
    let mut address = [0; 32];
    address[..8].copy_from_slice(&key.to_le_bytes());
    address[8] = tenant.as_bytes()[0];
    ClaimRequest {
        address: Address(address),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint::NONE,
        tags: Tags::new(tenant, "", "POST /pay", ""),
        label: bytes::Bytes::new(),
        lease: Duration::from_secs(30),
        ttl: Duration::from_secs(3600),
        take_over: None,
    }
}

#[tokio::test]
async fn a_tenant_who_floods_is_stopped_before_anything_is_claimed_and_the_others_go_on() {
    let store = Arc::new(Memory::default());
    let limit = QuotaLimit { most: QUOTA, per: Duration::from_secs(3600) };
    let engine = Engine::new(store.clone()).with_quota(Arc::new(Quota::new(Some(limit), None)));
    let policy = Policy::ietf().checked().unwrap();
    let (mut ran, mut refused) = (0, 0);
    for key in 0..KEYS {
        match engine.execute(policy.terms(), ask("flood", key), QuotaPayment).await {
            Decision::Ran((), _) => ran += 1,
            Decision::Refused(refusal) => {
                assert_eq!(refusal.reason, RefusalReason::QuotaExceeded);
                assert!(refusal.retry_after.is_some_and(|after| after <= Duration::from_secs(3600)));
                assert_eq!(store.get(&ask("flood", key).address).await.unwrap(), None, "nothing is left behind");
                refused += 1;
            }
            Decision::Replay(..) => panic!("every key was new"),
        }
        if key % 100 == 0 {
            let other = engine.execute(policy.terms(), ask("other", key), QuotaPayment).await;
            assert!(matches!(other, Decision::Ran((), _)), "{other:?}");
        }
    }
    assert_eq!((ran, refused), (QUOTA, KEYS - QUOTA));
    let counts = store.admin().counts().await.unwrap();
    assert_eq!(counts.finished, QUOTA + KEYS / 100, "only what ran takes room");
    println!("{KEYS} keys of one tenant: {ran} ran, {refused} refused, {} bytes in the store", counts.bytes);
    // What ran is answered still, however much is over.
    let again = engine.execute(policy.terms(), ask("flood", 0), QuotaPayment).await;
    assert!(matches!(again, Decision::Replay(..)), "{again:?}");
    assert!(matches!(store.get(&ask("flood", 0).address).await, Ok(Some(ClaimOutcome::Completed(_)))));
}
