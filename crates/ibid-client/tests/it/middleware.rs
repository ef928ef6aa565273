//! The same as a layer of `reqwest-middleware`.

use std::time::Duration;

use ibid_client::{
    ClientKey, IdempotencyMiddleware, KeyGenerator, OperationSpec, ResponseInfo, Schedule, SendError, SendErrorReason,
    SendOptions,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error};
use testbed::{
    FaultProxy,
    upstream::{TestUpstream, UpstreamReply},
};

use crate::common::{KeyFolder, client, gateway, only_key, problem};

fn client_with_middleware(options: SendOptions) -> ClientWithMiddleware {
    ClientBuilder::new(client()).with(IdempotencyMiddleware::new(options)).build()
}

fn send_error(error: &Error) -> &SendError {
    match error {
        Error::Middleware(inside) => inside.downcast_ref().expect("it is ours"),
        Error::Reqwest(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn requests_that_change_something_get_a_key_each_and_others_none() {
    let upstream = TestUpstream::start().await;
    // A name in the options would be every request's.
    let client = client_with_middleware(SendOptions::in_memory().operation("all"));
    for method in [http::Method::POST, http::Method::PUT, http::Method::PATCH, http::Method::DELETE] {
        client.request(method, upstream.url()).send().await.unwrap();
    }
    let keys: std::collections::HashSet<_> = upstream.log().iter().map(|seen| seen.key().map(str::to_owned)).collect();
    assert!(keys.len() == 4 && !keys.contains(&None), "{keys:?}");
    let answer = client.get(upstream.url()).send().await.unwrap();
    assert!(upstream.last().key().is_none() && answer.extensions().get::<ResponseInfo>().is_none());
}

#[tokio::test]
async fn a_named_operation_survives_the_network_and_the_client() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway("", &upstream).await;
    let link = FaultProxy::to(gateway.addr());
    let keys = KeyFolder::new();
    let pay = |client: ClientWithMiddleware| {
        let request = client.post(format!("http://{}/pay", link.addr())).body("amount=1");
        request.with_extension(OperationSpec::named("order-17")).send()
    };
    link.break_answers(1);
    let error = pay(client_with_middleware(keys.options().schedule(Schedule::once()))).await.unwrap_err();
    assert!(matches!(send_error(&error).reason, SendErrorReason::Network), "{error}");
    let answer = pay(client_with_middleware(keys.options())).await.unwrap();
    let told = answer.extensions().get::<ResponseInfo>().unwrap();
    assert_eq!((told.replayed, told.attempts, told.key.as_str()), (true, 1, only_key(&upstream).as_str()));
    assert_eq!((upstream.executions(), keys.files()), (1, 0));
}

#[tokio::test]
async fn the_key_is_made_as_the_request_asks() {
    let upstream = TestUpstream::start().await;
    let client = client_with_middleware(SendOptions::in_memory().key_generator(KeyGenerator::derived(["all"])));
    let mint = KeyGenerator::Fixed(ClientKey::new("mine").unwrap());
    client.post(upstream.url()).with_extension(OperationSpec::with_key_generator(mint)).send().await.unwrap();
    assert_eq!(upstream.last().key(), Some("mine"));
    client.post(upstream.url()).send().await.unwrap();
    assert_eq!(upstream.last().key(), Some(ibid::derive_key(&["all"]).as_str()));
}

#[tokio::test]
async fn what_stops_it_can_be_looked_into() {
    let upstream = TestUpstream::start().await;
    upstream.on_each("/pay", [UpstreamReply::status(409), problem("outcome-unknown", 409)]);
    let quick = Schedule::exponential().first(Duration::from_millis(2));
    let client = client_with_middleware(SendOptions::in_memory().schedule(quick));
    let error = client.post(format!("{}/pay", upstream.url())).body("b").send().await.unwrap_err();
    let stopped = send_error(&error);
    assert!(matches!(stopped.reason, SendErrorReason::OutcomeUnknown), "{stopped}");
    assert_eq!((stopped.attempts, stopped.status().map(|status| status.as_u16())), (2, Some(409)));
}
