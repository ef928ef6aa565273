//! Schemathesis calls everything that an OpenAPI document allows and much that it does not, and compares each answer with
//! the document. `scripts/tools` installs it.

use std::{fs, path::Path, process::Stdio, time::Duration};

use tokio::{process::Command, time::timeout};

/// How long one run may take, on a machine that does much else.
const SCHEMATHESIS_TIMEOUT: Duration = Duration::from_secs(240);

/// Runs it on the server at `url`. `document` is a file or a URL; `fixed` has the values of parameters that it could not
/// guess.
pub(crate) async fn run_schemathesis(url: &str, document: &str, token: &str, fixed: &str, flags: &[&str]) {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/schemathesis/bin/schemathesis");
    assert!(program.exists(), "{} is missing: scripts/tools installs it", program.display());
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("schemathesis.toml");
    fs::write(&config, format!("color = false\n{fixed}")).unwrap();
    let mut command = Command::new(&program);
    command.arg("--config-file").arg(&config).args(["run", document, "--url", url, "--checks", "all"]);
    command.args(["--max-examples", "15", "--seed", "7", "--request-timeout", "20", "--continue-on-failure"]);
    command.args(["--header", &format!("Authorization: Bearer {token}")]).args(flags);
    command.current_dir(folder.path()).stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(SCHEMATHESIS_TIMEOUT, command.output()).await.expect("it ends").expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("Test cases:") && !said.contains(" 0 generated"), "{said}");
}
