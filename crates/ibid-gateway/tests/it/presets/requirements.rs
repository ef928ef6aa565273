//! The preset pages answer every requirement of the checklist `requirements.toml`, and name tests that exist.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The rows of the section "Requirements" of a preset's page: requirement, where it is met, and the test.
fn rows(preset: &str) -> Vec<[String; 3]> {
    let page = std::fs::read_to_string(root().join(format!("docs/presets/{preset}.md"))).unwrap();
    let section = page.split("\n## ").find(|section| section.starts_with("Requirements")).expect("a section");
    let cells = |line: &str| -> Option<[String; 3]> {
        let cells: Vec<_> = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").map(str::to_owned).collect();
        Some(cells.try_into().unwrap_or_else(|cells| panic!("{preset}: three cells expected: {cells:?}")))
    };
    section.lines().filter_map(cells).filter(|[requirement, ..]| requirement != "requirement").collect()
}

/// Every function name in the workspace's sources and tests.
fn functions() -> String {
    fn walk(folder: &Path, out: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, out);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                out.push_str(&std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    let mut sources = String::new();
    walk(&root().join("crates"), &mut sources);
    sources
}

#[test]
fn every_requirement_is_answered_on_its_page_in_order() {
    let checklist = include_str!("requirements.toml");
    let checklist: BTreeMap<String, Vec<String>> = toml::from_str(checklist).unwrap();
    assert_eq!(checklist.len(), 5);
    let sources = functions();
    for (preset, requirements) in &checklist {
        let rows = rows(preset);
        let answered: Vec<_> = rows.iter().map(|[requirement, ..]| requirement.clone()).collect();
        assert_eq!(&answered, requirements, "docs/presets/{preset}.md");
        for [requirement, place, test] in &rows {
            assert!(!place.is_empty(), "{preset}: {requirement}");
            let name = test.trim_matches('`');
            assert!(sources.contains(&format!("fn {name}(")), "{preset}: {requirement}: there is no test {name}");
        }
    }
}
