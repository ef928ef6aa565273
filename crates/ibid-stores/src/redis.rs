//! Redis: alone, behind sentinels, or as a cluster.
//!
//! One hash per address, one script per operation, one round trip each. The server's clock alone decides lapse and
//! expiry; a key's own expiry is only how it is cleaned up. Every script is repeatable by its token, because a call whose
//! answer was lost is sent again.
//!
//! A server that cannot be reached is no reason not to start: calls fail, saying that nothing was applied, until it is
//! there.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use bytes::Bytes;
use ibid::store::{
    Address, Ask, Claim, Counters, Counts, Cursor, End, ErrorKind, Fence, Filter, Held, Lease, Operators, Page,
    Promise, Store, StoreError, StoreFuture, Swept, Used,
};
use parking_lot::Mutex;
use redis::Value;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout_at},
};

use self::{
    answers::{fingerprint_bytes, outline_text},
    checks::Found,
    dial::Dialer,
    ears::{Channel, Ears},
    names::Names,
    nodes::Nodes,
    operating::number,
    place::Place,
    scripts::{Call, Script},
    trouble::{STORE, corrupt},
    watch::Learned,
};
use crate::{breaker::jittered, remote::Remote};

mod answers;
mod checks;
mod dial;
mod ears;
mod link;
mod names;
mod nodes;
mod operating;
mod place;
mod routing;
mod scripts;
mod sentinel;
mod trouble;
mod watch;

/// How often waiters look for themselves, while messages are heard and while they are not.
const POLLED: Duration = Duration::from_secs(1);
const POLLED_DEAF: Duration = Duration::from_millis(200);
/// A duration beyond this means for ever. In microseconds, and such that the sum of two and of now stays far below
/// 2^53, up to which a script counts exactly.
const FOR_EVER: u64 = 1_500_000_000_000_000;
/// Fences that a script can count with.
const HIGHEST_FENCE: u64 = 1 << 52;
/// How long a wait may be at most: a year. Instants cannot be added to for ever.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// A store that many processes share.
///
/// ```no_run
/// # async fn example() -> Result<(), String> {
/// use ibid_stores::{Remote, redis::Redis};
///
/// let store = Redis::open("redis://127.0.0.1:6379/0", Remote::default()).await?;
/// # Ok(()) }
/// ```
pub struct Redis {
    inner: Arc<Inner>,
    /// What goes on in the background ends with the store.
    _background: JoinSet<()>,
}

struct Inner {
    nodes: Arc<Nodes>,
    names: Arc<Names>,
    ears: Arc<Ears>,
    wait_replicas: u32,
    found: Mutex<Found>,
}

impl Redis {
    /// Opens the store that a URL names. A server that cannot be reached is no error.
    ///
    /// # Errors
    /// If the URL, the prefix or a certificate cannot be used.
    pub async fn open(url: &str, with: Remote) -> Result<Self, String> {
        let place = Place::parse(url)?;
        let names = Arc::new(Names::new(&with.prefix)?);
        if with.timeout.is_zero() {
            return Err("the deadline of a call is zero; write one such as 500ms".into());
        }
        let dialer = Arc::new(Dialer::new(place, with.timeout)?);
        let nodes = Arc::new(Nodes::new(dialer));
        let ears = Arc::new(Ears::new(nodes.clone(), names.clone(), with.copies.clone()));
        let checked = checks::look(&nodes, with.wait_replicas).await;
        let mut background = JoinSet::new();
        let inner = Arc::new(Inner {
            nodes: nodes.clone(),
            names,
            ears: ears.clone(),
            wait_replicas: with.wait_replicas,
            found: Mutex::new(checked.clone().unwrap_or_else(|why| checks::unchecked(&why))),
        });
        match checked {
            Ok(found) => warn(&found),
            Err(why) => {
                tracing::warn!(why, "redis: cannot be reached yet; calls fail until it is");
                background.spawn(check_later(inner.clone()));
            }
        }
        if with.copies.is_some() {
            background.spawn(ears::hear_forgets(Arc::downgrade(&ears)));
        }
        if let Some(link) = nodes.of(0).filter(|link| matches!(link.target(), link::Target::Primary(_))) {
            background.spawn(sentinel::follow(Arc::downgrade(&link), nodes.dialer.clone()));
        }
        Ok(Self { inner, _background: background })
    }

    /// From now on entries are those of this generation: all others are as good as forgotten. 0 is the first.
    pub fn set_generation(&self, generation: u64) {
        self.inner.names.generation.store(generation, Relaxed);
    }
}

/// Whether a URL names a Redis. Nothing is connected to.
///
/// # Errors
/// What is wrong with it, without a password.
pub fn check(url: &str) -> Result<(), String> {
    Place::parse(url).map(drop)
}

async fn check_later(inner: Arc<Inner>) {
    let mut pause = FIRST_PAUSE;
    loop {
        sleep(jittered(pause)).await;
        match checks::look(&inner.nodes, inner.wait_replicas).await {
            Ok(found) => {
                tracing::info!("redis: reached");
                warn(&found);
                *inner.found.lock() = found;
                return;
            }
            Err(why) => inner.found.lock().wanting = checks::unchecked(&why).wanting,
        }
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

fn warn(found: &Found) {
    for wanting in &found.wanting {
        tracing::warn!("redis: {wanting}");
    }
}

impl Inner {
    fn timeout(&self) -> Duration {
        self.nodes.dialer.timeout
    }

    /// A script about one entry, with what every such script is told.
    fn call(&self, script: &'static Script, at: &Address, replicated: bool) -> Call {
        let bucket = at.0[0];
        let publish = if self.nodes.is_cluster() { "SPUBLISH" } else { "PUBLISH" };
        let replicated = if replicated { "1" } else { "0" };
        Call {
            script,
            bucket,
            keys: vec![self.names.entry(at), self.names.index(bucket), self.names.fences(bucket)],
            args: vec![publish.into(), self.names.channels(bucket).into(), at.to_string().into(), replicated.into()],
        }
    }

    async fn claim(&self, ask: &Arc<Ask>) -> Result<Claim, StoreError> {
        let mut call = self.call(&scripts::CLAIM, &ask.address, self.wait_replicas > 0);
        let over = ask.over.map(|fence| fence.to_string()).unwrap_or_default();
        call.args.extend([Bytes::copy_from_slice(&ask.token.0), micros(ask.hold), micros(ask.keep), over.into()]);
        call.args.extend([fingerprint_bytes(&ask.fingerprint), ask.tags.as_bytes().clone(), ask.label.clone()]);
        let answer = self.run_replicated(&call, |answer| is(answer, b"G")).await?;
        answers::claim(answer, Some(ask))
    }

    /// A script about a lease, with what it takes to put the entry back.
    fn lease_call(&self, script: &'static Script, lease: &Lease, replicated: bool) -> Result<Call, StoreError> {
        let ask = &lease.ask;
        if lease.fence.0 > HIGHEST_FENCE {
            let why = format!("fence {} is beyond all that this store gives ({HIGHEST_FENCE})", lease.fence);
            return Err(StoreError::new(ErrorKind::Rejected, STORE, why));
        }
        let mut call = self.call(script, &ask.address, replicated);
        let took_over = if ask.over.is_some() { "1" } else { "0" };
        call.args.extend([Bytes::copy_from_slice(&ask.token.0), number(lease.fence.0), number(lease.attempt.into())]);
        call.args.extend([took_over.into(), micros(ask.hold), micros(ask.keep)]);
        call.args.extend([fingerprint_bytes(&ask.fingerprint), ask.tags.as_bytes().clone(), ask.label.clone()]);
        Ok(call)
    }

    async fn extend(&self, lease: &Lease, hold: Duration) -> Result<Held, StoreError> {
        let mut call = self.lease_call(&scripts::EXTEND, lease, false)?;
        call.args.push(micros(hold));
        answers::held(self.run(&call).await?)
    }

    async fn settle(&self, lease: &Lease, end: &End) -> Result<Held, StoreError> {
        let completes = matches!(end, End::Complete { .. });
        let mut call = self.lease_call(&scripts::SETTLE, lease, completes && self.wait_replicas > 0)?;
        call.args.extend(end_args(end));
        let answer = if completes {
            self.run_replicated(&call, |answer| is(answer, b"H") || is(answer, b"R")).await?
        } else {
            self.run(&call).await?
        };
        answers::held(answer)
    }

    async fn get(&self, at: &Address) -> Result<Option<Claim>, StoreError> {
        match self.run(&self.call(&scripts::GET, at, false)).await? {
            Value::Nil => Ok(None),
            found => answers::claim(found, None).map(Some),
        }
    }

    async fn resolve(&self, at: &Address, seen: Fence, end: &End) -> Result<Held, StoreError> {
        let completes = matches!(end, End::Complete { .. });
        let mut call = self.call(&scripts::RESOLVE, at, completes && self.wait_replicas > 0);
        call.args.push(number(seen.0));
        call.args.extend(end_args(end));
        let answer = if completes {
            self.run_replicated(&call, |answer| is(answer, b"H")).await?
        } else {
            self.run(&call).await?
        };
        answers::held(answer)
    }

    async fn forget(&self, at: &Address, seen: Fence) -> Result<Held, StoreError> {
        let mut call = self.call(&scripts::FORGET, at, false);
        call.args.push(number(seen.0));
        answers::held(self.run(&call).await?)
    }

    async fn replace(&self, at: &Address, seen: Fence, record: Bytes) -> Result<Held, StoreError> {
        let mut call = self.call(&scripts::REPLACE, at, false);
        call.args.extend([number(seen.0), record]);
        answers::held(self.run(&call).await?)
    }

    async fn wait(&self, at: &Address, seen: Fence, limit: Duration) -> Result<(), StoreError> {
        let deadline = Instant::now() + limit.min(LONGEST_WAIT);
        let bucket = at.0[0];
        let seat = self.ears.watches.sit(at, seen);
        let _listener = self.ears.listener(bucket);
        loop {
            let heard = timeout_at(deadline, self.ears.hear(bucket, Channel::Wake)).await.unwrap_or(false);
            let bell = seat.watch.bell.notified();
            tokio::pin!(bell);
            bell.as_mut().enable();
            if seat.watch.is_woken() {
                return Ok(());
            }
            let polled = if heard { POLLED } else { POLLED_DEAF };
            let Ok(mut learned) = timeout_at(deadline, seat.watch.learned.lock()).await else { return Ok(()) };
            let (now, epoch) = (Instant::now(), self.ears.watches.epoch());
            let known =
                learned.filter(|known| known.epoch == epoch && now < known.until && now < known.at + polled / 2);
            let until = match known {
                Some(known) => known.until,
                None => match self.runs_for(at, seen).await? {
                    Some(left) => {
                        let until = now + left.min(LONGEST_WAIT);
                        *learned = Some(Learned { at: now, until, epoch });
                        until
                    }
                    None => {
                        drop(learned);
                        self.ears.watches.wake(at, seen);
                        return Ok(());
                    }
                },
            };
            drop(learned);
            let next_look = (Instant::now() + jittered(polled)).min(until).min(deadline);
            let _ = timeout_at(next_look, bell).await;
            if seat.watch.is_woken() || Instant::now() >= deadline {
                return Ok(());
            }
        }
    }

    async fn reserve(&self, who: &Address, n: u64, window: Duration) -> Result<Used, StoreError> {
        let millis = window.as_millis().clamp(1, u128::from(FOR_EVER / 1000)) as u64;
        let call = Call {
            script: &scripts::RESERVE,
            bucket: who.0[0],
            keys: vec![self.names.quota(who)],
            args: vec![number(n.min(HIGHEST_FENCE)), number(millis)],
        };
        let Value::Array(parts) = self.run(&call).await? else { return Err(corrupt("no list")) };
        match parts[..] {
            [Value::Int(total), Value::Int(left)] => Ok(Used {
                total: total.max(0).unsigned_abs(),
                resets_in: Duration::from_millis(left.max(1).unsigned_abs()),
            }),
            _ => Err(corrupt("no two numbers")),
        }
    }

    /// For how long `seen` still runs, if it does. From then on its end is published.
    async fn runs_for(&self, at: &Address, seen: Fence) -> Result<Option<Duration>, StoreError> {
        let mut call = self.call(&scripts::WAIT, at, false);
        call.args.push(number(seen.0));
        match self.run(&call).await? {
            Value::Int(-1) => Ok(None),
            Value::Int(left) => Ok(Some(Duration::from_micros(left.max(0).unsigned_abs()) + Duration::from_millis(1))),
            _ => Err(corrupt("no number")),
        }
    }
}

fn is(answer: &Value, tag: &[u8]) -> bool {
    matches!(answer, Value::Array(parts) if matches!(parts.first(), Some(Value::BulkString(first)) if first == tag))
}

fn end_args(end: &End) -> [Bytes; 6] {
    let none = Bytes::new;
    match end {
        End::Complete { failed, record, outline, keep } => {
            let failed = if *failed { "1" } else { "0" };
            ["c".into(), micros(*keep), number(0), failed.into(), record.clone(), outline_text(outline).into()]
        }
        End::Release => ["r".into(), number(0), number(0), "0".into(), none(), none()],
        End::Park { keep, retry_in } => ["p".into(), micros(*keep), micros(*retry_in), "0".into(), none(), none()],
    }
}

fn micros(duration: Duration) -> Bytes {
    number(duration.as_micros().min(u128::from(FOR_EVER)) as u64)
}

impl Store for Redis {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        StoreFuture::boxed(self.inner.claim(ask))
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.inner.extend(lease, hold))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.inner.settle(lease, end))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(self.inner.wait(at, seen, limit))
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        StoreFuture::boxed(self.inner.get(at))
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        StoreFuture::boxed(self.inner.sweep(at_most))
    }

    fn operators(&self) -> &dyn Operators {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(self)
    }

    fn promise(&self) -> Promise {
        let Found { durable, wanting } = self.inner.found.lock().clone();
        Promise { store: STORE, durable, shared: true, wanting }
    }
}

impl Operators for Redis {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        StoreFuture::boxed(self.inner.list(filter, from, at_most))
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.inner.resolve(at, seen, end))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.inner.forget(at, seen))
    }

    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.inner.replace(at, seen, record))
    }

    fn counts(&self) -> StoreFuture<'_, Counts> {
        StoreFuture::boxed(self.inner.counts())
    }
}

impl Counters for Redis {
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, Used> {
        StoreFuture::boxed(self.inner.reserve(who, n, window))
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("place", &self.inner.nodes.dialer.place)
            .field("names", &self.inner.names)
            .finish_non_exhaustive()
    }
}
