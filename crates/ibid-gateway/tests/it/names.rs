//! One name, one thing: no type name is defined twice in the sources of the crates.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

#[test]
fn no_type_name_is_defined_twice() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the crates");
    let mut defined: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for folder in fs::read_dir(crates).expect("the crates") {
        let sources = folder.expect("a crate").path().join("src");
        visit(&sources, &mut |file| {
            for name in types_in(&fs::read_to_string(file).expect("a source file")) {
                defined.entry(name).or_default().push(file.to_owned());
            }
        });
    }
    assert!(defined.len() > 500, "only {} types found", defined.len());
    defined.retain(|_, files| files.len() > 1);
    assert!(defined.is_empty(), "defined more than once: {defined:#?}");
}

#[test]
fn definitions_are_found() {
    let source = "pub(crate) struct A<T>(T);\nenum B {}\nmod m {\n    trait C {}\n    type Output = ();\n}\ntype D = A<()>;\n// struct E;\n";
    assert_eq!(types_in(source), ["A", "B", "C", "D"]);
}

fn visit(path: &Path, with: &mut impl FnMut(&Path)) {
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("a folder") {
            visit(&entry.expect("an entry").path(), with);
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        with(path);
    }
}

/// Types that are defined here, also inside functions. Associated types are not: they are the indented ones.
fn types_in(source: &str) -> Vec<String> {
    let definition = |line: &str| {
        let words = line.trim_start().trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ");
        let (kind, rest) = words.trim_start_matches("pub ").split_once(' ')?;
        let is_type = matches!(kind, "struct" | "enum" | "trait" | "union") || kind == "type" && !line.starts_with(' ');
        let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(rest.len());
        (is_type && end > 0).then(|| rest[..end].to_owned())
    };
    source.lines().filter_map(definition).collect()
}
