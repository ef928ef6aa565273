//! Decides what a response means for the client: one table, no I/O.
//!
//! Three questions: is the response the operation's own or a refusal, does a retry make sense and when, and can the key
//! be deleted? A key is deleted only if no earlier attempt with it can still have an effect.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode, header};
use ibid::RefusalReason as Refused;
use serde::Deserialize;

/// Precedes the name of the refusal in the problem types of ibid servers. The host before it is ignored.
const PROBLEM_TYPE_PREFIX: &str = "/.well-known/idempotency#";

/// What to do with a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum ResponseAction {
    /// Return the operation's own response.
    Answer {
        /// Whether it is final: the operation is over.
        settled: bool,
    },
    /// Send again with the same key.
    Retry {
        why: RetryCause,
        /// `Retry-After`, where it counts. `None`: the schedule decides.
        after: Option<Duration>,
    },
    /// A refusal that a retry would not change; `None` inside if this client does not know its name.
    Refused(Option<Refused>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RetryCause {
    /// The first attempt is still in progress.
    InProgress,
    /// The server is overloaded, or its store is down.
    Unavailable,
    /// The gateway could not reach the app, or lost its response.
    Upstream,
    /// Another 5xx, and the caller wants those retried.
    ServerError,
}

/// A problem document (RFC 9457) in a response. Stripe-style errors are converted to it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Default)]
#[serde(default)]
pub struct ServerProblem {
    /// The problem type. Those of ibid end in `/.well-known/idempotency#NAME`.
    #[serde(rename = "type")]
    pub kind: String,
    /// A short summary for people.
    pub title: String,
    /// What happened this time, and what to do.
    pub detail: String,
}

/// The parts of a response that the decision depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReceivedResponse<'a> {
    pub(crate) status: StatusCode,
    pub(crate) headers: &'a HeaderMap,
    /// The whole body; `None` if it is streamed to the caller.
    pub(crate) body: Option<&'a [u8]>,
}

impl ServerProblem {
    /// The name of the refusal if an ibid server sent it, such as `in-progress` or `outcome-unknown`.
    pub fn name(&self) -> Option<&str> {
        self.kind.rsplit_once(PROBLEM_TYPE_PREFIX).map(|(_, name)| name)
    }
}

impl ReceivedResponse<'_> {
    pub(crate) fn problem(&self) -> Option<ServerProblem> {
        match self.media_type()? {
            "application/problem+json" => serde_json::from_slice(self.body?).ok(),
            "application/json" if self.headers.contains_key("stripe-should-retry") => self.stripe_error(),
            _ => None,
        }
    }

    /// Converts a refusal in the shape of Stripe's errors. Returns `None` for the app's own errors.
    fn stripe_error(&self) -> Option<ServerProblem> {
        let body: serde_json::Value = serde_json::from_slice(self.body?).ok()?;
        let text = |name: &str| body["error"].get(name).map_or(Some(""), serde_json::Value::as_str);
        let (kind, code, message) = (text("type")?, text("code")?, text("message")?);
        body["error"].as_object()?;
        let refused = match (kind, code) {
            ("idempotency_error", _) => Refused::KeyReused,
            (_, "idempotency_key_in_use") => Refused::InProgress,
            (_, code) => Refused::from_name(code)?,
        };
        let (kind, title) = (format!("{PROBLEM_TYPE_PREFIX}{}", refused.name()), refused.title().to_owned());
        Some(ServerProblem { kind, title, detail: message.into() })
    }

    /// Whether the response is a replay, by any of the headers that mark one or by the envelope.
    pub(crate) fn is_replayed(&self) -> bool {
        let told = ["idempotent-replayed", "x-idempotency-replay", "x-idempotency-cached"];
        told.iter().any(|name| self.header_is(name, "true")) || self.envelope_cached().unwrap_or(false)
    }

    /// Whether the operation ran without protection, so that a retry may run it again.
    pub(crate) fn is_degraded(&self) -> bool {
        self.header_is("idempotency-guarantee", "degraded")
    }

    /// Reads `metadata.cached` of a JSON body.
    fn envelope_cached(&self) -> Option<bool> {
        let media = self.media_type()?;
        if media != "application/json" && !media.ends_with("+json") {
            return None;
        }
        let body: serde_json::Value = serde_json::from_slice(self.body?).ok()?;
        body["metadata"]["cached"].as_bool()
    }

    fn header_is(&self, name: &str, value: &str) -> bool {
        let mut values = self.headers.get_all(name).iter();
        values.any(|found| found.as_bytes().trim_ascii().eq_ignore_ascii_case(value.as_bytes()))
    }

    fn media_type(&self) -> Option<&str> {
        let value = self.headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        Some(value.split(';').next().unwrap_or_default().trim())
    }

    /// Parses `Retry-After`, as seconds or as a date. A date is compared with the server's own `Date`, so that the
    /// clocks need not agree.
    fn retry_after(&self, now: SystemTime) -> Option<Duration> {
        let date = |value: &str| httpdate::parse_http_date(value).ok();
        let value = self.headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
        if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
        }
        let server = self.headers.get(header::DATE).and_then(|value| date(value.to_str().ok()?));
        Some(date(value)?.duration_since(server.unwrap_or(now)).unwrap_or_default())
    }
}

/// The decision table.
pub(crate) fn classify_response(seen: &ReceivedResponse<'_>, retry_5xx: bool, now: SystemTime) -> ResponseAction {
    if let Some(name) = seen.problem().as_ref().and_then(ServerProblem::name) {
        return classify_refusal(Refused::from_name(name), seen, now);
    }
    if seen.is_replayed() {
        return ResponseAction::Answer { settled: true };
    }
    // The gateway adds this header to the app's own responses that it does not remember: a 409 with it is the app's
    // own.
    let apps_own = seen.headers.contains_key("idempotency-stored");
    match seen.status.as_u16() {
        409 if !apps_own => ResponseAction::Retry { why: RetryCause::InProgress, after: None },
        429 | 503 => ResponseAction::Retry { why: RetryCause::Unavailable, after: seen.retry_after(now) },
        500.. if retry_5xx => ResponseAction::Retry { why: RetryCause::ServerError, after: None },
        // An earlier attempt may have been accepted and had an effect.
        401 | 403 | 408 | 409 | 425 | 500.. => ResponseAction::Answer { settled: false },
        _ => ResponseAction::Answer { settled: true },
    }
}

fn classify_refusal(refusal: Option<Refused>, seen: &ReceivedResponse<'_>, now: SystemTime) -> ResponseAction {
    match refusal {
        Some(Refused::InProgress) => ResponseAction::Retry { why: RetryCause::InProgress, after: None },
        Some(Refused::StoreUnavailable | Refused::Overloaded | Refused::QuotaExceeded) => {
            ResponseAction::Retry { why: RetryCause::Unavailable, after: seen.retry_after(now) }
        }
        Some(Refused::UpstreamUnreachable | Refused::UpstreamLost | Refused::UpstreamTimeout) => {
            ResponseAction::Retry { why: RetryCause::Upstream, after: None }
        }
        refusal => ResponseAction::Refused(refusal),
    }
}

#[cfg(test)]
mod tests;
