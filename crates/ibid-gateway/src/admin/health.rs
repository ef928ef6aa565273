//! Whether the stores do their work, and what still works if one of them does not: the same for `/readyz`, the API and the
//! console.

use std::time::Duration;

use ibid::{Ibid, StoreCall};
use ibid_stores::StoreRole;
use serde_json::{Value, json};

use super::store_state::{StoreProbes, StoreState};
use crate::records::view::format_date;

/// How the store is.
#[derive(Debug, Clone)]
pub(crate) struct StoreHealth {
    pub(crate) name: &'static str,
    pub(crate) durable: bool,
    pub(crate) shared: bool,
    /// What start-up found.
    pub(crate) warnings: Vec<String>,
    /// Why it cannot be used now.
    pub(crate) error: Option<String>,
    /// Of two stores: which is down, and what the other does without it.
    pub(crate) degraded: Option<String>,
    /// Whether new keys are granted, and by which store.
    pub(crate) can_claim: Works,
    /// Whether what is stored can be replayed, and from which store.
    pub(crate) replays: Works,
    /// Each store, the one that decides last.
    pub(crate) stores: Vec<StoreState>,
    /// How long the one that decides took to answer.
    pub(crate) latency: Option<Duration>,
    /// Ends that it has not taken yet.
    pub(crate) pending_settlements: u64,
    /// As a class: `good`, `warn` or `bad`.
    pub(crate) css_class: &'static str,
    /// In a word.
    pub(crate) summary: &'static str,
}

/// How much of something works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Works {
    /// With the store that decides.
    Full,
    /// With the Redis in front of it alone.
    FrontOnly,
    None,
}

impl StoreHealth {
    /// Asks every store.
    pub(crate) async fn check(ibid: &Ibid, probes: &StoreProbes) -> Self {
        let engine = ibid.engine();
        let stores = probes.ask().await;
        let promise = engine.store().guarantees();
        let waiting = engine.settle_queue().pending() as u64;
        let (front, authority) = match &stores[..] {
            [front, authority] => (Some(front), authority),
            [authority] => (None, authority),
            _ => unreachable!("a gateway has one store, or two"),
        };
        engine.observer().asked(StoreCall::Get, authority.took);
        let claims = match front {
            _ if authority.claims => Works::Full,
            Some(front) if front.role == StoreRole::Front && front.claims => Works::FrontOnly,
            _ => Works::None,
        };
        let replays = match front {
            _ if authority.reads => Works::Full,
            Some(front) if front.reads => Works::FrontOnly,
            _ => Works::None,
        };
        let trouble = (claims == Works::None).then(|| trouble(front, authority, replays));
        let degraded = if trouble.is_none() { front.and_then(|front| degraded(front, authority)) } else { None };
        let (kind, word) = match (waiting, promise.warnings.is_empty()) {
            _ if trouble.is_some() && replays == Works::None => ("bad", "does not answer"),
            _ if trouble.is_some() => ("bad", "refuses new keys"),
            _ if degraded.is_some() => ("warn", "one of two is down"),
            (1.., _) => ("warn", "behind"),
            (0, false) => ("warn", "answers, promise weakened"),
            (0, true) => ("good", "answers"),
        };
        Self {
            name: promise.store,
            durable: promise.durable,
            shared: promise.shared,
            warnings: promise.warnings,
            latency: authority.reads.then_some(authority.took),
            can_claim: claims,
            replays,
            error: trouble,
            degraded,
            stores,
            pending_settlements: waiting,
            css_class: kind,
            summary: word,
        }
    }

    /// Whether new keys are granted.
    pub(crate) fn is_healthy(&self) -> bool {
        self.error.is_none()
    }

    /// For programs: `/readyz` and `/api/store` say the same. `url` gives a store's, without its password, to those who
    /// may see it.
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
            "name": self.name,
            "durable": self.durable,
            "shared": self.shared,
            "warnings": self.warnings,
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

/// Why new keys are refused, and what is left.
fn trouble(front: Option<&StoreState>, authority: &StoreState, replays: Works) -> String {
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

/// Which of two stores is down, and what the other does without it.
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
