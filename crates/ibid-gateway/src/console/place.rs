//! From a request to a place of the console and to what was asked for there.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header, request::Parts};
use http_body_util::Full;
use hyper::body::Incoming;
use ibid::store::Address;

use super::{Page, act::Action, form::Form, page};
use crate::admin::body;

/// A form that is longer is not read. An answer that is typed in fits; larger ones are for `ibid keys resolve`.
const LARGEST_FORM: usize = 1 << 20;
/// The same of somebody who is not known yet: a token fits.
const LARGEST_LOG_IN: usize = 16 << 10;

/// Where somebody wants to go.
pub(super) enum Place {
    Overview,
    Series,
    Records,
    Record(Address),
    Act(Address, Action),
    Stuck,
    Policies,
    Shadow,
    Store,
    Audit,
    LogIn,
    LogOut,
}

impl Place {
    pub(super) fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/" => Self::Overview,
            "/series" => Self::Series,
            "/records" => Self::Records,
            "/stuck" => Self::Stuck,
            "/policies" => Self::Policies,
            "/shadow" => Self::Shadow,
            "/store" => Self::Store,
            "/audit" => Self::Audit,
            "/login" => Self::LogIn,
            "/logout" => Self::LogOut,
            _ => {
                let rest = path.strip_prefix("/records/")?;
                match rest.split_once('/') {
                    None => Self::Record(Address::from_hex(rest)?),
                    Some((address, action)) => Self::Act(Address::from_hex(address)?, Action::of(action)?),
                }
            }
        })
    }

    pub(super) fn methods(&self) -> &'static [Method] {
        match self {
            Self::Act(..) | Self::LogIn => &[Method::GET, Method::POST],
            Self::LogOut => &[Method::POST],
            _ => &[Method::GET],
        }
    }

    /// How much of a form is read there.
    fn largest_form(&self) -> usize {
        match self {
            Self::LogIn => LARGEST_LOG_IN,
            _ => LARGEST_FORM,
        }
    }

    /// Whether one user's token leads there.
    pub(super) fn is_for_users(&self) -> bool {
        matches!(self, Self::Records | Self::Record(_) | Self::LogOut)
    }
}

/// The refusal of a method that is not understood there.
pub(super) fn only(method: &Method, allowed: &[Method]) -> Option<Page> {
    if allowed.contains(method) || *method == Method::HEAD && allowed.contains(&Method::GET) {
        return None;
    }
    let names: Vec<&str> = allowed.iter().map(Method::as_str).collect();
    let text = format!("only {} is understood here\n", names.join(" or "));
    let mut answer = plain(StatusCode::METHOD_NOT_ALLOWED, text);
    answer.headers_mut().insert(header::ALLOW, HeaderValue::from_str(&names.join(", ")).expect("names of methods"));
    Some(answer)
}

/// The query of a GET, the form of a POST.
pub(super) async fn read(place: &Place, parts: &Parts, body: Incoming) -> Result<Form, Page> {
    if parts.method != Method::POST {
        return Ok(Form::of(parts.uri.query().unwrap_or_default().as_bytes()));
    }
    if !is_form(&parts.headers) {
        return Err(plain(StatusCode::UNSUPPORTED_MEDIA_TYPE, "this page takes forms; programs use /api\n"));
    }
    body::read(body, place.largest_form()).await.map(|body| Form::of(&body)).map_err(|problem| {
        let then = match problem.status {
            StatusCode::PAYLOAD_TOO_LARGE => "; use ibid keys resolve --body FILE for large answers",
            _ => "",
        };
        plain(problem.status, format!("{}{then}\n", problem.detail))
    })
}

fn is_form(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

fn plain(status: StatusCode, text: impl Into<Bytes>) -> Page {
    let mut answer = Response::new(Full::new(text.into()));
    *answer.status_mut() = status;
    page::guard(answer.headers_mut());
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}
