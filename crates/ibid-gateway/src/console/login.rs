//! Log-in: exchanges a token for a session.

use askama::Template;
use http::{HeaderValue, Response, StatusCode, header};

use super::{
    form::Form,
    page::{PageNotice, html_response, see_other, set_security_headers},
};
use crate::admin::auth::{AuthError, SESSION_COOKIE, SESSION_LIFETIME, SessionSecrets};

#[derive(Template)]
#[template(path = "console/login.html")]
pub(super) struct LoginPage {
    pub(super) message: Option<PageNotice>,
    /// Whether the configuration has any token.
    pub(super) possible: bool,
    pub(super) how: &'static str,
    pub(super) next: String,
}

const TOKEN_SETUP_HINT: &str = "Set [admin] token = \"file:/etc/ibid/admin.token\" in its configuration, with a long random value in that file; \
                   it is taken up at once. A variable, as \"env:IBID_ADMIN_TOKEN\", needs a restart.";

type LoginResponse = Response<http_body_util::Full<bytes::Bytes>>;

pub(super) fn login_form(query: &Form, possible: bool) -> LoginResponse {
    let message = match query.value("because") {
        "expired" => Some(PageNotice {
            kind: "warn",
            text:
                "Your session has ended: sessions last 12 hours, and no longer than the gateway runs or their token is \
                   configured. Log in again; \
                   what you had not confirmed was not done."
                    .into(),
        }),
        "out" => Some(PageNotice { kind: "good", text: "You are logged out.".into() }),
        _ => None,
    };
    login_page(StatusCode::OK, message, possible, query.value("next"))
}

/// The form again, after a rejected log-in.
pub(super) fn login_refused(denied: AuthError, next: &str) -> LoginResponse {
    let (status, text) = match denied {
        AuthError::NoTokens => return login_page(StatusCode::UNAUTHORIZED, None, false, next),
        AuthError::MissingToken => (StatusCode::UNAUTHORIZED, "Type a token.".into()),
        AuthError::InvalidToken => (
            StatusCode::UNAUTHORIZED,
            "That is none of this gateway's tokens. Check that it was copied whole, and that it is for this gateway."
                .into(),
        ),
        AuthError::RateLimited { retry_after } => (
            StatusCode::TOO_MANY_REQUESTS,
            format!("Too many log-ins from your address have failed. Try again in {} s.", retry_after.as_secs()),
        ),
    };
    let mut answer = login_page(status, Some(PageNotice { kind: "bad", text }), true, next);
    if let AuthError::RateLimited { retry_after } = denied {
        answer.headers_mut().insert(header::RETRY_AFTER, retry_after.as_secs().into());
    }
    answer
}

/// The form again, after a log-in from a page of another origin.
pub(super) fn cross_origin_refused(next: &str) -> LoginResponse {
    let text = "This log-in came from a page of another site, and was not taken. Log in here.".into();
    login_page(StatusCode::FORBIDDEN, Some(PageNotice { kind: "bad", text }), true, next)
}

fn login_page(status: StatusCode, message: Option<PageNotice>, possible: bool, next: &str) -> LoginResponse {
    html_response(
        status,
        &LoginPage { message, possible, how: TOKEN_SETUP_HINT, next: local_path_or_root(next).to_owned() },
    )
}

/// Sets the session's cookie and redirects to `next`.
pub(super) fn log_in_response(session: &SessionSecrets, next: &str, secure: bool) -> LoginResponse {
    let mut answer = see_other(local_path_or_root(next));
    set_cookie(&mut answer, &session.cookie, SESSION_LIFETIME.as_secs(), secure);
    answer
}

/// Deletes the cookie and redirects to the form.
pub(super) fn log_out_response(secure: bool) -> LoginResponse {
    let mut answer = see_other("/login?because=out");
    set_cookie(&mut answer, "", 0, secure);
    answer
}

/// Redirects to the form. A partial refresh gets a header that redirects its whole page.
pub(super) fn login_required(here: &str, expired: bool, is_part: bool) -> LoginResponse {
    let because = if expired { "expired" } else { "" };
    let place = Form::build_url("/login", &[("because", because), ("next", if here == "/" { "" } else { here })]);
    if !is_part {
        return see_other(&place);
    }
    let mut answer = Response::new(http_body_util::Full::default());
    *answer.status_mut() = StatusCode::UNAUTHORIZED;
    set_security_headers(answer.headers_mut());
    if let Ok(place) = HeaderValue::from_str(&place) {
        answer.headers_mut().insert("hx-redirect", place);
    }
    answer
}

fn set_cookie(answer: &mut LoginResponse, value: &str, seconds: u64, secure: bool) {
    // Without its own TLS, the port is on loopback or behind a proxy that may use plain HTTP, over which browsers do
    // not send `Secure` cookies.
    let secure = if secure { "; Secure" } else { "" };
    let cookie = format!("{SESSION_COOKIE}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={seconds}{secure}");
    let cookie = HeaderValue::from_str(&cookie).expect("hex digits");
    answer.headers_mut().insert(header::SET_COOKIE, cookie);
}

/// Accepts only local paths, else `/`, so that a log-in link cannot redirect to another site.
fn local_path_or_root(next: &str) -> &str {
    let fits = next.starts_with('/') && !next.starts_with("//") && !next.contains(['\\', '\r', '\n']);
    if fits && next.is_ascii() && !next.contains(char::is_control) { next } else { "/" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_sent_elsewhere_after_logging_in() {
        for own in ["/", "/records?state=unknown", "/records/ab"] {
            assert_eq!(local_path_or_root(own), own);
        }
        for foreign in ["", "//evil.example", "/\\evil.example", "https://evil.example", "evil", "/a\r\nb: c", "/é"] {
            assert_eq!(local_path_or_root(foreign), "/", "{foreign}");
        }
    }
}
