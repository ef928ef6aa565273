//! The example on a real NATS server and a real PostgreSQL, killed at every step.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use async_nats::{
    HeaderMap,
    jetstream::{self, Context, consumer::PullConsumer, stream},
};
use ibid_brokers::nats::{
    DEAD_LETTER_MESSAGE_ID_HEADER, DEAD_LETTER_REASON_HEADER, DEAD_LETTER_SUBJECT_HEADER, redrive,
};
use ibid_stores::postgres::{MigrateAction, migrate};
use testbed::{TestNats, TestPostgres};
use tokio::time::sleep;

const BIN: &str = env!("CARGO_BIN_EXE_ibid-example-nats");
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// A consumer process. Killed when dropped, as `kill -9` would.
struct NatsConsumer {
    child: Child,
    lines: tokio::sync::mpsc::UnboundedReceiver<String>,
}

impl Drop for NatsConsumer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl NatsConsumer {
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

struct NatsFixture {
    nats: TestNats,
    postgres: &'static TestPostgres,
    database: String,
    jetstream: Context,
}

impl NatsFixture {
    async fn new() -> Self {
        let (nats, postgres) = (TestNats::start(), TestPostgres::shared());
        let database = postgres.create_database();
        migrate(&postgres.url("migrator", &database), MigrateAction::Up).await.unwrap();
        let jetstream = jetstream::new(async_nats::connect(nats.url()).await.unwrap());
        for (name, subject) in [("ORDERS", "orders.>"), ("DEAD", "dead.>")] {
            let duplicate_window = Duration::from_millis(100);
            let subjects = vec![subject.to_owned()];
            let config = stream::Config { name: name.into(), subjects, duplicate_window, ..stream::Config::default() };
            jetstream.create_stream(config).await.unwrap();
        }
        Self { nats, postgres, database, jetstream }
    }

    fn consumer(&self, args: &[&str]) -> NatsConsumer {
        let mut command = Command::new(BIN);
        command.args(["--nats", &self.nats.url(), "--ack-wait", "1000"]).args(args);
        command.args(["--postgres", &self.postgres.url("migrator", &self.database)]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = tokio::sync::mpsc::unbounded_channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok()));
        NatsConsumer { child, lines }
    }

    async fn publish(&self, headers: &[(&str, &str)], order: &str) {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, *value);
        }
        let sent = self.jetstream.publish_with_headers("orders.new", map, order.to_owned().into()).await;
        sent.unwrap().await.unwrap();
    }

    /// How many messages the consumer has not acknowledged, and how many it has not got yet.
    async fn unacknowledged(&self) -> Option<(usize, u64)> {
        let stream = self.jetstream.get_stream("ORDERS").await.ok()?;
        let mut consumer: PullConsumer = stream.get_consumer("shipping").await.ok()?;
        let info = consumer.info().await.ok()?;
        Some((info.num_ack_pending, info.num_pending))
    }

    async fn wait_settled(&self) {
        let began = Instant::now();
        while self.unacknowledged().await != Some((0, 0)) {
            assert!(began.elapsed() < WAIT_TIMEOUT, "{:?} are left", self.unacknowledged().await);
            sleep(Duration::from_millis(100)).await;
        }
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

    async fn dead_letters(&self) -> u64 {
        self.jetstream.get_stream("DEAD").await.unwrap().info().await.unwrap().state.messages
    }
}

fn once(orders: impl IntoIterator<Item = String>) -> BTreeMap<String, usize> {
    orders.into_iter().map(|order| (order, 1)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_every_step_every_order_is_shipped_exactly_once() {
    let world = NatsFixture::new().await;
    let orders = 30;
    for nth in 0..orders {
        let (id, order) = (nth.to_string(), format!("order {nth}"));
        match nth % 3 {
            0 => world.publish(&[("Nats-Msg-Id", &id)], &order).await,
            _ => world.publish(&[("ce-id", &id), ("ce-source", "/shop")], &order).await,
        }
        // A publisher that had no answer sends again.
        if nth % 3 == 1 {
            world.publish(&[("ce-id", &id), ("ce-source", "/shop")], &order).await;
        }
    }
    let steps = ["received", "claimed", "effect", "committed", "acknowledged"];
    for (nth, step) in steps.into_iter().enumerate() {
        let mut consumer = world.consumer(&["--pause-at", step, "--pause-on", &format!("order {}", nth * 4 + 1)]);
        consumer.wait_for_line("paused").await;
        drop(consumer);
    }
    // Then the broker dies under a consumer that lives on.
    let consumer = world.consumer(&["--slow", "300"]);
    let began = Instant::now();
    while world.shipped().len() < 22 {
        assert!(began.elapsed() < WAIT_TIMEOUT, "{:?}", world.shipped());
        sleep(Duration::from_millis(20)).await;
    }
    world.nats.kill();
    assert!(world.shipped().len() < orders, "in mid-run");
    world.nats.restart();
    world.wait_settled().await;
    assert_eq!(world.shipped(), once((0..orders).map(|nth| format!("order {nth}"))));
    assert_eq!(world.dead_letters().await, 0);
    drop(consumer);
    assert_eq!(world.unacknowledged().await, Some((0, 0)), "nothing is left unacknowledged");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_handled_is_a_dead_letter_and_can_be_sent_again() {
    let world = NatsFixture::new().await;
    world.publish(&[("Nats-Msg-Id", "p")], "poison").await;
    world.publish(&[], "nobody knows which order this is").await;
    world.publish(&[("ce-id", "half")], "half an identity").await;
    let long_ago = [("ce-id", "old"), ("ce-source", "/shop"), ("ce-time", "2001-01-01T00:00:00Z")];
    world.publish(&long_ago, "old").await;
    world.publish(&[("Nats-Msg-Id", "1")], "order 1").await;
    let mut consumer = world.consumer(&[]);
    consumer.wait_for_line("consuming").await;
    let began = Instant::now();
    while world.dead_letters().await < 4 {
        assert!(began.elapsed() < WAIT_TIMEOUT, "{} dead letters", world.dead_letters().await);
        sleep(Duration::from_millis(100)).await;
    }
    world.wait_settled().await;
    assert_eq!(world.shipped(), once(["order 1".to_owned()]));
    let dead = world.jetstream.get_stream("DEAD").await.unwrap();
    let mut letters = BTreeMap::new();
    for sequence in 1..=4 {
        let letter = dead.get_raw_message(sequence).await.unwrap();
        letters.insert(String::from_utf8_lossy(&letter.payload).into_owned(), letter);
    }
    let header = |order: &str, name: &str| letters[order].headers.get(name).map(ToString::to_string);
    assert!(
        header("poison", DEAD_LETTER_REASON_HEADER).unwrap().contains("5 times"),
        "{:?}",
        header("poison", DEAD_LETTER_REASON_HEADER)
    );
    assert_eq!(header("poison", DEAD_LETTER_SUBJECT_HEADER).as_deref(), Some("orders.new"));
    assert_eq!(header("poison", DEAD_LETTER_MESSAGE_ID_HEADER).as_deref(), Some("p"));
    assert!(header("nobody knows which order this is", DEAD_LETTER_REASON_HEADER).unwrap().contains("no identity"));
    assert!(header("half an identity", DEAD_LETTER_REASON_HEADER).unwrap().contains("without source"));
    assert!(header("old", DEAD_LETTER_REASON_HEADER).unwrap().contains("older"));

    // Sent again as it is, it is still too old; forgotten first, it is handled, as the same event.
    let old = async_nats::Message {
        subject: "dead.orders".into(),
        reply: None,
        payload: letters["old"].payload.clone(),
        headers: Some(letters["old"].headers.clone()),
        status: None,
        description: None,
        length: 0,
    };
    redrive(&world.jetstream, &old).await.unwrap();
    let began = Instant::now();
    while world.dead_letters().await < 5 {
        assert!(began.elapsed() < WAIT_TIMEOUT);
        sleep(Duration::from_millis(100)).await;
    }
    world.postgres.sql(&world.database, "SELECT ibid.forget_event('shipping', '/shop', 'old')");
    for _ in 0..2 {
        redrive(&world.jetstream, &old).await.unwrap();
    }
    world.wait_settled().await;
    assert_eq!(world.shipped(), once(["order 1".to_owned(), "old".to_owned()]));
    assert_eq!(world.dead_letters().await, 5);
}
