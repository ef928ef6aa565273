use std::time::Duration;

use async_nats::{
    HeaderMap,
    jetstream::{
        self, Context,
        consumer::{PullConsumer, pull},
        stream,
    },
};
use ibid::inbox::BrokerReply;
use ibid_brokers::nats::NatsDeliveries;
use testbed::TestNats;
use tokio::time::{sleep, timeout};

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

async fn create_stream(jetstream: &Context, name: &str, subject: &str) {
    let subjects = vec![subject.to_owned()];
    jetstream.create_stream(stream::Config { name: name.into(), subjects, ..Default::default() }).await.unwrap();
}

async fn create_consumer(jetstream: &Context, ack_wait: Duration) -> PullConsumer {
    let config = pull::Config { durable_name: Some("c".into()), ack_wait, ..Default::default() };
    jetstream.get_stream("ORDERS").await.unwrap().create_consumer(config).await.unwrap()
}

async fn start_jetstream() -> (TestNats, Context) {
    let server = TestNats::start();
    let jetstream = jetstream::new(async_nats::connect(server.url()).await.unwrap());
    create_stream(&jetstream, "ORDERS", "orders").await;
    (server, jetstream)
}

async fn publish(jetstream: &Context, headers: &[(&str, &str)], body: &str) {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.insert(*name, *value);
    }
    jetstream.publish_with_headers("orders", map, body.to_owned().into()).await.unwrap().await.unwrap();
}

async fn unacknowledged(jetstream: &Context) -> (usize, u64) {
    let stream = jetstream.get_stream("ORDERS").await.unwrap();
    let mut consumer: PullConsumer = stream.get_consumer("c").await.unwrap();
    let info = consumer.info().await.unwrap();
    (info.num_ack_pending, info.num_pending)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_stream_for_dead_letters_nothing_is_consumed() {
    let (_server, jetstream) = start_jetstream().await;
    let consumer = create_consumer(&jetstream, Duration::from_secs(30)).await;
    let refused = NatsDeliveries::open(&jetstream, consumer, "mailer", "dead.orders").await.unwrap_err();
    assert!(refused.to_string().contains("no stream keeps"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_known_by_what_their_publishers_say() {
    let (_server, jetstream) = start_jetstream().await;
    create_stream(&jetstream, "DEAD", "dead.>").await;
    publish(&jetstream, &[("Nats-Msg-Id", "m1")], "").await;
    publish(&jetstream, &[("Nats-Msg-Id", "m2"), ("ce-id", "c1"), ("ce-source", "/a%20b")], "").await;
    let structured = r#"{"specversion":"1.0","id":"s1","source":"/s"}"#;
    publish(&jetstream, &[("Content-Type", "application/cloudevents+json")], structured).await;
    publish(&jetstream, &[("x", "y")], "unknown").await;
    publish(&jetstream, &[("ce-id", "c2"), ("ce-source", "/last")], "").await;
    let consumer = create_consumer(&jetstream, Duration::from_secs(30)).await;
    let mut deliveries = NatsDeliveries::open(&jetstream, consumer, "mailer", "dead.orders").await.unwrap();
    for (source, id) in [("nats:ORDERS", "m1"), ("/a b", "c1"), ("/s", "s1"), ("/last", "c2")] {
        let delivery = timeout(WAIT_TIMEOUT, deliveries.next()).await.unwrap().unwrap().unwrap();
        let event = delivery.event();
        assert_eq!((event.consumer(), event.source(), event.id()), ("mailer", source, id));
        assert!(event.at().is_some_and(|at| at.elapsed().unwrap_or_default() < WAIT_TIMEOUT), "when it was published");
        assert_eq!(delivery.delivery_count(), 1);
        delivery.reply(BrokerReply::Acknowledge).await.unwrap();
    }
    assert_eq!(unacknowledged(&jetstream).await, (0, 0));
    let dead = jetstream.get_stream("DEAD").await.unwrap().get_raw_message(1).await.unwrap();
    assert_eq!((&dead.subject[..], &dead.payload[..]), ("dead.orders", &b"unknown"[..]));
    assert_eq!(dead.headers.get("x").map(|value| value.as_str()), Some("y"), "as it came");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_being_handled_is_not_delivered_again_and_what_is_dropped_is() {
    let (_server, jetstream) = start_jetstream().await;
    create_stream(&jetstream, "DEAD", "dead.>").await;
    publish(&jetstream, &[("Nats-Msg-Id", "1")], "").await;
    let consumer = create_consumer(&jetstream, Duration::from_secs(2)).await;
    let mut deliveries = NatsDeliveries::open(&jetstream, consumer, "mailer", "dead.orders").await.unwrap();
    let slow = timeout(WAIT_TIMEOUT, deliveries.next()).await.unwrap().unwrap().unwrap();
    // Three times as long as the server waits for a sign of life.
    let early = timeout(Duration::from_secs(6), deliveries.next()).await;
    assert!(early.is_err(), "{early:?}");
    drop(slow);
    let again = timeout(WAIT_TIMEOUT, deliveries.next()).await.unwrap().unwrap().unwrap();
    assert_eq!((again.event().id(), again.delivery_count()), ("1", 2));
    again.reply(BrokerReply::Redeliver { after: Duration::from_millis(200) }).await.unwrap();
    let third = timeout(WAIT_TIMEOUT, deliveries.next()).await.unwrap().unwrap().unwrap();
    assert_eq!((third.event().id(), third.delivery_count()), ("1", 3));
    third.reply(BrokerReply::DeadLetter { why: "two\nlines".into() }).await.unwrap();
    // Longer than the server waits: it does not come again.
    sleep(Duration::from_secs(3)).await;
    assert_eq!(unacknowledged(&jetstream).await, (0, 0));
    let dead = jetstream.get_stream("DEAD").await.unwrap().get_raw_message(1).await.unwrap();
    assert_eq!(
        dead.headers.get(ibid_brokers::nats::DEAD_LETTER_REASON_HEADER).map(|value| value.as_str()),
        Some("two lines")
    );
}
