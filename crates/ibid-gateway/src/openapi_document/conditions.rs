//! Conditional requests and entity tags.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Conditional and range headers. None of them reaches the app.
const CONDITIONS: [HeaderName; 6] = [
    header::IF_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_NONE_MATCH,
    header::IF_RANGE,
    header::IF_UNMODIFIED_SINCE,
    header::RANGE,
];

/// The values of `If-None-Match`. The other conditions are ignored: RFC 9110 allows a full response.
pub(super) struct Conditions(Vec<String>);

impl Conditions {
    /// Removes them from a request.
    pub(super) fn take(headers: &mut HeaderMap) -> Self {
        let lines = headers.get_all(header::IF_NONE_MATCH).iter();
        let none_match = lines.filter_map(|line| line.to_str().ok().map(str::to_owned)).collect();
        CONDITIONS.iter().for_each(|name| drop(headers.remove(name)));
        Self(none_match)
    }

    /// Whether the client has the version with this tag, and so gets a 304. Compares tags weakly.
    pub(super) fn hold(&self, etag: Option<&HeaderValue>) -> bool {
        if self.0.iter().any(|line| line.trim() == "*") {
            return true;
        }
        let wanted = etag.and_then(opaque);
        wanted.is_some_and(|wanted| self.0.iter().any(|line| tags(line).any(|found| found == wanted)))
    }
}

/// Returns a tag with its quotes and without `W/`, or `None` if it has no quotes.
pub(super) fn opaque(etag: &HeaderValue) -> Option<&str> {
    etag.to_str().ok().and_then(|text| tags(text).next())
}

/// Returns the tags of a list, with their quotes and without `W/`.
fn tags(mut rest: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let start = rest.find('"')?;
        let end = start + 1 + rest[start + 1..].find('"')?;
        let tag = &rest[start..=end];
        rest = &rest[end + 1..];
        Some(tag)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions(lines: &[&'static str]) -> Conditions {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(header::IF_NONE_MATCH, HeaderValue::from_static(line));
        }
        headers.insert(header::RANGE, HeaderValue::from_static("bytes=0-1"));
        let taken = Conditions::take(&mut headers);
        assert!(headers.is_empty(), "{headers:?}");
        taken
    }

    #[test]
    fn tags_are_compared_one_by_one_and_weakly() {
        for (lines, etag, holds) in [
            (&["\"a\""][..], "\"a\"", true),
            (&["W/\"a\""], "\"a\"", true),
            (&["\"a\""], "W/\"a\"", true),
            (&["\"b\", W/\"a,b\""], "\"a,b\"", true),
            (&["\"b\"", "\"a\""], "\"a\"", true),
            (&["\"a\", \"b\""], "\", \"", false),
            (&["\"ab\""], "\"a\"", false),
            (&["a"], "a", false),
            (&[], "\"a\"", false),
            (&[" * "], "\"a\"", true),
        ] {
            assert_eq!(conditions(lines).hold(Some(&HeaderValue::from_static(etag))), holds, "{lines:?} {etag}");
        }
        assert!(!conditions(&["\"a\""]).hold(None));
    }
}
