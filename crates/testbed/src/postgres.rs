//! PostgreSQL and pgbouncer. They never run as root.

use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use crate::{
    certificates::{CertificateAuthority, IssuedCertificate},
    server_process::{ServerFolder, ServerProcess, command_as, deref_to_process},
};

const BIN_FOLDER: &str = "/usr/lib/postgresql/15/bin";
/// PostgreSQL refuses to run as root; then it runs as the user that its package creates.
const USER: &str = "postgres";

/// The roles of every server: `migrator` creates schemas, `gateway` is the store's, `auditor` is an administrator,
/// `alice` is an ordinary user. None needs a password.
const CREATE_ROLES_SQL: &str = "CREATE ROLE ibid_service NOLOGIN; CREATE ROLE ibid_admin NOLOGIN;
    CREATE ROLE migrator LOGIN CREATEROLE; CREATE ROLE gateway LOGIN IN ROLE ibid_service;
    CREATE ROLE auditor LOGIN IN ROLE ibid_admin; CREATE ROLE alice LOGIN;";

#[derive(Debug)]
pub struct TestPostgres {
    process: ServerProcess,
    settings: Vec<String>,
    databases: AtomicU32,
}

deref_to_process!(TestPostgres);

impl TestPostgres {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with these settings, such as `fsync=off`.
    pub fn start_with(settings: &[&str]) -> Self {
        let process = ServerProcess::new("postgresql-15", Some(USER));
        let copied = Command::new("cp").arg("-a").arg(template_data_folder()).arg(process.path("data")).status();
        assert!(copied.is_ok_and(|status| status.success()), "the template cannot be copied");
        let settings = settings.iter().map(|setting| (*setting).into()).collect();
        let server = Self { process, settings, databases: AtomicU32::new(0) };
        server.restart();
        server.sql("postgres", CREATE_ROLES_SQL);
        server
    }

    /// Starts a server with TLS and a self-signed certificate for `localhost`. Returns also the certificate's file; its
    /// key is beside it, in `server.key`.
    pub fn start_with_tls() -> (Self, PathBuf) {
        let mut server = Self::start();
        let signed = rcgen::generate_simple_self_signed(vec!["localhost".into()]).expect("a certificate");
        let certificate = server.write_readable_file("server.crt", signed.cert.pem().as_bytes(), 0o644);
        let key = server.write_readable_file("server.key", signed.signing_key.serialize_pem().as_bytes(), 0o600);
        // Clients may present the same certificate, which identifies them.
        let clients = server.write_readable_file("clients.crt", signed.cert.pem().as_bytes(), 0o644);
        server.settings.extend([
            "ssl=on".into(),
            format!("ssl_cert_file={}", certificate.display()),
            format!("ssl_key_file={}", key.display()),
            format!("ssl_ca_file={}", clients.display()),
        ]);
        server.stop();
        server.restart();
        (server, certificate)
    }

    /// Replaces the certificate of a server with TLS, and the CA for its clients. Sessions continue.
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
        let path = self.path(name);
        fs::write(&path, content).expect("a file in our folder");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("our own file");
        let owner = fs::metadata(self.path("data")).expect("our own folder");
        chown(&path, Some(owner.uid()), Some(owner.gid())).expect("our own file");
        path
    }

    /// A server for all tests of this process that do not disturb it.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<TestPostgres> = OnceLock::new();
        SHARED.get_or_init(|| Self::start_with(&["max_connections=300"]))
    }

    pub fn url(&self, role: &str, database: &str) -> String {
        format!("postgres://{role}@127.0.0.1:{}/{database}", self.port())
    }

    /// Creates a database, owned by `migrator`. Returns its name.
    pub fn create_database(&self) -> String {
        let name = format!("test_{}", self.databases.fetch_add(1, Relaxed));
        self.sql("postgres", &format!("CREATE DATABASE {name} OWNER migrator TEMPLATE template0"));
        name
    }

    /// Runs SQL as superuser. Returns the selected rows as lines, with columns separated by `|`.
    pub fn sql(&self, database: &str, sql: &str) -> String {
        self.sql_as("postgres", database, sql).unwrap_or_else(|why| panic!("{sql}: {why}"))
    }

    /// Runs SQL as a role. The error is psql's output.
    pub fn sql_as(&self, role: &str, database: &str, sql: &str) -> Result<String, String> {
        self.psql(role, database, &["-c".as_ref(), sql.as_ref()])
    }

    /// Runs a file of SQL as a role. The error is psql's output.
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
        self.stop_with("-INT");
    }

    /// Starts it again on the same port, after a stop or kill.
    pub fn restart(&self) {
        let mut server = Command::new(program_path("postgres"));
        server.arg("-D").arg(self.path("data")).args(["-p", &self.port().to_string()]);
        let fixed = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "shared_buffers=16MB"];
        for setting in fixed.into_iter().chain(self.settings.iter().map(String::as_str)) {
            server.args(["-c", setting]);
        }
        self.process.start(&server, || self.is_ready());
    }

    fn is_ready(&self) -> bool {
        let mut asks = Command::new(program_path("pg_isready"));
        asks.args(["-q", "-t", "1", "-h", "127.0.0.1", "-p", &self.port().to_string()]);
        asks.status().is_ok_and(|status| status.success())
    }
}

impl Drop for TestPostgres {
    /// A clean shutdown also frees its shared memory.
    fn drop(&mut self) {
        self.resume();
        self.stop();
    }
}

/// pgbouncer in transaction mode: each statement may get another session.
#[derive(Debug)]
pub struct PgBouncer(ServerProcess);

impl PgBouncer {
    /// Starts pgbouncer in front of a server.
    pub fn start(server: &TestPostgres) -> Self {
        let process = ServerProcess::new("pgbouncer", Some(USER));
        let port = process.port();
        let users = process.write("users", "\"gateway\" \"\"\n\"migrator\" \"\"\n\"postgres\" \"\"\n");
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = trust\nauth_file = {}\npool_mode = transaction\n\
             default_pool_size = 5\nmax_client_conn = 2000\nserver_reset_query =\nquery_wait_timeout = 10\n",
            server.port(),
            users.display()
        );
        let mut command = Command::new("/usr/sbin/pgbouncer");
        command.arg(process.write("ini", &settings));
        process.start(&command, || process.answers(b"", b""));
        Self(process)
    }

    /// The URL of a database for a role, with unnamed statements.
    pub fn url(&self, role: &str, database: &str) -> String {
        format!("postgres://{role}@127.0.0.1:{}/{database}?statements=unnamed", self.0.port())
    }
}

/// A data directory to copy, created once per process.
fn template_data_folder() -> PathBuf {
    static TEMPLATE: OnceLock<ServerFolder> = OnceLock::new();
    let folder = TEMPLATE.get_or_init(|| {
        let folder = ServerFolder::new(Some(USER));
        let mut makes = command_as(Some(USER), &[]);
        makes.arg(program_path("initdb")).arg("-D").arg(folder.path("data"));
        makes.args(["-U", "postgres", "-A", "trust", "-N", "-E", "UTF8", "--locale=C", "--wal-segsize=1"]);
        let made = makes.output().expect("initdb runs");
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        folder
    });
    folder.path("data")
}

fn program_path(name: &str) -> PathBuf {
    let path = Path::new(BIN_FOLDER).join(name);
    assert!(path.exists(), "{} is missing: install the Debian package postgresql-15", path.display());
    path
}
