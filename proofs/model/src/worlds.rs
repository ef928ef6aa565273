//! What is explored, and how a result is told.

use std::collections::BTreeSet;

use stateright::{Checker, Expectation, HasDiscoveries, Model};

use crate::{
    Faults, OnUnknown, Stores, World,
    gateway::Reply::{Cut, NotSent, Remembered, TimedOut, Unremembered},
    red::Red,
};

/// What an exploration found.
#[derive(Debug, Clone)]
pub struct Found {
    pub name: &'static str,
    /// Different states.
    pub states: usize,
    /// The longest path looked at.
    pub depth: usize,
    pub properties: usize,
    /// What is wrong, one line each.
    pub wrong: Vec<String>,
}

/// Explores every order of events.
pub fn explore(world: &World) -> Found {
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
    Found {
        name: world.name,
        states: checker.unique_state_count(),
        depth: checker.max_depth(),
        properties: world.properties().len(),
        wrong,
    }
}

/// The shortest way to break the property that a red variant must break: how many states were looked at, and the steps.
///
/// `within`: looks no further than so many steps.
pub fn counterexample(red: &Red, within: Option<usize>) -> (usize, Option<Vec<String>>) {
    let only = HasDiscoveries::AnyOf(BTreeSet::from([red.breaks]));
    let checker = red.world.clone().checker().threads(1).finish_when(only);
    let checker = checker.target_max_depth(within.unwrap_or(usize::MAX)).spawn_bfs().join();
    let steps =
        |path: stateright::Path<_, crate::Action>| path.into_actions().iter().map(|step| format!("{step:?}")).collect();
    (checker.unique_state_count(), checker.discovery(red.breaks).map(steps))
}

const NONE: Faults = Faults {
    losses: 0,
    repeats: 0,
    first_unreachable: 0,
    last_unreachable: 0,
    crashes: 0,
    failovers: 0,
    replications: 0,
    beats: 0,
};

/// Explored in every test run.
pub fn small() -> Vec<World> {
    use OnUnknown::{Hold, Retry};
    use Stores::{Loose, One, Strict};
    let all = vec![Remembered, Unremembered, Cut, NotSent];
    let few = vec![Remembered, NotSent];
    let lossy = Faults { losses: 2, repeats: 1, crashes: 1, ..NONE };
    let apart = Faults { losses: 1, first_unreachable: 1, last_unreachable: 1, ..NONE };
    vec![
        World {
            name: "one store, hold",
            stores: One,
            on_unknown: Hold,
            bodies: vec![0, 0, 1],
            replies: all.clone(),
            faults: Faults { losses: 1, ..lossy },
            ..World::default()
        },
        World {
            name: "one store, retry",
            stores: One,
            on_unknown: Retry,
            bodies: vec![0, 0, 1],
            replies: all.clone(),
            faults: Faults { losses: 1, repeats: 0, ..lossy },
            ..World::default()
        },
        World {
            name: "one store, away, journal, hold",
            stores: One,
            on_unknown: Hold,
            bodies: vec![0, 0],
            replies: few.clone(),
            journal: true,
            faults: Faults { last_unreachable: 2, beats: 1, ..lossy },
            ..World::default()
        },
        World {
            name: "one store that fails over",
            stores: One,
            on_unknown: Retry,
            bodies: vec![0, 0],
            replies: few.clone(),
            faults: Faults { failovers: 1, replications: 1, beats: 1, losses: 1, ..NONE },
            ..World::default()
        },
        World {
            name: "tiered strict, hold",
            stores: Strict,
            on_unknown: Hold,
            bodies: vec![0, 0],
            replies: few.clone(),
            faults: Faults { crashes: 1, ..apart },
            ..World::default()
        },
        World {
            name: "tiered loose, hold",
            stores: Loose,
            on_unknown: Hold,
            bodies: vec![0, 0],
            replies: few.clone(),
            faults: Faults { last_unreachable: 2, ..apart },
            ..World::default()
        },
        World {
            name: "tiered loose, retry",
            stores: Loose,
            on_unknown: Retry,
            bodies: vec![0, 0],
            replies: few,
            faults: Faults { losses: 0, last_unreachable: 2, beats: 1, ..apart },
            ..World::default()
        },
    ]
}

/// Explored by the binary, those of [`open`] last.
pub fn large() -> Vec<World> {
    use OnUnknown::{Hold, Retry};
    use Stores::{Loose, One, Strict};
    let all = vec![Remembered, Unremembered, Cut, TimedOut, NotSent];
    let few = vec![Remembered, Cut, NotSent];
    let ends = vec![Remembered, NotSent];
    let lossy = Faults { losses: 2, repeats: 1, crashes: 1, ..NONE };
    let apart = Faults { losses: 1, crashes: 1, first_unreachable: 1, last_unreachable: 1, ..NONE };
    let world = |name, stores, on_unknown, bodies: &[u8], replies: &Vec<_>, faults| World {
        name,
        stores,
        on_unknown,
        bodies: bodies.to_vec(),
        replies: replies.clone(),
        faults,
        ..World::default()
    };
    vec![
        world("one store, hold, 3 requests", One, Hold, &[0, 0, 1], &all, Faults { beats: 1, ..lossy }),
        world("one store, retry, 3 requests", One, Retry, &[0, 0, 1], &all, Faults { losses: 1, beats: 1, ..lossy }),
        world("one store, hold, 4 requests", One, Hold, &[0, 0, 0, 0], &few, Faults { losses: 1, repeats: 0, ..lossy }),
        world("one store, retry, 4 requests", One, Retry, &[0, 0, 1, 1], &few, Faults { crashes: 1, ..NONE }),
        World {
            journal: true,
            ..world(
                "one store, away, journal, hold, 3 requests",
                One,
                Hold,
                &[0, 0, 0],
                &ends,
                Faults { last_unreachable: 2, beats: 1, repeats: 0, ..lossy },
            )
        },
        world(
            "one store that fails over, 3 requests",
            One,
            Retry,
            &[0, 0, 1],
            &ends,
            Faults { failovers: 1, replications: 1, beats: 1, losses: 1, ..NONE },
        ),
        world(
            "strict, hold, failover of the first store",
            Strict,
            Hold,
            &[0, 0],
            &few,
            Faults { failovers: 1, replications: 1, ..apart },
        ),
        world("strict, retry, 3 requests", Strict, Retry, &[0, 0, 1], &few, Faults { crashes: 0, losses: 0, ..apart }),
        world(
            "strict, retry, failover, 2 requests",
            Strict,
            Retry,
            &[0, 0],
            &few,
            Faults { failovers: 1, beats: 1, losses: 1, crashes: 0, ..apart },
        ),
        world(
            "loose, hold, 2 requests",
            Loose,
            Hold,
            &[0, 0],
            &few,
            Faults { last_unreachable: 2, beats: 1, repeats: 1, ..apart },
        ),
        world(
            "loose, hold, 3 requests",
            Loose,
            Hold,
            &[0, 0, 0],
            &ends,
            Faults { losses: 0, last_unreachable: 2, ..apart },
        ),
        world("loose, hold, two bodies", Loose, Hold, &[0, 1, 0], &ends, Faults { losses: 0, crashes: 0, ..apart }),
        world(
            "loose, retry, 3 requests",
            Loose,
            Retry,
            &[0, 0, 0],
            &ends,
            Faults { losses: 0, crashes: 0, last_unreachable: 2, beats: 1, ..apart },
        ),
        world(
            "loose, retry, 2 requests",
            Loose,
            Retry,
            &[0, 0],
            &few,
            Faults { last_unreachable: 2, beats: 1, ..apart },
        ),
        world(
            "loose, hold, failover of the first store",
            Loose,
            Hold,
            &[0, 0],
            &ends,
            Faults { failovers: 1, replications: 1, last_unreachable: 2, crashes: 0, ..apart },
        ),
    ]
}

/// Worlds of [`large`] in which the protocol, as modelled, still has a counterexample: loose with `retry`. The binary shows it,
/// and fails if there is none any more, so that this list stays true.
pub fn open() -> [&'static str; 1] {
    ["loose, retry, 3 requests"]
}
