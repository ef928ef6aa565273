use std::{fmt, time::SystemTime};

use super::identity;
use crate::scope::Scope;

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
