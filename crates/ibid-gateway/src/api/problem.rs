//! Errors of the exchange API: problem documents (RFC 9457). They concern the app that calls, never its client.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde_json::json;

#[derive(Debug)]
pub(super) struct ApiProblem {
    status: StatusCode,
    detail: String,
    header: Option<(header::HeaderName, HeaderValue)>,
}

impl ApiProblem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), header: None }
    }

    pub(super) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    pub(super) fn unavailable(detail: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, detail).with(header::RETRY_AFTER, HeaderValue::from_static("1"))
    }

    pub(super) fn with(mut self, name: header::HeaderName, value: HeaderValue) -> Self {
        self.header = Some((name, value));
        self
    }

    pub(super) fn into_response(self) -> Response<Full<Bytes>> {
        let title = self.status.canonical_reason().unwrap_or("Error");
        let body =
            json!({"type": "about:blank", "title": title, "status": self.status.as_u16(), "detail": self.detail});
        let mut response = Response::new(Full::new(format!("{body}\n").into()));
        *response.status_mut() = self.status;
        let kind = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        response.headers_mut().extend(self.header);
        response
    }
}
