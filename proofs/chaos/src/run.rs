//! One run: start, load and faults, heal, settle, verify, judge.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufWriter},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use ibid_histories::event::write_history;
use parking_lot::Mutex;
use testbed::FaultProxy;
use tokio::{
    task::JoinSet,
    time::{sleep, sleep_until},
};

use crate::{
    answer_history::{AnswerHistory, ChaosOperation, FinalAnswer, ObservedAnswer},
    client::ChaosClient,
    evaluation::{ChaosReport, FaultInterval, RunObservations, evaluate_run},
    fault::ChaosFault,
    fault_schedule::{FaultRate, FaultShape, ScheduledFault, schedule_faults},
    fleet::{FleetLayout, GatewayFleet},
    sandbox::Sandbox,
    upstream::Upstream,
};

/// The longest pause of a client between two operations.
const CLIENT_PAUSE: Duration = Duration::from_millis(8);

/// How many clients verify at the end.
const VERIFIER_COUNT: usize = 16;

/// After so many keys that do not settle, none is waited for any more.
const MAX_UNSETTLED_KEYS: usize = 50;

/// What a run needs to know.
#[derive(Clone, Debug)]
pub struct ChaosPlan {
    /// For the report.
    pub name: String,
    /// The gateway's binary.
    pub bin: PathBuf,
    /// What clients connect to.
    pub layout: FleetLayout,
    /// One whole configuration per gateway.
    pub configs: Vec<String>,
    /// How many clients.
    pub clients: usize,
    /// How many operations all clients together begin in a second; as many as they can if not given.
    pub rate: Option<f64>,
    /// What the gateways stand on, if it can fail.
    pub sandbox: Option<Arc<Sandbox>>,
    /// Decides the faults, and what the clients choose.
    pub seed: u64,
    /// How long, and how many faults.
    pub fault_rate: FaultRate,
    /// The slowest answer of the upstream.
    pub slowest_response: Duration,
    /// At most so many keys.
    pub max_keys: usize,
    /// How long everything may take to settle once it is whole again.
    pub settle_timeout: Duration,
    /// Where the history is written to.
    pub history_file: Option<PathBuf>,
}

impl ChaosPlan {
    /// A plan with moderate values.
    pub fn new(name: &str, bin: impl Into<PathBuf>, configs: Vec<String>, seed: u64, length: Duration) -> ChaosPlan {
        ChaosPlan {
            name: name.to_owned(),
            bin: bin.into(),
            layout: FleetLayout::default(),
            configs,
            clients: 12,
            rate: None,
            sandbox: None,
            seed,
            fault_rate: FaultRate {
                load_duration: length,
                mean_interval: Duration::from_millis(250),
                max_concurrent: 2,
            },
            slowest_response: Duration::from_millis(20),
            max_keys: 20_000,
            settle_timeout: Duration::from_secs(30),
            history_file: None,
        }
    }
}

/// What faults can act on besides the store: see [`run`].
pub struct FaultTargets {
    /// The gateways.
    pub fleet: Arc<GatewayFleet>,
    /// The way between the gateways and the upstream.
    pub upstream: Arc<FaultProxy>,
}

/// Runs the plan with the faults that `faults` makes of the stage.
///
/// # Errors
///
/// If the upstream cannot be started or its log not be read.
///
/// # Panics
///
/// If a gateway does not start, or a fault cannot be injected or healed.
pub async fn run(
    plan: &ChaosPlan, faults: impl FnOnce(&FaultTargets) -> Vec<Box<dyn ChaosFault>>,
) -> io::Result<ChaosReport> {
    let folder = tempfile::Builder::new().prefix("ibid-chaos-").tempdir()?;
    let began = Instant::now();
    let upstream = Upstream::start(folder.path(), began, plan.seed).await?;
    let link = Arc::new(FaultProxy::to(upstream.addr()));
    let fleet =
        GatewayFleet::start(plan.layout, &plan.bin, &plan.configs, link.addr(), plan.sandbox.as_deref()).await?;
    let stage = FaultTargets { fleet: Arc::clone(&fleet), upstream: link };
    let board = Arc::new(AnswerHistory::new(began, plan.max_keys));
    let faults: Arc<[Box<dyn ChaosFault>]> = faults(&stage).into();

    let over = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for nth in 0..plan.clients {
        let client = ChaosClient::new(&fleet, &board, plan.seed ^ ((nth as u64 + 1) << 32));
        let pause = plan.rate.map_or(CLIENT_PAUSE, |rate| Duration::from_secs_f64(2.0 * plan.clients as f64 / rate));
        clients.spawn(client.run(Arc::clone(&over), plan.slowest_response, pause));
    }
    let injected = inject(plan, &faults, &board).await;
    over.store(true, SeqCst);
    while let Some(client) = clients.join_next().await {
        client.expect("a client only ever gives up in words");
    }
    let crashed = fleet.find_crashed().await;
    let restless = fleet.wait_until_idle(plan.settle_timeout).await.err();
    let unsettled = verify(&fleet, &board, plan).await;

    let executions = upstream.executions();
    let history = board.events(&executions);
    let file = plan.history_file.clone().unwrap_or_else(|| folder.path().join("history.jsonl"));
    write_history(&history, BufWriter::new(File::create(file)?))?;
    let seen = RunObservations {
        executions,
        history,
        executions_on_disk: upstream.executions_on_disk()?,
        answers: board.snapshot(),
        faults: injected,
        unsettled,
        crashed,
        busy_gateway: restless,
        double_runs_announced: fleet.double_runs_announced().await,
        requests: board.requests.load(SeqCst),
        retries: board.retries.load(SeqCst),
        duration: began.elapsed(),
    };
    let mut outcome = evaluate_run(plan, seen);
    if outcome.has_findings() {
        outcome.log = Some(folder.keep().join("executions.log"));
    }
    Ok(outcome)
}

/// Injects and heals what the script says; returns when everything is healed and the time is over.
async fn inject(
    plan: &ChaosPlan, faults: &Arc<[Box<dyn ChaosFault>]>, board: &Arc<AnswerHistory>,
) -> Vec<FaultInterval> {
    let shapes: Vec<_> =
        faults.iter().map(|fault| FaultShape { targets: fault.targets(), durations: fault.durations() }).collect();
    // Injecting takes time too, so a target may still be healing when its next fault is due: that one waits.
    let targets: BTreeMap<String, Arc<tokio::sync::Mutex<()>>> =
        shapes.iter().flat_map(|shape| &shape.targets).map(|target| (target.clone(), Arc::default())).collect();
    let injected = Arc::new(Mutex::new(Vec::new()));
    let start = tokio::time::Instant::now();
    let mut working = JoinSet::new();
    for step in schedule_faults(plan.seed, &shapes, plan.fault_rate) {
        sleep_until(start + step.at).await;
        let (faults, board, injected) = (Arc::clone(faults), Arc::clone(board), Arc::clone(&injected));
        // In the order of their names, as everybody: so nobody waits for somebody who waits for them.
        let mine = targets.iter().filter(|(target, _)| shapes[step.fault].targets.contains(target));
        let mine: Vec<_> = mine.map(|(_, turn)| Arc::clone(turn)).collect();
        let latest = start + plan.fault_rate.load_duration;
        working.spawn(async move {
            let mut turns = Vec::with_capacity(mine.len());
            for turn in mine {
                turns.push(turn.lock_owned().await);
            }
            if tokio::time::Instant::now() < latest {
                let done = inject_one(&*faults[step.fault], step, &board).await;
                injected.lock().push(done);
            }
        });
    }
    while let Some(done) = working.join_next().await {
        if let Err(error) = done {
            std::panic::resume_unwind(error.into_panic());
        }
    }
    sleep_until(start + plan.fault_rate.load_duration).await;
    let mut injected = std::mem::take(&mut *injected.lock());
    injected.sort_by_key(|one| one.from);
    injected
}

async fn inject_one(fault: &dyn ChaosFault, step: ScheduledFault, board: &AnswerHistory) -> FaultInterval {
    let from = board.now();
    fault.inject().await;
    sleep(step.duration).await;
    fault.heal().await;
    FaultInterval { name: fault.name(), from, healed_at: board.now() }
}

/// Asks every gateway about every key, until all say the same; returns the keys for which they do not.
async fn verify(fleet: &Arc<GatewayFleet>, board: &Arc<AnswerHistory>, plan: &ChaosPlan) -> Vec<String> {
    let end = Instant::now() + plan.settle_timeout;
    let operations = Arc::new(Mutex::new(board.operations()));
    let unsettled = Arc::new(Mutex::new(Vec::new()));
    let mut verifiers = JoinSet::new();
    for nth in 0..VERIFIER_COUNT {
        let mut client = ChaosClient::new(fleet, board, plan.seed ^ nth as u64);
        let (board, operations, unsettled) = (Arc::clone(board), Arc::clone(&operations), Arc::clone(&unsettled));
        let gateways = fleet.len();
        verifiers.spawn(async move {
            loop {
                let Some(operation) = operations.lock().pop() else { return };
                // Each key has a moment of its own even when the settling took all the time there was; but where many
                // have not settled, the rest need not be waited for.
                let moment =
                    if unsettled.lock().len() < MAX_UNSETTLED_KEYS { Duration::from_secs(2) } else { Duration::ZERO };
                let end = if moment.is_zero() { Instant::now() } else { end.max(Instant::now() + moment) };
                if !verify_key(&mut client, &board, &operation, gateways, end).await {
                    unsettled.lock().push(operation.key);
                }
            }
        });
    }
    while let Some(done) = verifiers.join_next().await {
        done.expect("a verifier only ever gives up in words");
    }
    std::mem::take(&mut *unsettled.lock())
}

/// Asks every gateway about one key, until all say the same, and notes what they said.
async fn verify_key(
    client: &mut ChaosClient, board: &AnswerHistory, operation: &ChaosOperation, gateways: usize, end: Instant,
) -> bool {
    loop {
        let mut answers: Vec<Option<ObservedAnswer>> = Vec::with_capacity(gateways);
        for gateway in 0..gateways {
            answers.push(client.final_answer_from(operation, gateway, end).await);
        }
        let heard: Vec<_> = answers.iter().flatten().collect();
        let known = board.answers_for(&operation.key);
        let pending = known.iter().any(|heard| heard.pending);
        let promised = !pending && known.iter().any(|heard| heard.told != FinalAnswer::OutcomeUnknown);
        let waits = |told: &FinalAnswer| *told == FinalAnswer::OutcomeUnknown && pending;
        let agree = heard.len() == gateways && heard.windows(2).all(|two| two[0].told == two[1].told);
        let done = |heard: &&&ObservedAnswer| heard.told != FinalAnswer::OutcomeUnknown;
        let two_answers =
            heard.iter().filter(done).any(|one| heard.iter().filter(done).any(|other| one.told != other.told));
        let hopeless = two_answers || (promised && heard.iter().any(|heard| heard.told == FinalAnswer::OutcomeUnknown));
        if (agree && !heard.iter().any(|heard| waits(&heard.told))) || hopeless || Instant::now() >= end {
            answers.into_iter().flatten().for_each(|heard| board.record_answer(&operation.key, heard));
            return agree;
        }
        sleep(Duration::from_millis(200)).await;
    }
}
