//! Hearing that a holder's end was published, and what was forgotten.
//!
//! One connection per server, opened when somebody waits and closed when nobody does. A message that is lost only delays:
//! waiters poll beneath it. Copies of answers are different: they must know of every gap, so a silent connection is
//! pinged, and a gap flushes them, once when it is noticed and again when it is closed.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::join_all;
use ibid::store::Address;
use parking_lot::Mutex;
use redis::{PushInfo, PushKind, Value};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};

use super::{
    dial::Wire,
    link::Target,
    names::{Names, woken},
    nodes::{BUCKETS, Nodes},
    trouble::checked,
    watch::Watches,
};
use crate::{breaker::jittered, near::Copies};

/// A connection on which nothing is heard is pinged that often.
const PINGED: Duration = Duration::from_secs(2);
/// How long a subscription outlives its last waiter: the next is often near.
const LINGERS: Duration = Duration::from_secs(1);
/// After a failure to listen, not to be tried again before.
const PAUSE: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub(super) struct Ears {
    nodes: Arc<Nodes>,
    names: Arc<Names>,
    pub(super) watches: Arc<Watches>,
    copies: Option<Copies>,
    slots: Mutex<HashMap<String, Arc<Slot>>>,
    /// How many wait, by bucket.
    waiting: Mutex<Vec<u32>>,
    /// Rung when a connection was lost.
    gap: Arc<Notify>,
}

/// The ear at one server. `listening` is held while a subscription is made or ended, so that they keep their order.
#[derive(Default)]
struct Slot {
    ear: Mutex<Option<Arc<Ear>>>,
    listening: tokio::sync::Mutex<Option<Instant>>,
}

struct Ear {
    wire: Wire,
    channels: Arc<Mutex<HashSet<String>>>,
}

/// Told which channel, or with `None` that none, is heard any more.
type Lost = Arc<dyn Fn(Option<&str>) + Send + Sync>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Channel {
    Wake,
    Forget,
}

/// Somebody waits for something in a bucket.
pub(super) struct Listener {
    ears: Weak<Ears>,
    bucket: u8,
}

impl Ears {
    pub(super) fn new(nodes: Arc<Nodes>, names: Arc<Names>, copies: Option<Copies>) -> Self {
        Self {
            nodes,
            names,
            watches: Arc::default(),
            copies,
            slots: Mutex::default(),
            waiting: Mutex::new(vec![0; BUCKETS]),
            gap: Arc::default(),
        }
    }

    pub(super) fn listener(self: &Arc<Self>, bucket: u8) -> Listener {
        self.waiting.lock()[usize::from(bucket)] += 1;
        Listener { ears: Arc::downgrade(self), bucket }
    }

    /// Whether messages on this channel are heard from now on.
    pub(super) async fn hear(&self, bucket: u8, channel: Channel) -> bool {
        let Some((slot, name)) = self.slot(bucket, channel) else { return false };
        if slot.hears(&name) {
            return true;
        }
        let heard = timeout(self.nodes.dialer.timeout, self.subscribe(bucket, &slot, &name)).await;
        heard.unwrap_or(false)
    }

    fn slot(&self, bucket: u8, channel: Channel) -> Option<(Arc<Slot>, String)> {
        let link = self.nodes.of(bucket)?;
        let place = match link.target() {
            Target::Host(host) => host.to_string(),
            Target::Primary(_) => String::new(),
        };
        let word = if channel == Channel::Wake { "wake" } else { "forget" };
        let slot = self.slots.lock().entry(place).or_default().clone();
        Some((slot, format!("{}{word}", self.names.channels(bucket))))
    }

    async fn subscribe(&self, bucket: u8, slot: &Slot, name: &str) -> bool {
        let mut failed = slot.listening.lock().await;
        if slot.hears(name) {
            return true;
        }
        if failed.is_some_and(|at| at.elapsed() < PAUSE) {
            return false;
        }
        let ear = match slot.open() {
            Some(ear) => ear,
            None => match self.open(bucket).await {
                Ok(ear) => {
                    *slot.ear.lock() = Some(ear.clone());
                    ear
                }
                Err(why) => {
                    tracing::debug!(why, "redis: cannot listen; waiters poll");
                    *failed = Some(Instant::now());
                    return false;
                }
            },
        };
        let verb = if self.nodes.is_cluster() { "SSUBSCRIBE" } else { "SUBSCRIBE" };
        let mut command = redis::cmd(verb);
        command.arg(name);
        match ear.wire.ask(&command).await.map(checked) {
            Ok(Ok(_)) => {
                ear.channels.lock().insert(name.to_owned());
                *failed = None;
                // What was forgotten before this moment was not heard.
                if let Some(copies) = self.copies.as_ref().filter(|_| name.ends_with(":forget")) {
                    copies.flush();
                }
                true
            }
            Ok(Err(trouble)) => {
                tracing::debug!(?trouble, "redis: cannot listen; waiters poll");
                self.nodes.doubt();
                *failed = Some(Instant::now());
                false
            }
            Err(_) => {
                *failed = Some(Instant::now());
                false
            }
        }
    }

    async fn open(&self, bucket: u8) -> Result<Arc<Ear>, String> {
        let link = self.nodes.of(bucket).ok_or("no node is known to keep this bucket")?;
        let host = link.whereabouts().await?;
        let channels: Arc<Mutex<HashSet<String>>> = Arc::default();
        let lost = self.on_loss(channels.clone());
        let pushes = {
            let (watches, copies, lost) = (self.watches.clone(), self.copies.clone(), lost.clone());
            Arc::new(move |push: PushInfo| match push.kind {
                PushKind::Message | PushKind::SMessage => heard(&push.data, &watches, copies.as_ref()),
                PushKind::Disconnection => lost(None),
                PushKind::Unsubscribe | PushKind::SUnsubscribe => {
                    // Unasked for if we still think that it is heard: its slot went to another node.
                    if let Some(Value::BulkString(channel)) = push.data.first() {
                        lost(Some(&String::from_utf8_lossy(channel)));
                    }
                }
                _ => {}
            })
        };
        let wire = self.nodes.dialer.dial_ear(&host, pushes).await?;
        let ear = Arc::new(Ear { wire, channels });
        tokio::spawn(keep_alive(Arc::downgrade(&ear), self.nodes.dialer.timeout, lost));
        Ok(ear)
    }

    /// What to do when a channel, or with `None` all of a connection, is not heard any more.
    fn on_loss(&self, channels: Arc<Mutex<HashSet<String>>>) -> Lost {
        let (watches, copies, gap) = (self.watches.clone(), self.copies.clone(), self.gap.clone());
        Arc::new(move |channel| {
            let mut heard = channels.lock();
            let any = match channel {
                Some(channel) => heard.remove(channel),
                None => !std::mem::take(&mut *heard).is_empty(),
            };
            drop(heard);
            if any {
                watches.doubt();
                if let Some(copies) = &copies {
                    copies.flush();
                }
                gap.notify_one();
            }
        })
    }

    /// Nobody waits in this bucket any more, perhaps.
    async fn tidy(&self, bucket: u8) {
        sleep(LINGERS).await;
        let Some((slot, name)) = self.slot(bucket, Channel::Wake) else { return };
        let _listening = slot.listening.lock().await;
        let Some(ear) = slot.open() else { return };
        {
            // Who comes to wait counts itself first and looks for the channel then: it finds it gone, or we find it.
            let waiting = self.waiting.lock();
            if waiting[usize::from(bucket)] > 0 || !ear.channels.lock().remove(&name) {
                return;
            }
        }
        if ear.channels.lock().is_empty() {
            slot.ear.lock().take();
            return;
        }
        let verb = if self.nodes.is_cluster() { "SUNSUBSCRIBE" } else { "UNSUBSCRIBE" };
        let _ = timeout(self.nodes.dialer.timeout, ear.wire.ask(redis::cmd(verb).arg(&name))).await;
    }
}

/// Keeps hearing what is forgotten, at every server, for as long as the store is there.
pub(super) async fn hear_forgets(ears: Weak<Ears>) {
    loop {
        let (gap, all) = {
            let Some(ears) = ears.upgrade() else { return };
            let heard = join_all((0..=u8::MAX).map(|bucket| ears.hear(bucket, Channel::Forget))).await;
            (ears.gap.clone(), heard.into_iter().all(|heard| heard))
        };
        let _ = timeout(jittered(if all { PINGED } else { PAUSE }), gap.notified()).await;
    }
}

fn heard(data: &[Value], watches: &Watches, copies: Option<&Copies>) {
    let [Value::BulkString(channel), Value::BulkString(message)] = data else { return };
    if channel.ends_with(b":wake") {
        if let Some((at, fence)) = woken(message) {
            watches.wake(&at, fence);
        }
    } else if let (Some(copies), Some(at)) = (copies, std::str::from_utf8(message).ok().and_then(Address::from_hex)) {
        copies.forget(&at);
    }
}

/// Notices a server that is gone without a word.
async fn keep_alive(ear: Weak<Ear>, patience: Duration, lost: Lost) {
    loop {
        sleep(jittered(PINGED)).await;
        let Some(ear) = ear.upgrade() else { return };
        let answered = timeout(patience, ear.wire.ask(&redis::cmd("PING"))).await;
        if !matches!(answered, Ok(Ok(_))) {
            ear.wire.give_up();
            lost(None);
            return;
        }
    }
}

impl Slot {
    fn open(&self) -> Option<Arc<Ear>> {
        self.ear.lock().as_ref().filter(|ear| ear.wire.is_open()).cloned()
    }

    fn hears(&self, name: &str) -> bool {
        self.open().is_some_and(|ear| ear.channels.lock().contains(name))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(ears) = self.ears.upgrade() else { return };
        let left = {
            let mut waiting = ears.waiting.lock();
            let left = &mut waiting[usize::from(self.bucket)];
            *left -= 1;
            *left
        };
        if left == 0
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let bucket = self.bucket;
            runtime.spawn(async move { ears.tidy(bucket).await });
        }
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("open", &self.open().is_some()).finish()
    }
}
