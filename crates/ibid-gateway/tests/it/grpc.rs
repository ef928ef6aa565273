//! gRPC through the gateway, to an app that speaks HTTP/2 without TLS.

mod calls;
mod config;
mod reflection;
mod streams;

use prost::Message as _;
use testbed::{
    grpc::{GrpcTestClient, message},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};

use crate::support::start_gateway;

const CREATE: &str = "/shop.Orders/Create";
const KEY: (&str, &str) = ("idempotency-key", "key-1");

const SHOP: &str = r#"
    syntax = "proto3";
    package shop;
    message Order { string id = 1; }
    service Orders {
        rpc Create(Order) returns (Order);
        rpc Cancel(Order) returns (Order);
        rpc Get(Order) returns (Order) { option idempotency_level = NO_SIDE_EFFECTS; }
        rpc Chat(stream Order) returns (stream Order);
    }
"#;

/// The descriptors of the shop, as protoc writes them.
pub(crate) fn descriptors() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("shop.proto"), SHOP).unwrap();
    protox::compile(["shop.proto"], [folder.path()]).unwrap().encode_to_vec()
}

/// One route for `Create` under `platform`, with these dials on top.
fn create_route_config(dials: &str) -> String {
    format!("[[route]]\nmatch = \"grpc shop.Orders/Create\"\npreset = \"platform\"\n{dials}\n")
}

/// An app that answers every call with a message and status OK, behind a gateway that knows it as `http://`.
async fn start_shop(config: &str) -> (TestUpstream, GatewayProcess, GrpcTestClient) {
    let upstream = TestUpstream::start_h2c().await;
    upstream.reply_by_default(ok_reply("done"));
    let gateway = start_gateway(config, &upstream).await;
    let client = GrpcTestClient::connect(gateway.addr()).await;
    (upstream, gateway, client)
}

fn ok_reply(text: &str) -> UpstreamReply {
    UpstreamReply::chunks([message(text)])
        .header("content-type", "application/grpc")
        .header("x-before", "b")
        .header("trace-bin", "AAEC")
        .header("trace-bin", "AwQF")
        .trailer("grpc-status", "0")
        .trailer("x-after", "a")
}

fn error_reply(code: u32) -> UpstreamReply {
    UpstreamReply::status(200)
        .header("content-type", "application/grpc")
        .header("grpc-status", code.to_string())
        .header("grpc-message", "no")
}
