//! The gateway, seen from outside.

mod bad_input;
mod check;
mod config;
mod docs;
mod faults;
mod killed;
mod operations;
mod passing;
mod presets;
mod upstream;
