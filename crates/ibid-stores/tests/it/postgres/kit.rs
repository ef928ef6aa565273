//! What the tests of this store share.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{Address, Ask, Claim, End, Fingerprint, Lease, Outline, Store, Tags, Token};
use ibid_stores::{
    Remote,
    postgres::{Migrate, Postgres, migrate},
};
use ibid_testkit::servers::postgres::Server;

/// On a loaded machine an answer may take a while.
pub(super) fn patient() -> Remote {
    Remote { timeout: Duration::from_secs(20), ..Remote::default() }
}

pub(super) async fn open(url: &str) -> Postgres {
    Postgres::open(url, patient()).await.unwrap()
}

/// A fresh database with our schema in it.
pub(crate) fn database(server: &Server) -> String {
    let name = server.create_database();
    let url = server.url("migrator", &name);
    // Callers may be in a runtime already, or in none.
    let migrating = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(migrate(&url, Migrate::Up)).unwrap();
    });
    migrating.join().unwrap();
    name
}

pub(super) fn ask() -> Arc<Ask> {
    let mut address = [0; 32];
    address[..16].copy_from_slice(&Token::mint().0);
    address[16..].copy_from_slice(&Token::mint().0);
    Arc::new(Ask {
        address: Address(address),
        token: Token::mint(),
        fingerprint: Fingerprint { version: 1, digest: [7; 32] },
        tags: Tags::new("acme", "u1", "POST /payments", "k-1"),
        label: Bytes::new(),
        hold: Duration::from_secs(600),
        keep: Duration::from_secs(600),
        over: None,
    })
}

pub(super) fn rival(of: &Ask) -> Arc<Ask> {
    Arc::new(Ask { token: Token::mint(), ..of.clone() })
}

pub(super) async fn granted(store: &dyn Store, ask: &Arc<Ask>) -> Lease {
    match store.claim(ask).await.unwrap() {
        Claim::Granted(lease) => lease,
        other => panic!("not granted: {other:?}"),
    }
}

pub(super) fn complete(record: &'static [u8]) -> End {
    let outline = Outline { status: 201, requested_at_ms: 1000, completed_at_ms: 2000, took: Duration::from_secs(1) };
    End::Complete { failed: false, record: Bytes::from_static(record), outline, keep: Duration::from_secs(600) }
}
