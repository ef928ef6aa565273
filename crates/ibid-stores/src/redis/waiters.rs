//! Waits for holders. Waiters read on a connection of their own per server, which tracks what it reads: the server
//! reports the first change of it. So nobody who settles has to publish anything.
//!
//! A lost report only causes a delay, because waiters also poll. The expiry of a lease is no change, so a waiter wakes
//! at that time by itself. Heartbeats are changes: a waiter reads again and goes on. A server without RESP3 reports
//! nothing; its waiters poll more often.

use ibid::store::SharedMap;
use tokio::sync::Notify;

use super::{
    connection::{OnInvalidate, RedisCall},
    entry::{HEADER_LEN, running_holder},
    resp::Reply,
    *,
};

/// Poll interval while changes are reported.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
const POLL_INTERVAL_UNTRACKED: Duration = Duration::from_millis(200);
/// Upper limit of a wait, so that adding it does not overflow the clock.
const MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The waiters of this process, by address.
#[derive(Clone)]
pub(super) struct Waiters {
    changes: Arc<SharedMap<Address, Notify>>,
    on_invalidate: OnInvalidate,
}

impl Waiters {
    pub(super) fn new(key_names: Arc<KeyNames>) -> Self {
        let changes: Arc<SharedMap<Address, Notify>> = Arc::default();
        let notified = changes.clone();
        let on_invalidate: OnInvalidate = Arc::new(move |key: Option<&[u8]>| match key {
            None => notified.for_each(Notify::notify_waiters),
            Some(key) => {
                let at = key_names.parse_address(key).filter(|at| notified.contains(at));
                at.iter().for_each(|at| notified.join(*at, Notify::new).notify_waiters());
            }
        });
        Self { changes, on_invalidate }
    }

    /// Makes all waiters check again, because changes may have been missed.
    pub(super) fn check_again(&self) {
        (self.on_invalidate)(None);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

impl RedisCore {
    /// Waits until `seen` is not the running holder, or for `limit`.
    pub(super) async fn wait_for_change(&self, at: &Address, seen: Fence, limit: Duration) -> Result<(), StoreError> {
        let deadline = Instant::now() + limit.min(MAX_WAIT);
        let changes = self.waiters.changes.join(*at, Notify::new);
        loop {
            let changed = changes.notified();
            tokio::pin!(changed);
            // Register before reading, so that no later report is missed.
            changed.as_mut().enable();
            let Ok(checked) = timeout_at(deadline, self.remaining_lease(at, seen)).await else { return Ok(()) };
            let Some((left, poll_interval)) = checked? else { return Ok(()) };
            let wake_at = Instant::now() + left.min(with_jitter(poll_interval));
            let _ = timeout_at(wake_at.min(deadline), changed).await;
            if Instant::now() >= deadline {
                return Ok(());
            }
        }
    }

    /// Returns the remaining lease of `seen`, or `None` if it no longer runs; and when to look again at the latest.
    async fn remaining_lease(&self, at: &Address, seen: Fence) -> Result<Option<(Duration, Duration)>, StoreError> {
        if let Some(holder) = self.tracked_holder(at).await {
            let left = holder.filter(|(fence, _)| *fence == seen).map(|(_, left)| left + Duration::from_millis(1));
            return Ok(left.map(|left| (left, POLL_INTERVAL)));
        }
        // The calls' own connections follow redirects, but are told of no changes.
        match self.get(at).await? {
            Some(ClaimOutcome::InProgress(holder)) if holder.fence == seen => {
                Ok(Some((holder.takeover_in + Duration::from_millis(1), POLL_INTERVAL_UNTRACKED)))
            }
            _ => Ok(None),
        }
    }

    /// Returns the running holder at an address, if there is one, and has its next change reported. Returns `None` if
    /// no change is reported.
    async fn tracked_holder(&self, at: &Address) -> Option<Option<(Fence, Duration)>> {
        let (key, last) = (self.key_names.entry_key(at), (HEADER_LEN - 1).to_string());
        let read = RedisCall::new(&[b"GETRANGE", &key, b"0", last.as_bytes()]).then(&[b"PTTL", &key]).keep_all();
        let server = self.topology.server_for(at.0[0])?;
        let connection = server.waiters_connection(&self.waiters.on_invalidate).await?;
        let reply = match timeout(self.timeout(), connection.call(read)).await {
            Ok(reply) => reply.ok()?,
            Err(_) => {
                connection.abort();
                return None;
            }
        };
        match reply {
            Reply::Array(parts) => match &parts[..] {
                [Reply::Bytes(header), Reply::Int(pttl)] => Some(running_holder(header, *pttl)),
                _ => None,
            },
            _ => None,
        }
    }
}
