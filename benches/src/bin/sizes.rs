//! What stores take per key: `sizes [RECORDS [IN_ALL]]`, or `scripts/bench --sizes`. The figures of `docs/sizing.md`.
//!
//! Requests go through the layer, so that entries are what a service would have: its key, its labels, its headers. Bodies are
//! random letters, which nobody can compress. First some requests are held in the app, to see what a claim takes; then all of
//! them end, and more follow. `IN_ALL` then multiplies the entries with the answer of 300 bytes, at the servers themselves,
//! to show that a large store takes as much per key as a small one.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    process::{Command, ExitCode},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use ibid::{Ibid, Policy, http::PeerAddress, store::Store};
use ibid_bench::stores::{BenchDatabase, STORE_CALL_TIMEOUT, SharedStores, StoreServers};
use ibid_stores::{RemoteOptions, StoreUrl};
use tokio::{sync::Semaphore, task::JoinSet, time::sleep};
use tower_layer::Layer;
use tower_service::Service;

/// Answers as they are measured.
const ANSWER_BYTES: [usize; 2] = [300, 2048];
/// Held in the app at a time.
const HELD_REQUESTS: u64 = 2000;
/// In flight while records are made.
const MAX_IN_FLIGHT: u64 = 64;

/// Entries that are multiplied in one go.
const COPIES_AT_ONCE: u64 = 20_000;

fn main() -> ExitCode {
    let number = |nth, default| std::env::args().nth(nth).map_or(Ok(default), |count| count.parse());
    let (Ok(records @ HELD_REQUESTS..), Ok(in_all)) = (number(1, 100_000), number(2, 0)) else {
        eprintln!("sizes [RECORDS [IN_ALL]]: numbers, the first at least {HELD_REQUESTS}");
        return ExitCode::FAILURE;
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    match runtime.block_on(measure(records, in_all)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("sizes: {why}");
            ExitCode::FAILURE
        }
    }
}

async fn measure(records: u64, in_all: u64) -> Result<(), String> {
    println!("{records} records; bytes per key\n");
    println!("| store | answer | what | bytes |");
    println!("|---|---|---|---|");
    for answer in ANSWER_BYTES {
        measure_redis(records, answer, in_all).await?;
    }
    let database = BenchDatabase::start().await?;
    for answer in ANSWER_BYTES {
        measure_postgres(&database, records, answer, in_all).await?;
    }
    Ok(())
}

async fn measure_redis(records: u64, answer: usize, in_all: u64) -> Result<(), String> {
    let backing = StoreServers::start(SharedStores::RedisEverySecond, None)?;
    let server = backing.redis()?;
    let number = |name: &str| server.info(name).trim().parse::<u64>().map_err(|_| format!("INFO says no {name}"));
    let row = |what: &str, bytes: u64| println!("| Redis | {answer} B | {what} | {bytes} |");
    // Else the log shrinks meanwhile.
    server.cli(&["CONFIG", "SET", "auto-aof-rewrite-percentage", "0"]);
    let load = LayerLoad::new(&server.url(), answer).await?;
    load.start_held(0..1).await?;
    let (memory, log) = (number("used_memory")?, number("aof_current_size")?);
    let held = load.start_held(1..HELD_REQUESTS + 1).await?;
    row("memory, a claim in flight", (number("used_memory")? - memory) / HELD_REQUESTS);
    row("log (AOF) written, a claim", (number("aof_current_size")? - log) / HELD_REQUESTS);
    load.release_held(held).await;
    load.run(HELD_REQUESTS + 1..records + 1).await;
    row("memory, a finished entry", (number("used_memory")? - memory) / records);
    row("log (AOF) written, claim and end", (number("aof_current_size")? - log) / records);
    let names = server.cli(&["--scan", "--pattern", "idempotency:{7f}:*"]);
    let entries: Vec<_> = names.lines().filter(|name| name.len() > 64).collect();
    let mut usage = 0;
    for name in &entries {
        let bytes = server.cli(&["MEMORY", "USAGE", name, "SAMPLES", "0"]);
        usage += bytes.trim().parse::<u64>().map_err(|_| format!("MEMORY USAGE says {bytes}"))?;
    }
    row("MEMORY USAGE of its key alone", usage / entries.len().max(1) as u64);
    if answer == ANSWER_BYTES[0] && in_all > records {
        // What is in memory is what counts; the log would only fill the disk.
        server.cli(&["CONFIG", "SET", "appendonly", "no"]);
        let template = entries.first().ok_or("there is no entry to copy")?;
        copy_in_redis(server.port(), template, in_all - records).await?;
        let dataset = number("used_memory")? - memory;
        println!("| Redis | {answer} B | memory, a finished entry of {in_all} | {} |", dataset / in_all);
    }
    Ok(())
}

/// Makes so many entries like the one of that name, at other addresses.
async fn copy_in_redis(port: u16, template: &str, copies: u64) -> Result<(), String> {
    const SCRIPT: &str = "local value, ttl = redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])
        for n = ARGV[1], ARGV[2] do
            local at = redis.sha1hex(n) .. string.sub(redis.sha1hex(n .. 'x'), 1, 24)
            redis.call('SET', ARGV[3] .. '{' .. string.sub(at, 1, 2) .. '}:' .. at, value, 'PX', ttl)
        end
        return redis.call('DBSIZE')";
    let prefix = template.split('{').next().unwrap_or_default();
    for first in (0..copies).step_by(COPIES_AT_ONCE as usize) {
        let last = (first + COPIES_AT_ONCE).min(copies) - 1;
        let (first, last, port) = (first.to_string(), last.to_string(), port.to_string());
        let args = ["-p", &port, "EVAL", SCRIPT, "1", template, &first, &last, prefix];
        let said = Command::new("redis-cli").args(args).output().map_err(|error| format!("redis-cli: {error}"))?;
        let said = String::from_utf8_lossy(&said.stdout).trim().to_owned();
        said.parse::<u64>().map_err(|_| format!("redis-cli says {said}"))?;
    }
    Ok(())
}

async fn measure_postgres(database: &BenchDatabase, records: u64, answer: usize, in_all: u64) -> Result<(), String> {
    let _backing = StoreServers::start(SharedStores::Postgres, Some(database))?;
    let number = |sql: &str| {
        let said = database.sql(sql);
        said.trim().parse::<u64>().map_err(|_| format!("{sql} says {said}"))
    };
    const TABLE: &str = "'ibid.idempotency_keys'";
    let wal = || number("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint");
    let row = |what: &str, bytes: u64| println!("| PostgreSQL | {answer} B | {what} | {bytes} |");
    // What vacuum writes is measured by itself.
    let quiet = "SET (autovacuum_enabled = off, toast.autovacuum_enabled = off)";
    let _ = database.sql(&format!("ALTER TABLE ibid.idempotency_keys {quiet}"));
    let load = LayerLoad::new(&database.url(database.port()), answer).await?;
    load.start_held(0..1).await?;
    let before = wal()?;
    let held = load.start_held(1..HELD_REQUESTS + 1).await?;
    row("write-ahead log, a claim", (wal()? - before) / HELD_REQUESTS);
    load.release_held(held).await;
    load.run(HELD_REQUESTS + 1..records + 1).await;
    row("write-ahead log, claim and end", (wal()? - before) / records);
    row("table, TOAST included", number(&format!("SELECT pg_table_size({TABLE})"))? / records);
    row("its indexes", number(&format!("SELECT pg_indexes_size({TABLE})"))? / records);
    let written = wal()?;
    let _ = database.sql("VACUUM ibid.idempotency_keys");
    row("write-ahead log, vacuum", (wal()? - written) / records);
    if answer == ANSWER_BYTES[0] && in_all > records {
        copy_in_postgres(database, in_all - records);
        let bytes = |what: &str| number(&format!("SELECT pg_{what}_size({TABLE})"));
        row(&format!("table of {in_all}"), bytes("table")? / in_all);
        row(&format!("indexes of {in_all}"), bytes("indexes")? / in_all);
        return Ok(());
    }
    let (seen, replays) = (wal()?, records / 10);
    load.run(1..replays + 1).await;
    row("write-ahead log, a replay", (wal()? - seen) / replays);
    let _ = database.sql("VACUUM FULL ibid.idempotency_keys");
    row("all of it, packed", number(&format!("SELECT pg_total_relation_size({TABLE})"))? / records);
    Ok(())
}

/// Makes so many rows like one that is there, at other addresses, as the store does: by an insert and a heap-only update.
fn copy_in_postgres(database: &BenchDatabase, copies: u64) {
    let _ = database.sql(
        "CREATE TABLE template AS SELECT * FROM ibid.idempotency_keys WHERE state = 'done' LIMIT 1; \
         CREATE TABLE claimed AS SELECT * FROM template; UPDATE claimed SET state = 'processing', record = NULL, \
             status = NULL, requested_at = NULL, completed_at = NULL, took = NULL",
    );
    let columns = database.sql(
        "SELECT string_agg(CASE column_name WHEN 'address' THEN 'sha256(int8send(n))' \
             WHEN 'key' THEN 'left(encode(sha256(int8send(n)), ''hex''), length(t.key))' \
             WHEN 'key_hash' THEN 'left(encode(sha256(int8send(n)), ''hex''), length(t.key_hash))' \
             WHEN 'sweep_at' THEN 't.sweep_at + n * interval ''1 ms''' WHEN 'claimed_at' THEN 't.claimed_at + n * interval ''1 ms''' \
             ELSE 't.' || column_name END, ', ' ORDER BY ordinal_position) \
         FROM information_schema.columns WHERE table_schema = 'public' AND table_name = 'template'",
    );
    for first in (0..copies).step_by(COPIES_AT_ONCE as usize) {
        let numbers = format!("generate_series({first}::bigint, {}) n", (first + COPIES_AT_ONCE).min(copies) - 1);
        let _ = database.sql(&format!("INSERT INTO ibid.idempotency_keys SELECT {columns} FROM claimed t, {numbers}"));
        let _ = database.sql(&format!(
            "UPDATE ibid.idempotency_keys k SET state = t.state, record = t.record, status = t.status, \
                 requested_at = t.requested_at, completed_at = t.completed_at, took = t.took \
             FROM template t, {numbers} WHERE k.address = sha256(int8send(n))"
        ));
    }
    let _ = database.sql("DROP TABLE template, claimed");
}

/// Requests through the layer, on one store.
struct LayerLoad {
    ibid: Ibid,
    app: GatedApp,
}

impl LayerLoad {
    async fn new(url: &str, answer: usize) -> Result<Self, String> {
        let named: StoreUrl = url.parse().map_err(|why| format!("{why}"))?;
        let remote = RemoteOptions { timeout: STORE_CALL_TIMEOUT, ..RemoteOptions::default() };
        let store: Arc<dyn Store> = named.open(&remote).await?;
        let app = GatedApp { answer, arrived: Arc::default(), gate: Arc::new(Semaphore::new(0)) };
        Ok(Self { ibid: Ibid::new(store), app })
    }

    /// Sends requests whose app does not answer, and returns once all of them have been claimed.
    async fn start_held(&self, serials: std::ops::Range<u64>) -> Result<JoinSet<()>, String> {
        let expected = self.app.arrived.load(SeqCst) + (serials.end - serials.start);
        let mut held = JoinSet::new();
        serials.for_each(|serial| drop(held.spawn(self.send(serial))));
        for _ in 0..600 {
            if self.app.arrived.load(SeqCst) == expected {
                // What was published or logged behind the answer is in, too.
                sleep(Duration::from_millis(500)).await;
                return Ok(held);
            }
            sleep(Duration::from_millis(100)).await;
        }
        Err(format!("after a minute only {} of {expected} are claimed", self.app.arrived.load(SeqCst)))
    }

    /// From now on the app answers at once.
    async fn release_held(&self, mut held: JoinSet<()>) {
        self.app.gate.add_permits(Semaphore::MAX_PERMITS);
        while held.join_next().await.is_some() {}
    }

    async fn run(&self, serials: std::ops::Range<u64>) {
        let mut running = JoinSet::new();
        for serial in serials {
            if running.len() as u64 >= MAX_IN_FLIGHT {
                running.join_next().await.expect("some run").expect("no request panics");
            }
            running.spawn(self.send(serial));
        }
        while let Some(sent) = running.join_next().await {
            sent.expect("no request panics");
        }
        sleep(Duration::from_secs(1)).await;
    }

    fn send(&self, serial: u64) -> impl Future<Output = ()> + Send + 'static {
        let mut service = self.ibid.layer(Policy::ietf()).expect("a preset").layer(self.app.clone());
        let body = format!("{{\"order\":{serial},\"amount\":1200,\"currency\":\"EUR\"}}");
        let mut request = Request::post("/orders").body(Full::new(Bytes::from(body))).expect("a request");
        let headers = request.headers_mut();
        headers.insert(header::HOST, HeaderValue::from_static("shop.example.com"));
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("Bearer bench"));
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static("python-requests/2.32.3"));
        // As long as a UUID.
        let key = format!("{:08x}-0000-4000-8000-{serial:012x}", serial.wrapping_mul(0x9e37_79b9) as u32);
        headers.insert("idempotency-key", HeaderValue::from_str(&key).expect("hex digits"));
        request.extensions_mut().insert(PeerAddress([192, 0, 2, 7].into()));
        async move {
            let answer = service.call(request).await.unwrap_or_else(|never| match never {});
            let (head, body) = answer.into_parts();
            let body = body.collect().await.expect("a whole body").to_bytes();
            assert_eq!(head.status, StatusCode::CREATED, "{}", String::from_utf8_lossy(&body));
        }
    }
}

/// Answers with random letters, once the gate is open.
#[derive(Clone)]
struct GatedApp {
    answer: usize,
    arrived: Arc<AtomicU64>,
    gate: Arc<Semaphore>,
}

impl<B> Service<Request<B>> for GatedApp {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        let this = self.clone();
        let serial = this.arrived.fetch_add(1, SeqCst);
        Box::pin(async move {
            let _open = this.gate.acquire().await;
            let mut answer = Response::new(Full::new(random_letters(serial, this.answer)));
            *answer.status_mut() = StatusCode::CREATED;
            let headers = answer.headers_mut();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            headers.insert(header::LOCATION, HeaderValue::from_static("/orders/0123456789abcdef"));
            headers.insert(header::DATE, HeaderValue::from_static("Sun, 15 Nov 2026 12:00:00 GMT"));
            Ok(answer)
        })
    }
}

/// Letters that look random: a xorshift of the serial number.
fn random_letters(serial: u64, length: usize) -> Bytes {
    let mut state = serial.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        33 + (state >> 32) as u8 % 94
    };
    std::iter::repeat_with(next).take(length).collect::<Vec<_>>().into()
}
