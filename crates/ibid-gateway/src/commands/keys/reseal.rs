//! Remembered answers under the first key: page by page, each by a compare-and-set, beside gateways that run.
//!
//! It can be broken off and started again at any time: what has the first key already is left as it is.

use std::{collections::BTreeMap, io};

use futures_util::future::join_all;
use ibid::store::{Address, Cursor, ErrorKind, Filter, Listed, State};
use ibid_stores::seal::{Resealed, Sealed, sealed_with};
use serde_json::{Map, Value, json};

use super::{Failed, ResealArgs};
use crate::{
    commands::outside,
    config::{self, Env, Seal},
};

/// How many entries are asked for at once.
const PAGE: u32 = 500;
/// How many are resealed at the same time: enough that a server is not waited for one by one, too few for gateways beside
/// to notice.
const AT_ONCE: usize = 16;
/// How many addresses that do not open are said.
const SHOWN: usize = 20;

/// What was found and done.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    /// By the key that they had; `None` had none.
    resealed: BTreeMap<Option<String>, u64>,
    /// With the first key already.
    current: u64,
    /// Gone, or changed by somebody else, between being listed and being sealed.
    changed: u64,
    /// Not opened, so left as they are.
    unopened: u64,
    /// Entries whose label has another key than the first: it stays so until they expire.
    labels: u64,
    /// Where to go on, if it ended before the end.
    next: Option<Address>,
}

/// Seals what has another key, or none, with the first one.
pub(super) fn run(
    args: &ResealArgs, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), Failed> {
    let settings = config::Store::load(&args.store, env)?;
    let Some(sealing) = Seal::load(&args.store, env)?.and_then(|seal| seal.sealing()) else {
        let what = "there are no keys to seal with; name the gateway's --config, with its [seal]";
        return Err(Failed::Usage(what.into()));
    };
    let first = sealing.ids().swap_remove(0);
    let counts = outside::block_on(async {
        let opened = outside::open_sealed(&settings, Some(sealing)).await?;
        let sealed = opened.sealed.as_ref().expect("there are keys");
        reseal(sealed, &first, args, aside).await
    })?;
    if args.json {
        writeln!(out, "{:#}", counts.as_json(&first))?;
    } else {
        counts.print(&first, out)?;
    }
    if let Some(next) = counts.next {
        writeln!(aside, "ibid: there are more: --cursor {next}")?;
    }
    if counts.unopened > 0 {
        return Err(Failed::NotSo(format!("{} did not open; nothing was changed there", records(counts.unopened))));
    }
    Ok(())
}

async fn reseal(sealed: &Sealed, first: &str, args: &ResealArgs, aside: &mut dyn io::Write) -> Result<Counts, Failed> {
    let mut counts = Counts::default();
    let mut left = args.limit.unwrap_or(u64::MAX);
    let mut from = Cursor(args.cursor);
    loop {
        let at_most = left.min(PAGE.into()) as u32;
        let page = sealed.beneath().operators().list(&Filter::default(), from.clone(), at_most).await?;
        left -= (page.entries.len() as u64).min(left);
        let other_key = |listed: &&Listed| sealed_with(&listed.label).is_some_and(|key| key != first);
        counts.labels += page.entries.iter().filter(other_key).count() as u64;
        let finished = page.entries.iter().filter(|listed| matches!(listed.state, State::Done | State::Failed));
        let finished: Vec<Address> = finished.map(|listed| listed.address).collect();
        for some in finished.chunks(AT_ONCE) {
            let done = join_all(some.iter().map(|at| sealed.reseal(at))).await;
            some.iter().zip(done).try_for_each(|(at, done)| counts.add(at, done, aside))?;
        }
        match page.next {
            // A cursor that stands still would never end.
            Some(next) if next.0 > from.0 => from = next,
            _ => return Ok(counts),
        }
        if left == 0 {
            counts.next = from.0;
            return Ok(counts);
        }
    }
}

impl Counts {
    fn add(
        &mut self, at: &Address, done: Result<Resealed, ibid::store::StoreError>, aside: &mut dyn io::Write,
    ) -> Result<(), Failed> {
        match done {
            Ok(Resealed::Done { from }) => *self.resealed.entry(from).or_default() += 1,
            Ok(Resealed::Current) => self.current += 1,
            Ok(Resealed::Gone) => self.changed += 1,
            Err(error) if error.kind == ErrorKind::Corrupt => {
                self.unopened += 1;
                if self.unopened as usize <= SHOWN {
                    writeln!(aside, "ibid: {at}: {}", error.source)?;
                }
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn print(&self, first: &str, out: &mut dyn io::Write) -> io::Result<()> {
        for (from, count) in &self.resealed {
            let before = from.as_ref().map_or("in clear".into(), |from| format!("with {from}"));
            writeln!(out, "sealed {} with {first} that {} {before}", records(*count), be(*count))?;
        }
        writeln!(out, "{} had {first} already", records(self.current))?;
        if self.changed > 0 {
            writeln!(out, "{} changed meanwhile", records(self.changed))?;
        }
        if self.labels > 0 {
            let label = if self.labels == 1 { "1 label has" } else { &format!("{} labels have", self.labels) };
            writeln!(out, "{label} an older key until the entry expires; without that key only lists show less")?;
        }
        Ok(())
    }

    fn as_json(&self, first: &str) -> Value {
        let named = |(from, count): (&Option<String>, &u64)| (from.clone().unwrap_or_default(), json!(count));
        json!({
            "key": first,
            "resealed": self.resealed.values().sum::<u64>(),
            "from": self.resealed.iter().map(named).collect::<Map<_, _>>(),
            "current": self.current,
            "changed": self.changed,
            "unopened": self.unopened,
            "older_labels": self.labels,
            "next": self.next.map(|next| next.to_string()),
        })
    }
}

fn records(count: u64) -> String {
    if count == 1 { "1 record".into() } else { format!("{count} records") }
}

fn be(count: u64) -> &'static str {
    if count == 1 { "was" } else { "were" }
}
