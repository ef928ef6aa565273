//! Maps buckets to servers.
//!
//! The first byte of an address selects one of 256 buckets, and all keys of a bucket share one cluster slot, so the
//! topology is a table of 256 rows. MOVED redirects correct single rows; a refresh replaces the table. It runs in the
//! background, so that a failing node delays only the calls that need it.

use std::sync::atomic::Ordering::{AcqRel, Release};

use arc_swap::ArcSwap;

use super::{connection::RedisCall, resp::Reply, url::RedisDeployment, *};

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
    /// Replaced as a whole, so that calls read it without a lock.
    owners: ArcSwap<BucketOwners>,
    /// All known nodes. Locked while `owners` is replaced.
    servers: Mutex<HashMap<RedisHost, Arc<RedisServer>>>,
    is_refreshing: AtomicBool,
    /// Held by the call that loads the first table; others wait for its result.
    first_refresh: tokio::sync::Mutex<()>,
    /// Called when a bucket has another owner: what the former owner was to report is not reported any more.
    on_change: Arc<dyn Fn() + Send + Sync>,
}

/// The owner of each bucket, if it is known.
type BucketOwners = Vec<Option<Arc<RedisServer>>>;

impl RedisTopology {
    pub(super) fn new(connector: Arc<RedisConnector>, on_change: Arc<dyn Fn() + Send + Sync>) -> Self {
        let server = |target| Arc::new(RedisServer::new(connector.clone(), target));
        let kind = match &connector.url.deployment {
            RedisDeployment::Single => TopologyKind::Single(server(ServerTarget::Host(connector.url.hosts[0].clone()))),
            RedisDeployment::Sentinel(name) => TopologyKind::Single(server(ServerTarget::Primary(name.clone()))),
            RedisDeployment::Cluster => TopologyKind::Cluster(Arc::new(ClusterTopology {
                connector: connector.clone(),
                owners: ArcSwap::from_pointee(vec![None; BUCKET_COUNT]),
                servers: Mutex::default(),
                is_refreshing: AtomicBool::new(false),
                first_refresh: tokio::sync::Mutex::default(),
                on_change,
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
            TopologyKind::Cluster(cluster) => cluster.owners.load()[usize::from(bucket)].clone(),
        }
    }

    /// Returns the cluster node at this address, or the only server.
    pub(super) fn server_at(&self, host: &RedisHost) -> Arc<RedisServer> {
        match &self.kind {
            TopologyKind::Single(server) => server.clone(),
            TopologyKind::Cluster(cluster) => cluster.server(host),
        }
    }

    /// Returns every server that owns a bucket.
    pub(super) fn all(&self) -> Vec<Arc<RedisServer>> {
        match &self.kind {
            TopologyKind::Single(server) => vec![server.clone()],
            TopologyKind::Cluster(cluster) => cluster.known_owners(),
        }
    }

    /// Records the new owner of a bucket after a redirect.
    pub(super) fn set_owner(&self, bucket: u8, to: &RedisHost) {
        if let TopologyKind::Cluster(cluster) = &self.kind {
            let server = cluster.server(to);
            let servers = cluster.servers.lock();
            let mut owners = BucketOwners::clone(&cluster.owners.load());
            owners[usize::from(bucket)] = Some(server);
            cluster.owners.store(Arc::new(owners));
            drop(servers);
            (cluster.on_change)();
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
        if !cluster.known_owners().is_empty() {
            return Ok(());
        }
        let _learning = cluster.first_refresh.lock().await;
        if !cluster.known_owners().is_empty() || cluster.refresh().await {
            return Ok(());
        }
        Err("no node of the cluster could be asked for its slots".into())
    }
}

impl ClusterTopology {
    fn known_owners(&self) -> Vec<Arc<RedisServer>> {
        let mut owners: Vec<Arc<RedisServer>> = Vec::new();
        for owner in self.owners.load().iter().flatten() {
            if !owners.iter().any(|known| Arc::ptr_eq(known, owner)) {
                owners.push(owner.clone());
            }
        }
        owners
    }

    fn server(&self, host: &RedisHost) -> Arc<RedisServer> {
        let server = || Arc::new(RedisServer::new(self.connector.clone(), ServerTarget::Host(host.clone())));
        self.servers.lock().entry(host.clone()).or_insert_with(server).clone()
    }

    /// Asks all known nodes for the table and uses the first valid reply. Returns whether there was one.
    async fn refresh(&self) -> bool {
        let mut servers = self.known_owners();
        let seeds = self.connector.url.hosts.iter().map(|seed| self.server(seed));
        servers.extend(seeds.filter(|seed| !servers.iter().any(|known| Arc::ptr_eq(known, seed))).collect::<Vec<_>>());
        let deadline = Instant::now() + self.connector.timeout;
        let mut answers: FuturesUnordered<_> = servers
            .iter()
            .map(|server| async move {
                let ServerTarget::Host(host) = &server.target else { return None };
                let answer = server.send_plain(RedisCall::new(&[b"CLUSTER", b"SLOTS"]), deadline).await.ok()?;
                parse_cluster_slots(&answer, host)
            })
            .collect();
        while let Some(answer) = answers.next().await {
            if let Some(hosts) = answer {
                let owners: Vec<_> = hosts.iter().map(|host| host.as_ref().map(|host| self.server(host))).collect();
                drop(answers);
                drop(servers);
                self.replace_owners(owners);
                return true;
            }
        }
        false
    }

    fn replace_owners(&self, owners: BucketOwners) {
        let is_same = |(a, b): (&Option<Arc<RedisServer>>, &Option<Arc<RedisServer>>)| match (a, b) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        let mut servers = self.servers.lock();
        let before = self.owners.swap(Arc::new(owners));
        let has_changed = !before.iter().zip(self.owners.load().iter()).all(is_same);
        drop(before);
        // A server that owns nothing, and that nobody uses, is forgotten.
        servers.retain(|host, server| self.connector.url.hosts.contains(host) || Arc::strong_count(server) > 1);
        drop(servers);
        if has_changed {
            (self.on_change)();
        }
    }
}

/// Parses the reply of CLUSTER SLOTS. Returns `None` if it is invalid or names no node.
fn parse_cluster_slots(answer: &Reply, from: &RedisHost) -> Option<Vec<Option<RedisHost>>> {
    let Reply::Array(ranges) = answer else { return None };
    let mut found = Vec::new();
    for range in ranges {
        let Reply::Array(parts) = range else { return None };
        let [Reply::Int(first), Reply::Int(last), Reply::Array(primary), ..] = &parts[..] else { return None };
        let [name, Reply::Int(port), ..] = &primary[..] else { return None };
        let name = match name {
            // A node that does not know its own address is the one that was asked.
            Reply::Bytes(name) if !name.is_empty() && name != "?" => String::from_utf8_lossy(name).into_owned(),
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
        let bulk = |text: &str| Reply::Bytes(text.to_owned().into());
        let range = |first, last, name: &str, port| {
            Reply::Array(vec![
                Reply::Int(first),
                Reply::Int(last),
                Reply::Array(vec![bulk(name), Reply::Int(port), bulk("id"), Reply::Array(vec![])]),
            ])
        };
        let from = RedisHost::new("asked", 1);
        let answer = Reply::Array(vec![range(0, 12_000, "a", 7000), range(12_001, 16_383, "", 7001)]);
        let owners = parse_cluster_slots(&answer, &from).unwrap();
        assert_eq!(owners[0xff], Some(RedisHost::new("a", 7000)));
        assert_eq!(owners[0x00], Some(RedisHost::new("asked", 7001)));
        assert_eq!(parse_cluster_slots(&Reply::Array(vec![]), &from), None);
        assert_eq!(parse_cluster_slots(&Reply::Array(vec![Reply::Nil]), &from), None);
        assert_eq!(parse_cluster_slots(&Reply::Ok, &from), None);
    }
}
