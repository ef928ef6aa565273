//! The commands of `ibid`. They print and return; only `main` exits.

pub mod check;
pub mod demo;
pub mod health;
pub mod keys;
pub mod migrate;
pub mod openapi;
pub mod report;
pub mod serve;
pub mod store;
pub mod sweep;

mod admin_client;
mod open_store;
mod print;
