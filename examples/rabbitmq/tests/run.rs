//! The example on a real RabbitMQ node and a real PostgreSQL, killed at every step.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use ibid_brokers::rabbitmq::declare;
use ibid_stores::postgres::{MigrateAction, migrate};
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties,
    options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable},
};
use testbed::{TestPostgres, TestRabbitmq};
use tokio::time::sleep;

const BIN: &str = env!("CARGO_BIN_EXE_ibid-example-rabbitmq");
const WAIT_TIMEOUT: Duration = Duration::from_secs(180);

/// A consumer process. Killed when dropped, as `kill -9` would.
struct RabbitmqConsumer {
    child: Child,
    lines: tokio::sync::mpsc::UnboundedReceiver<String>,
}

impl Drop for RabbitmqConsumer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl RabbitmqConsumer {
    async fn wait_for_line(&mut self, what: &str) {
        let said = tokio::time::timeout(WAIT_TIMEOUT, async {
            while let Some(line) = self.lines.recv().await {
                if line.starts_with(what) {
                    return true;
                }
            }
            false
        });
        assert_eq!(said.await, Ok(true), "it never said {what:?}");
    }
}

struct RabbitmqFixture {
    rabbitmq: TestRabbitmq,
    postgres: &'static TestPostgres,
    database: String,
}

impl RabbitmqFixture {
    async fn new() -> Self {
        let (rabbitmq, postgres) = (TestRabbitmq::start(), TestPostgres::shared());
        let database = postgres.create_database();
        migrate(&postgres.url("migrator", &database), MigrateAction::Up).await.unwrap();
        Self { rabbitmq, postgres, database }
    }

    fn consumer(&self, args: &[&str]) -> RabbitmqConsumer {
        let mut command = Command::new(BIN);
        command.args(["--rabbitmq", &self.rabbitmq.url()]).args(args);
        command.args(["--postgres", &self.postgres.url("migrator", &self.database)]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = tokio::sync::mpsc::unbounded_channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok()));
        RabbitmqConsumer { child, lines }
    }

    async fn channel(&self) -> (Connection, Channel) {
        let connection = Connection::connect(&self.rabbitmq.url(), ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        (connection, channel)
    }

    /// How many messages a queue has that nobody has been given. Those that a consumer has come back when it is gone.
    async fn ready_messages(&self, queue: &str) -> u32 {
        let (_connection, channel) = self.channel().await;
        let look = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(queue.into(), look, FieldTable::default()).await.unwrap().message_count()
    }

    /// How often each order was shipped.
    fn shipped(&self) -> BTreeMap<String, usize> {
        let rows = self.postgres.sql(&self.database, "SELECT text FROM shipments");
        let mut shipped = BTreeMap::new();
        for order in rows.lines() {
            *shipped.entry(order.to_owned()).or_default() += 1;
        }
        shipped
    }

    async fn wait_until(&self, what: &str, is_so: impl AsyncFn() -> bool) {
        let began = Instant::now();
        while !is_so().await {
            assert!(began.elapsed() < WAIT_TIMEOUT, "waited in vain until {what}; shipped: {:?}", self.shipped());
            sleep(Duration::from_millis(100)).await;
        }
    }
}

async fn publish(channel: &Channel, properties: BasicProperties, order: &str) {
    let properties = properties.with_delivery_mode(2);
    let sent =
        channel.basic_publish("".into(), "orders".into(), BasicPublishOptions::default(), order.as_bytes(), properties);
    assert!(sent.await.unwrap().await.unwrap().is_ack());
}

fn cloud_event(attributes: &[(&str, &str)]) -> BasicProperties {
    let mut headers = FieldTable::default();
    for (name, value) in attributes {
        headers.insert(format!("cloudEvents:{name}").into(), AMQPValue::LongString((*value).into()));
    }
    BasicProperties::default().with_headers(headers)
}

fn once(orders: impl IntoIterator<Item = String>) -> BTreeMap<String, usize> {
    orders.into_iter().map(|order| (order, 1)).collect()
}

/// One test, because a node takes long to start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_every_step_every_order_is_shipped_exactly_once_and_the_rest_are_dead_letters() {
    let world = RabbitmqFixture::new().await;
    let orders = 30;
    let (connection, channel) = world.channel().await;
    declare(&channel, "orders").await.unwrap();
    for nth in 0..orders {
        let (id, order) = (nth.to_string(), format!("order {nth}"));
        let named = || match nth % 3 {
            0 => BasicProperties::default().with_message_id(id.as_str().into()),
            _ => cloud_event(&[("id", &id), ("source", "/shop")]),
        };
        publish(&channel, named(), &order).await;
        // A publisher that had no answer sends again.
        if nth % 3 == 1 {
            publish(&channel, named(), &order).await;
        }
    }
    let steps = ["received", "claimed", "effect", "committed", "acknowledged"];
    for (nth, step) in steps.into_iter().enumerate() {
        let mut consumer = world.consumer(&["--pause-at", step, "--pause-on", &format!("order {}", nth * 4 + 1)]);
        consumer.wait_for_line("paused").await;
        drop(consumer);
    }
    // Then the broker dies under a consumer that lives on.
    let mut consumer = world.consumer(&["--slow", "300"]);
    consumer.wait_for_line("consuming").await;
    world.wait_until("most are shipped", async || world.shipped().len() >= 22).await;
    world.rabbitmq.kill();
    assert!(world.shipped().len() < orders, "in mid-run");
    drop(connection);
    world.rabbitmq.restart();
    consumer.wait_for_line("consuming").await;
    world.wait_until("all are shipped", async || world.shipped().len() == orders).await;

    let (_connection, channel) = world.channel().await;
    publish(&channel, BasicProperties::default().with_message_id("p".into()), "poison").await;
    publish(&channel, BasicProperties::default(), "nobody knows which order this is").await;
    let long_ago = cloud_event(&[("id", "old"), ("source", "/shop"), ("time", "2001-01-01T00:00:00Z")]);
    publish(&channel, long_ago, "old").await;
    world.wait_until("three are dead letters", async || world.ready_messages("orders.dead").await == 3).await;
    assert_eq!(world.shipped(), once((0..orders).map(|nth| format!("order {nth}"))));
    // What was delivered and not acknowledged would be back.
    drop(consumer);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(world.ready_messages("orders").await, 0, "nothing is left unacknowledged");
    let mut dead = Vec::new();
    while let Some(letter) = channel.basic_get("orders.dead".into(), BasicGetOptions { no_ack: true }).await.unwrap() {
        dead.push(String::from_utf8_lossy(&letter.data).into_owned());
    }
    dead.sort();
    assert_eq!(dead, ["nobody knows which order this is", "old", "poison"]);
}
