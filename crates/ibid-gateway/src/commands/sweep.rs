//! `ibid sweep`: removes expired entries and marks expired leases as outcome unknown. Safe beside gateways, which sweep
//! periodically: only one sweeper of a store works at a time.

use std::io;

use clap::Args;
use ibid::store::{Store, StoreError};
use ibid_tools::CommandError;

use super::open_store;
use crate::config::{self, Env, StoreSelection};

/// Maximum number of entries that one call removes, so that no call delays others.
const SWEEP_BATCH: u32 = 1000;

#[derive(Debug, Args)]
pub struct SweepArgs {
    #[command(flatten)]
    store: StoreSelection,
}

pub fn run(args: &SweepArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), CommandError> {
    let settings = config::StoreSettings::load(&args.store, env)?;
    let (removed, lapsed) = open_store::block_on(async {
        let (counts, ended) = sweep(&*open_store::open_store(&settings, None).await?.store).await;
        Ok(ended.map(|()| counts)?)
    })?;
    Ok(writeln!(out, "removed {removed}, lapsed {lapsed}")?)
}

/// Sweeps until nothing is left. Returns the numbers of removed entries and of expired leases, and why it ended early.
pub(super) async fn sweep(store: &dyn Store) -> ((u64, u64), Result<(), StoreError>) {
    let (mut removed, mut lapsed) = (0, 0);
    loop {
        let swept = match store.sweep(SWEEP_BATCH).await {
            Ok(swept) => swept,
            Err(why) => return ((removed, lapsed), Err(why)),
        };
        removed += u64::from(swept.removed);
        lapsed += u64::from(swept.lapsed);
        // A store that reports more entries but removes none would never end.
        if !swept.more || (swept.removed == 0 && swept.lapsed == 0) {
            return ((removed, lapsed), Ok(()));
        }
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use ibid::store::{Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Memory, Tags};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_goes_on_until_nothing_is_left_and_leaves_what_counts() {
        let store = Memory::default();
        let claim = async |nth: u32, keep: Duration| {
            let mut address = Address([7; 32]);
            address.0[28..].copy_from_slice(&nth.to_be_bytes());
            let ask = ClaimRequest {
                address,
                token: ClaimToken::mint(),
                fingerprint: Fingerprint::NONE,
                tags: Tags::default(),
                label: Default::default(),
                lease: Duration::from_secs(1),
                ttl: keep,
                take_over: None,
            };
            assert!(matches!(store.claim(&Arc::new(ask)).await, Ok(ClaimOutcome::Granted(_))));
        };
        let many = 2 * SWEEP_BATCH + 500;
        for nth in 0..many {
            claim(nth, Duration::from_secs(1)).await;
        }
        claim(many, Duration::from_secs(86_400)).await;
        tokio::time::advance(Duration::from_secs(600)).await;
        assert_eq!(sweep(&store).await.0.0, u64::from(many), "in more than one batch");
        assert_eq!(sweep(&store).await.0.0, 0);
        assert_eq!(store.admin().counts().await.unwrap().unknown, 1);
    }
}
