//! Redis: alone behind links, watched by sentinels, as a cluster.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use testbed::{RedisCluster, RedisSentinels, TestRedis};
use tokio::task::spawn_blocking;

use super::{Server, StoreBackend};
use crate::fault::{ChaosFault, CustomFault, FaultFuture, ServerProcess};

/// How long a primary stays away: longer than it takes the others to notice and to choose another.
const PRIMARY_DOWNTIME: std::ops::Range<Duration> = Duration::from_secs(4)..Duration::from_secs(7);

/// Finds one server among those that belong together.
type PickServer<T> = fn(&T, usize) -> &TestRedis;

/// One server of a set that lives as long as any of its processes.
struct RedisProcess<T> {
    name: String,
    set: Arc<T>,
    nth: usize,
    pick: PickServer<T>,
}

impl<T: Send + Sync + 'static> RedisProcess<T> {
    /// Redis's own harness blocks.
    fn blocking(&self, act: fn(&TestRedis)) -> FaultFuture<'_> {
        let (set, nth, pick) = (Arc::clone(&self.set), self.nth, self.pick);
        Box::pin(async move {
            let done = spawn_blocking(move || act(pick(&set, nth))).await;
            done.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        })
    }
}

impl<T: Send + Sync + 'static> ServerProcess for RedisProcess<T> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn kill(&self) -> FaultFuture<'_> {
        self.blocking(|server| server.kill())
    }

    fn restart(&self) -> FaultFuture<'_> {
        self.blocking(TestRedis::restart)
    }

    fn pause(&self) -> FaultFuture<'_> {
        self.blocking(|server| server.pause())
    }

    fn resume(&self) -> FaultFuture<'_> {
        self.blocking(|server| server.resume())
    }
}

fn server<T: Send + Sync + 'static>(name: &str, set: &Arc<T>, nth: usize, pick: PickServer<T>, linked: bool) -> Server {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, pick(set, nth).port()));
    let process = Arc::new(RedisProcess { name: name.to_owned(), set: Arc::clone(set), nth, pick });
    Server { process, addr, via_proxy: linked }
}

/// Killed for so long that the others choose another primary; comes back as that one's replica, having lost what only it
/// had.
fn failover<T: Send + Sync + 'static>(
    name: &str, set: &Arc<T>, nth: usize, pick: PickServer<T>,
) -> Box<dyn ChaosFault> {
    let process = Arc::new(RedisProcess { name: name.to_owned(), set: Arc::clone(set), nth, pick });
    let again = Arc::clone(&process);
    let inject = move || {
        let process = Arc::clone(&process);
        async move { process.kill().await }
    };
    let heal = move || {
        let process = Arc::clone(&again);
        async move { process.restart().await }
    };
    CustomFault::from(name, "away until another takes its place", PRIMARY_DOWNTIME, inject, heal)
}

/// The same of whichever is the primary, and only once its replica is in step with it. Nothing happens if it never is.
fn orderly_failover(set: &Arc<RedisSentinels>) -> Box<dyn ChaosFault> {
    let members = [0, 1].map(|nth| {
        Arc::new(RedisProcess { name: "redis".to_owned(), set: Arc::clone(set), nth, pick: SentinelBackend::pick })
    });
    let killed: Arc<Mutex<Option<Arc<RedisProcess<RedisSentinels>>>>> = Arc::default();
    let again = Arc::clone(&killed);
    let inject = move || {
        let (members, killed) = (members.clone(), Arc::clone(&killed));
        async move {
            let looked = members.clone();
            let found = spawn_blocking(move || find_replicated_primary(&looked)).await.ok().flatten();
            if let Some(primary) = &found {
                primary.kill().await;
            }
            *killed.lock() = found;
        }
    };
    let heal = move || {
        let killed = again.lock().take();
        async move {
            if let Some(primary) = killed {
                primary.restart().await;
            }
        }
    };
    CustomFault::from("the primary", "away until another takes its place", PRIMARY_DOWNTIME, inject, heal)
}

/// The primary, once its replica has all that it has.
fn find_replicated_primary(members: &[Arc<RedisProcess<RedisSentinels>>]) -> Option<Arc<RedisProcess<RedisSentinels>>> {
    for _ in 0..80 {
        for member in members {
            let info = (member.pick)(&member.set, member.nth).try_cli(&["INFO", "replication"]).unwrap_or_default();
            if info.contains("role:master") && info.contains("state=online") && info.contains("lag=0") {
                return Some(Arc::clone(member));
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    None
}

/// A server that is reached over links.
pub(super) fn redis_server(redis: &Arc<TestRedis>) -> Server {
    server("redis", redis, 0, |redis, _| redis, true)
}

/// One server that syncs every write, unless told otherwise.
pub(super) struct RedisBackend(Arc<TestRedis>);

impl RedisBackend {
    /// With these lines in its configuration.
    pub(super) fn start(config: &[&str]) -> RedisBackend {
        RedisBackend(Arc::new(TestRedis::start_with_config(config)))
    }

    pub(super) fn start_valkey() -> RedisBackend {
        RedisBackend(Arc::new(TestRedis::start_valkey()))
    }
}

impl StoreBackend for RedisBackend {
    fn servers(&self) -> Vec<Server> {
        vec![redis_server(&self.0)]
    }

    fn store(&self, at: &dyn Fn(&str) -> SocketAddr) -> String {
        let own = format!("127.0.0.1:{}", self.0.port());
        format!("[store]\nurl = \"{}\"", self.0.url().replace(&own, &at("redis").to_string()))
    }

    fn bytes(&self, _: &Path) -> u64 {
        self.0.info("used_memory").parse().expect("Redis says how much it uses")
    }
}

/// A primary and a replica, watched by three sentinels.
pub(super) struct SentinelBackend {
    set: Arc<RedisSentinels>,
    /// Nothing is killed before its replica has all that it had when somebody looked.
    orderly: bool,
    wait_replicas: u32,
}

impl SentinelBackend {
    pub(super) fn start() -> SentinelBackend {
        SentinelBackend { set: Arc::new(RedisSentinels::start()), orderly: false, wait_replicas: 0 }
    }

    /// Fails over in good order; with gateways that wait for replicas, in any order.
    pub(super) fn failing_over(wait_replicas: u32) -> SentinelBackend {
        SentinelBackend { orderly: wait_replicas == 0, wait_replicas, ..SentinelBackend::start() }
    }

    fn pick(set: &RedisSentinels, nth: usize) -> &TestRedis {
        [&set.primary, &set.replica][nth]
    }
}

impl StoreBackend for SentinelBackend {
    fn servers(&self) -> Vec<Server> {
        let names = ["redis one", "redis two"];
        let servers = names.iter().enumerate();
        servers.map(|(nth, name)| server(name, &self.set, nth, SentinelBackend::pick, false)).collect()
    }

    fn store(&self, _: &dyn Fn(&str) -> SocketAddr) -> String {
        format!("[store]\nurl = \"{}\"\nwait_replicas = {}", self.set.url(), self.wait_replicas)
    }

    fn other_faults(&self) -> Vec<Box<dyn ChaosFault>> {
        if self.orderly {
            return vec![orderly_failover(&self.set)];
        }
        let names = ["redis one", "redis two"];
        names.iter().enumerate().map(|(nth, name)| failover(name, &self.set, nth, SentinelBackend::pick)).collect()
    }
}

/// Three primaries with a replica each.
pub(super) struct ClusterBackend(Arc<RedisCluster>);

impl ClusterBackend {
    pub(super) fn start() -> ClusterBackend {
        ClusterBackend(Arc::new(RedisCluster::start()))
    }

    fn pick(set: &RedisCluster, nth: usize) -> &TestRedis {
        &set.primaries[nth]
    }
}

impl StoreBackend for ClusterBackend {
    fn servers(&self) -> Vec<Server> {
        let servers = (0..self.0.primaries.len()).map(|nth| (nth, format!("redis {nth}")));
        servers.map(|(nth, name)| server(&name, &self.0, nth, ClusterBackend::pick, false)).collect()
    }

    fn store(&self, _: &dyn Fn(&str) -> SocketAddr) -> String {
        format!("[store]\nurl = \"{}\"", self.0.url())
    }

    fn other_faults(&self) -> Vec<Box<dyn ChaosFault>> {
        let mut faults = vec![failover("redis 0", &self.0, 0, ClusterBackend::pick)];
        let (there, back) = (Arc::clone(&self.0), Arc::clone(&self.0));
        let moved = Duration::from_millis(500)..Duration::from_secs(2);
        let inject = move || reshard(Arc::clone(&there), 1, 2);
        let heal = move || reshard(Arc::clone(&back), 2, 1);
        faults.push(CustomFault::from("redis slots", "slots moved", moved, inject, heal));
        faults
    }
}

/// How many slots move at once.
const RESHARD_SLOTS: &str = "400";

/// Moves slots between two of the first primaries, as an operator would, while they are in use.
async fn reshard(cluster: Arc<RedisCluster>, from: usize, to: usize) {
    let work = move || {
        let [from, to] = [from, to].map(|nth| &cluster.primaries[nth]);
        let ids = [from, to].map(|node| node.try_cli(&["CLUSTER", "MYID"]));
        // A node that is down at the moment cannot be moved from or to.
        let [Some(from_id), Some(to_id)] = ids else { return };
        let node = format!("127.0.0.1:{}", to.port());
        let args = ["--cluster", "reshard", &node, "--cluster-from", &from_id, "--cluster-to", &to_id];
        let rest = ["--cluster-slots", RESHARD_SLOTS, "--cluster-yes"];
        let cli = |args: &[&str]| {
            let run = std::process::Command::new("timeout").args(["20", "redis-cli"]).args(args).output();
            run.is_ok_and(|run| run.status.success())
        };
        if cli(&[&args[..], &rest[..]].concat()) {
            return;
        }
        // Another fault stopped it half way. What an operator does then: else a slot that is open stays so, and scripts on
        // keys of which some have moved and some have not are refused for ever.
        let give_up = Instant::now() + Duration::from_secs(40);
        while !cli(&["--cluster", "fix", &node, "--cluster-yes"]) && Instant::now() < give_up {
            std::thread::sleep(Duration::from_millis(500));
        }
    };
    spawn_blocking(work).await.expect("a reshard only ever fails in words");
}
