//! The example as its reader runs it.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use ibid::grpc::UnaryMethods;
use ibid_example_tonic::proto::{CreateRequest, StatsRequest, orders_client::OrdersClient};
use tonic::{
    Code, Request,
    transport::{Channel, Endpoint},
};

const BIN: &str = env!("CARGO_BIN_EXE_ibid-example-tonic");

/// Killed when dropped.
struct TonicServer(Child);

impl Drop for TonicServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn start(args: &[&str]) -> (TonicServer, OrdersClient<Channel>) {
    let mut command = Command::new(BIN);
    let child = command.args(["--listen", "127.0.0.1:0"]).args(args).stdout(Stdio::piped()).spawn().unwrap();
    let mut server = TonicServer(child);
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.trim().strip_prefix("listening on ").expect("it says where").to_owned();
    let channel = Endpoint::new(url).unwrap().timeout(Duration::from_secs(20)).connect().await.unwrap();
    (server, OrdersClient::new(channel))
}

fn create(key: &str) -> Request<CreateRequest> {
    let mut request = Request::new(CreateRequest { item: "tea".into(), amount: 3, script: None });
    if !key.is_empty() {
        request.metadata_mut().insert("idempotency-key", key.parse().unwrap());
    }
    request
}

#[tokio::test]
async fn with_a_store_a_call_runs_once() {
    let (_server, mut shop) = start(&["--ibid", "memory:"]).await;
    let first = shop.create(create("k")).await.unwrap().into_inner();
    let again = shop.create(create("k")).await.unwrap().into_inner();
    assert_eq!(first, again);
    let stats = shop.stats(StatsRequest { key: "k".into() }).await.unwrap().into_inner();
    assert_eq!((stats.begun, stats.finished), (1, 1));
    assert_eq!(shop.create(create("")).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn without_one_it_is_bare() {
    let (_server, mut shop) = start(&[]).await;
    let first = shop.create(create("k")).await.unwrap().into_inner();
    let again = shop.create(create("k")).await.unwrap().into_inner();
    assert_ne!(first.id, again.id);
    shop.create(create("")).await.unwrap();
}

#[test]
fn its_descriptors_tell_which_methods_are_unary() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shop.bin");
    assert!(Command::new(BIN).arg("--write-descriptors").arg(&file).status().unwrap().success());
    let unary = UnaryMethods::from_descriptor_set(&std::fs::read(file).unwrap()).unwrap();
    let paths: Vec<_> = unary.paths().collect();
    // Not Stats, which says that it has no effect.
    assert_eq!(paths, ["/shop.Orders/Create", "/shop.Orders/Open", "/shop.Orders/Pay", "/shop.Orders/Refund"]);
    assert!(unary.is_streaming("/shop.Orders/Watch") && unary.is_streaming("/shop.Orders/Chat"));
}
