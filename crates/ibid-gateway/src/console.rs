//! The console: the operators' web pages at `/` on the admin port.
//!
//! Templates render the pages, which work without scripts; scripts refresh parts of a page and draw charts. Invariants:
//! a page shows nothing that the admin API would not show to the same caller, and changes go through the same
//! [`admin::records::change`](crate::admin::records::change). The binary contains the static files; browsers load nothing
//! from other hosts.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use axum::{
    Router,
    handler::Handler,
    middleware::from_fn_with_state,
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use ibid::store::{Address, Fence};

pub(crate) use self::overview::Attention;
use self::{
    change_form::{ChangeFormPage, ConfirmPage},
    form::Form,
    overview::OverviewPage,
    page::{Badge, PAGE_HEADERS, RecordVisit, StaffVisit, Visit, html_response, see_other},
    read_only_pages::{AUDIT_PAGE_SIZE, AuditPage, PoliciesPage, ShadowPage, StorePage},
    recent::RecentPage,
    record::{RecordPage, RefusalRow},
    record_list::{MAX_SORTED_ROWS_SHOWN, OutcomeUnknownPage, RECORDS_PAGE_SIZE, RecordListPage, RecordOrder},
};
use crate::{
    admin::{
        self, AdminProblem, AdminState,
        auth::{AuthMethod, ForbiddenReason},
        input::validate_reason,
        records,
    },
    metrics::ChartWindow,
    records::{ChangeAction, ChangeRequest, ChangeVerb},
};

mod bulk;
mod change_form;
mod form;
mod login;
mod overview;
mod page;
mod read_only_pages;
mod recent;
mod record;
mod record_list;

/// What the form of a resolution has at first.
const FIRST_ANSWER: &str = "headers=Content-Type:+application/json%0A";
/// Maximum number of audit entries, and of refusals, beside one record.
const MAX_RELATED_ROWS: usize = 20;

pub(crate) fn routes() -> Router<Arc<AdminState>> {
    let mut pages = Router::new()
        .route("/", page(show_overview))
        .route("/series", page(show_series))
        .route("/recent", page(show_recent))
        .route("/badge", page(show_badge))
        .route("/records", page(list_records))
        .route("/records/{address}", page(show_record))
        .route("/records/{address}/reveal", with_methods(post(reveal_key), "POST"))
        .route("/unknown", with_methods(get(show_unknown).post(bulk::change_records), "GET, POST"))
        .route("/policies", page(show_policies))
        .route("/shadow", page(show_shadow))
        .route("/store", page(show_store))
        .route("/audit", page(show_audit))
        .route("/login", with_methods(get(login::show_form).post(login::log_in), "GET, POST"))
        .route("/logout", with_methods(post(log_out), "POST"));
    for verb in ChangeVerb::ALL {
        let path = format!("/records/{{address}}/{}", verb.name());
        pages = pages.route(&path, with_methods(get(change_record).post(change_record), "GET, POST"));
    }
    let assets = get(async |uri: Uri, headers: HeaderMap| {
        let name = uri.path().trim_start_matches("/assets/");
        serve_asset(name, &headers).unwrap_or_else(admin::not_found)
    });
    pages
        .route("/assets/{name}", with_methods(assets, "GET"))
        .layer(from_fn_with_state(&PAGE_HEADERS[..], admin::set_headers))
}

fn page<T: 'static>(handler: impl Handler<T, Arc<AdminState>>) -> MethodRouter<Arc<AdminState>> {
    with_methods(get(handler), "GET")
}

fn with_methods(route: MethodRouter<Arc<AdminState>>, allowed: &'static str) -> MethodRouter<Arc<AdminState>> {
    let text = format!("only {} is understood here\n", allowed.replace(", ", " or "));
    route.fallback(async move || (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, allowed)], text))
}

async fn show_overview(visit: Visit, form: Form) -> Response {
    if !visit.caller.can_see_all() {
        return see_other("/records");
    }
    let state = &visit.state;
    // One after the other: the gauges would count the key that the store probe claims.
    let health = state.store_health().await;
    let counts = state.gauges.read().await;
    let attention = state.attention.get(&**state.ibid.engine().store()).await;
    state.metrics.register_routes(&state.live.now().settings.routes);
    let window = ChartWindow::from_name(form.value("window")).unwrap_or_default();
    html_response(StatusCode::OK, &OverviewPage::new(&visit, window, health, counts, attention))
}

async fn show_series(StaffVisit(visit): StaffVisit, form: Form) -> Response {
    let window = ChartWindow::from_name(form.value("window")).unwrap_or_default();
    axum::Json(visit.state.history.chart_series(window)).into_response()
}

async fn show_recent(StaffVisit(visit): StaffVisit, form: Form) -> Response {
    html_response(StatusCode::OK, &RecentPage::new(&visit, form))
}

/// The number of unknown outcomes in the navigation bar.
async fn show_badge(StaffVisit(visit): StaffVisit) -> Response {
    visit.state.gauges.read().await;
    html_response(StatusCode::OK, &Badge { shell: visit.shell() })
}

async fn list_records(visit: Visit, form: Form) -> Response {
    if let Some(address) = Address::from_hex(form.value("key")) {
        return see_other(&format!("/records/{address}"));
    }
    let (query, cursor) = match form.to_query(&visit.caller) {
        Ok(asked) => asked,
        Err(wrong) => return html_response(StatusCode::BAD_REQUEST, &RecordListPage::with_error(&visit, form, wrong)),
    };
    let (state, caller) = (&visit.state, &visit.caller);
    let page = match RecordOrder::of(&form, state) {
        Some(order) => records::list_sorted(state, caller, query, MAX_SORTED_ROWS_SHOWN, |rows| order.sort(rows))
            .await
            .map(|sorted| RecordListPage::with_sorted(&visit, form, sorted)),
        None => records::list(state, caller, query, cursor, RECORDS_PAGE_SIZE)
            .await
            .map(|list| RecordListPage::with_results(&visit, form, list)),
    };
    match page {
        Ok(page) => html_response(StatusCode::OK, &page),
        Err(problem) => visit.problem_page(problem),
    }
}

async fn show_unknown(StaffVisit(visit): StaffVisit) -> Response {
    let state = &visit.state;
    let store = state.ibid.engine().store();
    let (lists, counts) = tokio::join!(state.attention.get(&**store), state.gauges.read());
    if let Some(why) = &lists.error {
        return visit.store_unavailable_page("/unknown", why.clone());
    }
    html_response(StatusCode::OK, &OutcomeUnknownPage::new(&visit, lists, counts.unknown, Vec::new()))
}

async fn show_record(RecordVisit(address, visit): RecordVisit, form: Form) -> Response {
    record_page(address, visit, form, None).await
}

/// Shows the record with its whole key, once.
async fn reveal_key(RecordVisit(address, visit): RecordVisit, form: Form) -> Response {
    if !visit.caller.can_change() {
        return visit.forbidden_page(ForbiddenReason::ReadOnlyRole);
    }
    if let Err(why) = visit.caller.authorize_change(&visit.headers, form.non_empty("csrf").as_deref()) {
        return visit.forbidden_page(why);
    }
    let revealed = match validate_reason(form.value("reason")) {
        Ok(reason) => records::reveal(&visit.state, &visit.caller, address, &reason).await,
        Err(why) => Err(AdminProblem::new(StatusCode::BAD_REQUEST, why)),
    };
    match revealed {
        Ok(revealed) => record_page(address, visit, form, Some(revealed.key)).await,
        Err(problem) => visit.problem_page(problem),
    }
}

async fn record_page(address: Address, visit: Visit, form: Form, revealed: Option<String>) -> Response {
    let view = match records::show(&visit.state, &visit.caller, address).await {
        Ok(view) => view,
        Err(problem) => return visit.problem_page(problem),
    };
    let (mut audit, mut refusals) = (None, Vec::new());
    if visit.caller.can_see_all() {
        // The page is useful without.
        audit = Some(visit.state.audit.entries_for(&address, MAX_RELATED_ROWS).await.unwrap_or_default());
        refusals = RefusalRow::for_record(&visit.state, address, MAX_RELATED_ROWS).await;
    }
    let mut shell = visit.shell();
    shell.notice = (form.value("done") == "resolve")
        .then_some("Resolved: every retry with this key gets this answer from now on.");
    let may_change = visit.caller.can_change();
    html_response(StatusCode::OK, &RecordPage::new(shell, view, audit, refusals, revealed, may_change))
}

async fn show_policies(StaffVisit(visit): StaffVisit) -> Response {
    let now = visit.state.live.now();
    html_response(StatusCode::OK, &PoliciesPage { shell: visit.shell(), routes: &now.settings.routes })
}

async fn show_shadow(StaffVisit(visit): StaffVisit) -> Response {
    let report = admin::stats::shadow(&visit.state);
    html_response(StatusCode::OK, &ShadowPage { shell: visit.shell(), report })
}

async fn show_store(StaffVisit(visit): StaffVisit) -> Response {
    let state = &visit.state;
    let health = state.store_health().await;
    let counts = state.gauges.read().await;
    html_response(StatusCode::OK, &StorePage::new(&visit, health, counts))
}

async fn show_audit(StaffVisit(visit): StaffVisit, form: Form) -> Response {
    let mut shell = visit.shell();
    shell.notice = match form.value("done") {
        "release" => Some("Released: the next request with this key runs."),
        "forget" => Some("Forgotten: a retry of its request runs again."),
        _ => None,
    };
    let before = form.value("before").parse().ok();
    match records::audit_page(&visit.state, before, AUDIT_PAGE_SIZE, None).await {
        Ok(page) => html_response(StatusCode::OK, &AuditPage::new(shell, &visit.state.audit, page, before)),
        Err(problem) => visit.problem_page(problem),
    }
}

/// Shows the form, then the confirmation, then applies the change.
async fn change_record(RecordVisit(address, visit): RecordVisit, verb: ChangeVerb, form: Form) -> Response {
    let is_post = visit.method == Method::POST;
    if !visit.caller.can_see_all() {
        return visit.forbidden_for_users();
    }
    if !visit.caller.can_change() {
        return visit.forbidden_page(ForbiddenReason::ReadOnlyRole);
    }
    let csrf = form.non_empty("csrf");
    if is_post && let Err(why) = visit.caller.authorize_change(&visit.headers, csrf.as_deref()) {
        return visit.forbidden_page(why);
    }
    let view = match records::show(&visit.state, &visit.caller, address).await {
        Ok(view) => view,
        Err(problem) => return visit.problem_page(problem),
    };
    let (shell, fence) = (visit.shell(), view.fence);
    let form_page = |status, form, seen, error| {
        html_response(status, &ChangeFormPage::new(shell.clone(), verb, &view, seen, form, error))
    };
    if !is_post {
        return form_page(StatusCode::OK, Form::parse(FIRST_ANSWER.as_bytes()), fence, None);
    }
    let Ok(seen) = form.value("seen").parse::<u64>() else {
        let wrong = Some("This form is incomplete. Start again.".into());
        return form_page(StatusCode::BAD_REQUEST, form, fence, wrong);
    };
    // The confirmation has the step in a hidden field, and its button to go back has another, which comes later.
    match (form.to_action(verb), form.values("step").last()) {
        (Ok(action), Some("commit")) => {
            let change = ChangeRequest { action, reason: form.value("reason").to_owned(), fence: Some(Fence(seen)) };
            apply_change(&visit, address, change).await
        }
        (Ok(action), Some("review")) => {
            html_response(StatusCode::OK, &ConfirmPage::new(shell, verb, &view, seen, form, action))
        }
        (Err(wrong), Some("commit" | "review")) => form_page(StatusCode::BAD_REQUEST, form, seen, Some(wrong)),
        // Back from the confirmation.
        _ => form_page(StatusCode::OK, form, seen, None),
    }
}

async fn apply_change(visit: &Visit, address: Address, change: ChangeRequest) -> Response {
    let verb = change.action.name();
    let stays = matches!(change.action, ChangeAction::Resolve(_));
    let changed = records::change(&visit.state, &visit.caller, address, change).await;
    visit.state.attention.invalidate().await;
    match changed {
        Ok(_) if stays => see_other(&format!("/records/{address}?done={verb}")),
        Ok(_) => see_other(&format!("/audit?done={verb}")),
        Err(problem) => visit.problem_page(problem),
    }
}

async fn log_out(visit: Visit, form: Form) -> Response {
    // A page of another origin must not end the session.
    let is_session = matches!(visit.caller.authenticated_by, AuthMethod::Session { .. });
    if is_session && !visit.caller.has_valid_csrf(form.non_empty("csrf").as_deref()) {
        return visit.forbidden_page(ForbiddenReason::MissingCsrfToken);
    }
    visit.state.auth.log_out(&visit.headers);
    login::log_out_response(visit.secure)
}

/// Name, content type and bytes.
type Asset = (&'static str, &'static str, &'static [u8]);

#[rustfmt::skip]
const ASSETS: [Asset; 6] = [
    ("console.css", "text/css; charset=utf-8", include_bytes!("../assets/console.css")),
    ("console.js", "text/javascript; charset=utf-8", include_bytes!("../assets/console.js")),
    ("htmx.js", "text/javascript; charset=utf-8", include_bytes!("../assets/vendor/htmx-2.0.11.min.js")),
    ("uplot.js", "text/javascript; charset=utf-8", include_bytes!("../assets/vendor/uplot-1.6.32.min.js")),
    ("uplot.css", "text/css; charset=utf-8", include_bytes!("../assets/vendor/uplot-1.6.32.min.css")),
    ("icon.svg", "image/svg+xml", include_bytes!("../assets/icon.svg")),
];

/// Serves a file with an ETag, so that browsers revalidate it.
fn serve_asset(name: &str, asked: &HeaderMap) -> Option<Response> {
    let (_, kind, bytes) = ASSETS.iter().find(|(known, ..)| *known == name)?;
    let tag = etag(bytes);
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::ETAG, tag.clone()),
    ];
    Some(match asked.get(header::IF_NONE_MATCH) == Some(&tag) {
        true => (StatusCode::NOT_MODIFIED, headers).into_response(),
        false => (headers, Bytes::from_static(bytes)).into_response(),
    })
}

fn etag(bytes: &[u8]) -> HeaderValue {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    HeaderValue::from_str(&format!("\"{:016x}\"", hasher.finish())).expect("hex in quotes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_the_browser_has_is_not_sent_again() {
        let first = serve_asset("console.css", &HeaderMap::new()).unwrap();
        assert_eq!(first.status(), StatusCode::OK);
        let asked = HeaderMap::from_iter([(header::IF_NONE_MATCH, first.headers()[header::ETAG].clone())]);
        assert_eq!(serve_asset("console.css", &asked).unwrap().status(), StatusCode::NOT_MODIFIED);
        assert_eq!(serve_asset("console.js", &asked).unwrap().status(), StatusCode::OK, "another file");
        assert!(serve_asset("../console.css", &asked).is_none());
    }

    #[test]
    fn our_own_files_name_no_other_place() {
        for (name, _, bytes) in ASSETS.iter().filter(|(name, ..)| name.starts_with("console.")) {
            let text = std::str::from_utf8(bytes).unwrap();
            assert!(!text.contains("//") || !text.contains("http"), "{name}");
            assert!(!text.contains("url(") && !text.contains("@import"), "{name}");
        }
    }
}
