use std::{fmt, time::SystemTime};

use super::identity;
use crate::scope::Scope;

/// The longest name of a consumer, in bytes.
pub const MAX_CONSUMER_BYTES: usize = 128;
/// The longest source and the longest id, in bytes: together they fit the index of a database.
pub const MAX_IDENTITY_PART_BYTES: usize = 1024;

/// Which event it is, and for whom: two deliveries with the same consumer, source and id are one event.
///
/// Another consumer of the same event is independent: its name is part of the identity.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InboxEvent {
    consumer: String,
    source: String,
    id: String,
    time: Option<SystemTime>,
}

/// What a broker delivered, as far as it can say which event it is.
#[derive(Debug, Clone, Copy)]
pub struct DeliveredMessage<'a> {
    /// All headers (application properties), as they came.
    pub headers: &'a [(&'a str, &'a [u8])],
    /// The content type, where the broker keeps it apart from the headers.
    pub content_type: Option<&'a str>,
    /// The content. Read only if the content type says that the event's attributes are in it.
    pub body: &'a [u8],
    /// The broker's own id of the message, set by its publisher, with the place where such ids are unique.
    pub broker: Option<BrokerMessageId<'a>>,
    /// When it was published, as far as the broker knows.
    pub published_at: Option<SystemTime>,
}

/// An id that a publisher gave to its broker.
#[derive(Debug, Clone, Copy)]
pub struct BrokerMessageId<'a> {
    /// Where such ids are unique: a stream, a queue. It must be the same for every delivery of a message.
    pub source: &'a str,
    /// The id.
    pub id: &'a str,
}

/// Why nobody can say which event a delivery is. It must not be handled as a new one: it belongs into a dead-letter
/// queue, where somebody looks at it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EventIdentityError {
    /// It carries no id at all.
    #[error(
        "the message has no identity: neither the CloudEvents attributes id and source nor the broker's own message id; \
         the publisher must set one"
    )]
    Missing,
    /// Of the two attributes that name a CloudEvent, this one is missing.
    #[error("the message is a CloudEvent without {0}; only id and source together name an event")]
    MissingAttribute(&'static str),
    /// An attribute has two values.
    #[error("the message has two values of the CloudEvents attribute {0}")]
    Ambiguous(&'static str),
    /// A part of the identity is not usable.
    #[error("the {part} {why}")]
    Unusable {
        /// Which part.
        part: &'static str,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The content should hold the event's attributes, and cannot be read.
    #[error("the message is a structured CloudEvent, and {0}")]
    Unreadable(&'static str),
}

impl InboxEvent {
    /// An event whose identity is known.
    ///
    /// # Errors
    /// If a part is empty, too long ([`MAX_CONSUMER_BYTES`], [`MAX_IDENTITY_PART_BYTES`]) or has control characters.
    pub fn new(consumer: &str, source: &str, id: &str) -> Result<Self, EventIdentityError> {
        check_part("consumer's name", consumer, MAX_CONSUMER_BYTES)?;
        check_part("source", source, MAX_IDENTITY_PART_BYTES)?;
        check_part("id", id, MAX_IDENTITY_PART_BYTES)?;
        Ok(Self { consumer: consumer.into(), source: source.into(), id: id.into(), time: None })
    }

    /// Which event a delivery is: by its CloudEvents attributes if it has any, else by the broker's own id.
    ///
    /// # Errors
    /// If nobody can say. Never guessed: two events taken for one would lose the second.
    pub fn of(consumer: &str, delivered: &DeliveredMessage<'_>) -> Result<Self, EventIdentityError> {
        let event = match (identity::parse_cloud_event(delivered)?, delivered.broker) {
            (Some(cloud), _) => Self { time: cloud.time, ..Self::new(consumer, &cloud.source, &cloud.id)? },
            (None, Some(broker)) => Self::new(consumer, broker.source, broker.id)?,
            (None, None) => return Err(EventIdentityError::Missing),
        };
        Ok(Self { time: event.time.or(delivered.published_at), ..event })
    }

    /// The same, said to have happened then.
    #[must_use]
    pub fn with_time(self, at: SystemTime) -> Self {
        Self { time: Some(at), ..self }
    }

    /// The same without its time, so that it is not too old: for somebody who sends it again knowing that it was never
    /// handled.
    #[must_use]
    pub fn without_time(self) -> Self {
        Self { time: None, ..self }
    }

    /// Who handles it.
    pub fn consumer(&self) -> &str {
        &self.consumer
    }

    /// Where it comes from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Its id, unique at its source.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// When it happened, if anybody said so.
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
