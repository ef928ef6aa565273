//! Maps buckets to servers.
//!
//! The first byte of an address selects one of 256 buckets, and all keys of a bucket share one cluster slot, so the
//! topology is a table of 256 rows. MOVED redirects correct single rows; a refresh replaces the table. It runs in the
//! background, so that a failing node delays only the calls that need it.

use std::sync::atomic::Ordering::{AcqRel, Release};

use super::{url::RedisDeployment, *};

pub(super) const BUCKET_COUNT: usize = 256;
/// Minimum interval between two refreshes.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(100);

pub(super) struct RedisTopology {
    pub(super) connector: Arc<RedisConnector>,
    kind: TopologyKind,
}

enum TopologyKind {
    Single(Arc<RedisServer>),
    Cluster(Arc<ClusterTopology>),
}

struct ClusterTopology {
    connector: Arc<RedisConnector>,
    table: Mutex<BucketTable>,
    is_refreshing: AtomicBool,
    /// Held by the call that loads the first table; others wait for its result.
    first_refresh: tokio::sync::Mutex<()>,
}

struct BucketTable {
    owners: Vec<Option<RedisHost>>,
    servers: HashMap<RedisHost, Arc<RedisServer>>,
}

impl RedisTopology {
    pub(super) fn new(connector: Arc<RedisConnector>) -> Self {
        let server = |target| Arc::new(RedisServer::new(connector.clone(), target));
        let kind = match &connector.url.deployment {
            RedisDeployment::Single => TopologyKind::Single(server(ServerTarget::Host(connector.url.hosts[0].clone()))),
            RedisDeployment::Sentinel(name) => TopologyKind::Single(server(ServerTarget::Primary(name.clone()))),
            RedisDeployment::Cluster => TopologyKind::Cluster(Arc::new(ClusterTopology {
                connector: connector.clone(),
                table: Mutex::new(BucketTable { owners: vec![None; BUCKET_COUNT], servers: HashMap::new() }),
                is_refreshing: AtomicBool::new(false),
                first_refresh: tokio::sync::Mutex::default(),
            })),
        };
        Self { connector, kind }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.kind, TopologyKind::Cluster(_))
    }

    /// Returns the owner of a bucket, or `None` if it is not known yet.
    pub(super) fn server_for(&self, bucket: u8) -> Option<Arc<RedisServer>> {
        match &self.kind {
            TopologyKind::Single(server) => Some(server.clone()),
            TopologyKind::Cluster(cluster) => cluster.owner(bucket).map(|host| cluster.server(&host)),
        }
    }

    /// Returns the cluster node at this address, or the only server.
    pub(super) fn server_at(&self, host: &RedisHost) -> Arc<RedisServer> {
        match &self.kind {
            TopologyKind::Single(server) => server.clone(),
            TopologyKind::Cluster(cluster) => cluster.server(host),
        }
    }

    pub(super) fn all(&self) -> Vec<Arc<RedisServer>> {
        match &self.kind {
            TopologyKind::Single(server) => vec![server.clone()],
            TopologyKind::Cluster(cluster) => cluster.owners().iter().map(|host| cluster.server(host)).collect(),
        }
    }

    /// Records the new owner of a bucket after a redirect.
    pub(super) fn set_owner(&self, bucket: u8, to: RedisHost) {
        if let TopologyKind::Cluster(cluster) = &self.kind {
            cluster.table.lock().owners[usize::from(bucket)] = Some(to);
        }
        self.refresh_in_background();
    }

    /// Refreshes the table in the background, because it may be out of date.
    pub(super) fn refresh_in_background(&self) {
        if let TopologyKind::Cluster(cluster) = &self.kind
            && !cluster.is_refreshing.swap(true, AcqRel)
        {
            let cluster = cluster.clone();
            tokio::spawn(async move {
                cluster.refresh().await;
                sleep(with_jitter(MIN_REFRESH_INTERVAL)).await;
                cluster.is_refreshing.store(false, Release);
            });
        }
    }

    /// Loads the table if none is known.
    pub(super) async fn ensure_known(&self) -> Result<(), String> {
        let TopologyKind::Cluster(cluster) = &self.kind else { return Ok(()) };
        if !cluster.owners().is_empty() {
            return Ok(());
        }
        let _learning = cluster.first_refresh.lock().await;
        if !cluster.owners().is_empty() || cluster.refresh().await {
            return Ok(());
        }
        Err("no node of the cluster could be asked for its slots".into())
    }
}

impl ClusterTopology {
    fn owner(&self, bucket: u8) -> Option<RedisHost> {
        self.table.lock().owners[usize::from(bucket)].clone()
    }

    fn owners(&self) -> Vec<RedisHost> {
        let mut hosts: Vec<RedisHost> = self.table.lock().owners.iter().flatten().cloned().collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    fn server(&self, host: &RedisHost) -> Arc<RedisServer> {
        let mut table = self.table.lock();
        let server = || Arc::new(RedisServer::new(self.connector.clone(), ServerTarget::Host(host.clone())));
        table.servers.entry(host.clone()).or_insert_with(server).clone()
    }

    /// Asks all known nodes for the table and uses the first valid reply. Returns whether there was one.
    async fn refresh(&self) -> bool {
        let mut hosts = self.owners();
        hosts.extend(self.connector.url.hosts.iter().filter(|seed| !hosts.contains(seed)).cloned().collect::<Vec<_>>());
        let deadline = Instant::now() + self.connector.timeout;
        let mut answers: FuturesUnordered<_> = hosts
            .iter()
            .map(|host| async move {
                let mut ask = redis::cmd("CLUSTER");
                ask.arg("SLOTS");
                let answer = self.server(host).send(RedisCommand::plain(&ask), deadline).await.ok()?;
                parse_cluster_slots(&answer, host)
            })
            .collect();
        while let Some(answer) = answers.next().await {
            if let Some(owners) = answer {
                let mut table = self.table.lock();
                table.servers.retain(|host, server| {
                    owners.contains(&Some(host.clone()))
                        || self.connector.url.hosts.contains(host)
                        || Arc::strong_count(server) > 1
                });
                table.owners = owners;
                return true;
            }
        }
        false
    }
}

/// Parses the reply of CLUSTER SLOTS. Returns `None` if it is invalid or names no node.
fn parse_cluster_slots(answer: &Value, from: &RedisHost) -> Option<Vec<Option<RedisHost>>> {
    let Value::Array(ranges) = answer else { return None };
    let mut found = Vec::new();
    for range in ranges {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = &parts[..] else { return None };
        let [name, Value::Int(port), ..] = &primary[..] else { return None };
        let name = match name {
            // A node that does not know its own address is the one that was asked.
            Value::BulkString(name) if !name.is_empty() && name != b"?" => String::from_utf8_lossy(name).into_owned(),
            _ => from.name.clone(),
        };
        found.push((*first..=*last, RedisHost::new(&name, u16::try_from(*port).ok()?)));
    }
    let owner = |bucket| {
        let slot = i64::from(slot_of(bucket));
        found.iter().find(|(slots, _)| slots.contains(&slot)).map(|(_, host)| host.clone())
    };
    let owners: Vec<_> = (0..=u8::MAX).map(owner).collect();
    owners.iter().any(Option::is_some).then_some(owners)
}

/// Returns the slot of a bucket's keys: CRC16 (XMODEM) of the part between braces.
fn slot_of(bucket: u8) -> u16 {
    let step = |crc: u16, byte: u8| {
        (0..8)
            .fold(crc ^ (u16::from(byte) << 8), |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 })
    };
    format!("{bucket:02x}").bytes().fold(0, step) % 16_384
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_server() {
        // Values of CLUSTER KEYSLOT for {00}, {0a} and {ff}.
        assert_eq!([slot_of(0x00), slot_of(0x0a), slot_of(0xff)], [13_254, 14_610, 11_756]);
    }

    #[test]
    fn a_table_is_read_and_nonsense_is_not() {
        let bulk = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let range = |first, last, name: &str, port| {
            Value::Array(vec![
                Value::Int(first),
                Value::Int(last),
                Value::Array(vec![bulk(name), Value::Int(port), bulk("id"), Value::Array(vec![])]),
            ])
        };
        let from = RedisHost::new("asked", 1);
        let answer = Value::Array(vec![range(0, 12_000, "a", 7000), range(12_001, 16_383, "", 7001)]);
        let owners = parse_cluster_slots(&answer, &from).unwrap();
        assert_eq!(owners[0xff], Some(RedisHost::new("a", 7000)));
        assert_eq!(owners[0x00], Some(RedisHost::new("asked", 7001)));
        assert_eq!(parse_cluster_slots(&Value::Array(vec![]), &from), None);
        assert_eq!(parse_cluster_slots(&Value::Array(vec![Value::Nil]), &from), None);
        assert_eq!(parse_cluster_slots(&Value::Okay, &from), None);
    }
}
