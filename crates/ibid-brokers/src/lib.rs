//! Deliveries of message brokers for ibid's inbox.
//!
//! A delivery of [NATS JetStream](nats) or [RabbitMQ](rabbitmq) becomes an [`Event`](ibid::inbox::InboxEvent), and a
//! [`Reply`](ibid::inbox::BrokerReply) becomes what the broker understands. In between is an inbox: that of `ibid-postgres-tx`,
//! where the effect and the mark of it commit together, or [`ibid::inbox::Inbox`] over any store.
//!
//! ```text
//! next delivery ─▶ which event? ─▶ inbox: handle, commit ─▶ reply
//!                   │ nobody can say                        │ Acknowledge: handled, now or earlier
//!                   ▼                                       │ Again: it comes again, later
//!               dead letter ◀───────────────────────────────┘ DeadLetter: coming again would not help
//! ```
//!
//! Invariants: nothing is acknowledged before the inbox has said what became of it; a duplicate is acknowledged; a delivery
//! whose event is not known is not handled, and not lost. A delivery that is dropped without a reply comes again.

#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
