//! Error responses of the admin port: problem documents (RFC 9457) that say what is allowed instead.

use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::auth::{AuthError, ForbiddenReason};
use crate::records::RecordLookupError;

#[derive(Debug, Clone, PartialEq)]
pub struct AdminProblem {
    pub status: StatusCode,
    /// What happened, what is allowed, what to do.
    pub detail: String,
    pub unavailable_part: Option<UnavailablePart>,
    pub extra_members: Option<Box<Map<String, Value>>>,
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnavailablePart {
    Store,
    /// The audit trail cannot be written, so nothing may be changed.
    Audit,
}

impl AdminProblem {
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), unavailable_part: None, extra_members: None, headers: Vec::new() }
    }

    /// Adds the members of a JSON object.
    pub fn with(mut self, more: &impl Serialize) -> Self {
        if let Ok(Value::Object(members)) = serde_json::to_value(more) {
            self.extra_members.get_or_insert_default().extend(members);
        }
        self
    }

    pub(super) fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// A 405 with these methods in `Allow`.
    pub(super) fn method_not_allowed(allowed: &'static str) -> Self {
        let detail = format!("only {allowed} are understood here");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, detail).with_header(header::ALLOW, HeaderValue::from_static(allowed))
    }

    /// Nothing was changed, because the change could not be audited.
    pub(super) fn audit_unwritable(why: &std::io::Error) -> Self {
        tracing::error!(%why, "the audit trail cannot be written; nothing was changed");
        let detail = format!("the audit trail cannot be written, so nothing was changed: {why}");
        Self { unavailable_part: Some(UnavailablePart::Audit), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, detail) }
    }

    pub(super) fn store_unavailable(why: impl std::fmt::Display) -> Self {
        let detail = format!("the store cannot be used: {why}");
        let gone = Self::new(StatusCode::SERVICE_UNAVAILABLE, detail).with_header(header::RETRY_AFTER, 1.into());
        Self { unavailable_part: Some(UnavailablePart::Store), ..gone }
    }
}

impl IntoResponse for AdminProblem {
    fn into_response(self) -> Response {
        let mut body = json!({
            "type": "about:blank",
            "title": self.status.canonical_reason().unwrap_or("Error"),
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        if let Value::Object(members) = &mut body {
            members.extend(self.extra_members.into_iter().flat_map(|more| *more));
        }
        let kind = [(header::CONTENT_TYPE, "application/problem+json")];
        let mut answer = (self.status, kind, format!("{body}\n")).into_response();
        answer.headers_mut().extend(self.headers);
        // Also where a page of the console responds with it.
        super::add_headers(answer.headers_mut(), &super::API_HEADERS);
        answer
    }
}

/// What is wrong with a parameter or a body.
impl From<String> for AdminProblem {
    fn from(detail: String) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }
}

impl From<AuthError> for AdminProblem {
    fn from(denied: AuthError) -> Self {
        let (status, name, value) = match denied {
            AuthError::RateLimited { retry_after } => {
                (StatusCode::TOO_MANY_REQUESTS, header::RETRY_AFTER, retry_after.as_secs().max(1).into())
            }
            _ => {
                let how = HeaderValue::from_static("Bearer realm=\"ibid\"");
                (StatusCode::UNAUTHORIZED, header::WWW_AUTHENTICATE, how)
            }
        };
        Self::new(status, denied.to_string()).with_header(name, value)
    }
}

impl From<ForbiddenReason> for AdminProblem {
    fn from(forbidden: ForbiddenReason) -> Self {
        Self::new(StatusCode::FORBIDDEN, forbidden.to_string())
    }
}

impl From<RecordLookupError> for AdminProblem {
    fn from(why: RecordLookupError) -> Self {
        match why {
            RecordLookupError::NotFound => Self::new(StatusCode::NOT_FOUND, why.to_string()),
            RecordLookupError::Store(error) => Self::store_unavailable(error),
            _ => Self::new(StatusCode::CONFLICT, why.to_string()),
        }
    }
}
