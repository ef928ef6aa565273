//! The clients, seen from outside: against servers that answer by script and record when they were asked, and against the
//! real gateway.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

mod browser;
mod common;
mod crash;
mod docs;
mod gateway;
mod middleware;
mod node;
mod send_outcomes;
mod timing;
