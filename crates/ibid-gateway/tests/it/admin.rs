//! The admin API, asked over HTTP as its users ask it.

mod audit;
mod bad_input;
mod changing;
mod command;
mod common;
mod hosts;
mod limits;
mod openapi_document;
mod origins;
mod reading;
mod reports;
mod roles;
mod tls;
mod tokens;
