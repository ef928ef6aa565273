//! Limits what a tenant may start: new keys and bytes per window, counted in the store, and a rate, counted in this
//! process.
//!
//! Only a granted claim spends quota. A request is checked before it claims, so that a refused request leaves no entry.
//! If no quota is left, the store is asked whether the key is known: a retry is answered, not refused.
//!
//! Each process reserves quota in the store in batches and spends it locally. When a process ends, its unspent
//! reservation is lost to the tenant until the window ends: at most a hundredth of the quota per process. If the store
//! cannot count, nobody is refused.
//!
//! The size of an answer is known when it is recorded. Its bytes are charged then, even beyond the limit; the tenant's
//! next new key is refused.

use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use self::reservations::{Allowance, QuotaReservations};
use crate::{
    key::framed_digest,
    store::{Address, Counters, InMemoryCounters, Store, Tags, counters::BoundedTable},
};

mod reservations;

/// The maximum number of new keys in one reservation.
const MAX_KEYS_PER_RESERVATION: u64 = 1000;
/// How often one request reserves again when concurrent requests used up the reservation.
const MAX_RESERVE_ATTEMPTS: u32 = 8;
/// Retry delay of requests that lost that race, and lifetime of uncounted reservations.
const RETRY_SOON: Duration = Duration::from_secs(1);
/// The maximum period of a limit. Adding a longer one could overflow an `Instant`.
const MAX_PERIOD: Duration = Duration::from_secs(365 * 24 * 3600);

/// A number per period: `100000/24h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaLimit {
    /// The maximum number per period, at least 1.
    pub most: u64,
    /// The period, above zero.
    pub per: Duration,
}

/// The limits of all tenants, and what they have used.
pub struct Quota {
    /// Whether any limit is set. Lets requests skip the locks.
    is_set: AtomicBool,
    /// Used if the store has no counters.
    local_counters: InMemoryCounters,
    /// Reserved keys by tenant, which are spent without a store call.
    new_keys: Mutex<QuotaReservations>,
    /// Reserved bytes by tenant.
    new_bytes: Mutex<QuotaReservations>,
    /// Buckets by tenant and user.
    rates: Mutex<RateBuckets>,
}

impl Quota {
    /// Limits new keys per tenant and window, and the rate of new keys per tenant and user.
    pub fn new(new_keys: Option<QuotaLimit>, rate: Option<QuotaLimit>) -> Self {
        let quota = Self {
            is_set: AtomicBool::new(false),
            local_counters: InMemoryCounters::default(),
            new_keys: Mutex::new(QuotaReservations::new(MAX_KEYS_PER_RESERVATION)),
            new_bytes: Mutex::new(QuotaReservations::new(u64::MAX)),
            rates: Mutex::default(),
        };
        quota.set(new_keys, rate);
        quota
    }

    /// Changes the limits. Earlier use still counts, so a change grants no second allowance. A window that has started
    /// ends as planned.
    pub fn set(&self, new_keys: Option<QuotaLimit>, rate: Option<QuotaLimit>) {
        self.new_keys.lock().limit = new_keys.map(clamped);
        self.rates.lock().set(rate.map(clamped));
        self.update_is_set();
    }

    /// Limits the bytes that a tenant's new answers may take up in the store: record, headers, tags and label. As with
    /// [`set`](Self::set), earlier use still counts.
    pub fn set_bytes(&self, new_bytes: Option<QuotaLimit>) {
        self.new_bytes.lock().limit = new_bytes.map(clamped);
        self.update_is_set();
    }

    fn update_is_set(&self) {
        let is_set = self.limits().into_iter().any(|limit| limit.is_some());
        self.is_set.store(is_set, Relaxed);
    }

    /// The limits of new keys, new bytes and the rate.
    fn limits(&self) -> [Option<QuotaLimit>; 3] {
        [self.new_keys.lock().limit, self.new_bytes.lock().limit, self.rates.lock().rate]
    }

    /// Whether any limit is set.
    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Relaxed)
    }

    /// Checks whether one more operation may start. `Err` contains the time until a retry makes sense.
    pub(crate) async fn check(&self, store: &dyn Store, tags: &Tags) -> Result<(), Duration> {
        self.rates.lock().take(&rate_counter(tags), false)?;
        self.check_allowance(&self.new_bytes, store, &bytes_counter(tags)).await?;
        self.check_allowance(&self.new_keys, store, &keys_counter(tags)).await
    }

    async fn check_allowance(
        &self, places: &Mutex<QuotaReservations>, store: &dyn Store, who: &Address,
    ) -> Result<(), Duration> {
        let room = places.lock().check(who, false);
        match room {
            Allowance::Available => Ok(()),
            Allowance::Exhausted(until) => Err(until),
            Allowance::NeedsReservation(some, window) => {
                self.reserve(places, store, who, some, window).await;
                match places.lock().check(who, false) {
                    Allowance::Exhausted(until) => Err(until),
                    // A concurrent request used up the reservation. The claim reserves again.
                    Allowance::Available | Allowance::NeedsReservation(..) => Ok(()),
                }
            }
        }
    }

    /// Spends one key. `Err` if concurrent requests were faster: the operation must not start.
    pub(crate) async fn spend(&self, store: &dyn Store, tags: &Tags) -> Result<(), Duration> {
        // The rate first: a token taken in vain is refilled soon.
        self.rates.lock().take(&rate_counter(tags), true)?;
        let who = keys_counter(tags);
        for _ in 0..=MAX_RESERVE_ATTEMPTS {
            let room = self.new_keys.lock().check(&who, true);
            match room {
                Allowance::Available => return Ok(()),
                Allowance::Exhausted(until) => return Err(until),
                Allowance::NeedsReservation(some, window) => {
                    self.reserve(&self.new_keys, store, &who, some, window).await
                }
            }
        }
        Err(RETRY_SOON)
    }

    /// Charges recorded bytes.
    pub(crate) async fn charge_bytes(&self, store: &dyn Store, tags: &Tags, bytes: u64) {
        let who = bytes_counter(tags);
        let missing = self.new_bytes.lock().charge(&who, bytes);
        if missing == 0 {
            return;
        }
        let (limit, room) = {
            let mut bytes = self.new_bytes.lock();
            (bytes.limit, bytes.check(&who, false))
        };
        let Some(QuotaLimit { per, .. }) = limit else { return };
        // Also reserves a batch for later requests, if the limit allows.
        let more = if let Allowance::NeedsReservation(more, _) = room { more } else { 0 };
        self.reserve(&self.new_bytes, store, &who, missing.saturating_add(more), per).await;
        let _ = self.new_bytes.lock().charge(&who, missing);
    }

    async fn reserve(
        &self, places: &Mutex<QuotaReservations>, store: &dyn Store, who: &Address, some: u64, window: Duration,
    ) {
        let counters = store.counters().unwrap_or(&self.local_counters as &dyn Counters);
        let answer = counters.reserve(who, some, window).await;
        let mut places = places.lock();
        match answer {
            Ok(used) => places.add_reserved(who, some, used),
            Err(_) => places.add_uncounted(who),
        }
    }
}

/// Rate limits: one token bucket per tenant and user. It refills at the rate and holds one period's tokens.
///
/// A bucket is stored as the instant at which it will be full. Instant and rate determine the number of taken tokens.
/// When the rate changes, the instants are adjusted so that the number of taken tokens stays the same.
#[derive(Default)]
struct RateBuckets {
    rate: Option<QuotaLimit>,
    /// The rate that `full_at` is based on, kept while no rate is set.
    computed_with: Option<QuotaLimit>,
    full_at: BoundedTable<Instant>,
}

impl RateBuckets {
    /// Changes the rate. Taken tokens stay taken: a higher rate grants the difference only.
    fn set(&mut self, rate: Option<QuotaLimit>) {
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
    fn take(&mut self, who: &Address, spend: bool) -> Result<(), Duration> {
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
    fn len(&self) -> usize {
        self.full_at.entries.len()
    }
}

fn clamped(limit: QuotaLimit) -> QuotaLimit {
    QuotaLimit { most: limit.most.max(1), per: limit.per.min(MAX_PERIOD) }
}

fn rate_counter(tags: &Tags) -> Address {
    Address(framed_digest(&[tags.tenant(), tags.user()]))
}

fn bytes_counter(tags: &Tags) -> Address {
    Address(framed_digest(&["bytes", "", tags.tenant()]))
}

fn keys_counter(tags: &Tags) -> Address {
    Address(framed_digest(&[tags.tenant()]))
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [new_keys, new_bytes, rate] = self.limits();
        write!(f, "Quota {{ new_keys: {new_keys:?}, new_bytes: {new_bytes:?}, rate: {rate:?}, .. }}")
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
            let quotas = [(); 2].map(|()| Quota::new(Some(QuotaLimit { most, per: hour }), None));
            let mut begun = 0;
            for n in 0..most + 500 {
                let quota = &quotas[n as usize % 2];
                if quota.check(&store, &tags("a", "u")).await.is_ok() {
                    assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
                    begun += 1;
                }
            }
            assert!(begun <= most, "{begun} of {most}");
            assert!(begun >= most - most / 100, "{begun} of {most}: only what is reserved elsewhere may be missing");
            let after = quotas[0].check(&store, &tags("a", "u")).await.unwrap_err();
            assert!(after <= hour && !after.is_zero());
            assert_eq!(quotas[0].check(&store, &tags("b", "u")).await, Ok(()), "another tenant");
            tokio::time::advance(hour).await;
            assert_eq!(quotas[0].check(&store, &tags("a", "u")).await, Ok(()), "another window");
        }
    }

    /// How many answers of this size a tenant may record before it is refused.
    async fn records(quota: &Quota, store: &Memory, bytes: u64) -> u64 {
        let mut recorded = 0;
        while recorded < 10_000 && quota.check(store, &tags("a", "u")).await.is_ok() {
            assert_eq!(quota.spend(store, &tags("a", "u")).await, Ok(()));
            quota.charge_bytes(store, &tags("a", "u"), bytes).await;
            recorded += 1;
        }
        recorded
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_records_as_many_bytes_as_the_quota_says_and_what_had_begun() {
        let hour = Duration::from_secs(3600);
        for (bytes, answers) in [(1, 1000), (7, 143), (300, 4), (5000, 1)] {
            let store = Memory::default();
            let quota = Quota::new(None, None);
            quota.set_bytes(Some(QuotaLimit { most: 1000, per: hour }));
            assert!(quota.is_set());
            assert_eq!(records(&quota, &store, bytes).await, answers, "of {bytes} bytes");
            let other = Quota::new(None, None);
            other.set_bytes(Some(QuotaLimit { most: 1000, per: hour }));
            assert_eq!(other.check(&store, &tags("a", "u")).await, Err(hour), "another gateway knows it");
            assert_eq!(quota.check(&store, &tags("b", "u")).await, Ok(()), "another tenant");
            // Operations that ran meanwhile are still recorded and counted.
            quota.charge_bytes(&store, &tags("a", "u"), 10_000).await;
            quota.set_bytes(Some(QuotaLimit { most: 10_000, per: hour }));
            assert!(records(&quota, &store, 1).await <= 10, "what was recorded counts under another limit");
            tokio::time::advance(hour).await;
            assert_eq!(quota.check(&store, &tags("a", "u")).await, Ok(()), "another window");
            quota.set_bytes(None);
            assert!(!quota.is_set());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn looking_spends_nothing() {
        let store = Memory::default();
        let one = QuotaLimit { most: 1, per: Duration::from_secs(60) };
        let quota = Quota::new(Some(one), Some(one));
        for _ in 0..100 {
            assert_eq!(quota.check(&store, &tags("a", "u")).await, Ok(()));
        }
        assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
        assert!(quota.check(&store, &tags("a", "u")).await.is_err());
        assert!(quota.spend(&store, &tags("a", "u")).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_allows_a_burst_of_one_period_and_then_its_pace() {
        let store = Memory::default();
        let quota = Quota::new(None, Some(QuotaLimit { most: 10, per: Duration::from_secs(1) }));
        let mut begun = 0;
        while quota.spend(&store, &tags("a", "u")).await.is_ok() {
            begun += 1;
        }
        assert_eq!(begun, 10);
        assert_eq!(quota.check(&store, &tags("a", "other")).await, Ok(()), "another user of the tenant");
        assert_eq!(quota.check(&store, &tags("a", "u")).await, Err(Duration::from_millis(100)));
        tokio::time::advance(Duration::from_millis(300)).await;
        for _ in 0..3 {
            assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
        }
        assert!(quota.spend(&store, &tags("a", "u")).await.is_err());
    }

    #[tokio::test]
    async fn made_up_tenants_do_not_fill_the_memory() {
        let store = Memory::default();
        let limit = QuotaLimit { most: 5, per: Duration::from_secs(3600) };
        let quota = Quota::new(Some(limit), Some(limit));
        const MOST: usize = 1 << 16;
        for n in 0..(MOST + 1000) {
            let _ = quota.spend(&store, &tags(&n.to_string(), "u")).await;
        }
        assert!(quota.new_keys.lock().len() <= MOST);
        assert!(quota.rates.lock().len() <= MOST + 1);
    }

    /// Starts operations of one user until the quota refuses, and counts them.
    async fn begins(quota: &Quota, store: &Memory, user: &str) -> u64 {
        let mut begun = 0;
        while quota.spend(store, &tags("a", user)).await.is_ok() {
            begun += 1;
        }
        begun
    }

    #[tokio::test(start_paused = true)]
    async fn another_limit_of_new_keys_counts_what_was_begun() {
        let hour = Duration::from_secs(3600);
        let (store, of) = (Memory::default(), |most| Some(QuotaLimit { most, per: hour }));
        let quota = Quota::new(of(300), None);
        assert_eq!(begins(&quota, &store, "u").await, 300);
        // A higher limit grants the difference only; a lower limit grants nothing.
        for (most, gets) in [(1000, 700), (1000, 0), (500, 0), (1200, 200), (1, 0), (1199, 0), (1201, 1)] {
            quota.set(of(most), None);
            assert_eq!(begins(&quota, &store, "u").await, gets, "{most}");
            assert_eq!(quota.check(&store, &tags("a", "u")).await, Err(hour), "{most}");
        }
        // Neither disabling the limit nor another window length grants a new allowance: the current window continues.
        quota.set(None, None);
        assert!(!quota.is_set());
        assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
        quota.set(of(1201), None);
        assert_eq!(begins(&quota, &store, "u").await, 0);
        quota.set(Some(QuotaLimit { most: 1201, per: hour / 60 }), None);
        tokio::time::advance(hour / 2).await;
        assert_eq!(quota.check(&store, &tags("a", "u")).await, Err(hour / 2));
        tokio::time::advance(hour / 2).await;
        assert_eq!(begins(&quota, &store, "u").await, 1201, "the next window");
        assert_eq!(quota.check(&store, &tags("a", "u")).await, Err(hour / 60), "is a short one");
    }

    #[tokio::test(start_paused = true)]
    async fn places_reserved_beyond_a_lower_limit_are_worth_nothing() {
        let (store, hour) = (Memory::default(), Duration::from_secs(3600));
        let quotas = [(); 2].map(|()| Quota::new(Some(QuotaLimit { most: 1000, per: hour }), None));
        // Each process reserves ten and spends one.
        for quota in &quotas {
            assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
            quota.set(Some(QuotaLimit { most: 12, per: hour }), None);
        }
        assert_eq!(begins(&quotas[1], &store, "u").await, 1, "places 12 to 20 are gone");
        assert_eq!(begins(&quotas[0], &store, "u").await, 9);
    }

    #[tokio::test(start_paused = true)]
    async fn another_rate_counts_what_was_begun() {
        let store = Memory::default();
        let second = Duration::from_secs(1);
        let of = |most, per| Some(QuotaLimit { most, per });
        let quota = Quota::new(None, of(10, second));
        assert_eq!(begins(&quota, &store, "u").await, 10);
        // A higher rate grants the difference only. A lower rate grants nothing, and the wait is for one token at most.
        for (most, gets) in [(25, 15), (25, 0), (5, 0)] {
            quota.set(None, of(most, second));
            assert_eq!(begins(&quota, &store, "u").await, gets, "{most}");
        }
        assert_eq!(quota.check(&store, &tags("a", "u")).await, Err(second / 5));
        quota.set(None, None);
        quota.set(None, of(5, second));
        assert_eq!(begins(&quota, &store, "u").await, 0, "off and on again");
        assert_eq!(begins(&quota, &store, "other").await, 5);
        quota.set(None, of(6, second * 60));
        assert_eq!(begins(&quota, &store, "u").await, 1);
        tokio::time::advance(second * 10).await;
        assert_eq!(begins(&quota, &store, "u").await, 1, "the pace of the new one");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_left_of_a_window_is_not_taken_into_the_next() {
        let (store, hour) = (Memory::default(), Duration::from_secs(3600));
        let quota = Quota::new(Some(QuotaLimit { most: 1000, per: hour }), None);
        assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
        tokio::time::advance(hour).await;
        assert_eq!(begins(&quota, &store, "u").await, 1000);
    }
}
