//! The last refusals, for operators: a client is not told which part of its request differed, they are.
//!
//! Bound: the last [`MAX_PER_KIND`] that found their key used for another request, and as many of all other reasons, so that a
//! storm of retries does not drive out what is asked about.

use std::{collections::VecDeque, net::IpAddr};

use ibid::{PartDigests, RefusalReason, RequestOutcome, RequestReport, ShadowOutcome, store::Address};
use parking_lot::Mutex;

use crate::records::view::now_ms;

/// How many are remembered of each kind.
const MAX_PER_KIND: usize = 128;
/// What is kept of what a client sent.
const MAX_TEXT_BYTES: usize = 200;

/// Remembers the last ones.
#[derive(Debug, Default)]
pub struct RefusalLog {
    reused: Mutex<VecDeque<RefusedRequest>>,
    others: Mutex<VecDeque<RefusedRequest>>,
}

/// A request that was refused, or would have been.
#[derive(Debug, Clone)]
pub struct RefusedRequest {
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Why.
    pub reason: RefusalReason,
    /// Whether it passed all the same: shadow mode.
    pub shadow: bool,
    /// The route's name.
    pub route: String,
    /// Of the request.
    pub method: String,
    /// Of the request, without its query.
    pub path: String,
    /// Masked.
    pub key: String,
    /// Where the entry lives, if it got that far.
    pub address: Option<Address>,
    /// Of the answer.
    pub status: u16,
    /// Who sent it.
    pub peer: Option<IpAddr>,
    /// As sent.
    pub user_agent: String,
    /// Of the request, to be compared with those of the first.
    pub parts: Option<PartDigests>,
}

impl RefusalLog {
    /// Called for every request; only a refusal costs anything.
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

    /// The latest, newest first; of one reason only, if one is given.
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
