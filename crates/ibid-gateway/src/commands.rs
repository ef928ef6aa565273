//! The commands of `ibid`. They print and return; only `main` exits.

use std::io;

use clap::Parser;
use ibid_tools::{CommandError, conform};

use crate::{
    config::{Env, ServeArgs, StoreSelection},
    tls,
};

pub mod admin;
pub mod check;
pub mod demo;
pub mod doctor;
pub mod init;
pub mod keys;
pub mod manual;
pub mod openapi;
pub mod serve;
pub mod store;

mod print;

#[derive(Parser)]
#[command(name = "ibid", version, about = "An idempotency gateway: a retried request takes effect once")]
pub enum Command {
    /// Run the gateway in front of a built-in payments API, to try it without an app
    Demo(demo::DemoArgs),
    /// Write a commented configuration file for your app
    Init(init::InitArgs),
    /// Run the gateway in front of your app
    Serve(ServeArgs),
    /// Check what a start depends on, without starting: store, app, ports, open files, disk
    Doctor(ServeArgs),
    /// Validate a configuration, print each route's effective dials and report the answers that a change would forget
    Check(check::CheckArgs),
    /// Check the health of the gateway that uses the same settings
    Health(admin::HealthArgs),
    /// Inspect stored keys and resolve unknown outcomes
    Keys(Box<keys::KeysArgs>),
    /// Report what shadow mode observed: requests to replay or refuse, and callers that send no key
    Report(admin::ReportArgs),
    /// Remove expired entries from a store and mark expired leases as outcome unknown
    Sweep(StoreSelection),
    /// Create, update or remove the tables of a PostgreSQL store
    Migrate(store::MigrateArgs),
    /// Maintain an embedded store that no gateway has open
    Store(store::StoreArgs),
    /// Add the key header, the refusals and the replay headers to an OpenAPI document
    Openapi(openapi::OpenapiArgs),
    /// Check any server that claims to support idempotency keys, from outside
    Conform(Box<conform::ConformArgs>),
    /// Print the JSON schema of the configuration file, for editors
    Schema,
    /// Print the completions of a shell
    Completions(manual::CompletionsArgs),
    /// Write the manual pages into a directory
    Man(manual::ManArgs),
}

impl Command {
    /// Returns whether the command succeeded: `false` if it found something wrong and printed it.
    pub fn run(self, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write) -> Result<bool, CommandError> {
        let done = |()| true;
        match self {
            Self::Demo(args) => demo::run(&args).map(done),
            Self::Init(args) => init::run(&args, &mut io::stdin().lock(), out).map(done),
            Self::Serve(args) => serve::run(args, env).map(done),
            Self::Doctor(args) => doctor::run(&args, env, out),
            Self::Check(args) => check::run(&args, env, out).map(|found| found.code() == 0),
            Self::Health(args) => admin::health(&args, env, out).map(done),
            Self::Keys(args) => keys::run(&args, env, out, aside).map(done),
            Self::Report(args) => admin::report(&args, env, out).map(done),
            Self::Sweep(args) => store::sweep(&args, env, out).map(done),
            Self::Migrate(args) => store::migrate(&args, env, out).map(done),
            Self::Store(args) => store::maintain(&args, out, aside),
            Self::Openapi(args) => openapi::run(&args, env, out, aside).map(done),
            Self::Conform(args) => conform::run(&args, &tls::for_checks, out),
            Self::Schema => Ok(write!(out, "{}", init::SCHEMA).map(done)?),
            Self::Completions(args) => manual::print_completions(&args, out).map(done),
            Self::Man(args) => manual::write_pages(&args).map(done),
        }
    }
}
