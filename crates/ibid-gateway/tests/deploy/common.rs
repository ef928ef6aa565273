//! Files of the repository, and the tools that judge them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

pub(super) const BIN: &str = env!("CARGO_BIN_EXE_ibid");

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A file of the repository.
pub(super) fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|why| panic!("{path}: {why}"))
}

/// A program that must be there.
pub(super) fn tool(name: &str, package: &str) -> Command {
    let found = Command::new("which").arg(name).output().is_ok_and(|found| found.status.success());
    assert!(found, "{name} is not installed; install the Debian package {package}");
    Command::new(name)
}

/// A program that `scripts/tools` installs.
pub(super) fn installed(name: &str) -> Command {
    let path = root().join("target/deploy-tools/bin").join(name);
    assert!(path.exists(), "{} is missing: run scripts/tools, which installs it", path.display());
    Command::new(path)
}

/// Runs it, and says what it printed.
pub(super) fn run(command: &mut Command) -> (bool, String) {
    let Output { status, stdout, stderr } = command.output().unwrap_or_else(|why| panic!("{command:?}: {why}"));
    (status.success(), format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)))
}

/// Everything in a YAML file, as JSON.
pub(super) fn yaml(path: &str) -> Vec<Value> {
    let program = "import json, sys, yaml; json.dump(list(yaml.safe_load_all(open(sys.argv[1]))), sys.stdout)";
    let (fine, printed) = run(installed("python").args(["-c", program]).arg(root().join(path)));
    assert!(fine, "{path}: {printed}");
    serde_json::from_str(&printed).unwrap_or_else(|why| panic!("{path}: {why}: {printed}"))
}

/// A text in there, at such a path: `/spec/replicas`.
#[track_caller]
pub(super) fn at<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_else(|| panic!("no text at {pointer} of {value:#}"))
}
