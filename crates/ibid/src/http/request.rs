//! Checks a covered request before anything is read or claimed: its key, its scope, and whether it is unambiguous.

use std::{cell::RefCell, net::IpAddr, sync::Arc, time::SystemTime};

use http::{HeaderMap, HeaderValue, header, request::Parts};

use super::{
    LayerState, Route, ambiguity,
    caller_tags::CallerTag,
    context::{RequestContext, RequestSender},
};
use crate::{
    fingerprint::{BodyFormat, FingerprintInput, PartDigests, form, json},
    key::{IdempotencyKey, KeySource, MaskedKey},
    label,
    policy::{LabelKeyDisplay, OnMismatch, Policy, PolicyMode},
    protocol::{MessageKind, Protocol},
    refusal::{Refusal, RefusalReason},
    scope::{CallerKind, Scope, ScopeInput, ScopePart, TokenVerification, cookies_only},
    sent_names::SentHeaders,
    store::{Address, ClaimRequest, Fingerprint, Tags, cut_tag, key_hash_digits},
    thread_buffer,
};

/// The result of checking a request's head.
pub(super) enum HeadCheck {
    /// The request has no key and needs none: it passes through.
    Keyless,
    Refused(Refusal, MaskedKey),
    Keyed(KeyedRequest),
}

/// A request that will be claimed.
pub(super) struct KeyedRequest {
    /// `None` if the key is in the body.
    key: Option<IdempotencyKey>,
    /// Empty if the address is known.
    scope: Scope,
    /// The address, if it does not depend on the body and nothing but the fingerprint is read from the body.
    address: Option<Address>,
    pub(super) caller: CallerKind,
    /// The user who may own a key of the form `user:operation:resource:timestamp`.
    key_owner: Option<String>,
    tenant: CallerTag,
    user: CallerTag,
    /// The length of the body, if it is declared.
    pub(super) length: Option<u64>,
    /// Why the head is refused, if its message is an operation. Boxed, because it is rare.
    head_refusal: Option<Box<Refusal>>,
}

impl KeyedRequest {
    /// A request whose claim was granted earlier: nothing of it is needed any more.
    pub(super) fn resumed() -> Self {
        let none = || CallerTag::Text(String::new());
        let (scope, caller) = (Scope::default(), CallerKind::Named);
        let (tenant, user) = (none(), none());
        let (key_owner, length, head_refusal) = (None, None, None);
        Self { key: None, scope, address: None, caller, key_owner, tenant, user, length, head_refusal }
    }

    /// A request whose head is refused, once its body tells which message to refuse.
    pub(super) fn refused(refusal: Refusal, headers: &HeaderMap) -> Self {
        let length = headers.get(header::CONTENT_LENGTH).and_then(content_length);
        Self { length, head_refusal: Some(Box::new(refusal)), ..Self::resumed() }
    }
}

/// Whether a request carries a key from one of the policy's sources, in any format. Bodies are not read: a request
/// whose body may contain a key counts as carrying one.
pub fn carries_key(policy: &Policy, uri: &http::Uri, headers: &HeaderMap) -> bool {
    let in_query = |name: &str| {
        let pairs = uri.query().unwrap_or_default().split('&');
        let mut names = pairs.map(|pair| pair.split('=').next().unwrap_or_default());
        names.any(|given| form::decode(given.as_bytes()).as_deref() == Some(name.as_bytes()))
    };
    policy.key.from.iter().any(|source| match source {
        KeySource::Header(name) => headers.contains_key(name),
        KeySource::Query(name) => in_query(name),
        KeySource::Json(_) | KeySource::Body => false,
    }) || may_have_key_in_body(policy, headers)
}

/// The governing route, the result of its head check, and the other routes under which the request has a key.
pub(super) type RouteChoice = (Arc<Route>, HeadCheck, Vec<(Arc<Route>, KeyedRequest)>);

/// Like [`check_head`], for a request that an app could match to several routes. The requirements of all routes apply.
/// The first route under which the request has a key governs it; enforced routes precede those in shadow mode.
#[inline]
pub(super) fn choose_route(
    shared: &LayerState, route: Arc<Route>, also: Vec<Arc<Route>>, parts: &Parts, sender: &RequestSender,
    sent: &SentHeaders<'_>,
) -> RouteChoice {
    let first = check_head(shared, &route, parts, sender, sent);
    if also.is_empty() {
        return (route, first, Vec::new());
    }
    choose_among(shared, (route, first), also, parts, sender, sent)
}

/// Chooses among several routes, the first of which was checked.
#[inline(never)]
fn choose_among(
    shared: &LayerState, (route, first): (Arc<Route>, HeadCheck), also: Vec<Arc<Route>>, parts: &Parts,
    sender: &RequestSender, sent: &SentHeaders<'_>,
) -> RouteChoice {
    let enforced = |route: &Route| route.policy.mode == PolicyMode::Enforce;
    if matches!(first, HeadCheck::Refused(..)) && enforced(&route) {
        return (route, first, Vec::new());
    }
    let has_key = matches!(first, HeadCheck::Keyed(_));
    let mut keyed = Vec::with_capacity(1 + also.len());
    let mut otherwise = None;
    match first {
        HeadCheck::Keyed(found) => keyed.push((route, found)),
        first => otherwise = Some((route, first)),
    }
    for other in also {
        match check_head(shared, &other, parts, sender, sent) {
            HeadCheck::Keyed(found) => keyed.push((other, found)),
            refused @ HeadCheck::Refused(..) if enforced(&other) && (other.policy.key.required || !has_key) => {
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
            (route, HeadCheck::Keyed(found), keyed)
        }
    }
}

/// Reads key and scope from the head.
fn check_head(
    shared: &LayerState, route: &Route, parts: &Parts, sender: &RequestSender, sent: &SentHeaders<'_>,
) -> HeadCheck {
    let policy = &route.policy;
    let key = match key_from_head(policy, parts, sent) {
        Ok(key) => key,
        Err(refusal) => return HeadCheck::Refused(refusal, refused_key(policy, parts, &[])),
    };
    let masked = || key.as_ref().map(|key| MaskedKey::of(key.as_str())).unwrap_or_default();
    let credentials = &shared.settings.credentials;
    if key.is_none() && !may_have_key_in_body(policy, &parts.headers) {
        if policy.key.required {
            return HeadCheck::Refused(key_missing(policy), MaskedKey::default());
        }
        return match ambiguity::check_headers(policy, credentials, &parts.headers, &sent.names) {
            Ok(()) => HeadCheck::Keyless,
            Err(refusal) => HeadCheck::Refused(refusal, MaskedKey::default()),
        };
    }
    // A signature does not cover the path: a copied delivery must not run again under another spelling of it.
    let signed = policy.signature.is_some() && policy.scope.contains(&ScopePart::Path);
    let plain = signed.then(|| ambiguity::normalized_uri(&parts.uri)).flatten();
    let caller = ScopeInput {
        method: &parts.method,
        uri: plain.as_ref().unwrap_or(&parts.uri),
        headers: &parts.headers,
        peer: sender.peer,
        identity: sender.identity.as_ref(),
        route: &route.name,
        trusted: &shared.settings.trusted_proxies,
        credentials,
    };
    let scope =
        Scope::read(&policy.scope, &caller, sent).and_then(|scope| check_identity(policy, &caller).map(|()| scope));
    let scope = match scope {
        // Only the cookies of HTTP responses are recorded: no other caller can be recognized by them.
        Ok((_, CallerKind::CookiesOnly)) if !route.protocol.rules().is_plain_http() => Err(cookies_only()),
        scope => scope,
    };
    let judged = match scope {
        // Report the earliest reason in the table.
        Err(refusal) if refusal.reason > RefusalReason::RequestAmbiguous => {
            ambiguity::check_headers(policy, credentials, &parts.headers, &sent.names).and(Err(refusal))
        }
        scope => scope,
    };
    let owner = key_owner(policy, &caller);
    let judged = judged.and_then(|scope| {
        ambiguity::check_headers(policy, credentials, &parts.headers, &sent.names)?;
        if signed {
            ambiguity::check_path(parts.uri.path())?;
        }
        if sent.get(&header::UPGRADE).is_some() {
            let detail = "a request with an idempotency key cannot upgrade its connection; send it without Upgrade";
            return Err(Refusal::new(RefusalReason::RequestAmbiguous, detail));
        }
        let owner = owner?;
        if let Some(key) = &key {
            check_owner(owner.as_deref(), key)?;
        }
        let length = sent.get(&header::CONTENT_LENGTH).and_then(content_length);
        if let Some(length) = length {
            let first = |refusal| if scope.1 == CallerKind::CookiesOnly { cookies_only() } else { refusal };
            check_length(policy, length).map_err(first)?;
        }
        Ok((scope, owner, length))
    });
    match judged {
        Err(refusal) => HeadCheck::Refused(refusal, masked()),
        Ok(((scope, kind), owner, length)) => {
            let (tenant, user) = CallerTag::of(policy, &caller, &scope, key.as_ref());
            let is_plain = route.protocol == Protocol::Http && policy.guard.is_none();
            let (scope, address) = match &key {
                Some(key) if is_plain && policy.on_mismatch != OnMismatch::New => {
                    let secret = shared.settings.address_secret.as_ref();
                    (Scope::default(), Some(scope.into_address(key.as_str(), secret)))
                }
                _ => (scope, None),
            };
            let head_refusal = None;
            HeadCheck::Keyed(KeyedRequest {
                key,
                scope,
                address,
                caller: kind,
                key_owner: owner,
                tenant,
                user,
                length,
                head_refusal,
            })
        }
    }
}

impl KeyedRequest {
    /// The key; empty until the body is read, if it is there.
    pub(super) fn key(&self) -> &str {
        self.key.as_ref().map_or("", IdempotencyKey::as_str)
    }

    /// The masked key; empty if it is in the body.
    pub(super) fn masked(&self) -> MaskedKey {
        self.key.as_ref().map(|key| MaskedKey::of(key.as_str())).unwrap_or_default()
    }

    /// The address at which to look up the cookies of a caller who has nothing else. `None` for all other callers, and
    /// if the address depends on the body.
    pub(super) fn cookies_only_at(&self, shared: &LayerState, policy: &Policy) -> Option<Address> {
        let is_final = self.caller == CallerKind::CookiesOnly && policy.on_mismatch != OnMismatch::New;
        let key = self.key.as_ref().filter(|_| is_final)?;
        let secret = shared.settings.address_secret.as_ref();
        Some(self.address.unwrap_or_else(|| self.scope.address(key.as_str(), None, secret)))
    }

    /// Finds key, fingerprint and address once the body is read. Returns `None` if the request has no key and needs none.
    pub(super) fn identify(
        &mut self, shared: &LayerState, context: &mut RequestContext, parts: &Parts,
        (body, trailers): RequestContent<'_>,
    ) -> Result<Option<RequestIdentity>, Refusal> {
        match context.route.protocol.rules().read_message(context.policy(), body)? {
            MessageKind::Operation { id } => context.message_id = id,
            MessageKind::Other => return Ok(None),
        }
        if let Some(refusal) = self.head_refusal.take() {
            return Err(*refusal);
        }
        let context = &*context;
        let policy = context.policy();
        let input = fingerprint_input(context, parts, (body, trailers));
        let secret = shared.settings.address_secret.as_ref();
        let known_at = self.address;
        let memo = &shared.fingerprint_memo;
        let remembered = known_at.as_ref().and_then(|at| memo.find(at, &context.route, || input.tag(policy)));
        let (fingerprint, digests) = match remembered {
            Some(made) => made,
            None => {
                let made = context.route.protocol.rules().fingerprint(Fingerprint::VERSION, policy, &input)?;
                made.expect("the current version is known")
            }
        };
        if self.key.is_none() {
            self.key = match key_from_body(policy, parts, body, &fingerprint)? {
                Some(key) => check_owner(self.key_owner.as_deref(), &key).map(|()| Some(key))?,
                None if policy.key.required => return Err(key_missing(policy)),
                None => return Ok(None),
            };
        }
        let digests = (fingerprint != Fingerprint::NONE).then_some(digests);
        let own_entry = (policy.on_mismatch == OnMismatch::New).then_some(&fingerprint);
        let address = known_at.unwrap_or_else(|| self.scope.address(self.key(), own_entry, secret));
        let intent = policy.guard.as_ref().and_then(|guard| {
            let intent = context.route.protocol.rules().intent(&guard.fields, &input)?;
            Some(self.scope.intent_address(&intent, secret))
        });
        let is_memorable = known_at.is_some() && remembered.is_none();
        Ok(Some(RequestIdentity { address, fingerprint, digests, intent, is_memorable }))
    }

    /// Builds the claim.
    pub(super) fn claim(&self, context: &RequestContext, parts: &Parts) -> ClaimRequest {
        let (route, policy, key, identity) = (&*context.route, context.policy(), self.key(), context.identity());
        let shown = match policy.label.key {
            LabelKeyDisplay::Clear => cut_tag(key),
            LabelKeyDisplay::Masked => context.key.as_bytes(),
        };
        let agent = context.user_agent.as_ref().map(|agent| agent.as_bytes()).unwrap_or_default();
        thread_local!(static WRITTEN: RefCell<(String, Vec<u8>)> = const { RefCell::new((String::new(), Vec::new())) });
        let (tags, label) = WRITTEN.with_borrow_mut(|(endpoint, out)| {
            // A catch-all route name does not describe the request.
            let endpoint = if matches!(route.name.as_str(), "" | "*") {
                endpoint.clear();
                route.protocol.rules().write_endpoint(parts, endpoint);
                &*endpoint
            } else {
                &route.name
            };
            out.clear();
            let (tenant, user, hash) = (self.tenant.as_bytes(), self.user.as_bytes(), key_hash_digits(key));
            Tags::write([tenant, user, cut_tag(endpoint), shown, hash.as_bytes()], out);
            let tags_length = out.len();
            with_address_text(context.client_address, |client| {
                let told = [parts.method.as_str().as_bytes(), parts.uri.path().as_bytes(), client.as_bytes(), agent];
                let (digests, intent) = (identity.digests.as_ref(), identity.intent.as_ref());
                let whole_key = context.has_label_key.then_some(key);
                label::write(out, context.requested_at_ms, told, digests, whole_key, intent);
            });
            // Most stores encode or copy both. The memory store keeps them, and so the buffer, only for entries that are
            // not compact: large, unknown or released ones.
            let mut label = thread_buffer::copy(out);
            (Tags::from_written(label.split_to(tags_length)), label)
        });
        ClaimRequest::new(identity.address, identity.fingerprint, tags, label, policy.terms())
    }
}

/// Formats the address of a client, unless it is that of the thread's last request.
fn with_address_text<T>(client: Option<IpAddr>, read: impl FnOnce(&str) -> T) -> T {
    thread_local!(static LAST: RefCell<(Option<IpAddr>, String)> = const { RefCell::new((None, String::new())) });
    LAST.with_borrow_mut(|(known, text)| {
        if *known != client {
            *text = client.map(|client| client.to_string()).unwrap_or_default();
            *known = client;
        }
        read(text)
    })
}

/// What tells a request with a key from all others.
pub(super) struct RequestIdentity {
    pub(super) address: Address,
    pub(super) fingerprint: Fingerprint,
    pub(super) digests: Option<PartDigests>,
    /// The address of the request's intent, if the route has a guard and the request all of its fields.
    pub(super) intent: Option<Address>,
    /// Whether the memo could have had the fingerprint, and did not.
    is_memorable: bool,
}

/// A body and its trailers.
pub(super) type RequestContent<'a> = (&'a [u8], Option<&'a HeaderMap>);

impl RequestIdentity {
    /// The identity of a request whose claim was granted earlier.
    pub(super) fn of_claim(claim: &ClaimRequest) -> Self {
        let ClaimRequest { address, fingerprint, .. } = *claim;
        Self { address, fingerprint, digests: None, intent: None, is_memorable: false }
    }

    /// Remembers the fingerprint of a replayed request for its next retry.
    pub(super) fn remember(
        &self, shared: &LayerState, context: &RequestContext, parts: &Parts, content: RequestContent<'_>,
    ) {
        if !self.is_memorable {
            return;
        }
        if let Some(tag) = fingerprint_input(context, parts, content).tag(context.policy()) {
            let made = (self.fingerprint, self.digests.unwrap_or_default());
            shared.fingerprint_memo.insert(&self.address, &context.route, tag, made);
        }
    }
}

/// Computes the fingerprint by the rules of `version`. Returns `None` if the version is unknown.
pub(super) fn fingerprint(
    version: u8, context: &RequestContext, parts: &Parts, content: RequestContent<'_>,
) -> Result<Option<(Fingerprint, PartDigests)>, Refusal> {
    let input = fingerprint_input(context, parts, content);
    context.route.protocol.rules().fingerprint(version, context.policy(), &input)
}

fn fingerprint_input<'a>(
    context: &RequestContext, parts: &'a Parts, (body, trailers): RequestContent<'a>,
) -> FingerprintInput<'a> {
    let Parts { method, uri, headers, .. } = parts;
    FingerprintInput { method, uri, headers, found: context.found_headers, body, trailers }
}

/// A label that reads a token claim makes the token mandatory. Otherwise a caller could stay unnamed by omitting the
/// token.
fn check_identity(policy: &Policy, caller: &ScopeInput<'_>) -> Result<(), Refusal> {
    match caller.identity {
        Some(TokenVerification(Err(refusal))) if policy.claims().next().is_some() => Err(refusal.clone()),
        _ => Ok(()),
    }
}

/// The caller's user, for keys that contain it. A header that is not accepted identifies nobody.
fn key_owner(policy: &Policy, caller: &ScopeInput<'_>) -> Result<Option<String>, Refusal> {
    let Some(part) = policy.user_part().filter(|_| policy.checks_key_owner()) else { return Ok(None) };
    match part.value(caller) {
        Ok(user) => Ok(Some(String::from_utf8_lossy(&user).into_owned())),
        Err(refusal) if refusal.reason == RefusalReason::ScopeRefused => Err(refusal),
        Err(_) => Ok(None),
    }
}

/// A key that contains a user is valid for that user only.
fn check_owner(owner: Option<&str>, key: &IdempotencyKey) -> Result<(), Refusal> {
    let Some(owner) = owner else { return Ok(()) };
    match key.as_str().split_once(':') {
        Some((user, _)) if user != owner => {
            let detail = "the key names a user who is not the caller; a key of this form begins with your own name";
            Err(Refusal::new(RefusalReason::ScopeRefused, detail))
        }
        _ => Ok(()),
    }
}

/// Verifies the signature before the claim: a forged delivery leaves no entry.
pub(super) fn check_signature(policy: &Policy, parts: &Parts, body: &[u8]) -> Result<(), Refusal> {
    let Some(verifier) = &policy.signature else { return Ok(()) };
    let verified = verifier.verify(&parts.headers, body, SystemTime::now());
    verified.map_err(|why| Refusal::new(RefusalReason::IdentityInvalid, format!("the delivery is not believed: {why}")))
}

fn key_from_head(policy: &Policy, parts: &Parts, sent: &SentHeaders<'_>) -> Result<Option<IdempotencyKey>, Refusal> {
    for source in &policy.key.from {
        let found = match source {
            KeySource::Header(name) => {
                if sent.is_repeated(name) {
                    return Err(key_invalid(format!("the header {name} is sent more than once; send one key")));
                }
                let key = sent.get(name).map(|value| IdempotencyKey::from_header(&policy.key, value.as_bytes()));
                key.transpose().map_err(key_invalid)?
            }
            KeySource::Query(name) => key_from_query(policy, parts.uri.query().unwrap_or_default(), name)?,
            KeySource::Json(_) if body_format(&parts.headers) != BodyFormat::Json => None,
            // Sources after this one are checked once the body is read.
            KeySource::Json(_) | KeySource::Body => return Ok(None),
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

fn key_from_query(policy: &Policy, query: &str, name: &str) -> Result<Option<IdempotencyKey>, Refusal> {
    let mut found = None;
    for pair in query.split('&') {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        if form::decode(key.as_bytes()).as_deref() != Some(name.as_bytes()) {
            continue;
        }
        let broken = || key_invalid(format!("the parameter {name} has a broken % escape"));
        let bytes = form::decode(value.as_bytes()).ok_or_else(broken)?;
        if found.replace(bytes).is_some() {
            return Err(key_invalid(format!("the parameter {name} is sent more than once; send one key")));
        }
    }
    found.map(|key| IdempotencyKey::new(&policy.key, key).map_err(key_invalid)).transpose()
}

fn may_have_key_in_body(policy: &Policy, headers: &HeaderMap) -> bool {
    policy.key.from.iter().any(|source| match source {
        KeySource::Json(_) => body_format(headers) == BodyFormat::Json,
        KeySource::Body => true,
        KeySource::Header(_) | KeySource::Query(_) => false,
    })
}

/// Tries the sources, starting with the first that needs the body.
fn key_from_body(
    policy: &Policy, parts: &Parts, body: &[u8], fingerprint: &Fingerprint,
) -> Result<Option<IdempotencyKey>, Refusal> {
    let plain = |key: &str| IdempotencyKey::new(&policy.key, key).map(Some).map_err(key_invalid);
    for source in &policy.key.from {
        match source {
            KeySource::Json(pointer) if body_format(&parts.headers) == BodyFormat::Json => {
                match json::find(body, pointer) {
                    Some(json::JsonLookup::String(key)) => return plain(&key),
                    Some(json::JsonLookup::Number(key)) => return plain(key),
                    Some(json::JsonLookup::OtherType | json::JsonLookup::True) => {
                        return Err(key_invalid(format!("the value at {pointer} is neither a string nor a number")));
                    }
                    Some(json::JsonLookup::Absent) | None => {}
                }
            }
            KeySource::Body => return Ok(Some(IdempotencyKey::of_request(fingerprint))),
            KeySource::Header(name) => {
                if let Some(value) = parts.headers.get(name) {
                    return IdempotencyKey::from_header(&policy.key, value.as_bytes()).map(Some).map_err(key_invalid);
                }
            }
            KeySource::Query(name) => {
                let found = key_from_query(policy, parts.uri.query().unwrap_or_default(), name)?;
                if found.is_some() {
                    return Ok(found);
                }
            }
            KeySource::Json(_) => {}
        }
    }
    Ok(None)
}

/// The key of a request that was refused for its key: masked, without characters that logs cannot show.
pub(super) fn refused_key(policy: &Policy, parts: &Parts, body: &[u8]) -> MaskedKey {
    let sent = policy.key.from.iter().find_map(|source| match source {
        KeySource::Header(name) => {
            let value = parts.headers.get(name)?.as_bytes().trim_ascii();
            let quoted = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
            Some(quoted.unwrap_or(value).to_vec())
        }
        KeySource::Query(name) => parts.uri.query()?.split('&').find_map(|pair| {
            let (key, value) = pair.split_once('=')?;
            let is_it = form::decode(key.as_bytes()).as_deref() == Some(name.as_bytes());
            is_it.then(|| form::decode(value.as_bytes()).unwrap_or(value.as_bytes().into()).into_owned())
        }),
        KeySource::Json(pointer) if body_format(&parts.headers) == BodyFormat::Json => match json::find(body, pointer)?
        {
            json::JsonLookup::String(key) => Some(key.into_owned().into_bytes()),
            json::JsonLookup::Number(key) => Some(key.as_bytes().to_vec()),
            json::JsonLookup::OtherType | json::JsonLookup::True | json::JsonLookup::Absent => None,
        },
        KeySource::Json(_) | KeySource::Body => None,
    });
    let visible = |byte: &u8| if (0x21..=0x7e).contains(byte) { char::from(*byte) } else { '?' };
    match sent.unwrap_or_default() {
        sent if sent.is_empty() => MaskedKey::default(),
        sent => MaskedKey::of(&sent.iter().map(visible).collect::<String>()),
    }
}

fn content_length(value: &HeaderValue) -> Option<u64> {
    let digits = value.as_bytes();
    let number = digits.iter().try_fold(0_u64, |number, digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit <= 9)?;
        number.checked_mul(10)?.checked_add(digit.into())
    });
    number.filter(|_| !digits.is_empty())
}

pub(super) fn check_length(policy: &Policy, length: u64) -> Result<(), Refusal> {
    if length <= policy.max_request {
        return Ok(());
    }
    let detail = format!("the body is larger than {} bytes, the most that this route protects", policy.max_request);
    Err(Refusal::new(RefusalReason::BodyTooLarge, detail))
}

fn body_format(headers: &HeaderMap) -> BodyFormat {
    BodyFormat::of(headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default())
}

fn key_missing(policy: &Policy) -> Refusal {
    let sources: Vec<_> = policy.key.from.iter().map(ToString::to_string).collect();
    Refusal::new(RefusalReason::KeyMissing, format!("this route needs an idempotency key in {}", sources.join(" or ")))
}

fn key_invalid(detail: impl Into<String>) -> Refusal {
    Refusal::new(RefusalReason::KeyInvalid, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_an_address_follows_the_address() {
        for text in ["127.0.0.1", "127.0.0.1", "::1", "", "::1", "10.0.0.7"] {
            assert_eq!(with_address_text(text.parse().ok(), str::to_owned), text);
        }
    }
}
