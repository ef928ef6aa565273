//! Tests of a store: the [contract] as a suite that every store passes, a [reference store](model) to compare stores with,
//! [faulty stores](broken) that the suite must fail, and [wrappers] that make a store fail on demand.
//!
//! ```
//! // One test per case of the contract, each on its own store.
//! # use ibid::store::Memory;
//! ibid_testkit::contract_tests!(memory, async { Memory::default() });
//! ```
//!
//! No test is skipped: a store that cannot be reached fails its tests.

#![allow(missing_docs, reason = "its items are documented where the name does not say enough")]

pub mod broken;
pub mod contract;
pub mod model;
pub mod property;
pub mod wrappers;
