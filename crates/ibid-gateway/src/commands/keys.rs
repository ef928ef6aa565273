//! `ibid keys list|show|release|forget|resolve|reveal|reseal|audit`: inspects and changes stored keys, directly in a store or
//! through the admin API of a running gateway.
//!
//! Invariant: every change is a compare-and-set on the fence of the entry that was read, has a reason, and is in the
//! audit trail and logged to standard error. The output contains no control characters from stored data.

use std::{
    fs, io,
    io::Read as _,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{
    Args, Subcommand, ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser},
};
use http::{HeaderMap, StatusCode};
use ibid::store::{Address, EntryState, Fence};
use ibid_tools::CommandError;

use self::target::KeysBackend;
use super::{
    admin::AdminArgs,
    print::{escape_control, print_json},
    store,
};
use crate::{
    config::{Env, StoreSelection, parse_duration},
    records::{
        AddressPattern, ChangeAction as Wish, ChangeRequest, MAX_ANSWER_BODY_BYTES, RecordQuery, ResolvedAnswer,
        state_from_name,
    },
};

mod audit;
mod reseal;
mod show;
mod target;
mod watch;

#[derive(Debug, Args)]
pub struct KeysArgs {
    #[command(subcommand)]
    command: KeysCommand,
}

#[derive(Debug, Subcommand)]
enum KeysCommand {
    /// List entries, sorted by address
    List(ListArgs),
    /// Print one entry with its answer
    Show(ShowArgs),
    /// Mark an entry with unknown outcome as not executed; the next request with its key runs
    Release(ChangeArgs),
    /// Forget an entry in any state; a retry of its request runs again
    Forget(ChangeArgs),
    /// Resolve an entry with unknown outcome
    Resolve(ResolveArgs),
    /// Print the whole key of an entry that is shown masked; needs [seal]
    Reveal(RevealArgs),
    /// Reseal remembered answers with the first key, so that the other keys can be removed
    Reseal(ResealArgs),
    /// List the changes that operators made: those in the store's trail, or those of a gateway
    Audit(AuditArgs),
}

/// A store, or a gateway's admin API.
#[derive(Debug, Args)]
struct KeysTargetArgs {
    #[command(flatten)]
    store: StoreSelection,
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    target: KeysTargetArgs,
    /// Only entries in this state
    #[arg(long, value_parser = state_parser())]
    state: Option<EntryState>,
    #[command(flatten)]
    tags: EntryTagArgs,
    /// Only entries that were claimed longer ago than this, such as 5m
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    older_than: Option<Duration>,
    /// The maximum number of entries, up to 1000
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Continue after this cursor of an earlier list
    #[arg(long, value_name = "CURSOR", value_parser = parse_address)]
    cursor: Option<Address>,
    /// Keep running, and print entries that begin, become unknown or end as it happens
    #[arg(long, conflicts_with_all = ["state", "cursor", "limit"])]
    watch: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    target: KeysTargetArgs,
    #[command(flatten)]
    entry: EntryArgs,
    /// Write only the bytes of the answer's body
    #[arg(long, conflicts_with = "json")]
    body: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ChangeArgs {
    #[command(flatten)]
    target: KeysTargetArgs,
    #[command(flatten)]
    entry: EntryArgs,
    /// The reason, for the log
    #[arg(long, value_name = "TEXT", value_parser = parse_reason)]
    reason: String,
    /// Change the entry only if it still has this fence [default: its current fence]
    #[arg(long, value_name = "N", value_parser = parse_fence)]
    fence: Option<Fence>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ResolveArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// The outcome
    #[arg(long = "as", value_enum)]
    outcome: OutcomeName,
    /// The status of the answer, such as 201
    #[arg(long, value_name = "CODE", value_parser = clap::value_parser!(u16).range(200..=599))]
    status: Option<u16>,
    /// The file with the body of the answer
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
    /// A header of the answer, such as 'Location: /payments/7'; may be repeated
    #[arg(long, value_name = "NAME: VALUE")]
    header: Vec<String>,
    /// How long the answer is remembered from now on [default: the entry's whole lifetime]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    keep: Option<Duration>,
}

#[derive(Debug, Args)]
struct ResealArgs {
    #[command(flatten)]
    target: KeysTargetArgs,
    /// The reason; required with the admin API
    #[arg(long, value_name = "TEXT", value_parser = parse_reason)]
    reason: Option<String>,
    /// The maximum number of entries to check [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Continue after this cursor of an earlier run
    #[arg(long, value_name = "CURSOR", value_parser = parse_address)]
    cursor: Option<Address>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct RevealArgs {
    #[command(flatten)]
    target: KeysTargetArgs,
    #[command(flatten)]
    entry: EntryArgs,
    /// The reason, for the audit trail
    #[arg(long, value_name = "TEXT", value_parser = parse_reason)]
    reason: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct AuditArgs {
    #[command(flatten)]
    target: KeysTargetArgs,
    /// The maximum number of entries, up to 1000
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Continue after this cursor of an earlier list
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct EntryArgs {
    /// The entry's address, its first digits (at least 4) if only one entry has them, or as the log shows it:
    /// 5ac2****fe5c
    #[arg(value_name = "ADDRESS", value_parser = parse_address_pattern)]
    address: Option<AddressPattern>,
    #[command(flatten)]
    tags: EntryTagArgs,
}

#[derive(Debug, Clone, Args)]
struct EntryTagArgs {
    /// Only entries of this tenant
    #[arg(long, value_name = "TEXT")]
    tenant: Option<String>,
    /// Only entries of this user
    #[arg(long, value_name = "TEXT")]
    user: Option<String>,
    /// Only entries of this endpoint, such as 'POST /payments/*'
    #[arg(long, value_name = "TEXT")]
    endpoint: Option<String>,
    /// Only entries with exactly this key as the client sent it, or with a key that is displayed like this; with a * at
    /// the end, only the beginning must match
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OutcomeName {
    /// The operation ran, and this is its answer
    Done,
    /// The operation never ran
    NotExecuted,
}

/// Runs the subcommand and prints to `out`. `aside` gets the log line of a change, and the cursor of a list.
pub fn run(
    args: &KeysArgs, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), CommandError> {
    match &args.command {
        KeysCommand::List(args) if args.watch => watch::run(args, env, out),
        KeysCommand::List(args) => list(args, env, out, aside),
        KeysCommand::Show(args) => show_one(args, env, out, aside),
        KeysCommand::Reveal(args) => reveal(args, env, out),
        KeysCommand::Reseal(args) => reseal::run(args, env, out, aside),
        KeysCommand::Audit(args) => audit::run(args, env, out, aside),
        KeysCommand::Release(args) => change(args, Wish::Release, env, out, aside),
        KeysCommand::Forget(args) => change(args, Wish::Forget, env, out, aside),
        KeysCommand::Resolve(args) => change(&args.change, parse_resolution(args)?, env, out, aside),
    }
}

fn list(
    args: &ListArgs, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), CommandError> {
    let query = RecordQuery { state: args.state, older_than: args.older_than, ..args.tags.query() };
    let (source, page) = store::block_on(async {
        let source = KeysBackend::open(&args.target, env, false).await?;
        let page = source.list(query, args.cursor, args.limit as usize).await?;
        Ok((source, page))
    })?;
    source.warn_if_sealed(&page.records, aside)?;
    if args.json {
        return Ok(writeln!(out, "{}", serde_json::to_string(&page).expect("a page has a form"))?);
    }
    show::print_table(&page.records, out)?;
    match (&page.next, page.records.is_empty()) {
        (Some(next), _) => writeln!(aside, "ibid: there are more: --cursor {}", escape_control(next))?,
        (None, true) => writeln!(aside, "ibid: nothing matches")?,
        (None, false) => {}
    }
    Ok(())
}

fn show_one(
    args: &ShowArgs, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), CommandError> {
    let query = args.entry.query()?;
    let (source, view) = store::block_on(async {
        let source = KeysBackend::open(&args.target, env, false).await?;
        let view = source.find_one(query).await?;
        Ok((source, view))
    })?;
    source.warn_if_sealed(std::slice::from_ref(&view), aside)?;
    match (args.body, args.json) {
        (true, _) => {
            out.write_all(&show::answer_body(&view)?)?;
            out.flush()?;
        }
        (_, true) => print_json(&view, out)?,
        _ => show::print_entry(&view, out)?,
    }
    Ok(())
}

fn change(
    args: &ChangeArgs, action: Wish, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), CommandError> {
    let query = args.entry.query()?;
    let change = ChangeRequest { action, reason: args.reason.clone(), fence: args.fence };
    let (told, failed) =
        store::block_on(async { KeysBackend::open(&args.target, env, false).await?.change(query, &change).await })?;
    show::print_change(&told, failed, args.json, out, aside)
}

fn reveal(args: &RevealArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), CommandError> {
    let query = args.entry.query()?;
    let revealed = store::block_on(async {
        KeysBackend::open(&args.target, env, false).await?.reveal(query, &args.reason).await
    })?;
    if args.json {
        return Ok(print_json(&revealed, out)?);
    }
    Ok(writeln!(out, "{}", escape_control(&revealed.key))?)
}

fn parse_resolution(args: &ResolveArgs) -> Result<Wish, CommandError> {
    let usage = |what: &str| CommandError::Usage(what.into());
    if args.outcome == OutcomeName::NotExecuted {
        if args.status.is_some() || args.body.is_some() || !args.header.is_empty() || args.keep.is_some() {
            return Err(usage("--as not-executed has no answer; leave out --status, --body, --header and --keep"));
        }
        return Ok(Wish::Release);
    }
    let status = args.status.and_then(|status| StatusCode::from_u16(status).ok());
    let status = status.ok_or_else(|| usage("--as done needs the --status of its answer, such as --status 201"))?;
    let mut headers = HeaderMap::new();
    for written in &args.header {
        let wrong = |why: String| CommandError::Usage(format!("--header: {why}"));
        let (name, value) = written
            .split_once(':')
            .ok_or_else(|| wrong(format!("{written:?} is no header; write one such as 'Location: /payments/7'")))?;
        let (name, value) = ResolvedAnswer::parse_header(name, value).map_err(wrong)?;
        headers.append(name, value);
    }
    let read = |path: &PathBuf| {
        read_body(path).map_err(|why| CommandError::Usage(format!("--body: {}: {why}", path.display())))
    };
    let body = args.body.as_ref().map(read).transpose()?.unwrap_or_default();
    if args.keep.is_some_and(|keep| keep.is_zero()) {
        return Err(usage("--keep: it is zero; it must be longer, such as 24h"));
    }
    Ok(Wish::Resolve(ResolvedAnswer { status, headers, body: body.into(), keep: args.keep }))
}

fn read_body(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(MAX_ANSWER_BODY_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_ANSWER_BODY_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is larger than 64 MiB"));
    }
    Ok(bytes)
}

impl EntryArgs {
    /// Returns the query for one entry, which the flags must identify.
    fn query(&self) -> Result<RecordQuery, CommandError> {
        let query = RecordQuery { address: self.address.clone(), ..self.tags.query() };
        if query == RecordQuery::default() {
            let what = "which one? name it by its ADDRESS, or by --key, --tenant, --user, --endpoint";
            return Err(CommandError::Usage(what.into()));
        }
        Ok(query)
    }
}

impl EntryTagArgs {
    fn query(&self) -> RecordQuery {
        let Self { tenant, user, endpoint, key } = self.clone();
        RecordQuery { tenant, user, endpoint, key, ..RecordQuery::default() }
    }
}

fn state_parser() -> impl TypedValueParser<Value = EntryState> {
    PossibleValuesParser::new(["processing", "done", "failed", "unknown"])
        .map(|name| state_from_name(&name).expect("one of these"))
}

fn parse_address(text: &str) -> Result<Address, String> {
    Address::from_hex(text)
        .ok_or_else(|| "it is no address; write the 64 hex digits that `ibid keys list` prints".into())
}

fn parse_address_pattern(text: &str) -> Result<AddressPattern, String> {
    let what = "it is no address; write at least the first 4 hex digits of one that `ibid keys list` or the log prints";
    AddressPattern::parse(text).ok_or_else(|| what.into())
}

fn parse_fence(text: &str) -> Result<Fence, String> {
    let fence = text.parse().ok().filter(|fence| *fence > 0).map(Fence);
    fence.ok_or_else(|| "it is no fence; write the number that `ibid keys show` prints".into())
}

fn parse_reason(text: &str) -> Result<String, String> {
    let text = text.trim();
    if text.is_empty() { Err("it is empty; give the reason for the log".into()) } else { Ok(text.into()) }
}
