//! **ibid**: a request that is retried has its effect once and gets the same answer every time.
//!
//! Put a layer around a service, and clients that send an `Idempotency-Key` may retry as often as they like:
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
//! ibid.drained().await; // what still runs is finished, even if its client has gone
//! # Ok(()) }
//! ```
//!
//! Handlers without a layer use [`run`]. The [`Engine`] decides who runs, a [`Store`](store::Store) remembers, a
//! [`Policy`] says how; [`http`] is the layer, for HTTP and for [`grpc`]. [`webhook`] is about
//! deliveries of others, [`inbox`] about events of message brokers.

pub use self::{
    engine::{
        Complete, Ended, Engine, Finish, Observation, Observed, Operation, Otherwise, ParkedBy, Probed, Stored, Verdict,
    },
    fingerprint::{Comparison, PartDigests, Pointer, PointerError},
    http::{Ibid, IbidLayer},
    journal::{Journal, JournalSeal},
    key::{Key, KeyFormat, KeySource, Pattern, derive_key, extract_key, generate_key, is_valid_key, mask},
    label::LabelText,
    later::Later,
    observe::{Answered, Notice, Observer, Outcome, Shadow, Silent, StoreCall},
    policy::{
        CheckedPolicy, Envelope, InvalidPolicy, KeyPolicy, Label, LabelKey, Mode, OnConcurrent, OnMismatch,
        OnStoreDown, OnUnknown, Part, Policy, Probe, Refusals, Remember, StatusRange, Template, presets,
    },
    quota::{Limit, Quota},
    record::{Record, RecordBody, Unreadable},
    refusal::{Reason, Refusal},
    run::{Ran, RunError, RunKey, run},
    running::{Running, Slot},
    scope::{AddressSecret, Caller, Claims, Credentials, Identity, Scope, ScopePart, TrustedProxies},
    time::rfc3339,
};

mod engine;
mod fingerprint;
pub mod grpc;
pub mod http;
pub mod inbox;
mod journal;
mod key;
mod label;
mod later;
mod observe;
mod policy;
mod quota;
mod record;
mod refusal;
mod run;
mod running;
mod scope;
#[doc(hidden)]
pub mod squeeze;
pub mod store;
mod time;
pub mod webhook;
mod wire;

/// The README's code, tested with the rest.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// The code of the page on events.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/events.md")]
struct Events;
