//! Runs the gateway as a process, as its users do.
//!
//! [`GatewayLauncher`] configures it, and [`GatewayProcess`] is the running process: its addresses, logs and signals.
//! Its working directory is temporary, so `embedded:data` is a store that survives [`GatewayProcess::restart`].
//!
//! Invariant: no process outlives its `GatewayProcess`. A failing test shows the end of the process's logs.
//!
//! ```no_run
//! # async fn example(upstream: testbed::upstream::TestUpstream) {
//! use std::{path::Path, time::Duration};
//!
//! use testbed::process::{GatewayProcess, ProcessSignal};
//!
//! let bin = Path::new("target/debug/ibid"); // in a test: env!("CARGO_BIN_EXE_ibid")
//! let config = "[store]\nurl = \"embedded:data\"";
//! let mut gateway = GatewayProcess::launch(bin).config(config).upstream(&upstream.url()).start().await;
//! gateway.signal(ProcessSignal::Kill);
//! gateway.wait_exit(Duration::from_secs(5)).await;
//! gateway.restart().await;
//! # }
//! ```

use std::{
    ffi::{OsStr, OsString},
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::Duration,
};

use tempfile::{NamedTempFile, TempDir};
use tokio::time::{Instant, sleep, timeout};

use crate::{http1::WAIT_TIMEOUT, server_process::log_tail};

/// Timeout of a start. Longer than other waits, because many tests start at once on few cores.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval at which the log and the process are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

const CONFIG_FILE: &str = "ibid.toml";

#[derive(Clone, Debug, Default)]
pub struct GatewayLauncher {
    bin: PathBuf,
    config: String,
    admin: bool,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    parent_folder: Option<PathBuf>,
}

impl GatewayLauncher {
    /// Sets the text of the configuration file, which is empty by default.
    pub fn config(mut self, text: impl Into<String>) -> Self {
        self.config = text.into();
        self
    }

    pub fn upstream(self, url: &str) -> Self {
        self.arg("--upstream").arg(url)
    }

    /// Does not pass `--admin`, nor wait for the admin address.
    pub fn without_admin(mut self) -> Self {
        self.admin = false;
        self
    }

    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds a variable to its environment, which contains no `IBID_*` of the test's own.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Makes its working directory in this one, instead of the system's for temporary files.
    pub fn folder_in(mut self, parent: &Path) -> Self {
        self.parent_folder = Some(parent.to_owned());
        self
    }

    /// Starts the gateway, and returns once it has announced its addresses.
    pub async fn start(self) -> GatewayProcess {
        let parent = self.parent_folder.clone().unwrap_or_else(std::env::temp_dir);
        let dir = tempfile::Builder::new().prefix("ibid-").tempdir_in(parent).expect("a temporary folder");
        fs::write(dir.path().join(CONFIG_FILE), &self.config).expect("the configuration is written");
        let log = NamedTempFile::new().expect("a temporary file");
        let child = self.spawn_process(dir.path(), log.path());
        let mut gateway = GatewayProcess { launch: self, dir, log, child, exit: None, addr: None, admin: None };
        gateway.wait_until_listening(0).await;
        gateway
    }

    fn spawn_process(&self, dir: &Path, log: &Path) -> Child {
        let mut command = base_command(&self.bin);
        command.arg("serve").arg("--config").arg(dir.join(CONFIG_FILE)).args(["--listen", "127.0.0.1:0"]);
        if self.admin {
            command.args(["--admin", "127.0.0.1:0"]);
        }
        command.args(&self.args).envs(self.env.iter().map(|(name, value)| (name, value))).current_dir(dir);
        let log = || fs::File::options().append(true).open(log).expect("the log is writable");
        command.stdin(Stdio::null()).stdout(log()).stderr(log());
        command.spawn().unwrap_or_else(|error| panic!("cannot run {}: {error}", self.bin.display()))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessSignal {
    Term,
    Int,
    Hup,
    Kill,
    Stop,
    Cont,
}

/// A running gateway. Dropping it kills the process and waits until it has exited.
#[derive(Debug)]
pub struct GatewayProcess {
    launch: GatewayLauncher,
    dir: TempDir,
    /// The output of all runs.
    log: NamedTempFile,
    child: Child,
    exit: Option<ExitStatus>,
    addr: Option<SocketAddr>,
    admin: Option<SocketAddr>,
}

impl GatewayProcess {
    pub fn launch(bin: impl AsRef<Path>) -> GatewayLauncher {
        GatewayLauncher { bin: bin.as_ref().to_owned(), admin: true, ..GatewayLauncher::default() }
    }

    /// Runs this binary with this configuration in front of `upstream`.
    pub async fn spawn(bin: impl AsRef<Path>, config: &str, upstream: &str) -> GatewayProcess {
        GatewayProcess::launch(bin).config(config).upstream(upstream).start().await
    }

    /// The address for clients. It changes with a restart.
    pub fn addr(&self) -> SocketAddr {
        self.addr.expect("the gateway is listening")
    }

    pub fn admin_addr(&self) -> SocketAddr {
        self.admin.expect("the gateway has an admin address")
    }

    /// Its working directory, which stays across restarts.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// All complete lines of stdout and stderr so far, in order of arrival; of all runs since the start.
    pub fn logs(&self) -> Vec<String> {
        let log = fs::read(self.log.path()).expect("the log is readable");
        let log = String::from_utf8_lossy(&log);
        let complete = log.rsplit_once('\n').map_or("", |(complete, _)| complete);
        complete.lines().map(str::to_owned).collect()
    }

    /// Waits for a line that contains `part`, and returns the first such line, old or new.
    pub async fn wait_for_log(&self, part: &str) -> String {
        let began = Instant::now();
        loop {
            if let Some(line) = self.logs().into_iter().find(|line| line.contains(part)) {
                return line;
            }
            let in_time = began.elapsed() < WAIT_TIMEOUT;
            assert!(in_time, "waited {WAIT_TIMEOUT:?} for {part:?} in the log:\n{}", self.log_tail());
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Replaces the configuration file atomically.
    pub fn rewrite_config(&self, text: &str) {
        let next = self.dir().join("ibid.toml.next");
        fs::write(&next, text).expect("the configuration is written");
        fs::rename(&next, self.dir().join(CONFIG_FILE)).expect("the configuration is replaced");
    }

    /// Sends a signal, unless the process has exited.
    pub fn signal(&mut self, signal: ProcessSignal) {
        // Once reaped, its pid may belong to another process.
        if self.has_exited() {
            return;
        }
        let flag = format!("-{signal:?}").to_uppercase();
        let status = Command::new("kill").arg(&flag).arg(self.child.id().to_string()).status();
        assert!(status.as_ref().is_ok_and(ExitStatus::success), "kill {flag}: {status:?}");
    }

    pub fn has_exited(&mut self) -> bool {
        if self.exit.is_none() {
            self.exit = self.child.try_wait().expect("the process is our child");
        }
        self.exit.is_some()
    }

    pub async fn wait_exit(&mut self, deadline: Duration) -> ExitStatus {
        let began = Instant::now();
        while !self.has_exited() {
            assert!(began.elapsed() < deadline, "the process still runs after {deadline:?}:\n{}", self.log_tail());
            sleep(POLL_INTERVAL).await;
        }
        self.exit.expect("just seen")
    }

    /// Kills the process, as a crash would, and waits until it has exited. The directory stays.
    pub async fn kill(&mut self) {
        self.signal(ProcessSignal::Kill);
        self.wait_exit(WAIT_TIMEOUT).await;
    }

    /// Runs it again in the same directory with the current configuration file. Kills it first if it still runs.
    pub async fn restart(&mut self) {
        self.kill().await;
        let earlier_lines = self.logs().len();
        self.child = self.launch.spawn_process(self.dir.path(), self.log.path());
        self.exit = None;
        self.wait_until_listening(earlier_lines).await;
    }

    async fn wait_until_listening(&mut self, earlier_lines: usize) {
        let began = Instant::now();
        loop {
            // After the exit, the log is complete.
            let has_exited = self.has_exited();
            let lines = self.logs().split_off(earlier_lines);
            self.addr = find_address(&lines, "ibid: listening on ");
            self.admin = find_address(&lines, "ibid: admin on ");
            if self.addr.is_some() && (self.admin.is_some() || !self.launch.admin) {
                return;
            }
            let log = || self.log_tail();
            assert!(!has_exited, "the gateway ended ({:?}) before it listened:\n{}", self.exit, log());
            assert!(began.elapsed() < START_TIMEOUT, "it did not listen within {START_TIMEOUT:?}:\n{}", log());
            sleep(POLL_INTERVAL).await;
        }
    }

    fn log_tail(&self) -> String {
        log_tail(self.log.path())
    }
}

impl Drop for GatewayProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- the gateway's log ---\n{}\n---", self.log_tail());
        }
    }
}

/// The address in the URL after `start`, which may follow half a line of a killed run.
fn find_address(lines: &[String], start: &str) -> Option<SocketAddr> {
    let url = lines.iter().find_map(|line| line.split_once(start))?.1.split_whitespace().next()?;
    url.split_once("://")?.1.trim_end_matches('/').parse().ok()
}

/// Runs a command of the binary, such as `ibid check FILE`, and waits until it exits.
pub async fn run(bin: impl AsRef<Path>, args: &[&str], env: &[(&str, &str)]) -> Output {
    // A temporary working directory, for the files that the command creates.
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = base_command(bin.as_ref());
    command.args(args).envs(env.iter().copied()).stdin(Stdio::null()).current_dir(folder.path());
    let output = tokio::process::Command::from(command).kill_on_drop(true).output();
    match timeout(START_TIMEOUT, output).await {
        Ok(output) => output.unwrap_or_else(|error| panic!("cannot run {}: {error}", bin.as_ref().display())),
        Err(_) => panic!("{} {args:?} did not end within {START_TIMEOUT:?}", bin.as_ref().display()),
    }
}

/// A command with the test's environment, without the settings of another gateway.
fn base_command(bin: &Path) -> Command {
    let mut command = Command::new(bin);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("IBID_")) {
        command.env_remove(name);
    }
    command
}
