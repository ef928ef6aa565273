//! The gateway. A request passes `main → commands → server → the ibid layer → proxy → upstream`.
//!
//! Only [`config`] reads the environment. Nothing in this crate's library exits the process.

#![allow(missing_docs, reason = "the library of a binary: its items are documented where the name does not say enough")]
#![allow(rustdoc::private_intra_doc_links, reason = "its documentation is for people who read the source")]

pub mod admin;
pub mod api;
mod catalog_config;
pub mod commands;
pub mod config;
mod console;
pub mod contract_page;
pub mod cores;
pub mod ext_proc;
pub(crate) mod format;
mod gathered_socket;
pub mod jwt;
mod listener;
pub mod logs;
pub mod metrics;
mod openapi_document;
mod outbound;
pub mod proxy;
pub mod records;
mod reflection;
pub mod routes;
pub mod server;
pub mod snapshot;
pub mod startup_checks;
pub mod tls;
pub mod trace;
pub mod upstream;
pub mod watch;
