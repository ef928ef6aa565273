//! How much a tenant may begin: new keys and bytes in a window, counted in the store, and a rate, counted here.
//!
//! Only a grant spends. A request is looked at before it claims, so that one that is over its quota leaves nothing
//! behind; but where nothing is left, the store is asked first whether the key is known: a retry is answered, not refused.
//!
//! Allowances are reserved in the store some at a time and spent here. What is reserved and not spent when a process ends is
//! lost to its tenant until the window ends: at most a hundredth of the quota per process. A store that cannot count
//! refuses nobody.
//!
//! How many bytes an answer takes is known when it is recorded. Then they are charged, whether any are left or not; the next new
//! key of a tenant who has none left is refused.

use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use self::{
    buckets::Buckets,
    places::{Places, Room},
};
use crate::store::{Address, Counters, Store, Tags, Windows};

mod buckets;
mod places;

/// At most so many new keys are reserved at a time.
const KEYS_AT_ONCE: u64 = 1000;
/// How often one request asks for more when others were faster.
const TRIES: u32 = 8;
/// Told to those who were not fast enough.
const SOON: Duration = Duration::from_secs(1);
/// Instants cannot be added to for ever.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

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
    /// Whether there is any limit, for all who need not look further.
    is_set: AtomicBool,
    /// Where the store has no counters.
    here: Windows,
    /// By tenant: what may be spent without asking the store.
    places: Mutex<Places>,
    /// The same, of bytes.
    bytes: Mutex<Places>,
    /// By tenant and user.
    buckets: Mutex<Buckets>,
}

impl Quota {
    /// New keys per tenant, and new keys per tenant and user at a time.
    pub fn new(new_keys: Option<Limit>, rate: Option<Limit>) -> Self {
        let quota = Self {
            is_set: AtomicBool::new(false),
            here: Windows::default(),
            places: Mutex::new(Places::new(KEYS_AT_ONCE)),
            bytes: Mutex::new(Places::new(u64::MAX)),
            buckets: Mutex::default(),
        };
        quota.set(new_keys, rate);
        quota
    }

    /// Other limits, from now on. What was begun under the old ones counts: nobody gets a new allowance by the change. A
    /// window that has begun ends when it would have.
    pub fn set(&self, new_keys: Option<Limit>, rate: Option<Limit>) {
        self.places.lock().set(new_keys.map(sound));
        self.buckets.lock().set(rate.map(sound));
        self.update_is_set();
    }

    /// How many bytes a tenant's new answers may take up in the store, from now on: what is recorded of each, with its headers and
    /// what operators see of it. As with [`set`](Self::set), what was recorded counts.
    pub fn set_bytes(&self, new_bytes: Option<Limit>) {
        self.bytes.lock().set(new_bytes.map(sound));
        self.update_is_set();
    }

    fn update_is_set(&self) {
        let (places, bytes, buckets) = (self.places.lock(), self.bytes.lock(), self.buckets.lock());
        let is_set = places.limit().or(bytes.limit()).or(buckets.rate()).is_some();
        self.is_set.store(is_set, Relaxed);
    }

    /// Whether anybody is limited.
    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Relaxed)
    }

    /// Whether one more may begin. `Err` says when to try again.
    pub(crate) async fn has_room(&self, store: &dyn Store, tags: &Tags) -> Result<(), Duration> {
        self.take(tags, false)?;
        self.is_left(&self.bytes, store, &bytes_of(tags)).await?;
        self.is_left(&self.places, store, &named(&[tags.tenant()])).await
    }

    async fn is_left(&self, places: &Mutex<Places>, store: &dyn Store, who: &Address) -> Result<(), Duration> {
        let room = places.lock().room(who, false);
        match room {
            Room::Free => Ok(()),
            Room::UsedUp(until) => Err(until),
            Room::Ask(some, window) => {
                self.reserve(places, store, who, some, window).await;
                match places.lock().room(who, false) {
                    Room::UsedUp(until) => Err(until),
                    // What others were faster to take can be asked for again, by the claim.
                    Room::Free | Room::Ask(..) => Ok(()),
                }
            }
        }
    }

    /// One has begun. `Err` if others were faster: it must not.
    pub(crate) async fn spend(&self, store: &dyn Store, tags: &Tags) -> Result<(), Duration> {
        // The rate first: what is taken of it in vain is back in a moment.
        self.take(tags, true)?;
        let who = named(&[tags.tenant()]);
        for _ in 0..=TRIES {
            let room = self.places.lock().room(&who, true);
            match room {
                Room::Free => return Ok(()),
                Room::UsedUp(until) => return Err(until),
                Room::Ask(some, window) => self.reserve(&self.places, store, &who, some, window).await,
            }
        }
        Err(SOON)
    }

    /// So many bytes were recorded.
    pub(crate) async fn recorded(&self, store: &dyn Store, tags: &Tags, bytes: u64) {
        let who = bytes_of(tags);
        let missing = self.bytes.lock().charge(&who, bytes);
        if missing == 0 {
            return;
        }
        let (limit, room) = {
            let mut bytes = self.bytes.lock();
            (bytes.limit(), bytes.room(&who, false))
        };
        let Some(Limit { per, .. }) = limit else { return };
        // With some for those who come next, if any are left.
        let more = if let Room::Ask(more, _) = room { more } else { 0 };
        self.reserve(&self.bytes, store, &who, missing.saturating_add(more), per).await;
        let _ = self.bytes.lock().charge(&who, missing);
    }

    async fn reserve(&self, places: &Mutex<Places>, store: &dyn Store, who: &Address, some: u64, window: Duration) {
        let counters = store.counters().unwrap_or(&self.here as &dyn Counters);
        let answer = counters.reserve(who, some, window).await;
        let mut places = places.lock();
        match answer {
            Ok(used) => places.reserved(who, some, used),
            Err(_) => places.uncounted(who),
        }
    }

    fn take(&self, tags: &Tags, spend: bool) -> Result<(), Duration> {
        let who = named(&[tags.tenant(), tags.user()]);
        self.buckets.lock().take(&who, spend)
    }
}

fn sound(limit: Limit) -> Limit {
    Limit { most: limit.most.max(1), per: limit.per.min(LONGEST) }
}

/// Where a tenant's bytes are counted.
fn bytes_of(tags: &Tags) -> Address {
    named(&["bytes", "", tags.tenant()])
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
        let (new_keys, new_bytes) = (self.places.lock().limit(), self.bytes.lock().limit());
        let rate = self.buckets.lock().rate();
        f.debug_struct("Quota")
            .field("new_keys", &new_keys)
            .field("new_bytes", &new_bytes)
            .field("rate", &rate)
            .finish_non_exhaustive()
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

    /// How many answers of this size a tenant may record before it is refused.
    async fn records(quota: &Quota, store: &Memory, bytes: u64) -> u64 {
        let mut recorded = 0;
        while recorded < 10_000 && quota.has_room(store, &tags("a", "u")).await.is_ok() {
            assert_eq!(quota.spend(store, &tags("a", "u")).await, Ok(()));
            quota.recorded(store, &tags("a", "u"), bytes).await;
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
            quota.set_bytes(Some(Limit { most: 1000, per: hour }));
            assert!(quota.is_set());
            assert_eq!(records(&quota, &store, bytes).await, answers, "of {bytes} bytes");
            let other = Quota::new(None, None);
            other.set_bytes(Some(Limit { most: 1000, per: hour }));
            assert_eq!(other.has_room(&store, &tags("a", "u")).await, Err(hour), "another gateway knows it");
            assert_eq!(quota.has_room(&store, &tags("b", "u")).await, Ok(()), "another tenant");
            // What ran meanwhile is recorded and counted all the same.
            quota.recorded(&store, &tags("a", "u"), 10_000).await;
            quota.set_bytes(Some(Limit { most: 10_000, per: hour }));
            assert!(records(&quota, &store, 1).await <= 10, "what was recorded counts under another limit");
            tokio::time::advance(hour).await;
            assert_eq!(quota.has_room(&store, &tags("a", "u")).await, Ok(()), "another window");
            quota.set_bytes(None);
            assert!(!quota.is_set());
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
        assert!(quota.places.lock().len() <= MOST);
        assert!(quota.buckets.lock().len() <= MOST + 1);
    }

    /// How many the tenant may begin at once, by one of its users.
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
        let (store, of) = (Memory::default(), |most| Some(Limit { most, per: hour }));
        let quota = Quota::new(of(300), None);
        assert_eq!(begins(&quota, &store, "u").await, 300);
        // More: only the difference, to the last one. Less: nothing.
        for (most, gets) in [(1000, 700), (1000, 0), (500, 0), (1200, 200), (1, 0), (1199, 0), (1201, 1)] {
            quota.set(of(most), None);
            assert_eq!(begins(&quota, &store, "u").await, gets, "{most}");
            assert_eq!(quota.has_room(&store, &tags("a", "u")).await, Err(hour), "{most}");
        }
        // Neither by turning it off and on again, nor by another window, for the one that has begun goes on.
        quota.set(None, None);
        assert!(!quota.is_set());
        assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
        quota.set(of(1201), None);
        assert_eq!(begins(&quota, &store, "u").await, 0);
        quota.set(Some(Limit { most: 1201, per: hour / 60 }), None);
        tokio::time::advance(hour / 2).await;
        assert_eq!(quota.has_room(&store, &tags("a", "u")).await, Err(hour / 2));
        tokio::time::advance(hour / 2).await;
        assert_eq!(begins(&quota, &store, "u").await, 1201, "the next window");
        assert_eq!(quota.has_room(&store, &tags("a", "u")).await, Err(hour / 60), "is a short one");
    }

    #[tokio::test(start_paused = true)]
    async fn places_reserved_beyond_a_lower_limit_are_worth_nothing() {
        let (store, hour) = (Memory::default(), Duration::from_secs(3600));
        let quotas = [(); 2].map(|()| Quota::new(Some(Limit { most: 1000, per: hour }), None));
        // Each has ten, of which it spends one.
        for quota in &quotas {
            assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
            quota.set(Some(Limit { most: 12, per: hour }), None);
        }
        assert_eq!(begins(&quotas[1], &store, "u").await, 1, "places 12 to 20 are gone");
        assert_eq!(begins(&quotas[0], &store, "u").await, 9);
    }

    #[tokio::test(start_paused = true)]
    async fn another_rate_counts_what_was_begun() {
        let store = Memory::default();
        let second = Duration::from_secs(1);
        let of = |most, per| Some(Limit { most, per });
        let quota = Quota::new(None, of(10, second));
        assert_eq!(begins(&quota, &store, "u").await, 10);
        // More: only the difference. Less: nothing, and no longer a wait than for one.
        for (most, gets) in [(25, 15), (25, 0), (5, 0)] {
            quota.set(None, of(most, second));
            assert_eq!(begins(&quota, &store, "u").await, gets, "{most}");
        }
        assert_eq!(quota.has_room(&store, &tags("a", "u")).await, Err(second / 5));
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
        let quota = Quota::new(Some(Limit { most: 1000, per: hour }), None);
        assert_eq!(quota.spend(&store, &tags("a", "u")).await, Ok(()));
        tokio::time::advance(hour).await;
        assert_eq!(begins(&quota, &store, "u").await, 1000);
    }
}
