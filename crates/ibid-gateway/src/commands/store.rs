//! The commands on a store, outside of a gateway.
//!
//! - `ibid sweep` removes expired entries and marks expired leases as outcome unknown. Safe beside gateways, which sweep
//!   periodically: only one sweeper of a store works at a time.
//! - `ibid migrate` creates, updates or removes the tables of a PostgreSQL store.
//! - `ibid store check|dump|compact PATH` maintains an embedded store that no gateway has open.

use std::{
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use ibid::{
    Observer,
    observe::EngineEvent,
    store::{Address, ErrorKind, Store, StoreError},
};
use ibid_stores::{
    OpenedStore, StoreUrl,
    embedded::{self, OpenError},
    postgres::{self, MigrateAction, MigrateOptions},
    seal::Sealer,
};
use ibid_tools::CommandError;

use crate::{
    config::{self, ConfigError, Env, StoreSelection},
    records::RecordLookupError,
};

/// Timeout of one store call. People wait longer than requests do.
const STORE_CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to retry the first connection, and the pause between two attempts.
const CONNECT_RETRY_PERIOD: Duration = Duration::from_secs(2);
const CONNECT_RETRY_PAUSE: Duration = Duration::from_millis(100);

impl From<ConfigError> for CommandError {
    fn from(why: ConfigError) -> Self {
        Self::Config(why.to_string())
    }
}

impl From<RecordLookupError> for CommandError {
    fn from(why: RecordLookupError) -> Self {
        match why {
            RecordLookupError::Store(error) => error.into(),
            why => Self::Conflict(why.to_string()),
        }
    }
}

/// Opens the store of the settings, and checks that it answers. Unseals if there are keys.
pub(super) async fn open_store(
    settings: &config::StoreSettings, sealing: Option<Sealer>,
) -> Result<OpenedStore, CommandError> {
    let layout = settings.store_config().for_operators(STORE_CALL_TIMEOUT).with_sealer(sealing);
    let url = &settings.url;
    let cannot = |why: &str| CommandError::Unavailable(format!("the store {url} cannot be opened: {why}"));
    match layout.authority() {
        StoreUrl::Memory(_) => {
            let why = "memory: lives in the process of its gateway, where no other command can reach it; \
                       ask that gateway (keys --admin URL), or name a store that is on a disk or on a server";
            return Err(CommandError::Usage(why.into()));
        }
        // A gateway creates a missing store. Here a missing store means a mistyped path.
        StoreUrl::Embedded(path, _) if !path.is_dir() => return Err(cannot("there is no such folder")),
        _ => {}
    }
    let opened = layout.open(Arc::new(StderrObserver)).await.map_err(|why| {
        let then = if why.to_string().contains("in use by") {
            "; ask that gateway instead (--admin URL), or stop it"
        } else {
            ""
        };
        cannot(&format!("{why}{then}"))
    })?;
    let nowhere = Address([0; 32]);
    let since = Instant::now();
    loop {
        match opened.store.get(&nowhere).await {
            Ok(_) => return Ok(opened),
            // The store may still be connecting.
            Err(error) if error.kind == ErrorKind::NotApplied && since.elapsed() < CONNECT_RETRY_PERIOD => {
                tokio::time::sleep(CONNECT_RETRY_PAUSE).await;
            }
            Err(error) => return Err(CommandError::Unavailable(format!("the store {url} cannot be used: {error}"))),
        }
    }
}

/// Runs a command that works on a store.
pub(super) fn block_on<T>(work: impl Future<Output = Result<T, CommandError>>) -> Result<T, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|why| CommandError::Unavailable(why.to_string()))?.block_on(work)
}

/// Reports to standard error that one of two stores could not be reached.
struct StderrObserver;

impl Observer for StderrObserver {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        // The command reports unreadable records itself.
        if !matches!(notice, EngineEvent::RecordUnreadable(_)) {
            eprintln!("ibid: {notice}");
        }
    }
}

/// Maximum number of entries that one call removes, so that no call delays others.
const SWEEP_BATCH: u32 = 1000;

pub fn sweep(store: &StoreSelection, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), CommandError> {
    let settings = config::StoreSettings::load(store, env)?;
    let (removed, lapsed) = block_on(async {
        let (counts, ended) = sweep_all(&*open_store(&settings, None).await?.store).await;
        Ok(ended.map(|()| counts)?)
    })?;
    Ok(writeln!(out, "removed {removed}, lapsed {lapsed}")?)
}

/// Sweeps until nothing is left. Returns the numbers of removed entries and of expired leases, and why it ended early.
pub(super) async fn sweep_all(store: &dyn Store) -> ((u64, u64), Result<(), StoreError>) {
    let (mut removed, mut lapsed) = (0, 0);
    loop {
        let swept = match store.sweep(SWEEP_BATCH).await {
            Ok(swept) => swept,
            Err(why) => return ((removed, lapsed), Err(why)),
        };
        removed += u64::from(swept.removed);
        lapsed += u64::from(swept.lapsed);
        // A store that reports more entries but removes none would never end.
        if !swept.more || (swept.removed == 0 && swept.lapsed == 0) {
            return ((removed, lapsed), Ok(()));
        }
        tokio::task::yield_now().await;
    }
}

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
    /// Do without the indexes for searches by tenant, user and key, which every first request pays for
    #[arg(long, conflicts_with = "down")]
    no_search_indexes: bool,
}

pub fn migrate(args: &MigrateArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), CommandError> {
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
    let lines = block_on(async {
        let rls_user = settings.rls_user.as_deref();
        let options = MigrateOptions { rls_user, no_search_indexes: args.no_search_indexes };
        let done = postgres::migrate_with(server.expose(), how, options).await;
        done.map_err(|why| CommandError::Unavailable(format!("{url} was not migrated: {why}")))
    })?;
    lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    Ok(())
}

#[derive(Debug, Args)]
pub struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(Debug, Subcommand)]
enum StoreCommand {
    /// Read everything and report errors with file and offset; change nothing
    Check(StoreDirectory),
    /// Print one line of JSON per live entry
    Dump(StoreDirectory),
    /// Rewrite the live entries compactly, and free the rest of the disk space
    Compact(StoreDirectory),
}

#[derive(Debug, Args)]
struct StoreDirectory {
    /// The store's directory
    path: PathBuf,
}

/// Runs the subcommand. Returns `false` if a part of the store is unreadable.
pub fn maintain(args: &StoreArgs, out: &mut dyn io::Write, aside: &mut dyn io::Write) -> Result<bool, CommandError> {
    let (StoreCommand::Check(at) | StoreCommand::Dump(at) | StoreCommand::Compact(at)) = &args.command;
    let path = &at.path;
    let failed = |why: OpenError| CommandError::Failed(format!("{}: {why}", path.display()));
    match &args.command {
        StoreCommand::Check(_) => {
            let report = embedded::check(path).map_err(failed)?;
            write!(out, "{report}")?;
            Ok(report.found.is_empty())
        }
        StoreCommand::Dump(_) => {
            let report = embedded::dump(path, out).map_err(failed)?;
            report.found.iter().try_for_each(|found| writeln!(aside, "{found}"))?;
            Ok(report.found.is_empty())
        }
        StoreCommand::Compact(_) => {
            let done = embedded::compact(path).map_err(failed)?;
            writeln!(out, "{} bytes before, {} after", done.before, done.after)?;
            Ok(true)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use ibid::store::{Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Memory, Tags};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_goes_on_until_nothing_is_left_and_leaves_what_counts() {
        let store = Memory::default();
        let claim = async |nth: u32, keep: Duration| {
            let mut address = Address([7; 32]);
            address.0[28..].copy_from_slice(&nth.to_be_bytes());
            let ask = ClaimRequest {
                address,
                token: ClaimToken::mint(),
                fingerprint: Fingerprint::NONE,
                tags: Tags::default(),
                label: Default::default(),
                lease: Duration::from_secs(1),
                ttl: keep,
                take_over: None,
            };
            assert!(matches!(store.claim(&Arc::new(ask)).await, Ok(ClaimOutcome::Granted(_))));
        };
        let many = 2 * SWEEP_BATCH + 500;
        for nth in 0..many {
            claim(nth, Duration::from_secs(1)).await;
        }
        claim(many, Duration::from_secs(86_400)).await;
        tokio::time::advance(Duration::from_secs(600)).await;
        assert_eq!(sweep_all(&store).await.0.0, u64::from(many), "in more than one batch");
        assert_eq!(sweep_all(&store).await.0.0, 0);
        assert_eq!(store.admin().counts().await.unwrap().unknown, 1);
    }
}
