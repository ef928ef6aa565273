//! `POST /api/reseal`: what a gateway's store holds under the first of its keys, while it serves.
//!
//! One request looks at some entries and says where to go on, so that none runs for long; one is at work at a time.
//! Requests of the same person with the same reason, each of which goes on where the one before ended, are one run, and one
//! entry of the audit trail: written before the first of them, and again at the end.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use ibid::store::Address;
use ibid_stores::seal::Sealed;
use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::timeout,
};

use super::{
    Desk, Problem,
    audit::{Audit, Entry, Outcome},
    auth::Caller,
};
use crate::records::Resealed;

/// How long a request looks at most; what it has begun then is ended.
const LASTS: Duration = Duration::from_secs(5);
/// How long one waits for it.
const PATIENCE: Duration = Duration::from_secs(10);

/// The way to the sealed store, and what is being resealed in it.
pub struct Reseals {
    sealed: Arc<Sealed>,
    run: Arc<Mutex<Option<Run>>>,
}

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) reason: String,
    pub(super) from: Option<Address>,
    pub(super) at_most: u32,
}

/// One that was begun, and goes on.
struct Run {
    entry: Entry,
    sum: Resealed,
}

impl Reseals {
    pub(super) fn new(sealed: Arc<Sealed>) -> Self {
        Self { sealed, run: Arc::default() }
    }
}

/// Reseals some entries. Whether the caller may is asked before: [`Caller::check_change`].
///
/// # Errors
/// If nothing is sealed here, another is at work (409), or the store or the audit trail cannot be used.
pub(super) async fn reseal(desk: &Desk, caller: &Caller, asked: Asked) -> Result<Resealed, Problem> {
    let conflict = |detail: &str| Problem::new(StatusCode::CONFLICT, detail);
    let Some(reseals) = &desk.reseals else {
        return Err(conflict("this gateway seals nothing, so there is nothing to reseal: it has no seal.keys"));
    };
    let Ok(mut last) = reseals.run.clone().try_lock_owned() else {
        return Err(conflict("a reseal is at work at this moment, and there is one at a time; try again"));
    };
    let run = match last.take() {
        Some(run) if run.goes_on(caller, &asked) => run,
        earlier => {
            if let Some(run) = earlier {
                run.end(&desk.audit, Outcome::Changed, Some("it was broken off; the rest was not looked at".into()))
                    .await;
            }
            let begun = desk.audit.begin(caller, "reseal", &asked.reason, None).await;
            Run { entry: begun.map_err(|why| Problem::unwritable(&why))?, sum: Resealed::default() }
        }
    };
    // To its end, whatever becomes of the one who asked.
    let work = tokio::spawn(run.some(last, reseals.sealed.clone(), desk.audit.clone(), asked));
    match timeout(PATIENCE, work).await {
        Ok(Ok((done, None))) => Ok(done),
        Ok(Ok((done, Some(why)))) => Err(Problem::unavailable(why).with(&done)),
        _ => Err(Problem::unavailable("it did not answer in time; ask again with the same cursor")),
    }
}

impl Run {
    fn goes_on(&self, caller: &Caller, asked: &Asked) -> bool {
        let here = self.sum.next.as_deref().and_then(Address::from_hex);
        let same = self.entry.by == caller.name && self.entry.reason == asked.reason;
        same && here.is_some() && here == asked.from
    }

    /// Does it, and keeps the run for the next request if it is not at its end.
    async fn some(
        mut self, mut kept: OwnedMutexGuard<Option<Self>>, sealed: Arc<Sealed>, audit: Audit, asked: Asked,
    ) -> (Resealed, Option<String>) {
        let mut done = Resealed::default();
        let failed = done.some(&sealed, asked.from, asked.at_most, LASTS).await.err().map(|error| error.to_string());
        self.sum.add(done.clone());
        match &failed {
            Some(why) => self.end(&audit, Outcome::Failed, Some(why.clone())).await,
            None if done.next.is_none() => self.end(&audit, Outcome::Changed, None).await,
            None => {
                self.entry.resealed = Some((&self.sum).into());
                audit.remember(&self.entry);
                *kept = Some(self);
            }
        }
        (done, failed)
    }

    async fn end(mut self, audit: &Audit, outcome: Outcome, why: Option<String>) {
        self.entry.resealed = Some((&self.sum).into());
        (self.entry.outcome, self.entry.why) = (outcome, why);
        audit.close(&self.entry).await;
    }
}
