//! PostgreSQL and pgbouncer that a test starts privately.
//!
//! Invariants: a server listens only on 127.0.0.1, on a free port, in its own directory; never as root. It ends and its
//! directory is removed when its owner is dropped, panics or is killed. (A guard process waits for the end of a pipe
//! that only the owner holds.) A missing program fails the test and names its package.

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

pub use self::pgbouncer::PgBouncer;
use crate::certificates::{CertificateAuthority, IssuedCertificate};
use crate::child_process::free_port;

mod pgbouncer;

const POSTGRES_BIN_FOLDER: &str = "/usr/lib/postgresql/15/bin";
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until the parent process closes the pipe, then kills the server whose pid is in the file `$1`, with its
/// children, and removes the directory `$2`.
const GUARD_SCRIPT: &str = r#"
while read -r _; do :; done
pid=$(head -n 1 "$1" 2>/dev/null)
if [ -n "$pid" ]; then
    kill -KILL $pid $(cat "/proc/$pid/task/$pid/children" 2>/dev/null) 2>/dev/null
fi
n=0
while [ $n -lt 50 ]; do rm -rf "$2" 2>/dev/null && exit 0; n=$((n + 1)); sleep 0.1; done
"#;

/// The roles of every server: `migrator` creates schemas, `gateway` is the store's, `auditor` is an administrator,
/// `alice` is an ordinary user. None needs a password.
const CREATE_ROLES_SQL: &str = "CREATE ROLE ibid_service NOLOGIN; CREATE ROLE ibid_admin NOLOGIN;
    CREATE ROLE migrator LOGIN CREATEROLE; CREATE ROLE gateway LOGIN IN ROLE ibid_service;
    CREATE ROLE auditor LOGIN IN ROLE ibid_admin; CREATE ROLE alice LOGIN;";

/// A PostgreSQL server.
#[derive(Debug)]
pub struct PostgresServer {
    folder: GuardedFolder,
    port: u16,
    settings: Vec<String>,
    process: Mutex<Option<Child>>,
    databases: AtomicU32,
}

/// A directory that is removed with its owner, together with the process that belongs to it.
#[derive(Debug)]
struct GuardedFolder {
    path: PathBuf,
    guard: Child,
}

impl PostgresServer {
    /// Starts a server with default settings.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with these settings, such as `fsync=off`.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start_with(settings: &[&str]) -> Self {
        let folder = GuardedFolder::new("data/postmaster.pid");
        let copied =
            unprivileged_command("cp").arg("-R").arg(template_data_folder()).arg(folder.path.join("data")).status();
        assert!(copied.is_ok_and(|status| status.success()), "the template cannot be copied");
        let server = Self {
            folder,
            port: free_port(),
            settings: settings.iter().map(|setting| (*setting).into()).collect(),
            process: Mutex::new(None),
            databases: AtomicU32::new(0),
        };
        server.run();
        server.sql("postgres", CREATE_ROLES_SQL);
        server
    }

    /// Starts a server with TLS and a self-signed certificate for `localhost`. Returns also the certificate's file; its
    /// key is beside it, in `server.key`.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start_with_tls() -> (Self, PathBuf) {
        let server = Self::start();
        server.stop();
        let signed = rcgen::generate_simple_self_signed(vec!["localhost".into()]).expect("a certificate");
        let certificate = server.write_readable_file("server.crt", signed.cert.pem().as_bytes(), 0o644);
        let key = server.write_readable_file("server.key", signed.signing_key.serialize_pem().as_bytes(), 0o600);
        // Clients may present the same certificate, which identifies them.
        let clients = server.write_readable_file("clients.crt", signed.cert.pem().as_bytes(), 0o644);
        let mut server = server;
        server.settings.extend([
            "ssl=on".into(),
            format!("ssl_cert_file={}", certificate.display()),
            format!("ssl_key_file={}", key.display()),
            format!("ssl_ca_file={}", clients.display()),
        ]);
        server.run();
        (server, certificate)
    }

    /// Replaces the certificate of a server with TLS, and the CA for its clients. Sessions continue.
    ///
    /// # Panics
    /// If a file cannot be read.
    pub fn renew_certificate(&self, server: &IssuedCertificate, clients: &CertificateAuthority) {
        let read = |path: &Path| fs::read(path).expect("a file of the test");
        self.write_readable_file("server.crt", &read(&server.cert), 0o644);
        self.write_readable_file("server.key", &read(&server.key), 0o600);
        self.write_readable_file("clients.crt", &read(&clients.path()), 0o644);
        self.sql("postgres", "SELECT pg_reload_conf()");
    }

    /// Sets the lines of `pg_hba.conf`, which decide who may connect.
    pub fn set_hba(&self, lines: &str) {
        self.write_readable_file("data/pg_hba.conf", lines.as_bytes(), 0o600);
        self.sql("postgres", "SELECT pg_reload_conf()");
    }

    /// Writes a file in its directory that the server can read.
    fn write_readable_file(&self, name: &str, content: &[u8], mode: u32) -> PathBuf {
        let path = self.folder.path.join(name);
        fs::write(&path, content).expect("a file in our folder");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("our own file");
        let owner = fs::metadata(&self.folder.path).expect("our own folder");
        chown(&path, Some(owner.uid()), Some(owner.gid())).expect("our own file");
        path
    }

    /// A server for all tests of this process that do not disturb it.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<PostgresServer> = OnceLock::new();
        SHARED.get_or_init(|| Self::start_with(&["max_connections=300"]))
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a database for a role.
    pub fn url(&self, role: &str, database: &str) -> String {
        format!("postgres://{role}@127.0.0.1:{}/{database}", self.port)
    }

    /// Creates a database, owned by `migrator`. Returns its name.
    pub fn create_database(&self) -> String {
        let name = format!("test_{}", self.databases.fetch_add(1, Relaxed));
        self.sql("postgres", &format!("CREATE DATABASE {name} OWNER migrator TEMPLATE template0"));
        name
    }

    /// Runs SQL as superuser. Returns the selected rows as lines, with columns separated by `|`.
    ///
    /// # Panics
    /// If it fails.
    pub fn sql(&self, database: &str, sql: &str) -> String {
        self.sql_as("postgres", database, sql).unwrap_or_else(|why| panic!("{sql}: {why}"))
    }

    /// Runs SQL as a role.
    ///
    /// # Errors
    /// Returns psql's error output.
    pub fn sql_as(&self, role: &str, database: &str, sql: &str) -> Result<String, String> {
        self.psql(role, database, &["-c".as_ref(), sql.as_ref()])
    }

    /// Runs a file of SQL as a role.
    ///
    /// # Errors
    /// Returns psql's error output.
    pub fn sql_file(&self, role: &str, database: &str, file: &Path) -> Result<String, String> {
        self.psql(role, database, &["-f".as_ref(), file.as_ref()])
    }

    fn psql(&self, role: &str, database: &str, what: &[&OsStr]) -> Result<String, String> {
        let mut psql = Command::new(program_path("psql"));
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", &self.url(role, database)]).args(what);
        let ran = psql.stdin(Stdio::null()).output().expect("psql runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        if ran.status.success() { Ok(text(&ran.stdout)) } else { Err(text(&ran.stderr)) }
    }

    /// Shuts it down cleanly and ends its sessions.
    pub fn stop(&self) {
        self.signal("-INT");
        self.wait_until_gone();
    }

    /// Kills it, as a crash of the machine would; but data that the system has not written yet is not lost.
    pub fn kill(&self) {
        self.signal("-KILL");
        self.wait_until_gone();
    }

    /// Starts it again on the same port, after a stop or kill.
    pub fn restart(&self) {
        self.run();
    }

    /// Pauses the whole server: connections stay, nothing is answered.
    pub fn pause(&self) {
        self.signal("-STOP");
    }

    /// Ends a pause.
    pub fn resume(&self) {
        self.signal("-CONT");
    }

    fn run(&self) {
        let log = fs::File::create(self.folder.path.join("log")).expect("a file in our folder");
        let errors = log.try_clone().expect("another handle");
        let mut server = unprivileged_command(program_path("postgres"));
        server.arg("-D").arg(self.folder.path.join("data")).arg("-p").arg(self.port.to_string());
        for setting in ["listen_addresses=127.0.0.1", "unix_socket_directories=", "shared_buffers=16MB"] {
            server.args(["-c", setting]);
        }
        for setting in &self.settings {
            server.args(["-c", setting]);
        }
        let began = Instant::now();
        *self.process.lock() = Some(server.stdin(Stdio::null()).stdout(log).stderr(errors).spawn().expect("it starts"));
        while !self.is_ready() {
            let ended = self.process.lock().as_mut().and_then(|child| child.try_wait().ok().flatten());
            if ended.is_some() || began.elapsed() > START_TIMEOUT {
                let log = fs::read_to_string(self.folder.path.join("log")).unwrap_or_default();
                panic!("PostgreSQL did not start ({ended:?}):\n{log}");
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn is_ready(&self) -> bool {
        let mut asks = Command::new(program_path("pg_isready"));
        asks.args(["-q", "-t", "1", "-h", "127.0.0.1", "-p", &self.port.to_string()]);
        asks.status().is_ok_and(|status| status.success())
    }

    /// Sends a signal to the server, and also to its sessions unless it is a clean shutdown.
    fn signal(&self, signal: &str) {
        let Some(pid) = self.process.lock().as_ref().map(Child::id) else { return };
        let mut pids = vec![pid.to_string()];
        if signal != "-INT" {
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
            pids.extend(children.split_whitespace().map(str::to_owned));
        }
        let sent = Command::new("kill").arg(signal).args(pids).stderr(Stdio::null()).status();
        assert!(sent.is_ok(), "kill runs");
    }

    fn wait_until_gone(&self) {
        if let Some(mut child) = self.process.lock().take() {
            drop(child.wait());
        }
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        self.resume();
        self.signal("-INT");
        self.wait_until_gone();
    }
}

impl GuardedFolder {
    /// `pid_file` is the file in the directory that contains the process's pid.
    fn new(pid_file: &str) -> Self {
        let made = tempfile::Builder::new().prefix("ibid-postgres-").tempdir().expect("a folder");
        let path = made.keep();
        give_to_server_user(&path);
        let mut guard = Command::new("sh");
        guard.args(["-c", GUARD_SCRIPT, "guard"]).arg(path.join(pid_file)).arg(&path);
        guard.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Self { path, guard: guard.spawn().expect("sh runs") }
    }
}

impl Drop for GuardedFolder {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        drop(self.guard.wait());
    }
}

/// A data directory to copy, created once per process.
fn template_data_folder() -> &'static Path {
    static TEMPLATE: OnceLock<GuardedFolder> = OnceLock::new();
    let folder = TEMPLATE.get_or_init(|| {
        let folder = GuardedFolder::new("none");
        let mut makes = unprivileged_command(program_path("initdb"));
        makes.arg("-D").arg(folder.path.join("data"));
        makes.args(["-U", "postgres", "-A", "trust", "-N", "-E", "UTF8", "--locale=C", "--wal-segsize=1"]);
        let made = makes.output().expect("initdb runs");
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        folder
    });
    Box::leak(folder.path.join("data").into_boxed_path())
}

fn program_path(name: &str) -> PathBuf {
    let path = Path::new(POSTGRES_BIN_FOLDER).join(name);
    assert!(path.exists(), "{} is missing: install the Debian package postgresql-15", path.display());
    path
}

/// PostgreSQL refuses to run as root; then it runs as the user that its package creates.
fn unprivileged_command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]).arg(program).current_dir("/");
    command
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|this| this.uid() == 0)
}

/// Gives a directory to the user that runs the server.
fn give_to_server_user(path: &Path) {
    if is_root() {
        let given = Command::new("chown").arg("postgres:postgres").arg(path).status();
        let why = "there is no user postgres: install the Debian package postgresql-15";
        assert!(given.is_ok_and(|status| status.success()), "{why}");
    }
}

fn write(path: &Path, content: &str) {
    let written = fs::File::create(path).and_then(|mut file| file.write_all(content.as_bytes()));
    written.expect("a file in our folder");
}
