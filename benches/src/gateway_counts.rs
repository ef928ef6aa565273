//! What the gateway does per request, counted instead of timed: instructions and clock readings under callgrind, system
//! calls under strace.
//!
//! Both run a bounded number of requests twice, the second time twice as many, so that start and end cancel out. Neither
//! figure is exact: threads of the gateway sleep and wake as the load has it, and timers run beside it.

use std::{fmt::Write, fs, path::Path, time::Duration};

use ibid_count::callgrind::ProcessProfile;
use tokio::time::{Instant, sleep};

use crate::{
    args::BenchArgs,
    load::{ApiLoad, LoadGenerator, LoadKeys, LoadPlan, LoadProtocol, StopCondition},
    rows::ContenderProgram,
    runner::{api_config, ibid_args, start_server},
    server_child::ServerChild,
};

/// Requests of the shorter run.
const REQUESTS: u64 = 1_000;
/// Connections of the load.
const CONNECTIONS: usize = 16;
/// How long strace may take to write its summary after the gateway has ended.
const SUMMARY_TIMEOUT: Duration = Duration::from_secs(10);

/// What watches the gateway.
#[derive(Clone, Copy, Debug)]
enum CallTracer {
    Callgrind,
    Strace,
}

/// Counts of one run or, divided, of one request.
#[derive(Clone, Copy, Debug, Default)]
struct GatewayCalls {
    instructions: f64,
    sha256: f64,
    clock_readings: f64,
    futex: f64,
    system_calls: f64,
}

/// Counts first requests and replays of the gateway on the memory store.
///
/// # Errors
/// If valgrind or strace is missing, or something cannot be run.
pub async fn table(args: &BenchArgs) -> Result<String, String> {
    let mut table = String::from(
        "Gateway on the memory store, per request (300-byte JSON request and answer)\n\n\
         | request | instructions | of it SHA-256 | clock readings | futex calls | system calls |\n|---|---|---|---|---|---|\n",
    );
    for (name, keys, is_api) in [
        ("first", LoadKeys::Unique, false),
        ("replay", LoadKeys::Fixed(64), false),
        ("first, exchange API (begin and end)", LoadKeys::Unique, true),
        ("replay, exchange API", LoadKeys::Fixed(64), true),
    ] {
        let mut each = GatewayCalls::default();
        for tracer in [CallTracer::Callgrind, CallTracer::Strace] {
            let once = run(args, tracer, keys, is_api, REQUESTS).await?;
            let twice = run(args, tracer, keys, is_api, 2 * REQUESTS).await?;
            let per_request = |pick: fn(&GatewayCalls) -> f64| (pick(&twice) - pick(&once)) / REQUESTS as f64;
            each.instructions += per_request(|calls| calls.instructions);
            each.sha256 += per_request(|calls| calls.sha256);
            each.clock_readings += per_request(|calls| calls.clock_readings);
            each.futex += per_request(|calls| calls.futex);
            each.system_calls += per_request(|calls| calls.system_calls);
        }
        let GatewayCalls { instructions, sha256, clock_readings, futex, system_calls } = each;
        let _ = writeln!(
            table,
            "| {name} | {instructions:.0} | {sha256:.0} | {clock_readings:.1} | {futex:.2} | {system_calls:.2} |"
        );
    }
    Ok(table)
}

async fn run(
    args: &BenchArgs, tracer: CallTracer, keys: LoadKeys, is_api: bool, requests: u64,
) -> Result<GatewayCalls, String> {
    let upstream = start_server(args, ContenderProgram::Upstream, None, None).await?;
    let folder = tempfile::tempdir().map_err(|why| format!("no folder for a profile: {why}"))?;
    let file = folder.path().join("counts");
    let out = file.display();
    let (program, flags) = match tracer {
        CallTracer::Callgrind => {
            let out = format!("--callgrind-out-file={out}");
            ("valgrind", ["--tool=callgrind", "--compress-strings=no", "--compress-pos=no", &out].map(str::to_owned))
        }
        // -D: the gateway is the process that was started, and strace its child.
        CallTracer::Strace => ("strace", ["-D", "-fqqc", "-o", &out.to_string()].map(str::to_owned)),
    };
    let mut command = flags.to_vec();
    command.push(args.ibid_bin.display().to_string());
    command.extend(ibid_args(&format!("http://{}", upstream.addr())));
    let api_folder = tempfile::tempdir().map_err(|why| format!("no folder for a socket: {why}"))?;
    if is_api {
        let config = api_folder.path().join("ibid.toml");
        fs::write(&config, api_config(api_folder.path())).map_err(|why| format!("{}: {why}", config.display()))?;
        command.extend(["--config".to_owned(), config.display().to_string()]);
    }
    let server = ServerChild::start(Path::new(program), &command).await?.with_folder(api_folder);
    let plan = LoadPlan {
        addr: server.addr(),
        protocol: LoadProtocol::Http1,
        path: "/orders".into(),
        body_bytes: 300,
        connections: CONNECTIONS,
        namespace: 1,
        keys,
        api: server.api_socket().map(|socket| ApiLoad { socket, response_bytes: 300 }),
    };
    let failed = |why: std::io::Error| format!("{program}: {why}");
    let mut load = LoadGenerator::connect(&plan).await.map_err(failed)?;
    let warming = load.warm_up().await.map_err(failed)?;
    let run = load.run(StopCondition::Requests(requests), server.pid()).await.map_err(failed)?;
    if let Some(problem) = warming.or(run.problem) {
        return Err(format!("{program}: {problem}"));
    }
    drop(load);
    server.terminate().await?;
    let deadline = Instant::now() + SUMMARY_TIMEOUT;
    loop {
        let counts = fs::read_to_string(&file).unwrap_or_default();
        let counts = match tracer {
            CallTracer::Callgrind => ProcessProfile::parse(&counts).map(from_profile),
            CallTracer::Strace => parse_summary(&counts).ok_or_else(|| format!("strace said {counts:?}")),
        };
        match counts {
            Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(50)).await,
            counts => return counts,
        }
    }
}

fn from_profile(profile: ProcessProfile) -> GatewayCalls {
    GatewayCalls {
        instructions: profile.instructions as f64,
        sha256: profile.sha256 as f64,
        clock_readings: profile.clock_readings as f64,
        ..GatewayCalls::default()
    }
}

/// Reads the table of `strace -c`: share, seconds, time per call, calls, errors if there were any, and the name.
fn parse_summary(summary: &str) -> Option<GatewayCalls> {
    let calls = |name: &str| {
        let line = summary.lines().find(|line| line.split_ascii_whitespace().next_back() == Some(name))?;
        line.split_ascii_whitespace().nth(3)?.parse::<f64>().ok()
    };
    let system_calls = calls("total")?;
    Some(GatewayCalls { system_calls, futex: calls("futex").unwrap_or(0.0), ..GatewayCalls::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calls_of_a_summary_are_found_with_and_without_errors() {
        let summary = "% time     seconds  usecs/call     calls    errors syscall\n\
                       ------ ----------- ----------- --------- --------- ----------------\n \
                       60.00    0.000600           3       200        17 futex\n \
                       40.00    0.000400           4       100           read\n\
                       ------ ----------- ----------- --------- --------- ----------------\n\
                       100.00    0.001000           3       300        17 total\n";
        let calls = parse_summary(summary).unwrap();
        assert_eq!((calls.futex, calls.system_calls), (200.0, 300.0));
        assert!(parse_summary("").is_none());
    }
}
