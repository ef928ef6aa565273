//! `POST /api/reseal`: what a gateway's store holds under the first of its keys, while it serves.
//!
//! One request looks at some entries and says where to go on, so that none runs for long; one is at work at a time.
//! Requests of the same person with the same reason, each of which goes on where the one before ended, are one run, and one
//! entry of the audit trail: written before the first of them, and again at the end.

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

/// How long a request looks at most; what it has begun then is ended.
const RESEAL_TIME_BUDGET: Duration = Duration::from_secs(5);
/// How long one waits for it.
const RESEAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The way to the sealed store, and what is being resealed in it.
pub struct Resealer {
    sealed: Arc<SealedStore>,
    run: Arc<Mutex<Option<ResealRun>>>,
}

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResealRequest {
    pub(super) reason: String,
    pub(super) from: Option<Address>,
    pub(super) limit: u32,
}

/// One that was begun, and goes on.
struct ResealRun {
    entry: AuditEntry,
    totals: ResealReport,
}

impl Resealer {
    pub(super) fn new(sealed: Arc<SealedStore>) -> Self {
        Self { sealed, run: Arc::default() }
    }
}

/// Reseals some entries. Whether the caller may is asked before: [`AdminCaller::authorize_change`].
///
/// # Errors
/// If nothing is sealed here, another is at work (409), or the store or the audit trail cannot be used.
pub(super) async fn reseal(
    desk: &AdminState, caller: &AdminCaller, asked: ResealRequest,
) -> Result<ResealReport, AdminProblem> {
    let conflict = |detail: &str| AdminProblem::new(StatusCode::CONFLICT, detail);
    let Some(reseals) = &desk.resealer else {
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
                    &desk.audit,
                    AuditOutcome::Changed,
                    Some("it was broken off; the rest was not looked at".into()),
                )
                .await;
            }
            let begun = desk.audit.begin(caller, "reseal", &asked.reason, None).await;
            ResealRun {
                entry: begun.map_err(|why| AdminProblem::audit_unwritable(&why))?,
                totals: ResealReport::default(),
            }
        }
    };
    // To its end, whatever becomes of the one who asked.
    let work = tokio::spawn(run.run_slice(last, reseals.sealed.clone(), desk.audit.clone(), asked));
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

    /// Does it, and keeps the run for the next request if it is not at its end.
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
