//! Whether the store does its work, as everybody is told: `/readyz`, the API and the console.
//!
//! A store that answers may still refuse every new key: a read-only PostgreSQL, a Redis out of memory, a full disk. So a
//! new key is claimed and released ([`Probe`]), and something is read.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::{
    Ibid, StoreCall,
    store::{Address, Ask, Claim, End, ErrorKind, Fingerprint, Lease, Store, Tags, Token},
};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

/// A store that takes longer to answer is not well.
const PATIENCE: Duration = Duration::from_secs(1);
/// No new key is claimed while the last one that was granted is younger than this.
const GRANTED_FOR: Duration = Duration::from_secs(1);
/// Lease and retention of a claim that nobody could release.
const PROBE_LEASE: Duration = Duration::from_secs(5);
const PROBE_TTL: Duration = Duration::from_secs(1);

/// How the store is.
#[derive(Debug, Clone)]
pub(crate) struct Health {
    pub(crate) name: &'static str,
    pub(crate) durable: bool,
    pub(crate) shared: bool,
    /// What start-up found.
    pub(crate) wanting: Vec<String>,
    /// Why it cannot be used now.
    pub(crate) trouble: Option<String>,
    /// Why it can be used with a weaker guarantee only.
    pub(crate) degraded: Option<String>,
    /// Whether new keys are granted.
    pub(crate) claims: bool,
    /// Whether what is stored can be read, and so replayed.
    pub(crate) reads: bool,
    /// How long it took to answer.
    pub(crate) took: Option<Duration>,
    /// Ends that it has not taken yet.
    pub(crate) waiting: u64,
    /// As a class: `good`, `warn` or `bad`.
    pub(crate) kind: &'static str,
    /// In a word.
    pub(crate) word: &'static str,
}

/// Claims a new key, and releases it: at most one at a time, and at most one a second while they are granted.
#[derive(Debug, Default)]
pub(crate) struct Probe(Mutex<Option<(Instant, Granted)>>);

/// How a new key was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Granted {
    Fully,
    /// Of two stores, without the one that decides.
    Degraded,
}

impl Probe {
    /// Whether a new key is granted, and if not, why. `fresh` asks the store in any case.
    async fn claims(&self, store: &dyn Store, fresh: bool) -> Result<Granted, String> {
        let mut last = self.0.lock().await;
        match *last {
            Some((at, granted)) if !fresh && at.elapsed() < GRANTED_FOR => return Ok(granted),
            _ => *last = None,
        }
        let granted = claims(store).await?;
        *last = Some((Instant::now(), granted));
        Ok(granted)
    }
}

/// Claims a key that nobody else has, and releases it.
///
/// # Errors
/// Why it was not granted.
async fn claims(store: &dyn Store) -> Result<Granted, String> {
    let mut address = [0; 32];
    address[..16].copy_from_slice(&Token::mint().0);
    address[16..].copy_from_slice(&Token::mint().0);
    let ask = Arc::new(Ask {
        address: Address(address),
        token: Token::mint(),
        fingerprint: Fingerprint { version: 0, digest: [0; 32] },
        tags: Tags::new("", "", "readiness probe", ""),
        label: Bytes::new(),
        hold: PROBE_LEASE,
        keep: PROBE_TTL,
        over: None,
    });
    let (lease, granted) = match timeout(PATIENCE, store.claim(&ask)).await {
        Ok(Ok(Claim::Granted(lease))) => {
            let granted = if lease.solo { Granted::Degraded } else { Granted::Fully };
            (lease, Ok(granted))
        }
        Ok(Ok(other)) => return Err(format!("a key that was never used was not granted: {other:?}")),
        Ok(Err(why)) if why.kind != ErrorKind::Ambiguous => return Err(why.to_string()),
        Ok(Err(why)) => (Lease::unseen(&ask), Err(why.to_string())),
        Err(_) => (Lease::unseen(&ask), Err(format!("no answer within {PATIENCE:?}"))),
    };
    // If that fails, too, its lease and retention end soon.
    let _ = timeout(PATIENCE, store.settle(&lease, &End::Release)).await;
    granted
}

impl Health {
    /// Asks the store for something that is not there, and for a new key.
    pub(crate) async fn ask(ibid: &Ibid, probe: &Probe) -> Self {
        let engine = ibid.engine();
        let store = &**engine.store();
        let sent = Instant::now();
        let reads = async {
            let found = timeout(PATIENCE, store.get(&Address([0; 32]))).await;
            engine.observer().asked(StoreCall::Get, sent.elapsed());
            match found {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(why)) => Err(why.to_string()),
                Err(_) => Err(format!("no answer within {PATIENCE:?}")),
            }
        };
        let (reads, mut claims) = tokio::join!(reads, probe.claims(store, false));
        if reads.is_err() && claims == Ok(Granted::Fully) {
            claims = probe.claims(store, true).await;
        }
        let took = sent.elapsed();
        let promise = engine.store().promise();
        let waiting = engine.later().waiting() as u64;
        let (trouble, degraded) = match (&claims, &reads) {
            (Ok(Granted::Degraded), reads) => (None, Some(without_the_other(reads.as_ref().err()))),
            (Ok(Granted::Fully), Ok(())) => (None, None),
            (_, Err(why)) => (Some(why.clone()), None),
            (Err(why), Ok(())) => {
                (Some(format!("new keys are refused: {why}; finished answers are still replayed")), None)
            }
        };
        let (kind, word) = match (&claims, &reads, waiting, promise.wanting.is_empty()) {
            _ if trouble.is_some() && reads.is_err() => ("bad", "does not answer"),
            _ if trouble.is_some() => ("bad", "refuses new keys"),
            _ if degraded.is_some() => ("warn", "one of two does not answer"),
            (_, _, 1.., _) => ("warn", "behind"),
            (_, _, 0, false) => ("warn", "answers, promise weakened"),
            (_, _, 0, true) => ("good", "answers"),
        };
        Self {
            name: promise.store,
            durable: promise.durable,
            shared: promise.shared,
            wanting: promise.wanting,
            took: trouble.is_none().then_some(took),
            claims: claims.is_ok(),
            reads: reads.is_ok(),
            trouble,
            degraded,
            waiting,
            kind,
            word,
        }
    }

    /// Whether it grants new keys and answers what it has.
    pub(crate) fn is_well(&self) -> bool {
        self.trouble.is_none()
    }
}

fn without_the_other(why: Option<&String>) -> String {
    let why = why.map_or_else(String::new, |why| format!(": {why}"));
    format!("new keys are granted without the store that decides, and their answers say degraded{why}")
}
