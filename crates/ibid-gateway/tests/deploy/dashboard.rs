//! The dashboard: each of its queries is one, and asks for what there is.

use std::fs;

use serde_json::{Value, json};

use super::{
    common::{at, run, text, tool},
    queries::ExposedMetrics,
};

fn dashboard() -> Value {
    serde_json::from_str(&text("deploy/grafana/ibid.json")).expect("it is JSON")
}

/// Every query of every panel, with the panel's title, and Grafana's variables as they stand.
fn panel_queries() -> Vec<(String, String)> {
    let dashboard = dashboard();
    let panels = dashboard["panels"].as_array().expect("panels");
    let of = |panel: &Value| {
        let title = at(panel, "/title").to_owned();
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        targets.into_iter().map(move |target| (title.clone(), at(&target, "/expr").to_owned())).collect::<Vec<_>>()
    };
    panels.iter().flat_map(of).collect()
}

/// The same, as Grafana would send them if nothing is chosen.
pub(super) fn queries(interval: &str) -> Vec<(String, String)> {
    let mut queries = panel_queries();
    for (_, query) in &mut queries {
        *query = query.replace("$__rate_interval", interval);
        for variable in ["$job", "$instance", "$route"] {
            *query = query.replace(&format!("\"{variable}\""), "\".*\"");
        }
        assert!(!query.contains('$'), "a variable that the dashboard does not have: {query}");
    }
    queries
}

#[test]
fn every_query_is_one() {
    let rules: Vec<_> =
        queries("5m").into_iter().map(|(_, query)| json!({"record": "checked", "expr": query})).collect();
    assert!(rules.len() > 20, "{rules:?}");
    let folder = tempfile::tempdir().unwrap();
    let check = |rules: &[Value]| {
        let file = folder.path().join("queries.yml");
        fs::write(&file, json!({"groups": [{"name": "queries", "rules": rules}]}).to_string()).unwrap();
        run(tool("promtool", "prometheus").args(["check", "rules", "--lint=none"]).arg(&file))
    };
    let (fine, told) = check(&rules);
    assert!(fine, "{told}");
    let (fine, _) = check(&[json!({"record": "checked", "expr": "sum(rate(idempotency_conflicts_total))"})]);
    assert!(!fine, "the tool finds what is no query");
}

#[tokio::test]
async fn every_query_asks_for_what_there_is() {
    let exposed = ExposedMetrics::scrape().await;
    for (panel, query) in panel_queries() {
        assert_eq!(exposed.missing(&query), [""; 0], "{panel}");
    }
    let dashboard = dashboard();
    for variable in dashboard["templating"]["list"].as_array().expect("variables") {
        let Some(query) = variable["definition"].as_str() else { continue };
        let inside = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).expect(query);
        let (of, label) = inside.rsplit_once(", ").expect("a label");
        assert_eq!(exposed.missing(&format!("sum by ({label}) ({of})")), [""; 0], "{query}");
    }
}

#[test]
fn every_metric_is_on_it() {
    let asked: String = panel_queries().into_iter().map(|(_, query)| query).collect();
    for family in ibid_gateway::metrics::FAMILIES {
        assert!(asked.contains(family.name), "{} is on no panel", family.name);
    }
}

#[test]
fn panels_do_not_cover_each_other() {
    let dashboard = dashboard();
    let mut taken = std::collections::HashSet::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        let place = |name: &str| panel["gridPos"][name].as_u64().expect("a place");
        assert!(place("x") + place("w") <= 24, "{}", panel["title"]);
        for x in place("x")..place("x") + place("w") {
            for y in place("y")..place("y") + place("h") {
                assert!(taken.insert((x, y)), "{} covers another", panel["title"]);
            }
        }
    }
}
