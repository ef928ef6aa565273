//! Queries against what a gateway exposes: every name, every label, and every value that a query spells out.

use std::collections::{BTreeMap, BTreeSet};

use testbed::{client::get, process::GatewayProcess, upstream::TestUpstream};

use super::common::BIN;

/// What a scraper adds.
const SCRAPER_LABELS: [&str; 2] = ["job", "instance"];

/// What `GET /metrics` shows: of each name its labels, of each label its values.
pub(super) struct ExposedMetrics(BTreeMap<String, BTreeMap<String, BTreeSet<String>>>);

impl ExposedMetrics {
    /// Asks a gateway that has just begun: everything is there from the start.
    pub(super) async fn scrape() -> Self {
        let upstream = TestUpstream::start().await;
        let gateway = GatewayProcess::spawn(BIN, "[store]\nurl = \"memory:\"\n", &upstream.url()).await;
        let answer = get(gateway.admin_addr(), "/metrics").send().await;
        assert_eq!(answer.status, 200, "{answer:?}");
        Self::read(&answer.text())
    }

    fn read(page: &str) -> Self {
        let mut names = BTreeMap::<_, BTreeMap<_, BTreeSet<_>>>::new();
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let (name, rest) = line.split_at(line.find(['{', ' ']).expect("a value"));
            let labels = names.entry(name.to_owned()).or_default();
            let Some((inside, _)) = rest.strip_prefix('{').and_then(|rest| rest.rsplit_once('}')) else { continue };
            for (label, value) in matchers(inside) {
                labels.entry(label.to_owned()).or_default().insert(value.to_owned());
            }
        }
        Self(names)
    }

    /// What a query asks for that is not there.
    pub(super) fn missing(&self, query: &str) -> Vec<String> {
        let mut wanting = Vec::new();
        let mut asked = BTreeSet::new();
        let begins_a_name = |at: usize| !query[..at].ends_with(|c: char| c.is_ascii_lowercase() || c == '_');
        let prefixes = ["idempotency_", "ibid_", "process_"];
        let names = prefixes.into_iter().flat_map(|prefix| query.match_indices(prefix)).map(|(at, _)| at);
        for at in names.filter(|at| begins_a_name(*at)) {
            let rest = &query[at..];
            let (name, rest) = rest.split_at(rest.find(|c| !matches!(c, 'a'..='z' | '_')).unwrap_or(rest.len()));
            let Some(labels) = self.0.get(name) else {
                wanting.push(format!("no metric is called {name}"));
                continue;
            };
            asked.extend(labels.keys().map(String::as_str));
            let inside = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(inside, _)| inside);
            for (label, value) in matchers(inside).filter(|(label, _)| !SCRAPER_LABELS.contains(label)) {
                let Some(values) = labels.get(label) else {
                    wanting.push(format!("{name} has no label {label}"));
                    continue;
                };
                let spelled_out = value.split('|').filter(|value| !value.contains(['$', '*']));
                let unknown = spelled_out.filter(|value| !values.contains(*value));
                wanting.extend(unknown.map(|value| format!("{label} of {name} is never {value}")));
            }
        }
        for grouped in query.split(" by (").skip(1) {
            let labels = grouped.split(')').next().expect("the first part is always there").split(", ");
            let unknown = labels.filter(|label| !SCRAPER_LABELS.contains(label) && !asked.contains(label));
            wanting.extend(unknown.map(|label| format!("nothing that is asked for has the label {label}")));
        }
        wanting
    }
}

/// `a="1",b=~"2|3"`, one by one.
fn matchers(inside: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut rest = inside;
    std::iter::from_fn(move || {
        let (label, after) = rest.split_once('"')?;
        let (value, after) = after.split_once('"').expect("a value ends");
        rest = after.trim_start_matches([',', ' ']);
        Some((label.trim_end_matches(['=', '~', '!']), value))
    })
}

#[test]
fn what_is_not_exposed_is_found() {
    let page = "# TYPE idempotency_x_total counter\nidempotency_x_total{route=\"POST /a\",outcome=\"executed\"} 1\nidempotency_y 2\n";
    let exposed = ExposedMetrics::read(page);
    for (query, wanting) in [
        ("sum by (job, outcome) (rate(idempotency_x_total{route=~\"$route\",outcome=\"executed\"}[5m]))", &[][..]),
        ("idempotency_y{job=\"a\"} > idempotency_z", &["no metric is called idempotency_z"]),
        ("idempotency_y{route=\"a\"}", &["idempotency_y has no label route"]),
        ("idempotency_x_total{outcome=~\"executed|done\"}", &["outcome of idempotency_x_total is never done"]),
        ("sum by (outcome) (idempotency_y)", &["nothing that is asked for has the label outcome"]),
    ] {
        assert_eq!(exposed.missing(query), wanting, "{query}");
    }
}
