//! Delays answers until the test releases them.

use tokio::sync::Semaphore;

use super::*;

/// [`gated`](super::UpstreamReply::gated) replies wait until the gate is opened. Clones share the gate.
#[derive(Clone, Debug)]
pub struct ReplyGate(Arc<ReplyGateState>);

#[derive(Debug)]
struct ReplyGateState {
    /// One permit per reply that may pass; closed once the gate is open for good.
    permits: Semaphore,
    /// The number of requests that have reached the gate.
    arrived: watch::Sender<usize>,
}

impl ReplyGate {
    #[expect(clippy::new_without_default, reason = "a gate that appears by default would hang a test")]
    pub fn new() -> ReplyGate {
        ReplyGate(Arc::new(ReplyGateState { permits: Semaphore::new(0), arrived: watch::Sender::new(0) }))
    }

    /// Lets all replies pass from now on.
    pub fn open(&self) {
        self.0.permits.close();
    }

    /// Lets `n` replies pass, now or when they arrive.
    pub fn let_through(&self, n: usize) {
        self.0.permits.add_permits(n);
    }

    /// The number of requests that have reached the gate, passed or not.
    pub fn count(&self) -> usize {
        *self.0.arrived.borrow()
    }

    /// Waits until `n` requests have reached the gate. Each is in the upstream's log by then.
    pub async fn arrived(&self, n: usize) {
        let mut arrived = self.0.arrived.subscribe();
        let enough = timeout(WAIT_TIMEOUT, arrived.wait_for(|count| *count >= n)).await.is_ok();
        assert!(enough, "waited {WAIT_TIMEOUT:?} for {n} requests at the gate; {} came", self.count());
    }

    pub(super) async fn wait_open(&self) {
        self.0.arrived.send_modify(|count| *count += 1);
        if let Ok(permit) = self.0.permits.acquire().await {
            permit.forget();
        }
    }
}
