use std::{
    fs::{self, File},
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;
use testbed::process::run;

use super::{BIN, until};

/// Any command of the binary, printing into files. Killed when dropped.
pub(crate) struct IbidProcess {
    child: Child,
    dir: TempDir,
}

impl IbidProcess {
    pub(crate) fn start(args: &[&str], env: &[(&str, &str)]) -> IbidProcess {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let out = File::create(dir.path().join("out")).expect("a file");
        let mut command = Command::new(BIN);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("IBID_")) {
            command.env_remove(name);
        }
        command.args(args).envs(env.iter().copied()).current_dir(dir.path()).stdin(Stdio::null());
        command.stderr(out.try_clone().expect("a second handle")).stdout(out);
        IbidProcess { child: command.spawn().expect("the binary runs"), dir }
    }

    /// All that it printed so far.
    pub(crate) fn printed(&self) -> String {
        fs::read_to_string(self.dir.path().join("out")).unwrap_or_default()
    }

    pub(crate) async fn wait_for(&self, part: &str) -> String {
        until(part, || self.printed().contains(part)).await;
        self.printed()
    }

    pub(crate) fn interrupt(&self) {
        let status = Command::new("kill").arg("-INT").arg(self.child.id().to_string()).status();
        assert!(status.is_ok_and(|status| status.success()));
    }

    pub(crate) async fn exit_code(&mut self) -> Option<i32> {
        let mut status = None;
        until("the end of the process", || {
            status = self.child.try_wait().expect("our child");
            status.is_some()
        })
        .await;
        status.and_then(|status| status.code())
    }
}

impl Drop for IbidProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- it printed ---\n{}\n---", self.printed());
        }
    }
}

/// What a command did.
#[derive(Debug)]
pub(crate) struct CommandResult {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl CommandResult {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).expect("text")
    }

    /// All that it printed.
    pub(crate) fn all(&self) -> String {
        self.text() + &self.stderr
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|why| panic!("{why}: {self:?}"))
    }

    /// The value beside a name in what `ibid keys show` prints.
    #[track_caller]
    pub(crate) fn field(&self, name: &str) -> String {
        let text = self.text();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name:<13}  ")));
        line.unwrap_or_else(|| panic!("no {name} in\n{text}")).to_owned()
    }
}

/// Runs a command of the binary to its end.
pub(crate) async fn run_ibid(args: &[&str], env: &[(&str, &str)]) -> CommandResult {
    let Output { status, stdout, stderr } = run(BIN, args, env).await;
    CommandResult { code: status.code(), stdout, stderr: String::from_utf8(stderr).expect("text") }
}
