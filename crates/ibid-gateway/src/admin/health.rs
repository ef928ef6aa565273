//! The health of the stores, and what still works if one of them is down. `/readyz`, the API and the console all use
//! it.

use std::time::Duration;

use ibid::{Ibid, observe::StoreCall, store::Guarantees};
use ibid_stores::StoreRole;
use serde_json::{Value, json};

use super::store_state::{StoreProbes, StoreState};
use crate::format::format_date;

/// The health of the gateway's store, or of both its stores.
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
    /// One-line summary for the console.
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

    /// Whether new keys are granted.
    pub(crate) fn is_healthy(&self) -> bool {
        self.error.is_none()
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
