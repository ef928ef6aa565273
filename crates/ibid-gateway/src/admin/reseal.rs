//! `POST /api/reseal`: seals the stored records with the first key while the gateway serves.
//!
//! One request handles some entries and returns a cursor, so that none runs for long; only one runs at a time.
//! Consecutive requests of one caller with the same reason, each starting at the previous cursor, form one run with one
//! audit entry, written before the first request and again at the end.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use ibid::store::Address;
use ibid_stores::seal::SealedStore;
use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::timeout,
};

use super::{
    AdminProblem, AdminState,
    audit::{AuditEntry, AuditOutcome, AuditTrail},
    auth::AdminCaller,
};
use crate::records::ResealReport;

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
        return Err(conflict("a reseal is at work at this moment, and there is one at a time; try again"));
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
            let begun = state.audit.begin(caller, "reseal", &asked.reason, None).await;
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
                audit.update_in_memory(&self.entry);
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
