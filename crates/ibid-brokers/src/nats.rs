//! Deliveries of a JetStream pull consumer.
//!
//! Which event it is: its CloudEvents attributes, else its `Nats-Msg-Id`, which is unique in its stream. While a delivery is
//! being handled the server is told so, and does not deliver it to somebody else. An acknowledgement is confirmed by
//! the server. A dead letter is published to a subject of its own, which a stream must keep, and confirmed there before
//! the delivery is ended.
//!
//! ```no_run
//! # async fn consume(consumer: async_nats::jetstream::consumer::PullConsumer, jetstream: async_nats::jetstream::Context)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! use ibid::inbox::Inbox;
//! use ibid_brokers::nats::Deliveries;
//!
//! # let inbox: Inbox = unimplemented!();
//! let mut deliveries = Deliveries::of(&jetstream, consumer, "mailer", "dead.mailer").await?;
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
use tokio::{task::JoinHandle, time::sleep};

/// What NATS knows a message by. It also drops a second message with the same one, for a while.
const MESSAGE_ID_HEADER: &str = "Nats-Msg-Id";
/// Why a message is a dead letter.
pub const DEAD_LETTER_REASON_HEADER: &str = "Ibid-Dead-Letter-Why";
/// The subject that a dead letter was published to.
pub const DEAD_LETTER_SUBJECT_HEADER: &str = "Ibid-Dead-Letter-Subject";
/// The `Nats-Msg-Id` that a dead letter came with.
pub const DEAD_LETTER_MESSAGE_ID_HEADER: &str = "Ibid-Dead-Letter-Msg-Id";

/// A fault of the broker, or of the way to it. What was not confirmed comes again.
#[derive(Debug)]
pub struct NatsError {
    action: &'static str,
    source: Box<dyn Error + Send + Sync>,
}

/// What a pull consumer is given, one by one.
pub struct NatsDeliveries {
    messages: pull::Stream,
    context: NatsDeliveryContext,
}

/// For whom deliveries are, and where dead letters go.
#[derive(Clone)]
struct NatsDeliveryContext {
    jetstream: Context,
    consumer: String,
    dead_letters: String,
    /// How often the server is told that a delivery is being handled.
    progress_interval: Duration,
}

/// One delivery, known by its event. Dropped without a reply, it comes again.
pub struct NatsDelivery {
    message: Message,
    event: InboxEvent,
    context: NatsDeliveryContext,
    progress_task: AckProgressTask,
}

/// Tells the server that a delivery is being handled, until it is dropped.
struct AckProgressTask(JoinHandle<()>);

impl Drop for AckProgressTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl NatsDeliveries {
    /// Those of a consumer with explicit acknowledgement. `name` is the consumer in the events; two names are two
    /// independent consumers.
    ///
    /// # Errors
    /// If no stream keeps `dead_letters`, or the server cannot be asked.
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
        let to = NatsDeliveryContext {
            jetstream: context.clone(),
            consumer: name.into(),
            dead_letters: dead_letters.into(),
            progress_interval: (wait / 3).max(Duration::from_millis(50)),
        };
        Ok(Self { messages, context: to })
    }

    /// The next delivery. One whose event nobody can tell becomes a dead letter, and the next one is returned.
    pub async fn next(&mut self) -> Option<Result<NatsDelivery, NatsError>> {
        loop {
            let message = match self.messages.next().await? {
                Ok(message) => message,
                Err(error) => return Some(Err(NatsError::context("nothing can be pulled")(error))),
            };
            match identify(&self.context.consumer, &message) {
                Ok(event) => {
                    let beating = spawn_progress_task(&message, self.context.progress_interval);
                    return Some(Ok(NatsDelivery {
                        message,
                        event,
                        context: self.context.clone(),
                        progress_task: beating,
                    }));
                }
                Err(why) => {
                    tracing::warn!(subject = %message.subject, %why, "a message without an identity");
                    if let Err(error) = self.context.dead_letter(&message, &why.to_string()).await {
                        // It comes again, and so does this attempt.
                        tracing::error!(subject = %message.subject, %error, "a dead letter was not taken");
                    }
                }
            }
        }
    }
}

impl NatsDelivery {
    /// Which event it is.
    pub fn event(&self) -> &InboxEvent {
        &self.event
    }

    /// The message, to be read. The reply is given by [`reply`](Self::reply).
    pub fn message(&self) -> &async_nats::Message {
        &self.message
    }

    /// How often it was delivered, this time included. A handler that takes its process down is never counted by an inbox
    /// in a transaction; this is.
    pub fn delivery_count(&self) -> u64 {
        self.message.info().map_or(1, |info| u64::try_from(info.delivered).unwrap_or(1))
    }

    /// Tells the broker what became of it, and waits for the broker's word on that.
    ///
    /// # Errors
    /// If the broker did not confirm it. Then it may come again, and will be a duplicate if it was handled.
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
    /// Kept elsewhere first, then ended here: whatever happens in between, it is not lost.
    async fn dead_letter(&self, message: &Message, why: &str) -> Result<(), NatsError> {
        let mut headers = HeaderMap::new();
        for (name, values) in message.headers.iter().flat_map(HeaderMap::iter) {
            let renamed = if name.to_string().eq_ignore_ascii_case(MESSAGE_ID_HEADER) {
                DEAD_LETTER_MESSAGE_ID_HEADER
            } else {
                name.as_ref()
            };
            for value in values {
                headers.append(renamed, value.as_str());
            }
        }
        // A header is one line.
        headers.insert(DEAD_LETTER_REASON_HEADER, why.replace(['\r', '\n'], " ").as_str());
        headers.insert(DEAD_LETTER_SUBJECT_HEADER, message.subject.as_str());
        if let Ok(info) = message.info() {
            // Kept once, even if it must be sent again. Two consumers have a dead letter each.
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

/// Sends a dead letter back to where it came from, as the event that it was. Forget it in the inbox first, or it is a
/// duplicate or poisoned still.
///
/// # Errors
/// If it is no dead letter, or was not kept: the stream takes no second message with the same `Nats-Msg-Id` within its
/// duplicate window.
pub async fn redrive(context: &Context, dead: &async_nats::Message) -> Result<(), NatsError> {
    let all = dead.headers.clone().unwrap_or_default();
    let Some(subject) = all.get(DEAD_LETTER_SUBJECT_HEADER).map(|subject| subject.to_string()) else {
        return Err(NatsError::context("this is no dead letter")(format!(
            "it has no header {DEAD_LETTER_SUBJECT_HEADER}"
        )));
    };
    let mut headers = HeaderMap::new();
    for (name, values) in all.iter() {
        let renamed = match name.as_ref() {
            DEAD_LETTER_REASON_HEADER | DEAD_LETTER_SUBJECT_HEADER | MESSAGE_ID_HEADER => continue,
            DEAD_LETTER_MESSAGE_ID_HEADER => MESSAGE_ID_HEADER,
            other => other,
        };
        for value in values {
            headers.append(renamed, value.as_str());
        }
    }
    let sent = context.publish_with_headers(subject, headers, dead.payload.clone()).await;
    let kept =
        sent.map_err(NatsError::context("it was not sent"))?.await.map_err(NatsError::context("it was not kept"))?;
    if kept.duplicate {
        let why = "the stream has a message with this Nats-Msg-Id; try again after its duplicate window";
        return Err(NatsError::context("it was not kept")(why));
    }
    Ok(())
}

/// Which event a JetStream message is.
///
/// # Errors
/// If nobody can say.
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
    let published = info.as_ref().map(|info| SystemTime::from(info.published));
    InboxEvent::of(
        consumer,
        &DeliveredMessage {
            headers: &headers,
            content_type: None,
            body: &message.payload,
            broker,
            published_at: published,
        },
    )
}

fn spawn_progress_task(message: &Message, every: Duration) -> AckProgressTask {
    let acker = Acker::new(message.context.clone(), message.reply.clone());
    AckProgressTask(tokio::spawn(async move {
        loop {
            sleep(every).await;
            if let Err(error) = acker.ack_with(AckKind::Progress).await {
                tracing::debug!(%error, "the server could not be told that a delivery is being handled");
            }
        }
    }))
}

impl NatsError {
    fn context<E: Into<Box<dyn Error + Send + Sync>>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self { action: what, source: source.into() }
    }
}

impl fmt::Display for NatsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NATS: {}: {}", self.action, self.source)
    }
}

impl Error for NatsError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
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
