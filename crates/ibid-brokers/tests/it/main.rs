//! The adapters on real brokers. That effects happen once is shown by the examples, which are killed at every step.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

mod nats;
mod rabbitmq;
