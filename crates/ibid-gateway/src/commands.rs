//! What `ibid` can be told to do. Commands print and return; only `main` exits.

pub mod check;
pub mod demo;
pub mod serve;
pub mod store;
