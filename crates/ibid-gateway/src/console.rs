//! The console: what operators see in a browser, at `/` on the admin port.
//!
//! Pages are made here, from templates, and work without scripts; with them parts of a page refresh themselves and
//! charts are drawn. Invariants: a page shows nothing that the admin API would not show to the same caller, and changes
//! go through the same [`admin::records::change`](crate::admin::records::change). Nothing is ever fetched from elsewhere.

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::Full;
use hyper::body::Incoming;
use ibid::store::{Address, Fence};

use self::{
    act::{Act, Action, Confirm, Given},
    form::Form,
    list::{Asked, PAGE, Records, Stuck},
    needs::Needs,
    others::{AuditPage, Policies, ShadowPage, StorePage, TroublePage},
    overview::{Overview, Sources},
    page::{Notice, Shell, html, see_other},
    place::{Place, only, read},
    record::{Record, Refused},
    row::Deed,
    words::sentence,
};
use crate::{
    admin::{
        Asking, Desk, Gone, Problem,
        auth::{self, Caller, Denied, Forbidden, Via},
        records,
    },
    config::Role,
    metrics::Window,
    records::{Change, View, What},
};

mod act;
mod assets;
mod form;
mod list;
mod login;
mod needs;
mod others;
mod overview;
mod page;
mod place;
mod record;
mod row;
mod words;

/// Deeds and refusals beside one record.
const BESIDE: usize = 20;

type Page = Response<Full<Bytes>>;

/// What the console keeps between requests.
#[derive(Default)]
pub(crate) struct Console {
    needs: Needs,
}

impl Console {
    /// Answers a request to a path that is not the API's. `None`: there is no such page.
    pub(crate) async fn answer(&self, desk: &Desk, request: Request<Incoming>, asking: Asking) -> Option<Page> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        if let Some(name) = path.strip_prefix("/assets/") {
            return only(&parts.method, &[Method::GET]).or_else(|| assets::answer(name, &parts.headers));
        }
        let place = Place::of(path)?;
        if let Some(refused) = only(&parts.method, place.methods()) {
            return Some(refused);
        }
        // Before anything is read of them: strangers are not to take up memory.
        let caller = match place {
            Place::LogIn => None,
            _ => match desk.auth.caller(&desk.live.now().tokens, &parts.headers, asking.client) {
                Ok(caller) => Some(caller),
                Err(denied) => return Some(stranger(&parts, denied)),
            },
        };
        let form = match read(&place, &parts, body).await {
            Ok(form) => form,
            Err(refused) => return Some(refused),
        };
        let visit = Visit { console: self, desk, parts: &parts, form, secure: asking.secure };
        Some(match caller {
            Some(caller) => visit.go(place, &caller).await,
            None => visit.log_in(asking.client),
        })
    }
}

/// One request of somebody who looks at pages.
struct Visit<'a> {
    console: &'a Console,
    desk: &'a Desk,
    parts: &'a Parts,
    /// The query of a GET, the body of a POST.
    form: Form,
    /// Whether it came over TLS.
    secure: bool,
}

impl Visit<'_> {
    async fn go(&self, place: Place, caller: &Caller) -> Page {
        if caller.role == Role::User && !place.is_for_users() {
            return match place {
                Place::Overview => see_other("/records"),
                _ => self.not_for_users(caller),
            };
        }
        match place {
            Place::Overview => self.overview(caller).await,
            Place::Series => self.series(),
            Place::Records => self.records(caller).await,
            Place::Record(address) => self.record(caller, address).await,
            Place::Act(address, action) => self.act(caller, address, action).await,
            Place::Stuck => self.stuck(caller).await,
            Place::Policies => {
                let routes = &self.desk.live.now().settings.routes;
                html(StatusCode::OK, &Policies::new(Shell::new("/policies", caller), routes))
            }
            Place::Shadow => {
                let report = crate::admin::stats::shadow(self.desk);
                html(StatusCode::OK, &ShadowPage::new(Shell::new("/shadow", caller), &report))
            }
            Place::Store => self.store(caller).await,
            Place::Audit => self.audit(caller),
            Place::LogOut => self.log_out(caller),
            Place::LogIn => unreachable!("answered before anybody is known"),
        }
    }

    async fn overview(&self, caller: &Caller) -> Page {
        let desk = self.desk;
        let window = Window::of(self.form.value("window")).unwrap_or_default();
        // One after the other: the gauges would count the key that is claimed for the first.
        let health = desk.health().await;
        let counts = desk.gauges.read().await;
        let needs = self.console.needs.read(&**desk.ibid.engine().store()).await;
        desk.metrics.show(&desk.live.now().settings.routes);
        let page = Overview::new(Sources {
            shell: Shell::new("/", caller),
            window,
            metrics: &desk.metrics,
            history: &desk.history,
            started_ms: desk.started_ms,
            counts,
            health,
            needs: &needs,
            running: desk.ibid.engine().running().count(),
        });
        html(StatusCode::OK, &page)
    }

    /// What the charts are drawn from.
    fn series(&self) -> Page {
        let window = Window::of(self.form.value("window")).unwrap_or_default();
        let mut answer = Response::new(Full::new(self.desk.history.series(window).to_string().into()));
        page::guard(answer.headers_mut());
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        answer
    }

    async fn records(&self, caller: &Caller) -> Page {
        let asked = Asked::of(&self.form);
        if let Some(address) = Address::from_hex(&asked.key) {
            return see_other(&format!("/records/{address}"));
        }
        let shell = Shell::new("/records", caller);
        let now = self.desk.live.now();
        let endpoints = || now.settings.routes.iter().map(|route| route.name.clone()).collect();
        let (query, cursor) = match asked.query(caller) {
            Ok(asked) => asked,
            Err(wrong) => {
                return html(StatusCode::BAD_REQUEST, &Records::wrong(shell, asked, wrong, endpoints(), caller));
            }
        };
        match records::list(self.desk, caller, query, cursor, PAGE).await {
            Ok(page) => html(StatusCode::OK, &Records::found(shell, asked, &page, endpoints(), caller)),
            Err(problem) => self.problem(shell, problem),
        }
    }

    async fn stuck(&self, caller: &Caller) -> Page {
        let shell = Shell::new("/stuck", caller);
        let store = self.desk.ibid.engine().store();
        let (lists, counts) = tokio::join!(self.console.needs.read(&**store), self.desk.gauges.read());
        match &lists.trouble {
            Some(why) => html(StatusCode::SERVICE_UNAVAILABLE, &TroublePage::store_gone(shell, "/stuck", why.clone())),
            None => html(StatusCode::OK, &Stuck::new(shell, &lists, counts.unknown)),
        }
    }

    async fn record(&self, caller: &Caller, address: Address) -> Page {
        let notice = match self.form.value("done") {
            "resolve" => Some("Resolved: every retry with this key gets this answer from now on."),
            _ => None,
        };
        let notice = notice.map(|text| Notice { kind: "good", text: text.into() });
        let shell = Shell::new("/records", caller).saying(notice);
        match records::show(self.desk, caller, address).await {
            Ok(view) => {
                let audit = caller.sees_all().then(|| self.deeds_of(&view));
                let refusals = if caller.sees_all() { self.refusals_of(address).await } else { Vec::new() };
                html(StatusCode::OK, &Record::new(shell, &view, audit, refusals, caller.may_change()))
            }
            Err(problem) => self.problem(shell, problem),
        }
    }

    fn deeds_of(&self, view: &View) -> Vec<Deed> {
        self.desk.audit.of(&view.address, BESIDE).iter().map(Deed::of).collect()
    }

    async fn refusals_of(&self, address: Address) -> Vec<Refused> {
        Refused::at(self.desk, address, BESIDE).await
    }

    async fn store(&self, caller: &Caller) -> Page {
        let health = self.desk.health().await;
        let counts = self.desk.gauges.read().await;
        let now = self.desk.live.now();
        let settings = &now.settings.store;
        let (promise, url) = (settings.layout().promise(), settings.url.to_string());
        let page = StorePage::new(Shell::new("/store", caller), health, counts, &self.desk.metrics, promise, url);
        html(StatusCode::OK, &page)
    }

    fn audit(&self, caller: &Caller) -> Page {
        let notice = match self.form.value("done") {
            "release" => Some("Released: the next request with this key runs."),
            "forget" => Some("Forgotten: a retry of its request runs again."),
            _ => None,
        };
        let notice = notice.map(|text| Notice { kind: "good", text: text.into() });
        let before = self.form.value("before").parse().ok();
        let shell = Shell::new("/audit", caller).saying(notice);
        html(StatusCode::OK, &AuditPage::new(shell, &self.desk.audit, before))
    }

    /// The form, the look at what it would do, and the deed.
    async fn act(&self, caller: &Caller, address: Address, action: Action) -> Page {
        let shell = Shell::new("/records", caller);
        if !caller.may_change() {
            return self.forbidden(shell, Forbidden::Role);
        }
        let is_post = self.parts.method == Method::POST;
        if is_post && let Err(why) = caller.check_change(&self.parts.headers, self.form.given("csrf").as_deref()) {
            return self.forbidden(shell, why);
        }
        let view = match records::show(self.desk, caller, address).await {
            Ok(view) => view,
            Err(problem) => return self.problem(shell, problem),
        };
        let given = Given::of(&self.form);
        if !is_post {
            return html(StatusCode::OK, &Act::new(shell, action, &view, view.fence, Given::default(), None));
        }
        let Ok(seen) = self.form.value("seen").parse::<u64>() else {
            let wrong = Some("This form was not filled in here. Begin again.".into());
            return html(StatusCode::BAD_REQUEST, &Act::new(shell, action, &view, view.fence, given, wrong));
        };
        let what = match (given.what(action), self.form.value("step")) {
            (Ok(what), "commit") => what,
            (Ok(what), "review") => {
                return html(StatusCode::OK, &Confirm::new(shell, action, &view, seen, &given, &what));
            }
            (Err(wrong), "commit" | "review") => {
                return html(StatusCode::BAD_REQUEST, &Act::new(shell, action, &view, seen, given, Some(wrong)));
            }
            // Back from the look.
            (_, _) => return html(StatusCode::OK, &Act::new(shell, action, &view, seen, given, None)),
        };
        self.commit(shell, caller, address, what, given.reason(), Fence(seen)).await
    }

    async fn commit(
        &self, shell: Shell, caller: &Caller, address: Address, what: What, reason: &str, seen: Fence,
    ) -> Page {
        let verb = what.verb();
        let is_there = matches!(what, What::Resolve(_));
        let change = Change { what, reason: reason.to_owned(), fence: Some(seen) };
        let changed = records::change(self.desk, caller, address, change).await;
        self.console.needs.forget().await;
        match changed {
            Ok(_) if is_there => see_other(&Form::link(&format!("/records/{address}"), &[("done", verb)])),
            Ok(_) => see_other(&Form::link("/audit", &[("done", verb)])),
            Err(problem) => self.problem(shell, problem),
        }
    }

    fn log_in(&self, client: std::net::IpAddr) -> Page {
        let next = self.form.value("next");
        if self.parts.method == Method::GET {
            return login::form(&self.form, !self.desk.live.now().tokens.is_empty());
        }
        if auth::from_elsewhere(&self.parts.headers) {
            return login::elsewhere(next);
        }
        let token = self.form.value("token");
        if token.is_empty() {
            return login::refused(Denied::Missing, next);
        }
        match self.desk.auth.log_in(&self.desk.live.now().tokens, token, client) {
            Ok(session) => login::welcome(&session, next, self.secure),
            Err(denied) => login::refused(denied, next),
        }
    }

    fn log_out(&self, caller: &Caller) -> Page {
        // Nobody else's page ends a session.
        if matches!(caller.via, Via::Session { .. }) && !caller.meant(self.form.given("csrf").as_deref()) {
            return self.forbidden(Shell::new("", caller), Forbidden::NotMeant);
        }
        self.desk.auth.log_out(&self.parts.headers);
        login::goodbye(self.secure)
    }

    fn not_for_users(&self, caller: &Caller) -> Page {
        let why = "Your token shows your own records, and nothing else.";
        html(StatusCode::FORBIDDEN, &TroublePage::new(Shell::new("", caller), "Not for your token", why, Vec::new()))
    }

    fn forbidden(&self, shell: Shell, why: Forbidden) -> Page {
        let (what, why, advice) = match why {
            Forbidden::Role => (
                "You may look, and not change",
                "Your token's role only sees. Nothing was changed.",
                vec!["Ask somebody with a token of the role admin."],
            ),
            Forbidden::Elsewhere => (
                "This came from another site",
                "A page of another site asked for a change in your name. Nothing was changed.",
                vec!["If you did not expect that, log out here, and look at where you came from."],
            ),
            Forbidden::NotMeant => (
                "This page is from another session",
                "It was opened before you last logged in. Nothing was changed.",
                vec!["Open the record again and repeat what you wanted to do."],
            ),
        };
        html(StatusCode::FORBIDDEN, &TroublePage::new(shell, what, why, advice))
    }

    fn problem(&self, shell: Shell, problem: Problem) -> Page {
        let Problem { status, detail, gone, .. } = problem;
        let page = match (gone, status) {
            (Some(Gone::Audit), _) => TroublePage::unwritable(shell, sentence(&detail)),
            (Some(Gone::Store), _) => {
                let here = if self.parts.method == Method::GET { here(self.parts) } else { self.record_path() };
                TroublePage::store_gone(shell, here, sentence(&detail))
            }
            (None, StatusCode::NOT_FOUND) => {
                let advice = vec![
                    "It was never there, was released or forgotten, has expired, or is not yours to see. The audit trail \
                     knows whether somebody removed it.",
                ];
                TroublePage::new(shell, "Nothing is here", "There is no record at this address.", advice)
            }
            (None, _) => {
                let advice = vec!["Look at the record as it is now, and decide again."];
                TroublePage {
                    back: "/stuck",
                    back_name: "Stuck and unknown",
                    retry: self.parts.method == Method::POST,
                    here: self.record_path().to_owned(),
                    ..TroublePage::new(shell, "Nothing was changed", sentence(&detail), advice)
                }
            }
        };
        html(status, &page)
    }

    /// Of the record that an action is about.
    fn record_path(&self) -> &str {
        let path = self.parts.uri.path();
        path.rsplit_once('/').filter(|(record, _)| record.starts_with("/records/")).map_or(path, |(record, _)| record)
    }
}

/// Somebody who is not known, or not any more.
fn stranger(parts: &Parts, denied: Denied) -> Page {
    let asked_with_token = parts.headers.contains_key(header::AUTHORIZATION);
    if asked_with_token || matches!(denied, Denied::Limited { .. }) {
        return Problem::from(denied).into_reply();
    }
    let is_part = parts.headers.contains_key("hx-request");
    // What was posted is not there any more; the page that it was posted from is.
    let here = match (parts.method == Method::POST, parts.uri.path()) {
        (true, "/logout") => "/",
        (true, path) => path,
        (false, "/series") => "/",
        (false, _) => here(parts),
    };
    login::wanted(here, denied == Denied::Wrong, is_part)
}

fn here(parts: &Parts) -> &str {
    parts.uri.path_and_query().map_or("/", |path| path.as_str())
}
