//! `ibid keys list|show|release|forget|resolve|reseal`: what a store remembers, for people.
//!
//! Invariant: every change is a compare-and-set on the fence of the entry that was seen, has a reason, and is written
//! to standard error. What is printed has no control characters of others in it.

use std::{io, path::PathBuf, time::Duration};

use clap::{Args, Subcommand, ValueEnum};
use ibid::store::{Address, Fence, State};

use self::find::Wanted;
use super::outside::{self, Failed, Opened};
use crate::config::{self, ConfigError, Env, Seal, StoreChoice, parse_duration};

mod change;
mod find;
mod reseal;
mod show;

/// What to do to which entries.
#[derive(Debug, Args)]
pub struct KeysArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List entries, in the order of their addresses
    List(ListArgs),
    /// Print one entry, with its answer
    Show(ShowArgs),
    /// Say that an unknown one never happened, so that the next request with its key runs
    Release(ChangeArgs),
    /// Forget an entry in whatever state it is: a retry of its request runs again
    Forget(ChangeArgs),
    /// Say how an unknown one ended
    Resolve(ResolveArgs),
    /// Seal remembered answers with the first of the keys, so that the others can be dropped
    Reseal(ResealArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    store: StoreChoice,
    /// Only those in this state
    #[arg(long, value_enum)]
    state: Option<StateName>,
    #[command(flatten)]
    tags: TagArgs,
    /// Only those that were claimed longer ago, such as 5m
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    older_than: Option<Duration>,
    /// How many at most, up to 1000
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Where the list before this one ended
    #[arg(long, value_name = "CURSOR", value_parser = parse_address)]
    cursor: Option<Address>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    store: StoreChoice,
    #[command(flatten)]
    which: WhichArgs,
    /// Write nothing but the bytes of the answer's body
    #[arg(long, conflicts_with = "json")]
    body: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ChangeArgs {
    #[command(flatten)]
    store: StoreChoice,
    #[command(flatten)]
    which: WhichArgs,
    /// Why, for the log
    #[arg(long, value_name = "TEXT", value_parser = parse_reason)]
    reason: String,
    /// Only if the entry still has this fence; without it, the one that is there now
    #[arg(long, value_name = "N", value_parser = parse_fence)]
    fence: Option<Fence>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ResolveArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// How it ended
    #[arg(long = "as", value_enum)]
    outcome: OutcomeName,
    /// The status of its answer, such as 201
    #[arg(long, value_name = "CODE", value_parser = clap::value_parser!(u16).range(200..=599))]
    status: Option<u16>,
    /// The file with the body of its answer
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
    /// A header of its answer, such as 'Location: /payments/7'; may be repeated
    #[arg(long, value_name = "NAME: VALUE")]
    header: Vec<String>,
    /// How long the answer is remembered from now on; without it, as long as the entry would have lived in all
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    keep: Option<Duration>,
}

#[derive(Debug, Args)]
struct ResealArgs {
    #[command(flatten)]
    store: StoreChoice,
    /// How many entries to look at, at most; without it, all
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Where the run before this one ended
    #[arg(long, value_name = "CURSOR", value_parser = parse_address)]
    cursor: Option<Address>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// One entry, by its address or by what it is searched by.
#[derive(Debug, Args)]
struct WhichArgs {
    /// The entry's address, 64 hex digits
    #[arg(value_name = "ADDRESS", value_parser = parse_address)]
    address: Option<Address>,
    #[command(flatten)]
    tags: TagArgs,
}

#[derive(Debug, Clone, Args)]
struct TagArgs {
    /// Only those of this tenant
    #[arg(long, value_name = "TEXT")]
    tenant: Option<String>,
    /// Only those of this user
    #[arg(long, value_name = "TEXT")]
    user: Option<String>,
    /// Only those of this endpoint, such as 'POST /payments/*'
    #[arg(long, value_name = "TEXT")]
    endpoint: Option<String>,
    /// Only those with this key: as the client sent it, or as it is stored, which may be masked
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum StateName {
    Processing,
    Done,
    Failed,
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OutcomeName {
    /// It happened, and this is its answer
    Done,
    /// It never happened
    NotExecuted,
}

impl From<StateName> for State {
    fn from(name: StateName) -> Self {
        match name {
            StateName::Processing => Self::Processing,
            StateName::Done => Self::Done,
            StateName::Failed => Self::Failed,
            StateName::Unknown => Self::Unknown,
        }
    }
}

/// Does it, printing to `out`. `aside` gets the line about a change, and where a list goes on.
///
/// # Errors
/// If the entry is not there or not as it must be, or the store cannot be used.
pub fn run(args: &KeysArgs, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write) -> Result<(), Failed> {
    match &args.what {
        What::List(args) => {
            let on = On::load(&args.store, env)?;
            outside::block_on(list(args, &on, out, aside))
        }
        What::Show(args) => {
            let wanted = Wanted::one(&args.which)?;
            let on = On::load(&args.store, env)?;
            outside::block_on(show_one(args, &wanted, &on, out, aside))
        }
        What::Reseal(args) => reseal::run(args, env, out, aside),
        What::Release(args) => change(args, change::What::Release, env, out, aside),
        What::Forget(args) => change(args, change::What::Forget, env, out, aside),
        What::Resolve(args) => {
            let what = change::resolution(args)?;
            change(&args.change, what, env, out, aside)
        }
    }
}

/// What a command works on.
struct On {
    settings: config::Store,
    /// What is sealed can be looked at, released and forgotten without keys.
    seal: Result<Option<Seal>, ConfigError>,
}

impl On {
    fn load(choice: &StoreChoice, env: &Env<'_>) -> Result<Self, Failed> {
        Ok(Self { settings: config::Store::load(choice, env)?, seal: Seal::load(choice, env) })
    }

    async fn open(&self) -> Result<Opened, Failed> {
        let sealing = self.seal.as_ref().ok().and_then(Option::as_ref).and_then(Seal::sealing);
        outside::open_sealed(&self.settings, sealing).await
    }

    /// Says that something is shown as it is sealed, and why.
    fn say_sealed(&self, sealed: usize, aside: &mut dyn io::Write) -> io::Result<()> {
        if sealed == 0 {
            return Ok(());
        }
        let why = match &self.seal {
            Err(why) => format!("the keys cannot be had: {why}"),
            Ok(None) => "name the gateway's --config, with its [seal], to see what is in them".into(),
            Ok(Some(_)) => "their keys are not in [seal], or they were altered".into(),
        };
        let entries = if sealed == 1 { "1 entry is" } else { &format!("{sealed} entries are") };
        writeln!(aside, "ibid: {entries} shown sealed, with hashes for key, tenant, user and endpoint: {why}")
    }
}

async fn list(args: &ListArgs, on: &On, out: &mut dyn io::Write, aside: &mut dyn io::Write) -> Result<(), Failed> {
    let store = on.open().await?;
    let wanted = Wanted::many(&args.tags, args.state.map(State::from), args.older_than);
    let page = wanted.list(store.store(), args.cursor, args.limit as usize).await?;
    on.say_sealed(show::sealed(&page.entries), aside)?;
    if args.json {
        writeln!(out, "{}", show::page_as_json(&page))?;
        return Ok(());
    }
    show::table(&page.entries, out)?;
    match (&page.next, page.entries.is_empty()) {
        (Some(next), _) => writeln!(aside, "ibid: there are more: --cursor {next}")?,
        (None, true) => writeln!(aside, "ibid: nothing matches")?,
        (None, false) => {}
    }
    Ok(())
}

async fn show_one(
    args: &ShowArgs, wanted: &Wanted, on: &On, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), Failed> {
    let store = on.open().await?;
    let entry = wanted.find_one(&store).await?;
    on.say_sealed(show::sealed(std::slice::from_ref(&entry.listed)), aside)?;
    if args.body {
        out.write_all(&show::body_of(&entry)?)?;
        out.flush()?;
    } else if args.json {
        writeln!(out, "{:#}", show::entry_as_json(&entry))?;
    } else {
        show::entry(&entry, out)?;
    }
    Ok(())
}

fn change(
    args: &ChangeArgs, what: change::What, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), Failed> {
    let wanted = Wanted::one(&args.which)?;
    let on = On::load(&args.store, env)?;
    outside::block_on(async {
        let store = on.open().await?;
        let change = change::Change { what, reason: &args.reason, fence: args.fence };
        let made = change.make(&store, &wanted).await?;
        made.print(&change, args.json, out, aside)
    })
}

fn parse_address(text: &str) -> Result<Address, String> {
    Address::from_hex(text)
        .ok_or_else(|| "it is no address; write the 64 hex digits that `ibid keys list` prints".into())
}

fn parse_fence(text: &str) -> Result<Fence, String> {
    let fence = text.parse().ok().filter(|fence| *fence > 0).map(Fence);
    fence.ok_or_else(|| "it is no fence; write the number that `ibid keys show` prints".into())
}

fn parse_reason(text: &str) -> Result<String, String> {
    let text = text.trim();
    if text.is_empty() { Err("it is empty; say why, for whoever reads the log".into()) } else { Ok(text.into()) }
}
