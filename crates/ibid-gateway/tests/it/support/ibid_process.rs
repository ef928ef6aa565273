use std::{
    fs::{self, File},
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

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
