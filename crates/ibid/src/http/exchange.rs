//! One request with a key. Every transport uses the same pair: [`begin`] decides whether the request runs, and
//! [`Exchange::end`] settles the run and builds the response.

use std::{sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header, request::Parts};
use http_body::Body;
use tokio::time::Instant;

use super::{
    LayerState, Route,
    anonymous::{self, AnonymousCaller},
    app::{App, HandlerClaim},
    body::{BoxError, RequestBody, ResponseBody, WholeBody},
    budget::{BudgetExhausted, MemoryReservation},
    call_app::{self, AppResponse},
    context::{NO_RESPONSE_STATUS, RequestContext, RequestSender},
    future::{ResponseFuture, WorkState},
    read_body::{overloaded, read_body},
    request::{self, KeyedRequest, RequestIdentity},
    rules,
};
use crate::{
    engine::{BeginOutcome, Claimant, ClaimedRun, Decision, OnRollback, ProbeOutcome, RunOutcome, StoredAs},
    key::MaskedKey,
    observe::{EngineEvent, RequestOutcome},
    policy::PolicyMode,
    record::Record,
    refusal::{Refusal, RefusalReason},
    running::RunSlot,
    scope::{CallerKind, ScopePart},
    store::{ClaimOutcome, CompletedEntry, Fingerprint, Lease},
};

/// Responses up to this size in bytes are not counted: they need less memory than the request's own task.
const MAX_UNCOUNTED_RESPONSE_BYTES: u64 = 4 << 10;

/// A request with a key, and the routes that may cover it.
pub(super) struct KeyedHead {
    /// Boxed, because it moves from step to step.
    pub(super) context: Box<RequestContext>,
    pub(super) keyed: KeyedRequest,
    /// Further routes under which the request has a key.
    pub(super) others: Vec<(Arc<Route>, KeyedRequest)>,
}

/// The result of [`begin`].
#[expect(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub(super) enum BegunExchange<B, RB> {
    /// The client gets this response.
    Respond(Response<ResponseBody<RB>>),
    /// The body contains no key, and needs none: the request passes through.
    Pass(Box<RequestContext>, Request<RequestBody<B>>),
    /// The operation runs now.
    Run(Exchange),
}

/// A request whose operation runs now. If it is dropped before its end, the outcome is unknown.
pub(super) struct Exchange {
    pub(super) shared: Arc<LayerState>,
    pub(super) context: Box<RequestContext>,
    /// `None` if the operation runs unprotected.
    pub(super) run: Option<ClaimedRun>,
    pub(super) handler_claim: Option<HandlerClaim>,
    /// Boxed, because most callers are named.
    pub(super) anonymous: Option<Box<AnonymousCaller>>,
    pub(super) buffers: MemoryReservation,
    /// Taken by the run.
    pub(super) request: Option<WholeRequest>,
    _slot: RunSlot,
}

/// Head, body and trailers.
pub(super) type WholeRequest = (Parts, Bytes, Option<HeaderMap>);

/// A request that is ready to be claimed.
pub(super) struct PreparedExchange {
    pub(super) identity: RequestIdentity,
    pub(super) keyed: KeyedRequest,
    pub(super) body: Bytes,
    pub(super) trailers: Option<HeaderMap>,
    pub(super) buffers: MemoryReservation,
    pub(super) slot: RunSlot,
}

/// A request that is not claimed, with its body as far as it was read and its rest, for shadow mode.
pub(super) struct NotClaimed<B> {
    pub(super) why: NotClaimedReason,
    pub(super) body: RequestBody<B>,
}

pub(super) enum NotClaimedReason {
    /// The body contains no key, and needs none.
    Keyless,
    Refused(Refusal),
    /// The body did not arrive in time.
    TimedOut,
    /// The client broke off the request.
    Malformed(&'static str),
}

/// Decides what happens to a request with a key. After `state.mark_claimed()`, the work runs to its end even if the
/// client leaves.
pub(super) async fn begin<A, B>(
    shared: Arc<LayerState>, app: &mut A, mut parts: Parts, body: B, head: KeyedHead, state: &WorkState<A::Body>,
) -> BegunExchange<B, A::Body>
where
    A: App<B>,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    let KeyedHead { mut context, keyed, others } = head;
    let deadline = context.route.protocol.rules().deadline(&parts.headers);
    // Check before reading the body if the key is already known: most of these requests are refused.
    if let Some(at) = keyed.cookies_only_at(&shared, context.policy())
        && let Err(refusal) = Box::pin(anonymous::check_cookies(&shared, &parts.headers, &at, None)).await
    {
        return BegunExchange::Respond(context.refuse_and_report(&shared, &refusal));
    }
    // Routes in shadow mode require nothing and do not govern.
    let others = others.into_iter().filter(|(other, _)| other.policy.mode == PolicyMode::Enforce).collect();
    let prepared = match prepare(&shared, &parts, body, keyed, others, &mut context).await {
        Ok(prepared) => prepared,
        Err(NotClaimed { why, body }) => {
            return match why {
                NotClaimedReason::Keyless => {
                    context.report(&shared, RequestOutcome::Keyless, NO_RESPONSE_STATUS);
                    context.set_request_id(&mut parts.headers);
                    BegunExchange::Pass(context, Request::from_parts(parts, body))
                }
                NotClaimedReason::Refused(refusal) => {
                    BegunExchange::Respond(context.refuse_and_report(&shared, &refusal))
                }
                NotClaimedReason::TimedOut => {
                    let detail = "the body did not arrive in time";
                    BegunExchange::Respond(incomplete_body(StatusCode::REQUEST_TIMEOUT, detail, &context))
                }
                NotClaimedReason::Malformed(detail) => {
                    BegunExchange::Respond(incomplete_body(StatusCode::BAD_REQUEST, detail, &context))
                }
            };
        }
    };
    let PreparedExchange { identity, keyed, body, trailers, buffers, slot } = prepared;
    if let Some(entry) = shared.engine.find_completed(&identity.address, &identity.fingerprint) {
        return BegunExchange::Respond(replay(&shared, entry, StoredAs::Recorded, &context).await);
    }
    let mut request = keyed.claim(&identity, &context, &parts);
    if let Some(token) = context.claim_token {
        request.token = token;
    }
    let secret = shared.settings.address_secret.as_ref();
    let anonymous = AnonymousCaller::of(keyed.caller, &request, context.policy(), secret);
    state.mark_claimed();
    let mut claimant = RequestClaimant {
        app,
        context: &context,
        shared: &shared,
        parts: &parts,
        content: (&body, trailers.as_ref()),
        key: &identity.key,
        deadline,
        body_type: std::marker::PhantomData::<fn(B)>,
    };
    let run = match shared.engine.begin(context.policy().terms(), request, &mut claimant).await {
        BeginOutcome::Run(run) => Some(run),
        BeginOutcome::RunUnprotected => None,
        BeginOutcome::Replay(entry, stored) => {
            return BegunExchange::Respond(replay(&shared, entry, stored, &context).await);
        }
        BeginOutcome::Refused(refusal) => {
            return BegunExchange::Respond(context.refuse_and_report(&shared, &refusal));
        }
    };
    let claim = run.as_ref().filter(|_| A::USES_CLAIM && context.route.protocol.rules().is_plain_http());
    let handler_claim = claim.map(|run| HandlerClaim::new(run, &context.route, context.requested_at_ms));
    let request = Some((parts, body, trailers));
    BegunExchange::Run(Exchange { shared, context, run, handler_claim, anonymous, buffers, request, _slot: slot })
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
    let mut context = RequestContext::new(shared, &route, &parts, sender);
    context.requested_at_ms = requested_at_ms;
    context.address = Some(lease.request.address);
    context.key = MaskedKey::of(lease.request.tags.key());
    let (running, state) = (shared.engine.running().clone(), WorkState::new());
    state.mark_claimed();
    let (shared, work_state) = (shared.clone(), state.clone());
    let work = Box::pin(async move {
        let found = shared.engine.peek(&lease.request.address).await;
        if let Ok(Some(ClaimOutcome::Completed(entry))) = found
            && entry.fence == lease.fence
        {
            return Some(replay(&shared, entry, StoredAs::Recorded, &context).await);
        }
        let mut exchange = Exchange {
            run: Some(shared.engine.resume(context.policy().terms(), lease)),
            context: Box::new(context),
            handler_claim: None,
            anonymous: None,
            buffers: shared.budget.reserve_nothing(),
            request: Some((parts, Bytes::new(), None)),
            _slot: shared.engine.running().try_enter(usize::MAX).expect("no limit"),
            shared,
        };
        let outcome = exchange.run(&mut app, &work_state).await;
        exchange.end(outcome).await
    });
    ResponseFuture::covered(work, state, running)
}

/// Reads the body and prepares the claim. The first of the routes under which the body contains a key governs.
pub(super) async fn prepare<B>(
    shared: &LayerState, parts: &Parts, body: B, mut keyed: KeyedRequest, others: Vec<(Arc<Route>, KeyedRequest)>,
    context: &mut RequestContext,
) -> Result<PreparedExchange, NotClaimed<B>>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    let (body, trailers, buffers) = read_body(shared, &context.route, &context.client, parts, body).await?;
    let whole = || RequestBody::whole(body.clone(), trailers.clone());
    let content = (&*body, trailers.as_ref());
    let mut routes = std::iter::once(&context.route).chain(others.iter().map(|(route, _)| route));
    if let Err(refusal) = routes.try_for_each(|route| request::check_signature(&route.policy, parts, &body)) {
        return Err(NotClaimed::refused(refusal, whole()));
    }
    let mut others = others.into_iter();
    let prepared = loop {
        match (keyed.identify(shared, context, parts, content), others.next()) {
            // The body contains no key under this route: try the next one.
            (Ok(None), Some((other, next))) => (context.route, keyed) = (other, next),
            (prepared, _) => break prepared,
        }
    };
    let identity = match prepared {
        Ok(Some(prepared)) => prepared,
        Ok(None) => return Err(NotClaimed { why: NotClaimedReason::Keyless, body: whole() }),
        Err(refusal) => {
            if context.key.is_empty() {
                context.key = request::refused_key(context.policy(), parts, &body);
            }
            return Err(NotClaimed::refused(refusal, whole()));
        }
    };
    // Only after the body is complete, so that slow senders do not occupy slots.
    let Some(slot) = shared.engine.running().try_enter(shared.settings.max_running) else {
        return Err(NotClaimed::refused(overloaded(), whole()));
    };
    let RequestIdentity { key, address, fingerprint, digests } = &identity;
    (context.address, context.part_digests) = (Some(*address), *digests);
    if context.key.is_empty() {
        context.key = MaskedKey::of(key);
    }
    if keyed.caller == CallerKind::CookiesOnly {
        let known = anonymous::check_cookies(shared, &parts.headers, address, Some(fingerprint));
        if let Err(refusal) = Box::pin(known).await {
            return Err(NotClaimed::refused(refusal, whole()));
        }
    }
    if context.policy().scope.iter().any(ScopePart::names_caller) {
        shared.shared_key_detector.check(key, fingerprint, address);
    }
    Ok(PreparedExchange { identity, keyed, body, trailers, buffers, slot })
}

impl<B> NotClaimed<B> {
    pub(super) fn refused(refusal: Refusal, body: RequestBody<B>) -> Self {
        Self { why: NotClaimedReason::Refused(refusal), body }
    }
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

    fn fingerprint(&self, version: u8) -> Option<Fingerprint> {
        let made = request::fingerprint(version, &self.context.route, self.parts, self.content).ok()??;
        Some(made.0)
    }

    async fn probe(&mut self) -> ProbeOutcome {
        match call_app::probe(self.app, self.context, self.parts, self.key).await {
            ProbeOutcome::Happened(answer) => ProbeOutcome::Happened(self.shared.compress(answer)),
            outcome => outcome,
        }
    }
}

impl Exchange {
    /// Settles the run and builds the response. Returns `None` if the client already has it.
    pub(super) async fn end<RB>(&mut self, outcome: RunOutcome<AppResponse<RB>>) -> Option<Response<ResponseBody<RB>>> {
        let Self { shared, context, run, handler_claim, anonymous, .. } = self;
        let (shared, context) = (&**shared, &**context);
        let outcome = match handler_claim {
            Some(claim) => delegated_outcome(claim, outcome),
            None => outcome,
        };
        let outcome = match outcome {
            RunOutcome::Complete(response, answer) => {
                anonymous.iter().for_each(|anonymous| anonymous.mark_recorded());
                RunOutcome::Complete(response, shared.compress(answer))
            }
            outcome => outcome,
        };
        let decision = match run.take() {
            Some(run) => shared.engine.end(context.policy().terms(), run, outcome, |_| None).await,
            None => Decision::unprotected(outcome),
        };
        if let Some(anonymous) = anonymous.take().filter(|anonymous| anonymous.has_unrecorded()) {
            Box::pin(anonymous.store_cookies(&shared.engine)).await;
        }
        if context.is_late() {
            let outcome = match &decision {
                Decision::Ran(_, stored) => request_outcome(*stored),
                Decision::Replay(..) => RequestOutcome::Replayed,
                Decision::Refused(refusal) => RequestOutcome::Refused(refusal.reason),
            };
            let address = &context.address.expect("a claimed request has an address");
            shared.engine.observer().on_event(&EngineEvent::LateAnswer { address, outcome });
            return None;
        }
        let (response, stored) = match decision {
            Decision::Ran(AppResponse::Whole(response, whole), stored) => {
                let mut response = rules::first_response(response, Some(whole), Some(stored), context);
                let length = response.body().whole_length();
                if length > MAX_UNCOUNTED_RESPONSE_BYTES {
                    let reservation = shared.budget.send(&context.client);
                    reservation.count(length);
                    response.body_mut().attach_reservation(reservation);
                }
                (response, stored)
            }
            Decision::Ran(AppResponse::Tail(status, tail), stored) => {
                let rules = context.route.protocol.rules();
                let status = rules.status(status, &HeaderMap::new(), tail.trailers.as_ref());
                Box::pin(tail.send()).await;
                context.report(shared, request_outcome(stored), status);
                return None;
            }
            Decision::Ran(AppResponse::Refused(refusal), stored) => (context.refuse(&refusal), stored),
            Decision::Ran(AppResponse::Panicked, stored) => {
                let detail = "the handler failed; whether the operation took place is not known";
                (context.fail(StatusCode::INTERNAL_SERVER_ERROR, detail), stored)
            }
            Decision::Replay(entry, stored) => return Some(replay(shared, entry, stored, context).await),
            Decision::Refused(refusal) => return Some(context.refuse_and_report(shared, &refusal)),
        };
        context.report(shared, request_outcome(stored), context.status(&response));
        Some(response)
    }
}

async fn replay<RB>(
    shared: &LayerState, entry: CompletedEntry, stored: StoredAs, context: &RequestContext,
) -> Response<ResponseBody<RB>> {
    let address = context.address.expect("a claimed request has an address");
    let record = match Record::decode(shared.shared_records.share(&address, entry.record)) {
        Ok(record) => record,
        Err(why) => {
            shared.engine.observer().on_event(&EngineEvent::RecordUnreadable(&address));
            let detail = format!("the remembered answer cannot be read: {why}");
            return context.refuse_and_report(shared, &Refusal::new(RefusalReason::StoreUnavailable, detail));
        }
    };
    let response = context.route.protocol.rules().replay(record, stored, context);
    let mut response: Response<ResponseBody<RB>> = response.map(WholeBody::into);
    let length = response.body().whole_length();
    if length > MAX_UNCOUNTED_RESPONSE_BYTES {
        match Box::pin(shared.budget.answer(&context.client, length)).await {
            Ok(reservation) => response.body_mut().attach_reservation(reservation),
            Err(BudgetExhausted) => return context.refuse_and_report(shared, &overloaded()),
        }
    }
    context.report(shared, RequestOutcome::Replayed, context.status(&response));
    response
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
fn delegated_outcome<RB>(claim: &HandlerClaim, outcome: RunOutcome<AppResponse<RB>>) -> RunOutcome<AppResponse<RB>> {
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
