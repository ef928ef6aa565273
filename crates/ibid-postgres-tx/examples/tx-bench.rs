//! What `run_tx`, `commit_with` and the inbox cost: the same business insert in a transaction of its own, with its claim and
//! its answer, with the answer to a claim that the layer made before, and with the mark of an event.
//!
//! `tx-bench [--quick] [ROUNDS] [SECONDS]`. Starts a private PostgreSQL server as it is shipped (every commit is synced); the
//! contenders take turns within each round, and only ratios within a round count. CPU is the server's, of all its processes.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use axum::{Extension, Router, body::Body, extract::State, routing::post};
use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use ibid::{Ibid, Policy, Scope, http::HandlerClaim, inbox::InboxEvent};
use ibid_postgres_tx::{
    IdempotentCall, TxOutcome, commit_with,
    inbox::{TxEventOutcome, TxInbox},
    run_tx,
};
use ibid_stores::{
    RemoteOptions,
    postgres::{MigrateAction, Postgres, migrate},
};
use sqlx::postgres::{PgPool, PgPoolOptions};
use testbed::TestPostgres;
use tokio::{
    sync::{Mutex, mpsc, watch},
    task::JoinSet,
};
use tower::ServiceExt as _;

const CALLERS: u64 = 16;
const CONNECTIONS: u32 = 16;
const BODY: &[u8] = &[b'x'; 300];
/// Claims of the layer that wait for their transaction at the beginning of a measurement.
const CLAIMS_PER_SECOND: f64 = 3000.0;
const INSERT: &str = "INSERT INTO payments (what) VALUES ($1)";

type TxBenchError = Box<dyn std::error::Error + Send + Sync>;

struct TxBench {
    sqlx: PgPool,
    deadpool: deadpool_postgres::Pool,
    keys: AtomicU64,
    server_pid: String,
    policy: Policy,
    inbox: TxInbox,
    claims: ClaimSource,
}

/// Claims that the layer made for handlers that wait.
struct ClaimSource {
    router: Router,
    next: Mutex<mpsc::UnboundedReceiver<HandlerClaim>>,
    round: watch::Sender<u64>,
    handlers: Mutex<JoinSet<()>>,
}

type HandedOut = (mpsc::UnboundedSender<HandlerClaim>, watch::Receiver<u64>);

async fn hand_out(
    State((claims, mut round)): State<HandedOut>, Extension(claimed): Extension<HandlerClaim>,
) -> Response<Body> {
    round.mark_unchanged();
    claims.send(claimed).expect("the benchmark runs");
    drop(round.changed().await);
    // The layer answers with what was committed, if it was.
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

impl ClaimSource {
    async fn new(url: &str) -> Result<Self, TxBenchError> {
        let store = Postgres::open(url, RemoteOptions::default()).await?;
        let (claims, next) = mpsc::unbounded_channel();
        let (round, changes) = watch::channel(0);
        let layer = Ibid::new(std::sync::Arc::new(store)).layer(Policy::ietf())?;
        let router = Router::new().route("/", post(hand_out)).layer(layer).with_state((claims, changes));
        Ok(Self { router, next: Mutex::new(next), round, handlers: Mutex::default() })
    }

    /// Lets the layer claim new keys. Their handlers wait until [`end`](Self::end).
    async fn begin(&self, keys: &AtomicU64, count: usize) {
        let mut handlers = self.handlers.lock().await;
        for _ in 0..count {
            let key = format!("claim-{}", keys.fetch_add(1, Relaxed));
            let request = Request::post("/").header("host", "shop").header("authorization", "Bearer a");
            let request = request.header("idempotency-key", key).body(Body::from(BODY)).expect("a request");
            let router = self.router.clone();
            handlers.spawn(async move { drop(router.oneshot(request).await) });
        }
        drop(handlers);
        while self.next.lock().await.len() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn end(&self) {
        self.round.send_modify(|round| *round += 1);
        let mut next = self.next.lock().await;
        while next.try_recv().is_ok() {}
        while self.handlers.lock().await.join_next().await.is_some() {}
    }
}

#[derive(Clone, Copy)]
enum TxBenchRow {
    SqlxPlain,
    SqlxRun,
    DeadpoolPlain,
    DeadpoolRun,
    SqlxReplay,
    SqlxCommitWith,
    DeadpoolCommitWith,
    SqlxInbox,
    DeadpoolInbox,
}

impl TxBenchRow {
    fn needs_claims(self) -> bool {
        matches!(self, Self::SqlxCommitWith | Self::DeadpoolCommitWith)
    }
}

const ROWS: [TxBenchRow; 9] = [
    TxBenchRow::SqlxPlain,
    TxBenchRow::SqlxRun,
    TxBenchRow::DeadpoolPlain,
    TxBenchRow::DeadpoolRun,
    TxBenchRow::SqlxReplay,
    TxBenchRow::SqlxCommitWith,
    TxBenchRow::DeadpoolCommitWith,
    TxBenchRow::SqlxInbox,
    TxBenchRow::DeadpoolInbox,
];

impl TxBench {
    /// Returns false if there is nothing left to do.
    async fn once(&self, row: TxBenchRow) -> Result<bool, TxBenchError> {
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
            TxBenchRow::SqlxCommitWith => {
                let Ok(claimed) = self.claims.next.lock().await.try_recv() else { return Ok(false) };
                let mut tx = self.sqlx.begin().await?;
                sqlx::query(INSERT).bind(nth).execute(&mut *tx).await?;
                commit_with(tx, &claimed, &Response::new(Bytes::from_static(BODY))).await?;
            }
            TxBenchRow::DeadpoolCommitWith => {
                let Ok(claimed) = self.claims.next.lock().await.try_recv() else { return Ok(false) };
                let mut client = self.deadpool.get().await?;
                let tx = client.transaction().await?;
                let insert = tx.prepare_cached(INSERT).await?;
                tx.execute(&insert, &[&nth]).await?;
                commit_with(tx, &claimed, &Response::new(Bytes::from_static(BODY))).await?;
            }
            TxBenchRow::SqlxInbox => {
                let event = event(nth)?;
                let handled = self.inbox.handle(&self.sqlx, &event, |tx| {
                    Box::pin(async move { sqlx::query(INSERT).bind(nth).execute(&mut **tx).await.map(drop) })
                });
                assert!(matches!(handled.await?, TxEventOutcome::Done));
            }
            TxBenchRow::DeadpoolInbox => {
                let event = event(nth)?;
                let handled = self.inbox.handle(&self.deadpool, &event, |tx| {
                    Box::pin(async move {
                        let insert = tx.prepare_cached(INSERT).await?;
                        tx.execute(&insert, &[&nth]).await.map(drop)
                    })
                });
                assert!(matches!(handled.await?, TxEventOutcome::Done));
            }
        }
        Ok(true)
    }

    /// Operations per second, and microseconds of the server's CPU per operation.
    async fn measure(&self, row: TxBenchRow, span: Duration) -> Result<[f64; 2], TxBenchError> {
        if row.needs_claims() {
            self.claims.begin(&self.keys, (CLAIMS_PER_SECOND * span.as_secs_f64()) as usize + 1).await;
        }
        let (began, done, cpu) = (Instant::now(), AtomicU64::new(0), server_cpu_us(&self.server_pid)?);
        let callers = (0..CALLERS).map(|_| async {
            while began.elapsed() < span && self.once(row).await? {
                done.fetch_add(1, Relaxed);
            }
            Ok::<_, TxBenchError>(())
        });
        for ended in join_all(callers).await {
            ended?;
        }
        let done = done.into_inner() as f64;
        let measured = [done / began.elapsed().as_secs_f64(), (server_cpu_us(&self.server_pid)? - cpu) / done];
        if row.needs_claims() {
            self.claims.end().await;
        }
        Ok(measured)
    }
}

/// CPU time of the server's processes in microseconds, with those that have ended.
fn server_cpu_us(pid: &str) -> Result<f64, TxBenchError> {
    let mut ticks = 0;
    for process in std::fs::read_dir("/proc")? {
        let Ok(stat) = std::fs::read_to_string(process?.path().join("stat")) else { continue };
        // `pid (name) state ppid …`; user and system time are the 14th and 15th field, those of ended children follow.
        let Some((head, rest)) = stat.rsplit_once(')') else { continue };
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let is_server = head.split(' ').next() == Some(pid);
        if is_server || fields.get(1) == Some(&pid) {
            let times = fields.get(11..if is_server { 15 } else { 13 }).unwrap_or_default();
            ticks += times.iter().filter_map(|time| time.parse::<u64>().ok()).sum::<u64>();
        }
    }
    // Linux counts 100 ticks per second for programs, whatever its own clock.
    Ok(ticks as f64 * 10_000.0)
}

fn call(nth: i64) -> IdempotentCall {
    IdempotentCall::new(&Scope::from_parts(&["bench"]), format!("order-{nth}")).request(BODY)
}

fn event(nth: i64) -> Result<InboxEvent, TxBenchError> {
    Ok(InboxEvent::new("bench", "/bench", &format!("event-{nth}"))?)
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
        server_pid: server.sql("postgres", "SELECT split_part(pg_read_file('postmaster.pid'), E'\\n', 1)"),
        policy: Policy::ietf(),
        inbox: TxInbox::default(),
        claims: ClaimSource::new(&url).await?,
    };
    // Whatever is replayed has to be there.
    bench.once(TxBenchRow::SqlxReplay).await?;
    for row in ROWS {
        bench.measure(row, span / 4).await?;
    }
    let mut rates: [Vec<[f64; 2]>; ROWS.len()] = Default::default();
    for _ in 0..rounds {
        for (rates, row) in rates.iter_mut().zip(ROWS) {
            rates.push(bench.measure(row, span).await?);
        }
    }
    let ratio = |of: usize, to: usize, what: usize| {
        median(rates[of].iter().zip(&rates[to]).map(|(of, to)| of[what] / to[what]).collect())
    };
    let replays = bench.keys.load(Relaxed);
    let (effects, remembered) = (
        server.sql(&name, "SELECT count(*) FROM payments").parse::<u64>()?,
        server.sql(&name, "SELECT count(*) FROM ibid.idempotency_keys WHERE state = 'done'").parse::<u64>()?,
    );
    assert!(effects > 0 && effects < replays && remembered <= effects + 1, "{effects} effects, {remembered} records");
    println!("| operation | median per second | against the same insert alone | server CPU | against it |");
    println!("|---|---|---|---|---|");
    for (nth, plain, name) in [
        (0, 0, "sqlx, insert and commit"),
        (1, 0, "sqlx, run_tx"),
        (2, 2, "tokio-postgres, insert and commit"),
        (3, 2, "tokio-postgres, run_tx"),
        (4, 0, "sqlx, run_tx, replay"),
        (5, 0, "sqlx, commit_with"),
        (6, 2, "tokio-postgres, commit_with"),
        (7, 0, "sqlx, inbox"),
        (8, 2, "tokio-postgres, inbox"),
    ] {
        let [rate, cpu] = [0, 1].map(|what| median(rates[nth].iter().map(|sample| sample[what]).collect()));
        let [speed, cost] = [0, 1].map(|what| ratio(nth, plain, what));
        println!("| {name} | {rate:.0} | {speed:.2} | {cpu:.0} µs | {cost:.2} |");
    }
    Ok(())
}
