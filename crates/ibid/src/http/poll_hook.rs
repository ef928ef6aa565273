//! Work that is polled inside of something, such as the span of a trace, wherever it is polled: also in a task of its own,
//! after its client has gone.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

/// Put into a request's extensions: all work on it is polled by this function, which must call what it is given exactly once.
///
/// What an [`Observer`](crate::Observer) is told about the request it is told in there, but for what is known before there is
/// any work: a request without a key, or one that is refused for its head.
///
/// ```
/// use ibid::http::Around;
///
/// let around = Around::new(|poll| {
///     // here the span is entered
///     poll();
///     // and left again
/// });
/// ```
#[derive(Clone)]
pub struct PollHook(Arc<PollHookFn>);

type PollHookFn = dyn Fn(&mut dyn FnMut()) + Send + Sync;

impl PollHook {
    /// By this function.
    pub fn new(poll: impl Fn(&mut dyn FnMut()) + Send + Sync + 'static) -> Self {
        Self(Arc::new(poll))
    }
}

impl fmt::Debug for PollHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PollHook")
    }
}

/// Work inside of something.
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
