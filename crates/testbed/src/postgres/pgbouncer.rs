use std::{
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{GuardedFolder, PostgresServer, START_TIMEOUT, give_to_server_user, unprivileged_command, write};
use crate::child_process::free_port;

/// pgbouncer in transaction mode: each statement may get another session.
#[derive(Debug)]
pub struct PgBouncer {
    port: u16,
    process: Child,
    _folder: GuardedFolder,
}

impl PgBouncer {
    /// Starts pgbouncer in front of a server.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(server: &PostgresServer) -> Self {
        let program = "/usr/sbin/pgbouncer";
        assert!(Path::new(program).exists(), "{program} is missing: install the Debian package pgbouncer");
        let folder = GuardedFolder::new("pid");
        let (port, path) = (free_port(), folder.path.display());
        let users = folder.path.join("users");
        write(&users, "\"gateway\" \"\"\n\"migrator\" \"\"\n\"postgres\" \"\"\n");
        let config = folder.path.join("ini");
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = trust\nauth_file = {path}/users\npidfile = {path}/pid\npool_mode = transaction\n\
             default_pool_size = 5\nmax_client_conn = 2000\nserver_reset_query =\nquery_wait_timeout = 10\n",
            server.port()
        );
        write(&config, &settings);
        for file in [&users, &config] {
            give_to_server_user(file);
        }
        let mut command = unprivileged_command(program);
        command.arg(&config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().expect("it starts");
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(began.elapsed() < START_TIMEOUT, "pgbouncer did not start");
            thread::sleep(Duration::from_millis(20));
        }
        Self { port, process, _folder: folder }
    }

    /// The URL of a database for a role, with unnamed statements.
    pub fn url(&self, role: &str, database: &str) -> String {
        format!("postgres://{role}@127.0.0.1:{}/{database}?statements=unnamed", self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        drop(Command::new("kill").arg(self.process.id().to_string()).status());
        drop(self.process.wait());
    }
}
