//! Connects message brokers to ibid's inbox.
//!
//! A delivery of [NATS JetStream](nats) or [RabbitMQ](rabbitmq) becomes an [`InboxEvent`](ibid::inbox::InboxEvent), and
//! a [`BrokerReply`](ibid::inbox::BrokerReply) becomes the broker's own acknowledgement. In between is an inbox: that
//! of `ibid-postgres-tx`, where the effect and its mark commit together, or [`ibid::inbox::Inbox`] over any store.
//!
//! ```text
//! next delivery ─▶ which event? ─▶ inbox: handle, commit ─▶ reply
//!                   │ no identity                           │ Acknowledge: handled, now or earlier
//!                   ▼                                       │ Redeliver: delivered again, later
//!               dead letter ◀───────────────────────────────┘ DeadLetter: redelivery would not help
//! ```
//!
//! Invariants: nothing is acknowledged before the inbox returns an outcome; a duplicate is acknowledged; a delivery
//! without an event identity is dead-lettered, neither handled nor lost. A delivery dropped without a reply is
//! delivered again.

#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
