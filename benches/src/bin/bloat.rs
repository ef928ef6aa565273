//! Whether the PostgreSQL store's table stays as large as it has to be: constant load, answers that live for half a minute,
//! and autovacuum as it is shipped.
//!
//! `bloat [MINUTES] [KEYS_PER_SECOND]`, or `scripts/bench --bloat`. Prints a line every 30 seconds, and one at the end. Once
//! answers expire as fast as new ones come and autovacuum has come by, the size must not grow any more.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, RecordSummary, Settlement, Store, Tags,
};
use ibid_bench::stores::{BenchDatabase, STORE_CALL_TIMEOUT};
use ibid_stores::{RemoteOptions, postgres::Postgres};
use tokio::{task::JoinSet, time::sleep};

type BloatError = Box<dyn std::error::Error + Send + Sync>;

const TTL: Duration = Duration::from_secs(30);
const LEASE: Duration = Duration::from_secs(3);
const RECORD_BYTES: usize = 600;
const BATCHES_PER_SECOND: u64 = 20;
const REPORT_INTERVAL: Duration = Duration::from_secs(30);

const SIZES_SQL: &str = "SELECT pg_relation_size('ibid.idempotency_keys') / 1024, \
    pg_indexes_size('ibid.idempotency_keys') / 1024, (SELECT count(*) FROM ibid.idempotency_keys), s.n_dead_tup, \
    s.autovacuum_count, round(100.0 * s.n_tup_hot_upd / greatest(s.n_tup_upd, 1), 1), \
    (pg_current_wal_insert_lsn() - '0/0')::bigint \
    FROM pg_stat_user_tables s WHERE s.relname = 'idempotency_keys'";

#[tokio::main]
async fn main() -> Result<(), BloatError> {
    let mut numbers = std::env::args().skip(1).filter_map(|arg| arg.parse::<f64>().ok());
    let span = Duration::from_secs_f64(60.0 * numbers.next().unwrap_or(10.0));
    let batch = (numbers.next().unwrap_or(1000.0) as u64 / BATCHES_PER_SECOND).max(1);
    let database = BenchDatabase::start().await?;
    let options = RemoteOptions { timeout: STORE_CALL_TIMEOUT, ..RemoteOptions::default() };
    let store = Arc::new(Postgres::open(&database.url(database.port()), options).await?);
    let sweeping = store.clone();
    let sweeper = tokio::spawn(async move {
        loop {
            sleep(Duration::from_secs(1)).await;
            while sweeping.sweep(1000).await.is_ok_and(|swept| swept.more) {}
        }
    });
    println!(
        "| minutes | keys so far | table KiB | indexes KiB | rows | dead rows | autovacuums | heap-only % | WAL bytes per key |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let (mut wal, mut keys_before) = (report(&database)?.1, 0);
    let (began, mut keys, mut reported) = (Instant::now(), 0, Duration::ZERO);
    loop {
        let is_over = began.elapsed() >= span;
        if is_over || began.elapsed() - reported >= REPORT_INTERVAL {
            reported = began.elapsed();
            let (sizes, wal_now) = report(&database)?;
            let wal_per_key = (wal_now - wal) / (keys - keys_before).max(1);
            (wal, keys_before) = (wal_now, keys);
            println!("| {:.1} | {keys} | {sizes} | {wal_per_key} |", reported.as_secs_f64() / 60.0);
        }
        if is_over {
            break;
        }
        let due = Duration::from_millis(1000 * (keys / batch) / BATCHES_PER_SECOND);
        sleep(due.saturating_sub(began.elapsed())).await;
        let mut running: JoinSet<_> = (0..batch).map(|_| complete_one(store.clone())).collect();
        while let Some(ended) = running.join_next().await {
            ended??;
        }
        keys += batch;
    }
    sweeper.abort();
    Ok(())
}

/// The columns of the report, and the position in the write-ahead log.
fn report(database: &BenchDatabase) -> Result<(String, u64), BloatError> {
    let told = database.sql(SIZES_SQL);
    let (sizes, wal) = told.rsplit_once('|').ok_or_else(|| format!("the server tells {told:?}"))?;
    Ok((sizes.replace('|', " | "), wal.parse()?))
}

async fn complete_one(store: Arc<Postgres>) -> Result<(), BloatError> {
    let mut address = [0; 32];
    address[..16].copy_from_slice(&ClaimToken::mint().0);
    let ask = Arc::new(ClaimRequest {
        address: Address(address),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint { version: 1, digest: [7; 32] },
        tags: Tags::new("acme", "u1", "POST /payments", "k-1"),
        label: Bytes::new(),
        lease: LEASE,
        ttl: TTL,
        take_over: None,
    });
    let ClaimOutcome::Granted(lease) = store.claim(&ask).await? else { return Err("a new key is not granted".into()) };
    let summary = RecordSummary { status: 201, requested_at_ms: 1, completed_at_ms: 2, took: Duration::from_millis(1) };
    let record = vec![b'r'; RECORD_BYTES].into();
    let _ = store.settle(&lease, &Settlement::Complete { failed: false, record, summary, ttl: TTL }).await?;
    Ok(())
}
