//! Histories that must be accepted, and wrong ones that must be rejected.

use ibid_histories::{
    checker::{HistoryVerdict, check_history},
    event::{HistoryEvent, RequestResult, read_history, write_history},
};

fn sent(request: u64, at: u64) -> HistoryEvent {
    HistoryEvent::Invoke { at, request, caller: "shop".into(), key: "k".into(), at_rest: false }
}

fn sent_at_rest(request: u64, at: u64) -> HistoryEvent {
    HistoryEvent::Invoke { at, request, caller: "shop".into(), key: "k".into(), at_rest: true }
}

fn ended(request: u64, at: u64, result: RequestResult) -> HistoryEvent {
    HistoryEvent::Return { at, request, result }
}

fn ran(at: u64, answer: &str) -> HistoryEvent {
    HistoryEvent::Execute { at, caller: "shop".into(), key: "k".into(), answer: answer.into() }
}

fn answer(answer: &str) -> RequestResult {
    RequestResult::Answer { answer: answer.into(), pending: false }
}

fn pending(answer: &str) -> RequestResult {
    RequestResult::Answer { answer: answer.into(), pending: true }
}

fn verdict(events: &[HistoryEvent]) -> HistoryVerdict {
    check_history(events).expect("the lines fit together")
}

#[track_caller]
fn accepted(events: &[HistoryEvent]) {
    let verdict = verdict(events);
    assert!(verdict.rejected.is_empty(), "{verdict:?}");
}

#[track_caller]
fn rejected(events: &[HistoryEvent], because: &str) {
    let verdict = verdict(events);
    assert_eq!(verdict.rejected.len(), 1, "{verdict:?}");
    assert!(verdict.rejected[0].reason.contains(because), "{verdict:?}");
}

#[test]
fn one_run_and_its_answer_for_all() {
    accepted(&[sent(1, 0), ran(5, "a"), ended(1, 10, answer("a")), sent(2, 20), ended(2, 30, answer("a"))]);
}

#[test]
fn two_runs_are_rejected() {
    rejected(
        &[
            sent(1, 0),
            ran(5, "a"),
            ended(1, 10, RequestResult::Lost),
            sent(2, 20),
            ran(25, "b"),
            ended(2, 30, answer("b")),
        ],
        "ran before",
    );
}

#[test]
fn two_answers_are_rejected() {
    let events = [sent(1, 0), ran(5, "a"), ended(1, 10, answer("a")), sent(2, 20), ended(2, 30, answer("b"))];
    rejected(&events, "no run gave this answer");
}

#[test]
fn an_answer_before_its_run_is_rejected() {
    rejected(&[sent(1, 0), ended(1, 10, answer("a")), ran(15, "a")], "no run gave this answer");
}

#[test]
fn an_answer_of_another_key_is_rejected() {
    let other = HistoryEvent::Execute { at: 5, caller: "shop".into(), key: "other".into(), answer: "a".into() };
    rejected(&[sent(1, 0), other, ended(1, 10, answer("a"))], "no run gave this answer");
}

#[test]
fn another_callers_answer_is_rejected() {
    let other = HistoryEvent::Execute { at: 5, caller: "bank".into(), key: "k".into(), answer: "a".into() };
    rejected(&[sent(1, 0), other, ended(1, 10, answer("a"))], "no run gave this answer");
}

#[test]
fn an_answer_that_is_forgotten_is_rejected() {
    let first = [sent(1, 0), ran(5, "a"), ended(1, 10, answer("a")), sent(2, 20)];
    for forgotten in [RequestResult::OutcomeUnknown, RequestResult::InProgress] {
        rejected(&[&first[..], &[ended(2, 30, forgotten)]].concat(), "a client had the answer before");
    }
}

#[test]
fn concurrent_requests_may_be_refused_in_either_order() {
    let overlapping = [sent(1, 0), sent(2, 1), ran(5, "a"), ended(1, 10, answer("a"))];
    for result in [RequestResult::InProgress, RequestResult::Lost, answer("a")] {
        accepted(&[&overlapping[..], &[ended(2, 30, result)]].concat());
    }
    // It is unknown as long as nobody has the answer, and the run makes it so.
    accepted(&[&overlapping[..], &[ended(2, 30, RequestResult::OutcomeUnknown)]].concat());
}

#[test]
fn an_unknown_outcome_needs_a_cause() {
    rejected(&[sent(1, 0), ended(1, 10, RequestResult::OutcomeUnknown)], "could make the outcome unknown");
    let lost = [sent(1, 0), ended(1, 10, RequestResult::Lost)];
    accepted(&[&lost[..], &[sent(2, 20), ended(2, 30, RequestResult::OutcomeUnknown)]].concat());
    // A request that was sent and of which nothing was heard any more.
    accepted(&[sent(1, 0), sent(2, 20), ended(2, 30, RequestResult::OutcomeUnknown)]);
    // One whose gateway was paused for longer than its lease, and then answered.
    let paused = [sent(1, 0), sent(2, 20), ended(2, 30, RequestResult::OutcomeUnknown), ran(35, "a")];
    accepted(&[&paused[..], &[ended(1, 40, answer("a"))]].concat());
    // One that was sent later, or ended before, is no cause.
    let before = [sent(1, 0), ended(1, 10, RequestResult::InProgress), sent(2, 20)];
    rejected(&[&before[..], &[ended(2, 30, RequestResult::OutcomeUnknown)]].concat(), "could make the outcome unknown");
    let later = [sent(2, 20), ended(2, 30, RequestResult::OutcomeUnknown), sent(1, 40)];
    rejected(&later, "could make the outcome unknown");
}

#[test]
fn a_pending_answer_may_be_unknown_elsewhere_until_all_is_at_rest() {
    let first = [sent(1, 0), ran(5, "a"), ended(1, 10, pending("a"))];
    accepted(&[&first[..], &[sent(2, 20), ended(2, 30, RequestResult::OutcomeUnknown)]].concat());
    let late = [sent_at_rest(2, 20), ended(2, 30, RequestResult::OutcomeUnknown)];
    rejected(&[&first[..], &late[..]].concat(), "a client had the answer before");
}

#[test]
fn a_late_answer_after_an_unknown_outcome_is_fine() {
    let unknown = [sent(1, 0), ran(5, "a"), sent(2, 20), ended(2, 30, RequestResult::OutcomeUnknown)];
    accepted(&[&unknown[..], &[sent(3, 40), ended(3, 50, answer("a"))]].concat());
}

/// The order of real time must be tried in more than one way: the second request got its answer while the third was
/// refused, and only the order third, second explains both.
#[test]
fn overlapping_requests_are_ordered_so_that_they_fit() {
    accepted(&[
        sent(1, 0),
        ran(5, "a"),
        sent(2, 6),
        sent(3, 7),
        ended(2, 40, answer("a")),
        ended(3, 50, RequestResult::InProgress),
        sent(4, 60),
        ended(4, 70, answer("a")),
    ]);
}

#[test]
fn a_thousand_requests_of_one_key_are_decided_quickly() {
    let mut events: Vec<_> = (0..1000).map(|nth| sent(nth, nth)).collect();
    events.push(ran(1500, "a"));
    events.extend(
        (0..1000).map(|nth| ended(nth, 2000 + nth, if nth % 3 == 0 { RequestResult::InProgress } else { answer("a") })),
    );
    accepted(&events);
    events.push(ran(5000, "b"));
    rejected(&events, "ran before");
}

#[test]
fn lines_that_contradict_each_other_are_an_error() {
    for (events, why) in [
        (vec![sent(1, 0), sent(1, 1)], "sent twice"),
        (vec![ended(1, 0, RequestResult::Lost)], "never sent"),
        (vec![sent(1, 5), ended(1, 0, RequestResult::Lost)], "before it is sent"),
        (vec![sent(1, 0), ended(1, 1, RequestResult::Lost), ended(1, 2, RequestResult::Lost)], "returns twice"),
    ] {
        assert!(check_history(&events).unwrap_err().contains(why), "{events:?}");
    }
}

#[test]
fn a_history_is_read_as_it_was_written() {
    let events = vec![sent_at_rest(1, 0), ran(5, "a"), ended(1, 10, pending("a")), sent(2, 11)];
    let mut file = Vec::new();
    write_history(&events, &mut file).unwrap();
    let text = String::from_utf8(file).unwrap();
    let expected = r#"{"event":"invoke","at":0,"request":1,"caller":"shop","key":"k","at_rest":true}
{"event":"execute","at":5,"caller":"shop","key":"k","answer":"a"}
{"event":"return","at":10,"request":1,"result":"answer","answer":"a","pending":true}
{"event":"invoke","at":11,"request":2,"caller":"shop","key":"k"}
"#;
    assert_eq!(text, expected);
    assert_eq!(read_history(text.as_bytes()).unwrap(), events);
    assert!(read_history(&b"\n{\"event\":\"invoke\"}\n"[..]).unwrap_err().starts_with("line 2: "));
}
