//! Runs the commands of a documentation page, and compares their output with the page.
//!
//! A page is Markdown. Its first `toml` block is the configuration ([`DocPage::config`], also written to the commands'
//! directory as `ibid.toml`). In its `console` blocks, a line that starts with `$ ` is a command (a `\` at its end
//! continues it on the next line), and the lines after it are its output, stdout and stderr together:
//!
//! ````text
//! ```console
//! $ curl -si http://127.0.0.1:8080/pay -H 'Idempotency-Key: k-1' -d 'amount=1'
//! HTTP/1.1 201 Created
//! …
//! idempotent-replayed: …
//!
//! {"id":…,"run":1}
//! ```
//! ````
//!
//! Within a line `…` matches anything; alone on a line it matches any number of lines. Carriage returns, trailing
//! spaces and trailing empty lines are ignored. All commands of a page run in one shell, so variables persist.
//!
//! Invariant: every command of a page is run and compared; a page without commands fails.

use std::{
    ffi::OsString,
    fmt::Write as _,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::{process::Command, time::timeout};

use self::{
    compare::{OutputDifference, compare},
    parse::{DocCommand, FencedBlock},
};

mod compare;
mod parse;

/// Default timeout of all commands of one page together.
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// The address of the gateway in every page.
const DOCUMENTED_GATEWAY_ADDR: &str = "127.0.0.1:8080";

#[derive(Clone, Debug)]
pub struct DocPage {
    path: PathBuf,
    config: Option<String>,
    steps: Vec<DocCommand>,
    /// Texts of the page, and their values in this run.
    replacements: Vec<(String, String)>,
    env: Vec<(OsString, OsString)>,
    timeout: Duration,
}

impl DocPage {
    pub fn read(path: impl AsRef<Path>) -> DocPage {
        let path = path.as_ref();
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let blocks = parse::parse_blocks(&text);
        let config = blocks.iter().find(|block| block.language == "toml").map(FencedBlock::text);
        let steps = blocks.iter().filter(|block| block.language == "console").map(parse::parse_commands);
        let steps: Result<Vec<_>, _> = steps.collect();
        let steps = steps.unwrap_or_else(|(line, why)| panic!("{}:{line}: {why}", path.display())).concat();
        let path = path.to_owned();
        DocPage { path, config, steps, replacements: vec![], env: vec![], timeout: PAGE_TIMEOUT }
    }

    pub fn config(&self) -> Option<&str> {
        self.config.as_deref()
    }

    pub fn commands(&self) -> usize {
        self.steps.len()
    }

    /// Sets the gateway's address, which replaces `127.0.0.1:8080`.
    pub fn gateway(self, addr: SocketAddr) -> Self {
        self.replace(DOCUMENTED_GATEWAY_ADDR, &addr.to_string())
    }

    /// Replaces `shown` by `actual` in commands, and `actual` by `shown` in their output.
    pub fn replace(mut self, shown: &str, actual: &str) -> Self {
        self.replacements.push((shown.to_owned(), actual.to_owned()));
        self
    }

    /// Adds a variable to the shell's environment, which otherwise has only `PATH`, `HOME`, `LANG` and `TERM`.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Sets the timeout of all commands together; a minute by default.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.timeout = limit;
        self
    }

    pub fn binary(self, bin: impl AsRef<Path>) -> Self {
        let folder = bin.as_ref().parent().expect("a binary has a folder").to_owned();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(folder).chain(std::env::split_paths(&path)));
        self.env("PATH", path.expect("a path without a colon"))
    }

    pub async fn run(&self) {
        if let Err(report) = self.check().await {
            panic!("{report}");
        }
    }

    /// Runs the commands and compares their output. The error reports all differences.
    pub async fn check(&self) -> Result<(), String> {
        if self.steps.is_empty() {
            return Err(format!("{}: the page has no command", self.path.display()));
        }
        let (outputs, finished) = self.run_commands().await;
        let mut report = String::new();
        for (step, (output, status)) in self.steps.iter().zip(outputs) {
            let got = output.as_deref().map(|text| self.to_documented(text)).unwrap_or_default();
            let (status, difference) = match (&status, compare(&step.expected, &got)) {
                (Some(_), Ok(())) => continue,
                (Some(status), Err(difference)) => (format!("exit status {}", status.trim()), difference),
                // Whatever it printed, the later commands never ran.
                (None, _) => {
                    let why = match (output, finished) {
                        (None, _) => "never run: a command before it did not end, or ended the shell",
                        (Some(_), false) => "did not end in time",
                        (Some(_), true) => "it ended the shell",
                    };
                    (why.into(), OutputDifference { expected: step.expected.len(), got: got.lines().count() })
                }
            };
            let _ = writeln!(report, "{}:{}: not as the page says ({status})", self.path.display(), step.line);
            let _ = writeln!(report, "  $ {}", step.command.replace('\n', "\n    "));
            write_lines(&mut report, "expected", &step.expected, difference.expected);
            write_lines(&mut report, "got", &compare::output_lines(&got), difference.got);
            report.push('\n');
        }
        if report.is_empty() { Ok(()) } else { Err(report) }
    }

    /// Runs all commands in one shell. The shell reads each command from its own file, so that a syntax error
    /// cannot swallow the next command; each output goes to a file, so that a leftover process cannot block the end.
    /// Returns the output of each command, if it was reached, its status, if it ended, and whether all ended in time.
    async fn run_commands(&self) -> (Vec<(Option<String>, Option<String>)>, bool) {
        let home = tempfile::Builder::new().prefix("ibid-page-").tempdir().expect("a temporary folder");
        let files = tempfile::Builder::new().prefix("ibid-steps-").tempdir().expect("a temporary folder");
        if let Some(config) = &self.config {
            fs::write(home.path().join("ibid.toml"), config).expect("the configuration is written");
        }
        let file = |index: usize, kind: &str| files.path().join(format!("{index}.{kind}"));
        let mut session = String::new();
        for (index, step) in self.steps.iter().enumerate() {
            fs::write(file(index, "sh"), self.to_actual(&step.command) + "\n").expect("the command is written");
            let [sh, out, status] = ["sh", "out", "status"].map(|kind| file(index, kind).display().to_string());
            let _ = writeln!(session, ". '{sh}' </dev/null >'{out}' 2>&1; echo $? >'{status}'");
        }
        let finished = self.run_shell(&session, home.path()).await;
        let read = |path: PathBuf| fs::read(path).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let ran = (0..self.steps.len()).map(|index| (read(file(index, "out")), read(file(index, "status"))));
        (ran.collect(), finished)
    }

    /// Returns whether the shell ended in time. Kills the processes that it left running.
    async fn run_shell(&self, session: &str, home: &Path) -> bool {
        let mut command = Command::new("bash");
        command.args(["--norc", "--noprofile", "-c", session]).current_dir(home).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("HOME", home);
        command.env("LANG", "C.UTF-8").env("TERM", "dumb").envs(self.env.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut shell = command.process_group(0).kill_on_drop(true).spawn().expect("bash is installed");
        let group = shell.id().expect("the shell is not reaped yet");
        let finished = timeout(self.timeout, shell.wait()).await.is_ok();
        let group = format!("-{group}");
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status().await;
        finished
    }

    fn to_actual(&self, command: &str) -> String {
        self.replacements.iter().fold(command.to_owned(), |text, (shown, actual)| text.replace(shown, actual))
    }

    fn to_documented(&self, output: &str) -> String {
        self.replacements.iter().fold(output.to_owned(), |text, (shown, actual)| text.replace(actual, shown))
    }
}

/// Writes the lines and marks the first difference.
fn write_lines(report: &mut String, title: &str, lines: &[String], marked: usize) {
    let _ = writeln!(report, "{title}:");
    for (index, line) in lines.iter().enumerate() {
        let mark = if index == marked { '>' } else { ' ' };
        let _ = writeln!(report, "{mark} | {line}");
    }
    if marked >= lines.len() {
        let _ = writeln!(report, "> (no more lines)");
    }
}
