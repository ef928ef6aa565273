//! A request of an authenticated caller for a page, and the pages that say why it cannot have it.

use std::sync::Arc;

use askama::Template;
use axum::{
    extract::FromRequestParts,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, Method, StatusCode, Uri, header, request::Parts};
use ibid::store::Address;

use super::{
    login,
    page::{PageShell, html_response},
    read_only_pages::STORE_DOWN_ADVICE,
};
use crate::{
    admin::{
        self, AdminProblem, AdminState, ClientInfo, UnavailablePart,
        auth::{AdminCaller, AuthError, ForbiddenReason},
    },
    format::to_sentence,
};

/// A request for a page.
pub(super) struct Visit {
    pub(super) state: Arc<AdminState>,
    pub(super) caller: AdminCaller,
    pub(super) method: Method,
    pub(super) headers: HeaderMap,
    uri: Uri,
    /// Whether the request came over TLS.
    pub(super) secure: bool,
}

/// A [`Visit`] of a caller who may see more than one user's records.
pub(super) struct StaffVisit(pub(super) Visit);

/// A [`Visit`] to a page of a record. Without a valid address there is no such page.
pub(super) struct RecordVisit(pub(super) Address, pub(super) Visit);

impl FromRequestParts<Arc<AdminState>> for Visit {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &Arc<AdminState>) -> Result<Self, Response> {
        let client = ClientInfo::of(parts);
        let caller = state.auth.caller(&state.live.now().tokens, &parts.headers, client.client);
        Ok(Self {
            caller: caller.map_err(|denied| unauthenticated_response(parts, denied))?,
            state: state.clone(),
            method: parts.method.clone(),
            headers: parts.headers.clone(),
            uri: parts.uri.clone(),
            secure: client.secure,
        })
    }
}

impl FromRequestParts<Arc<AdminState>> for StaffVisit {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &Arc<AdminState>) -> Result<Self, Response> {
        let visit = Visit::from_request_parts(parts, state).await?;
        if visit.caller.can_see_all() { Ok(Self(visit)) } else { Err(visit.forbidden_for_users()) }
    }
}

impl FromRequestParts<Arc<AdminState>> for RecordVisit {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &Arc<AdminState>) -> Result<Self, Response> {
        let address = parts.uri.path().split('/').nth(2).and_then(Address::from_hex).ok_or_else(admin::not_found)?;
        Ok(Self(address, Visit::from_request_parts(parts, state).await?))
    }
}

/// Redirects to the log-in page, or responds with a problem if the request had a token.
fn unauthenticated_response(parts: &Parts, denied: AuthError) -> Response {
    let asked_with_token = parts.headers.contains_key(header::AUTHORIZATION);
    if asked_with_token || matches!(denied, AuthError::RateLimited { .. }) {
        return AdminProblem::from(denied).into_response();
    }
    let is_part = parts.headers.contains_key("hx-request");
    // After the log-in, the browser cannot repeat a POST: it returns to the form's page.
    let here = match (parts.method == Method::POST, parts.uri.path()) {
        (true, "/logout") | (false, "/series") => "/",
        (true, path) => path,
        (false, _) => path_and_query(&parts.uri),
    };
    login::login_required(here, denied == AuthError::InvalidToken, is_part)
}

fn path_and_query(uri: &Uri) -> &str {
    uri.path_and_query().map_or("/", |path| path.as_str())
}

impl Visit {
    pub(super) fn shell(&self) -> PageShell {
        let section = self.uri.path().split('/').nth(1).unwrap_or_default();
        PageShell { section: format!("/{section}"), caller: self.caller.clone(), notice: None }
    }

    pub(super) fn forbidden_for_users(&self) -> Response {
        let why = "Your token shows your own records, and nothing else.";
        html_response(StatusCode::FORBIDDEN, &ErrorPage::new(self.shell(), "Not for your token", why, &[]))
    }

    pub(super) fn forbidden_page(&self, why: ForbiddenReason) -> Response {
        let (what, why, advice) = match why {
            ForbiddenReason::ReadOnlyRole => (
                "You may look, and not change",
                "Your token's role only sees. Nothing was changed.",
                "Ask somebody with a token of the role admin.",
            ),
            ForbiddenReason::CrossOrigin => (
                "This came from another site",
                "A page of another site asked for a change in your name. Nothing was changed.",
                "If you did not expect that, log out here, and look at where you came from.",
            ),
            ForbiddenReason::MissingCsrfToken => (
                "This page is from another session",
                "It was opened before you last logged in. Nothing was changed.",
                "Open the record again and repeat what you wanted to do.",
            ),
        };
        html_response(StatusCode::FORBIDDEN, &ErrorPage::new(self.shell(), what, why, &[advice]))
    }

    pub(super) fn store_unavailable_page(&self, here: &str, why: String) -> Response {
        let page = ErrorPage {
            kind: "bad",
            retry_path: Some(here.to_owned()),
            back: ("/", "To the overview"),
            ..ErrorPage::new(self.shell(), "The store does not answer", why, &STORE_DOWN_ADVICE)
        };
        html_response(StatusCode::SERVICE_UNAVAILABLE, &page)
    }

    pub(super) fn problem_page(&self, problem: AdminProblem) -> Response {
        let AdminProblem { status, detail, unavailable_part, .. } = problem;
        let (shell, detail) = (self.shell(), to_sentence(&detail));
        let is_post = self.method == Method::POST;
        let page = match (unavailable_part, status) {
            (Some(UnavailablePart::Audit), _) => {
                let advice = "Look at the gateway's disk, and at the file that admin.audit names. Then repeat what you wanted to do.";
                ErrorPage {
                    kind: "bad",
                    ..ErrorPage::new(shell, "The audit trail cannot be written", detail, &[advice])
                }
            }
            (Some(UnavailablePart::Store), _) => {
                let here = if is_post { self.record_path() } else { path_and_query(&self.uri) };
                return self.store_unavailable_page(here, detail);
            }
            (None, StatusCode::NOT_FOUND) => {
                let advice = "It was never there, was released or forgotten, has expired, or is not yours to see. The audit \
                              trail knows whether somebody removed it.";
                ErrorPage::new(shell, "Nothing is here", "There is no record at this address.", &[advice])
            }
            (None, _) => {
                let advice = "Look at the record as it is now, and decide again.";
                ErrorPage {
                    back: ("/unknown", "Outcome unknown"),
                    retry_path: is_post.then(|| self.record_path().to_owned()),
                    ..ErrorPage::new(shell, "Nothing was changed", detail, &[advice])
                }
            }
        };
        html_response(status, &page)
    }

    /// The path of the record that the action belongs to.
    fn record_path(&self) -> &str {
        let path = self.uri.path();
        path.rsplit_once('/').filter(|(record, _)| record.starts_with("/records/")).map_or(path, |(record, _)| record)
    }
}

/// A page that says what is wrong and what to do.
#[derive(Template)]
#[template(path = "console/trouble.html")]
struct ErrorPage {
    shell: PageShell,
    title: &'static str,
    kind: &'static str,
    detail: String,
    advice: Vec<&'static str>,
    /// Where to try again, if that may help.
    retry_path: Option<String>,
    /// Path and name of the page to go back to.
    back: (&'static str, &'static str),
}

impl ErrorPage {
    /// An error that a retry does not fix.
    fn new(shell: PageShell, title: &'static str, why: impl Into<String>, advice: &[&'static str]) -> Self {
        let back = ("/records", "To the records");
        Self { shell, title, kind: "warn", detail: why.into(), advice: advice.to_vec(), retry_path: None, back }
    }
}
