//! The last requests of this gateway, for the console, and why outcomes became unknown.
//!
//! Every core has a ring of [`ENTRIES_PER_CORE`] slots of a fixed size. A request is written with plain atomic stores:
//! no lock, no allocation, and no reading of the clock, which a task ([`RecentRequests::run_clock`]) reads instead. A
//! reader skips a slot that is written meanwhile. Until the task runs (without an admin port, never) nothing is
//! written.

use std::{
    collections::VecDeque,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
            fence,
        },
    },
    time::Duration,
};

use ibid::{RefusalReason, RequestOutcome, RequestReport, observe::EngineEvent, store::Address};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{all_outcomes, outcome_index};
use crate::{cores, format::now_ms};

const ENTRIES_PER_CORE: usize = 1024;
/// Memory does not grow with the number of cores beyond this.
const MAX_RINGS: usize = 8;
const CLOCK_INTERVAL: Duration = Duration::from_millis(50);
/// Longer paths are cut off.
const MAX_PATH_BYTES: usize = 104;
const MAX_METHOD_BYTES: usize = 8;
const MAX_KEY_BYTES: usize = 16;
const WORDS: usize = 26;
/// Unknown outcomes whose cause is kept.
const MAX_CAUSES: usize = 1000;

#[derive(Debug)]
pub struct RecentRequests {
    rings: Box<[RequestRing]>,
    /// Milliseconds since the Unix epoch; 0 until the task runs.
    clock_ms: AtomicU64,
    causes: Mutex<VecDeque<UnknownOutcome>>,
}

#[derive(Debug)]
struct RequestRing {
    written: AtomicU64,
    slots: Box<[RequestSlot]>,
}

/// `version` is odd while the words are written.
#[derive(Debug, Default)]
struct RequestSlot {
    version: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// A request as the console lists it.
#[derive(Debug, Clone, PartialEq)]
pub struct RecentRequest {
    pub at_ms: u64,
    pub method: String,
    pub path: String,
    /// Masked; empty without a key.
    pub key: String,
    pub outcome: RequestOutcome,
    /// As in [`RequestReport::status`].
    pub status: u16,
    pub took: Duration,
    pub client: Option<IpAddr>,
    pub address: Option<Address>,
}

/// Why the outcome of a record became unknown, as far as this gateway saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownOutcome {
    pub address: Address,
    pub at_ms: u64,
    pub cause: String,
}

impl Default for RecentRequests {
    fn default() -> Self {
        let ring = || RequestRing {
            written: AtomicU64::new(0),
            slots: (0..ENTRIES_PER_CORE).map(|_| RequestSlot::default()).collect(),
        };
        let rings = (0..cores::count().min(MAX_RINGS)).map(|_| ring()).collect();
        Self { rings, clock_ms: AtomicU64::new(0), causes: Mutex::default() }
    }
}

impl RecentRequests {
    /// Keeps the clock until the gateway stops.
    pub(crate) async fn run_clock(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        loop {
            self.clock_ms.store(now_ms(), Relaxed);
            tokio::select! {
                () = tokio::time::sleep(CLOCK_INTERVAL) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    pub(super) fn on_request(&self, request: &RequestReport<'_>) {
        let at_ms = self.clock_ms.load(Relaxed);
        if at_ms == 0 {
            return;
        }
        let ring = &self.rings[cores::index() % self.rings.len()];
        let number = ring.written.fetch_add(1, Relaxed);
        let slot = &ring.slots[number as usize % ENTRIES_PER_CORE];
        let version = slot.version.load(Relaxed) | 1;
        slot.version.store(version, Relaxed);
        fence(Release);
        for (word, value) in slot.words.iter().zip(encode(request, at_ms)) {
            word.store(value, Relaxed);
        }
        slot.version.store(version + 1, Release);
        self.note_cause(request, at_ms);
    }

    /// Rare: only requests whose outcome is unknown take the lock.
    fn note_cause(&self, request: &RequestReport<'_>, at_ms: u64) {
        let Some(address) = request.address else { return };
        let cause = match (request.outcome, request.status) {
            (RequestOutcome::Refused(RefusalReason::UpstreamTimeout), _) => "upstream timed out".to_owned(),
            (RequestOutcome::Unknown, 502) => "connection lost before the whole answer, or 502 from a proxy".into(),
            (RequestOutcome::Unknown, 504) => "504 from the app or a proxy".into(),
            (RequestOutcome::Unknown, status) => format!("the app answered {status}, listed in unknown_status"),
            _ => return,
        };
        self.push_cause(UnknownOutcome { address, at_ms, cause });
    }

    pub(super) fn on_event(&self, event: &EngineEvent<'_>) {
        let cause = match event {
            EngineEvent::LateAnswer { outcome: RequestOutcome::Unknown, .. } => {
                "upstream timed out, and no answer came during late_answer either"
            }
            EngineEvent::SettlementDropped(_) => "the result could not be saved in the store",
            _ => return,
        };
        if let EngineEvent::LateAnswer { address, .. } | EngineEvent::SettlementDropped(address) = event {
            self.push_cause(UnknownOutcome { address: **address, at_ms: now_ms(), cause: cause.to_owned() });
        }
    }

    fn push_cause(&self, cause: UnknownOutcome) {
        let mut causes = self.causes.lock();
        causes.retain(|known| known.address != cause.address);
        if causes.len() == MAX_CAUSES {
            causes.pop_front();
        }
        causes.push_back(cause);
    }

    /// Why the outcome at this address is unknown, if this gateway saw it.
    pub fn cause(&self, address: &Address) -> Option<UnknownOutcome> {
        self.causes.lock().iter().rev().find(|known| known.address == *address).cloned()
    }

    /// All requests that are still in the rings, newest first.
    pub fn latest(&self) -> Vec<RecentRequest> {
        let mut numbered: Vec<(u64, RecentRequest)> = Vec::new();
        for ring in &self.rings {
            let written = ring.written.load(Acquire);
            for number in written.saturating_sub(ENTRIES_PER_CORE as u64)..written {
                let read = ring.slots[number as usize % ENTRIES_PER_CORE].read();
                numbered.extend(read.and_then(|words| decode(&words)).map(|request| (number, request)));
            }
        }
        numbered.sort_by_key(|(number, request)| std::cmp::Reverse((request.at_ms, *number)));
        numbered.into_iter().map(|(_, request)| request).collect()
    }
}

impl RequestSlot {
    /// `None` while it is written.
    fn read(&self) -> Option<[u64; WORDS]> {
        let before = self.version.load(Acquire);
        let words = std::array::from_fn(|at| self.words[at].load(Relaxed));
        fence(Acquire);
        (before.is_multiple_of(2) && before > 0 && self.version.load(Relaxed) == before).then_some(words)
    }
}

/// Numbers first (time, duration, and outcome, status and lengths together), then the client's address as IPv6, the
/// address, and three texts.
fn encode(request: &RequestReport<'_>, at_ms: u64) -> [u64; WORDS] {
    let mut bytes = [0_u8; WORDS * 8];
    let (method, path, key) = (request.method.as_bytes(), request.path.as_bytes(), request.key.as_bytes());
    let (method, path) = (&method[..method.len().min(MAX_METHOD_BYTES)], &path[..path.len().min(MAX_PATH_BYTES)]);
    let key = &key[..key.len().min(MAX_KEY_BYTES)];
    bytes[..8].copy_from_slice(&at_ms.to_le_bytes());
    bytes[8..16].copy_from_slice(&(request.took.as_micros() as u64).to_le_bytes());
    bytes[16] = outcome_index(request.outcome) as u8;
    bytes[17..19].copy_from_slice(&request.status.to_le_bytes());
    bytes[19..22].copy_from_slice(&[method.len() as u8, path.len() as u8, key.len() as u8]);
    bytes[22] = u8::from(request.client_address.is_some());
    bytes[23] = u8::from(request.address.is_some());
    let client = match request.client_address {
        Some(IpAddr::V4(client)) => client.to_ipv6_mapped(),
        Some(IpAddr::V6(client)) => client,
        None => Ipv6Addr::UNSPECIFIED,
    };
    bytes[24..40].copy_from_slice(&client.octets());
    bytes[40..72].copy_from_slice(&request.address.map_or([0; 32], |address| address.0));
    bytes[72..72 + method.len()].copy_from_slice(method);
    bytes[80..80 + path.len()].copy_from_slice(path);
    bytes[184..184 + key.len()].copy_from_slice(key);
    std::array::from_fn(|at| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte])))
}

fn decode(words: &[u64; WORDS]) -> Option<RecentRequest> {
    let bytes: [u8; WORDS * 8] = std::array::from_fn(|at| words[at / 8].to_le_bytes()[at % 8]);
    let number = |from: usize| u64::from_le_bytes(std::array::from_fn(|at| bytes[from + at]));
    let text = |from: usize, length: u8, most: usize| {
        String::from_utf8_lossy(&bytes[from..from + usize::from(length).min(most)]).into_owned()
    };
    let octets: [u8; 16] = std::array::from_fn(|at| bytes[24 + at]);
    Some(RecentRequest {
        at_ms: number(0),
        took: Duration::from_micros(number(8)),
        outcome: *all_outcomes().get(usize::from(bytes[16]))?,
        status: u16::from_le_bytes([bytes[17], bytes[18]]),
        method: text(72, bytes[19], MAX_METHOD_BYTES),
        path: text(80, bytes[20], MAX_PATH_BYTES),
        key: text(184, bytes[21], MAX_KEY_BYTES),
        client: (bytes[22] == 1).then(|| IpAddr::V6(octets.into()).to_canonical()),
        address: (bytes[23] == 1).then(|| Address(std::array::from_fn(|at| bytes[40 + at]))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report<'a>(path: &'a str, outcome: RequestOutcome, status: u16) -> RequestReport<'a> {
        RequestReport {
            route: "*",
            method: "POST",
            path,
            key: "550e****0000",
            address: Some(Address([7; 32])),
            outcome,
            status,
            attempt: None,
            took: Duration::from_micros(1250),
            run_took: Duration::ZERO,
            client_address: Some([203, 0, 113, 7].into()),
            request_id: "r",
            user_agent: None,
            parts: None,
        }
    }

    #[test]
    fn what_is_written_is_read_again_newest_first_and_bounded() {
        let recent = RecentRequests::default();
        recent.on_request(&report("/before", RequestOutcome::Executed, 201));
        assert_eq!(recent.latest(), [], "nothing is kept until the clock runs");
        recent.clock_ms.store(1000, Relaxed);
        let long = format!("/{}", "x".repeat(500));
        recent.on_request(&report("/pay/1", RequestOutcome::Executed, 201));
        recent.clock_ms.store(2000, Relaxed);
        recent.on_request(&report(&long, RequestOutcome::Refused(RefusalReason::InProgress), 409));
        let [last, first] = &recent.latest()[..] else { panic!("two") };
        assert_eq!((first.at_ms, &*first.path, first.status), (1000, "/pay/1", 201));
        assert_eq!((&*first.method, &*first.key, first.took), ("POST", "550e****0000", Duration::from_micros(1250)));
        assert_eq!((first.client, first.address), (Some([203, 0, 113, 7].into()), Some(Address([7; 32]))));
        assert_eq!((last.path.len(), last.outcome.name()), (MAX_PATH_BYTES, "in-progress"));
        for _ in 0..3 * ENTRIES_PER_CORE {
            recent.on_request(&report("/pay/2", RequestOutcome::Replayed, 201));
        }
        assert_eq!(recent.latest().len(), ENTRIES_PER_CORE);
    }

    #[test]
    fn readers_see_no_half_written_request() {
        let recent = Arc::new(RecentRequests::default());
        recent.clock_ms.store(1, Relaxed);
        let writer = recent.clone();
        let writing = std::thread::spawn(move || {
            for number in 0..100_000_u32 {
                let status = 200 + (number % 300) as u16;
                writer.on_request(&report(&format!("/{status}"), RequestOutcome::Executed, status));
            }
        });
        while !writing.is_finished() {
            for request in recent.latest() {
                assert_eq!(request.path, format!("/{}", request.status));
            }
        }
        writing.join().unwrap();
    }

    #[test]
    fn the_cause_of_an_unknown_outcome_is_kept() {
        let recent = RecentRequests::default();
        recent.clock_ms.store(5, Relaxed);
        let address = Address([7; 32]);
        assert_eq!(recent.cause(&address), None);
        recent.on_request(&report("/pay", RequestOutcome::Refused(RefusalReason::UpstreamTimeout), 504));
        assert_eq!(recent.cause(&address).unwrap().cause, "upstream timed out");
        recent.on_event(&EngineEvent::LateAnswer { address: &address, outcome: RequestOutcome::Unknown });
        assert!(recent.cause(&address).unwrap().cause.contains("late_answer"));
        recent.on_request(&report("/pay", RequestOutcome::Unknown, 503));
        assert!(recent.cause(&address).unwrap().cause.contains("503"));
    }
}
