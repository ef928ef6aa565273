//! Gateways that share a store: the binary in several processes, real servers, real outages.

mod certificates;
pub(crate) mod common;
mod outages;
mod presets;
mod readiness;
mod round_trips;
mod tiered_outages;
mod two_stores;
mod waiters;
