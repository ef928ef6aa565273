//! Upgraded connections: which there are, what they count as, and when they end.

use std::time::Duration;

use testbed::{
    client::{RawClient, TestResponse, get},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};
use tokio::time::sleep;

use super::ONE_ROUTE;
use crate::support::{TestGateway, assert_refused, caller, pay, until};

async fn start_echo(config: &str) -> (TestUpstream, GatewayProcess) {
    let TestGateway { upstream, gateway } = TestGateway::start(&format!("{config}{ONE_ROUTE}")).await;
    upstream.on("/socket", UpstreamReply::upgrade_echo());
    (upstream, gateway)
}

async fn request_upgrade(client: &mut RawClient, upgrade: &str) -> TestResponse {
    let lines = format!("connection: Upgrade, HTTP2-Settings\r\nupgrade: {upgrade}\r\nhttp2-settings: AAMAAABk\r\n");
    client.send(format!("GET /socket HTTP/1.1\r\nhost: a\r\n{lines}\r\n")).await;
    client.read_response().await
}

async fn open_tunnel(gateway: &GatewayProcess) -> RawClient {
    let mut client = RawClient::connect(gateway.addr()).await;
    assert_eq!(request_upgrade(&mut client, "websocket").await.status, 101);
    client.send("hello;").await;
    assert_eq!(client.read_until(";").await, "hello;");
    client
}

#[tokio::test]
async fn only_upgrades_of_the_setting_are_tunnelled() {
    let (upstream, gateway) = start_echo("").await;
    for (asked, seen) in [("WebSocket", Some("WebSocket")), ("h2c, websocket", Some("websocket"))] {
        let mut client = RawClient::connect(gateway.addr()).await;
        assert_eq!(request_upgrade(&mut client, asked).await.status, 101, "{asked}");
        assert_eq!(upstream.last().header("upgrade"), seen);
        assert!(!upstream.last().headers.contains("http2-settings"), "{:?}", upstream.last());
    }
    // An app that changes the protocol all the same has lost its connection, and no byte gets to it.
    for asked in ["h2c", "echo", "TLS/1.0"] {
        let mut client = RawClient::connect(gateway.addr()).await;
        let answer = request_upgrade(&mut client, asked).await;
        assert_refused(&answer, 502, "upstream-lost");
        for name in ["upgrade", "connection", "http2-settings"] {
            assert!(!upstream.last().headers.contains(name), "{asked}: {:?}", upstream.last());
        }
    }
    // Such a request is an ordinary one, with a key too.
    let upgrading = pay(&gateway, "k-1").header("Connection", "Upgrade, HTTP2-Settings").header("Upgrade", "h2c");
    let first = upgrading.send().await;
    assert_eq!(first.status, 201, "{first:?}");
    crate::support::assert_replay(&upgrading.send().await, &first);
    assert_eq!(upstream.executions_at("/pay"), 1);
}

#[tokio::test]
async fn other_upgrades_can_be_allowed_and_websockets_forbidden() {
    let (_upstream, gateway) = start_echo("upgrades = [\"Echo\"]\n").await;
    assert_eq!(request_upgrade(&mut RawClient::connect(gateway.addr()).await, "echo").await.status, 101);
    assert_refused(
        &request_upgrade(&mut RawClient::connect(gateway.addr()).await, "websocket").await,
        502,
        "upstream-lost",
    );
}

#[tokio::test]
async fn a_tunnel_counts_as_a_connection_until_it_ends() {
    let (upstream, gateway) = start_echo("limits.max_connections = 2\n").await;
    let (first, second) = (open_tunnel(&gateway).await, open_tunnel(&gateway).await);
    let arrived = upstream.requests();
    let next = tokio::spawn({
        let request = get(gateway.addr(), "/list");
        async move { request.send().await }
    });
    sleep(Duration::from_millis(300)).await;
    assert_eq!(upstream.requests(), arrived, "two connections are all there may be");
    drop(first);
    assert_eq!(next.await.expect("an answer").status, 200);
    drop(second);
}

#[tokio::test]
async fn a_tunnel_that_is_silent_is_cut_on_both_sides() {
    let (upstream, gateway) = start_echo("limits.tunnel_timeout = \"400ms\"\nlimits.idle_timeout = \"200ms\"\n").await;
    let mut client = open_tunnel(&gateway).await;
    for n in 0..4 {
        sleep(Duration::from_millis(200)).await;
        client.send(format!("frame {n};")).await;
        assert_eq!(client.read_until(";").await, format!("frame {n};"), "it is in use");
    }
    assert!(client.is_closed_within(Duration::from_secs(5)).await, "a silent tunnel is cut");
    until("the upstream's side to end", || upstream.connections_open() == 0).await;
}

#[tokio::test]
async fn tunnels_leave_connections_to_the_app_for_requests_with_a_key() {
    let (upstream, gateway) = start_echo("max_upstream = 4\nlimits.pool_timeout = \"200ms\"\n").await;
    let tunnels = [open_tunnel(&gateway).await, open_tunnel(&gateway).await, open_tunnel(&gateway).await];
    assert_refused(&caller(get(gateway.addr(), "/list")).send().await, 503, "overloaded");
    assert_eq!(pay(&gateway, "k-1").send().await.status, 201);
    drop(tunnels);
    until("the tunnels to end", || upstream.connections_open() <= 1).await;
    assert_eq!(get(gateway.addr(), "/list").send().await.status, 200);
}
