use std::{path::PathBuf, process::Command, sync::OnceLock};

use crate::server_process::{ServerProcess, free_port};

/// Not the wrapper in /usr/sbin, which switches to the user of the system's own node.
const SERVER_PROGRAM: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";

/// A RabbitMQ node without plugins, as the user that runs the test. It has its own port mapper (`epmd`), so it neither
/// sees nor disturbs other nodes of this machine.
#[derive(Debug)]
pub struct TestRabbitmq {
    node: ServerProcess,
    mapper: ServerProcess,
    distribution_port: u16,
}

impl TestRabbitmq {
    pub fn start() -> Self {
        let node = ServerProcess::new("rabbitmq-server", None);
        let config = format!(
            "listeners.tcp.1 = 127.0.0.1:{}\nlog.console = false\nlog.file = log\n\
             disk_free_limit.absolute = 1MB\nvm_memory_high_watermark.absolute = 1GB\n",
            node.port()
        );
        node.write("rabbitmq.conf", &config);
        node.write("enabled_plugins", "[].\n");
        node.write("env.conf", "");
        let mapper = ServerProcess::new("erlang-base", None);
        let server = Self { node, mapper, distribution_port: free_port() };
        server.restart();
        server
    }

    /// A node for all tests of this process that do not disturb it: a start takes seconds.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<TestRabbitmq> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// `amqp://…`, as the user guest.
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.node.port())
    }

    /// All ports of the node and its port mapper.
    pub fn ports(&self) -> [u16; 3] {
        [self.node.port(), self.distribution_port, self.mapper.port()]
    }

    /// The directory of all its files.
    pub fn folder(&self) -> PathBuf {
        self.node.path("")
    }

    /// Starts it again on the same ports, with its data on disk.
    pub fn restart(&self) {
        self.kill();
        let mut mapper = Command::new("epmd");
        mapper.args(["-port", &self.mapper.port().to_string(), "-address", "127.0.0.1"]);
        self.mapper.start(&mapper, || true);
        let mut node = Command::new(SERVER_PROGRAM);
        node.env("HOME", self.folder())
            .env("ERL_EPMD_PORT", self.mapper.port().to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODENAME", format!("ibid{}@localhost", self.node.port()))
            .env("RABBITMQ_NODE_PORT", self.node.port().to_string())
            .env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_DIST_PORT", self.distribution_port.to_string())
            .env("RABBITMQ_MNESIA_BASE", self.node.path("data"))
            .env("RABBITMQ_LOG_BASE", self.folder())
            .env("RABBITMQ_PID_FILE", self.node.path("pid"))
            .env("RABBITMQ_CONFIG_FILE", self.node.path("rabbitmq.conf"))
            .env("RABBITMQ_CONF_ENV_FILE", self.node.path("env.conf"))
            .env("RABBITMQ_GENERATED_CONFIG_DIR", self.node.path("config"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", self.node.path("enabled_plugins"))
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "+S 2:2 -kernel inet_dist_use_interface {127,0,0,1}")
            // The script then becomes the node instead of waiting for it, so killing the process kills the node.
            .env("detached", "true");
        // Once it is ready, it answers the protocol's greeting with a method frame: connection.start.
        self.node.start(&node, || self.node.answers(b"AMQP\0\0\x09\x01", &[1]));
    }

    pub fn kill(&self) {
        self.node.kill();
        self.mapper.kill();
    }
}
