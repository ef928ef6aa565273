//! The contract as a self-contained HTML page, without scripts, in the reader's light or dark mode.

use std::fmt::Write;

use ibid::{KeySource, PolicyMode, RefusalFormat, RefusalReason, http::Protocol};

use ibid_tools::describe::is_possible;

use super::{describe, grpc_methods, published_routes};
use crate::routes::{RouteEntry, RouteTable};

/// The contract for people.
pub fn render_html(routes: &RouteTable) -> String {
    let mut page = String::with_capacity(32 << 10);
    page.push_str(PAGE_HEAD);
    let all: Vec<&RouteEntry> = published_routes(routes).collect();
    page.push_str("<h2 id=\"routes\">Routes</h2>\n");
    if all.is_empty() {
        page.push_str("<p class=\"lead\">No route is covered at the moment.</p>\n");
    }
    for route in &all {
        write_route(&mut page, route, &grpc_methods(routes, route));
    }
    page.push_str(REFUSALS_INTRO);
    for reason in RefusalReason::all() {
        write_refusal(&mut page, reason, &all);
    }
    page.push_str(PAGE_FOOT);
    page
}

fn write_route(page: &mut String, route: &RouteEntry, calls: &[&str]) {
    let policy = &route.policy;
    page.push_str("<section class=\"card\">\n<h3>");
    let is_call = route.protocol == Protocol::Grpc;
    let methods = policy.methods.iter().map(http::Method::as_str);
    for method in methods.filter(|_| !is_call).chain(is_call.then_some("gRPC")) {
        write_text(page, format_args!("<span class=\"method\">{}</span> ", escape(method)));
    }
    write_text(page, format_args!("<code>{}</code>", escape(&display_path(route))));
    let badge = match (policy.mode, policy.key.required) {
        (PolicyMode::Shadow, _) => "<span class=\"badge quiet\">observed, not enforced</span>",
        (_, true) => "<span class=\"badge\">key required</span>",
        (_, false) => "<span class=\"badge quiet\">key optional</span>",
    };
    write_text(page, format_args!("{badge}</h3>\n<dl>\n"));
    let from: Vec<String> = policy.key.from.iter().map(describe::key_source).collect();
    write_row(page, "Key", &capitalize(&from.join(", else ")));
    if policy.key.from.iter().any(|source| *source != KeySource::Body) {
        let form =
            format!("{}; at most {} characters", describe::key_format(&policy.key.format), policy.key.max_length);
        write_row(page, "Form", &capitalize(&form));
    }
    if let Some(signature) = &policy.signature {
        write_row(page, "Signed", &capitalize(&describe::signature(signature)));
    }
    write_row(page, "Whose key", &capitalize(&describe::scope(&policy.scope)));
    write_row(page, "A retry has the same", &capitalize(&describe::fingerprint(policy)));
    if is_call && !route.pattern.is_single_method() {
        let calls: Vec<&str> = calls.iter().map(|path| path.trim_start_matches('/')).collect();
        write_row(page, "Methods", &calls.join(", "));
    }
    write_row(page, "Remembered", &capitalize(&describe::remembered(route)));
    write_row(page, "Remembered for", &describe::duration(policy.ttl));
    write_row(page, "Same key, other request", &capitalize(describe::mismatch(policy)));
    write_row(page, "Still running", &capitalize(&describe::concurrent(policy)));
    write_row(page, "Outcome unknown", &capitalize(describe::unknown(policy)));
    let limits = format!(
        "requests up to {}, answers up to {} in full",
        describe::size(policy.max_request),
        describe::size(policy.max_response)
    );
    write_row(page, "Sizes", &capitalize(&limits));
    let replay: Vec<String> = policy
        .replay_headers
        .iter()
        .map(|(name, value)| format!("{}: {}", describe::header(name), describe::header_value(value)))
        .collect();
    if !replay.is_empty() {
        write_row(page, "A replay says", &replay.join(", "));
    }
    if policy.refusals != RefusalFormat::Problem {
        write_row(page, "Shape of refusals", &format!("{} ({})", policy.refusals, policy.refusals.media_type()));
    }
    let refusals: Vec<RefusalReason> =
        RefusalReason::all().filter(|reason| is_possible(&route.policy, route.has_quota, *reason)).collect();
    if refusals.is_empty() {
        write_row(page, "Refusals", "None, as long as this route is only observed");
    } else {
        page.push_str("<dt>Refusals</dt><dd class=\"codes\">");
        for reason in refusals {
            let (name, status) = (reason.name(), describe::refusal_status(route, reason));
            write_text(page, format_args!("<a href=\"#{name}\"><b>{status}</b> {name}</a> "));
        }
        page.push_str("</dd>\n");
    }
    page.push_str("</dl>\n</section>\n");
}

fn write_refusal(page: &mut String, reason: RefusalReason, routes: &[&RouteEntry]) {
    let mut codes: Vec<String> = Vec::new();
    for route in routes.iter().filter(|route| is_possible(&route.policy, route.has_quota, reason)) {
        let code = describe::refusal_status(route, reason);
        if !codes.contains(&code) {
            codes.push(code);
        }
    }
    let unused = codes.is_empty();
    if unused {
        codes.push(reason.status().as_u16().to_string());
    }
    let name = reason.name();
    write_text(
        page,
        format_args!("<section class=\"refusal{}\" id=\"{name}\">\n", if unused { " unused" } else { "" }),
    );
    write_text(page, format_args!("<p class=\"code\">{}</p>\n<div>\n", codes.join(" / ")));
    write_text(page, format_args!("<h3><a href=\"#{name}\">{name}</a></h3>\n"));
    write_text(page, format_args!("<p><strong>{}.</strong> {}</p>\n", escape(reason.title()), escape(reason.help())));
    if unused {
        page.push_str("<p class=\"note\">No route here answers with it.</p>\n");
    }
    page.push_str("</div>\n</section>\n");
}

fn write_row(page: &mut String, term: &str, text: &str) {
    write_text(page, format_args!("<dt>{term}</dt><dd>{}</dd>\n", escape(text)));
}

fn write_text(page: &mut String, text: std::fmt::Arguments<'_>) {
    page.write_fmt(text).expect("a String takes everything");
}

fn display_path(route: &RouteEntry) -> String {
    match (route.protocol, route.is_default_policy) {
        (Protocol::Http, true) => route.title().into(),
        (Protocol::Http, false) => route.pattern.to_string(),
        (Protocol::Grpc, _) => route.pattern.to_string().trim_start_matches('/').to_owned(),
    }
}

fn capitalize(text: &str) -> String {
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

const PAGE_HEAD: &str = include_str!("head.html");

const REFUSALS_INTRO: &str = "<h2 id=\"refusals\">Refusals</h2>\n\
    <p class=\"lead\">A refusal is an <code>application/problem+json</code> document (RFC 9457), unless its route \
    names another shape. Its <code>type</code> leads to the paragraph here. To a gRPC call it is an answer of trailers only, with the refusal's name in its <code>ErrorInfo</code>.</p>\n";

const PAGE_FOOT: &str = "</main>\n<footer><p><em>ibid.</em> (Latin <em>ibidem</em>, &ldquo;in the same place&rdquo;) &middot; the same \
    page for programs: ask with <code>Accept: application/json</code></p></footer>\n</body>\n</html>\n";
