//! Each finding from a story made by hand.

use std::path::PathBuf;

use super::*;
use crate::{board::Operation, report::Allow, script::Tempo};

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn plan() -> Plan {
    let tempo = Tempo { length: ms(1), pace: ms(1), at_once: 1 };
    let mut plan = Plan::new("by hand", PathBuf::new(), vec![String::new(); 2], 1, ms(1));
    plan.tempo = tempo;
    plan
}

fn ran(number: usize, at: u64) -> Execution {
    Execution { number, at: ms(at), answer: format!("answer {number}").into() }
}

fn done(number: usize, at: u64) -> Heard {
    heard(Told::Done { status: 201, body: format!("answer {number}").into() }, at)
}

fn heard(told: Told, at: u64) -> Heard {
    let (begun, at) = (ms(at - 1), ms(at));
    Heard { told, gateway: 0, begun, at, replayed: false, pending: false, degraded: false, verifying: false }
}

/// One key with this story, and one that is fine.
fn judged(runs: Vec<Execution>, heard: Vec<Heard>) -> Outcome {
    let operation = |key: &str| Operation { key: key.to_owned(), path: "/".to_owned() };
    let fine = (vec![ran(99, 1)], vec![done(99, 5), Heard { verifying: true, ..done(99, 900) }]);
    let mut seen = Seen { logged: runs.len() + 1, ..Seen::default() };
    seen.stories.operations = vec![operation("k"), operation("fine")];
    seen.executions = [("k".to_owned(), runs), ("fine".to_owned(), fine.0)].into();
    seen.stories.heard = [("k".to_owned(), heard), ("fine".to_owned(), fine.1)].into();
    seen.injected = vec![Injected { name: "store: cut".into(), from: ms(2), to: ms(30) }];
    judge(&plan(), seen)
}

fn kept(outcome: &Outcome, allow: &[Allow]) -> bool {
    outcome.complaints(allow).is_empty()
}

#[test]
fn one_run_and_one_answer_is_fine() {
    let outcome = judged(vec![ran(1, 3)], vec![done(1, 10), done(1, 20), Heard { verifying: true, ..done(1, 99) }]);
    assert!(!outcome.has_findings(), "{outcome}");
    assert!(kept(&outcome, &[]));
    assert_eq!((outcome.keys, outcome.executions, outcome.finished, outcome.unknown), (2, 2, 2, 0));
}

#[test]
fn unknown_is_no_breach_whether_it_ran_or_not() {
    for runs in [vec![], vec![ran(1, 3)]] {
        let outcome = judged(runs.clone(), vec![heard(Told::Unknown, 10), heard(Told::Unknown, 99)]);
        assert!(kept(&outcome, &[]), "{outcome}");
        assert_eq!((outcome.unknown, outcome.unknown_ran), (1, runs.len()));
    }
}

#[test]
fn unknown_that_finishes_later_is_no_breach() {
    let outcome = judged(vec![ran(1, 3)], vec![heard(Told::Unknown, 10), done(1, 20)]);
    assert!(kept(&outcome, &[]), "{outcome}");
    assert_eq!((outcome.late, outcome.unknown, outcome.finished), (1, 0, 2));
}

#[test]
fn two_runs_are_a_duplicate_with_a_timeline() {
    let outcome = judged(vec![ran(1, 3), ran(2, 20)], vec![done(1, 10)]);
    assert_eq!(outcome.duplicates.len(), 1);
    assert!(!kept(&outcome, &[]) && kept(&outcome, &[Allow::Loss]));
    let timeline = outcome.duplicates[0].timeline.join("\n");
    assert!(timeline.contains("execution 2") && timeline.contains("fault: store: cut"), "{timeline}");
    assert!(outcome.to_string().contains("execution 2"), "{outcome}");
}

#[test]
fn a_duplicate_is_excused_where_an_answer_said_degraded() {
    let both = vec![Heard { degraded: true, ..done(1, 10) }, done(2, 30)];
    let outcome = judged(vec![ran(1, 3), ran(2, 20)], both);
    assert_eq!((outcome.duplicates.len(), outcome.divergent.len(), outcome.degraded_answers), (1, 1, 1));
    assert!(!kept(&outcome, &[]) && kept(&outcome, &[Allow::IfDegraded]), "{outcome}");
    let silent = judged(vec![ran(1, 3), ran(2, 20)], vec![done(1, 10), done(2, 30)]);
    assert!(!kept(&silent, &[Allow::IfDegraded]), "{silent}");
}

#[test]
fn duplicates_are_excused_as_far_as_the_gateways_announced_them() {
    let mut outcome = judged(vec![ran(1, 3), ran(2, 20)], vec![done(1, 10)]);
    assert!(!kept(&outcome, &[Allow::IfAnnounced]));
    outcome.announced = 1;
    assert!(kept(&outcome, &[Allow::IfAnnounced]) && !kept(&outcome, &[]));
}

#[test]
fn two_answers_are_divergent() {
    let outcome = judged(vec![ran(1, 3), ran(2, 20)], vec![done(1, 10), done(2, 30)]);
    assert_eq!(outcome.divergent.len(), 1);
    assert!(!kept(&outcome, &[]));
}

#[test]
fn an_answer_that_no_run_gave_is_divergent() {
    let outcome = judged(vec![ran(1, 3)], vec![done(1, 10), done(7, 30)]);
    assert_eq!((outcome.divergent.len(), outcome.duplicates.len()), (1, 0));
    let outcome = judged(vec![], vec![done(1, 10)]);
    assert_eq!(outcome.divergent.len(), 1);
}

#[test]
fn an_answer_that_becomes_unknown_is_lost() {
    let outcome = judged(vec![ran(1, 3)], vec![done(1, 10), heard(Told::Unknown, 30)]);
    assert_eq!(outcome.lost.len(), 1);
    assert!(!kept(&outcome, &[]) && kept(&outcome, &[Allow::Loss]));
    // Asked before the answer was there.
    let begun_before = Heard { begun: ms(5), ..heard(Told::Unknown, 30) };
    assert!(judged(vec![ran(1, 3)], vec![done(1, 10), begun_before]).lost.is_empty());
}

#[test]
fn an_answer_that_is_unknown_for_a_while_is_told_from_one_that_is_lost() {
    let at_the_end = |told| Heard { verifying: true, ..heard(told, 99) };
    let again = done(1, 10).told;
    let for_a_while = vec![done(1, 10), heard(Told::Unknown, 30), at_the_end(again)];
    let outcome = judged(vec![ran(1, 3)], for_a_while);
    assert!(!kept(&outcome, &[]) && kept(&outcome, &[Allow::ForAWhile]));
    let for_good = vec![done(1, 10), heard(Told::Unknown, 30), at_the_end(Told::Unknown)];
    assert!(!kept(&judged(vec![ran(1, 3)], for_good), &[Allow::ForAWhile]));
}

#[test]
fn a_pending_answer_may_be_unknown_for_a_while_but_not_at_the_end() {
    let pending = Heard { pending: true, ..done(1, 10) };
    let for_a_while = vec![pending.clone(), heard(Told::Unknown, 30), Heard { verifying: true, ..done(1, 99) }];
    assert!(kept(&judged(vec![ran(1, 3)], for_a_while), &[]));
    let replayed_meanwhile = vec![pending.clone(), Heard { replayed: true, ..done(1, 20) }, heard(Told::Unknown, 30)];
    assert!(kept(&judged(vec![ran(1, 3)], replayed_meanwhile), &[]));
    let for_good = vec![pending, Heard { verifying: true, ..heard(Told::Unknown, 99) }];
    assert_eq!(judged(vec![ran(1, 3)], for_good).lost.len(), 1);
}

#[test]
fn whatever_is_allowed_some_things_are_not() {
    let everything = [Allow::Loss, Allow::IfDegraded, Allow::IfAnnounced];
    let complaints = |change: &dyn Fn(&mut Seen)| {
        let mut seen = Seen { logged: 1, ..Seen::default() };
        seen.stories.operations = vec![Operation { key: "k".into(), path: "/".into() }];
        seen.executions = [("k".to_owned(), vec![ran(1, 3)])].into();
        seen.stories.heard = [("k".to_owned(), vec![done(1, 5)])].into();
        change(&mut seen);
        judge(&plan(), seen).complaints(&everything).join("; ")
    };
    assert_eq!(complaints(&|_| ()), "");
    assert!(complaints(&|seen| seen.logged = 0).contains("in the log"));
    assert!(complaints(&|seen| seen.crashed = Some(1)).contains("gateway 1 ended"));
    assert!(complaints(&|seen| seen.restless = Some("restless".into())).contains("restless"));
    assert!(complaints(&|seen| seen.stories.surprised = 1).contains("no client should get"));
    assert!(complaints(&|seen| seen.stories.gave_up = vec!["k".into()]).contains("no final answer"));
    assert!(complaints(&|seen| seen.stories.heard.clear()).contains("shows nothing"));
    assert!(complaints(&|seen| drop(seen.executions.insert("x".into(), vec![]))).contains("no client sent"));
    assert!(complaints(&|seen| seen.unsettled = vec!["k".into()]).contains("unsettled"));
}
