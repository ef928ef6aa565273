//! One change for many records with an unknown outcome: the same reason, and an audit entry for each.

use axum::response::Response;
use http::{HeaderMap, StatusCode};
use ibid::store::{Address, Fence};

use super::{
    form::Form,
    page::{StaffVisit, Visit, html_response},
    record_list::OutcomeUnknownPage,
};
use crate::{
    admin::{auth::ForbiddenReason, input::validate_reason, records},
    format::to_sentence,
    records::{ChangeAction, ChangeRequest, ResolvedAnswer},
};

/// Applies the change to every selected record whose fence is still the one that the operator saw.
pub(super) async fn change_records(StaffVisit(visit): StaffVisit, form: Form) -> Response {
    if !visit.caller.can_change() {
        return visit.forbidden_page(ForbiddenReason::ReadOnlyRole);
    }
    if let Err(why) = visit.caller.authorize_change(&visit.headers, form.non_empty("csrf").as_deref()) {
        return visit.forbidden_page(why);
    }
    let selected: Vec<(Address, Fence)> = form.values("record").filter_map(parse_record).collect();
    let reason = form.value("reason").to_owned();
    let action = match parse_action(&form, &reason, selected.is_empty()) {
        Ok(action) => action,
        Err(wrong) => {
            return page(&visit, StatusCode::BAD_REQUEST, vec![("Nothing was changed".into(), Some(wrong))]).await;
        }
    };
    let mut results = Vec::new();
    for (address, fence) in selected {
        let name = ibid::mask(&address.to_string());
        let change = ChangeRequest { action: action.clone(), reason: reason.clone(), fence: Some(fence) };
        let refused = records::change(&visit.state, &visit.caller, address, change).await.err();
        results.push((name, refused.map(|problem| problem.detail)));
    }
    page(&visit, StatusCode::OK, results).await
}

/// `ADDRESS/FENCE`, as the page writes it.
fn parse_record(text: &str) -> Option<(Address, Fence)> {
    let (address, fence) = text.split_once('/')?;
    Some((Address::from_hex(address)?, Fence(fence.parse().ok()?)))
}

fn parse_action(form: &Form, reason: &str, none_selected: bool) -> Result<ChangeAction, String> {
    if none_selected {
        return Err("Select at least one record.".into());
    }
    if reason.is_empty() {
        return Err("Give a reason: the audit trail keeps it.".into());
    }
    validate_reason(reason).map_err(|why| to_sentence(&why))?;
    match form.value("do") {
        "release" => Ok(ChangeAction::Release),
        "resolve" => {
            let status = form.value("status").parse().ok().and_then(ResolvedAnswer::parse_status);
            let status = status.ok_or("Give the status of the answer: a number from 200 to 599, such as 200.")?;
            let answer = ResolvedAnswer { status, headers: HeaderMap::new(), body: Default::default(), keep: None };
            Ok(ChangeAction::Resolve(answer))
        }
        _ => Err("Choose release or resolve.".into()),
    }
}

async fn page(visit: &Visit, status: StatusCode, results: Vec<(String, Option<String>)>) -> Response {
    let state = &visit.state;
    state.attention.invalidate().await;
    let lists = state.attention.get(&**state.ibid.engine().store()).await;
    let counts = state.gauges.read().await;
    html_response(status, &OutcomeUnknownPage::new(visit, lists, counts.unknown, results))
}
