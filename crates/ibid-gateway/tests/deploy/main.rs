//! What stands around a gateway. What is in `deploy/` holds: alerts fire when they should and only then, the dashboard asks
//! for what there is, and what the manifests carry can be started. And a collector gets its traces.
//!
//! Container images are not built here: that takes an engine.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

mod common;
mod container;
mod dashboard;
mod kubernetes;
mod metrics_lint;
mod prometheus;
mod queries;
mod rules;
mod systemd;
mod traces;
