//! Records: a search, and pages of what it found.

use askama::Template;
use ibid::store::Address;

use super::{
    form::Form,
    needs::{LONG, Lists},
    page::Shell,
    row::Row,
    words::{count, sentence},
};
use crate::{
    admin::{auth::Caller, query::filters},
    config::show,
    records::{self, Query},
};

/// Rows of a page.
pub(super) const PAGE: usize = 50;
/// How many pages back are remembered, in the address of a page. Beyond them there is the way to the first.
const BACK: usize = 20;
/// Where the first page begins, in that list.
const START: &str = "start";
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
    previous: Option<String>,
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
    /// Where the pages before this one began, the latest last; the first one at [`START`].
    back: Vec<String>,
}

impl Asked {
    pub(super) fn of(form: &Form) -> Self {
        let [key, state, endpoint, tenant, user, older_than, cursor] =
            ["key", "state", "endpoint", "tenant", "user", "older_than", "cursor"]
                .map(|name| form.value(name).to_owned());
        let mut back: Vec<String> = form.values("back").map(str::to_owned).collect();
        back.drain(..back.len().saturating_sub(BACK));
        Self { key, state, endpoint, tenant, user, older_than, cursor, back }
    }

    /// What that is in the words of the store.
    ///
    /// # Errors
    /// What is wrong with it, for whoever typed it.
    pub(super) fn query(&self, caller: &Caller) -> Result<(Query, Option<Address>), String> {
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
        let query = filters(of).map_err(|problem| sentence(&problem.detail))?;
        let cursor = match self.cursor.as_str() {
            "" => None,
            hex => Some(Address::from_hex(hex).ok_or("This page of the list cannot be found; search again.")?),
        };
        let user = caller.user.clone().or(query.user);
        Ok((Query { user, ..query }, cursor))
    }

    fn is_filtered(&self) -> bool {
        let all = [&self.key, &self.state, &self.endpoint, &self.tenant, &self.user, &self.older_than];
        all.iter().any(|text| !text.is_empty())
    }

    /// The page that begins at a cursor, and those before it.
    fn link(&self, cursor: &str, back: &[String]) -> String {
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
        Form::link("/records", &pairs)
    }

    /// The page before this one. `None` on the first, and where it is not known any more.
    fn previous(&self) -> Option<String> {
        match &self.back[..] {
            [before @ .., last] if last == START => Some(self.link("", before)),
            [before @ .., last] => Some(self.link(last, before)),
            [] => None,
        }
    }

    /// The page behind this one, which knows the way back.
    fn next(&self, cursor: &str) -> String {
        let here = if self.cursor.is_empty() { START.into() } else { self.cursor.clone() };
        let back: Vec<String> = self.back.iter().cloned().chain([here]).collect();
        self.link(cursor, &back[back.len().saturating_sub(BACK)..])
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
        let first = (!asked.cursor.is_empty()).then(|| asked.link("", &[]));
        let previous = asked.previous();
        let next = page.next.as_ref().map(|next| asked.next(next));
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
            previous: None,
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
