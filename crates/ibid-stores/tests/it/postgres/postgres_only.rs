//! What only this store does: batches, replays that write nothing, fences beyond the clock, sweeps, rows written by SQL.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use ibid::{
    record::{Record, RecordBody},
    store::{ClaimOutcome, ClaimRequest, EntryState, SettleOutcome, Store},
};
use testbed::TestPostgres;

use super::common::{claim_granted, claim_request, competing_request, complete, database, open};

async fn fresh() -> (&'static TestPostgres, String, ibid_stores::postgres::Postgres) {
    let server = TestPostgres::shared();
    let name = database(server);
    let store = open(&(server.url("gateway", &name) + "?pool=1")).await;
    (server, name, store)
}

fn short_lease_request() -> Arc<ClaimRequest> {
    Arc::new(ClaimRequest {
        lease: Duration::from_millis(1),
        ttl: Duration::from_millis(1),
        ..ClaimRequest::clone(&claim_request())
    })
}

#[tokio::test]
async fn claims_and_ends_that_gather_are_one_statement() {
    let (server, name, store) = fresh().await;
    let asks: Vec<_> = (0..500).map(|_| claim_request()).collect();
    let leases = join_all(asks.iter().map(|ask| claim_granted(&store, ask))).await;
    // Rows of one transaction carry its number.
    let transactions = "SELECT count(DISTINCT xmin::text), max(n) <= 64 FROM \
        (SELECT xmin, count(*) OVER (PARTITION BY xmin::text) AS n FROM ibid.idempotency_keys) k";
    let count = |found: String| {
        let (transactions, bounded) =
            found.split_once('|').map(|(n, b)| (n.parse::<u32>().unwrap(), b == "t")).unwrap();
        assert!(bounded, "a statement is bounded");
        transactions
    };
    let claims = count(server.sql(&name, transactions));
    assert!((8..50).contains(&claims), "500 claims were {claims} transactions");
    let end = complete(b"done");
    for held in join_all(leases.iter().map(|lease| store.settle(lease, &end))).await {
        assert_eq!(held.unwrap(), SettleOutcome::Applied);
    }
    let ends = count(server.sql(&name, transactions));
    assert!((8..50).contains(&ends), "500 ends were {ends} transactions");
}

#[tokio::test]
async fn claims_and_ends_of_one_batch_are_one_transaction() {
    let (server, name, store) = fresh().await;
    let [ended, new] = [(); 2].map(|()| (0..100).map(|_| claim_request()).collect::<Vec<_>>());
    let rivals: Vec<_> = ended.iter().map(|ask| competing_request(ask)).collect();
    let leases = join_all(ended.iter().map(|ask| claim_granted(&store, ask))).await;
    let end = complete(b"done");
    let each = leases.iter().zip(&new).zip(&rivals).map(|((lease, new), rival)| async {
        let (held, _lease, found) =
            tokio::join!(store.settle(lease, &end), claim_granted(&store, new), store.claim(rival));
        assert_eq!(held.unwrap(), SettleOutcome::Applied);
        // Whichever of the two came first.
        assert!(matches!(found.unwrap(), ClaimOutcome::Completed(_) | ClaimOutcome::InProgress(_)));
    });
    join_all(each).await;
    let states = "SELECT state, count(*) FROM ibid.idempotency_keys GROUP BY state ORDER BY state";
    assert_eq!(server.sql(&name, states), "done|100\nprocessing|100");
    // Rows of one transaction carry its number.
    let mixed = "SELECT count(*) > 0 FROM (SELECT FROM ibid.idempotency_keys GROUP BY xmin::text \
        HAVING bool_or(state = 'done') AND bool_or(state = 'processing')) k";
    assert_eq!(server.sql(&name, mixed), "t");
}

#[tokio::test]
async fn rivals_in_one_batch_are_settled_by_it() {
    let (_, _, store) = fresh().await;
    let first = claim_request();
    let asks: Vec<_> = (0..100).map(|_| competing_request(&first)).collect();
    let found = join_all(asks.iter().map(|ask| store.claim(ask))).await;
    let granted = found.iter().filter(|found| matches!(found, Ok(ClaimOutcome::Granted(_)))).count();
    let busy = found.iter().filter(|found| matches!(found, Ok(ClaimOutcome::InProgress(_)))).count();
    assert_eq!((granted, busy), (1, 99));
}

#[tokio::test]
async fn a_replay_writes_nothing() {
    let server = TestPostgres::start_with(&["autovacuum=off"]);
    let name = database(&server);
    let store = open(&server.url("gateway", &name)).await;
    let done = claim_request();
    let _ = store.settle(&claim_granted(&store, &done).await, &complete(b"done")).await.unwrap();
    let running = claim_request();
    let lease = claim_granted(&store, &running).await;
    let look = async || {
        for _ in 0..50 {
            assert!(matches!(store.claim(&competing_request(&done)).await.unwrap(), ClaimOutcome::Completed(_)));
            assert!(matches!(store.claim(&competing_request(&running)).await.unwrap(), ClaimOutcome::InProgress(_)));
            assert!(matches!(store.claim(&running).await.unwrap(), ClaimOutcome::Granted(_)), "the same token again");
            assert!(matches!(store.get(&done.address).await.unwrap(), Some(ClaimOutcome::Completed(_))));
        }
    };
    // The first readers may tidy up a page.
    look().await;
    server.sql(&name, "CHECKPOINT");
    let written = || server.sql(&name, "SELECT pg_snapshot_xmax(pg_current_snapshot()), pg_current_wal_insert_lsn()");
    let mut rounds = Vec::new();
    for _ in 0..3 {
        let before = written();
        look().await;
        let after = written();
        assert_eq!(before.split('|').next(), after.split('|').next(), "no transaction wrote");
        if before == after {
            let _ = store.settle(&lease, &complete(b"done")).await.unwrap();
            assert_ne!(written(), after, "the measure works: an end does write");
            return;
        }
        rounds.push((before, after));
    }
    panic!("replays wrote to the log: {rounds:?}");
}

/// The last statement of the gateway's connections only read.
fn has_only_read(server: &TestPostgres, name: &str) -> bool {
    let sql =
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'SELECT u.nth%'";
    server.sql(name, sql) == "t"
}

#[tokio::test]
async fn batches_of_replays_only_read_and_what_is_not_completed_is_claimed() {
    let (server, name, store) = fresh().await;
    let [done, running, new] = [100, 10, 10].map(|n| (0..n).map(|_| claim_request()).collect::<Vec<_>>());
    let expired: Vec<_> = (0..10).map(|_| short_lease_request()).collect();
    let leases = join_all(done.iter().map(|ask| claim_granted(&store, ask))).await;
    let end = complete(b"done");
    for held in join_all(leases.iter().map(|lease| store.settle(lease, &end))).await {
        assert_eq!(held.unwrap(), SettleOutcome::Applied);
    }
    join_all(running.iter().chain(&expired).map(|ask| claim_granted(&store, ask))).await;
    assert!(!has_only_read(server, &name));
    let replay_all = async || {
        for ask in &done {
            assert!(matches!(store.claim(&competing_request(ask)).await, Ok(ClaimOutcome::Completed(_))));
        }
    };
    let replays = || join_all(done.iter().map(|ask| async { store.claim(&competing_request(ask)).await.unwrap() }));
    replay_all().await;
    assert!(!has_only_read(server, &name), "single claims do not read first");
    for _ in 0..2 {
        for found in replays().await {
            assert!(matches!(&found, ClaimOutcome::Completed(entry) if entry.record[..] == *b"done"), "{found:?}");
        }
    }
    assert!(has_only_read(server, &name));
    let rivals: Vec<_> = running.iter().map(|ask| competing_request(ask)).collect();
    let (replayed, busy, again, granted, overdue) = tokio::join!(
        replays(),
        join_all(rivals.iter().map(|ask| store.claim(ask))),
        join_all(running.iter().map(|ask| claim_granted(&store, ask))),
        join_all(new.iter().map(|ask| claim_granted(&store, ask))),
        join_all(expired.iter().map(|ask| async { claim_granted(&store, &competing_request(ask)).await })),
    );
    assert!(replayed.iter().all(|found| matches!(found, ClaimOutcome::Completed(_))));
    assert!(busy.iter().all(|found| matches!(found, Ok(ClaimOutcome::InProgress(_)))), "{busy:?}");
    assert!(again.iter().chain(&granted).chain(&overdue).all(|lease| lease.attempt == 1), "what expired is forgotten");
}

#[tokio::test]
async fn fences_grow_although_the_clock_is_set_back() {
    let (server, name, store) = fresh().await;
    // As if all that is gone had been claimed in the far future.
    server.sql(&name, "UPDATE ibid.meta SET fence_high = 5000000000000000");
    let one = short_lease_request();
    let first = claim_granted(&store, &one).await;
    assert_eq!(first.fence.0, 5_000_000_000_000_001, "above what is gone");
    tokio::time::sleep(Duration::from_millis(30)).await;
    let again = claim_granted(&store, &competing_request(&one)).await;
    assert_eq!(again.fence.0, first.fence.0 + 1, "above the row that is there");
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert_eq!(store.sweep(100).await.unwrap().removed, 1);
    let third = claim_granted(&store, &competing_request(&one)).await;
    assert!(third.fence > again.fence, "above the row that was swept: {} after {}", third.fence, again.fence);
}

#[tokio::test]
async fn two_sweepers_under_load_remove_each_row_once_and_nothing_that_lives() {
    let (server, name, store) = fresh().await;
    let other = open(&server.url("gateway", &name)).await;
    let expired: Vec<_> = (0..300).map(|_| short_lease_request()).collect();
    join_all(expired.iter().map(|ask| claim_granted(&store, ask))).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let sweeps = async |store: &ibid_stores::postgres::Postgres| {
        let mut removed = 0;
        for _ in 0..30 {
            removed += store.sweep(20).await.unwrap().removed;
        }
        removed
    };
    let claims = async {
        let mut leases = Vec::new();
        for _ in 0..10 {
            let asks: Vec<_> = (0..20).map(|_| claim_request()).collect();
            leases.extend(join_all(asks.iter().map(|ask| claim_granted(&other, ask))).await);
        }
        leases
    };
    let (one, two, leases) = tokio::join!(sweeps(&store), sweeps(&other), claims);
    let rest = store.sweep(1000).await.unwrap();
    assert_eq!(one + two + rest.removed, 300, "{one} and {two} and {rest:?}");
    let end = complete(b"alive");
    for held in join_all(leases.iter().map(|lease| other.settle(lease, &end))).await {
        assert_eq!(held.unwrap(), SettleOutcome::Applied);
    }
}

#[tokio::test]
async fn a_sweep_says_unknown_of_what_lapsed_and_the_holder_may_still_come_back() {
    let (server, name, store) = fresh().await;
    let silent = Arc::new(ClaimRequest { lease: Duration::from_millis(1), ..ClaimRequest::clone(&claim_request()) });
    let lease = claim_granted(&store, &silent).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let state = "SELECT state FROM ibid.idempotency_keys";
    assert_eq!(server.sql(&name, state), "processing");
    let swept = store.sweep(10).await.unwrap();
    assert_eq!((swept.removed, swept.lapsed, swept.more), (0, 1, false));
    assert_eq!(server.sql(&name, state), "unknown");
    assert_eq!(store.sweep(10).await.unwrap().lapsed, 0, "once");
    assert_eq!(claim_granted(&store, &silent).await, lease, "still itself");
    assert_eq!(store.extend(&lease, Duration::from_secs(60)).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(server.sql(&name, state), "processing");
    let _ = store.settle(&lease, &complete(b"late")).await.unwrap();
    assert_eq!(server.sql(&name, state), "done");
}

#[tokio::test]
async fn an_answer_that_sql_wrote_is_put_together() {
    let (server, name, store) = fresh().await;
    let one = claim_request();
    let lease = claim_granted(&store, &one).await;
    let _ = store.settle(&lease, &complete(b"as bytes")).await.unwrap();
    server.sql(
        &name,
        r#"UPDATE ibid.idempotency_keys SET record = NULL, status = 202, body = '{"id":1}',
           headers = '{"content-type": "application/json", "link": ["</a>", "</b>"]}'"#,
    );
    let ClaimOutcome::Completed(done) = store.claim(&competing_request(&one)).await.unwrap() else {
        panic!("it is done")
    };
    let record = Record::decode(done.record).unwrap();
    assert_eq!((record.status.as_u16(), record.requested_at_ms, record.completed_at_ms), (202, 1000, 2000));
    assert_eq!(record.body, RecordBody::Whole("{\"id\":1}".into()));
    assert_eq!(record.headers.get_all("link").iter().collect::<Vec<_>>(), ["</a>", "</b>"]);
    server.sql(&name, "UPDATE ibid.idempotency_keys SET status = NULL");
    let failed = store.claim(&competing_request(&one)).await.unwrap_err();
    assert_eq!(failed.kind, ibid::store::ErrorKind::Corrupt, "{failed}");
}

#[tokio::test]
async fn people_can_read_the_table() {
    let (server, name, store) = fresh().await;
    let _ = store.settle(&claim_granted(&store, &claim_request()).await, &complete(b"done")).await.unwrap();
    let row = "SELECT state, tenant, user_id, endpoint, key, attempt, status, took, completed_at - requested_at, \
        expires_at > now() FROM ibid.idempotency_keys";
    assert_eq!(server.sql(&name, row), "done|acme|u1|POST /payments|k-1|1|201|00:00:01|00:00:01|t");
    let page = store.admin().list(&Default::default(), Default::default(), 10).await.unwrap();
    assert_eq!(page.entries[0].state, EntryState::Done);
}

#[tokio::test]
async fn generations_only_grow_and_are_shared() {
    let (server, name, store) = fresh().await;
    let other = open(&server.url("gateway", &name)).await;
    assert_eq!(store.generation().await.unwrap(), 0);
    assert_eq!(store.raise_generation().await.unwrap(), 1);
    assert_eq!(other.raise_generation().await.unwrap(), 2);
    assert_eq!(store.generation().await.unwrap(), 2);
}

#[tokio::test]
async fn a_statement_whose_plan_has_become_stale_is_prepared_again() {
    let (server, name, store) = fresh().await;
    assert_eq!(store.sweep(10).await.unwrap().removed, 0);
    // What was prepared before now fails with "cached plan must not change result type".
    server.sql(
        &name,
        "CREATE DOMAIN ibid.yes AS boolean; DROP FUNCTION ibid._sweep_all(integer);
         CREATE FUNCTION ibid._sweep_all(at_most integer, OUT removed integer, OUT lapsed integer, OUT more ibid.yes)
             LANGUAGE sql AS 'SELECT 7, 0, false::ibid.yes'",
    );
    assert_eq!(store.sweep(10).await.unwrap().removed, 7);
    assert_eq!(store.sweep(10).await.unwrap().removed, 7);
}

/// The share of updates that touched no index.
async fn hot_share(server: &TestPostgres, name: &str) -> f64 {
    let read = "SELECT pg_stat_clear_snapshot(); SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables \
        WHERE relname = 'idempotency_keys'";
    for _ in 0..100 {
        let found = server.sql(name, read);
        let (all, hot) = found.lines().last().and_then(|line| line.split_once('|')).unwrap();
        let (all, hot): (f64, f64) = (all.parse().unwrap(), hot.parse().unwrap());
        if all >= 2000.0 {
            return hot / all;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the statistics never came");
}

#[tokio::test]
async fn completing_records_of_600_bytes_touches_no_index() {
    let server = TestPostgres::shared();
    let name = database(server);
    let store = open(&server.url("gateway", &name)).await;
    let mut end = complete(&[b'r'; 600]);
    if let ibid::store::Settlement::Complete { ttl, .. } = &mut end {
        *ttl = Duration::from_secs(86400);
    }
    let ask = || ClaimRequest {
        lease: Duration::from_secs(60),
        ttl: Duration::from_secs(86400),
        ..ClaimRequest::clone(&claim_request())
    };
    for _ in 0..20 {
        let asks: Vec<_> = (0..100).map(|_| Arc::new(ask())).collect();
        let leases = join_all(asks.iter().map(|ask| claim_granted(&store, ask))).await;
        for held in join_all(leases.iter().map(|lease| store.settle(lease, &end))).await {
            assert_eq!(held.unwrap(), SettleOutcome::Applied);
        }
    }
    // A session that stays open reports what it did when it is idle for a while.
    drop(store);
    let share = hot_share(server, &name).await;
    assert!(share >= 0.95, "{share}");
}

#[tokio::test]
async fn batches_of_the_same_rows_in_other_orders_do_not_deadlock() {
    let (server, name, store) = fresh().await;
    let other = open(&(server.url("gateway", &name) + "?pool=1")).await;
    let deadlocks = format!("SELECT deadlocks FROM pg_stat_database WHERE datname = '{name}'");
    let end = complete(b"done");
    for _ in 0..40 {
        let asks: Vec<_> = (0..32).map(|_| claim_request()).collect();
        let rivals: Vec<_> = asks.iter().rev().map(|ask| competing_request(ask)).collect();
        let (ours, theirs) = tokio::join!(
            join_all(asks.iter().map(|ask| store.claim(ask))),
            join_all(rivals.iter().map(|ask| other.claim(ask)))
        );
        let granted = |found: Vec<Result<ClaimOutcome, _>>| -> Vec<_> {
            let granted = found.into_iter().map(Result::unwrap);
            granted
                .filter_map(|found| if let ClaimOutcome::Granted(lease) = found { Some(lease) } else { None })
                .collect()
        };
        let mut leases = granted(ours);
        leases.extend(granted(theirs));
        assert_eq!(leases.len(), 32, "each address is granted once");
        // Both say the same, as after a lost answer.
        let settle = async |store: &ibid_stores::postgres::Postgres, leases: Vec<&ibid::store::Lease>| {
            for held in join_all(leases.into_iter().map(|lease| store.settle(lease, &end))).await {
                assert_eq!(held.unwrap(), SettleOutcome::Applied);
            }
        };
        tokio::join!(settle(&store, leases.iter().collect()), settle(&other, leases.iter().rev().collect()));
    }
    drop((store, other));
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(server.sql("postgres", &deadlocks), "0");
}

#[tokio::test]
async fn what_has_not_ended_is_found_without_an_index_on_the_state() {
    use ibid::store::EntryFilter;
    let (server, name, store) = fresh().await;
    let unfinished = "SELECT count(*) FROM ibid.unfinished_keys";
    let listed = async |state| {
        let filter = EntryFilter { state: Some(state), ..EntryFilter::default() };
        store.admin().list(&filter, Default::default(), 100).await.unwrap().entries.len()
    };
    let (slow, quick) = (claim_request(), claim_request());
    let lease = claim_granted(&store, &slow).await;
    let _ = store.settle(&claim_granted(&store, &quick).await, &complete(b"done")).await.unwrap();
    let look = async || {
        let counts = store.admin().counts().await.unwrap();
        (counts.processing, counts.unknown, counts.finished, listed(EntryState::Processing).await)
    };
    assert_eq!(look().await, (1, 0, 1, 1), "by the time of the claim");
    // What other tests do on this server may be under way when a sweep looks.
    for _ in 0..200 {
        store.sweep(100).await.unwrap();
        if server.sql(&name, unfinished) == "1" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(server.sql(&name, unfinished), "1", "only what has not ended is named");
    server.sql(&name, "UPDATE ibid.meta SET indexed_until = now()");
    assert_eq!(look().await, (1, 0, 1, 1), "by its name");
    let park = ibid::store::Settlement::Park { ttl: Duration::from_secs(600), retry_in: Duration::ZERO };
    let _ = store.settle(&lease, &park).await.unwrap();
    assert_eq!((look().await, listed(EntryState::Unknown).await), ((0, 1, 1, 0), 1));
    let _ = store.settle(&lease, &complete(b"late")).await.unwrap();
    assert_eq!(look().await, (0, 0, 2, 0), "although it is still named");
    server.sql(&name, "UPDATE ibid.unfinished_keys SET check_at = now()");
    assert_eq!(store.sweep(100).await.unwrap().removed, 0);
    assert_eq!(server.sql(&name, unfinished), "0");
}

#[tokio::test]
async fn a_row_lives_as_long_as_its_answer_whatever_was_planned_when_it_was_claimed() {
    let (server, name, store) = fresh().await;
    let rows = "SELECT count(*) FROM ibid.idempotency_keys";
    let long = ibid::store::Settlement::Complete {
        failed: false,
        record: "long".into(),
        summary: ibid::store::RecordSummary {
            status: 201,
            requested_at_ms: 1,
            completed_at_ms: 2,
            took: Duration::from_millis(1),
        },
        ttl: Duration::from_secs(600),
    };
    // Completed for longer than it was claimed for, and for less.
    let brief = Arc::new(ClaimRequest {
        lease: Duration::from_secs(1),
        ttl: Duration::from_millis(1),
        ..ClaimRequest::clone(&claim_request())
    });
    let _ = store.settle(&claim_granted(&store, &brief).await, &long).await.unwrap();
    let ask = claim_request();
    let mut short = complete(b"short");
    if let ibid::store::Settlement::Complete { ttl, .. } = &mut short {
        *ttl = Duration::from_millis(1);
    }
    let _ = store.settle(&claim_granted(&store, &ask).await, &short).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let swept = store.sweep(10).await.unwrap();
    assert_eq!((swept.removed, swept.more, server.sql(&name, rows).as_str()), (1, false, "1"));
    assert!(matches!(store.claim(&competing_request(&brief)).await.unwrap(), ClaimOutcome::Completed(_)));
}
