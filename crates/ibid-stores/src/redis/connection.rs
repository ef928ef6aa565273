//! One connection. Commands that arrive while a write is under way are gathered into the next write; replies are
//! delivered in order.
//!
//! A task on the runtime of the caller that opened the connection drives the socket. In the gateway that is the caller's
//! own thread, so that a call wakes no other thread.
//!
//! Invariants: [`RedisCallError::NotSent`] is returned only if no byte of the call was written. A command that was not
//! written within [`MAX_UNWRITTEN_MICROS`] is never written, so that no fence arrives long after it was minted.

use std::{
    mem,
    pin::Pin,
    task::{Context, Poll},
};

use futures_util::task::AtomicWaker;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::oneshot,
};

use super::{
    claim_log::ClaimLog,
    resp::{Reply, encode_command},
    *,
};

mod driver;

/// How long a command may wait to be written, in microseconds.
const MAX_UNWRITTEN_MICROS: u64 = 30_000_000;
/// Age from which the server's clock is read again, in microseconds.
const CLOCK_REFRESH_MICROS: u64 = 8_000_000;
/// Age from which a reading of the server's clock is not used for fences, in microseconds.
const MAX_CLOCK_AGE_MICROS: u64 = 10_000_000;

/// An open connection, used by concurrent calls.
pub(super) struct RedisConnection {
    pub(super) host: RedisHost,
    pub(super) features: ServerFeatures,
    state: Arc<ConnectionState>,
}

/// What the server was found to support when the connection was opened.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ServerFeatures {
    /// `SET … IFEQ`.
    pub(super) compare_and_set: bool,
    /// The connection receives invalidations of the keys that it read with `CLIENT CACHING YES`.
    pub(super) tracking: bool,
}

/// Receives invalidated keys, or `None` if all keys are invalid, or the connection was lost.
pub(super) type OnInvalidate = Arc<dyn Fn(Option<&[u8]>) + Send + Sync>;

struct ConnectionState {
    outbox: Mutex<Outbox>,
    driver: AtomicWaker,
    reply_count: AtomicU64,
    is_closed: AtomicBool,
    /// Set if later calls should use another connection.
    is_retired: AtomicBool,
    /// The server's time minus [`boot_micros`], and when it was read. Written by the driver only.
    clock_offset: AtomicU64,
    clock_read_at: AtomicU64,
    key_names: Arc<KeyNames>,
    on_invalidate: Option<OnInvalidate>,
}

#[derive(Default)]
struct Outbox {
    bytes: Vec<u8>,
    calls: Vec<PendingCall>,
    /// When the first of `calls` was added, by [`boot_micros`].
    waiting_since: u64,
    is_clock_requested: bool,
    claims: ClaimLog,
    closed_because: Option<String>,
}

/// A call whose replies are expected.
struct PendingCall {
    missing: u32,
    replies: Vec<Reply>,
    target: ReplyTarget,
}

enum ReplyTarget {
    /// Gets the last reply, or the first error.
    Last(oneshot::Sender<Result<Reply, RedisCallError>>),
    /// Gets all replies as an array, errors included.
    All(oneshot::Sender<Result<Reply, RedisCallError>>),
    /// The server's clock, requested at this time.
    Clock(u64),
    /// Replies that nobody waits for.
    ClaimLog,
}

/// The reply of a call that was sent. Dropping it drops the reply only.
pub(super) struct ReplyReceiver(oneshot::Receiver<Result<Reply, RedisCallError>>);

impl Future for ReplyReceiver {
    type Output = Result<Reply, RedisCallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = |_| Err(RedisCallError::Unanswered("the connection's task has ended".into()));
        Pin::new(&mut self.0).poll(cx).map(|reply| reply.unwrap_or_else(ended))
    }
}

/// One or several commands that are written together.
#[derive(Debug, Default)]
pub(super) struct RedisCall {
    bytes: Vec<u8>,
    replies: u32,
    keep_all: bool,
    /// The address that these commands claim, for the claim log.
    claims: Option<Address>,
}

impl RedisCall {
    pub(super) fn new(args: &[&[u8]]) -> Self {
        Self::default().then(args)
    }

    /// Appends a command.
    pub(super) fn then(mut self, args: &[&[u8]]) -> Self {
        encode_command(&mut self.bytes, args);
        self.replies += 1;
        self
    }

    /// Appends a command that `encode` writes.
    pub(super) fn then_encoded(mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Self {
        encode(&mut self.bytes);
        self.replies += 1;
        self
    }

    /// Appends commands that are encoded already.
    pub(super) fn then_call(mut self, call: &Self) -> Self {
        self.bytes.extend_from_slice(&call.bytes);
        self.replies += call.replies;
        self.keep_all |= call.keep_all;
        self.claims = self.claims.or(call.claims);
        self
    }

    /// Notes that the call claims this address without indexing it.
    pub(super) fn claiming(mut self, at: Address) -> Self {
        self.claims = Some(at);
        self
    }

    /// Makes the reply an array of all replies.
    pub(super) fn keep_all(mut self) -> Self {
        self.keep_all = true;
        self
    }
}

impl RedisConnection {
    /// Starts to drive a socket.
    pub(super) fn start(
        host: &RedisHost, socket: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, key_names: Arc<KeyNames>,
        on_invalidate: Option<OnInvalidate>,
    ) -> Self {
        let state = Arc::new(ConnectionState {
            outbox: Mutex::default(),
            driver: AtomicWaker::new(),
            reply_count: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            is_retired: AtomicBool::new(false),
            clock_offset: AtomicU64::new(0),
            clock_read_at: AtomicU64::new(0),
            key_names,
            on_invalidate,
        });
        tokio::spawn(driver::ConnectionDriver::new(socket, state.clone()).run());
        Self { host: host.clone(), features: ServerFeatures::default(), state }
    }

    /// Sends a call and waits for its reply, without a deadline. Dropping the future drops the reply only.
    pub(super) async fn call(&self, call: RedisCall) -> Result<Reply, RedisCallError> {
        self.enqueue(call)?.await
    }

    /// Adds a call to the next write.
    pub(super) fn enqueue(&self, call: RedisCall) -> Result<ReplyReceiver, RedisCallError> {
        let (sender, receiver) = oneshot::channel();
        let target = if call.keep_all { ReplyTarget::All(sender) } else { ReplyTarget::Last(sender) };
        let mut outbox = self.state.outbox.lock();
        if let Some(why) = &outbox.closed_because {
            return Err(RedisCallError::NotSent(why.clone()));
        }
        if let Some(at) = call.claims {
            outbox.claims.add(at);
        }
        let was_empty = outbox.calls.is_empty();
        if was_empty {
            outbox.waiting_since = boot_micros();
        }
        outbox.bytes.extend_from_slice(&call.bytes);
        outbox.calls.push(PendingCall { missing: call.replies, replies: Vec::new(), target });
        drop(outbox);
        if was_empty {
            self.state.driver.wake();
        }
        Ok(ReplyReceiver(receiver))
    }

    /// Returns the server's time in microseconds, if it was read recently. Requests it again when the last reading gets
    /// old.
    pub(super) fn server_time(&self) -> Option<u64> {
        let now = boot_micros();
        let age = now.saturating_sub(self.state.clock_read_at.load(Relaxed));
        if age > CLOCK_REFRESH_MICROS {
            self.request_clock(now);
        }
        (age <= MAX_CLOCK_AGE_MICROS).then(|| self.state.server_time(now))
    }

    /// Reads the server's clock for the first time. Without it, scripts mint the fences.
    pub(super) async fn read_clock(&self) {
        let requested_at = boot_micros();
        if let Ok(time) = self.call(RedisCall::new(&[b"TIME"])).await {
            self.state.set_clock(requested_at, &time);
        }
    }

    fn request_clock(&self, now: u64) {
        let mut outbox = self.state.outbox.lock();
        if mem::replace(&mut outbox.is_clock_requested, true) || outbox.closed_because.is_some() {
            return;
        }
        let was_empty = outbox.calls.is_empty();
        if was_empty {
            outbox.waiting_since = now;
        }
        encode_command(&mut outbox.bytes, &[b"TIME"]);
        outbox.calls.push(PendingCall { missing: 1, replies: Vec::new(), target: ReplyTarget::Clock(now) });
        drop(outbox);
        if was_empty {
            self.state.driver.wake();
        }
    }

    /// Gives access to the claims of this connection that are not indexed yet.
    pub(super) fn with_claim_log<T>(&self, use_log: impl FnOnce(&mut ClaimLog) -> T) -> T {
        use_log(&mut self.state.outbox.lock().claims)
    }

    /// Whether new calls may use this connection.
    pub(super) fn is_open(&self) -> bool {
        !self.state.is_closed.load(Relaxed) && !self.state.is_retired.load(Relaxed)
    }

    /// Makes later calls use another connection. Calls in flight still get their replies.
    pub(super) fn retire(&self) {
        self.state.is_retired.store(true, Relaxed);
    }

    pub(super) fn reply_count(&self) -> u64 {
        self.state.reply_count.load(Relaxed)
    }

    /// Closes the connection. Calls in flight get no reply.
    pub(super) fn abort(&self) {
        self.state.is_closed.store(true, Relaxed);
        self.state.driver.wake();
    }
}

impl Drop for RedisConnection {
    fn drop(&mut self) {
        self.abort();
    }
}

impl ConnectionState {
    fn server_time(&self, now: u64) -> u64 {
        now.wrapping_add(self.clock_offset.load(Relaxed))
    }

    /// Sets the clock from a reply of TIME. The request's time is used, so that the estimate never lags.
    fn set_clock(&self, requested_at: u64, reply: &Reply) {
        self.outbox.lock().is_clock_requested = false;
        let Reply::Array(parts) = reply else { return };
        let part = |nth: usize| -> Option<u64> { std::str::from_utf8(parts.get(nth)?.as_bytes()?).ok()?.parse().ok() };
        if let (Some(seconds), Some(micros)) = (part(0), part(1)) {
            let time = seconds.saturating_mul(1_000_000).saturating_add(micros);
            self.clock_offset.store(time.wrapping_sub(requested_at), Relaxed);
            self.clock_read_at.store(requested_at, Relaxed);
        }
    }

    fn deliver(&self, call: PendingCall, last: Reply) {
        let PendingCall { replies: mut before, target, .. } = call;
        let first_error = || before.iter().position(|reply| matches!(reply, Reply::Error(_)));
        // A caller that no longer waits has dropped its receiver.
        match target {
            ReplyTarget::Last(sender) => {
                let reply = first_error().map_or(last, |nth| before.swap_remove(nth));
                drop(sender.send(reply.ok()));
            }
            ReplyTarget::All(sender) => {
                before.push(last);
                drop(sender.send(Ok(Reply::Array(before))));
            }
            ReplyTarget::Clock(requested_at) => self.set_clock(requested_at, &last),
            ReplyTarget::ClaimLog => {
                let error = first_error().map_or(&last, |nth| &before[nth]);
                if let Reply::Error(error) = error {
                    tracing::debug!(?error, "redis: claims could not be listed; they are indexed a second later");
                }
            }
        }
    }

    fn on_push(&self, message: &[Reply]) {
        let [Reply::Bytes(kind), Reply::Array(_) | Reply::Nil, ..] = message else { return };
        let Some(on_invalidate) = self.on_invalidate.as_ref().filter(|_| kind == "invalidate") else { return };
        match &message[1] {
            Reply::Array(keys) => keys.iter().filter_map(Reply::as_bytes).for_each(|key| on_invalidate(Some(key))),
            _ => on_invalidate(None),
        }
    }
}

/// Microseconds since the system was started, or in a simulation since that was.
pub(super) fn boot_micros() -> u64 {
    #[cfg(feature = "simulation")]
    if let Some(simulated) = crate::simulation::now_micros() {
        return simulated;
    }
    system_micros()
}

/// Counts also while the system is suspended.
#[cfg(target_os = "linux")]
fn system_micros() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_nsec.unsigned_abs() / 1000
}

/// Counts from an arbitrary point in time.
#[cfg(not(target_os = "linux"))]
fn system_micros() -> u64 {
    static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    START.elapsed().as_micros() as u64 + MAX_UNWRITTEN_MICROS
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    /// The driver runs on this thread, so it sees a call only once this task waits.
    #[tokio::test]
    async fn a_command_that_could_not_be_written_for_30_s_is_never_written() {
        for (waited, is_written) in [(MAX_UNWRITTEN_MICROS - 1_000_000, true), (MAX_UNWRITTEN_MICROS + 1, false)] {
            let (ours, mut server) = tokio::io::duplex(1 << 10);
            let names = Arc::new(KeyNames::new("test").unwrap());
            let connection = RedisConnection::start(&RedisHost::new("server", 1), ours, names, None);
            let reply = connection.enqueue(RedisCall::new(&[b"SET", b"k", b"a fence of that time"])).unwrap();
            connection.state.outbox.lock().waiting_since -= waited;
            if is_written {
                assert_eq!(server.read_u8().await.unwrap(), b'*');
                continue;
            }
            assert!(matches!(reply.await, Err(RedisCallError::NotSent(_))), "so the caller may mint another");
            let mut received = Vec::new();
            server.read_to_end(&mut received).await.unwrap();
            assert!(received.is_empty(), "{received:?}");
            assert!(!connection.is_open());
        }
    }
}
