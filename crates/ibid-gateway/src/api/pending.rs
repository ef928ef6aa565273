//! The exchanges that this process knows: those that are decided or run now, and those that ended a moment ago.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::Response;
use http_body_util::{BodyExt as _, Full};
use ibid::http::ResponseBody;
use parking_lot::Mutex;
use subtle::ConstantTimeEq as _;
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use super::{
    handle::{ExchangeId, SECRET_DIGITS},
    messages::{HandlerFailure, encode_answer},
};

/// How long a repeated `end` gets the same answer from memory. Later ones get the recorded answer.
const FINISHED_TTL: Duration = Duration::from_secs(30);
/// The maximum number of ended exchanges in memory, and of their bytes: few enough to stay in the processor's cache.
const MAX_FINISHED: usize = 2_000;
const MAX_FINISHED_BYTES: usize = 4 << 20;

/// How the handler ended.
pub(super) enum HandlerReply {
    Response(Response<Full<Bytes>>),
    Failed(HandlerFailure),
}

/// What `begin` answers.
pub(super) enum BegunCall {
    /// No policy covers the request.
    Pass,
    /// The encoded grant.
    Run(Bytes),
    /// The encoded answer for the client.
    Answer(Bytes),
}

/// The message that lets a handler run, and the handle in it.
pub(super) struct EncodedGrant {
    pub(super) handle: String,
    pub(super) message: Bytes,
}

/// One exchange.
pub(super) struct PendingExchange {
    pub(super) id: ExchangeId,
    state: Mutex<ExchangeState>,
    changed: Notify,
}

#[derive(Default)]
struct ExchangeState {
    /// `None` if only the handle of the exchange is known.
    request_hash: Option<u64>,
    is_passed: bool,
    /// The `begin` calls that wait for a decision.
    waiters: usize,
    grant: Option<EncodedGrant>,
    /// Present while the handler runs.
    reply: Option<oneshot::Sender<HandlerReply>>,
    /// Tells another reply from the same one sent again.
    reply_hash: Option<u64>,
    deadline: Option<Instant>,
    /// The encoded answer for the client, or `None` if it was dropped at shutdown.
    answer: Option<Option<Bytes>>,
}

/// What became of a reply.
#[must_use]
pub(super) enum ReplyOutcome {
    Taken,
    /// The exchange has ended in another way.
    EndedOtherwise,
    /// The exchange never reached a handler, or it has ended without a reply. Has the reply.
    NotRunning(HandlerReply),
}

#[derive(Default)]
pub(super) struct ExchangeTable(Mutex<TableState>);

#[derive(Default)]
struct TableState {
    exchanges: HashMap<ExchangeId, Arc<PendingExchange>>,
    finished: VecDeque<(ExchangeId, Instant, usize)>,
    finished_bytes: usize,
}

impl ExchangeTable {
    /// Finds or creates an exchange. The second value is `true` if it is new. Returns `None` if the id belongs to
    /// another request.
    pub(super) fn enter(&self, id: ExchangeId, request_hash: Option<u64>) -> Option<(Arc<PendingExchange>, bool)> {
        let mut table = self.0.lock();
        if let Some(known) = table.exchanges.get(&id) {
            let is_other = known.state.lock().request_hash.zip(request_hash).is_some_and(|(known, own)| known != own);
            return (!is_other).then(|| (known.clone(), false));
        }
        let state = Mutex::new(ExchangeState { request_hash, ..ExchangeState::default() });
        let exchange = Arc::new(PendingExchange { id, state, changed: Notify::new() });
        table.exchanges.insert(id, exchange.clone());
        Some((exchange, true))
    }

    pub(super) fn get(&self, id: ExchangeId) -> Option<Arc<PendingExchange>> {
        self.0.lock().exchanges.get(&id).cloned()
    }

    /// Ends an exchange with this answer. It stays for repeated calls if its handler has replied.
    pub(super) fn finish(&self, exchange: &PendingExchange, answer: Option<Bytes>) {
        let bytes = answer.as_ref().map_or(0, Bytes::len);
        // Locked before anybody is woken, so that they do not find what has ended.
        let mut table = self.0.lock();
        if !exchange.finish(answer) {
            table.exchanges.remove(&exchange.id);
            return;
        }
        table.finished.push_back((exchange.id, Instant::now(), bytes));
        table.finished_bytes += bytes;
        while let Some((id, ended_at, bytes)) = table.finished.front().copied() {
            let is_full = table.finished.len() > MAX_FINISHED || table.finished_bytes > MAX_FINISHED_BYTES;
            if !is_full && ended_at.elapsed() < FINISHED_TTL {
                break;
            }
            table.finished.pop_front();
            table.finished_bytes -= bytes;
            table.exchanges.remove(&id);
        }
    }
}

impl PendingExchange {
    /// Waits until the request is decided. Counts as waiting at once, before the future is polled.
    pub(super) fn begun(&self) -> impl Future<Output = Option<BegunCall>> {
        self.state.lock().waiters += 1;
        let waiter = BeginWaiter(self);
        async move {
            let _waiter = waiter;
            self.wait_for(|state| {
                if let Some(grant) = &state.grant {
                    return Some(Some(BegunCall::Run(grant.message.clone())));
                }
                if state.is_passed {
                    return Some(Some(BegunCall::Pass));
                }
                state.answer.as_ref().map(|answer| answer.clone().map(BegunCall::Answer))
            })
            .await
        }
    }

    /// Waits for the answer. `None` if ibid stops first.
    pub(super) async fn answer(&self) -> Option<Bytes> {
        self.wait_for(|state| state.answer.clone()).await
    }

    /// Waits until the handler runs or the exchange has ended.
    pub(super) async fn started(&self) {
        self.wait_for(|state| (state.reply.is_some() || state.answer.is_some()).then_some(())).await;
    }

    async fn wait_for<T>(&self, mut find: impl FnMut(&ExchangeState) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Registers before looking, so that no change in between is missed.
            changed.as_mut().enable();
            if let Some(found) = find(&self.state.lock()) {
                return found;
            }
            changed.await;
        }
    }

    pub(super) fn pass(&self) {
        self.state.lock().is_passed = true;
        self.changed.notify_waiters();
    }

    /// Starts the handler. Returns `None` if nobody waits to run it: it provably did not start.
    pub(super) fn start(
        &self, grant: EncodedGrant, deadline: Instant, needs_waiter: bool,
    ) -> Option<oneshot::Receiver<HandlerReply>> {
        let mut state = self.state.lock();
        if needs_waiter && state.waiters == 0 {
            return None;
        }
        let (reply, replied) = oneshot::channel();
        (state.reply, state.grant, state.deadline) = (Some(reply), Some(grant), Some(deadline));
        drop(state);
        self.changed.notify_waiters();
        Some(replied)
    }

    /// Passes on how the handler ended. The same reply may come again.
    pub(super) fn reply(&self, reply: HandlerReply, hash: u64) -> ReplyOutcome {
        let mut state = self.state.lock();
        match (state.reply.take(), state.reply_hash) {
            (_, Some(earlier)) if earlier == hash => ReplyOutcome::Taken,
            (_, Some(_)) => ReplyOutcome::EndedOtherwise,
            (Some(waiting), None) => match waiting.send(reply) {
                Ok(()) => {
                    state.reply_hash = Some(hash);
                    ReplyOutcome::Taken
                }
                Err(reply) => ReplyOutcome::NotRunning(reply),
            },
            (None, None) => ReplyOutcome::NotRunning(reply),
        }
    }

    /// Whether this is the handle that `begin` gave out: it needs no further check.
    pub(super) fn has_handle(&self, text: &str) -> bool {
        let (state, text) = (self.state.lock(), text.as_bytes());
        let Some(own) = state.grant.as_ref().map(|grant| grant.handle.as_bytes()) else { return false };
        // Only the code at the end is secret.
        let content = own.len().saturating_sub(SECRET_DIGITS);
        text.len() == own.len()
            && text[..content] == own[..content]
            && bool::from(text[content..].ct_eq(&own[content..]))
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.state.lock().deadline
    }

    /// Returns `false` if the handler does not run.
    pub(super) fn extend(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        let is_running = state.reply.as_ref().is_some_and(|reply| !reply.is_closed());
        if is_running {
            state.deadline = state.deadline.max(Some(deadline));
        }
        is_running
    }

    /// Returns whether the handler has replied.
    fn finish(&self, answer: Option<Bytes>) -> bool {
        let mut state = self.state.lock();
        // The handler must not run again: a `begin` that is sent again gets the answer.
        (state.answer, state.reply, state.grant) = (Some(answer), None, None);
        let has_replied = state.reply_hash.is_some();
        drop(state);
        self.changed.notify_waiters();
        has_replied
    }
}

/// Counts a `begin` call until it is answered or its connection is closed.
struct BeginWaiter<'a>(&'a PendingExchange);

impl Drop for BeginWaiter<'_> {
    fn drop(&mut self) {
        self.0.state.lock().waiters -= 1;
    }
}

/// Ends an exchange when it is dropped: with the answer, or without one if the work was given up.
pub(super) struct ExchangeGuard<'a> {
    table: &'a ExchangeTable,
    exchange: &'a PendingExchange,
    answer: Option<Bytes>,
}

impl<'a> ExchangeGuard<'a> {
    pub(super) fn new(table: &'a ExchangeTable, exchange: &'a PendingExchange) -> Self {
        Self { table, exchange, answer: None }
    }

    pub(super) async fn finish(mut self, response: Response<ResponseBody<Full<Bytes>>>) {
        let (head, body) = response.into_parts();
        // A response that breaks off is not recorded: its outcome is unknown.
        let body = body.collect().await.ok();
        self.answer = body.map(|body| encode_answer(head.status, &head.headers, &body.to_bytes()));
    }
}

impl Drop for ExchangeGuard<'_> {
    fn drop(&mut self) {
        self.table.finish(self.exchange, self.answer.take());
    }
}
