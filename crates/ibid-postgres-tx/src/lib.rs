//! Idempotency in your own PostgreSQL transaction: the claim, the business write and the answer commit together.

pub use self::driver::{Connection, Isolation, Pool, Transaction};

mod driver;
pub mod inbox;
