//! A NATS server with JetStream that a test starts privately.
//!
//! Invariants: it listens only on 127.0.0.1, on a free port, with its streams in its own directory; it ends with its
//! owner, however that ends. A missing program fails the test and names its package.
//!
//! ```no_run
//! use testbed::NatsServer;
//!
//! let server = NatsServer::start();
//! println!("{}", server.url());
//! server.kill();
//! server.restart();
//! ```

use std::{
    fmt, fs,
    io::Read,
    net::TcpStream,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::child_process::{ServerFolder, free_port, spawn};

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A running server.
pub struct NatsServer {
    folder: ServerFolder,
    port: u16,
    child: Mutex<Option<Child>>,
}

impl NatsServer {
    /// Starts a server with JetStream.
    ///
    /// # Panics
    /// If it cannot be started, with the reason.
    pub fn start() -> Self {
        let server = Self { folder: ServerFolder::new(), port: free_port(), child: Mutex::new(None) };
        server.restart();
        server
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `nats://…`
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Starts it again after [`kill`](Self::kill), on the same port, with its streams on disk.
    ///
    /// # Panics
    /// If it is not ready in time, with its log.
    pub fn restart(&self) {
        self.kill();
        let mut command = Command::new("/usr/sbin/nats-server");
        command.args(["--addr", "127.0.0.1", "--port", &self.port.to_string(), "--jetstream"]);
        command.arg("--store_dir").arg(self.folder.path().join("streams"));
        command.arg("--log").arg(self.folder.path().join("log"));
        command.stdin(Stdio::null());
        *self.child.lock() = Some(spawn(command, "nats-server"));
        let began = Instant::now();
        while !self.is_ready() {
            let ended = self.child.lock().as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "nats-server ended at once ({ended:?}):\n{}", self.log());
            assert!(
                began.elapsed() < START_TIMEOUT,
                "nats-server is not ready after {START_TIMEOUT:?}:\n{}",
                self.log()
            );
            sleep(Duration::from_millis(20));
        }
    }

    /// Kills it, as a crash would.
    pub fn kill(&self) {
        if let Some(mut child) = self.child.lock().take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// The server speaks first once it is ready.
    fn is_ready(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let mut first = [0; 5];
        stream.set_read_timeout(Some(Duration::from_secs(5))).is_ok()
            && stream.read_exact(&mut first).is_ok()
            && &first == b"INFO "
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- the log of nats-server on port {} ---\n{}\n---", self.port, self.log());
        }
    }
}

impl fmt::Debug for NatsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsServer").field("port", &self.port).finish_non_exhaustive()
    }
}
