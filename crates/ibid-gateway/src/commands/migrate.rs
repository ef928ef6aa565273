//! `ibid migrate`: creates, updates or removes the tables of a PostgreSQL store.

use std::io;

use clap::Args;
use ibid_stores::{
    StoreUrl,
    postgres::{self, MigrateAction},
};
use ibid_tools::CommandError;

use super::open_store;
use crate::config::{self, Env, StoreSelection};

#[derive(Debug, Args)]
pub struct MigrateArgs {
    #[command(flatten)]
    store: StoreSelection,
    /// Print the SQL as a file for psql, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Remove everything that ibid has created there, including records
    #[arg(long, conflicts_with = "dry_run")]
    down: bool,
}

pub fn run(args: &MigrateArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), CommandError> {
    let settings = config::StoreSettings::load(&args.store, env)?;
    let url = settings.authority_url();
    let StoreUrl::Postgres(server) = url.store_url() else {
        let kind = url.store_url().kind();
        let what = format!("only a postgres store is migrated, and {url} is a store of kind {kind}: it needs nothing");
        return Err(CommandError::Usage(what));
    };
    let how = match (args.dry_run, args.down) {
        (true, _) => MigrateAction::DryRun,
        (_, true) => MigrateAction::Down,
        _ => MigrateAction::Up,
    };
    let lines = open_store::block_on(async {
        let done = postgres::migrate_with_rls_user(server.expose(), how, settings.rls_user.as_deref()).await;
        done.map_err(|why| CommandError::Unavailable(format!("{url} was not migrated: {why}")))
    })?;
    lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    Ok(())
}
