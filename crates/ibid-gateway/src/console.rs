//! The console: the operators' web pages at `/` on the admin port.
//!
//! Templates render the pages, which work without scripts; scripts refresh parts of a page and draw charts. Invariants:
//! a page shows nothing that the admin API would not show to the same caller, and changes go through the same
//! [`admin::records::change`](crate::admin::records::change). Browsers load nothing from other hosts.

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::Full;
use hyper::body::Incoming;
use ibid::store::{Address, Fence};

use self::{
    attention::Attention,
    change_form::{ActionForm, ChangeFormPage, ConfirmPage, RecordAction},
    form::Form,
    overview::{OverviewPage, OverviewSources},
    page::{PageNotice, PageShell, html_response, see_other},
    read_only_pages::{AuditPage, ErrorPage, PoliciesPage, ShadowPage, StorePage},
    record::{RecordPage, RefusalRow},
    record_list::{OutcomeUnknownPage, RECORDS_PAGE_SIZE, RecordListPage, RecordSearch},
    routing::{ConsolePage, read_form, refuse_method},
    row::AuditEntryRow,
};
use crate::{
    admin::{
        AdminProblem, AdminState, ClientInfo, UnavailablePart,
        auth::{self, AdminCaller, AuthError, AuthMethod, ForbiddenReason},
        records,
    },
    config::Role,
    format::{self, to_sentence},
    metrics::ChartWindow,
    records::{ChangeAction, ChangeRequest, RecordView},
};

mod assets;
mod attention;
mod change_form;
mod form;
mod login;
mod overview;
mod page;
mod read_only_pages;
mod record;
mod record_list;
mod routing;
mod row;

/// Maximum number of audit entries, and of refusals, beside one record.
const MAX_RELATED_ROWS: usize = 20;

type ConsoleResponse = Response<Full<Bytes>>;

/// State that the console keeps between requests.
#[derive(Default)]
pub(crate) struct Console {
    attention: Attention,
}

impl Console {
    /// Responds to a request outside the API; `None` if there is no such page.
    pub(crate) async fn answer(
        &self, desk: &AdminState, request: Request<Incoming>, asking: ClientInfo,
    ) -> Option<ConsoleResponse> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        if let Some(name) = path.strip_prefix("/assets/") {
            return refuse_method(&parts.method, &[Method::GET]).or_else(|| assets::serve_asset(name, &parts.headers));
        }
        let place = ConsolePage::from_path(path)?;
        if let Some(refused) = refuse_method(&parts.method, place.allowed_methods()) {
            return Some(refused);
        }
        // Authenticates before it reads the body: unknown clients must not take up memory.
        let caller = match place {
            ConsolePage::LogIn => None,
            _ => match desk.auth.caller(&desk.live.now().tokens, &parts.headers, asking.client) {
                Ok(caller) => Some(caller),
                Err(denied) => return Some(unauthenticated_response(&parts, denied)),
            },
        };
        let form = match read_form(&place, &parts, body).await {
            Ok(form) => form,
            Err(refused) => return Some(refused),
        };
        let visit = ConsoleRequest { console: self, desk, parts: &parts, form, secure: asking.secure };
        Some(match caller {
            Some(caller) => visit.dispatch(place, &caller).await,
            None => visit.log_in(asking.client),
        })
    }
}

struct ConsoleRequest<'a> {
    console: &'a Console,
    desk: &'a AdminState,
    parts: &'a Parts,
    /// The query of a GET, the body of a POST.
    form: Form,
    /// Whether the request came over TLS.
    secure: bool,
}

impl ConsoleRequest<'_> {
    async fn dispatch(&self, place: ConsolePage, caller: &AdminCaller) -> ConsoleResponse {
        if caller.role == Role::User && !place.is_for_users() {
            return match place {
                ConsolePage::Overview => see_other("/records"),
                _ => self.forbidden_for_users(caller),
            };
        }
        match place {
            ConsolePage::Overview => self.show_overview(caller).await,
            ConsolePage::ChartSeries => self.show_series(),
            ConsolePage::Records => self.list_records(caller).await,
            ConsolePage::Record(address) => self.show_record(caller, address).await,
            ConsolePage::ChangeRecord(address, action) => self.change_record(caller, address, action).await,
            ConsolePage::OutcomeUnknown => self.show_unknown(caller).await,
            ConsolePage::Policies => {
                let routes = &self.desk.live.now().settings.routes;
                html_response(StatusCode::OK, &PoliciesPage::new(PageShell::new("/policies", caller), routes))
            }
            ConsolePage::Shadow => {
                let report = crate::admin::stats::shadow(self.desk);
                html_response(StatusCode::OK, &ShadowPage::new(PageShell::new("/shadow", caller), &report))
            }
            ConsolePage::Store => self.show_store(caller).await,
            ConsolePage::Audit => self.show_audit(caller),
            ConsolePage::LogOut => self.log_out(caller),
            ConsolePage::LogIn => unreachable!("answered before anybody is known"),
        }
    }

    async fn show_overview(&self, caller: &AdminCaller) -> ConsoleResponse {
        let desk = self.desk;
        let window = ChartWindow::from_name(self.form.value("window")).unwrap_or_default();
        // One after the other: the gauges would count the key that the store probe claims.
        let health = desk.store_health().await;
        let counts = desk.gauges.read().await;
        let needs = self.console.attention.get(&**desk.ibid.engine().store()).await;
        desk.metrics.register_routes(&desk.live.now().settings.routes);
        let page = OverviewPage::new(OverviewSources {
            shell: PageShell::new("/", caller),
            window,
            metrics: &desk.metrics,
            history: &desk.history,
            started_ms: desk.started_ms,
            counts,
            health,
            attention: &needs,
            running: desk.ibid.engine().running().count(),
        });
        html_response(StatusCode::OK, &page)
    }

    /// The data of the charts, as JSON.
    fn show_series(&self) -> ConsoleResponse {
        let window = ChartWindow::from_name(self.form.value("window")).unwrap_or_default();
        let mut answer = Response::new(Full::new(self.desk.history.chart_series(window).to_string().into()));
        page::set_security_headers(answer.headers_mut());
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        answer
    }

    async fn list_records(&self, caller: &AdminCaller) -> ConsoleResponse {
        let asked = RecordSearch::from_form(&self.form);
        if let Some(address) = Address::from_hex(&asked.key) {
            return see_other(&format!("/records/{address}"));
        }
        let shell = PageShell::new("/records", caller);
        let now = self.desk.live.now();
        let endpoints = || now.settings.routes.iter().map(|route| route.name.clone()).collect();
        let (query, cursor) = match asked.to_query(caller) {
            Ok(asked) => asked,
            Err(wrong) => {
                return html_response(
                    StatusCode::BAD_REQUEST,
                    &RecordListPage::with_error(shell, asked, wrong, endpoints(), caller),
                );
            }
        };
        match records::list(self.desk, caller, query, cursor, RECORDS_PAGE_SIZE).await {
            Ok(page) => {
                html_response(StatusCode::OK, &RecordListPage::with_results(shell, asked, &page, endpoints(), caller))
            }
            Err(problem) => self.problem_page(shell, problem),
        }
    }

    async fn show_unknown(&self, caller: &AdminCaller) -> ConsoleResponse {
        let shell = PageShell::new("/unknown", caller);
        let store = self.desk.ibid.engine().store();
        let (lists, counts) = tokio::join!(self.console.attention.get(&**store), self.desk.gauges.read());
        match &lists.error {
            Some(why) => html_response(
                StatusCode::SERVICE_UNAVAILABLE,
                &ErrorPage::store_unavailable(shell, "/unknown", why.clone()),
            ),
            None => html_response(StatusCode::OK, &OutcomeUnknownPage::new(shell, &lists, counts.unknown)),
        }
    }

    async fn show_record(&self, caller: &AdminCaller, address: Address) -> ConsoleResponse {
        let notice = match self.form.value("done") {
            "resolve" => Some("Resolved: every retry with this key gets this answer from now on."),
            _ => None,
        };
        let notice = notice.map(|text| PageNotice { kind: "good", text: text.into() });
        let shell = PageShell::new("/records", caller).with_notice(notice);
        match records::show(self.desk, caller, address).await {
            Ok(view) => {
                let audit = caller.can_see_all().then(|| self.audit_rows_for(&view));
                let refusals = if caller.can_see_all() { self.refusal_rows_for(address).await } else { Vec::new() };
                html_response(StatusCode::OK, &RecordPage::new(shell, &view, audit, refusals, caller.can_change()))
            }
            Err(problem) => self.problem_page(shell, problem),
        }
    }

    fn audit_rows_for(&self, view: &RecordView) -> Vec<AuditEntryRow> {
        self.desk.audit.entries_for(&view.address, MAX_RELATED_ROWS).iter().map(AuditEntryRow::from_entry).collect()
    }

    async fn refusal_rows_for(&self, address: Address) -> Vec<RefusalRow> {
        RefusalRow::for_record(self.desk, address, MAX_RELATED_ROWS).await
    }

    async fn show_store(&self, caller: &AdminCaller) -> ConsoleResponse {
        let health = self.desk.store_health().await;
        let counts = self.desk.gauges.read().await;
        let now = self.desk.live.now();
        let settings = &now.settings.store;
        let (promise, url) = (settings.store_config().guarantee_summary(), settings.url.to_string());
        let page = StorePage::new(PageShell::new("/store", caller), health, counts, &self.desk.metrics, promise, url);
        html_response(StatusCode::OK, &page)
    }

    fn show_audit(&self, caller: &AdminCaller) -> ConsoleResponse {
        let notice = match self.form.value("done") {
            "release" => Some("Released: the next request with this key runs."),
            "forget" => Some("Forgotten: a retry of its request runs again."),
            _ => None,
        };
        let notice = notice.map(|text| PageNotice { kind: "good", text: text.into() });
        let before = self.form.value("before").parse().ok();
        let shell = PageShell::new("/audit", caller).with_notice(notice);
        html_response(StatusCode::OK, &AuditPage::new(shell, &self.desk.audit, before))
    }

    /// Shows the form, then the confirmation, then applies the change.
    async fn change_record(&self, caller: &AdminCaller, address: Address, action: RecordAction) -> ConsoleResponse {
        let shell = PageShell::new("/records", caller);
        if !caller.can_change() {
            return self.forbidden_page(shell, ForbiddenReason::ReadOnlyRole);
        }
        let is_post = self.parts.method == Method::POST;
        if is_post
            && let Err(why) = caller.authorize_change(&self.parts.headers, self.form.non_empty("csrf").as_deref())
        {
            return self.forbidden_page(shell, why);
        }
        let view = match records::show(self.desk, caller, address).await {
            Ok(view) => view,
            Err(problem) => return self.problem_page(shell, problem),
        };
        let given = ActionForm::from_form(&self.form);
        if !is_post {
            return html_response(
                StatusCode::OK,
                &ChangeFormPage::new(shell, action, &view, view.fence, ActionForm::default(), None),
            );
        }
        let Ok(seen) = self.form.value("seen").parse::<u64>() else {
            let wrong = Some("This form was not filled in here. Begin again.".into());
            return html_response(
                StatusCode::BAD_REQUEST,
                &ChangeFormPage::new(shell, action, &view, view.fence, given, wrong),
            );
        };
        let what = match (given.to_action(action), self.form.value("step")) {
            (Ok(what), "commit") => what,
            (Ok(what), "review") => {
                return html_response(StatusCode::OK, &ConfirmPage::new(shell, action, &view, seen, &given, &what));
            }
            (Err(wrong), "commit" | "review") => {
                return html_response(
                    StatusCode::BAD_REQUEST,
                    &ChangeFormPage::new(shell, action, &view, seen, given, Some(wrong)),
                );
            }
            // Back from the confirmation.
            (_, _) => {
                return html_response(StatusCode::OK, &ChangeFormPage::new(shell, action, &view, seen, given, None));
            }
        };
        self.apply_change(shell, caller, address, what, given.reason(), Fence(seen)).await
    }

    async fn apply_change(
        &self, shell: PageShell, caller: &AdminCaller, address: Address, what: ChangeAction, reason: &str, seen: Fence,
    ) -> ConsoleResponse {
        let verb = what.name();
        let is_there = matches!(what, ChangeAction::Resolve(_));
        let change = ChangeRequest { action: what, reason: reason.to_owned(), fence: Some(seen) };
        let changed = records::change(self.desk, caller, address, change).await;
        self.console.attention.invalidate().await;
        match changed {
            Ok(_) if is_there => see_other(&Form::build_url(&format!("/records/{address}"), &[("done", verb)])),
            Ok(_) => see_other(&Form::build_url("/audit", &[("done", verb)])),
            Err(problem) => self.problem_page(shell, problem),
        }
    }

    fn log_in(&self, client: std::net::IpAddr) -> ConsoleResponse {
        let next = self.form.value("next");
        if self.parts.method == Method::GET {
            return login::login_form(&self.form, !self.desk.live.now().tokens.is_empty());
        }
        if auth::is_cross_origin(&self.parts.headers) {
            return login::cross_origin_refused(next);
        }
        let token = self.form.value("token");
        if token.is_empty() {
            return login::login_refused(AuthError::MissingToken, next);
        }
        match self.desk.auth.log_in(&self.desk.live.now().tokens, token, client) {
            Ok(session) => login::log_in_response(&session, next, self.secure),
            Err(denied) => login::login_refused(denied, next),
        }
    }

    fn log_out(&self, caller: &AdminCaller) -> ConsoleResponse {
        // A page of another origin must not end the session.
        if matches!(caller.authenticated_by, AuthMethod::Session { .. })
            && !caller.has_valid_csrf(self.form.non_empty("csrf").as_deref())
        {
            return self.forbidden_page(PageShell::new("", caller), ForbiddenReason::MissingCsrfToken);
        }
        self.desk.auth.log_out(&self.parts.headers);
        login::log_out_response(self.secure)
    }

    fn forbidden_for_users(&self, caller: &AdminCaller) -> ConsoleResponse {
        let why = "Your token shows your own records, and nothing else.";
        html_response(
            StatusCode::FORBIDDEN,
            &ErrorPage::new(PageShell::new("", caller), "Not for your token", why, Vec::new()),
        )
    }

    fn forbidden_page(&self, shell: PageShell, why: ForbiddenReason) -> ConsoleResponse {
        let (what, why, advice) = match why {
            ForbiddenReason::ReadOnlyRole => (
                "You may look, and not change",
                "Your token's role only sees. Nothing was changed.",
                vec!["Ask somebody with a token of the role admin."],
            ),
            ForbiddenReason::CrossOrigin => (
                "This came from another site",
                "A page of another site asked for a change in your name. Nothing was changed.",
                vec!["If you did not expect that, log out here, and look at where you came from."],
            ),
            ForbiddenReason::MissingCsrfToken => (
                "This page is from another session",
                "It was opened before you last logged in. Nothing was changed.",
                vec!["Open the record again and repeat what you wanted to do."],
            ),
        };
        html_response(StatusCode::FORBIDDEN, &ErrorPage::new(shell, what, why, advice))
    }

    fn problem_page(&self, shell: PageShell, problem: AdminProblem) -> ConsoleResponse {
        let AdminProblem { status, detail, unavailable_part: gone, .. } = problem;
        let page = match (gone, status) {
            (Some(UnavailablePart::Audit), _) => ErrorPage::audit_unwritable(shell, to_sentence(&detail)),
            (Some(UnavailablePart::Store), _) => {
                let here = if self.parts.method == Method::GET { request_path(self.parts) } else { self.record_path() };
                ErrorPage::store_unavailable(shell, here, to_sentence(&detail))
            }
            (None, StatusCode::NOT_FOUND) => {
                let advice = vec![
                    "It was never there, was released or forgotten, has expired, or is not yours to see. The audit trail \
                     knows whether somebody removed it.",
                ];
                ErrorPage::new(shell, "Nothing is here", "There is no record at this address.", advice)
            }
            (None, _) => {
                let advice = vec!["Look at the record as it is now, and decide again."];
                ErrorPage {
                    back: "/unknown",
                    back_name: "Outcome unknown",
                    retry: self.parts.method == Method::POST,
                    retry_path: self.record_path().to_owned(),
                    ..ErrorPage::new(shell, "Nothing was changed", to_sentence(&detail), advice)
                }
            }
        };
        html_response(status, &page)
    }

    /// The path of the record that the action belongs to.
    fn record_path(&self) -> &str {
        let path = self.parts.uri.path();
        path.rsplit_once('/').filter(|(record, _)| record.starts_with("/records/")).map_or(path, |(record, _)| record)
    }
}

/// Redirects to the log-in page, or responds with a problem if the request had a token.
fn unauthenticated_response(parts: &Parts, denied: AuthError) -> ConsoleResponse {
    let asked_with_token = parts.headers.contains_key(header::AUTHORIZATION);
    if asked_with_token || matches!(denied, AuthError::RateLimited { .. }) {
        return AdminProblem::from(denied).into_response();
    }
    let is_part = parts.headers.contains_key("hx-request");
    // After the log-in, the browser cannot repeat a POST: it returns to the form's page.
    let here = match (parts.method == Method::POST, parts.uri.path()) {
        (true, "/logout") => "/",
        (true, path) => path,
        (false, "/series") => "/",
        (false, _) => request_path(parts),
    };
    login::login_required(here, denied == AuthError::InvalidToken, is_part)
}

fn request_path(parts: &Parts) -> &str {
    parts.uri.path_and_query().map_or("/", |path| path.as_str())
}
