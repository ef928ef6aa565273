//! Reads: `get`, listings and counts. They change nothing.

use super::common::*;

pub async fn get_is_read_only(store: &dyn Store) {
    let ask = new_request();
    for _ in 0..2 {
        assert_eq!(get(store, &ask).await, None, "nothing is there");
    }
    let lease = claim_granted(store, &ask).await;
    assert_eq!(lease.attempt, 1, "looking claimed nothing");
    for _ in 0..2 {
        let holder = expect_in_progress(get(store, &ask).await.expect("a holder is there"));
        assert_eq!((holder.fence, holder.fingerprint), (lease.fence, ask.fingerprint), "the holder");
    }
    park(store, &lease).await;
    for _ in 0..2 {
        let holder = expect_outcome_unknown(get(store, &ask).await.expect("a parked holder is there"));
        assert_eq!(holder.fence, lease.fence, "the parked holder");
    }
    complete(store, &lease, b"done").await;
    for _ in 0..2 {
        let done = expect_completed(get(store, &ask).await.expect("a record is there"));
        assert_eq!((done.fence, &done.record[..]), (lease.fence, &b"done"[..]), "the record");
    }
}

pub async fn get_after_a_release_is_none(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    release(store, &lease).await;
    assert_eq!(get(store, &ask).await, None, "a released entry is not there");
    let filter = EntryFilter { address: Some(ask.address), ..EntryFilter::default() };
    assert_eq!(list_all(store, &filter, 9).await, [], "nor listed");
}

/// A listing returns every field of an entry unchanged: any text in tags, any bytes in the summary.
pub async fn a_listed_entry_carries_what_was_given(store: &dyn Store) {
    let tags = Tags::new("ten\0ant'; --", "üser \u{1f980}", "POST /päy%_\\*?", "key\n\"quoted\"");
    let label = Bytes::from((0..=255).rev().collect::<Vec<u8>>());
    let ask = ClaimRequest { tags: tags.clone(), label: label.clone(), ..new_request() };
    let lease = claim_granted(store, &ask).await;
    let seen = find_listed(store, &ask).await;
    assert_eq!((seen.address, seen.state), (ask.address, EntryState::Processing));
    assert_eq!((seen.fence, seen.attempt), (lease.fence, 1), "of its holder");
    assert_eq!(seen.fingerprint, ask.fingerprint, "of its request");
    assert_eq!((&seen.tags, &seen.label), (&tags, &label), "tags and label come back byte for byte");
    assert!(seen.age <= POLL_TIMEOUT * 2 && seen.expires_in <= ask.lease + ask.ttl, "age and life are sensible");
    assert!(seen.expires_in > ask.lease, "a running entry is kept beyond its lease");
    assert_eq!(seen.summary, None, "it has not finished");
    let outline = RecordSummary {
        status: 201,
        requested_at_ms: 1_800_000_000_123,
        completed_at_ms: 1_800_000_000_456,
        took: Duration::from_millis(333),
    };
    let (record, ttl) = (Bytes::from_static(b"r"), Duration::from_secs(100));
    let end = Settlement::Complete { failed: true, record, summary: outline, ttl };
    settle_applied(store, &lease, &end).await;
    let seen = find_listed(store, &ask).await;
    assert_eq!((seen.state, seen.summary), (EntryState::Failed, Some(outline)), "it has failed, and how");
    assert_eq!((&seen.tags, &seen.label), (&tags, &label), "tags and label outlive the run");
    assert!(seen.expires_in <= Duration::from_secs(100), "its life is that of its record");
}

pub async fn a_listing_filters_by_state(store: &dyn Store) {
    let tenant = unique_tag();
    let asks: Vec<ClaimRequest> = (0..5).map(|_| request_of_tenant(&tenant)).collect();
    claim_granted(store, &asks[0]).await;
    let done = claim_granted(store, &asks[1]).await;
    complete(store, &done, b"done").await;
    let failed = claim_granted(store, &asks[2]).await;
    settle_applied(store, &failed, &completion(true, "no", LONG_LEASE)).await;
    park(store, &claim_granted(store, &asks[3]).await).await;
    claim_and_lapse(store, &asks[4]).await;
    let expected = [
        (EntryState::Processing, vec![0]),
        (EntryState::Done, vec![1]),
        (EntryState::Failed, vec![2]),
        (EntryState::Unknown, vec![3, 4]),
    ];
    for (state, of) in expected {
        let filter = EntryFilter { state: Some(state), tenant: Some(tenant.clone()), ..EntryFilter::default() };
        let found: Vec<_> =
            list_all(store, &filter, 2).await.into_iter().map(|seen| (seen.address, seen.state)).collect();
        let mut wanted: Vec<_> = of.into_iter().map(|nth: usize| (asks[nth].address, state)).collect();
        wanted.sort_unstable_by_key(|(address, _)| *address);
        assert_eq!(found, wanted, "entries in state {state:?}");
    }
}

pub async fn a_listing_filters_by_tags_and_address(store: &dyn Store) {
    let [tenant, user, endpoint, key] = [unique_tag(), unique_tag(), unique_tag(), unique_tag()];
    let hash = key_hash(&key);
    let wanted = ClaimRequest { tags: Tags::from_parts([&tenant, &user, &endpoint, &key, &hash]), ..new_request() };
    claim_granted(store, &wanted).await;
    for tags in [
        Tags::from_parts([&user, &tenant, &key, &endpoint, &key_hash(&endpoint)]),
        Tags::new(&format!("{tenant}x"), &user[1..], &endpoint.to_uppercase(), ""),
        Tags::default(),
    ] {
        claim_granted(store, &ClaimRequest { tags, ..new_request() }).await;
    }
    let none = EntryFilter::default;
    for filter in [
        EntryFilter { tenant: Some(tenant.clone()), ..none() },
        EntryFilter { user: Some(user.clone()), ..none() },
        EntryFilter { endpoint: Some(endpoint.clone()), ..none() },
        EntryFilter { key: Some(key.clone()), ..none() },
        EntryFilter { key_hash: Some(hash.clone()), ..none() },
        EntryFilter { tenant: Some(tenant.clone()), key_hash: Some(hash.clone()), ..none() },
        EntryFilter { address: Some(wanted.address), ..none() },
        EntryFilter {
            tenant: Some(tenant.clone()),
            key: Some(key.clone()),
            state: Some(EntryState::Processing),
            ..none()
        },
    ] {
        let found: Vec<_> = list_all(store, &filter, 10).await.into_iter().map(|seen| seen.address).collect();
        assert_eq!(found, [wanted.address], "exactly one entry matches {filter:?}");
    }
    for filter in [
        EntryFilter { tenant: Some(tenant.clone()), user: Some(tenant.clone()), ..none() },
        EntryFilter { key_hash: Some(key.clone()), ..none() },
        EntryFilter { tenant: Some(user.clone()), key_hash: Some(hash), ..none() },
        EntryFilter { tenant: Some(tenant), state: Some(EntryState::Done), ..none() },
        EntryFilter { address: Some(new_request().address), ..none() },
    ] {
        assert_eq!(list_all(store, &filter, 10).await, [], "nothing matches {filter:?}");
    }
}

pub async fn a_listing_filters_by_age(store: &dyn Store) {
    let tenant = unique_tag();
    claim_granted(store, &request_of_tenant(&tenant)).await;
    let filter = |age| EntryFilter { tenant: Some(tenant.clone()), older_than: Some(age), ..EntryFilter::default() };
    sleep(SHORT_LEASE).await;
    assert_eq!(list_all(store, &filter(SHORT_LEASE / 2), 10).await.len(), 1, "it is older than that");
    assert_eq!(list_all(store, &filter(LONG_LEASE), 10).await, [], "it is younger than that");
}

pub async fn paging_shows_every_entry_once(store: &dyn Store) {
    let tenant = unique_tag();
    let mut wanted = Vec::new();
    for _ in 0..23 {
        let ask = request_of_tenant(&tenant);
        let lease = claim_granted(store, &ask).await;
        if wanted.len() % 3 == 0 {
            complete(store, &lease, b"done").await;
        }
        wanted.push(ask.address);
    }
    wanted.sort_unstable();
    let filter = EntryFilter { tenant: Some(tenant), ..EntryFilter::default() };
    for at_most in [1, 5, 22, 23, 24, 1000] {
        let mut found = Vec::new();
        let mut from = ListCursor::default();
        // Pages may be short, and even empty, but not for ever.
        for _ in 0..200 {
            let page = expect_answer("list", store.admin().list(&filter, from, at_most).await);
            assert!(page.entries.len() <= at_most as usize, "a page of {at_most} held {}", page.entries.len());
            found.extend(page.entries.into_iter().map(|seen| seen.address));
            let Some(next) = page.next else { break };
            from = next;
            assert!(found.len() <= wanted.len(), "an entry came twice");
        }
        assert_eq!(found, wanted, "pages of {at_most} show every entry once, in order");
    }
}

pub async fn counts_follow_what_is_there(store: &dyn Store) {
    const OWN_ENTRIES: u64 = 12;
    let mut leases = Vec::new();
    for _ in 0..OWN_ENTRIES * 3 {
        leases.push(claim_granted(store, &new_request()).await);
    }
    let counts = || async { expect_answer("counts", store.admin().counts().await) };
    let before = counts().await;
    assert!(before.processing >= OWN_ENTRIES * 3, "{} run, and at least {} do", before.processing, OWN_ENTRIES * 3);
    assert!(before.bytes > 0, "they take up something");
    for lease in &leases[..OWN_ENTRIES as usize] {
        complete(store, lease, b"done").await;
    }
    for lease in &leases[OWN_ENTRIES as usize..OWN_ENTRIES as usize * 2] {
        park(store, lease).await;
    }
    let after = counts().await;
    assert!(
        after.processing >= OWN_ENTRIES && after.finished >= OWN_ENTRIES && after.unknown >= OWN_ENTRIES,
        "each is counted: {after:?}"
    );
    for lease in &leases {
        forget_applied(store, lease).await;
    }
    // Others may use the store too. Counts and listings agree as soon as both are read in the same state.
    for state in [EntryState::Processing, EntryState::Unknown] {
        let filter = EntryFilter { state: Some(state), ..EntryFilter::default() };
        poll_until("the counts to be those of the listing", || async {
            let before = list_all(store, &filter, 1000).await.len() as u64;
            let counts = counts().await;
            let counted = if state == EntryState::Processing { counts.processing } else { counts.unknown };
            (counted == before).then_some(())
        })
        .await;
    }
}

pub async fn an_expired_entry_is_not_listed(store: &dyn Store) {
    let tenant = unique_tag();
    let ask = ClaimRequest { tags: Tags::new(&tenant, "", "", ""), ..short_request() };
    claim_granted(store, &ask).await;
    wait_until_absent(store, &ask).await;
    let filter = EntryFilter { tenant: Some(tenant), ..EntryFilter::default() };
    assert_eq!(list_all(store, &filter, 10).await, [], "it has expired");
    assert!(!matches!(get(store, &ask).await, Some(ClaimOutcome::Completed(_))));
}

fn unique_tag() -> String {
    ClaimToken::mint().0.iter().map(|byte| format!("{byte:02x}")).collect()
}
