//! Starts a scene's processes and loads them in interleaved rounds.
//!
//! In every round each contender is loaded once; the order is rotated from round to round, so that no contender always
//! follows the same other. Every run has a **fresh process** of its contender, so that the luck of one process (its memory
//! layout, its allocator, a store filled by earlier rounds) is drawn anew each round instead of shifting all of them.
//!
//! A contender whose run went wrong keeps its problem and takes no further part; the rows that need it are invalid,
//! the others go on.

use std::{
    fs,
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::time::sleep;

use crate::{
    args::Args,
    child::Server,
    cpu::{self, Machine},
    limits::{Limit, Reached},
    load::{self, Keys, Load, Outcome, Plan, Stop},
    rows::{Contender, Program, Row, Scene, Traffic},
    stores::{self, Backing, Database},
};

/// Rest between two runs, for the last server to notice that its connections are gone.
const REST: Duration = Duration::from_millis(50);

/// The gateway under test.
const SERVE: &[&str] =
    &["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--journal", "off", "--preset", "ietf"];
/// Its routes, where it is to protect one gRPC method and let the others pass.
const CALLS: &str = "grpc_unknown = \"pass\"\n[[route]]\nmatch = \"grpc bench.Orders/Guarded\"\n";
const MEMORY: &[&str] = &["--store", "memory:"];
const QUIET: &[&str] = &["--log-level", "warn"];

/// A scene's results.
#[derive(Debug)]
pub struct Played {
    /// The scene.
    pub scene: &'static Scene,
    /// The rows to judge.
    pub rows: Vec<&'static Row>,
    /// What was measured of each contender that the rows need.
    pub measured: Vec<Measured>,
    /// Rounds that were played again because of strangers' noise.
    pub redone: usize,
}

/// What was measured of one contender.
#[derive(Debug)]
pub struct Measured {
    /// The contender's name.
    pub name: &'static str,
    /// One sample per round, while there was no problem.
    pub samples: Vec<Sample>,
    /// Why its figures mean nothing.
    pub problem: Option<String>,
}

/// One contender's figures of one round.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Requests per second.
    pub per_second: f64,
    /// Median latency in microseconds, unless the tool does not tell.
    pub p50_us: Option<f64>,
    /// 99th percentile of latency in microseconds, likewise.
    pub p99_us: Option<f64>,
    /// CPU of the contender's process per request, in microseconds (not of the upstream or the store behind it); of a load
    /// on a store, that of the store's servers.
    pub cpu_us: f64,
    /// CPU of the load generator per request, in microseconds.
    pub load_cpu_us: f64,
    /// Share of the machine (0–1) that was idle: much of it means that generator and server were kept on one core.
    pub idle: f64,
    /// Share of the machine (0–1) that strangers used or the hypervisor took: the noise of this run.
    pub others: f64,
}

impl Sample {
    /// Figures of `run`, between two looks at the `machine`; `behind` is the CPU time of the upstream and the stores behind
    /// a gateway.
    fn new(run: &Outcome, machine: [Machine; 2], behind: Duration) -> Self {
        let quantile = |share| Some(micros(run.latency.quantile(share)));
        let (idle, others) = shares(machine, run.server_cpu + run.own_cpu + behind);
        Self {
            per_second: run.per_second(),
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            cpu_us: run.cpu_us(run.server_cpu),
            load_cpu_us: run.cpu_us(run.own_cpu),
            idle,
            others,
        }
    }

    /// Figures of a load on a store.
    fn of_limit(reached: &Reached) -> Self {
        let each = |cpu| micros(cpu) / reached.operations.max(1) as f64;
        let (idle, others) = shares(reached.machine, reached.store_cpu + reached.own_cpu);
        Self {
            per_second: reached.per_second,
            p50_us: reached.latency.map(|[p50, _]| micros(p50)),
            p99_us: reached.latency.map(|[_, p99]| micros(p99)),
            cpu_us: each(reached.store_cpu),
            load_cpu_us: each(reached.own_cpu),
            idle,
            others,
        }
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Between two looks at the machine: which share of it was idle, and which was used by others than `ours`.
fn shares([before, after]: [Machine; 2], ours: Duration) -> (f64, f64) {
    let idle = after.idle.saturating_sub(before.idle);
    let busy = after.busy.saturating_sub(before.busy);
    let share = |part: Duration| part.as_secs_f64() / (idle + busy).as_secs_f64().max(f64::MIN_POSITIVE);
    (share(idle), share(busy.saturating_sub(ours)))
}

/// Checks that the programs of all chosen scenes exist, before any time is spent on the first.
///
/// # Errors
/// A sentence for the user, naming the program, the rows that need it and the flag.
pub fn check_programs(args: &Args, chosen: &[(&'static Scene, Vec<&'static Row>)]) -> Result<(), String> {
    let mut missing: Vec<(String, String, Vec<&str>)> = Vec::new();
    for (scene, rows) in chosen {
        for row in rows {
            let contenders = needed(scene, &[row]);
            for (program, hint) in contenders.iter().flat_map(|contender| lacking(args, contender.program)) {
                match missing.iter_mut().find(|(known, ..)| *known == program) {
                    Some((.., rows)) if rows.contains(&row.name) => {}
                    Some((.., rows)) => rows.push(row.name),
                    None => missing.push((program, hint, vec![row.name])),
                }
            }
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let lines: Vec<_> = missing
        .iter()
        .map(|(program, hint, rows)| format!("no such program: {program} ({hint}), needed by {}", rows.join(", ")))
        .collect();
    Err(lines.join("\n"))
}

/// Programs that a contender runs and that are not there, each with how to have it.
fn lacking(args: &Args, program: Program) -> Vec<(String, String)> {
    let own = binary(args, program).filter(|(path, _)| !path.is_file());
    let own = own.map(|(path, hint)| (path.display().to_string(), hint.to_owned()));
    let tool = if let Program::Limit(limit) = program { limit.program() } else { None };
    let servers = program.stores().into_iter().flat_map(stores::Stores::programs);
    let installed = servers.chain(tool).filter(|(name, _)| !stores::is_installed(name));
    let installed = installed.map(|(name, package)| (name.to_owned(), format!("install the Debian package {package}")));
    own.into_iter().chain(installed).collect()
}

/// Plays all rounds of one scene.
///
/// # Errors
/// If the upstream or the database behind the gateways cannot be started; anything that concerns one contender is a
/// [`Measured::problem`].
pub async fn play(args: &Args, scene: &'static Scene, rows: Vec<&'static Row>) -> Result<Played, String> {
    let contenders = needed(scene, &rows);
    let upstream = match contenders.iter().find_map(|contender| contender.program.upstream()) {
        Some(app) => Some(start(args, app, None, None).await?),
        None => None,
    };
    let mut stores = contenders.iter().filter_map(|contender| contender.program.stores());
    let database = if stores.any(stores::Stores::has_postgres) { Some(Database::start().await?) } else { None };
    let stage = Stage { args, scene, upstream, database };
    let mut measured: Vec<_> = contenders
        .iter()
        .map(|contender| Measured { name: contender.name, samples: Vec::new(), problem: None })
        .collect();
    let (mut kept, mut redone) = (0, 0);
    while kept < args.rounds {
        let mut samples = vec![None; contenders.len()];
        for turn in 0..contenders.len() {
            let place = (turn + kept + redone) % contenders.len();
            let (contender, measured) = (contenders[place], &mut measured[place]);
            if measured.problem.is_some() {
                continue;
            }
            let prefix = format!("{} round {}/{} {}", scene.name, kept + 1, args.rounds, contender.name);
            match stage.run(contender).await {
                Ok(sample) => {
                    eprintln!("{prefix}: {}", line(&sample));
                    samples[place] = Some(sample);
                }
                Err(problem) => {
                    eprintln!("{prefix}: INVALID: {problem}");
                    measured.problem = Some(problem);
                }
            }
            sleep(REST).await;
        }
        // Decided by what strangers did, never by what the contenders achieved, and for the round as a whole.
        let noisy = samples.iter().flatten().any(|sample| sample.others > args.redo_above);
        if noisy && redone < args.rounds {
            redone += 1;
            eprintln!("{}: that round was noisy; it is played again ({redone} so far)", scene.name);
            continue;
        }
        kept += 1;
        measured.iter_mut().zip(samples).for_each(|(measured, sample)| measured.samples.extend(sample));
    }
    Ok(Played { scene, rows, measured, redone })
}

fn line(sample: &Sample) -> String {
    let Sample { per_second, p50_us, p99_us, cpu_us, load_cpu_us, idle, others } = sample;
    let time = |us: &Option<f64>| us.map_or("–".to_owned(), |us| format!("{us:.0} µs"));
    let (p50, p99) = (time(p50_us), time(p99_us));
    format!(
        "{per_second:.0} req/s, p50 {p50}, p99 {p99}, CPU {cpu_us:.1} µs (generator {load_cpu_us:.1}), \
         idle {:.0} %, others {:.0} %",
        idle * 100.0,
        others * 100.0
    )
}

fn needed(scene: &'static Scene, rows: &[&'static Row]) -> Vec<&'static Contender> {
    let names: Vec<_> = rows.iter().flat_map(|row| row.needs()).collect();
    scene.contenders.iter().filter(|contender| names.contains(&contender.name)).collect()
}

/// Whether some of these rows need the servers of shared stores, and whether gateways on them.
#[must_use]
pub fn shared_stores(chosen: &[(&'static Scene, Vec<&'static Row>)]) -> (bool, bool) {
    let programs = || chosen.iter().flat_map(|(scene, rows)| needed(scene, rows)).map(|contender| contender.program);
    let is_gateway = |program| matches!(program, Program::IbidOn(_));
    (programs().any(|program| program.stores().is_some()), programs().any(is_gateway))
}

/// What the runs of a scene share.
struct Stage<'a> {
    args: &'a Args,
    scene: &'static Scene,
    /// The app behind the gateways; the same for all of them, so that they differ in nothing else.
    upstream: Option<Server>,
    /// The PostgreSQL of all stores that have one.
    database: Option<Database>,
}

impl Stage<'_> {
    /// One run of one contender, or why it does not count.
    async fn run(&self, contender: &Contender) -> Result<Sample, String> {
        let stores = contender.program.stores();
        let backing = stores.map(|stores| Backing::start(stores, self.database.as_ref())).transpose()?;
        if let (Program::Limit(limit), Some(backing)) = (contender.program, &backing) {
            return self.limit(limit, backing).await;
        }
        let config = backing.as_ref().map(Backing::config).transpose()?;
        let behind = self.upstream.as_ref().filter(|_| contender.program.upstream().is_some());
        let server = start(self.args, contender.program, behind.map(Server::addr), config).await?;
        let app = behind.unwrap_or(&server).addr();
        let mut load = self.warmed_up(contender, &server).await?;
        let executed_before = load::executions(app).await.map_err(|error| error.to_string())?;
        let behind_before = behind_cpu(behind, backing.as_ref())?;
        let machine_before = cpu::machine().map_err(|error| error.to_string())?;
        let run = load.run(Stop::After(self.args.measure), server.pid()).await.map_err(|error| error.to_string())?;
        let machine = [machine_before, cpu::machine().map_err(|error| error.to_string())?];
        let behind = behind_cpu(behind, backing.as_ref())?.saturating_sub(behind_before);
        let executed = load::executions(app).await.map_err(|error| error.to_string())? - executed_before;
        if let Some(problem) = &run.problem {
            return Err(format!("{problem}\nby status: {:?}", run.statuses));
        }
        let due = match contender.traffic {
            Traffic::Miss => run.requests,
            Traffic::Replay => 0,
        };
        if executed != due {
            return Err(format!("{} requests were executed {executed} times instead of {due}", run.requests));
        }
        Ok(Sample::new(&run, machine, behind))
    }

    async fn limit(&self, limit: Limit, backing: &Backing<'_>) -> Result<Sample, String> {
        limit.reach(self.args, backing).await.map(|reached| Sample::of_limit(&reached))
    }

    /// Connections whose keys are known to the server, if they are to be, and which have settled.
    async fn warmed_up(&self, contender: &Contender, server: &Server) -> Result<Load, String> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let plan = Plan {
            addr: server.addr(),
            protocol: self.scene.protocol,
            path: contender.path.to_owned(),
            body_bytes: self.scene.body_bytes,
            connections: self.args.connections,
            namespace: since_epoch.as_nanos() as u64,
            keys: match contender.traffic {
                Traffic::Miss => Keys::Unique,
                Traffic::Replay => Keys::Fixed(self.args.replay_keys),
            },
        };
        let failed = |what: &dyn std::fmt::Display| format!("warming up: {what}");
        let mut load = Load::connect(&plan).await.map_err(|error| failed(&error))?;
        let mut problem = load.warm_up().await.map_err(|error| failed(&error))?;
        if problem.is_none() {
            let settling = load.run(Stop::After(self.args.settle), server.pid()).await;
            problem = settling.map_err(|error| failed(&error))?.problem;
        }
        problem.map_or(Ok(load), |problem| Err(failed(&problem)))
    }
}

fn behind_cpu(upstream: Option<&Server>, backing: Option<&Backing<'_>>) -> Result<Duration, String> {
    let upstream = upstream.map_or(Ok(Duration::ZERO), |server| cpu::consumed(server.pid()));
    let stores = backing.map_or(Ok(Duration::ZERO), Backing::cpu);
    upstream.and_then(|upstream| Ok(upstream + stores?)).map_err(|error| error.to_string())
}

/// Where a program is, and how to say otherwise; none if it is no server of ours.
fn binary(args: &Args, program: Program) -> Option<(PathBuf, &'static str)> {
    Some(match program {
        Program::Upstream => (args.own_bins.join("bare-upstream"), "build all binaries of ibid-bench"),
        Program::LayerApp => (args.own_bins.join("layer-app"), "build all binaries of ibid-bench"),
        Program::Proxy => (args.proxy_bin.clone(), "set --proxy-bin or IBID_BENCH_PROXY"),
        Program::Ibid | Program::IbidLogging | Program::IbidEmbedded | Program::IbidCalls | Program::IbidOn(_) => {
            (args.ibid_bin.clone(), "set --ibid-bin or IBID_BENCH_IBID")
        }
        Program::Limit(_) => return None,
    })
}

/// Starts a server, with a configuration file if there is one to be.
pub(crate) async fn start(
    args: &Args, program: Program, upstream: Option<SocketAddr>, config: Option<String>,
) -> Result<Server, String> {
    let (path, _) = binary(args, program).ok_or_else(|| format!("{program:?} is no server"))?;
    let upstream = upstream.map(|addr| format!("http://{addr}")).unwrap_or_default();
    let answer = args.answer.to_string();
    let threads = args.app_threads.to_string();
    let folder = tempfile::tempdir().map_err(|why| format!("no folder for a store: {why}"))?;
    let embedded = format!("embedded:{}", folder.path().display());
    let file = folder.path().join("ibid.toml");
    let config = config.or_else(|| (program == Program::IbidCalls).then(|| CALLS.to_owned()));
    if let Some(config) = config {
        fs::write(&file, config).map_err(|why| format!("{}: {why}", file.display()))?;
    }
    let file = file.display().to_string();
    let flags: Vec<&str> = match program {
        Program::Upstream | Program::LayerApp => {
            vec!["--listen", "127.0.0.1:0", "--answer", &answer, "--threads", &threads]
        }
        Program::Proxy => vec!["--upstream", &upstream, "--listen", "127.0.0.1:0"],
        Program::Ibid => [SERVE, MEMORY, QUIET, &["--upstream", &upstream]].concat(),
        Program::IbidLogging => [SERVE, MEMORY, &["--upstream", &upstream]].concat(),
        Program::IbidCalls => [SERVE, MEMORY, QUIET, &["--upstream", &upstream, "--config", &file]].concat(),
        Program::IbidEmbedded => [SERVE, QUIET, &["--upstream", &upstream, "--store", &embedded]].concat(),
        Program::IbidOn(_) => [SERVE, QUIET, &["--upstream", &upstream, "--config", &file]].concat(),
        Program::Limit(_) => Vec::new(),
    };
    let flags: Vec<String> = flags.into_iter().map(str::to_owned).collect();
    Ok(Server::start(&path, &flags).await?.keeping(folder))
}
