//! A Redis server in this process, for the real client of the Redis store.
//!
//! The client sends bytes, so everything that it does is simulated: connecting, pipelining, timeouts, reconnecting, its circuit
//! breaker, its claim log, waiting and the local cache. The server runs the client's own scripts with Lua 5.1. It
//! panics at a command that it does not know.
//!
//! - [`server`]: keys, clock, replica, and what happens to the server.
//! - [`database`]: the commands. [`scripts`]: Lua. [`resp`]: the protocol.

pub mod database;
pub mod resp;
pub mod scripts;
pub mod server;
mod session;
