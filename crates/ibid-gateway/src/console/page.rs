//! A request of an authenticated caller for a page; the frame and the security headers of all pages; the pages that say
//! why there is no other; the filters of templates.

use std::sync::Arc;

use askama::Template;
use axum::response::{Html, IntoResponse, Response};
use http::{HeaderMap, HeaderName, Method, StatusCode, Uri, header, request::Parts};
use ibid::store::Address;

use super::{login, read_only_pages::STORE_DOWN_ADVICE};
use crate::{
    admin::{
        self, AdminProblem, AdminState, ClientInfo, UnavailablePart,
        auth::{AdminCaller, AuthError, AuthMethod, ForbiddenReason},
        extractors,
    },
    config::Role,
    format::{format_rough_ms, now_ms, to_sentence},
};

pub(super) static PAGE_HEADERS: [(HeaderName, &str); 4] = [
    (header::CACHE_CONTROL, "no-store"),
    // Allows only the gateway's own scripts, styles and requests, nothing inline, and no framing.
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
         form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    // Not `no-referrer`, which makes browsers send `Origin: null` with forms.
    (header::REFERRER_POLICY, "same-origin"),
];

/// The navigation bar of every page, and an optional notice.
#[derive(Debug, Clone)]
pub(super) struct PageShell {
    /// The path of the current entry of the bar.
    pub(super) section: String,
    pub(super) caller: AdminCaller,
    /// The result of the last action.
    pub(super) notice: Option<&'static str>,
    /// Name, version, store and uptime of this gateway; empty for users.
    pub(super) gateway: String,
    /// Records with an unknown outcome, as last counted.
    pub(super) unknown_count: u64,
}

#[derive(Template)]
#[template(path = "console/badge.html")]
pub(super) struct Badge {
    pub(super) shell: PageShell,
}

/// The pages for admins and viewers, as path and title.
const NAV_LINKS: [(&str, &str); 8] = [
    ("/", "Overview"),
    ("/recent", "Recent"),
    ("/records", "Records"),
    ("/unknown", "Outcome unknown"),
    ("/policies", "Policies"),
    ("/shadow", "Shadow"),
    ("/store", "Store"),
    ("/audit", "Audit"),
];

impl PageShell {
    /// The session's CSRF token, which forms repeat. Empty for callers with a bearer token.
    pub(super) fn csrf(&self) -> &str {
        match &self.caller.authenticated_by {
            AuthMethod::Session { csrf } => csrf,
            AuthMethod::Bearer => "",
        }
    }

    pub(super) fn links(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        NAV_LINKS.iter().filter(|(path, _)| self.caller.role != Role::User || *path == "/records")
    }

    pub(super) fn who(&self) -> String {
        match &self.caller.user {
            Some(user) => format!("user {user}"),
            None => format!("{} ({})", self.caller.name, self.caller.role),
        }
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

pub(super) fn html_response(status: StatusCode, page: &impl Template) -> Response {
    match page.render() {
        Ok(text) => (status, Html(text)).into_response(),
        Err(why) => {
            let text = format!("this page cannot be shown: {why}\n");
            (StatusCode::INTERNAL_SERVER_ERROR, Html(text)).into_response()
        }
    }
}

/// A 303 redirect. The path consists of URL-safe parts.
pub(super) fn see_other(path: &str) -> Response {
    (StatusCode::SEE_OTHER, [(header::LOCATION, path)]).into_response()
}

/// How templates format values. Inputs are generic because templates pass values and references alike.
pub(super) mod filters {
    #![allow(unreachable_pub, reason = "the macro of askama makes public items")]

    use std::{borrow::Borrow, fmt::Display, time::Duration};

    use askama::{Result, Values, filter_fn};

    use super::super::record;
    use crate::format;

    macro_rules! filters {
        ($($(#[$doc:meta])* $name:ident($value:ident: $kind:ty) => $shown:expr;)+) => {
            $($(#[$doc])* #[filter_fn]
            pub(crate) fn $name($value: $kind, _: &dyn Values) -> Result<String> {
                Ok($shown)
            })+
        };
    }

    filters! {
        /// Untrusted text. The template escapes its markup.
        visible(text: impl Display) => format::escape_invisible(&text.to_string()).into_owned();
        state_text(name: impl Display) => record::state_text(&name.to_string()).to_owned();
        count(number: impl Display) => format::format_count(number);
        size(bytes: impl Borrow<u64>) => format::format_size(*bytes.borrow());
        percent(part: impl Borrow<Option<f64>>) => format::format_percent(*part.borrow());
        took(duration: impl Borrow<Option<Duration>>) => format::format_duration(*duration.borrow());
        date(rfc3339: impl Display) => format::display_date(&rfc3339.to_string());
        rfc3339(ms: impl Borrow<u64>) => format::format_date(*ms.borrow());
        clock(ms: impl Borrow<u64>) => format::format_time(&format::format_date(*ms.borrow()));
        rough(ms: impl Borrow<u64>) => format::format_rough_ms(*ms.borrow());
        /// The CSS class of a policy's mode.
        mode_class(mode: impl Display) => match mode.to_string().as_str() {
            "shadow" => "warn",
            "off" => "",
            _ => "good",
        }.into();
    }
}

pub(super) struct Visit {
    pub(super) state: Arc<AdminState>,
    pub(super) caller: AdminCaller,
    pub(super) method: Method,
    pub(super) headers: HeaderMap,
    uri: Uri,
    pub(super) secure: bool,
}

/// A [`Visit`] of a caller who may see more than one user's records.
pub(super) struct StaffVisit(pub(super) Visit);

/// A [`Visit`] to a page of a record. Without a valid address there is no such page.
pub(super) struct RecordVisit(pub(super) Address, pub(super) Visit);

extractors! {
    Visit, Response: |parts, state| {
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
    };
    StaffVisit, Response: |parts, state| {
        let visit = Visit::from_request_parts(parts, state).await?;
        if visit.caller.can_see_all() { Ok(Self(visit)) } else { Err(visit.forbidden_for_users()) }
    };
    RecordVisit, Response: |parts, state| {
        let address = parts.uri.path().split('/').nth(2).and_then(Address::from_hex).ok_or_else(admin::not_found)?;
        Ok(Self(address, Visit::from_request_parts(parts, state).await?))
    };
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
        let state = &self.state;
        let gateway = self.caller.can_see_all().then(|| {
            let uptime = format_rough_ms(now_ms().saturating_sub(state.started_ms));
            let (host, store) = (host_name(), state.ibid.engine().store().guarantees().store);
            format!("{host} · ibid {} · {store} · up {uptime}", env!("CARGO_PKG_VERSION"))
        });
        PageShell {
            section: format!("/{section}"),
            caller: self.caller.clone(),
            notice: None,
            gateway: gateway.unwrap_or_default(),
            unknown_count: state.gauges.latest().unknown,
        }
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
