//! Keys that change while the store is in use.

use ibid::store::{Cursor, ErrorKind, Filter, Store};
use ibid_stores::seal::{Resealed, Rules, Sealing, sealed_with};

use super::{Bench, Planted, answered, ask, key, replayed};

fn with(first: &str, others: &[&str]) -> Sealing {
    Sealing::new(key(first), others.iter().map(|id| key(id)).collect(), &[0x33; 32], Rules::default())
}

#[tokio::test]
async fn after_a_reseal_the_old_key_can_be_dropped() {
    let bench = Bench::new(with("old", &[]));
    for nth in 0..20 {
        answered(&bench.store, &ask(nth), format!("answer {nth}")).await;
    }
    bench.sealing.rekey(key("new"), vec![key("old")], Rules::default());
    answered(&bench.store, &ask(20), "answer 20").await;
    for nth in 0..=20 {
        assert_eq!(replayed(&bench.store, &ask(nth)).await, format!("answer {nth}"));
        let from = if nth < 20 { Resealed::Done { from: Some("old".into()) } } else { Resealed::Current };
        assert_eq!(bench.store.reseal(&ask(nth).address).await.unwrap(), from);
        assert_eq!(bench.store.reseal(&ask(nth).address).await.unwrap(), Resealed::Current);
    }
    bench.sealing.rekey(key("new"), Vec::new(), Rules::default());
    for nth in 0..=20 {
        assert_eq!(replayed(&bench.store, &ask(nth)).await, format!("answer {nth}"));
    }
    // Labels stay as they were claimed; who looks for a tag still finds them.
    let filter = Filter { tenant: Some("planted-tenant".into()), ..Filter::default() };
    let page = bench.store.operators().list(&filter, Cursor::default(), 100).await.unwrap();
    assert_eq!(page.entries.len(), 21);
    let opened = page.entries.iter().filter(|listed| sealed_with(&listed.label).is_none()).count();
    assert_eq!(opened, 1, "the one that was claimed under the new key");
}

#[tokio::test]
async fn a_key_that_was_dropped_too_early_can_come_back() {
    let bench = Bench::new(with("old", &[]));
    answered(&bench.store, &ask(1), "kept").await;
    bench.sealing.rekey(key("new"), Vec::new(), Rules::default());
    let error = bench.store.claim(&ask(1)).await.unwrap_err();
    let said = error.to_string();
    assert!(said.contains("is sealed with the key \"old\", which seal.keys does not have"), "{said}");
    assert_eq!(bench.store.reseal(&ask(1).address).await.unwrap_err().kind, ErrorKind::Corrupt);
    bench.sealing.rekey(key("new"), vec![key("old")], Rules::default());
    assert_eq!(replayed(&bench.store, &ask(1)).await, "kept");
}

#[tokio::test]
async fn what_is_in_clear_is_sealed_where_it_is_accepted() {
    let bench = Bench::new(with("k", &[]));
    let plain = Planted { fingerprint: ask(1).fingerprint, attempt: 1, failed: true, record: "in clear".into() };
    bench.plant(ask(1).address, plain).await;
    assert_eq!(bench.store.reseal(&ask(1).address).await.unwrap_err().kind, ErrorKind::Corrupt);
    bench.sealing.rekey(key("k"), Vec::new(), Rules { accept_plain: true, ..Rules::default() });
    assert_eq!(bench.store.reseal(&ask(1).address).await.unwrap(), Resealed::Done { from: None });
    assert_eq!(sealed_with(&bench.stored(&ask(1).address).await.record).as_deref(), Some("k"));
    assert_eq!(replayed(&bench.store, &ask(1)).await, "in clear");
    bench.sealing.rekey(key("k"), Vec::new(), Rules::default());
    assert_eq!(replayed(&bench.store, &ask(1)).await, "in clear", "also once nothing else in clear is accepted");
}

#[tokio::test]
async fn the_secret_must_stay() {
    let bench = Bench::new(with("k", &[]));
    answered(&bench.store, &ask(1), "kept").await;
    let other = Sealing::new(key("k"), Vec::new(), &[0x44; 32], Rules::default());
    let store = ibid_stores::seal::Sealed::new(bench.raw.clone(), other, bench.told.clone());
    assert_eq!(store.claim(&ask(1)).await.unwrap_err().kind, ErrorKind::Corrupt);
}
