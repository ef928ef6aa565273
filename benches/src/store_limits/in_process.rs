//! A store in this process, with many callers at once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use ibid::store::{ClaimOutcome, Store};
use ibid_stores::{RemoteOptions, postgres::Postgres, redis::Redis};
use tokio::task::JoinSet;

use super::{LimitResult, Watch, address, claim_request};
use crate::{
    args::BenchArgs,
    histogram::LatencyHistogram,
    stores::{STORE_CALL_TIMEOUT, SharedStores, StoreServers},
};

pub(super) async fn claims(
    args: &BenchArgs, backing: &StoreServers<'_>, stores: SharedStores,
) -> Result<LimitResult, String> {
    let remote = RemoteOptions { timeout: STORE_CALL_TIMEOUT, ..RemoteOptions::default() };
    let store: Arc<dyn Store> = match stores {
        SharedStores::Postgres => {
            let database = backing.database()?;
            Arc::new(Postgres::open(&database.url(database.port()), remote).await?)
        }
        SharedStores::Redis => Arc::new(Redis::open(&backing.redis()?.url(), remote).await?),
        other => return Err(format!("{other:?}: only a single store is called directly")),
    };
    let next = Arc::new(AtomicU64::new(0));
    load(&store, &next, args.connections, args.warm_up).await?;
    let watch = Watch::begin(backing)?;
    let began = Instant::now();
    let (claims, latency) = load(&store, &next, args.connections, args.measure).await?;
    let per_second = claims as f64 / began.elapsed().as_secs_f64();
    watch.end(per_second, claims, Some([0.5, 0.99].map(|share| latency.quantile(share))))
}

/// So many callers, each of which claims a new address as soon as it was granted the last.
async fn load(
    store: &Arc<dyn Store>, next: &Arc<AtomicU64>, callers: usize, time: Duration,
) -> Result<(u64, LatencyHistogram), String> {
    let until = Instant::now() + time;
    let mut running = JoinSet::new();
    for _ in 0..callers {
        let (store, next) = (store.clone(), next.clone());
        running.spawn(async move {
            let (mut claims, mut latency) = (0_u64, LatencyHistogram::default());
            let mut asked = Instant::now();
            while asked < until {
                match store.claim(&claim_request(address(next.fetch_add(1, Relaxed)))).await {
                    Ok(ClaimOutcome::Granted(_)) => {}
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
    let (mut claims, mut latency) = (0, LatencyHistogram::default());
    while let Some(done) = running.join_next().await {
        let (more, of_one) = done.map_err(|error| error.to_string())??;
        claims += more;
        latency.merge(&of_one);
    }
    Ok((claims, latency))
}
