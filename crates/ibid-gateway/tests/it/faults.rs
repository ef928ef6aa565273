//! Upstreams, clients and holders that fail: the settle table, seen on the wire.

mod anonymous_callers;
mod client_disconnects;
mod concurrency;
mod fidelity;
mod large_responses;
mod lost_responses;
mod process_faults;
mod resolve_probe;
mod resource_exhaustion;
mod scopes;
mod unreachable;
mod upstream_view;
