//! The network between one gateway and a server: TCP connections that are slow, stall, and are cut at any byte.
//!
//! TCP neither loses, repeats nor reorders bytes within a connection. So what can happen to a message is: it arrives late,
//! in pieces, in part, or not at all; and its sender learns that late, or never.

use std::{
    future::pending,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

use ibid_stores::simulation::SimulatedConnecting;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadHalf, WriteHalf, duplex, split},
    sync::Notify,
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use crate::random::SeededRandom;

/// What the system buffers of a connection in each direction.
const SOCKET_BUFFER: usize = 16 << 10;
/// The longest that a piece takes.
const MAX_DELAY_MS: u64 = 8;

/// What happens to the connections of one gateway.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkCondition {
    /// No connection can be opened.
    pub is_cut: bool,
    /// Nothing arrives at the server, until this ends.
    pub calls_stall: bool,
    /// Nothing arrives from the server, until this ends.
    pub answers_stall: bool,
    /// So many of a thousand pieces are the last of their connection.
    pub resets: u64,
    /// Pieces are a few bytes long.
    pub in_pieces: bool,
}

/// What is wrong with a server.
#[derive(Debug, Clone, Copy, Default)]
pub struct ServerCondition {
    /// It accepts no connection.
    pub is_down: bool,
    /// It has no memory left.
    pub is_full: bool,
    /// It thinks that it is a replica.
    pub is_read_only: bool,
}

/// What is at the other end.
pub trait SimulatedServer: std::fmt::Debug + Send + Sync {
    /// Whether it accepts connections now.
    fn is_up(&self) -> bool;

    /// Serves a connection until it ends.
    fn serve(
        self: Arc<Self>, stream: DuplexStream, connection: CancellationToken,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TransferDirection {
    Calls,
    Answers,
}

/// The way of one gateway to the server.
#[derive(Debug)]
pub struct TcpLink {
    server: Arc<dyn SimulatedServer>,
    random: Arc<SeededRandom>,
    condition: Mutex<LinkCondition>,
    /// Tells that the condition has changed. A `watch` channel would wake its receivers in any order.
    changed: Notify,
    connections: Mutex<Vec<CancellationToken>>,
    /// The gateway has crashed: it sends nothing more, and hears nothing.
    death: CancellationToken,
    /// The gateway crashes when so many more pieces were sent or received.
    pieces_left: AtomicU64,
    has_server_panicked: AtomicBool,
}

impl TcpLink {
    /// Creates a link that works.
    pub fn new(server: Arc<dyn SimulatedServer>, random: &Arc<SeededRandom>) -> Self {
        Self {
            server,
            random: Arc::clone(random),
            condition: Mutex::default(),
            changed: Notify::new(),
            connections: Mutex::default(),
            death: CancellationToken::new(),
            pieces_left: AtomicU64::new(u64::MAX),
            has_server_panicked: AtomicBool::new(false),
        }
    }

    /// Sets what happens from now on. A link that is cut loses its connections.
    pub fn set_condition(&self, condition: LinkCondition) {
        *self.condition.lock() = condition;
        self.changed.notify_waiters();
        if condition.is_cut {
            self.close_connections();
        }
    }

    /// The gateway crashes.
    pub fn kill(&self) {
        self.death.cancel();
        self.close_connections();
    }

    /// The gateway crashes as soon as so many pieces more were sent or received; with `u64::MAX` it does not.
    pub fn kill_after(&self, pieces: u64) {
        self.pieces_left.store(pieces, SeqCst);
    }

    /// Whether the gateway has crashed.
    pub fn is_dead(&self) -> bool {
        self.death.is_cancelled()
    }

    /// Whether the server got something that it does not know.
    pub fn has_server_panicked(&self) -> bool {
        self.has_server_panicked.load(SeqCst)
    }

    /// Opens a connection.
    pub fn connect(self: &Arc<Self>) -> SimulatedConnecting {
        let link = Arc::clone(self);
        Box::pin(async move {
            if link.is_dead() {
                pending::<()>().await;
            }
            link.until_it_flows(TransferDirection::Calls).await;
            sleep(link.random.millis(MAX_DELAY_MS)).await;
            if link.condition.lock().is_cut || !link.server.is_up() {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let connection = CancellationToken::new();
            link.connections.lock().push(connection.clone());
            let (client, client_end) = duplex(SOCKET_BUFFER);
            let (server, server_end) = duplex(SOCKET_BUFFER);
            let ((from_client, to_client), (from_server, to_server)) = (split(client_end), split(server_end));
            let served = tokio::spawn(Arc::clone(&link.server).serve(server, connection.clone()));
            let observer = Arc::clone(&link);
            tokio::spawn(async move {
                let has_panicked = served.await.is_err_and(|error| error.is_panic());
                observer.has_server_panicked.fetch_or(has_panicked, SeqCst);
            });
            let calls =
                Arc::clone(&link).transfer(TransferDirection::Calls, from_client, to_server, connection.clone());
            tokio::spawn(calls);
            tokio::spawn(link.transfer(TransferDirection::Answers, from_server, to_client, connection));
            Ok(client)
        })
    }

    /// Carries bytes in one direction until the connection ends.
    async fn transfer(
        self: Arc<Self>, direction: TransferDirection, mut from: ReadHalf<DuplexStream>,
        mut to: WriteHalf<DuplexStream>, connection: CancellationToken,
    ) {
        let mut buffer = vec![0; SOCKET_BUFFER];
        loop {
            let is_small = self.condition.lock().in_pieces;
            let most = 1 + self.random.below(if is_small { 20 } else { SOCKET_BUFFER as u64 - 1 }) as usize;
            let read = tokio::select! {
                biased;
                () = connection.cancelled() => break,
                read = from.read(&mut buffer[..most]) => read,
            };
            let Ok(count @ 1..) = read else { break };
            let delay = self.random.millis(MAX_DELAY_MS);
            let is_carried = tokio::select! {
                biased;
                () = connection.cancelled() => false,
                () = async {
                    sleep(delay).await;
                    self.until_it_flows(direction).await;
                } => true,
            };
            let is_last = !is_carried || self.is_piece_the_last();
            // Of the last piece a part arrives.
            let count = if is_last { self.random.below(count as u64 + 1) as usize } else { count };
            if self.is_dead() && direction == TransferDirection::Answers {
                break;
            }
            if to.write_all(&buffer[..count]).await.is_err() || is_last {
                break;
            }
        }
        connection.cancel();
        // The other end may have gone before.
        let _ = to.shutdown().await;
    }

    fn is_piece_the_last(&self) -> bool {
        let left = self.pieces_left.load(SeqCst);
        if left == 0 {
            self.kill();
        } else if left != u64::MAX {
            self.pieces_left.store(left - 1, SeqCst);
        }
        self.random.happens(self.condition.lock().resets)
    }

    async fn until_it_flows(&self, direction: TransferDirection) {
        loop {
            let changed = self.changed.notified();
            let condition = *self.condition.lock();
            let stalls = match direction {
                TransferDirection::Calls => condition.calls_stall,
                TransferDirection::Answers => condition.answers_stall,
            };
            if !stalls {
                return;
            }
            changed.await;
        }
    }

    fn close_connections(&self) {
        self.connections.lock().drain(..).for_each(|connection| connection.cancel());
    }
}
