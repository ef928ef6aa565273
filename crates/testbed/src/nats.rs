use std::{io::Read, net::TcpStream, process::Command, time::Duration};

use crate::server_process::{ServerProcess, free_port};

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
    port: u16,
}

impl TestNats {
    pub fn start() -> Self {
        let server = Self { process: ServerProcess::new("nats-server", None), port: free_port() };
        server.restart();
        server
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Starts it again on the same port.
    pub fn restart(&self) {
        let mut command = Command::new("/usr/sbin/nats-server");
        command.args(["--addr", "127.0.0.1", "--port", &self.port.to_string(), "--jetstream"]);
        command.arg("--store_dir").arg(self.process.path("streams"));
        self.process.start(&command, || self.is_ready());
    }

    pub fn kill(&self) {
        self.process.kill();
    }

    /// The server speaks first once it is ready.
    fn is_ready(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let mut first = [0; 5];
        stream.set_read_timeout(Some(Duration::from_secs(5))).is_ok()
            && stream.read_exact(&mut first).is_ok()
            && &first == b"INFO "
    }
}
