//! A seal around two stores: what either of them holds opens, whichever answers.

use std::sync::Arc;

use ibid::{
    Silent,
    store::{ErrorKind, Held, Memory, Store},
};
use ibid_stores::{
    seal::{Resealed, Rules, Sealed, Sealing},
    tiered::{Mode, Tiered},
};
use ibid_testkit::wrappers::{Calls, FailsOnDemand};

use super::{answered, ask, complete, granted, key, replayed, sealing};

type Part = Arc<FailsOnDemand<Memory>>;

fn part() -> Part {
    Arc::new(FailsOnDemand::new(Memory::default()))
}

fn around(first: &Part, last: &Part, mode: Mode, sealing: &Sealing) -> Sealed {
    let tiered = Tiered::new(first.clone(), last.clone(), mode, Arc::new(Silent), None);
    Sealed::new(Arc::new(tiered), sealing.clone(), Arc::new(Silent))
}

#[tokio::test(start_paused = true)]
async fn what_ran_solo_opens_in_the_first_store_and_in_the_last() {
    let (first, last, sealing) = (part(), part(), sealing());
    let [one, other] = [(); 2].map(|()| around(&first, &last, Mode::Loose, &sealing));
    last.fail(Calls::All, ErrorKind::NotApplied);
    let lease = granted(&one, &ask(1)).await;
    assert!(lease.solo);
    let end = complete("alone");
    assert_eq!(one.settle(&lease, &end).await.unwrap_err().kind, ErrorKind::NotApplied, "so it is journaled");
    for store in [&one, &other] {
        assert_eq!(replayed(store, &ask(1)).await, "alone");
    }
    last.heal();
    assert_eq!(one.settle(&lease, &end).await.unwrap(), Held::Restored, "from the journal");
    first.fail(Calls::All, ErrorKind::NotApplied);
    assert_eq!(replayed(&other, &ask(1)).await, "alone");
}

#[tokio::test(start_paused = true)]
async fn a_reseal_reaches_both() {
    for mode in [Mode::Strict, Mode::Loose] {
        let (first, last, sealing) = (part(), part(), sealing());
        let store = around(&first, &last, mode, &sealing);
        answered(&store, &ask(1), "kept").await;
        // The copy in the first store is made behind the answer.
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        sealing.rekey(key("k2"), vec![key("k1")], Rules::default());
        assert_eq!(store.reseal(&ask(1).address).await.unwrap(), Resealed::Done { from: Some("k1".into()) });
        sealing.rekey(key("k2"), Vec::new(), Rules::default());
        for away in [&first, &last] {
            away.fail(Calls::All, ErrorKind::NotApplied);
            let other = around(&first, &last, mode, &sealing);
            assert_eq!(replayed(&other, &ask(1)).await, "kept", "{mode:?}");
            away.heal();
        }
    }
}
