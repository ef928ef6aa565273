//! Records: a search, and pages of what it found.

use askama::Template;
use ibid::store::Address;

use super::{
    form::Form,
    needs::{LONG, Lists},
    page::Shell,
    row::Row,
    words::count,
};
use crate::{
    admin::auth::Caller,
    config::{parse_duration, show},
    records::{self, Query},
};

/// Rows of a page.
pub(super) const PAGE: usize = 50;
const STATES: [&str; 4] = ["processing", "done", "failed", "unknown"];

#[derive(Template)]
#[template(path = "console/records.html")]
pub(super) struct Records {
    shell: Shell,
    heading: &'static str,
    lead: String,
    action: &'static str,
    asked: Asked,
    wrong: Option<String>,
    states: [&'static str; 4],
    endpoints: Vec<String>,
    filtered: bool,
    rows: Vec<Row>,
    empty: &'static str,
    empty_more: &'static str,
    paged: bool,
    shown: String,
    first: Option<String>,
    next: Option<String>,
}

/// What the search form holds.
#[derive(Debug, Clone, Default)]
pub(super) struct Asked {
    pub(super) key: String,
    state: String,
    endpoint: String,
    tenant: String,
    user: String,
    older_than: String,
    cursor: String,
}

impl Asked {
    pub(super) fn of(form: &Form) -> Self {
        let [key, state, endpoint, tenant, user, older_than, cursor] =
            ["key", "state", "endpoint", "tenant", "user", "older_than", "cursor"]
                .map(|name| form.value(name).to_owned());
        Self { key, state, endpoint, tenant, user, older_than, cursor }
    }

    /// What that is in the words of the store.
    ///
    /// # Errors
    /// What is wrong with it, for whoever typed it.
    pub(super) fn query(&self, caller: &Caller) -> Result<(Query, Option<Address>), String> {
        let given = |text: &String| (!text.is_empty()).then(|| text.clone());
        let state = match self.state.as_str() {
            "" => None,
            name => {
                let known = records::state_named(name);
                Some(known.ok_or_else(|| format!("{name:?} is no state; there are {}", STATES.join(", ")))?)
            }
        };
        let older_than = match self.older_than.as_str() {
            "" => None,
            text => {
                let read = parse_duration(text);
                Some(read.map_err(|_| format!("{text:?} is no duration; write one such as 30s, 5m or 24h"))?)
            }
        };
        let cursor = match self.cursor.as_str() {
            "" => None,
            hex => Some(Address::from_hex(hex).ok_or("this page of the list cannot be found; search again")?),
        };
        let user = caller.user.clone().or_else(|| given(&self.user));
        let (tenant, endpoint, key) = (given(&self.tenant), given(&self.endpoint), given(&self.key));
        Ok((Query { address: None, state, tenant, user, endpoint, key, older_than }, cursor))
    }

    fn is_filtered(&self) -> bool {
        let all = [&self.key, &self.state, &self.endpoint, &self.tenant, &self.user, &self.older_than];
        all.iter().any(|text| !text.is_empty())
    }

    fn link(&self, cursor: &str) -> String {
        Form::link(
            "/records",
            &[
                ("key", &self.key),
                ("state", &self.state),
                ("endpoint", &self.endpoint),
                ("tenant", &self.tenant),
                ("user", &self.user),
                ("older_than", &self.older_than),
                ("cursor", cursor),
            ],
        )
    }
}

impl Records {
    /// What was found.
    pub(super) fn found(
        shell: Shell, asked: Asked, page: &records::Page, endpoints: Vec<String>, caller: &Caller,
    ) -> Self {
        let rows: Vec<Row> = page.records.iter().map(Row::of).collect();
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
            (rows, None) => format!("{} records", count(rows as u64)),
            (rows, Some(_)) => format!("{} records, and more", count(rows as u64)),
        };
        let first = (!asked.cursor.is_empty()).then(|| asked.link(""));
        let next = page.next.as_ref().map(|next| asked.link(next));
        let paged = !rows.is_empty() || first.is_some();
        Self {
            filtered,
            rows,
            empty,
            empty_more,
            paged,
            shown,
            first,
            next,
            ..Self::bare(shell, asked, endpoints, caller)
        }
    }

    /// The form alone, and what is wrong with it.
    pub(super) fn wrong(shell: Shell, asked: Asked, wrong: String, endpoints: Vec<String>, caller: &Caller) -> Self {
        let empty = "Nothing was searched for.";
        Self { wrong: Some(wrong), filtered: true, empty, ..Self::bare(shell, asked, endpoints, caller) }
    }

    fn bare(shell: Shell, asked: Asked, endpoints: Vec<String>, caller: &Caller) -> Self {
        let lead = match &caller.user {
            Some(user) => format!("Those of {user}"),
            None => "What the store remembers, in the order of addresses".into(),
        };
        Self {
            shell,
            heading: "Records",
            lead,
            action: "/records",
            asked,
            wrong: None,
            states: STATES,
            endpoints,
            filtered: false,
            rows: Vec::new(),
            empty: "",
            empty_more: "",
            paged: false,
            shown: String::new(),
            first: None,
            next: None,
        }
    }
}

#[derive(Template)]
#[template(path = "console/stuck.html")]
pub(super) struct Stuck {
    shell: Shell,
    lead: &'static str,
    long: String,
    unknown_count: String,
    unknown: Vec<Row>,
    more_unknown: Option<String>,
    long_running: Vec<Row>,
    more_long: Option<String>,
}

impl Stuck {
    pub(super) fn new(shell: Shell, lists: &Lists, unknown: u64) -> Self {
        let long = show::duration(LONG);
        let all = |state, age: &str| Form::link("/records", &[("state", state), ("older_than", age)]);
        Self {
            shell,
            lead: "Operations that need somebody, the oldest first",
            unknown_count: if unknown == 0 { String::new() } else { count(unknown) },
            unknown: lists.unknown.clone(),
            more_unknown: lists.more_unknown.then(|| all("unknown", "")),
            long_running: lists.long.clone(),
            more_long: lists.more_long.then(|| all("processing", &long)),
            long,
        }
    }
}
