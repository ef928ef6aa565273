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
//! remembers outcomes, and a [`Policy`] configures both. [`http`] contains the layer for HTTP and [`grpc`], [`webhook`]
//! verifies webhook deliveries, and [`inbox`] deduplicates events from message brokers.

pub use self::{
    engine::{
        BeginOutcome, Claimant, ClaimedRun, CompletedAnswer, Decision, Engine, OnRollback, Operation, ProbeOutcome,
        RunOutcome, ShadowClaim, ShadowResult, ShadowRunOutcome, StoredAs, UnknownCause,
    },
    fingerprint::{FingerprintComparison, JsonPointer, JsonPointerError, PartDigests},
    http::{Ibid, IbidLayer},
    journal::{Journal, JournalSeal},
    key::{
        IdempotencyKey, KeyError, KeyFormat, KeyFormatPattern, KeySource, derive_key, extract_key, generate_key,
        is_valid_key, mask,
    },
    label::LabelText,
    observe::{EngineEvent, NoopObserver, Observer, RequestOutcome, RequestReport, ShadowOutcome, StoreCall},
    policy::{
        CheckedPolicy, FingerprintPart, HeaderTemplate, InvalidPolicy, InvalidSetting, KeyPolicy, LabelKeyDisplay,
        LabelPolicy, OnConcurrent, OnMismatch, OnStoreDown, OnUnknown, Policy, PolicyMode, RefusalFormat, Remember,
        ResolveProbe, ResponseEnvelope, StatusRange, Terms, presets,
    },
    quota::{Quota, QuotaLimit},
    record::{Record, RecordBody, RecordError},
    refusal::{Refusal, RefusalReason},
    run::{RunError, RunKey, RunResult, run},
    running::{RunSlot, RunningOperations},
    scope::{AddressSecret, Credentials, Scope, ScopeInput, ScopePart, TokenClaims, TokenVerification, TrustedProxies},
    settle_queue::SettleQueue,
    time::rfc3339,
};

#[doc(hidden)]
pub mod compression;
mod engine;
mod fingerprint;
pub mod grpc;
pub mod http;
pub mod inbox;
mod journal;
mod key;
mod label;
mod observe;
mod policy;
mod protocol;
mod quota;
mod record;
mod refusal;
mod run;
mod running;
mod scope;
mod settle_queue;
pub mod store;
mod time;
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
