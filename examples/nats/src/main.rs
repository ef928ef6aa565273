//! A consumer of orders: each order has one row in PostgreSQL, however often NATS delivers it, whatever dies when.
//!
//! ```text
//! ibid-example-nats --nats nats://127.0.0.1:4222 --postgres postgres://app@127.0.0.1/shop
//! ```
//!
//! It consumes the stream ORDERS (subjects `orders.>`), which it makes if it is not there; dead letters go to `dead.orders`.
//! The row and the mark that the order was handled commit together; NATS is told afterwards. Whoever wants to see
//! that hold stops it at a step (`--pause-at`) and kills it there.

#![allow(clippy::disallowed_methods, reason = "an example reads what it was started with")]

use std::{error::Error, time::Duration};

use async_nats::jetstream::{self, consumer, stream};
use clap::{Parser, ValueEnum};
use deadpool_postgres::{Manager, Pool};
use ibid::inbox::{BrokerReply, RedeliveryBackoff};
use ibid_brokers::nats::{NatsDeliveries, NatsDelivery};
use ibid_postgres_tx::inbox::{TxEventOutcome, TxInbox, TxInboxError};
use tokio_postgres::NoTls;

/// A handler that takes the process down is not counted by the inbox, because nothing is left to count it. The broker
/// counts deliveries.
const MAX_DELIVERIES: u64 = 20;

#[derive(Debug, Parser)]
struct NatsArgs {
    #[arg(long, default_value = "nats://127.0.0.1:4222")]
    nats: String,
    /// A database on which `ibid migrate` has run, by a role that is a member of ibid_service
    #[arg(long)]
    postgres: String,
    /// How long NATS waits for a sign of life before it delivers again
    #[arg(long, default_value_t = 30_000, value_name = "MILLISECONDS")]
    ack_wait: u64,
    /// Say so at this step, and stop there
    #[arg(long)]
    pause_at: Option<NatsStep>,
    /// Only at the order with this text
    #[arg(long, requires = "pause_at")]
    pause_on: Option<String>,
    /// Take so long for every order
    #[arg(long, default_value_t = 0, value_name = "MILLISECONDS")]
    slow: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum NatsStep {
    Received,
    Claimed,
    Effect,
    Committed,
    Acknowledged,
}

/// Where to stop, and how long to take.
#[derive(Debug, Clone)]
struct NatsPause {
    at: Option<NatsStep>,
    on: Option<String>,
    slow: Duration,
}

impl NatsPause {
    async fn step(&self, step: NatsStep, order: &str) {
        if self.at == Some(step) && self.on.as_deref().is_none_or(|on| on == order) {
            println!("paused at {step:?} on {order}");
            std::future::pending::<()>().await;
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args = NatsArgs::parse();
    let pool = Pool::builder(Manager::new(args.postgres.parse()?, NoTls)).max_size(8).build()?;
    let table = "CREATE TABLE IF NOT EXISTS shipments (order_id text NOT NULL, text text NOT NULL)";
    pool.get().await?.batch_execute(table).await?;

    let jetstream = jetstream::new(async_nats::connect(&args.nats).await?);
    let keep = |name: &str, subject: &str| stream::Config {
        name: name.into(),
        subjects: vec![subject.into()],
        ..stream::Config::default()
    };
    jetstream.get_or_create_stream(keep("DEAD", "dead.>")).await?;
    let orders = jetstream.get_or_create_stream(keep("ORDERS", "orders.>")).await?;
    let pull = consumer::pull::Config {
        durable_name: Some("shipping".into()),
        ack_wait: Duration::from_millis(args.ack_wait),
        ..consumer::pull::Config::default()
    };
    let consumer = orders.get_or_create_consumer("shipping", pull).await?;
    let mut deliveries = NatsDeliveries::open(&jetstream, consumer, "shipping", "dead.orders").await?;

    let inbox = TxInbox::default()
        .backoff(RedeliveryBackoff { first: Duration::from_millis(200), most: Duration::from_secs(60) });
    let pause = NatsPause { at: args.pause_at, on: args.pause_on, slow: Duration::from_millis(args.slow) };
    println!("consuming");
    while let Some(delivery) = deliveries.next().await {
        let delivery = match delivery {
            Ok(delivery) => delivery,
            // The client connects again by itself.
            Err(error) => {
                eprintln!("{error}");
                continue;
            }
        };
        let order = String::from_utf8_lossy(&delivery.message().payload).into_owned();
        pause.step(NatsStep::Received, &order).await;
        let handled = ship(&pool, &inbox, &delivery, &order, &pause).await;
        if let Err(error) = &handled {
            eprintln!("{}: {error}", delivery.event());
        }
        pause.step(NatsStep::Committed, &order).await;
        let reply: BrokerReply = inbox.reply(&handled);
        // What is not confirmed comes again, and is a duplicate then.
        if let Err(error) = delivery.reply(reply).await {
            eprintln!("{error}");
        }
        pause.step(NatsStep::Acknowledged, &order).await;
    }
    Ok(())
}

async fn ship(
    pool: &Pool, inbox: &TxInbox, delivery: &NatsDelivery, order: &str, pause: &NatsPause,
) -> Result<TxEventOutcome<String>, TxInboxError> {
    let (id, delivered) = (delivery.event().id().to_owned(), delivery.delivery_count());
    let (order, pause) = (order.to_owned(), pause.clone());
    let handled = inbox.handle(pool, delivery.event(), |tx| {
        Box::pin(async move {
            pause.step(NatsStep::Claimed, &order).await;
            if delivered > MAX_DELIVERIES {
                return Err(format!("delivered {delivered} times and never finished"));
            }
            if order.contains("poison") {
                return Err("this order cannot be shipped".to_owned());
            }
            let insert = "INSERT INTO shipments (order_id, text) VALUES ($1, $2)";
            tx.execute(insert, &[&id, &order]).await.map_err(|error| error.to_string())?;
            pause.step(NatsStep::Effect, &order).await;
            tokio::time::sleep(pause.slow).await;
            Ok(())
        })
    });
    handled.await
}
