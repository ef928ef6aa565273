//! Which operations are covered, and what each still lacks.

use std::collections::HashMap;

use http::Method;
use ibid::{Mode, Policy};

use super::{
    edit::Additions,
    made::{Made, reference},
    parts,
    tree::{Document, Kind, Node, Wrong},
};
use crate::routes::RouteTable;

/// The operations that a path item may have.
const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];
/// What a new `parameters` is put before.
const AFTER_PARAMETERS: [&str; 4] = ["requestBody", "responses", "callbacks", "deprecated"];

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The whole text.
    pub(crate) text: String,
    pub(crate) operations: usize,
    pub(crate) covered: usize,
    /// Responses that do not describe their refusals, and cannot be added to.
    pub(crate) undescribed: usize,
    /// What somebody should know, with its line.
    pub(crate) notes: Vec<(usize, String)>,
}

struct Operation<'a> {
    /// Of the path.
    shared: Vec<&'a Node>,
    node: &'a Node,
    policy: &'a Policy,
    /// Whether its callers have a quota.
    is_limited: bool,
}

struct Work<'a> {
    document: &'a Document,
    additions: Additions<'a>,
    /// Section, name, value: what has to be in `components`.
    components: Vec<(&'static str, String, Made)>,
    notes: Vec<(usize, String)>,
    undescribed: usize,
    /// Whether shared responses are those of covered operations alone, by reference.
    ours: HashMap<String, bool>,
}

/// Adds what the covered operations lack.
///
/// # Errors
/// It is no OpenAPI document that can be understood.
pub(super) fn annotate(document: &Document, routes: &RouteTable, base: Option<&str>) -> Result<Outcome, Wrong> {
    version(document)?;
    let mut outcome = Outcome::default();
    let mut work = Work {
        document,
        additions: Additions::new(document),
        components: Vec::new(),
        notes: Vec::new(),
        undescribed: 0,
        ours: HashMap::new(),
    };
    let covered = operations(document, routes, base, &mut outcome)?;
    outcome.covered = covered.len();
    for operation in &covered {
        work.parameters(operation)?;
        work.responses(operation)?;
        work.headers(operation, &covered)?;
        for remark in parts::remarks(operation.policy) {
            work.note(operation.node, remark);
        }
    }
    work.components()?;
    outcome.undescribed = work.undescribed;
    outcome.notes.append(&mut work.notes);
    outcome.notes.sort();
    outcome.notes.dedup();
    outcome.text = if work.additions.is_empty() { document.text.clone() } else { work.additions.applied()? };
    Ok(outcome)
}

fn version(document: &Document) -> Result<(), Wrong> {
    let root = &document.root;
    let allowed = "3.0 and 3.1 are understood";
    if let Some((key, _)) = root.own("swagger") {
        return Err(document.wrong(key, format!("this is a Swagger 2.0 document; {allowed}")));
    }
    let version = document.text_of(root, "openapi").unwrap_or_default();
    match version.split('.').take(2).collect::<Vec<_>>()[..] {
        ["3", "0" | "1"] => Ok(()),
        _ if version.is_empty() => {
            Err(document.wrong(root, format!("this is no OpenAPI document: it has no \"openapi\"; {allowed}")))
        }
        _ => {
            let node = document.member(root, "openapi").unwrap_or(root);
            Err(document.wrong(node, format!("this is OpenAPI {version}; {allowed}")))
        }
    }
}

/// The covered operations.
fn operations<'a>(
    document: &'a Document, routes: &'a RouteTable, base: Option<&str>, outcome: &mut Outcome,
) -> Result<Vec<Operation<'a>>, Wrong> {
    let mut found = Vec::new();
    // OpenAPI 3.1 allows documents without paths.
    let Some(paths) = document.member(&document.root, "paths") else { return Ok(found) };
    let paths = document.seen(paths);
    let Kind::Map { entries, .. } = &paths.kind else { return Err(document.wrong(paths, "\"paths\" is no mapping")) };
    let top = document.member(&document.root, "servers");
    for (path, item) in entries {
        let Some(template) = path.scalar().filter(|path| path.starts_with('/')) else { continue };
        let item = document.seen(item);
        if document.text_of(item, "$ref").is_some() {
            outcome.notes.push((
                document.line(item.start),
                format!("{template} is in another place ($ref), which is not followed"),
            ));
        }
        for (name, node) in item.entries() {
            let Some(method) = name.scalar().filter(|name| METHODS.contains(name)) else { continue };
            outcome.operations += 1;
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).expect("one of the list");
            let seen = document.seen(node);
            let servers = document.member(seen, "servers").or_else(|| document.member(item, "servers")).or(top);
            let bases = base.map_or_else(|| bases(document, servers), |base| vec![base.to_owned()]);
            let mut named = bases.iter().filter_map(|base| routes.find(&method, &format!("{base}{template}")));
            // A route that one of the servers leads to comes before [policy], to which all of them do.
            let route = named.clone().find(|route| !route.is_policy).or_else(|| named.next());
            let Some(route) = route.filter(|route| route.policy.covers(&method)) else { continue };
            if route.policy.mode != Mode::Enforce {
                outcome.notes.push((
                    document.line(name.start),
                    format!("{method} {template} is only observed (mode {})", route.policy.mode),
                ));
                continue;
            }
            if !matches!(node.kind, Kind::Map { .. }) {
                let why = format!(
                    "{method} {template} is no mapping of its own, so nothing can be added to it alone; write it out"
                );
                return Err(document.wrong(node, why));
            }
            let shared = document.member(item, "parameters").into_iter().collect();
            found.push(Operation { shared, node, policy: &route.policy, is_limited: route.is_limited });
        }
    }
    Ok(found)
}

/// The paths of the servers, `/v1` of `https://api.example.com/v1`. Variables have their defaults.
fn bases(document: &Document, servers: Option<&Node>) -> Vec<String> {
    let servers = servers.map(|servers| document.seen(servers).items()).unwrap_or_default();
    let base = |server: &Node| {
        let mut url = document.text_of(document.seen(server), "url")?.to_owned();
        let variables = document.member(document.seen(server), "variables").map(|found| document.seen(found));
        for (name, variable) in variables.map(Node::entries).unwrap_or_default() {
            let default = document.text_of(variable, "default").unwrap_or_default();
            url = url.replace(&format!("{{{}}}", name.scalar().unwrap_or_default()), default);
        }
        let path = match url.split_once("://") {
            Some((_, rest)) => rest.find('/').map_or("", |at| &rest[at..]),
            None => &url,
        };
        let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
        Some(path.to_owned())
    };
    let found: Vec<String> = servers.iter().filter_map(base).collect();
    if found.is_empty() { vec![String::new()] } else { found }
}

impl<'a> Work<'a> {
    fn note(&mut self, at: &Node, note: impl Into<String>) {
        self.notes.push((self.document.line(at.start), note.into()));
    }

    /// The collection that a member of an operation is, if it can be added to.
    fn own(&self, node: &'a Node, name: &str) -> Result<Option<&'a Node>, Wrong> {
        match node.own(name) {
            Some((_, value)) if matches!(value.kind, Kind::Alias(_)) => {
                let why =
                    format!("\"{name}\" is an alias, so that adding to it would change other places; write it out");
                Err(self.document.wrong(value, why))
            }
            Some((_, value)) => Ok(Some(value)),
            None => match self.document.member(node, name) {
                Some(_) => {
                    let why = format!(
                        "\"{name}\" is merged in (<<), so that adding to it would change other places; write it out"
                    );
                    Err(self.document.wrong(node, why))
                }
                None => Ok(None),
            },
        }
    }

    fn parameters(&mut self, operation: &Operation<'a>) -> Result<(), Wrong> {
        let node = operation.node;
        let mut missing = Vec::new();
        for parameter in parts::parameters(operation.policy) {
            let lists = operation.shared.iter().copied().chain(self.document.member(node, "parameters"));
            let all: Vec<&Node> = lists.flat_map(|list| self.document.seen(list).items()).collect();
            let mut there = false;
            for given in all {
                there |= self.is_parameter(given, &parameter);
            }
            if !there {
                let name = format!("{}Parameter", camel(&parameter.name)).replace("KeyParameter", "Key");
                let name = self.component("parameters", name, parameter.made);
                missing.push(reference(format!("#/components/parameters/{name}")));
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        match self.own(node, "parameters")? {
            Some(list) if matches!(list.kind, Kind::List { .. }) => {
                missing.into_iter().for_each(|made| self.additions.item(list, made));
            }
            Some(other) => return Err(self.document.wrong(other, "\"parameters\" is no list")),
            None => {
                let next = node.entries().iter().map(|(key, _)| key);
                let next = next.clone().find(|key| key.scalar().is_some_and(|name| AFTER_PARAMETERS.contains(&name)));
                self.additions.member_before(node, next, "parameters", Made::List(missing));
            }
        }
        Ok(())
    }

    /// Whether it is this parameter, here or where it points to.
    fn is_parameter(&mut self, given: &'a Node, wanted: &parts::Parameter) -> bool {
        let (document, name, place) = (self.document, &wanted.name, wanted.place);
        let mut given = document.seen(given);
        if let Some(to) = document.text_of(given, "$ref") {
            match document.pointed(to) {
                Some(found) => given = found,
                None => {
                    let is_it = to.to_lowercase().contains(&wanted.known_by);
                    let not = if is_it { "" } else { "not " };
                    self.note(given, format!("{to} is not in this document; it is {not}taken for {name}"));
                    return is_it;
                }
            }
        }
        // Names of headers have no case.
        let same = |found: &str| if place == "header" { found.eq_ignore_ascii_case(name) } else { found == name };
        document.text_of(given, "in") == Some(place) && document.text_of(given, "name").is_some_and(same)
    }

    fn responses(&mut self, operation: &Operation<'a>) -> Result<(), Wrong> {
        let node = operation.node;
        let mut missing = Vec::new();
        let there = self.document.member(node, "responses");
        for (status, made) in parts::refusals(operation.policy, operation.is_limited) {
            let code = status.to_string();
            let (usual, schema) = parts::body(operation.policy.refusals);
            let body = self.component("schemas", usual.to_owned(), schema);
            if let Some(given) = there.and_then(|responses| self.document.member(responses, &code)) {
                self.refusals_in(given, &code, operation.policy.refusals.media_type(), &body)?;
                continue;
            }
            let made = pointing(made, usual, &body);
            let name = self.component("responses", format!("Idempotency{status}"), made);
            missing.push((code, reference(format!("#/components/responses/{name}"))));
        }
        if missing.is_empty() {
            return Ok(());
        }
        match self.own(node, "responses")? {
            Some(map) if matches!(map.kind, Kind::Map { .. }) => {
                missing.into_iter().for_each(|(code, made)| self.additions.member(map, &code, made));
            }
            Some(other) => return Err(self.document.wrong(other, "\"responses\" is no mapping")),
            None => self.additions.member(node, "responses", Made::Map(missing)),
        }
        Ok(())
    }

    /// Describes refusals in a response that is there already: as another media type beside what it says. Where that cannot
    /// be added, somebody is told.
    fn refusals_in(&mut self, given: &'a Node, code: &str, media: &str, body: &str) -> Result<(), Wrong> {
        let document = self.document;
        let shared = document.text_of(document.seen(given), "$ref");
        let response = match shared {
            Some(to) => document.pointed(to),
            None => Some(document.seen(given)),
        };
        let content = response.and_then(|response| document.member(response, "content"));
        let there = content.and_then(|content| document.member(document.seen(content), media));
        let why = match there {
            Some(there) if parts::described_by(body).is(document.seen(there)) => return Ok(()),
            Some(_) => format!("describes {media} in its own way"),
            None if shared.is_some() => "is in another place ($ref)".into(),
            None if !matches!(given.kind, Kind::Map { .. }) => "is no mapping of its own".into(),
            None => {
                match self.own(given, "content")? {
                    Some(map) if matches!(map.kind, Kind::Map { .. }) => {
                        self.additions.member(map, media, parts::described_by(body));
                    }
                    Some(other) => return Err(document.wrong(other, "\"content\" is no mapping")),
                    None => {
                        let next = given.own("links").map(|(key, _)| key);
                        self.additions.nested(given, next, "content", media, parts::described_by(body));
                    }
                }
                return Ok(());
            }
        };
        self.undescribed += 1;
        let told =
            format!("the response {code} {why}, and is left as it is: say there that refusals are {media}, {body}");
        self.note(given, told);
        Ok(())
    }

    fn headers(&mut self, operation: &Operation<'a>, covered: &[Operation<'a>]) -> Result<(), Wrong> {
        let headers = parts::headers(operation.policy);
        let Some(responses) = self.document.member(operation.node, "responses") else { return Ok(()) };
        for (code, response) in self.document.seen(responses).entries() {
            let success = code.scalar().is_some_and(|code| code.len() == 3 && code.starts_with('2'));
            if !success || headers.is_empty() {
                continue;
            }
            let mut target = response;
            if let Some(to) = self.document.text_of(self.document.seen(response), "$ref") {
                match self.document.pointed(to) {
                    Some(found) if self.is_ours(to, covered) => target = found,
                    Some(_) => {
                        let told = format!(
                            "{to} is also the answer of operations that are not covered: its headers are left as they are"
                        );
                        self.note(response, told);
                        continue;
                    }
                    None => {
                        self.note(response, format!("{to} is not in this document: its headers are left as they are"));
                        continue;
                    }
                }
            }
            if !matches!(target.kind, Kind::Map { .. }) {
                return Err(self.document.wrong(target, "the response is no mapping of its own; write it out"));
            }
            self.headers_of(target, &headers)?;
        }
        Ok(())
    }

    /// Whether a shared response is used by successes of covered operations only.
    fn is_ours(&mut self, to: &str, covered: &[Operation<'a>]) -> bool {
        if let Some(known) = self.ours.get(to) {
            return *known;
        }
        let ours = |operation: &Operation<'a>| {
            let responses = self.document.member(operation.node, "responses").map(|found| self.document.seen(found));
            let successes = responses.map(Node::entries).unwrap_or_default().iter();
            let successes = successes.filter(|(code, _)| code.scalar().is_some_and(|code| code.starts_with('2')));
            successes.filter(|(_, value)| self.document.text_of(self.document.seen(value), "$ref") == Some(to)).count()
        };
        let is_ours = self.document.root.references(to) == covered.iter().map(ours).sum::<usize>();
        self.ours.insert(to.to_owned(), is_ours);
        is_ours
    }

    fn headers_of(&mut self, response: &'a Node, headers: &[(String, Made)]) -> Result<(), Wrong> {
        let own = self.own(response, "headers")?;
        let has = |name: &str| {
            let entries = own.map(Node::entries).unwrap_or_default();
            entries.iter().any(|(key, _)| key.scalar().is_some_and(|found| found.eq_ignore_ascii_case(name)))
        };
        let missing: Vec<_> = headers.iter().filter(|(name, _)| !has(name)).collect();
        for (name, header) in missing {
            let component = self.component("headers", camel(name), header.clone());
            let made = reference(format!("#/components/headers/{component}"));
            match own {
                Some(map) if matches!(map.kind, Kind::Map { .. }) => self.additions.member(map, name, made),
                Some(other) => return Err(self.document.wrong(other, "\"headers\" is no mapping")),
                None => {
                    let next = response.own("content").or_else(|| response.own("links")).map(|(key, _)| key);
                    self.additions.nested(response, next, "headers", name, made);
                }
            }
        }
        Ok(())
    }

    /// The name under which a component is, or will be.
    fn component(&mut self, section: &'static str, wanted: String, made: Made) -> String {
        let components = self.document.member(&self.document.root, "components");
        let there = components.and_then(|components| self.document.member(components, section));
        let mut name = wanted.clone();
        for number in 2.. {
            let written =
                there.and_then(|there| self.document.member(there, &name)).map(|found| self.document.seen(found));
            let planned = self.components.iter().find(|(other, found, _)| *other == section && *found == name);
            match (written, planned) {
                (Some(found), _) if made.is(found) => return name,
                (None, Some((_, _, found))) if *found == made => return name,
                (None, None) => break,
                _ => name = format!("{wanted}_{number}"),
            }
        }
        self.components.push((section, name.clone(), made));
        name
    }

    /// Writes the components that are new.
    fn components(&mut self) -> Result<(), Wrong> {
        let mut sections: Vec<(&'static str, Vec<(String, Made)>)> = Vec::new();
        for (section, name, made) in std::mem::take(&mut self.components) {
            match sections.iter_mut().find(|(found, _)| *found == section) {
                Some((_, all)) => all.push((name, made)),
                None => sections.push((section, vec![(name, made)])),
            }
        }
        if sections.is_empty() {
            return Ok(());
        }
        let root = &self.document.root;
        let Some(components) = self.own(root, "components")? else {
            let all = sections.into_iter().map(|(section, all)| (section.to_owned(), Made::Map(all)));
            self.additions.member(root, "components", Made::Map(all.collect()));
            return Ok(());
        };
        if !matches!(components.kind, Kind::Map { .. }) {
            return Err(self.document.wrong(components, "\"components\" is no mapping"));
        }
        for (section, all) in sections {
            match self.own(components, section)? {
                Some(map) if matches!(map.kind, Kind::Map { .. }) => {
                    all.into_iter().for_each(|(name, made)| self.additions.member(map, &name, made));
                }
                Some(other) => return Err(self.document.wrong(other, format!("\"{section}\" is no mapping"))),
                None => self.additions.member(components, section, Made::Map(all)),
            }
        }
        Ok(())
    }
}

/// The same response, with its body described under this name instead of the usual one.
fn pointing(made: Made, usual: &str, body: &str) -> Made {
    match made {
        Made::Text(text) if text == format!("#/components/schemas/{usual}") => {
            Made::Text(format!("#/components/schemas/{body}"))
        }
        Made::List(items) => Made::List(items.into_iter().map(|item| pointing(item, usual, body)).collect()),
        Made::Map(entries) => {
            Made::Map(entries.into_iter().map(|(key, value)| (key, pointing(value, usual, body))).collect())
        }
        other => other,
    }
}

/// `IdempotencyKey` of `Idempotency-Key`: names of components have few characters.
fn camel(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}
