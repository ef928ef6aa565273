//! The latest refusals, for operators. They show which part of a request differed, which a client is not told.
//!
//! Bound: the last [`MAX_PER_KIND`] requests with a reused key, and as many for all other reasons together, so that a
//! storm of retries does not push out reused keys.

use std::{collections::VecDeque, net::IpAddr};

use ibid::{
    RefusalReason, RequestOutcome, RequestReport, fingerprint::PartDigests, observe::ShadowOutcome, store::Address,
};
use parking_lot::Mutex;

use crate::format::now_ms;

const MAX_PER_KIND: usize = 128;
/// Longest text kept of what a client sent, in bytes.
const MAX_TEXT_BYTES: usize = 200;

#[derive(Debug, Default)]
pub struct RefusalLog {
    reused: Mutex<VecDeque<RefusedRequest>>,
    others: Mutex<VecDeque<RefusedRequest>>,
}

/// A request that was refused, or would have been in shadow mode.
#[derive(Debug, Clone)]
pub struct RefusedRequest {
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    pub reason: RefusalReason,
    /// Whether shadow mode let it pass.
    pub shadow: bool,
    pub route: String,
    pub method: String,
    /// Without the query.
    pub path: String,
    /// Masked.
    pub key: String,
    /// The entry's address; `None` if the request was refused before it was known.
    pub address: Option<Address>,
    pub status: u16,
    pub peer: Option<IpAddr>,
    pub user_agent: String,
    /// Digests of the request's parts, to compare with those of the first request.
    pub parts: Option<PartDigests>,
}

impl RefusalLog {
    /// Called for every request; returns at once unless it is a refusal.
    pub(super) fn on_request(&self, request: &RequestReport<'_>) {
        let (reason, shadow) = match request.outcome {
            RequestOutcome::Refused(reason) => (reason, false),
            RequestOutcome::Shadow(ShadowOutcome::Refusal(reason)) => (reason, true),
            _ => return,
        };
        let agent = request.user_agent.unwrap_or_default();
        let refused = RefusedRequest {
            at_ms: now_ms(),
            reason,
            shadow,
            route: request.route.into(),
            method: request.method.into(),
            path: request.path[..request.path.floor_char_boundary(MAX_TEXT_BYTES)].into(),
            key: request.key.into(),
            address: request.address,
            status: request.status,
            peer: request.client_address,
            user_agent: String::from_utf8_lossy(&agent[..agent.len().min(MAX_TEXT_BYTES)]).into_owned(),
            parts: request.parts,
        };
        let mut last = if reason == RefusalReason::KeyReused { self.reused.lock() } else { self.others.lock() };
        if last.len() == MAX_PER_KIND {
            last.pop_front();
        }
        last.push_back(refused);
    }

    /// The latest refusals, newest first; with `reason`, only those.
    pub fn latest(&self, reason: Option<RefusalReason>, at_most: usize) -> Vec<RefusedRequest> {
        let mut all: Vec<RefusedRequest> =
            self.reused.lock().iter().chain(self.others.lock().iter()).cloned().collect();
        all.retain(|refused| reason.is_none_or(|reason| refused.reason == reason));
        all.reverse();
        all.sort_by_key(|refused| std::cmp::Reverse(refused.at_ms));
        all.truncate(at_most);
        all
    }
}
