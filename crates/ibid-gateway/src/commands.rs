//! The commands of `ibid`. They print and return; only `main` exits.

pub mod admin;
pub mod check;
pub mod demo;
pub mod keys;
pub mod openapi;
pub mod serve;
pub mod store;

mod print;
