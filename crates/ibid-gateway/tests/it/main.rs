//! The gateway, seen from outside.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

mod bad_input;
mod check;
mod config;
mod disk;
mod docs;
mod faults;
mod keys;
mod killed;
mod operations;
mod passing;
mod presets;
mod store_command;
mod upstream;
mod webhooks;
