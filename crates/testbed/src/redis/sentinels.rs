use std::sync::OnceLock;

use super::{RedisOptions, TestRedis};

/// The sentinels' name of the primary.
const PRIMARY_NAME: &str = "ibid-primary";

/// A primary, a replica, and three sentinels that monitor them.
#[derive(Debug)]
pub struct RedisSentinels {
    pub primary: TestRedis,
    pub replica: TestRedis,
    pub sentinels: Vec<TestRedis>,
}

impl RedisSentinels {
    /// Starts all servers, and waits until they know each other.
    pub fn start() -> Self {
        Self::launch(false)
    }

    /// As [`Self::start`], with Valkey.
    pub fn start_valkey() -> Self {
        Self::launch(true)
    }

    fn launch(valkey: bool) -> Self {
        let primary = TestRedis::start_configured(&["repl-diskless-sync-delay 0"], valkey);
        let replica = primary.start_replica();
        let watch = [
            format!("sentinel monitor {PRIMARY_NAME} 127.0.0.1 {} 2", primary.port()),
            format!("sentinel down-after-milliseconds {PRIMARY_NAME} 2000"),
            format!("sentinel failover-timeout {PRIMARY_NAME} 6000"),
        ];
        let options = RedisOptions { config: watch.to_vec(), valkey, ..RedisOptions::default() };
        let sentinel = || TestRedis::launch(options.clone(), true);
        let sentinels: Vec<TestRedis> = (0..3).map(|_| sentinel()).collect();
        for sentinel in &sentinels {
            sentinel.until("the sentinels know each other and the replica", || {
                sentinel.try_cli(&["SENTINEL", "CKQUORUM", PRIMARY_NAME]).is_some_and(|says| says.starts_with("OK 3"))
                    && sentinel.cli(&["SENTINEL", "REPLICAS", PRIMARY_NAME]).contains(&replica.port().to_string())
            });
        }
        Self { primary, replica, sentinels }
    }

    /// A set for all tests of this process that do not cause a failover.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<RedisSentinels> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// As [`Self::shared`], with Valkey.
    pub fn shared_valkey() -> &'static Self {
        static SHARED: OnceLock<RedisSentinels> = OnceLock::new();
        SHARED.get_or_init(Self::start_valkey)
    }

    pub fn url(&self) -> String {
        let all: Vec<String> = self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port())).collect();
        format!("{}+sentinel://{}/{PRIMARY_NAME}", self.primary.scheme(), all.join(","))
    }
}

impl TestRedis {
    /// Starts a sentinel that monitors this server as a primary, with TLS if the server has TLS.
    pub fn start_sentinel(&self) -> TestRedis {
        let watch = format!("sentinel monitor {PRIMARY_NAME} 127.0.0.1 {} 1", self.port());
        TestRedis::launch(RedisOptions { config: vec![watch], tls: self.options.tls, ..RedisOptions::default() }, true)
    }

    /// The last part of a sentinel URL: the name of the primary.
    pub fn sentinel_url_suffix(&self) -> &'static str {
        PRIMARY_NAME
    }
}
