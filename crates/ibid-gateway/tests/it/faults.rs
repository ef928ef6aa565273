//! Upstreams, clients and holders that fail: the settle table, seen on the wire.

mod anonymous;
mod clients;
mod crowd;
mod fidelity;
mod greedy;
mod holders;
pub(crate) mod kit;
mod large;
mod lost;
mod resolve;
mod scopes;
mod unreachable;
mod upstream_side;
