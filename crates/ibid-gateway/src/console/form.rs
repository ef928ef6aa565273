//! Names and values of a query or a form.

use std::borrow::Cow;

use axum::{
    extract::{FromRequest, Request},
    response::{IntoResponse, Response},
};
use http::{Method, StatusCode};

use crate::admin::input;

/// Further pairs are ignored.
const MAX_FORM_PAIRS: usize = 128;
/// Larger forms are refused. Enough for an answer typed by hand; `ibid keys resolve` accepts larger ones.
const MAX_FORM_BYTES: usize = 1 << 20;
/// The same limit before authentication: enough for a token.
const MAX_LOGIN_FORM_BYTES: usize = 16 << 10;

#[derive(Debug, Clone, Default)]
pub(super) struct Form(Vec<(String, String)>);

/// The query of a GET, the body of a POST. Handlers authenticate the caller first: unknown clients must not take up
/// memory.
impl<S: Sync> FromRequest<S> for Form {
    type Rejection = Response;

    async fn from_request(request: Request, _: &S) -> Result<Self, Response> {
        if request.method() != Method::POST {
            return Ok(Self::parse(request.uri().query().unwrap_or_default().as_bytes()));
        }
        if !input::has_media_type(request.headers(), "application/x-www-form-urlencoded") {
            let text = "this page takes forms; programs use /api\n";
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, text).into_response());
        }
        let largest = if request.uri().path() == "/login" { MAX_LOGIN_FORM_BYTES } else { MAX_FORM_BYTES };
        let body = input::read(request.into_body(), largest).await.map_err(|problem| {
            let then = match problem.status {
                StatusCode::PAYLOAD_TOO_LARGE => "; use ibid keys resolve --body FILE for large answers",
                _ => "",
            };
            (problem.status, format!("{}{then}\n", problem.detail)).into_response()
        })?;
        Ok(Self::parse(&body))
    }
}

impl Form {
    /// Line ends become LF, because browsers send CRLF.
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let owned = |(name, value): (Cow<'_, str>, Cow<'_, str>)| (name.into_owned(), value.replace("\r\n", "\n"));
        Self(form_urlencoded::parse(bytes).take(MAX_FORM_PAIRS).map(owned).collect())
    }

    /// The first value of a name, trimmed; empty if there is none.
    pub(super) fn value(&self, name: &str) -> &str {
        self.raw_value(name).trim()
    }

    pub(super) fn values(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(known, value)| known == name && !value.is_empty()).map(|(_, value)| value.as_str())
    }

    /// The first value of a name, untrimmed.
    pub(super) fn raw_value(&self, name: &str) -> &str {
        self.0.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value)
    }

    /// The value of a name, `None` if it is empty.
    pub(super) fn non_empty(&self, name: &str) -> Option<String> {
        let value = self.value(name);
        (!value.is_empty()).then(|| value.to_owned())
    }

    /// Builds a URL with these pairs, leaving out empty values.
    pub(super) fn build_url(path: &str, pairs: &[(&str, &str)]) -> String {
        let mut query = form_urlencoded::Serializer::new(String::new());
        for (name, value) in pairs.iter().filter(|(_, value)| !value.is_empty()) {
            query.append_pair(name, value);
        }
        let query = query.finish();
        if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_as_they_were_typed_and_links_carry_them() {
        let form = Form::parse(b"key=a%2Bb+c%26&reason=%20why%20&body=1%0D%0A2&empty=");
        assert_eq!((form.value("key"), form.value("reason"), form.value("none")), ("a+b c&", "why", ""));
        assert_eq!((form.non_empty("empty"), form.raw_value("body")), (None, "1\n2"));
        let link = Form::build_url("/records", &[("key", "a+b c&\"<"), ("state", "")]);
        assert_eq!(Form::parse(link.split_once('?').unwrap().1.as_bytes()).value("key"), "a+b c&\"<");
        assert_eq!(Form::build_url("/records", &[("state", "")]), "/records");
        assert_eq!(Form::parse(&b"a&".repeat(1000)).0.len(), MAX_FORM_PAIRS);
    }
}
