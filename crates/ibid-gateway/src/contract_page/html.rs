//! The contract as a page: self-contained, no scripts, light or dark as the reader prefers.

use std::fmt::Write;

use ibid::{KeySource, Mode, Reason, Refusals, http::Protocol};

use super::{calls, possible, published, words};
use crate::routes::{Route, RouteTable};

/// The contract for people.
pub fn html(routes: &RouteTable) -> String {
    let mut page = String::with_capacity(32 << 10);
    page.push_str(HEAD);
    let all: Vec<&Route> = published(routes).collect();
    page.push_str("<h2 id=\"routes\">Routes</h2>\n");
    if all.is_empty() {
        page.push_str("<p class=\"lead\">No route is covered at the moment.</p>\n");
    }
    for route in &all {
        card(&mut page, route, &calls(routes, route));
    }
    page.push_str(REFUSALS);
    for reason in Reason::all() {
        refusal(&mut page, reason, &all);
    }
    page.push_str(FOOT);
    page
}

fn card(page: &mut String, route: &Route, calls: &[&str]) {
    let policy = &route.policy;
    page.push_str("<section class=\"card\">\n<h3>");
    let is_call = route.protocol == Protocol::Grpc;
    let methods = policy.methods.iter().map(http::Method::as_str);
    for method in methods.filter(|_| !is_call).chain(is_call.then_some("gRPC")) {
        add(page, format_args!("<span class=\"method\">{}</span> ", escape(method)));
    }
    add(page, format_args!("<code>{}</code>", escape(&path(route))));
    let badge = match (policy.mode, policy.key.required) {
        (Mode::Shadow, _) => "<span class=\"badge quiet\">observed, not enforced</span>",
        (_, true) => "<span class=\"badge\">key required</span>",
        (_, false) => "<span class=\"badge quiet\">key optional</span>",
    };
    add(page, format_args!("{badge}</h3>\n<dl>\n"));
    let from: Vec<String> = policy.key.from.iter().map(words::source).collect();
    row(page, "Key", &sentence(&from.join(", else ")));
    if policy.key.from.iter().any(|source| *source != KeySource::Body) {
        let form = format!("{}; at most {} characters", words::format(&policy.key.format), policy.key.max_length);
        row(page, "Form", &sentence(&form));
    }
    if let Some(signature) = &policy.signature {
        row(page, "Signed", &sentence(&words::signature(signature)));
    }
    row(page, "Whose key", &sentence(&words::scope(&policy.scope)));
    row(page, "A retry has the same", &sentence(&words::fingerprint(policy)));
    if is_call && !route.pattern.names_one() {
        let calls: Vec<&str> = calls.iter().map(|path| path.trim_start_matches('/')).collect();
        row(page, "Methods", &calls.join(", "));
    }
    row(page, "Remembered", &sentence(&words::remembered(route)));
    row(page, "Remembered for", &words::duration(policy.ttl));
    row(page, "Same key, other request", &sentence(words::mismatch(policy)));
    row(page, "Still running", &sentence(&words::concurrent(policy)));
    row(page, "Outcome unknown", &sentence(words::unknown(policy)));
    let limits = format!(
        "requests up to {}, answers up to {} in full",
        words::size(policy.max_request),
        words::size(policy.max_response)
    );
    row(page, "Sizes", &sentence(&limits));
    let replay: Vec<String> = policy
        .replay_headers
        .iter()
        .map(|(name, value)| format!("{}: {}", words::header(name), words::value(value)))
        .collect();
    if !replay.is_empty() {
        row(page, "A replay says", &replay.join(", "));
    }
    if policy.refusals != Refusals::Problem {
        row(page, "Shape of refusals", &format!("{} ({})", policy.refusals, policy.refusals.media_type()));
    }
    let refusals: Vec<Reason> =
        Reason::all().filter(|reason| possible(&route.policy, route.is_limited, *reason)).collect();
    if refusals.is_empty() {
        row(page, "Refusals", "None, as long as this route is only observed");
    } else {
        page.push_str("<dt>Refusals</dt><dd class=\"codes\">");
        for reason in refusals {
            let (name, status) = (reason.name(), words::status(route, reason));
            add(page, format_args!("<a href=\"#{name}\"><b>{status}</b> {name}</a> "));
        }
        page.push_str("</dd>\n");
    }
    page.push_str("</dl>\n</section>\n");
}

fn refusal(page: &mut String, reason: Reason, routes: &[&Route]) {
    let mut codes: Vec<String> = Vec::new();
    for route in routes.iter().filter(|route| possible(&route.policy, route.is_limited, reason)) {
        let code = words::status(route, reason);
        if !codes.contains(&code) {
            codes.push(code);
        }
    }
    let unused = codes.is_empty();
    if unused {
        codes.push(reason.status().as_u16().to_string());
    }
    let name = reason.name();
    add(page, format_args!("<section class=\"refusal{}\" id=\"{name}\">\n", if unused { " unused" } else { "" }));
    add(page, format_args!("<p class=\"code\">{}</p>\n<div>\n", codes.join(" / ")));
    add(page, format_args!("<h3><a href=\"#{name}\">{name}</a></h3>\n"));
    add(page, format_args!("<p><strong>{}.</strong> {}</p>\n", escape(reason.title()), escape(reason.help())));
    if unused {
        page.push_str("<p class=\"note\">No route here answers with it.</p>\n");
    }
    page.push_str("</div>\n</section>\n");
}

fn row(page: &mut String, term: &str, text: &str) {
    add(page, format_args!("<dt>{term}</dt><dd>{}</dd>\n", escape(text)));
}

fn add(page: &mut String, text: std::fmt::Arguments<'_>) {
    page.write_fmt(text).expect("a String takes everything");
}

fn path(route: &Route) -> String {
    match (route.protocol, route.is_policy) {
        (Protocol::Http, true) => route.title().into(),
        (Protocol::Http, false) => route.pattern.to_string(),
        (Protocol::Grpc, _) => route.pattern.to_string().trim_start_matches('/').to_owned(),
    }
}

/// With a capital letter at its start.
fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect()
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

const HEAD: &str = include_str!("head.html");

const REFUSALS: &str = "<h2 id=\"refusals\">Refusals</h2>\n\
    <p class=\"lead\">A refusal is an <code>application/problem+json</code> document (RFC 9457), unless its route \
    names another shape. Its <code>type</code> leads to the paragraph here. To a gRPC call it is an answer of trailers only, with the refusal's name in its <code>ErrorInfo</code>.</p>\n";

const FOOT: &str = "</main>\n<footer><p><em>ibid.</em> (Latin <em>ibidem</em>, &ldquo;in the same place&rdquo;) &middot; the same \
    page for programs: ask with <code>Accept: application/json</code></p></footer>\n</body>\n</html>\n";
