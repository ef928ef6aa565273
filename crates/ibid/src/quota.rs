//! How much a tenant may begin: new keys in a window, counted in the store, and a rate, counted here.
//!
//! Only a grant spends. A request is looked at before it claims, so that one that is over its quota leaves nothing
//! behind; but where nothing is left, the store is asked first whether the key is known: a retry is answered, not refused.
//!
//! Allowances are reserved in the store some at a time and spent here. What is reserved and not spent when a process ends is
//! lost to its tenant until the window ends: at most a hundredth of the quota per process. A store that cannot count
//! refuses nobody.

use std::{fmt, time::Duration};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use crate::store::{Address, Counters, Store, Tags, Used, Windows, counters::Table};

/// How often one request asks for more when others were faster.
const TRIES: u32 = 8;
/// Told to those who were not fast enough.
const SOON: Duration = Duration::from_secs(1);

/// So many in so long: `100000/24h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// At least one.
    pub most: u64,
    /// Not zero.
    pub per: Duration,
}

/// What a tenant may begin.
pub struct Quota {
    new_keys: Option<Limit>,
    rate: Option<Limit>,
    /// Where the store has no counters.
    here: Windows,
    /// By tenant: what may be spent without asking the store.
    allowances: Mutex<Table<Allowance>>,
    /// By tenant and user: when the bucket is full again.
    buckets: Mutex<Table<Instant>>,
}

#[derive(Debug, Clone, Copy)]
struct Allowance {
    left: u64,
    /// The store has none either.
    used_up: bool,
    /// The end of the window.
    until: Instant,
}

impl Quota {
    /// New keys per tenant, and new keys per tenant and user at a time.
    pub fn new(new_keys: Option<Limit>, rate: Option<Limit>) -> Self {
        Self { new_keys, rate, here: Windows::default(), allowances: Mutex::default(), buckets: Mutex::default() }
    }

    /// Whether one more may begin. `Err` says when to try again.
    pub(crate) async fn has_room(&self, store: &dyn Store, tags: &Tags) -> Result<(), Duration> {
        if let Some(rate) = self.rate {
            self.take(rate, tags, false)?;
        }
        let Some(limit) = self.new_keys else { return Ok(()) };
        let who = named(&[tags.tenant()]);
        if self.left(&who).is_some_and(|known| known.left > 0) { Ok(()) } else { self.ask(store, limit, &who).await }
    }

    /// One has begun. `Err` if others were faster: it must not.
    pub(crate) async fn spend(&self, store: &dyn Store, tags: &Tags) -> Result<(), Duration> {
        // The rate first: what is taken of it in vain is back in a moment.
        if let Some(rate) = self.rate {
            self.take(rate, tags, true)?;
        }
        let Some(limit) = self.new_keys else { return Ok(()) };
        let who = named(&[tags.tenant()]);
        for _ in 0..TRIES {
            if self.spend_one(&who) {
                return Ok(());
            }
            self.ask(store, limit, &who).await?;
        }
        if self.spend_one(&who) { Ok(()) } else { Err(SOON) }
    }

    /// What is known of a tenant in the present window.
    fn left(&self, who: &Address) -> Option<Allowance> {
        self.allowances.lock().all.get(who).copied().filter(|known| known.until > Instant::now())
    }

    fn spend_one(&self, who: &Address) -> bool {
        let mut table = self.allowances.lock();
        match table.all.get_mut(who).filter(|known| known.until > Instant::now() && known.left > 0) {
            Some(known) => {
                known.left -= 1;
                true
            }
            None => false,
        }
    }

    /// Reserves some more in the store, unless it is known to have none.
    async fn ask(&self, store: &dyn Store, limit: Limit, who: &Address) -> Result<(), Duration> {
        if let Some(known) = self.left(who).filter(|known| known.used_up && known.left == 0) {
            return Err(known.until.saturating_duration_since(Instant::now()));
        }
        let some = (limit.most / 100).clamp(1, 1000);
        let counters = store.counters().unwrap_or(&self.here as &dyn Counters);
        match counters.reserve(who, some, limit.per).await {
            Ok(used) => self.reserved(who, some, limit, used),
            // Nobody is refused for want of a count.
            Err(_) => {
                self.put(who, 1, Instant::now() + SOON);
                Ok(())
            }
        }
    }

    fn reserved(&self, who: &Address, some: u64, limit: Limit, used: Used) -> Result<(), Duration> {
        let until = Instant::now() + used.resets_in.max(Duration::from_millis(1));
        let got = some.saturating_sub(used.total.saturating_sub(limit.most));
        self.put(who, got, until);
        if got == 0 { Err(used.resets_in) } else { Ok(()) }
    }

    /// Where nothing was got, that is remembered.
    fn put(&self, who: &Address, got: u64, until: Instant) {
        let mut table = self.allowances.lock();
        let now = Instant::now();
        if table.place(who, now, |known| known.until <= now) != *who {
            // Of so many at once, what some have reserved is lost to them.
            table.all.clear();
        }
        let known = table.all.entry(*who).or_insert(Allowance { left: 0, used_up: false, until });
        if known.until <= now {
            known.left = 0;
        }
        *known = Allowance { left: known.left + got, used_up: got == 0, until };
    }

    /// Takes one from a bucket that fills at the rate and holds what one period gives; or only looks.
    fn take(&self, rate: Limit, tags: &Tags, spend: bool) -> Result<(), Duration> {
        let who = named(&[tags.tenant(), tags.user()]);
        let one = rate.per.div_f64(rate.most as f64);
        let now = Instant::now();
        let mut table = self.buckets.lock();
        let who = table.place(&who, now, |full| *full <= now);
        let full = table.all.get(&who).copied().unwrap_or(now).max(now) + one;
        if full > now + rate.per {
            return Err(full - now - rate.per);
        }
        if spend {
            table.all.insert(who, full);
        }
        Ok(())
    }
}

fn named(parts: &[&str]) -> Address {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    Address(hash.finalize().into())
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quota").field("new_keys", &self.new_keys).field("rate", &self.rate).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Memory;

    fn tags(tenant: &str, user: &str) -> Tags {
        Tags::new(tenant, user, "", "")
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_begins_as_many_as_the_quota_says_and_not_one_more() {
        let hour = Duration::from_secs(3600);
        for most in [1, 3, 250, 100_000] {
            // Two gateways on one store.
            let store = Memory::default();
            let quotas = [(); 2].map(|()| Quota::new(Some(Limit { most, per: hour }), None));
            let mut begun = 0;
            for n in 0..most + 500 {
                let quota = &quotas[n as usize % 2];
                if quota.has_room(&store, &tags("a", "u")).await.is_ok() {
                    assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
                    begun += 1;
                }
            }
            assert!(begun <= most, "{begun} of {most}");
            assert!(begun >= most - most / 100, "{begun} of {most}: only what is reserved elsewhere may be missing");
            let after = quotas[0].has_room(&store, &tags("a", "u")).await.unwrap_err();
            assert!(after <= hour && !after.is_zero());
            assert_eq!(quotas[0].has_room(&store, &tags("b", "u")).await, Ok(()), "another tenant");
            tokio::time::advance(hour).await;
            assert_eq!(quotas[0].has_room(&store, &tags("a", "u")).await, Ok(()), "another window");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn looking_spends_nothing() {
        let store = Memory::default();
        let one = Limit { most: 1, per: Duration::from_secs(60) };
        let quota = Quota::new(Some(one), Some(one));
        for _ in 0..100 {
            assert_eq!(quota.has_room(&store, &tags("a", "u")).await, Ok(()));
        }
        assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
        assert!(quota.has_room(&store, &tags("a", "u")).await.is_err());
        assert!(quota.spend(&store, &tags("a", "u")).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_allows_a_burst_of_one_period_and_then_its_pace() {
        let store = Memory::default();
        let quota = Quota::new(None, Some(Limit { most: 10, per: Duration::from_secs(1) }));
        let mut begun = 0;
        while quota.spend(&store, &tags("a", "u")).await.is_ok() {
            begun += 1;
        }
        assert_eq!(begun, 10);
        assert_eq!(quota.has_room(&store, &tags("a", "other")).await, Ok(()), "another user of the tenant");
        assert_eq!(quota.has_room(&store, &tags("a", "u")).await, Err(Duration::from_millis(100)));
        tokio::time::advance(Duration::from_millis(300)).await;
        for _ in 0..3 {
            assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
        }
        assert!(quota.spend(&store, &tags("a", "u")).await.is_err());
    }

    #[tokio::test]
    async fn made_up_tenants_do_not_fill_the_memory() {
        let store = Memory::default();
        let limit = Limit { most: 5, per: Duration::from_secs(3600) };
        let quota = Quota::new(Some(limit), Some(limit));
        const MOST: usize = 1 << 16;
        for n in 0..(MOST + 1000) {
            let _ = quota.spend(&store, &tags(&n.to_string(), "u")).await;
        }
        assert!(quota.allowances.lock().all.len() <= MOST);
        assert!(quota.buckets.lock().all.len() <= MOST + 1);
    }
}
