//! The gateway, seen from outside.

mod check;
mod config;

mod upstream;
