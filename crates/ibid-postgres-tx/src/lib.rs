//! Idempotency in your own PostgreSQL transaction: the claim, the business write and the answer commit together.
//!
//! A gateway or layer remembers *that* something ran; if it crashes in between, the outcome is unknown. If the effect
//! is a write to PostgreSQL, there is no in between: everything commits, or nothing does. So no outcome is unknown, and
//! the effect happens exactly once in that database.
//!
//! - [`run_tx`] for handlers without a layer: claims, calls your operation with a transaction, records its answer,
//!   commits.
//! - [`complete_in`] for handlers under the `ibid` layer: records the answer in your transaction.
//! - [`inbox`] for events of a message broker: each has its effect once, however often it is delivered.
//! - For every other language: the SQL functions of the schema `ibid` (see `docs/same-transaction.md`).
//!
//! All of them write the rows of the PostgreSQL store: a gateway or layer on that database replays their answers, and
//! vice versa. `ibid migrate` creates the schema; the role of your pool must be a member of `ibid_service`.
//!
//! ```no_run
//! use bytes::Bytes;
//! use http::Response;
//! use ibid::{Policy, Scope};
//! use ibid_postgres_tx::{IdempotentCall, TxOutcome, run_tx};
//!
//! # #[cfg(feature = "sqlx")]
//! # async fn pay(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! let call = IdempotentCall::new(&Scope::from_parts(&["acme"]), "order-17").request(b"12.50 EUR");
//! let outcome = run_tx(&pool, &Policy::ietf(), &call, |tx| {
//!     Box::pin(async move {
//!         sqlx::query("INSERT INTO payments (cents) VALUES (1250)").execute(&mut **tx).await?;
//!         Ok::<_, sqlx::Error>(Response::new(Bytes::from("paid")))
//!     })
//! })
//! .await?;
//! assert!(matches!(outcome, TxOutcome::Executed(_)));
//! # Ok(()) }
//! ```

#[cfg(not(any(feature = "sqlx", feature = "tokio-postgres")))]
compile_error!("ibid-postgres-tx needs a driver: turn on its feature \"sqlx\" or \"tokio-postgres\"");

pub use self::{
    call::IdempotentCall,
    complete::{CompleteError, commit_with, complete_in},
    driver::{DriverError, DriverErrorKind, Isolation, Transaction, TxConnection, TxPool},
    error::TxError,
    run::{Tx, TxFuture, TxOutcome, run_tx},
};

#[cfg(feature = "tokio-postgres")]
pub use self::driver::PooledTransaction;

mod call;
mod claim_outcome;
mod complete;
mod driver;
mod error;
pub mod inbox;
mod run;
