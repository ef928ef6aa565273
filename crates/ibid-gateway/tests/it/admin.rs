//! The admin API, asked over HTTP as its users ask it.

mod audit;
mod bad_input;
mod changing;
mod command;
mod document;
mod hosts;
mod kit;
mod limits;
mod origins;
mod reading;
mod reports;
mod roles;
mod tls;
mod tokens;
