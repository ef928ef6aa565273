//! What is explored, and how a result is told.

use std::collections::BTreeSet;

use stateright::{Checker, Expectation, HasDiscoveries, Model};

use crate::{
    FaultBudget, ModelOnUnknown, ModelSetup, StoreSetup,
    gateway::UpstreamOutcome::{ConnectionLost, NotSent, Remembered, TimedOut, Unremembered},
    red::Mutant,
};

/// What an exploration found.
#[derive(Debug, Clone)]
pub struct ExplorationReport {
    pub name: &'static str,
    /// Different states.
    pub states: usize,
    /// The longest path looked at.
    pub depth: usize,
    pub properties: usize,
    /// What is wrong, one line each.
    pub violations: Vec<String>,
}

/// Explores every order of events.
pub fn explore_setup(world: &ModelSetup) -> ExplorationReport {
    let checker = world.clone().checker().threads(1).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let mut wrong = Vec::new();
    for property in world.properties() {
        match (property.expectation, checker.discovery(property.name)) {
            (Expectation::Always | Expectation::Eventually, Some(path)) => {
                let steps: Vec<String> = path.into_actions().iter().map(|step| format!("{step:?}")).collect();
                wrong.push(format!("broken: {}\n    {}", property.name, steps.join("\n    ")));
            }
            (Expectation::Sometimes, None) => wrong.push(format!("never seen: {}", property.name)),
            _ => {}
        }
    }
    ExplorationReport {
        name: world.name,
        states: checker.unique_state_count(),
        depth: checker.max_depth(),
        properties: world.properties().len(),
        violations: wrong,
    }
}

/// The shortest way to break the property that a red variant must break: how many states were looked at, and the steps.
///
/// `within`: looks no further than so many steps.
pub fn counterexample(red: &Mutant, within: Option<usize>) -> (usize, Option<Vec<String>>) {
    let only = HasDiscoveries::AnyOf(BTreeSet::from([red.broken_property]));
    let checker = red.setup.clone().checker().threads(1).finish_when(only);
    let checker = checker.target_max_depth(within.unwrap_or(usize::MAX)).spawn_bfs().join();
    let steps = |path: stateright::Path<_, crate::ModelAction>| {
        path.into_actions().iter().map(|step| format!("{step:?}")).collect()
    };
    (checker.unique_state_count(), checker.discovery(red.broken_property).map(steps))
}

const NO_FAULTS: FaultBudget = FaultBudget {
    losses: 0,
    repeats: 0,
    front_unreachable: 0,
    authority_unreachable: 0,
    crashes: 0,
    failovers: 0,
    replications: 0,
    heartbeats: 0,
};

/// Explored in every test run.
pub fn small_setups() -> Vec<ModelSetup> {
    use ModelOnUnknown::{Hold, Retry};
    use StoreSetup::{Loose, One, Strict};
    let all = vec![Remembered, Unremembered, ConnectionLost, NotSent];
    let few = vec![Remembered, NotSent];
    let lossy = FaultBudget { losses: 2, repeats: 1, crashes: 1, ..NO_FAULTS };
    let apart = FaultBudget { losses: 1, front_unreachable: 1, authority_unreachable: 1, ..NO_FAULTS };
    vec![
        ModelSetup {
            name: "one store, hold",
            stores: One,
            on_unknown: Hold,
            fingerprints: vec![0, 0, 1],
            replies: all.clone(),
            faults: FaultBudget { losses: 1, ..lossy },
            ..ModelSetup::default()
        },
        ModelSetup {
            name: "one store, retry",
            stores: One,
            on_unknown: Retry,
            fingerprints: vec![0, 0, 1],
            replies: all.clone(),
            faults: FaultBudget { losses: 1, repeats: 0, ..lossy },
            ..ModelSetup::default()
        },
        ModelSetup {
            name: "one store, away, journal, hold",
            stores: One,
            on_unknown: Hold,
            fingerprints: vec![0, 0],
            replies: few.clone(),
            journal: true,
            faults: FaultBudget { authority_unreachable: 2, heartbeats: 1, ..lossy },
            ..ModelSetup::default()
        },
        ModelSetup {
            name: "one store that fails over",
            stores: One,
            on_unknown: Retry,
            fingerprints: vec![0, 0],
            replies: few.clone(),
            faults: FaultBudget { failovers: 1, replications: 1, heartbeats: 1, losses: 1, ..NO_FAULTS },
            ..ModelSetup::default()
        },
        ModelSetup {
            name: "tiered strict, hold",
            stores: Strict,
            on_unknown: Hold,
            fingerprints: vec![0, 0],
            replies: few.clone(),
            faults: FaultBudget { crashes: 1, ..apart },
            ..ModelSetup::default()
        },
        ModelSetup {
            name: "tiered loose, hold",
            stores: Loose,
            on_unknown: Hold,
            fingerprints: vec![0, 0],
            replies: few.clone(),
            faults: FaultBudget { authority_unreachable: 2, ..apart },
            ..ModelSetup::default()
        },
        ModelSetup {
            name: "tiered loose, retry",
            stores: Loose,
            on_unknown: Retry,
            fingerprints: vec![0, 0],
            replies: few,
            faults: FaultBudget { losses: 0, authority_unreachable: 2, heartbeats: 1, ..apart },
            ..ModelSetup::default()
        },
    ]
}

/// Explored by the binary.
pub fn large_setups() -> Vec<ModelSetup> {
    use ModelOnUnknown::{Hold, Retry};
    use StoreSetup::{Loose, One, Strict};
    let all = vec![Remembered, Unremembered, ConnectionLost, TimedOut, NotSent];
    let few = vec![Remembered, ConnectionLost, NotSent];
    let ends = vec![Remembered, NotSent];
    let lossy = FaultBudget { losses: 2, repeats: 1, crashes: 1, ..NO_FAULTS };
    let apart = FaultBudget { losses: 1, crashes: 1, front_unreachable: 1, authority_unreachable: 1, ..NO_FAULTS };
    let world = |name, stores, on_unknown, bodies: &[u8], replies: &Vec<_>, faults| ModelSetup {
        name,
        stores,
        on_unknown,
        fingerprints: bodies.to_vec(),
        replies: replies.clone(),
        faults,
        ..ModelSetup::default()
    };
    vec![
        world("one store, hold, 3 requests", One, Hold, &[0, 0, 1], &all, FaultBudget { heartbeats: 1, ..lossy }),
        world(
            "one store, retry, 3 requests",
            One,
            Retry,
            &[0, 0, 1],
            &all,
            FaultBudget { losses: 1, heartbeats: 1, ..lossy },
        ),
        world(
            "one store, hold, 4 requests",
            One,
            Hold,
            &[0, 0, 0, 0],
            &few,
            FaultBudget { losses: 1, repeats: 0, ..lossy },
        ),
        world("one store, retry, 4 requests", One, Retry, &[0, 0, 1, 1], &few, FaultBudget { crashes: 1, ..NO_FAULTS }),
        ModelSetup {
            journal: true,
            ..world(
                "one store, away, journal, hold, 3 requests",
                One,
                Hold,
                &[0, 0, 0],
                &ends,
                FaultBudget { authority_unreachable: 2, heartbeats: 1, repeats: 0, ..lossy },
            )
        },
        world(
            "one store that fails over, 3 requests",
            One,
            Retry,
            &[0, 0, 1],
            &ends,
            FaultBudget { failovers: 1, replications: 1, heartbeats: 1, losses: 1, ..NO_FAULTS },
        ),
        world(
            "strict, hold, failover of the first store",
            Strict,
            Hold,
            &[0, 0],
            &few,
            FaultBudget { failovers: 1, replications: 1, ..apart },
        ),
        world(
            "strict, retry, 3 requests",
            Strict,
            Retry,
            &[0, 0, 1],
            &few,
            FaultBudget { crashes: 0, losses: 0, ..apart },
        ),
        world(
            "strict, retry, failover, 2 requests",
            Strict,
            Retry,
            &[0, 0],
            &few,
            FaultBudget { failovers: 1, heartbeats: 1, losses: 1, crashes: 0, ..apart },
        ),
        world(
            "loose, hold, 2 requests",
            Loose,
            Hold,
            &[0, 0],
            &few,
            FaultBudget { authority_unreachable: 2, heartbeats: 1, repeats: 1, ..apart },
        ),
        world(
            "loose, hold, 3 requests",
            Loose,
            Hold,
            &[0, 0, 0],
            &ends,
            FaultBudget { losses: 0, authority_unreachable: 2, ..apart },
        ),
        world(
            "loose, hold, two bodies",
            Loose,
            Hold,
            &[0, 1, 0],
            &ends,
            FaultBudget { losses: 0, crashes: 0, ..apart },
        ),
        world(
            "loose, retry, 3 requests",
            Loose,
            Retry,
            &[0, 0, 0],
            &ends,
            FaultBudget { losses: 0, crashes: 0, authority_unreachable: 2, heartbeats: 1, ..apart },
        ),
        world(
            "loose, retry, 2 requests",
            Loose,
            Retry,
            &[0, 0],
            &few,
            FaultBudget { authority_unreachable: 2, heartbeats: 1, ..apart },
        ),
        world(
            "loose, hold, failover of the first store",
            Loose,
            Hold,
            &[0, 0],
            &ends,
            FaultBudget { failovers: 1, replications: 1, authority_unreachable: 2, crashes: 0, ..apart },
        ),
    ]
}
