//! A seal around two stores: what either of them holds opens, whichever answers.

use std::sync::Arc;

use ibid::{
    observe::NoopObserver,
    store::{ErrorKind, Memory, SettleOutcome, Store},
};
use ibid_stores::{
    seal::{ResealOutcome, SealOptions, SealedStore, Sealer},
    tiered::{TieredMode, TieredStore},
};
use ibid_testkit::wrappers::{CallFilter, FailingStore};

use super::{answered, ask, complete, expect_replayed, granted, key, sealing};

type FailingPart = Arc<FailingStore<Memory>>;

fn failing_store() -> FailingPart {
    Arc::new(FailingStore::new(Memory::default()))
}

fn sealed_tiers(first: &FailingPart, last: &FailingPart, mode: TieredMode, sealing: &Sealer) -> SealedStore {
    let tiered = TieredStore::new(first.clone(), last.clone(), mode, Arc::new(NoopObserver), None);
    SealedStore::new(Arc::new(tiered), sealing.clone(), Arc::new(NoopObserver))
}

#[tokio::test(start_paused = true)]
async fn what_ran_solo_opens_in_the_first_store_and_in_the_last() {
    let (first, last, sealing) = (failing_store(), failing_store(), sealing());
    let [one, other] = [(); 2].map(|()| sealed_tiers(&first, &last, TieredMode::Loose, &sealing));
    last.fail(CallFilter::All, ErrorKind::NotApplied);
    let lease = granted(&one, &ask(1)).await;
    assert!(lease.front_only);
    let end = complete("alone");
    assert_eq!(one.settle(&lease, &end).await.unwrap_err().kind, ErrorKind::NotApplied, "so it is journaled");
    for store in [&one, &other] {
        assert_eq!(expect_replayed(store, &ask(1)).await, "alone");
    }
    last.heal();
    assert_eq!(one.settle(&lease, &end).await.unwrap(), SettleOutcome::Restored, "from the journal");
    first.fail(CallFilter::All, ErrorKind::NotApplied);
    assert_eq!(expect_replayed(&other, &ask(1)).await, "alone");
}

#[tokio::test(start_paused = true)]
async fn a_reseal_reaches_both() {
    for mode in [TieredMode::Strict, TieredMode::Loose] {
        let (first, last, sealing) = (failing_store(), failing_store(), sealing());
        let store = sealed_tiers(&first, &last, mode, &sealing);
        answered(&store, &ask(1), "kept").await;
        // The copy in the first store is made behind the answer.
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        sealing.rekey(key("k2"), vec![key("k1")], SealOptions::default());
        assert_eq!(store.reseal(&ask(1).address).await.unwrap(), ResealOutcome::Done { from: Some("k1".into()) });
        sealing.rekey(key("k2"), Vec::new(), SealOptions::default());
        for away in [&first, &last] {
            away.fail(CallFilter::All, ErrorKind::NotApplied);
            let other = sealed_tiers(&first, &last, mode, &sealing);
            assert_eq!(expect_replayed(&other, &ask(1)).await, "kept", "{mode:?}");
            away.heal();
        }
    }
}
