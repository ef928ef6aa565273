//! The upstream side alone, against real sockets that misbehave.

mod common;
mod http1;
mod http2;
