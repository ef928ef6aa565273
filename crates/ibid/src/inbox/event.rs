use std::{
    fmt,
    time::{Duration, SystemTime},
};

use super::identity;
use crate::{scope::Scope, store::with_jitter};

/// The maximum length of a consumer's name, in bytes.
pub const MAX_CONSUMER_BYTES: usize = 128;
/// The maximum length of the source and of the id, in bytes. Together they fit a database index.
pub const MAX_IDENTITY_PART_BYTES: usize = 1024;

/// Identifies an event for a consumer: two deliveries with the same consumer, source and id are one event.
///
/// Consumers of the same event are independent, because the consumer's name is part of the identity.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InboxEvent {
    consumer: String,
    source: String,
    id: String,
    time: Option<SystemTime>,
}

/// The parts of a delivery that identify its event.
#[derive(Debug, Clone, Copy)]
pub struct DeliveredMessage<'a> {
    /// All headers (application properties) as received.
    pub headers: &'a [(&'a str, &'a [u8])],
    /// The content type, if the broker keeps it apart from the headers.
    pub content_type: Option<&'a str>,
    /// The content. Read only if the content type says that it contains the event's attributes.
    pub body: &'a [u8],
    /// The message id that the publisher set at the broker.
    pub broker: Option<BrokerMessageId<'a>>,
    /// When the message was published, if the broker knows.
    pub published_at: Option<SystemTime>,
}

/// A message id that the publisher gave to the broker.
#[derive(Debug, Clone, Copy)]
pub struct BrokerMessageId<'a> {
    /// The stream or queue in which ids are unique. It must be the same for every delivery of a message.
    pub source: &'a str,
    /// The message id.
    pub id: &'a str,
}

/// Why the event of a delivery cannot be identified. Do not handle such a delivery as a new event: send it to a
/// dead-letter queue for inspection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EventIdentityError {
    /// The message has no id.
    #[error(
        "the message has no identity: neither the CloudEvents attributes id and source nor the broker's own message id; \
         the publisher must set one"
    )]
    Missing,
    /// A CloudEvent lacks this attribute of its identity.
    #[error("the message is a CloudEvent without {0}; only id and source together name an event")]
    MissingAttribute(&'static str),
    /// An attribute has two different values.
    #[error("the message has two values of the CloudEvents attribute {0}")]
    Ambiguous(&'static str),
    /// A part of the identity is invalid.
    #[error("the {part} {why}")]
    Unusable {
        /// The name of the part.
        part: &'static str,
        /// What is wrong with the part.
        why: &'static str,
    },
    /// The content should contain the event's attributes and cannot be read.
    #[error("the message is a structured CloudEvent, and {0}")]
    Unreadable(&'static str),
}

impl InboxEvent {
    /// Creates an event with a known identity.
    ///
    /// # Errors
    /// If a part is empty, too long ([`MAX_CONSUMER_BYTES`], [`MAX_IDENTITY_PART_BYTES`]) or has control characters.
    pub fn new(consumer: &str, source: &str, id: &str) -> Result<Self, EventIdentityError> {
        check_part("consumer's name", consumer, MAX_CONSUMER_BYTES)?;
        check_part("source", source, MAX_IDENTITY_PART_BYTES)?;
        check_part("id", id, MAX_IDENTITY_PART_BYTES)?;
        Ok(Self { consumer: consumer.into(), source: source.into(), id: id.into(), time: None })
    }

    /// Identifies the event of a delivery by its CloudEvents attributes, or without any by the broker's message id.
    ///
    /// # Errors
    /// If the event cannot be identified. The identity is never guessed: treating two events as one would lose the
    /// second.
    pub fn of(consumer: &str, delivered: &DeliveredMessage<'_>) -> Result<Self, EventIdentityError> {
        let event = match (identity::parse_cloud_event(delivered)?, delivered.broker) {
            (Some(cloud), _) => Self { time: cloud.time, ..Self::new(consumer, &cloud.source, &cloud.id)? },
            (None, Some(broker)) => Self::new(consumer, broker.source, broker.id)?,
            (None, None) => return Err(EventIdentityError::Missing),
        };
        Ok(Self { time: event.time.or(delivered.published_at), ..event })
    }

    /// Sets when the event happened.
    #[must_use]
    pub fn with_time(self, at: SystemTime) -> Self {
        Self { time: Some(at), ..self }
    }

    /// Removes the time, so that the event is not too old. Use it to resend an event that was certainly never handled.
    #[must_use]
    pub fn without_time(self) -> Self {
        Self { time: None, ..self }
    }

    /// The consumer that handles the event.
    pub fn consumer(&self) -> &str {
        &self.consumer
    }

    /// The source of the event.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The id, unique at its source.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// When the event happened, if known.
    pub fn at(&self) -> Option<SystemTime> {
        self.time
    }

    /// The consumer is part of the scope: two consumers never share an entry.
    pub(super) fn scope(&self) -> Scope {
        Scope::from_parts(&["ibid.inbox", &self.consumer, &self.source])
    }
}

impl fmt::Display for InboxEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event {:?} of {:?} for {:?}", self.id, self.source, self.consumer)
    }
}

fn check_part(part: &'static str, text: &str, at_most: usize) -> Result<(), EventIdentityError> {
    let why = if text.trim().is_empty() {
        "is empty"
    } else if text.len() > at_most {
        "is too long: allowed are 1024 bytes, of a consumer's name 128"
    } else if text.chars().any(char::is_control) {
        "has control characters"
    } else {
        return Ok(());
    };
    Err(EventIdentityError::Unusable { part, why })
}

/// The final reply to the broker about a delivery. Send it only after the outcome is recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a delivery that is not answered comes again"]
pub enum BrokerReply {
    /// The event is handled. The broker must not deliver it again.
    Acknowledge,
    /// The event is not handled. The broker must deliver it again after this delay.
    Redeliver {
        /// The delay from now.
        after: Duration,
    },
    /// The event is not handled, and another delivery would not help: an operator must inspect it.
    DeadLetter {
        /// The reason, for the operator.
        why: String,
    },
}

impl BrokerReply {
    /// The reply for an event so old that it may have been handled and forgotten.
    pub fn too_old() -> Self {
        let why = "it is older than handled events are remembered: it may have been handled already";
        Self::DeadLetter { why: why.into() }
    }
}

/// The maximum delay of a redelivery. No broker keeps a longer one.
const MAX_REDELIVERY_DELAY: Duration = Duration::from_secs(365 * 24 * 3600);

/// The delay before a failed event is delivered again. It doubles up to a maximum, with jitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RedeliveryBackoff {
    /// The maximum delay after the first failure.
    pub first: Duration,
    /// The maximum delay after any failure.
    pub most: Duration,
}

impl Default for RedeliveryBackoff {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), most: Duration::from_secs(5 * 60) }
    }
}

impl RedeliveryBackoff {
    /// The delay after the `attempt`th failure: random between half and all of it, so that events that failed together
    /// are not delivered together.
    pub fn after(&self, attempt: u32) -> Duration {
        let doubled = self.first.saturating_mul(1_u32.checked_shl(attempt.saturating_sub(1)).unwrap_or(u32::MAX));
        with_jitter(doubled.min(self.most).min(MAX_REDELIVERY_DELAY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_doubles_up_to_the_limit_and_is_never_more() {
        let backoff = RedeliveryBackoff { first: Duration::from_secs(1), most: Duration::from_secs(60) };
        for (attempt, most) in [(0, 1), (1, 1), (2, 2), (3, 4), (7, 60), (40, 60), (u32::MAX, 60)] {
            for _ in 0..50 {
                let after = backoff.after(attempt);
                let most = Duration::from_secs(most);
                assert!(after >= most / 2 && after <= most, "{attempt}: {after:?}");
            }
        }
        let endless = RedeliveryBackoff { first: Duration::MAX, most: Duration::MAX };
        assert!(endless.after(5) <= MAX_REDELIVERY_DELAY);
    }
}
