//! Somebody who can write to the store, and has no key: nothing of his is ever answered.

use bytes::Bytes;
use ibid::store::{Ask, Claim, Cursor, End, Fence, Filter, Fingerprint, Held, Lease, Store, Token};
use ibid_stores::seal::{Rules, Sealing};

use super::{Bench, Planted, answered, ask, complete, granted, key, replayed, sealing};

/// A bench with an answer at 1 and another at 2, and what the attacker sees of the first.
async fn bench() -> (Bench, Planted) {
    let bench = Bench::new(sealing());
    answered(&bench.store, &ask(1), &b"the answer of 1"[..]).await;
    answered(&bench.store, &ask(2), &b"the answer of 2"[..]).await;
    let seen = bench.stored(&ask(1).address).await;
    let planted =
        Planted { fingerprint: seen.fingerprint, attempt: seen.attempt, failed: seen.failed, record: seen.record };
    (bench, planted)
}

#[tokio::test]
async fn what_was_put_back_as_it_was_is_answered() {
    // So that what the other tests change, and nothing else, is why they are refused.
    let (bench, planted) = bench().await;
    bench.plant(ask(1).address, planted).await;
    assert_eq!(replayed(&bench.store, &ask(1)).await, &b"the answer of 1"[..]);
    assert_eq!(bench.told.unreadable(), 0);
}

#[tokio::test]
async fn a_record_moved_to_another_address_is_refused() {
    let (bench, planted) = bench().await;
    bench.plant(ask(2).address, planted.clone()).await;
    bench.assert_refused(&ask(2), "with the fingerprint of where it came from").await;
    let of_2 = bench.store.beneath().get(&ask(2).address).await.unwrap();
    assert!(of_2.is_some());
    let (bench, planted) = bench_with_fingerprint_of_2(planted).await;
    bench.plant(ask(2).address, planted).await;
    bench.assert_refused(&ask(2), "with the fingerprint of where it is now").await;
}

async fn bench_with_fingerprint_of_2(of_1: Planted) -> (Bench, Planted) {
    let (bench, _) = bench().await;
    let fingerprint = bench.stored(&ask(2).address).await.fingerprint;
    (bench, Planted { fingerprint, ..of_1 })
}

#[tokio::test]
async fn a_record_for_another_request_attempt_or_state_is_refused() {
    let other = Fingerprint { version: 0x81, digest: [7; 32] };
    for (what, change) in [
        ("fingerprint", &(|planted: &mut Planted| planted.fingerprint = other) as &dyn Fn(&mut Planted)),
        ("fingerprint in clear", &|planted| planted.fingerprint = ask(2).fingerprint),
        ("attempt", &|planted| planted.attempt += 1),
        ("no attempt", &|planted| planted.attempt = 0),
        ("state", &|planted| planted.failed = true),
    ] {
        let (bench, mut planted) = bench().await;
        change(&mut planted);
        bench.plant(ask(1).address, planted).await;
        bench.assert_refused(&ask(1), what).await;
    }
}

#[tokio::test]
async fn every_flipped_byte_is_refused() {
    let (bench, planted) = bench().await;
    for at in 0..planted.record.len() {
        let mut record = planted.record.to_vec();
        record[at] ^= 0x10;
        bench.plant(ask(1).address, Planted { record: record.into(), ..planted.clone() }).await;
        bench.assert_refused(&ask(1), &format!("byte {at}")).await;
    }
}

#[tokio::test]
async fn an_answer_in_clear_is_refused_unless_it_is_accepted() {
    let plain = Planted {
        fingerprint: ask(1).fingerprint,
        attempt: 1,
        failed: false,
        record: Bytes::from_static(b"planted in clear"),
    };
    let (bench, sealed) = bench().await;
    bench.plant(ask(1).address, plain.clone()).await;
    bench.assert_refused(&ask(1), "all in clear").await;
    bench.plant(ask(1).address, Planted { fingerprint: sealed.fingerprint, ..plain.clone() }).await;
    bench.assert_refused(&ask(1), "under a fingerprint that is not").await;

    let rules = Rules { accept_plain: true, ..Rules::default() };
    let bench = Bench::new(Sealing::new(key("k1"), Vec::new(), &[0x33; 32], rules));
    bench.plant(ask(1).address, plain).await;
    assert_eq!(replayed(&bench.store, &ask(1)).await, &b"planted in clear"[..]);
    assert_eq!(bench.told.unreadable(), 0);
    bench.sealing.rekey(key("k1"), Vec::new(), Rules::default());
    bench.assert_refused(&ask(1), "once it is no longer accepted").await;
}

#[tokio::test]
async fn a_running_claim_in_clear_is_refused_unless_it_is_accepted() {
    let bench = Bench::new(sealing());
    granted(&*bench.raw, &ask(1)).await;
    bench.assert_refused(&ask(1), "claimed without a seal").await;
    bench.sealing.rekey(key("k1"), Vec::new(), Rules { accept_plain: true, ..Rules::default() });
    let found = bench.store.claim(&ask(1)).await.unwrap();
    let Claim::Busy(holder) = found else { panic!("{found:?}") };
    assert_eq!(holder.fingerprint, ask(1).fingerprint);
}

#[tokio::test]
async fn a_holder_that_finds_a_forged_answer_learns_that_nobody_knows() {
    let bench = Bench::new(sealing());
    let lease = granted(&bench.store, &ask(1)).await;
    let stored = match bench.raw.get(&ask(1).address).await.unwrap() {
        Some(Claim::Busy(holder)) => holder,
        other => panic!("{other:?}"),
    };
    assert_eq!(bench.raw.operators().forget(&ask(1).address, stored.fence).await.unwrap(), Held::Held);
    let record = Bytes::from_static(b"forged");
    bench.plant(ask(1).address, Planted { fingerprint: stored.fingerprint, attempt: 1, failed: false, record }).await;
    for end in [complete("mine"), End::Park { keep: lease.ask.keep, retry_in: lease.ask.hold }] {
        let Held::Lost(found) = bench.store.settle(&lease, &end).await.unwrap() else { panic!("it is lost") };
        let Claim::Unknown(holder) = *found else { panic!("{found:?}") };
        assert_eq!(holder.fingerprint, ask(1).fingerprint);
    }
    assert_eq!(bench.told.unreadable(), 2, "it is reported");
    // The way out: whoever looks after the store forgets it, whatever it is.
    let seen = bench.stored(&ask(1).address).await.fence;
    assert_eq!(bench.store.operators().forget(&ask(1).address, seen).await.unwrap(), Held::Held);
    granted(&bench.store, &ask(1)).await;
}

#[tokio::test]
async fn a_label_or_tags_of_another_entry_are_not_shown_as_its_own() {
    let bench = Bench::new(sealing());
    let lease = granted(&bench.store, &ask(1)).await;
    let other = Ask { label: "of 2".into(), ..Ask::clone(&ask(2)) };
    granted(&bench.store, &other.into()).await;
    let raw = |at| Filter { address: Some(at), ..Filter::default() };
    let list = async |store: &dyn Store, nth| {
        let page = store.operators().list(&raw(ask(nth).address), Cursor::default(), 1).await.unwrap();
        page.entries.into_iter().next().unwrap()
    };
    assert_eq!(list(&bench.store, 1).await.label, &b"planted-label"[..]);
    // The attacker swaps in label and tags of 2.
    let (of_1, of_2) = (list(&*bench.raw, 1).await, list(&*bench.raw, 2).await);
    assert_eq!(bench.raw.operators().forget(&ask(1).address, of_1.fence).await.unwrap(), Held::Held);
    let swapped = Ask {
        token: Token::mint(),
        fingerprint: of_1.fingerprint,
        tags: of_2.tags.clone(),
        label: of_2.label.clone(),
        ..Ask::clone(&lease.ask)
    };
    let held = Lease { ask: swapped.into(), fence: Fence(u64::MAX / 4), attempt: 1, solo: false };
    assert_eq!(bench.raw.extend(&held, lease.ask.hold).await.unwrap(), Held::Restored);
    let shown = list(&bench.store, 1).await;
    assert_eq!((&shown.label, &shown.tags), (&of_2.label, &of_2.tags), "as they are held: sealed");
    assert_eq!(shown.fingerprint, ask(1).fingerprint);
}
