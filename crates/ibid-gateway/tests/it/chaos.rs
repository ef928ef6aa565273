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
