//! A consumer of orders: each order has one row in PostgreSQL, however often RabbitMQ delivers it, whatever dies when.
//!
//! ```text
//! ibid-example-rabbitmq --rabbitmq amqp://guest:guest@127.0.0.1:5672/%2f --postgres postgres://app@127.0.0.1/shop
//! ```
//!
//! It consumes the queue `orders`, which it makes if it is not there; dead letters go to the queue `orders.dead`. The row
//! and the mark that the order was handled commit together; RabbitMQ is told afterwards. Whoever wants to see that
//! hold stops it at a step (`--pause-at`) and kills it there.

#![allow(clippy::disallowed_methods, reason = "an example reads what it was started with")]

use std::{error::Error, time::Duration};

use clap::{Parser, ValueEnum};
use deadpool_postgres::{Manager, Pool};
use ibid::inbox::RedeliveryBackoff;
use ibid_brokers::rabbitmq::{RabbitmqDeliveries, RabbitmqDelivery, declare};
use ibid_postgres_tx::inbox::{TxEventOutcome, TxInbox, TxInboxError};
use lapin::{Connection, ConnectionProperties};
use tokio_postgres::NoTls;

/// A handler that takes the process down is not counted by the inbox, because nothing is left to count it. The broker
/// counts deliveries.
const MAX_DELIVERIES: u64 = 20;
/// Deliveries that may be unanswered at a time: those that are held back before they come again included.
const PREFETCH: u16 = 32;

#[derive(Debug, Parser)]
struct RabbitmqArgs {
    #[arg(long, default_value = "amqp://guest:guest@127.0.0.1:5672/%2f")]
    rabbitmq: String,
    /// A database on which `ibid migrate` has run, by a role that is a member of ibid_service
    #[arg(long)]
    postgres: String,
    /// Say so at this step, and stop there
    #[arg(long)]
    pause_at: Option<RabbitmqStep>,
    /// Only at the order with this text
    #[arg(long, requires = "pause_at")]
    pause_on: Option<String>,
    /// Take so long for every order
    #[arg(long, default_value_t = 0, value_name = "MILLISECONDS")]
    slow: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RabbitmqStep {
    Received,
    Claimed,
    Effect,
    Committed,
    Acknowledged,
}

/// Where to stop, and how long to take.
#[derive(Debug, Clone)]
struct RabbitmqPause {
    at: Option<RabbitmqStep>,
    on: Option<String>,
    slow: Duration,
}

impl RabbitmqPause {
    async fn step(&self, step: RabbitmqStep, order: &str) {
        if self.at == Some(step) && self.on.as_deref().is_none_or(|on| on == order) {
            println!("paused at {step:?} on {order}");
            std::future::pending::<()>().await;
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args = RabbitmqArgs::parse();
    let pool = Pool::builder(Manager::new(args.postgres.parse()?, NoTls)).max_size(8).build()?;
    let table = "CREATE TABLE IF NOT EXISTS shipments (order_id text NOT NULL, text text NOT NULL)";
    pool.get().await?.batch_execute(table).await?;
    let inbox = TxInbox::default()
        .backoff(RedeliveryBackoff { first: Duration::from_millis(200), most: Duration::from_secs(60) });
    let pause = RabbitmqPause { at: args.pause_at, on: args.pause_on, slow: Duration::from_millis(args.slow) };
    // A channel that is gone takes its deliveries with it: they come again on the next.
    loop {
        if let Err(error) = consume(&args.rabbitmq, &pool, &inbox, &pause).await {
            eprintln!("{error}");
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn consume(url: &str, pool: &Pool, inbox: &TxInbox, pause: &RabbitmqPause) -> Result<(), Box<dyn Error>> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    declare(&channel, "orders").await?;
    let mut deliveries = RabbitmqDeliveries::open(&channel, "orders", "shipping", PREFETCH).await?;
    println!("consuming");
    while let Some(delivery) = deliveries.next().await {
        let delivery = delivery?;
        let order = String::from_utf8_lossy(&delivery.message().data).into_owned();
        pause.step(RabbitmqStep::Received, &order).await;
        let handled = ship(pool, inbox, &delivery, &order, pause).await;
        if let Err(error) = &handled {
            eprintln!("{}: {error}", delivery.event());
        }
        pause.step(RabbitmqStep::Committed, &order).await;
        delivery.reply(inbox.reply(&handled)).await?;
        pause.step(RabbitmqStep::Acknowledged, &order).await;
    }
    Ok(())
}

async fn ship(
    pool: &Pool, inbox: &TxInbox, delivery: &RabbitmqDelivery, order: &str, pause: &RabbitmqPause,
) -> Result<TxEventOutcome<String>, TxInboxError> {
    let (id, delivered) = (delivery.event().id().to_owned(), delivery.delivery_count());
    let (order, pause) = (order.to_owned(), pause.clone());
    let handled = inbox.handle(pool, delivery.event(), |tx| {
        Box::pin(async move {
            pause.step(RabbitmqStep::Claimed, &order).await;
            if let Some(delivered) = delivered.filter(|delivered| *delivered > MAX_DELIVERIES) {
                return Err(format!("delivered {delivered} times and never finished"));
            }
            if order.contains("poison") {
                return Err("this order cannot be shipped".to_owned());
            }
            let insert = "INSERT INTO shipments (order_id, text) VALUES ($1, $2)";
            tx.execute(insert, &[&id, &order]).await.map_err(|error| error.to_string())?;
            pause.step(RabbitmqStep::Effect, &order).await;
            tokio::time::sleep(pause.slow).await;
            Ok(())
        })
    });
    handled.await
}
