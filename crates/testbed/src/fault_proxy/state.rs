//! The state that a proxy's connections share: the rules, the answers to lose, the counts.
//!
//! Only the proxy's thread writes it; every thread may read it.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProxyDirection {
    ToServer = 0,
    ToClient = 1,
}

#[derive(Clone, Debug)]
pub(super) struct ProxyRules {
    /// Whether data passes, by [`ProxyDirection`].
    pub(super) open: [bool; 2],
    pub(super) delay: Duration,
    pub(super) slice: Option<usize>,
    /// How often `reset` and `heal` were called.
    pub(super) resets: u64,
    pub(super) heals: u64,
}

impl Default for ProxyRules {
    fn default() -> Self {
        ProxyRules { open: [true, true], delay: Duration::ZERO, slice: None, resets: 0, heals: 0 }
    }
}

/// What happens instead of a lost answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum AnswerLoss {
    #[default]
    Dropped,
    Reset,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProxyCounts {
    pub connections: usize,
    pub open: usize,
    /// Maximum number of connections that were open at once.
    pub most_open: usize,
    pub bytes_to_server: u64,
    pub bytes_to_client: u64,
    /// How often an answer followed a request: changes of direction from "to the server" to "to the client", summed
    /// over all connections. Requests that are sent together, before the first of their answers, are one round trip.
    pub round_trips: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionTraffic {
    pub open: bool,
    pub bytes_to_server: u64,
    pub bytes_to_client: u64,
    pub round_trips: u64,
}

#[derive(Debug)]
pub(super) struct ProxyState {
    pub(super) server: Mutex<SocketAddr>,
    pub(super) rules: watch::Sender<ProxyRules>,
    pub(super) ledger: Mutex<ProxyLedger>,
}

#[derive(Debug, Default)]
pub(super) struct ProxyLedger {
    open: usize,
    most_open: usize,
    pub(super) connections: Vec<Arc<Mutex<ProxiedConnection>>>,
    pub(super) answers_to_lose: usize,
    loss: AnswerLoss,
    /// Incremented by every command to lose answers: only requests that are delivered afterwards lose theirs.
    loss_order: u64,
}

#[derive(Debug, Default)]
pub(super) struct ProxiedConnection {
    pub(super) traffic: ConnectionTraffic,
    /// Set if the last bytes went to the server: the `loss_order` at that time.
    awaiting_answer: Option<u64>,
    /// `ProxyRules::resets` when it was opened.
    resets_when_opened: u64,
    /// `ProxyRules::heals` when its first answer was dropped.
    heals_when_dropped: Option<u64>,
}

impl ProxiedConnection {
    pub(super) fn is_reset_by(&self, rules: &ProxyRules) -> bool {
        self.resets_when_opened != rules.resets || self.heals_when_dropped.is_some_and(|since| since != rules.heals)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeliveryAction {
    Deliver,
    Drop,
    Reset,
}

impl ProxyLedger {
    /// The traffic by connection, the oldest first.
    pub(super) fn traffic(&self) -> Vec<ConnectionTraffic> {
        self.connections.iter().map(|connection| connection.lock().traffic).collect()
    }

    pub(super) fn counts(&self) -> ProxyCounts {
        let counts = ProxyCounts { open: self.open, most_open: self.most_open, ..ProxyCounts::default() };
        self.traffic().iter().fold(counts, |counts, one| ProxyCounts {
            connections: counts.connections + 1,
            bytes_to_server: counts.bytes_to_server + one.bytes_to_server,
            bytes_to_client: counts.bytes_to_client + one.bytes_to_client,
            round_trips: counts.round_trips + one.round_trips,
            ..counts
        })
    }
}

impl ProxyState {
    pub(super) fn new(server: SocketAddr) -> ProxyState {
        ProxyState { server: Mutex::new(server), rules: watch::Sender::default(), ledger: Mutex::default() }
    }

    pub(super) fn lose_answers(&self, n: usize, how: AnswerLoss) {
        let mut book = self.ledger.lock();
        (book.answers_to_lose, book.loss) = (n, how);
        book.loss_order += 1;
    }

    pub(super) fn has_connection_to_reset(&self) -> bool {
        let (book, rules) = (self.ledger.lock(), self.rules.borrow());
        let mut connections = book.connections.iter().map(|connection| connection.lock());
        connections.any(|connection| connection.traffic.open && connection.is_reset_by(&rules))
    }

    pub(super) fn open_connection(self: &Arc<Self>) -> OpenProxyConnection {
        let born = self.rules.borrow().resets;
        let traffic = ConnectionTraffic { open: true, ..ConnectionTraffic::default() };
        let connection = Arc::new(Mutex::new(ProxiedConnection {
            traffic,
            resets_when_opened: born,
            ..ProxiedConnection::default()
        }));
        let mut book = self.ledger.lock();
        book.open += 1;
        book.most_open = book.most_open.max(book.open);
        book.connections.push(Arc::clone(&connection));
        OpenProxyConnection { state: Arc::clone(self), connection }
    }
}

/// An open connection. Dropping it ends the count as open.
#[derive(Debug)]
pub(super) struct OpenProxyConnection {
    pub(super) state: Arc<ProxyState>,
    pub(super) connection: Arc<Mutex<ProxiedConnection>>,
}

impl OpenProxyConnection {
    /// Decides about bytes that are about to go to the client.
    pub(super) fn next_delivery(&self) -> DeliveryAction {
        let mut book = self.state.ledger.lock();
        let mut connection = self.connection.lock();
        let answers = connection.awaiting_answer.take();
        connection.traffic.round_trips += u64::from(answers.is_some());
        if book.answers_to_lose > 0 && answers == Some(book.loss_order) {
            book.answers_to_lose -= 1;
            if book.loss == AnswerLoss::Reset {
                return DeliveryAction::Reset;
            }
            let heals = self.state.rules.borrow().heals;
            connection.heals_when_dropped.get_or_insert(heals);
        }
        if connection.heals_when_dropped.is_some() { DeliveryAction::Drop } else { DeliveryAction::Deliver }
    }

    /// Sends and counts under one lock, so that a receiver finds its bytes counted.
    pub(super) fn deliver(&self, way: ProxyDirection, send: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
        let book = self.state.ledger.lock();
        let mut connection = self.connection.lock();
        let sent = send()?;
        match way {
            ProxyDirection::ToServer => {
                connection.traffic.bytes_to_server += sent as u64;
                connection.awaiting_answer = Some(book.loss_order);
            }
            ProxyDirection::ToClient => connection.traffic.bytes_to_client += sent as u64,
        }
        Ok(sent)
    }
}

impl Drop for OpenProxyConnection {
    fn drop(&mut self) {
        self.state.ledger.lock().open -= 1;
        self.connection.lock().traffic.open = false;
    }
}
