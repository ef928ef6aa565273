//! What the tests of this store share.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Lease, RecordSummary, Settlement, Store, Tags,
};
use ibid_stores::{
    RemoteOptions,
    postgres::{MigrateAction, Postgres, migrate},
};
use testbed::TestPostgres;

/// On a loaded machine an answer may take a while.
pub(super) fn patient_options() -> RemoteOptions {
    RemoteOptions { timeout: Duration::from_secs(20), ..RemoteOptions::default() }
}

pub(super) async fn open(url: &str) -> Postgres {
    Postgres::open(url, patient_options()).await.unwrap()
}

/// A fresh database with our schema in it.
pub(crate) fn database(server: &TestPostgres) -> String {
    let name = server.create_database();
    let url = server.url("migrator", &name);
    // Callers may be in a runtime already, or in none.
    let migrating = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(migrate(&url, MigrateAction::Up)).unwrap();
    });
    migrating.join().unwrap();
    name
}

pub(super) fn claim_request() -> Arc<ClaimRequest> {
    let mut address = [0; 32];
    address[..16].copy_from_slice(&ClaimToken::mint().0);
    address[16..].copy_from_slice(&ClaimToken::mint().0);
    Arc::new(ClaimRequest {
        address: Address(address),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint { version: 1, digest: [7; 32] },
        tags: Tags::new("acme", "u1", "POST /payments", "k-1"),
        label: Bytes::new(),
        lease: Duration::from_secs(600),
        ttl: Duration::from_secs(600),
        take_over: None,
    })
}

pub(super) fn competing_request(of: &ClaimRequest) -> Arc<ClaimRequest> {
    Arc::new(ClaimRequest { token: ClaimToken::mint(), ..of.clone() })
}

pub(super) async fn claim_granted(store: &dyn Store, ask: &Arc<ClaimRequest>) -> Lease {
    match store.claim(ask).await.unwrap() {
        ClaimOutcome::Granted(lease) => lease,
        other => panic!("not granted: {other:?}"),
    }
}

pub(super) fn complete(record: &'static [u8]) -> Settlement {
    let outline =
        RecordSummary { status: 201, requested_at_ms: 1000, completed_at_ms: 2000, took: Duration::from_secs(1) };
    Settlement::Complete {
        failed: false,
        record: Bytes::from_static(record),
        summary: outline,
        ttl: Duration::from_secs(600),
    }
}
