//! A PostgreSQL server in this process, for the real client of the PostgreSQL store.
//!
//! The client sends bytes, so connecting, pooling, batching, deadlines and the circuit breaker are simulated. What a statement does is what
//! the contract's reference store does; each statement is one transaction. The server panics at a statement that it does not know.

use std::{future::Future, pin::Pin, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio_util::sync::CancellationToken;

use self::{
    statements::{KnownStatement, SqlState, StatementContext},
    wire::{MessageReader, SqlValue, put_columns, put_error, put_message, put_row, take_message},
};
use crate::{
    network::SimulatedStore,
    random::SeededRandom,
    tcp::{ServerCondition, SimulatedServer},
};

mod statements;
pub mod wire;

/// Another transaction has locked the row.
const LOCKED: SqlState = "55P03";
const READ_ONLY: SqlState = "25006";

/// A server in this process.
#[derive(Debug)]
pub struct SimulatedPostgres {
    /// Its rows, and its clock.
    store: Arc<SimulatedStore>,
    random: Arc<SeededRandom>,
    state: Mutex<PostgresServerState>,
}

#[derive(Debug, Default)]
struct PostgresServerState {
    condition: ServerCondition,
    /// So many of a thousand statements find a row locked, and are rolled back.
    conflicts: u64,
    /// Counts processes: a connection of an earlier one runs nothing more.
    process: u64,
    connections: Vec<CancellationToken>,
}

impl SimulatedPostgres {
    /// Starts a server with these contents.
    pub fn new(store: &Arc<SimulatedStore>, random: &Arc<SeededRandom>) -> Self {
        Self { store: Arc::clone(store), random: Arc::clone(random), state: Mutex::default() }
    }

    /// Sets what is wrong with it.
    pub fn set_condition(&self, condition: ServerCondition) {
        self.state.lock().condition = condition;
    }

    /// Sets how many of a thousand statements are rolled back because of another transaction.
    pub fn set_conflicts(&self, per_mille: u64) {
        self.state.lock().conflicts = per_mille;
    }

    /// The server crashes and starts again: it loses its connections, and nothing that was committed.
    pub fn restart(&self) {
        let mut state = self.state.lock();
        state.process += 1;
        state.connections.drain(..).for_each(|connection| connection.cancel());
    }

    /// Runs a statement as one transaction. Returns `None` if the process has ended.
    fn run(
        &self, process: u64, statement: KnownStatement, params: &[SqlValue],
    ) -> Option<Result<Vec<Vec<SqlValue>>, SqlState>> {
        let (condition, conflicts) = {
            let state = self.state.lock();
            if state.process != process {
                return None;
            }
            (state.condition, state.conflicts)
        };
        if statement.writes() && condition.is_read_only {
            return Some(Err(READ_ONLY));
        }
        if statement.writes() && self.random.happens(conflicts) {
            return Some(Err(LOCKED));
        }
        let is_full = condition.is_full || self.store.is_full();
        Some(self.store.transact(|contents, next_fence| {
            let before = contents.clone();
            let rows = statement.run(&mut StatementContext { contents, next_fence, is_full }, params);
            if rows.is_err() {
                *contents = before;
            }
            rows
        }))
    }

    async fn serve_connection(self: Arc<Self>, mut stream: DuplexStream, connection: CancellationToken) {
        let process = {
            let mut state = self.state.lock();
            state.connections.push(connection);
            state.process
        };
        let (mut input, mut output) = (Vec::new(), Vec::new());
        let mut session = PostgresSession {
            server: self,
            process,
            is_started: false,
            is_skipping: false,
            statement: None,
            params: Vec::new(),
        };
        while let Ok(1..) = stream.read_buf(&mut input).await {
            while let Some((kind, message)) = take_message(&mut input, !session.is_started) {
                if session.answer(kind, message, &mut output).is_none() {
                    return;
                }
            }
            if stream.write_all(&output).await.is_err() {
                return;
            }
            output.clear();
        }
    }
}

impl SimulatedServer for SimulatedPostgres {
    fn is_up(&self) -> bool {
        !self.state.lock().condition.is_down
    }

    fn serve(
        self: Arc<Self>, stream: DuplexStream, connection: CancellationToken,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.serve_connection(stream, connection))
    }
}

/// A connection, as the server sees it.
struct PostgresSession {
    server: Arc<SimulatedPostgres>,
    process: u64,
    is_started: bool,
    /// After an error everything is ignored, up to the next sync.
    is_skipping: bool,
    statement: Option<KnownStatement>,
    params: Vec<SqlValue>,
}

impl PostgresSession {
    /// Answers a message. Returns `None` if the connection ends.
    fn answer(&mut self, kind: u8, message: Bytes, output: &mut Vec<u8>) -> Option<()> {
        let mut reader = MessageReader(message);
        match kind {
            0 => {
                self.is_started = true;
                put_message(output, b'R', &[&[0; 4]]);
                put_message(output, b'Z', &[b"I"]);
            }
            b'Q' => {
                let is_empty = reader.text().is_empty();
                put_message(output, if is_empty { b'I' } else { b'C' }, if is_empty { &[] } else { &[b"SET\0"] });
                put_message(output, b'Z', &[b"I"]);
            }
            b'S' => {
                self.is_skipping = false;
                put_message(output, b'Z', &[b"I"]);
            }
            b'X' => return None,
            _ if self.is_skipping => {}
            b'P' => {
                reader.text();
                self.statement = Some(KnownStatement::of(&reader.text()));
                put_message(output, b'1', &[]);
            }
            b'B' => {
                // Of the portal and of the statement: both have no name.
                reader.text();
                reader.text();
                let formats = reader.short();
                reader.take(2 * formats as usize);
                let count = reader.short();
                self.params = (0..count).map(|_| reader.value()).collect();
                put_message(output, b'2', &[]);
            }
            b'D' => {
                put_message(output, b't', &[&[0; 2]]);
                put_columns(output, self.statement?.columns());
            }
            b'E' => match self.server.run(self.process, self.statement?, &self.params)? {
                Ok(rows) => {
                    rows.iter().for_each(|row| put_row(output, row));
                    put_message(output, b'C', &[b"SELECT\0"]);
                }
                Err(code) => {
                    put_error(output, code);
                    self.is_skipping = true;
                }
            },
            other => panic!("message {:?} is not simulated", char::from(other)),
        }
        Some(())
    }
}
