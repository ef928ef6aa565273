//! Which server keeps which bucket.
//!
//! Keys are spread over 256 buckets by the first byte of their address, and a bucket's keys share one slot. So a cluster
//! is known by a table of 256 rows. Rows are corrected by the servers themselves (MOVED) and by asking for the whole
//! table; that happens in the background, so that a bad node holds up nobody but those who need it.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release},
    },
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use parking_lot::Mutex;
use redis::Value;
use tokio::time::{Instant, sleep};

use super::{
    dial::Dialer,
    link::{Link, Sent, Target},
    place::{Host, Shape},
};
use crate::breaker::jittered;

pub(super) const BUCKETS: usize = 256;
/// Between two times that the table is asked for.
const REFRESHED: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Nodes {
    pub(super) dialer: Arc<Dialer>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    One(Arc<Link>),
    Cluster(Arc<Cluster>),
}

#[derive(Debug)]
struct Cluster {
    dialer: Arc<Dialer>,
    table: Mutex<Table>,
    refreshing: AtomicBool,
    /// Held by the one who asks for the first table; the others wait for what it finds.
    learning: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Table {
    owners: Vec<Option<Host>>,
    links: HashMap<Host, Arc<Link>>,
}

impl Nodes {
    pub(super) fn new(dialer: Arc<Dialer>) -> Self {
        let link = |target| Arc::new(Link::new(dialer.clone(), target));
        let kind = match &dialer.place.shape {
            Shape::Single => Kind::One(link(Target::Host(dialer.place.hosts[0].clone()))),
            Shape::Sentinel(name) => Kind::One(link(Target::Primary(name.clone()))),
            Shape::Cluster => Kind::Cluster(Arc::new(Cluster {
                dialer: dialer.clone(),
                table: Mutex::new(Table { owners: vec![None; BUCKETS], links: HashMap::new() }),
                refreshing: AtomicBool::new(false),
                learning: tokio::sync::Mutex::default(),
            })),
        };
        Self { dialer, kind }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.kind, Kind::Cluster(_))
    }

    /// Who keeps a bucket; `None` if that is not known yet.
    pub(super) fn of(&self, bucket: u8) -> Option<Arc<Link>> {
        match &self.kind {
            Kind::One(link) => Some(link.clone()),
            Kind::Cluster(cluster) => cluster.owner(bucket).map(|host| cluster.link(&host)),
        }
    }

    /// A node of the cluster by its address; the one server otherwise.
    pub(super) fn at(&self, host: &Host) -> Arc<Link> {
        match &self.kind {
            Kind::One(link) => link.clone(),
            Kind::Cluster(cluster) => cluster.link(host),
        }
    }

    /// All that keep something.
    pub(super) fn all(&self) -> Vec<Arc<Link>> {
        match &self.kind {
            Kind::One(link) => vec![link.clone()],
            Kind::Cluster(cluster) => cluster.owners().iter().map(|host| cluster.link(host)).collect(),
        }
    }

    /// A node says that another keeps this bucket.
    pub(super) fn moved(&self, bucket: u8, to: Host) {
        if let Kind::Cluster(cluster) = &self.kind {
            cluster.table.lock().owners[usize::from(bucket)] = Some(to);
        }
        self.doubt();
    }

    /// What is known may be out of date: asks again in the background.
    pub(super) fn doubt(&self) {
        if let Kind::Cluster(cluster) = &self.kind
            && !cluster.refreshing.swap(true, AcqRel)
        {
            let cluster = cluster.clone();
            tokio::spawn(async move {
                cluster.refresh().await;
                sleep(jittered(REFRESHED)).await;
                cluster.refreshing.store(false, Release);
            });
        }
    }

    /// Asks for the table now, if none is known.
    pub(super) async fn known(&self) -> Result<(), String> {
        let Kind::Cluster(cluster) = &self.kind else { return Ok(()) };
        if !cluster.owners().is_empty() {
            return Ok(());
        }
        let _learning = cluster.learning.lock().await;
        if !cluster.owners().is_empty() || cluster.refresh().await {
            return Ok(());
        }
        Err("no node of the cluster could be asked for its slots".into())
    }
}

impl Cluster {
    fn owner(&self, bucket: u8) -> Option<Host> {
        self.table.lock().owners[usize::from(bucket)].clone()
    }

    fn owners(&self) -> Vec<Host> {
        let mut hosts: Vec<Host> = self.table.lock().owners.iter().flatten().cloned().collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    fn link(&self, host: &Host) -> Arc<Link> {
        let mut table = self.table.lock();
        let link = || Arc::new(Link::new(self.dialer.clone(), Target::Host(host.clone())));
        table.links.entry(host.clone()).or_insert_with(link).clone()
    }

    /// Asks all nodes that are known for the table and takes the first answer. Returns whether there was one.
    async fn refresh(&self) -> bool {
        let mut hosts = self.owners();
        hosts.extend(self.dialer.place.hosts.iter().filter(|seed| !hosts.contains(seed)).cloned().collect::<Vec<_>>());
        let deadline = Instant::now() + self.dialer.timeout;
        let mut answers: FuturesUnordered<_> = hosts
            .iter()
            .map(|host| async move {
                let mut ask = redis::cmd("CLUSTER");
                ask.arg("SLOTS");
                let answer = self.link(host).send(Sent::plain(&ask), deadline).await.ok()?;
                owners_in(&answer, host)
            })
            .collect();
        while let Some(answer) = answers.next().await {
            if let Some(owners) = answer {
                let mut table = self.table.lock();
                table.links.retain(|host, link| {
                    owners.contains(&Some(host.clone()))
                        || self.dialer.place.hosts.contains(host)
                        || Arc::strong_count(link) > 1
                });
                table.owners = owners;
                return true;
            }
        }
        false
    }
}

/// Reads CLUSTER SLOTS. `None` if it is not one, or names nobody.
fn owners_in(answer: &Value, from: &Host) -> Option<Vec<Option<Host>>> {
    let Value::Array(ranges) = answer else { return None };
    let mut found = Vec::new();
    for range in ranges {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = &parts[..] else { return None };
        let [name, Value::Int(port), ..] = &primary[..] else { return None };
        let name = match name {
            // A node that does not know its own address is where it was asked.
            Value::BulkString(name) if !name.is_empty() && name != b"?" => String::from_utf8_lossy(name).into_owned(),
            _ => from.name.clone(),
        };
        found.push((*first..=*last, Host::new(&name, u16::try_from(*port).ok()?)));
    }
    let owner = |bucket| {
        let slot = i64::from(slot_of(bucket));
        found.iter().find(|(slots, _)| slots.contains(&slot)).map(|(_, host)| host.clone())
    };
    let owners: Vec<_> = (0..=u8::MAX).map(owner).collect();
    owners.iter().any(Option::is_some).then_some(owners)
}

/// The slot of a bucket's keys: CRC16 (XMODEM) of what stands between their braces.
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
        // As CLUSTER KEYSLOT says of {00}, {0a} and {ff}.
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
        let from = Host::new("asked", 1);
        let answer = Value::Array(vec![range(0, 12_000, "a", 7000), range(12_001, 16_383, "", 7001)]);
        let owners = owners_in(&answer, &from).unwrap();
        assert_eq!(owners[0xff], Some(Host::new("a", 7000)));
        assert_eq!(owners[0x00], Some(Host::new("asked", 7001)));
        assert_eq!(owners_in(&Value::Array(vec![]), &from), None);
        assert_eq!(owners_in(&Value::Array(vec![Value::Nil]), &from), None);
        assert_eq!(owners_in(&Value::Okay, &from), None);
    }
}
