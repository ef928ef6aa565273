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
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::time::sleep;

use crate::{
    args::BenchArgs,
    cpu::{self, MachineTimes},
    load::{self, ApiLoad, LoadGenerator, LoadKeys, LoadPlan, LoadResult, StopCondition},
    peers::{self, PeerProxy},
    rows::{Benchmark, BenchmarkRow, Contender, ContenderProgram, KeyTraffic},
    server_child::{API_SOCKET, ServerChild},
    store_limits::{LimitResult, StoreLimit},
    stores::{self, BenchDatabase, StoreServers},
};

/// Rest between two runs, for the last server to notice that its connections are gone.
const PAUSE_BETWEEN_RUNS: Duration = Duration::from_millis(50);

/// The gateway under test.
const SERVE_ARGS: &[&str] =
    &["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--journal", "off", "--preset", "ietf"];
/// Its routes, where it is to protect one gRPC method and let the others pass.
const GRPC_ROUTES: &str = "grpc_unknown = \"pass\"\n[[route]]\nmatch = \"grpc bench.Orders/Covered\"\n";
/// A long run must not fill it.
const MEMORY_STORE_ARGS: &[&str] = &["--store", "memory:?max_size=8GiB"];
const QUIET_LOG_ARGS: &[&str] = &["--log-level", "warn"];

/// A scene's results.
#[derive(Debug)]
pub struct BenchmarkResult {
    /// The scene.
    pub benchmark: &'static Benchmark,
    /// The rows to judge.
    pub rows: Vec<&'static BenchmarkRow>,
    /// What was measured of each contender that the rows need.
    pub measured: Vec<ContenderResult>,
    /// Rounds that were played again because of strangers' noise.
    pub repeated_rounds: usize,
}

/// What was measured of one contender.
#[derive(Debug)]
pub struct ContenderResult {
    /// The contender's name.
    pub name: &'static str,
    /// One sample per round, while there was no problem.
    pub samples: Vec<RoundSample>,
    /// Why its figures mean nothing.
    pub problem: Option<String>,
}

/// One contender's figures of one round.
#[derive(Clone, Copy, Debug)]
pub struct RoundSample {
    /// Requests per second.
    pub per_second: f64,
    /// Median latency in microseconds, unless the tool does not tell.
    pub p50_us: Option<f64>,
    /// 99th percentile of latency in microseconds, likewise.
    pub p99_us: Option<f64>,
    /// CPU of the contender's processes per request, in microseconds (not of the upstream or the store behind it); of a load
    /// on a store, that of the store's servers.
    pub cpu_us: f64,
    /// CPU of the servers of the contender's shared stores per request, in microseconds, if it has any.
    pub store_cpu_us: Option<f64>,
    /// CPU of the load generator per request, in microseconds.
    pub load_cpu_us: f64,
    /// Share of the machine (0–1) that was idle: much of it means that generator and server were kept on one core.
    pub idle: f64,
    /// Share of the machine (0–1) that strangers used or the hypervisor took: the noise of this run.
    pub foreign_load: f64,
}

impl RoundSample {
    /// Figures of `run`, between two looks at the `machine`; `app` and `stores` are the CPU times of what is behind a
    /// gateway.
    fn new(run: &LoadResult, machine: [MachineTimes; 2], app: Duration, stores: Option<Duration>) -> Self {
        let quantile = |share| Some(micros(run.latency.quantile(share)));
        let ours = run.server_cpu + run.own_cpu + app + stores.unwrap_or_default();
        let (idle, foreign_load) = shares(machine, ours);
        Self {
            per_second: run.per_second(),
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            cpu_us: run.cpu_us(run.server_cpu),
            store_cpu_us: stores.map(|cpu| run.cpu_us(cpu)),
            load_cpu_us: run.cpu_us(run.own_cpu),
            idle,
            foreign_load,
        }
    }

    /// Figures of a load on a store.
    fn of_limit(reached: &LimitResult) -> Self {
        let each = |cpu| micros(cpu) / reached.operations.max(1) as f64;
        let (idle, foreign_load) = shares(reached.machine, reached.store_cpu + reached.own_cpu);
        Self {
            per_second: reached.per_second,
            p50_us: reached.latency.map(|[p50, _]| micros(p50)),
            p99_us: reached.latency.map(|[_, p99]| micros(p99)),
            cpu_us: each(reached.store_cpu),
            store_cpu_us: Some(each(reached.store_cpu)),
            load_cpu_us: each(reached.own_cpu),
            idle,
            foreign_load,
        }
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Between two looks at the machine: which share of it was idle, and which was used by others than `ours`.
fn shares([before, after]: [MachineTimes; 2], ours: Duration) -> (f64, f64) {
    let idle = after.idle.saturating_sub(before.idle);
    let busy = after.busy.saturating_sub(before.busy);
    let share = |part: Duration| part.as_secs_f64() / (idle + busy).as_secs_f64().max(f64::MIN_POSITIVE);
    (share(idle), share(busy.saturating_sub(ours)))
}

/// Checks that the programs of all chosen scenes exist, before any time is spent on the first.
///
/// # Errors
/// A sentence for the user, naming the program, the rows that need it and the flag.
pub fn check_programs(
    args: &BenchArgs, chosen: &[(&'static Benchmark, Vec<&'static BenchmarkRow>)],
) -> Result<(), String> {
    let mut missing: Vec<(String, String, Vec<&str>)> = Vec::new();
    for (scene, rows) in chosen {
        for row in rows {
            let contenders = needed_contenders(scene, &[row]);
            for (program, hint) in contenders.iter().flat_map(|contender| missing_programs(args, contender.program)) {
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
fn missing_programs(args: &BenchArgs, program: ContenderProgram) -> Vec<(String, String)> {
    let own = program_path(args, program).filter(|(path, _)| !path.is_file());
    let own = own.map(|(path, hint)| (path.display().to_string(), hint.to_owned()));
    let tool = if let ContenderProgram::Limit(limit) = program { limit.program() } else { None };
    let servers = program.stores().into_iter().flat_map(stores::SharedStores::programs);
    let installed = servers.chain(tool).filter(|(name, _)| stores::installed_path(name).is_none());
    let installed = installed.map(|(name, package)| (name.to_owned(), format!("install the Debian package {package}")));
    own.into_iter().chain(installed).collect()
}

/// Plays all rounds of one scene.
///
/// # Errors
/// If the upstream or the database behind the gateways cannot be started; anything that concerns one contender is a
/// [`ContenderResult::problem`].
pub async fn run_benchmark(
    args: &BenchArgs, scene: &'static Benchmark, rows: Vec<&'static BenchmarkRow>,
) -> Result<BenchmarkResult, String> {
    let contenders = needed_contenders(scene, &rows);
    let upstream = match contenders.iter().find_map(|contender| contender.program.upstream()) {
        Some(app) => Some(start_server(args, app, None, None).await?),
        None => None,
    };
    let mut stores = contenders.iter().filter_map(|contender| contender.program.stores());
    let database =
        if stores.any(stores::SharedStores::has_postgres) { Some(BenchDatabase::start().await?) } else { None };
    let stage = BenchmarkRun { args, benchmark: scene, upstream, database };
    let mut measured: Vec<_> = contenders
        .iter()
        .map(|contender| ContenderResult { name: contender.name, samples: Vec::new(), problem: None })
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
                    eprintln!("{prefix}: {}", format_sample(&sample));
                    samples[place] = Some(sample);
                }
                Err(problem) => {
                    eprintln!("{prefix}: INVALID: {problem}");
                    measured.problem = Some(problem);
                }
            }
            sleep(PAUSE_BETWEEN_RUNS).await;
        }
        // Decided by what strangers did, never by what the contenders achieved, and for the round as a whole.
        let noisy = samples.iter().flatten().any(|sample| sample.foreign_load > args.max_foreign_load);
        if noisy && redone < args.rounds {
            redone += 1;
            eprintln!("{}: that round was noisy; it is played again ({redone} so far)", scene.name);
            continue;
        }
        kept += 1;
        measured.iter_mut().zip(samples).for_each(|(measured, sample)| measured.samples.extend(sample));
    }
    Ok(BenchmarkResult { benchmark: scene, rows, measured, repeated_rounds: redone })
}

fn format_sample(sample: &RoundSample) -> String {
    let RoundSample { per_second, p50_us, p99_us, cpu_us, store_cpu_us, load_cpu_us, idle, foreign_load: others } =
        sample;
    let store = store_cpu_us.map(|us| format!(", store {us:.1} µs")).unwrap_or_default();
    let time = |us: &Option<f64>| us.map_or("–".to_owned(), |us| format!("{us:.0} µs"));
    let (p50, p99) = (time(p50_us), time(p99_us));
    format!(
        "{per_second:.0} req/s, p50 {p50}, p99 {p99}, CPU {cpu_us:.1} µs{store} (generator {load_cpu_us:.1}), \
         idle {:.0} %, others {:.0} %",
        idle * 100.0,
        others * 100.0
    )
}

fn needed_contenders(scene: &'static Benchmark, rows: &[&'static BenchmarkRow]) -> Vec<&'static Contender> {
    let names: Vec<_> = rows.iter().flat_map(|row| row.needs()).collect();
    scene.contenders.iter().filter(|contender| names.contains(&contender.name)).collect()
}

/// Whether some of these rows need the servers of shared stores, and whether gateways on them.
#[must_use]
pub fn shared_stores(chosen: &[(&'static Benchmark, Vec<&'static BenchmarkRow>)]) -> (bool, bool) {
    let programs =
        || chosen.iter().flat_map(|(scene, rows)| needed_contenders(scene, rows)).map(|contender| contender.program);
    let is_gateway = |program| matches!(program, ContenderProgram::IbidOn(_));
    (programs().any(|program| program.stores().is_some()), programs().any(is_gateway))
}

/// What the runs of a scene share.
struct BenchmarkRun<'a> {
    args: &'a BenchArgs,
    benchmark: &'static Benchmark,
    /// The app behind the gateways; the same for all of them, so that they differ in nothing else.
    upstream: Option<ServerChild>,
    /// The PostgreSQL of all stores that have one.
    database: Option<BenchDatabase>,
}

impl BenchmarkRun<'_> {
    /// One run of one contender, or why it does not count.
    async fn run(&self, contender: &Contender) -> Result<RoundSample, String> {
        let stores = contender.program.stores();
        let backing = stores.map(|stores| StoreServers::start(stores, self.database.as_ref())).transpose()?;
        if let (ContenderProgram::Limit(limit), Some(backing)) = (contender.program, &backing) {
            return self.measure_limit(limit, backing).await;
        }
        let config = backing.as_ref().map(StoreServers::config).transpose()?;
        let behind = self.upstream.as_ref().filter(|_| contender.program.upstream().is_some());
        let upstream = behind.map(ServerChild::addr);
        let server = match (contender.program, upstream, &backing) {
            (ContenderProgram::IdempotentProxy, Some(upstream), Some(backing)) => {
                peers::start_idempotent_proxy(self.args, upstream, &backing.redis()?.url()).await?
            }
            (program, ..) => start_server(self.args, program, upstream, config).await?,
        };
        let app = behind.unwrap_or(&server).addr();
        let mut load = self.warm_up(contender, &server).await?;
        let executed_before = load::executions(app).await.map_err(|error| error.to_string())?;
        let behind_before = backend_cpu_times(behind, backing.as_ref())?;
        let database = backing.as_ref().and_then(|backing| backing.database().ok());
        let figures_before = database.map(BenchDatabase::figures).transpose()?;
        let asked_before = asked_cpu_time(&server)?;
        let machine_before = cpu::read_machine().map_err(|error| error.to_string())?;
        let mut run =
            load.run(StopCondition::After(self.args.measure), server.pid()).await.map_err(|error| error.to_string())?;
        let machine = [machine_before, cpu::read_machine().map_err(|error| error.to_string())?];
        if server.asked().is_some() {
            let asked = asked_cpu_time(&server)?.saturating_sub(asked_before);
            eprintln!("  CPU: {:.1} µs, and {:.1} µs of ibid", run.cpu_us(run.server_cpu), run.cpu_us(asked));
            run.server_cpu += asked;
        }
        let behind = backend_cpu_times(behind, backing.as_ref())?;
        let [app_cpu, stores_cpu] = [0, 1].map(|nth| behind[nth].saturating_sub(behind_before[nth]));
        // An app on the exchange API runs its handlers itself.
        let executed = load::executions(app).await.map_err(|error| error.to_string())? - executed_before + run.executed;
        if let Some((database, before)) = database.zip(figures_before) {
            eprintln!("  {}", database.figures()?.per_request(&before, run.requests));
        }
        if let Some(problem) = &run.problem {
            return Err(format!("{problem}\nby status: {:?}", run.statuses));
        }
        let due = match contender.traffic {
            KeyTraffic::Miss => run.requests,
            KeyTraffic::Replay => 0,
        };
        if executed != due {
            return Err(format!("{} requests were executed {executed} times instead of {due}", run.requests));
        }
        Ok(RoundSample::new(&run, machine, app_cpu, backing.map(|_| stores_cpu)))
    }

    async fn measure_limit(&self, limit: StoreLimit, backing: &StoreServers<'_>) -> Result<RoundSample, String> {
        limit.measure(self.args, backing).await.map(|reached| RoundSample::of_limit(&reached))
    }

    /// Connections whose keys are known to the server, if they are to be, and which have settled.
    async fn warm_up(&self, contender: &Contender, server: &ServerChild) -> Result<LoadGenerator, String> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let plan = LoadPlan {
            addr: server.addr(),
            protocol: self.benchmark.protocol,
            path: contender.path.to_owned(),
            body_bytes: self.benchmark.body_bytes,
            connections: self.args.connections,
            namespace: since_epoch.as_nanos() as u64,
            keys: match contender.traffic {
                KeyTraffic::Miss => LoadKeys::Unique,
                KeyTraffic::Replay => LoadKeys::Fixed(self.args.replay_keys),
            },
            api: server.api_socket().map(|socket| ApiLoad { socket, response_bytes: self.args.response_bytes }),
        };
        let failed = |what: &dyn std::fmt::Display| format!("warming up: {what}");
        let mut load = LoadGenerator::connect(&plan).await.map_err(|error| failed(&error))?;
        let mut problem = load.warm_up().await.map_err(|error| failed(&error))?;
        if problem.is_none() {
            let settling = load.run(StopCondition::After(self.args.warm_up), server.pid()).await;
            problem = settling.map_err(|error| failed(&error))?.problem;
        }
        problem.map_or(Ok(load), |problem| Err(failed(&problem)))
    }
}

/// CPU time of the server that `server` asks about requests, so far.
fn asked_cpu_time(server: &ServerChild) -> Result<Duration, String> {
    let asked = server.asked().map_or(Ok(Duration::ZERO), |asked| cpu::cpu_time(asked.pid()));
    asked.map_err(|error| error.to_string())
}

/// CPU times of the app and of the stores' servers so far.
fn backend_cpu_times(
    upstream: Option<&ServerChild>, backing: Option<&StoreServers<'_>>,
) -> Result<[Duration; 2], String> {
    let upstream = upstream.map_or(Ok(Duration::ZERO), |server| cpu::cpu_time(server.pid()));
    let stores = backing.map_or(Ok(Duration::ZERO), StoreServers::cpu);
    upstream.and_then(|upstream| Ok([upstream, stores?])).map_err(|error| error.to_string())
}

/// Where a program is, and how to say otherwise; none if it is no server of ours.
fn program_path(args: &BenchArgs, program: ContenderProgram) -> Option<(PathBuf, &'static str)> {
    Some(match program {
        ContenderProgram::Upstream => (args.bin_folder.join("bare-upstream"), "build all binaries of ibid-bench"),
        ContenderProgram::LayerApp => (args.bin_folder.join("layer-app"), "build all binaries of ibid-bench"),
        ContenderProgram::Proxy => (args.proxy_bin.clone(), "set --proxy-bin or IBID_BENCH_PROXY"),
        ContenderProgram::Ibid
        | ContenderProgram::IbidLogging
        | ContenderProgram::IbidEmbedded
        | ContenderProgram::IbidGrpc
        | ContenderProgram::IbidApi
        | ContenderProgram::IbidOn(_) => (args.ibid_bin.clone(), "set --ibid-bin or IBID_BENCH_IBID"),
        ContenderProgram::Peer(peer) => peer.program(args),
        ContenderProgram::EnvoyExtProc => PeerProxy::Envoy.program(args),
        ContenderProgram::IdempotentProxy => {
            (peers::idempotent_proxy_path(args), "scripts/bench --stores builds it from crates.io")
        }
        ContenderProgram::Limit(_) => return None,
    })
}

/// The configuration of an exchange API whose socket is in this folder.
pub(crate) fn api_config(folder: &Path) -> String {
    format!("[api]\nlisten = \"unix:{}\"\n", folder.join(API_SOCKET).display())
}

/// What the quiet gateway on the memory store is told, in front of `upstream`.
pub(crate) fn ibid_args(upstream: &str) -> Vec<String> {
    let flags = [SERVE_ARGS, MEMORY_STORE_ARGS, QUIET_LOG_ARGS, &["--upstream", upstream]].concat();
    flags.into_iter().map(str::to_owned).collect()
}

/// Starts a server, with a configuration file if there is one to be.
pub(crate) async fn start_server(
    args: &BenchArgs, program: ContenderProgram, upstream: Option<SocketAddr>, config: Option<String>,
) -> Result<ServerChild, String> {
    let (path, _) = program_path(args, program).ok_or_else(|| format!("{program:?} is no server"))?;
    match (program, upstream) {
        (ContenderProgram::Peer(peer), Some(upstream)) => return peer.start(args, upstream, None).await,
        (ContenderProgram::EnvoyExtProc, Some(upstream)) => return start_envoy_with_ibid(args, upstream).await,
        _ => {}
    }
    let upstream = upstream.map(|addr| format!("http://{addr}")).unwrap_or_default();
    let answer = args.response_bytes.to_string();
    let threads = args.app_threads.to_string();
    let folder = tempfile::tempdir().map_err(|why| format!("no folder for a store: {why}"))?;
    let embedded = format!("embedded:{}", folder.path().display());
    let file = folder.path().join("ibid.toml");
    let config = config.or_else(|| match program {
        ContenderProgram::IbidGrpc => Some(GRPC_ROUTES.to_owned()),
        ContenderProgram::IbidApi => Some(api_config(folder.path())),
        _ => None,
    });
    let is_configured = config.is_some();
    if let Some(config) = config {
        fs::write(&file, config).map_err(|why| format!("{}: {why}", file.display()))?;
    }
    let file = file.display().to_string();
    let with_file: &[&str] = if is_configured { &["--config", &file] } else { &[] };
    let flags: Vec<&str> = match program {
        ContenderProgram::Upstream | ContenderProgram::LayerApp => {
            vec!["--listen", "127.0.0.1:0", "--answer", &answer, "--threads", &threads]
        }
        ContenderProgram::Proxy => vec!["--upstream", &upstream, "--listen", "127.0.0.1:0"],
        ContenderProgram::Ibid => {
            [SERVE_ARGS, MEMORY_STORE_ARGS, QUIET_LOG_ARGS, &["--upstream", &upstream], with_file].concat()
        }
        ContenderProgram::IbidLogging => [SERVE_ARGS, MEMORY_STORE_ARGS, &["--upstream", &upstream]].concat(),
        ContenderProgram::IbidGrpc | ContenderProgram::IbidApi => {
            [SERVE_ARGS, MEMORY_STORE_ARGS, QUIET_LOG_ARGS, &["--upstream", &upstream, "--config", &file]].concat()
        }
        ContenderProgram::IbidEmbedded => {
            [SERVE_ARGS, QUIET_LOG_ARGS, &["--upstream", &upstream, "--store", &embedded], with_file].concat()
        }
        ContenderProgram::IbidOn(_) => {
            [SERVE_ARGS, QUIET_LOG_ARGS, &["--upstream", &upstream, "--config", &file]].concat()
        }
        ContenderProgram::Peer(_)
        | ContenderProgram::EnvoyExtProc
        | ContenderProgram::IdempotentProxy
        | ContenderProgram::Limit(_) => Vec::new(),
    };
    let flags: Vec<String> = flags.into_iter().map(str::to_owned).collect();
    Ok(ServerChild::start(&path, &flags).await?.with_folder(folder))
}

/// Starts Envoy with the quiet gateway on the memory store as its external processor.
async fn start_envoy_with_ibid(args: &BenchArgs, upstream: SocketAddr) -> Result<ServerChild, String> {
    let folder = tempfile::tempdir().map_err(|why| format!("no folder for a configuration: {why}"))?;
    let (file, ext_proc) = (folder.path().join("ibid.toml"), peers::free_address());
    fs::write(&file, format!("[ext_proc]\nlisten = \"{ext_proc}\"\n")).map_err(|why| why.to_string())?;
    let mut flags = ibid_args(&format!("http://{upstream}"));
    flags.extend(["--config".to_owned(), file.display().to_string()]);
    let ibid = ServerChild::start(&args.ibid_bin, &flags).await?.with_folder(folder);
    let envoy = PeerProxy::Envoy.start(args, upstream, Some(ext_proc)).await?;
    Ok(envoy.with_asked(ibid))
}
