//! The gateway, seen from outside.

mod bad_input;
mod check;
mod config;
mod disk;
mod docs;
mod faults;
mod killed;
mod operations;
mod passing;
mod presets;
mod store_command;
mod upstream;
