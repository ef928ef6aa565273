//! The frame and the security headers of all pages, and the filters of their templates.

use askama::Template;
use axum::response::{Html, IntoResponse, Response};
use http::{HeaderName, StatusCode, header};

use crate::{
    admin::auth::{AdminCaller, AuthMethod},
    config::Role,
};

pub(super) const PAGE_HEADERS: [(HeaderName, &str); 4] = [
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

    /// The caller's name and role.
    pub(super) fn who(&self) -> String {
        match &self.caller.user {
            Some(user) => format!("user {user}"),
            None => format!("{} ({})", self.caller.name, self.caller.role),
        }
    }
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
        count(number: impl Display) => format::format_count(number);
        size(bytes: impl Borrow<u64>) => format::format_size(*bytes.borrow());
        percent(part: impl Borrow<Option<f64>>) => format::format_percent(*part.borrow());
        took(duration: impl Borrow<Option<Duration>>) => format::format_duration(*duration.borrow());
        date(rfc3339: impl Display) => format::display_date(&rfc3339.to_string());
        /// The CSS class of a policy's mode.
        mode_class(mode: impl Display) => match mode.to_string().as_str() {
            "shadow" => "warn",
            "off" => "",
            _ => "good",
        }.into();
    }
}
