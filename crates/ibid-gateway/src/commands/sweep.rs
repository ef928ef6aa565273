//! `ibid sweep`: removes what has expired, and marks what has lapsed. Safe beside gateways, which do the same now and
//! then: of several sweepers on one store, one works at a time.

use std::io;

use clap::Args;
use ibid::store::Store;

use super::outside::{self, Failed};
use crate::config::{self, Env, StoreChoice};

/// What one call removes at most, so that no call keeps others waiting.
const BATCH: u32 = 1000;

/// `ibid sweep`.
#[derive(Debug, Args)]
pub struct SweepArgs {
    #[command(flatten)]
    store: StoreChoice,
}

/// Sweeps until nothing is left to do, and prints what was done.
///
/// # Errors
/// If the store cannot be used.
pub fn run(args: &SweepArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), Failed> {
    let settings = config::Store::load(&args.store, env)?;
    let (removed, lapsed) = outside::block_on(async { sweep(&*outside::open(&settings).await?).await })?;
    writeln!(out, "removed {removed}, lapsed {lapsed}")?;
    Ok(())
}

async fn sweep(store: &dyn Store) -> Result<(u64, u64), Failed> {
    let (mut removed, mut lapsed) = (0, 0);
    loop {
        let swept = store.sweep(BATCH).await?;
        removed += u64::from(swept.removed);
        lapsed += u64::from(swept.lapsed);
        // A store that has more and did nothing would have the same to say for ever.
        if !swept.more || (swept.removed == 0 && swept.lapsed == 0) {
            return Ok((removed, lapsed));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use ibid::store::{Address, Ask, Claim, Fingerprint, Memory, Tags, Token};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_goes_on_until_nothing_is_left_and_leaves_what_counts() {
        let store = Memory::default();
        let claim = async |nth: u32, keep: Duration| {
            let mut address = Address([7; 32]);
            address.0[28..].copy_from_slice(&nth.to_be_bytes());
            let ask = Ask {
                address,
                token: Token::mint(),
                fingerprint: Fingerprint::NONE,
                tags: Tags::default(),
                label: Default::default(),
                hold: Duration::from_secs(1),
                keep,
                over: None,
            };
            assert!(matches!(store.claim(&Arc::new(ask)).await, Ok(Claim::Granted(_))));
        };
        let many = 2 * BATCH + 500;
        for nth in 0..many {
            claim(nth, Duration::from_secs(1)).await;
        }
        claim(many, Duration::from_secs(86_400)).await;
        tokio::time::advance(Duration::from_secs(600)).await;
        assert_eq!(sweep(&store).await.unwrap().0, u64::from(many), "in more than one batch");
        assert_eq!(sweep(&store).await.unwrap().0, 0);
        assert_eq!(store.operators().counts().await.unwrap().unknown, 1);
    }
}
