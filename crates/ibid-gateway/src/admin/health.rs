//! Whether the store does its work, as everybody is told: `/readyz`, the API and the console.

use std::time::Duration;

use ibid::{Ibid, StoreCall, store::Address};
use tokio::time::{Instant, timeout};

/// A store that takes longer to answer is not well.
const PATIENCE: Duration = Duration::from_secs(1);

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
    /// How long it took to answer.
    pub(crate) took: Option<Duration>,
    /// Ends that it has not taken yet.
    pub(crate) waiting: u64,
    /// As a class: `good`, `warn` or `bad`.
    pub(crate) kind: &'static str,
    /// In a word.
    pub(crate) word: &'static str,
}

impl Health {
    /// Asks the store for something that is not there.
    pub(crate) async fn ask(ibid: &Ibid) -> Self {
        let engine = ibid.engine();
        let sent = Instant::now();
        let found = timeout(PATIENCE, engine.store().get(&Address([0; 32]))).await;
        let took = sent.elapsed();
        engine.observer().asked(StoreCall::Get, took);
        let trouble = match found {
            Ok(Ok(_)) => None,
            Ok(Err(why)) => Some(why.to_string()),
            Err(_) => Some(format!("no answer within {PATIENCE:?}")),
        };
        let promise = engine.store().promise();
        let waiting = engine.later().waiting() as u64;
        let (kind, word) = match (&trouble, waiting, promise.wanting.is_empty()) {
            (Some(_), ..) => ("bad", "does not answer"),
            (None, 1.., _) => ("warn", "behind"),
            (None, 0, false) => ("warn", "answers, promise weakened"),
            (None, 0, true) => ("good", "answers"),
        };
        let took = trouble.is_none().then_some(took);
        let (name, durable, shared, wanting) = (promise.store, promise.durable, promise.shared, promise.wanting);
        Self { name, durable, shared, wanting, trouble, took, waiting, kind, word }
    }

    /// Whether it answers.
    pub(crate) fn is_well(&self) -> bool {
        self.trouble.is_none()
    }
}
