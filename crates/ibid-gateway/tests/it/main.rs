//! The gateway, seen from outside.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

mod admin;
mod api;
mod app_servers;
mod bad_input;
mod chaos;
mod check;
mod cli;
mod config;
mod conform;
mod console;
mod coverage;
mod crash;
mod disk;
mod docs;
mod examples;
mod ext_proc;
mod faults;
mod grpc;
mod grpc_clients;
mod guard;
mod iceberg_client;
mod jwt;
mod keys;
mod mcp_clients;
mod names;
mod openapi;
mod operations;
mod outbound;
mod passthrough;
mod presets;
mod quota;
mod redirects;
mod scenarios;
mod sdks;
mod sealing;
mod secret_leaks;
mod store_command;
mod stores;
mod stripe_clients;
mod support;
mod upgrade;
mod upstream;
mod webhooks;
