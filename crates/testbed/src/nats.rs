use std::{io::Read, net::TcpStream, process::Command, time::Duration};

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
        self.process.start(&command, || self.is_ready());
    }

    /// The server speaks first once it is ready.
    fn is_ready(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port())) else { return false };
        let mut first = [0; 5];
        stream.set_read_timeout(Some(Duration::from_secs(5))).is_ok()
            && stream.read_exact(&mut first).is_ok()
            && &first == b"INFO "
    }
}
