//! Several gateways, real stores, clients that retry, and faults from a seed.
//!
//! A [run] puts load on a [fleet] of gateway processes (or of Envoys or apps that ask them) in front of an [upstream] that logs every execution, while a
//! [fault_schedule] made from a seed injects [faults](fault): processes killed and paused, [links](testbed::fault_proxy)
//! cut, reset and slowed, and what is [beneath](sandbox) the gateways taken away. Then everything is healed, comes to rest, and every key is asked for through every gateway. What
//! comes out is a [judgement](evaluation): keys that ran twice, got two answers or lost theirs, each with its timeline.
//!
//! The harness knows no store: the caller gives a configuration per gateway and the faults. [`scenarios`] has the ones that
//! ship, `ibid-chaos` runs them by name. A [soak] asks whether anything grows.
//!
//! A seed gives the same faults in the same order at the same times. What the machine makes of it varies: two runs of a seed
//! are alike, not equal.
//!
//! [run]: run::run

#![allow(clippy::disallowed_methods, reason = "a harness may read the environment and block")]

pub mod answer_history;
mod client;
pub mod crowd;
pub mod evaluation;
mod exchange_app;
pub mod fault;
pub mod fault_schedule;
pub mod fleet;
pub mod random;
pub mod report;
pub mod run;
pub mod sandbox;
pub mod scenarios;
pub mod soak;
pub mod upstream;
