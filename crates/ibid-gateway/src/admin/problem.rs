//! What whoever asked wrongly is told: RFC 9457, and what is allowed instead.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::auth::{Denied, Forbidden};
use crate::records::NotFound;

/// What clients of the admin port get.
pub(crate) type Reply = Response<Full<Bytes>>;

/// A request that is not answered as asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// Of the answer.
    pub status: StatusCode,
    /// What happened, what is allowed, what to do.
    pub detail: String,
    /// What cannot be used, if that is it.
    pub gone: Option<Gone>,
    /// Members besides those of every problem.
    pub more: Option<Box<Map<String, Value>>>,
    /// Of the answer.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// Something that the admin port cannot do without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// It does not answer, or fails.
    Store,
    /// Nothing can be written to it, so nothing may be changed.
    Audit,
}

impl Problem {
    /// Without anything besides.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), gone: None, more: None, headers: Vec::new() }
    }

    /// It cannot be asked for like this.
    pub fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// With the members of an object.
    pub fn with(mut self, more: &impl Serialize) -> Self {
        if let Ok(Value::Object(members)) = serde_json::to_value(more) {
            self.more.get_or_insert_default().extend(members);
        }
        self
    }

    pub(super) fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// Only these methods are understood there.
    pub(super) fn method(allowed: &'static str) -> Self {
        let detail = format!("only {allowed} are understood here");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, detail).header(header::ALLOW, HeaderValue::from_static(allowed))
    }

    /// Its bytes.
    pub(crate) fn into_reply(self) -> Reply {
        let mut body = json!({
            "type": "about:blank",
            "title": self.status.canonical_reason().unwrap_or("Error"),
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        if let Value::Object(members) = &mut body {
            members.extend(self.more.into_iter().flat_map(|more| *more));
        }
        let mut reply = super::reply(self.status, "application/problem+json", format!("{body}\n"));
        for (name, value) in self.headers {
            reply.headers_mut().insert(name, value);
        }
        reply
    }
}

impl From<Denied> for Problem {
    fn from(denied: Denied) -> Self {
        let unauthorized = |detail: &str| {
            let how = HeaderValue::from_static("Bearer realm=\"ibid\"");
            Self::new(StatusCode::UNAUTHORIZED, detail).header(header::WWW_AUTHENTICATE, how)
        };
        match denied {
            Denied::NoTokens => unauthorized(
                "no token is configured, so nobody may use the admin API: set admin.token in the gateway's \
                 configuration, such as token = \"file:/etc/ibid/admin.token\"; it is taken up without a restart",
            ),
            Denied::Missing => unauthorized("send a token of [admin] in the header Authorization: Bearer TOKEN"),
            Denied::Wrong => unauthorized(
                "this is no token of [admin]; send one in the header Authorization: Bearer TOKEN, or log in again",
            ),
            Denied::Limited { retry_after } => {
                let detail = "too many log-ins from this address have failed; try again later";
                Self::new(StatusCode::TOO_MANY_REQUESTS, detail).header(header::RETRY_AFTER, seconds(retry_after))
            }
        }
    }
}

impl From<Forbidden> for Problem {
    fn from(forbidden: Forbidden) -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            match forbidden {
                Forbidden::Role => "this token sees and does not change; a change needs a token of role \"admin\"",
                Forbidden::Elsewhere => {
                    "a page of another origin asked for this change; changes are taken from here only"
                }
                Forbidden::NotMeant => {
                    "in a session a change needs the header Ibid-Csrf with the session's secret, sent by a browser from a \
                     page of this origin"
                }
            },
        )
    }
}

impl From<NotFound> for Problem {
    fn from(why: NotFound) -> Self {
        match &why {
            NotFound::Absent => Self::new(StatusCode::NOT_FOUND, why.to_string()),
            NotFound::Many(..) | NotFound::Restless => Self::new(StatusCode::CONFLICT, why.to_string()),
            NotFound::Store(error) => Self::unavailable(error.to_string()),
        }
    }
}

impl Problem {
    /// Nothing was changed, because nobody would know of it.
    pub(super) fn unwritable(why: &std::io::Error) -> Self {
        tracing::error!(%why, "the audit trail cannot be written; nothing was changed");
        let detail = format!("the audit trail cannot be written, so nothing was changed: {why}");
        Self { gone: Some(Gone::Audit), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, detail) }
    }

    /// The store cannot be used.
    pub(super) fn unavailable(why: impl std::fmt::Display) -> Self {
        let detail = format!("the store cannot be used: {why}");
        let gone = Self { gone: Some(Gone::Store), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, detail) };
        gone.header(header::RETRY_AFTER, seconds(Duration::from_secs(1)))
    }
}

fn seconds(duration: Duration) -> HeaderValue {
    HeaderValue::from(duration.as_secs().max(1))
}
