//! What is not a known unary call passes as it comes: streams, health, reflection.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Response};
use testbed::{
    grpc::{GrpcTestClient, message},
    process::GatewayProcess,
};
use tokio::net::TcpListener;

use super::{KEY, descriptors, start_shop};
use crate::support::{BIN, within};

/// An app that sends every frame back as soon as it comes.
async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let Ok(mut connection) = h2::server::handshake(socket).await else { return };
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    tokio::spawn(async move {
                        let mut body = request.into_body();
                        let head = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
                        let mut send = respond.send_response(head, false).unwrap();
                        while let Some(Ok(data)) = body.data().await {
                            let _ = body.flow_control().release_capacity(data.len());
                            let _ = send.send_data(data, false);
                        }
                        let mut end = HeaderMap::new();
                        end.insert("grpc-status", "0".parse().unwrap());
                        let _ = send.send_trailers(end);
                    });
                }
            });
        }
    });
    addr
}

#[tokio::test]
async fn a_bidirectional_call_with_a_key_is_not_buffered() {
    let app = echo().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shop.bin");
    std::fs::write(&file, descriptors()).unwrap();
    let with_descriptors = format!("descriptors = {file:?}\n[[route]]\nmatch = \"grpc *\"\npreset = \"platform\"");
    for config in ["grpc_unknown = \"pass\"", &with_descriptors] {
        let gateway = GatewayProcess::spawn(BIN, config, &format!("http://{app}")).await;
        let client = GrpcTestClient::connect(gateway.addr()).await;
        let mut call = client.open("/shop.Orders/Chat", &[KEY]).await;
        let mut body = None;
        for turn in 0..5 {
            let said = message(&format!("turn {turn}"));
            call.send.send_data(said.clone(), false).unwrap();
            if body.is_none() {
                body = Some(within("a head", &mut call.answer).await.unwrap().into_body());
            }
            let heard = within("an echo", body.as_mut().unwrap().data()).await.unwrap().unwrap();
            assert_eq!(heard, said);
        }
        call.send.send_data(Bytes::new(), true).unwrap();
        let mut body = body.unwrap();
        assert!(within("an end", body.data()).await.is_none());
        assert_eq!(within("trailers", body.trailers()).await.unwrap().unwrap()["grpc-status"], "0");
    }
}

#[tokio::test]
async fn with_descriptors_every_unary_method_is_covered_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shop.bin");
    std::fs::write(&file, descriptors()).unwrap();
    for route in ["[[route]]\nmatch = \"grpc *\"", "[[route]]\nmatch = \"grpc shop.Orders/*\"", "[policy]"] {
        let (upstream, _gateway, client) =
            start_shop(&format!("descriptors = {file:?}\n{route}\npreset = \"platform\"")).await;
        for method in ["Create", "Cancel"] {
            let path = format!("/shop.Orders/{method}");
            client.call(&path, &[], message("x")).await.assert_refused(3, "KEY_MISSING");
            for _ in 0..2 {
                assert_eq!(client.call(&path, &[("idempotency-key", method)], message("x")).await.code(), 0, "{route}");
            }
            assert_eq!(upstream.executions_at(&path), 1, "{route}");
        }
        for path in ["/shop.Orders/Get", "/grpc.health.v1.Health/Check"] {
            for _ in 0..2 {
                assert_eq!(client.call(path, &[], message("x")).await.code(), 0, "{route}");
            }
            assert_eq!(upstream.executions_at(path), 2, "{route} {path}");
        }
        // Nobody knows what it is: it runs without a key, unless the policy requires one.
        let later = client.call("/shop.Orders/Later", &[], message("x")).await;
        match route {
            "[policy]" => later.assert_refused(9, "METHOD_UNKNOWN"),
            _ => assert_eq!(later.code(), 0),
        }
    }
}
