//! Histories of requests and executions, and a checker that knows nothing of ibid but its promise.
//!
//! A [history](event) is what clients and the app saw: when a request was sent, when and how it was answered, and when the
//! app ran an operation. It is written as one JSON object per line, so that other checkers can read it.
//!
//! The [checker] looks at each key by itself, because keys are independent. It searches for an order of all events of the
//! key that respects real time (what ended before something else began comes first) and in which every event is allowed
//! by the [sequential specification](spec). This is the search of Wing and Gong with the memory of Lowe. If there is no such order, the
//! history breaks the promise, whatever happened inside.

pub mod checker;
pub mod event;
pub mod spec;
