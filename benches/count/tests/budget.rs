//! The `count` program from outside.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
};

fn count(args: &[&str]) -> (Output, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_count")).args(args).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output, text)
}

#[test]
fn a_budget_is_met_as_it_was_written_and_an_exceeded_one_fails() {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("budgets.toml");
    let name = file.to_str().unwrap();
    let table = |option| count(&["table", "--operations", "8", option, name]);
    let (output, text) = table("--write-budgets");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("| operation | instructions | of it SHA-256 (blocks) | without SHA-256 |"), "{text}");
    let budgets = fs::read_to_string(&file).unwrap();
    let (output, text) = table("--check");
    assert!(output.status.success() && text.contains("All figures keep their budgets."), "{text}");
    // One less than nothing is more than any figure keeps.
    let lowered = budgets.replacen("allocations = ", "allocations = 0.0 # ", 1);
    assert_ne!(lowered, budgets);
    fs::write(&file, lowered).unwrap();
    let (output, text) = table("--check");
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("layer-first exceeds its budget: ") && text.contains("allocations where 0 are allowed"),
        "{text}"
    );
    assert!(text.contains("--write-budgets"), "{text}");
}

#[test]
fn an_operation_prints_what_it_allocates() {
    let figures = |n: &str| -> Vec<u64> {
        let (output, text) = count(&["engine-replay", n]);
        assert!(output.status.success(), "{text}");
        text.split_whitespace().map(|figure| figure.parse().unwrap()).collect()
    };
    let (few, more) = (figures("10"), figures("20"));
    assert!(few.len() == 2 && few[0] <= more[0] && few[1] <= more[1], "{few:?} {more:?}");
    let (output, text) = count(&["nothing", "1"]);
    assert!(!output.status.success() && text.contains("modes: inner"), "{text}");
}
