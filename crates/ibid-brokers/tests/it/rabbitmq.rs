use std::time::{Duration, SystemTime};

use ibid::inbox::{BrokerReply, EventIdentityError};
use ibid_brokers::rabbitmq::{RabbitmqDeliveries, RabbitmqDelivery, declare, identify};
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties,
    message::Delivery as Message,
    options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions},
    types::{AMQPValue, FieldTable},
};
use testbed::TestRabbitmq;
use tokio::time::timeout;

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

fn message(headers: &[(&str, &str)], properties: BasicProperties, body: &str) -> Message {
    let mut table = FieldTable::default();
    for (name, value) in headers {
        table.insert((*name).into(), AMQPValue::LongString((*value).into()));
    }
    let mut message = Message::mock(1, "".into(), "orders".into(), false, body.into());
    message.properties = properties.with_headers(table);
    message
}

#[test]
fn messages_are_known_by_what_their_publishers_say() {
    let properties = BasicProperties::default;
    let known = |message: &Message| {
        let event = identify("mailer", "orders", message)?;
        Ok::<_, EventIdentityError>((event.source().to_owned(), event.id().to_owned()))
    };
    let found = |source: &str, id: &str| Ok((source.to_owned(), id.to_owned()));
    let by_id = message(&[], properties().with_message_id("m1".into()).with_timestamp(7), "");
    assert_eq!(known(&by_id), found("rabbitmq:orders", "m1"));
    let at = identify("mailer", "orders", &by_id).unwrap().at();
    assert_eq!(at, Some(SystemTime::UNIX_EPOCH + Duration::from_secs(7)));
    let attributes = [("cloudEvents:id", "c1"), ("cloudEvents:source", "/a%20b")];
    let cloud = message(&attributes, properties().with_message_id("m1".into()), "");
    assert_eq!(known(&cloud), found("/a%20b", "c1"), "nothing is escaped in AMQP");
    let kind = properties().with_content_type("application/cloudevents+json; charset=utf-8".into());
    assert_eq!(known(&message(&[], kind, r#"{"id":"s1","source":"/s"}"#)), found("/s", "s1"));
    assert_eq!(known(&message(&[("x", "y")], properties(), "")), Err(EventIdentityError::Missing));
    assert_eq!(
        known(&message(&attributes[..1], properties(), "")),
        Err(EventIdentityError::MissingAttribute("source"))
    );
}

async fn open_channel(server: &TestRabbitmq) -> (Connection, Channel) {
    let connection = Connection::connect(&server.url(), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    (connection, channel)
}

async fn next_delivery(deliveries: &mut RabbitmqDeliveries) -> RabbitmqDelivery {
    timeout(WAIT_TIMEOUT, deliveries.next()).await.unwrap().unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_are_what_they_say() {
    let server = TestRabbitmq::start();
    let (_connection, publisher) = open_channel(&server).await;
    declare(&publisher, "orders").await.unwrap();
    declare(&publisher, "orders").await.expect("a second time nothing changes");
    for id in ["1", "2"] {
        let properties = BasicProperties::default().with_message_id(id.into());
        let sent =
            publisher.basic_publish("".into(), "orders".into(), BasicPublishOptions::default(), b"x", properties);
        assert!(sent.await.unwrap().await.unwrap().is_ack());
    }
    let (connection, consumer) = open_channel(&server).await;
    let mut deliveries = RabbitmqDeliveries::open(&consumer, "orders", "mailer", 1).await.unwrap();
    let first = next_delivery(&mut deliveries).await;
    assert_eq!((first.event().id(), first.delivery_count()), ("1", Some(1)));
    first.reply(BrokerReply::Redeliver { after: Duration::from_millis(300) }).await.unwrap();
    // At most one is unanswered: what is held back holds the next one back too, and comes again before or after it.
    let mut again = next_delivery(&mut deliveries).await;
    if again.event().id() == "2" {
        again.reply(BrokerReply::Acknowledge).await.unwrap();
        again = next_delivery(&mut deliveries).await;
    }
    assert_eq!((again.event().id(), again.delivery_count()), ("1", Some(2)), "and the queue counts");
    // Its channel goes, and it comes again.
    connection.close(200, "bye".into()).await.unwrap();
    let gone = again.reply(BrokerReply::Acknowledge).await.unwrap_err();
    assert!(gone.to_string().contains("not acknowledged"), "{gone}");
    let (_connection, consumer) = open_channel(&server).await;
    let mut deliveries = RabbitmqDeliveries::open(&consumer, "orders", "mailer", 8).await.unwrap();
    let mut dead = 0;
    while dead == 0 {
        let delivery = next_delivery(&mut deliveries).await;
        let reply = if delivery.event().id() == "1" {
            dead += 1;
            assert_eq!(delivery.delivery_count(), Some(3));
            BrokerReply::DeadLetter { why: "no".into() }
        } else {
            BrokerReply::Acknowledge
        };
        delivery.reply(reply).await.unwrap();
    }
    let letter = timeout(WAIT_TIMEOUT, async {
        loop {
            let got = publisher.basic_get("orders.dead".into(), BasicGetOptions { no_ack: true }).await.unwrap();
            if let Some(letter) = got {
                return letter;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    assert_eq!(letter.await.unwrap().properties.message_id().as_ref().map(|id| id.as_str()), Some("1"));
}
