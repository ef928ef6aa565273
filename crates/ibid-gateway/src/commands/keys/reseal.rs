//! `ibid keys reseal`: remembered answers under the first key, straight on a store or by the gateway that has it open.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::Address;
use ibid_stores::seal::Sealed;
use serde_json::json;

use super::{Failed, ResealArgs, show::plain, source::Place};
use crate::{
    commands::{outside, remote::Api},
    config::Env,
    records::{
        Resealed,
        view::{date, now_ms},
    },
};

/// How many entries are asked for at once.
const PAGE: u64 = 500;

/// What does it.
enum Worker {
    Store(Arc<Sealed>),
    Admin(Api),
}

/// Seals what has another key, or none, with the first one.
pub(super) fn run(
    args: &ResealArgs, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), Failed> {
    let place = Place::of(&args.place, env)?;
    if matches!(place, Place::Admin(_)) && args.reason.is_none() {
        return Err(Failed::Usage("--admin needs a --reason: the gateway's audit trail keeps it".into()));
    }
    let done = outside::block_on(async { all(&Worker::of(place).await?, args, aside).await })?;
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&done).expect("counts have a form"))?;
    } else {
        print(&done, out)?;
    }
    if let Some(next) = &done.next {
        writeln!(aside, "ibid: there are more: --cursor {}", plain(next))?;
    }
    if done.unopened > 0 {
        return Err(Failed::NotSo(format!("{} did not open; nothing was changed there", records(done.unopened))));
    }
    Ok(())
}

/// Goes on until the end, or until as many were looked at as were asked for.
async fn all(worker: &Worker, args: &ResealArgs, aside: &mut dyn io::Write) -> Result<Resealed, Failed> {
    let mut sum = Resealed::default();
    let mut from = args.cursor;
    let ended = loop {
        let left = args.limit.map_or(PAGE, |limit| limit.saturating_sub(sum.looked).min(PAGE));
        let (done, failed) = worker.some(from, left, args.reason.as_deref()).await;
        sum.add(done);
        let next = sum.next.as_deref().and_then(Address::from_hex);
        if failed.is_some() {
            break failed;
        }
        // A cursor that stands still would never end.
        if next <= from || args.limit.is_some_and(|limit| sum.looked >= limit) {
            break None;
        }
        from = next;
    };
    for unopened in &sum.unopened_at {
        writeln!(aside, "ibid: {}: {}", plain(&unopened.address), plain(&unopened.why))?;
    }
    if let Some(reason) = &args.reason {
        log(&sum, reason, ended.is_some(), aside)?;
    }
    match ended {
        None => Ok(sum),
        Some(failed) => {
            let from = from.map_or(String::new(), |from| format!(", and go on with --cursor {from}"));
            writeln!(aside, "ibid: {} were sealed before it failed; do it again{from}", records(sum.resealed))?;
            Err(failed)
        }
    }
}

impl Worker {
    async fn of(place: Place) -> Result<Self, Failed> {
        match place {
            Place::Admin(api) => Ok(Self::Admin(api)),
            Place::Store(settings, seal) => {
                let Some(sealing) = seal?.and_then(|seal| seal.sealing()) else {
                    let what = "there are no keys to seal with; name the gateway's --config, with its [seal]";
                    return Err(Failed::Usage(what.into()));
                };
                let opened = outside::open_sealed(&settings, Some(sealing)).await?;
                Ok(Self::Store(opened.sealed.expect("there are keys")))
            }
        }
    }

    /// What was done, also if it failed on the way.
    async fn some(&self, from: Option<Address>, at_most: u64, reason: Option<&str>) -> (Resealed, Option<Failed>) {
        let mut done = Resealed::default();
        match self {
            Self::Store(sealed) => {
                let failed = done.some(sealed, from, at_most as u32, Duration::MAX).await;
                (done, failed.err().map(Failed::from))
            }
            Self::Admin(api) => {
                let from = from.map(|from| from.to_string());
                let body = json!({ "reason": reason, "cursor": from, "limit": at_most });
                match api.post("/api/reseal", Bytes::from(body.to_string())).await {
                    Ok(told) => told,
                    Err(failed) => (done, Some(failed)),
                }
            }
        }
    }
}

fn print(done: &Resealed, out: &mut dyn io::Write) -> io::Result<()> {
    let key = plain(&done.key);
    for (from, count) in &done.from {
        let before = if from.is_empty() { "in clear".into() } else { format!("with {}", plain(from)) };
        writeln!(out, "sealed {} with {key} that {} {before}", records(*count), be(*count))?;
    }
    writeln!(out, "{} had {key} already", records(done.current))?;
    if done.changed > 0 {
        writeln!(out, "{} changed meanwhile", records(done.changed))?;
    }
    if done.older_labels > 0 {
        let label = if done.older_labels == 1 { "1 label has" } else { &format!("{} labels have", done.older_labels) };
        writeln!(out, "{label} an older key until the entry expires; without that key only lists show less")?;
    }
    Ok(())
}

fn log(done: &Resealed, reason: &str, failed: bool, aside: &mut dyn io::Write) -> io::Result<()> {
    let level = match (failed, done.unopened) {
        (true, _) => "ERROR",
        (false, 1..) => "WARN",
        (false, 0) => "INFO",
    };
    writeln!(
        aside,
        "{} {level} keys reseal key={} looked={} resealed={} current={} changed={} unopened={} reason={reason:?}",
        date(now_ms()),
        plain(&done.key),
        done.looked,
        done.resealed,
        done.current,
        done.changed,
        done.unopened,
    )
}

fn records(count: u64) -> String {
    if count == 1 { "1 record".into() } else { format!("{count} records") }
}

fn be(count: u64) -> &'static str {
    if count == 1 { "was" } else { "were" }
}
