//! What ibid is tested with: the [store contract](contract) as a suite that every store passes, a [model] to compare
//! stores with, [broken stores](broken) that the suite must fail, and [wrappers] that make a good store misbehave.
//!
//! ```
//! // One test per case of the contract, each on a store of its own.
//! # use std::sync::Arc;
//! # use ibid::store::{Memory, Store};
//! ibid_testkit::contract_tests!(memory, async { Arc::new(Memory::default()) as Arc<dyn Store> });
//! ```
//!
//! Nothing here skips: a store that cannot be reached fails its tests.

pub mod broken;
pub mod contract;
pub mod model;
pub mod property;
pub mod wrappers;
