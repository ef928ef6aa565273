//! The sequential specification: what one key of one caller may do if one event follows the other.
//!
//! - The app runs an operation at most once.
//! - An answer is the answer of that run.
//! - Once an answer was given, every later request gets it: nothing is in progress or unknown any more.
//! - An answer that waits to be stored (`pending`) may be unknown elsewhere until everything is at rest.
//! - An outcome is unknown only after something that can make it so: a run, a request whose answer was lost, or one that is
//!   still under way (its gateway may be paused for longer than its lease).

use crate::event::RequestResult;

/// The state of a key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct KeyState {
    /// The answer of the run, once there was one.
    executed: Option<String>,
    /// Whether a client has that answer.
    answered: bool,
    /// Whether a client was told that the answer waits to be stored.
    is_pending: bool,
}

/// One thing that happened to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyEvent {
    /// A run began, with this answer.
    Execute(String),
    /// A request ended like this.
    Request {
        /// How.
        result: RequestResult,
        /// Whether it was sent when everything was at rest.
        at_rest: bool,
        /// Whether another request can have made the outcome unknown: it was lost before this one ended, or overlaps it.
        has_cause: bool,
    },
}

impl KeyState {
    /// The state after an event, or why it is not allowed.
    pub fn apply(&self, event: &KeyEvent) -> Result<KeyState, &'static str> {
        let mut next = self.clone();
        match event {
            KeyEvent::Execute(_) if self.executed.is_some() => return Err("it ran before"),
            KeyEvent::Execute(answer) => next.executed = Some(answer.clone()),
            KeyEvent::Request { result, at_rest, has_cause } => match result {
                RequestResult::Answer { answer, pending } => {
                    if self.executed.as_ref() != Some(answer) {
                        return Err("no run gave this answer");
                    }
                    next.is_pending |= pending;
                    next.answered |= !pending;
                }
                RequestResult::InProgress | RequestResult::OutcomeUnknown if self.forgets(*at_rest) => {
                    return Err("a client had the answer before");
                }
                RequestResult::OutcomeUnknown if self.executed.is_none() && !has_cause => {
                    return Err("nothing had happened that could make the outcome unknown");
                }
                RequestResult::InProgress | RequestResult::OutcomeUnknown | RequestResult::Lost => {}
            },
        }
        Ok(next)
    }

    /// Whether a client had an answer that a request must get too.
    fn forgets(&self, at_rest: bool) -> bool {
        if self.is_pending { at_rest } else { self.answered }
    }
}
