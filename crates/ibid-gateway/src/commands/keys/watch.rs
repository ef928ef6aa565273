//! `ibid keys list --watch`: prints the entries that are in progress or unknown, and then every change of them.

use std::{collections::BTreeMap, io, time::Duration};

use ibid::store::{Address, EntryState};
use ibid_tools::CommandError;
use serde_json::json;

use super::{ListArgs, target::KeysBackend};
use crate::{
    commands::{print::escape_control, store},
    config::Env,
    format::{format_date, now_ms},
    records::{RecordQuery, RecordView},
};

const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Entries in progress, and entries with an unknown outcome, that are watched. More are not seen.
const MAX_WATCHED: usize = 1000;

/// Runs until the process is interrupted or its output is closed.
pub(super) fn run(args: &ListArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), CommandError> {
    store::block_on(async {
        let source = KeysBackend::open(&args.target, env, false).await?;
        let mut known: BTreeMap<String, RecordView> = BTreeMap::new();
        loop {
            let mut current: BTreeMap<String, RecordView> = BTreeMap::new();
            for state in [EntryState::Processing, EntryState::Unknown] {
                let query = RecordQuery { state: Some(state), older_than: args.older_than, ..args.tags.query() };
                let page = source.list(query, None, MAX_WATCHED).await?;
                current.extend(page.records.into_iter().map(|view| (view.address.clone(), view)));
            }
            for (address, view) in &current {
                let before = known.get(address);
                if before.is_none_or(|before| (&before.state, before.fence) != (&view.state, view.fence)) {
                    print_change(view, Some(&view.state), args.json, out)?;
                }
            }
            for (address, before) in known.iter().filter(|(address, _)| !current.contains_key(*address)) {
                let query =
                    RecordQuery { address: Address::from_hex(address).map(Into::into), ..RecordQuery::default() };
                match source.find_one(query).await {
                    Ok(ended) => print_change(&ended, Some(&ended.state), args.json, out)?,
                    // Released, forgotten or expired.
                    Err(_) => print_change(before, None, args.json, out)?,
                }
            }
            known = current;
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    })
}

/// `state` is the new state; `None` if the entry is gone.
fn print_change(view: &RecordView, state: Option<&str>, json: bool, out: &mut dyn io::Write) -> io::Result<()> {
    let at = format_date(now_ms());
    if json {
        writeln!(out, "{}", json!({ "at": at, "state": state, "record": view }))?;
    } else {
        let state = match state {
            None => "released".to_owned(),
            Some("processing") => "in progress".into(),
            Some("unknown") => "unknown".into(),
            Some("done") => format!("completed {}", view.status.unwrap_or_default()),
            Some(other) => format!("{other} {}", view.status.unwrap_or_default()),
        };
        let [endpoint, key, address] = [&view.endpoint, &view.key, &view.address].map(|text| escape_control(text));
        writeln!(out, "{at}  {state:<13}  attempt {}  {endpoint}  {key}  {address}", view.attempt)?;
    }
    out.flush()
}
