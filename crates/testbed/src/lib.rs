//! What ibid's own tests run with.
//!
//! On the wire: a real [upstream] that counts executions and misbehaves on demand, a [client] that sends exact bytes,
//! another one for [gRPC](grpc), [certificates], the gateway as a [process], and a runner for the commands in the
//! [documentation](docs).
//!
//! Real servers that a test starts privately, and that end with it: [`TestRedis`], [`TestPostgres`],
//! [`TestNats`], [`TestRabbitmq`], [`TestEnvoy`]; and a [`FaultProxy`] to put in front of one.
//!
//! Everything panics with a description if it does not happen, or not in time: within ten seconds on the wire, thirty
//! for the start of a gateway, three minutes for a server. No test is skipped.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]
#![allow(missing_docs, reason = "an unpublished crate: its items are documented where the name does not say enough")]

pub mod certificates;
pub mod chromedriver;
pub mod client;
pub mod docs;
mod envoy;
pub mod fault_proxy;
pub mod grpc;
pub mod http1;
mod loopback;
mod nats;
mod postgres;
pub mod process;
mod rabbitmq;
mod redis;
mod server_process;
pub mod upstream;

pub use self::{
    envoy::{HTTP2_APP, TestEnvoy},
    fault_proxy::{ConnectionTraffic, FaultProxy, ProxyCounts},
    nats::TestNats,
    postgres::{PgBouncer, TestPostgres},
    rabbitmq::TestRabbitmq,
    redis::{RedisCluster, RedisOptions, RedisSentinels, TestRedis},
    server_process::{ServerProcess, free_port},
};
