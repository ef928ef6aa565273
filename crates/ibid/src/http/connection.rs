//! What the server tells the layer about the connection of a request, in the request's extensions.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;

use super::budget::MemoryAccount;

/// One connection of a client. The server puts a clone into the extensions of every request of the connection: then the
/// connection may hold only a part of the memory for bodies. Without it there is no bound per connection.
#[derive(Clone, Default)]
pub struct PeerConnection(pub(super) Arc<MemoryAccount>);

/// Lets the layer abort the answer to a request whose client does not read it. The server puts one into the extensions
/// of the request, and drops the connection, or the HTTP/2 stream, once [`poll_aborted`](Self::poll_aborted) is ready. Without
/// it an answer is aborted when its body is next polled.
#[derive(Clone, Default)]
pub struct ResponseAbort(Arc<Mutex<ResponseAbortState>>);

#[derive(Default)]
struct ResponseAbortState {
    is_aborted: bool,
    waker: Option<Waker>,
}

impl PeerConnection {
    /// A new connection.
    pub fn new() -> Self {
        Self::default()
    }
}

impl ResponseAbort {
    /// Not cut yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Aborts the answer.
    pub fn cut(&self) {
        let waker = {
            let mut state = self.0.lock();
            state.is_aborted = true;
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Ready once the answer is to be aborted. Only the last one who asked is woken.
    pub fn poll_aborted(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        if state.is_aborted {
            return Poll::Ready(());
        }
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            state.waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

impl fmt::Debug for PeerConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PeerConnection").field(&self.0).finish()
    }
}

impl fmt::Debug for ResponseAbort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseAbort").field("is_cut", &self.0.lock().is_aborted).finish()
    }
}
