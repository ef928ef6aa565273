//! Lists, shows and changes records, within the caller's role.
//!
//! A [`Role::User`](crate::config::Role::User) sees only records with its own user tag. Other records look absent to
//! it, whether they exist or not.

use std::time::Duration;

use ibid::store::Address;
use tokio::time::timeout;

use super::{AdminProblem, AdminState, auth::AdminCaller};
use crate::records::{
    ChangeReport, ChangeRequest, RecordEntry, RecordList, RecordLookupError, RecordQuery, RecordView,
};

/// Time limit of a store call (10 s); longer than for proxied requests, because an operator can wait.
const ADMIN_STORE_TIMEOUT: Duration = Duration::from_secs(10);

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

pub async fn show(state: &AdminState, caller: &AdminCaller, address: Address) -> Result<RecordView, AdminProblem> {
    Ok(RecordView::from(&find_entry(state, caller, address).await?))
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
    let begun =
        state.audit.begin(caller, change.action.name(), &change.reason, Some(&RecordView::from(&before.info))).await;
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

async fn find_entry(state: &AdminState, caller: &AdminCaller, address: Address) -> Result<RecordEntry, AdminProblem> {
    let store = state.ibid.engine().store();
    let query = RecordQuery { address: Some(address), user: caller.user.clone(), ..RecordQuery::default() };
    with_store_timeout(query.find_one(&**store)).await
}

async fn with_store_timeout<T>(work: impl Future<Output = Result<T, RecordLookupError>>) -> Result<T, AdminProblem> {
    match timeout(ADMIN_STORE_TIMEOUT, work).await {
        Ok(found) => Ok(found?),
        Err(_) => Err(AdminProblem::store_unavailable(format!("no answer within {ADMIN_STORE_TIMEOUT:?}"))),
    }
}
