//! Gateways that share a store: the binary in several processes, real servers, real outages.

mod certificates;
pub(crate) mod kit;
mod outages;
mod pair;
mod presets;
mod readiness;
mod round_trips;
mod two_stores;
mod waiters;
