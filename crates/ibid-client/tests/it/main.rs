//! The clients, seen from outside: against servers that answer by script and record when they were asked, and against the
//! real gateway.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

mod browser;
mod docs;
mod endings;
mod gateway;
mod killed;
mod kit;
mod middleware;
mod node;
mod timing;
