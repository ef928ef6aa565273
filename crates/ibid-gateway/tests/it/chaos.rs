//! Gateways under load while things break, a few seconds each. `scripts/chaos` does the same for as long as one likes.
//!
//! The second half are setups that cannot keep their promise: the harness must say so, or its silence means nothing.

use std::time::Duration;

use ibid_chaos::{
    crowd::{self, Crowd},
    fault::{Fault, OfGateway, OfLink, Tear},
    judge::Outcome,
    report::Allow,
    run::{Plan, Stage, run},
};

use crate::faults::kit::BIN;

const FEW_SECONDS: Duration = Duration::from_secs(5);
/// For what goes wrong at once.
const MOMENT: Duration = Duration::from_secs(2);

/// A gateway with this store whose every path is under `ietf` with these dials on top.
fn config(store: &str, dials: &str) -> String {
    format!(
        "[log]\nlevel = \"warn\"\n[store]\nurl = \"{store}\"\n[policy]\npreset = \"ietf\"\nlease = \"1s\"\ntimeout = \"2s\"\n{dials}\n"
    )
}

async fn outcome(plan: &Plan, faults: impl FnOnce(&Stage) -> Vec<Box<dyn Fault>>) -> Outcome {
    let outcome = run(plan, faults).await.expect("the run can be made");
    println!("{outcome}");
    outcome
}

fn plan(name: &str, configs: Vec<String>, length: Duration) -> Plan {
    Plan::new(name, BIN, configs, 7, length)
}

fn none(_: &Stage) -> Vec<Box<dyn Fault>> {
    Vec::new()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_store_keeps_its_promise_whatever_breaks() {
    let plan = plan("embedded", vec![config("embedded:data", "")], FEW_SECONDS);
    let outcome = outcome(&plan, |stage| {
        let mut faults = OfGateway::all(&stage.fleet);
        let clients = [Tear::Cut, Tear::Reset, Tear::Slice(7), Tear::BreakAnswers(5)];
        faults.extend(clients.map(|tear| OfLink::to_gateway(&stage.fleet, 0, tear)));
        let upstream = [Tear::CutToClient, Tear::Reset, Tear::Refuse, Tear::BreakAnswers(5)];
        faults.extend(upstream.map(|tear| OfLink::one("upstream", &stage.upstream, tear)));
        faults
    })
    .await;
    let complaints = outcome.complaints(&[]);
    assert!(complaints.is_empty(), "{complaints:?}\n{outcome}");
    assert!(outcome.faults.values().sum::<usize>() >= 8, "{outcome}");
    assert!(outcome.finished > 50 && outcome.unknown > 0 && outcome.replays > 0, "{outcome}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_faults_nothing_is_unknown() {
    let outcome = outcome(&plan("quiet", vec![config("memory:", "")], MOMENT), none).await;
    assert!(outcome.complaints(&[]).is_empty(), "{outcome}");
    assert_eq!((outcome.unknown, outcome.late, outcome.executions), (0, 0, outcome.keys), "{outcome}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_waiters_for_one_key_are_one_execution() {
    let stores = vec!["[store]\nurl = \"embedded:data\"".to_owned()];
    let crowd = Crowd { bin: BIN.into(), stores, waiters: 10_000, links: Vec::new() };
    let waited = crowd::wait(&crowd).await.expect("all of them arrive");
    println!("{waited}");
    let complaints = waited.complaints(0, 0);
    assert!(complaints.is_empty(), "{complaints:?}");
}

mod found {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_gateways_with_a_memory_each_run_keys_twice() {
        let configs = vec![config("memory:", ""), config("memory:", "")];
        let outcome = outcome(&plan("two memories", configs, MOMENT), none).await;
        assert!(!outcome.duplicates.is_empty() && !outcome.divergent.is_empty(), "{outcome}");
        assert!(!outcome.complaints(&[Allow::IfDegraded, Allow::IfAnnounced]).is_empty(), "{outcome}");
        let duplicate = &outcome.duplicates[0];
        let runs = duplicate.timeline.iter().filter(|line| line.contains("ran, execution")).count();
        assert!(runs >= 2, "{duplicate:?}");
        assert!(outcome.log.as_ref().is_some_and(|log| log.exists()), "the log of a bad run is kept");
        tidy(&outcome);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_memory_that_is_killed_forgets() {
        let plan = plan("killed memory", vec![config("memory:", "")], FEW_SECONDS);
        let outcome = outcome(&plan, |stage| OfGateway::all(&stage.fleet)).await;
        assert!(!outcome.duplicates.is_empty() && !outcome.complaints(&[]).is_empty(), "{outcome}");
        tidy(&outcome);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn replays_without_their_body_are_divergent() {
        let plan = plan("no bodies", vec![config("memory:", "remember_body = false")], MOMENT);
        let outcome = outcome(&plan, none).await;
        assert!(outcome.duplicates.is_empty() && !outcome.divergent.is_empty(), "{outcome}");
        assert!(!outcome.complaints(&[]).is_empty());
        tidy(&outcome);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_policy_that_retries_the_unknown_runs_it_again() {
        let plan = plan("retrying", vec![config("embedded:data", "on_unknown = \"retry\"")], FEW_SECONDS);
        let faults = |stage: &Stage| vec![OfLink::one("upstream", &stage.upstream, Tear::BreakAnswers(20))];
        let outcome = outcome(&plan, faults).await;
        assert!(!outcome.duplicates.is_empty(), "{outcome}");
        assert!(!outcome.complaints(&[]).is_empty(), "{outcome}");
        tidy(&outcome);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_gateway_in_nobodys_way_is_unprotected() {
        let plan = plan("off", vec![config("memory:", "mode = \"off\"")], MOMENT);
        let outcome = outcome(&plan, none).await;
        assert!(!outcome.duplicates.is_empty() && !outcome.divergent.is_empty(), "{outcome}");
        tidy(&outcome);
    }

    /// The log of a run that was meant to be bad.
    fn tidy(outcome: &Outcome) {
        let folder = outcome.log.as_ref().and_then(|log| log.parent()).expect("a bad run keeps its log");
        std::fs::remove_dir_all(folder).expect("it is ours");
    }
}

mod shared {
    use ibid_chaos::scenarios::{How, Shown, find, play};

    use super::*;

    /// A scenario for a few seconds, with the faults of this seed.
    async fn short(name: &str, seed: u64, length: Duration) -> Shown {
        let mut how = How::new(BIN.as_ref(), length);
        how.seed = seed;
        let scenario = find(name).expect("it is in the table");
        let (shown, complaints) = play(scenario, &how).await.expect("its servers can be started");
        assert!(complaints.is_empty(), "{name}, seed {seed}: {complaints:?}");
        shown
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_that_syncs_keeps_its_promise_whatever_breaks() {
        let Shown::Faults(outcome) = short("redis", 5, FEW_SECONDS * 2).await else { panic!("it has faults") };
        assert!(outcome.faults.keys().any(|fault| fault.contains("to redis")), "{outcome}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_redis_without_a_log_forgets_is_found() {
        let Shown::Faults(outcome) = short("redis-without-log", 5, FEW_SECONDS * 2).await else {
            panic!("it has faults")
        };
        assert!(outcome.faults.keys().any(|fault| fault == "redis: killed"), "{outcome}");
        assert!(!outcome.duplicates.is_empty() && !outcome.complaints(&[]).is_empty(), "{outcome}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_with_sentinels_goes_on_after_a_failover() {
        short("redis-sentinel", 5, FEW_SECONDS * 2).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_redis_cluster_goes_on_while_a_primary_dies_and_slots_move() {
        short("redis-cluster", 5, FEW_SECONDS * 2).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn postgres_keeps_its_promise_whatever_breaks() {
        let Shown::Faults(outcome) = short("postgres", 5, FEW_SECONDS * 2).await else { panic!("it has faults") };
        assert!(outcome.faults.keys().any(|fault| fault.contains("to postgres")), "{outcome}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn postgres_with_redis_as_a_cache_keeps_its_promise_whatever_breaks() {
        short("tiered-strict", 5, FEW_SECONDS * 2).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_with_postgres_behind_it_runs_twice_only_where_it_says_so() {
        short("tiered-loose", 5, FEW_SECONDS * 2).await;
    }
}
