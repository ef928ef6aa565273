//! **ibid** makes retries safe: a retried request takes effect once and gets the same response every time.
//!
//! Wrap a service in the layer, and clients that send an `Idempotency-Key` can retry as often as they like:
//!
//! ```no_run
//! use std::sync::Arc;
//! use axum::{Router, routing::post};
//! use ibid::{Ibid, Policy, store::Memory};
//!
//! # async fn pay() -> &'static str { "paid" }
//! # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
//! let ibid = Ibid::new(Arc::new(Memory::default()));
//! let app: Router = Router::new().route("/payments", post(pay)).layer(ibid.layer(Policy::ietf())?);
//!
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//! axum::serve(listener, app).await?;
//! ibid.drained().await; // finishes running operations, including those whose client has disconnected
//! # Ok(()) }
//! ```
//!
//! Handlers without a layer call [`run`]. The [`Engine`] decides whether an operation runs, a [`Store`](store::Store)
//! remembers outcomes, and a [`Policy`] configures both. [`http`] contains the layer for HTTP, [`grpc`] and [`json_rpc`],
//! [`webhook`] verifies webhook deliveries, and [`inbox`] deduplicates events from message brokers.

pub use self::{
    engine::{Claimant, Decision, Engine, Operation, RunOutcome},
    http::{Ibid, IbidLayer},
    key::{IdempotencyKey, derive_key, generate_key, mask, outbound_key},
    observe::{Observer, RequestOutcome, RequestReport},
    policy::{CheckedPolicy, InvalidPolicy, Policy, presets},
    refusal::{Refusal, RefusalReason},
    run::{RunError, RunKey, RunResult, run},
    scope::Scope,
};

#[doc(hidden)]
pub mod compression;
pub mod engine;
pub mod fingerprint;
pub mod grpc;
pub mod http;
pub mod inbox;
pub mod intent;
pub mod journal;
pub mod json_rpc;
pub mod key;
pub mod label;
pub mod observe;
pub mod policy;
mod protocol;
pub mod quota;
pub mod record;
mod refusal;
mod run;
pub mod running;
pub mod scope;
mod sent_names;
pub mod settle_queue;
pub mod store;
mod thread_buffer;
pub mod time;
pub mod webhook;
mod wire;

/// Compiles the code in the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct ReadmeDoctests;

/// Compiles the code in docs/events.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/events.md")]
struct EventsDoctests;
