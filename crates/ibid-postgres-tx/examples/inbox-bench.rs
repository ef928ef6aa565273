//! Events marked per second, one by one and in batches, side by side in one run: `scripts/bench --inbox`.
//!
//! Both write the mark and one row of effect per event, on one connection, on a private server with the settings of a
//! newcomer. What counts is the ratio: the rates are those of this machine.

#![allow(clippy::disallowed_methods, reason = "a benchmark reads what it was started with")]

use std::time::{Duration, Instant};

use ibid::inbox::InboxEvent;
use ibid_postgres_tx::inbox::{TxEventOutcome, TxInbox};
use ibid_stores::postgres::{MigrateAction, migrate};
use sqlx::PgPool;
use testbed::TestPostgres;

const BATCHES: [usize; 3] = [1, 16, 256];

#[tokio::main]
async fn main() {
    let rounds: usize = std::env::args().nth(1).map_or(7, |rounds| rounds.parse().expect("a number of rounds"));
    let span = Duration::from_millis(if rounds > 1 { 1000 } else { 100 });
    let server = TestPostgres::start();
    let name = server.create_database();
    migrate(&server.url("migrator", &name), MigrateAction::Up).await.expect("it migrates");
    server.sql(&name, "CREATE TABLE public.effects (id text); GRANT ALL ON public.effects TO PUBLIC");
    let pool = PgPool::connect(&server.url("gateway", &name)).await.expect("it connects");
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); BATCHES.len()];
    let mut next = 0;
    // Interleaved, so that whatever else the machine does disturbs all of them alike.
    for _ in 0..rounds {
        for (size, rates) in BATCHES.into_iter().zip(&mut rates) {
            rates.push(rate(&pool, size, span, &mut next).await);
        }
    }
    let median = |rates: &mut Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let medians: Vec<f64> = rates.iter_mut().map(median).collect();
    println!("| events per transaction | events/s, median of {rounds} | against one by one |");
    println!("|---|---|---|");
    for (size, rate) in BATCHES.iter().zip(&medians) {
        println!("| {size} | {rate:.0} | {:.2} |", rate / medians[0]);
    }
}

async fn rate(pool: &PgPool, size: usize, span: Duration, next: &mut usize) -> f64 {
    let (inbox, began, mut handled) = (TxInbox::default(), Instant::now(), 0);
    while began.elapsed() < span {
        let events: Vec<InboxEvent> = (*next..*next + size)
            .map(|nth| InboxEvent::new("bench", "/bench", &nth.to_string()).expect("a name"))
            .collect();
        *next += size;
        let ends = if size == 1 {
            let id = events[0].id().to_owned();
            let one = inbox.handle(pool, &events[0], |tx| {
                Box::pin(async move {
                    sqlx::query("INSERT INTO public.effects VALUES ($1)").bind(id).execute(&mut **tx).await.map(drop)
                })
            });
            vec![one.await.expect("the server answers")]
        } else {
            let ids: Vec<String> = events.iter().map(|event| event.id().to_owned()).collect();
            let many = inbox.handle_batch(pool, &events, move |tx, nth| {
                let id = ids[nth].clone();
                Box::pin(async move {
                    sqlx::query("INSERT INTO public.effects VALUES ($1)").bind(id).execute(&mut **tx).await.map(drop)
                })
            });
            many.await.expect("the server answers")
        };
        assert!(ends.iter().all(|end| matches!(end, TxEventOutcome::Done)));
        handled += size;
    }
    handled as f64 / began.elapsed().as_secs_f64()
}
