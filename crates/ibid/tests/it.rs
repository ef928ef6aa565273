//! The library, seen from outside.

mod engine;
mod grpc;
mod layer;
mod quota;
