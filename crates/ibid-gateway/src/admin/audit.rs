//! The audit trail: who changed what, when and why.
//!
//! An entry is written and synced **before** its change is made, and again with the outcome: if the process crashes in
//! between, the entry stays with outcome `unknown`; a change is never made without an entry. If the entry cannot be
//! written, nothing is changed.
//!
//! The trail is in a file of this gateway ([`local_trail`]), or in the store ([`store_trail`]), where all its gateways
//! share it. `ibid keys` writes to the store's.

use std::{io, path::Path, sync::Arc};

use ibid::store::{Address, Store, StoreError};
use serde::{Deserialize, Serialize};

use self::{local_trail::LocalTrail, store_trail::StoreTrail};
use super::auth::AdminCaller;
use crate::{
    config::AuditDestination,
    format::{format_date, now_ms},
    records::{self, ChangeReport, RecordView},
};

mod files;
mod local_trail;
mod store_trail;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// Grows by one, also across restarts.
    pub id: u64,
    /// Time of the request, RFC 3339.
    pub at: String,
    pub by: String,
    pub role: String,
    pub client: String,
    /// `release`, `forget`, `resolve`, `reveal` or `reseal`.
    pub action: String,
    /// Of the changed record; `None` for a reseal, which covers all records.
    pub address: Option<String>,
    /// Masked.
    pub key: String,
    pub tenant: String,
    pub user: String,
    pub endpoint: String,
    pub reason: String,
    /// The record before the change; `None` for a reseal.
    pub before: Option<AuditedState>,
    /// The record after the change; `None` if it is absent or could not be read.
    pub after: Option<AuditedState>,
    pub outcome: AuditOutcome,
    pub why: Option<String>,
    /// Result of a reseal, so far or in total.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resealed: Option<ResealSummary>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResealSummary {
    /// The name of the key that seals new records.
    pub key: String,
    pub looked: u64,
    /// Records that now have this key and had another or none.
    pub resealed: u64,
    pub unopened: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditedState {
    pub state: String,
    pub fence: u64,
    pub attempt: u32,
    pub status: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuditOutcome {
    Changed,
    /// Nothing was changed, because the record was not in the expected state.
    Refused,
    /// The store failed and did not apply the change.
    Failed,
    /// The store may have applied the change, or the gateway stopped before it knew.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditEntryPage {
    /// Newest first.
    pub entries: Vec<AuditEntry>,
    /// Cursor of the next page: it lists entries with a lower id. `None` on the last page.
    pub next: Option<u64>,
}

#[derive(Debug, Clone)]
pub struct AuditTrail(AuditBackend);

#[derive(Debug, Clone)]
enum AuditBackend {
    Local(Arc<LocalTrail>),
    Store(Arc<StoreTrail>),
}

/// Who made a change.
#[derive(Debug, Clone)]
pub struct AuditActor {
    pub by: String,
    pub role: String,
    pub client: String,
}

impl From<&AdminCaller> for AuditActor {
    fn from(caller: &AdminCaller) -> Self {
        Self { by: caller.name.clone(), role: caller.role.to_string(), client: caller.client.to_string() }
    }
}

impl AuditTrail {
    pub fn open(kept: &AuditDestination, store: &Arc<dyn Store>) -> io::Result<Self> {
        match kept {
            AuditDestination::Memory => Self::local(None),
            AuditDestination::File(path) => Self::local(Some(path)),
            AuditDestination::Store => Ok(Self::in_store(store.clone())),
        }
    }

    pub fn in_store(store: Arc<dyn Store>) -> Self {
        Self(AuditBackend::Store(Arc::new(StoreTrail::new(store))))
    }

    fn local(path: Option<&Path>) -> io::Result<Self> {
        Ok(Self(AuditBackend::Local(Arc::new(LocalTrail::open(path)?))))
    }

    /// Whose changes the trail has, as a sentence for people.
    pub fn reach(&self) -> &'static str {
        match &self.0 {
            AuditBackend::Store(_) => {
                "Changes through all gateways that keep their trail in this store, and by ibid keys on the store."
            }
            AuditBackend::Local(trail) if trail.is_in_file => {
                "Changes through this gateway. Other gateways have their own trail; ibid keys audit lists the changes made by ibid keys on the store."
            }
            AuditBackend::Local(_) => {
                "Changes through this gateway since it started: admin.audit is off. ibid keys audit lists the changes made by ibid keys on the store."
            }
        }
    }

    /// Writes the entry of a change that is about to be made. Its outcome is `unknown` until [`ended`](Self::ended).
    /// If it cannot be written, the change must not be made.
    pub async fn begin(
        &self, by: &AuditActor, action: &str, reason: &str, before: Option<&RecordView>,
    ) -> io::Result<AuditEntry> {
        let text = |of: fn(&RecordView) -> &String| before.map(of).cloned();
        let entry = AuditEntry {
            id: 0,
            at: format_date(now_ms()),
            by: by.by.clone(),
            role: by.role.clone(),
            client: by.client.clone(),
            action: action.into(),
            address: text(|view| &view.address),
            // The store may hold the key in clear, for callers who may see the record.
            key: text(|view| &view.key)
                .map(|key| if key.contains("****") { key } else { ibid::mask(&key) })
                .unwrap_or_default(),
            tenant: text(|view| &view.tenant).unwrap_or_default(),
            user: text(|view| &view.user).unwrap_or_default(),
            endpoint: text(|view| &view.endpoint).unwrap_or_default(),
            reason: reason.into(),
            before: before.map(AuditedState::from_view),
            after: None,
            outcome: AuditOutcome::Unknown,
            why: None,
            resealed: None,
        };
        match &self.0 {
            AuditBackend::Local(trail) => trail.run_blocking(move |trail| trail.append(entry)).await,
            AuditBackend::Store(trail) => trail.append(entry).await.map_err(io::Error::other),
        }
    }

    pub async fn ended(&self, mut entry: AuditEntry, changed: &ChangeReport, why: Option<String>) -> AuditEntry {
        entry.after = changed.after.as_ref().map(AuditedState::from_view);
        entry.outcome = match (changed.changed, &changed.refused) {
            (Some(true), _) => AuditOutcome::Changed,
            (Some(false), Some(_)) => AuditOutcome::Refused,
            (Some(false), None) => AuditOutcome::Failed,
            (None, _) => AuditOutcome::Unknown,
        };
        entry.why = changed.refused.clone().or(why);
        self.write_outcome(&entry).await;
        entry
    }

    /// Writes down that a key is about to be revealed. If it cannot be written, the key must not be shown.
    pub async fn record_reveal(&self, by: &AuditActor, reason: &str, of: &RecordView) -> io::Result<()> {
        let mut entry = self.begin(by, "reveal", reason, Some(of)).await?;
        (entry.after, entry.outcome) = (entry.before.clone(), AuditOutcome::Changed);
        self.write_outcome(&entry).await;
        Ok(())
    }

    pub async fn write_outcome(&self, entry: &AuditEntry) {
        log_change(entry);
        let known = entry.clone();
        let written = match &self.0 {
            AuditBackend::Local(trail) => trail.run_blocking(move |trail| trail.amend(known)).await,
            AuditBackend::Store(trail) => trail.amend(entry).await.map_err(io::Error::other),
        };
        // The change is already made. If this write fails, the entry keeps the outcome `unknown`.
        if let Err(why) = written {
            tracing::error!(id = entry.id, %why, "the outcome of a change could not be written to the audit trail");
        }
    }

    /// Updates the progress of a file's entry in memory only: a long reseal would fill the file.
    pub async fn update_progress(&self, entry: &AuditEntry) {
        match &self.0 {
            AuditBackend::Local(trail) => trail.update_in_memory(entry),
            // The next update may succeed, and the outcome is written in any case.
            AuditBackend::Store(trail) => drop(trail.amend(entry).await),
        }
    }

    /// Entries with an id below `before`, newest first. With `user`, only those of the user's records.
    pub async fn page(
        &self, before: Option<u64>, limit: usize, user: Option<&str>,
    ) -> Result<AuditEntryPage, StoreError> {
        match &self.0 {
            AuditBackend::Local(trail) => Ok(trail.page(before, limit, user)),
            AuditBackend::Store(trail) => trail.page(before, limit, user).await,
        }
    }

    /// Returns the `before` value of the previous (newer) page, or `None` if that is the first page.
    pub fn previous_page_start(&self, before: u64, limit: usize) -> Option<u64> {
        match &self.0 {
            AuditBackend::Local(trail) => trail.previous_page_start(before, limit),
            AuditBackend::Store(trail) => trail.previous_page_start(before, limit),
        }
    }

    /// The latest changes of one record, newest first.
    pub async fn entries_for(&self, record: &Address, at_most: usize) -> Result<Vec<AuditEntry>, StoreError> {
        match &self.0 {
            AuditBackend::Local(trail) => Ok(trail.entries_for(record, at_most)),
            AuditBackend::Store(trail) => trail.entries_for(record, at_most).await,
        }
    }
}

impl AuditEntry {
    /// Stands for an entry that cannot be read.
    fn unreadable(id: u64) -> Self {
        let unknown = || "unknown".to_owned();
        Self {
            id,
            at: format_date(0),
            by: unknown(),
            role: unknown(),
            client: unknown(),
            action: unknown(),
            address: None,
            key: String::new(),
            tenant: String::new(),
            user: String::new(),
            endpoint: String::new(),
            reason: String::new(),
            before: None,
            after: None,
            outcome: AuditOutcome::Unknown,
            why: Some("the entry does not open: ibid keys wrote it without this gateway's [seal]".into()),
            resealed: None,
        }
    }
}

impl AuditedState {
    fn from_view(view: &RecordView) -> Self {
        Self { state: view.state.clone(), fence: view.fence, attempt: view.attempt, status: view.status }
    }
}

impl From<&records::ResealReport> for ResealSummary {
    fn from(done: &records::ResealReport) -> Self {
        let (looked, resealed, unopened) = (done.looked, done.resealed, done.unopened);
        Self { key: done.key.clone(), looked, resealed, unopened }
    }
}

fn log_change(entry: &AuditEntry) {
    let before = entry.before.as_ref().map_or("", |before| &before.state);
    let after = entry.after.as_ref().map_or("absent", |after| &after.state);
    macro_rules! line {
        ($level:ident) => {
            tracing::$level!(
                id = entry.id,
                by = entry.by,
                client = entry.client,
                action = entry.action,
                outcome = ?entry.outcome,
                address = entry.address.as_deref().map(ibid::mask),
                key = entry.key,
                endpoint = entry.endpoint,
                before,
                after,
                reason = entry.reason,
                why = entry.why,
                resealed = entry.resealed.as_ref().map(|done| done.resealed),
                "an operator's change"
            )
        };
    }
    match entry.outcome {
        AuditOutcome::Changed => line!(info),
        AuditOutcome::Refused => line!(warn),
        AuditOutcome::Failed | AuditOutcome::Unknown => line!(error),
    }
}
