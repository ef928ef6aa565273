//! Drives a connection's socket: writes what callers have gathered, and delivers replies.

use std::{
    collections::VecDeque,
    mem,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{ConnectionState, MAX_UNWRITTEN_MICROS, PendingCall, ReplyTarget, boot_micros};
use crate::redis::{
    error::RedisCallError,
    resp::{Reply, parse_reply},
};

const READ_SIZE: usize = 16 << 10;
/// Capacity that an idle write buffer keeps.
const MAX_KEPT_WRITE_BYTES: usize = 1 << 20;

pub(super) struct ConnectionDriver<S> {
    socket: S,
    state: Arc<ConnectionState>,
    write: Vec<u8>,
    written: usize,
    /// When the oldest command in `write` was added.
    waiting_since: u64,
    needs_flush: bool,
    read: Vec<u8>,
    /// How many bytes of `read` are not parsed yet.
    filled: usize,
    in_flight: VecDeque<PendingCall>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ConnectionDriver<S> {
    pub(super) fn new(socket: S, state: Arc<ConnectionState>) -> Self {
        Self {
            socket,
            state,
            write: Vec::new(),
            written: 0,
            waiting_since: 0,
            needs_flush: false,
            read: Vec::new(),
            filled: 0,
            in_flight: VecDeque::new(),
        }
    }

    pub(super) async fn run(mut self) {
        let why = std::future::poll_fn(|cx| self.poll(cx)).await;
        self.close(&why);
    }

    /// Returns why the connection ends.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<String> {
        self.state.driver.register(cx.waker());
        if self.state.is_closed.load(Relaxed) {
            return Poll::Ready("the connection was given up".into());
        }
        if let Poll::Ready(Err(why)) = self.poll_write(cx) {
            return Poll::Ready(why);
        }
        self.poll_read(cx)
    }

    /// Writes until there is nothing left, or the socket is full.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), String>> {
        loop {
            if self.written == self.write.len() && !self.next_batch()? {
                if self.needs_flush {
                    ready!(Pin::new(&mut self.socket).poll_flush(cx)).map_err(|error| error.to_string())?;
                    self.needs_flush = false;
                }
                return Poll::Ready(Ok(()));
            }
            if self.written > 0 && boot_micros().saturating_sub(self.waiting_since) > MAX_UNWRITTEN_MICROS {
                return Poll::Ready(Err("a command could not be written for 30 s".into()));
            }
            let written = ready!(Pin::new(&mut self.socket).poll_write(cx, &self.write[self.written..]));
            match written {
                Ok(0) => return Poll::Ready(Err("the connection takes no more bytes".into())),
                Ok(count) => self.written += count,
                Err(error) => return Poll::Ready(Err(error.to_string())),
            }
            self.needs_flush = true;
        }
    }

    /// Takes all commands that have arrived as the next write. Returns whether there are any.
    fn next_batch(&mut self) -> Result<bool, String> {
        if self.write.capacity() > MAX_KEPT_WRITE_BYTES {
            self.write = Vec::new();
        }
        self.write.clear();
        self.written = 0;
        let mut outbox = self.state.outbox.lock();
        if outbox.calls.is_empty() {
            return Ok(false);
        }
        let now = boot_micros();
        if now.saturating_sub(outbox.waiting_since) > MAX_UNWRITTEN_MICROS {
            return Err("commands were not written for 30 s".into());
        }
        self.waiting_since = outbox.waiting_since;
        let logged = outbox.claims.encode(&self.state.key_names, self.state.server_time(now), &mut self.write);
        if logged == 0 {
            mem::swap(&mut self.write, &mut outbox.bytes);
        } else {
            self.write.append(&mut outbox.bytes);
            let target = ReplyTarget::ClaimLog;
            self.in_flight.push_back(PendingCall { missing: logged, replies: Vec::new(), target });
        }
        self.in_flight.extend(outbox.calls.drain(..));
        Ok(true)
    }

    /// Reads and delivers replies until the socket is empty. Returns why the connection ends.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<String> {
        loop {
            if self.read.len() - self.filled < READ_SIZE / 2 {
                self.read.resize((self.read.len() * 2).max(READ_SIZE), 0);
            }
            let mut buffer = ReadBuf::new(&mut self.read[self.filled..]);
            if let Err(error) = ready!(Pin::new(&mut self.socket).poll_read(cx, &mut buffer)) {
                return Poll::Ready(error.to_string());
            }
            let count = buffer.filled().len();
            if count == 0 {
                return Poll::Ready("the server closed it".into());
            }
            self.filled += count;
            if let Err(why) = self.deliver_replies() {
                return Poll::Ready(why);
            }
        }
    }

    fn deliver_replies(&mut self) -> Result<(), String> {
        let mut at = 0;
        while let Some((reply, length)) = parse_reply(&self.read[at..self.filled])? {
            at += length;
            if let Reply::Push(message) = reply {
                self.state.on_push(&message);
                continue;
            }
            self.state.reply_count.fetch_add(1, Relaxed);
            let call = self.in_flight.front_mut().ok_or("the server sent a reply that nobody asked for")?;
            call.missing -= 1;
            if call.missing > 0 {
                call.replies.push(reply);
            } else if let Some(call) = self.in_flight.pop_front() {
                self.state.deliver(call, reply);
            }
        }
        self.read.copy_within(at..self.filled, 0);
        self.filled -= at;
        // A large reply does not occupy memory for ever.
        if self.filled < READ_SIZE / 2 && self.read.len() > 8 * READ_SIZE {
            self.read.truncate(READ_SIZE);
            self.read.shrink_to_fit();
        }
        Ok(())
    }
}

impl<S> ConnectionDriver<S> {
    /// Fails all calls. Those that were not written report that.
    fn close(&mut self, why: &str) {
        self.state.is_closed.store(true, Relaxed);
        let unwritten = {
            let mut outbox = self.state.outbox.lock();
            outbox.closed_because.get_or_insert_with(|| why.to_owned());
            mem::take(&mut outbox.calls)
        };
        let fail = |calls: &mut dyn Iterator<Item = PendingCall>, error: &dyn Fn(String) -> RedisCallError| {
            for call in calls {
                if let ReplyTarget::Last(sender) | ReplyTarget::All(sender) = call.target {
                    drop(sender.send(Err(error(why.to_owned()))));
                }
            }
        };
        fail(&mut self.in_flight.drain(..), &RedisCallError::Unanswered);
        fail(&mut unwritten.into_iter(), &RedisCallError::NotSent);
        if let Some(on_invalidate) = &self.state.on_invalidate {
            on_invalidate(None);
        }
    }
}

/// The runtime may drop the task at any time.
impl<S> Drop for ConnectionDriver<S> {
    fn drop(&mut self) {
        if self.state.outbox.lock().closed_because.is_none() {
            self.close("its runtime has ended");
        }
    }
}
