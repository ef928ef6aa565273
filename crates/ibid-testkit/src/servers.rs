//! Real servers that a test starts privately. They end with the test.

pub mod link;
pub mod nats;
pub mod postgres;
pub mod rabbitmq;
pub mod redis;
