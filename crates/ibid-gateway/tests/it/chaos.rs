//! Gateways under load while things break, a few seconds each. `scripts/chaos` does the same for as long as one likes.
//!
//! The second half are setups that cannot keep their promise: the harness must say so, or its silence means nothing.

use std::time::Duration;

use ibid_chaos::{
    crowd::{self, WaiterPlan},
    evaluation::ChaosReport,
    fault::{ChaosFault, GatewayFault, NetworkFault, ProxyFault},
    report::Exemption,
    run::{ChaosPlan, FaultTargets, run},
};

use crate::support::BIN;

const RUN_DURATION: Duration = Duration::from_secs(5);
/// For what goes wrong at once.
const SHORT_RUN_DURATION: Duration = Duration::from_secs(2);

/// A gateway with this store whose every path is under `ietf` with these dials on top.
fn config(store: &str, dials: &str) -> String {
    format!(
        "[log]\nlevel = \"warn\"\n[store]\nurl = \"{store}\"\n[policy]\npreset = \"ietf\"\nlease = \"1s\"\ntimeout = \"2s\"\n{dials}\n"
    )
}

async fn run_plan(plan: &ChaosPlan, faults: impl FnOnce(&FaultTargets) -> Vec<Box<dyn ChaosFault>>) -> ChaosReport {
    let outcome = run(plan, faults).await.expect("the run can be made");
    println!("{outcome}");
    outcome
}

fn plan(name: &str, configs: Vec<String>, length: Duration) -> ChaosPlan {
    ChaosPlan::new(name, BIN, configs, 7, length)
}

fn no_faults(_: &FaultTargets) -> Vec<Box<dyn ChaosFault>> {
    Vec::new()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_store_keeps_its_promise_whatever_breaks() {
    let plan = plan("embedded", vec![config("embedded:data", "")], RUN_DURATION);
    let outcome = run_plan(&plan, |stage| {
        let mut faults = GatewayFault::all(&stage.fleet);
        let clients = [NetworkFault::Cut, NetworkFault::Reset, NetworkFault::Slice(7), NetworkFault::BreakAnswers(5)];
        faults.extend(clients.map(|tear| ProxyFault::to_gateway(&stage.fleet, 0, tear)));
        let upstream =
            [NetworkFault::CutToClient, NetworkFault::Reset, NetworkFault::Refuse, NetworkFault::BreakAnswers(5)];
        faults.extend(upstream.map(|tear| ProxyFault::one("upstream", &stage.upstream, tear)));
        faults
    })
    .await;
    let complaints = outcome.failures(&[]);
    assert!(complaints.is_empty(), "{complaints:?}\n{outcome}");
    assert!(outcome.faults.values().sum::<usize>() >= 8, "{outcome}");
    assert!(outcome.finished > 50 && outcome.unknown > 0 && outcome.replays > 0, "{outcome}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_faults_nothing_is_unknown() {
    let outcome = run_plan(&plan("quiet", vec![config("memory:", "")], SHORT_RUN_DURATION), no_faults).await;
    assert!(outcome.failures(&[]).is_empty(), "{outcome}");
    assert_eq!((outcome.unknown, outcome.late_answers, outcome.executions), (0, 0, outcome.keys), "{outcome}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_waiters_for_one_key_are_one_execution() {
    let stores = vec!["[store]\nurl = \"embedded:data\"".to_owned()];
    let crowd = WaiterPlan { bin: BIN.into(), stores, waiters: 10_000, proxies: Vec::new() };
    let waited = crowd::run_waiters(&crowd).await.expect("all of them arrive");
    println!("{waited}");
    let complaints = waited.complaints(0, 0);
    assert!(complaints.is_empty(), "{complaints:?}");
}

mod detected_violations {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_gateways_with_a_memory_each_run_keys_twice() {
        let configs = vec![config("memory:", ""), config("memory:", "")];
        let outcome = run_plan(&plan("two memories", configs, SHORT_RUN_DURATION), no_faults).await;
        assert!(!outcome.duplicates.is_empty() && !outcome.divergent.is_empty(), "{outcome}");
        assert!(!outcome.failures(&[Exemption::IfDegraded, Exemption::IfAnnounced]).is_empty(), "{outcome}");
        let duplicate = &outcome.duplicates[0];
        let runs = duplicate.timeline.iter().filter(|line| line.contains("ran, execution")).count();
        assert!(runs >= 2, "{duplicate:?}");
        assert!(outcome.log.as_ref().is_some_and(|log| log.exists()), "the log of a bad run is kept");
        remove_log(&outcome);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_memory_that_is_killed_forgets() {
        let plan = plan("killed memory", vec![config("memory:", "")], RUN_DURATION);
        let outcome = run_plan(&plan, |stage| GatewayFault::all(&stage.fleet)).await;
        assert!(!outcome.duplicates.is_empty() && !outcome.failures(&[]).is_empty(), "{outcome}");
        remove_log(&outcome);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn replays_without_their_body_are_divergent() {
        let plan = plan("no bodies", vec![config("memory:", "remember_body = false")], SHORT_RUN_DURATION);
        let outcome = run_plan(&plan, no_faults).await;
        assert!(outcome.duplicates.is_empty() && !outcome.divergent.is_empty(), "{outcome}");
        assert!(!outcome.failures(&[]).is_empty());
        remove_log(&outcome);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_policy_that_retries_the_unknown_runs_it_again() {
        let plan = plan("retrying", vec![config("embedded:data", "on_unknown = \"retry\"")], RUN_DURATION);
        let faults =
            |stage: &FaultTargets| vec![ProxyFault::one("upstream", &stage.upstream, NetworkFault::BreakAnswers(20))];
        let outcome = run_plan(&plan, faults).await;
        assert!(!outcome.duplicates.is_empty(), "{outcome}");
        assert!(!outcome.failures(&[]).is_empty(), "{outcome}");
        remove_log(&outcome);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_gateway_in_nobodys_way_is_unprotected() {
        let plan = plan("off", vec![config("memory:", "mode = \"off\"")], SHORT_RUN_DURATION);
        let outcome = run_plan(&plan, no_faults).await;
        assert!(!outcome.duplicates.is_empty() && !outcome.divergent.is_empty(), "{outcome}");
        remove_log(&outcome);
    }

    /// The log of a run that was meant to be bad.
    fn remove_log(outcome: &ChaosReport) {
        let folder = outcome.log.as_ref().and_then(|log| log.parent()).expect("a bad run keeps its log");
        std::fs::remove_dir_all(folder).expect("it is ours");
    }
}

mod shared_stores {
    use ibid_chaos::scenarios::{ScenarioOptions, ScenarioResult, find, run_scenario};

    use super::*;

    /// A scenario for a few seconds, with the faults of this seed.
    async fn short(name: &str, seed: u64, length: Duration) -> ScenarioResult {
        let mut how = ScenarioOptions::new(BIN.as_ref(), length);
        how.seed = seed;
        let scenario = find(name).expect("it is in the table");
        let (shown, complaints) = run_scenario(scenario, &how).await.expect("its servers can be started");
        assert!(complaints.is_empty(), "{name}, seed {seed}: {complaints:?}");
        shown
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_that_syncs_keeps_its_promise_whatever_breaks() {
        let ScenarioResult::Faults(outcome) = short("redis", 5, RUN_DURATION * 2).await else {
            panic!("it has faults")
        };
        assert!(outcome.faults.keys().any(|fault| fault.contains("to redis")), "{outcome}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn valkey_that_syncs_keeps_its_promise_whatever_breaks() {
        short("valkey", 5, RUN_DURATION * 2).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_short_soak_samples_mixed_traffic_and_grows_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut how = ScenarioOptions::new(BIN.as_ref(), Duration::from_secs(15));
        (how.rate, how.curves) = (Some(60.0), Some(folder.path()));
        let scenario = find("soak-embedded").expect("it is in the table");
        let (shown, mut complaints) = run_scenario(scenario, &how).await.expect("it can be run");
        // Other tests run on the same cores.
        complaints.retain(|complaint| !complaint.starts_with("p99"));
        assert!(complaints.is_empty(), "{complaints:?}");
        let ScenarioResult::Soak(report) = shown else { panic!("it is a soak") };
        assert!(report.samples.len() >= 14 && report.reloads > 5, "{report}");
        for kind in ["First: 201", "Replay: 201", "Mismatch: 422", "HangUp: hung up"] {
            assert!(report.answers.contains_key(kind), "{kind}: {report}");
        }
        let table = std::fs::read_to_string(folder.path().join("soak-embedded.csv")).expect("the samples");
        assert_eq!(table.lines().count(), report.samples.len() + 1, "{table}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_redis_without_a_log_forgets_is_found() {
        let ScenarioResult::Faults(outcome) = short("redis-without-log", 5, RUN_DURATION * 2).await else {
            panic!("it has faults")
        };
        assert!(outcome.faults.keys().any(|fault| fault == "redis: killed"), "{outcome}");
        assert!(!outcome.duplicates.is_empty() && !outcome.failures(&[]).is_empty(), "{outcome}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_with_sentinels_goes_on_after_a_failover() {
        short("redis-sentinel", 5, RUN_DURATION * 2).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_redis_cluster_goes_on_while_a_primary_dies_and_slots_move() {
        short("redis-cluster", 5, RUN_DURATION * 2).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn postgres_keeps_its_promise_whatever_breaks() {
        let ScenarioResult::Faults(outcome) = short("postgres", 5, RUN_DURATION * 2).await else {
            panic!("it has faults")
        };
        assert!(outcome.faults.keys().any(|fault| fault.contains("to postgres")), "{outcome}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn postgres_with_redis_as_a_cache_keeps_its_promise_whatever_breaks() {
        short("tiered-strict", 5, RUN_DURATION * 2).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_with_postgres_behind_it_runs_twice_only_where_it_says_so() {
        short("tiered-loose", 5, RUN_DURATION * 2).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn envoys_that_ask_ibid_keep_its_promise_whatever_breaks() {
        let ScenarioResult::Faults(outcome) = short("ext-proc", 5, RUN_DURATION * 2).await else {
            panic!("it has faults")
        };
        assert!(outcome.faults.keys().any(|fault| fault.starts_with("front ")), "{outcome}");
        assert!(outcome.finished > 20 && outcome.replays > 0, "{outcome}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn apps_that_ask_ibid_keep_its_promise_whatever_breaks() {
        let ScenarioResult::Faults(outcome) = short("exchange-api", 5, RUN_DURATION * 2).await else {
            panic!("it has faults")
        };
        assert!(outcome.faults.keys().any(|fault| fault.starts_with("front ")), "{outcome}");
        assert!(outcome.finished > 20 && outcome.replays > 0, "{outcome}");
    }
}

/// What is beneath the gateways fails. It needs namespaces, which only a process of its own can have: each test runs an
/// ignored one in such a process.
mod sandboxed {
    use std::{fs, io, sync::Arc, time::Instant};

    use ibid_chaos::{
        fleet::{FleetLayout, GatewayFleet},
        sandbox::{Sandbox, sandbox_command},
        scenarios::{ScenarioOptions, ScenarioResult, find, run_scenario},
        upstream::Upstream,
    };
    use testbed::client::{RawClient, TestResponse, post};
    use tokio::time::{sleep, timeout};

    use super::*;

    fn run_inside(test: &str) {
        let this = std::env::current_exe().expect("this program");
        let mut inside = sandbox_command(&this).expect("namespaces can be made");
        let done = inside.args(["--ignored", "--exact", "--nocapture", &format!("chaos::sandboxed::{test}")]).output();
        let done = done.expect("it can be run");
        let shown = [done.stdout, done.stderr].concat();
        let shown = String::from_utf8_lossy(&shown);
        assert!(done.status.success() && shown.contains("1 passed"), "{shown}");
    }

    #[test]
    fn the_default_store_keeps_its_promise_whatever_fails_beneath_it() {
        run_inside("embedded");
    }

    #[test]
    fn every_fault_beneath_a_gateway_takes_effect_and_ends() {
        run_inside("each_fault");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "run by the tests above, in namespaces"]
    async fn embedded() {
        let mut how = ScenarioOptions::new(BIN.as_ref(), RUN_DURATION * 3);
        (how.seed, how.sandboxed, how.concurrent_faults) = (6, true, 5);
        let shown = run_scenario(find("embedded").expect("it is in the table"), &how).await;
        let (ScenarioResult::Faults(outcome), complaints) = shown.expect("it can be run") else {
            panic!("it has faults")
        };
        assert!(complaints.is_empty(), "{complaints:?}");
        for kind in ["packets", "names", "clock", "disk full", "disk slow", "file descriptors"] {
            assert!(outcome.faults.keys().any(|fault| fault.contains(kind)), "{kind}: {outcome}");
        }
    }

    struct OneGateway {
        sandbox: Arc<Sandbox>,
        fleet: Arc<GatewayFleet>,
        faults: Vec<Box<dyn ChaosFault>>,
    }

    impl OneGateway {
        fn fault(&self, name: &str) -> &dyn ChaosFault {
            self.faults.iter().find(|fault| fault.name() == name).expect("there is such a fault").as_ref()
        }

        /// Nothing if there is no answer in time.
        async fn send(&self, key: &str, path: &str) -> Option<TestResponse> {
            let request = post(self.fleet.addr(0), path).header("Authorization", "Bearer a").key(key).json("{}");
            timeout(Duration::from_millis(700), request.try_send()).await.ok()?.ok()
        }

        async fn status(&self, key: &str) -> Option<u16> {
            Some(self.send(key, "/1").await?.status)
        }

        /// The gateway's clock in minutes, by a refusal of its own.
        async fn minute(&self, known_key: &str) -> i64 {
            let refused = self.send(known_key, "/2").await.expect("it answers");
            let time = refused.header("date").and_then(|date| date.split(' ').nth(4)).expect("a time of day");
            let numbers: Vec<i64> = time.split(':').filter_map(|part| part.parse().ok()).collect();
            assert_eq!((refused.status, numbers.len()), (422, 3), "{refused:?}");
            numbers[0] * 60 + numbers[1]
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "run by the tests above, in namespaces"]
    async fn each_fault() {
        let folder = tempfile::tempdir().expect("a folder");
        let app = Upstream::start(folder.path(), Instant::now(), 1).await.expect("it starts");
        let sandbox = Arc::new(Sandbox::new().expect("a sandbox"));
        let configs = [config("embedded:data", "")];
        let fleet = GatewayFleet::start(FleetLayout::Gateway, BIN.as_ref(), &configs, app.addr(), Some(&sandbox));
        let fleet = fleet.await.expect("it starts");
        let faults = sandbox.faults(&fleet);
        let one = OneGateway { sandbox, fleet, faults };

        let names = one.fault("names: gone");
        names.inject().await;
        assert_eq!(one.status("a").await, Some(502));
        names.heal().await;
        assert_eq!(one.status("a").await, Some(201));

        let (before, clock) = (one.minute("a").await, one.fault("gateway 0 clock: an hour ahead"));
        clock.inject().await;
        sleep(Duration::from_millis(2500)).await;
        let ahead = (one.minute("a").await - before).rem_euclid(24 * 60);
        assert!((60..65).contains(&ahead), "{ahead} minutes");
        clock.heal().await;

        let files = one.fault("gateway 0: file descriptors exhausted");
        files.inject().await;
        let mut open = Vec::new();
        for _ in 0..20 {
            open.push(RawClient::connect(one.fleet.addr(0)).await);
        }
        assert_eq!(one.status("b").await, None);
        files.heal().await;
        drop(open);
        assert_eq!(one.status("b").await, Some(201));

        disk_faults(&one).await;
        packet_faults(&one, &app).await;
    }

    async fn disk_faults(one: &OneGateway) {
        let file = one.sandbox.disk(0).join("file");
        let write = || fs::write(&file, [7; 100_000]);
        let full = one.fault("gateway 0: disk full");
        full.inject().await;
        assert_eq!(write().map_err(|error| error.kind()), Err(io::ErrorKind::StorageFull));
        full.heal().await;
        write().expect("there is space again");

        let slow = one.fault("gateway 0: disk slow");
        slow.inject().await;
        let slowest = (0..5).map(|_| {
            let began = Instant::now();
            write().expect("it can be written");
            std::thread::sleep(Duration::from_millis(40));
            began.elapsed()
        });
        let slowest = slowest.max().expect("five");
        slow.heal().await;
        assert!(slowest > Duration::from_millis(90), "{slowest:?}");
    }

    async fn packet_faults(one: &OneGateway, app: &Upstream) {
        let fault = |kind| ProxyFault::to_gateway(&one.fleet, 0, kind);
        let addr = one.fleet.addr(0);
        for (kind, key, runs) in
            [(NetworkFault::DropPacketsToServer, "c", 0), (NetworkFault::DropPacketsToClient, "d", 1)]
        {
            let mut open = RawClient::connect(addr).await;
            let cut = fault(kind);
            cut.inject().await;
            let request = post(addr, "/1").header("Authorization", "Bearer a").key(key).json("{}");
            let answer = timeout(Duration::from_millis(700), request.try_send_on(&mut open)).await;
            assert!(answer.is_err(), "{}: {answer:?}", cut.name());
            assert_eq!(app.execution_count(key), runs, "{}", cut.name());
            cut.heal().await;
            sleep(Duration::from_millis(100)).await;
            // The kernel may deliver the first one now: it is in progress then.
            let mut status = one.status(key).await;
            for _ in 0..100 {
                if status != Some(409) {
                    break;
                }
                sleep(Duration::from_millis(100)).await;
                status = one.status(key).await;
            }
            assert_eq!(status, Some(201), "{}", cut.name());
            assert_eq!(app.execution_count(key), 1, "{}", cut.name());
        }
    }
}
