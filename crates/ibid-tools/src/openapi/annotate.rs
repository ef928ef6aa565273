//! Finds the covered operations, and what each of them lacks.

use std::collections::HashMap;

use http::Method;
use ibid::{Policy, policy::PolicyMode};

use super::{
    CoveringRoute, FindRoute, components,
    document::{DocumentError, DocumentNode, NodeKind, OpenapiDocument},
    edit::Additions,
    new_value::{NewValue, new_reference},
};

const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];
/// A new `parameters` goes before these members.
const AFTER_PARAMETERS: [&str; 4] = ["requestBody", "responses", "callbacks", "deprecated"];

#[derive(Debug, Default, PartialEq, Eq)]
pub struct AnnotateOutcome {
    pub text: String,
    pub operations: usize,
    pub covered: usize,
    /// Responses that do not describe their refusals and cannot be extended.
    pub undescribed: usize,
    /// Notes for the user, with their lines.
    pub notes: Vec<(usize, String)>,
}

struct CoveredOperation<'a> {
    path_parameters: Option<&'a DocumentNode>,
    node: &'a DocumentNode,
    policy: &'a Policy,
    has_quota: bool,
}

struct Annotator<'a> {
    document: &'a OpenapiDocument,
    additions: Additions<'a>,
    outcome: AnnotateOutcome,
    components: Vec<(&'static str, Vec<(String, NewValue)>)>,
    /// By reference: whether only covered operations use a shared response.
    ours: HashMap<String, bool>,
}

/// Adds what the covered operations lack.
pub(super) fn annotate<'a, 'r: 'a>(
    document: &'a OpenapiDocument, find_route: FindRoute<'_, 'r>, base: Option<&str>,
) -> Result<AnnotateOutcome, DocumentError> {
    check_version(document)?;
    let (outcome, components, ours) = Default::default();
    let mut work = Annotator { document, additions: Additions::new(document), outcome, components, ours };
    let covered = work.covered_operations(find_route, base)?;
    work.outcome.covered = covered.len();
    for operation in &covered {
        work.add_parameters(operation)?;
        work.add_responses(operation)?;
        work.add_headers(operation, &covered)?;
        for remark in components::policy_remarks(operation.policy) {
            work.note(operation.node, remark);
        }
    }
    work.write_components()?;
    let mut outcome = work.outcome;
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

/// Returns the paths of the servers, such as `/v1` of `https://api.example.com/v1`. Variables have their defaults.
fn server_paths(document: &OpenapiDocument, servers: Option<&DocumentNode>) -> Vec<String> {
    let base = |server: &DocumentNode| {
        let mut url = document.text_member(server, "url")?.to_owned();
        let variables = document.member(server, "variables").map(DocumentNode::entries).unwrap_or_default();
        for (name, variable) in variables {
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
    let servers = servers.map(DocumentNode::items).unwrap_or_default();
    let found: Vec<String> = servers.iter().filter_map(base).collect();
    if found.is_empty() { vec![String::new()] } else { found }
}

impl<'a> Annotator<'a> {
    fn note(&mut self, at: &DocumentNode, note: impl Into<String>) {
        self.outcome.notes.push((self.document.line_of(at.start), note.into()));
    }

    fn covered_operations<'r: 'a>(
        &mut self, find_route: FindRoute<'_, 'r>, base: Option<&str>,
    ) -> Result<Vec<CoveredOperation<'a>>, DocumentError> {
        let document = self.document;
        let mut found = Vec::new();
        // OpenAPI 3.1 allows documents without paths.
        let Some(paths) = document.member(&document.root, "paths") else { return Ok(found) };
        if !paths.is_map() {
            return Err(document.error_at(paths, "\"paths\" is no mapping"));
        }
        let top = document.member(&document.root, "servers");
        for (path, item) in paths.entries() {
            let Some(template) = path.scalar().filter(|path| path.starts_with('/')) else { continue };
            let item = document.resolve_alias(item);
            if document.text_member(item, "$ref").is_some() {
                self.note(item, format!("{template} is in another place ($ref), which is not followed"));
            }
            for (name, node) in item.entries() {
                let Some(method) = name.scalar().filter(|name| METHODS.contains(name)) else { continue };
                self.outcome.operations += 1;
                let method = Method::from_bytes(method.to_uppercase().as_bytes()).expect("one of the list");
                let servers = document.member(node, "servers").or_else(|| document.member(item, "servers")).or(top);
                let bases = base.map_or_else(|| server_paths(document, servers), |base| vec![base.to_owned()]);
                let named = bases.iter().filter_map(|base| find_route(&method, &format!("{base}{template}")));
                // A route that matches under any of the servers takes precedence over [policy], which matches under
                // all.
                let route = named.min_by_key(|route| route.is_default_policy);
                let Some(CoveringRoute { policy, has_quota, .. }) = route.filter(|route| route.policy.covers(&method))
                else {
                    continue;
                };
                if policy.mode != PolicyMode::Enforce {
                    self.note(name, format!("{method} {template} is only observed (mode {})", policy.mode));
                    continue;
                }
                if !node.is_map() {
                    let why = format!(
                        "{method} {template} is no mapping of its own, so nothing can be added to it alone; write it out"
                    );
                    return Err(document.error_at(node, why));
                }
                let path_parameters = document.member(item, "parameters");
                found.push(CoveredOperation { path_parameters, node, policy, has_quota });
            }
        }
        Ok(found)
    }

    /// Returns a member that is a mapping, or a list, if it can be extended.
    fn own_collection(
        &self, node: &'a DocumentNode, name: &str, is_list: bool,
    ) -> Result<Option<&'a DocumentNode>, DocumentError> {
        let elsewhere = "so that adding to it would change other places; write it out";
        let (at, why) = match node.own_member(name).map(|(_, value)| value) {
            None if self.document.member(node, name).is_none() => return Ok(None),
            None => (node, format!("is merged in (<<), {elsewhere}")),
            Some(value) => match &value.kind {
                NodeKind::Sequence(_) if is_list => return Ok(Some(value)),
                NodeKind::Map(_) if !is_list => return Ok(Some(value)),
                NodeKind::Alias(_) => (value, format!("is an alias, {elsewhere}")),
                _ => (value, format!("is no {}", if is_list { "list" } else { "mapping" })),
            },
        };
        Err(self.document.error_at(at, format!("\"{name}\" {why}")))
    }

    fn own_map(&self, node: &'a DocumentNode, name: &str) -> Result<Option<&'a DocumentNode>, DocumentError> {
        self.own_collection(node, name, false)
    }

    fn add_parameters(&mut self, operation: &CoveredOperation<'a>) -> Result<(), DocumentError> {
        let node = operation.node;
        let lists = operation.path_parameters.into_iter().chain(self.document.member(node, "parameters"));
        let given: Vec<&DocumentNode> = lists.flat_map(DocumentNode::items).collect();
        let mut missing = Vec::new();
        for parameter in components::key_parameters(operation.policy) {
            // Checks all of them: each may add a note.
            if given.iter().filter(|given| self.is_same_parameter(given, &parameter)).count() == 0 {
                let name = format!("{}Parameter", to_camel_case(&parameter.name)).replace("KeyParameter", "Key");
                let name = self.intern_component("parameters", name, parameter.value);
                missing.push(new_reference(format!("#/components/parameters/{name}")));
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        match self.own_collection(node, "parameters", true)? {
            Some(list) => missing.into_iter().for_each(|made| self.additions.add_item(list, made)),
            None => {
                let mut names = node.entries().iter().map(|(key, _)| key);
                let next = names.find(|key| key.scalar().is_some_and(|name| AFTER_PARAMETERS.contains(&name)));
                self.additions.add_member_before(node, next, "parameters", NewValue::List(missing));
            }
        }
        Ok(())
    }

    /// Whether `given`, or the target of its reference, is this parameter.
    fn is_same_parameter(&mut self, given: &DocumentNode, wanted: &components::KeyParameter) -> bool {
        let (document, name, place) = (self.document, &wanted.name, wanted.location);
        let mut parameter = given;
        if let Some(to) = document.text_member(given, "$ref") {
            let Some(found) = document.resolve_reference(to) else {
                let is_it = to.to_lowercase().contains(&wanted.known_by);
                let not = if is_it { "" } else { "not " };
                self.note(
                    document.resolve_alias(given),
                    format!("{to} is not in this document; it is {not}taken for {name}"),
                );
                return is_it;
            };
            parameter = found;
        }
        // Header names are case-insensitive.
        let same = |found: &str| if place == "header" { found.eq_ignore_ascii_case(name) } else { found == name };
        document.text_member(parameter, "in") == Some(place)
            && document.text_member(parameter, "name").is_some_and(same)
    }

    fn add_responses(&mut self, operation: &CoveredOperation<'a>) -> Result<(), DocumentError> {
        let CoveredOperation { node, policy, has_quota, .. } = *operation;
        let there = self.document.member(node, "responses");
        let (usual, schema) = components::refusal_body_schema(policy.refusals);
        let body = self.intern_component("schemas", usual.to_owned(), schema);
        let mut missing = Vec::new();
        for (status, made) in components::refusal_responses(policy, has_quota, &body) {
            let code = status.to_string();
            if let Some(given) = there.and_then(|responses| self.document.written_member(responses, &code)) {
                self.describe_refusals(given, &code, policy.refusals.media_type(), &body)?;
                continue;
            }
            let name = self.intern_component("responses", format!("Idempotency{status}"), made);
            missing.push((code, new_reference(format!("#/components/responses/{name}"))));
        }
        if missing.is_empty() {
            return Ok(());
        }
        match self.own_map(node, "responses")? {
            Some(map) => missing.into_iter().for_each(|(code, made)| self.additions.add_member(map, &code, made)),
            None => self.additions.add_member(node, "responses", NewValue::Map(missing)),
        }
        Ok(())
    }

    /// Describes refusals in an existing response, as an additional media type. Adds a note if that is not possible.
    fn describe_refusals(
        &mut self, given: &'a DocumentNode, code: &str, media: &str, body: &str,
    ) -> Result<(), DocumentError> {
        let document = self.document;
        let shared = document.text_member(given, "$ref");
        let response = shared.map_or(Some(given), |to| document.resolve_reference(to));
        let content = response.and_then(|response| document.member(response, "content"));
        let described = components::media_type_for(body);
        let why = match content.and_then(|content| document.member(content, media)) {
            Some(there) if described.matches_node(there) => return Ok(()),
            Some(_) => format!("describes {media} in its own way"),
            None if shared.is_some() => "is in another place ($ref)".into(),
            None if !given.is_map() => "is no mapping of its own".into(),
            None => {
                match self.own_map(given, "content")? {
                    Some(map) => self.additions.add_member(map, media, described),
                    None => {
                        let next = given.own_member("links").map(|(key, _)| key);
                        self.additions.add_nested(given, next, "content", media, described);
                    }
                }
                return Ok(());
            }
        };
        self.outcome.undescribed += 1;
        let told =
            format!("the response {code} {why}, and is left as it is: say there that refusals are {media}, {body}");
        self.note(given, told);
        Ok(())
    }

    fn add_headers(
        &mut self, operation: &CoveredOperation<'a>, covered: &[CoveredOperation<'a>],
    ) -> Result<(), DocumentError> {
        let document = self.document;
        let headers = components::replay_headers(operation.policy);
        let responses = document.member(operation.node, "responses").map(DocumentNode::entries).unwrap_or_default();
        for (code, response) in responses {
            let success = code.scalar().is_some_and(|code| code.len() == 3 && code.starts_with('2'));
            if !success || headers.is_empty() {
                continue;
            }
            let mut target = response;
            if let Some(to) = document.text_member(response, "$ref") {
                let why = match document.resolve_reference(to) {
                    Some(found) if self.is_used_by_covered_only(to, covered) => {
                        target = found;
                        None
                    }
                    Some(_) => Some("is also the answer of operations that are not covered"),
                    None => Some("is not in this document"),
                };
                if let Some(why) = why {
                    self.note(response, format!("{to} {why}: its headers are left as they are"));
                    continue;
                }
            }
            if !target.is_map() {
                return Err(document.error_at(target, "the response is no mapping of its own; write it out"));
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
        let document = self.document;
        let responses = |operation: &CoveredOperation<'a>| {
            document.member(operation.node, "responses").map(DocumentNode::entries).unwrap_or_default()
        };
        let ours = covered.iter().flat_map(responses).filter(|(code, response)| {
            code.scalar().is_some_and(|code| code.starts_with('2'))
                && document.text_member(response, "$ref") == Some(to)
        });
        let is_ours = document.root.count_references(to) == ours.count();
        self.ours.insert(to.to_owned(), is_ours);
        is_ours
    }

    fn add_response_headers(
        &mut self, response: &'a DocumentNode, headers: &[(String, NewValue)],
    ) -> Result<(), DocumentError> {
        let own = self.own_map(response, "headers")?;
        let has = |name: &str| {
            let entries = own.map(DocumentNode::entries).unwrap_or_default();
            entries.iter().any(|(key, _)| key.scalar().is_some_and(|found| found.eq_ignore_ascii_case(name)))
        };
        for (name, header) in headers.iter().filter(|(name, _)| !has(name)) {
            let component = self.intern_component("headers", to_camel_case(name), header.clone());
            let made = new_reference(format!("#/components/headers/{component}"));
            match own {
                Some(map) => self.additions.add_member(map, name, made),
                None => {
                    let next = response.own_member("content").or_else(|| response.own_member("links"));
                    self.additions.add_nested(response, next.map(|(key, _)| key), "headers", name, made);
                }
            }
        }
        Ok(())
    }

    fn intern_component(&mut self, section: &'static str, wanted: String, made: NewValue) -> String {
        let components = self.document.member(&self.document.root, "components");
        let there = components.and_then(|components| self.document.member(components, section));
        let mut name = wanted.clone();
        for number in 2.. {
            let written = there.and_then(|there| self.document.member(there, &name));
            let planned = self.components.iter().find(|(other, _)| *other == section).map(|(_, all)| all);
            let planned = planned.and_then(|all| all.iter().find(|(found, _)| *found == name));
            match (written, planned) {
                (Some(found), _) if made.matches_node(found) => return name,
                (None, Some((_, found))) if *found == made => return name,
                (None, None) => break,
                _ => name = format!("{wanted}_{number}"),
            }
        }
        let component = (name.clone(), made);
        match self.components.iter_mut().find(|(found, _)| *found == section) {
            Some((_, all)) => all.push(component),
            None => self.components.push((section, vec![component])),
        }
        name
    }

    fn write_components(&mut self) -> Result<(), DocumentError> {
        let sections = std::mem::take(&mut self.components);
        if sections.is_empty() {
            return Ok(());
        }
        let root = &self.document.root;
        let Some(components) = self.own_map(root, "components")? else {
            let all = sections.into_iter().map(|(section, all)| (section.to_owned(), NewValue::Map(all)));
            self.additions.add_member(root, "components", NewValue::Map(all.collect()));
            return Ok(());
        };
        for (section, all) in sections {
            match self.own_map(components, section)? {
                Some(map) => all.into_iter().for_each(|(name, made)| self.additions.add_member(map, &name, made)),
                None => self.additions.add_member(components, section, NewValue::Map(all)),
            }
        }
        Ok(())
    }
}

/// Converts `Idempotency-Key` to `IdempotencyKey`: component names allow few characters.
fn to_camel_case(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}
