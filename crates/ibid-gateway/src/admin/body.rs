//! What a change is asked for with.

use std::{fmt, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use ibid::store::Fence;
use serde::{
    Deserialize,
    de::{self, Deserializer},
};
use tokio::time::timeout;

use super::{
    Problem,
    query::{MOST, USUAL, checked_cursor, duration},
    reseal,
};
use crate::records::{Answer, Change, What, view::unhex};

/// A larger body is refused.
pub(super) const LARGEST: usize = 16 << 20;
/// How long it may take to arrive.
const PATIENCE: Duration = Duration::from_secs(30);
/// Characters of a reason at most.
pub const LONGEST_REASON: usize = 1000;

/// What to do to a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Release,
    Forget,
    Resolve,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plain {
    reason: String,
    #[serde(default, deserialize_with = "some_whole")]
    fence: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Resolve {
    reason: String,
    #[serde(default, deserialize_with = "some_whole")]
    fence: Option<u64>,
    r#as: Ended,
    answer: Option<Answered>,
    keep: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reseal {
    reason: String,
    cursor: Option<String>,
    #[serde(default, deserialize_with = "some_whole")]
    limit: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Ended {
    Done,
    NotExecuted,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Answered {
    #[serde(deserialize_with = "whole")]
    status: u64,
    #[serde(default)]
    headers: Vec<(String, String)>,
    #[serde(default)]
    body: Body,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Body {
    Text(String),
    Hex(Hex),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hex {
    hex: String,
}

/// A whole number, also one that is written as `201.0`: to JSON they are the same. Read as a [`serde_json::Number`], which can
/// be had whether or not numbers are kept as written.
fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let wrong =
        |found: &dyn fmt::Display| de::Error::custom(format!("invalid value: {found}, expected a whole number"));
    let value = serde_json::Value::deserialize(deserializer)?;
    let Some(number) = value.as_number() else { return Err(wrong(&value)) };
    // Beyond that not every whole number has a form of its own.
    let exact = |number: f64| (0.0..=9_007_199_254_740_992.0).contains(&number) && number.fract() == 0.0;
    match (number.as_u64(), number.as_f64()) {
        (Some(whole), _) => Ok(whole),
        (None, Some(float)) if exact(float) => Ok(float as u64),
        _ => Err(wrong(&number)),
    }
}

fn some_whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    whole(deserializer).map(Some)
}

impl Default for Body {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

/// Reads all of a body, bounded in size and time.
pub(crate) async fn read(body: Incoming, largest: usize) -> Result<Bytes, Problem> {
    match timeout(PATIENCE, Limited::new(body, largest).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(why)) if why.is::<LengthLimitError>() => {
            let most =
                if largest < 1 << 20 { format!("{} KiB", largest >> 10) } else { format!("{} MiB", largest >> 20) };
            let detail = format!("the body is larger than {most}, the most that is taken");
            Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail))
        }
        Ok(Err(_)) => Err(Problem::bad("the body broke off")),
        Err(_) => Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    }
}

/// Whether it says that it is JSON.
pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// The change that a body asks for.
pub(super) fn change(verb: Verb, body: &[u8]) -> Result<Change, Problem> {
    let (what, reason, fence) = match verb {
        Verb::Release | Verb::Forget => {
            let Plain { reason, fence } = parsed(body, "{\"reason\": TEXT, \"fence\": NUMBER, which may be left out}")?;
            (if verb == Verb::Forget { What::Forget } else { What::Release }, reason, fence)
        }
        Verb::Resolve => {
            let resolve: Resolve = parsed(
                body,
                "{\"reason\": TEXT, \"as\": \"not-executed\"} or {\"reason\": TEXT, \"as\": \"done\", \"answer\": \
                 {\"status\": CODE, \"headers\": [[NAME, VALUE]], \"body\": TEXT}}, and \"fence\": NUMBER",
            )?;
            (resolve.what()?, resolve.reason, resolve.fence)
        }
    };
    Ok(Change { what, reason: checked_reason(&reason)?, fence: checked_fence(fence)? })
}

/// The reseal that a body asks for.
pub(super) fn reseal(body: &[u8]) -> Result<reseal::Asked, Problem> {
    let allowed =
        "{\"reason\": TEXT, \"cursor\": what \"next\" said, \"limit\": NUMBER}, of which the last two may be left out";
    let Reseal { reason, cursor, limit } = parsed(body, allowed)?;
    let from = match cursor.as_deref() {
        None | Some("") => None,
        Some(text) => Some(checked_cursor(text)?),
    };
    let limit = limit.unwrap_or(USUAL as u64);
    let at_most = u32::try_from(limit).ok().filter(|limit| (1..=MOST as u32).contains(limit));
    let at_most = at_most.ok_or_else(|| Problem::bad(format!("limit: {limit} is no limit; allowed is 1 to {MOST}")))?;
    Ok(reseal::Asked { reason: checked_reason(&reason)?, from, at_most })
}

fn parsed<'a, T: Deserialize<'a>>(body: &'a [u8], allowed: &str) -> Result<T, Problem> {
    // What serde says of an untagged body is of no use to anybody.
    let said = |why: serde_json::Error| {
        why.to_string().replace(
            "data did not match any variant of untagged enum Body",
            "answer.body: allowed is TEXT or {\"hex\": DIGITS}",
        )
    };
    serde_json::from_slice(body)
        .map_err(|why| Problem::bad(format!("the body cannot be used: {}; send {allowed}", said(why))))
}

/// A reason that says something.
///
/// # Errors
/// What is wrong with it.
pub fn checked_reason(reason: &str) -> Result<String, Problem> {
    let text = reason.trim();
    if text.is_empty() {
        return Err(Problem::bad("reason: it is empty; say why, for whoever reads the audit trail"));
    }
    let odd = |character: char| character.is_control() && !matches!(character, '\n' | '\r' | '\t');
    if reason.chars().count() > LONGEST_REASON || text.contains(odd) {
        let what =
            format!("reason: it cannot be kept; allowed are up to {LONGEST_REASON} characters that can be shown");
        return Err(Problem::bad(what));
    }
    Ok(text.into())
}

/// How long an answer is to be kept.
///
/// # Errors
/// What is wrong with it.
pub fn checked_keep(text: &str) -> Result<Duration, Problem> {
    duration(text).filter(|keep| !keep.is_zero()).ok_or_else(|| {
        Problem::bad(format!("keep: {text:?} is no duration to keep it for; allowed is one such as 24h or 7d"))
    })
}

fn checked_fence(fence: Option<u64>) -> Result<Option<Fence>, Problem> {
    match fence {
        None => Ok(None),
        Some(fence) if (1..=i64::MAX as u64).contains(&fence) => Ok(Some(Fence(fence))),
        Some(fence) => {
            Err(Problem::bad(format!("fence: {fence} is none; send the one that the record showed, or none")))
        }
    }
}

impl Resolve {
    fn what(&self) -> Result<What, Problem> {
        let answer = match (self.r#as, &self.answer) {
            (Ended::NotExecuted, None) if self.keep.is_none() => return Ok(What::Release),
            (Ended::NotExecuted, _) => {
                return Err(Problem::bad("as: what was not executed has no answer; leave out answer and keep"));
            }
            (Ended::Done, None) => {
                return Err(Problem::bad("answer: missing; as \"done\" needs the answer, with its status at least"));
            }
            (Ended::Done, Some(answer)) => answer,
        };
        let status = u16::try_from(answer.status).ok().filter(|status| (200..=599).contains(status));
        let status = status.and_then(|status| StatusCode::from_u16(status).ok());
        let Some(status) = status else {
            return Err(Problem::bad(format!("answer.status: {} is none; allowed is 200 to 599", answer.status)));
        };
        let mut headers = HeaderMap::new();
        for (name, value) in &answer.headers {
            let (name, value) =
                Answer::header(name, value).map_err(|why| Problem::bad(format!("answer.headers: {why}")))?;
            if headers.try_append(name, value).is_err() {
                return Err(Problem::bad("answer.headers: there are too many"));
            }
        }
        let body = match &answer.body {
            Body::Text(text) => Bytes::copy_from_slice(text.as_bytes()),
            Body::Hex(Hex { hex }) => unhex(hex)
                .map(Bytes::from)
                .ok_or_else(|| Problem::bad("answer.body.hex: it is no hex; allowed are pairs of hex digits"))?,
        };
        let keep = self.keep.as_deref().map(checked_keep).transpose()?;
        Ok(What::Resolve(Answer { status, headers, body, keep }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read() {
        let plain = change(Verb::Forget, br#"{"reason":" ticket 7 ","fence":5.0}"#).unwrap();
        assert_eq!((plain.what.verb(), plain.reason.as_str(), plain.fence), ("forget", "ticket 7", Some(Fence(5))));
        let never = change(Verb::Resolve, br#"{"reason":"r","as":"not-executed"}"#).unwrap();
        assert_eq!(never.what.verb(), "release");
        let body = br#"{"reason":"r","as":"done","keep":"2h",
            "answer":{"status":201,"headers":[["Location","/p/7"],["Link","a"],["Link","b"]],"body":{"hex":"00FF"}}}"#;
        let What::Resolve(answer) = change(Verb::Resolve, body).unwrap().what else { panic!("it is resolved") };
        assert_eq!((answer.status.as_u16(), &answer.body[..]), (201, &b"\x00\xff"[..]));
        assert_eq!((answer.headers.len(), answer.keep), (3, Some(Duration::from_secs(7200))));
    }

    #[test]
    fn a_reseal_is_read() {
        let asked = reseal(br#"{"reason":" new key "}"#).unwrap();
        assert_eq!((asked.reason.as_str(), asked.from, asked.at_most), ("new key", None, 100));
        let asked = reseal(br#"{"reason":"r","cursor":null,"limit":1000}"#).unwrap();
        assert_eq!((asked.from, asked.at_most), (None, 1000));
        let cursor = "ab".repeat(32);
        let asked = reseal(format!(r#"{{"reason":"r","cursor":"{cursor}","limit":7.0}}"#).as_bytes()).unwrap();
        assert_eq!((asked.from.map(|from| from.to_string()), asked.at_most), (Some(cursor), 7));
        for (body, part) in [
            ("{}", "missing field `reason`"),
            (r#"{"reason":" "}"#, "say why"),
            (r#"{"reason":"r","cursor":"7"}"#, "64 hex digits"),
            (r#"{"reason":"r","limit":0}"#, "allowed is 1 to 1000"),
            (r#"{"reason":"r","limit":1001}"#, "allowed is 1 to 1000"),
            (r#"{"reason":"r","limit":99999999999}"#, "allowed is 1 to 1000"),
            (r#"{"reason":"r","limit":null}"#, "a whole number"),
            (r#"{"reason":"r","fence":1}"#, "unknown field `fence`"),
        ] {
            let problem = reseal(body.as_bytes()).unwrap_err();
            assert_eq!(problem.status, 400);
            assert!(problem.detail.contains(part), "{body}: {}", problem.detail);
        }
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let long = format!(r#"{{"reason":"{}"}}"#, "x".repeat(LONGEST_REASON + 1));
        for (verb, body, part) in [
            (Verb::Release, "", "EOF"),
            (Verb::Release, "[]", "send {\"reason\": TEXT"),
            (Verb::Release, "{}", "missing field `reason`"),
            (Verb::Release, r#"{"reason":"  "}"#, "say why"),
            (Verb::Release, r#"{"reason":7}"#, "expected a string"),
            (Verb::Release, r#"{"reason":"a\u0000b"}"#, "can be shown"),
            (Verb::Release, &long, "up to 1000 characters"),
            (Verb::Release, r#"{"reason":"r","fense":1}"#, "unknown field `fense`"),
            (Verb::Release, r#"{"reason":"r","reason":"s"}"#, "duplicate field"),
            (Verb::Release, r#"{"reason":"r","fence":0}"#, "fence: 0 is none"),
            (Verb::Release, r#"{"reason":"r","fence":-1}"#, "a whole number"),
            (Verb::Release, r#"{"reason":"r","fence":1.5}"#, "a whole number"),
            (Verb::Release, r#"{"reason":"r","fence":null}"#, "a whole number"),
            (Verb::Release, r#"{"reason":"r","fence":1e300}"#, "a whole number"),
            (Verb::Resolve, r#"{"reason":"r"}"#, "missing field `as`"),
            (Verb::Resolve, r#"{"reason":"r","as":"maybe"}"#, "unknown variant"),
            (Verb::Resolve, r#"{"reason":"r","as":"done"}"#, "needs the answer"),
            (Verb::Resolve, r#"{"reason":"r","as":"not-executed","answer":{"status":200}}"#, "has no answer"),
            (Verb::Resolve, r#"{"reason":"r","as":"not-executed","keep":"1h"}"#, "has no answer"),
            (Verb::Resolve, r#"{"reason":"r","as":"done","answer":{"status":99}}"#, "200 to 599"),
            (Verb::Resolve, r#"{"reason":"r","as":"done","answer":{"status":200,"body":7}}"#, "{\"hex\": DIGITS}"),
            (Verb::Resolve, r#"{"reason":"r","as":"done","answer":{"status":200,"body":{"hex":"0"}}}"#, "pairs of hex"),
            (
                Verb::Resolve,
                r#"{"reason":"r","as":"done","answer":{"status":200,"headers":[["a b","c"]]}}"#,
                "is no header",
            ),
            (
                Verb::Resolve,
                r#"{"reason":"r","as":"done","answer":{"status":200,"headers":[["Content-Length","1"]]}}"#,
                "frames",
            ),
            (Verb::Resolve, r#"{"reason":"r","as":"done","answer":{"status":200},"keep":"0s"}"#, "keep:"),
        ] {
            let problem = change(verb, body.as_bytes()).unwrap_err();
            assert_eq!(problem.status, 400);
            assert!(problem.detail.contains(part), "{body}: {}", problem.detail);
        }
    }
}
