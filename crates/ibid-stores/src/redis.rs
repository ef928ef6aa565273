//! The Redis store: a single server, a primary behind sentinels, or a cluster.
//!
//! Each address is one hash, each operation one script and one round trip. Only the server's clock decides when leases
//! and entries expire; the expiry of a key only cleans up. Every script can be repeated with the same token, because a
//! call whose answer was lost is sent again.
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
use redis::{Cmd, PushInfo, RedisError, Value};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout, timeout_at},
};

use self::{
    admin::number_arg,
    checks::RedisFindings,
    connect::{RedisConnection, RedisConnector},
    error::{RedisCallError, STORE_NAME, check_reply, corrupt_reply},
    key_names::KeyNames,
    pubsub::{PubSub, PubSubChannel},
    replies::{ReplyParts, fingerprint_bytes, summary_text},
    scripts::{RedisScript, ScriptCall},
    server::{RedisCommand, RedisServer, ServerTarget, background_deadline},
    topology::{BUCKET_COUNT, RedisTopology},
    url::{RedisHost, RedisUrl},
};
use crate::{StoreSetupError, notifications::ServerNotifications, remote::RemoteOptions};

mod admin;
mod checks;
mod connect;
mod error;
mod key_names;
mod pubsub;
mod replies;
mod routing;
mod scripts;
mod sentinel;
mod server;
mod topology;
mod url;

/// Poll interval of waiters while they are subscribed.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
const POLL_INTERVAL_UNSUBSCRIBED: Duration = Duration::from_millis(200);
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
    topology: Arc<RedisTopology>,
    key_names: Arc<KeyNames>,
    pubsub: Arc<PubSub>,
    wait_replicas: u32,
    findings: Arc<Mutex<RedisFindings>>,
    /// Background tasks. They end when the store is dropped.
    _background: JoinSet<()>,
}

impl Redis {
    /// Opens the store that a URL names. An unreachable server is not an error.
    ///
    /// # Errors
    /// Returns an error if the URL, the prefix or a certificate is invalid.
    pub async fn open(url: &str, with: RemoteOptions) -> Result<Self, StoreSetupError> {
        let url = RedisUrl::parse(url)?;
        let key_names = Arc::new(KeyNames::new(&with.prefix)?);
        if with.timeout.is_zero() {
            return Err("the deadline of a call is zero; write one such as 500ms".to_owned().into());
        }
        let topology = Arc::new(RedisTopology::new(Arc::new(RedisConnector::new(url, with.timeout)?)));
        let notifications = ServerNotifications::new(with.answer_cache);
        let follows_forgets = notifications.has_cache();
        let pubsub = Arc::new(PubSub::new(topology.clone(), key_names.clone(), notifications));
        let wait_replicas = with.wait_replicas;
        let checked = checks::run_checks(&topology, wait_replicas).await;
        let mut background = JoinSet::new();
        let findings = checked.clone().unwrap_or_else(|why| checks::unchecked_findings(&why));
        let findings = Arc::new(Mutex::new(findings));
        match checked {
            Ok(found) => log_warnings(&found),
            Err(why) => {
                tracing::warn!(why, "redis: cannot be reached yet; calls fail until it is");
                background.spawn(retry_checks(topology.clone(), wait_replicas, findings.clone()));
            }
        }
        if follows_forgets {
            background.spawn(pubsub::follow_forgets(Arc::downgrade(&pubsub)));
        }
        let server = topology.server_for(0);
        if let Some(primary) = server.filter(|server| matches!(server.target, ServerTarget::Primary(_))) {
            background.spawn(sentinel::follow_primary(Arc::downgrade(&primary), topology.connector.clone()));
        }
        Ok(Self { topology, key_names, pubsub, wait_replicas, findings, _background: background })
    }

    /// Switches to this generation: entries of all others become invisible. The first generation is 0.
    pub fn set_generation(&self, generation: u64) {
        self.key_names.generation.store(generation, Relaxed);
    }
}

/// Checks that a URL names a Redis store. Errors do not contain its password.
pub(crate) fn check_url(url: &str) -> Result<(), String> {
    RedisUrl::parse(url).map(drop)
}

async fn retry_checks(topology: Arc<RedisTopology>, wait_replicas: u32, findings: Arc<Mutex<RedisFindings>>) {
    let mut pause = INITIAL_BACKOFF;
    loop {
        sleep(with_jitter(pause)).await;
        match checks::run_checks(&topology, wait_replicas).await {
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

impl Redis {
    fn timeout(&self) -> Duration {
        self.topology.connector.timeout
    }

    /// Builds a call of a script about one entry, with the arguments that all such scripts need.
    fn call(&self, script: &'static RedisScript, at: &Address, replicated: bool) -> ScriptCall {
        let bucket = at.0[0];
        let publish = if self.topology.is_cluster() { "SPUBLISH" } else { "PUBLISH" };
        let replicated = if replicated { "1" } else { "0" };
        ScriptCall {
            script,
            bucket,
            keys: vec![
                self.key_names.entry_key(at),
                self.key_names.index_key(bucket),
                self.key_names.fences_key(bucket),
            ],
            args: vec![
                publish.into(),
                self.key_names.bucket_prefix(bucket).into(),
                at.to_string().into(),
                replicated.into(),
            ],
        }
    }

    /// Builds a call of a script about a lease, with the arguments for restoring the entry.
    fn lease_script_call(
        &self, script: &'static RedisScript, lease: &Lease, replicated: bool,
    ) -> Result<ScriptCall, StoreError> {
        let ask = &lease.request;
        if lease.fence.0 > MAX_FENCE {
            let why = format!("fence {} is beyond all that this store gives ({MAX_FENCE})", lease.fence);
            return Err(StoreError::new(ErrorKind::Rejected, STORE_NAME, why));
        }
        let mut call = self.call(script, &ask.address, replicated);
        let took_over = if ask.take_over.is_some() { "1" } else { "0" };
        call.args.extend([
            Bytes::copy_from_slice(&ask.token.0),
            number_arg(lease.fence.0),
            number_arg(lease.attempt.into()),
        ]);
        call.args.extend([took_over.into(), micros_arg(ask.lease), micros_arg(ask.ttl)]);
        call.args.extend([fingerprint_bytes(&ask.fingerprint), ask.tags.as_bytes().clone(), ask.label.clone()]);
        Ok(call)
    }

    /// Builds a call of a script that changes the entry of the holder `seen`.
    fn admin_script_call(
        &self, script: &'static RedisScript, at: &Address, seen: Fence, replicated: bool,
    ) -> ScriptCall {
        let mut call = self.call(script, at, replicated);
        call.args.push(number_arg(seen.0));
        call
    }

    async fn run_change(&self, call: ScriptCall) -> Result<SettleOutcome, StoreError> {
        replies::parse_settle_outcome(self.run(&call).await?)
    }

    /// Runs a settlement. A completed answer must reach the replicas.
    async fn run_settlement(&self, mut call: ScriptCall, end: &Settlement) -> Result<SettleOutcome, StoreError> {
        call.args.extend(settlement_args(end));
        if !matches!(end, Settlement::Complete { .. }) {
            return self.run_change(call).await;
        }
        let changed = |answer: &Value| has_tag(answer, b"H") || has_tag(answer, b"R");
        replies::parse_settle_outcome(self.run_replicated(&call, changed).await?)
    }

    fn is_replicated(&self, end: &Settlement) -> bool {
        matches!(end, Settlement::Complete { .. }) && self.wait_replicas > 0
    }

    /// Returns the remaining lease of `seen`, or `None` if it no longer runs. The script also requests a message at its
    /// settlement.
    async fn remaining_lease(&self, at: &Address, seen: Fence) -> Result<Option<Duration>, StoreError> {
        let call = self.admin_script_call(&scripts::WAIT, at, seen, false);
        match self.run(&call).await? {
            Value::Int(-1) => Ok(None),
            Value::Int(left) => Ok(Some(Duration::from_micros(left.max(0).unsigned_abs()) + Duration::from_millis(1))),
            _ => Err(corrupt_reply("no number")),
        }
    }
}

fn has_tag(answer: &Value, tag: &[u8]) -> bool {
    matches!(answer, Value::Array(parts) if matches!(parts.first(), Some(Value::BulkString(first)) if first == tag))
}

fn settlement_args(end: &Settlement) -> [Bytes; 6] {
    let none = Bytes::new;
    match end {
        Settlement::Complete { failed, record, summary, ttl } => {
            let failed = if *failed { "1" } else { "0" };
            ["c".into(), micros_arg(*ttl), number_arg(0), failed.into(), record.clone(), summary_text(summary).into()]
        }
        Settlement::Release => ["r".into(), number_arg(0), number_arg(0), "0".into(), none(), none()],
        Settlement::Park { ttl, retry_in } => {
            ["p".into(), micros_arg(*ttl), micros_arg(*retry_in), "0".into(), none(), none()]
        }
    }
}

fn micros_arg(duration: Duration) -> Bytes {
    number_arg(duration.as_micros().min(u128::from(MAX_DURATION_US)) as u64)
}

impl Store for Redis {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        StoreFuture::boxed(async move {
            let mut call = self.call(&scripts::CLAIM, &ask.address, self.wait_replicas > 0);
            let over = ask.take_over.map(|fence| fence.to_string()).unwrap_or_default();
            call.args.extend([
                Bytes::copy_from_slice(&ask.token.0),
                micros_arg(ask.lease),
                micros_arg(ask.ttl),
                over.into(),
            ]);
            call.args.extend([fingerprint_bytes(&ask.fingerprint), ask.tags.as_bytes().clone(), ask.label.clone()]);
            let answer = self.run_replicated(&call, |answer| has_tag(answer, b"G")).await?;
            replies::parse_claim_outcome(answer, Some(ask))
        })
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let mut call = self.lease_script_call(&scripts::EXTEND, lease, false)?;
            call.args.push(micros_arg(hold));
            self.run_change(call).await
        })
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let call = self.lease_script_call(&scripts::SETTLE, lease, self.is_replicated(end))?;
            self.run_settlement(call, end).await
        })
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        let bucket = at.0[0];
        let check = move || async move {
            let heard = self.pubsub.ensure_subscribed(bucket, PubSubChannel::Wake).await;
            let polled = if heard { POLL_INTERVAL } else { POLL_INTERVAL_UNSUBSCRIBED };
            let left = self.remaining_lease(at, seen).await?;
            Ok(left.map(|left| left.min(with_jitter(polled))))
        };
        StoreFuture::boxed(async move {
            let _listener = self.pubsub.register_listener(bucket);
            self.pubsub.notifications.waits.wait(at, seen, limit, check).await
        })
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::boxed(async move {
            match self.run(&self.call(&scripts::GET, at, false)).await? {
                Value::Nil => Ok(None),
                found => replies::parse_claim_outcome(found, None).map(Some),
            }
        })
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        StoreFuture::boxed(self.sweep_locked(at_most))
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(self)
    }

    fn guarantees(&self) -> Guarantees {
        let RedisFindings { durable, warnings: wanting } = self.findings.lock().clone();
        Guarantees { store: STORE_NAME, durable, shared: true, warnings: wanting }
    }
}

impl StoreAdmin for Redis {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        StoreFuture::boxed(self.list_page(filter, from, at_most))
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        let call = self.admin_script_call(&scripts::RESOLVE, at, seen, self.is_replicated(end));
        StoreFuture::boxed(self.run_settlement(call, end))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.run_change(self.admin_script_call(&scripts::FORGET, at, seen, false)))
    }

    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        let mut call = self.admin_script_call(&scripts::REPLACE, at, seen, false);
        call.args.push(record);
        StoreFuture::boxed(self.run_change(call))
    }

    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        StoreFuture::boxed(self.count_entries())
    }
}

impl Counters for Redis {
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, CounterUsage> {
        let millis = window.as_millis().clamp(1, u128::from(MAX_DURATION_US / 1000)) as u64;
        let call = ScriptCall {
            script: &scripts::RESERVE,
            bucket: who.0[0],
            keys: vec![self.key_names.quota_key(who)],
            args: vec![number_arg(n.min(MAX_FENCE)), number_arg(millis)],
        };
        StoreFuture::boxed(async move {
            let mut parts = ReplyParts::from_value(self.run(&call).await?)?;
            let (total, left) = (parts.number()?, parts.number()?.max(1));
            Ok(CounterUsage { total, resets_in: Duration::from_millis(left) })
        })
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("place", &self.topology.connector.url)
            .field("names", &self.key_names)
            .finish_non_exhaustive()
    }
}
