//! The real engine and layer on simulated time, network and store.
//!
//! Everything runs on one thread with tokio's paused clock, so hours pass in milliseconds, and one seed decides all that is
//! random: delays, faults, what clients send. A seed gives the same [history](ibid_histories) every time.
//!
//! - [`network`]: the store behind a network that delays, loses and repeats messages, and can be cut.
//! - [`world`]: gateways, the app, clients and faults. After the faults, everything is healed and comes to rest; then every
//!   key is asked for once more through every gateway.
//!
//! The store is the contract's reference implementation, and the judge is the checker of histories.

pub mod backend;
pub mod network;
pub mod random;
pub mod redis;
pub mod world;
