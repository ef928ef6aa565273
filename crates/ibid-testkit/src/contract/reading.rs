//! What readers and operators see: `get`, listings and counts. Looking changes nothing.

use std::time::Duration;

use bytes::Bytes;
use ibid::store::{Ask, Claim, Cursor, End, Filter, Outline, State, Store, Tags, Token};

use super::kit::*;

/// `get` shows what a claim would find, and claims nothing.
pub async fn get_is_read_only(store: &dyn Store) {
    let ask = fresh();
    for _ in 0..2 {
        assert_eq!(get(store, &ask).await, None, "nothing is there");
    }
    let lease = granted(store, &ask).await;
    assert_eq!(lease.attempt, 1, "looking claimed nothing");
    for _ in 0..2 {
        let holder = expect_busy(get(store, &ask).await.expect("a holder is there"));
        assert_eq!((holder.fence, holder.fingerprint), (lease.fence, ask.fingerprint), "the holder");
    }
    held(store, &lease, &park()).await;
    for _ in 0..2 {
        let holder = expect_unknown(get(store, &ask).await.expect("a parked holder is there"));
        assert_eq!(holder.fence, lease.fence, "the parked holder");
    }
    held(store, &lease, &complete(b"done")).await;
    for _ in 0..2 {
        let done = expect_done(get(store, &ask).await.expect("a record is there"));
        assert_eq!((done.fence, &done.record[..]), (lease.fence, &b"done"[..]), "the record");
    }
}

/// After a release there is nothing to see.
pub async fn get_after_a_release_is_none(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    held(store, &lease, &End::Release).await;
    assert_eq!(get(store, &ask).await, None, "a released entry is not there");
    assert_eq!(list(store, &Filter { address: Some(ask.address), ..Filter::default() }, 9).await, [], "nor listed");
}

/// Every column of an entry comes back as it was given: any text in tags, any bytes in the label.
pub async fn a_listed_entry_carries_what_was_given(store: &dyn Store) {
    let tags = Tags::new("ten\0ant'; --", "üser \u{1f980}", "POST /päy%_\\*?", "key\n\"quoted\"");
    let label = Bytes::from((0..=255).rev().collect::<Vec<u8>>());
    let ask = Ask { tags: tags.clone(), label: label.clone(), ..fresh() };
    let lease = granted(store, &ask).await;
    let seen = listed(store, &ask).await;
    assert_eq!((seen.address, seen.state), (ask.address, State::Processing));
    assert_eq!((seen.fence, seen.attempt), (lease.fence, 1), "of its holder");
    assert_eq!(seen.fingerprint, ask.fingerprint, "of its request");
    assert_eq!((&seen.tags, &seen.label), (&tags, &label), "tags and label come back byte for byte");
    assert!(seen.age <= PATIENCE * 2 && seen.expires_in <= ask.hold + ask.keep, "age and life are sensible");
    assert!(seen.expires_in > ask.hold, "a running entry is kept beyond its lease");
    assert_eq!(seen.outline, None, "it has not finished");
    let outline = Outline {
        status: 201,
        requested_at_ms: 1_800_000_000_123,
        completed_at_ms: 1_800_000_000_456,
        took: Duration::from_millis(333),
    };
    let end = End::Complete { failed: true, record: Bytes::from_static(b"r"), outline, keep: Duration::from_secs(100) };
    held(store, &lease, &end).await;
    let seen = listed(store, &ask).await;
    assert_eq!((seen.state, seen.outline), (State::Failed, Some(outline)), "it has failed, and how");
    assert_eq!((&seen.tags, &seen.label), (&tags, &label), "tags and label outlive the run");
    assert!(seen.expires_in <= Duration::from_secs(100), "its life is that of its record");
}

/// Entries are found by their state.
pub async fn a_listing_filters_by_state(store: &dyn Store) {
    let tenant = unique();
    let tags = Tags::new(&tenant, "", "", "");
    let asks: Vec<Ask> = (0..5).map(|_| Ask { tags: tags.clone(), ..fresh() }).collect();
    granted(store, &asks[0]).await;
    let done = granted(store, &asks[1]).await;
    held(store, &done, &complete(b"done")).await;
    let failed = granted(store, &asks[2]).await;
    let record = Bytes::from_static(b"no");
    held(store, &failed, &End::Complete { failed: true, record, outline: Outline::default(), keep: LONG }).await;
    parked(store, &asks[3]).await;
    lapsed(store, &asks[4]).await;
    let expected =
        [(State::Processing, vec![0]), (State::Done, vec![1]), (State::Failed, vec![2]), (State::Unknown, vec![3, 4])];
    for (state, of) in expected {
        let filter = Filter { state: Some(state), tenant: Some(tenant.clone()), ..Filter::default() };
        let found: Vec<_> = list(store, &filter, 2).await.into_iter().map(|seen| (seen.address, seen.state)).collect();
        let mut wanted: Vec<_> = of.into_iter().map(|nth: usize| (asks[nth].address, state)).collect();
        wanted.sort_unstable_by_key(|(address, _)| *address);
        assert_eq!(found, wanted, "entries in state {state:?}");
    }
}

/// Entries are found by each of their tags, exactly, and by all that are given together.
pub async fn a_listing_filters_by_tags_and_address(store: &dyn Store) {
    let [tenant, user, endpoint, key] = [unique(), unique(), unique(), unique()];
    let hash = ibid::store::key_hash(&key);
    let wanted = Ask { tags: Tags::from_parts([&tenant, &user, &endpoint, &key, &hash]), ..fresh() };
    granted(store, &wanted).await;
    for tags in [
        Tags::from_parts([&user, &tenant, &key, &endpoint, &ibid::store::key_hash(&endpoint)]),
        Tags::new(&format!("{tenant}x"), &user[1..], &endpoint.to_uppercase(), ""),
        Tags::default(),
    ] {
        granted(store, &Ask { tags, ..fresh() }).await;
    }
    let none = Filter::default;
    for filter in [
        Filter { tenant: Some(tenant.clone()), ..none() },
        Filter { user: Some(user.clone()), ..none() },
        Filter { endpoint: Some(endpoint.clone()), ..none() },
        Filter { key: Some(key.clone()), ..none() },
        Filter { key_hash: Some(hash.clone()), ..none() },
        Filter { tenant: Some(tenant.clone()), key_hash: Some(hash.clone()), ..none() },
        Filter { address: Some(wanted.address), ..none() },
        Filter { tenant: Some(tenant.clone()), key: Some(key.clone()), state: Some(State::Processing), ..none() },
    ] {
        let found: Vec<_> = list(store, &filter, 10).await.into_iter().map(|seen| seen.address).collect();
        assert_eq!(found, [wanted.address], "exactly one entry matches {filter:?}");
    }
    for filter in [
        Filter { tenant: Some(tenant.clone()), user: Some(tenant.clone()), ..none() },
        Filter { key_hash: Some(key.clone()), ..none() },
        Filter { tenant: Some(user.clone()), key_hash: Some(hash), ..none() },
        Filter { tenant: Some(tenant), state: Some(State::Done), ..none() },
        Filter { address: Some(fresh().address), ..none() },
    ] {
        assert_eq!(list(store, &filter, 10).await, [], "nothing matches {filter:?}");
    }
}

/// Entries are found by their age, which counts from the grant.
pub async fn a_listing_filters_by_age(store: &dyn Store) {
    let tenant = unique();
    let old = Ask { tags: Tags::new(&tenant, "", "", ""), ..fresh() };
    granted(store, &old).await;
    let filter = |age| Filter { tenant: Some(tenant.clone()), older_than: Some(age), ..Filter::default() };
    tokio::time::sleep(SHORT).await;
    assert_eq!(list(store, &filter(SHORT / 2), 10).await.len(), 1, "it is older than that");
    assert_eq!(list(store, &filter(LONG), 10).await, [], "it is younger than that");
}

/// Page by page, every entry comes once.
pub async fn paging_shows_every_entry_once(store: &dyn Store) {
    let tenant = unique();
    let mut wanted = Vec::new();
    for _ in 0..23 {
        let ask = Ask { tags: Tags::new(&tenant, "", "", ""), ..fresh() };
        let lease = granted(store, &ask).await;
        if wanted.len() % 3 == 0 {
            held(store, &lease, &complete(b"done")).await;
        }
        wanted.push(ask.address);
    }
    wanted.sort_unstable();
    let filter = Filter { tenant: Some(tenant), ..Filter::default() };
    for at_most in [1, 5, 22, 23, 24, 1000] {
        let mut found = Vec::new();
        let mut from = Cursor::default();
        // Pages may come short, and even empty, but not for ever.
        for _ in 0..200 {
            let page = answer("list", store.operators().list(&filter, from, at_most).await);
            assert!(page.entries.len() <= at_most as usize, "a page of {at_most} held {}", page.entries.len());
            found.extend(page.entries.into_iter().map(|seen| seen.address));
            let Some(next) = page.next else { break };
            from = next;
            assert!(found.len() <= wanted.len(), "an entry came twice");
        }
        assert_eq!(found, wanted, "pages of {at_most} show every entry once, in order");
    }
}

/// Counts go up with what comes, and down with what goes.
pub async fn counts_follow_what_is_there(store: &dyn Store) {
    const MINE: u64 = 12;
    let mut leases = Vec::new();
    for _ in 0..MINE * 3 {
        leases.push(granted(store, &fresh()).await);
    }
    let counts = || async { answer("counts", store.operators().counts().await) };
    let before = counts().await;
    assert!(before.processing >= MINE * 3, "{} run, and at least {} do", before.processing, MINE * 3);
    assert!(before.bytes > 0, "they take up something");
    for lease in &leases[..MINE as usize] {
        held(store, lease, &complete(b"done")).await;
    }
    for lease in &leases[MINE as usize..MINE as usize * 2] {
        held(store, lease, &park()).await;
    }
    let after = counts().await;
    assert!(after.processing >= MINE && after.finished >= MINE && after.unknown >= MINE, "each is counted: {after:?}");
    for lease in &leases {
        let forgotten = store.operators().forget(&lease.ask.address, lease.fence).await;
        expect_held("forget", answer("forget", forgotten));
    }
    // Others may use the store too: what is counted is what is listed, as soon as both are seen at the same time.
    for state in [State::Processing, State::Unknown] {
        let filter = Filter { state: Some(state), ..Filter::default() };
        until("the counts to be those of the listing", || async {
            let before = list(store, &filter, 1000).await.len() as u64;
            let counts = counts().await;
            let counted = if state == State::Processing { counts.processing } else { counts.unknown };
            (counted == before).then_some(())
        })
        .await;
    }
}

/// What was gone is not counted: a claim that expires leaves the listing.
pub async fn an_expired_entry_is_not_listed(store: &dyn Store) {
    let tenant = unique();
    let ask = Ask { hold: SHORT, keep: SHORT, tags: Tags::new(&tenant, "", "", ""), ..fresh() };
    granted(store, &ask).await;
    gone(store, &ask).await;
    assert_eq!(list(store, &Filter { tenant: Some(tenant), ..Filter::default() }, 10).await, [], "it has expired");
    assert!(!matches!(get(store, &ask).await, Some(Claim::Done(_))));
}

/// A tag that nobody else uses.
fn unique() -> String {
    Token::mint().0.iter().map(|byte| format!("{byte:02x}")).collect()
}
