//! Keys that change while the store is in use.

use ibid::store::{EntryFilter, ErrorKind, ListCursor, Store};
use ibid_stores::seal::{ResealOutcome, SealOptions, Sealer, sealing_key_id};

use super::{ForgedEntry, SealFixture, answered, ask, expect_replayed, key};

fn with(first: &str, others: &[&str]) -> Sealer {
    Sealer::new(key(first), others.iter().map(|id| key(id)).collect(), &[0x33; 32], SealOptions::default())
}

#[tokio::test]
async fn after_a_reseal_the_old_key_can_be_dropped() {
    let bench = SealFixture::new(with("old", &[]));
    for nth in 0..20 {
        answered(&bench.store, &ask(nth), format!("answer {nth}")).await;
    }
    bench.sealing.rekey(key("new"), vec![key("old")], SealOptions::default());
    answered(&bench.store, &ask(20), "answer 20").await;
    for nth in 0..=20 {
        assert_eq!(expect_replayed(&bench.store, &ask(nth)).await, format!("answer {nth}"));
        let from =
            if nth < 20 { ResealOutcome::Done { from: Some("old".into()) } } else { ResealOutcome::AlreadyCurrent };
        assert_eq!(bench.store.reseal(&ask(nth).address).await.unwrap(), from);
        assert_eq!(bench.store.reseal(&ask(nth).address).await.unwrap(), ResealOutcome::AlreadyCurrent);
    }
    bench.sealing.rekey(key("new"), Vec::new(), SealOptions::default());
    for nth in 0..=20 {
        assert_eq!(expect_replayed(&bench.store, &ask(nth)).await, format!("answer {nth}"));
    }
    // Labels stay as they were claimed; who looks for a tag still finds them.
    let filter = EntryFilter { tenant: Some("planted-tenant".into()), ..EntryFilter::default() };
    let page = bench.store.admin().list(&filter, ListCursor::default(), 100).await.unwrap();
    assert_eq!(page.entries.len(), 21);
    let opened = page.entries.iter().filter(|listed| sealing_key_id(&listed.label).is_none()).count();
    assert_eq!(opened, 1, "the one that was claimed under the new key");
}

#[tokio::test]
async fn a_key_that_was_dropped_too_early_can_come_back() {
    let bench = SealFixture::new(with("old", &[]));
    answered(&bench.store, &ask(1), "kept").await;
    bench.sealing.rekey(key("new"), Vec::new(), SealOptions::default());
    let error = bench.store.claim(&ask(1)).await.unwrap_err();
    let said = error.to_string();
    assert!(said.contains("is sealed with the key \"old\", which seal.keys does not have"), "{said}");
    assert_eq!(bench.store.reseal(&ask(1).address).await.unwrap_err().kind, ErrorKind::Corrupt);
    bench.sealing.rekey(key("new"), vec![key("old")], SealOptions::default());
    assert_eq!(expect_replayed(&bench.store, &ask(1)).await, "kept");
}

#[tokio::test]
async fn what_is_in_clear_is_sealed_where_it_is_accepted() {
    let bench = SealFixture::new(with("k", &[]));
    let plain = ForgedEntry { fingerprint: ask(1).fingerprint, attempt: 1, failed: true, record: "in clear".into() };
    bench.write_forged_entry(ask(1).address, plain).await;
    assert_eq!(bench.store.reseal(&ask(1).address).await.unwrap_err().kind, ErrorKind::Corrupt);
    bench.sealing.rekey(key("k"), Vec::new(), SealOptions { accept_plain: true, ..SealOptions::default() });
    assert_eq!(bench.store.reseal(&ask(1).address).await.unwrap(), ResealOutcome::Done { from: None });
    assert_eq!(sealing_key_id(&bench.stored_entry(&ask(1).address).await.record).as_deref(), Some("k"));
    assert_eq!(expect_replayed(&bench.store, &ask(1)).await, "in clear");
    bench.sealing.rekey(key("k"), Vec::new(), SealOptions::default());
    assert_eq!(expect_replayed(&bench.store, &ask(1)).await, "in clear", "also once nothing else in clear is accepted");
}

#[tokio::test]
async fn the_secret_must_stay() {
    let bench = SealFixture::new(with("k", &[]));
    answered(&bench.store, &ask(1), "kept").await;
    let other = Sealer::new(key("k"), Vec::new(), &[0x44; 32], SealOptions::default());
    let store = ibid_stores::seal::SealedStore::new(bench.raw.clone(), other, bench.events.clone());
    assert_eq!(store.claim(&ask(1)).await.unwrap_err().kind, ErrorKind::Corrupt);
}
