//! The whole crate on private PostgreSQL servers. What is about transactions runs once per driver.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

mod inbox;
mod layer;
mod lost_commits;
mod operation_transactions;
mod pipelining;
mod run_tx;
mod sql;
mod support;
mod waiting;
