//! `ibid keys reseal`: seals remembered answers with the first key, directly in a store or through its gateway.

use std::{io, time::Duration};

use bytes::Bytes;
use ibid::store::Address;
use ibid_tools::CommandError;
use serde_json::json;

use super::{ResealArgs, audit, target::KeysBackend};
use crate::{
    commands::{
        print::{escape_control, print_json},
        store,
    },
    config::Env,
    format::{format_date, now_ms},
    records::ResealReport,
};

const RESEAL_BATCH: u64 = 500;

/// Reseals answers that are sealed with another key or not sealed.
pub(super) fn run(
    args: &ResealArgs, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), CommandError> {
    if args.target.admin.admin.is_some() && args.reason.is_none() {
        return Err(CommandError::Usage("--admin needs a --reason: the gateway's audit trail keeps it".into()));
    }
    let done = store::block_on(async {
        let source = KeysBackend::open(&args.target, env, true).await?;
        let audited = match &source {
            KeysBackend::Store(opened, _) => {
                Some(audit::begin_reseal(&opened.store, args.reason.as_deref().unwrap_or_default()).await?)
            }
            KeysBackend::Admin(_) => None,
        };
        let (done, failed) = reseal_all(&source, args, aside).await?;
        if let Some(audited) = audited {
            audit::end_reseal(audited, &done, failed.as_ref()).await;
        }
        failed.map_or(Ok(done), Err)
    })?;
    if args.json { print_json(&done, out) } else { print(&done, out) }?;
    if let Some(next) = &done.next {
        writeln!(aside, "ibid: there are more: --cursor {}", escape_control(next))?;
    }
    if done.unopened > 0 {
        return Err(CommandError::Conflict(format!(
            "{} did not open; nothing was changed there",
            count_of_records(done.unopened)
        )));
    }
    Ok(())
}

/// Continues to the end, or until the limit of checked entries. Returns what was done, also if it failed on the way.
async fn reseal_all(
    worker: &KeysBackend, args: &ResealArgs, aside: &mut dyn io::Write,
) -> Result<(ResealReport, Option<CommandError>), CommandError> {
    let mut sum = ResealReport::default();
    let mut from = args.cursor;
    let ended = loop {
        let left = args.limit.map_or(RESEAL_BATCH, |limit| limit.saturating_sub(sum.looked).min(RESEAL_BATCH));
        let (done, failed) = worker.reseal_batch(from, left, args.reason.as_deref()).await;
        sum.merge(done);
        let next = sum.next.as_deref().and_then(Address::from_hex);
        if failed.is_some() {
            break failed;
        }
        // A cursor that does not advance would never end.
        if next <= from || args.limit.is_some_and(|limit| sum.looked >= limit) {
            break None;
        }
        from = next;
    };
    for unopened in &sum.unopened_at {
        writeln!(aside, "ibid: {}: {}", escape_control(&unopened.address), escape_control(&unopened.why))?;
    }
    if let Some(reason) = &args.reason {
        write_log_line(&sum, reason, ended.is_some(), aside)?;
    }
    if ended.is_some() {
        let from = from.map_or(String::new(), |from| format!(", and go on with --cursor {from}"));
        writeln!(aside, "ibid: {} were sealed before it failed; do it again{from}", count_of_records(sum.resealed))?;
    }
    Ok((sum, ended))
}

impl KeysBackend {
    /// Returns what was done, also if it failed on the way.
    async fn reseal_batch(
        &self, from: Option<Address>, at_most: u64, reason: Option<&str>,
    ) -> (ResealReport, Option<CommandError>) {
        let mut done = ResealReport::default();
        match self {
            Self::Store(opened, _) => {
                let sealed = opened.sealed.as_ref().expect("there are keys");
                let failed = done.run_slice(sealed, from, at_most as u32, Duration::MAX).await;
                (done, failed.err().map(CommandError::from))
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

fn print(done: &ResealReport, out: &mut dyn io::Write) -> io::Result<()> {
    let key = escape_control(&done.key);
    for (from, count) in &done.from {
        let before = if from.is_empty() { "in clear".into() } else { format!("with {}", escape_control(from)) };
        writeln!(
            out,
            "sealed {} with {key} that {} {before}",
            count_of_records(*count),
            if *count == 1 { "was" } else { "were" }
        )?;
    }
    writeln!(out, "{} had {key} already", count_of_records(done.current))?;
    if done.changed > 0 {
        writeln!(out, "{} changed meanwhile", count_of_records(done.changed))?;
    }
    if done.older_labels > 0 {
        let label = if done.older_labels == 1 { "1 label has" } else { &format!("{} labels have", done.older_labels) };
        writeln!(out, "{label} an older key until the entry expires; without that key only lists show less")?;
    }
    Ok(())
}

fn write_log_line(done: &ResealReport, reason: &str, failed: bool, aside: &mut dyn io::Write) -> io::Result<()> {
    let level = match (failed, done.unopened) {
        (true, _) => "ERROR",
        (false, 1..) => "WARN",
        (false, 0) => "INFO",
    };
    writeln!(
        aside,
        "{} {level} keys reseal key={} looked={} resealed={} current={} changed={} unopened={} reason={reason:?}",
        format_date(now_ms()),
        escape_control(&done.key),
        done.looked,
        done.resealed,
        done.current,
        done.changed,
        done.unopened,
    )
}

fn count_of_records(count: u64) -> String {
    if count == 1 { "1 record".into() } else { format!("{count} records") }
}
