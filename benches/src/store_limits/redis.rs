//! `redis-benchmark` of the very command by which the store claims.
//!
//! The command is not written down here: the store sends one, the server's `MONITOR` shows it, and its address is
//! made random. What differs from the store's own: zero bytes, which no command line can carry, are ones; and all
//! addresses share one bucket, because their first byte does not change.

use std::{ffi::OsString, os::unix::ffi::OsStringExt, process::Command, time::Duration};

use ibid::store::{ClaimOutcome, ClaimRequest, Store};
use ibid_stores::{RemoteOptions, redis::Redis};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{LimitResult, Watch, address, claim_request, started};
use crate::{
    args::BenchArgs,
    stores::{STORE_CALL_TIMEOUT, StoreServers},
};

/// What `redis-benchmark` puts a random number of twelve digits in the place of.
const RANDOM_PLACEHOLDER: &str = "__rand_int__";
/// Of so many: it reads a number of 32 bits.
const NUMBERS: &str = "2000000000";
/// Calls of the run that tells how many there are to be in the one that counts.
const PILOT: u64 = 5000;
/// How often it is begun anew at most, because its random numbers were those of an earlier run.
const RUNS: u32 = 3;

pub(super) async fn claims(args: &BenchArgs, backing: &StoreServers<'_>, deep: u32) -> Result<LimitResult, String> {
    let server = backing.redis()?;
    let command = recorded(&server.url(), server.port()).await?;
    let run = async |calls: u64| {
        let mut tool = Command::new("redis-benchmark");
        tool.args(["-h", "127.0.0.1", "-p", &server.port().to_string(), "--csv", "-r", NUMBERS]);
        tool.args(["-c", &args.connections.to_string(), "-P", &deep.to_string(), "-n", &calls.to_string()]);
        let output = started(tool.args(&command))?.ended().await?;
        figures(&String::from_utf8_lossy(&output.stdout))
    };
    let pilot = run(PILOT).await?;
    let calls = ((pilot.per_second * args.measure.as_secs_f64()) as u64).max(PILOT);
    let mut made = 0;
    for _ in 0..RUNS {
        let before = keys(server)?;
        let watch = Watch::begin(backing)?;
        let reached = run(calls).await?;
        let reached = watch.end(reached.per_second, calls, Some(reached.latency))?;
        // A few of two billion random addresses may be the same.
        made = keys(server)?.saturating_sub(before);
        if made >= calls - calls / 100 {
            return Ok(reached);
        }
        // It begins its random numbers with the second and its process's number, and so now and then where an earlier run did.
        sleep(Duration::from_secs(1)).await;
    }
    Err(format!("redis-benchmark sent {calls} claims, and {made} entries were made, {RUNS} times in a row"))
}

fn keys(server: &testbed::TestRedis) -> Result<u64, String> {
    let size = server.cli(&["DBSIZE"]);
    size.parse().map_err(|_| format!("DBSIZE says {size:?}"))
}

/// The command of a claim, with `RANDOM` in the place of all that differs from claim to claim.
async fn recorded(url: &str, port: u16) -> Result<Vec<OsString>, String> {
    let store = Redis::open(url, RemoteOptions { timeout: STORE_CALL_TIMEOUT, ..RemoteOptions::default() }).await?;
    // The first opens the connection, the second is sent as all others will be.
    granted(&store, &claim_request(address(0))).await?;
    let failed = |error: std::io::Error| format!("MONITOR: {error}");
    let mut monitor = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await.map_err(failed)?);
    monitor.write_all(b"MONITOR\r\n").await.map_err(failed)?;
    let mut line = String::new();
    monitor.read_line(&mut line).await.map_err(failed)?;
    let ask = claim_request(address(1));
    granted(&store, &ask).await?;
    loop {
        line.clear();
        let read =
            timeout(STORE_CALL_TIMEOUT, monitor.read_line(&mut line)).await.map_err(|_| "MONITOR shows no claim")?;
        if read.map_err(failed)? == 0 {
            return Err("MONITOR ended before it showed a claim".into());
        }
        let command = parse_monitor_line(&line);
        if command.first().is_some_and(|verb| verb.eq_ignore_ascii_case(b"SET")) {
            return Ok(command.into_iter().map(|argument| randomise_argument(argument, &ask)).collect());
        }
    }
}

async fn granted(store: &Redis, ask: &std::sync::Arc<ClaimRequest>) -> Result<(), String> {
    match store.claim(ask).await {
        Ok(ClaimOutcome::Granted(_)) => Ok(()),
        other => Err(format!("a claim of a new address was not granted: {other:?}")),
    }
}

fn randomise_argument(argument: Vec<u8>, ask: &ClaimRequest) -> OsString {
    let address = ask.address.to_string();
    if let Some(start) = argument.strip_suffix(address.as_bytes()) {
        let fixed = &address.as_bytes()[..address.len() - RANDOM_PLACEHOLDER.len()];
        return OsString::from_vec([start, fixed, RANDOM_PLACEHOLDER.as_bytes()].concat());
    }
    OsString::from_vec(argument.into_iter().map(|byte| byte.max(1)).collect())
}

/// The arguments on a line of `MONITOR`: `1700000000.000000 [0 127.0.0.1:1] "GET" "a\x00\"b"`.
fn parse_monitor_line(line: &str) -> Vec<Vec<u8>> {
    let mut rest = line.split_once("] ").map_or("", |(_, rest)| rest).bytes();
    let mut arguments = Vec::new();
    while rest.by_ref().any(|byte| byte == b'"') {
        let mut argument = Vec::new();
        while let Some(byte) = rest.next().filter(|byte| *byte != b'"') {
            argument.push(match byte {
                b'\\' => match rest.next() {
                    Some(b'n') => b'\n',
                    Some(b'r') => b'\r',
                    Some(b't') => b'\t',
                    Some(b'a') => 7,
                    Some(b'b') => 8,
                    Some(b'x') => {
                        let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16)).unwrap_or(0);
                        (digit() * 16 + digit()) as u8
                    }
                    Some(other) => other,
                    None => break,
                },
                byte => byte,
            });
        }
        arguments.push(argument);
    }
    arguments
}

struct RedisBenchmarkResult {
    per_second: f64,
    latency: [Duration; 2],
}

/// The end of `"test","rps","avg","min","p50","p95","p99","max"`: the name of the test is the command, with all that is in it.
fn figures(csv: &str) -> Result<RedisBenchmarkResult, String> {
    let mut cells = csv.trim_end().rsplit("\",\"").map(|cell| cell.trim_matches('"').parse::<f64>().ok());
    let mut read = || Some((cells.nth(1)??, cells.nth(1)??, cells.nth(2)??));
    let (p99, p50, per_second) = read().ok_or_else(|| format!("redis-benchmark said {csv:?}"))?;
    let latency = [p50, p99].map(|ms| Duration::from_secs_f64(ms.max(0.0) / 1e3));
    Ok(RedisBenchmarkResult { per_second, latency })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_monitor_is_read_with_its_escapes() {
        let line = r#"1700000000.000000 [0 127.0.0.1:1] "EVALSHA" "" "a\x00\xffb\"\\\n" "3""#;
        assert_eq!(parse_monitor_line(line), [&b"EVALSHA"[..], b"", b"a\x00\xffb\"\\\n", b"3"]);
        assert!(parse_monitor_line("OK").is_empty());
    }

    #[test]
    fn an_address_becomes_random_and_keeps_its_length() {
        let ask = claim_request(address(7));
        let key = format!("idempotency:{{00}}:{}", ask.address);
        let random = randomise_argument(key.clone().into_bytes(), &ask).into_string().unwrap();
        assert!(
            random.starts_with("idempotency:{00}:")
                && random.ends_with(RANDOM_PLACEHOLDER)
                && random.len() == key.len()
        );
        assert_eq!(randomise_argument(vec![0, 4, b'a'], &ask), OsString::from("\u{1}\u{4}a"));
    }

    #[test]
    fn figures_are_found_behind_a_name_with_anything_in_it() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\",\"p95_latency_ms\",\
                   \"p99_latency_ms\",\"max_latency_ms\"\n\
                   \"EVALSHA a\",\"b\n c\",\"25000.00\",\"0.4\",\"0.1\",\"0.5\",\"0.6\",\"0.7\",\"0.8\"\n";
        let figures = figures(csv).unwrap();
        assert_eq!(figures.per_second, 25000.0);
        assert_eq!(figures.latency, [Duration::from_micros(500), Duration::from_micros(700)]);
        assert!(super::figures("").is_err());
    }
}
