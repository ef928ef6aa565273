//! The frame and the security headers of all pages.

use askama::Template;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;

use crate::{
    admin::auth::{AdminCaller, AuthMethod},
    config::Role,
};

/// Allows only the gateway's own scripts, styles and requests, nothing inline, and no framing.
pub(super) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// The navigation bar of every page, and an optional notice.
#[derive(Debug, Clone)]
pub(super) struct PageShell {
    current_path: &'static str,
    role: Role,
    name: String,
    user: Option<String>,
    /// The session's CSRF token, which forms repeat. Empty for callers with a bearer token.
    pub(super) csrf: String,
    /// The result of the last action.
    pub(super) notice: Option<PageNotice>,
}

#[derive(Debug, Clone)]
pub(super) struct PageNotice {
    /// CSS class: `good`, `warn` or `bad`.
    pub(super) kind: &'static str,
    pub(super) text: String,
}

#[derive(Debug)]
pub(super) struct NavLink {
    pub(super) path: &'static str,
    pub(super) name: &'static str,
    pub(super) current: bool,
}

/// The pages for admins and viewers, as path and title.
const NAV_LINKS: [(&str, &str); 7] = [
    ("/", "Overview"),
    ("/records", "Records"),
    ("/unknown", "Outcome unknown"),
    ("/policies", "Policies"),
    ("/shadow", "Shadow"),
    ("/store", "Store"),
    ("/audit", "Audit"),
];

impl PageShell {
    pub(super) fn new(current_path: &'static str, caller: &AdminCaller) -> Self {
        let csrf = match &caller.authenticated_by {
            AuthMethod::Session { csrf } => csrf.clone(),
            AuthMethod::Bearer => String::new(),
        };
        let (name, user) = (caller.name.clone(), caller.user.clone());
        Self { current_path, role: caller.role, name, user, csrf, notice: None }
    }

    pub(super) fn with_notice(self, notice: Option<PageNotice>) -> Self {
        Self { notice, ..self }
    }

    pub(super) fn links(&self) -> Vec<NavLink> {
        let all = NAV_LINKS.iter().filter(|(path, _)| self.role != Role::User || *path == "/records");
        all.map(|(path, name)| NavLink { path, name, current: *path == self.current_path }).collect()
    }

    /// The caller's name and role.
    pub(super) fn who(&self) -> String {
        match &self.user {
            Some(user) => format!("user {user}"),
            None => format!("{} ({})", self.name, self.role),
        }
    }
}

/// Renders a page with the security headers.
pub(super) fn html_response(status: StatusCode, page: &impl Template) -> Response<Full<Bytes>> {
    let (status, text) = match page.render() {
        Ok(text) => (status, text),
        Err(why) => (StatusCode::INTERNAL_SERVER_ERROR, format!("this page cannot be shown: {why}\n")),
    };
    let mut answer = Response::new(Full::new(text.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    set_security_headers(answer.headers_mut());
    answer
}

/// A 303 redirect.
pub(super) fn see_other(path: &str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::default());
    *answer.status_mut() = StatusCode::SEE_OTHER;
    // All paths are built from URL-safe parts, so this fallback is not used.
    let place = HeaderValue::from_str(path).unwrap_or(HeaderValue::from_static("/"));
    answer.headers_mut().insert(header::LOCATION, place);
    set_security_headers(answer.headers_mut());
    answer
}

pub(super) fn set_security_headers(headers: &mut HeaderMap) {
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // Not `no-referrer`, which makes browsers send `Origin: null` with forms.
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
}
