//! Judges a covered request before anything is read or claimed: its key, whose it is, and whether it can be read in
//! only one way.

use std::{sync::Arc, time::SystemTime};

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header, request::Parts};
use sha2::{Digest, Sha256};

use super::{Peer, Protocol, Route, Shared, ambiguity};
use crate::{
    fingerprint::{Kind, PartDigests, json},
    grpc,
    key::{KeyFormat, KeySource, extract_key, hex, mask},
    label,
    policy::{LabelKey, Mode, OnMismatch, Policy},
    refusal::{Reason, Refusal},
    scope::{Caller, Identity, Scope, ScopePart},
    store::{Ask, Fingerprint, Tags, Token},
};

/// What became of a covered request's head.
pub(super) enum Judged {
    /// No key and none required: passes through.
    Keyless,
    Refused(Refusal, String),
    Keyed(Keyed),
}

/// A request that will be claimed.
pub(super) struct Keyed {
    /// `None` while it has to come from the body.
    key: Option<String>,
    scope: Scope,
    /// Who may name themselves in a key of the form `user:operation:resource:timestamp`.
    owner: Option<String>,
    tenant: String,
    user: String,
}

/// Whether a request carries a key by a policy's sources, whatever its form. Bodies are not looked into: where a key may
/// be in one, it counts as carried.
pub fn carries_key(policy: &Policy, uri: &http::Uri, headers: &HeaderMap) -> bool {
    let in_query = |name: &str| {
        let pairs = uri.query().unwrap_or_default().split('&');
        let mut names = pairs.map(|pair| pair.split('=').next().unwrap_or_default());
        names.any(|given| decoded(given).as_deref() == Some(name.as_bytes()))
    };
    policy.key.from.iter().any(|source| match source {
        KeySource::Header(name) => headers.contains_key(name),
        KeySource::Query(name) => in_query(name),
        KeySource::Json(_) | KeySource::Body => false,
    }) || may_have_key_in_body(policy, headers)
}

/// The route that governs a request, what became of its head under it, and the other routes by which it has a key.
pub(super) type Governed = (Arc<Route>, Judged, Vec<(Arc<Route>, Keyed)>);

/// As [`judge`], for a request that an app could take for one of several routes. What any of them requires is required;
/// the first by which the request has a key governs it, an enforced one before one in shadow mode.
pub(super) fn judge_all(shared: &Shared, route: Arc<Route>, also: Vec<Arc<Route>>, parts: &Parts) -> Governed {
    let enforced = |route: &Route| route.policy.mode == Mode::Enforce;
    let first = judge(shared, &route, parts);
    if also.is_empty() || matches!(first, Judged::Refused(..)) && enforced(&route) {
        return (route, first, Vec::new());
    }
    let has_key = matches!(first, Judged::Keyed(_));
    let mut keyed = Vec::with_capacity(1 + also.len());
    let mut otherwise = None;
    match first {
        Judged::Keyed(found) => keyed.push((route, found)),
        first => otherwise = Some((route, first)),
    }
    for other in also {
        match judge(shared, &other, parts) {
            Judged::Keyed(found) => keyed.push((other, found)),
            refused @ Judged::Refused(..) if enforced(&other) && (other.policy.key.required || !has_key) => {
                return (other, refused, Vec::new());
            }
            _ => {}
        }
    }
    let governs = keyed.iter().position(|(route, _)| enforced(route)).unwrap_or(0);
    match otherwise {
        Some((route, first)) if keyed.is_empty() => (route, first, Vec::new()),
        _ => {
            let (route, found) = keyed.remove(governs);
            (route, Judged::Keyed(found), keyed)
        }
    }
}

/// Reads key and scope from the head.
pub(super) fn judge(shared: &Shared, route: &Route, parts: &Parts) -> Judged {
    let policy = &route.policy;
    let key = match key_from_head(policy, parts) {
        Ok(key) => key,
        Err(refusal) => return Judged::Refused(refusal, String::new()),
    };
    let masked = || key.as_deref().map(mask).unwrap_or_default();
    if key.is_none() && !may_have_key_in_body(policy, &parts.headers) {
        if policy.key.required {
            return Judged::Refused(key_missing(policy), String::new());
        }
        return match ambiguity::check(policy, &parts.headers) {
            Ok(()) => Judged::Keyless,
            Err(refusal) => Judged::Refused(refusal, String::new()),
        };
    }
    // A signature does not cover the path: a copy of a delivery must not run again under another spelling of it.
    let signed = policy.signature.is_some() && policy.scope.contains(&ScopePart::Path);
    let plain = signed.then(|| ambiguity::plain(&parts.uri)).flatten();
    let caller = Caller {
        method: &parts.method,
        uri: plain.as_ref().unwrap_or(&parts.uri),
        headers: &parts.headers,
        peer: parts.extensions.get::<Peer>().map(|peer| peer.0),
        identity: parts.extensions.get::<Identity>(),
        route: &route.name,
        trusted: &shared.settings.trusted,
    };
    let scope = Scope::of(&policy.scope, &caller).and_then(|scope| identified(policy, &caller).map(|()| scope));
    let judged = match scope {
        // In the order of the table.
        Err(refusal) if refusal.reason > Reason::RequestAmbiguous => {
            ambiguity::check(policy, &parts.headers).and(Err(refusal))
        }
        scope => scope,
    };
    let owner = policy.user().filter(|_| policy.checks_owners());
    let owner = owner.and_then(|part| part.value(&caller).ok()).map(|user| String::from_utf8_lossy(&user).into_owned());
    let judged = judged.and_then(|scope| {
        ambiguity::check(policy, &parts.headers)?;
        if signed {
            ambiguity::check_path(parts.uri.path())?;
        }
        if parts.headers.contains_key(header::UPGRADE) {
            let detail = "a request with an idempotency key cannot upgrade its connection; send it without Upgrade";
            return Err(Refusal::new(Reason::RequestAmbiguous, detail));
        }
        if let Some(key) = &key {
            check_owner(owner.as_deref(), key)?;
        }
        if let Some(length) = content_length(&parts.headers) {
            check_length(policy, length)?;
        }
        Ok(scope)
    });
    match judged {
        Err(refusal) => Judged::Refused(refusal, masked()),
        Ok(scope) => {
            let (tenant, user) = tags(policy, &caller, key.as_deref());
            Judged::Keyed(Keyed { key, scope, owner, tenant, user })
        }
    }
}

impl Keyed {
    /// The key, masked; empty while it has to come from the body.
    pub(super) fn masked(&self) -> String {
        self.key.as_deref().map(mask).unwrap_or_default()
    }

    /// With the body at hand: the claim to make. `None` if there is no key after all and none is required.
    pub(super) fn ask(
        mut self, shared: &Shared, route: &Route, parts: &Parts, body: &[u8], requested_at_ms: u64,
    ) -> Result<Option<(Ask, String, Option<PartDigests>)>, Refusal> {
        let policy = &route.policy;
        let (fingerprint, digests) = match route.protocol {
            Protocol::Http => Fingerprint::with_parts(policy, &parts.method, &parts.uri, &parts.headers, body),
            Protocol::Grpc => grpc::fingerprint(policy, parts, body)?,
        };
        let key = match self.key.take() {
            Some(key) => key,
            None => match key_from_body(policy, parts, body, &fingerprint)? {
                Some(key) => check_owner(self.owner.as_deref(), &key).map(|()| key)?,
                None if policy.key.required => return Err(key_missing(policy)),
                None => return Ok(None),
            },
        };
        let digests = (fingerprint != Fingerprint::NONE).then_some(digests);
        let own_entry = (policy.on_mismatch == OnMismatch::New).then_some(&fingerprint);
        let address = self.scope.address(&key, own_entry, shared.settings.secret.as_ref());
        let shown = match policy.label.key {
            LabelKey::Clear => key.clone(),
            LabelKey::Masked => mask(&key),
        };
        let named;
        let endpoint = if route.name.is_empty() {
            named = match route.protocol {
                Protocol::Http => format!("{} {}", parts.method, parts.uri.path()),
                Protocol::Grpc => format!("grpc {}", parts.uri.path().trim_start_matches('/')),
            };
            &named
        } else {
            &route.name
        };
        let peer = parts.extensions.get::<Peer>().map(|peer| peer.0.to_string()).unwrap_or_default();
        let agent = parts.headers.get(header::USER_AGENT).map(|agent| agent.as_bytes()).unwrap_or_default();
        let told = [parts.method.as_str().as_bytes(), parts.uri.path().as_bytes(), peer.as_bytes(), agent];
        let ask = Ask {
            address,
            token: Token::mint(),
            fingerprint,
            tags: Tags::new(&self.tenant, &self.user, endpoint, &shown),
            label: label::encode(requested_at_ms, told, digests.as_ref()),
            hold: policy.lease,
            keep: policy.ttl,
            over: None,
        };
        Ok(Some((ask, key, digests)))
    }
}

/// A label needs its token, too: otherwise whoever leaves it away is somebody whom operators cannot name.
fn identified(policy: &Policy, caller: &Caller<'_>) -> Result<(), Refusal> {
    match caller.identity {
        Some(Identity(Err(refusal))) if policy.claims().next().is_some() => Err(refusal.clone()),
        _ => Ok(()),
    }
}

/// A key that names its user is good for that user only.
fn check_owner(owner: Option<&str>, key: &str) -> Result<(), Refusal> {
    match (owner, key.split_once(':')) {
        (Some(owner), Some((user, _))) if user != owner => {
            let detail = "the key names a user who is not the caller; a key of this form begins with your own name";
            Err(Refusal::new(Reason::ScopeRefused, detail))
        }
        _ => Ok(()),
    }
}

/// Before anything is claimed: a forged delivery leaves nothing behind.
pub(super) fn check_signature(policy: &Policy, parts: &Parts, body: &[u8]) -> Result<(), Refusal> {
    let Some(verifier) = &policy.signature else { return Ok(()) };
    let verified = verifier.verify(&parts.headers, body, SystemTime::now());
    verified.map_err(|why| Refusal::new(Reason::IdentityInvalid, format!("the delivery is not believed: {why}")))
}

fn key_from_head(policy: &Policy, parts: &Parts) -> Result<Option<String>, Refusal> {
    for source in &policy.key.from {
        let found = match source {
            KeySource::Header(name) => {
                let mut values = parts.headers.get_all(name).iter();
                let first = values.next();
                if values.next().is_some() {
                    return Err(invalid(format!("the header {name} is sent more than once; send one key")));
                }
                first.map(|value| extract_key(value.as_bytes()).map_err(invalid)).transpose()?
            }
            KeySource::Query(name) => key_from_query(parts.uri.query().unwrap_or_default(), name)?,
            KeySource::Json(_) if body_kind(&parts.headers) != Kind::Json => None,
            // What stands behind it in the list is only looked at once the body is there.
            KeySource::Json(_) | KeySource::Body => return Ok(None),
        };
        if let Some(key) = found {
            return checked(policy, key).map(Some);
        }
    }
    Ok(None)
}

fn key_from_query(query: &str, name: &str) -> Result<Option<String>, Refusal> {
    let mut found = None;
    for pair in query.split('&') {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        if decoded(key).as_deref() != Some(name.as_bytes()) {
            continue;
        }
        let bytes = decoded(value).ok_or_else(|| invalid(format!("the parameter {name} has a broken % escape")))?;
        if found.replace(bytes).is_some() {
            return Err(invalid(format!("the parameter {name} is sent more than once; send one key")));
        }
    }
    found.map(plain).transpose()
}

fn decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let digits = [bytes.next()?, bytes.next()?];
                let digit = |byte: u8| char::from(byte).to_digit(16);
                u8::try_from(digit(digits[0])? * 16 + digit(digits[1])?).ok()?
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    Some(out)
}

fn may_have_key_in_body(policy: &Policy, headers: &HeaderMap) -> bool {
    policy.key.from.iter().any(|source| match source {
        KeySource::Json(_) => body_kind(headers) == Kind::Json,
        KeySource::Body => true,
        KeySource::Header(_) | KeySource::Query(_) => false,
    })
}

/// The sources from the first that needs the body on.
fn key_from_body(
    policy: &Policy, parts: &Parts, body: &[u8], fingerprint: &Fingerprint,
) -> Result<Option<String>, Refusal> {
    for source in &policy.key.from {
        match source {
            KeySource::Json(pointer) if body_kind(&parts.headers) == Kind::Json => match json::find(body, pointer) {
                Some(json::Found::String(key)) => {
                    return checked(policy, plain(key.into_owned().into_bytes())?).map(Some);
                }
                Some(json::Found::Number(key)) => return checked(policy, key.to_owned()).map(Some),
                Some(json::Found::Unusable) => {
                    return Err(invalid(format!("the value at {pointer} is neither a string nor a number")));
                }
                Some(json::Found::Absent) | None => {}
            },
            KeySource::Body => return Ok(Some(hex(&fingerprint.digest))),
            KeySource::Header(name) => {
                if let Some(value) = parts.headers.get(name) {
                    return checked(policy, extract_key(value.as_bytes()).map_err(invalid)?).map(Some);
                }
            }
            KeySource::Query(name) => {
                if let Some(key) = key_from_query(parts.uri.query().unwrap_or_default(), name)? {
                    return checked(policy, key).map(Some);
                }
            }
            KeySource::Json(_) => {}
        }
    }
    Ok(None)
}

/// A key that did not come as a header's value: the same rules, without quotes.
fn plain(bytes: Vec<u8>) -> Result<String, Refusal> {
    if bytes.is_empty() {
        return Err(invalid("the key is empty"));
    }
    match bytes.iter().find(|byte| !(0x21..=0x7e).contains(*byte)) {
        None => Ok(String::from_utf8(bytes).expect("just seen to be ASCII")),
        Some(byte) => Err(invalid(format!("the key has the byte {byte:#04x}; only visible ASCII is allowed"))),
    }
}

fn checked(policy: &Policy, mut key: String) -> Result<String, Refusal> {
    if key.len() > policy.key.max_length {
        let detail = format!("the key has {} characters; at most {} are allowed", key.len(), policy.key.max_length);
        return Err(invalid(detail));
    }
    policy.key.format.check(&key).map_err(invalid)?;
    if policy.key.format.lowers() {
        key.make_ascii_lowercase();
    }
    Ok(key)
}

fn tags(policy: &Policy, caller: &Caller<'_>, key: Option<&str>) -> (String, String) {
    let mut who = policy.scope.iter().filter(|part| part.names_caller());
    let tenant = policy.label.tenant.as_ref().or_else(|| who.next());
    // A scope of users only has no tenants beside them: then both are the same.
    let named = policy.scope.iter().find(|part| part.names_user());
    let user = policy.label.user.as_ref().or(named).or_else(|| who.next());
    let tag = |part: Option<&ScopePart>| part.map(|part| tag(part, caller)).unwrap_or_default();
    let mut user = tag(user);
    if user.is_empty()
        && policy.key.format == KeyFormat::Operation
        && let Some((owner, _)) = key.and_then(|key| key.split_once(':'))
    {
        user = owner.to_owned();
    }
    (tag(tenant), user)
}

/// What operators see of a part. Secrets only as the beginning of their hash.
fn tag(part: &ScopePart, caller: &Caller<'_>) -> String {
    let Ok(value) = part.value(caller) else { return String::new() };
    match part {
        _ if value.is_empty() => String::new(),
        ScopePart::Credential | ScopePart::Cookie(_) => hex(&Sha256::digest(&value)[..6]),
        _ => String::from_utf8_lossy(&value).into_owned(),
    }
}

pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

pub(super) fn check_length(policy: &Policy, length: u64) -> Result<(), Refusal> {
    if length <= policy.max_request {
        return Ok(());
    }
    let detail = format!("the body is larger than {} bytes, the most that this route protects", policy.max_request);
    Err(Refusal::new(Reason::BodyTooLarge, detail))
}

fn body_kind(headers: &HeaderMap) -> Kind {
    Kind::of(headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default())
}

fn key_missing(policy: &Policy) -> Refusal {
    let sources: Vec<_> = policy.key.from.iter().map(ToString::to_string).collect();
    Refusal::new(Reason::KeyMissing, format!("this route needs an idempotency key in {}", sources.join(" or ")))
}

fn invalid(detail: impl Into<String>) -> Refusal {
    Refusal::new(Reason::KeyInvalid, detail)
}

/// A body that could not be read.
#[derive(Debug)]
pub(super) enum Unread<B> {
    /// It is refused. With what was read of it and the rest, for shadow mode.
    Refused(Refusal, Bytes, B),
    /// There is nothing to refuse: the client broke off, or was too slow.
    Broken(StatusCode, &'static str),
}
