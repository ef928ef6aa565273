//! Real servers, started privately for a test and gone with it.

pub mod link;
pub mod nats;
pub mod postgres;
pub mod rabbitmq;
pub mod redis;
