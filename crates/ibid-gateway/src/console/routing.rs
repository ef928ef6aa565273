//! Maps requests to console pages, and reads their forms.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header, request::Parts};
use http_body_util::Full;
use hyper::body::Incoming;
use ibid::store::Address;

use super::{ConsoleResponse, change_form::RecordAction, form::Form, page};
use crate::admin::body;

/// Larger forms are refused. Enough for an answer typed by hand; `ibid keys resolve` accepts larger ones.
const MAX_FORM_BYTES: usize = 1 << 20;
/// The same limit before authentication: enough for a token.
const MAX_LOGIN_FORM_BYTES: usize = 16 << 10;

pub(super) enum ConsolePage {
    Overview,
    ChartSeries,
    Records,
    Record(Address),
    ChangeRecord(Address, RecordAction),
    OutcomeUnknown,
    Policies,
    Shadow,
    Store,
    Audit,
    LogIn,
    LogOut,
}

impl ConsolePage {
    pub(super) fn from_path(path: &str) -> Option<Self> {
        Some(match path {
            "/" => Self::Overview,
            "/series" => Self::ChartSeries,
            "/records" => Self::Records,
            "/unknown" => Self::OutcomeUnknown,
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
                    Some((address, action)) => {
                        Self::ChangeRecord(Address::from_hex(address)?, RecordAction::from_path(action)?)
                    }
                }
            }
        })
    }

    pub(super) fn allowed_methods(&self) -> &'static [Method] {
        match self {
            Self::ChangeRecord(..) | Self::LogIn => &[Method::GET, Method::POST],
            Self::LogOut => &[Method::POST],
            _ => &[Method::GET],
        }
    }

    fn max_form_bytes(&self) -> usize {
        match self {
            Self::LogIn => MAX_LOGIN_FORM_BYTES,
            _ => MAX_FORM_BYTES,
        }
    }

    /// Whether a [`Role::User`](crate::config::Role::User) may open the page.
    pub(super) fn is_for_users(&self) -> bool {
        matches!(self, Self::Records | Self::Record(_) | Self::LogOut)
    }
}

/// A 405 response, unless the method is allowed.
pub(super) fn refuse_method(method: &Method, allowed: &[Method]) -> Option<ConsoleResponse> {
    if allowed.contains(method) || *method == Method::HEAD && allowed.contains(&Method::GET) {
        return None;
    }
    let names: Vec<&str> = allowed.iter().map(Method::as_str).collect();
    let text = format!("only {} is understood here\n", names.join(" or "));
    let mut answer = text_response(StatusCode::METHOD_NOT_ALLOWED, text);
    answer.headers_mut().insert(header::ALLOW, HeaderValue::from_str(&names.join(", ")).expect("names of methods"));
    Some(answer)
}

/// Reads the query of a GET or the form of a POST.
pub(super) async fn read_form(place: &ConsolePage, parts: &Parts, body: Incoming) -> Result<Form, ConsoleResponse> {
    if parts.method != Method::POST {
        return Ok(Form::parse(parts.uri.query().unwrap_or_default().as_bytes()));
    }
    if !is_form(&parts.headers) {
        return Err(text_response(StatusCode::UNSUPPORTED_MEDIA_TYPE, "this page takes forms; programs use /api\n"));
    }
    body::read(body, place.max_form_bytes()).await.map(|body| Form::parse(&body)).map_err(|problem| {
        let then = match problem.status {
            StatusCode::PAYLOAD_TOO_LARGE => "; use ibid keys resolve --body FILE for large answers",
            _ => "",
        };
        text_response(problem.status, format!("{}{then}\n", problem.detail))
    })
}

fn is_form(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

fn text_response(status: StatusCode, text: impl Into<Bytes>) -> ConsoleResponse {
    let mut answer = Response::new(Full::new(text.into()));
    *answer.status_mut() = status;
    page::set_security_headers(answer.headers_mut());
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}
