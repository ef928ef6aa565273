use std::process::Command;

use crate::server_process::{ServerProcess, deref_to_process};

/// A NATS server with JetStream. Its streams stay across restarts.
///
/// ```no_run
/// let server = testbed::TestNats::start();
/// server.kill();
/// server.restart();
/// println!("{}", server.url());
/// ```
#[derive(Debug)]
pub struct TestNats {
    process: ServerProcess,
}

deref_to_process!(TestNats);

impl TestNats {
    pub fn start() -> Self {
        let server = Self { process: ServerProcess::new("nats-server", None) };
        server.restart();
        server
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port())
    }

    /// Starts it again on the same port.
    pub fn restart(&self) {
        let mut command = Command::new("/usr/sbin/nats-server");
        command.args(["--addr", "127.0.0.1", "--port", &self.port().to_string(), "--jetstream"]);
        command.arg("--store_dir").arg(self.path("streams"));
        // The server speaks first once it is ready.
        self.process.start(&command, || self.answers(b"", b"INFO "));
    }
}
