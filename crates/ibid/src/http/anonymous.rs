//! Anonymous callers under the scope `credential`, and how they are recognized when they return with cookies.
//!
//! A request with cookies but without a credential is refused, because it is not configured which cookie identifies the
//! caller. One case is unambiguous: the first request was anonymous, its response set cookies (of a load balancer,
//! say), and the retry sends exactly such cookies. The layer therefore stores hashes of the cookies that a response to
//! an anonymous caller sets: in the record if the response is remembered, otherwise each in its own marker entry. A
//! retry counts as anonymous if all its cookies were set by a response to the same request. A session that started
//! elsewhere does not.

use std::sync::Arc;

use http::{HeaderMap, StatusCode, response::Parts};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::LayerState;
use crate::{
    engine::{CompletedAnswer, Engine, store_unavailable},
    policy::Policy,
    record::{Record, RecordBody},
    refusal::Refusal,
    scope::{AddressSecret, CallerKind, cookies, cookies_only, cookies_set},
    store::{Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Tags},
    time::now_ms,
};

/// The maximum number of cookies stored per response. A request with more is not recognized.
const MAX_RECORDED_COOKIES: usize = 32;

pub(super) struct AnonymousCaller {
    /// A template; each marker claim gets its own token.
    request: ClaimRequest,
    secret: Option<AddressSecret>,
    /// Cookies that the response set and its record does not contain, with the response's status.
    unrecorded_cookies: Mutex<Option<(StatusCode, Vec<[u8; 32]>)>>,
}

impl AnonymousCaller {
    /// Returns `None` if a credential identifies the caller, or the scope needs none.
    pub(super) fn of(
        kind: CallerKind, ask: &ClaimRequest, policy: &Policy, secret: Option<&AddressSecret>,
    ) -> Option<Box<Self>> {
        if kind == CallerKind::Named {
            return None;
        }
        // Must outlive the answer itself, which is settled a little later.
        let request = ClaimRequest { ttl: policy.ttl.saturating_add(policy.lease), ..ask.clone() };
        Some(Box::new(Self { request, secret: secret.cloned(), unrecorded_cookies: Mutex::default() }))
    }

    /// Hashes the cookies that a response sets. They count as unrecorded until [`mark_recorded`](Self::mark_recorded).
    pub(super) fn cookies_set_by(&self, answer: &Parts) -> Vec<[u8; 32]> {
        let set = cookies_set(&answer.headers).take(MAX_RECORDED_COOKIES);
        let (at, secret) = (&self.request.address, self.secret.as_ref());
        let set: Vec<_> = set.map(|(name, value)| hashed(at, name, value, secret)).collect();
        if !set.is_empty() {
            *self.unrecorded_cookies.lock() = Some((answer.status, set.clone()));
        }
        set
    }

    /// The record of the response contains its cookies.
    pub(super) fn mark_recorded(&self) {
        *self.unrecorded_cookies.lock() = None;
    }

    pub(super) fn has_unrecorded(&self) -> bool {
        self.unrecorded_cookies.lock().is_some()
    }

    /// Stores the cookies of a response that is not remembered. A store error does not fail the request: the retry is
    /// then refused, and nothing runs twice.
    pub(super) async fn store_cookies(&self, engine: &Engine) {
        let Some((status, set)) = self.unrecorded_cookies.lock().take() else { return };
        for cookie in set {
            let _ = self.store_cookie(engine, cookie, status).await;
        }
    }

    async fn store_cookie(&self, engine: &Engine, cookie: [u8; 32], status: StatusCode) -> Option<()> {
        let started = Instant::now();
        let tags = &self.request.tags;
        let shown = format!("{} (cookie)", tags.key());
        let ask = Arc::new(ClaimRequest {
            address: Address(cookie),
            token: ClaimToken::mint(),
            tags: Tags::new(tags.tenant(), tags.user(), tags.endpoint(), &shown),
            ..self.request.clone()
        });
        let ClaimOutcome::Granted(lease) = engine.store().claim(&ask).await.ok()? else { return None };
        let (requested_at_ms, headers, trailers, cookies) = (now_ms(), HeaderMap::new(), HeaderMap::new(), Vec::new());
        let (completed_at_ms, body) = (requested_at_ms, RecordBody::None);
        let record = Record { status, requested_at_ms, completed_at_ms, headers, body, trailers, cookies };
        let end =
            CompletedAnswer::new(&record.source(), status.as_u16(), false, started.elapsed()).into_settlement(ask.ttl);
        engine.store().settle(&lease, &end).await.ok().map(drop)
    }
}

/// Checks that every cookie of a request was set by a response to an anonymous request at this address; with a
/// fingerprint, to the same request. Without one, the check works before the body is read.
///
/// # Errors
/// A refusal, if another cookie was sent.
pub(super) async fn check_cookies(
    shared: &LayerState, headers: &HeaderMap, at: &Address, fingerprint: Option<&Fingerprint>,
) -> Result<(), Refusal> {
    let (engine, secret) = (&shared.engine, shared.settings.address_secret.as_ref());
    let sent: Vec<_> = cookies(headers).map(|(name, value)| hashed(at, name, value, secret)).collect();
    if sent.len() > MAX_RECORDED_COOKIES {
        return Err(cookies_only());
    }
    let is_same = |seen: &Fingerprint| fingerprint.is_none_or(|fingerprint| fingerprint == seen);
    let recorded = match engine.peek(at).await.map_err(|_| store_unavailable())? {
        Some(ClaimOutcome::Completed(finished)) if is_same(&finished.fingerprint) => {
            Record::decode(finished.record).map(|record| record.cookies).unwrap_or_default()
        }
        _ => Vec::new(),
    };
    for cookie in sent.iter().filter(|cookie| !recorded.contains(cookie)) {
        let is_known = match engine.peek(&Address(*cookie)).await.map_err(|_| store_unavailable())? {
            Some(ClaimOutcome::Completed(finished)) => is_same(&finished.fingerprint),
            Some(ClaimOutcome::InProgress(holder) | ClaimOutcome::OutcomeUnknown(holder)) => {
                is_same(&holder.fingerprint)
            }
            Some(ClaimOutcome::Granted(_) | ClaimOutcome::TokenSpent) | None => false,
        };
        if !is_known {
            return Err(cookies_only());
        }
    }
    Ok(())
}

/// The hash of a cookie in a record, and the address of its marker entry.
fn hashed(at: &Address, name: &[u8], value: &[u8], secret: Option<&AddressSecret>) -> [u8; 32] {
    at.of_cookie(name, value, secret).0
}
