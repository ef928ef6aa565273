//! The Redis store: a single server, a primary behind sentinels, or a cluster.
//!
//! Each address is one string, each operation one round trip: a native command on the hot path, a script elsewhere. Only
//! the server's clock decides when leases and entries expire. Every call can be repeated with the same token, because a
//! call whose answer was lost is sent again.
//!
//! Fences of new entries are the server's time, which each connection samples; a takeover's is above the fence before it.
//! They grow because a fence is written soon after it was minted or never, and a key stays for at least a minute.
//!
//! The store opens even if the server is unreachable: calls then fail as not applied until it is reachable.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, CounterUsage, Counters, EntryCounts, EntryFilter, EntryInfo, EntryPage,
    EntryState, ErrorKind, Fence, Guarantees, Lease, ListCursor, SettleOutcome, Settlement, Store, StoreAdmin,
    StoreError, StoreFuture, SweepResult, with_jitter,
};
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout, timeout_at},
};

use self::{
    checks::RedisFindings,
    connect::RedisConnector,
    connection::RedisConnection,
    error::{RedisCallError, STORE_NAME, corrupt_reply},
    key_names::KeyNames,
    scripts::{RedisScript, ScriptForm},
    server::{RedisServer, ServerTarget, background_deadline},
    topology::{BUCKET_COUNT, RedisTopology},
    url::{RedisHost, RedisUrl},
    waiters::Waiters,
};
use crate::{StoreSetupError, local_cache::AnswerCache, remote::RemoteOptions};

mod admin;
mod checks;
mod claim_log;
mod connect;
mod connection;
mod entry;
mod error;
mod key_names;
mod maintenance;
mod operations;
mod resp;
#[doc(hidden)]
pub use resp::reply_length;
mod routing;
mod scripts;
mod sentinel;
mod server;
mod topology;
mod url;
mod waiters;

/// Longer durations count as unlimited, in microseconds. The sum of two and the current time stays far below 2^53, up
/// to which Lua counts exactly.
const MAX_DURATION_US: u64 = 1_500_000_000_000_000;
/// Upper limit of fences that Lua counts exactly.
const MAX_FENCE: u64 = 1 << 52;
const INITIAL_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// A store on Redis that many processes share.
///
/// ```no_run
/// # async fn example() -> Result<(), ibid_stores::StoreSetupError> {
/// use ibid_stores::{RemoteOptions, redis::Redis};
///
/// let store = Redis::open("redis://127.0.0.1:6379/0", RemoteOptions::default()).await?;
/// # Ok(()) }
/// ```
pub struct Redis {
    core: Arc<RedisCore>,
    findings: Arc<Mutex<RedisFindings>>,
    /// Background tasks. They end when the store is dropped.
    _background: JoinSet<()>,
}

/// What calls and background tasks share.
struct RedisCore {
    topology: RedisTopology,
    key_names: Arc<KeyNames>,
    waiters: Waiters,
    wait_replicas: u32,
}

impl Redis {
    /// Opens the store that a URL names. An unreachable server is not an error.
    ///
    /// # Errors
    /// Returns an error if the URL, the prefix or a certificate is invalid, or if a later version of ibid has changed the
    /// format of the entries.
    pub async fn open(url: &str, with: RemoteOptions) -> Result<Self, StoreSetupError> {
        let url = RedisUrl::parse(url)?;
        let key_names = Arc::new(KeyNames::new(&with.prefix)?);
        if with.timeout.is_zero() {
            return Err("the deadline of a call is zero; write one such as 500ms".to_owned().into());
        }
        let waiters = Waiters::new(key_names.clone());
        let connector = RedisConnector::new(url, with.timeout, key_names.clone(), with.answer_cache.clone())?;
        let on_change = {
            let (waiters, answers) = (waiters.clone(), with.answer_cache);
            Arc::new(move || {
                waiters.check_again();
                answers.iter().for_each(AnswerCache::flush);
            })
        };
        let topology = RedisTopology::new(Arc::new(connector), on_change);
        let core = Arc::new(RedisCore { topology, key_names, waiters, wait_replicas: with.wait_replicas });
        let checked = checks::run_checks(&core.topology, with.wait_replicas).await;
        let mut background = JoinSet::new();
        let findings = checked.clone().unwrap_or_else(|why| checks::unchecked_findings(&why));
        let findings = Arc::new(Mutex::new(findings));
        match checked {
            Ok(found) => {
                if let Some(why) = checks::find_later_format(&core).await {
                    return Err(why.into());
                }
                log_warnings(&found);
            }
            Err(why) => {
                tracing::warn!(why, "redis: cannot be reached yet; calls fail until it is");
                background.spawn(retry_checks(Arc::downgrade(&core), findings.clone()));
            }
        }
        background.spawn(maintenance::run(Arc::downgrade(&core)));
        let server = core.topology.server_for(0);
        if let Some(primary) = server.filter(|server| matches!(server.target, ServerTarget::Primary(_))) {
            let connector = core.topology.connector.clone();
            background.spawn(sentinel::follow_primary(Arc::downgrade(&primary), connector));
        }
        Ok(Self { core, findings, _background: background })
    }

    /// Switches to this generation: entries of all others become invisible. The first generation is 0.
    pub fn set_generation(&self, generation: u64) {
        self.core.key_names.generation.store(generation, Relaxed);
    }
}

/// Checks that a URL names a Redis store. Errors do not contain its password.
pub(crate) fn check_url(url: &str) -> Result<(), String> {
    RedisUrl::parse(url).map(drop)
}

async fn retry_checks(core: Weak<RedisCore>, findings: Arc<Mutex<RedisFindings>>) {
    let mut pause = INITIAL_BACKOFF;
    loop {
        sleep(with_jitter(pause)).await;
        let Some(core) = core.upgrade() else { return };
        match checks::run_checks(&core.topology, core.wait_replicas).await {
            Ok(found) => {
                tracing::info!("redis: reached");
                log_warnings(&found);
                *findings.lock() = found;
                return;
            }
            Err(why) => findings.lock().warnings = checks::unchecked_findings(&why).warnings,
        }
        pause = (pause * 2).min(MAX_BACKOFF);
    }
}

fn log_warnings(found: &RedisFindings) {
    for wanting in &found.warnings {
        tracing::warn!("redis: {wanting}");
    }
}

impl Store for Redis {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        StoreFuture::boxed(self.core.claim(ask))
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.core.extend(lease, hold))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.core.settle(lease, end))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(self.core.wait_for_change(at, seen, limit))
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::boxed(self.core.get(at))
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        StoreFuture::boxed(self.core.sweep_locked(at_most))
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(self)
    }

    fn guarantees(&self) -> Guarantees {
        let RedisFindings { durable, warnings } = self.findings.lock().clone();
        Guarantees { store: STORE_NAME, durable, shared: true, warnings }
    }
}

impl StoreAdmin for Redis {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        StoreFuture::boxed(self.core.list_page(filter, from, at_most))
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.core.resolve(at, seen, end))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.core.forget(at, seen))
    }

    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.core.replace_record(at, seen, record))
    }

    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        StoreFuture::boxed(self.core.count_entries())
    }

    fn clock(&self) -> StoreFuture<'_, Option<Duration>> {
        StoreFuture::boxed(async { Ok(Some(self.core.server_time().await?)) })
    }
}

impl Counters for Redis {
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, CounterUsage> {
        StoreFuture::boxed(self.core.reserve(who, n, window))
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("url", &self.core.topology.connector.url)
            .field("names", &self.core.key_names)
            .finish_non_exhaustive()
    }
}
