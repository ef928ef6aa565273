use std::sync::OnceLock;

use super::{Options, Server};

/// The name under which the sentinels know the primary.
const PRIMARY_NAME: &str = "ibid-primary";

/// A primary, a replica, and three sentinels that watch them.
#[derive(Debug)]
pub struct RedisSentinels {
    /// The one that is the primary at first.
    pub primary: Server,
    /// The one that is its replica at first.
    pub replica: Server,
    /// Those that watch.
    pub sentinels: Vec<Server>,
}

impl RedisSentinels {
    /// Returns once all know each other.
    ///
    /// # Panics
    /// If they cannot be started, saying why.
    pub fn start() -> Self {
        let primary = Server::start_with_config(&["repl-diskless-sync-delay 0"]);
        let of = format!("replicaof 127.0.0.1 {}", primary.port());
        let replica = Server::start_with_config(&["repl-diskless-sync-delay 0", &of]);
        replica.until("the replica has caught up", || replica.info("master_link_status") == "up");
        let watch = [
            format!("sentinel monitor {PRIMARY_NAME} 127.0.0.1 {} 2", primary.port()),
            format!("sentinel down-after-milliseconds {PRIMARY_NAME} 2000"),
            format!("sentinel failover-timeout {PRIMARY_NAME} 6000"),
        ];
        let sentinel = || Server::launch(Options { config: watch.to_vec(), ..Options::default() }, true);
        let sentinels: Vec<Server> = (0..3).map(|_| sentinel()).collect();
        for sentinel in &sentinels {
            sentinel.until("the sentinels know each other and the replica", || {
                sentinel.try_cli(&["SENTINEL", "CKQUORUM", PRIMARY_NAME]).is_some_and(|says| says.starts_with("OK 3"))
                    && sentinel.cli(&["SENTINEL", "REPLICAS", PRIMARY_NAME]).contains(&replica.port().to_string())
            });
        }
        Self { primary, replica, sentinels }
    }

    /// One set for all tests of this process. Not for tests that make it fail over.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<RedisSentinels> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// `redis+sentinel://…`
    pub fn url(&self) -> String {
        let all: Vec<String> = self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port())).collect();
        format!("redis+sentinel://{}/{PRIMARY_NAME}", all.join(","))
    }
}

impl Server {
    /// One sentinel that knows this server as a primary, and speaks TLS if that does.
    ///
    /// # Panics
    /// If it cannot be started, saying why.
    pub fn start_sentinel(&self) -> Server {
        let watch = format!("sentinel monitor {PRIMARY_NAME} 127.0.0.1 {} 1", self.port());
        Server::launch(Options { config: vec![watch], tls: self.options.tls, password: None }, true)
    }

    /// The end of the URL by which a sentinel is asked for the primary.
    pub fn sentinel_url_suffix(&self) -> &'static str {
        PRIMARY_NAME
    }
}
