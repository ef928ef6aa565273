//! `pgbench` of the very statements that the store sends.
//!
//! They are not written down here: the store sends them, the server shows what its connections did last, and values take
//! the place of the parameters. Clients prepare them, as the store does, and one statement is one transaction.

use std::{fs, path::Path, process::Command, time::Duration};

use ibid::store::{ClaimOutcome, Lease, SettleOutcome, Store};
use ibid_stores::{RemoteOptions, postgres::Postgres};
use tokio::time::sleep;

use super::{LimitResult, RECORD_BYTES, Watch, address, claim_request, completed_settlement, started};
use crate::{
    args::BenchArgs,
    stores::{BenchDatabase, STORE_CALL_TIMEOUT, StoreServers, postgres_program},
};

/// Every claim is of another address; a few of so many may be the same.
const RANDOM_KEY_SCRIPT: &str = "\\set a random(1, 4000000000000000000)\n\\set b random(1, 4000000000000000000)\n";

/// Seconds before those that count.
const WARM_UP_SECONDS: u64 = 2;
/// How often it is tried for longer.
const MAX_ATTEMPTS: u32 = 3;

pub(super) async fn claims(args: &BenchArgs, backing: &StoreServers<'_>, rows: u32) -> Result<LimitResult, String> {
    let statements = StoreStatements::recorded(backing.database()?).await?;
    let script = format!("{RANDOM_KEY_SCRIPT}{};\n", statements.claim(rows));
    let clients = (args.connections / rows as usize).max(1);
    run(args, backing, &PgbenchScript { text: script, clients, operations: rows.into(), entries: rows.into() }).await
}

pub(super) async fn misses(args: &BenchArgs, backing: &StoreServers<'_>) -> Result<LimitResult, String> {
    let statements = StoreStatements::recorded(backing.database()?).await?;
    let script = format!("{RANDOM_KEY_SCRIPT}{} \\gset\n{};\n", statements.claim(1), statements.settle());
    run(args, backing, &PgbenchScript { text: script, clients: args.connections, operations: 1, entries: 1 }).await
}

pub(super) async fn replays(args: &BenchArgs, backing: &StoreServers<'_>) -> Result<LimitResult, String> {
    let database = backing.database()?;
    let statements = StoreStatements::recorded(database).await?;
    let store = open(database).await?;
    for n in 1..=args.replay_keys {
        finish(&store, n).await?;
    }
    let known = format!("\\set a random(1, {})\n\\set b random(1, 4000000000000000000)\n", args.replay_keys);
    // Addresses are made of `a + 1`, because rows are counted from 1.
    let script = format!("{known}\\set a :a - 1\n{};\n", statements.claim(1));
    run(args, backing, &PgbenchScript { text: script, clients: args.connections, operations: 1, entries: 0 }).await
}

async fn open(database: &BenchDatabase) -> Result<Postgres, String> {
    Postgres::open(
        &database.url(database.port()),
        RemoteOptions { timeout: STORE_CALL_TIMEOUT, ..RemoteOptions::default() },
    )
    .await
    .map_err(String::from)
}

async fn finish(store: &Postgres, n: u64) -> Result<(), String> {
    let lease = granted(store, n).await?;
    complete(store, &lease).await
}

async fn granted(store: &Postgres, n: u64) -> Result<Lease, String> {
    match store.claim(&claim_request(address(n))).await {
        Ok(ClaimOutcome::Granted(lease)) => Ok(lease),
        other => Err(format!("a claim of a new address was not granted: {other:?}")),
    }
}

async fn complete(store: &Postgres, lease: &Lease) -> Result<(), String> {
    match store.settle(lease, &completed_settlement()).await {
        Ok(SettleOutcome::Applied) => Ok(()),
        other => Err(format!("a holder that completes was answered with {other:?}")),
    }
}

/// What one client does again and again.
struct PgbenchScript {
    text: String,
    clients: usize,
    /// How many operations that is,
    operations: u64,
    /// and how many entries it makes.
    entries: u64,
}

/// Runs it on connections that are warm: the first calls on each prepare the statement and compile the functions.
async fn run(args: &BenchArgs, backing: &StoreServers<'_>, script: &PgbenchScript) -> Result<LimitResult, String> {
    let folder = tempfile::tempdir().map_err(|error| format!("no folder for a script: {error}"))?;
    let file = folder.path().join("script.sql");
    fs::write(&file, &script.text).map_err(|error| format!("{}: {error}", file.display()))?;
    // It counts in whole seconds, and connecting is part of them. A smoke test, which judges nothing, does not warm up.
    let seconds = args.measure.as_secs_f64().ceil() as u64;
    let warming = if args.measure < Duration::from_secs(1) { 0 } else { WARM_UP_SECONDS };
    let mut total = warming + seconds + warming.min(1);
    let reached = run_with_retries(backing, script, &file, warming, &mut total).await;
    reached?.ok_or_else(|| format!("pgbench came to nothing in {} seconds", total / 2))
}

async fn run_with_retries(
    backing: &StoreServers<'_>, script: &PgbenchScript, file: &Path, warming: u64, total: &mut u64,
) -> Result<Option<LimitResult>, String> {
    for _ in 0..MAX_ATTEMPTS {
        if let Some(reached) = attempt(backing, script, file, warming, *total).await? {
            return Ok(Some(reached));
        }
        // A machine that is busy with others may take all of it to connect.
        *total *= 2;
    }
    Ok(None)
}

/// None if hardly any of the time counts, or no transaction ended in it.
async fn attempt(
    backing: &StoreServers<'_>, script: &PgbenchScript, file: &Path, warming: u64, total: u64,
) -> Result<Option<LimitResult>, String> {
    let database = backing.database()?;
    let before = database.entries()?;
    let mut tool = Command::new(postgres_program("pgbench"));
    // As the store's own sessions.
    tool.env("PGOPTIONS", "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_hashjoin=off -c enable_mergejoin=off -c jit=off");
    tool.args(["-n", "-M", "prepared", "-h", "127.0.0.1", "-U", "gateway", "-j", "2", "-P", "1"]);
    tool.args(["-p", &database.port().to_string(), "-c", &script.clients.to_string()]);
    tool.args(["-T", &total.to_string(), "-f"]).arg(file).arg(database.name());
    let tool = started(&mut tool)?;
    sleep(Duration::from_secs(warming)).await;
    let watch = Watch::begin(backing)?;
    let output = tool.ended().await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let told = PgbenchResult::read(&text(&output.stdout), &text(&output.stderr), warming)?;
    let (made, due) = (database.entries()? - before, told.transactions * script.entries);
    if made > due || made < due - due / 100 {
        return Err(format!("{} transactions made {made} entries instead of {due}", told.transactions));
    }
    let least = (total - warming) as f64 / 4.0;
    let Some((transactions, per_second)) = told.warm(least) else { return Ok(None) };
    let operations = script.operations as f64;
    watch.end(per_second * operations, (transactions * operations) as u64, None).map(Some)
}

/// What pgbench says when it ends.
#[derive(Debug, PartialEq)]
struct PgbenchResult {
    transactions: u64,
    /// None if there were none.
    per_second: Option<f64>,
    /// Seconds that do not count, and transactions in them.
    warming: [f64; 2],
}

impl PgbenchResult {
    fn read(output: &str, progress: &str, warming: u64) -> Result<Self, String> {
        let number = |name: &str| {
            output.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<f64>().ok())
        };
        let transactions = number("number of transactions actually processed:")
            .ok_or_else(|| format!("pgbench said nothing of transactions:\n{output}"))?;
        // `progress: 2.0 s, 812.5 tps, lat 77.906 ms stddev 31.337, 0 failed`, about once a second.
        let (mut until, mut before) = (0.0, 0.0);
        for line in progress.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let ["progress:", at, "s,", rate, "tps,", ..] = words[..] else { continue };
            let (Ok(at), Ok(rate)) = (at.parse::<f64>(), rate.parse::<f64>()) else { continue };
            if at > warming as f64 + 0.5 {
                break;
            }
            before += rate * (at - until);
            until = at;
        }
        Ok(Self { transactions: transactions as u64, per_second: number("tps ="), warming: [until, before] })
    }

    /// How many there were in the time that counts, and how many per second; none if that time was no more than `least`.
    fn warm(&self, least: f64) -> Option<(f64, f64)> {
        let [until, before] = self.warming;
        let (count, all) = (self.transactions as f64 - before, self.transactions as f64 / self.per_second?);
        (count >= 1.0 && all - until > least).then(|| (count, count / (all - until)))
    }
}

/// As the store sends them.
struct StoreStatements {
    claim: String,
    settle: String,
}

impl StoreStatements {
    async fn recorded(database: &BenchDatabase) -> Result<Self, String> {
        let store = open(database).await?;
        let lease = granted(&store, 0).await?;
        // As many clients as callers all extend the table at once, and wait for each other. The store, which has few
        // connections, asks again; pgbench would give up.
        let shown = |begin: &str, end: &str| {
            let statement = database.sql(&format!(
                "SELECT query FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'gateway' AND query LIKE \
                 '{begin}%' LIMIT 1"
            ));
            match statement.ends_with(end) {
                true => Ok(statement.replace("'50ms'", "'10s'")),
                false => Err(format!("the server does not show the whole statement {begin}: {statement:?}")),
            }
        };
        // A connection shows the last only, and the next may go over the same.
        let claim = shown("WITH asked AS", "a.is_completed")?;
        complete(&store, &lease).await?;
        Ok(Self { claim, settle: shown("UPDATE ibid.idempotency_keys", "u.nth::integer")? })
    }

    fn claim(&self, rows: u32) -> String {
        fill_parameters(&self.claim, &claim_values(), rows)
    }

    /// Of the claim whose fence is in the variable of that name.
    fn settle(&self) -> String {
        let record = format!("decode(repeat('72', {RECORD_BYTES}), 'hex')");
        let [address, token, ..] = claim_values();
        let end = [
            address,
            token,
            ":fence::bigint",
            "false",
            &record,
            "201::integer",
            "1000::bigint",
            "2000::bigint",
            "1000000::bigint",
            "86400000000::bigint",
        ];
        fill_parameters(&self.settle, &end, 1)
    }
}

/// The parameters of a claim as expressions in which `i` is the row, in the shape of [`ask`].
fn claim_values() -> [&'static str; 13] {
    [
        "sha256(int8send(:a::bigint + i))",
        "decode(md5((:b::bigint + i)::text), 'hex')",
        "1::smallint",
        "decode(repeat('07', 32), 'hex')",
        "'acme'::text",
        "'u1'::text",
        "'POST /orders'::text",
        "md5((:b::bigint - i)::text)",
        "left(md5((:b::bigint - i)::text), 16)",
        "NULL::bytea",
        "''::bytea",
        "30000000::bigint",
        "86400000000::bigint",
    ]
}

/// A statement with arrays of these values in the place of its parameters.
fn fill_parameters(statement: &str, values: &[&str], rows: u32) -> String {
    let mut filled = statement.to_owned();
    for (nth, value) in values.iter().enumerate().rev() {
        let array = match rows {
            1 => format!("ARRAY[{}]", value.replace("+ i)", "+ 1)").replace("- i)", "- 1)")),
            rows => format!("(SELECT array_agg({value}) FROM generate_series(1, {rows}) i)"),
        };
        filled = filled.replace(&format!("${}", nth + 1), &array);
    }
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_seconds_do_not_count() {
        let output = "transaction type: x\nnumber of transactions actually processed: 1000\nlatency average = 1 ms\n\
                      tps = 250.000000 (without initial connection time)\n";
        let progress = "pgbench (15)\nprogress: 1.0 s, 40.0 tps, lat 1 ms stddev 2, 0 failed\n\
                        progress: 2.0 s, 60.0 tps, lat 1 ms stddev 2, 0 failed\n\
                        progress: 3.0 s, 450.0 tps, lat 1 ms stddev 2, 0 failed\n";
        let told = PgbenchResult::read(output, progress, 2).unwrap();
        assert_eq!(told, PgbenchResult { transactions: 1000, per_second: Some(250.0), warming: [2.0, 100.0] });
        assert_eq!(told.warm(0.5), Some((900.0, 450.0)));
        assert_eq!(told.warm(2.0), None, "two seconds are left, and no more");
        let nothing = PgbenchResult::read("number of transactions actually processed: 0\n", "", 2).unwrap();
        assert_eq!(nothing.warm(0.5), None);
        assert!(PgbenchResult::read("", progress, 2).is_err());
    }

    #[test]
    fn values_take_the_place_of_parameters_of_more_than_one_digit() {
        let values: Vec<String> = (1..=12).map(|n| format!("v{n}")).collect();
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        assert_eq!(fill_parameters("f($1, $12, $2)", &values, 1), "f(ARRAY[v1], ARRAY[v12], ARRAY[v2])");
        assert_eq!(fill_parameters("f($1)", &["g(:a + i)"], 1), "f(ARRAY[g(:a + 1)])");
        let many = "f((SELECT array_agg(g(:a + i)) FROM generate_series(1, 16) i))";
        assert_eq!(fill_parameters("f($1)", &["g(:a + i)"], 16), many);
    }
}
