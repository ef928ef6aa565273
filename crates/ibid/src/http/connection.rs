//! Information about a request's connection, which the server passes to the layer in the request's extensions.

use std::{
    sync::Arc,
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;

use super::budget::MemoryAccount;

/// One connection of a client. The server puts a clone into the extensions of each of its requests. It limits the
/// memory for bodies per connection; without it there is no such limit.
#[derive(Debug, Clone, Default)]
pub struct PeerConnection(pub(super) Arc<MemoryAccount>);

/// Lets the layer abort a response that its client does not read. The server puts one into the request's extensions,
/// and closes the connection or resets the HTTP/2 stream once [`poll_aborted`](Self::poll_aborted) is ready. Without
/// it, a response is aborted when its body is next polled.
#[derive(Debug, Clone, Default)]
pub struct ResponseAbort(Arc<Mutex<ResponseAbortState>>);

#[derive(Debug, Default)]
struct ResponseAbortState {
    is_aborted: bool,
    waker: Option<Waker>,
}

impl ResponseAbort {
    /// Aborts the response.
    pub fn cut(&self) {
        let waker = {
            let mut state = self.0.lock();
            state.is_aborted = true;
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Ready once the response must be aborted. Only the last caller is woken.
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
