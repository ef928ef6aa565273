//! The suite on the in-process store, and the harness on itself.

mod brokers;
mod client;
mod contract;
mod docs;
mod h2c;
mod process;
mod upstream;
