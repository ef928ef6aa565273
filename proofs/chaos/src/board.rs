//! What the clients were told: every final answer, by key.

use std::{
    collections::{HashMap, VecDeque},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    time::{Duration, Instant},
};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::dice::Dice;

/// How many keys are fresh enough for another client to join in.
const FRESH: usize = 32;
/// How many answers to one key are kept that say nothing new.
const STORY: usize = 16;
/// How many surprising answers are kept.
const SURPRISES: usize = 20;

/// A final answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// An answer of the upstream, first or replayed.
    Done {
        /// Its status.
        status: u16,
        /// Its body.
        body: Bytes,
    },
    /// `outcome-unknown`.
    Unknown,
}

/// One final answer, and who heard it when.
#[derive(Clone, Debug)]
pub struct Heard {
    /// What it was.
    pub told: Told,
    /// Through which gateway.
    pub gateway: usize,
    /// When the request was sent that got it.
    pub begun: Duration,
    /// When it was there.
    pub at: Duration,
    /// `Idempotent-Replayed`.
    pub replayed: bool,
    /// `Idempotency-Stored: pending`: it waits in that gateway's journal.
    pub pending: bool,
    /// `Idempotency-Guarantee: degraded`.
    pub degraded: bool,
    /// Whether it was heard at the end, when everything was whole again.
    pub verifying: bool,
}

/// One operation: its key, and the path that says how long it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Its key.
    pub key: String,
    /// Its path.
    pub path: String,
}

/// What all clients share.
#[derive(Debug)]
pub struct Board {
    began: Instant,
    book: Mutex<Book>,
    max_keys: usize,
    /// Requests sent, and those of them that were retries.
    pub requests: AtomicUsize,
    /// See `requests`.
    pub retries: AtomicUsize,
}

#[derive(Debug, Default)]
struct Book {
    operations: Vec<Operation>,
    fresh: VecDeque<usize>,
    heard: HashMap<String, Vec<Heard>>,
    surprises: Vec<String>,
    surprised: usize,
    gave_up: Vec<String>,
    replays: usize,
}

/// All that was heard.
#[derive(Debug, Default)]
pub struct Stories {
    /// In the order in which they were begun.
    pub operations: Vec<Operation>,
    /// By key, in the order of hearing.
    pub heard: HashMap<String, Vec<Heard>>,
    /// Answers that no client should get: a few of them, and how many there were.
    pub surprises: Vec<String>,
    /// See `surprises`.
    pub surprised: usize,
    /// Keys that had no final answer when the client's patience ended, with the last thing it saw.
    pub gave_up: Vec<String>,
    /// How many answers were replays.
    pub replays: usize,
}

impl Board {
    /// An empty one. Times are counted from `began`; there will be no more than `max_keys` keys.
    pub fn new(began: Instant, max_keys: usize) -> Board {
        let (requests, retries) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Board { began, book: Mutex::default(), max_keys: max_keys.max(1), requests, retries }
    }

    /// The time of the run.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// What a client does next: mostly a new operation, often one that somebody else is at, sometimes an old one.
    pub fn next(&self, dice: &mut Dice, slowest: Duration) -> Operation {
        let mut book = self.book.lock();
        let known = book.operations.len();
        let chance = dice.below(16);
        if chance < 5 && !book.fresh.is_empty() {
            let nth = book.fresh[dice.below(book.fresh.len())];
            return book.operations[nth].clone();
        }
        if known >= self.max_keys || (chance < 7 && known > 0) {
            return book.operations[dice.below(known)].clone();
        }
        let path = format!("/{}", dice.below(slowest.as_millis() as usize + 1));
        let operation = Operation { key: format!("op-{known}-{:08x}", dice.roll() as u32), path };
        book.operations.push(operation.clone());
        book.fresh.push_back(known);
        if book.fresh.len() > FRESH {
            book.fresh.pop_front();
        }
        operation
    }

    /// A final answer. Of a key that is often asked for, the same answer again is only counted.
    pub fn hear(&self, key: &str, heard: Heard) {
        let mut book = self.book.lock();
        book.replays += usize::from(heard.replayed);
        let story = book.heard.entry(key.to_owned()).or_default();
        let done = |heard: &Heard| matches!(heard.told, Told::Done { .. });
        let flags = |heard: &Heard| (heard.pending, heard.degraded);
        // That an outcome is unknown is news as long as there was an answer before.
        let news = heard.verifying
            || story.len() < STORY
            || (!done(&heard) && story.iter().any(done))
            || story.last().is_none_or(|last| last.told != heard.told || flags(last) != flags(&heard));
        if news {
            story.push(heard);
        }
    }

    /// What was heard of a key so far.
    pub fn heard(&self, key: &str) -> Vec<Heard> {
        self.book.lock().heard.get(key).cloned().unwrap_or_default()
    }

    /// An answer that no client should get.
    pub fn surprise(&self, what: String) {
        let mut book = self.book.lock();
        book.surprised += 1;
        if book.surprises.len() < SURPRISES {
            book.surprises.push(what);
        }
    }

    /// No final answer.
    pub fn give_up(&self, what: String) {
        self.book.lock().gave_up.push(what);
    }

    /// Every operation so far.
    pub fn operations(&self) -> Vec<Operation> {
        self.book.lock().operations.clone()
    }

    /// All that was heard.
    pub fn stories(&self) -> Stories {
        let book = self.book.lock();
        Stories {
            operations: book.operations.clone(),
            heard: book.heard.clone(),
            surprises: book.surprises.clone(),
            surprised: book.surprised,
            gave_up: book.gave_up.clone(),
            replays: book.replays,
        }
    }

    pub(crate) fn count(&self, retry: bool) {
        self.requests.fetch_add(1, SeqCst);
        self.retries.fetch_add(usize::from(retry), SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(told: Told) -> Heard {
        let at = Duration::from_secs(1);
        Heard { told, gateway: 0, begun: at, at, replayed: true, pending: false, degraded: false, verifying: false }
    }

    fn done(body: &'static str) -> Told {
        Told::Done { status: 201, body: Bytes::from_static(body.as_bytes()) }
    }

    #[test]
    fn the_same_answer_again_is_only_counted_and_news_is_kept() {
        let board = Board::new(Instant::now(), 1);
        (0..100).for_each(|_| board.hear("k", heard(done("a"))));
        assert_eq!((board.heard("k").len(), board.stories().replays), (STORY, 100));
        board.hear("k", heard(Told::Unknown));
        board.hear("k", heard(Told::Unknown));
        board.hear("k", heard(done("b")));
        board.hear("k", Heard { pending: true, ..heard(done("b")) });
        board.hear("k", Heard { pending: true, verifying: true, ..heard(done("b")) });
        assert_eq!(board.heard("k").len(), STORY + 5);
    }

    #[test]
    fn there_are_no_more_keys_than_allowed() {
        let (board, mut dice) = (Board::new(Instant::now(), 10), Dice::new(1));
        for _ in 0..500 {
            let _ = board.next(&mut dice, Duration::from_millis(5));
        }
        assert_eq!(board.operations().len(), 10);
    }
}
