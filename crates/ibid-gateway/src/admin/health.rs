//! The health of the stores, probed on demand, and what still works if one of them is down. `/readyz`, the API and the
//! console all use it.
//!
//! A store that can be read may still refuse every new key: a read-only PostgreSQL, a Redis out of memory, a full disk.
//! So a probe reads an entry, and claims and releases a new key. Two stores are probed separately, because combined
//! calls would hide which of them is down.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::join_all;
use ibid::{
    Ibid,
    observe::StoreCall,
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, ErrorKind, Fingerprint, Guarantees, Lease, Settlement, Store,
        Tags,
    },
};
use ibid_stores::{StoreMember, StoreRole};
use serde_json::{Value, json};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

use crate::format::{format_date, now_ms};

#[derive(Debug, Clone)]
pub(crate) struct StoreHealth {
    pub(crate) guarantees: Guarantees,
    /// Why new keys are refused; `None` while they are granted.
    pub(crate) error: Option<String>,
    /// With two stores: which one is down, and what the other does without it.
    pub(crate) degraded: Option<String>,
    /// Whether new keys are granted, and by which store.
    pub(crate) can_claim: Works,
    /// Whether stored answers can be replayed, and from which store.
    pub(crate) replays: Works,
    /// Every store; the authority is the last.
    pub(crate) stores: Vec<StoreState>,
    /// Read latency of the authority; `None` if it is down.
    pub(crate) latency: Option<Duration>,
    /// Settlements that the store has not acknowledged yet.
    pub(crate) pending_settlements: u64,
    /// CSS class: `good`, `warn` or `bad`.
    pub(crate) css_class: &'static str,
    pub(crate) summary: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Works {
    /// With the authority.
    Full,
    /// With the front store (Redis) only.
    FrontOnly,
    None,
}

impl StoreHealth {
    pub(crate) async fn check(ibid: &Ibid, probes: &StoreProbes) -> Self {
        let engine = ibid.engine();
        let stores = probes.ask().await;
        let guarantees = engine.store().guarantees();
        let pending_settlements = engine.settle_queue().pending() as u64;
        let (front, authority) = match &stores[..] {
            [front, authority] => (Some(front), authority),
            [authority] => (None, authority),
            _ => unreachable!("a gateway has one store, or two"),
        };
        engine.observer().on_store_call(StoreCall::Get, authority.took);
        let can_claim = match front {
            _ if authority.claims => Works::Full,
            Some(front) if front.role == StoreRole::Front && front.claims => Works::FrontOnly,
            _ => Works::None,
        };
        let replays = match front {
            _ if authority.reads => Works::Full,
            Some(front) if front.reads => Works::FrontOnly,
            _ => Works::None,
        };
        let error = (can_claim == Works::None).then(|| why_refused(front, authority, replays));
        let degraded = if error.is_none() { front.and_then(|front| degraded(front, authority)) } else { None };
        let (css_class, summary) = match (pending_settlements, guarantees.warnings.is_empty()) {
            _ if error.is_some() && replays == Works::None => ("bad", "does not answer"),
            _ if error.is_some() => ("bad", "refuses new keys"),
            _ if degraded.is_some() => ("warn", "one of two is down"),
            (1.., _) => ("warn", "behind"),
            (0, false) => ("warn", "answers, promise weakened"),
            (0, true) => ("good", "answers"),
        };
        Self {
            guarantees,
            latency: authority.reads.then_some(authority.took),
            can_claim,
            replays,
            error,
            degraded,
            stores,
            pending_settlements,
            css_class,
            summary,
        }
    }

    /// The JSON of `/readyz` and `/api/store`. `url` returns a store's URL without its password, or `None` for callers
    /// who may not see it.
    pub(crate) fn to_json(&self, url: impl Fn(StoreRole) -> Option<String>) -> Value {
        let stores: Vec<Value> = self
            .stores
            .iter()
            .map(|store| {
                let mut shown = json!({
                    "name": store.name,
                    "role": store.role.name(),
                    "state": if store.is_up() { "up" } else { "down" },
                    "since": format_date(store.since_ms),
                    "claims": store.claims,
                    "reads": store.reads,
                    "last_error": store.last_error.as_ref().map(|error| json!({
                        "at": format_date(error.at_ms),
                        "text": error.text,
                    })),
                });
                if let Some(url) = url(store.role) {
                    shown["url"] = url.into();
                }
                shown
            })
            .collect();
        json!({
            "name": self.guarantees.store,
            "durable": self.guarantees.durable,
            "shared": self.guarantees.shared,
            "warnings": self.guarantees.warnings,
            "error": self.error,
            "degraded": self.degraded,
            "claims": self.can_claim.name(),
            "replays": self.replays.name(),
            "stores": stores,
            "waiting": self.pending_settlements,
        })
    }
}

impl Works {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::FrontOnly => "front-only",
            Self::None => "none",
        }
    }
}

/// Says why new keys are refused, and what still works.
fn why_refused(front: Option<&StoreState>, authority: &StoreState, replays: Works) -> String {
    let why = match front {
        None => authority.error().unwrap_or_default().to_owned(),
        Some(front) => {
            let down = [authority, front].into_iter().filter(|store| !store.is_up());
            let down: Vec<String> = down.map(is_down).collect();
            format!("new keys are refused: {}", down.join("; "))
        }
    };
    match (replays, front) {
        (Works::Full, _) => format!("{why}; finished answers are still replayed"),
        (Works::FrontOnly, Some(front)) => {
            format!("{why}; finished answers of which {} has a copy are still replayed", front.name)
        }
        (Works::FrontOnly | Works::None, _) => why,
    }
}

/// Says which of two stores is down, and what the other does without it.
fn degraded(front: &StoreState, authority: &StoreState) -> Option<String> {
    match (front.is_up(), authority.is_up()) {
        (true, true) => None,
        (false, _) => Some(format!("{}; {} decides alone", is_down(front), authority.name)),
        (true, false) => {
            let alone = "grants new keys alone, and their answers say degraded";
            Some(format!("{}; {} {alone}", is_down(authority), front.name))
        }
    }
}

fn is_down(store: &StoreState) -> String {
    format!("{} is down ({})", store.name, store.error().unwrap_or_default())
}

/// A store that takes longer to respond is down.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// A probe skips the claim if an earlier one was granted within this time.
const MIN_PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Lease and ttl of a probe's claim, in case its release fails.
const PROBE_LEASE: Duration = Duration::from_secs(5);
const PROBE_TTL: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub(crate) struct StoreState {
    /// `memory`, `embedded`, `redis` or `postgres`. The two stores of a gateway have different names.
    pub(crate) name: &'static str,
    pub(crate) role: StoreRole,
    /// Whether it grants new keys. Implies `reads`.
    pub(crate) claims: bool,
    /// Whether its entries can be read, and so replayed.
    pub(crate) reads: bool,
    /// When the gateway first saw the current state (up or down), in milliseconds since the Unix epoch.
    pub(crate) since_ms: u64,
    /// The latest failure, kept after recovery.
    pub(crate) last_error: Option<LastError>,
    pub(crate) took: Duration,
}

#[derive(Debug, Clone)]
pub(crate) struct LastError {
    pub(crate) at_ms: u64,
    pub(crate) text: String,
}

#[derive(Debug)]
pub(crate) struct StoreProbes(Vec<StoreProbe>);

/// Probes one store. Concurrent callers share one probe, and granted claims are at least a second apart.
#[derive(Debug)]
struct StoreProbe {
    name: &'static str,
    member: StoreMember,
    last: Mutex<Option<Found>>,
}

#[derive(Debug)]
struct Found {
    asked: Instant,
    granted: Option<Instant>,
    state: StoreState,
}

impl StoreState {
    pub(crate) fn is_up(&self) -> bool {
        self.claims
    }

    pub(crate) fn error(&self) -> Option<&str> {
        self.last_error.as_ref().filter(|_| !self.is_up()).map(|error| error.text.as_str())
    }
}

impl StoreProbes {
    pub(crate) fn new(members: Vec<StoreMember>) -> Self {
        let probe =
            |member: StoreMember| StoreProbe { name: member.store.guarantees().store, member, last: Mutex::default() };
        Self(members.into_iter().map(probe).collect())
    }

    pub(crate) async fn ask(&self) -> Vec<StoreState> {
        join_all(self.0.iter().map(StoreProbe::ask)).await
    }
}

impl StoreProbe {
    async fn ask(&self) -> StoreState {
        let wanted = Instant::now();
        let mut last = self.last.lock().await;
        // Another caller's probe started after this call.
        if let Some(found) = last.as_ref().filter(|found| found.asked >= wanted) {
            return found.state.clone();
        }
        let asked = Instant::now();
        let granted = last.as_ref().and_then(|found| found.granted).filter(|at| at.elapsed() < MIN_PROBE_INTERVAL);
        let store = &self.member.store;
        let read = async {
            let read = read(&**store).await;
            (read, asked.elapsed())
        };
        let claim = async {
            match granted {
                Some(at) => Ok(at),
                None => claim_and_release(store).await.map(|()| Instant::now()),
            }
        };
        let ((read, took), claimed) = tokio::join!(read, claim);
        let error = match (&read, &claimed) {
            (Err(why), _) => Some(why.clone()),
            (Ok(()), Err(why)) => Some(format!("new keys are refused: {why}")),
            (Ok(()), Ok(_)) => None,
        };
        let reads = read.is_ok();
        let before = last.as_ref().map(|found| &found.state);
        let state = StoreState {
            name: self.name,
            role: self.member.role,
            // The claim may have been granted before the store went down.
            claims: claimed.is_ok() && reads,
            reads,
            since_ms: match before {
                Some(before) if before.is_up() == error.is_none() => before.since_ms,
                _ => now_ms(),
            },
            last_error: match error {
                Some(text) => Some(LastError { at_ms: now_ms(), text }),
                None => before.and_then(|before| before.last_error.clone()),
            },
            took,
        };
        let granted = claimed.ok().filter(|_| reads);
        *last = Some(Found { asked, granted, state: state.clone() });
        state
    }
}

/// Reads an entry that does not exist.
async fn read(store: &dyn Store) -> Result<(), String> {
    match timeout(ANSWER_TIMEOUT, store.get(&Address([0; 32]))).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(why)) => Err(why.to_string()),
        Err(_) => Err(format!("no answer within {ANSWER_TIMEOUT:?}")),
    }
}

/// Claims a new random key, and releases it.
async fn claim_and_release(store: &Arc<dyn Store>) -> Result<(), String> {
    let mut address = [0; 32];
    address[..16].copy_from_slice(&ClaimToken::mint().0);
    address[16..].copy_from_slice(&ClaimToken::mint().0);
    let ask = Arc::new(ClaimRequest {
        address: Address(address),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint { version: 0, digest: [0; 32] },
        tags: Tags::new("", "", "readiness probe", ""),
        label: Bytes::new(),
        lease: PROBE_LEASE,
        ttl: PROBE_TTL,
        take_over: None,
    });
    let why = match timeout(ANSWER_TIMEOUT, store.claim(&ask)).await {
        Ok(Ok(ClaimOutcome::Granted(lease))) => {
            // If the release fails, the lease and the ttl end soon.
            let _ = timeout(ANSWER_TIMEOUT, store.settle(&lease, &Settlement::Release)).await;
            return Ok(());
        }
        Ok(Ok(other)) => return Err(format!("a key that was never used was not granted: {other:?}")),
        Ok(Err(why)) if why.kind != ErrorKind::Ambiguous => return Err(why.to_string()),
        Ok(Err(why)) => why.to_string(),
        Err(_) => format!("no answer within {ANSWER_TIMEOUT:?}"),
    };
    // The claim may have been granted. The caller does not wait for this release.
    let store = store.clone();
    tokio::spawn(async move {
        let _ = timeout(ANSWER_TIMEOUT, store.settle(&Lease::unseen(&ask), &Settlement::Release)).await;
    });
    Err(why)
}
