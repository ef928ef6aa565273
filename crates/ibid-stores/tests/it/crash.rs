//! Crash images: a workload is run once on a disk that remembers every operation, then the power goes after each of
//! them, in several ways, and what is left is opened and questioned.
//!
//! What must hold in each image: what was acknowledged before the power went is there, byte for byte, until it expires;
//! what was asked but not answered is there or not; nothing else is. Nobody is granted what somebody may have run.
//!
//! The short form is part of the tests; `IBID_CRASH_IMAGES=10000 cargo test -p ibid-stores --release crash_images --
//! --nocapture` makes at least so many, and prints how many there were.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::join_all;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Lease, RecordSummary, SettleOutcome, Settlement,
    Store, StoreError, Tags,
};
use ibid_stores::embedded::{Embedded, EmbeddedOptions, TimeSource};

use crate::{
    sim_disk::{DiskRandom, SimDisk, SimDiskFaults},
    small,
};

pub(crate) const MINUTE: Duration = Duration::from_secs(60);
const LEASE: Duration = MINUTE;

/// A clock that stands still until it is set.
#[derive(Debug, Clone)]
pub(crate) struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    pub(crate) fn at(micros: u64) -> Self {
        Self(Arc::new(AtomicU64::new(micros)))
    }

    pub(crate) fn source(&self) -> TimeSource {
        let hands = self.0.clone();
        TimeSource::new(move || Duration::from_micros(hands.load(SeqCst)))
    }

    pub(crate) fn now(&self) -> u64 {
        self.0.load(SeqCst)
    }

    pub(crate) fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_micros() as u64, SeqCst);
    }
}

/// What is known about a key after a step.
#[derive(Debug, Clone, PartialEq)]
enum KnownState {
    Nothing,
    /// Granted, or parked.
    OutcomeUnknown(Lease),
    /// Granted, but nobody heard.
    GrantedUnacknowledged,
    Completed(Lease, Bytes),
    TokenSpent(Arc<ClaimRequest>),
}

/// One step of a key's life: when it was asked and answered, in operations of the disk, and what holds then.
#[derive(Debug)]
struct LifeStep {
    requested_at: usize,
    answered_at: Option<usize>,
    known: KnownState,
    /// When it stops to hold.
    valid_until: u64,
}

#[derive(Debug)]
struct KeyLife {
    address: Address,
    steps: Vec<LifeStep>,
}

struct DiskHistory {
    disk: SimDisk,
    lives: Vec<KeyLife>,
    /// From which operation on it was what time.
    times: Vec<(usize, u64)>,
}

struct CrashWorkload<'a> {
    disk: &'a SimDisk,
    store: &'a Embedded,
    clock: &'a ManualClock,
}

impl CrashWorkload<'_> {
    async fn step<F: Future<Output = Result<T, StoreError>>, T>(
        &self, life: &mut KeyLife, keep: Duration, unheard: KnownState, call: impl FnOnce() -> F,
        known: impl FnOnce(T) -> KnownState,
    ) -> bool {
        let (asked, until) = (self.disk.position(), self.clock.now() + keep.as_micros() as u64);
        let answer = call().await;
        let answered = answer.is_ok().then(|| self.disk.position());
        let heard = answer.is_ok();
        let known = answer.map_or(unheard, known);
        life.steps.push(LifeStep { requested_at: asked, answered_at: answered, known, valid_until: until });
        heard
    }

    /// One key's life, chosen by its number.
    async fn run_key_life(&self, nth: usize) -> KeyLife {
        let mut dice = DiskRandom(nth as u64);
        let mut life = KeyLife { address: address(nth), steps: Vec::new() };
        let keep = if nth % 6 == 3 { MINUTE * 60 * 24 * 7 } else { MINUTE * 5 };
        let ask = Arc::new(ask(life.address, keep));
        let granted = |found| match found {
            ClaimOutcome::Granted(lease) => KnownState::OutcomeUnknown(lease),
            other => panic!("a fresh key found {other:?}"),
        };
        if !self
            .step(&mut life, LEASE + keep, KnownState::GrantedUnacknowledged, || self.store.claim(&ask), granted)
            .await
        {
            return life;
        }
        let KnownState::OutcomeUnknown(lease) = life.steps[0].known.clone() else { unreachable!("it was granted") };
        let held = |known: &KnownState| {
            let known = known.clone();
            move |held| {
                assert_eq!(held, SettleOutcome::Applied);
                known
            }
        };
        if nth % 4 == 1 {
            let known = KnownState::OutcomeUnknown(lease.clone());
            let call = || self.store.extend(&lease, LEASE);
            if !self.step(&mut life, LEASE + keep, known.clone(), call, held(&known)).await {
                return life;
            }
        }
        let record: Bytes = (0..dice.below(4000)).map(|at| (at * 7 + nth) as u8).collect();
        let complete = Settlement::Complete {
            failed: false,
            record: record.clone(),
            summary: RecordSummary::default(),
            ttl: keep,
        };
        let (end, known, kept) = match nth % 7 {
            0 => return life,
            1 => (Settlement::Release, KnownState::TokenSpent(ask.clone()), MINUTE),
            2 => (Settlement::Park { ttl: keep, retry_in: MINUTE }, KnownState::OutcomeUnknown(lease.clone()), keep),
            _ => (complete, KnownState::Completed(lease.clone(), record), keep),
        };
        self.step(&mut life, kept, known.clone(), || self.store.settle(&lease, &end), held(&known)).await;
        life
    }
}

/// Runs a workload in which segments are filled, emptied and recycled.
fn run(rounds: usize, faults: SimDiskFaults) -> DiskHistory {
    run_with_pauses(rounds, faults, Duration::ZERO)
}

fn run_with_pauses(rounds: usize, faults: SimDiskFaults, pause: Duration) -> DiskHistory {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let disk = SimDisk::default();
    disk.set_faults(faults);
    let hands = ManualClock::at(1_800_000_000_000_000);
    let options = EmbeddedOptions { time: hands.source(), ..small() };
    let store = Embedded::open_on(Arc::new(disk.clone()), options).unwrap();
    let workload = CrashWorkload { disk: &disk, store: &store, clock: &hands };
    let mut history = DiskHistory { disk: disk.clone(), lives: Vec::new(), times: vec![(0, hands.now())] };
    for round in 0..rounds {
        let lives = runtime.block_on(join_all((0..8).map(|nth| workload.run_key_life(round * 8 + nth))));
        history.lives.extend(lives);
        hands.advance(MINUTE * 3);
        history.times.push((disk.position(), hands.now()));
        runtime.block_on(store.sweep(1000)).unwrap();
        std::thread::sleep(pause);
    }
    drop(store);
    history
}

impl DiskHistory {
    fn time_at(&self, position: usize) -> u64 {
        self.times.iter().rev().find(|(from, _)| *from <= position).unwrap().1
    }

    /// Opens what is left of the disk and questions it.
    fn check(&self, image: &SimDisk, position: usize) {
        let now = self.time_at(position);
        let open = || {
            let options = EmbeddedOptions { time: ManualClock::at(now).source(), ..small() };
            Embedded::open_on(Arc::new(image.clone()), options).unwrap()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for _ in 0..2 {
            let store = open();
            assert_eq!(store.report().found, [], "a crash is no corruption");
            for life in &self.lives {
                runtime.block_on(life.check(&store, position, now));
            }
            // And it goes on.
            let fresh = Arc::new(ask(address(usize::MAX), MINUTE));
            let found = runtime.block_on(store.claim(&fresh)).unwrap();
            let ClaimOutcome::Granted(lease) = found else { panic!("a fresh key found {found:?}") };
            assert_eq!(runtime.block_on(store.settle(&lease, &Settlement::Release)).unwrap(), SettleOutcome::Applied);
        }
    }
}

impl KeyLife {
    async fn check(&self, store: &Embedded, position: usize, now: u64) {
        let last = self.steps.iter().rposition(|step| step.answered_at.is_some_and(|answered| answered <= position));
        let known = |step: &LifeStep| match step.known.clone() {
            known if now < step.valid_until => vec![known],
            // Nobody wrote anything since it expired: it is kept for those who could not ask in the meantime.
            known @ (KnownState::OutcomeUnknown(_) | KnownState::GrantedUnacknowledged) => {
                vec![KnownState::Nothing, known]
            }
            _ => vec![KnownState::Nothing],
        };
        let mut possible = last.map_or(vec![KnownState::Nothing], |nth| known(&self.steps[nth]));
        // Asked, and not answered when the power went.
        let next = self.steps.get(last.map_or(0, |nth| nth + 1)).filter(|step| step.requested_at < position);
        possible.extend(next.into_iter().flat_map(known));
        let found = store.get(&self.address).await.unwrap();
        let mut fits = possible.iter().filter(|known| known.matches(found.as_ref()));
        let Some(known) = fits.next() else {
            panic!("at operation {position} {} was {found:?}, and may be {possible:?}", self.address);
        };
        let rival = Arc::new(ask(self.address, MINUTE));
        if found.is_some() {
            let found = store.claim(&rival).await.unwrap();
            assert!(!matches!(found, ClaimOutcome::Granted(_)), "a second run of {known:?}");
        }
        if let ([KnownState::TokenSpent(ask)], true) = (&possible[..], found.is_none()) {
            assert_eq!(store.claim(ask).await.unwrap(), ClaimOutcome::TokenSpent);
        }
    }
}

impl KnownState {
    fn matches(&self, found: Option<&ClaimOutcome>) -> bool {
        match (self, found) {
            (Self::Nothing | Self::TokenSpent(_), None)
            | (Self::GrantedUnacknowledged, Some(ClaimOutcome::OutcomeUnknown(_))) => true,
            (Self::OutcomeUnknown(lease), Some(ClaimOutcome::OutcomeUnknown(holder))) => holder.fence == lease.fence,
            (Self::Completed(lease, record), Some(ClaimOutcome::Completed(done))) => {
                done.fence == lease.fence && done.record == record && done.fingerprint == lease.request.fingerprint
            }
            _ => false,
        }
    }
}

pub(crate) fn address(nth: usize) -> Address {
    let mut address = [0x3c; 32];
    address[..8].copy_from_slice(&(nth as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    Address(address)
}

pub(crate) fn ask(address: Address, keep: Duration) -> ClaimRequest {
    ClaimRequest {
        address,
        token: ClaimToken::mint(),
        fingerprint: Fingerprint { version: 1, digest: address.0 },
        tags: Tags::new("acme", "", "POST /payments", "k"),
        label: Bytes::from_static(b"label"),
        lease: LEASE,
        ttl: keep,
        take_over: None,
    }
}

fn seed_count(otherwise: usize) -> usize {
    std::env::var("IBID_CRASH_IMAGES").map_or(otherwise, |number| number.parse().expect("IBID_CRASH_IMAGES: a number"))
}

/// The power goes after every single operation of the disk.
#[test]
fn crash_images_lose_nothing_that_was_acknowledged() {
    let mut images = 0;
    let wanted = seed_count(600);
    let history = run(if wanted > 5000 { 24 } else { 12 }, SimDiskFaults::default());
    let positions = history.disk.position();
    let seeds = (wanted / positions).max(1) as u64 + 1;
    for position in 0..=positions {
        for seed in 0..seeds {
            // Few per place: let them not all be the two extremes.
            let seed = if seeds < 4 { seed + position as u64 % 5 } else { seed };
            history.check(&history.disk.image(position, seed), position);
            images += 1;
        }
    }
    println!("{images} crash images of {positions} disk operations");
}

/// In the pauses the keeper moves what lives on out of segments that are mostly dead.
#[test]
fn crash_images_while_stragglers_are_moved_lose_nothing_that_was_acknowledged() {
    let history = run_with_pauses(12, SimDiskFaults::default(), Duration::from_millis(250));
    let lane_of = |name: &String| history.disk.bytes(name).get(4096 + 40).copied();
    assert!(history.disk.names().iter().any(|name| lane_of(name) == Some(1)), "something was moved");
    let wanted = seed_count(300) / 2;
    let mut dice = DiskRandom(11);
    for image in 0..wanted {
        let position = dice.below(history.disk.position() + 1);
        history.check(&history.disk.image(position, image as u64), position);
    }
    println!("{wanted} crash images of {} disk operations while stragglers are moved", history.disk.position());
}

/// A sync fails, then perhaps another one; then the power goes.
#[test]
fn crash_images_after_failed_syncs_lose_nothing_that_was_acknowledged() {
    let clean = run(6, SimDiskFaults::default()).disk.syncs();
    let wanted = seed_count(300) / 2;
    let mut images = 0;
    let mut dice = DiskRandom(7);
    // The first syncs are those of opening.
    let runs = 20.min(wanted / 10).max(5);
    for nth in 0..runs {
        let first = 4 + nth * (clean - 4) / runs;
        let mut syncs = HashSet::from([first]);
        if nth % 2 == 1 {
            syncs.extend(first..first + 3);
        }
        let history = run(6, SimDiskFaults { syncs, ..SimDiskFaults::default() });
        for image in 0..wanted / runs + 1 {
            let position = dice.below(history.disk.position() + 1);
            history.check(&history.disk.image(position, image as u64), position);
            images += 1;
        }
    }
    println!("{images} crash images after failed syncs");
}
