//! Record search, and pages of results.

use askama::Template;
use ibid::store::Address;

use super::{
    attention::{AttentionLists, LONG_RUNNING_AFTER},
    form::Form,
    format::{format_count, to_sentence},
    page::PageShell,
    row::RecordRow,
};
use crate::{
    admin::{auth::AdminCaller, query::parse_filters},
    records::{self, RecordQuery},
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
    heading: &'static str,
    lead: String,
    action: &'static str,
    search: RecordSearch,
    error: Option<String>,
    states: [&'static str; 4],
    endpoints: Vec<String>,
    filtered: bool,
    rows: Vec<RecordRow>,
    empty: &'static str,
    empty_more: &'static str,
    paged: bool,
    shown: String,
    first: Option<String>,
    previous: Option<String>,
    next: Option<String>,
}

/// The fields of the search form.
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
        let [key, state, endpoint, tenant, user, older_than, cursor] =
            ["key", "state", "endpoint", "tenant", "user", "older_than", "cursor"]
                .map(|name| form.value(name).to_owned());
        let mut back: Vec<String> = form.values("back").map(str::to_owned).collect();
        back.drain(..back.len().saturating_sub(MAX_BACK_LINKS));
        Self { key, state, endpoint, tenant, user, older_than, cursor, back }
    }

    /// Converts the form to a query and a cursor.
    ///
    /// # Errors
    /// What is wrong with a field, as a sentence for the form.
    pub(super) fn to_query(&self, caller: &AdminCaller) -> Result<(RecordQuery, Option<Address>), String> {
        let written = [
            ("key", &self.key),
            ("state", &self.state),
            ("endpoint", &self.endpoint),
            ("tenant", &self.tenant),
            ("user", &self.user),
            ("older_than", &self.older_than),
        ];
        let of = |name: &str| {
            let value = written.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str());
            value.filter(|value| !value.is_empty())
        };
        let query = parse_filters(of).map_err(|problem| to_sentence(&problem.detail))?;
        let cursor = match self.cursor.as_str() {
            "" => None,
            hex => Some(Address::from_hex(hex).ok_or("This page of the list cannot be found; search again.")?),
        };
        let user = caller.user.clone().or(query.user);
        Ok((RecordQuery { user, ..query }, cursor))
    }

    fn is_filtered(&self) -> bool {
        let all = [&self.key, &self.state, &self.endpoint, &self.tenant, &self.user, &self.older_than];
        all.iter().any(|text| !text.is_empty())
    }

    /// Link to the page at a cursor, with the cursors of the pages before it.
    fn page_link(&self, cursor: &str, back: &[String]) -> String {
        let mut pairs = vec![
            ("key", self.key.as_str()),
            ("state", &self.state),
            ("endpoint", &self.endpoint),
            ("tenant", &self.tenant),
            ("user", &self.user),
            ("older_than", &self.older_than),
            ("cursor", cursor),
        ];
        pairs.extend(back.iter().map(|cursor| ("back", cursor.as_str())));
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
    pub(super) fn with_results(
        shell: PageShell, asked: RecordSearch, page: &records::RecordList, endpoints: Vec<String>, caller: &AdminCaller,
    ) -> Self {
        let rows: Vec<RecordRow> = page.records.iter().map(RecordRow::from_view).collect();
        let filtered = asked.is_filtered();
        let (empty, empty_more) = match filtered {
            true => (
                "Nothing matches.",
                "It was never there, was released or forgotten, or has expired. Every field must match in full.",
            ),
            false => ("Nothing is remembered yet.", "Records appear with the first request that has a key."),
        };
        let shown = match (rows.len(), &page.next) {
            (1, None) => "1 record".into(),
            (rows, None) => format!("{} records", format_count(rows as u64)),
            (rows, Some(_)) => format!("{} records, and more", format_count(rows as u64)),
        };
        let first = (!asked.cursor.is_empty()).then(|| asked.page_link("", &[]));
        let previous = asked.previous_link();
        let next = page.next.as_ref().map(|next| asked.next_link(next));
        let paged = !rows.is_empty() || first.is_some();
        Self {
            filtered,
            rows,
            empty,
            empty_more,
            paged,
            shown,
            first,
            previous,
            next,
            ..Self::empty_page(shell, asked, endpoints, caller)
        }
    }

    /// The form with an error message.
    pub(super) fn with_error(
        shell: PageShell, asked: RecordSearch, wrong: String, endpoints: Vec<String>, caller: &AdminCaller,
    ) -> Self {
        let empty = "Nothing was searched for.";
        Self { error: Some(wrong), filtered: true, empty, ..Self::empty_page(shell, asked, endpoints, caller) }
    }

    fn empty_page(shell: PageShell, search: RecordSearch, endpoints: Vec<String>, caller: &AdminCaller) -> Self {
        let lead = match &caller.user {
            Some(user) => format!("Those of {user}"),
            None => "What the store remembers, in the order of addresses".into(),
        };
        Self {
            shell,
            heading: "Records",
            lead,
            action: "/records",
            search,
            error: None,
            states: STATE_NAMES,
            endpoints,
            filtered: false,
            rows: Vec::new(),
            empty: "",
            empty_more: "",
            paged: false,
            shown: String::new(),
            first: None,
            previous: None,
            next: None,
        }
    }
}

#[derive(Template)]
#[template(path = "console/unknown.html")]
pub(super) struct OutcomeUnknownPage {
    shell: PageShell,
    lead: &'static str,
    long: String,
    unknown_count: String,
    unknown: Vec<RecordRow>,
    more_unknown: Option<String>,
    long_running: Vec<RecordRow>,
    more_long: Option<String>,
}

impl OutcomeUnknownPage {
    pub(super) fn new(shell: PageShell, lists: &AttentionLists, unknown: u64) -> Self {
        let long = ibid_tools::format::format_duration(LONG_RUNNING_AFTER);
        let all = |state, age: &str| Form::build_url("/records", &[("state", state), ("older_than", age)]);
        Self {
            shell,
            lead: "Operations that need somebody, the oldest first",
            unknown_count: if unknown == 0 { String::new() } else { format_count(unknown) },
            unknown: lists.unknown.clone(),
            more_unknown: lists.more_unknown.then(|| all("unknown", "")),
            long_running: lists.long_running.clone(),
            more_long: lists.more_long_running.then(|| all("processing", &long)),
            long,
        }
    }
}
