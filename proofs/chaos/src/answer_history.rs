//! What the clients were told: every final answer, by key.

use std::{
    collections::{HashMap, VecDeque},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    time::{Duration, Instant},
};

use bytes::Bytes;
use ibid_histories::event::{HistoryEvent, RequestResult};
use parking_lot::Mutex;

use crate::{random::SplitMix64, upstream::Execution};

/// All clients share one credential.
const CALLER: &str = "chaos";
/// How many keys are fresh enough for another client to join in.
const MAX_RECENT_KEYS: usize = 32;
/// How many answers to one key are kept that say nothing new.
const MAX_REPEATED_ANSWERS: usize = 16;
/// How many surprising answers are kept.
const MAX_UNEXPECTED_ANSWERS: usize = 20;

/// A final answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinalAnswer {
    /// An answer of the upstream, first or replayed.
    Completed {
        /// Its status.
        status: u16,
        /// Its body.
        body: Bytes,
    },
    /// `outcome-unknown`.
    OutcomeUnknown,
}

/// One final answer, and who heard it when.
#[derive(Clone, Debug)]
pub struct ObservedAnswer {
    /// What it was.
    pub told: FinalAnswer,
    /// Through which gateway.
    pub gateway: usize,
    /// When the request was sent that got it.
    pub sent_at: Duration,
    /// When it was there.
    pub at: Duration,
    /// `Idempotent-Replayed`.
    pub replayed: bool,
    /// `Idempotency-Stored: pending`: it waits in that gateway's journal.
    pub pending: bool,
    /// `Idempotency-Guarantee: degraded`.
    pub degraded: bool,
    /// Whether it was heard at the end, when everything was whole again.
    pub during_verification: bool,
}

/// One operation: its key, and the path that says how long it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChaosOperation {
    /// Its key.
    pub key: String,
    /// Its path.
    pub path: String,
}

/// What all clients share.
#[derive(Debug)]
pub struct AnswerHistory {
    started_at: Instant,
    state: Mutex<AnswerHistoryState>,
    /// Everything, for the checker of histories.
    events: Mutex<Vec<HistoryEvent>>,
    max_keys: usize,
    /// Requests sent, and those of them that were retries.
    pub requests: AtomicUsize,
    /// See `requests`.
    pub retries: AtomicUsize,
}

#[derive(Debug, Default)]
struct AnswerHistoryState {
    operations: Vec<ChaosOperation>,
    recent: VecDeque<usize>,
    answers: HashMap<String, Vec<ObservedAnswer>>,
    unexpected: Vec<String>,
    unexpected_count: usize,
    abandoned: Vec<String>,
    replays: usize,
}

/// All that was heard.
#[derive(Debug, Default)]
pub struct AnswerSnapshot {
    /// In the order in which they were begun.
    pub operations: Vec<ChaosOperation>,
    /// By key, in the order of hearing.
    pub answers: HashMap<String, Vec<ObservedAnswer>>,
    /// Answers that no client should get: a few of them, and how many there were.
    pub unexpected: Vec<String>,
    /// See `unexpected`.
    pub unexpected_count: usize,
    /// Keys that had no final answer when the client's patience ended, with the last thing it saw.
    pub abandoned: Vec<String>,
    /// How many answers were replays.
    pub replays: usize,
}

impl AnswerHistory {
    /// An empty one. Times are counted from `began`; there will be no more than `max_keys` keys.
    pub fn new(started_at: Instant, max_keys: usize) -> AnswerHistory {
        let (requests, retries) = (AtomicUsize::new(0), AtomicUsize::new(0));
        AnswerHistory {
            started_at,
            state: Mutex::default(),
            events: Mutex::default(),
            max_keys: max_keys.max(1),
            requests,
            retries,
        }
    }

    /// The time of the run.
    pub fn now(&self) -> Duration {
        self.started_at.elapsed()
    }

    /// What a client does next: mostly a new operation, often one that somebody else is at, sometimes an old one.
    pub fn next(&self, dice: &mut SplitMix64, slowest: Duration) -> ChaosOperation {
        let mut book = self.state.lock();
        let known = book.operations.len();
        let chance = dice.next_below(16);
        if chance < 5 && !book.recent.is_empty() {
            let nth = book.recent[dice.next_below(book.recent.len())];
            return book.operations[nth].clone();
        }
        if known >= self.max_keys || (chance < 7 && known > 0) {
            return book.operations[dice.next_below(known)].clone();
        }
        let path = format!("/{}", dice.next_below(slowest.as_millis() as usize + 1));
        let operation = ChaosOperation { key: format!("op-{known}-{:08x}", dice.next_u64() as u32), path };
        book.operations.push(operation.clone());
        book.recent.push_back(known);
        if book.recent.len() > MAX_RECENT_KEYS {
            book.recent.pop_front();
        }
        operation
    }

    /// A final answer. Of a key that is often asked for, the same answer again is only counted.
    pub fn record_answer(&self, key: &str, heard: ObservedAnswer) {
        let mut book = self.state.lock();
        book.replays += usize::from(heard.replayed);
        let story = book.answers.entry(key.to_owned()).or_default();
        let done = |heard: &ObservedAnswer| matches!(heard.told, FinalAnswer::Completed { .. });
        let flags = |heard: &ObservedAnswer| (heard.pending, heard.degraded);
        // That an outcome is unknown is news as long as there was an answer before.
        let news = heard.during_verification
            || story.len() < MAX_REPEATED_ANSWERS
            || (!done(&heard) && story.iter().any(done))
            || story.last().is_none_or(|last| last.told != heard.told || flags(last) != flags(&heard));
        if news {
            story.push(heard);
        }
    }

    /// What was heard of a key so far.
    pub fn answers_for(&self, key: &str) -> Vec<ObservedAnswer> {
        self.state.lock().answers.get(key).cloned().unwrap_or_default()
    }

    /// An answer that no client should get.
    pub fn record_unexpected(&self, what: String) {
        let mut book = self.state.lock();
        book.unexpected_count += 1;
        if book.unexpected.len() < MAX_UNEXPECTED_ANSWERS {
            book.unexpected.push(what);
        }
    }

    /// No final answer.
    pub fn record_abandoned(&self, what: String) {
        self.state.lock().abandoned.push(what);
    }

    /// Every operation so far.
    pub fn operations(&self) -> Vec<ChaosOperation> {
        self.state.lock().operations.clone()
    }

    /// All that was heard.
    pub fn snapshot(&self) -> AnswerSnapshot {
        let book = self.state.lock();
        AnswerSnapshot {
            operations: book.operations.clone(),
            answers: book.answers.clone(),
            unexpected: book.unexpected.clone(),
            unexpected_count: book.unexpected_count,
            abandoned: book.abandoned.clone(),
            replays: book.replays,
        }
    }

    /// A request is about to be sent. Returns its number.
    pub(crate) fn record_invoke(&self, key: &str, retry: bool, at_rest: bool) -> u64 {
        self.retries.fetch_add(usize::from(retry), SeqCst);
        let request = self.requests.fetch_add(1, SeqCst) as u64;
        let (caller, key) = (CALLER.to_owned(), key.to_owned());
        let mut events = self.events.lock();
        events.push(HistoryEvent::Invoke { at: as_micros(self.now()), request, caller, key, at_rest });
        request
    }

    /// A request has ended.
    pub(crate) fn record_return(&self, request: u64, result: RequestResult) {
        let mut events = self.events.lock();
        events.push(HistoryEvent::Return { at: as_micros(self.now()), request, result });
    }

    /// What clients and upstream saw, in the order of time.
    pub fn events(&self, executions: &HashMap<String, Vec<Execution>>) -> Vec<HistoryEvent> {
        let mut events = self.events.lock().clone();
        for (key, executions) in executions {
            events.extend(executions.iter().map(|one| HistoryEvent::Execute {
                at: as_micros(one.at),
                caller: CALLER.to_owned(),
                key: key.clone(),
                answer: String::from_utf8_lossy(&one.answer).into_owned(),
            }));
        }
        events.sort_by_key(HistoryEvent::at);
        events
    }
}

fn as_micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(told: FinalAnswer) -> ObservedAnswer {
        let at = Duration::from_secs(1);
        ObservedAnswer {
            told,
            gateway: 0,
            sent_at: at,
            at,
            replayed: true,
            pending: false,
            degraded: false,
            during_verification: false,
        }
    }

    fn done(body: &'static str) -> FinalAnswer {
        FinalAnswer::Completed { status: 201, body: Bytes::from_static(body.as_bytes()) }
    }

    #[test]
    fn the_same_answer_again_is_only_counted_and_news_is_kept() {
        let board = AnswerHistory::new(Instant::now(), 1);
        (0..100).for_each(|_| board.record_answer("k", heard(done("a"))));
        assert_eq!((board.answers_for("k").len(), board.snapshot().replays), (MAX_REPEATED_ANSWERS, 100));
        board.record_answer("k", heard(FinalAnswer::OutcomeUnknown));
        board.record_answer("k", heard(FinalAnswer::OutcomeUnknown));
        board.record_answer("k", heard(done("b")));
        board.record_answer("k", ObservedAnswer { pending: true, ..heard(done("b")) });
        board.record_answer("k", ObservedAnswer { pending: true, during_verification: true, ..heard(done("b")) });
        assert_eq!(board.answers_for("k").len(), MAX_REPEATED_ANSWERS + 5);
    }

    #[test]
    fn there_are_no_more_keys_than_allowed() {
        let (board, mut dice) = (AnswerHistory::new(Instant::now(), 10), SplitMix64::new(1));
        for _ in 0..500 {
            let _ = board.next(&mut dice, Duration::from_millis(5));
        }
        assert_eq!(board.operations().len(), 10);
    }
}
