//! The commands of `ibid`. They print and return; only `main` exits.

pub mod check;
pub mod demo;
pub mod health;
pub mod keys;
pub mod openapi;
pub mod report;
pub mod serve;
pub mod store;

mod admin_client;
mod print;
