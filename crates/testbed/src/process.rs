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
    sync::Arc,
    time::Duration,
};

use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use self::capture::{OutputCapture, wait_for_address};
use crate::http1::WAIT_TIMEOUT;

mod capture;

/// Timeout of a start. Longer than other waits, because many tests start at once on few cores.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of log lines that a failing test shows.
const MAX_SHOWN_LOG_LINES: usize = 60;

const CONFIG_FILE: &str = "ibid.toml";

#[derive(Clone, Debug, Default)]
pub struct GatewayLauncher {
    bin: PathBuf,
    config: String,
    upstream: Option<String>,
    admin: bool,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
}

impl GatewayLauncher {
    /// Sets the text of the configuration file, which is empty by default.
    pub fn config(mut self, text: impl Into<String>) -> Self {
        self.config = text.into();
        self
    }

    pub fn upstream(mut self, url: &str) -> Self {
        self.upstream = Some(url.to_owned());
        self
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

    /// Starts the gateway, and returns once it has announced its addresses.
    pub async fn start(self) -> GatewayProcess {
        let dir = tempfile::Builder::new().prefix("ibid-").tempdir().expect("a temporary folder");
        fs::write(dir.path().join(CONFIG_FILE), &self.config).expect("the configuration is written");
        let (child, capture) = self.spawn_process(dir.path(), Vec::new());
        let mut gateway = GatewayProcess { launch: self, dir, child, capture, exit: None, addr: None, admin: None };
        gateway.wait_until_listening().await;
        gateway
    }

    fn spawn_process(&self, dir: &Path, earlier_lines: Vec<String>) -> (Child, Arc<OutputCapture>) {
        let mut command = base_command(&self.bin);
        command.arg("serve").arg("--config").arg(dir.join(CONFIG_FILE)).args(["--listen", "127.0.0.1:0"]);
        if self.admin {
            command.args(["--admin", "127.0.0.1:0"]);
        }
        if let Some(url) = &self.upstream {
            command.args(["--upstream", url]);
        }
        command.args(&self.args).envs(self.env.iter().map(|(name, value)| (name, value))).current_dir(dir);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot run {}: {error}", self.bin.display()));
        let capture = capture::start(&mut child, earlier_lines);
        (child, capture)
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
    child: Child,
    capture: Arc<OutputCapture>,
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

    /// All lines of stdout and stderr so far, in order of arrival; of all runs since the start.
    pub fn logs(&self) -> Vec<String> {
        self.capture.borrow().all.clone()
    }

    /// Waits for a line that contains `part`, and returns the first such line, old or new.
    pub async fn wait_for_log(&self, part: &str) -> String {
        match timeout(WAIT_TIMEOUT, capture::wait_for_line(&self.capture, part)).await {
            Ok(Some(line)) => line,
            Ok(None) => panic!("the process ended without logging {part:?}:\n{}", self.log_tail()),
            Err(_) => panic!("waited {WAIT_TIMEOUT:?} for {part:?} in the log:\n{}", self.log_tail()),
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

    /// Waits until the process has exited, and for the rest of its log.
    pub async fn wait_exit(&mut self, deadline: Duration) -> ExitStatus {
        let ended = async {
            while !self.has_exited() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        if timeout(deadline, ended).await.is_err() {
            panic!("the process still runs after {deadline:?}:\n{}", self.log_tail());
        }
        let _ = timeout(Duration::from_secs(1), capture::wait_for_end(&self.capture)).await;
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
        (self.child, self.capture) = self.launch.spawn_process(self.dir.path(), self.logs());
        self.exit = None;
        self.wait_until_listening().await;
    }

    async fn wait_until_listening(&mut self) {
        (self.addr, self.admin) = (None, None);
        let admin = self.launch.admin;
        let capture = Arc::clone(&self.capture);
        let lines = async {
            let addr = wait_for_address(&capture, "ibid: listening on ").await?;
            let admin = if admin { Some(wait_for_address(&capture, "ibid: admin on ").await?) } else { None };
            Some((addr, admin))
        };
        match timeout(START_TIMEOUT, lines).await {
            Ok(Some((addr, admin))) => (self.addr, self.admin) = (Some(addr), admin),
            Ok(None) => {
                let exit = self.wait_exit(WAIT_TIMEOUT).await;
                panic!("the gateway ended ({exit}) before it listened:\n{}", self.log_tail());
            }
            Err(_) => panic!("the gateway did not listen within {START_TIMEOUT:?}:\n{}", self.log_tail()),
        }
    }

    fn log_tail(&self) -> String {
        let lines = self.logs();
        lines[lines.len().saturating_sub(MAX_SHOWN_LOG_LINES)..].join("\n")
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
