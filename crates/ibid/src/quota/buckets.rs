//! Rates: a bucket per tenant and user, which fills at the rate and holds what one period gives.
//!
//! A bucket is the moment when it will be full again. How much is taken from it follows from that and the rate; so when
//! the rate changes, the moments are moved such that the same is taken.

use std::time::Duration;

use tokio::time::Instant;

use super::QuotaLimit;
use crate::store::{Address, counters::BoundedTable};

#[derive(Default)]
pub(super) struct RateBuckets {
    rate: Option<QuotaLimit>,
    /// The rate that the moments go by, also while there is none.
    computed_with: Option<QuotaLimit>,
    full_at: BoundedTable<Instant>,
}

impl RateBuckets {
    /// What was taken stays taken: who has used up the old rate gets only what the new one gives beyond it.
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

    pub(super) fn rate(&self) -> Option<QuotaLimit> {
        self.rate
    }

    /// Takes one, or only looks. `Err` says when there is one.
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
