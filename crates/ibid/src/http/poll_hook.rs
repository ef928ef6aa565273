//! Polls work inside a function of the server, such as one that enters a tracing span, also in a detached task after
//! the client has left.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

/// A function that polls all work on a request, which has this in its extensions. It must call its argument exactly
/// once.
///
/// An [`Observer`](crate::Observer) is also called inside it, except for requests without a key and requests that are
/// refused for their head: there is no work to poll for them.
///
/// ```
/// use ibid::http::PollHook;
///
/// let hook = PollHook::new(|poll| {
///     // enter the span here
///     poll();
///     // and leave it here
/// });
/// ```
#[derive(Clone)]
pub struct PollHook(Arc<PollHookFn>);

type PollHookFn = dyn Fn(&mut dyn FnMut()) + Send + Sync;

impl PollHook {
    /// Creates a hook from a function.
    pub fn new(poll: impl Fn(&mut dyn FnMut()) + Send + Sync + 'static) -> Self {
        Self(Arc::new(poll))
    }
}

impl fmt::Debug for PollHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PollHook")
    }
}

pub(super) struct HookedFuture<W> {
    pub(super) work: W,
    pub(super) hook: PollHook,
}

impl<W: Future + Unpin> Future for HookedFuture<W> {
    type Output = W::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<W::Output> {
        let this = &mut *self;
        let mut polled = None;
        (this.hook.0)(&mut || polled = Some(Pin::new(&mut this.work).poll(cx)));
        polled.expect("what surrounds the work polls it")
    }
}
