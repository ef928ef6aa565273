//! `/api/…`: the admin API for programs.
//!
//! The router checks path (404) and method (405); then the extractors check authentication (401, 429), role (403) and
//! parameters (400) in the order of a handler's arguments. So an error reveals nothing that the caller may not see.

use std::{convert::Infallible, sync::Arc};

use axum::{
    Router,
    extract::{FromRequest, RawQuery, Request, State},
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use http::{StatusCode, header, request::Parts};
use ibid::store::Address;
use serde::Serialize;
use serde_json::Value;

use super::{
    AdminProblem, AdminState, ClientInfo,
    audit::AuditEntryPage,
    auth::{AdminCaller, AuthError, AuthMethod, CSRF_HEADER},
    extractors,
    input::{self, DEFAULT_PAGE_SIZE, ListRequest, MAX_PAGE_SIZE, QueryParams},
    read_only, records, stats, with_methods,
};
use crate::records::{ChangeReport, ChangeVerb, RecordList, RecordView, ResealReport, RevealedKey};

pub const OPENAPI_DOCUMENT: &str = include_str!("openapi.json");

/// Default and maximum number of refusals on a page.
const REFUSAL_LIMITS: (usize, usize) = (50, 256);

type AppState = State<Arc<AdminState>>;
/// A report about all records, without parameters.
type Report = (FullView, NoQuery);
type ApiResult<T> = Result<ApiJson<T>, AdminProblem>;

pub(super) fn routes() -> Router<Arc<AdminState>> {
    let mut routes = Router::new()
        .route("/api/openapi.json", read_only(async |_: NoQuery| ([JSON], OPENAPI_DOCUMENT)))
        .route("/api/records", read_only(list_records))
        .route("/api/records/{address}", read_only(show_record))
        .route("/api/audit", read_only(list_audit_entries))
        .route("/api/refusals", read_only(list_refusals))
        .route("/api/stats", read_only(async |_: Report, state: AppState| ApiJson(stats::stats(&state).await)))
        .route("/api/policies", read_only(async |_: Report, state: AppState| ApiJson(stats::policies(&state))))
        .route("/api/store", read_only(async |_: Report, state: AppState| ApiJson(stats::store(&state).await)))
        .route("/api/shadow", read_only(async |_: Report, state: AppState| ApiJson(stats::shadow(&state))))
        .route("/api/records/{address}/reveal", with_methods(post(reveal_key), CHANGE_METHODS))
        .route("/api/reseal", with_methods(post(reseal_records), CHANGE_METHODS));
    for verb in ChangeVerb::ALL {
        let path = format!("/api/records/{{address}}/{}", verb.name());
        routes = routes.route(&path, with_methods(post(change_record), CHANGE_METHODS));
    }
    routes
}

const CHANGE_METHODS: &str = "POST, OPTIONS";
const JSON: (header::HeaderName, &str) = (header::CONTENT_TYPE, "application/json");

pub(super) fn not_found() -> AdminProblem {
    AdminProblem::new(StatusCode::NOT_FOUND, "there is no such endpoint; /api/openapi.json says which there are")
}

async fn list_records(state: AppState, caller: AdminCaller, RawQuery(query): RawQuery) -> ApiResult<RecordList> {
    let ListRequest { query, from, limit } = ListRequest::parse(query.as_deref())?;
    Ok(ApiJson(records::list(&state, &caller, query, from, limit).await?))
}

async fn show_record(
    state: AppState, caller: AdminCaller, _: NoQuery, RecordAddress(address): RecordAddress,
) -> ApiResult<RecordView> {
    Ok(ApiJson(records::show(&state, &caller, address).await?))
}

async fn change_record(
    state: AppState, ChangingCaller(caller): ChangingCaller, RecordAddress(address): RecordAddress, verb: ChangeVerb,
    ApiBody(body): ApiBody,
) -> ApiResult<ChangeReport> {
    Ok(ApiJson(records::change(&state, &caller, address, input::parse_change(verb, &body)?).await?))
}

async fn reveal_key(
    state: AppState, ChangingCaller(caller): ChangingCaller, RecordAddress(address): RecordAddress,
    ApiBody(body): ApiBody,
) -> ApiResult<RevealedKey> {
    Ok(ApiJson(records::reveal(&state, &caller, address, &input::parse_reveal(&body)?).await?))
}

async fn reseal_records(
    state: AppState, _: FullView, ChangingCaller(caller): ChangingCaller, ApiBody(body): ApiBody,
) -> ApiResult<ResealReport> {
    Ok(ApiJson(records::reseal(&state, &caller, input::parse_reseal(&body)?).await?))
}

async fn list_audit_entries(
    state: AppState, caller: AdminCaller, RawQuery(query): RawQuery,
) -> ApiResult<AuditEntryPage> {
    let params = QueryParams::parse(query.as_deref(), &["limit", "cursor"])?;
    let (before, limit) = (params.cursor_number()?, params.limit(DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)?);
    Ok(ApiJson(records::audit_page(&state, before, limit, caller.user.as_deref()).await?))
}

async fn list_refusals(state: AppState, _: FullView, RawQuery(query): RawQuery) -> ApiResult<Value> {
    let params = QueryParams::parse(query.as_deref(), &["reason", "limit"])?;
    let (reason, limit) = (params.reason()?, params.limit(REFUSAL_LIMITS.0, REFUSAL_LIMITS.1)?);
    Ok(ApiJson(stats::refusals(&state, reason, limit).await))
}

/// A JSON response that ends with a newline.
pub(super) struct ApiJson<T>(pub(super) T);

impl<T: Serialize> IntoResponse for ApiJson<T> {
    fn into_response(self) -> Response {
        match serde_json::to_string(&self.0) {
            Ok(text) => ([JSON], text + "\n").into_response(),
            Err(why) => AdminProblem::new(StatusCode::INTERNAL_SERVER_ERROR, why.to_string()).into_response(),
        }
    }
}

/// A caller who may see more than one user's records.
struct FullView;

/// A caller who may make changes, with a request that is meant as one.
struct ChangingCaller(AdminCaller);

struct RecordAddress(Address);

struct NoQuery;

/// The whole body, limited in size and time.
struct ApiBody(Bytes);

extractors! {
    AdminCaller, AdminProblem: |parts, state| {
        let client = ClientInfo::of(parts).client;
        let caller = state.auth.caller(&state.live.now().tokens, &parts.headers, client);
        caller.map_err(|denied| {
            match denied {
                // The login limit also limits how often this is logged.
                AuthError::InvalidToken => tracing::warn!(%client, "a request to the admin API had a wrong token"),
                _ => tracing::debug!(%client, ?denied, "a request to the admin API was not authenticated"),
            }
            denied.into()
        })
    };
    FullView, AdminProblem: |parts, state| {
        if AdminCaller::from_request_parts(parts, state).await?.can_see_all() {
            return Ok(Self);
        }
        let detail =
            "this token sees the records of one user; this is about all of them and needs role \"viewer\" or \"admin\"";
        Err(AdminProblem::new(StatusCode::FORBIDDEN, detail))
    };
    ChangingCaller, AdminProblem: |parts, state| {
        let caller = AdminCaller::from_request_parts(parts, state).await?;
        let csrf = parts.headers.get(CSRF_HEADER).and_then(|csrf| csrf.to_str().ok());
        caller.authorize_change(&parts.headers, csrf)?;
        NoQuery::from_request_parts(parts, state).await?;
        if caller.authenticated_by != AuthMethod::Bearer && !input::has_media_type(&parts.headers, "application/json") {
            let detail = "the body must be application/json";
            return Err(AdminProblem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail));
        }
        Ok(Self(caller))
    };
    RecordAddress, AdminProblem: |parts, _state| {
        let text = parts.uri.path().split('/').nth(3).unwrap_or_default();
        let wrong = || format!("{text:?} is no address; send the 64 hex digits that the list shows");
        Ok(Self(Address::from_hex(text).ok_or_else(wrong)?))
    };
    // The last segment of the path.
    ChangeVerb, Infallible: |parts, _state| {
        let name = parts.uri.path().rsplit('/').next().unwrap_or_default();
        Ok(Self::from_name(name).expect("only routes of verbs use it"))
    };
    NoQuery, AdminProblem: |parts, _state| {
        QueryParams::parse(parts.uri.query(), &[])?;
        Ok(Self)
    };
}

impl<S: Sync> FromRequest<S> for ApiBody {
    type Rejection = AdminProblem;

    async fn from_request(request: Request, _: &S) -> Result<Self, AdminProblem> {
        input::read(request.into_body(), input::MAX_BODY_BYTES).await.map(Self)
    }
}

impl ClientInfo {
    pub(crate) fn of(parts: &Parts) -> Self {
        *parts.extensions.get().expect("every request of a connection has it")
    }
}
