//! The future of an answer. A client that hangs up drops it; work that has claimed then carries on in a task of its
//! own, so that hanging up never cancels the operation or its record.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use http::Response;
use parking_lot::Mutex;
use pin_project_lite::pin_project;

use super::{
    Route, answer,
    body::ResponseBody,
    cors::{self, Preflight},
};
use crate::running::Running;

/// The work on one covered request. Its output is `None` if the answer went out before the work was done.
pub(super) type Work<B> = Pin<Box<dyn Future<Output = Option<Response<ResponseBody<B>>>> + Send>>;

pin_project! {
    /// The future of an answer.
    pub struct ResponseFuture<F, B> where B: 'static {
        #[pin]
        kind: Kind<F, B>,
    }
}

pin_project! {
    #[project = KindProject]
    enum Kind<F, B> where B: 'static {
        Passed { #[pin] future: F, preflight: Option<Box<Patch>>, covered: Option<Arc<Route>> },
        Ready { answer: Option<Response<ResponseBody<B>>> },
        Covered { covered: Covered<B> },
    }
}

/// What to do to the app's answer to a preflight.
pub(super) struct Patch {
    pub(super) origin: http::HeaderValue,
    pub(super) asked: Preflight,
    pub(super) keys: Vec<http::HeaderName>,
}

/// What the work and the future that drives it share.
pub(super) struct Side<B> {
    /// Set right before the claim: from then on the work must be finished.
    claimed: AtomicBool,
    /// The head of an answer whose body is still being streamed.
    early: Mutex<Option<Response<ResponseBody<B>>>>,
}

struct Covered<B: 'static> {
    work: Option<Work<B>>,
    side: Arc<Side<B>>,
    running: Running,
}

impl<F, B: 'static> ResponseFuture<F, B> {
    pub(super) fn passed(future: F, preflight: Option<Box<Patch>>) -> Self {
        Self { kind: Kind::Passed { future, preflight, covered: None } }
    }

    /// A request without a key under this route.
    pub(super) fn keyless(future: F, route: Arc<Route>) -> Self {
        Self { kind: Kind::Passed { future, preflight: None, covered: Some(route) } }
    }

    pub(super) fn ready(answer: Response<ResponseBody<B>>) -> Self {
        Self { kind: Kind::Ready { answer: Some(answer) } }
    }

    pub(super) fn covered(work: Work<B>, side: Arc<Side<B>>, running: Running) -> Self {
        Self { kind: Kind::Covered { covered: Covered { work: Some(work), side, running } } }
    }
}

impl<F, B, E> Future for ResponseFuture<F, B>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: 'static,
{
    type Output = Result<Response<ResponseBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().kind.project() {
            KindProject::Passed { future, preflight, covered } => {
                let mut answer = ready!(future.poll(cx))?.map(ResponseBody::untouched);
                if let Some(route) = covered.take() {
                    answer::remove_own_headers(answer.headers_mut(), &route.policy);
                }
                if let Some(patch) = preflight.take() {
                    let (keys, headers) = (patch.keys.into_iter(), answer.headers_mut());
                    if cors::complete_preflight(headers, &patch.origin, &patch.asked, keys) {
                        *answer.status_mut() = http::StatusCode::NO_CONTENT;
                        answer.headers_mut().remove(http::header::CONTENT_LENGTH);
                        answer.headers_mut().remove(http::header::CONTENT_TYPE);
                        *answer.body_mut() = ResponseBody::whole("", None);
                    }
                }
                Poll::Ready(Ok(answer))
            }
            KindProject::Ready { answer } => Poll::Ready(Ok(answer.take().expect("polled after it was ready"))),
            KindProject::Covered { covered } => covered.poll(cx).map(Ok),
        }
    }
}

impl<B> Side<B> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { claimed: AtomicBool::new(false), early: Mutex::new(None) })
    }

    /// From now on the work is finished even if its client leaves.
    pub(super) fn claim(&self) {
        self.claimed.store(true, Relaxed);
    }

    /// Answers before the work is done.
    pub(super) fn answer_early(&self, head: Response<ResponseBody<B>>) {
        *self.early.lock() = Some(head);
    }
}

impl<B: 'static> Covered<B> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Response<ResponseBody<B>>> {
        // Out of its place while it is polled: work that panics is gone, and must not be detached.
        let mut work = self.work.take().expect("polled after it was ready");
        let done = work.as_mut().poll(cx);
        self.work = Some(work);
        let early = self.side.early.lock().take();
        if let Some(head) = early {
            match done {
                Poll::Ready(_) => self.work = None,
                Poll::Pending => self.detach(),
            }
            return Poll::Ready(head);
        }
        let answer = ready!(done).expect("without an early head the work ends with an answer");
        self.work = None;
        Poll::Ready(answer)
    }
}

impl<B: 'static> Covered<B> {
    fn detach(&mut self) {
        if let Some(work) = self.work.take() {
            self.running.detach(Detached(work));
        }
    }
}

impl<B: 'static> Drop for Covered<B> {
    fn drop(&mut self) {
        if self.side.claimed.load(Relaxed) {
            self.detach();
        }
    }
}

/// Work whose client has gone, or has the head of its answer.
struct Detached<B>(Work<B>);

impl<B> Future for Detached<B> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx).map(drop)
    }
}
