//! Test tools of ibid.
//!
//! For stores: the [contract] as a suite that every store passes, a [reference store](model) to compare stores with,
//! [faulty stores](broken) that the suite must fail, and [wrappers] that make a store fail on demand.
//!
//! ```
//! // One test per case of the contract, each on its own store.
//! # use std::sync::Arc;
//! # use ibid::store::{Memory, Store};
//! ibid_testkit::contract_tests!(memory, async { Arc::new(Memory::default()) as Arc<dyn Store> });
//! ```
//!
//! For the wire: a real [upstream] that counts executions and misbehaves on demand, a [client] that sends exact bytes,
//! another one for [gRPC](grpc), [certificates], the gateway as a [process], and a runner for the commands in the
//! [documentation](docs).
//!
//! No test is skipped: a store that cannot be reached fails its tests.

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
