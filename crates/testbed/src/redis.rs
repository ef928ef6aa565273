//! Redis: a single server, a replica with sentinels, or a cluster.
//!
//! Each server has its own temporary directory, listens only on 127.0.0.1, and writes every change
//! to its log before it answers (`appendfsync always`), unless configured otherwise.
//!
//! Invariant: no server outlives the process that started it, however that ends.
//!
//! ```no_run
//! use testbed::RedisServer;
//!
//! let server = RedisServer::start();
//! assert_eq!(server.cli(&["PING"]), "PONG");
//! server.kill();
//! server.restart();
//! ```

use std::{
    fmt, fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::OnceLock,
    thread::sleep,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::child_process::{ServerFolder, free_port, spawn, write_certificates};

pub use self::{cluster::RedisCluster, sentinels::RedisSentinels};

mod cluster;
mod sentinels;

/// Timeout of any server operation: many tests run at once on few cores.
const SERVER_TIMEOUT: Duration = Duration::from_secs(60);

/// The options of a server.
#[derive(Debug, Clone, Default)]
pub struct RedisOptions {
    /// Additional lines of its configuration.
    pub config: Vec<String>,
    /// The default user's password.
    pub password: Option<String>,
    /// Accept only TLS, with generated certificates.
    pub tls: bool,
}

/// A running server. Dropping it ends the server and removes its directory.
pub struct RedisServer {
    folder: ServerFolder,
    port: u16,
    options: RedisOptions,
    child: Mutex<Option<Child>>,
    is_sentinel: bool,
}

impl RedisServer {
    /// Starts a server without a password.
    ///
    /// # Panics
    /// If it cannot be started, with the reason.
    pub fn start() -> Self {
        Self::start_with(RedisOptions::default())
    }

    /// Starts a server with these lines in its configuration.
    ///
    /// # Panics
    /// If it cannot be started, with the reason.
    pub fn start_with_config(config: &[&str]) -> Self {
        Self::start_with(RedisOptions {
            config: config.iter().map(|line| (*line).to_owned()).collect(),
            ..RedisOptions::default()
        })
    }

    /// Starts a server with these options.
    ///
    /// # Panics
    /// If it cannot be started, with the reason.
    pub fn start_with(options: RedisOptions) -> Self {
        Self::launch(options, false)
    }

    /// A server for all tests of this process, started on first use. Each test should use its own prefix.
    ///
    /// # Panics
    /// If it cannot be started, with the reason.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<RedisServer> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    fn launch(options: RedisOptions, sentinel: bool) -> Self {
        let folder = ServerFolder::new();
        let (port, bus) = (free_port(), free_port());
        let mut config = vec!["bind 127.0.0.1".to_owned(), "save \"\"".to_owned(), "daemonize no".to_owned()];
        config.push(format!("dir {}", folder.path().display()));
        config.push(format!("logfile {}", folder.path().join("log").display()));
        if !sentinel {
            config.extend(["appendonly yes".to_owned(), "appendfsync always".to_owned()]);
        }
        if options.config.iter().any(|line| line == "cluster-enabled yes") {
            config.push(format!("cluster-port {bus}"));
        }
        if options.tls {
            write_certificates(folder.path());
            let file = |name: &str| folder.path().join(name).display().to_string();
            config.extend(["port 0".to_owned(), format!("tls-port {port}"), "tls-auth-clients optional".to_owned()]);
            config.push(format!("tls-ca-cert-file {}", file("ca.pem")));
            config.push(format!("tls-cert-file {}", file("cert.pem")));
            config.push(format!("tls-key-file {}", file("key.pem")));
        } else {
            config.push(format!("port {port}"));
        }
        if let Some(password) = &options.password {
            config.push(format!("requirepass {password}"));
        }
        config.extend(options.config.iter().cloned());
        fs::write(folder.path().join("redis.conf"), config.join("\n") + "\n").expect("its configuration is written");
        let server = Self { folder, port, options, child: Mutex::new(None), is_sentinel: sentinel };
        server.restart();
        server
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `redis://…`, or `rediss://…` with the CA to trust.
    pub fn url(&self) -> String {
        let login = self.options.password.as_ref().map(|password| format!(":{password}@")).unwrap_or_default();
        if self.options.tls {
            return format!("rediss://{login}127.0.0.1:{}/0?ca={}", self.port, self.file("ca.pem").display());
        }
        format!("redis://{login}127.0.0.1:{}/0", self.port)
    }

    /// A file in its directory: `log`, `ca.pem`, `cert.pem`, `key.pem`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts it again on its data, after [`kill`](Self::kill) or [`stop`](Self::stop), and waits until it is ready.
    ///
    /// # Panics
    /// If it is not ready in time, with the end of its log.
    pub fn restart(&self) {
        self.kill();
        let mut command = Command::new("redis-server");
        command.arg(self.file("redis.conf")).args(self.is_sentinel.then_some("--sentinel"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        *self.child.lock() = Some(spawn(command, "redis-server"));
        self.until("it answers", || {
            let ended = self.child.lock().as_mut().is_some_and(|child| child.try_wait().ok().flatten().is_some());
            assert!(!ended, "redis-server ended at once:\n{}", self.log());
            self.try_cli(&["PING"]).is_some_and(|answer| answer == "PONG")
        });
    }

    /// Kills it, as a crash would.
    pub fn kill(&self) {
        if let Some(mut child) = self.child.lock().take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Shuts it down cleanly.
    pub fn stop(&self) {
        let Some(mut child) = self.child.lock().take() else { return };
        signal(&child, "-TERM");
        let _ = child.wait();
    }

    /// Pauses it: it accepts connections and answers nothing.
    ///
    /// # Panics
    /// If it does not run.
    pub fn pause(&self) {
        signal(self.child.lock().as_ref().expect("it runs"), "-STOP");
    }

    /// Ends a pause.
    ///
    /// # Panics
    /// If it does not run.
    pub fn resume(&self) {
        signal(self.child.lock().as_ref().expect("it runs"), "-CONT");
    }

    /// Returns the output of `redis-cli`.
    ///
    /// # Panics
    /// If the server cannot be reached.
    pub fn cli(&self, args: &[&str]) -> String {
        self.try_cli(args).unwrap_or_else(|| panic!("redis-cli {args:?} failed:\n{}", self.log()))
    }

    /// Returns the output of `redis-cli`, if the server answers within ten seconds.
    pub fn try_cli(&self, args: &[&str]) -> Option<String> {
        // redis-cli itself has no timeout for a silent server.
        let mut command = Command::new("timeout");
        command.args(["10", "redis-cli", "-p", &self.port.to_string()]);
        if let Some(password) = &self.options.password {
            command.args(["--no-auth-warning", "-a", password]);
        }
        if self.options.tls {
            command.arg("--tls").arg("--cacert").arg(self.file("ca.pem"));
        }
        let output = command.args(args).output().unwrap_or_else(|error| {
            panic!("redis-cli cannot be run ({error}); install the Debian package redis-tools");
        });
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }

    /// Returns a value from `INFO`.
    ///
    /// # Panics
    /// If there is no such value.
    pub fn info(&self, name: &str) -> String {
        let info = self.cli(&["INFO", "everything"]);
        let found = info.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':').map(str::to_owned));
        found.unwrap_or_else(|| panic!("INFO says nothing of {name}"))
    }

    /// Waits until a condition holds.
    ///
    /// # Panics
    /// If it does not hold in time, with the end of the server's log.
    pub fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(
                began.elapsed() < SERVER_TIMEOUT,
                "waited {SERVER_TIMEOUT:?} in vain until {what}:\n{}",
                self.log()
            );
            sleep(Duration::from_millis(20));
        }
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.file("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

fn signal(child: &Child, which: &str) {
    let status = Command::new("kill").arg(which).arg(child.id().to_string()).status();
    assert!(status.as_ref().is_ok_and(|status| status.success()), "kill {which}: {status:?}");
}

impl fmt::Debug for RedisServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisServer").field("port", &self.port).finish_non_exhaustive()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- the log of the server on port {} ---\n{}\n---", self.port, self.log());
        }
    }
}
