//! The testbed on itself.

mod brokers;
mod client;
mod docs;
mod h2c;
mod process;
mod upstream;
