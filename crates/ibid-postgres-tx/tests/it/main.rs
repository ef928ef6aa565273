//! The whole crate on a private PostgreSQL server, once per driver.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod inbox;
