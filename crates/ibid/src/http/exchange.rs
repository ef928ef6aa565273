//! One request with a key. Every transport uses the same pair: [`Exchange::begin`] decides whether the request runs,
//! and [`Exchange::end`] settles the run and builds the response.

use std::{pin::Pin, sync::Arc, task::Context, time::Duration};

use bytes::Buf;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header, request::Parts};
use http_body::Body;
use tokio::time::Instant;

use super::{
    LayerState, Route,
    anonymous::{self, AnonymousCaller},
    app::{App, HandlerClaim, HandlerClaimState},
    body::{BoxError, RequestBody, ResponseBody, WholeBody},
    budget::{BudgetExhausted, MemoryReservation},
    call_app::{self, AppAnswer},
    context::{NO_RESPONSE_STATUS, RequestContext, RequestSender},
    future::{ResponseFuture, WorkState},
    read_body::{ReadBody, overloaded, read_at_once, read_body},
    request::{self, KeyedRequest, RequestIdentity},
    rules,
};
use crate::{
    engine::{BeginOutcome, Claimant, ClaimedRun, Decision, OnRollback, ProbeOutcome, RunOutcome, StoredAs},
    json_rpc::{ToolSelection, called_tool},
    key::MaskedKey,
    observe::{EngineEvent, RequestOutcome},
    policy::OnMatch,
    record::Record,
    refusal::{Refusal, RefusalReason},
    running::RunSlot,
    scope::{CallerKind, ScopePart},
    sent_names::SentHeaders,
    store::{ClaimOutcome, CompletedEntry, Fingerprint, Lease},
};

/// Responses up to this size in bytes are not counted: they need less memory than the request's own task.
const MAX_UNCOUNTED_RESPONSE_BYTES: u64 = 4 << 10;

const PARTS: &str = "the head is there until the request is sent";

/// A request with a key, from its head to its response. All steps borrow from this one allocation: what they passed to
/// each other would be copied each time.
pub(super) struct Exchange {
    pub(super) shared: Arc<LayerState>,
    /// Boxed, because it is large, and the exchange is moved.
    pub(super) context: Box<RequestContext>,
    pub(super) keyed: KeyedRequest,
    /// Further routes under which the request has a key.
    pub(super) others: Vec<(Arc<Route>, KeyedRequest)>,
    /// Taken by the run.
    pub(super) parts: Option<Parts>,
    pub(super) body: ReadBody,
    pub(super) buffers: Option<MemoryReservation>,
    pub(super) slot: Option<RunSlot>,
    /// `None` if the operation runs unprotected.
    pub(super) run: Option<ClaimedRun>,
    pub(super) handler_claim: Option<HandlerClaim>,
    /// Boxed, because most callers are named.
    pub(super) anonymous: Option<Box<AnonymousCaller>>,
    /// The result of [`identify`](Self::identify), if it is known already.
    identified: Option<Result<(), NotClaimedReason>>,
    /// When the store was looked into for a recorded answer, if there was none.
    absent_at: Option<Instant>,
}

/// The result of [`Exchange::begin`].
pub(super) enum BegunExchange<'a> {
    /// The client gets the response that was set.
    Responded,
    /// The client gets the response that this future sets.
    RespondLater(LateResponse<'a>),
    /// The body contains no key, and needs none: the request passes through.
    Pass,
    /// The operation runs now. If the exchange is dropped before its end, the outcome is unknown.
    Run,
}

/// Sets the response once there is memory for it.
pub(super) type LateResponse<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Why a request is not claimed.
pub(super) enum NotClaimedReason {
    /// The body contains no key, and needs none.
    Keyless,
    Refused(Refusal),
    /// The body did not arrive in time.
    TimedOut,
    /// The client broke off the request.
    Malformed(&'static str),
}

impl Exchange {
    #[inline(always)]
    pub(super) fn new(
        shared: &Arc<LayerState>, context: Box<RequestContext>, parts: Parts, keyed: KeyedRequest,
        others: Vec<(Arc<Route>, KeyedRequest)>,
    ) -> Self {
        Self {
            shared: shared.clone(),
            context,
            keyed,
            others,
            parts: Some(parts),
            body: ReadBody::default(),
            buffers: None,
            slot: None,
            run: None,
            handler_claim: None,
            anonymous: None,
            identified: None,
            absent_at: None,
        }
    }

    /// Replays the recorded answer, if the store has it in memory and the body has arrived with its head. Otherwise keeps
    /// what it has found out for [`begin`](Self::begin).
    pub(super) fn replay_at_once<B, RB>(
        &mut self, body: Pin<&mut B>, cx: &mut Context<'_>,
    ) -> Option<Response<ResponseBody<RB>>>
    where
        B: Body<Data: Buf, Error: Into<BoxError>>,
        RB: Send + 'static,
    {
        let is_awaited = self.keyed.caller == CallerKind::CookiesOnly || self.context.policy().tools.is_some();
        if is_awaited {
            return None;
        }
        let read = read_at_once(&self.shared, self.context.policy(), self.keyed.length, body, &mut self.body, cx);
        let identified = match read {
            Ok(buffers) => {
                self.buffers = Some(buffers?);
                self.identify()
            }
            Err(why) => Err(why),
        };
        if identified.is_ok() {
            let Self { shared, context, .. } = &*self;
            let (identity, content) = (context.identity(), (&*self.body.data, self.body.trailers.as_deref()));
            let now = shared.engine.measured(context.started);
            match shared.engine.find_completed(&identity.address, &identity.fingerprint, now) {
                Some(entry) => {
                    let stored = StoredAs::of(&entry);
                    if let Ok(response) = replay(shared, entry, stored, context) {
                        identity.remember(shared, context, self.parts.as_ref().expect(PARTS), content);
                        return Some(response);
                    }
                }
                None => self.absent_at = Some(now),
            }
        }
        self.identified = Some(identified);
        None
    }

    /// Decides what happens to the request. After `state.mark_claimed()`, the work runs to its end even if the client
    /// leaves.
    pub(super) async fn begin<'a, A, B>(
        &'a mut self, app: &mut A, mut body: Pin<&mut B>, state: &'a Arc<WorkState<A::Body>>,
    ) -> BegunExchange<'a>
    where
        A: App<B>,
        B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    {
        let headers = &self.parts.as_ref().expect(PARTS).headers;
        let deadline = self.context.route.protocol.rules().deadline(headers);
        // Check before reading the body if the key is already known: most of these requests are refused.
        if let Some(at) = self.keyed.cookies_only_at(&self.shared, self.context.policy())
            && let Err(refusal) = Box::pin(anonymous::check_cookies(&self.shared, headers, &at, None)).await
        {
            return self.refuse(&refusal, state);
        }
        if A::SENDS_OTHERS && self.context.policy().tools == Some(ToolSelection::Annotations) {
            match Box::pin(self.passes_by_annotations(app, body.as_mut())).await {
                Ok(true) => return self.decline(NotClaimedReason::Keyless, state),
                Ok(false) => {}
                Err(why) => return self.decline(why, state),
            }
        }
        if let Err(why) = self.prepare(body).await {
            return self.decline(why, state);
        }
        let Self { shared, context, keyed, parts, body, run, handler_claim, anonymous, absent_at, .. } = self;
        let (shared, parts, context) = (&**shared, parts.as_ref().expect(PARTS), &*context);
        let identity = context.identity();
        let now = match absent_at {
            Some(at) => *at,
            None => {
                // Most bodies arrive with their head, in no time.
                let now = if body.was_awaited { Instant::now() } else { shared.engine.measured(context.started) };
                if let Some(entry) = shared.engine.find_completed(&identity.address, &identity.fingerprint, now) {
                    identity.remember(shared, context, parts, (&body.data, body.trailers.as_deref()));
                    let stored = StoredAs::of(&entry);
                    return self.replay(entry, stored, state);
                }
                now
            }
        };
        let mut request = keyed.claim(context, parts);
        if let Some(token) = context.claim_token {
            request.token = token;
        }
        let request = Arc::new(request);
        let secret = shared.settings.address_secret.as_ref();
        *anonymous = AnonymousCaller::of(keyed.caller, &request, context.policy(), secret);
        state.mark_claimed();
        let mut claimant = RequestClaimant {
            app,
            context,
            shared,
            parts,
            content: (&body.data, body.trailers.as_deref()),
            key: keyed.key(),
            deadline,
            body_type: std::marker::PhantomData::<fn(B)>,
        };
        let (terms, guard) = (context.policy().terms(), context.policy().guard.as_ref());
        let begun = match guard.zip(identity.intent) {
            None => shared.engine.begin_at(now, terms, request, &mut claimant).await,
            Some((guard, intent)) => {
                // Boxed, because most routes have no guard.
                let guarded = Box::pin(async {
                    match shared.engine.begin_at(now, terms, request, &mut claimant).await {
                        BeginOutcome::Run(run) => {
                            let key = context.key.as_str();
                            Box::pin(shared.engine.claim_intent(terms, guard, intent, key, run)).await
                        }
                        begun => begun,
                    }
                });
                guarded.await
            }
        };
        *run = match begun {
            BeginOutcome::Run(run) => Some(run),
            BeginOutcome::RunUnprotected => None,
            BeginOutcome::Replay(entry, stored) => {
                identity.remember(shared, context, parts, (&body.data, body.trailers.as_deref()));
                return self.replay(entry, stored, state);
            }
            BeginOutcome::Refused(refusal) => return self.refuse(&refusal, state),
        };
        let claim = run.as_ref().filter(|_| A::USES_CLAIM && context.route.protocol.rules().is_plain_http());
        let claim = claim.map(|run| HandlerClaimState::new(run, &context.route, context.requested_at_ms));
        *handler_claim = claim.map(|claim| state.set_claim(claim));
        BegunExchange::Run
    }

    /// Whether the server of the called tool says that the tool needs no protection. Reads the body.
    async fn passes_by_annotations<A, B>(&mut self, app: &mut A, body: Pin<&mut B>) -> Result<bool, NotClaimedReason>
    where
        A: App<B>,
        B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    {
        let Self { shared, context, keyed, parts, body: read, buffers, .. } = self;
        *buffers = Some(read_body(shared, &context.route, &context.client, keyed.length, body, read).await?);
        let Some(tool) = called_tool(&read.data) else { return Ok(false) };
        let list = match shared.tool_lists.find(&context.route.name) {
            Some(list) => list,
            None => {
                let read = call_app::list_tools(app, context, parts.as_ref().expect(PARTS), &read.data).await;
                shared.tool_lists.keep(&context.route.name, read)
            }
        };
        Ok(list.contains(&tool))
    }

    /// What the client of a request gets that is not claimed.
    fn decline<RB>(&self, why: NotClaimedReason, state: &WorkState<RB>) -> BegunExchange<'static> {
        let Self { shared, context, .. } = self;
        state.set_response(match why {
            NotClaimedReason::Keyless => {
                context.report(shared, RequestOutcome::Keyless, NO_RESPONSE_STATUS);
                return BegunExchange::Pass;
            }
            NotClaimedReason::Refused(refusal) => return self.refuse(&refusal, state),
            NotClaimedReason::TimedOut => {
                incomplete_body(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time", context)
            }
            NotClaimedReason::Malformed(detail) => incomplete_body(StatusCode::BAD_REQUEST, detail, context),
        });
        BegunExchange::Responded
    }

    fn refuse<RB>(&self, refusal: &Refusal, state: &WorkState<RB>) -> BegunExchange<'static> {
        state.set_response(self.context.refuse_and_report(&self.shared, refusal));
        BegunExchange::Responded
    }

    /// Replays a recorded answer.
    fn replay<'a, RB: Send + 'static>(
        &'a self, entry: CompletedEntry, stored: StoredAs, state: &'a WorkState<RB>,
    ) -> BegunExchange<'a> {
        match replay(&self.shared, entry, stored, &self.context) {
            Ok(response) => {
                state.set_response(response);
                BegunExchange::Responded
            }
            Err(later) => BegunExchange::RespondLater(Box::pin(async move { state.set_response(later.await) })),
        }
    }

    /// Reads the body and prepares the claim.
    pub(super) async fn prepare<B>(&mut self, body: Pin<&mut B>) -> Result<(), NotClaimedReason>
    where
        B: Body<Data: Buf, Error: Into<BoxError>>,
    {
        if let Some(identified) = self.identified.take() {
            return identified;
        }
        if self.buffers.is_none() {
            let Self { shared, context, keyed, body: read, buffers, .. } = self;
            *buffers = Some(read_body(shared, &context.route, &context.client, keyed.length, body, read).await?);
        }
        self.identify()?;
        if self.keyed.caller == CallerKind::CookiesOnly {
            let (headers, identity) = (&self.parts.as_ref().expect(PARTS).headers, self.context.identity());
            let (address, fingerprint) = (&identity.address, Some(&identity.fingerprint));
            let known = anonymous::check_cookies(&self.shared, headers, address, fingerprint);
            Box::pin(known).await.map_err(NotClaimedReason::Refused)?;
        }
        Ok(())
    }

    /// Finds key, fingerprint and address of a request whose body was read. The first of the routes under which the body
    /// contains a key governs.
    fn identify(&mut self) -> Result<(), NotClaimedReason> {
        let Self { shared, context, keyed, others, parts, body: read, slot, .. } = self;
        let (shared, parts) = (&**shared, parts.as_ref().expect(PARTS));
        let body = &*read.data;
        let mut routes = std::iter::once(&context.route).chain(others.iter().map(|(route, _)| route));
        let signed = routes.try_for_each(|route| request::check_signature(&route.policy, parts, body));
        signed.map_err(NotClaimedReason::Refused)?;
        let mut others = others.drain(..);
        let identified = loop {
            match (keyed.identify(shared, context, parts, (body, read.trailers.as_deref())), others.next()) {
                // The body contains no key under this route: try the next one.
                (Ok(None), Some((other, next))) => (context.route, *keyed) = (other, next),
                (identified, _) => break identified,
            }
        };
        let identity = match identified {
            Ok(Some(identity)) => identity,
            Ok(None) => return Err(NotClaimedReason::Keyless),
            Err(refusal) => {
                if context.key.is_empty() {
                    context.key = request::refused_key(context.policy(), parts, body);
                }
                return Err(NotClaimedReason::Refused(refusal));
            }
        };
        // Only after the body is complete, so that slow senders do not occupy slots.
        let entered = shared.engine.running().try_enter(shared.settings.max_running);
        *slot = Some(entered.ok_or_else(|| NotClaimedReason::Refused(overloaded()))?);
        let RequestIdentity { address, fingerprint, .. } = *context.identity.insert(identity);
        if context.key.is_empty() {
            context.key = MaskedKey::of(keyed.key());
        }
        if context.policy().scope.iter().any(ScopePart::names_caller) {
            shared.shared_key_detector.check(keyed.key(), &fingerprint, &address);
        }
        Ok(())
    }

    /// The request as it passes through, with its body as far as it was read and `rest`, unless it is whole.
    pub(super) fn take_unclaimed<B>(&mut self, rest: Option<Pin<Box<B>>>) -> Request<RequestBody<B>> {
        let (mut parts, read) = (self.parts.take().expect(PARTS), std::mem::take(&mut self.body));
        self.context.set_request_id(&mut parts.headers);
        let body = match rest.filter(|_| !read.is_whole) {
            Some(rest) => RequestBody::begun(read.data, rest),
            None => RequestBody::whole(read.data, read.trailers.map(|trailers| *trailers)),
        };
        Request::from_parts(parts, body)
    }
}

/// A run whose claim was granted earlier, to another process or to this one. See
/// [`Ibid::resume`](super::Ibid::resume).
#[derive(Debug, Clone)]
pub struct ResumedRun {
    /// The route that governed the request.
    pub route: Arc<Route>,
    /// The claim.
    pub lease: Lease,
    /// When the request arrived, in milliseconds since the Unix epoch.
    pub requested_at_ms: u64,
}

/// Continues a run. If it has already completed, the client gets the recorded answer.
pub(super) fn resume<A, B>(
    shared: &Arc<LayerState>, mut app: A, parts: Parts, sender: &RequestSender, run: ResumedRun,
) -> ResponseFuture<A::PassFuture, A::Body>
where
    A: App<B>,
    B: Send + 'static,
{
    let ResumedRun { route, lease, requested_at_ms } = run;
    let sent = SentHeaders::of(&parts.headers);
    let mut context = Box::new(RequestContext::new(shared, &route, &parts, sender, &sent));
    context.requested_at_ms = requested_at_ms;
    context.identity = Some(RequestIdentity::of_claim(&lease.request));
    context.key = MaskedKey::of(lease.request.tags.key());
    let (running, state) = (shared.engine.running().clone(), WorkState::new());
    state.mark_claimed();
    let mut exchange = Box::new(Exchange::new(shared, context, parts, KeyedRequest::resumed(), Vec::new()));
    exchange.buffers = Some(shared.budget.reserve_nothing());
    exchange.slot = shared.engine.running().try_enter(usize::MAX);
    let work_state = state.clone();
    let work = Box::pin(async move {
        let engine = &exchange.shared.engine;
        if let Ok(Some(ClaimOutcome::Completed(entry))) = engine.peek(&lease.request.address).await
            && entry.fence == lease.fence
        {
            let stored = StoredAs::of(&entry);
            if let BegunExchange::RespondLater(response) = exchange.replay(entry, stored, &work_state) {
                response.await;
            }
            return;
        }
        exchange.run = Some(engine.resume(exchange.context.policy(), lease));
        let (outcome, now) = exchange.run(&mut app, &work_state).await;
        exchange.end(now, outcome, &work_state).await;
    });
    ResponseFuture::running(work, state, running)
}

/// Answers the engine's questions about a request.
struct RequestClaimant<'a, A, B> {
    app: &'a mut A,
    context: &'a RequestContext,
    shared: &'a LayerState,
    parts: &'a Parts,
    content: request::RequestContent<'a>,
    key: &'a str,
    /// When the client stops waiting, if it says so.
    deadline: Option<Instant>,
    body_type: std::marker::PhantomData<fn(B)>,
}

impl<A: App<B>, B: Send + 'static> Claimant for RequestClaimant<'_, A, B> {
    fn max_wait(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    fn may_be_held(&self) -> bool {
        self.context.policy().guard.as_ref().is_some_and(|guard| guard.on_match == OnMatch::Hold)
    }

    fn fingerprint(&self, version: u8) -> Option<Fingerprint> {
        let made = request::fingerprint(version, self.context, self.parts, self.content).ok()??;
        Some(made.0)
    }

    async fn probe(&mut self) -> ProbeOutcome {
        let mut outcome = call_app::probe(self.app, self.context, self.parts, self.key).await;
        if let ProbeOutcome::Happened(answer) = &mut outcome {
            self.shared.compress(answer);
        }
        outcome
    }
}

impl Exchange {
    /// The outcome of the run to settle, in place of the one that the handler's answer has.
    fn final_outcome(&self, outcome: RunOutcome<AppAnswer>) -> RunOutcome<AppAnswer> {
        let mut outcome = match &self.handler_claim {
            Some(claim) => delegated_outcome(claim, outcome),
            None => outcome,
        };
        if let RunOutcome::Complete(_, answer) = &mut outcome {
            self.anonymous.iter().for_each(|anonymous| anonymous.mark_recorded());
            self.shared.compress(answer);
        }
        outcome
    }

    /// Settles the run, which ended `now`, and sets the response, unless the client already has it. Not an `async fn`,
    /// which would store the outcome twice.
    pub(super) fn end<RB: Send + 'static>(
        &mut self, now: Instant, outcome: RunOutcome<AppAnswer>, state: &WorkState<RB>,
    ) -> impl Future<Output = ()> {
        let outcome = self.final_outcome(outcome);
        async move {
            let Self { shared, context, anonymous, run, .. } = self;
            let decision = match run.as_mut() {
                Some(held) => shared.engine.end_at(now, context.policy().terms(), held, outcome, |_| None).await,
                None => Decision::unprotected(outcome),
            };
            *run = None;
            let (shared, context) = (&**shared, &*context);
            if let Some(anonymous) = anonymous.take().filter(|anonymous| anonymous.has_unrecorded()) {
                Box::pin(anonymous.store_cookies(&shared.engine)).await;
            }
            if context.is_late() {
                let outcome = match &decision {
                    Decision::Ran(_, stored) => request_outcome(*stored),
                    Decision::Replay(..) => RequestOutcome::Replayed,
                    Decision::Refused(refusal) => RequestOutcome::Refused(refusal.reason),
                };
                let address = &context.identity().address;
                shared.engine.observer().on_event(&EngineEvent::LateAnswer { address, outcome });
                return;
            }
            let stored = match decision {
                Decision::Ran(AppAnswer::Whole, stored) => {
                    state.with_response(|response| {
                        rules::complete_first_response(response, Some(stored), context);
                        let length = response.body().whole_length();
                        if length > MAX_UNCOUNTED_RESPONSE_BYTES {
                            let reservation = shared.budget.send(&context.client);
                            reservation.count(length);
                            response.body_mut().attach_reservation(reservation);
                        }
                    });
                    stored
                }
                Decision::Ran(AppAnswer::Tail(status, tail), stored) => {
                    let rules = context.route.protocol.rules();
                    let status = rules.status(status, &HeaderMap::new(), tail.trailers.as_ref());
                    Box::pin(tail.send()).await;
                    context.report(shared, request_outcome(stored), status);
                    return;
                }
                Decision::Ran(AppAnswer::Refused(refusal), stored) => {
                    state.set_response(context.refuse(&refusal));
                    stored
                }
                Decision::Ran(AppAnswer::Panicked, stored) => {
                    let detail = "the handler failed; whether the operation took place is not known";
                    state.set_response(context.fail(StatusCode::INTERNAL_SERVER_ERROR, detail));
                    stored
                }
                Decision::Replay(entry, stored) => {
                    if let BegunExchange::RespondLater(response) = self.replay(entry, stored, state) {
                        response.await;
                    }
                    return;
                }
                Decision::Refused(refusal) => {
                    self.refuse(&refusal, state);
                    return;
                }
            };
            state.with_response(|response| context.report(shared, request_outcome(stored), context.status(response)));
        }
    }
}

/// A response that needs memory first.
pub(super) type LargeReplay<'a, RB> = Pin<Box<dyn Future<Output = Response<ResponseBody<RB>>> + Send + 'a>>;

/// Replays a recorded answer. A large one is counted first, which may take time.
fn replay<'a, RB: Send + 'static>(
    shared: &'a LayerState, entry: CompletedEntry, stored: StoredAs, context: &'a RequestContext,
) -> Result<Response<ResponseBody<RB>>, LargeReplay<'a, RB>> {
    let address = &context.identity().address;
    let record = match Record::decode(shared.shared_records.share(address, entry.record)) {
        Ok(record) => record,
        Err(why) => {
            shared.engine.observer().on_event(&EngineEvent::RecordUnreadable(address));
            let detail = format!("the remembered answer cannot be read: {why}");
            return Ok(context.refuse_and_report(shared, &Refusal::new(RefusalReason::StoreUnavailable, detail)));
        }
    };
    let response = context.route.protocol.rules().replay(record, stored, context);
    let mut response: Response<ResponseBody<RB>> = response.map(WholeBody::into);
    let length = response.body().whole_length();
    if length <= MAX_UNCOUNTED_RESPONSE_BYTES {
        context.report(shared, RequestOutcome::Replayed, context.status(&response));
        return Ok(response);
    }
    Err(Box::pin(async move {
        match shared.budget.answer(&context.client, length).await {
            Ok(reservation) => response.body_mut().attach_reservation(reservation),
            Err(BudgetExhausted) => return context.refuse_and_report(shared, &overloaded()),
        }
        context.report(shared, RequestOutcome::Replayed, context.status(&response));
        response
    }))
}

fn request_outcome(stored: StoredAs) -> RequestOutcome {
    match stored {
        StoredAs::Recorded => RequestOutcome::Executed,
        StoredAs::NotRecorded => RequestOutcome::Released,
        StoredAs::Pending => RequestOutcome::Pending,
        StoredAs::OutcomeUnknown => RequestOutcome::Unknown,
        StoredAs::Unprotected | StoredAs::FrontOnly => RequestOutcome::Degraded,
    }
}

/// If the handler delegated its answer to a transaction, its return value only decides what happens to the claim after
/// a rollback.
fn delegated_outcome(claim: &HandlerClaim, outcome: RunOutcome<AppAnswer>) -> RunOutcome<AppAnswer> {
    let record = match &outcome {
        RunOutcome::Complete(_, answer) => Some(&answer.record),
        _ => None,
    };
    let Some(is_the_same) = claim.is_delegated(record) else { return outcome };
    let (response, on_rollback) = match outcome {
        RunOutcome::Complete(response, _) if is_the_same => (response, OnRollback::Refuse),
        RunOutcome::Complete(response, _) | RunOutcome::Release(response) => (response, OnRollback::Release),
        RunOutcome::Park(response, cause) => (response, OnRollback::Park(cause)),
        outcome @ (RunOutcome::DelegatedToTransaction(..) | RunOutcome::NotStarted(_)) => return outcome,
    };
    RunOutcome::DelegatedToTransaction(response, on_rollback)
}

/// Responds to an incomplete body. The connection must close, because the next request cannot be told from the rest of
/// the body.
pub(super) fn incomplete_body<RB>(
    status: StatusCode, detail: &str, context: &RequestContext,
) -> Response<ResponseBody<RB>> {
    let mut response = context.fail(status, detail);
    if context.route.protocol.rules().is_plain_http() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}
