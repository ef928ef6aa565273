//! What callers send, parsed strictly: query parameters, and bodies with their size and time limits. An unknown or invalid
//! part is refused and named, never ignored.

use std::{fmt, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use data_encoding::HEXLOWER_PERMISSIVE;
use http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use ibid::{
    RefusalReason,
    store::{Address, Fence},
};
use percent_encoding::percent_decode_str;
use serde::{
    Deserialize,
    de::{self, Deserializer},
};
use tokio::time::timeout;

use super::{AdminProblem, records::ResealRequest};
use crate::{
    format::{MAX_DURATION, parse_duration},
    records::{AddressPattern, ChangeAction, ChangeRequest, ChangeVerb, RecordQuery, ResolvedAnswer, state_from_name},
};

/// Entries per page if the request sets no `limit`.
pub(super) const DEFAULT_PAGE_SIZE: usize = 100;
pub(super) const MAX_PAGE_SIZE: usize = 1000;
/// Maximum length of a filter, in characters. Tags are never longer.
const MAX_FILTER_CHARS: usize = 1024;

pub(super) struct QueryParams(Vec<(String, String)>);

#[derive(Debug)]
pub(super) struct ListRequest {
    pub(super) query: RecordQuery,
    pub(super) from: Option<Address>,
    pub(super) limit: usize,
}

impl QueryParams {
    /// Parses a query string. Every name must be in `known` and occur at most once.
    pub(super) fn parse(query: Option<&str>, known: &[&str]) -> Result<Self, String> {
        let mut all: Vec<(String, String)> = Vec::new();
        for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let decoded = |text| percent_decode(text).ok_or("the query has a broken % escape, or is no UTF-8");
            let (name, value) = (decoded(name)?, decoded(value)?);
            if !known.contains(&name.as_str()) {
                let allowed = match known {
                    [] => "none is allowed here".into(),
                    known => format!("allowed are {}", known.join(", ")),
                };
                return Err(format!("{name:?} is no parameter; {allowed}"));
            }
            if all.iter().any(|(earlier, _)| *earlier == name) {
                return Err(format!("the parameter {name} is there twice; send one"));
            }
            all.push((name, value));
        }
        Ok(Self(all))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Treats an empty value as missing, because forms send empty fields.
    fn get_non_empty(&self, name: &str) -> Option<&str> {
        self.get(name).filter(|value| !value.is_empty())
    }

    /// The page size: `limit`, or `usual` if it is missing; at most `most`.
    pub(super) fn limit(&self, usual: usize, most: usize) -> Result<usize, String> {
        let Some(value) = self.get("limit") else { return Ok(usual) };
        let number = parse_digits(value).and_then(|number| usize::try_from(number).ok());
        let number = number.filter(|number| (1..=most).contains(number));
        number.ok_or_else(|| format!("limit: {value:?} is no limit; allowed is 1 to {most}"))
    }

    /// The cursor as an entry id.
    pub(super) fn cursor_number(&self) -> Result<Option<u64>, String> {
        let number =
            |value| parse_digits(value).ok_or_else(|| format!("cursor: {value:?} is none; send what \"next\" said"));
        self.get_non_empty("cursor").map(number).transpose()
    }

    pub(super) fn reason(&self) -> Result<Option<RefusalReason>, String> {
        let reason = |value| {
            RefusalReason::all().find(|reason| reason.name() == value).ok_or_else(|| {
                let names: Vec<&str> = RefusalReason::all().map(RefusalReason::name).collect();
                format!("reason: {value:?} is no refusal; allowed are {}", names.join(", "))
            })
        };
        self.get_non_empty("reason").map(reason).transpose()
    }
}

impl ListRequest {
    const PARAMETERS: [&str; 9] =
        ["state", "tenant", "user", "endpoint", "key", "address", "older_than", "limit", "cursor"];

    pub(super) fn parse(query: Option<&str>) -> Result<Self, AdminProblem> {
        let params = QueryParams::parse(query, &Self::PARAMETERS)?;
        let query = parse_filters(|name| params.get_non_empty(name))?;
        let from = params.get_non_empty("cursor").map(parse_cursor).transpose()?;
        Ok(Self { query, from, limit: params.limit(DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)? })
    }
}

/// Parses the record filters. `of` returns the non-empty value of a parameter.
pub(crate) fn parse_filters<'a>(of: impl Fn(&str) -> Option<&'a str>) -> Result<RecordQuery, String> {
    let state = |name: &str| {
        state_from_name(name)
            .ok_or_else(|| format!("state: {name:?} is no state; allowed are processing, done, failed, unknown"))
    };
    let age = |text: &str| {
        let age = parse_duration(text).map(|age| age.min(MAX_DURATION));
        age.ok_or_else(|| {
            format!("older_than: {text:?} is no duration; allowed is one such as 500ms, 30s, 5m, 24h, 7d")
        })
    };
    let address = |text: &str| {
        AddressPattern::parse(text).ok_or_else(|| {
            format!("address: {text:?} is none; allowed are at least its first 4 hex digits, or 5ac2****fe5c")
        })
    };
    let text = |name: &str| of(name).map(|text| validate_text(name, text)).transpose();
    Ok(RecordQuery {
        address: of("address").map(address).transpose()?,
        state: of("state").map(state).transpose()?,
        tenant: text("tenant")?,
        user: text("user")?,
        endpoint: text("endpoint")?,
        key: text("key")?,
        older_than: of("older_than").map(age).transpose()?,
    })
}

fn validate_text(name: &str, text: &str) -> Result<String, String> {
    if text.chars().count() > MAX_FILTER_CHARS || text.contains(char::is_control) {
        return Err(format!(
            "{name}: it is no text to search by; allowed are up to {MAX_FILTER_CHARS} characters that can be shown"
        ));
    }
    Ok(text.into())
}

pub(super) fn parse_cursor(text: &str) -> Result<Address, String> {
    Address::from_hex(text).ok_or_else(|| format!("cursor: {text:?} is none; send what \"next\" said, 64 hex digits"))
}

/// Parses a number without a sign.
fn parse_digits(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// Decodes `%` escapes and `+`; `None` if an escape is broken or the result is no UTF-8.
fn percent_decode(text: &str) -> Option<String> {
    let escapes_fit =
        text.split('%').skip(1).all(|rest| rest.len() >= 2 && rest.as_bytes()[..2].iter().all(u8::is_ascii_hexdigit));
    let text = text.replace('+', " ");
    let decoded = percent_decode_str(&text).decode_utf8().ok().filter(|_| escapes_fit)?;
    Some(decoded.into_owned())
}

/// Larger bodies are refused.
pub(super) const MAX_BODY_BYTES: usize = 16 << 20;
const BODY_READ_TIMEOUT: Duration = Duration::from_secs(30);
pub(crate) const MAX_REASON_CHARS: usize = 1000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RevealBody {
    reason: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainChangeBody {
    reason: String,
    #[serde(default, deserialize_with = "some_whole")]
    fence: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResolveBody {
    reason: String,
    #[serde(default, deserialize_with = "some_whole")]
    fence: Option<u64>,
    r#as: ResolvedAs,
    answer: Option<ResolveAnswer>,
    keep: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResealBody {
    reason: String,
    cursor: Option<String>,
    #[serde(default, deserialize_with = "some_whole")]
    limit: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ResolvedAs {
    Done,
    NotExecuted,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResolveAnswer {
    #[serde(deserialize_with = "whole")]
    status: u64,
    #[serde(default)]
    headers: Vec<(String, String)>,
    #[serde(default)]
    body: AnswerBody,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum AnswerBody {
    Text(String),
    Hex { hex: String },
}

/// Parses a whole number, also one written as `201.0`, which JSON treats as equal. Uses [`serde_json::Number`], which
/// works with and without arbitrary precision.
fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let wrong =
        |found: &dyn fmt::Display| de::Error::custom(format!("invalid value: {found}, expected a whole number"));
    let value = serde_json::Value::deserialize(deserializer)?;
    let Some(number) = value.as_number() else { return Err(wrong(&value)) };
    // Above 2^53, an `f64` cannot represent every whole number.
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

impl Default for AnswerBody {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

/// Reads a whole body, limited in size and time.
pub(crate) async fn read(body: Body, largest: usize) -> Result<Bytes, AdminProblem> {
    match timeout(BODY_READ_TIMEOUT, Limited::new(body, largest).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(why)) if why.is::<LengthLimitError>() => {
            let most =
                if largest < 1 << 20 { format!("{} KiB", largest >> 10) } else { format!("{} MiB", largest >> 20) };
            let detail = format!("the body is larger than {most}, the most that is taken");
            Err(AdminProblem::new(StatusCode::PAYLOAD_TOO_LARGE, detail))
        }
        Ok(Err(_)) => Err("the body broke off".to_owned().into()),
        Err(_) => Err(AdminProblem::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    }
}

/// Whether the `Content-Type` is this one, with any parameters.
pub(crate) fn has_media_type(headers: &HeaderMap, wanted: &str) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(wanted)
}

pub(super) fn parse_change(verb: ChangeVerb, body: &[u8]) -> Result<ChangeRequest, AdminProblem> {
    let (action, reason, fence) = if verb == ChangeVerb::Resolve {
        let resolve: ResolveBody = parse_json(
            body,
            "{\"reason\": TEXT, \"as\": \"not-executed\"} or {\"reason\": TEXT, \"as\": \"done\", \"answer\": \
             {\"status\": CODE, \"headers\": [[NAME, VALUE]], \"body\": TEXT}}, and \"fence\": NUMBER",
        )?;
        (resolve.to_action()?, resolve.reason, resolve.fence)
    } else {
        let PlainChangeBody { reason, fence } =
            parse_json(body, "{\"reason\": TEXT, \"fence\": NUMBER, which may be left out}")?;
        (if verb == ChangeVerb::Forget { ChangeAction::Forget } else { ChangeAction::Release }, reason, fence)
    };
    if let Some(fence) = fence.filter(|fence| !(1..=i64::MAX as u64).contains(fence)) {
        Err(format!("fence: {fence} is none; send the one that the record showed, or none"))?;
    }
    Ok(ChangeRequest { action, reason: validate_reason(&reason)?, fence: fence.map(Fence) })
}

/// Returns the reason.
pub(super) fn parse_reveal(body: &[u8]) -> Result<String, AdminProblem> {
    let RevealBody { reason } = parse_json(body, "{\"reason\": TEXT}")?;
    Ok(validate_reason(&reason)?)
}

pub(super) fn parse_reseal(body: &[u8]) -> Result<ResealRequest, AdminProblem> {
    let allowed =
        "{\"reason\": TEXT, \"cursor\": what \"next\" said, \"limit\": NUMBER}, of which the last two may be left out";
    let ResealBody { reason, cursor, limit } = parse_json(body, allowed)?;
    let from = cursor.as_deref().filter(|text| !text.is_empty()).map(parse_cursor).transpose()?;
    let limit = limit.unwrap_or(DEFAULT_PAGE_SIZE as u64);
    let at_most = u32::try_from(limit).ok().filter(|limit| (1..=MAX_PAGE_SIZE as u32).contains(limit));
    let limit = at_most.ok_or_else(|| format!("limit: {limit} is no limit; allowed is 1 to {MAX_PAGE_SIZE}"))?;
    Ok(ResealRequest { reason: validate_reason(&reason)?, from, limit })
}

fn parse_json<'a, T: Deserialize<'a>>(body: &'a [u8], allowed: &str) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|why| {
        // Replaces serde's message about an untagged enum, which does not help the caller.
        let why = why.to_string().replace(
            "data did not match any variant of untagged enum AnswerBody",
            "answer.body: allowed is TEXT or {\"hex\": DIGITS}",
        );
        format!("the body cannot be used: {why}; send {allowed}")
    })
}

/// Checks that a reason is not empty, not too long, and printable; returns it trimmed.
pub(crate) fn validate_reason(reason: &str) -> Result<String, String> {
    let text = reason.trim();
    if text.is_empty() {
        return Err("reason: it is empty; give the reason for the audit trail".into());
    }
    let odd = |character: char| character.is_control() && !matches!(character, '\n' | '\r' | '\t');
    if reason.chars().count() > MAX_REASON_CHARS || text.contains(odd) {
        return Err(format!(
            "reason: it cannot be kept; allowed are up to {MAX_REASON_CHARS} characters that can be shown"
        ));
    }
    Ok(text.into())
}

pub(crate) fn parse_keep(text: &str) -> Result<Duration, String> {
    let keep = parse_duration(text).filter(|keep| !keep.is_zero()).map(|keep| keep.min(MAX_DURATION));
    keep.ok_or_else(|| format!("keep: {text:?} is no duration to keep it for; allowed is one such as 24h or 7d"))
}

impl ResolveBody {
    fn to_action(&self) -> Result<ChangeAction, String> {
        let answer = match (self.r#as, &self.answer) {
            (ResolvedAs::NotExecuted, None) if self.keep.is_none() => return Ok(ChangeAction::Release),
            (ResolvedAs::NotExecuted, _) => {
                return Err("as: what was not executed has no answer; leave out answer and keep".into());
            }
            (ResolvedAs::Done, None) => {
                return Err("answer: missing; as \"done\" needs the answer, with its status at least".into());
            }
            (ResolvedAs::Done, Some(answer)) => answer,
        };
        let status = ResolvedAnswer::parse_status(answer.status)
            .ok_or_else(|| format!("answer.status: {} is none; allowed is 200 to 599", answer.status))?;
        let headers = answer.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let headers = ResolvedAnswer::parse_headers(headers).map_err(|why| format!("answer.headers: {why}"))?;
        let body = match &answer.body {
            AnswerBody::Text(text) => text.clone().into_bytes(),
            AnswerBody::Hex { hex } => HEXLOWER_PERMISSIVE
                .decode(hex.as_bytes())
                .map_err(|_| "answer.body.hex: it is no hex; allowed are pairs of hex digits")?,
        };
        let keep = self.keep.as_deref().map(parse_keep).transpose()?;
        Ok(ChangeAction::Resolve(ResolvedAnswer { status, headers, body: body.into(), keep }))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_list_is_asked_for_by_filters() {
        let asked =
            ListRequest::parse(Some("state=unknown&tenant=a%20b&key=k%2B1&older_than=5m&limit=7&user=")).unwrap();
        assert_eq!((asked.query.tenant.as_deref(), asked.query.key.as_deref()), (Some("a b"), Some("k+1")));
        assert_eq!((asked.query.user, asked.query.older_than), (None, Some(Duration::from_secs(300))));
        assert_eq!((asked.limit, asked.from), (7, None));
        assert_eq!(ListRequest::parse(None).unwrap().limit, DEFAULT_PAGE_SIZE);
        assert_eq!(ListRequest::parse(Some("older_than=999999999d")).unwrap().query.older_than, Some(MAX_DURATION));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (query, part) in [
            ("limit=0", "allowed is 1 to 1000"),
            ("limit=1001", "allowed is 1 to 1000"),
            ("limit=", "allowed is 1 to 1000"),
            ("limit=-1", "allowed is 1 to 1000"),
            ("limit=%2B5", "allowed is 1 to 1000"),
            ("limit=99999999999999999999", "allowed is 1 to 1000"),
            ("state=lost", "processing, done, failed, unknown"),
            ("older_than=soon", "such as 500ms"),
            ("older_than=5", "such as 500ms"),
            ("older_than=-5m", "such as 500ms"),
            ("cursor=5", "64 hex digits"),
            ("tennant=a", "allowed are state, tenant"),
            ("tenant=a&tenant=b", "there twice"),
            ("tenant=%zz", "broken % escape"),
            ("tenant=%ff", "no UTF-8"),
            ("key=%00", "can be shown"),
        ] {
            let problem = ListRequest::parse(Some(query)).unwrap_err();
            assert!(problem.detail.contains(part), "{query}: {}", problem.detail);
        }
        let long = format!("tenant={}", "x".repeat(MAX_FILTER_CHARS + 1));
        assert!(ListRequest::parse(Some(&long)).is_err());
    }
}

#[cfg(test)]
mod body_tests {
    use super::*;

    #[test]
    fn changes_are_read() {
        let plain = parse_change(ChangeVerb::Forget, br#"{"reason":" ticket 7 ","fence":5.0}"#).unwrap();
        assert_eq!((plain.action.name(), plain.reason.as_str(), plain.fence), ("forget", "ticket 7", Some(Fence(5))));
        let never = parse_change(ChangeVerb::Resolve, br#"{"reason":"r","as":"not-executed"}"#).unwrap();
        assert_eq!(never.action.name(), "release");
        let body = br#"{"reason":"r","as":"done","keep":"2h",
            "answer":{"status":201,"headers":[["Location","/p/7"],["Link","a"],["Link","b"]],"body":{"hex":"00FF"}}}"#;
        let ChangeAction::Resolve(answer) = parse_change(ChangeVerb::Resolve, body).unwrap().action else {
            panic!("it is resolved")
        };
        assert_eq!((answer.status.as_u16(), &answer.body[..]), (201, &b"\x00\xff"[..]));
        assert_eq!((answer.headers.len(), answer.keep), (3, Some(Duration::from_secs(7200))));
    }

    #[test]
    fn a_reseal_is_read() {
        let asked = parse_reseal(br#"{"reason":" new key "}"#).unwrap();
        assert_eq!((asked.reason.as_str(), asked.from, asked.limit), ("new key", None, 100));
        let asked = parse_reseal(br#"{"reason":"r","cursor":null,"limit":1000}"#).unwrap();
        assert_eq!((asked.from, asked.limit), (None, 1000));
        let cursor = "ab".repeat(32);
        let asked = parse_reseal(format!(r#"{{"reason":"r","cursor":"{cursor}","limit":7.0}}"#).as_bytes()).unwrap();
        assert_eq!((asked.from.map(|from| from.to_string()), asked.limit), (Some(cursor), 7));
        for (body, part) in [
            ("{}", "missing field `reason`"),
            (r#"{"reason":" "}"#, "give the reason"),
            (r#"{"reason":"r","cursor":"7"}"#, "64 hex digits"),
            (r#"{"reason":"r","limit":0}"#, "allowed is 1 to 1000"),
            (r#"{"reason":"r","limit":1001}"#, "allowed is 1 to 1000"),
            (r#"{"reason":"r","limit":99999999999}"#, "allowed is 1 to 1000"),
            (r#"{"reason":"r","limit":null}"#, "a whole number"),
            (r#"{"reason":"r","fence":1}"#, "unknown field `fence`"),
        ] {
            let problem = parse_reseal(body.as_bytes()).unwrap_err();
            assert_eq!(problem.status, 400);
            assert!(problem.detail.contains(part), "{body}: {}", problem.detail);
        }
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let long = format!(r#"{{"reason":"{}"}}"#, "x".repeat(MAX_REASON_CHARS + 1));
        for (verb, body, part) in [
            (ChangeVerb::Release, "", "EOF"),
            (ChangeVerb::Release, "[]", "send {\"reason\": TEXT"),
            (ChangeVerb::Release, "{}", "missing field `reason`"),
            (ChangeVerb::Release, r#"{"reason":"  "}"#, "give the reason"),
            (ChangeVerb::Release, r#"{"reason":7}"#, "expected a string"),
            (ChangeVerb::Release, r#"{"reason":"a\u0000b"}"#, "can be shown"),
            (ChangeVerb::Release, &long, "up to 1000 characters"),
            (ChangeVerb::Release, r#"{"reason":"r","fense":1}"#, "unknown field `fense`"),
            (ChangeVerb::Release, r#"{"reason":"r","reason":"s"}"#, "duplicate field"),
            (ChangeVerb::Release, r#"{"reason":"r","fence":0}"#, "fence: 0 is none"),
            (ChangeVerb::Release, r#"{"reason":"r","fence":-1}"#, "a whole number"),
            (ChangeVerb::Release, r#"{"reason":"r","fence":1.5}"#, "a whole number"),
            (ChangeVerb::Release, r#"{"reason":"r","fence":null}"#, "a whole number"),
            (ChangeVerb::Release, r#"{"reason":"r","fence":1e300}"#, "a whole number"),
            (ChangeVerb::Resolve, r#"{"reason":"r"}"#, "missing field `as`"),
            (ChangeVerb::Resolve, r#"{"reason":"r","as":"maybe"}"#, "unknown variant"),
            (ChangeVerb::Resolve, r#"{"reason":"r","as":"done"}"#, "needs the answer"),
            (ChangeVerb::Resolve, r#"{"reason":"r","as":"not-executed","answer":{"status":200}}"#, "has no answer"),
            (ChangeVerb::Resolve, r#"{"reason":"r","as":"not-executed","keep":"1h"}"#, "has no answer"),
            (ChangeVerb::Resolve, r#"{"reason":"r","as":"done","answer":{"status":99}}"#, "200 to 599"),
            (
                ChangeVerb::Resolve,
                r#"{"reason":"r","as":"done","answer":{"status":200,"body":7}}"#,
                "{\"hex\": DIGITS}",
            ),
            (
                ChangeVerb::Resolve,
                r#"{"reason":"r","as":"done","answer":{"status":200,"body":{"hex":"0"}}}"#,
                "pairs of hex",
            ),
            (
                ChangeVerb::Resolve,
                r#"{"reason":"r","as":"done","answer":{"status":200,"headers":[["a b","c"]]}}"#,
                "is no header",
            ),
            (
                ChangeVerb::Resolve,
                r#"{"reason":"r","as":"done","answer":{"status":200,"headers":[["Content-Length","1"]]}}"#,
                "frames",
            ),
            (ChangeVerb::Resolve, r#"{"reason":"r","as":"done","answer":{"status":200},"keep":"0s"}"#, "keep:"),
        ] {
            let problem = parse_change(verb, body.as_bytes()).unwrap_err();
            assert_eq!(problem.status, 400);
            assert!(problem.detail.contains(part), "{body}: {}", problem.detail);
        }
    }
}
