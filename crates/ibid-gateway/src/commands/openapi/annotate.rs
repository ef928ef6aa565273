//! Finds the covered operations, and what each of them lacks.

use std::collections::HashMap;

use http::Method;
use ibid::{Policy, PolicyMode};

use super::{
    components,
    document::{DocumentError, DocumentNode, NodeKind, OpenapiDocument},
    edit::Additions,
    new_value::{NewValue, new_reference},
};
use crate::routes::RouteTable;

/// The operations that a path item may have.
const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];
/// A new `parameters` goes before these members.
const AFTER_PARAMETERS: [&str; 4] = ["requestBody", "responses", "callbacks", "deprecated"];

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct AnnotateOutcome {
    /// The whole text.
    pub(crate) text: String,
    pub(crate) operations: usize,
    pub(crate) covered: usize,
    /// Responses that do not describe their refusals and cannot be extended.
    pub(crate) undescribed: usize,
    /// Notes for the user, with their lines.
    pub(crate) notes: Vec<(usize, String)>,
}

struct CoveredOperation<'a> {
    /// The parameters of the path item.
    path_parameters: Vec<&'a DocumentNode>,
    node: &'a DocumentNode,
    policy: &'a Policy,
    /// Whether its callers have a quota.
    is_limited: bool,
}

struct Annotator<'a> {
    document: &'a OpenapiDocument,
    additions: Additions<'a>,
    /// Section, name and value of the components to add.
    components: Vec<(&'static str, String, NewValue)>,
    notes: Vec<(usize, String)>,
    undescribed: usize,
    /// By reference: whether only covered operations use a shared response.
    ours: HashMap<String, bool>,
}

/// Adds what the covered operations lack.
///
/// # Errors
/// Returns an error if it is not a supported OpenAPI document.
pub(super) fn annotate(
    document: &OpenapiDocument, routes: &RouteTable, base: Option<&str>,
) -> Result<AnnotateOutcome, DocumentError> {
    check_version(document)?;
    let mut outcome = AnnotateOutcome::default();
    let mut work = Annotator {
        document,
        additions: Additions::new(document),
        components: Vec::new(),
        notes: Vec::new(),
        undescribed: 0,
        ours: HashMap::new(),
    };
    let covered = covered_operations(document, routes, base, &mut outcome)?;
    outcome.covered = covered.len();
    for operation in &covered {
        work.add_parameters(operation)?;
        work.add_responses(operation)?;
        work.add_headers(operation, &covered)?;
        for remark in components::policy_remarks(operation.policy) {
            work.note(operation.node, remark);
        }
    }
    work.write_components()?;
    outcome.undescribed = work.undescribed;
    outcome.notes.append(&mut work.notes);
    outcome.notes.sort();
    outcome.notes.dedup();
    outcome.text = if work.additions.is_empty() { document.text.clone() } else { work.additions.apply()? };
    Ok(outcome)
}

fn check_version(document: &OpenapiDocument) -> Result<(), DocumentError> {
    let root = &document.root;
    let allowed = "3.0 and 3.1 are understood";
    if let Some((key, _)) = root.own_member("swagger") {
        return Err(document.error_at(key, format!("this is a Swagger 2.0 document; {allowed}")));
    }
    let version = document.text_member(root, "openapi").unwrap_or_default();
    match version.split('.').take(2).collect::<Vec<_>>()[..] {
        ["3", "0" | "1"] => Ok(()),
        _ if version.is_empty() => {
            Err(document.error_at(root, format!("this is no OpenAPI document: it has no \"openapi\"; {allowed}")))
        }
        _ => {
            let node = document.member(root, "openapi").unwrap_or(root);
            Err(document.error_at(node, format!("this is OpenAPI {version}; {allowed}")))
        }
    }
}

fn covered_operations<'a>(
    document: &'a OpenapiDocument, routes: &'a RouteTable, base: Option<&str>, outcome: &mut AnnotateOutcome,
) -> Result<Vec<CoveredOperation<'a>>, DocumentError> {
    let mut found = Vec::new();
    // OpenAPI 3.1 allows documents without paths.
    let Some(paths) = document.member(&document.root, "paths") else { return Ok(found) };
    let paths = document.resolve_alias(paths);
    let NodeKind::Map { entries, .. } = &paths.kind else {
        return Err(document.error_at(paths, "\"paths\" is no mapping"));
    };
    let top = document.member(&document.root, "servers");
    for (path, item) in entries {
        let Some(template) = path.scalar().filter(|path| path.starts_with('/')) else { continue };
        let item = document.resolve_alias(item);
        if document.text_member(item, "$ref").is_some() {
            outcome.notes.push((
                document.line_of(item.start),
                format!("{template} is in another place ($ref), which is not followed"),
            ));
        }
        for (name, node) in item.entries() {
            let Some(method) = name.scalar().filter(|name| METHODS.contains(name)) else { continue };
            outcome.operations += 1;
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).expect("one of the list");
            let seen = document.resolve_alias(node);
            let servers = document.member(seen, "servers").or_else(|| document.member(item, "servers")).or(top);
            let bases = base.map_or_else(|| server_paths(document, servers), |base| vec![base.to_owned()]);
            let mut named = bases.iter().filter_map(|base| routes.find(&method, &format!("{base}{template}")));
            // A route that matches under any of the servers takes precedence over [policy], which matches under all.
            let route = named.clone().find(|route| !route.is_default_policy).or_else(|| named.next());
            let Some(route) = route.filter(|route| route.policy.covers(&method)) else { continue };
            if route.policy.mode != PolicyMode::Enforce {
                outcome.notes.push((
                    document.line_of(name.start),
                    format!("{method} {template} is only observed (mode {})", route.policy.mode),
                ));
                continue;
            }
            if !matches!(node.kind, NodeKind::Map { .. }) {
                let why = format!(
                    "{method} {template} is no mapping of its own, so nothing can be added to it alone; write it out"
                );
                return Err(document.error_at(node, why));
            }
            let shared = document.member(item, "parameters").into_iter().collect();
            found.push(CoveredOperation {
                path_parameters: shared,
                node,
                policy: &route.policy,
                is_limited: route.has_quota,
            });
        }
    }
    Ok(found)
}

/// Returns the paths of the servers, such as `/v1` of `https://api.example.com/v1`. Variables have their defaults.
fn server_paths(document: &OpenapiDocument, servers: Option<&DocumentNode>) -> Vec<String> {
    let servers = servers.map(|servers| document.resolve_alias(servers).items()).unwrap_or_default();
    let base = |server: &DocumentNode| {
        let mut url = document.text_member(document.resolve_alias(server), "url")?.to_owned();
        let variables =
            document.member(document.resolve_alias(server), "variables").map(|found| document.resolve_alias(found));
        for (name, variable) in variables.map(DocumentNode::entries).unwrap_or_default() {
            let default = document.text_member(variable, "default").unwrap_or_default();
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

impl<'a> Annotator<'a> {
    fn note(&mut self, at: &DocumentNode, note: impl Into<String>) {
        self.notes.push((self.document.line_of(at.start), note.into()));
    }

    /// Returns an operation's member that is a collection, if it can be extended.
    fn own_collection(&self, node: &'a DocumentNode, name: &str) -> Result<Option<&'a DocumentNode>, DocumentError> {
        match node.own_member(name) {
            Some((_, value)) if matches!(value.kind, NodeKind::Alias(_)) => {
                let why =
                    format!("\"{name}\" is an alias, so that adding to it would change other places; write it out");
                Err(self.document.error_at(value, why))
            }
            Some((_, value)) => Ok(Some(value)),
            None => match self.document.member(node, name) {
                Some(_) => {
                    let why = format!(
                        "\"{name}\" is merged in (<<), so that adding to it would change other places; write it out"
                    );
                    Err(self.document.error_at(node, why))
                }
                None => Ok(None),
            },
        }
    }

    fn add_parameters(&mut self, operation: &CoveredOperation<'a>) -> Result<(), DocumentError> {
        let node = operation.node;
        let mut missing = Vec::new();
        for parameter in components::key_parameters(operation.policy) {
            let lists = operation.path_parameters.iter().copied().chain(self.document.member(node, "parameters"));
            let all: Vec<&DocumentNode> = lists.flat_map(|list| self.document.resolve_alias(list).items()).collect();
            let mut there = false;
            for given in all {
                there |= self.is_same_parameter(given, &parameter);
            }
            if !there {
                let name = format!("{}Parameter", to_camel_case(&parameter.name)).replace("KeyParameter", "Key");
                let name = self.intern_component("parameters", name, parameter.value);
                missing.push(new_reference(format!("#/components/parameters/{name}")));
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        match self.own_collection(node, "parameters")? {
            Some(list) if matches!(list.kind, NodeKind::Sequence { .. }) => {
                missing.into_iter().for_each(|made| self.additions.add_item(list, made));
            }
            Some(other) => return Err(self.document.error_at(other, "\"parameters\" is no list")),
            None => {
                let next = node.entries().iter().map(|(key, _)| key);
                let next = next.clone().find(|key| key.scalar().is_some_and(|name| AFTER_PARAMETERS.contains(&name)));
                self.additions.add_member_before(node, next, "parameters", NewValue::List(missing));
            }
        }
        Ok(())
    }

    /// Whether `given`, or the target of its reference, is this parameter.
    fn is_same_parameter(&mut self, given: &'a DocumentNode, wanted: &components::KeyParameter) -> bool {
        let (document, name, place) = (self.document, &wanted.name, wanted.location);
        let mut given = document.resolve_alias(given);
        if let Some(to) = document.text_member(given, "$ref") {
            match document.resolve_reference(to) {
                Some(found) => given = found,
                None => {
                    let is_it = to.to_lowercase().contains(&wanted.known_by);
                    let not = if is_it { "" } else { "not " };
                    self.note(given, format!("{to} is not in this document; it is {not}taken for {name}"));
                    return is_it;
                }
            }
        }
        // Header names are case-insensitive.
        let same = |found: &str| if place == "header" { found.eq_ignore_ascii_case(name) } else { found == name };
        document.text_member(given, "in") == Some(place) && document.text_member(given, "name").is_some_and(same)
    }

    fn add_responses(&mut self, operation: &CoveredOperation<'a>) -> Result<(), DocumentError> {
        let node = operation.node;
        let mut missing = Vec::new();
        let there = self.document.member(node, "responses");
        for (status, made) in components::refusal_responses(operation.policy, operation.is_limited) {
            let code = status.to_string();
            let (usual, schema) = components::refusal_body_schema(operation.policy.refusals);
            let body = self.intern_component("schemas", usual.to_owned(), schema);
            if let Some(given) = there.and_then(|responses| self.document.member(responses, &code)) {
                self.describe_refusals(given, &code, operation.policy.refusals.media_type(), &body)?;
                continue;
            }
            let made = with_body_reference(made, usual, &body);
            let name = self.intern_component("responses", format!("Idempotency{status}"), made);
            missing.push((code, new_reference(format!("#/components/responses/{name}"))));
        }
        if missing.is_empty() {
            return Ok(());
        }
        match self.own_collection(node, "responses")? {
            Some(map) if matches!(map.kind, NodeKind::Map { .. }) => {
                missing.into_iter().for_each(|(code, made)| self.additions.add_member(map, &code, made));
            }
            Some(other) => return Err(self.document.error_at(other, "\"responses\" is no mapping")),
            None => self.additions.add_member(node, "responses", NewValue::Map(missing)),
        }
        Ok(())
    }

    /// Describes refusals in an existing response, as an additional media type. Adds a note if that is not possible.
    fn describe_refusals(
        &mut self, given: &'a DocumentNode, code: &str, media: &str, body: &str,
    ) -> Result<(), DocumentError> {
        let document = self.document;
        let shared = document.text_member(document.resolve_alias(given), "$ref");
        let response = match shared {
            Some(to) => document.resolve_reference(to),
            None => Some(document.resolve_alias(given)),
        };
        let content = response.and_then(|response| document.member(response, "content"));
        let there = content.and_then(|content| document.member(document.resolve_alias(content), media));
        let why = match there {
            Some(there) if components::media_type_for(body).matches_node(document.resolve_alias(there)) => {
                return Ok(());
            }
            Some(_) => format!("describes {media} in its own way"),
            None if shared.is_some() => "is in another place ($ref)".into(),
            None if !matches!(given.kind, NodeKind::Map { .. }) => "is no mapping of its own".into(),
            None => {
                match self.own_collection(given, "content")? {
                    Some(map) if matches!(map.kind, NodeKind::Map { .. }) => {
                        self.additions.add_member(map, media, components::media_type_for(body));
                    }
                    Some(other) => return Err(document.error_at(other, "\"content\" is no mapping")),
                    None => {
                        let next = given.own_member("links").map(|(key, _)| key);
                        self.additions.add_nested(given, next, "content", media, components::media_type_for(body));
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

    fn add_headers(
        &mut self, operation: &CoveredOperation<'a>, covered: &[CoveredOperation<'a>],
    ) -> Result<(), DocumentError> {
        let headers = components::replay_headers(operation.policy);
        let Some(responses) = self.document.member(operation.node, "responses") else { return Ok(()) };
        for (code, response) in self.document.resolve_alias(responses).entries() {
            let success = code.scalar().is_some_and(|code| code.len() == 3 && code.starts_with('2'));
            if !success || headers.is_empty() {
                continue;
            }
            let mut target = response;
            if let Some(to) = self.document.text_member(self.document.resolve_alias(response), "$ref") {
                match self.document.resolve_reference(to) {
                    Some(found) if self.is_used_by_covered_only(to, covered) => target = found,
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
            if !matches!(target.kind, NodeKind::Map { .. }) {
                return Err(self.document.error_at(target, "the response is no mapping of its own; write it out"));
            }
            self.add_response_headers(target, &headers)?;
        }
        Ok(())
    }

    /// Whether only successes of covered operations use a shared response.
    fn is_used_by_covered_only(&mut self, to: &str, covered: &[CoveredOperation<'a>]) -> bool {
        if let Some(known) = self.ours.get(to) {
            return *known;
        }
        let ours = |operation: &CoveredOperation<'a>| {
            let responses =
                self.document.member(operation.node, "responses").map(|found| self.document.resolve_alias(found));
            let successes = responses.map(DocumentNode::entries).unwrap_or_default().iter();
            let successes = successes.filter(|(code, _)| code.scalar().is_some_and(|code| code.starts_with('2')));
            successes
                .filter(|(_, value)| self.document.text_member(self.document.resolve_alias(value), "$ref") == Some(to))
                .count()
        };
        let is_ours = self.document.root.count_references(to) == covered.iter().map(ours).sum::<usize>();
        self.ours.insert(to.to_owned(), is_ours);
        is_ours
    }

    fn add_response_headers(
        &mut self, response: &'a DocumentNode, headers: &[(String, NewValue)],
    ) -> Result<(), DocumentError> {
        let own = self.own_collection(response, "headers")?;
        let has = |name: &str| {
            let entries = own.map(DocumentNode::entries).unwrap_or_default();
            entries.iter().any(|(key, _)| key.scalar().is_some_and(|found| found.eq_ignore_ascii_case(name)))
        };
        let missing: Vec<_> = headers.iter().filter(|(name, _)| !has(name)).collect();
        for (name, header) in missing {
            let component = self.intern_component("headers", to_camel_case(name), header.clone());
            let made = new_reference(format!("#/components/headers/{component}"));
            match own {
                Some(map) if matches!(map.kind, NodeKind::Map { .. }) => self.additions.add_member(map, name, made),
                Some(other) => return Err(self.document.error_at(other, "\"headers\" is no mapping")),
                None => {
                    let next =
                        response.own_member("content").or_else(|| response.own_member("links")).map(|(key, _)| key);
                    self.additions.add_nested(response, next, "headers", name, made);
                }
            }
        }
        Ok(())
    }

    /// Returns the name of an existing or new component.
    fn intern_component(&mut self, section: &'static str, wanted: String, made: NewValue) -> String {
        let components = self.document.member(&self.document.root, "components");
        let there = components.and_then(|components| self.document.member(components, section));
        let mut name = wanted.clone();
        for number in 2.. {
            let written = there
                .and_then(|there| self.document.member(there, &name))
                .map(|found| self.document.resolve_alias(found));
            let planned = self.components.iter().find(|(other, found, _)| *other == section && *found == name);
            match (written, planned) {
                (Some(found), _) if made.matches_node(found) => return name,
                (None, Some((_, _, found))) if *found == made => return name,
                (None, None) => break,
                _ => name = format!("{wanted}_{number}"),
            }
        }
        self.components.push((section, name.clone(), made));
        name
    }

    /// Writes the new components.
    fn write_components(&mut self) -> Result<(), DocumentError> {
        let mut sections: Vec<(&'static str, Vec<(String, NewValue)>)> = Vec::new();
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
        let Some(components) = self.own_collection(root, "components")? else {
            let all = sections.into_iter().map(|(section, all)| (section.to_owned(), NewValue::Map(all)));
            self.additions.add_member(root, "components", NewValue::Map(all.collect()));
            return Ok(());
        };
        if !matches!(components.kind, NodeKind::Map { .. }) {
            return Err(self.document.error_at(components, "\"components\" is no mapping"));
        }
        for (section, all) in sections {
            match self.own_collection(components, section)? {
                Some(map) if matches!(map.kind, NodeKind::Map { .. }) => {
                    all.into_iter().for_each(|(name, made)| self.additions.add_member(map, &name, made));
                }
                Some(other) => return Err(self.document.error_at(other, format!("\"{section}\" is no mapping"))),
                None => self.additions.add_member(components, section, NewValue::Map(all)),
            }
        }
        Ok(())
    }
}

/// Replaces the name of the body's schema in a response.
fn with_body_reference(made: NewValue, usual: &str, body: &str) -> NewValue {
    match made {
        NewValue::Text(text) if text == format!("#/components/schemas/{usual}") => {
            NewValue::Text(format!("#/components/schemas/{body}"))
        }
        NewValue::List(items) => {
            NewValue::List(items.into_iter().map(|item| with_body_reference(item, usual, body)).collect())
        }
        NewValue::Map(entries) => NewValue::Map(
            entries.into_iter().map(|(key, value)| (key, with_body_reference(value, usual, body))).collect(),
        ),
        other => other,
    }
}

/// Converts `Idempotency-Key` to `IdempotencyKey`: component names allow few characters.
fn to_camel_case(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}
