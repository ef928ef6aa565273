//! A tenant sends a million new keys, with a quota of a thousand: what that costs in memory, and what others notice.
//!
//! `cargo run --release -p ibid --example one_tenant_floods [KEYS]`

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use ibid::{
    Decision, Engine, Operation, Policy, RunOutcome,
    engine::CompletedAnswer,
    quota::{Quota, QuotaLimit},
    store::{Address, ClaimRequest, ClaimToken, Fingerprint, Lease, Memory, Store as _, Tags},
};

struct FloodPayment;

impl ibid::Claimant for FloodPayment {}

impl Operation for FloodPayment {
    type Answer = ();

    async fn run(&mut self, _: Option<&Lease>) -> RunOutcome<()> {
        RunOutcome::Complete(
            (),
            CompletedAnswer { failed: false, record: Bytes::from_static(b"paid"), summary: Default::default() },
        )
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let keys: u64 = std::env::args().nth(1).and_then(|keys| keys.parse().ok()).unwrap_or(1_000_000);
    let store = Arc::new(Memory::default());
    let limit = QuotaLimit { most: 1_000, per: Duration::from_secs(3600) };
    let engine = Engine::new(store.clone()).with_quota(Arc::new(Quota::new(Some(limit), None)));
    let policy = Policy::ietf().checked().expect("a preset");
    let (before, began) = (resident_kib(), Instant::now());
    let (mut ran, mut others) = (0, 0);
    for key in 0..keys {
        ran += u64::from(matches!(
            engine.execute(policy.terms(), ask("flood", key), FloodPayment).await,
            Decision::Ran(..)
        ));
        if key % 1000 == 0 {
            let tenant = format!("tenant {key}");
            others += u64::from(matches!(
                engine.execute(policy.terms(), ask(&tenant, key), FloodPayment).await,
                Decision::Ran(..)
            ));
        }
    }
    let bytes = store.admin().counts().await.expect("memory answers").bytes;
    println!("{keys} new keys of one tenant in {:.1?}: {ran} ran, the rest was refused", began.elapsed());
    println!("{others} of {} requests of other tenants ran meanwhile", keys.div_ceil(1000));
    println!("{bytes} bytes in the store; the process grew by {} KiB", resident_kib().saturating_sub(before));
}

fn ask(tenant: &str, key: u64) -> ClaimRequest {
    let mut address = [0; 32];
    address[..8].copy_from_slice(&key.to_le_bytes());
    address[8] = u8::from(tenant == "flood");
    let tags = Tags::new(tenant, "", "POST /pay", "");
    let (hold, keep) = (Duration::from_secs(30), Duration::from_secs(3600));
    let (address, token, fingerprint) = (Address(address), ClaimToken::mint(), Fingerprint::NONE);
    ClaimRequest { address, token, fingerprint, tags, label: Bytes::new(), lease: hold, ttl: keep, take_over: None }
}

/// Of this process, in KiB, where the system says so.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or_default()
}
