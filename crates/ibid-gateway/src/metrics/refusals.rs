//! The last refusals, for operators: a client is not told which part of its request differed, they are.
//!
//! Bound: the last [`LAST`] that found their key used for another request, and as many of all other reasons, so that a
//! storm of retries does not drive out what is asked about.

use std::{collections::VecDeque, net::IpAddr};

use ibid::{Answered, Outcome, PartDigests, Reason, Shadow, store::Address};
use parking_lot::Mutex;

use crate::records::view::now_ms;

/// How many are remembered of each kind.
const LAST: usize = 128;
/// What is kept of what a client sent.
const LONGEST: usize = 200;

/// Remembers the last ones.
#[derive(Debug, Default)]
pub struct Refusals {
    reused: Mutex<VecDeque<Refused>>,
    others: Mutex<VecDeque<Refused>>,
}

/// A request that was refused, or would have been.
#[derive(Debug, Clone)]
pub struct Refused {
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Why.
    pub reason: Reason,
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

impl Refusals {
    /// Called for every request; only a refusal costs anything.
    pub(super) fn answered(&self, request: &Answered<'_>) {
        let (reason, shadow) = match request.outcome {
            Outcome::Refused(reason) => (reason, false),
            Outcome::Shadow(Shadow::Refusal(reason)) => (reason, true),
            _ => return,
        };
        let agent = request.user_agent.unwrap_or_default();
        let refused = Refused {
            at_ms: now_ms(),
            reason,
            shadow,
            route: request.route.into(),
            method: request.method.into(),
            path: request.path[..request.path.floor_char_boundary(LONGEST)].into(),
            key: request.key.into(),
            address: request.address,
            status: request.status,
            peer: request.peer,
            user_agent: String::from_utf8_lossy(&agent[..agent.len().min(LONGEST)]).into_owned(),
            parts: request.parts,
        };
        let mut last = if reason == Reason::KeyReused { self.reused.lock() } else { self.others.lock() };
        if last.len() == LAST {
            last.pop_front();
        }
        last.push_back(refused);
    }

    /// The latest, newest first; of one reason only, if one is given.
    pub fn latest(&self, reason: Option<Reason>, at_most: usize) -> Vec<Refused> {
        let mut all: Vec<Refused> = self.reused.lock().iter().chain(self.others.lock().iter()).cloned().collect();
        all.retain(|refused| reason.is_none_or(|reason| refused.reason == reason));
        all.reverse();
        all.sort_by_key(|refused| std::cmp::Reverse(refused.at_ms));
        all.truncate(at_most);
        all
    }
}
