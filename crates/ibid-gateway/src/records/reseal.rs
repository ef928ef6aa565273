//! Remembered answers under the first key: some at a time, each by a compare-and-set, beside gateways that run.
//!
//! It can be broken off and started again at any time: what has the first key already is left as it is.

use std::{collections::BTreeMap, time::Duration};

use futures_util::future::join_all;
use ibid::store::{Address, Cursor, ErrorKind, Filter, Listed, State, StoreError};
use ibid_stores::seal::{Resealed as One, Sealed, sealed_with};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// How many are resealed at the same time: enough that a server is not waited for one by one, too few for gateways beside
/// to notice.
const AT_ONCE: usize = 16;
/// How many that do not open are named.
const NAMED: usize = 20;

/// What was found and done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resealed {
    /// The name of the key that seals.
    pub key: String,
    /// Entries that were looked at, in whatever state they are.
    pub looked: u64,
    /// Records that have that key now and had another, or none.
    pub resealed: u64,
    /// The same by the key that they had; those under the empty name had none.
    pub from: BTreeMap<String, u64>,
    /// Had that key already.
    pub current: u64,
    /// Gone, or changed by somebody else, between being listed and being sealed.
    pub changed: u64,
    /// Not opened, so left as they are.
    pub unopened: u64,
    /// The first [`NAMED`] of those.
    pub unopened_at: Vec<Unopened>,
    /// Entries whose label has another key: it stays so until they expire.
    pub older_labels: u64,
    /// Where to go on. `None` at the end.
    pub next: Option<String>,
}

/// A record that did not open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unopened {
    /// Where it is.
    pub address: String,
    /// Why.
    pub why: String,
}

impl Resealed {
    /// Looks at entries behind `from`, at most so many and for about that long, and seals with the first key what has
    /// another. What was done is counted here, and stays done if the store fails on the way.
    ///
    /// # Errors
    /// If the store fails. `next` then says where this began.
    pub async fn some(
        &mut self, sealed: &Sealed, from: Option<Address>, at_most: u32, lasts: Duration,
    ) -> Result<(), StoreError> {
        self.key = sealed.first_key();
        self.next = from.map(|from| from.to_string());
        let begun = Instant::now();
        let page = sealed.beneath().operators().list(&Filter::default(), Cursor(from), at_most).await?;
        let mut last = None;
        for some in page.entries.chunks(AT_ONCE) {
            if let Some(last) = last
                && begun.elapsed() >= lasts
            {
                self.next = Some(Address::to_string(last));
                return Ok(());
            }
            self.each(sealed, some).await?;
            last = some.last().map(|listed| &listed.address);
        }
        // A cursor that stands still would never end.
        let next = page.next.and_then(|next| next.0).filter(|next| Some(*next) > from);
        self.next = next.map(|next| next.to_string());
        Ok(())
    }

    async fn each(&mut self, sealed: &Sealed, some: &[Listed]) -> Result<(), StoreError> {
        let finished = some.iter().filter(|listed| matches!(listed.state, State::Done | State::Failed));
        let finished: Vec<&Address> = finished.map(|listed| &listed.address).collect();
        let done = join_all(finished.iter().map(|at| sealed.reseal(at))).await;
        let mut failed = None;
        for (at, done) in finished.into_iter().zip(done) {
            match done {
                Ok(One::Done { from }) => {
                    self.resealed += 1;
                    *self.from.entry(from.unwrap_or_default()).or_default() += 1;
                }
                Ok(One::Current) => self.current += 1,
                Ok(One::Gone) => self.changed += 1,
                Err(error) if error.kind == ErrorKind::Corrupt => {
                    let why = error.source.to_string();
                    self.name(Unopened { address: at.to_string(), why });
                    self.unopened += 1;
                }
                Err(error) => failed = Some(error),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let other_key = |listed: &&Listed| sealed_with(&listed.label).is_some_and(|key| key != self.key);
        self.older_labels += some.iter().filter(other_key).count() as u64;
        self.looked += some.len() as u64;
        Ok(())
    }

    fn name(&mut self, unopened: Unopened) {
        if self.unopened_at.len() < NAMED {
            self.unopened_at.push(unopened);
        }
    }

    /// Adds what came after it.
    pub fn add(&mut self, more: Self) {
        let Self { key, looked, resealed, from, current, changed, unopened, unopened_at, older_labels, next } = more;
        (self.key, self.next) = (key, next);
        self.looked += looked;
        self.resealed += resealed;
        self.current += current;
        self.changed += changed;
        self.unopened += unopened;
        self.older_labels += older_labels;
        from.into_iter().for_each(|(key, count)| *self.from.entry(key).or_default() += count);
        unopened_at.into_iter().for_each(|unopened| self.name(unopened));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use ibid::store::{Ask, Claim, End, Fingerprint, Memory, Outline, Store, Tags, Token};
    use ibid_stores::seal::{Rules, SealKey, Sealing};
    use ibid_testkit::wrappers::{Calls, Delays};

    use super::*;

    async fn filled(entries: u8) -> (Sealed, Arc<Delays<Memory>>) {
        let store = Arc::new(Delays::new(Memory::default()));
        let key = |id: &str, byte| SealKey::new(id, [byte; 32]).unwrap();
        let sealing = Sealing::new(key("old", 1), Vec::new(), &[9; 32], Rules::default());
        let sealed = Sealed::new(store.clone(), sealing.clone(), Arc::new(ibid::Silent));
        for at in 0..entries {
            let ask = Ask {
                address: Address([at; 32]),
                token: Token::mint(),
                fingerprint: Fingerprint::NONE,
                tags: Tags::new("acme", "u", "POST /pay", "k"),
                label: Bytes::new(),
                hold: Duration::from_secs(5),
                keep: Duration::from_secs(6000),
                over: None,
            };
            let Ok(Claim::Granted(lease)) = Store::claim(&sealed, &Arc::new(ask)).await else { panic!("it is free") };
            let (record, outline, keep) = (Bytes::from_static(b"r"), Outline::default(), Duration::from_secs(6000));
            let end = End::Complete { failed: false, record, outline, keep };
            assert!(Store::settle(&sealed, &lease, &end).await.is_ok());
        }
        sealing.rekey(key("new", 2), vec![key("old", 1)], Rules::default());
        (sealed, store)
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_store_ends_it_early_and_the_next_goes_on_behind() {
        let (sealed, store) = filled(100).await;
        store.delay(Calls::All, Duration::from_secs(1), Duration::ZERO);
        let (mut sum, mut from, mut times) = (Resealed::default(), None, 0);
        loop {
            let mut done = Resealed::default();
            done.some(&sealed, from, 1000, Duration::from_secs(4)).await.unwrap();
            assert!(done.looked > 0 && times < 100, "each comes further: {done:?}");
            times += 1;
            from = done.next.as_deref().and_then(Address::from_hex);
            sum.add(done);
            if from.is_none() {
                break;
            }
        }
        assert!(times > 2, "{times}");
        assert_eq!(
            (sum.looked, sum.resealed, sum.current, sum.older_labels),
            (100, 100, 0, 100),
            "none twice: {sum:?}"
        );
        store.heal();
        let mut again = Resealed::default();
        again.some(&sealed, None, 1000, Duration::MAX).await.unwrap();
        assert_eq!((again.current, again.resealed, again.next), (100, 0, None));
    }
}
