//! The response future. If the client disconnects, it is dropped; claimed work then continues in its own task, so that
//! disconnecting never cancels the operation or its record.

use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use http::Response;
use parking_lot::Mutex;
use pin_project_lite::pin_project;

use super::{
    Route,
    app::{HandlerClaim, HandlerClaimState, HoldsClaim},
    body::ResponseBody,
    cors::PreflightPatch,
    rules,
};
use crate::running::RunningOperations;

/// The work on one covered request. Its [`WorkState`] has the response at the end, unless it was sent before.
pub(super) type RequestWork = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The work on one covered request before it is first polled. Most replays end in this poll, and need no future.
pub(super) trait NewWork<B>: Send {
    fn begin(self: Pin<Box<Self>>, cx: &mut Context<'_>) -> BegunWork<B>;
}

pub(super) enum BegunWork<B> {
    Answered(Response<ResponseBody<B>>),
    /// The work that goes on, and the result of its first poll.
    Running(RequestWork, Arc<WorkState<B>>, Poll<()>),
}

pin_project! {
    /// The response future of [`IbidService`](super::IbidService).
    pub struct ResponseFuture<F, B> where B: 'static {
        #[pin]
        kind: ResponseFutureKind<F, B>,
    }
}

pin_project! {
    #[project = KindProject]
    enum ResponseFutureKind<F, B> where B: 'static {
        Passed { #[pin] future: F, preflight: Option<Box<PreflightPatch>>, covered: Option<Arc<Route>> },
        Ready { answer: Option<Response<ResponseBody<B>>> },
        Covered { covered: CoveredWork<B> },
    }
}

/// State shared by the work and the future that drives it.
pub(super) struct WorkState<B> {
    /// Set immediately before the claim: from then on the work must finish.
    is_claimed: AtomicBool,
    /// The head of a response whose body is still being streamed.
    early_response: Mutex<Option<Box<Response<ResponseBody<B>>>>>,
    /// The response, from when the app has answered until the work ends. It is large: as an output of the work, each
    /// future on its way would move it.
    response: Mutex<Option<Response<ResponseBody<B>>>>,
    /// The claim for the handler, which may keep it for longer than the run.
    claim: OnceLock<HandlerClaimState>,
}

impl<B: Send> HoldsClaim for WorkState<B> {
    fn claim(&self) -> &HandlerClaimState {
        self.claim.get().expect("set before a handler has it")
    }
}

struct CoveredWork<B: 'static> {
    stage: WorkStage<B>,
    running: RunningOperations,
}

enum WorkStage<B> {
    New(Pin<Box<dyn NewWork<B>>>),
    Running(RequestWork, Arc<WorkState<B>>),
    Ended,
}

impl<F, B: 'static> ResponseFuture<F, B> {
    pub(super) fn pass_through(future: F, preflight: Option<Box<PreflightPatch>>) -> Self {
        Self { kind: ResponseFutureKind::Passed { future, preflight, covered: None } }
    }

    /// A request without a key under this route.
    pub(super) fn keyless(future: F, route: Arc<Route>) -> Self {
        Self { kind: ResponseFutureKind::Passed { future, preflight: None, covered: Some(route) } }
    }

    pub(super) fn ready(answer: Response<ResponseBody<B>>) -> Self {
        Self { kind: ResponseFutureKind::Ready { answer: Some(answer) } }
    }

    pub(super) fn new_work(work: Pin<Box<dyn NewWork<B>>>, running: RunningOperations) -> Self {
        let covered = CoveredWork { stage: WorkStage::New(work), running };
        Self { kind: ResponseFutureKind::Covered { covered } }
    }

    pub(super) fn running(work: RequestWork, state: Arc<WorkState<B>>, running: RunningOperations) -> Self {
        let covered = CoveredWork { stage: WorkStage::Running(work, state), running };
        Self { kind: ResponseFutureKind::Covered { covered } }
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
                    rules::remove_own_headers(answer.headers_mut(), &route.policy);
                }
                if preflight.take().is_some_and(|patch| patch.complete(answer.headers_mut())) {
                    *answer.status_mut() = http::StatusCode::NO_CONTENT;
                    answer.headers_mut().remove(http::header::CONTENT_LENGTH);
                    answer.headers_mut().remove(http::header::CONTENT_TYPE);
                    *answer.body_mut() = ResponseBody::whole("", None);
                }
                Poll::Ready(Ok(answer))
            }
            KindProject::Ready { answer } => Poll::Ready(Ok(answer.take().expect("polled after it was ready"))),
            KindProject::Covered { covered } => covered.poll(cx).map(Ok),
        }
    }
}

impl<B> WorkState<B> {
    pub(super) fn new() -> Arc<Self> {
        let (is_claimed, early_response, response) = (AtomicBool::new(false), Mutex::new(None), Mutex::new(None));
        Arc::new(Self { is_claimed, early_response, response, claim: OnceLock::new() })
    }

    /// Sets the claim, and returns it for the handler.
    pub(super) fn set_claim(self: &Arc<Self>, claim: HandlerClaimState) -> HandlerClaim
    where
        B: Send + 'static,
    {
        let _ = self.claim.set(claim);
        HandlerClaim::held(self.clone())
    }

    /// From now on the work finishes even if its client leaves.
    pub(super) fn mark_claimed(&self) {
        self.is_claimed.store(true, Relaxed);
    }

    /// Sends the head before the work ends.
    pub(super) fn respond_early(&self, head: Response<ResponseBody<B>>) {
        *self.early_response.lock() = Some(Box::new(head));
    }

    /// Sets the response that is sent when the work ends.
    pub(super) fn set_response(&self, response: Response<ResponseBody<B>>) {
        *self.response.lock() = Some(response);
    }

    /// Changes the response that was set.
    pub(super) fn with_response<T>(&self, change: impl FnOnce(&mut Response<ResponseBody<B>>) -> T) -> T {
        change(self.response.lock().as_mut().expect("a whole answer has a response"))
    }
}

impl<B: 'static> CoveredWork<B> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Response<ResponseBody<B>>> {
        // Taken out while it is polled: work that panics is dropped and must not be detached.
        let (work, state, done) = match mem::replace(&mut self.stage, WorkStage::Ended) {
            WorkStage::New(new) => match new.begin(cx) {
                BegunWork::Answered(answer) => return Poll::Ready(answer),
                BegunWork::Running(work, state, done) => (work, state, done),
            },
            WorkStage::Running(mut work, state) => {
                let done = work.as_mut().poll(cx);
                (work, state, done)
            }
            WorkStage::Ended => panic!("polled after it was ready"),
        };
        let early = state.early_response.lock().take();
        match (early, done) {
            (Some(head), done) => {
                if done.is_pending() {
                    self.running.detach(work);
                }
                Poll::Ready(*head)
            }
            (None, Poll::Ready(())) => {
                let response = state.response.lock().take();
                Poll::Ready(response.expect("without an early head the work ends with a response"))
            }
            (None, Poll::Pending) => {
                self.stage = WorkStage::Running(work, state);
                Poll::Pending
            }
        }
    }
}

impl<B: 'static> Drop for CoveredWork<B> {
    fn drop(&mut self) {
        if let WorkStage::Running(work, state) = mem::replace(&mut self.stage, WorkStage::Ended)
            && state.is_claimed.load(Relaxed)
        {
            self.running.detach(work);
        }
    }
}

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
