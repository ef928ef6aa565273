//! `/api/…`: maps paths to endpoints, checks the caller, and responds.
//!
//! The checks run in this order: path (404), method (405), authentication (401, 429), role (403), parameters (400). So
//! an error reveals nothing that the caller may not see.

use std::net::IpAddr;

use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use hyper::body::Incoming;
use ibid::store::Address;
use serde::Serialize;

use super::{
    AdminProblem, AdminState,
    auth::{AdminCaller, AuthError, AuthMethod, CSRF_HEADER},
    body::{self, ChangeVerb},
    problem::AdminResponse,
    query::{DEFAULT_PAGE_SIZE, ListRequest, MAX_PAGE_SIZE, QueryParams},
    records, reseal, stats,
};

/// The OpenAPI document of this API.
pub const OPENAPI_DOCUMENT: &str = include_str!("openapi.json");

/// Default and maximum number of refusals on a page.
const REFUSAL_LIMITS: (usize, usize) = (50, 256);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ApiEndpoint<'a> {
    Document,
    Records,
    Record(&'a str),
    Change(&'a str, ChangeVerb),
    Reseal,
    Stats,
    Policies,
    Store,
    Audit,
    Shadow,
    Refusals,
}

impl<'a> ApiEndpoint<'a> {
    fn from_path(path: &'a str) -> Option<Self> {
        let mut segments = path.strip_prefix("/api/")?.split('/');
        let endpoint = match (segments.next()?, segments.next(), segments.next()) {
            ("openapi.json", None, _) => Self::Document,
            ("records", None, _) => Self::Records,
            ("records", Some(address), None) => Self::Record(address),
            ("records", Some(address), Some("release")) => Self::Change(address, ChangeVerb::Release),
            ("records", Some(address), Some("forget")) => Self::Change(address, ChangeVerb::Forget),
            ("records", Some(address), Some("resolve")) => Self::Change(address, ChangeVerb::Resolve),
            ("reseal", None, _) => Self::Reseal,
            ("stats", None, _) => Self::Stats,
            ("policies", None, _) => Self::Policies,
            ("store", None, _) => Self::Store,
            ("audit", None, _) => Self::Audit,
            ("shadow", None, _) => Self::Shadow,
            ("refusals", None, _) => Self::Refusals,
            _ => return None,
        };
        segments.next().is_none().then_some(endpoint)
    }

    fn allowed_methods(self) -> &'static str {
        match self {
            Self::Change(..) | Self::Reseal => "POST, OPTIONS",
            _ => "GET, HEAD, OPTIONS",
        }
    }

    fn accepts(self, method: &Method) -> bool {
        match self {
            Self::Change(..) | Self::Reseal => method == Method::POST,
            _ => matches!(*method, Method::GET | Method::HEAD),
        }
    }

    /// Whether the endpoint shows more than one user's records.
    fn needs_full_view(self) -> bool {
        !matches!(self, Self::Document | Self::Records | Self::Record(_) | Self::Change(..) | Self::Audit)
    }
}

pub(super) async fn respond(desk: &AdminState, request: Request<Incoming>, client: IpAddr) -> AdminResponse {
    handle(desk, request, client).await.unwrap_or_else(AdminProblem::into_response)
}

async fn handle(desk: &AdminState, request: Request<Incoming>, client: IpAddr) -> Result<AdminResponse, AdminProblem> {
    let (parts, incoming) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let Some(endpoint) = ApiEndpoint::from_path(&path) else {
        let detail = "there is no such endpoint; /api/openapi.json says which there are";
        return Err(AdminProblem::new(StatusCode::NOT_FOUND, detail));
    };
    if parts.method == Method::OPTIONS {
        let mut reply = super::build_response(StatusCode::NO_CONTENT, "text/plain; charset=utf-8", String::new());
        reply.headers_mut().insert(header::ALLOW, HeaderValue::from_static(endpoint.allowed_methods()));
        reply.headers_mut().remove(header::CONTENT_TYPE);
        return Ok(reply);
    }
    if !endpoint.accepts(&parts.method) {
        return Err(AdminProblem::method_not_allowed(endpoint.allowed_methods()));
    }
    if endpoint == ApiEndpoint::Document {
        QueryParams::parse(parts.uri.query(), &[])?;
        return Ok(super::build_response(StatusCode::OK, "application/json", OPENAPI_DOCUMENT.into()));
    }
    let caller =
        desk.auth.caller(&desk.live.now().tokens, &parts.headers, client).inspect_err(|denied| match denied {
            // The login limit also limits how often this is logged.
            AuthError::InvalidToken => tracing::warn!(%client, "the admin API was asked with a wrong token"),
            denied => tracing::debug!(%client, ?denied, "the admin API was asked by nobody who is known"),
        })?;
    if endpoint.needs_full_view() && !caller.can_see_all() {
        let detail =
            "this token sees the records of one user; this is about all of them and needs role \"viewer\" or \"admin\"";
        return Err(AdminProblem::new(StatusCode::FORBIDDEN, detail));
    }
    if parts.method == Method::POST {
        let csrf = parts.headers.get(CSRF_HEADER).and_then(|csrf| csrf.to_str().ok());
        caller.authorize_change(&parts.headers, csrf)?;
        QueryParams::parse(parts.uri.query(), &[])?;
        return handle_change(desk, &caller, endpoint, &parts.headers, incoming).await;
    }
    handle_read(desk, &caller, endpoint, parts.uri.query()).await
}

async fn handle_change(
    desk: &AdminState, caller: &AdminCaller, endpoint: ApiEndpoint<'_>, headers: &HeaderMap, incoming: Incoming,
) -> Result<AdminResponse, AdminProblem> {
    let of = match endpoint {
        ApiEndpoint::Change(address, verb) => Some((parse_address(address)?, verb)),
        _ => None,
    };
    if caller.authenticated_by != AuthMethod::Bearer && !body::is_json(headers) {
        let detail = "the body must be application/json";
        return Err(AdminProblem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail));
    }
    let body = body::read(incoming, body::MAX_BODY_BYTES).await?;
    match of {
        Some((address, verb)) => {
            json_response(&records::change(desk, caller, address, body::parse_change(verb, &body)?).await?)
        }
        None => json_response(&reseal::reseal(desk, caller, body::parse_reseal(&body)?).await?),
    }
}

async fn handle_read(
    desk: &AdminState, caller: &AdminCaller, endpoint: ApiEndpoint<'_>, query: Option<&str>,
) -> Result<AdminResponse, AdminProblem> {
    match endpoint {
        ApiEndpoint::Records => {
            let ListRequest { query, from, limit } = ListRequest::parse(query)?;
            json_response(&records::list(desk, caller, query, from, limit).await?)
        }
        ApiEndpoint::Record(address) => {
            QueryParams::parse(query, &[])?;
            json_response(&records::show(desk, caller, parse_address(address)?).await?)
        }
        ApiEndpoint::Audit => {
            let params = QueryParams::parse(query, &["limit", "cursor"])?;
            let (before, limit) = (params.cursor_number()?, params.limit(DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)?);
            json_response(&desk.audit.page(before, limit, caller.user.as_deref()))
        }
        ApiEndpoint::Refusals => {
            let params = QueryParams::parse(query, &["reason", "limit"])?;
            json_response(
                &stats::refusals(desk, params.reason()?, params.limit(REFUSAL_LIMITS.0, REFUSAL_LIMITS.1)?).await,
            )
        }
        _ => {
            QueryParams::parse(query, &[])?;
            match endpoint {
                ApiEndpoint::Stats => json_response(&stats::stats(desk).await),
                ApiEndpoint::Policies => json_response(&stats::policies(desk)),
                ApiEndpoint::Store => json_response(&stats::store(desk).await),
                _ => json_response(&stats::shadow(desk)),
            }
        }
    }
}

fn parse_address(text: &str) -> Result<Address, AdminProblem> {
    let wrong =
        || AdminProblem::bad_request(format!("{text:?} is no address; send the 64 hex digits that the list shows"));
    Address::from_hex(text).ok_or_else(wrong)
}

fn json_response(value: &impl Serialize) -> Result<AdminResponse, AdminProblem> {
    match serde_json::to_string(value) {
        Ok(text) => Ok(super::build_response(StatusCode::OK, "application/json", text + "\n")),
        Err(why) => Err(AdminProblem::new(StatusCode::INTERNAL_SERVER_ERROR, why.to_string())),
    }
}
