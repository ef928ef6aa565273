//! The id of the current request, for log lines.
//!
//! Reports of the engine and the store to an [`Observer`](crate::Observer) do not name the request. The work on a
//! request is therefore polled with its id in a thread-local, also in a detached task after the client has left.

use std::{
    cell::RefCell,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use http::{HeaderMap, HeaderName, HeaderValue};
use pin_project_lite::pin_project;

use super::header_value;
use crate::{key::uuid4_text, sent_names::SentNames, store::ClaimToken};

pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

thread_local!(static CURRENT: RefCell<Option<HeaderValue>> = const { RefCell::new(None) });

/// The id of the current request with a key, as in [`RequestReport`](crate::RequestReport). `None` outside of the work
/// on such a request.
pub fn current_request_id() -> Option<HeaderValue> {
    CURRENT.with_borrow(Clone::clone)
}

/// The client's `X-Request-Id`, if it is a single value of 1 to 128 visible ASCII characters.
pub fn sent_request_id(headers: &HeaderMap) -> Option<&HeaderValue> {
    let mut sent = headers.get_all(REQUEST_ID).iter();
    let fits = |id: &&HeaderValue| {
        (1..=128).contains(&id.len()) && id.as_bytes().iter().all(|byte| (0x21..=0x7e).contains(byte))
    };
    let first = sent.next().filter(fits)?;
    sent.next().is_none().then_some(first)
}

/// The client's `X-Request-Id` if it is valid, otherwise a new id.
pub(super) fn sent_or_new(headers: &HeaderMap, names: &SentNames) -> HeaderValue {
    let sent = if names.may_have(&REQUEST_ID) { sent_request_id(headers) } else { None };
    sent.cloned().unwrap_or_else(|| header_value::from_bytes(&uuid4_text(ClaimToken::mint().0)))
}

pin_project! {
    pub(crate) struct UnderRequestId<W> {
        #[pin]
        work: W,
        // Taken while the work is polled.
        id: Option<HeaderValue>,
    }
}

impl<W> UnderRequestId<W> {
    pub(super) fn new(id: Option<HeaderValue>, work: W) -> Self {
        Self { work, id }
    }

    /// Polls work that is new under an id that is [current](call_under) already.
    pub(super) fn poll_new(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<W::Output>
    where
        W: Future,
    {
        self.project().work.poll(cx)
    }

    /// Sets the id under which the work is polled from now on.
    pub(super) fn set_id(self: Pin<&mut Self>, id: Option<HeaderValue>) {
        *self.project().id = id;
    }

    /// Attaches the current request id, if any, to work that is polled elsewhere.
    pub(crate) fn current(work: W) -> Self {
        Self { work, id: current_request_id() }
    }
}

impl<W: Future> Future for UnderRequestId<W> {
    type Output = W::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<W::Output> {
        let this = self.project();
        call_under(this.id, || this.work.poll(cx))
    }
}

/// Calls a part of the work on a request, whose id is taken meanwhile.
pub(super) fn call_under<T>(id: &mut Option<HeaderValue>, call: impl FnOnce() -> T) -> T {
    /// Restores both ids, even if the call panics.
    struct Leave<'a> {
        id: &'a mut Option<HeaderValue>,
        outer: Option<HeaderValue>,
    }
    impl Drop for Leave<'_> {
        fn drop(&mut self) {
            *self.id = CURRENT.replace(self.outer.take());
        }
    }
    let outer = CURRENT.replace(id.take());
    let _leave = Leave { id, outer };
    call()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn current() -> Option<String> {
        tokio::task::yield_now().await;
        current_request_id().map(|id| id.to_str().unwrap().to_owned())
    }

    #[tokio::test]
    async fn only_the_work_on_a_request_has_its_id() {
        let under = |id: &'static str, work| UnderRequestId::new(Some(HeaderValue::from_static(id)), work);
        let work = async {
            let inner = Box::pin(under("inner", current())).await;
            (current().await, inner, current().await)
        };
        let outer = UnderRequestId::new(Some(HeaderValue::from_static("outer")), work);
        let (outer, other) = tokio::join!(outer, under("other", current()));
        assert_eq!(outer, (Some("outer".into()), Some("inner".into()), Some("outer".into())));
        assert_eq!((other, current().await), (Some("other".into()), None));
    }
}
