//! Latency at half of the throughput that a gateway reaches, beside the bare proxy at the same rate.
//!
//! Requests are sent at a fixed rate, whether or not earlier ones were answered, and each is timed from when it was due:
//! a pause delays everything that is due meanwhile, and counts that often. In every round the gateway and the bare proxy
//! are loaded once, in fresh processes; what the gateway adds is the difference within a round.

use std::{
    fmt::Write,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{
    args::BenchArgs,
    load::{LoadGenerator, LoadKeys, LoadPlan, LoadProtocol, LoadResult, StopCondition},
    rows::ContenderProgram,
    runner,
    server_child::ServerChild,
};

const BODY_BYTES: usize = 300;
/// The longest pause that a gateway may make.
const MAX_PAUSE: Duration = Duration::from_millis(20);

/// The gateways, by name, and what each may add to the bare proxy's 99th percentile.
const GATEWAYS: [(&str, ContenderProgram, Duration); 2] = [
    ("memory", ContenderProgram::Ibid, Duration::from_micros(300)),
    ("embedded", ContenderProgram::IbidEmbedded, Duration::from_millis(2)),
];

/// How long a gateway is loaded fully in a round: that gives a rate, and a long run needs no longer.
const MAX_FULL_LOAD_TIME: Duration = Duration::from_secs(3);

/// How long the bare proxy is loaded in a round: its 99th percentile needs no longer.
const MAX_PROXY_TIME: Duration = Duration::from_secs(60);

/// Answers are forgotten soon, so that a long run has as many as a store has room for, and that many expire.
const CONFIG: &str = "[policy]\nttl = \"20s\"\n";

/// Measures, tells of each run on standard error, and returns one line per gateway.
///
/// # Errors
/// A sentence for the user if a server cannot be started or answers wrongly.
pub async fn table(args: &BenchArgs) -> Result<String, String> {
    let app = runner::start_server(args, ContenderProgram::Upstream, None, None).await?;
    let mut out = String::from(
        "First requests at half of the throughput that each store reaches, timed from when they were due\n\n\
         | store | requests/s | p50 | p99 | p99 of the bare proxy | added | may add | longest | longest of the bare proxy | may last |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    for (name, program, may_add) in GATEWAYS {
        let runs = HalfLoadRuns::measure(args, name, program, &app).await?;
        runs.write_row(&mut out, name, may_add);
    }
    Ok(out)
}

/// The runs of one gateway, and those of the bare proxy at the same rate in the same rounds.
struct HalfLoadRuns {
    rate: f64,
    gateway: Vec<LoadResult>,
    proxy: Vec<LoadResult>,
}

impl HalfLoadRuns {
    async fn measure(
        args: &BenchArgs, name: &str, program: ContenderProgram, app: &ServerChild,
    ) -> Result<Self, String> {
        let mut reached = Vec::new();
        for round in 1..=args.rounds {
            let mut load = PacedLoad::start(args, program, app).await?;
            let run = load.run_for(args.measure.min(MAX_FULL_LOAD_TIME), None).await?;
            eprintln!("{name}, full load, round {round} of {}: {:.0} requests/s", args.rounds, run.per_second());
            reached.push(run.per_second());
        }
        let mut runs = Self { rate: median(reached) / 2.0, gateway: Vec::new(), proxy: Vec::new() };
        for round in 1..=args.rounds {
            let turns = [
                (name, program, args.measure, &mut runs.gateway),
                ("bare proxy", ContenderProgram::Proxy, args.measure.min(MAX_PROXY_TIME), &mut runs.proxy),
            ];
            for (name, program, time, results) in turns {
                let mut load = PacedLoad::start(args, program, app).await?;
                let run = load.run_for(time, Some(runs.rate)).await?;
                let (p99, longest) = (millis(&run, 0.99), millis(&run, 1.0));
                eprintln!(
                    "{name}, {:.0} requests/s, round {round} of {}: p99 {p99:.2} ms, longest {longest:.1} ms",
                    runs.rate, args.rounds
                );
                results.push(run);
            }
        }
        Ok(runs)
    }

    fn write_row(&self, out: &mut String, name: &str, may_add: Duration) {
        let typical = |runs: &[LoadResult], share| median(runs.iter().map(|run| millis(run, share)).collect());
        let longest = |runs: &[LoadResult]| runs.iter().map(|run| millis(run, 1.0)).fold(0.0, f64::max);
        let rounds = self.gateway.iter().zip(&self.proxy);
        let added = median(rounds.map(|(gateway, proxy)| millis(gateway, 0.99) - millis(proxy, 0.99)).collect());
        let _ = writeln!(
            out,
            "| {name} | {:.0} | {:.2} ms | {:.2} ms | {:.2} ms | {added:.2} ms | {:.1} ms | {:.1} ms | {:.1} ms | {:.0} ms |",
            self.rate,
            typical(&self.gateway, 0.5),
            typical(&self.gateway, 0.99),
            typical(&self.proxy, 0.99),
            may_add.as_secs_f64() * 1e3,
            longest(&self.gateway),
            longest(&self.proxy),
            MAX_PAUSE.as_secs_f64() * 1e3,
        );
    }
}

/// A quantile of a run's latency in milliseconds.
fn millis(run: &LoadResult, share: f64) -> f64 {
    run.latency.quantile(share).as_secs_f64() * 1e3
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// A server and the load on it.
struct PacedLoad {
    server: ServerChild,
    load: LoadGenerator,
}

impl PacedLoad {
    async fn start(args: &BenchArgs, program: ContenderProgram, app: &ServerChild) -> Result<Self, String> {
        let server = runner::start_server(args, program, Some(app.addr()), Some(CONFIG.to_owned())).await?;
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let plan = LoadPlan {
            addr: server.addr(),
            protocol: LoadProtocol::Http1,
            path: "/orders".to_owned(),
            body_bytes: BODY_BYTES,
            connections: args.connections,
            namespace: since_epoch.as_nanos() as u64,
            keys: LoadKeys::Unique,
            api: None,
        };
        let load = LoadGenerator::connect(&plan).await.map_err(|error| error.to_string())?;
        let mut started = Self { server, load };
        started.run_for(args.warm_up, None).await?;
        Ok(started)
    }

    /// Loads the server at a rate per second, or as fast as it answers.
    async fn run_for(&mut self, time: Duration, rate: Option<f64>) -> Result<LoadResult, String> {
        let run = match rate {
            Some(rate) => self.load.run_at_rate(rate, time, self.server.pid()).await,
            None => self.load.run(StopCondition::After(time), self.server.pid()).await,
        };
        let run = run.map_err(|error| error.to_string())?;
        match &run.problem {
            Some(problem) => Err(format!("{problem}\nby status: {:?}", run.statuses)),
            None => Ok(run),
        }
    }
}
