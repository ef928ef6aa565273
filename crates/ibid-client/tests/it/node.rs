//! The JavaScript client's own tests, in Node.

use std::{fs, path::PathBuf, time::Duration};

use tokio::{process::Command, time::timeout};

use crate::common::{gateway_binary, root};

#[tokio::test]
async fn the_javascript_client_passes_its_tests() {
    let folder = root().join("clients/js");
    let entries = fs::read_dir(folder.join("test")).expect("its tests").map(|entry| entry.expect("an entry").path());
    let tests: Vec<PathBuf> = entries.filter(|path| path.to_string_lossy().ends_with(".test.mjs")).collect();
    assert!(tests.len() >= 3, "{tests:?}");
    let mut node = Command::new("node");
    node.arg("--test").args(tests).current_dir(folder).env("IBID_BIN", gateway_binary()).kill_on_drop(true);
    let output = timeout(Duration::from_secs(300), node.output()).await.expect("node ends");
    let output = output.unwrap_or_else(|error| panic!("node (Debian package nodejs, version 20 or later): {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("# fail 0") && said.contains("# skipped 0") && said.contains("# todo 0"), "{said}");
}
