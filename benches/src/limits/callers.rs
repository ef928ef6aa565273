//! A store in this process, with many callers at once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use ibid::store::{Claim, Store};
use ibid_stores::{Remote, postgres::Postgres, redis::Redis};
use tokio::task::JoinSet;

use super::{Reached, Watch, address, ask};
use crate::{
    args::Args,
    histogram::Histogram,
    stores::{Backing, PATIENCE, Stores},
};

pub(super) async fn claims(args: &Args, backing: &Backing<'_>, stores: Stores) -> Result<Reached, String> {
    let remote = Remote { timeout: PATIENCE, ..Remote::default() };
    let store: Arc<dyn Store> = match stores {
        Stores::Postgres => {
            let database = backing.database()?;
            Arc::new(Postgres::open(&database.url(database.port()), remote).await?)
        }
        Stores::Redis => Arc::new(Redis::open(&backing.redis()?.url(), remote).await?),
        other => return Err(format!("{other:?}: only a single store is called directly")),
    };
    let next = Arc::new(AtomicU64::new(0));
    load(&store, &next, args.connections, args.settle).await?;
    let watch = Watch::begin(backing)?;
    let began = Instant::now();
    let (claims, latency) = load(&store, &next, args.connections, args.measure).await?;
    let per_second = claims as f64 / began.elapsed().as_secs_f64();
    watch.end(per_second, claims, Some([0.5, 0.99].map(|share| latency.quantile(share))))
}

/// So many callers, each of which claims a new address as soon as it was granted the last.
async fn load(
    store: &Arc<dyn Store>, next: &Arc<AtomicU64>, callers: usize, time: Duration,
) -> Result<(u64, Histogram), String> {
    let until = Instant::now() + time;
    let mut running = JoinSet::new();
    for _ in 0..callers {
        let (store, next) = (store.clone(), next.clone());
        running.spawn(async move {
            let (mut claims, mut latency) = (0_u64, Histogram::default());
            let mut asked = Instant::now();
            while asked < until {
                match store.claim(&ask(address(next.fetch_add(1, Relaxed)))).await {
                    Ok(Claim::Granted(_)) => {}
                    Ok(other) => return Err(format!("a claim of a new address was not granted: {other:?}")),
                    Err(error) => return Err(error.to_string()),
                }
                let granted = Instant::now();
                latency.record(granted - asked);
                asked = granted;
                claims += 1;
            }
            Ok((claims, latency))
        });
    }
    let (mut claims, mut latency) = (0, Histogram::default());
    while let Some(done) = running.join_next().await {
        let (more, of_one) = done.map_err(|error| error.to_string())??;
        claims += more;
        latency.merge(&of_one);
    }
    Ok((claims, latency))
}
