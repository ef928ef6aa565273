//! What no route names: under `[policy]`, or counted where a key is sent in vain.

use testbed::{
    client::{get, post, request},
    grpc::{GrpcTestClient, message},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};

use super::Http2Connection;
use crate::support::{TestGateway, assert_ran, assert_replay, start_gateway};

const POLICY_OFF_CONFIG: &str =
    "store.url = \"memory:\"\n[policy]\npreset = \"off\"\n[[route]]\nmatch = \"POST /pay\"\n";

async fn uncovered_metric(gateway: &GatewayProcess) -> String {
    let page = get(gateway.admin_addr(), "/metrics").send().await.text();
    let line = page.lines().find(|line| line.starts_with("idempotency_uncovered_total ")).expect("always there");
    line.rsplit(' ').next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_route_uncovers_nothing_beside_it() {
    let TestGateway { upstream, gateway } = TestGateway::start("[[route]]\nmatch = \"POST /payments/*\"\n").await;
    let paths = ["/payments", "/else", "/@scope%2fname", "/projects/group%2Fproject/issues", "/files/a%5Cb", "/a//b"];
    for (at, path) in paths.into_iter().enumerate() {
        let send = || post(gateway.addr(), path).key(format!("key-{at}")).json("{}");
        let first = send().send().await;
        assert_ran(&first);
        assert_eq!(upstream.last().target, path, "the path goes on as it was sent");
        assert_replay(&send().send().await, &first);
    }
    assert_eq!(upstream.executions(), 6);
}

#[tokio::test]
async fn a_key_that_nothing_covers_is_counted_and_logged_once_per_path() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start(POLICY_OFF_CONFIG).await;
    assert_eq!(uncovered_metric(&gateway).await, "0");
    for path in ["/paid", "/paid", "/paid/1", "/@scope%2fname"] {
        assert_eq!(post(gateway.addr(), path).key("key-1").json("{}").send().await.status, 201, "{path}");
    }
    assert_eq!(request("PATCH", gateway.addr(), "/pay").key("key-1").send().await.status, 201);
    assert_eq!(uncovered_metric(&gateway).await, "5");
    // These are no mistake, or there is no key.
    assert_eq!(get(gateway.addr(), "/paid").key("key-1").send().await.status, 200);
    assert_eq!(post(gateway.addr(), "/paid").json("{}").send().await.status, 201);
    assert_eq!(post(gateway.addr(), "/pay").key("key-1").json("{}").send().await.status, 201);
    assert_eq!(uncovered_metric(&gateway).await, "5");
    gateway.wait_for_log("PATCH /pay: a request carried a key, but no policy covers it").await;
    let told =
        |path: &str| gateway.logs().iter().filter(|line| line.contains(&format!("POST {path}: a request"))).count();
    assert_eq!((told("/paid"), told("/paid/1"), told("/pay")), (1, 1, 0));
}

#[tokio::test]
async fn a_thousand_paths_are_logged_and_no_more() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start(POLICY_OFF_CONFIG).await;
    let http2 = Http2Connection::connect(gateway.addr()).await;
    for at in 0..1005 {
        let answer = http2.send("POST", &format!("/paid/{at}"), &[("idempotency-key", "key-1")], "").await;
        assert_eq!(answer.status, 201, "{:?}", answer.body);
    }
    assert_eq!(uncovered_metric(&gateway).await, "1005");
    gateway.wait_for_log("went to 1000 uncovered paths; no more are logged").await;
    let told = gateway.logs().iter().filter(|line| line.contains("no policy covers it")).count();
    assert_eq!(told, 1000);
}

/// What a call to a method gets about which nothing is known: with a key, and without one.
#[tokio::test]
async fn calls_to_unknown_methods_are_refused_or_pass_as_is_set() {
    let upstream = TestUpstream::start_h2c().await;
    let reply = UpstreamReply::chunks([message("done")]).header("content-type", "application/grpc");
    upstream.reply_by_default(reply.trailer("grpc-status", "0"));
    let platform = "[policy]\npreset = \"platform\"";
    let off = "[policy]\npreset = \"off\"";
    for (config, keyed, keyless) in [
        ("", false, true),
        ("[[route]]\nmatch = \"grpc shop.Orders/Create\"\n", false, true),
        (platform, false, false),
        (off, true, true),
        ("grpc_unknown = \"refuse\"", false, false),
        (&format!("grpc_unknown = \"refuse\"\n{off}"), false, false),
        ("grpc_unknown = \"pass\"", true, true),
        (&format!("grpc_unknown = \"pass\"\n{platform}"), true, true),
    ] {
        let gateway = start_gateway(config, &upstream).await;
        let client = GrpcTestClient::connect(gateway.addr()).await;
        for (headers, passes) in [(&[("x-idempotency-key", "key-1")][..], keyed), (&[], keyless)] {
            let before = upstream.requests();
            let answer = client.call("/shop.Orders/Other", headers, message("x")).await;
            match passes {
                true => assert_eq!(answer.code(), 0, "{config}: {answer:?}"),
                false => {
                    answer.assert_refused(9, "METHOD_UNKNOWN");
                    let told = answer.value("grpc-message").unwrap();
                    for setting in ["grpc package.Service/Method", "descriptors", "reflection", "grpc_unknown"] {
                        assert!(told.contains(setting), "{told}");
                    }
                }
            }
            assert_eq!(upstream.requests() - before, usize::from(passes), "{config}");
            // What servers have about themselves is known everywhere.
            assert_eq!(client.call("/grpc.health.v1.Health/Check", headers, message("")).await.code(), 0);
        }
    }
}
