//! What ibid is tested with.
//!
//! For stores: the [contract] as a suite that every store passes, a [model] to compare stores with,
//! [broken stores](broken) that the suite must fail, and [wrappers] that make a good store misbehave.
//!
//! ```
//! // One test per case of the contract, each on a store of its own.
//! # use std::sync::Arc;
//! # use ibid::store::{Memory, Store};
//! ibid_testkit::contract_tests!(memory, async { Arc::new(Memory::default()) as Arc<dyn Store> });
//! ```
//!
//! For what is seen on the wire: a real [upstream] that counts what it runs and misbehaves on demand, a [client] that
//! sends exact bytes, another for [gRPC](grpc), [certificates], the gateway as a [process], and a runner for the commands in the [documentation](docs).
//!
//! Nothing here skips: a store that cannot be reached fails its tests.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

pub mod broken;
pub mod certificates;
pub mod chromedriver;
pub mod client;
pub mod contract;
pub mod docs;
pub mod grpc;
pub mod http1;
pub mod model;
pub mod process;
pub mod property;
pub mod servers;
pub mod upstream;
pub mod wrappers;
