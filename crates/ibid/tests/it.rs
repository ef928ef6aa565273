//! The library, seen from outside.

mod engine;
mod grpc;
mod inbox;
mod layer;
mod picky;
mod quota;
