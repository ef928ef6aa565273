//! The library, seen from outside.

mod engine;
mod layer;
