//! The intent guard: it recognizes an operation that was sent twice with two keys.

use std::time::Duration;

use http::Method;

use super::{InvalidSetting, MAX_DURATION, Policy, parse::words, require};
use crate::fingerprint::JsonPointer;

/// Recognizes an operation that a caller sends again under another key, by the values of some fields.
///
/// The guide describes what it does when a gateway or a store fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IntentGuard {
    /// The fields of the request's JSON or form body whose values make up the intent. For an MCP server, of the tool's
    /// arguments. A request that lacks one of them is not guarded.
    pub fields: Vec<JsonPointer>,
    /// How long after the completion of an operation another key with the same values counts as a duplicate.
    pub window: Duration,
    /// What a duplicate gets.
    pub on_match: OnMatch,
}

/// What a request gets that has the intent of another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OnMatch {
    /// The refusal `duplicate-intent`.
    Reject,
    /// The refusal `duplicate-intent`, until an operator releases the key.
    Hold,
    /// A run. Only the observer is told.
    Count,
}

words!(OnMatch, "on_match", { "reject" => Reject, "hold" => Hold, "count" => Count });

impl Policy {
    /// Checks the intent guard, if there is one.
    pub(super) fn check_guard(&self) -> Result<(), InvalidSetting> {
        let Some(IntentGuard { fields, window, .. }) = &self.guard else { return Ok(()) };
        let message = "is empty; name the fields that make two requests the same operation, such as \"/order_id\"";
        require(!fields.is_empty(), "guard.fields", message)?;
        require(!window.is_zero(), "guard.window", "is zero; it must be longer, such as \"10m\"")?;
        let message = format!("is {window:?}; it must be at most a hundred years, \"36600d\"");
        require(*window <= MAX_DURATION, "guard.window", message)?;
        let message = format!(
            "is {window:?}, and ttl is {:?}; it must be at most ttl, or the first key runs again before another may",
            self.ttl
        );
        require(*window <= self.ttl, "guard.window", message)?;
        let has_body = |method: &Method| {
            ![Method::GET, Method::HEAD, Method::DELETE, Method::OPTIONS, Method::TRACE].contains(method)
        };
        let message = "is set, and no method of this route has a body to read fields from; leave it out";
        require(self.methods.iter().any(has_body), "guard", message)
    }
}
