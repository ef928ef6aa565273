//! The real engine, layer and store clients on simulated time, networks and servers.
//!
//! Everything runs on one thread with tokio's paused clock, so hours pass in milliseconds, and one seed decides all that is
//! random: delays, faults, what clients send. A seed gives the same [history](ibid_histories) every time.
//!
//! - [`network`]: the reference store behind a network that delays, loses and repeats messages, and can be cut.
//! - [`tcp`]: connections for the real clients. [`redis`], [`postgres`]: the servers at their other end.
//! - [`backend`]: which of these a world has, and what goes wrong with them.
//! - [`world`]: gateways, the app, clients and faults. After the faults, everything is healed and comes to rest; then every
//!   key is asked for once more through every gateway.
//!
//! The judge is the checker of histories.

pub mod backend;
pub mod network;
pub mod postgres;
pub mod random;
pub mod redis;
pub mod tcp;
pub mod world;
