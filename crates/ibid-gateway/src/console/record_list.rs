//! Record search, and pages of results.

use std::sync::Arc;

use askama::Template;
use ibid::store::Address;

use super::{
    form::Form,
    overview::{AttentionLists, LONG_RUNNING_AFTER},
    page::Visit,
    page::{PageShell, filters},
};
use crate::{
    admin::{auth::AdminCaller, input::parse_filters},
    format::{format_exact_duration, to_sentence},
    records::{RecordList, RecordQuery, RecordView},
};

pub(super) const RECORDS_PAGE_SIZE: usize = 50;
/// Number of previous pages whose cursors the URL carries. From later pages, only a link to the first leads further
/// back.
const MAX_BACK_LINKS: usize = 20;
/// Stands for the first page among those cursors.
const FIRST_PAGE_CURSOR: &str = "start";
const STATE_NAMES: [&str; 4] = ["processing", "done", "failed", "unknown"];

#[derive(Template)]
#[template(path = "console/records.html")]
pub(super) struct RecordListPage {
    shell: PageShell,
    search: RecordSearch,
    error: Option<String>,
    endpoints: Vec<String>,
    rows: Vec<RecordView>,
    first: Option<String>,
    previous: Option<String>,
    next: Option<String>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct RecordSearch {
    pub(super) key: String,
    state: String,
    endpoint: String,
    tenant: String,
    user: String,
    older_than: String,
    cursor: String,
    /// Cursors of the previous pages, latest last; the first page is [`FIRST_PAGE_CURSOR`].
    back: Vec<String>,
}

impl RecordSearch {
    pub(super) fn from_form(form: &Form) -> Self {
        let value = |name| form.value(name).to_owned();
        let mut back: Vec<String> = form.values("back").map(str::to_owned).collect();
        back.drain(..back.len().saturating_sub(MAX_BACK_LINKS));
        Self {
            key: value("key"),
            state: value("state"),
            endpoint: value("endpoint"),
            tenant: value("tenant"),
            user: value("user"),
            older_than: value("older_than"),
            cursor: value("cursor"),
            back,
        }
    }

    fn filters(&self) -> [(&'static str, &str); 6] {
        [
            ("key", &self.key),
            ("state", &self.state),
            ("endpoint", &self.endpoint),
            ("tenant", &self.tenant),
            ("user", &self.user),
            ("older_than", &self.older_than),
        ]
    }

    fn is_filtered(&self) -> bool {
        self.filters().iter().any(|(_, value)| !value.is_empty())
    }

    /// Converts the form to a query and a cursor. The error is a sentence for the form.
    pub(super) fn to_query(&self, caller: &AdminCaller) -> Result<(RecordQuery, Option<Address>), String> {
        let written = self.filters();
        let of =
            |name: &str| written.iter().find(|(known, value)| *known == name && !value.is_empty()).map(|pair| pair.1);
        let query = parse_filters(of).map_err(|why| to_sentence(&why))?;
        let cursor = match self.cursor.as_str() {
            "" => None,
            hex => Some(Address::from_hex(hex).ok_or("This page of the list cannot be found; search again.")?),
        };
        let user = caller.user.clone().or(query.user);
        Ok((RecordQuery { user, ..query }, cursor))
    }

    /// Link to the page at a cursor, with the cursors of the pages before it.
    fn page_link(&self, cursor: &str, back: &[String]) -> String {
        let back = back.iter().map(|cursor| ("back", cursor.as_str()));
        let pairs: Vec<_> = self.filters().into_iter().chain([("cursor", cursor)]).chain(back).collect();
        Form::build_url("/records", &pairs)
    }

    /// Link to the previous page; `None` on the first page, and where its cursor was dropped.
    fn previous_link(&self) -> Option<String> {
        match &self.back[..] {
            [before @ .., last] if last == FIRST_PAGE_CURSOR => Some(self.page_link("", before)),
            [before @ .., last] => Some(self.page_link(last, before)),
            [] => None,
        }
    }

    /// Link to the next page, with this page added to the cursors.
    fn next_link(&self, cursor: &str) -> String {
        let here = if self.cursor.is_empty() { FIRST_PAGE_CURSOR.into() } else { self.cursor.clone() };
        let back: Vec<String> = self.back.iter().cloned().chain([here]).collect();
        self.page_link(cursor, &back[back.len().saturating_sub(MAX_BACK_LINKS)..])
    }
}

impl RecordListPage {
    pub(super) fn with_results(visit: &Visit, search: RecordSearch, list: RecordList) -> Self {
        Self {
            first: (!search.cursor.is_empty()).then(|| search.page_link("", &[])),
            previous: search.previous_link(),
            next: list.next.as_ref().map(|next| search.next_link(next)),
            rows: list.records,
            ..Self::empty_page(visit, search)
        }
    }

    pub(super) fn with_error(visit: &Visit, search: RecordSearch, wrong: String) -> Self {
        Self { error: Some(wrong), ..Self::empty_page(visit, search) }
    }

    fn empty_page(visit: &Visit, search: RecordSearch) -> Self {
        let now = visit.state.live.now();
        let endpoints = now.settings.routes.iter().map(|route| route.name.clone()).collect();
        let shell = visit.shell();
        Self { shell, search, error: None, endpoints, rows: Vec::new(), first: None, previous: None, next: None }
    }
}

#[derive(Template)]
#[template(path = "console/unknown.html")]
pub(super) struct OutcomeUnknownPage {
    shell: PageShell,
    lists: Arc<AttentionLists>,
    unknown_count: u64,
    long: String,
}

impl OutcomeUnknownPage {
    pub(super) fn new(shell: PageShell, lists: Arc<AttentionLists>, unknown_count: u64) -> Self {
        Self { shell, lists, unknown_count, long: format_exact_duration(LONG_RUNNING_AFTER) }
    }
}
