//! The protobuf messages of error details (`google.rpc`) and of server reflection (`grpc.reflection`).

use std::collections::BTreeMap;

use bytes::Bytes;
use prost_types::{Any, Duration};

/// `google.rpc.Status`.
#[derive(prost::Message)]
pub(super) struct RpcStatus {
    #[prost(int32, tag = "1")]
    pub(super) code: i32,
    #[prost(string, tag = "2")]
    pub(super) message: String,
    #[prost(message, repeated, tag = "3")]
    pub(super) details: Vec<Any>,
}

#[derive(prost::Message)]
pub(super) struct ErrorInfo {
    #[prost(string, tag = "1")]
    pub(super) reason: String,
    #[prost(string, tag = "2")]
    pub(super) domain: String,
    #[prost(btree_map = "string, string", tag = "3")]
    pub(super) metadata: BTreeMap<String, String>,
}

#[derive(prost::Message)]
pub(super) struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    pub(super) retry_delay: Option<Duration>,
}

#[derive(prost::Message)]
pub(super) struct BadRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) field_violations: Vec<FieldViolation>,
}

#[derive(prost::Message)]
pub(super) struct FieldViolation {
    #[prost(string, tag = "1")]
    pub(super) field: String,
    #[prost(string, tag = "2")]
    pub(super) description: String,
}

/// `ServerReflectionRequest`. Exactly one field is set.
#[derive(prost::Message)]
pub(super) struct ReflectionRequest {
    #[prost(string, optional, tag = "4")]
    pub(super) file_containing_symbol: Option<String>,
    #[prost(string, optional, tag = "7")]
    pub(super) list_services: Option<String>,
}

/// `ServerReflectionResponse`. Exactly one field is set.
#[derive(prost::Message)]
pub(super) struct ReflectionResponse {
    #[prost(message, optional, tag = "4")]
    pub(super) files: Option<RawFileDescriptors>,
    #[prost(message, optional, tag = "6")]
    pub(super) services: Option<ServiceList>,
    #[prost(message, optional, tag = "7")]
    pub(super) error: Option<ReflectionErrorDetail>,
}

/// `FileDescriptorResponse`. A `FileDescriptorSet` has the same encoding.
#[derive(prost::Message)]
pub(super) struct RawFileDescriptors {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub(super) files: Vec<Bytes>,
}

#[derive(prost::Message)]
pub(super) struct ServiceList {
    #[prost(message, repeated, tag = "1")]
    pub(super) services: Vec<ServiceName>,
}

#[derive(prost::Message)]
pub(super) struct ServiceName {
    #[prost(string, tag = "1")]
    pub(super) name: String,
}

#[derive(prost::Message)]
pub(super) struct ReflectionErrorDetail {
    #[prost(string, tag = "2")]
    pub(super) message: String,
}
