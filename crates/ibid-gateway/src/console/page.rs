//! What all pages have: a frame around them, and headers that let them do little.

use askama::Template;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;

use crate::{
    admin::auth::{AdminCaller, AuthMethod},
    config::Role,
};

/// No script, style or request but our own, nothing inline, in nobody's frame.
pub(super) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// The bar over every page, and a word to its reader.
#[derive(Debug, Clone)]
pub(super) struct PageShell {
    current_path: &'static str,
    role: Role,
    name: String,
    user: Option<String>,
    /// The session's secret, which forms repeat. Empty for those who came with a token.
    pub(super) csrf: String,
    /// What just happened.
    pub(super) notice: Option<PageNotice>,
}

/// A word to the reader.
#[derive(Debug, Clone)]
pub(super) struct PageNotice {
    /// `good`, `warn` or `bad`.
    pub(super) kind: &'static str,
    /// What to know.
    pub(super) text: String,
}

/// A place in the bar.
#[derive(Debug)]
pub(super) struct NavLink {
    pub(super) path: &'static str,
    pub(super) name: &'static str,
    pub(super) current: bool,
}

/// Everywhere that admins and viewers can go; the first two are for one user's token, too.
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
    /// Around a page for somebody.
    pub(super) fn new(current_path: &'static str, caller: &AdminCaller) -> Self {
        let csrf = match &caller.authenticated_by {
            AuthMethod::Session { csrf } => csrf.clone(),
            AuthMethod::Bearer => String::new(),
        };
        let (name, user) = (caller.name.clone(), caller.user.clone());
        Self { current_path, role: caller.role, name, user, csrf, notice: None }
    }

    /// With a word to the reader.
    pub(super) fn with_notice(self, notice: Option<PageNotice>) -> Self {
        Self { notice, ..self }
    }

    pub(super) fn links(&self) -> Vec<NavLink> {
        let all = NAV_LINKS.iter().filter(|(path, _)| self.role != Role::User || *path == "/records");
        all.map(|(path, name)| NavLink { path, name, current: *path == self.current_path }).collect()
    }

    /// Who is logged in, and as what.
    pub(super) fn who(&self) -> String {
        match &self.user {
            Some(user) => format!("user {user}"),
            None => format!("{} ({})", self.name, self.role),
        }
    }
}

/// A page, with the headers of all pages.
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

/// Elsewhere, by GET.
pub(super) fn see_other(path: &str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::default());
    *answer.status_mut() = StatusCode::SEE_OTHER;
    // What we link to is made of URL-safe parts.
    let place = HeaderValue::from_str(path).unwrap_or(HeaderValue::from_static("/"));
    answer.headers_mut().insert(header::LOCATION, place);
    set_security_headers(answer.headers_mut());
    answer
}

/// The headers of every page.
pub(super) fn set_security_headers(headers: &mut HeaderMap) {
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // Not `no-referrer`: with it browsers hide the origin of a form from its own server, too.
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
}
