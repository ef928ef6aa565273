//! Each finding from a story made by hand.

use std::path::PathBuf;

use super::*;
use crate::{answer_history::ChaosOperation, fault_schedule::FaultRate, report::Exemption};

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn plan() -> ChaosPlan {
    let tempo = FaultRate { load_duration: ms(1), mean_interval: ms(1), max_concurrent: 1 };
    let mut plan = ChaosPlan::new("by hand", PathBuf::new(), vec![String::new(); 2], 1, ms(1));
    plan.fault_rate = tempo;
    plan
}

fn ran(number: usize, at: u64) -> Execution {
    Execution { number, at: ms(at), answer: format!("answer {number}").into() }
}

fn done(number: usize, at: u64) -> ObservedAnswer {
    heard(FinalAnswer::Completed { status: 201, body: format!("answer {number}").into() }, at)
}

fn heard(told: FinalAnswer, at: u64) -> ObservedAnswer {
    let (begun, at) = (ms(at - 1), ms(at));
    ObservedAnswer {
        told,
        gateway: 0,
        sent_at: begun,
        at,
        replayed: false,
        pending: false,
        degraded: false,
        during_verification: false,
    }
}

/// One key with this story, and one that is fine.
fn judged(runs: Vec<Execution>, heard: Vec<ObservedAnswer>) -> ChaosReport {
    judged_with(runs, heard, Vec::new())
}

/// Like [`judged`], with more events of that key for the checker.
fn judged_with(runs: Vec<Execution>, heard: Vec<ObservedAnswer>, more: Vec<HistoryEvent>) -> ChaosReport {
    let operation = |key: &str| ChaosOperation { key: key.to_owned(), path: "/".to_owned() };
    let fine = (vec![ran(99, 1)], vec![done(99, 5), ObservedAnswer { during_verification: true, ..done(99, 900) }]);
    let mut seen = RunObservations { executions_on_disk: runs.len() + 1, ..RunObservations::default() };
    seen.answers.operations = vec![operation("k"), operation("fine")];
    seen.executions = [("k".to_owned(), runs), ("fine".to_owned(), fine.0)].into();
    seen.answers.answers = [("k".to_owned(), heard), ("fine".to_owned(), fine.1)].into();
    seen.history = history_of(&seen);
    seen.history.extend(more);
    seen.faults = vec![FaultInterval { name: "store: cut".into(), from: ms(2), healed_at: ms(30) }];
    evaluate_run(&plan(), seen)
}

/// The same story for the checker, and a request of each key that was lost.
fn history_of(seen: &RunObservations) -> Vec<HistoryEvent> {
    let (caller, micros) = (|| "chaos".to_owned(), |time: Duration| time.as_micros() as u64);
    let mut events = Vec::new();
    for (key, heard) in &seen.answers.answers {
        let key = || key.clone();
        let (request, at_rest) = (events.len() as u64, false);
        events.push(HistoryEvent::Invoke { at: 0, request, caller: caller(), key: key(), at_rest });
        for heard in heard {
            let (request, at) = (events.len() as u64, micros(heard.sent_at));
            let at_rest = heard.during_verification;
            events.push(HistoryEvent::Invoke { at, request, caller: caller(), key: key(), at_rest });
            let result = match &heard.told {
                FinalAnswer::OutcomeUnknown => RequestResult::OutcomeUnknown,
                FinalAnswer::Completed { body, .. } => {
                    RequestResult::Answer { answer: String::from_utf8_lossy(body).into(), pending: heard.pending }
                }
            };
            events.push(HistoryEvent::Return { at: micros(heard.at), request, result });
        }
        events.extend(seen.executions[&key()].iter().map(|run| HistoryEvent::Execute {
            at: micros(run.at),
            caller: caller(),
            key: key(),
            answer: String::from_utf8_lossy(&run.answer).into(),
        }));
    }
    events
}

fn kept(outcome: &ChaosReport, allow: &[Exemption]) -> bool {
    outcome.failures(allow).is_empty()
}

#[test]
fn one_run_and_one_answer_is_fine() {
    let outcome = judged(
        vec![ran(1, 3)],
        vec![done(1, 10), done(1, 20), ObservedAnswer { during_verification: true, ..done(1, 99) }],
    );
    assert!(!outcome.has_findings(), "{outcome}");
    assert!(kept(&outcome, &[]));
    assert_eq!((outcome.keys, outcome.executions, outcome.finished, outcome.unknown), (2, 2, 2, 0));
}

#[test]
fn unknown_is_no_breach_whether_it_ran_or_not() {
    for runs in [vec![], vec![ran(1, 3)]] {
        let outcome =
            judged(runs.clone(), vec![heard(FinalAnswer::OutcomeUnknown, 10), heard(FinalAnswer::OutcomeUnknown, 99)]);
        assert!(kept(&outcome, &[]), "{outcome}");
        assert_eq!((outcome.unknown, outcome.unknown_but_ran), (1, runs.len()));
    }
}

#[test]
fn unknown_that_finishes_later_is_no_breach() {
    let outcome = judged(vec![ran(1, 3)], vec![heard(FinalAnswer::OutcomeUnknown, 10), done(1, 20)]);
    assert!(kept(&outcome, &[]), "{outcome}");
    assert_eq!((outcome.late_answers, outcome.unknown, outcome.finished), (1, 0, 2));
}

#[test]
fn two_runs_are_a_duplicate_with_a_timeline() {
    let outcome = judged(vec![ran(1, 3), ran(2, 20)], vec![done(1, 10)]);
    assert_eq!(outcome.duplicates.len(), 1);
    assert!(!kept(&outcome, &[]) && kept(&outcome, &[Exemption::Loss]));
    let timeline = outcome.duplicates[0].timeline.join("\n");
    assert!(timeline.contains("execution 2") && timeline.contains("fault: store: cut"), "{timeline}");
    assert!(outcome.to_string().contains("execution 2"), "{outcome}");
}

#[test]
fn a_duplicate_is_excused_where_an_answer_said_degraded() {
    let both = vec![ObservedAnswer { degraded: true, ..done(1, 10) }, done(2, 30)];
    let outcome = judged(vec![ran(1, 3), ran(2, 20)], both);
    assert_eq!((outcome.duplicates.len(), outcome.divergent.len(), outcome.degraded_answers), (1, 1, 1));
    assert!(!kept(&outcome, &[]) && kept(&outcome, &[Exemption::IfDegraded]), "{outcome}");
    let silent = judged(vec![ran(1, 3), ran(2, 20)], vec![done(1, 10), done(2, 30)]);
    assert!(!kept(&silent, &[Exemption::IfDegraded]), "{silent}");
}

#[test]
fn duplicates_are_excused_as_far_as_the_gateways_announced_them() {
    let mut outcome = judged(vec![ran(1, 3), ran(2, 20)], vec![done(1, 10)]);
    assert!(!kept(&outcome, &[Exemption::IfAnnounced]));
    outcome.double_runs_announced = 1;
    assert!(kept(&outcome, &[Exemption::IfAnnounced]) && !kept(&outcome, &[]));
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
    let outcome = judged(vec![ran(1, 3)], vec![done(1, 10), heard(FinalAnswer::OutcomeUnknown, 30)]);
    assert_eq!(outcome.lost.len(), 1);
    assert!(!kept(&outcome, &[]) && kept(&outcome, &[Exemption::Loss]));
    // Asked before the answer was there.
    let begun_before = ObservedAnswer { sent_at: ms(5), ..heard(FinalAnswer::OutcomeUnknown, 30) };
    assert!(judged(vec![ran(1, 3)], vec![done(1, 10), begun_before]).lost.is_empty());
}

#[test]
fn an_answer_that_is_unknown_for_a_while_is_told_from_one_that_is_lost() {
    let at_the_end = |told| ObservedAnswer { during_verification: true, ..heard(told, 99) };
    let again = done(1, 10).told;
    let for_a_while = vec![done(1, 10), heard(FinalAnswer::OutcomeUnknown, 30), at_the_end(again)];
    let outcome = judged(vec![ran(1, 3)], for_a_while);
    assert!(!kept(&outcome, &[]) && kept(&outcome, &[Exemption::Temporary]));
    let for_good = vec![done(1, 10), heard(FinalAnswer::OutcomeUnknown, 30), at_the_end(FinalAnswer::OutcomeUnknown)];
    assert!(!kept(&judged(vec![ran(1, 3)], for_good), &[Exemption::Temporary]));
}

#[test]
fn an_answer_that_is_in_progress_for_a_while_is_told_from_one_that_still_is_at_the_end() {
    let story = || vec![done(1, 10), ObservedAnswer { during_verification: true, ..done(1, 99) }];
    let in_progress = |from: u64, at_rest| {
        let (request, caller, key) = (1_000, "chaos".to_owned(), "k".to_owned());
        let invoke = HistoryEvent::Invoke { at: from, request, caller, key, at_rest };
        vec![invoke, HistoryEvent::Return { at: from + 1, request, result: RequestResult::InProgress }]
    };
    let outcome = judged_with(vec![ran(1, 3)], story(), in_progress(30_000, false));
    assert_eq!(outcome.unexplained.len(), 1, "{outcome}");
    assert!(!kept(&outcome, &[]) && kept(&outcome, &[Exemption::Temporary]), "{outcome}");
    let at_the_end = judged_with(vec![ran(1, 3)], story(), in_progress(120_000, true));
    assert!(!kept(&at_the_end, &[Exemption::Temporary]), "{at_the_end}");
}

#[test]
fn a_pending_answer_may_be_unknown_for_a_while_but_not_at_the_end() {
    let pending = ObservedAnswer { pending: true, ..done(1, 10) };
    let for_a_while = vec![
        pending.clone(),
        heard(FinalAnswer::OutcomeUnknown, 30),
        ObservedAnswer { during_verification: true, ..done(1, 99) },
    ];
    assert!(kept(&judged(vec![ran(1, 3)], for_a_while), &[]));
    let replayed_meanwhile =
        vec![pending.clone(), ObservedAnswer { replayed: true, ..done(1, 20) }, heard(FinalAnswer::OutcomeUnknown, 30)];
    assert!(kept(&judged(vec![ran(1, 3)], replayed_meanwhile), &[]));
    let for_good =
        vec![pending, ObservedAnswer { during_verification: true, ..heard(FinalAnswer::OutcomeUnknown, 99) }];
    assert_eq!(judged(vec![ran(1, 3)], for_good).lost.len(), 1);
}

#[test]
fn whatever_is_allowed_some_things_are_not() {
    let everything = [Exemption::Loss, Exemption::IfDegraded, Exemption::IfAnnounced];
    let complaints = |change: &dyn Fn(&mut RunObservations)| {
        let mut seen = RunObservations { executions_on_disk: 1, ..RunObservations::default() };
        seen.answers.operations = vec![ChaosOperation { key: "k".into(), path: "/".into() }];
        seen.executions = [("k".to_owned(), vec![ran(1, 3)])].into();
        seen.answers.answers = [("k".to_owned(), vec![done(1, 5)])].into();
        change(&mut seen);
        evaluate_run(&plan(), seen).failures(&everything).join("; ")
    };
    assert_eq!(complaints(&|_| ()), "");
    assert!(complaints(&|seen| seen.executions_on_disk = 0).contains("in the log"));
    assert!(complaints(&|seen| seen.crashed = Some(1)).contains("gateway 1 ended"));
    assert!(complaints(&|seen| seen.busy_gateway = Some("restless".into())).contains("restless"));
    assert!(complaints(&|seen| seen.answers.unexpected_count = 1).contains("no client should get"));
    assert!(complaints(&|seen| seen.answers.abandoned = vec!["k".into()]).contains("no final answer"));
    assert!(complaints(&|seen| seen.answers.answers.clear()).contains("shows nothing"));
    assert!(complaints(&|seen| drop(seen.executions.insert("x".into(), vec![]))).contains("no client sent"));
    assert!(complaints(&|seen| seen.unsettled = vec!["k".into()]).contains("unsettled"));
}

/// The evaluation looks only at final answers; the checker also at requests that were told to come back.
#[test]
fn what_only_the_checker_rejects_is_a_finding() {
    let mut seen = RunObservations { executions_on_disk: 1, ..RunObservations::default() };
    seen.answers.operations = vec![ChaosOperation { key: "k".into(), path: "/".into() }];
    seen.executions = [("k".to_owned(), vec![ran(1, 3)])].into();
    seen.answers.answers = [("k".to_owned(), vec![done(1, 5)])].into();
    seen.history = history_of(&seen);
    let (request, caller) = (99, "chaos".to_owned());
    seen.history.push(HistoryEvent::Invoke { at: 9_000, request, caller, key: "k".into(), at_rest: false });
    seen.history.push(HistoryEvent::Return { at: 9_500, request, result: RequestResult::InProgress });
    let outcome = evaluate_run(&plan(), seen);
    assert_eq!((outcome.unexplained.len(), outcome.finding_count()), (1, 1), "{outcome}");
    assert!(!kept(&outcome, &[]) && outcome.unexplained[0].description.contains("had the answer before"), "{outcome}");
}

#[test]
fn the_checker_must_reject_what_the_evaluation_finds() {
    let mut seen = RunObservations { executions_on_disk: 2, ..RunObservations::default() };
    seen.answers.operations = vec![ChaosOperation { key: "k".into(), path: "/".into() }];
    seen.executions = [("k".to_owned(), vec![ran(1, 3), ran(2, 4)])].into();
    seen.answers.answers = [("k".to_owned(), vec![done(1, 5)])].into();
    let outcome = evaluate_run(&plan(), seen);
    assert!(outcome.violations.iter().any(|what| what.contains("accepts k")), "{outcome}");
}
