//! The exchange API, seen by an app that calls it.

mod bad_input;
pub(crate) mod common;
mod crash;
mod dependencies;
mod exchanges;
mod openapi_document;
mod sockets;
