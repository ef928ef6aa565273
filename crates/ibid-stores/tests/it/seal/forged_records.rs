//! Somebody who can write to the store, and has no key: nothing of his is ever answered.

use bytes::Bytes;
use ibid::store::{
    ClaimOutcome, ClaimRequest, ClaimToken, EntryFilter, Fence, Fingerprint, Lease, ListCursor, SettleOutcome,
    Settlement, Store,
};
use ibid_stores::seal::{SealOptions, Sealer};

use super::{ForgedEntry, SealFixture, answered, ask, complete, expect_replayed, granted, key, sealing};

/// A bench with an answer at 1 and another at 2, and what the attacker sees of the first.
async fn bench() -> (SealFixture, ForgedEntry) {
    let bench = SealFixture::new(sealing());
    answered(&bench.store, &ask(1), &b"the answer of 1"[..]).await;
    answered(&bench.store, &ask(2), &b"the answer of 2"[..]).await;
    let seen = bench.stored_entry(&ask(1).address).await;
    let planted =
        ForgedEntry { fingerprint: seen.fingerprint, attempt: seen.attempt, failed: seen.failed, record: seen.record };
    (bench, planted)
}

#[tokio::test]
async fn what_was_put_back_as_it_was_is_answered() {
    // So that what the other tests change, and nothing else, is why they are refused.
    let (bench, planted) = bench().await;
    bench.write_forged_entry(ask(1).address, planted).await;
    assert_eq!(expect_replayed(&bench.store, &ask(1)).await, &b"the answer of 1"[..]);
    assert_eq!(bench.events.unreadable_count(), 0);
}

#[tokio::test]
async fn a_record_moved_to_another_address_is_refused() {
    let (bench, planted) = bench().await;
    bench.write_forged_entry(ask(2).address, planted.clone()).await;
    bench.assert_refused(&ask(2), "with the fingerprint of where it came from").await;
    let of_2 = bench.store.inner_store().get(&ask(2).address).await.unwrap();
    assert!(of_2.is_some());
    let (bench, planted) = fixture_with_fingerprint_of_2(planted).await;
    bench.write_forged_entry(ask(2).address, planted).await;
    bench.assert_refused(&ask(2), "with the fingerprint of where it is now").await;
}

async fn fixture_with_fingerprint_of_2(of_1: ForgedEntry) -> (SealFixture, ForgedEntry) {
    let (bench, _) = bench().await;
    let fingerprint = bench.stored_entry(&ask(2).address).await.fingerprint;
    (bench, ForgedEntry { fingerprint, ..of_1 })
}

#[tokio::test]
async fn a_record_for_another_request_attempt_or_state_is_refused() {
    let other = Fingerprint { version: 0x81, digest: [7; 32] };
    for (what, change) in [
        ("fingerprint", &(|planted: &mut ForgedEntry| planted.fingerprint = other) as &dyn Fn(&mut ForgedEntry)),
        ("fingerprint in clear", &|planted| planted.fingerprint = ask(2).fingerprint),
        ("attempt", &|planted| planted.attempt += 1),
        ("no attempt", &|planted| planted.attempt = 0),
        ("state", &|planted| planted.failed = true),
    ] {
        let (bench, mut planted) = bench().await;
        change(&mut planted);
        bench.write_forged_entry(ask(1).address, planted).await;
        bench.assert_refused(&ask(1), what).await;
    }
}

#[tokio::test]
async fn every_flipped_byte_is_refused() {
    let (bench, planted) = bench().await;
    for at in 0..planted.record.len() {
        let mut record = planted.record.to_vec();
        record[at] ^= 0x10;
        bench.write_forged_entry(ask(1).address, ForgedEntry { record: record.into(), ..planted.clone() }).await;
        bench.assert_refused(&ask(1), &format!("byte {at}")).await;
    }
}

#[tokio::test]
async fn an_answer_in_clear_is_refused_unless_it_is_accepted() {
    let plain = ForgedEntry {
        fingerprint: ask(1).fingerprint,
        attempt: 1,
        failed: false,
        record: Bytes::from_static(b"planted in clear"),
    };
    let (bench, sealed) = bench().await;
    bench.write_forged_entry(ask(1).address, plain.clone()).await;
    bench.assert_refused(&ask(1), "all in clear").await;
    bench.write_forged_entry(ask(1).address, ForgedEntry { fingerprint: sealed.fingerprint, ..plain.clone() }).await;
    bench.assert_refused(&ask(1), "under a fingerprint that is not").await;

    let rules = SealOptions { accept_plain: true, ..SealOptions::default() };
    let bench = SealFixture::new(Sealer::new(key("k1"), Vec::new(), &[0x33; 32], rules));
    bench.write_forged_entry(ask(1).address, plain).await;
    assert_eq!(expect_replayed(&bench.store, &ask(1)).await, &b"planted in clear"[..]);
    assert_eq!(bench.events.unreadable_count(), 0);
    bench.sealing.rekey(key("k1"), Vec::new(), SealOptions::default());
    bench.assert_refused(&ask(1), "once it is no longer accepted").await;
}

#[tokio::test]
async fn a_running_claim_in_clear_is_refused_unless_it_is_accepted() {
    let bench = SealFixture::new(sealing());
    granted(&*bench.raw, &ask(1)).await;
    bench.assert_refused(&ask(1), "claimed without a seal").await;
    bench.sealing.rekey(key("k1"), Vec::new(), SealOptions { accept_plain: true, ..SealOptions::default() });
    let found = bench.store.claim(&ask(1)).await.unwrap();
    let ClaimOutcome::InProgress(holder) = found else { panic!("{found:?}") };
    assert_eq!(holder.fingerprint, ask(1).fingerprint);
}

#[tokio::test]
async fn a_holder_that_finds_a_forged_answer_learns_that_nobody_knows() {
    let bench = SealFixture::new(sealing());
    let lease = granted(&bench.store, &ask(1)).await;
    let stored = match bench.raw.get(&ask(1).address).await.unwrap() {
        Some(ClaimOutcome::InProgress(holder)) => holder,
        other => panic!("{other:?}"),
    };
    assert_eq!(bench.raw.admin().forget(&ask(1).address, stored.fence).await.unwrap(), SettleOutcome::Applied);
    let record = Bytes::from_static(b"forged");
    bench
        .write_forged_entry(
            ask(1).address,
            ForgedEntry { fingerprint: stored.fingerprint, attempt: 1, failed: false, record },
        )
        .await;
    for end in [complete("mine"), Settlement::Park { ttl: lease.request.ttl, retry_in: lease.request.lease }] {
        let SettleOutcome::ClaimLost(found) = bench.store.settle(&lease, &end).await.unwrap() else {
            panic!("it is lost")
        };
        let ClaimOutcome::OutcomeUnknown(holder) = *found else { panic!("{found:?}") };
        assert_eq!(holder.fingerprint, ask(1).fingerprint);
    }
    assert_eq!(bench.events.unreadable_count(), 2, "it is reported");
    // The way out: whoever looks after the store forgets it, whatever it is.
    let seen = bench.stored_entry(&ask(1).address).await.fence;
    assert_eq!(bench.store.admin().forget(&ask(1).address, seen).await.unwrap(), SettleOutcome::Applied);
    granted(&bench.store, &ask(1)).await;
}

#[tokio::test]
async fn a_label_or_tags_of_another_entry_are_not_shown_as_its_own() {
    let bench = SealFixture::new(sealing());
    let lease = granted(&bench.store, &ask(1)).await;
    let other = ClaimRequest { label: "of 2".into(), ..ClaimRequest::clone(&ask(2)) };
    granted(&bench.store, &other.into()).await;
    let raw = |at| EntryFilter { address: Some(at), ..EntryFilter::default() };
    let list = async |store: &dyn Store, nth| {
        let page = store.admin().list(&raw(ask(nth).address), ListCursor::default(), 1).await.unwrap();
        page.entries.into_iter().next().unwrap()
    };
    assert_eq!(list(&bench.store, 1).await.label, &b"planted-label"[..]);
    // The attacker swaps in label and tags of 2.
    let (of_1, of_2) = (list(&*bench.raw, 1).await, list(&*bench.raw, 2).await);
    assert_eq!(bench.raw.admin().forget(&ask(1).address, of_1.fence).await.unwrap(), SettleOutcome::Applied);
    let swapped = ClaimRequest {
        token: ClaimToken::mint(),
        fingerprint: of_1.fingerprint,
        tags: of_2.tags.clone(),
        label: of_2.label.clone(),
        ..ClaimRequest::clone(&lease.request)
    };
    let held = Lease { request: swapped.into(), fence: Fence(u64::MAX / 4), attempt: 1, front_only: false };
    assert_eq!(bench.raw.extend(&held, lease.request.lease).await.unwrap(), SettleOutcome::Restored);
    let shown = list(&bench.store, 1).await;
    assert_eq!((&shown.label, &shown.tags), (&of_2.label, &of_2.tags), "as they are held: sealed");
    assert_eq!(shown.fingerprint, ask(1).fingerprint);
}
