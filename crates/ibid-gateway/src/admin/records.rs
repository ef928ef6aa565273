//! Lists, shows, changes and reseals records, within the caller's role.
//!
//! A [`Role::User`](crate::config::Role::User) sees only records with its own user tag. Other records look absent to
//! it, whether they exist or not.
//!
//! `POST /api/reseal` seals the stored records with the first key while the gateway serves. One request handles some
//! entries and returns a cursor, so that none runs for long; only one runs at a time. Consecutive requests of one caller
//! with the same reason, each starting at the previous cursor, form one run with one audit entry, written before the
//! first request and again at the end.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use http::StatusCode;
use ibid::store::Address;
use ibid_stores::seal::SealedStore;
use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::timeout,
};

use super::{
    AdminProblem, AdminState,
    audit::{AuditEntry, AuditEntryPage, AuditOutcome, AuditTrail},
    auth::AdminCaller,
};
use crate::records::{
    ChangeReport, ChangeRequest, RecordEntry, RecordList, RecordLookupError, RecordQuery, RecordView, ResealReport,
    RevealedKey, view::whole_key,
};

/// Time limit of a store call (10 s); longer than for proxied requests, because an operator can wait.
const ADMIN_STORE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long entries are read for a sorted list (5 s).
const SORT_TIME_BUDGET: Duration = Duration::from_secs(5);
const SORT_PAGE_SIZE: usize = 1000;

/// Lists the entries that match, from a cursor on.
pub async fn list(
    state: &AdminState, caller: &AdminCaller, mut query: RecordQuery, from: Option<Address>, limit: usize,
) -> Result<RecordList, AdminProblem> {
    if let Some(own) = &caller.user {
        if query.user.as_ref().is_some_and(|user| user != own) {
            return Ok(RecordList { records: Vec::new(), next: None });
        }
        query.user = Some(own.clone());
    }
    let store = state.ibid.engine().store();
    with_store_timeout(async { Ok(query.list(&**store, from, limit).await?) }).await
}

/// The first entries of those that match in some order, and how many match.
pub struct SortedRecords {
    pub records: Vec<RecordView>,
    pub matching: usize,
    /// Whether time ran out before all that match were read.
    pub is_partial: bool,
}

/// Reads all entries that match, for at most [`SORT_TIME_BUDGET`], and keeps the first of them by `sort`.
pub async fn list_sorted(
    state: &AdminState, caller: &AdminCaller, query: RecordQuery, limit: usize, sort: impl Fn(&mut [RecordView]),
) -> Result<SortedRecords, AdminProblem> {
    let start = Instant::now();
    let mut sorted = SortedRecords { records: Vec::new(), matching: 0, is_partial: false };
    let mut from = None;
    loop {
        let page = list(state, caller, query.clone(), from, SORT_PAGE_SIZE).await?;
        sorted.matching += page.records.len();
        sorted.records.extend(page.records);
        sort(&mut sorted.records);
        sorted.records.truncate(limit);
        from = page.next.as_deref().and_then(Address::from_hex);
        sorted.is_partial = from.is_some() && start.elapsed() >= SORT_TIME_BUDGET;
        if from.is_none() || sorted.is_partial {
            return Ok(sorted);
        }
    }
}

pub async fn show(state: &AdminState, caller: &AdminCaller, address: Address) -> Result<RecordView, AdminProblem> {
    let view = RecordView::from(&find_entry(state, caller, address).await?);
    let store = &**state.ibid.engine().store();
    with_store_timeout(async { Ok(view.with_note(store, state.started_ms).await) }).await
}

/// Changes an entry, and audits the change before and after. The caller must have passed
/// [`AdminCaller::authorize_change`].
///
/// # Errors
/// If the entry is absent or not in the expected state (409, with its current state), or the store or the audit trail
/// fails.
pub async fn change(
    state: &AdminState, caller: &AdminCaller, address: Address, change: ChangeRequest,
) -> Result<ChangeReport, AdminProblem> {
    let before = find_entry(state, caller, address).await?;
    let begun = state
        .audit
        .begin(&caller.into(), change.action.name(), &change.reason, Some(&RecordView::from(&before.info)))
        .await;
    let begun = begun.map_err(|why| AdminProblem::audit_unwritable(&why))?;
    // Runs in its own task, so that a client that disconnects cannot leave the audit entry without an outcome.
    let (store, audit) = (state.ibid.engine().store().clone(), state.audit.clone());
    let work = tokio::spawn(async move {
        let (told, error) = change.execute(&*store, before).await;
        let failed = error.map(|error| error.to_string());
        audit.ended(begun, &told, failed.clone()).await;
        (told, failed)
    });
    let Ok(Ok((told, failed))) = timeout(ADMIN_STORE_TIMEOUT, work).await else {
        return Err(AdminProblem::store_unavailable(
            "it did not answer in time; look what became of the change before you try again",
        ));
    };
    match (&told.refused, failed) {
        (None, None) => Ok(told),
        (Some(why), _) => {
            let detail = format!("nothing was changed: {why}");
            Err(AdminProblem::new(http::StatusCode::CONFLICT, detail).with(&told))
        }
        (None, Some(why)) if told.changed.is_none() => {
            Err(AdminProblem::store_unavailable(format!("{why}; look before you try again")).with(&told))
        }
        (None, Some(why)) => Err(AdminProblem::store_unavailable(why).with(&told)),
    }
}

/// Reveals a key that lists show masked, and audits that. The caller must have passed
/// [`AdminCaller::authorize_change`].
pub async fn reveal(
    state: &AdminState, caller: &AdminCaller, address: Address, reason: &str,
) -> Result<RevealedKey, AdminProblem> {
    let entry = find_entry(state, caller, address).await?;
    let key = whole_key(&entry.info).map_err(|why| AdminProblem::new(StatusCode::CONFLICT, why))?;
    let audited = state.audit.record_reveal(&caller.into(), reason, &RecordView::from(&entry.info)).await;
    audited.map_err(|why| AdminProblem::audit_unwritable(&why))?;
    Ok(RevealedKey { address: address.to_string(), key })
}

/// A page of the audit trail. See [`AuditTrail::page`].
pub async fn audit_page(
    state: &AdminState, before: Option<u64>, limit: usize, user: Option<&str>,
) -> Result<AuditEntryPage, AdminProblem> {
    with_store_timeout(async { Ok(state.audit.page(before, limit, user).await?) }).await
}

async fn find_entry(state: &AdminState, caller: &AdminCaller, address: Address) -> Result<RecordEntry, AdminProblem> {
    let store = state.ibid.engine().store();
    let query = RecordQuery { address: Some(address.into()), user: caller.user.clone(), ..RecordQuery::default() };
    with_store_timeout(query.find_one(&**store)).await
}

async fn with_store_timeout<T>(work: impl Future<Output = Result<T, RecordLookupError>>) -> Result<T, AdminProblem> {
    match timeout(ADMIN_STORE_TIMEOUT, work).await {
        Ok(found) => Ok(found?),
        Err(_) => Err(AdminProblem::store_unavailable(format!("no answer within {ADMIN_STORE_TIMEOUT:?}"))),
    }
}

/// Time budget of one request (5 s). Records already being resealed are finished.
const RESEAL_TIME_BUDGET: Duration = Duration::from_secs(5);
/// How long the client waits for the response (10 s). The work continues after that.
const RESEAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The sealed store, and the current run.
pub struct Resealer {
    sealed: Arc<SealedStore>,
    run: Arc<Mutex<Option<ResealRun>>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResealRequest {
    pub(super) reason: String,
    pub(super) from: Option<Address>,
    pub(super) limit: u32,
}

/// A run that continues with the next request.
struct ResealRun {
    entry: AuditEntry,
    totals: ResealReport,
}

impl Resealer {
    pub(super) fn new(sealed: Arc<SealedStore>) -> Self {
        Self { sealed, run: Arc::default() }
    }
}

/// Reseals some entries. The caller must have passed [`AdminCaller::authorize_change`].
pub(super) async fn reseal(
    state: &AdminState, caller: &AdminCaller, asked: ResealRequest,
) -> Result<ResealReport, AdminProblem> {
    let conflict = |detail: &str| AdminProblem::new(StatusCode::CONFLICT, detail);
    let Some(reseals) = &state.resealer else {
        return Err(conflict("this gateway seals nothing, so there is nothing to reseal: it has no seal.keys"));
    };
    let Ok(mut last) = reseals.run.clone().try_lock_owned() else {
        return Err(conflict("another reseal is running; try again later"));
    };
    let run = match last.take() {
        Some(run) if run.is_continued_by(caller, &asked) => run,
        earlier => {
            if let Some(run) = earlier {
                run.finish(
                    &state.audit,
                    AuditOutcome::Changed,
                    Some("it was broken off; the rest was not looked at".into()),
                )
                .await;
            }
            let begun = state.audit.begin(&caller.into(), "reseal", &asked.reason, None).await;
            ResealRun {
                entry: begun.map_err(|why| AdminProblem::audit_unwritable(&why))?,
                totals: ResealReport::default(),
            }
        }
    };
    // Runs in its own task, so that a client that disconnects does not cancel it.
    let work = tokio::spawn(run.run_slice(last, reseals.sealed.clone(), state.audit.clone(), asked));
    match timeout(RESEAL_TIMEOUT, work).await {
        Ok(Ok((done, None))) => Ok(done),
        Ok(Ok((done, Some(why)))) => Err(AdminProblem::store_unavailable(why).with(&done)),
        _ => Err(AdminProblem::store_unavailable("it did not answer in time; ask again with the same cursor")),
    }
}

impl ResealRun {
    fn is_continued_by(&self, caller: &AdminCaller, asked: &ResealRequest) -> bool {
        let here = self.totals.next.as_deref().and_then(Address::from_hex);
        let same = self.entry.by == caller.name && self.entry.reason == asked.reason;
        same && here.is_some() && here == asked.from
    }

    /// Handles one request, and keeps the run for the next one unless it is finished.
    async fn run_slice(
        mut self, mut kept: OwnedMutexGuard<Option<Self>>, sealed: Arc<SealedStore>, audit: AuditTrail,
        asked: ResealRequest,
    ) -> (ResealReport, Option<String>) {
        let mut done = ResealReport::default();
        let failed = done
            .run_slice(&sealed, asked.from, asked.limit, RESEAL_TIME_BUDGET)
            .await
            .err()
            .map(|error| error.to_string());
        self.totals.merge(done.clone());
        match &failed {
            Some(why) => self.finish(&audit, AuditOutcome::Failed, Some(why.clone())).await,
            None if done.next.is_none() => self.finish(&audit, AuditOutcome::Changed, None).await,
            None => {
                self.entry.resealed = Some((&self.totals).into());
                audit.update_progress(&self.entry).await;
                *kept = Some(self);
            }
        }
        (done, failed)
    }

    async fn finish(mut self, audit: &AuditTrail, outcome: AuditOutcome, why: Option<String>) {
        self.entry.resealed = Some((&self.totals).into());
        (self.entry.outcome, self.entry.why) = (outcome, why);
        audit.write_outcome(&self.entry).await;
    }
}
