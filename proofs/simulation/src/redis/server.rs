//! A Redis server: its keys, its clock, its replica, and what happens to it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::{io::DuplexStream, sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    database::{BrokenRule, CommandContext, KeyAccess, RedisDatabase, write_flags},
    resp::{ServerReply, invalidation},
    scripts::run_script,
    session,
};
use crate::{
    random::SeededRandom,
    tcp::{ServerCondition, SimulatedServer},
};

/// What the server's clock shows at the start, in microseconds.
const CLOCK_START: u64 = 1_750_000_000_000_000;
/// The longest that a write takes to reach the replica, unless replication is stalled.
const MAX_REPLICATION_MS: u64 = 30;

/// How a server is set up.
#[derive(Debug, Clone, Copy)]
pub struct RedisSetup {
    /// Whether it has `SET … IFEQ`.
    pub has_compare_and_set: bool,
    /// Whether it has a replica.
    pub has_replica: bool,
    /// A rule that it breaks.
    pub broken: Option<BrokenRule>,
}

/// A server in this process.
#[derive(Debug)]
pub struct SimulatedRedis {
    setup: RedisSetup,
    random: Arc<SeededRandom>,
    started_at: Instant,
    state: Mutex<RedisServerState>,
}

#[derive(Debug, Default)]
struct RedisServerState {
    database: RedisDatabase,
    /// By digest.
    scripts: BTreeMap<Bytes, Bytes>,
    condition: ServerCondition,
    /// How far the clock was stepped, in microseconds.
    clock_step: i64,
    /// Counts processes: a session of an earlier one runs nothing more.
    process: u64,
    sessions: BTreeMap<u64, OpenSession>,
    /// Who wants to know when a key changes.
    trackers: BTreeMap<Bytes, BTreeSet<u64>>,
    next_session: u64,
    /// How many commands have written something.
    writes: u64,
    replica: RedisDatabase,
    /// What the replica does not have yet: how many writes, when it arrives, and the keys then.
    on_the_way: VecDeque<(u64, Instant, RedisDatabase)>,
    replication_stalled_until: Option<Instant>,
}

#[derive(Debug)]
struct OpenSession {
    pushes: mpsc::UnboundedSender<Vec<u8>>,
    connection: CancellationToken,
    ignores_own_writes: bool,
}

/// A session's number, its server process, and the messages that it is sent without having asked.
pub(super) struct SessionTicket {
    pub(super) id: u64,
    pub(super) process: u64,
    pub(super) pushes: mpsc::UnboundedReceiver<Vec<u8>>,
}

impl SimulatedRedis {
    /// Starts an empty server.
    pub fn new(setup: RedisSetup, random: &Arc<SeededRandom>) -> Self {
        Self { setup, random: Arc::clone(random), started_at: Instant::now(), state: Mutex::default() }
    }

    /// How it is set up.
    pub fn setup(&self) -> &RedisSetup {
        &self.setup
    }

    /// Sets what is wrong with it.
    pub fn set_condition(&self, condition: ServerCondition) {
        self.state.lock().condition = condition;
    }

    /// What is wrong with it.
    pub fn condition(&self) -> ServerCondition {
        self.state.lock().condition
    }

    /// Steps the clock, forwards or back.
    pub fn step_clock(&self, micros: i64) {
        self.state.lock().clock_step += micros;
    }

    /// The process ends. It loses its connections and cached scripts, and no key.
    pub fn restart(&self) {
        self.state.lock().end_process();
    }

    /// The replica becomes the server. What it does not have yet is lost. Returns how many writes that are.
    pub fn fail_over(&self) -> usize {
        let mut state = self.state.lock();
        state.receive(Instant::now());
        let lost = state.on_the_way.len();
        state.on_the_way.clear();
        state.database = state.replica.clone();
        state.end_process();
        lost
    }

    /// Nothing reaches the replica for so long.
    pub fn stall_replication(&self, lasts: Duration) {
        self.state.lock().replication_stalled_until = Some(Instant::now() + lasts);
    }

    pub(super) fn open_session(&self, connection: CancellationToken) -> SessionTicket {
        let mut state = self.state.lock();
        let (sender, pushes) = mpsc::unbounded_channel();
        state.next_session += 1;
        let id = state.next_session;
        state.sessions.insert(id, OpenSession { pushes: sender, connection, ignores_own_writes: false });
        SessionTicket { id, process: state.process, pushes }
    }

    pub(super) fn close_session(&self, id: u64) {
        self.state.lock().sessions.remove(&id);
    }

    pub(super) fn ignore_own_writes(&self, id: u64) {
        if let Some(session) = self.state.lock().sessions.get_mut(&id) {
            session.ignores_own_writes = true;
        }
    }

    /// Runs commands as one step. Returns `None` if the process that the session belongs to has ended, or the replies and the
    /// number of writes if there was one.
    pub(super) fn run(
        &self, ticket: &SessionTicket, commands: &[Vec<Bytes>], is_tracking: bool,
    ) -> Option<(Vec<ServerReply>, Option<u64>)> {
        let mut state = self.state.lock();
        if state.process != ticket.process {
            return None;
        }
        let mut context = self.context(&state);
        let replies = commands.iter().map(|args| state.run_command(&mut context, args)).collect();
        let mut has_written = false;
        for access in context.accesses {
            match access {
                KeyAccess::Read(key) if is_tracking => {
                    state.trackers.entry(key).or_default().insert(ticket.id);
                }
                KeyAccess::Read(_) => {}
                KeyAccess::Written(key) => {
                    has_written = true;
                    state.report_change(&key, ticket.id);
                }
            }
        }
        if has_written {
            state.writes += 1;
            if self.setup.has_replica {
                self.replicate(&mut state);
            }
        }
        Some((replies, has_written.then_some(state.writes)))
    }

    /// Whether the server refuses to queue this command.
    pub(super) fn refuses(&self, name: &str) -> Option<ServerReply> {
        let condition = self.condition();
        let (is_write, needs_memory) = write_flags(name);
        match () {
            () if needs_memory && condition.is_full => Some("OOM command not allowed when used memory > 'maxmemory'."),
            () if is_write && condition.is_read_only => Some("READONLY You can't write against a read only replica."),
            () => None,
        }
        .map(|error| ServerReply::Error(error.to_owned()))
    }

    /// When the replica has so many writes, as far as is known now.
    pub(super) fn replicated_at(&self, writes: u64) -> Instant {
        let state = self.state.lock();
        let on_the_way = state.on_the_way.iter().find(|(number, ..)| *number >= writes);
        on_the_way.map_or_else(Instant::now, |(_, arrives_at, _)| *arrives_at)
    }

    fn context(&self, state: &RedisServerState) -> CommandContext {
        let elapsed = self.started_at.elapsed().as_micros() as u64;
        CommandContext {
            now: (CLOCK_START + elapsed).wrapping_add_signed(state.clock_step),
            is_full: state.condition.is_full,
            is_read_only: state.condition.is_read_only,
            broken: self.setup.broken,
            accesses: Vec::new(),
        }
    }

    fn replicate(&self, state: &mut RedisServerState) {
        let now = Instant::now();
        state.receive(now);
        let stalled = state.replication_stalled_until.map_or(now, |until| until.max(now));
        let last = state.on_the_way.back().map_or(stalled, |(_, at, _)| stalled.max(*at));
        let arrives_at = last.max(now + self.random.millis(MAX_REPLICATION_MS));
        state.on_the_way.push_back((state.writes, arrives_at, state.database.clone()));
    }
}

impl SimulatedServer for SimulatedRedis {
    fn is_up(&self) -> bool {
        !self.condition().is_down
    }

    fn serve(
        self: Arc<Self>, stream: DuplexStream, connection: CancellationToken,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(session::serve(self, stream, connection))
    }
}

impl RedisServerState {
    fn run_command(&mut self, context: &mut CommandContext, args: &[Bytes]) -> ServerReply {
        let is_full_text = args[0] == "EVAL";
        if !is_full_text && args[0] != "EVALSHA" {
            let reply = self.database.run(context, args);
            return reply.unwrap_or_else(|| panic!("{:?} is not simulated", args[0]));
        }
        let body = if is_full_text { Some(args[1].clone()) } else { self.scripts.get(&args[1]).cloned() };
        let Some(body) = body else { return ServerReply::Error("NOSCRIPT No matching script.".into()) };
        if is_full_text {
            let digest = sha1_smol::Sha1::from(&body[..]).digest().to_string();
            self.scripts.insert(digest.into(), body.clone());
        }
        let key_count = super::database::number(&args[2]) as usize;
        let (keys, args) = args[3..].split_at(key_count);
        run_script(&mut self.database, context, &body, keys, args)
    }

    /// Tells all who have read a key that it has changed. They are told once.
    fn report_change(&mut self, key: &Bytes, by: u64) {
        for id in self.trackers.remove(key).unwrap_or_default() {
            if let Some(session) = self.sessions.get(&id)
                && !(id == by && session.ignores_own_writes)
            {
                // A session that has ended is not told.
                let _ = session.pushes.send(invalidation(key));
            }
        }
    }

    /// Brings the replica up to time.
    fn receive(&mut self, now: Instant) {
        while self.on_the_way.front().is_some_and(|(_, arrives_at, _)| *arrives_at <= now) {
            self.replica = self.on_the_way.pop_front().expect("it was looked at").2;
        }
    }

    fn end_process(&mut self) {
        self.process += 1;
        self.scripts.clear();
        self.trackers.clear();
        std::mem::take(&mut self.sessions).values().for_each(|session| session.connection.cancel());
    }
}
