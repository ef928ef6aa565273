//! What is remembered, for those who may see it; and changes, by those who may make them.
//!
//! A [`Role::User`](crate::config::Role::User) sees the entries whose user tag is its own. All others are not there for
//! it, whether they exist or not.

use std::time::Duration;

use ibid::store::Address;
use tokio::time::timeout;

use super::{Desk, Problem, auth::Caller};
use crate::records::{Change, Changed, Entry, NotFound, Outcome, Page, Query, View, Wanted};

/// How long the store may take: people wait longer than requests do.
const PATIENCE: Duration = Duration::from_secs(10);

/// Entries that match, from a cursor on.
///
/// # Errors
/// If the store cannot be used.
pub async fn list(
    desk: &Desk, caller: &Caller, mut query: Query, from: Option<Address>, limit: usize,
) -> Result<Page, Problem> {
    if let Some(own) = &caller.user {
        if query.user.as_ref().is_some_and(|user| user != own) {
            return Ok(Page { records: Vec::new(), next: None });
        }
        query.user = Some(own.clone());
    }
    let store = desk.ibid.engine().store().clone();
    let found = patient(async { Wanted::of(query).list(&*store, from, limit).await.map_err(NotFound::from) }).await?;
    Ok(found.into())
}

/// One entry in full.
///
/// # Errors
/// If it is not there, or not for this caller, or the store cannot be used.
pub async fn show(desk: &Desk, caller: &Caller, address: Address) -> Result<View, Problem> {
    Ok(View::from(&entry(desk, caller, address).await?))
}

/// Changes an entry, and writes down that it was asked for and what became of it. Whether the caller may is asked before:
/// [`Caller::check_change`].
///
/// # Errors
/// If it is not there, is not as it must be (409, with what is there), or the store or the audit trail cannot be used.
pub async fn change(desk: &Desk, caller: &Caller, address: Address, change: Change) -> Result<Changed, Problem> {
    let before = entry(desk, caller, address).await?;
    let begun = desk.audit.begin(caller, change.what.verb(), &change.reason, Some(&View::from(&before.listed))).await;
    let begun = begun.map_err(|why| Problem::unwritable(&why))?;
    // To its end, whatever becomes of the one who asked: what was begun must be written down as it ended.
    let (store, audit) = (desk.ibid.engine().store().clone(), desk.audit.clone());
    let work = tokio::spawn(async move {
        let made = change.make(&*store, before).await;
        let told = change.told(&made);
        let failed = match &made.outcome {
            Outcome::Failed(error) => Some(error.to_string()),
            Outcome::Changed | Outcome::Refused(_) => None,
        };
        audit.ended(begun, &told, failed.clone()).await;
        (told, failed)
    });
    let Ok(Ok((told, failed))) = timeout(PATIENCE, work).await else {
        return Err(Problem::unavailable(
            "it did not answer in time; look what became of the change before you try again",
        ));
    };
    match (&told.refused, failed) {
        (None, None) => Ok(told),
        (Some(why), _) => {
            let detail = format!("nothing was changed: {why}");
            Err(Problem::new(http::StatusCode::CONFLICT, detail).with(&told))
        }
        (None, Some(why)) if told.changed.is_none() => {
            Err(Problem::unavailable(format!("{why}; look before you try again")).with(&told))
        }
        (None, Some(why)) => Err(Problem::unavailable(why).with(&told)),
    }
}

async fn entry(desk: &Desk, caller: &Caller, address: Address) -> Result<Entry, Problem> {
    let store = desk.ibid.engine().store().clone();
    let query = Query { address: Some(address), user: caller.user.clone(), ..Query::default() };
    patient(Wanted::of(query).find_one(&*store)).await
}

async fn patient<T>(work: impl Future<Output = Result<T, NotFound>>) -> Result<T, Problem> {
    match timeout(PATIENCE, work).await {
        Ok(found) => Ok(found?),
        Err(_) => Err(Problem::unavailable(format!("no answer within {PATIENCE:?}"))),
    }
}
