//! Rate limits: one token bucket per tenant and user. It refills at the rate and holds one period's tokens.
//!
//! A bucket is stored as the instant at which it will be full. Instant and rate determine the number of taken tokens.
//! When the rate changes, the instants are adjusted so that the number of taken tokens stays the same.

use std::time::Duration;

use tokio::time::Instant;

use super::QuotaLimit;
use crate::store::{Address, counters::BoundedTable};

#[derive(Default)]
pub(super) struct RateBuckets {
    pub(super) rate: Option<QuotaLimit>,
    /// The rate that `full_at` is based on, kept while no rate is set.
    computed_with: Option<QuotaLimit>,
    full_at: BoundedTable<Instant>,
}

impl RateBuckets {
    /// Changes the rate. Taken tokens stay taken: a higher rate grants the difference only.
    pub(super) fn set(&mut self, rate: Option<QuotaLimit>) {
        self.rate = rate;
        let (Some(old), Some(new)) = (self.computed_with, rate) else {
            self.computed_with = self.computed_with.or(rate);
            return;
        };
        self.computed_with = rate;
        let now = Instant::now();
        for full in self.full_at.entries.values_mut() {
            let missing = full.saturating_duration_since(now).as_secs_f64() / old.per.as_secs_f64();
            let taken = (missing * old.most as f64).min(new.most as f64);
            *full = now + new.per.mul_f64(taken / new.most as f64);
        }
    }

    /// Takes a token if `spend`, otherwise only checks. `Err` contains the time until one is available.
    pub(super) fn take(&mut self, who: &Address, spend: bool) -> Result<(), Duration> {
        let Some(rate) = self.rate else { return Ok(()) };
        let one = rate.per.div_f64(rate.most as f64);
        let now = Instant::now();
        let who = self.full_at.slot_for(who, now, |full| *full <= now);
        let full = self.full_at.entries.get(&who).copied().unwrap_or(now).max(now) + one;
        if full > now + rate.per {
            return Err(full - now - rate.per);
        }
        if spend {
            self.full_at.entries.insert(who, full);
        }
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.full_at.entries.len()
    }
}
