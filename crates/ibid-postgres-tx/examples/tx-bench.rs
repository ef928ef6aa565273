//! What `run_tx` costs: the same business insert in a transaction of its own, and with its claim and its answer.
//!
//! `tx-bench [--quick] [ROUNDS] [SECONDS]`. Starts a private PostgreSQL server as it is shipped (every commit is synced); the
//! contenders take turns within each round, and only ratios within a round count.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::join_all;
use http::Response;
use ibid::{Policy, Scope};
use ibid_postgres_tx::{IdempotentCall, TxOutcome, run_tx};
use ibid_stores::postgres::{MigrateAction, migrate};
use sqlx::postgres::{PgPool, PgPoolOptions};
use testbed::TestPostgres;

const CALLERS: u64 = 16;
const CONNECTIONS: u32 = 16;
const BODY: &[u8] = &[b'x'; 300];
const INSERT: &str = "INSERT INTO payments (what) VALUES ($1)";

type TxBenchError = Box<dyn std::error::Error + Send + Sync>;

struct TxBench {
    sqlx: PgPool,
    deadpool: deadpool_postgres::Pool,
    keys: AtomicU64,
    policy: Policy,
}

#[derive(Clone, Copy)]
enum TxBenchRow {
    SqlxPlain,
    SqlxRun,
    DeadpoolPlain,
    DeadpoolRun,
    SqlxReplay,
}

const ROWS: [TxBenchRow; 5] = [
    TxBenchRow::SqlxPlain,
    TxBenchRow::SqlxRun,
    TxBenchRow::DeadpoolPlain,
    TxBenchRow::DeadpoolRun,
    TxBenchRow::SqlxReplay,
];

impl TxBench {
    async fn once(&self, row: TxBenchRow) -> Result<(), TxBenchError> {
        let nth = self.keys.fetch_add(1, Relaxed) as i64;
        match row {
            TxBenchRow::SqlxPlain => {
                let mut tx = self.sqlx.begin().await?;
                sqlx::query(INSERT).bind(nth).execute(&mut *tx).await?;
                tx.commit().await?;
            }
            TxBenchRow::SqlxRun => {
                let call = call(nth);
                let ran = run_tx(&self.sqlx, &self.policy, &call, |tx| {
                    Box::pin(async move {
                        sqlx::query(INSERT).bind(nth).execute(&mut **tx).await?;
                        Ok::<_, sqlx::Error>(Response::new(Bytes::from_static(BODY)))
                    })
                });
                assert!(matches!(ran.await?, TxOutcome::Executed(_)));
            }
            TxBenchRow::SqlxReplay => {
                let call = call(-1);
                let ran = run_tx(&self.sqlx, &self.policy, &call, |_| {
                    Box::pin(async { Ok::<_, TxBenchError>(Response::new(Bytes::from_static(BODY))) })
                });
                drop(ran.await?);
            }
            TxBenchRow::DeadpoolPlain => {
                let mut client = self.deadpool.get().await?;
                let tx = client.transaction().await?;
                let insert = tx.prepare_cached(INSERT).await?;
                tx.execute(&insert, &[&nth]).await?;
                tx.commit().await?;
            }
            TxBenchRow::DeadpoolRun => {
                let call = call(nth);
                let ran = run_tx(&self.deadpool, &self.policy, &call, |tx| {
                    Box::pin(async move {
                        let insert = tx.prepare_cached(INSERT).await?;
                        tx.execute(&insert, &[&nth]).await?;
                        Ok::<_, tokio_postgres::Error>(Response::new(Bytes::from_static(BODY)))
                    })
                });
                assert!(matches!(ran.await?, TxOutcome::Executed(_)));
            }
        }
        Ok(())
    }

    /// Operations per second.
    async fn measure(&self, row: TxBenchRow, span: Duration) -> Result<f64, TxBenchError> {
        let (began, done) = (Instant::now(), AtomicU64::new(0));
        let callers = (0..CALLERS).map(|_| async {
            while began.elapsed() < span {
                self.once(row).await?;
                done.fetch_add(1, Relaxed);
            }
            Ok::<_, TxBenchError>(())
        });
        for ended in join_all(callers).await {
            ended?;
        }
        Ok(done.into_inner() as f64 / began.elapsed().as_secs_f64())
    }
}

fn call(nth: i64) -> IdempotentCall {
    IdempotentCall::new(&Scope::from_parts(&["bench"]), format!("order-{nth}")).request(BODY)
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

#[tokio::main]
async fn main() -> Result<(), TxBenchError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let quick = args.iter().any(|arg| arg == "--quick");
    let mut numbers = args.iter().filter_map(|arg| arg.parse::<f64>().ok());
    let rounds = numbers.next().map_or(if quick { 1 } else { 7 }, |rounds| rounds.max(1.0) as usize);
    let span = Duration::from_secs_f64(numbers.next().unwrap_or(if quick { 0.2 } else { 3.0 }));

    let server = TestPostgres::start();
    let name = server.create_database();
    migrate(&server.url("migrator", &name), MigrateAction::Up).await?;
    server.sql(&name, "CREATE TABLE payments (what bigint PRIMARY KEY); GRANT ALL ON payments TO gateway");
    let url = server.url("gateway", &name);
    let manager = deadpool_postgres::Manager::new(url.parse()?, tokio_postgres::NoTls);
    let bench = TxBench {
        sqlx: PgPoolOptions::new().max_connections(CONNECTIONS).connect(&url).await?,
        deadpool: deadpool_postgres::Pool::builder(manager).max_size(CONNECTIONS as usize).build()?,
        keys: AtomicU64::new(0),
        policy: Policy::ietf(),
    };
    // Whatever is replayed has to be there.
    bench.once(TxBenchRow::SqlxReplay).await?;
    for row in ROWS {
        bench.measure(row, span / 4).await?;
    }
    let mut rates: [Vec<f64>; ROWS.len()] = Default::default();
    for _ in 0..rounds {
        for (rates, row) in rates.iter_mut().zip(ROWS) {
            rates.push(bench.measure(row, span).await?);
        }
    }
    let ratio = |of: usize, to: usize| median(rates[of].iter().zip(&rates[to]).map(|(of, to)| of / to).collect());
    let replays = bench.keys.load(Relaxed);
    let (effects, remembered) = (
        server.sql(&name, "SELECT count(*) FROM payments").parse::<u64>()?,
        server.sql(&name, "SELECT count(*) FROM ibid.idempotency_keys WHERE state = 'done'").parse::<u64>()?,
    );
    assert!(effects > 0 && effects < replays && remembered <= effects + 1, "{effects} effects, {remembered} records");
    println!("| operation | median per second | against the same insert alone |");
    println!("|---|---|---|");
    println!("| sqlx, insert and commit | {:.0} | 1 |", median(rates[0].clone()));
    println!("| sqlx, run_tx | {:.0} | {:.2} |", median(rates[1].clone()), ratio(1, 0));
    println!("| tokio-postgres, insert and commit | {:.0} | 1 |", median(rates[2].clone()));
    println!("| tokio-postgres, run_tx | {:.0} | {:.2} |", median(rates[3].clone()), ratio(3, 2));
    println!("| sqlx, run_tx, replay | {:.0} | {:.2} |", median(rates[4].clone()), ratio(4, 0));
    Ok(())
}
