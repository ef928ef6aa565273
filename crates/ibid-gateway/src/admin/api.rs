//! `/api/…`: which endpoint a path is, who may ask it, and what it answers.
//!
//! In this order: is there such a path (404), such a method (405), somebody known (401, 429), allowed (403), and is it
//! asked for well (400). So nobody learns from an error what they may not see.

use std::net::IpAddr;

use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use hyper::body::Incoming;
use ibid::store::Address;
use serde::Serialize;

use super::{
    Desk, Problem,
    auth::{CSRF_HEADER, Caller, Denied, Via},
    body::{self, Verb},
    problem::Reply,
    query::{ListAsked, MOST, Params, USUAL},
    records, reseal, stats,
};

/// The description of this API, for programs.
pub const DOCUMENT: &str = include_str!("openapi.json");

/// Refusals of a page, unless asked otherwise, and at most.
const REFUSALS: (usize, usize) = (50, 256);

/// Something that can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Endpoint<'a> {
    Document,
    Records,
    Record(&'a str),
    Change(&'a str, Verb),
    Reseal,
    Stats,
    Policies,
    Store,
    Audit,
    Shadow,
    Refusals,
}

impl<'a> Endpoint<'a> {
    fn of(path: &'a str) -> Option<Self> {
        let mut segments = path.strip_prefix("/api/")?.split('/');
        let endpoint = match (segments.next()?, segments.next(), segments.next()) {
            ("openapi.json", None, _) => Self::Document,
            ("records", None, _) => Self::Records,
            ("records", Some(address), None) => Self::Record(address),
            ("records", Some(address), Some("release")) => Self::Change(address, Verb::Release),
            ("records", Some(address), Some("forget")) => Self::Change(address, Verb::Forget),
            ("records", Some(address), Some("resolve")) => Self::Change(address, Verb::Resolve),
            ("reseal", None, _) => Self::Reseal,
            ("stats", None, _) => Self::Stats,
            ("policies", None, _) => Self::Policies,
            ("store", None, _) => Self::Store,
            ("audit", None, _) => Self::Audit,
            ("shadow", None, _) => Self::Shadow,
            ("refusals", None, _) => Self::Refusals,
            _ => return None,
        };
        segments.next().is_none().then_some(endpoint)
    }

    fn allow(self) -> &'static str {
        match self {
            Self::Change(..) | Self::Reseal => "POST, OPTIONS",
            _ => "GET, HEAD, OPTIONS",
        }
    }

    fn takes(self, method: &Method) -> bool {
        match self {
            Self::Change(..) | Self::Reseal => method == Method::POST,
            _ => matches!(*method, Method::GET | Method::HEAD),
        }
    }

    /// Whether it is about more than one user's records.
    fn is_about_all(self) -> bool {
        !matches!(self, Self::Document | Self::Records | Self::Record(_) | Self::Change(..) | Self::Audit)
    }
}

pub(super) async fn answer(desk: &Desk, request: Request<Incoming>, client: IpAddr) -> Reply {
    handle(desk, request, client).await.unwrap_or_else(Problem::into_reply)
}

async fn handle(desk: &Desk, request: Request<Incoming>, client: IpAddr) -> Result<Reply, Problem> {
    let (parts, incoming) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let Some(endpoint) = Endpoint::of(&path) else {
        let detail = "there is no such endpoint; /api/openapi.json says which there are";
        return Err(Problem::new(StatusCode::NOT_FOUND, detail));
    };
    if parts.method == Method::OPTIONS {
        let mut reply = super::reply(StatusCode::NO_CONTENT, "text/plain; charset=utf-8", String::new());
        reply.headers_mut().insert(header::ALLOW, HeaderValue::from_static(endpoint.allow()));
        reply.headers_mut().remove(header::CONTENT_TYPE);
        return Ok(reply);
    }
    if !endpoint.takes(&parts.method) {
        return Err(Problem::method(endpoint.allow()));
    }
    if endpoint == Endpoint::Document {
        Params::read(parts.uri.query(), &[])?;
        return Ok(super::reply(StatusCode::OK, "application/json", DOCUMENT.into()));
    }
    let caller =
        desk.auth.caller(&desk.live.now().tokens, &parts.headers, client).inspect_err(|denied| match denied {
            // As often as the limit allows, no more.
            Denied::Wrong => tracing::warn!(%client, "the admin API was asked with a wrong token"),
            denied => tracing::debug!(%client, ?denied, "the admin API was asked by nobody who is known"),
        })?;
    if endpoint.is_about_all() && !caller.sees_all() {
        let detail =
            "this token sees the records of one user; this is about all of them and needs role \"viewer\" or \"admin\"";
        return Err(Problem::new(StatusCode::FORBIDDEN, detail));
    }
    if parts.method == Method::POST {
        let csrf = parts.headers.get(CSRF_HEADER).and_then(|csrf| csrf.to_str().ok());
        caller.check_change(&parts.headers, csrf)?;
        Params::read(parts.uri.query(), &[])?;
        return change(desk, &caller, endpoint, &parts.headers, incoming).await;
    }
    read(desk, &caller, endpoint, parts.uri.query()).await
}

/// What changes something.
async fn change(
    desk: &Desk, caller: &Caller, endpoint: Endpoint<'_>, headers: &HeaderMap, incoming: Incoming,
) -> Result<Reply, Problem> {
    let of = match endpoint {
        Endpoint::Change(address, verb) => Some((read_address(address)?, verb)),
        _ => None,
    };
    if caller.via != Via::Bearer && !body::is_json(headers) {
        let detail = "the body must be application/json";
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail));
    }
    let body = body::read(incoming, body::LARGEST).await?;
    match of {
        Some((address, verb)) => json(&records::change(desk, caller, address, body::change(verb, &body)?).await?),
        None => json(&reseal::reseal(desk, caller, body::reseal(&body)?).await?),
    }
}

/// What only reads.
async fn read(desk: &Desk, caller: &Caller, endpoint: Endpoint<'_>, query: Option<&str>) -> Result<Reply, Problem> {
    match endpoint {
        Endpoint::Records => {
            let ListAsked { query, from, limit } = ListAsked::read(query)?;
            json(&records::list(desk, caller, query, from, limit).await?)
        }
        Endpoint::Record(address) => {
            Params::read(query, &[])?;
            json(&records::show(desk, caller, read_address(address)?).await?)
        }
        Endpoint::Audit => {
            let params = Params::read(query, &["limit", "cursor"])?;
            let (before, limit) = (params.cursor_number()?, params.limit(USUAL, MOST)?);
            json(&desk.audit.page(before, limit, caller.user.as_deref()))
        }
        Endpoint::Refusals => {
            let params = Params::read(query, &["reason", "limit"])?;
            json(&stats::refusals(desk, params.reason()?, params.limit(REFUSALS.0, REFUSALS.1)?).await)
        }
        _ => {
            Params::read(query, &[])?;
            match endpoint {
                Endpoint::Stats => json(&stats::stats(desk).await),
                Endpoint::Policies => json(&stats::policies(desk)),
                Endpoint::Store => json(&stats::store(desk).await),
                _ => json(&stats::shadow(desk)),
            }
        }
    }
}

fn read_address(text: &str) -> Result<Address, Problem> {
    let wrong = || Problem::bad(format!("{text:?} is no address; send the 64 hex digits that the list shows"));
    Address::from_hex(text).ok_or_else(wrong)
}

fn json(value: &impl Serialize) -> Result<Reply, Problem> {
    match serde_json::to_string(value) {
        Ok(text) => Ok(super::reply(StatusCode::OK, "application/json", text + "\n")),
        Err(why) => Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, why.to_string())),
    }
}
