//! A RabbitMQ node that a test starts privately.
//!
//! Invariants: it listens only on 127.0.0.1, on free ports, with its data, logs and home in its own directory; no
//! plugins; as the user that runs the test. It has its own port mapper (`epmd`), so it neither sees nor disturbs other
//! nodes of this machine. Both end with their owner, however that ends. A missing program fails the test and names its
//! package.

use std::{
    fmt, fs,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    sync::OnceLock,
    thread::sleep,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::child_process::{ServerFolder, free_port, spawn};

/// Not the wrapper in /usr/sbin, which switches to the user of the system's own node.
const SERVER_PROGRAM: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";
/// A node starts slowly, especially if many tests run on few cores.
const START_TIMEOUT: Duration = Duration::from_secs(180);

/// A running node.
pub struct RabbitmqServer {
    folder: ServerFolder,
    amqp_port: u16,
    distribution_port: u16,
    mapper_port: u16,
    mapper: Mutex<Option<Child>>,
    node: Mutex<Option<Child>>,
}

impl RabbitmqServer {
    /// Starts a node.
    ///
    /// # Panics
    /// If it cannot be started, with the reason.
    pub fn start() -> Self {
        assert!(
            Path::new(SERVER_PROGRAM).exists(),
            "{SERVER_PROGRAM} is missing: install the Debian package rabbitmq-server"
        );
        let folder = ServerFolder::new();
        let (amqp, distribution, mapper_port) = (free_port(), free_port(), free_port());
        let config = format!(
            "listeners.tcp.1 = 127.0.0.1:{amqp}\nlog.console = false\nlog.file = node.log\n\
             disk_free_limit.absolute = 1MB\nvm_memory_high_watermark.absolute = 1GB\n"
        );
        let write = |name: &str, content: &str| fs::write(folder.path().join(name), content).expect("it is written");
        write("rabbitmq.conf", &config);
        write("enabled_plugins", "[].\n");
        write("env.conf", "");
        let server = Self {
            folder,
            amqp_port: amqp,
            distribution_port: distribution,
            mapper_port,
            mapper: Mutex::new(None),
            node: Mutex::new(None),
        };
        server.restart();
        server
    }

    /// A node for all tests of this process that do not disturb it: a start takes seconds.
    ///
    /// # Panics
    /// If it cannot be started, with the reason.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<RabbitmqServer> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// `amqp://…`, as the user guest.
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.amqp_port)
    }

    /// All ports of the node and its port mapper.
    pub fn ports(&self) -> [u16; 3] {
        [self.amqp_port, self.distribution_port, self.mapper_port]
    }

    /// The directory of all its files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts it again after [`kill`](Self::kill), on the same ports, with its data on disk.
    ///
    /// # Panics
    /// If it is not ready in time, with its log.
    pub fn restart(&self) {
        self.kill();
        let path = |name: &str| self.folder.path().join(name);
        let mut mapper = Command::new("epmd");
        mapper.args(["-port", &self.mapper_port.to_string(), "-address", "127.0.0.1"]);
        *self.mapper.lock() = Some(spawn(mapper, "erlang-base"));
        let mut node = Command::new(SERVER_PROGRAM);
        node.env("HOME", self.folder.path())
            .env("ERL_EPMD_PORT", self.mapper_port.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODENAME", format!("ibid{}@localhost", self.amqp_port))
            .env("RABBITMQ_NODE_PORT", self.amqp_port.to_string())
            .env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_DIST_PORT", self.distribution_port.to_string())
            .env("RABBITMQ_MNESIA_BASE", path("data"))
            .env("RABBITMQ_LOG_BASE", path("logs"))
            .env("RABBITMQ_PID_FILE", path("pid"))
            .env("RABBITMQ_CONFIG_FILE", path("rabbitmq.conf"))
            .env("RABBITMQ_CONF_ENV_FILE", path("env.conf"))
            .env("RABBITMQ_GENERATED_CONFIG_DIR", path("config"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", path("enabled_plugins"))
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "+S 2:2 -kernel inet_dist_use_interface {127,0,0,1}")
            // The script then becomes the node instead of waiting for it, so killing the process kills the node.
            .env("detached", "true");
        node.stdin(Stdio::null());
        *self.node.lock() = Some(spawn(node, "rabbitmq-server"));
        let began = Instant::now();
        while !self.is_ready() {
            let ended = self.node.lock().as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "rabbitmq-server ended at once ({ended:?}):\n{}", self.log());
            assert!(
                began.elapsed() < START_TIMEOUT,
                "rabbitmq-server is not ready after {START_TIMEOUT:?}:\n{}",
                self.log()
            );
            sleep(Duration::from_millis(100));
        }
    }

    /// Kills it, as a crash would.
    pub fn kill(&self) {
        for child in [&self.node, &self.mapper] {
            if let Some(mut child) = child.lock().take() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }

    /// The node answers the protocol's greeting once it is ready.
    fn is_ready(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.amqp_port)) else { return false };
        let mut kind = [0; 1];
        stream.set_read_timeout(Some(Duration::from_secs(5))).is_ok()
            && stream.write_all(b"AMQP\0\0\x09\x01").is_ok()
            && stream.read_exact(&mut kind).is_ok()
            // A method frame: connection.start.
            && kind == [1]
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.folder.path().join("logs/node.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }
}

impl Drop for RabbitmqServer {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- the log of rabbitmq-server on port {} ---\n{}\n---", self.amqp_port, self.log());
        }
    }
}

impl fmt::Debug for RabbitmqServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitmqServer").field("amqp", &self.amqp_port).finish_non_exhaustive()
    }
}
