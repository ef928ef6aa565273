//! The audit trail in the store: `ibid keys audit` lists it, and changes that `ibid keys` makes on the store are in it.

use std::{fs, io, sync::Arc};

use ibid::store::Store;
use ibid_tools::CommandError;

use super::{AuditArgs, target::KeysBackend};
use crate::{
    admin::audit::{AuditActor, AuditEntry, AuditEntryPage, AuditOutcome, AuditTrail},
    commands::{
        print::{escape_control, print_columns, print_json},
        store,
    },
    config::Env,
    format::display_date,
    records::{ChangeReport, ChangeRequest, RecordEntry, RecordView, ResealReport, RevealedKey, view::whole_key},
};

/// Prints the trail of the store, or of the gateway that `--admin` names.
pub(super) fn run(
    args: &AuditArgs, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), CommandError> {
    let page: AuditEntryPage = store::block_on(async {
        match KeysBackend::open(&args.target, env, false).await? {
            KeysBackend::Store(opened, _) => {
                Ok(AuditTrail::in_store(opened.store).page(args.cursor, args.limit as usize, None).await?)
            }
            KeysBackend::Admin(api) => {
                let cursor = args.cursor.map_or(String::new(), |cursor| format!("&cursor={cursor}"));
                api.get(&format!("/api/audit?limit={}{cursor}", args.limit)).await
            }
        }
    })?;
    if args.json {
        return Ok(print_json(&page, out)?);
    }
    let names = ["ID", "WHEN", "WHO", "CHANGE", "OUTCOME", "RECORD", "REASON"].map(String::from);
    let row = |entry: &AuditEntry| {
        [
            entry.id.to_string(),
            escape_control(&display_date(&entry.at)),
            escape_control(&entry.by),
            escape_control(&entry.action),
            serde_json::to_value(entry.outcome)
                .ok()
                .and_then(|name| Some(name.as_str()?.to_owned()))
                .unwrap_or_default(),
            entry.address.as_deref().map_or("all records".into(), |address| ibid::mask(&escape_control(address))),
            escape_control(&entry.reason),
        ]
    };
    if !page.entries.is_empty() {
        let rows: Vec<[String; 7]> = [names].into_iter().chain(page.entries.iter().map(row)).collect();
        print_columns(&rows, out)?;
    }
    match page.next {
        Some(next) => writeln!(aside, "ibid: there are more: --cursor {next}")?,
        None if page.entries.is_empty() => writeln!(aside, "ibid: no change is recorded")?,
        None => {}
    }
    Ok(())
}

/// Makes a change on a store, with an audit entry before and after.
pub(super) async fn change(
    store: &Arc<dyn Store>, before: RecordEntry, change: &ChangeRequest,
) -> Result<(ChangeReport, Option<CommandError>), CommandError> {
    let trail = AuditTrail::in_store(store.clone());
    let view = RecordView::from(&before.info);
    let begun = trail.begin(&actor(), change.action.name(), &change.reason, Some(&view)).await;
    let begun = begun.map_err(unwritable)?;
    let (told, error) = change.execute(&**store, before).await;
    trail.ended(begun, &told, error.as_ref().map(ToString::to_string)).await;
    let refused = told.refused.as_ref();
    let refused = refused.map(|why| CommandError::Conflict(format!("nothing was changed: {why}")));
    Ok((told, refused.or(error.map(CommandError::from))))
}

/// Returns the whole key of an entry, with an audit entry before.
pub(super) async fn reveal(
    store: &Arc<dyn Store>, entry: &RecordEntry, reason: &str,
) -> Result<RevealedKey, CommandError> {
    let key = whole_key(&entry.info).map_err(|why| CommandError::Conflict(why.into()))?;
    let trail = AuditTrail::in_store(store.clone());
    trail.record_reveal(&actor(), reason, &RecordView::from(&entry.info)).await.map_err(unwritable)?;
    Ok(RevealedKey { address: entry.info.address.to_string(), key })
}

/// The audit entry of a reseal; its outcome is unknown until [`end_reseal`].
pub(super) async fn begin_reseal(
    store: &Arc<dyn Store>, reason: &str,
) -> Result<(AuditTrail, AuditEntry), CommandError> {
    let trail = AuditTrail::in_store(store.clone());
    let entry = trail.begin(&actor(), "reseal", reason, None).await.map_err(unwritable)?;
    Ok((trail, entry))
}

pub(super) async fn end_reseal(
    (trail, mut entry): (AuditTrail, AuditEntry), done: &ResealReport, failed: Option<&CommandError>,
) {
    entry.resealed = Some(done.into());
    entry.outcome = if failed.is_some() { AuditOutcome::Failed } else { AuditOutcome::Changed };
    entry.why = failed.map(ToString::to_string);
    trail.write_outcome(&entry).await;
}

fn unwritable(why: io::Error) -> CommandError {
    CommandError::Unavailable(format!("nothing was changed: the audit entry could not be written to the store: {why}"))
}

/// The user who runs this command, and the machine.
fn actor() -> AuditActor {
    let id = rustix::process::getuid().as_raw().to_string();
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let name = users.lines().find_map(|line| {
        let mut parts = line.split(':');
        let name = parts.next()?;
        (parts.nth(1)? == id).then(|| name.to_owned())
    });
    let system = rustix::system::uname();
    AuditActor {
        by: format!("{} (ibid keys)", name.unwrap_or_else(|| format!("uid {id}"))),
        role: "command line".into(),
        client: system.nodename().to_string_lossy().into_owned(),
    }
}
