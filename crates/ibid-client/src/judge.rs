//! What an answer means for the client: one table, no I/O.
//!
//! Three questions about each answer. Is it the operation's own, or a refusal? Is it worth another attempt, and when? Has
//! the key done its duty? The last one errs to one side: a key is only given up if no earlier attempt with it can
//! still have an effect whose answer was not seen.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode, header};
use ibid::Reason as Refused;
use serde::Deserialize;

/// Where the types of an ibid server's problems begin. The host before it is of no interest.
const TYPES: &str = "/.well-known/idempotency#";

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Verdict {
    /// The operation's own answer.
    Answer {
        /// Whether it is final, so that the operation has ended.
        settled: bool,
    },
    /// Another attempt, with the same key.
    Retry {
        why: Why,
        /// What the server asks for, where it is asked. None: as the schedule says.
        after: Option<Duration>,
    },
    /// A refusal that another attempt would not change; none is named if this client does not know it.
    Refused(Option<Refused>),
}

/// Why another attempt makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// The first attempt is still running.
    InProgress,
    /// The server has no room, or no store, at the moment.
    Unavailable,
    /// The app behind the gateway was not reached, or its answer was lost.
    Upstream,
    /// Some other 5xx, where the caller wants that retried.
    ServerError,
}

/// A refusal in the form of RFC 9457.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Default)]
#[serde(default)]
pub struct Problem {
    /// Which one. ibid's end in `/.well-known/idempotency#NAME`.
    #[serde(rename = "type")]
    pub kind: String,
    /// A sentence for people.
    pub title: String,
    /// What happened this time, and what to do.
    pub detail: String,
}

/// An answer as far as it is judged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) status: StatusCode,
    pub(crate) headers: &'a HeaderMap,
    /// The whole body, if it was read.
    pub(crate) body: Option<&'a [u8]>,
}

impl Problem {
    /// The name of the refusal, if an ibid server gave it: `in-progress`, `outcome-unknown`, ….
    pub fn name(&self) -> Option<&str> {
        self.kind.rsplit_once(TYPES).map(|(_, name)| name)
    }
}

impl Seen<'_> {
    /// The problem, if it is one.
    pub(crate) fn problem(&self) -> Option<Problem> {
        match self.media_type()? {
            "application/problem+json" => serde_json::from_slice(self.body?).ok(),
            "application/json" if self.headers.contains_key("stripe-should-retry") => self.error_of_stripe(),
            _ => None,
        }
    }

    /// A refusal in the shape of Stripe's errors. The app's own errors are none.
    fn error_of_stripe(&self) -> Option<Problem> {
        #[derive(Deserialize)]
        struct Body {
            error: Told,
        }
        #[derive(Deserialize, Default)]
        #[serde(default)]
        struct Told {
            r#type: String,
            code: String,
            message: String,
        }
        let Told { r#type: kind, code, message } = serde_json::from_slice::<Body>(self.body?).ok()?.error;
        let refused = match (kind.as_str(), code.as_str()) {
            ("idempotency_error", _) => Refused::KeyReused,
            (_, "idempotency_key_in_use") => Refused::InProgress,
            (_, code) => Refused::from_name(code)?,
        };
        let (kind, title) = (format!("{TYPES}{}", refused.name()), refused.title().to_owned());
        Some(Problem { kind, title, detail: message })
    }

    /// Whether it was given before: by any of the headers that say so, or by the envelope.
    pub(crate) fn replayed(&self) -> bool {
        let told = ["idempotent-replayed", "x-idempotency-replay", "x-idempotency-cached"];
        told.iter().any(|name| self.says(name, "true")) || self.cached().unwrap_or(false)
    }

    /// Whether it was given without protection, so that a retry may run again.
    pub(crate) fn degraded(&self) -> bool {
        self.says("idempotency-guarantee", "degraded")
    }

    /// `metadata.cached`.
    fn cached(&self) -> Option<bool> {
        let media = self.media_type()?;
        if media != "application/json" && !media.ends_with("+json") {
            return None;
        }
        #[derive(Deserialize)]
        struct Envelope {
            metadata: Metadata,
        }
        #[derive(Deserialize)]
        struct Metadata {
            cached: bool,
        }
        Some(serde_json::from_slice::<Envelope>(self.body?).ok()?.metadata.cached)
    }

    fn says(&self, name: &str, value: &str) -> bool {
        let mut values = self.headers.get_all(name).iter();
        values.any(|found| found.as_bytes().trim_ascii().eq_ignore_ascii_case(value.as_bytes()))
    }

    fn media_type(&self) -> Option<&str> {
        let value = self.headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        Some(value.split(';').next().unwrap_or_default().trim())
    }

    /// What `Retry-After` asks for, as seconds or as a date. A date is compared with the server's own `Date`, so that
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

/// The table.
pub(crate) fn judge(seen: &Seen<'_>, retry_5xx: bool, now: SystemTime) -> Verdict {
    if let Some(name) = seen.problem().as_ref().and_then(Problem::name) {
        return judge_refusal(Refused::from_name(name), seen, now);
    }
    if seen.replayed() {
        return Verdict::Answer { settled: true };
    }
    // ibid says on the app's own answers that they are not remembered: a conflict with that is the app's own.
    let apps_own = seen.headers.contains_key("idempotency-stored");
    match seen.status.as_u16() {
        409 if !apps_own => Verdict::Retry { why: Why::InProgress, after: None },
        429 | 503 => Verdict::Retry { why: Why::Unavailable, after: seen.retry_after(now) },
        500.. if retry_5xx => Verdict::Retry { why: Why::ServerError, after: None },
        // An earlier attempt may have been let in, and have had its effect.
        401 | 403 | 408 | 409 | 425 | 500.. => Verdict::Answer { settled: false },
        _ => Verdict::Answer { settled: true },
    }
}

fn judge_refusal(refusal: Option<Refused>, seen: &Seen<'_>, now: SystemTime) -> Verdict {
    match refusal {
        Some(Refused::InProgress) => Verdict::Retry { why: Why::InProgress, after: None },
        Some(Refused::StoreUnavailable | Refused::Overloaded | Refused::QuotaExceeded) => {
            Verdict::Retry { why: Why::Unavailable, after: seen.retry_after(now) }
        }
        Some(Refused::UpstreamUnreachable | Refused::UpstreamLost | Refused::UpstreamTimeout) => {
            Verdict::Retry { why: Why::Upstream, after: None }
        }
        Some(
            Refused::KeyMissing
            | Refused::KeyInvalid
            | Refused::ScopeMissing
            | Refused::RequestAmbiguous
            | Refused::IdentityInvalid
            | Refused::ScopeRefused
            | Refused::BodyTooLarge
            | Refused::KeyReused
            | Refused::MethodUnknown
            | Refused::OutcomeUnknown,
        )
        | None => Verdict::Refused(refusal),
    }
}

#[cfg(test)]
mod tests;
