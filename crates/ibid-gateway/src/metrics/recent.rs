//! The last requests of this gateway, for the console; and why outcomes became unknown, for the notes in the store.
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

use ibid::{
    RefusalReason, RequestOutcome, RequestReport,
    observe::EngineEvent,
    store::{Address, Store},
};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::{all_outcomes, outcome_index};
use crate::{
    cores,
    format::now_ms,
    records::notes::{RecordNote, TimedText},
};

const ENTRIES_PER_CORE: usize = 1024;
/// Memory does not grow with the number of cores beyond this.
const MAX_RINGS: usize = 8;
const CLOCK_INTERVAL: Duration = Duration::from_millis(50);
/// Longer paths are cut off.
const MAX_PATH_BYTES: usize = 104;
const MAX_METHOD_BYTES: usize = 8;
const MAX_KEY_BYTES: usize = 16;
const WORDS: usize = 26;
/// Findings that wait to be written to the store. More are dropped.
const MAX_UNSAVED_FINDINGS: usize = 1000;

#[derive(Debug)]
pub struct RecentRequests {
    rings: Box<[RequestRing]>,
    /// Milliseconds since the Unix epoch; 0 until the task runs.
    clock_ms: AtomicU64,
    unsaved: Mutex<VecDeque<OutcomeFinding>>,
    has_unsaved: Notify,
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

/// What this gateway found out about an unknown outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OutcomeFinding {
    address: Address,
    /// Whether the app said so when it was asked, or this is why the outcome became unknown.
    is_probe: bool,
    told: TimedText,
}

impl Default for RecentRequests {
    fn default() -> Self {
        let ring = || RequestRing {
            written: AtomicU64::new(0),
            slots: (0..ENTRIES_PER_CORE).map(|_| RequestSlot::default()).collect(),
        };
        let rings = (0..cores::count().min(MAX_RINGS)).map(|_| ring()).collect();
        Self { rings, clock_ms: AtomicU64::new(0), unsaved: Mutex::default(), has_unsaved: Notify::new() }
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

    /// Writes findings to the store until the gateway stops.
    pub(crate) async fn save_findings(self: Arc<Self>, store: Arc<dyn Store>, mut stop: watch::Receiver<bool>) {
        loop {
            let stopping = tokio::select! {
                () = self.has_unsaved.notified() => false,
                _ = stop.wait_for(|stop| *stop) => true,
            };
            while let Some(found) = self.next_unsaved() {
                let OutcomeFinding { address, is_probe, told } = found;
                let saved = RecordNote::update(&*store, &address, |note| {
                    *(if is_probe { &mut note.probe } else { &mut note.cause }) = Some(told);
                });
                if let Err(why) = saved.await {
                    tracing::debug!(%why, "why an outcome is unknown could not be written to the store");
                }
            }
            if stopping {
                return;
            }
        }
    }

    fn next_unsaved(&self) -> Option<OutcomeFinding> {
        self.unsaved.lock().pop_front()
    }

    pub(super) fn on_request(&self, request: &RequestReport<'_>) {
        self.find_cause(request);
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
    }

    fn find_cause(&self, request: &RequestReport<'_>) {
        let cause = match (request.outcome, request.status) {
            (RequestOutcome::Refused(RefusalReason::UpstreamTimeout), _) => "upstream timed out".to_owned(),
            (RequestOutcome::Unknown, 502) => "connection lost before the whole answer, or 502 from a proxy".into(),
            (RequestOutcome::Unknown, 504) => "504 from the app or a proxy".into(),
            (RequestOutcome::Unknown, status) => format!("the app answered {status}, listed in unknown_status"),
            _ => return,
        };
        if let Some(address) = request.address {
            self.push(address, false, cause);
        }
    }

    pub(super) fn on_event(&self, event: &EngineEvent<'_>) {
        let (address, is_probe, text) = match event {
            EngineEvent::LateAnswer { address, outcome: RequestOutcome::Unknown } => {
                (address, false, "upstream timed out, and no answer came during late_answer either")
            }
            EngineEvent::SettlementDropped(address) => (address, false, "the result could not be saved in the store"),
            EngineEvent::Probed { address, happened: None } => (address, true, "the app does not know"),
            EngineEvent::Probed { address, happened: Some(true) } => (address, true, "it happened"),
            EngineEvent::Probed { address, happened: Some(false) } => (address, true, "it did not happen"),
            _ => return,
        };
        self.push(**address, is_probe, text.to_owned());
    }

    fn push(&self, address: Address, is_probe: bool, text: String) {
        let mut unsaved = self.unsaved.lock();
        if unsaved.len() < MAX_UNSAVED_FINDINGS {
            unsaved.push_back(OutcomeFinding { address, is_probe, told: TimedText { at_ms: now_ms(), text } });
            self.has_unsaved.notify_one();
        }
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

    #[tokio::test]
    async fn what_is_known_about_an_unknown_outcome_reaches_the_store() {
        let (recent, store) = (Arc::new(RecentRequests::default()), Arc::new(ibid::store::Memory::default()));
        let (address, (stop, stopping)) = (Address([7; 32]), watch::channel(false));
        let saver = tokio::spawn(recent.clone().save_findings(store.clone(), stopping));
        let timed_out = RequestOutcome::Refused(RefusalReason::UpstreamTimeout);
        let late = EngineEvent::LateAnswer { address: &address, outcome: RequestOutcome::Unknown };
        let steps: [(&dyn Fn(), &str); 3] = [
            (&|| recent.on_request(&report("/pay", timed_out, 504)), "upstream timed out"),
            (&|| recent.on_event(&late), "late_answer"),
            (&|| recent.on_request(&report("/pay", RequestOutcome::Unknown, 503)), "answered 503"),
        ];
        for (step, expected) in steps {
            step();
            let mut text = String::new();
            while !text.contains(expected) {
                tokio::task::yield_now().await;
                text = RecordNote::read(&*store, &address).await.unwrap().cause.map_or(String::new(), |told| told.text);
            }
        }
        recent.on_event(&EngineEvent::Probed { address: &address, happened: None });
        stop.send(true).unwrap();
        saver.await.unwrap();
        let note = RecordNote::read(&*store, &address).await.unwrap();
        assert_eq!(note.probe.unwrap().text, "the app does not know");
        assert!(note.cause.unwrap().text.contains("503"), "it stays");
    }
}
