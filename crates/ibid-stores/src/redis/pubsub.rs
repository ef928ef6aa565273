//! Subscribes to published settlements and forgets.
//!
//! There is one connection per server, opened for the first waiter and closed after the last. A lost message only
//! causes a delay, because waiters also poll. The local cache must know of every gap: an idle connection is pinged, and
//! a gap flushes the cache, once when it is detected and again when it is closed.

use std::collections::HashSet;

use redis::PushKind;
use tokio::sync::Notify;

use super::*;

/// Interval of pings on a subscribed connection.
const PING_INTERVAL: Duration = Duration::from_secs(2);
/// How long a subscription outlives its last waiter, because the next one often follows soon.
const SUBSCRIPTION_LINGER: Duration = Duration::from_secs(1);
/// Minimum delay before a failed subscription is retried.
const SUBSCRIBE_RETRY_DELAY: Duration = Duration::from_millis(250);

pub(super) struct PubSub {
    topology: Arc<RedisTopology>,
    key_names: Arc<KeyNames>,
    pub(super) notifications: Arc<ServerNotifications>,
    slots: Mutex<HashMap<String, Arc<PubSubSlot>>>,
    /// Number of waiters by bucket.
    waiter_counts: Mutex<Vec<u32>>,
    /// Notified when a connection is lost.
    connection_lost: Arc<Notify>,
}

/// The subscriber of one server. `subscribe_lock` is held during every (un)subscribe, so that they stay in order.
#[derive(Default)]
struct PubSubSlot {
    connection: Mutex<Option<Arc<PubSubConnection>>>,
    subscribe_lock: tokio::sync::Mutex<Option<Instant>>,
}

struct PubSubConnection {
    connection: RedisConnection,
    channels: Arc<Mutex<HashSet<String>>>,
}

/// Called with the channel that was lost, or `None` if all of the connection's channels were.
type OnChannelLost = Arc<dyn Fn(Option<&str>) + Send + Sync>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PubSubChannel {
    Wake,
    Forget,
}

/// Registers a waiter in a bucket until dropped.
pub(super) struct BucketListener {
    pubsub: Weak<PubSub>,
    bucket: u8,
}

impl PubSub {
    pub(super) fn new(
        topology: Arc<RedisTopology>, key_names: Arc<KeyNames>, notifications: ServerNotifications,
    ) -> Self {
        Self {
            topology,
            key_names,
            notifications: Arc::new(notifications),
            slots: Mutex::default(),
            waiter_counts: Mutex::new(vec![0; BUCKET_COUNT]),
            connection_lost: Arc::default(),
        }
    }

    pub(super) fn register_listener(self: &Arc<Self>, bucket: u8) -> BucketListener {
        self.waiter_counts.lock()[usize::from(bucket)] += 1;
        BucketListener { pubsub: Arc::downgrade(self), bucket }
    }

    /// Subscribes to a channel. Returns whether its messages are received from now on.
    pub(super) async fn ensure_subscribed(&self, bucket: u8, channel: PubSubChannel) -> bool {
        let Some((slot, name)) = self.slot_for(bucket, channel) else { return false };
        if slot.is_subscribed(&name) {
            return true;
        }
        let heard = timeout(self.topology.connector.timeout, self.subscribe(bucket, &slot, &name)).await;
        heard.unwrap_or(false)
    }

    fn slot_for(&self, bucket: u8, channel: PubSubChannel) -> Option<(Arc<PubSubSlot>, String)> {
        let server = self.topology.server_for(bucket)?;
        let place = match &server.target {
            ServerTarget::Host(host) => host.to_string(),
            ServerTarget::Primary(_) => String::new(),
        };
        let word = if channel == PubSubChannel::Wake { "wake" } else { "forget" };
        let slot = self.slots.lock().entry(place).or_default().clone();
        Some((slot, format!("{}{word}", self.key_names.bucket_prefix(bucket))))
    }

    async fn subscribe(&self, bucket: u8, slot: &PubSubSlot, name: &str) -> bool {
        let mut failed = slot.subscribe_lock.lock().await;
        if slot.is_subscribed(name) {
            return true;
        }
        if failed.is_some_and(|at| at.elapsed() < SUBSCRIBE_RETRY_DELAY) {
            return false;
        }
        let subscribed = self.try_subscribe(bucket, slot, name).await;
        if let Err(why) = &subscribed {
            tracing::debug!(why, "redis: cannot listen; waiters poll");
        }
        *failed = subscribed.is_err().then(Instant::now);
        subscribed.is_ok()
    }

    async fn try_subscribe(&self, bucket: u8, slot: &PubSubSlot, name: &str) -> Result<(), String> {
        let subscriber = match slot.open_connection() {
            Some(subscriber) => subscriber,
            None => {
                let subscriber = self.connect(bucket).await?;
                slot.connection.lock().insert(subscriber).clone()
            }
        };
        let verb = if self.topology.is_cluster() { "SSUBSCRIBE" } else { "SUBSCRIBE" };
        let answer = subscriber.connection.ask(redis::cmd(verb).arg(name)).await.map_err(|error| error.to_string())?;
        if let Err(trouble) = check_reply(answer) {
            self.topology.refresh_in_background();
            return Err(format!("{trouble:?}"));
        }
        subscriber.channels.lock().insert(name.to_owned());
        // Forgets before the subscription were not received.
        if name.ends_with(":forget") {
            self.notifications.flush_cache();
        }
        Ok(())
    }

    async fn connect(&self, bucket: u8) -> Result<Arc<PubSubConnection>, String> {
        let server = self.topology.server_for(bucket).ok_or("no node is known to keep this bucket")?;
        let host = server.resolve_host().await?;
        let channels: Arc<Mutex<HashSet<String>>> = Arc::default();
        let lost = self.channel_lost_handler(channels.clone());
        let pushes = {
            let (notifications, lost) = (self.notifications.clone(), lost.clone());
            Arc::new(move |push: PushInfo| match push.kind {
                PushKind::Message | PushKind::SMessage => dispatch_message(&push.data, &notifications),
                PushKind::Disconnection => lost(None),
                PushKind::Unsubscribe | PushKind::SUnsubscribe => {
                    // If we still expect messages of this channel, its slot has moved to another node.
                    if let Some(Value::BulkString(channel)) = push.data.first() {
                        lost(Some(&String::from_utf8_lossy(channel)));
                    }
                }
                _ => {}
            })
        };
        let wire = self.topology.connector.connect_pubsub(&host, pushes).await?;
        let subscriber = Arc::new(PubSubConnection { connection: wire, channels });
        tokio::spawn(keep_alive(Arc::downgrade(&subscriber), self.topology.connector.timeout, lost));
        Ok(subscriber)
    }

    /// Creates the handler for a lost channel, or `None` for all channels of a connection.
    fn channel_lost_handler(&self, channels: Arc<Mutex<HashSet<String>>>) -> OnChannelLost {
        let (notifications, gap) = (self.notifications.clone(), self.connection_lost.clone());
        Arc::new(move |channel| {
            let mut heard = channels.lock();
            let any = match channel {
                Some(channel) => heard.remove(channel),
                None => !std::mem::take(&mut *heard).is_empty(),
            };
            drop(heard);
            if any {
                notifications.waits.check_again();
                notifications.flush_cache();
                gap.notify_one();
            }
        })
    }

    /// Unsubscribes from a bucket that has had no waiter for a while.
    async fn unsubscribe_if_idle(&self, bucket: u8) {
        sleep(SUBSCRIPTION_LINGER).await;
        let Some((slot, name)) = self.slot_for(bucket, PubSubChannel::Wake) else { return };
        let _listening = slot.subscribe_lock.lock().await;
        let Some(subscriber) = slot.open_connection() else { return };
        {
            // A new waiter counts itself before it checks the channel: it sees the removal, or this code sees the
            // waiter.
            let waiting = self.waiter_counts.lock();
            if waiting[usize::from(bucket)] > 0 || !subscriber.channels.lock().remove(&name) {
                return;
            }
        }
        if subscriber.channels.lock().is_empty() {
            slot.connection.lock().take();
            return;
        }
        let verb = if self.topology.is_cluster() { "SUNSUBSCRIBE" } else { "UNSUBSCRIBE" };
        let _ = timeout(self.topology.connector.timeout, subscriber.connection.ask(redis::cmd(verb).arg(&name))).await;
    }
}

/// Keeps every server's forget channel subscribed for as long as the store lives.
pub(super) async fn follow_forgets(pubsub: Weak<PubSub>) {
    loop {
        let (gap, all) = {
            let Some(pubsub) = pubsub.upgrade() else { return };
            let heard =
                join_all((0..=u8::MAX).map(|bucket| pubsub.ensure_subscribed(bucket, PubSubChannel::Forget))).await;
            (pubsub.connection_lost.clone(), heard.into_iter().all(|heard| heard))
        };
        let _ = timeout(with_jitter(if all { PING_INTERVAL } else { SUBSCRIBE_RETRY_DELAY }), gap.notified()).await;
    }
}

fn dispatch_message(data: &[Value], notifications: &ServerNotifications) {
    let [Value::BulkString(channel), Value::BulkString(message)] = data else { return };
    let Ok(message) = std::str::from_utf8(message) else { return };
    if channel.ends_with(b":wake") {
        notifications.on_wake(message);
    } else {
        notifications.on_forget(message);
    }
}

/// Detects a server that vanished without closing the connection.
async fn keep_alive(subscriber: Weak<PubSubConnection>, patience: Duration, lost: OnChannelLost) {
    loop {
        sleep(with_jitter(PING_INTERVAL)).await;
        let Some(subscriber) = subscriber.upgrade() else { return };
        let answered = timeout(patience, subscriber.connection.ask(&redis::cmd("PING"))).await;
        if !matches!(answered, Ok(Ok(_))) {
            subscriber.connection.abort();
            lost(None);
            return;
        }
    }
}

impl PubSubSlot {
    fn open_connection(&self) -> Option<Arc<PubSubConnection>> {
        self.connection.lock().as_ref().filter(|subscriber| subscriber.connection.is_open()).cloned()
    }

    fn is_subscribed(&self, name: &str) -> bool {
        self.open_connection().is_some_and(|subscriber| subscriber.channels.lock().contains(name))
    }
}

impl Drop for BucketListener {
    fn drop(&mut self) {
        let Some(pubsub) = self.pubsub.upgrade() else { return };
        let left = {
            let mut waiting = pubsub.waiter_counts.lock();
            let left = &mut waiting[usize::from(self.bucket)];
            *left -= 1;
            *left
        };
        if left == 0
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let bucket = self.bucket;
            runtime.spawn(async move { pubsub.unsubscribe_if_idle(bucket).await });
        }
    }
}
