//! Deliveries of a RabbitMQ queue.
//!
//! The event identity is taken from the CloudEvents attributes, else from `message_id`, which the publisher must keep
//! unique in the queue. A dead letter is rejected, and goes to the queue's dead-letter exchange: **without one RabbitMQ
//! drops it**. [`declare`] creates a queue that has one.
//!
//! RabbitMQ cannot delay a redelivery. So a delivery to be redelivered later is held back unacknowledged in this
//! process and then returned to the queue; meanwhile it counts against the prefetch limit. If this process ends, it
//! returns at once.
//!
//! ```no_run
//! # async fn consume(channel: lapin::Channel) -> Result<(), Box<dyn std::error::Error>> {
//! use ibid::inbox::Inbox;
//! use ibid_brokers::rabbitmq::{RabbitmqDeliveries, declare};
//!
//! # let inbox: Inbox = unimplemented!();
//! declare(&channel, "orders").await?;
//! let mut deliveries = RabbitmqDeliveries::open(&channel, "orders", "mailer", 32).await?;
//! while let Some(delivery) = deliveries.next().await {
//!     let delivery = delivery?;
//!     let handled = inbox.handle(delivery.event(), |_attempt| async { Ok::<_, std::io::Error>(()) }).await;
//!     delivery.reply(inbox.reply(&handled)).await?;
//! }
//! # Ok(()) }
//! ```

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use futures_util::StreamExt;
use ibid::inbox::{BrokerMessageId, BrokerReply, DeliveredMessage, EventIdentityError, InboxEvent};
use lapin::{
    Acker, Channel, ExchangeKind,
    message::Delivery as Message,
    options::{
        BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, BasicRejectOptions,
        ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
    },
    types::{AMQPValue, FieldTable},
};
use tokio::time::sleep;

/// Maximum time that a delivery is held back. Servers close channels with a delivery unacknowledged for half an hour.
pub const MAX_REQUEUE_DELAY: Duration = Duration::from_secs(5 * 60);

/// An error of the broker or the connection. Unacknowledged messages are delivered again.
#[derive(Debug, thiserror::Error)]
#[error("RabbitMQ: {action}: {}", source.as_ref().map_or("the channel that it came on is gone".into(), ToString::to_string))]
pub struct RabbitmqError {
    action: &'static str,
    /// `None` if the delivery's channel is closed.
    source: Option<lapin::Error>,
}

/// The deliveries of a queue.
pub struct RabbitmqDeliveries {
    messages: lapin::Consumer,
    consumer: String,
    queue: String,
}

/// A delivery and its event. Without a reply, it is delivered again once the channel closes.
pub struct RabbitmqDelivery {
    message: Message,
    event: InboxEvent,
}

/// Declares a durable queue, and `{queue}.dead` as exchange and queue for its dead letters. They are quorum queues
/// (replicated), so that deliveries are counted and no dead letter is lost on its way.
///
/// # Errors
/// Returns an error if the broker rejects a declaration, for example because the queue exists with other settings.
pub async fn declare(channel: &Channel, queue: &str) -> Result<(), RabbitmqError> {
    let dead = format!("{queue}.dead");
    let failed = RabbitmqError::context("the queue and its dead letters cannot be declared");
    let exchange = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let made = channel.exchange_declare(dead.as_str().into(), ExchangeKind::Fanout, exchange, FieldTable::default());
    made.await.map_err(failed)?;
    let text = |text: &str| AMQPValue::LongString(text.into());
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let mut kept = FieldTable::default();
    kept.insert("x-queue-type".into(), text("quorum"));
    channel.queue_declare(dead.as_str().into(), durable, kept.clone()).await.map_err(failed)?;
    let bound = channel.queue_bind(
        dead.as_str().into(),
        dead.as_str().into(),
        "".into(),
        QueueBindOptions::default(),
        FieldTable::default(),
    );
    bound.await.map_err(failed)?;
    kept.insert("x-dead-letter-exchange".into(), text(&dead));
    kept.insert("x-dead-letter-strategy".into(), text("at-least-once"));
    kept.insert("x-overflow".into(), text("reject-publish"));
    channel.queue_declare(queue.into(), durable, kept).await.map_err(failed)?;
    Ok(())
}

impl RabbitmqDeliveries {
    /// Consumes a queue, with at most `prefetch` unacknowledged deliveries. `consumer` is the consumer name in the
    /// events; different names are independent consumers.
    ///
    /// # Errors
    /// Returns an error if the queue does not exist.
    pub async fn open(channel: &Channel, queue: &str, consumer: &str, prefetch: u16) -> Result<Self, RabbitmqError> {
        let failed = RabbitmqError::context("the queue cannot be consumed");
        channel.basic_qos(prefetch, BasicQosOptions::default()).await.map_err(failed)?;
        let messages =
            channel.basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default());
        let messages = messages.await.map_err(failed)?;
        Ok(Self { messages, consumer: consumer.into(), queue: queue.into() })
    }

    /// Waits for the next delivery. A message without an event identity is dead-lettered, and the next delivery is
    /// returned.
    pub async fn next(&mut self) -> Option<Result<RabbitmqDelivery, RabbitmqError>> {
        loop {
            let message = match self.messages.next().await? {
                Ok(message) => message,
                Err(error) => return Some(Err(RabbitmqError::context("nothing is delivered")(error))),
            };
            match identify(&self.consumer, &self.queue, &message) {
                Ok(event) => return Some(Ok(RabbitmqDelivery { message, event })),
                Err(why) => {
                    tracing::warn!(queue = self.queue, %why, "a message without an identity");
                    if let Err(error) = reject(&message.acker).await {
                        return Some(Err(error));
                    }
                }
            }
        }
    }
}

impl RabbitmqDelivery {
    /// Returns the event of the delivery.
    pub fn event(&self) -> &InboxEvent {
        &self.event
    }

    /// Returns the message, for reading. Acknowledge it only with [`reply`](Self::reply).
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Returns the number of deliveries, including this one, if the queue counts them (quorum queues do). It also
    /// counts handlers that crash their process, which an inbox in a transaction never does.
    pub fn delivery_count(&self) -> Option<u64> {
        let headers = self.message.properties.headers().as_ref();
        let before = match headers.and_then(|headers| headers.inner().get("x-delivery-count")) {
            None if self.message.redelivered => return None,
            None => 0,
            Some(AMQPValue::LongLongInt(before)) => u64::try_from(*before).ok()?,
            Some(AMQPValue::LongInt(before)) => u64::try_from(*before).ok()?,
            Some(AMQPValue::LongUInt(before)) => u64::from(*before),
            Some(AMQPValue::ShortInt(before)) => u64::try_from(*before).ok()?,
            Some(AMQPValue::ShortShortInt(before)) => u64::try_from(*before).ok()?,
            Some(_) => return None,
        };
        Some(before + 1)
    }

    /// Sends the reply to the broker.
    ///
    /// # Errors
    /// Returns an error if the channel is closed. The message is then delivered again; it is a duplicate if it was
    /// handled.
    pub async fn reply(self, reply: BrokerReply) -> Result<(), RabbitmqError> {
        let acker = self.message.acker;
        match reply {
            BrokerReply::Acknowledge => {
                check_sent("it was not acknowledged", acker.ack(BasicAckOptions::default()).await)
            }
            BrokerReply::Redeliver { after } => {
                tokio::spawn(async move {
                    sleep(after.min(MAX_REQUEUE_DELAY)).await;
                    // If the channel is closed by now, the delivery has already returned to the queue.
                    let requeue = BasicNackOptions { requeue: true, ..BasicNackOptions::default() };
                    if let Err(error) = acker.nack(requeue).await {
                        tracing::debug!(%error, "a delivery returned to its queue with its channel");
                    }
                });
                Ok(())
            }
            BrokerReply::DeadLetter { why } => {
                tracing::warn!(event = %self.event, why, "a dead letter");
                reject(&acker).await
            }
        }
    }
}

/// Returns the event of a message in this queue.
///
/// # Errors
/// Returns an error if the message has no event identity.
pub fn identify(consumer: &str, queue: &str, message: &Message) -> Result<InboxEvent, EventIdentityError> {
    let properties = &message.properties;
    let headers: Vec<(&str, &[u8])> = properties
        .headers()
        .iter()
        .flat_map(|headers| headers.inner())
        .filter_map(|(name, value)| match value {
            AMQPValue::LongString(text) => Some((name.as_str(), text.as_bytes())),
            AMQPValue::ShortString(text) => Some((name.as_str(), text.as_str().as_bytes())),
            AMQPValue::ByteArray(bytes) => Some((name.as_str(), bytes.as_slice())),
            _ => None,
        })
        .collect();
    let source = format!("rabbitmq:{queue}");
    let broker = properties.message_id().as_ref().map(|id| BrokerMessageId { source: &source, id: id.as_str() });
    let published_at =
        properties.timestamp().and_then(|at| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(at)));
    let content_type = properties.content_type().as_ref().map(|content_type| content_type.as_str());
    let body = &message.data;
    InboxEvent::of(consumer, &DeliveredMessage { headers: &headers, content_type, body, broker, published_at })
}

async fn reject(acker: &Acker) -> Result<(), RabbitmqError> {
    check_sent("it was not rejected", acker.reject(BasicRejectOptions { requeue: false }).await)
}

/// `Ok(false)` means that there is no channel to send on.
fn check_sent(what: &'static str, told: lapin::Result<bool>) -> Result<(), RabbitmqError> {
    match told {
        Ok(true) => Ok(()),
        Ok(false) => Err(RabbitmqError { action: what, source: None }),
        Err(error) => Err(RabbitmqError::context(what)(error)),
    }
}

impl RabbitmqError {
    fn context(what: &'static str) -> impl Fn(lapin::Error) -> Self + Copy {
        move |source| Self { action: what, source: Some(source) }
    }
}

impl fmt::Debug for RabbitmqDeliveries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitmqDeliveries")
            .field("consumer", &self.consumer)
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for RabbitmqDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitmqDelivery").field("event", &self.event).finish_non_exhaustive()
    }
}
