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
fn an_exceeded_budget_fails_and_the_others_do_not() {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("budgets.toml");
    let name = file.to_str().unwrap();
    let table = |option| count(&["table", "--operations", "8", "--rows", "layer-first", option, name]);
    let (output, text) = table("--write-budgets");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("| operation | instructions | of it SHA-256 (blocks) | without SHA-256 |"), "{text}");
    // So few operations are not exact. All budgets are doubled but one, which becomes less than any figure.
    let changed = |line: &str| match line.split_once(" = ") {
        Some(("allocations", _)) => "allocations = 0\n".to_owned(),
        Some((figure, budget)) => format!("{figure} = {}\n", 2.0 * budget.parse::<f64>().unwrap()),
        None => format!("{line}\n"),
    };
    let budgets: String = fs::read_to_string(&file).unwrap().lines().map(changed).collect();
    fs::write(&file, budgets).unwrap();
    let (output, text) = table("--check");
    assert_eq!(output.status.code(), Some(1), "{text}");
    let exceeded: Vec<_> = text.lines().filter(|line| line.contains("exceeds its budget")).collect();
    assert!(matches!(exceeded[..], [line] if line.starts_with("layer-first exceeds its budget: ")), "{text}");
    assert!(
        exceeded[0].contains("allocations where 0 are allowed") && exceeded[0].contains("--write-budgets"),
        "{text}"
    );
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
