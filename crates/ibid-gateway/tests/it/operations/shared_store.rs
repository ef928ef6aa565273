//! A store on another machine that is not there when the gateway starts.

use testbed::{
    client::{get, post},
    process::GatewayProcess,
    upstream::TestUpstream,
};

use crate::support::{TestGateway, anonymous_pay, folder_with, refusal_name, run_ibid, start_gateway, until};

/// Nobody listens on these ports.
const STORES: [&str; 4] = [
    "url = \"redis://:s3cret@127.0.0.1:1/0\"",
    "url = \"postgres://ibid:s3cret@127.0.0.1:1/ibid\"",
    "url = \"redis://:s3cret@127.0.0.1:1/0\"\nfallback = \"postgres://ibid:s3cret@127.0.0.1:2/ibid\"",
    "url = \"postgres://ibid:s3cret@127.0.0.1:2/ibid\"\ncache = \"redis://:s3cret@127.0.0.1:1/0\"",
];

#[tokio::test]
async fn a_store_that_is_not_there_does_not_stop_the_start() {
    for store in STORES {
        let TestGateway { upstream, gateway } = TestGateway::start(&format!("[store]\n{store}\n")).await;
        gateway.wait_for_log("the store cannot be used yet: ").await;

        let ready = get(gateway.admin_addr(), "/readyz").send().await;
        let json = ready.json();
        assert_eq!((ready.status, &json["ready"]), (503, &false.into()), "{store}: {ready:?}");
        assert!(json["store"]["error"].as_str().is_some_and(|trouble| !trouble.is_empty()), "{store}: {ready:?}");
        assert_eq!(json["store"]["shared"], true, "{store}: {ready:?}");
        assert_eq!(get(gateway.admin_addr(), "/healthz").send().await.status, 200, "{store}");

        let answer = anonymous_pay(gateway.addr(), "k-1").send().await;
        assert_eq!((answer.status, refusal_name(&answer).as_str()), (503, "store-unavailable"), "{store}: {answer:?}");
        assert_eq!(upstream.executions(), 0, "{store}");
        assert_eq!(post(gateway.addr(), "/pay").send().await.status, 201, "{store}: without a key it passes");
        until("the failure is logged", || gateway.logs().iter().any(|line| line.contains("ERROR"))).await;
        assert!(!gateway.logs().iter().any(|line| line.contains("s3cret")), "{store}: {:#?}", gateway.logs());
    }
}

#[tokio::test]
async fn answers_that_are_kept_near_any_store_are_the_same_answers() {
    let upstream = TestUpstream::start().await;
    let config = "[store]\nurl = \"embedded:data\"\nlocal_cache = \"1MiB\"\n";
    let mut gateway = start_gateway(config, &upstream).await;
    let request = |gateway: &GatewayProcess| anonymous_pay(gateway.addr(), "k-1").header("Host", "shop.example");
    let first = request(&gateway).send().await;
    assert_eq!(first.status, 201, "{first:?}");
    for restarted in [false, true] {
        for _ in 0..3 {
            let again = request(&gateway).send().await;
            assert_eq!((again.header("idempotent-replayed"), &again.body), (Some("true"), &first.body), "{restarted}");
        }
        gateway.restart().await;
    }
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn under_strict_it_does() {
    for store in STORES {
        let settings = "upstream = \"http://127.0.0.1:9\"\nlisten = \"127.0.0.1:0\"\nadmin.listen = \"127.0.0.1:0\"";
        let (_dir, path) = folder_with("mine.toml", &format!("{settings}\n[store]\nstrict = true\n{store}\n"));
        let output = run_ibid(&["serve", "--config", path.to_str().unwrap(), "--log-level", "error"], &[]).await;
        let said = output.stderr;
        assert_eq!((output.code, said.lines().count()), (Some(1), 1), "{store}: {said}");
        assert!(said.starts_with("ibid: store.strict is set, and the "), "{store}: {said}");
        let why = [" store has weaknesses: ", " store cannot be used: "].iter().any(|why| said.contains(why));
        assert!(why && !said.contains("s3cret"), "{store}: {said}");
        assert!(output.stdout.is_empty(), "{store}");
    }
}
