//! Deliveries of a JetStream pull consumer.
//!
//! The event identity is taken from the CloudEvents attributes, else from `Nats-Msg-Id`, which is unique in its stream.
//! During handling, the server receives progress acknowledgements, so that it does not redeliver the message. The
//! server confirms every acknowledgement. A dead letter is published to its own subject, which a stream must store, and
//! confirmed there before the delivery ends.
//!
//! ```no_run
//! # use async_nats::jetstream::{Context, consumer::PullConsumer};
//! # async fn consume(consumer: PullConsumer, jetstream: Context) -> Result<(), Box<dyn std::error::Error>> {
//! use ibid::inbox::Inbox;
//! use ibid_brokers::nats::NatsDeliveries;
//!
//! # let inbox: Inbox = unimplemented!();
//! let mut deliveries = NatsDeliveries::open(&jetstream, consumer, "mailer", "dead.mailer").await?;
//! while let Some(delivery) = deliveries.next().await {
//!     let delivery = delivery?;
//!     let handled = inbox.handle(delivery.event(), |_attempt| async { Ok::<_, std::io::Error>(()) }).await;
//!     delivery.reply(inbox.reply(&handled)).await?;
//! }
//! # Ok(()) }
//! ```

use std::{
    error::Error,
    fmt,
    time::{Duration, SystemTime},
};

use async_nats::{
    HeaderMap,
    jetstream::{
        self, AckKind, Context, Message,
        consumer::{PullConsumer, pull},
        message::Acker,
    },
};
use futures_util::StreamExt;
use ibid::inbox::{BrokerMessageId, BrokerReply, DeliveredMessage, EventIdentityError, InboxEvent};
use tokio::{task::JoinSet, time::sleep};

/// Identifies a message. JetStream drops a second message with the same id within its duplicate window.
const MESSAGE_ID_HEADER: &str = "Nats-Msg-Id";
/// Header with the reason for dead-lettering.
pub const DEAD_LETTER_REASON_HEADER: &str = "Ibid-Dead-Letter-Why";
/// Header with the original subject of a dead letter.
pub const DEAD_LETTER_SUBJECT_HEADER: &str = "Ibid-Dead-Letter-Subject";
/// Header with the original `Nats-Msg-Id` of a dead letter.
pub const DEAD_LETTER_MESSAGE_ID_HEADER: &str = "Ibid-Dead-Letter-Msg-Id";

/// An error of the broker or the connection. Unconfirmed messages are delivered again.
#[derive(Debug, thiserror::Error)]
#[error("NATS: {action}: {source}")]
pub struct NatsError {
    action: &'static str,
    source: Box<dyn Error + Send + Sync>,
}

/// The deliveries of a pull consumer.
pub struct NatsDeliveries {
    messages: pull::Stream,
    context: NatsDeliveryContext,
}

#[derive(Clone)]
struct NatsDeliveryContext {
    jetstream: Context,
    consumer: String,
    dead_letters: String,
    /// Interval of progress acknowledgements during handling.
    progress_interval: Duration,
}

/// A delivery and its event. If dropped without a reply, it is delivered again.
pub struct NatsDelivery {
    message: Message,
    event: InboxEvent,
    context: NatsDeliveryContext,
    /// Sends progress acknowledgements until dropped.
    progress_task: JoinSet<()>,
}

impl NatsDeliveries {
    /// Opens a consumer with explicit acknowledgement. `name` is the consumer name in the events; different names are
    /// independent consumers.
    ///
    /// # Errors
    /// Returns an error if no stream stores the subject `dead_letters`, or if the server cannot be reached.
    pub async fn open(
        context: &Context, mut consumer: PullConsumer, name: &str, dead_letters: &str,
    ) -> Result<Self, NatsError> {
        let kept = context.stream_by_subject(dead_letters).await;
        kept.map_err(NatsError::context(
            "no stream keeps the subject of dead letters; make one before messages are consumed",
        ))?;
        let info = consumer.info().await.map_err(NatsError::context("the consumer cannot be asked about itself"))?;
        // The server's default, if none is set.
        let wait = if info.config.ack_wait.is_zero() { Duration::from_secs(30) } else { info.config.ack_wait };
        let messages = consumer.messages().await.map_err(NatsError::context("nothing can be pulled"))?;
        let progress_interval = (wait / 3).max(Duration::from_millis(50));
        let (jetstream, consumer, dead_letters) = (context.clone(), name.into(), dead_letters.into());
        let context = NatsDeliveryContext { jetstream, consumer, dead_letters, progress_interval };
        Ok(Self { messages, context })
    }

    /// Waits for the next delivery. A message without an event identity is dead-lettered, and the next delivery is
    /// returned.
    pub async fn next(&mut self) -> Option<Result<NatsDelivery, NatsError>> {
        loop {
            let message = match self.messages.next().await? {
                Ok(message) => message,
                Err(error) => return Some(Err(NatsError::context("nothing can be pulled")(error))),
            };
            match identify(&self.context.consumer, &message) {
                Ok(event) => {
                    let progress_task = spawn_progress_task(&message, self.context.progress_interval);
                    return Some(Ok(NatsDelivery { message, event, context: self.context.clone(), progress_task }));
                }
                Err(why) => {
                    tracing::warn!(subject = %message.subject, %why, "a message without an identity");
                    if let Err(error) = self.context.dead_letter(&message, &why.to_string()).await {
                        // The message is delivered again, and dead-lettering is retried then.
                        tracing::error!(subject = %message.subject, %error, "a dead letter was not taken");
                    }
                }
            }
        }
    }
}

impl NatsDelivery {
    /// Returns the event of the delivery.
    pub fn event(&self) -> &InboxEvent {
        &self.event
    }

    /// Returns the message, for reading. Acknowledge it only with [`reply`](Self::reply).
    pub fn message(&self) -> &async_nats::Message {
        &self.message
    }

    /// Returns the number of deliveries, including this one. It also counts handlers that crash their process, which an
    /// inbox in a transaction never does.
    pub fn delivery_count(&self) -> u64 {
        self.message.info().map_or(1, |info| u64::try_from(info.delivered).unwrap_or(1))
    }

    /// Sends the reply to the broker and waits for its confirmation.
    ///
    /// # Errors
    /// Returns an error if the broker did not confirm. The message may then be delivered again; it is a duplicate if it
    /// was handled.
    pub async fn reply(self, reply: BrokerReply) -> Result<(), NatsError> {
        let told = match reply {
            BrokerReply::Acknowledge => self.message.double_ack().await,
            BrokerReply::Redeliver { after } => self.message.double_ack_with(AckKind::Nak(Some(after))).await,
            BrokerReply::DeadLetter { why } => {
                tracing::warn!(event = %self.event, why, "a dead letter");
                return self.context.dead_letter(&self.message, &why).await;
            }
        };
        drop(self.progress_task);
        told.map_err(|source| NatsError { action: "the reply was not confirmed", source })
    }
}

impl NatsDeliveryContext {
    /// Publishes the dead letter first, then ends the delivery, so that a crash in between loses nothing.
    async fn dead_letter(&self, message: &Message, why: &str) -> Result<(), NatsError> {
        let mut headers = renamed_headers(message, |name| {
            Some(if name.eq_ignore_ascii_case(MESSAGE_ID_HEADER) { DEAD_LETTER_MESSAGE_ID_HEADER } else { name })
        });
        // A header is one line.
        headers.insert(DEAD_LETTER_REASON_HEADER, why.replace(['\r', '\n'], " ").as_str());
        headers.insert(DEAD_LETTER_SUBJECT_HEADER, message.subject.as_str());
        if let Ok(info) = message.info() {
            // Makes a repeated publish a duplicate. Two consumers have one dead letter each.
            let id = format!("dead:{}:{}:{}", self.consumer, info.stream, info.stream_sequence);
            headers.insert(MESSAGE_ID_HEADER, id.as_str());
        }
        let subject = self.dead_letters.clone();
        let sent = self.jetstream.publish_with_headers(subject, headers, message.payload.clone()).await;
        let kept = sent.map_err(NatsError::context("the dead letter was not sent"))?.await;
        kept.map_err(NatsError::context("the dead letter was not kept"))?;
        let ended = message.double_ack_with(AckKind::Term).await;
        ended.map_err(|source| NatsError { action: "the end of a dead letter was not confirmed", source })
    }
}

/// Resends a dead letter to its original subject, as the original event. Forget the event in the inbox first; otherwise
/// it is still a duplicate or poisoned.
///
/// # Errors
/// Returns an error if the message is not a dead letter, or was not stored: within its duplicate window, the stream
/// does not accept a second message with the same `Nats-Msg-Id`.
pub async fn redrive(context: &Context, dead: &async_nats::Message) -> Result<(), NatsError> {
    let Some(subject) = dead.headers.as_ref().and_then(|headers| headers.get(DEAD_LETTER_SUBJECT_HEADER)) else {
        let why = format!("it has no header {DEAD_LETTER_SUBJECT_HEADER}");
        return Err(NatsError::context("this is no dead letter")(why));
    };
    let subject = subject.to_string();
    let headers = renamed_headers(dead, |name| match name {
        DEAD_LETTER_REASON_HEADER | DEAD_LETTER_SUBJECT_HEADER | MESSAGE_ID_HEADER => None,
        DEAD_LETTER_MESSAGE_ID_HEADER => Some(MESSAGE_ID_HEADER),
        other => Some(other),
    });
    let sent = context.publish_with_headers(subject, headers, dead.payload.clone()).await;
    let kept =
        sent.map_err(NatsError::context("it was not sent"))?.await.map_err(NatsError::context("it was not kept"))?;
    if kept.duplicate {
        let why = "the stream has a message with this Nats-Msg-Id; try again after its duplicate window";
        return Err(NatsError::context("it was not kept")(why));
    }
    Ok(())
}

/// Copies the headers of a message under the names that `rename` returns.
fn renamed_headers(message: &async_nats::Message, rename: impl Fn(&str) -> Option<&str>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, values) in message.headers.iter().flat_map(HeaderMap::iter) {
        let Some(renamed) = rename(name.as_ref()) else { continue };
        values.iter().for_each(|value| headers.append(renamed, value.as_str()));
    }
    headers
}

/// Returns the event of a JetStream message.
///
/// # Errors
/// Returns an error if the message has no event identity.
pub fn identify(consumer: &str, message: &jetstream::Message) -> Result<InboxEvent, EventIdentityError> {
    let info = message.info().ok();
    let headers: Vec<(&str, &[u8])> = message
        .headers
        .iter()
        .flat_map(HeaderMap::iter)
        .flat_map(|(name, values)| values.iter().map(move |value| (name.as_ref(), value.as_str().as_bytes())))
        .collect();
    let id = message.headers.as_ref().and_then(|headers| headers.get(MESSAGE_ID_HEADER));
    let source = info.as_ref().map(|info| format!("nats:{}", info.stream));
    let broker = id.zip(source.as_ref()).map(|(id, source)| BrokerMessageId { source, id: id.as_str() });
    let published_at = info.as_ref().map(|info| SystemTime::from(info.published));
    let body = &message.payload;
    InboxEvent::of(consumer, &DeliveredMessage { headers: &headers, content_type: None, body, broker, published_at })
}

fn spawn_progress_task(message: &Message, every: Duration) -> JoinSet<()> {
    let acker = Acker::new(message.context.clone(), message.reply.clone());
    let mut task = JoinSet::new();
    task.spawn(async move {
        loop {
            sleep(every).await;
            if let Err(error) = acker.ack_with(AckKind::Progress).await {
                tracing::debug!(%error, "the server could not be told that a delivery is being handled");
            }
        }
    });
    task
}

impl NatsError {
    fn context<E: Into<Box<dyn Error + Send + Sync>>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self { action: what, source: source.into() }
    }
}

impl fmt::Debug for NatsDeliveries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsDeliveries").field("consumer", &self.context.consumer).finish_non_exhaustive()
    }
}

impl fmt::Debug for NatsDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsDelivery").field("event", &self.event).finish_non_exhaustive()
    }
}
