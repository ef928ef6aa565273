//! What a link's connections share: the rules, the answers still to be lost, the counts.
//!
//! Written by the link's thread alone; read by everybody.

use std::{collections::VecDeque, io, net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::watch;

/// How many closed connections are remembered one by one.
const REMEMBERED: usize = 4096;

/// A direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    ToServer = 0,
    ToClient = 1,
}

/// What holds at present for every connection.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    /// Whether anything passes, by [`Way`].
    pub(super) open: [bool; 2],
    pub(super) delay: Duration,
    pub(super) slice: Option<usize>,
    /// How often everything was reset, and healed.
    pub(super) resets: u64,
    pub(super) heals: u64,
}

impl Default for Rules {
    fn default() -> Self {
        Rules { open: [true, true], delay: Duration::ZERO, slice: None, resets: 0, heals: 0 }
    }
}

/// What takes a lost answer's place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Lost {
    #[default]
    InSilence,
    WithReset,
}

/// What went through a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// How many connections were ever accepted.
    pub connections: usize,
    /// How many are open now.
    pub open: usize,
    /// How many were open at once, at most.
    pub most_open: usize,
    /// Bytes delivered to the server.
    pub bytes_to_server: u64,
    /// Bytes delivered to the client.
    pub bytes_to_client: u64,
    /// How often an answer followed a request: changes of direction from "to the server" to "to the client", added up over
    /// all connections. Requests sent together, before the first of their answers, are one round trip.
    pub round_trips: u64,
}

/// What went through one connection; see [`Counts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "as in `Counts`")]
pub struct Traffic {
    pub open: bool,
    pub bytes_to_server: u64,
    pub bytes_to_client: u64,
    pub round_trips: u64,
}

#[derive(Debug)]
pub(super) struct Wire {
    pub(super) server: Mutex<SocketAddr>,
    pub(super) rules: watch::Sender<Rules>,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    counts: Counts,
    connections: VecDeque<Arc<Mutex<Connection>>>,
    to_lose: usize,
    how: Lost,
    /// Grows with every order to lose answers: only requests delivered after the order have theirs lost.
    order: u64,
}

#[derive(Debug, Default)]
struct Connection {
    traffic: Traffic,
    /// Whether the last bytes went to the server, and under which order.
    asked: Option<u64>,
    /// `Rules::resets` when it was opened.
    born: u64,
    /// `Rules::heals` when its first answer was swallowed.
    silent_since: Option<u64>,
}

impl Connection {
    fn is_reset_by(&self, rules: &Rules) -> bool {
        self.born != rules.resets || self.silent_since.is_some_and(|since| since != rules.heals)
    }
}

/// What is to be done with bytes on their way to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Deliver,
    Swallow,
    Reset,
}

impl Wire {
    pub(super) fn new(server: SocketAddr) -> Wire {
        Wire { server: Mutex::new(server), rules: watch::Sender::default(), book: Mutex::default() }
    }

    pub(super) fn lose_answers(&self, n: usize, how: Lost) {
        let mut book = self.book.lock();
        (book.to_lose, book.how) = (n, how);
        book.order += 1;
    }

    pub(super) fn answers_to_lose(&self) -> usize {
        self.book.lock().to_lose
    }

    pub(super) fn counts(&self) -> Counts {
        self.book.lock().counts
    }

    pub(super) fn traffic(&self) -> Vec<Traffic> {
        self.book.lock().connections.iter().map(|connection| connection.lock().traffic).collect()
    }

    /// Whether a connection is open that the present rules reset.
    pub(super) fn has_to_reset(&self) -> bool {
        let (book, rules) = (self.book.lock(), self.rules.borrow());
        let mut connections = book.connections.iter().map(|connection| connection.lock());
        connections.any(|connection| connection.traffic.open && connection.is_reset_by(&rules))
    }

    pub(super) fn opened(self: &Arc<Self>) -> Open {
        let born = self.rules.borrow().resets;
        let traffic = Traffic { open: true, ..Traffic::default() };
        let connection = Arc::new(Mutex::new(Connection { traffic, born, ..Connection::default() }));
        let mut book = self.book.lock();
        book.counts.connections += 1;
        book.counts.open += 1;
        book.counts.most_open = book.counts.most_open.max(book.counts.open);
        if book.connections.len() >= REMEMBERED + book.counts.open {
            book.connections.retain({
                let mut excess = REMEMBERED / 2;
                move |connection| {
                    let forget = excess > 0 && !connection.lock().traffic.open;
                    excess -= usize::from(forget);
                    !forget
                }
            });
        }
        book.connections.push_back(Arc::clone(&connection));
        Open { wire: Arc::clone(self), connection }
    }
}

/// An open connection; it counts as open until this is dropped.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) wire: Arc<Wire>,
    connection: Arc<Mutex<Connection>>,
}

impl Open {
    pub(super) fn is_reset_by(&self, rules: &Rules) -> bool {
        self.connection.lock().is_reset_by(rules)
    }

    /// Bytes are about to go to the client.
    pub(super) fn answering(&self) -> Fate {
        let mut book = self.wire.book.lock();
        let mut connection = self.connection.lock();
        let answers = connection.asked.take();
        if answers.is_some() {
            connection.traffic.round_trips += 1;
            book.counts.round_trips += 1;
        }
        if book.to_lose > 0 && answers == Some(book.order) {
            book.to_lose -= 1;
            if book.how == Lost::WithReset {
                return Fate::Reset;
            }
            let heals = self.wire.rules.borrow().heals;
            connection.silent_since.get_or_insert(heals);
        }
        if connection.silent_since.is_some() { Fate::Swallow } else { Fate::Deliver }
    }

    /// Sends, and counts what was sent before anybody can look: who has received it finds it counted.
    pub(super) fn deliver(&self, way: Way, send: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
        let mut book = self.wire.book.lock();
        let mut connection = self.connection.lock();
        let sent = send()?;
        let bytes = sent as u64;
        match way {
            Way::ToServer => {
                book.counts.bytes_to_server += bytes;
                connection.traffic.bytes_to_server += bytes;
                connection.asked = Some(book.order);
            }
            Way::ToClient => {
                book.counts.bytes_to_client += bytes;
                connection.traffic.bytes_to_client += bytes;
            }
        }
        Ok(sent)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.wire.book.lock().counts.open -= 1;
        self.connection.lock().traffic.open = false;
    }
}
