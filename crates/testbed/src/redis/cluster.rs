use std::sync::OnceLock;

use super::TestRedis;

const PRIMARIES: usize = 3;
/// Milliseconds of silence after which a node counts as down.
const NODE_TIMEOUT_MS: u32 = 3000;

/// Three primaries, each with a replica. A shard that is down does not stop the others.
#[derive(Debug)]
pub struct RedisCluster {
    pub primaries: Vec<TestRedis>,
    /// The initial replicas, in the order of their primaries.
    pub replicas: Vec<TestRedis>,
}

impl RedisCluster {
    /// Starts a cluster, and waits until all slots are served and all replicas have caught up.
    pub fn start() -> Self {
        Self::launch(false)
    }

    /// As [`Self::start`], with Valkey.
    pub fn start_valkey() -> Self {
        Self::launch(true)
    }

    fn launch(valkey: bool) -> Self {
        let timeout = format!("cluster-node-timeout {NODE_TIMEOUT_MS}");
        let config = [
            "cluster-enabled yes",
            "cluster-require-full-coverage no",
            "cluster-replica-validity-factor 0",
            "repl-diskless-sync-delay 0",
            &timeout,
        ];
        let node = |_| TestRedis::start_configured(&config, valkey);
        let mut nodes: Vec<TestRedis> = (0..PRIMARIES * 2).map(node).collect();
        for (nth, node) in nodes.iter().enumerate() {
            node.cli(&["CLUSTER", "SET-CONFIG-EPOCH", &(nth + 1).to_string()]);
            let (first, last) = (nth * 16_384 / PRIMARIES, (nth + 1) * 16_384 / PRIMARIES - 1);
            if nth < PRIMARIES {
                node.cli(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
            }
        }
        for node in &nodes[1..] {
            let config = node.cli(&["CONFIG", "GET", "cluster-port"]);
            let bus = config.lines().nth(1).expect("a cluster node has a bus port");
            nodes[0].cli(&["CLUSTER", "MEET", "127.0.0.1", &node.port().to_string(), bus]);
        }
        let says =
            |node: &TestRedis, what: &str| node.cli(&["CLUSTER", "INFO"]).lines().any(|line| line.trim() == what);
        let known = format!("cluster_known_nodes:{}", PRIMARIES * 2);
        for node in &nodes {
            node.until("all nodes know each other", || says(node, &known) && says(node, "cluster_state:ok"));
        }
        let replicas = nodes.split_off(PRIMARIES);
        for (primary, replica) in nodes.iter().zip(&replicas) {
            let id = primary.cli(&["CLUSTER", "MYID"]);
            replica.until("it is a replica", || replica.cli(&["CLUSTER", "REPLICATE", &id]) == "OK");
        }
        for replica in &replicas {
            replica.until("the replica has caught up", || {
                replica.info("role") == "slave" && replica.info("master_link_status") == "up"
            });
        }
        for node in &nodes {
            node.until("all slots are served", || says(node, "cluster_slots_ok:16384"));
        }
        Self { primaries: nodes, replicas }
    }

    /// A cluster for all tests of this process that do not cause a failover.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<RedisCluster> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// As [`Self::shared`], with Valkey.
    pub fn shared_valkey() -> &'static Self {
        static SHARED: OnceLock<RedisCluster> = OnceLock::new();
        SHARED.get_or_init(Self::start_valkey)
    }

    /// `redis+cluster://…` or `valkey+cluster://…`, with two of its nodes.
    pub fn url(&self) -> String {
        let scheme = self.primaries[0].scheme();
        format!("{scheme}+cluster://127.0.0.1:{},127.0.0.1:{}", self.primaries[0].port(), self.replicas[1].port())
    }

    /// The index of the initial primary of a slot.
    pub fn first_owner(&self, slot: usize) -> usize {
        (0..PRIMARIES).find(|nth| slot < (nth + 1) * 16_384 / PRIMARIES).expect("a slot below 16,384")
    }
}
