//! The library, seen from outside.

mod engine;
mod grpc;
mod inbox;
mod layer;
mod quota;
mod rejecting_store;
