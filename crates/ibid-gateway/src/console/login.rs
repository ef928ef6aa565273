//! Log-in: exchanges a token for a session.

use std::{borrow::Cow, sync::Arc};

use askama::Template;
use axum::{
    Extension,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderValue, StatusCode, header};

use super::{
    form::Form,
    page::{html_response, see_other},
};
use crate::admin::{
    AdminState, ClientInfo,
    auth::{self, AuthError, SESSION_COOKIE, SESSION_LIFETIME},
};

#[derive(Template)]
#[template(path = "console/login.html")]
struct LoginPage<'a> {
    message: Option<LoginMessage>,
    /// Whether the configuration has any token.
    possible: bool,
    how: &'static str,
    next: &'a str,
}

/// A CSS class (`good`, `warn` or `bad`) and a text.
type LoginMessage = (&'static str, Cow<'static, str>);

const TOKEN_SETUP_HINT: &str = "Set [admin] token = \"file:/etc/ibid/admin.token\" in its configuration, with a long random value in that file; \
                   it is taken up at once. A variable, as \"env:IBID_ADMIN_TOKEN\", needs a restart.";

pub(super) async fn show_form(
    State(state): State<Arc<AdminState>>, Extension(client): Extension<ClientInfo>, query: Form,
) -> Response {
    if let Some(code) = query.non_empty("code") {
        return log_in_by_link(&state, client, &code);
    }
    let message = match query.value("because") {
        "expired" => Some((
            "warn",
            "Your session has ended: sessions last 12 hours, and no longer than the gateway runs or their token is \
             configured. Log in again; what you had not confirmed was not done."
                .into(),
        )),
        "out" => Some(("good", "You are logged out.".into())),
        _ => None,
    };
    login_page(StatusCode::OK, message, !state.live.now().tokens.is_empty(), query.value("next"))
}

pub(super) async fn log_in(
    State(state): State<Arc<AdminState>>, Extension(client): Extension<ClientInfo>, headers: HeaderMap, form: Form,
) -> Response {
    let next = form.value("next");
    if auth::is_cross_origin(&headers) {
        let text = "This log-in came from a page of another site, and was not taken. Log in here.";
        return refused(StatusCode::FORBIDDEN, text, next);
    }
    let session = match form.value("token") {
        "" => Err(AuthError::MissingToken),
        token => state.auth.log_in(&state.live.now().tokens, token, client.client),
    };
    match session {
        Ok(session) => {
            let mut answer = see_other(local_path_or_root(next));
            set_cookie(&mut answer, &session.cookie, SESSION_LIFETIME.as_secs(), client.secure);
            answer
        }
        Err(AuthError::NoTokens) => login_page(StatusCode::UNAUTHORIZED, None, false, next),
        Err(AuthError::MissingToken) => refused(StatusCode::UNAUTHORIZED, "Type a token.", next),
        Err(AuthError::InvalidToken) => {
            let text = "That is none of this gateway's tokens. Check that it was copied whole, and that it is for this gateway.";
            refused(StatusCode::UNAUTHORIZED, text, next)
        }
        Err(AuthError::RateLimited { retry_after }) => {
            let seconds = retry_after.as_secs();
            let text = format!("Too many log-ins from your address have failed. Try again in {seconds} s.");
            let mut answer = refused(StatusCode::TOO_MANY_REQUESTS, text, next);
            answer.headers_mut().insert(header::RETRY_AFTER, seconds.into());
            answer
        }
    }
}

/// Answers the link that `ibid serve` prints.
fn log_in_by_link(state: &AdminState, client: ClientInfo, code: &str) -> Response {
    let now = state.live.now();
    match state.auth.log_in_by_link(&now.tokens, code, client.client) {
        Ok(session) => {
            let mut answer = see_other("/");
            set_cookie(&mut answer, &session.cookie, SESSION_LIFETIME.as_secs(), client.secure);
            answer
        }
        Err(_) => {
            let text = "This link does not work: it works once, within ten minutes after the start, and only on the \
                        gateway's own machine. Restart the gateway for another one, or configure a token.";
            login_page(StatusCode::UNAUTHORIZED, Some(("bad", text.into())), !now.tokens.is_empty(), "")
        }
    }
}

/// The form again, after a rejected log-in.
fn refused(status: StatusCode, text: impl Into<Cow<'static, str>>, next: &str) -> Response {
    login_page(status, Some(("bad", text.into())), true, next)
}

fn login_page(status: StatusCode, message: Option<LoginMessage>, possible: bool, next: &str) -> Response {
    let next = local_path_or_root(next);
    html_response(status, &LoginPage { message, possible, how: TOKEN_SETUP_HINT, next })
}

/// Deletes the cookie and redirects to the form.
pub(super) fn log_out_response(secure: bool) -> Response {
    let mut answer = see_other("/login?because=out");
    set_cookie(&mut answer, "", 0, secure);
    answer
}

/// Redirects to the form. A partial refresh gets a header that redirects its whole page.
pub(super) fn login_required(here: &str, expired: bool, is_part: bool) -> Response {
    let because = if expired { "expired" } else { "" };
    let place = Form::build_url("/login", &[("because", because), ("next", if here == "/" { "" } else { here })]);
    if is_part { (StatusCode::UNAUTHORIZED, [("hx-redirect", place)]).into_response() } else { see_other(&place) }
}

fn set_cookie(answer: &mut Response, value: &str, seconds: u64, secure: bool) {
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
