use std::process::Command;

use super::{TestPostgres, USER};
use crate::server_process::ServerProcess;

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
