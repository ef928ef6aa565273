//! Record search, and pages of results.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc};

use askama::Template;
use ibid::store::Address;

use super::{
    form::Form,
    overview::{AttentionLists, LONG_RUNNING_AFTER},
    page::Visit,
    page::{PageShell, filters},
};
use crate::{
    admin::{
        AdminState,
        auth::AdminCaller,
        input::{MAX_REASON_CHARS, parse_filters},
        records::SortedRecords,
    },
    format::to_sentence,
    records::{AddressPattern, RecordList, RecordQuery, RecordView},
};

pub(super) const RECORDS_PAGE_SIZE: usize = 50;
pub(super) const MAX_SORTED_ROWS_SHOWN: usize = 200;
/// Number of previous pages whose cursors the URL carries. From later pages, only a link to the first leads further
/// back.
const MAX_BACK_LINKS: usize = 20;
/// From so many hex digits on, a search is for the beginning of an address, not for a key.
const MIN_ADDRESS_CHARS: usize = 40;
/// Stands for the first page among those cursors.
const FIRST_PAGE_CURSOR: &str = "start";
const STATE_NAMES: [&str; 4] = ["processing", "done", "failed", "unknown"];

/// An order other than that of addresses. All matching records are read for it, which is cheap except on Redis, which is
/// scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordOrder {
    Newest,
    Oldest,
    ExpiresSoonest,
}

impl RecordOrder {
    const ALL: [(Self, &str, &str); 3] = [
        (Self::Newest, "newest", "newest first"),
        (Self::Oldest, "oldest", "oldest first"),
        (Self::ExpiresSoonest, "expires", "expires soonest"),
    ];

    /// The order that the form asks for, if the store can.
    pub(super) fn of(form: &Form, state: &AdminState) -> Option<Self> {
        let asked = Self::ALL.into_iter().find(|(_, name, _)| *name == form.value("sort"));
        asked.filter(|_| Self::is_offered(state)).map(|(order, ..)| order)
    }

    fn is_offered(state: &AdminState) -> bool {
        matches!(state.ibid.engine().store().guarantees().store, "memory" | "embedded" | "postgres")
    }

    pub(super) fn sort(self, rows: &mut [RecordView]) {
        match self {
            Self::Newest => rows.sort_by_key(|row| row.age_ms),
            Self::Oldest => rows.sort_by_key(|row| Reverse(row.age_ms)),
            Self::ExpiresSoonest => rows.sort_by_key(|row| row.expires_in_ms),
        }
    }
}

#[derive(Template)]
#[template(path = "console/records.html")]
pub(super) struct RecordListPage {
    shell: PageShell,
    search: Form,
    error: Option<String>,
    endpoints: Vec<String>,
    /// The tenants of the rows.
    tenants: BTreeSet<String>,
    rows: Vec<RecordView>,
    can_sort: bool,
    /// Of a sorted list: how many match, and whether more may match that were not read.
    sorted: Option<(usize, bool)>,
    first: Option<String>,
    previous: Option<String>,
    next: Option<String>,
}

/// The form of a search, with its filters, the cursor of the page, and the cursors of the previous pages (`back`, latest
/// last; the first page is [`FIRST_PAGE_CURSOR`]).
impl Form {
    fn filters(&self) -> [(&'static str, &str); 6] {
        ["key", "state", "endpoint", "tenant", "user", "older_than"].map(|name| (name, self.value(name)))
    }

    fn back(&self) -> Vec<&str> {
        let back: Vec<&str> = self.values("back").collect();
        back[back.len().saturating_sub(MAX_BACK_LINKS)..].to_vec()
    }

    fn is_filtered(&self) -> bool {
        self.filters().iter().any(|(_, value)| !value.is_empty())
    }

    /// Converts the form to a query and a cursor. The error is a sentence for the form.
    pub(super) fn to_query(&self, caller: &AdminCaller) -> Result<(RecordQuery, Option<Address>), String> {
        let written = self.filters();
        let of =
            |name: &str| written.iter().find(|(known, value)| *known == name && !value.is_empty()).map(|pair| pair.1);
        let mut query = parse_filters(of).map_err(|why| to_sentence(&why))?;
        // One field searches both. Keys never look like addresses in the log, which have a mask between hex digits.
        let key = query.key.as_deref().unwrap_or_default();
        if let Some(pattern) =
            AddressPattern::parse(key).filter(|_| key.contains('*') || key.len() >= MIN_ADDRESS_CHARS)
        {
            (query.address, query.key) = (Some(pattern), None);
        }
        let cursor = match self.value("cursor") {
            "" => None,
            hex => Some(Address::from_hex(hex).ok_or("This page of the list cannot be found; search again.")?),
        };
        let user = caller.user.clone().or(query.user);
        Ok((RecordQuery { user, ..query }, cursor))
    }

    /// Link to the page at a cursor, with the cursors of the pages before it.
    fn page_link(&self, cursor: &str, back: &[&str]) -> String {
        let back = back.iter().map(|cursor| ("back", *cursor));
        let pairs: Vec<_> = self.filters().into_iter().chain([("cursor", cursor)]).chain(back).collect();
        Self::build_url("/records", &pairs)
    }

    /// Link to the previous page; `None` on the first page, and where its cursor was dropped.
    fn previous_link(&self) -> Option<String> {
        match &self.back()[..] {
            [before @ .., FIRST_PAGE_CURSOR] => Some(self.page_link("", before)),
            [before @ .., last] => Some(self.page_link(last, before)),
            [] => None,
        }
    }

    /// Link to the next page, with this page added to the cursors.
    fn next_link(&self, cursor: &str) -> String {
        let here = Some(self.value("cursor")).filter(|here| !here.is_empty()).unwrap_or(FIRST_PAGE_CURSOR);
        let back = [self.back(), vec![here]].concat();
        self.page_link(cursor, &back[back.len().saturating_sub(MAX_BACK_LINKS)..])
    }
}

impl RecordListPage {
    pub(super) fn with_sorted(visit: &Visit, search: Form, sorted: SortedRecords) -> Self {
        let SortedRecords { records, matching, is_partial } = sorted;
        let list = RecordList { records, next: None };
        Self { sorted: Some((matching, is_partial)), ..Self::with_results(visit, search, list) }
    }

    pub(super) fn with_results(visit: &Visit, search: Form, list: RecordList) -> Self {
        Self {
            first: (!search.value("cursor").is_empty()).then(|| search.page_link("", &[])),
            previous: search.previous_link(),
            next: list.next.as_ref().map(|next| search.next_link(next)),
            tenants: list.records.iter().map(|row| row.tenant.clone()).filter(|tenant| !tenant.is_empty()).collect(),
            rows: list.records,
            ..Self::empty_page(visit, search)
        }
    }

    pub(super) fn with_error(visit: &Visit, search: Form, wrong: String) -> Self {
        Self { error: Some(wrong), ..Self::empty_page(visit, search) }
    }

    fn empty_page(visit: &Visit, search: Form) -> Self {
        let now = visit.state.live.now();
        let endpoints = now.settings.routes.iter().map(|route| route.name.clone()).collect();
        let shell = visit.shell();
        Self {
            shell,
            search,
            error: None,
            endpoints,
            tenants: BTreeSet::new(),
            rows: Vec::new(),
            can_sort: RecordOrder::is_offered(&visit.state),
            sorted: None,
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
    lists: Arc<AttentionLists>,
    unknown_count: u64,
    /// What became of the records that a bulk change named: the record's name, and why it was not changed.
    results: Vec<(String, Option<String>)>,
    can_change: bool,
    longest_reason: usize,
}

impl OutcomeUnknownPage {
    fn is_all_changed(&self) -> bool {
        self.results.iter().all(|(_, refused)| refused.is_none())
    }

    pub(super) fn new(
        visit: &Visit, lists: Arc<AttentionLists>, unknown_count: u64, results: Vec<(String, Option<String>)>,
    ) -> Self {
        let can_change = visit.caller.can_change();
        Self { shell: visit.shell(), lists, unknown_count, results, can_change, longest_reason: MAX_REASON_CHARS }
    }
}
