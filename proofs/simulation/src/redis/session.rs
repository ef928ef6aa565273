//! One connection at the server: reads commands and answers them in order.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{
    database::{command_name, number},
    resp::{ServerReply, take_command},
    server::{SessionTicket, SimulatedRedis},
};

/// A connection, as the server sees it.
struct RedisSession {
    server: Arc<SimulatedRedis>,
    ticket: SessionTicket,
    tracking: TrackingMode,
    /// The next command's reads are tracked.
    is_caching: bool,
    /// The commands of a transaction, and whether one of them was refused.
    queue: Option<Vec<Vec<Bytes>>>,
    is_queue_refused: bool,
    /// The session's last write.
    last_write: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TrackingMode {
    Off,
    All,
    OptIn,
}

/// Serves a connection until it is closed.
pub(super) async fn serve(server: Arc<SimulatedRedis>, mut stream: DuplexStream, connection: CancellationToken) {
    let ticket = server.open_session(connection);
    let id = ticket.id;
    let mut session = RedisSession {
        server: Arc::clone(&server),
        ticket,
        tracking: TrackingMode::Off,
        is_caching: false,
        queue: None,
        is_queue_refused: false,
        last_write: 0,
    };
    session.serve(&mut stream).await;
    server.close_session(id);
}

impl RedisSession {
    async fn serve(&mut self, stream: &mut DuplexStream) {
        let (mut input, mut output) = (Vec::new(), Vec::new());
        loop {
            tokio::select! {
                biased;
                Some(message) = self.ticket.pushes.recv() => output.extend(message),
                read = stream.read_buf(&mut input) => {
                    if read.is_err() || read.is_ok_and(|count| count == 0) {
                        return;
                    }
                }
            }
            while let Some(command) = take_command(&mut input) {
                // What changed before a command is said before its reply.
                while let Ok(message) = self.ticket.pushes.try_recv() {
                    output.extend(message);
                }
                let Some(reply) = self.answer(command).await else { return };
                reply.encode(&mut output);
            }
            if stream.write_all(&output).await.is_err() {
                return;
            }
            output.clear();
        }
    }

    /// Returns `None` if the server's process has ended.
    async fn answer(&mut self, command: Vec<Bytes>) -> Option<ServerReply> {
        let name = command_name(&command);
        match name.as_str() {
            "MULTI" => {
                self.queue = Some(Vec::new());
                return Some(ServerReply::OK);
            }
            "EXEC" => return self.run_transaction(),
            "CLIENT" => return Some(self.set_up_tracking(&command)),
            "WAIT" => return Some(self.wait_for_replica(&command).await),
            "HELLO" | "INFO" | "CONFIG" | "PING" => return Some(self.describe(&name, &command)),
            _ => {}
        }
        if let Some(queue) = &mut self.queue {
            if let Some(refused) = self.server.refuses(&name) {
                self.is_queue_refused = true;
                return Some(refused);
            }
            queue.push(command);
            return Some(ServerReply::Status("QUEUED"));
        }
        self.run(&[command]).map(|mut replies| replies.remove(0))
    }

    fn run(&mut self, commands: &[Vec<Bytes>]) -> Option<Vec<ServerReply>> {
        let is_caching = std::mem::take(&mut self.is_caching);
        let is_tracking = match self.tracking {
            TrackingMode::Off => false,
            TrackingMode::All => true,
            TrackingMode::OptIn => is_caching,
        };
        let (replies, write) = self.server.run(&self.ticket, commands, is_tracking)?;
        self.last_write = write.unwrap_or(self.last_write);
        Some(replies)
    }

    fn run_transaction(&mut self) -> Option<ServerReply> {
        let queue = self.queue.take().unwrap_or_default();
        if std::mem::take(&mut self.is_queue_refused) {
            self.is_caching = false;
            return Some(ServerReply::Error("EXECABORT Transaction discarded because of previous errors.".into()));
        }
        self.run(&queue).map(ServerReply::Array)
    }

    fn set_up_tracking(&mut self, command: &[Bytes]) -> ServerReply {
        match (command_name(&command[1..]).as_str(), &command[2..]) {
            ("CACHING", _) => self.is_caching = true,
            ("TRACKING", [_on]) => self.tracking = TrackingMode::All,
            ("TRACKING", _) => {
                self.tracking = TrackingMode::OptIn;
                self.server.ignore_own_writes(self.ticket.id);
            }
            other => panic!("CLIENT {other:?} is not simulated"),
        }
        ServerReply::OK
    }

    /// Waits until the replica has this session's last write, and answers how many replicas have it.
    async fn wait_for_replica(&self, command: &[Bytes]) -> ServerReply {
        if !self.server.setup().has_replica {
            return ServerReply::Int(0);
        }
        let deadline = Instant::now() + Duration::from_millis(number(&command[2]) as u64);
        let arrives_at = self.server.replicated_at(self.last_write);
        sleep_until(arrives_at.min(deadline)).await;
        ServerReply::Int(i64::from(arrives_at <= deadline))
    }

    fn describe(&self, name: &str, command: &[Bytes]) -> ServerReply {
        let setup = self.server.setup();
        match name {
            "PING" => ServerReply::Status("PONG"),
            "HELLO" => {
                let version = if setup.has_compare_and_set { "8.4.0" } else { "7.0.15" };
                let facts = ["server", "redis", "version", version].map(ServerReply::text);
                ServerReply::Array(facts.into())
            }
            "INFO" => {
                let replicas = u8::from(setup.has_replica);
                ServerReply::text(format!(
                    "role:master\r\nredis_version:8.4.0\r\nmaxmemory:0\r\naof_enabled:1\r\nconnected_slaves:{replicas}\r\n"
                ))
            }
            _ => {
                let value = if command[2] == "appendfsync" { "always" } else { "1" };
                ServerReply::Array(vec![ServerReply::Bytes(command[2].clone()), ServerReply::text(value)])
            }
        }
    }
}
