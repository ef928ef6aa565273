//! Upstreams that say themselves which methods are unary.

use std::time::Duration;

use ibid_example_tonic::{Shop, proto::CreateRequest, serve};
use prost::Message as _;
use testbed::{
    grpc::{GrpcTestClient, frame_message},
    process::GatewayProcess,
    upstream::TestUpstream,
};
use tokio::net::TcpListener;

use super::{CREATE, KEY};
use crate::support::{BIN, run_ibid, within};

const ALL: &str = "descriptors = \"reflection\"\n[[route]]\nmatch = \"grpc *\"\npreset = \"platform\"\n";

#[tokio::test]
async fn what_an_app_says_of_itself_is_protected_also_if_it_comes_late() {
    let place = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = place.local_addr().unwrap();
    drop(place);
    let starting = tokio::spawn(async move { GatewayProcess::spawn(BIN, ALL, &format!("http://{addr}")).await });
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(!starting.is_finished(), "it must not listen before it knows what to protect");
    let listener = TcpListener::bind(addr).await.unwrap();
    tokio::spawn(serve(listener, Shop::default(), None, std::future::pending()));
    let gateway = within("a gateway that listens", starting).await.unwrap();
    gateway.wait_for_log("waiting for the upstream to say which gRPC methods it has").await;

    let client = GrpcTestClient::connect(gateway.addr()).await;
    let order =
        frame_message(0, &CreateRequest { item: "tea".into(), amount: 1, ..CreateRequest::default() }.encode_to_vec());
    let first = client.call(CREATE, &[KEY], order.clone()).await;
    assert_eq!(first.code(), 0, "{first:?}");
    let again = client.call(CREATE, &[KEY], order).await;
    assert_eq!(again.text(), first.text(), "a second run would have another id");
    let missing = client.call("/shop.Orders/Pay", &[], frame_message(0, b"")).await;
    missing.assert_refused(3, "key-missing");
    // A stream passes, with a key and without.
    let mut chat = client.open("/shop.Orders/Chat", &[KEY]).await;
    chat.send.send_data(frame_message(0, b""), true).unwrap();
    let ended = within("the end of a chat", chat.end()).await;
    assert_eq!(ended.code(), 0, "{ended:?}");
}

#[tokio::test]
async fn an_app_that_says_nothing_is_not_started_for() {
    let app = TestUpstream::start_h2c().await;
    app.reply_by_default(super::error_reply(12));
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ibid.toml");
    let text = format!(
        "listen = \"127.0.0.1:0\"\nupstream = {:?}\nadmin.listen = \"off\"\nstore.url = \"memory:\"\n{ALL}",
        app.url()
    );
    std::fs::write(&config, text).unwrap();
    let ended =
        within("a gateway that does not start", run_ibid(&["serve", "--config", config.to_str().unwrap()], &[])).await;
    let told = ended.stderr;
    assert!(ended.code != Some(0), "{told}");
    assert!(
        told.contains("it has no reflection service (grpc.reflection.v1); add one, or name a file of descriptors"),
        "{told}"
    );
}

#[tokio::test]
async fn methods_that_the_app_does_not_have_are_told() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, Shop::default(), None, std::future::pending()));
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ibid.toml");
    let text = format!(
        "descriptors = \"reflection\"\nlisten = \"127.0.0.1:0\"\nupstream = \"http://{addr}\"\nadmin.listen = \"off\"\n\
         store.url = \"memory:\"\n[[route]]\nmatch = \"grpc shop.Orders/Craete\"\npreset = \"platform\"\n"
    );
    std::fs::write(&config, text).unwrap();
    let config = config.to_str().unwrap();
    let ended = within("a gateway that does not start", run_ibid(&["serve", "--config", config], &[])).await;
    let told = ended.stderr;
    assert_eq!(ended.code, Some(64), "{told}");
    assert!(told.contains("is not in the descriptors; shop.Orders has"), "{told}");
    // Without the app, nothing can be said against it.
    let checked = run_ibid(&["check", config], &[]).await;
    let told = checked.text();
    assert!(
        checked.code == Some(0) && told.contains("reflection: upstreams are asked when the gateway starts"),
        "{told}"
    );
}
