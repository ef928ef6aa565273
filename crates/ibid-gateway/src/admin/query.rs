//! Strict parsing of query parameters: an unknown or invalid one is refused and named, never ignored.

use ibid::{RefusalReason, store::Address};
use percent_encoding::percent_decode_str;

use super::AdminProblem;
use crate::{
    format::{MAX_DURATION, parse_duration},
    records::{RecordQuery, state_from_name},
};

/// Entries per page if the request sets no `limit`.
pub(super) const DEFAULT_PAGE_SIZE: usize = 100;
pub(super) const MAX_PAGE_SIZE: usize = 1000;
/// Maximum length of a filter, in characters. Tags are never longer.
const MAX_FILTER_CHARS: usize = 1024;

pub(super) struct QueryParams(Vec<(String, String)>);

/// The parameters of `GET /api/records`.
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
    const PARAMETERS: [&str; 8] = ["state", "tenant", "user", "endpoint", "key", "older_than", "limit", "cursor"];

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
    let text = |name: &str| of(name).map(|text| validate_text(name, text)).transpose();
    Ok(RecordQuery {
        address: None,
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
