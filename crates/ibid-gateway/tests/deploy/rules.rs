//! The alert rules, judged by Prometheus' own tool on series that must fire them and series that must not.

use std::fs;

use serde_json::Value;

use super::{
    common::{at, root, run, text, tool, yaml},
    queries::ExposedMetrics,
};

const RULES: &str = "deploy/prometheus/ibid.rules.yml";
const TESTS: &str = "deploy/prometheus/ibid.rules.test.yml";

/// The rules of the only group.
fn rules_of(file: &mut Value) -> &mut Vec<Value> {
    file.pointer_mut("/groups/0/rules").and_then(Value::as_array_mut).expect("a group of rules")
}

/// Of each alert its name and its expression.
pub(super) fn alerts() -> Vec<(String, String)> {
    let mut file = yaml(RULES).remove(0);
    rules_of(&mut file).iter().map(|rule| (at(rule, "/alert").to_owned(), at(rule, "/expr").to_owned())).collect()
}

/// Whether these tests hold for these rules. JSON is YAML.
fn run_rule_tests(rules: &Value, tests: &Value) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("ibid.rules.yml"), rules.to_string()).unwrap();
    fs::write(folder.path().join("tests.yml"), tests.to_string()).unwrap();
    run(tool("promtool", "prometheus").args(["test", "rules", "tests.yml"]).current_dir(folder.path()))
}

#[test]
fn the_rules_are_valid_and_do_what_their_tests_say() {
    let promtool = || tool("promtool", "prometheus");
    let (fine, told) = run(promtool().args(["check", "rules"]).arg(root().join(RULES)));
    assert!(fine, "{told}");
    let (fine, told) = run(promtool().args(["test", "rules"]).arg(root().join(TESTS)));
    assert!(fine, "{told}");
}

/// What could be wrong with an alert: where it says one thing, it says another.
#[rustfmt::skip]
const RULE_MUTATIONS: [(&str, &str, &str, &str); 42] = [
    ("IbidHitRateHigh", "/expr", "> 0.1\n", "> 0.12\n"),
    ("IbidHitRateHigh", "/expr", "> 0.1\n", "> 0.09\n"),
    ("IbidHitRateHigh", "/expr", ">= 20", ">= 2"),
    ("IbidHitRateHigh", "/expr", "_cache_miss_total", "_requests_total"),
    ("IbidHitRateHigh", "/for", "10m", "3m"),
    ("IbidConflictRateHigh", "/expr", "> 0.05\n", "> 0.07\n"),
    ("IbidConflictRateHigh", "/expr", "> 0.05\n", "> 0.04\n"),
    ("IbidConflictRateHigh", "/expr", ">= 20", ">= 2"),
    ("IbidConflictRateHigh", "/expr", "{reason=\"in_progress\"}", ""),
    ("IbidConflictRateHigh", "/for", "10m", "3m"),
    ("IbidConflictsRising", "/expr", "> 2 * (", "> 1 * ("),
    ("IbidConflictsRising", "/expr", "> 2 * (", "> 4 * ("),
    ("IbidConflictsRising", "/expr", ">= 10", ">= 2"),
    ("IbidConflictsRising", "/expr", ">= 10", ">= 100"),
    ("IbidConflictsRising", "/expr", "conflicts_total[", "conflicts_total{reason=\"in_progress\"}["),
    ("IbidFallback", "/expr", "> 0", "> 2"),
    ("IbidFallback", "/expr", "> 0", ">= 0"),
    ("IbidStoreDown", "/expr", "== 0", "== 1"),
    ("IbidStoreDown", "/expr", "== 0", "< 0"),
    ("IbidStoreDown", "/for", "1m", "0m"),
    ("IbidOutcomeUnknown", "/expr", "max by (job) (idempotency_outcome_unknown)", "idempotency_outcome_unknown"),
    ("IbidOutcomeUnknown", "/expr", "> 0", "> 1"),
    ("IbidOutcomeUnknown", "/expr", "> 0", ">= 0"),
    ("IbidOutcomeUnknown", "/for", "5m", "1m"),
    ("IbidUnknownGrowing", "/expr", ">= 10", ">= 9"),
    ("IbidUnknownGrowing", "/expr", ">= 10", ">= 11"),
    ("IbidUnknownGrowing", "/for", "5m", "30m"),
    ("IbidLostClaim", "/expr", "> 0", "> 2"),
    ("IbidLostClaim", "/expr", "> 0", ">= 0"),
    ("IbidStoreErrors", "/expr", "store-unavailable|pending", "store-unavailable"),
    ("IbidStoreErrors", "/expr", "store-unavailable|pending", "pending"),
    ("IbidStoreErrors", "/expr", "store-unavailable|pending", "store-unavailable|pending|unknown"),
    ("IbidStoreErrors", "/for", "1m", "5m"),
    ("IbidUnprotected", "/expr", "> 0", "> 2"),
    ("IbidUnprotected", "/expr", "> 0", ">= 0"),
    ("IbidStoreSlow", "/expr", "0.99,", "0.9,"),
    ("IbidStoreSlow", "/expr", "0.99,", "0.995,"),
    ("IbidStoreSlow", "/expr", "> 0.1", "> 0.3"),
    ("IbidStoreSlow", "/for", "10m", "3m"),
    ("IbidDown", "/expr", "ibid.*", ".*"),
    ("IbidDown", "/expr", "== 0", "== 2"),
    ("IbidDown", "/for", "2m", "0m"),
];

/// Each threshold and each pause is held by a test; and no alert is without one.
#[test]
fn a_rule_that_fires_too_soon_or_too_late_is_found() {
    let (rules, tests) = (yaml(RULES).remove(0), yaml(TESTS).remove(0));
    for (alert, expression) in alerts() {
        // The tests without one of its series have nothing to say about it, and take their time.
        let asks_for =
            |series: &Value| at(series, "/series").split('{').next().is_some_and(|name| expression.contains(name));
        let mut about = tests.clone();
        let cases = about["tests"].as_array_mut().expect("tests");
        cases.retain(|case| case["input_series"].as_array().expect("series").iter().any(asks_for));
        assert!(run_rule_tests(&rules, &about).0, "{alert}");
        let wrong: Vec<_> = RULE_MUTATIONS.iter().filter(|(of, ..)| *of == alert).collect();
        assert!(wrong.len() > 1, "nothing is tried with {alert}");
        for (_, field, from, to) in wrong {
            let mut changed = rules.clone();
            let rule = rules_of(&mut changed).iter_mut().find(|rule| rule["alert"] == *alert).expect("it is there");
            let text = rule.pointer_mut(field).expect("the field is there");
            let before = text.as_str().expect("a text").to_owned();
            assert!(before.contains(from), "{from:?} is not in {before:?}");
            *text = before.replace(from, to).into();
            assert!(
                !run_rule_tests(&changed, &about).0,
                "no test notices {from:?} becoming {to:?} in {field} of {alert}"
            );
        }
    }
}

#[tokio::test]
async fn the_rules_ask_for_what_there_is() {
    let exposed = ExposedMetrics::scrape().await;
    let alerts = alerts();
    assert!(alerts.len() > 8, "{alerts:?}");
    for (name, expression) in alerts {
        assert_eq!(exposed.missing(&expression), [""; 0], "{name}");
    }
}

#[test]
fn every_alert_is_documented() {
    let page = text("docs/operating.md");
    let table = page.split("\n### Alerts\n").nth(1).expect("a section of alerts").split("\n#").next().unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `Ibid")?.split_once('`'));
    let documented: Vec<_> = rows.map(|(name, _)| format!("Ibid{name}")).collect();
    let shipped: Vec<_> = alerts().into_iter().map(|(name, _)| name).collect();
    assert_eq!(documented, shipped);
}
